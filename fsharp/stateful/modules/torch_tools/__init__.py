"""What torch's own tools see of a sharded module: chunks for checkpoints, refusals by name, wrappers. Reads no ``modules``."""
