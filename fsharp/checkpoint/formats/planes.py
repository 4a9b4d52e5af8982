"""Planes of encoded parameters in files: the tensors that a leaf has there, and the values that these encode.

The codes of a leaf ``w`` are the tensor ``w``. Its scales are the tensor ``w_scale``: one for each block, one for each row, or
one for the whole leaf. A format that has a scale of the whole leaf beside those of blocks stores it as ``w_scale_2``. A value
is the product of its code and its scales. The names are those of compressed-tensors, and of NVIDIA's ModelOpt for
``w_scale_2``.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from fsharp.errors import CheckpointError, LayoutError, problem
from fsharp.functional.formats.format import Format, LeafPart, Plane, Shape, align_nbytes, as_bytes
from fsharp.functional.formats.registry import format_named
from fsharp.functional.layout.sharded import Sharded
from fsharp.functional.layout.stored import encoded_leaf_parts
from fsharp.functional.layout.unit_layout import Leaf

METADATA_KEY = "fsharp.encoded"
"""The key in the metadata of a safetensors file whose text, in JSON, has the encoded leaves of the file."""
_PLANE_SUFFIXES = ("", "_scale", *(f"_plane_{i}" for i in range(2, 16)))


class EncodedLeaf(NamedTuple):
    """A leaf of which a checkpoint has the planes.

    Attributes:
        format: name of the format.
        shape: shape of the leaf.
        skip: number of values in the leaf's first block that come before the first value of the leaf.
        planes: names of the tensors with the planes, in the order of the format.
        scales: names of the tensors with the scales of the whole leaf.
    """

    format: str
    shape: Shape
    skip: int
    planes: tuple[str, ...]
    scales: tuple[str, ...]

    def renamed(self, new_names: Mapping[str, str]) -> "EncodedLeaf":
        """Return this leaf with new names of its planes and scales. ``new_names``: dict from each old name to the new name."""
        planes, scales = ([new_names[name] for name in names] for names in (self.planes, self.scales))
        return self._replace(planes=tuple(planes), scales=tuple(scales))


class PlaneOfLeaf(NamedTuple):
    """One plane of a leaf in the format ``form``.

    ``skip``: number of values in the leaf's first block before the leaf. ``shape``: shape of the whole plane. ``numbers``: the
    numbers of the plane that this rank holds.
    """

    form: Format
    plane: Plane
    skip: int
    shape: Shape
    numbers: torch.Tensor

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """Return ``(start, stop)``: the range of the plane's numbers that encode the values ``[first, last)`` of the leaf.

        The range is extended to whole steps of the format, such as blocks. So some numbers may also encode other values.
        """
        where = self.form.plane_slice(self.plane, self.skip + first, self.skip + last) if first < last else slice(0, 0)
        return where.start, where.stop


def planes_of_group(
    name: Callable[[str], str], node: Sharded, group: int, rank: int
) -> Iterator[tuple[Leaf, EncodedLeaf, list[PlaneOfLeaf], list[torch.Tensor]]]:
    """Yield ``(leaf, encoded leaf, planes, scales of the leaf)`` for each leaf of a group that is encoded in ``node``.

    ``name``: function from a leaf's path in the unit to the leaf's name in the checkpoint. ``rank``: the rank of ``node``.
    """
    [buffer] = node.select_groups([group]).buffers
    for leaf, part in encoded_leaf_parts(node.unit, group, buffer, node.place, rank):
        form, scales = node.unit.groups[group].dtypes.stored_format, dict[str, torch.Tensor]()
        if form.leaf_codec is not None and form.leaf_codec.for_inference is not None:
            form, part = form.leaf_codec.for_inference(part)
        if form.leaf_codec is not None:
            scales = form.leaf_codec.scales_by_suffix(leaf.shape, part.scales)
        skip, whole = leaf.offset % form.step, name(leaf.path)
        planes = [
            PlaneOfLeaf(form, plane, skip, plane_shape(form, plane, leaf.shape, skip), numbers)
            for plane, numbers in zip(form.planes, part.planes, strict=True)
        ]
        names = [whole + suffix for suffix, _ in zip(_PLANE_SUFFIXES, planes, strict=False)]
        made = EncodedLeaf(form.name, tuple(leaf.shape), skip, tuple(names), tuple(whole + suffix for suffix in scales))
        yield leaf, made, planes, [*scales.values()]


def encoded_leaf_from_json(fields: Any) -> EncodedLeaf:
    """Return the encoded leaf that a file describes. Raise ValueError or TypeError if ``fields`` describes none."""
    form, shape, skip, planes, scales = fields
    names = [*planes, *scales]
    if not planes or not all(isinstance(name, str) for name in (form, *names)) or len({*names}) < len(names):
        raise ValueError(f"{fields!r:.80} is not an encoded leaf")
    if any(type(x) is not int or not 0 <= x < 1 << 62 for x in (*shape, skip)):
        raise ValueError(f"{fields!r:.80} has a size that is not a count")
    return EncodedLeaf(form, tuple(shape), skip, tuple(planes), tuple(scales))


def plane_shape(form: Format, plane: Plane, shape: Shape, skip: int) -> Shape:
    """Return the shape that ``plane`` has in a file, for a leaf of ``shape``.

    The last dim counts the numbers that encode one row; all other dims are those of the leaf. With a scale for each 32 values,
    the scales of a leaf ``(128, 64)`` have the shape ``(128, 2)``. If a number encodes values of two rows, or values outside of
    the leaf, the plane has one dim. ``skip``: number of values in the first block that come before the leaf.
    """
    size, last = form.plane_slice(plane, 0, skip + prod(shape)).stop, shape[-1] if shape else 0
    found = (*shape[:-1], last * plane.per_block // form.block) if shape else ()
    is_cut = skip == 0 and last * plane.per_block % form.block == 0 and prod(found) == size
    return found if is_cut else (size,)


def specs_in_files(form: Format, leaf: EncodedLeaf) -> list[tuple[torch.dtype, Shape]]:
    """Return dtype and shape of each tensor of an encoded leaf: first of its planes, then of its scales."""
    planes = [(plane.dtype, plane_shape(form, plane, leaf.shape, leaf.skip)) for plane in form.planes]
    scales = {} if form.leaf_codec is None else form.leaf_codec.scale_specs(leaf.shape)
    return planes + [(dtype, tuple(shape)) for shape, dtype in scales.values()]


def format_of(where: str, name: str, leaf: EncodedLeaf) -> Format:
    """Return the registered format of the encoded leaf ``name``.

    Raises CheckpointError if the format is not registered or has another number of planes than the leaf, or if ``leaf.skip`` is
    not below :attr:`Format.step`.
    """
    try:
        form = format_named(leaf.format)
    except LayoutError as error:
        raise CheckpointError(f"{where}: {name!r:.200} has planes of a format that is not there: {error}") from error
    if len(form.planes) != len(leaf.planes) or (leaf.skip and leaf.skip >= form.step):
        facts = [("got", f"{len(leaf.planes)} planes, skip {leaf.skip}"), ("expected", f"{len(form.planes)} planes of {form}")]
        remedy = "Register the format with which the checkpoint was saved."
        raise CheckpointError(problem(where, f"{name!r:.200} does not have the planes of its format.", facts, remedy))
    return form


class EncodedElements:
    """The elements ``[first, last)`` of an encoded leaf: what a caller has to read to decode them, and the decoding.

    Attributes:
        needs: rows ``(name, begin, end, memory)``. Before :meth:`decode` the caller reads the elements ``[begin, end)`` of the
            tensor ``name`` into ``memory``.
    """

    needs: list[tuple[str, int, int, torch.Tensor]]

    def __init__(self, path: str, form: Format, leaf: EncodedLeaf, first: int, last: int) -> None:
        self._path, self._form, self._leaf, self._first, self._last = path, form, leaf, first, last
        self._planes, self._scales = list[torch.Tensor](), list[torch.Tensor]()
        self.needs = []
        for name, plane in zip(leaf.planes, form.planes, strict=True):
            where = form.plane_slice(plane, *self._around(first, last))
            self._planes.append(torch.empty(where.stop - where.start, dtype=plane.dtype, device="cpu"))
            self.needs.append((name, where.start, where.stop, self._planes[-1]))
        for name, (dtype, shape) in zip(leaf.scales, specs_in_files(form, leaf)[len(leaf.planes) :], strict=True):
            self._scales.append(torch.empty(prod(shape), dtype=dtype, device="cpu"))
            self.needs.append((name, 0, prod(shape), self._scales[-1]))

    def _around(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of values that contains the elements ``[first, last)``, from a multiple of ``Format.step`` on.

        Values are counted from the beginning of the leaf's first block on.
        """
        low = (self._leaf.skip + first) // self._form.step * self._form.step
        return low, max(low, self._leaf.skip + last if first < last else low)

    def decode(self) -> torch.Tensor:
        """Return the values of the elements, 1-D and floating-point. Before this call, read what :attr:`needs` lists."""
        form, leaf = self._form, self._leaf
        if self._first == self._last:
            return torch.empty(0, device="cpu")
        low, high = self._around(self._first, self._last)
        if form.leaf_codec is None:
            values = form.decode(self._planes)
        else:
            scales = [as_bytes(x) for x in self._scales]
            padded = [torch.nn.functional.pad(x, (0, align_nbytes(len(x)) - len(x))) for x in scales[:-1]] + scales[-1:]
            part = LeafPart(self._path, leaf.shape, torch.float32, low, high, tuple(self._planes), torch.cat(padded))
            values = form.decode_part(part)
        start = leaf.skip + self._first - low
        return values[start : start + self._last - self._first]
