"""Run steps: turn a function's events into ops, and execute the ops. Imports all folders except ``modules``."""
