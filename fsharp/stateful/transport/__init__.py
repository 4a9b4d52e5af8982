"""Collectives that may still run when the call returns, and the streams they run on. Knows nothing of schedules and units."""
