"""What JAX has to know before its first use: several devices in one process, and how it compiles."""

import os
import tempfile

import jax

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rest of a GPU is torch's
OPTIONS = {"jax_num_cpu_devices": 4, "jax_disable_most_optimizations": True}  # most of the time goes into compiling
for name, value in OPTIONS.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # ranks in processes of their own have the same bits only if they compile alike

# Simulated ranks, and many tests, compile the same programs: the first one does, and the others load what it has compiled.
_compiled = tempfile.TemporaryDirectory(prefix="jax-")
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
