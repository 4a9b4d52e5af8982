"""How values are stored and travel: formats, and those of 8 and 4 bits."""
