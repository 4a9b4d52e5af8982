"""Recorded values of a run, and a report of them as one HTML file."""
