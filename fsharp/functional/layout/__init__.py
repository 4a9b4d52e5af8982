"""Where each element of each leaf is, from shapes alone: meshes, placements, units, layouts. Reads no other folder."""
