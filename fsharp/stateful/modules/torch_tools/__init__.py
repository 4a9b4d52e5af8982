"""Sharded modules under torch's own tools: refusals. Imports nothing of ``modules``."""
