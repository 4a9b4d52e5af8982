"""Several devices in one process, which JAX has to know before its first use."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # most of the time goes into compiling
