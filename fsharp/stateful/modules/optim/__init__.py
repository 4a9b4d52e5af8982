"""Optimizers of torch.optim over the parts of a module's parameters, and loss scaling."""
