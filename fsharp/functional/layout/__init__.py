"""Where each element of each leaf is, from shapes alone: meshes, placements, layouts. Reads ``formats`` and ``tree``."""
