"""Format: how values are stored or travel, as one or more arrays of numbers, called planes. Each dtype is a plain format."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from fsharp.errors import FormatError, FsharpError, LayoutError, problem
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, options_checked_on_failure

T = TypeVar("T")


@options_checked
@dataclass(frozen=True, slots=True)
class Plane:
    """One array of numbers that a format stores, such as the 8-bit codes of values, or the scales of blocks.

    Args:
        dtype: dtype of the numbers.
        per_block: number of these numbers for each block of values.

    Raises:
        LayoutError: ``per_block`` is less than 1, or ``dtype`` is a quantized dtype of torch.
    """

    dtype: torch.dtype
    per_block: int = 1

    def __post_init__(self) -> None:
        if self.per_block < 1 or dtype_name(self.dtype).startswith("q"):
            raise LayoutError(
                f"Plane(): got {self.dtype} and per_block {self.per_block}, expected a dtype of plain numbers and 1 or more."
            )


PLANE_ALIGNMENT = 16
"""Each plane of a part begins at a multiple of so many bytes."""

Shape = tuple[int, ...]
MessageFacts = Callable[[], Sequence[tuple[str, object]]]
"""A function that returns facts for an error: unit, leaves and axis of the encoded values."""
AgreeMax = Callable[[torch.Tensor], None]
"""A function that replaces each number of a tensor by its maximum over ranks, in place. A collective."""
NoiseFn = Callable[[int, int, torch.device], torch.Tensor]
"""A function of a seed, a number of values and a device: a uniform random number in (0, 1) for each value, in float32."""


class ResidualAndNoise(NamedTuple):
    """The residual and the random numbers with which a gradient is encoded.

    Attributes:
        residual: encoding errors of earlier gradients, 1-D, to add and to overwrite; None adds nothing.
        noise_fn: function that makes the random numbers of stochastic rounding; None without stochastic rounding.
    """

    residual: torch.Tensor | None = None
    noise_fn: NoiseFn | None = None


@options_checked
@dataclass(frozen=True, slots=True)
class LeafPart:
    """The elements ``leaf.flatten()[first:last]`` on one rank: input and output of a :class:`LeafCodec`.

    Attributes:
        path: path of the leaf in the user's tree.
        shape: shape of the whole leaf.
        dtype: dtype in which functions use the leaf.
        first: index of the first element.
        last: index after the last element; equal to ``first`` if this rank holds no element.
        planes: encoded elements: a 1-D tensor for each plane of the format. A short last block is stored as a whole block.
        scales: scales of the whole leaf, as 1-D uint8; every rank has all scales.
        values: the elements to encode, 1-D, in the ``main`` dtype; None for decoding.
    """

    path: str
    shape: Shape
    dtype: torch.dtype
    first: int
    last: int
    planes: tuple[torch.Tensor, ...]
    scales: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class EncodedTensorClass:
    """A tensor class, such as TransformerEngine's, with which functions compute on encoded leaves without decoding them.

    A tensor of this class wraps inner tensors (torch's ``__tensor_flatten__``) in the leaf's memory. While this memory is
    released, the inner tensors are empty, also in all aliases of the wrapper.

    Attributes:
        make_tensor: function from a whole leaf to a tensor of the class. The inner tensors use the leaf's memory, but must not
            be views of it, as views keep memory alive: see :func:`non_view_alias`.
        compute_derived: function of the tensor that computes values derived from its bytes, such as a transpose.
        release_derived: function of the tensor that frees these derived values. Called before the memory is released.
    """

    make_tensor: Callable[[LeafPart], torch.Tensor]
    compute_derived: Callable[[torch.Tensor], None]
    release_derived: Callable[[torch.Tensor], None]


@options_checked_on_failure
@dataclass(frozen=True, slots=True)
class LeafCodec:
    """Functions that encode whole leaves with scales on which all ranks agree, such as one scale for each tensor or row.

    A scale depends on the largest element of the whole leaf, of which a rank has only a part. So ranks compute the maximum over
    all ranks, and every rank computes the same scales from this maximum. Scales are never sent. A rank keeps the scales of
    whole leaves at the end of its buffer.

    Args:
        scales_nbytes: function from the shape of a leaf to the bytes of the leaf's scales.
        agreed_maxima: function from the shape of a leaf to a list with a pair ``(count, dtype)`` for each call of ``agree`` in
            ``encode``. ``count``: how many numbers of the call belong to this leaf. ``[(1, torch.float32)]`` means one call,
            with one number for the leaf.
        encode: function ``(parts, agree)`` that fills ``planes`` and ``scales`` of each part. ``parts`` has one LeafPart for
            each leaf, in the same order on all ranks. ``agree(tensor)`` replaces each number of a tensor by its maximum over
            ranks, in place. Each call has the numbers of all leaves, and all ranks make equally many calls.
        decode: function from a LeafPart to its elements, 1-D and floating-point.
        tensor_class: class of the tensors in which the user's functions get whole leaves under a scheduler. None: they get
            decoded values.
        scale_tensors: function from the shape of a leaf to a dict, which divides the leaf's scales into tensors for readers of
            checkpoints with ``planes=True``: ``{suffix of the name: (shape, dtype)}``. None: readers get bytes.
        for_inference: function from a LeafPart to a pair: the format in which such a checkpoint has the part, and the part in
            this format. None: the part is written as it is.
    """

    scales_nbytes: Callable[[Shape], int]
    agreed_maxima: Callable[[Shape], Sequence[tuple[int, torch.dtype]]]
    encode: Callable[[Sequence[LeafPart], AgreeMax], None]
    decode: Callable[[LeafPart], torch.Tensor]
    tensor_class: EncodedTensorClass | None = None
    scale_tensors: Callable[[Shape], dict[str, tuple[Shape, torch.dtype]]] | None = None
    for_inference: Callable[[LeafPart], tuple["Format", LeafPart]] | None = None

    def scale_specs(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return ``scale_tensors(shape)``; without this function, one uint8 tensor with the suffix ``_scales``."""
        if self.scale_tensors is not None:
            return self.scale_tensors(shape)
        return {"_scales": ((self.scales_nbytes(shape),), torch.uint8)}

    def scales_by_suffix(self, shape: Shape, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of :meth:`scale_specs` as views of ``scales``."""
        return aligned_views(scales, self.scale_specs(shape))


def _raise_not_blockwise(values: Any) -> Any:
    raise LayoutError("this format encodes whole leaves, on whose scales ranks agree: it cannot encode blocks.")


@options_checked_on_failure
@dataclass(frozen=True, slots=True)
class Format:
    """An encoding of values, for :class:`~fsharp.Precision`: of parameters at rest and in gathers, gradients, or updates.

    The values that one rank keeps, or sends to one receiver, are a *part*. A part has whole blocks, and is stored as bytes, one
    plane after another. So one message moves all planes. A buffer holds parts one after another.

    Parameters are encoded from the dtype ``Precision.main``, gradients from ``Precision.accumulate``. Checkpoints hold decoded
    parameters. So if parameters are decoded to the dtype ``main`` and encoded again, the bytes have to be equal. ``encode`` and
    ``decode`` must not change their arguments.

    Args:
        name: name of the format in layouts, checkpoints and labels: a Python identifier.
        planes: the arrays that the format stores, a tuple of :class:`Plane`.
        encode: function from 1-D values, in whole blocks, to a list of planes. A plane is a 1-D tensor with
            ``Plane.per_block`` numbers for each block.
        decode: function from the list of planes to 1-D values in any floating-point dtype.
        block: number of values that are encoded together.
        leaf_codec: codec of whole leaves, in place of ``encode`` and ``decode``; for parameters alone.
        stochastic_encode: function ``(values, uniform)`` that encodes with stochastic rounding. ``uniform`` has a random number
            in (0, 1) for each value. On average a decoded value has to be the value itself. None: there is no stochastic
            rounding.
        seed: seed of the random numbers, in a format that :func:`~fsharp.formats.stochastic` has made. The ``encode`` of such a
            format is a function ``(values, uniform)``.
        reencodes_exactly: whether encoding decoded values gives the same bytes. If False, ``Precision(stored=)`` refuses the
            format.
        made_by: function and arguments that make the format again, for pickles, such as ``(make_my_format, (8,))``. None: a
            pickle has the functions of the format. Then these have to be functions of a module, or cloudpickle is needed.

    Raises:
        LayoutError: there are no planes, the block is less than 1, or the name is not a Python identifier.
        LayoutError: there are both a ``leaf_codec`` and functions ``encode`` and ``decode``, or neither.
    """

    name: str
    planes: tuple[Plane, ...]
    encode: Callable[..., Sequence[torch.Tensor]] = field(compare=False, repr=False, default=_raise_not_blockwise)
    decode: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(compare=False, repr=False, default=_raise_not_blockwise)
    block: int = 1
    leaf_codec: LeafCodec | None = field(compare=False, repr=False, default=None)
    stochastic_encode: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]] | None = field(
        compare=False, repr=False, default=None
    )
    seed: int | None = field(repr=False, default=None)
    reencodes_exactly: bool = field(compare=False, repr=False, default=True)
    made_by: tuple[Callable[..., Any], tuple[Any, ...]] | None = field(compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        are_planes = isinstance(self.planes, tuple) and self.planes and all(isinstance(each, Plane) for each in self.planes)
        is_block = isinstance(self.block, int) and self.block >= 1
        is_name = isinstance(self.name, str) and self.name.isidentifier()
        has_codec = isinstance(self.leaf_codec, LeafCodec) if self.encode is _raise_not_blockwise else self.leaf_codec is None
        if not (are_planes and is_block and is_name and has_codec and callable(self.encode) and callable(self.decode)):
            raise LayoutError(
                f"Format(): got name {self.name!r}, planes {self.planes!r:.80}, block {self.block!r}, "
                f"encode {self.encode!r:.40}, decode {self.decode!r:.40}; expected an identifier, a tuple with one Plane at "
                "least, an integer of 1 or more, and two functions, or leaf_codec=LeafCodec(...) in place of these."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made_by or object.__reduce_ex__(self, protocol)

    def __str__(self) -> str:
        if self.is_plain:
            return self.name
        planes = ", ".join(f"{dtype_name(plane.dtype)} x {plane.per_block}" for plane in self.planes)
        return f"{self.name} ({planes}; blocks of {self.block})"

    @property
    def is_plain(self) -> bool:
        """Whether the format stores plain values in one dtype, without encoding."""
        return self.encode is _encode_plain

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype of a stored buffer: the values' dtype for a plain format, else ``torch.uint8``."""
        return self.planes[0].dtype if self.is_plain else torch.uint8

    def size(self, num_values: int) -> int:
        """Return the number of elements of :attr:`buffer_dtype` that store ``num_values``, a multiple of :attr:`block`."""
        return num_values if self.is_plain else sum(map(align_nbytes, self.plane_nbytes(num_values)))

    def plane_nbytes(self, num_values: int) -> list[int]:
        """Return the bytes of each plane that stores ``num_values`` values, a multiple of :attr:`block`."""
        return [num_values // self.block * plane.per_block * plane.dtype.itemsize for plane in self.planes]

    @api_boundary
    def store(
        self, values: torch.Tensor, part_size: int, facts: MessageFacts = tuple, noise_fn: NoiseFn | None = None
    ) -> torch.Tensor:
        """Encode 1-D ``values``, in parts of ``part_size`` values, and return the stored buffer.

        ``part_size`` is a multiple of :attr:`block`, and divides the number of values. A plain format casts the values.
        ``facts()`` returns rows for an error. ``noise_fn`` makes the random numbers of stochastic rounding.

        Raises:
            FormatError: ``encode`` raises an error, or returns planes that do not match the format; the format rounds
                stochastically, and ``noise_fn`` is None.
        """
        if self.is_plain:
            return values.to(self.buffer_dtype)
        num_parts = values.numel() // part_size if part_size else 0
        stored = values.new_zeros((num_parts, self.size(part_size)), dtype=torch.uint8)
        if not stored.numel():
            return stored.view(-1)
        if self.seed is not None and noise_fn is None:
            text = (
                "rounds stochastically, and no step says with which random numbers: pass step=state.step to value_and_grad's "
            )
            raise self._format_error(f"{text}function and to reduce_scatter(). Transforms of torch.func have no step.", facts)
        uniform = [] if self.seed is None or noise_fn is None else [noise_fn(self.seed, values.numel(), values.device)]
        planes = self._call_codec("encode", lambda: self.encode(values, *uniform), facts)
        expected = [(plane.dtype, (values.numel() // self.block * plane.per_block,)) for plane in self.planes]
        if (found := _dtypes_and_shapes(planes)) != expected:
            raise self._format_error(f"encode() returned {found!r:.200}, expected {expected}.", facts)
        for plane, column in zip(planes, self.plane_columns(stored, part_size), strict=True):
            column.copy_(plane.contiguous().view(num_parts, -1).view(torch.uint8))
        return stored.view(-1)

    @api_boundary
    def load(self, stored: torch.Tensor, part_size: int, dtype: torch.dtype, facts: MessageFacts = tuple) -> torch.Tensor:
        """Decode ``stored``, a buffer from :meth:`store` with the same ``part_size``, and return 1-D values in ``dtype``.

        A plain format returns ``stored`` itself, in its own dtype.

        Raises:
            FormatError: ``decode`` raises an error, or does not return one floating-point number for each value. The message
                has the rows ``facts()``.
        """
        if self.is_plain:
            return stored
        if not stored.numel():
            return stored.new_empty(0, dtype=dtype)
        rows = stored.view(-1, self.size(part_size))
        columns = self.plane_columns(rows, part_size)
        planes = [column.contiguous().view(-1).view(plane.dtype) for plane, column in zip(self.planes, columns, strict=True)]
        values = self._call_codec("decode", lambda: self.decode(planes), facts)
        self._check_decoded(values, len(rows) * part_size, facts)
        # A transform of torch.func wraps tensors, whose storage cannot be asked for: such values are copied.
        is_view = is_wrapped(values) or values.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        return cast_decoded(values, dtype, copy=is_view)

    @api_boundary
    def store_summand(
        self,
        values: torch.Tensor,
        part_size: int,
        residual: torch.Tensor | None = None,
        facts: MessageFacts = tuple,
        noise_fn: NoiseFn | None = None,
    ) -> torch.Tensor:
        """Encode a gradient plus its residual, and return the stored buffer. The encoding error becomes the new residual.

        The error of an infinity or NaN counts as zero, so that one gradient with an infinity does not make all later gradients
        infinite. A gradient of zeros is encoded without the residual, which is kept. The reason: some strategies send zeros
        where a step has no gradient, and others send nothing.

        ``values``: the gradient, 1-D. ``residual``: encoding errors of earlier gradients, for the first ``len(residual)``
        values; overwritten, but not after a FormatError. Other arguments and errors are those of :meth:`store`.
        """
        if residual is None:
            return self.store(values, part_size, facts, noise_fn)
        has_gradient = values.count_nonzero() > 0  # a tensor on the device, for which the host does not wait
        total = values.clone()
        total[: len(residual)].addcmul_(residual, has_gradient.to(residual.dtype))
        stored = self.store(total, part_size, facts, noise_fn)
        lost = total.sub_(self.load(stored, part_size, total.dtype, facts))[: len(residual)]
        residual.mul_(has_gradient.logical_not()).add_(lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
        return stored

    def padded_part_size(self, num_values: int, num_parts: int) -> int:
        """Return the size of a part, with padding, if ``num_values`` are cut into ``num_parts`` equal parts of whole blocks."""
        return -(-num_values // (num_parts * self.block)) * self.block

    def sum(self, stored: torch.Tensor, part_size: int, dtype: torch.dtype, facts: MessageFacts = tuple) -> torch.Tensor:
        """Decode ``stored``, parts of ``part_size`` values one after another, and return the elementwise sum of all parts.

        The sum is 1-D, and computed in ``dtype``, from the first part to the last. ``facts()`` returns rows for an error.
        """
        size = self.size(part_size)
        first, *others = stored.view(-1, size).unbind() if size else [stored]
        total = self.load(first, part_size, dtype, facts).to(dtype, copy=True)
        for each in others:
            total += self.load(each, part_size, dtype, facts)
        return total

    def _call_codec(self, name: str, fn: Callable[[], T], facts: MessageFacts) -> T:
        """Return ``fn()``, which calls the codec function ``name``. An error becomes a FormatError, unless an FsharpError."""
        try:
            return fn()
        except FsharpError:  # from ``agree``
            raise
        except Exception as error:
            raise self._format_error(f"{name}() raised {type(error).__name__}: {error}", facts) from error

    def _format_error(self, text: str, facts: MessageFacts) -> FormatError:
        return FormatError(problem(f"Format {self.name!r}", text, facts()))

    @property
    def step(self) -> int:
        """The least number of values for which each plane has whole numbers. Without a ``leaf_codec``: the block."""
        return self.block if self.leaf_codec is None else self.leaf_alignment

    @property
    def leaf_alignment(self) -> int:
        """With a ``leaf_codec`` leaves begin at multiples of this number, so no stored number encodes two leaves. Else 1."""
        if self.leaf_codec is None:
            return 1
        return math.lcm(*[self.block // math.gcd(self.block, plane.per_block) for plane in self.planes])

    def plane_slice(self, plane: Plane, first: int, last: int) -> slice:
        """Return the slice of the numbers of ``plane`` that encode the values ``[first, last)``, extended to whole steps.

        With a ``leaf_codec`` these are values of a leaf, and ``first`` has to be a multiple of :attr:`leaf_alignment`.
        """
        assert first % self.leaf_alignment == 0, f"{self}: values from {first} on begin within a number"
        low, high = first // self.step, -(-last // self.step) if first < last else first // self.step
        times = self.step * plane.per_block // self.block
        return slice(low * times, high * times)

    @api_boundary
    def encode_leaves(self, parts: Sequence[LeafPart], agree: AgreeMax, facts: MessageFacts) -> None:
        """Encode whole leaves: each rank encodes its ``parts`` into their memory. All ranks call this method together.

        ``agree``: see :class:`LeafCodec`. ``facts()`` returns rows for an error. Raises FormatError if ``encode`` raises an
        error. FsharpErrors, such as those of ``agree``, are raised as they are.
        """
        codec = self.leaf_codec
        assert codec is not None
        self._call_codec(
            "encode", lambda: codec.encode(parts, agree), lambda: [*facts(), ("leaves", first_few([p.path for p in parts]))]
        )

    @api_boundary
    def decode_part(self, part: LeafPart, facts: MessageFacts = tuple) -> torch.Tensor:
        """Return the decoded elements of a leaf's part, 1-D and floating-point. Errors list the pairs ``facts()``.

        Raises FormatError if ``decode`` raises an error, or does not return one floating-point number for each element.
        """
        codec = self.leaf_codec
        assert codec is not None
        values = self._call_codec("decode", lambda: codec.decode(part), facts)
        self._check_decoded(values, part.last - part.first, facts, f" for {part.path!r}")
        return values

    def _check_decoded(self, values: Any, size: int, facts: MessageFacts, of: str = "") -> None:
        if not (isinstance(values, torch.Tensor) and values.is_floating_point() and values.shape == (size,)):
            text = f"decode() returned {_dtypes_and_shapes([values])!r:.200}{of}"
            raise self._format_error(f"{text}, expected a floating-point tensor of shape ({size},).", facts)

    def planes_of(self, stored_part: torch.Tensor, part_size: int) -> list[torch.Tensor]:
        """Return the planes of one stored part of ``part_size`` values, as 1-D views."""
        columns = self.plane_columns(stored_part.view(1, -1), part_size)
        return [column.view(-1).view(plane.dtype) for plane, column in zip(self.planes, columns, strict=True)]

    def plane_columns(self, stored: torch.Tensor, part_size: int) -> list[torch.Tensor]:
        """Return a view of each plane's bytes in ``stored``, which has a row for each part of ``part_size`` values."""
        found, start = [], 0
        for nbytes in self.plane_nbytes(part_size):
            found.append(stored[:, start : start + nbytes])
            start += align_nbytes(nbytes)
        return found


def cast_decoded(values: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """Return decoded values in ``dtype``, with ``copy`` always in new memory.

    In float16 a finite value beyond 65504, as encoding may round up, becomes 65504 with its sign, and not an infinity.
    """
    cast = values.to(dtype, copy=copy)
    if dtype is not torch.float16 or values.dtype is dtype:
        return cast
    return torch.where(values.isfinite(), cast.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16), cast)


_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def non_view_alias(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the memory of ``x`` that ``set_`` can move to other memory. A view would keep this memory alive."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def align_nbytes(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of :data:`PLANE_ALIGNMENT`."""
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def aligned_views(memory: torch.Tensor, specs: Mapping[str, tuple[Shape, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of the shapes and dtypes ``specs`` in ``memory``; each begins at a multiple of PLANE_ALIGNMENT."""
    found, start = {}, 0
    for name, (shape, dtype) in specs.items():
        nbytes = math.prod(shape) * dtype.itemsize
        found[name] = memory[start : start + nbytes].view(dtype).view(shape)
        start += align_nbytes(nbytes)
    return found


def _dtypes_and_shapes(planes: Any) -> Any:
    """Return ``(dtype, shape)`` of each tensor in ``planes``, for an error. Return anything but a list of tensors unchanged."""
    if not isinstance(planes, list | tuple) or not all(isinstance(x, torch.Tensor) for x in planes):
        return planes
    return [(x.dtype, tuple(x.shape)) for x in planes]


def _encode_plain(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return [values]


@cache
def plain_format(dtype: torch.dtype) -> Format:
    """Return the plain format of ``dtype``: values are stored in this dtype, without encoding."""
    return Format(dtype_name(dtype), (Plane(dtype),), _encode_plain, itemgetter(0), made_by=(plain_format, (dtype,)))


def first_few(names: Sequence[str]) -> str:
    """Return at most four of ``names`` as text, and the number of all others, for an error message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_text(x: Any) -> str:
    """Return dtype and shape of a tensor, or of any object that has both, in words: ``float32[2, 3]``."""
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as 1-D uint8: a view if the tensor is contiguous, else a copy."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # stride 1 even for a single element
