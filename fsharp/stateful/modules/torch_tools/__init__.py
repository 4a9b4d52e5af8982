"""Sharded modules under torch's own tools: chunks for checkpoints, and refusals. Imports nothing of ``modules``."""
