"""A tree of shards under another layout: other places, units, or ranks."""
