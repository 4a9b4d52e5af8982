"""Errors for torch's own tools that would be wrong with a sharded module. Imports nothing of ``modules``."""
