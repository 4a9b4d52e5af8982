"""HandedOutLeaf: a leaf that callers may hold when its memory is released. The release takes the memory from the leaf."""

from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from fsharp.errors import TreeError
from fsharp.functional.formats.format import EncodedTensorClass
from fsharp.functional.release import inner_tensors


class HandedOutLeaf:
    """A leaf that callers hold, or an alias. It is empty after a release, and gets memory again when its unit is gathered.

    Args:
        cls: the leaf's tensor class, if it has a class of its own.
        address: address of the leaf's ``UntypedStorage``.
    """

    __slots__ = ("_address", "_cls", "_inner", "_path", "_tensor")

    def __init__(self, tensor: torch.Tensor, path: str, cls: EncodedTensorClass | None, address: int) -> None:
        self._tensor, self._cls, self._path, self._address = TensorWeakRef(tensor), cls, path, address
        inner = [x for x in inner_tensors(tensor) if x.untyped_storage().data_ptr() == address]
        self._inner = [(TensorWeakRef(x), int(x.storage_offset()), x.shape, x.stride()) for x in inner]

    @property
    def is_alive(self) -> bool:
        """Whether a caller holds the leaf, or an alias with the same inner tensors."""
        return any(ref() is not None for ref, *_ in self._inner)

    @property
    def version(self) -> int:
        """Version counter of the leaf; -1 if no caller holds it."""
        total = 0
        for ref in (self._tensor, *[ref for ref, *_ in self._inner]):
            if (x := ref()) is None:
                return -1
            total += x._version
        return total

    def is_for_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the HandedOutLeaf of a tensor."""
        return self._tensor() is tensor

    def shares_inner_tensors_with(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` uses the leaf's memory, and only through inner tensors of the leaf."""
        mine = {id(ref()) for ref, *_ in self._inner} - {id(None)}
        here = [x for x in inner_tensors(tensor) if id(x) in mine or x.untyped_storage().data_ptr() == self._address]
        return bool(here) and all(id(x) in mine for x in here)

    @torch.no_grad()
    def take_memory(self) -> None:
        """Make the leaf empty: any function of it raises an error."""
        if self._cls is not None and (tensor := self._tensor()) is not None:
            self._cls.drop_derived(tensor)
        for ref, *_ in self._inner:
            if (inner := ref()) is not None:
                inner.set_()
                inner.__class__, inner.path = _ReleasedTensor, self._path

    @torch.no_grad()
    def give_memory(self, storage: torch.UntypedStorage) -> None:
        """Give the leaf memory in ``storage``, at the same offset as before. It may be filled later."""
        for ref, *where in self._inner:
            if (inner := ref()) is not None:
                inner.__class__ = torch.Tensor
                inner.set_(storage, *where)

    def recompute_derived_data(self) -> None:
        """Recompute the data that a tensor class derives from its bytes, such as a transpose, after the memory was filled."""
        if self._cls is not None and (tensor := self._tensor()) is not None:
            self._cls.compute_derived(tensor)


class _ReleasedTensor(torch.Tensor):
    """The class of an inner tensor whose memory is released: any function of the tensor raises an error."""

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = next((x.__dict__["path"] for x in args if isinstance(x, _ReleasedTensor)), "of a unit")
        raise TreeError(
            f"parameter {path!r} is used while its memory is released, outside of its unit's forward and backward. Return the "
            "parameter from the forward, or keep w.dequantize()."
        )
