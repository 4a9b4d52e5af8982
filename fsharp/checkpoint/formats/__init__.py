"""Conversions of checkpoints to and from the formats of other libraries."""
