"""What torch's tools see of a sharded module: chunks for checkpoints, and refusals. Imports nothing of ``modules``."""
