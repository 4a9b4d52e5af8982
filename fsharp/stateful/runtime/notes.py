"""Notes of tensors in gathered memory, which autograd keeps in place of the tensors."""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsharp.functional.release import is_plain


class Note(NamedTuple):
    """The note of a tensor in gathered memory: its dtype, size, strides and offset."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(x: torch.Tensor) -> "Note":
        """Return the note of a tensor."""
        return Note(x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def made(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in gathered memory, which may be at another address."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class WrapperNote(NamedTuple):
    """The note of a wrapper of tensors, such as the transpose of a leaf of a class of its own.

    Attributes:
        cls: the wrapper's class.
        inner: inner tensors by attribute; notes in place of tensors in gathered memory.
        about: the metadata that ``__tensor_flatten__`` returns.
        size: size of the wrapper.
        stride: stride of the wrapper.
    """

    cls: Any
    inner: dict[str, torch.Tensor | Note]
    about: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, place: int) -> "WrapperNote | None":
        """Return the note of a wrapper; None if the tensor is no wrapper, or its inner tensors are not plain.

        Args:
            x: the wrapper.
            place: address of the gathered memory.
        """
        if not is_traceable_wrapper_subclass(x):
            return None
        names, about = x.__tensor_flatten__()
        inner: dict[str, torch.Tensor | Note] = {}
        for name in names:
            each = getattr(x, name)
            if type(each) is not torch.Tensor or not is_plain(each):
                return None
            inner[name] = Note.of(each) if each.untyped_storage().data_ptr() == place else each
        return cls(type(x), inner, about, torch.Size(x.size()), x.stride())

    @property
    def is_gathered(self) -> bool:
        """Whether the wrapper has a tensor in gathered memory."""
        return any(not isinstance(x, torch.Tensor) for x in self.inner.values())

    def made(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the wrapper in gathered memory."""
        inner = {name: x if isinstance(x, torch.Tensor) else x.made(memory) for name, x in self.inner.items()}
        return self.cls.__tensor_unflatten__(inner, self.about, self.size, self.stride)  # type: ignore[no-any-return]
