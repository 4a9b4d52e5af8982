"""Which dtype each kind of state has: what parameters rest and travel in, the main copy, the gradients' wire and sum."""

from dataclasses import dataclass

import torch

from fsharp.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of floating-point parameters and of what is derived from them. ``None`` means the leaf's own dtype.

    Args:
        compute: the dtype in which parameters rest, travel and are used.
        main: the dtype of the copy that the optimizer updates. Where it differs from ``compute`` a main copy is kept at
            the optimizer's place, at the cost of its bytes there.
        wire: the dtype in which gradients travel; ``None`` means ``compute``'s. The sum over ranks is taken in
            ``accumulate`` by backends that add on arrival (all but NCCL's own reductions).
        accumulate: the dtype in which gradients rest and are summed; ``None`` means ``main``'s.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = None
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "main", "wire", "accumulate"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise LayoutError(f"Precision(): {name} is {dtype!r}, expected a floating-point torch.dtype or None.")

    def resolve(self, dtype: torch.dtype) -> "Dtypes":
        """The four dtypes of a parameter that the user holds in ``dtype``."""
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, dtype, dtype)
        compute, main = self.compute or dtype, self.main or dtype
        return Dtypes(compute, main, self.wire or compute, self.accumulate or main)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of one group of parameters.

    Attributes:
        compute: at rest, in collectives and in use.
        main: of the optimizer's copy and its state.
        wire: of gradients in collectives.
        accumulate: of gradients at rest.
    """

    compute: torch.dtype
    main: torch.dtype
    wire: torch.dtype
    accumulate: torch.dtype

    @property
    def has_main_copy(self) -> bool:
        """Whether the optimizer keeps a copy of its own."""
        return self.compute != self.main


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
