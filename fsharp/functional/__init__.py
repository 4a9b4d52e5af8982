"""Pure functions: equal inputs give equal outputs. No streams, and no global variable on which a value depends."""
