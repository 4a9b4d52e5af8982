"""This rank's part of a tensor, and the functions of torch that compute with parts."""
