"""Collectives of the ranks of a mesh, and checks before them that ranks agree."""
