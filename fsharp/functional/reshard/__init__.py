"""Move a tree of shards to another layout: other places, units, or ranks."""
