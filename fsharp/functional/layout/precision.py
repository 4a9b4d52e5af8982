"""Which dtype each kind of state has: what parameters rest and travel in, the main copy, the gradients' wire and sum."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fsharp.errors import LayoutError, OptionError
from fsharp.tracebacks import api_boundary


@api_boundary
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
        output: the dtype to which floating-point outputs of a module are cast; ``None`` leaves them. For
            :func:`~fsharp.shard_module`.
        cast_inputs: whether floating-point inputs of a module are cast to ``compute``, if that is given. For
            :func:`~fsharp.shard_module`.

    Raises:
        LayoutError: a dtype that is not floating-point, or of 8 bits or less, which needs a scale for each block of values.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = None
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cast_inputs, bool):
            raise OptionError(f"Precision(): cast_inputs is {self.cast_inputs!r}, expected True or False.")
        for name in ("compute", "main", "wire", "accumulate", "output"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise LayoutError(f"Precision(): {name} is {dtype!r}, expected a floating-point torch.dtype or None.")
            if dtype is not None and needs_scale(dtype):
                raise LayoutError(
                    f"Precision(): {name} is {dtype!r}. Values of 8 bits and less need a scale, without which small ones "
                    "become zero: pass torch.bfloat16, and scale inside of your function or module."
                )

    def resolve(self, dtype: torch.dtype) -> "Dtypes":
        """The four dtypes of a parameter that the user holds in ``dtype``."""
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, dtype, dtype)
        compute, main = self.compute or dtype, self.main or dtype
        return Dtypes(compute, main, self.wire or compute, self.accumulate or main)

    @property
    def of_parameters(self) -> "Precision":
        """The same without what is said of a module's inputs and outputs."""
        return replace(self, output=None, cast_inputs=True)


Precisions = Precision | Mapping[str, Precision]
"""One precision, or precisions by pattern of key paths, the last that matches counting."""


def check_precisions(where: str, precision: Precisions) -> None:
    """Refuse what is no precision.

    Raises:
        OptionError: the pattern, and what it stands for.
    """
    for pattern, each in precision.items() if isinstance(precision, Mapping) else ():
        if not isinstance(each, Precision):
            raise OptionError(f"{where}: precision[{pattern!r}] is {each!r:.80}, expected a Precision.")


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


def needs_scale(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has so small a range that values need a scale beside them: ``torch.float8_*`` and smaller.

    >>> needs_scale(torch.float8_e4m3fn), needs_scale(torch.bfloat16), needs_scale(torch.uint8)
    (True, False, False)
    """
    return dtype.is_floating_point and dtype.itemsize == 1


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
