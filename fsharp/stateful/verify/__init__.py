"""What makes a schedule wrong. Knows what ops do to buffers, from their records, and nothing of how schedules are made."""
