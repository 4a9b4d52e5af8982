"""Time and memory: when things run, and who owns storage. Nothing here changes a computed value."""
