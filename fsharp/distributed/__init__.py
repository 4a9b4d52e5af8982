"""Ranks as processes: process groups, the store of a job, watches that notice what other ranks do, and worker threads."""
