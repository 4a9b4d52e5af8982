"""One unit in a step: its full parameters, its gradient, its update, its state in host memory, and the memory of each.

Reads ``schedule`` and ``transport``; knows no events and no autograd.
"""
