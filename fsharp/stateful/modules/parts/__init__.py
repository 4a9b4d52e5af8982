"""This rank's part of a tensor, and the torch functions that compute with parts."""
