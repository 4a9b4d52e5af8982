"""What the ranks of a module start from: made by its own initializers, compared, or taken from one rank; as DTensors or not.

Reads no other folder of ``modules``.
"""
