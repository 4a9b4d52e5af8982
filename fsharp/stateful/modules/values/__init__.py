"""Values that a module takes, returns or stores: finding, casting and replacing the tensors in them."""
