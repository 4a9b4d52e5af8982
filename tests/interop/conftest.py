"""Several devices in one process, which JAX has to know before its first use."""

import os

import jax

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rest of a GPU is torch's
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
