"""A torch.optim class over the parts of a module's parameters, and loss scaling. Reads ``modules``, which knows none of it."""
