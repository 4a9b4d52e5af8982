"""One unit in a step: its full parameters, gradient, update, state in host memory, and the memory of each.

Imports ``schedule`` and ``transport``; has no code for events and autograd.
"""
