"""How each kind of state is stored: the format of parameters at rest, the main copy's dtype, the gradients' wire and sum."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from fsharp.annotated import options_checked, options_explained
from fsharp.errors import LayoutError, OptionError
from fsharp.tracebacks import api_boundary


@options_checked
@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of number in which a format stores values, such as the values in 8 bits, or their scales.

    Args:
        dtype: of the numbers.
        per_block: how many of them each block of values has.

    Raises:
        LayoutError: ``per_block`` is less than 1, or the dtype is a quantised one of torch, which has scales of its own.
    """

    dtype: torch.dtype
    per_block: int = 1

    def __post_init__(self) -> None:
        if self.per_block < 1 or dtype_name(self.dtype).startswith("q"):
            raise LayoutError(
                f"Plane(): got {self.dtype} and per_block {self.per_block}, expected a dtype of plain numbers and 1 or more."
            )


PLANE_ALIGNMENT = 16
"""Bytes: where each plane of a part begins in a buffer."""


@options_explained
@dataclass(frozen=True, slots=True)
class Format:
    """How values are stored or travel: parameters where they rest and in gathers, gradients in reductions.

    Values that a rank has for itself, or for one receiver, are a *part*: whole blocks, which are encoded together. A part is
    stored as bytes, one plane after another. A buffer of several parts has one after another, so that one message moves all
    planes, and what moves is cut between parts alone.

    ``encode`` gets values in the dtype of the main copy, or of a gradient's sum. For parameters, decoding what was encoded and
    encoding the result again has to give the same bytes, as a checkpoint has decoded values. Neither function may change what
    it is given.

    Args:
        name: names it in layouts, checkpoints and labels.
        planes: what it stores.
        encode: of 1-D values, in whole blocks, the planes, each 1-D with ``per_block`` numbers for each block.
        decode: of the planes, the 1-D values in any floating-point dtype, which are cast to the one they are needed in.
        block: number of values that are encoded together; parts are cut between blocks.

    Raises:
        LayoutError: no planes, a block that is no positive number, or a name that is none.
    """

    name: str
    planes: tuple[Plane, ...]
    encode: Callable[[torch.Tensor], Sequence[torch.Tensor]] = field(compare=False, repr=False)
    decode: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(compare=False, repr=False)
    block: int = 1

    def __post_init__(self) -> None:
        are_planes = isinstance(self.planes, tuple) and self.planes and all(isinstance(each, Plane) for each in self.planes)
        is_block = isinstance(self.block, int) and self.block >= 1
        is_name = isinstance(self.name, str) and self.name.isidentifier()
        if not (are_planes and is_block and is_name and callable(self.encode) and callable(self.decode)):
            raise LayoutError(
                f"Format(): got name {self.name!r}, planes {self.planes!r:.80}, block {self.block!r}, "
                f"encode {self.encode!r:.40}, decode {self.decode!r:.40}; expected an identifier, a tuple with one Plane at "
                "least, an integer of 1 or more, and two functions."
            )

    def __str__(self) -> str:
        if self.is_plain:
            return self.name
        planes = ", ".join(f"{dtype_name(plane.dtype)} x {plane.per_block}" for plane in self.planes)
        return f"{self.name} ({planes}; blocks of {self.block})"

    @property
    def is_plain(self) -> bool:
        """Whether it stores values as they are, in one dtype."""
        return self.encode is _as_they_are

    @property
    def dtype(self) -> torch.dtype:
        """Of a stored buffer: that of the values if the format is plain, else bytes."""
        return self.planes[0].dtype if self.is_plain else torch.uint8

    def size(self, values: int) -> int:
        """Numbers of :attr:`dtype` in which a part of so many values is stored, a multiple of :attr:`block`."""
        return values if self.is_plain else sum(map(_aligned, self._plane_nbytes(values)))

    def _plane_nbytes(self, values: int) -> list[int]:
        return [values // self.block * plane.per_block * plane.dtype.itemsize for plane in self.planes]

    @api_boundary
    def store(self, values: torch.Tensor, part: int) -> torch.Tensor:
        """Return 1-D values, in whole parts of ``part`` values each, as they are stored.

        Raises:
            LayoutError: ``encode`` returns other planes than the format says.
        """
        if self.is_plain:
            return values.to(self.dtype)
        num_parts = values.numel() // part if part else 0
        stored = values.new_zeros((num_parts, self.size(part)), dtype=torch.uint8)
        if not stored.numel():
            return stored.view(-1)
        planes = self.encode(values)
        expected = [(plane.dtype, (values.numel() // self.block * plane.per_block,)) for plane in self.planes]
        if (found := _shapes(planes)) != expected:
            raise LayoutError(f"Format {self.name!r}: encode() returned {found!r:.200}, expected {expected}.")
        for plane, column in zip(planes, self._columns(stored, part), strict=True):
            column.copy_(plane.contiguous().view(num_parts, -1).view(torch.uint8))
        return stored.view(-1)

    @api_boundary
    def load(self, stored: torch.Tensor, part: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the 1-D values, in ``dtype``, of a buffer of whole parts, as :meth:`store` has returned them.

        Raises:
            LayoutError: ``decode`` does not return one floating-point number for each value.
        """
        if self.is_plain:
            return stored
        if not stored.numel():
            return stored.new_empty(0, dtype=dtype)
        rows = stored.view(-1, self.size(part))
        columns = self._columns(rows, part)
        planes = [column.contiguous().view(-1).view(plane.dtype) for plane, column in zip(self.planes, columns, strict=True)]
        values = self.decode(planes)
        size = len(rows) * part
        if not (isinstance(values, torch.Tensor) and values.is_floating_point() and values.shape == (size,)):
            found = _shapes([values])
            raise LayoutError(
                f"Format {self.name!r}: decode() returned {found!r:.200}, expected a floating-point tensor of shape ({size},)."
            )
        is_view = values.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        return values.to(dtype, copy=is_view)

    def padded(self, values: int, parts: int) -> int:
        """Return the size of one of ``parts`` equal parts, in whole blocks, that together have room for so many values."""
        return -(-values // (parts * self.block)) * self.block

    def sum(self, stored: torch.Tensor, part: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of stored parts of ``part`` values each, decoded one by one and added in ``dtype``, in their order."""
        first, *others = stored.view(-1, self.size(part)).unbind()
        total = self.load(first, part, dtype).to(dtype, copy=True)
        for each in others:
            total += self.load(each, part, dtype)
        return total

    def _columns(self, stored: torch.Tensor, part: int) -> list[torch.Tensor]:
        """Return a view of each plane, ``[parts, bytes of the plane]``, of stored parts, ``[parts, bytes of a part]``."""
        found, start = [], 0
        for nbytes in self._plane_nbytes(part):
            found.append(stored[:, start : start + nbytes])
            start += _aligned(nbytes)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def _shapes(planes: Any) -> Any:
    """The dtype and shape of each of some tensors; what is anything else as it is."""
    if not isinstance(planes, list | tuple) or not all(isinstance(x, torch.Tensor) for x in planes):
        return planes
    return [(x.dtype, tuple(x.shape)) for x in planes]


def _as_they_are(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return [values]


def _only(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    return planes[0]


@cache
def plain(dtype: torch.dtype) -> Format:
    """The format of values that are stored as they are, in ``dtype``."""
    return Format(dtype_name(dtype), (Plane(dtype),), _as_they_are, _only)


_formats: dict[str, Format] = {}


@options_explained
def register_format(format: Format) -> Format:
    """Have layouts and checkpoints that are read find a format by its name, and return it.

    Raises:
        LayoutError: another format has this name, or other functions, or a dtype has it.
    """
    is_dtype = isinstance(getattr(torch, format.name, None), torch.dtype)
    found = plain(getattr(torch, format.name)) if is_dtype else _formats.setdefault(format.name, format)
    if found != format or found.encode is not format.encode or found.decode is not format.decode:
        raise LayoutError(
            f"register_format(): there is another format {format.name!r} already, {found}, or one with other functions. "
            "Give this one another name."
        )
    return format


def format_named(name: str) -> Format:
    """Return the plain format of a dtype, or a registered format, by its name.

    Raises:
        LayoutError: there is none.
    """
    if isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return plain(dtype)
    if name not in _formats:
        raise LayoutError(f"no format {name!r}: import what registers it first. There are {sorted(_formats)}.")
    return _formats[name]


@api_boundary
@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of floating-point parameters and of what is derived from them. ``None`` means the leaf's own dtype.

    Args:
        compute: the dtype in which parameters are used; they rest and travel in it too, unless ``stored`` says otherwise.
        main: the dtype of the copy that the optimizer updates. Where it differs from ``compute`` a main copy is kept at
            the optimizer's place, at the cost of its bytes there.
        wire: the dtype in which gradients travel; ``None`` means ``compute``'s. The sum over ranks is taken in
            ``accumulate`` by backends that add on arrival (all but NCCL's own reductions). A format of several planes is
            encoded from values in ``accumulate``, exchanged, and decoded and summed in ``accumulate`` by all backends.
        accumulate: the dtype in which gradients rest and are summed; ``None`` means ``main``'s.
        stored: the format in which trained parameters rest and travel, and from which they are decoded where they are used;
            ``None`` means as they are. The optimizer then has a main copy.
        output: the dtype to which floating-point outputs of a module are cast; ``None`` leaves them. For
            :func:`~fsharp.shard_module`.
        cast_inputs: whether floating-point inputs of a module are cast to ``compute``, if that is given. For
            :func:`~fsharp.shard_module`.

    Raises:
        LayoutError: a dtype that is not floating-point, or of 8 bits or less, which needs a scale for each block of values.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = None
    wire: torch.dtype | Format | None = None
    accumulate: torch.dtype | None = None
    stored: Format | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cast_inputs, bool):
            raise OptionError(f"Precision(): cast_inputs is {self.cast_inputs!r}, expected True or False.")
        if self.stored is not None and not isinstance(self.stored, Format):
            raise OptionError(f"Precision(): stored is {self.stored!r}, expected a Format.")
        dtypes = {name: getattr(self, name) for name in ("compute", "main", "wire", "accumulate", "output")}
        if isinstance(self.wire, Format):
            dtypes["wire"] = self.wire.dtype if self.wire.is_plain else None
        for name, dtype in dtypes.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                expected = "a Format, " * (name == "wire") + "a floating-point torch.dtype or None"
                raise LayoutError(f"Precision(): {name} is {dtype!r}, expected {expected}.")
            if dtype is not None and needs_scale(dtype):
                raise LayoutError(
                    f"Precision(): {name} is {dtype!r}. Values of 8 bits and less need a scale, without which small ones "
                    "become zero: pass torch.bfloat16, or for wire= and stored= a Format that has scales."
                )

    def resolve(self, dtype: torch.dtype) -> "Dtypes":
        """The four dtypes of a parameter that the user holds in ``dtype``."""
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, plain(dtype), dtype)
        compute, main = self.compute or dtype, self.main or dtype
        wire = self.wire or compute
        wire = wire if isinstance(wire, Format) else plain(wire)
        return Dtypes(compute, main, wire, self.accumulate or main, self.stored)

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
        compute: of parameters in use.
        main: of the optimizer's copy and its state.
        wire: the format of gradients in collectives.
        accumulate: of gradients at rest.
        format: of parameters at rest and in collectives, if that is not plain ``compute``.
    """

    compute: torch.dtype
    main: torch.dtype
    wire: Format
    accumulate: torch.dtype
    format: Format | None = None

    @property
    def stored(self) -> Format:
        """The format of parameters at rest and in collectives."""
        return self.format or plain(self.compute)

    @property
    def travels(self) -> torch.dtype:
        """The dtype of gradients when a collective gets them: that of a plain wire, or that from which a format is encoded."""
        return self.wire.dtype if self.wire.is_plain else self.accumulate

    @property
    def block(self) -> int:
        """Number of values that no rank may have a part of: a multiple of the blocks of both formats."""
        return math.lcm(self.stored.block, self.wire.block)

    @property
    def names(self) -> list[str]:
        """The names of what has to be equal where buffers share a collective."""
        names = [dtype_name(self.compute), dtype_name(self.main), self.wire.name, dtype_name(self.accumulate)]
        return [*names, self.format.name] if self.format is not None else names

    @property
    def texts(self) -> list[str]:
        """The same with the planes and blocks of formats: what ranks compare."""
        texts = [dtype_name(self.compute), dtype_name(self.main), str(self.wire), dtype_name(self.accumulate)]
        return [*texts, str(self.format)] if self.format is not None else texts

    @property
    def has_main_copy(self) -> bool:
        """Whether the optimizer keeps a copy of its own."""
        return self.compute != self.main or self.format is not None


def needs_scale(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has so small a range that values need a scale beside them: ``torch.float8_*`` and smaller.

    >>> needs_scale(torch.float8_e4m3fn), needs_scale(torch.bfloat16), needs_scale(torch.uint8)
    (True, False, False)
    """
    return dtype.is_floating_point and dtype.itemsize == 1


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
