"""Values: the same inputs give the same outputs. No streams, and no global variable that a value depends on."""
