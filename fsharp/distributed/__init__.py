"""Ranks as processes: process groups, the job's store, detection of ranks that fail or differ, and worker threads."""
