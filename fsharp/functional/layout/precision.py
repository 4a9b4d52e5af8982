"""Dtypes and formats of each kind of state: parameters at rest, main copies, gradients on the wire, sums of gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsharp.errors import LayoutError, OptionError
from fsharp.functional.formats.format import Format, dtype_name, plain_format
from fsharp.type_checks import signature_checked

FEEDBACK_NAME = "feedback:"
"""The last text in :attr:`Dtypes.names` of a group with error feedback."""
Wire = torch.dtype | Format | None
"""How gradients travel; None: in the dtype in which parameters are used."""


@signature_checked
@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes and formats of floating-point parameters, gradients, updates and outputs: mixed precision.

    Args:
        compute: the dtype in which functions use parameters; ``None`` keeps the dtype of the leaf. Parameters also rest and
            travel in ``compute``, unless ``stored`` is given.
        main: the dtype of the parameters that the optimizer updates; ``None`` keeps the dtype of the leaf. If ``main`` differs
            from ``compute``, the optimizer keeps a main copy (master weights), sharded like optimizer state.
        wire: the dtype or format in which gradients travel; ``None`` means ``compute``. gloo and simulated ranks sum in
            ``accumulate``, NCCL's own reductions sum in ``wire``. Gradients in a format are encoded from ``accumulate``,
            exchanged, decoded, and summed in ``accumulate``, over any backend. A mapping chooses by mesh axis:
            ``{"outer": fs.formats.mxint4}`` for gradients that travel between hosts. Other axes then have ``compute``.
        accumulate: the dtype in which gradients rest and are summed; ``None`` means ``main``.
        stored: the format in which trained parameters rest and travel; they are decoded where functions use them. ``None``
            means no encoding. With a format the optimizer keeps a main copy.
        update: the format in which updates travel from the optimizer to the parameters, along axes that shard optimizer state
            but not parameters (``zero1``, ``zero2``, ``hfsdp``). ``None`` means that updated parameters travel themselves. With
            a format the optimizer keeps a main copy, and sends the difference between main copy and parameters. All ranks add
            the decoded difference to their parameters. So parameters differ from main copies by the error of one difference;
            errors do not accumulate. ``update`` and ``stored`` exclude each other.
        feedback: whether the encoding error of ``wire`` is added to the next gradient (error feedback). Each rank keeps its
            errors in ``TrainState.residuals``: for each axis with a format, one value in ``accumulate`` for each value that the
            rank encodes along the axis. Along the first axis of a reduction each rank encodes whole gradients. If this axis has
            a format, each rank keeps a value for every parameter of the model, under any strategy: 4 bytes in float32. The
            residuals of a module are in ``train_state``.
            Sources: Seide et al., 2014 (1-bit SGD); Karimireddy et al., arXiv 1901.09847.
        output: the dtype to which floating-point outputs of a module are cast; ``None`` means no cast. For
            :func:`~fsharp.shard_module` alone.
        cast_inputs: whether floating-point inputs of a module are cast to ``compute``, if ``compute`` is given. For
            :func:`~fsharp.shard_module` alone.

    Raises:
        LayoutError: a dtype is not floating-point, or has 8 bits or less and so would need scales.
        LayoutError: a format cannot be used for this argument, or ``feedback`` has no format.
        OptionError: ``stored`` or ``update`` is no Format, or ``feedback`` or ``cast_inputs`` is no bool.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = None
    wire: Wire | Mapping[str, Wire] = field(default=None, hash=False)
    accumulate: torch.dtype | None = None
    stored: Format | None = None
    update: Format | None = None
    feedback: bool = False
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("feedback", "cast_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"Precision(): {name} is {getattr(self, name)!r}, expected True or False.")
        for name in ("stored", "update"):
            if not isinstance(form := getattr(self, name), Format | None):
                one = " for all axes: an update that is encoded again for the next axis would be rounded twice"
                by_axis = one * (name == "update" and isinstance(form, Mapping))
                raise OptionError(f"Precision(): {name} is {form!r}, expected a Format{by_axis}.")
        if self.stored is not None and self.stored.seed is not None:
            raise LayoutError(
                f"Precision(): stored is {self.stored.name!r}, which rounds stochastically. Parameters at rest are encoded "
                "again by checkpoints and reshard(), which have no step: pass the format itself, or wire= or update=."
            )
        if self.stored is not None and not self.stored.reencodes_exactly:
            raise LayoutError(
                f"Precision(): stored is {self.stored.name!r}, which gives other bytes when decoded values are encoded again, "
                "so a load would change parameters. Rotated formats that do not are hadamard(fs.formats.mxint8, size) and "
                "hadamard(fs.formats.mxint4, size), with a size of at most 32."
            )
        if self.update is not None and self.update.leaf_codec is not None:
            raise LayoutError(
                f"Precision(): update is {self.update.name!r}, which encodes whole leaves, on whose scales ranks agree. Pass a "
                "format that encodes blocks, such as fs.formats.mxint8."
            )
        dtypes: dict[str, Any] = {name: getattr(self, name) for name in ("compute", "main", "accumulate", "output")}
        if self.update is not None and self.update.is_plain:
            dtypes["update"] = self.update.buffer_dtype
        wires = self.wire.items() if isinstance(self.wire, Mapping) else [("", self.wire)]
        for axis, wire in wires:
            if isinstance(wire, Format) and wire.leaf_codec is not None:
                raise LayoutError(
                    f"Precision(): wire is {wire.name!r}, which encodes whole leaves, with scales on which ranks agree: one "
                    "of parameters, for stored=. Gradients travel in formats of blocks, such as fs.formats.mxfp4."
                )
            if not isinstance(wire, Format) or wire.is_plain:
                dtypes[f"wire[{axis!r}]" if axis else "wire"] = wire.buffer_dtype if isinstance(wire, Format) else wire
        if self.feedback and all(not isinstance(wire, Format) or wire.is_plain for _, wire in wires):
            raise LayoutError(
                f"Precision(): feedback is True, and wire is {self.wire!r}, with no format whose loss would be fed back. Pass "
                "a format, such as wire=fs.formats.mxint4, or leave out feedback."
            )
        for name, dtype in dtypes.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                expected = "a Format, " * name.startswith(("wire", "update")) + "a floating-point torch.dtype or None"
                raise LayoutError(f"Precision(): {name} is {dtype!r}, expected {expected}.")
            if dtype is not None and is_float8_or_smaller(dtype):
                raise LayoutError(
                    f"Precision(): {name} is {dtype!r}. Values of 8 bits and less need a scale, without which small ones "
                    "become zero: pass torch.bfloat16, or for wire=, stored= and update= a Format that has scales."
                )

    def resolve(self, dtype: torch.dtype) -> "Dtypes":
        """Return the dtypes and formats of a parameter that the user holds in ``dtype``.

        If ``dtype`` is not floating-point, all dtypes are ``dtype``, and nothing is encoded.
        """
        if not dtype.is_floating_point:
            return Dtypes(dtype, dtype, plain_format(dtype), dtype)
        compute, main = self.compute or dtype, self.main or dtype

        def format_of(wire: Wire) -> Format:
            return wire if isinstance(wire, Format) else plain_format(wire or compute)

        by_axis = self.wire if isinstance(self.wire, Mapping) else {}
        wire = format_of(None if isinstance(self.wire, Mapping) else self.wire)
        wires = tuple([(axis, format_of(by_axis[axis])) for axis in sorted(by_axis)])
        return Dtypes(compute, main, wire, self.accumulate or main, self.stored, wires, self.update, self.feedback)

    @property
    def formats(self) -> list[Format]:
        """Each Format in ``stored``, ``update`` and ``wire``, in this order, maybe several times. A ``torch.dtype`` is none."""
        wires = self.wire.values() if isinstance(self.wire, Mapping) else (self.wire,)
        return [form for form in (self.stored, self.update, *wires) if isinstance(form, Format)]

    @property
    def without_module_options(self) -> "Precision":
        """Return this precision without ``output`` and ``cast_inputs``, which are for modules."""
        return replace(self, output=None, cast_inputs=True)


Precisions = Precision | Mapping[str, Precision]
"""One precision, or a dict from patterns of key paths to precisions. The last pattern that matches a path counts."""


def check_precisions(where: str, precision: Precisions) -> None:
    """Raise an OptionError, which names the pattern and its value, if a pattern has no Precision."""
    for pattern, each in precision.items() if isinstance(precision, Mapping) else ():
        if not isinstance(each, Precision):
            raise OptionError(f"{where}: precision[{pattern!r}] is {each!r:.80}, expected a Precision.")


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes and formats of one group of parameters, as a :class:`Precision` resolves them for a leaf's dtype.

    Attributes:
        compute: dtype of parameters in use.
        main: dtype of main copies and optimizer state.
        wire: format of gradients in collectives.
        accumulate: dtype of gradients at rest.
        format: format of parameters at rest and in collectives; None means plain ``compute``.
        wires: pairs ``(axis, format)``: the format of gradients along each mesh axis that a mapping ``Precision.wire`` names.
        update: format of differences between main copies and parameters; None if updated parameters travel themselves.
        feedback: whether errors of formats of gradients are added to the next gradients.
    """

    compute: torch.dtype
    main: torch.dtype
    wire: Format
    accumulate: torch.dtype
    format: Format | None = None
    wires: tuple[tuple[str, Format], ...] = ()
    update: Format | None = None
    feedback: bool = False

    @property
    def stored_format(self) -> Format:
        """The format of parameters at rest and in collectives."""
        return self.format or plain_format(self.compute)

    def gradient_format_along(self, axis: str) -> Format:
        """Return the format of gradients in collectives along an axis."""
        return dict(self.wires).get(axis, self.wire)

    @property
    def block(self) -> int:
        """Number of values in a block that no rank boundary may cut: a multiple of the blocks of all formats."""
        update = 1 if self.update is None else self.update.block
        return math.lcm(self.stored_format.block, self.wire.block, update, *[wire.block for _, wire in self.wires])

    @property
    def names(self) -> list[str]:
        """Names of dtypes and formats; only buffers with equal names share a collective."""
        return self.to_texts(lambda each: each.name)

    def to_texts(self, text: Callable[[Format], str]) -> list[str]:
        """Return these precision settings as texts in the order of the fields, with a text for each axis in ``wires``.

        The last four fields are left out where they are not set; but ``format`` is an empty text if a later field is set.
        ``text``: function that returns the text of a format. Ranks compare the texts that ``text=str`` gives.
        """
        listed = [dtype_name(self.compute), dtype_name(self.main), text(self.wire), dtype_name(self.accumulate)]
        if self.format is not None or self.wires or self.update is not None or self.feedback:
            listed.append("" if self.format is None else text(self.format))
        listed += [f"{axis}={text(wire)}" for axis, wire in self.wires]
        listed += [] if self.update is None else [f"update:{text(self.update)}"]
        return [*listed, FEEDBACK_NAME] if self.feedback else listed

    @property
    def has_main_copy(self) -> bool:
        """Whether the optimizer keeps a main copy."""
        return self.compute != self.main or self.format is not None or self.update is not None


def is_float8_or_smaller(dtype: torch.dtype) -> bool:
    """Return whether a dtype has so small a range that values need a scale beside them: ``torch.float8_*`` and smaller.

    >>> [is_float8_or_smaller(dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.uint8)]
    [True, False, False]
    """
    return dtype.is_floating_point and dtype.itemsize == 1
