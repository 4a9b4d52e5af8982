"""How each kind of state is stored: the format of parameters at rest, the main copy's dtype, the gradients' wire and sum."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsharp.errors import LayoutError, OptionError
from fsharp.functional.formats.format import Format, dtype_name, plain
from fsharp.tracebacks import api_boundary

Wire = torch.dtype | Format | None
"""How gradients travel; None: in the dtype in which parameters are used."""


@api_boundary
@dataclass(frozen=True, slots=True)
class Precision:
    """Choose dtypes for floating-point parameters, gradients and outputs.

    Args:
        compute: the dtype in which parameters are used; ``None`` means the leaf's own. Parameters also rest and travel in
            ``compute``, unless ``stored`` is given.
        main: the dtype of the copy that the optimizer updates; ``None`` means the leaf's own. If ``main`` is not ``compute``, a
            main copy is kept at the optimizer's place, and takes its bytes there.
        wire: the dtype in which gradients travel; ``None`` means ``compute``'s. The sum over ranks is taken in
            ``accumulate`` by backends that add on arrival (all but NCCL's own reductions). A format of several planes is
            encoded from values in ``accumulate``, exchanged, and decoded and summed in ``accumulate`` by all backends. A
            mapping gives a wire by mesh axis, such as ``{"outer": fs.formats.mxint4}`` for what travels between hosts.
        accumulate: the dtype in which gradients rest and are summed; ``None`` means ``main``'s.
        stored: the format in which trained parameters rest and travel, and from which they are decoded where they are used;
            ``None`` means not encoded. With a format the optimizer has a main copy.
        update: the format in which updates of parameters travel from the optimizer's place to where parameters rest, if that
            is wider, as under ``zero1``, ``zero2`` and ``hfsdp``; ``None`` means that updated parameters travel themselves.
            With a format the optimizer has a main copy, and sends the difference between this copy and the parameters. All
            ranks add the decoded difference to the parameters. So parameters differ from main copies by the error of one
            difference, which does not accumulate. Along axes of one rank nothing is encoded. Not together with ``stored``.
        output: the dtype to which floating-point outputs of a module are cast; ``None`` leaves them. For
            :func:`~fsharp.shard_module`.
        cast_inputs: whether floating-point inputs of a module are cast to ``compute``, if that is given. For
            :func:`~fsharp.shard_module`.

    Raises:
        LayoutError: a dtype that is not floating-point, or of 8 bits or less, which needs a scale for each block of values.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = None
    wire: Wire | Mapping[str, Wire] = field(default=None, hash=False)
    accumulate: torch.dtype | None = None
    stored: Format | None = None
    update: Format | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cast_inputs, bool):
            raise OptionError(f"Precision(): cast_inputs is {self.cast_inputs!r}, expected True or False.")
        for name in ("stored", "update"):
            if not isinstance(form := getattr(self, name), Format | None):
                raise OptionError(f"Precision(): {name} is {form!r}, expected a Format.")
        if self.update is not None and self.update.leaves is not None:
            raise LayoutError(
                f"Precision(): update is {self.update.name!r}, which encodes whole leaves, on whose scales ranks agree. Pass a "
                "format that encodes blocks, such as fs.formats.mxint8."
            )
        dtypes: dict[str, Any] = {name: getattr(self, name) for name in ("compute", "main", "accumulate", "output")}
        if self.update is not None and self.update.is_plain:
            dtypes["update"] = self.update.dtype
        wires = self.wire.items() if isinstance(self.wire, Mapping) else [("", self.wire)]
        for axis, wire in wires:
            if isinstance(wire, Format) and wire.leaves is not None:
                raise LayoutError(
                    f"Precision(): wire is {wire.name!r}, which encodes whole leaves, with scales on which ranks agree: one "
                    "of parameters, for stored=. Gradients travel in formats of blocks, such as fs.formats.mxfp4."
                )
            if not isinstance(wire, Format) or wire.is_plain:
                dtypes[f"wire[{axis!r}]" if axis else "wire"] = wire.dtype if isinstance(wire, Format) else wire
        for name, dtype in dtypes.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                expected = "a Format, " * name.startswith(("wire", "update")) + "a floating-point torch.dtype or None"
                raise LayoutError(f"Precision(): {name} is {dtype!r}, expected {expected}.")
            if dtype is not None and needs_scale(dtype):
                raise LayoutError(
                    f"Precision(): {name} is {dtype!r}. Values of 8 bits and less need a scale, without which small ones "
                    "become zero: pass torch.bfloat16, or for wire=, stored= and update= a Format that has scales."
                )

    def resolve(self, dtype: torch.dtype) -> "Dtypes":
        """Return the four dtypes of a parameter that the user holds in ``dtype``."""
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, plain(dtype), dtype)
        compute, main = self.compute or dtype, self.main or dtype

        def format_of(wire: Wire) -> Format:
            return wire if isinstance(wire, Format) else plain(wire or compute)

        by_axis = self.wire if isinstance(self.wire, Mapping) else {}
        wire = format_of(None if isinstance(self.wire, Mapping) else self.wire)
        wires = tuple([(axis, format_of(by_axis[axis])) for axis in sorted(by_axis)])
        return Dtypes(compute, main, wire, self.accumulate or main, self.stored, wires, self.update)

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
        wires: pairs of a mesh axis and the format of gradients in collectives along it, where that is not ``wire``.
        update: of differences between main copies and parameters, if these travel in place of updated parameters.
    """

    compute: torch.dtype
    main: torch.dtype
    wire: Format
    accumulate: torch.dtype
    format: Format | None = None
    wires: tuple[tuple[str, Format], ...] = ()
    update: Format | None = None

    @property
    def stored(self) -> Format:
        """The format of parameters at rest and in collectives."""
        return self.format or plain(self.compute)

    def wire_along(self, axis: str) -> Format:
        """Return the format of gradients in collectives along an axis."""
        return dict(self.wires).get(axis, self.wire)

    def sent_along(self, axis: str) -> torch.dtype:
        """Return the dtype of gradients that a collective along an axis gets: a plain wire's, or ``accumulate`` to encode."""
        wire = self.wire_along(axis)
        return wire.dtype if wire.is_plain else self.accumulate

    @property
    def block(self) -> int:
        """Number of values that no rank may have a part of: a multiple of the blocks of all formats."""
        update = 1 if self.update is None else self.update.block
        return math.lcm(self.stored.block, self.wire.block, update, *[wire.block for _, wire in self.wires])

    @property
    def names(self) -> list[str]:
        """The names of what has to be equal where buffers share a collective."""
        return self._listed(lambda each: each.name)

    @property
    def texts(self) -> list[str]:
        """The same with the planes and blocks of formats: what ranks compare."""
        return self._listed(str)

    def _listed(self, text: Callable[[Format], str]) -> list[str]:
        """Return the four dtypes, the format at rest or nothing, each axis that has a wire of its own, and that of updates."""
        listed = [dtype_name(self.compute), dtype_name(self.main), text(self.wire), dtype_name(self.accumulate)]
        if self.format is not None or self.wires or self.update is not None:
            listed.append("" if self.format is None else text(self.format))
        listed += [f"{axis}={text(wire)}" for axis, wire in self.wires]
        return listed if self.update is None else [*listed, f"update:{text(self.update)}"]

    @property
    def has_main_copy(self) -> bool:
        """Whether the optimizer keeps a copy of its own."""
        return self.compute != self.main or self.format is not None or self.update is not None


def needs_scale(dtype: torch.dtype) -> bool:
    """Return whether a dtype has so small a range that values need a scale beside them: ``torch.float8_*`` and smaller.

    >>> needs_scale(torch.float8_e4m3fn), needs_scale(torch.bfloat16), needs_scale(torch.uint8)
    (True, False, False)
    """
    return dtype.is_floating_point and dtype.itemsize == 1
