"""Running a step: what turns a function's events into ops, and what executes those. Reads all folders but ``modules``."""
