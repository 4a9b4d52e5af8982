"""This rank's part of a tensor, and what may be computed with parts."""
