"""Formats: how values are stored and sent, in 8 or 4 bits or as a plain dtype."""
