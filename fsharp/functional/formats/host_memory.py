"""The memory of a tensor on the host as a Python buffer, without numpy, which torch does not require."""

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor on the host. The caller has to keep the tensor alive."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
