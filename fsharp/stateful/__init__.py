"""Time and memory: when things run, and who owns storage. Never what is computed."""
