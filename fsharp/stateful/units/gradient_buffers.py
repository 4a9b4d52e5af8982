"""GradientBuffers: the flat buffers of a unit's gradient, at rest or reduced, with a count of callers that hold them."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fsharp.stateful.units.full_unit import FlatSizes, LeafTable, LeavesAndPadding, carve_tensors, sizes_nbytes


class GradientBuffers:
    """The flat buffers of a gradient, at rest or reduced, one for each group. They are in the arena, or allocated on use.

    Callers get tensors in a second ``UntypedStorage`` over the same bytes. The storage's reference count tells whether
    callers hold tensors. If they do, the next step takes new memory, and tensors in the arena are copied out.

    Attributes:
        nbytes: bytes of the flat buffers of all groups.
        handed_out: tensors that callers got and that are still in this memory, each with the index of its buffer.
    """

    def __init__(self, sizes: FlatSizes, device: torch.device, arena_bytes: torch.Tensor | None = None) -> None:
        self.sizes, self.nbytes, self.device, self._memory = sizes, sizes_nbytes(sizes), device, arena_bytes
        self.in_arena = arena_bytes is not None
        self.release()

    def release(self) -> None:
        """Release the memory, unless it is in the arena. Tensors that callers hold stay valid."""
        self._memory = self._memory if self.in_arena else None
        self._tensors: list[torch.Tensor] | None = None
        self._views: list[torch.Tensor] | None = None
        self.handed_out: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._storage: Any = None  # the storage of the views; None if it is empty
        self._alone = 0
        self._leaves: LeavesAndPadding | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The flat buffers. The first read makes them, without values, and allocates memory unless they are in the arena."""
        if self._tensors is None:
            with torch.inference_mode(False):
                if self._memory is None:
                    self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
                self._tensors = carve_tensors(self._memory, self.sizes)
        return self._tensors

    def trained_leaves(self, table: LeafTable, groups: Sequence[int]) -> LeavesAndPadding:
        """Return views of trained leaves, and of padding, where a rank holds whole buffers. ``groups``: each buffer's group."""
        if self._leaves is None:
            self._leaves = table.trained_leaves(dict(zip(groups, self.tensors, strict=True)))
        return self._leaves

    def hand_out(self) -> list[torch.Tensor]:
        """Return the buffers as tensors for a caller, and record the tensors in ``handed_out``."""
        if self._views is None:
            with torch.inference_mode(False):
                _ = self.tensors
                assert self._memory is not None
                self._views = carve_tensors(view_in_new_storage(self._memory) if self.nbytes else self._memory, self.sizes)
            self._storage = next((tensor.untyped_storage() for tensor in self._views if len(tensor)), None)
            self._alone = self._count_references()
        tensors = []
        if self.handed_out:
            self.handed_out = [(ref, i) for ref, i in self.handed_out if ref() is not None]
        for i, view in enumerate(self._views):
            tensors.append(view.data)
            self.handed_out.append((weakref.ref(tensors[-1]), i))
        return tensors

    def try_relocate_into(self, other: "GradientBuffers") -> bool:
        """Move the values, and the tensors that callers hold, to the memory of ``other``, which these tensors then share.

        If a caller holds a view of such a tensor, which cannot be moved, nothing is moved, and the result is False.
        """
        held = [
            (tensor, i)
            for ref, i in self.handed_out
            if (tensor := ref()) is not None and tensor.numel() and tensor.data_ptr() == self.tensors[i].data_ptr()
        ]
        if self._views is not None and self._count_references() - self._alone > len(held):
            return False
        torch._foreach_copy_(other.tensors, self.tensors)
        there = other.hand_out() if held else []
        for tensor, i in held:
            tensor.data = there[i]
            other.handed_out.append((weakref.ref(tensor), i))
        self.handed_out = []
        return True

    def try_copy_out_held_tensors(self) -> bool:
        """Move the tensors that callers hold to new memory. Return False if callers hold views, which cannot be moved."""
        if self.handed_out and self.is_held_by_caller:
            for ref, _ in self.handed_out:
                if (tensor := ref()) is not None:
                    tensor.data = tensor.data.clone()
            if self.is_held_by_caller:
                gc.collect()  # finds views in cycles that nobody can reach
        self.handed_out = []
        return not self.is_held_by_caller

    def _count_references(self) -> int:
        """Return torch's count of references to the ``UntypedStorage`` of the views (one for each tensor); else 0."""
        return 0 if self._storage is None else int(torch._C._storage_Use_Count(self._storage._cdata))

    @property
    def is_held_by_caller(self) -> bool:
        """Whether a caller holds one of the tensors of :meth:`hand_out`, or a view of one."""
        return self._storage is not None and torch._C._storage_Use_Count(self._storage._cdata) != self._alone


def view_in_new_storage(memory: torch.Tensor) -> torch.Tensor:
    """Return a view of ``memory`` in a new ``UntypedStorage``, whose reference count tells whether callers hold views of it."""
    if memory.device.type == "cuda":
        return torch.as_tensor(_CudaArrayInterface(memory), device=memory.device)
    return from_dlpack(torch._C._to_dlpack(memory))


class _CudaArrayInterface:
    """Device memory as an object with the CUDA array interface, from which torch makes a tensor in a new storage."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, at = memory, (memory.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": (len(memory),), "typestr": "|u1", "data": at, "strides": None, "version": 2}
