"""Layouts: which rank holds which element of each leaf, from shapes alone. Imports ``formats`` and ``tree``."""
