"""Pure functions: equal inputs give equal outputs. They use no streams, and no global variable changes a value."""
