"""Checkpoints in formats of other libraries: written, and read once."""
