"""An nn.Module and a torch.optim class, sharded: the same engine for those who keep them."""
