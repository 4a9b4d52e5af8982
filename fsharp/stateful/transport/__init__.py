"""Collectives that may still run when the call returns. Knows nothing of schedules, of units or of who calls."""
