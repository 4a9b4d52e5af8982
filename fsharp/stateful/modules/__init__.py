"""Sharded nn.Modules and optimizers of torch.optim, run by the same engine as pure functions."""
