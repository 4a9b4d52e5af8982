"""Stored buffers: parameters of a group on one rank, as the group's format encodes them, and scales of whole leaves.

    values of one part | values of the next part | ... | scales of whole leaves, on every rank

A gather sends the values only. Without a format, values in the compute dtype are the stored buffer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from fsharp.errors import TreeError
from fsharp.functional.formats.format import LeafPart, align_nbytes, cast_decoded, tensor_text
from fsharp.functional.formats.te_delayed import ModuleFormat
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.unit_layout import Leaf, Span, UnitLayout
from fsharp.tracebacks import api_boundary


def is_encoded(unit: UnitLayout, group: int, buffer: torch.Tensor) -> bool:
    """Return whether a buffer holds parameters that a format has encoded."""
    form = unit.groups[group].dtypes.format
    return form is not None and buffer.dtype == form.buffer_dtype


def encode_values(unit: UnitLayout, group: int, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in stored form. The number of values is a multiple of the group's capacity.

    If the group has a format, ``values`` are cast to the main dtype and encoded; if not, they are cast to the compute dtype.
    """
    dtypes, capacity = unit.groups[group].dtypes, unit.groups[group].capacity
    values = values if dtypes.format is None else values.to(dtypes.main)
    return dtypes.stored_format.store(values, capacity, partial(unit.error_facts, group))


@api_boundary
def decoded_buffer(
    unit: UnitLayout, group: int, buffer: torch.Tensor, place: MeshPlacement, rank: int, *, in_main_dtype: bool = False
) -> torch.Tensor:
    """Return the values of a buffer of parameters: decoded if the buffer is encoded, else the buffer itself.

    Decoded values have the ``compute`` dtype; with ``in_main_dtype`` they have the main copy's dtype, without rounding. Raises
    TreeError if the group has a format, and the buffer has neither the size of values nor that of encoded values.
    """
    dtypes, size = unit.groups[group].dtypes, unit.local_size(group, place)
    if dtypes.format is None:
        return buffer
    if is_encoded(unit, group, buffer) and buffer.shape[-1] == unit.stored_size(group, place):
        dtype = dtypes.main if in_main_dtype else dtypes.compute
        return decode_stored(unit, group, buffer, scales_in(unit, group, buffer), place, rank, dtype)
    if buffer.shape[-1] != size:
        raise TreeError(
            f"a buffer of {tensor_text(buffer)} is neither {size} values nor what format "
            f"{dtypes.format.name!r} stores of them. Functions of values do not apply to stored parameters: map main "
            'copies, or the result of gather() to "full".'
        )
    return buffer


