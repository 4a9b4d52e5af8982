"""Find, cast and replace tensors in the values that a module takes, returns or stores."""
