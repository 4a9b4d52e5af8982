"""What a module takes, returns and leaves elsewhere: the tensors in it, casts of these, others in their place."""
