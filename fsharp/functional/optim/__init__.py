"""Gradient transformations over sharded trees: pairs of pure functions ``(init, update)``."""
