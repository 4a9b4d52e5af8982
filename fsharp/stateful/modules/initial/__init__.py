"""Initial values of a module: made by its own initializers, compared between ranks, or taken from one rank; DTensors."""
