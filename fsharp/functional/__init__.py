"""Values: the same inputs give the same outputs. No globals, no hooks, no streams."""
