"""Recorded values of a run, and the report that is made of them."""
