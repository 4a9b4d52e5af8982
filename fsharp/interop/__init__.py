"""Interoperation with JAX, optax, Flax, Equinox and Orbax. Only files in this folder import these libraries."""
