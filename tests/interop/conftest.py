"""Several devices in one process, which JAX has to know before its first use."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
