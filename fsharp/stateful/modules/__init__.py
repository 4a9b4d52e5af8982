"""Sharded nn.Modules and torch.optim optimizers, on the engine of the functions."""
