"""Running a step: what turns a function's events into ops, and what executes those. Reads ``schedule`` and ``transport``."""
