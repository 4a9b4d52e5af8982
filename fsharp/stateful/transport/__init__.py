"""Asynchronous collectives, and their streams. Imports nothing of schedules and units."""
