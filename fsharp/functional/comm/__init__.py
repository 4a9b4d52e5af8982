"""Collectives of the ranks of a mesh, and the agreement of ranks before them. Reads ``layout``."""
