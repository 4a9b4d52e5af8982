"""Rest: where a unit's gradient stays until the step is over, and who else holds it."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from fsharp.stateful.runtime.chain import Pieces, nbytes_of
from fsharp.stateful.runtime.full import LeafIndex, carve


class Rest:
    """Flat buffers, one for each group: in the arena, or in memory of their own, taken when it is first needed.

    They are handed out each step, and used again once nobody else holds them. What is handed out has a storage of its own
    over the same bytes, which counts its holders: no thread that works in this memory is one of them.

    Args:
        sizes: elements and dtype of each group.
        device: of memory of their own.
        window: bytes in the arena.

    Attributes:
        in_arena: whether they are in a window.
        is_open: of a window, whether the step has come to where nobody else uses these bytes.
    """

    __slots__ = (
        "_alone",
        "_memory",
        "_outside",
        "_storage",
        "_tensors",
        "device",
        "gaps",
        "in_arena",
        "is_open",
        "leaves",
        "sizes",
    )

    def __init__(self, sizes: Pieces, device: torch.device, window: torch.Tensor | None = None) -> None:
        self.sizes, self.device, self._memory = sizes, device, window
        self.in_arena, self.is_open = window is not None, False
        self.forget()

    def forget(self) -> None:
        """Have no tensors any more, and no memory that is not the arena's."""
        self._memory = self._memory if self.in_arena else None
        self._tensors: list[torch.Tensor] | None = None
        self._outside: list[torch.Tensor] | None = None
        self._storage: Any = None  # theirs; None if it is empty
        self._alone = 0
        self.leaves: list[torch.Tensor] | None = None
        self.gaps: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return nbytes_of(self.sizes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers."""
        if self._tensors is None:
            with torch.inference_mode(False):
                if self._memory is None:
                    self._memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
                self._tensors = carve(self._memory, self.sizes)
        return self._tensors

    def look(self, index: LeafIndex, groups: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The trained leaves in them, which rest in full, and the padding between."""
        if self.leaves is None:
            flats = dict(zip(groups, self.tensors, strict=True))
            self.leaves = index.views(flats, [index.stored[i] for i in index.trainable])
            self.gaps = [gap for g, flat in flats.items() for gap in index.gaps(g, flat)]
        return self.leaves, self.gaps

    def hand_out(self) -> list[torch.Tensor]:
        """The buffers, for somebody else."""
        if self._outside is None:
            with torch.inference_mode(False):
                _ = self.tensors
                assert self._memory is not None
                self._outside = carve(window_on(self._memory) if self.nbytes else self._memory, self.sizes)
            self._storage = next((tensor.untyped_storage() for tensor in self._outside if len(tensor)), None)
            self._alone = self._holders()
        return [tensor.data for tensor in self._outside]

    def _holders(self) -> int:
        return 0 if self._storage is None else int(torch._C._storage_Use_Count(self._storage._cdata))

    @property
    def is_held(self) -> bool:
        """Whether somebody has what was handed out."""
        return self._outside is not None and self._holders() != self._alone


def window_on(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor with a storage of its own, which keeps ``memory`` and counts its own holders."""
    if memory.device.type == "cuda":
        return torch.as_tensor(_Cuda(memory), device=memory.device)
    array: Any = (ctypes.c_uint8 * len(memory)).from_address(memory.data_ptr())
    array.memory = memory
    return torch.frombuffer(array, dtype=torch.uint8)


class _Cuda:
    """Device memory as other libraries hand it over."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }
