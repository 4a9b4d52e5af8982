"""Convert tensors to JAX arrays and back, in the same memory where possible."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils.dlpack
from jax._src import xla_bridge  # no public function tells whether backends exist without making them
from torch._subclasses.fake_tensor import FakeTensor

from fsharp.errors import TreeError

_NEEDS_64_BITS = "an integer needs 64 bits, and JAX has 32. Call jax.config.update('jax_enable_x64', True)."
_is_forked_after_jax = False


def _record_fork() -> None:
    global _is_forked_after_jax
    _is_forked_after_jax = _is_forked_after_jax or xla_bridge.backends_are_initialized()


os.register_at_fork(after_in_child=_record_fork)


def check_not_forked_after_jax(where: str) -> None:
    """Raise a TreeError in a process that was forked from a process with JAX, where calls would hang without XLA's threads."""
    if _is_forked_after_jax:
        raise TreeError(
            f"{where}: process {os.getpid()} was forked from a process that had used JAX, and XLA does not survive a fork. "
            'Start processes by "spawn" or "forkserver": multiprocessing.get_context("spawn"), '
            'DataLoader(multiprocessing_context="spawn").'
        )


def as_jax_array(x: torch.Tensor) -> Any:
    """Return a tensor as a JAX array: a copy, unless the tensor is contiguous and its address is a multiple of 64 bytes.

    Without a copy, array and tensor share memory. Do not write to the tensor while JAX has the array, as JAX assumes that
    arrays are constant. Unless ``jax_enable_x64`` is set, integers of 64 bits are copied to 32 bits.

    Raises a TreeError if JAX has no such dtype, or would change the values: a float64, or an integer that needs 64 bits,
    without ``jax_enable_x64``. Raises a TreeError if the tensor is not one block of memory, as a DTensor or a sparse tensor.
    Raises a TreeError in a process that was forked from a process with JAX.
    """
    check_not_forked_after_jax("a tensor for JAX")
    if x._is_zerotensor():  # a zero tangent of forward mode
        x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    check_has_memory(x)
    if x.dtype is torch.int64 and not jax.config.jax_enable_x64:
        if x.numel() and not -(1 << 31) <= int(x.min()) <= int(x.max()) < 1 << 31:
            raise TreeError(_NEEDS_64_BITS)
        x = x.int()
    dtype = jax_dtype(x.dtype)
    if not x.numel():
        return jnp.zeros(tuple(x.shape), dtype)
    return jax.dlpack.from_dlpack(x.detach().resolve_conj().resolve_neg().contiguous())


def check_has_memory(x: torch.Tensor) -> None:
    """Raise a TreeError for a tensor without memory for XLA to read: fake, meta, nested, sparse, or a wrapper as DTensor."""
    try:
        has_memory = not isinstance(x, FakeTensor) and not x.is_nested and (not x.numel() or x.data_ptr() != 0)
    except RuntimeError:  # the tensor has no storage
        has_memory = False
    if not has_memory:
        raise TreeError(
            f"JAX reads the memory of a tensor, and a {type(x).__name__} of layout {x.layout} on device {x.device} has no "
            "memory with its values. Pass a plain dense tensor, such as to_local() of a DTensor."
        )


class _NumpyMemory:
    """The memory of a tensor as numpy takes it. numpy arrays in this memory keep this object and the tensor alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self._tensor = x
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (x.nbytes,), "data": (x.data_ptr(), False)}


def as_jax_array_and_lifetime(x: torch.Tensor, device: Any) -> tuple[Any, Any]:
    """Return a contiguous tensor as an array on a JAX device, and an object that lives as long as JAX uses the memory.

    The object is the ``holder`` for :func:`~fsharp.functional.layout.lent_memory.mark_read_only`. CPU tensors go through numpy,
    as DLPack gives CPU memory to JAX's first CPU device. JAX copies a CPU tensor at an address that is no multiple of 64 bytes.
    """
    check_has_memory(x)
    if x.device.type != "cpu":
        shared = x.detach()
        return jax.dlpack.from_dlpack(shared), shared
    memory = _NumpyMemory(x.detach())
    return jax.device_put(np.asarray(memory).view(jax_dtype(x.dtype)).reshape(x.shape), device), memory


def as_torch_tensor(x: Any) -> torch.Tensor:
    """Return a JAX array as a tensor in the same memory. Do not write to the tensor while JAX may read the array."""
    if not x.size:
        return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name))
    return torch.utils.dlpack.from_dlpack(x)


def copy_as_tensor(x: Any) -> torch.Tensor:
    """Return a small array, or the data of a random key, as a new CPU tensor. TypeError for a dtype such as float8."""
    data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    known = data.astype(jnp.float32) if data.dtype == jnp.bfloat16 else data  # torch takes no bfloat16 from numpy
    return torch.from_numpy(np.array(known)).to(getattr(torch, data.dtype.name))


def as_jax_array_with_dtype_of(x: Any, like: Any) -> Any:
    """Return a number or tensor as an array with the dtype of ``like``: the inverse of :func:`copy_as_tensor`.

    Raises a TypeError if the dtype would drop a fraction or an imaginary part, or does not have the integer. Raises an
    OverflowError for an integer that JAX would change.
    """
    if isinstance(x, torch.Tensor):
        x = (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()
    array = number_as_jax_array(x)
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=like.dtype._impl.name)  # no public name: jax.random.key_impl() takes keys
    kinds = jnp.inexact, jnp.complexfloating
    is_wider = any(jnp.issubdtype(array.dtype, kind) and not jnp.issubdtype(like.dtype, kind) for kind in kinds)
    result = (array.real if is_wider else array).astype(like.dtype)
    is_integer = all(jnp.issubdtype(each.dtype, jnp.integer) for each in (array, result))
    if (is_wider or is_integer) and bool((np.asarray(result) != np.asarray(array)).any()):
        raise TypeError(f"the state has {like.dtype} there. Begin with a number of the dtype {array.dtype}.")
    return result


def number_as_jax_array(x: Any) -> Any:
    """Return a number or a numpy array as a JAX array. OverflowError for an integer that JAX would change."""
    try:
        array = jnp.asarray(x)
        is_changed = jnp.issubdtype(array.dtype, jnp.integer) and bool((np.asarray(array) != np.asarray(x)).any())
    except OverflowError:
        is_changed = True
    if is_changed:
        raise OverflowError(_NEEDS_64_BITS)
    return array


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return JAX's dtype for a dtype of torch. Raise a TreeError if JAX has no such dtype, or would use a narrower one."""
    name = str(dtype).removeprefix("torch.")
    try:
        found = jnp.dtype(name)
    except TypeError:
        raise TreeError(f"JAX has no dtype for {dtype}.") from None
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise TreeError(f"JAX would make {name} narrower. Call jax.config.update('jax_enable_x64', True) first.")
    return found
