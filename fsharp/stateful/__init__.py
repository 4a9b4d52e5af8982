"""Time and memory: when ops run, and which object owns each storage. Nothing here changes a computed value."""