def decode_stored(
    unit: UnitLayout,
    group: int,
    stored: torch.Tensor,
    scales: torch.Tensor,
    place: MeshPlacement,
    rank: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the values, in ``dtype``, of the stored buffer that a rank holds in a place.

    ``scales`` has the scales of all leaves, for a format that encodes whole leaves.
    """
    form, facts = unit.groups[group].dtypes.stored_format, partial(unit.error_facts, group)
    stored = stored[: unit.gather_input_size(group, place)]
    if form.leaf_codec is None:
        return form.load(stored, unit.groups[group].capacity, dtype, facts)
    out = torch.zeros(unit.local_size(group, place), dtype=dtype, device=stored.device)
    for start, part in starts_and_leaf_parts(unit, group, place, rank, stored, scales, None):
        if part.first < part.last:
            out[start : start + part.last - part.first] = cast_decoded(form.decode_part(part, facts), dtype)
    return out


def part_to_gather(unit: UnitLayout, group: int, stored: torch.Tensor) -> torch.Tensor:
    """Return the part of a stored buffer that a gather sends: all but the scales of whole leaves at the end."""
    scales = unit.scales_nbytes[group]
    return stored[..., : stored.shape[-1] - scales] if scales else stored


def use_gather_inputs(unit: UnitLayout, group: int, stored: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs of the gathers that bring a stored buffer to a function; for a tensor class one for each plane."""
    part, of = part_to_gather(unit, group, stored), unit.groups[group]
    if group not in unit.tensor_classes:
        return [part]
    form, capacity = of.dtypes.stored_format, of.capacity
    rows = part.view(-1, form.size(capacity)) if part.numel() else part.view(1, 0)
    return [column.reshape(-1) for column in form.plane_columns(rows, capacity)]


def scales_in(unit: UnitLayout, group: int, stored: torch.Tensor) -> torch.Tensor:
    """Return the scales of whole leaves in a stored buffer."""
    return stored[stored.shape[-1] - unit.scales_nbytes[group] :]


def starts_and_leaf_parts(
    unit: UnitLayout,
    group: int,
    place: MeshPlacement,
    rank: int,
    stored: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor | None,
) -> Iterator[tuple[int, LeafPart]]:
    """Yield the parts of leaves that ``rank`` holds in ``place``, for a group whose format encodes whole leaves.

    Items are pairs ``(index, part)``, with the index of the part's first element in the buffer. A leaf in several parts of
    the buffer is yielded several times. A leaf of which this rank holds nothing is yielded once, as an empty part.
    ``stored`` is the buffer without scales. ``values`` are the values to encode, one for each element; None to decode.
    """
    form, capacity = unit.groups[group].dtypes.stored_format, unit.groups[group].capacity
    assert form.leaf_codec is not None
    rows = [*stored.view(-1, form.size(capacity))] if stored.numel() else [stored]
    parts = [form.planes_of(row, capacity if len(row) else 0) for row in rows]
    step = capacity or 1  # there is no capacity if all leaves are empty
    spans = {span.leaf.path: span for span in unit.leaf_spans(group, place, rank)}
    for leaf, its_scales in _leaves_with_scales(unit, group, scales):
        about = unit.path_in_tree(leaf), leaf.shape, unit.groups[group].dtypes.compute
        span = spans.get(leaf.path, Span(leaf, 0, 0, 0, 0))
        for start in (span.start, *range((span.start // step + 1) * step, span.stop, step)):
            part, low = divmod(start, step)
            stop = min(span.stop, start - low + step)
            where = [form.plane_slice(plane, low, low + stop - start) for plane in form.planes]
            held = tuple([plane[each] for plane, each in zip(parts[part], where, strict=True)])
            first = span.first + start - span.start
            own = None if values is None else values[start:stop]
            yield start, LeafPart(*about, first, first + stop - start, held, its_scales, own)


def whole_leaf_parts(unit: UnitLayout, group: int, planes: Sequence[torch.Tensor], scales: torch.Tensor) -> dict[str, LeafPart]:
    """Return each leaf of a group, whose format encodes whole leaves, as a LeafPart with all elements, by path in the unit.

    ``planes``: for each plane of the format the numbers of the full buffer, 1-D. ``scales``: the scales of all leaves.
    """
    form, found = unit.groups[group].dtypes.stored_format, {}
    for leaf, its_scales in _leaves_with_scales(unit, group, scales):
        where = [form.plane_slice(plane, leaf.offset, leaf.offset + leaf.numel) for plane in form.planes]
        held = tuple([plane[each] for plane, each in zip(planes, where, strict=True)])
        about = unit.path_in_tree(leaf), leaf.shape, unit.groups[group].dtypes.compute
        found[leaf.path] = LeafPart(*about, 0, leaf.numel, held, its_scales)
    return found


def encoded_leaf_parts(
    unit: UnitLayout, group: int, stored: torch.Tensor, place: MeshPlacement, rank: int
) -> Iterator[tuple[Leaf, LeafPart]]:
    """Yield each leaf of a group in a format, with the planes of the elements that a rank holds, for a reader of planes.

    Blocks that the leaf shares with its neighbours are whole in ``planes``. ``stored``: the rank's buffer in ``place``.
    """
    form, capacity = unit.groups[group].dtypes.stored_format, unit.groups[group].capacity
    size, start = unit.gather_input_size(group, place), unit.local_start(group, place, rank)
    rows = stored[:size].view(-1, form.size(capacity)) if size else stored.new_empty(1, 0)
    columns = form.plane_columns(rows, capacity if size else 0)
    planes = [column.contiguous().view(-1).view(plane.dtype) for plane, column in zip(form.planes, columns, strict=True)]
    for leaf, scales in _leaves_with_scales(unit, group, scales_in(unit, group, stored)):
        first, last = unit.leaf_range_on_rank(leaf, place, rank)
        begin = leaf.offset + first - start if first < last else 0
        where = [form.plane_slice(plane, begin, begin + last - first) for plane in form.planes]
        held = tuple([plane[each] for plane, each in zip(planes, where, strict=True)])
        yield leaf, LeafPart(unit.path_in_tree(leaf), leaf.shape, unit.groups[group].dtypes.compute, first, last, held, scales)


def _leaves_with_scales(unit: UnitLayout, group: int, scales: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
    """Yield each leaf of a group with the scales of the whole leaf. Scales of blocks are a plane, and not among them."""
    codec, end = unit.groups[group].dtypes.stored_format.leaf_codec, 0
    for leaf in unit.leaves_of_group(group):
        begin, size = end, codec.scales_nbytes(leaf.shape) if codec is not None else 0
        end = begin + align_nbytes(size)
        yield leaf, scales[begin : begin + size]


@contextmanager
def preserving_amax_histories(units: Iterable[UnitLayout]) -> Iterator[None]:
    """Keep casts of these units' weights in this context out of the amax histories of TransformerEngine's delayed scaling."""
    formats = [group.dtypes.stored_format for unit in units for group in unit.groups]
    with ExitStack() as stack:
        for scales in dict.fromkeys(form.scales for form in formats if isinstance(form, ModuleFormat)):
            stack.enter_context(scales.restoring_maxima())
        yield
