"""Mesh: named axis sizes and the arithmetic between ranks and coordinates. Integers only, no process group."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsharp.errors import MeshError, problem
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import signature_checked


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Ranks arranged in a grid with named axes; the last axis varies fastest.

    >>> mesh = Mesh({"outer": 2, "inner": 4})
    >>> mesh.size, mesh.coords(6)
    (8, (1, 2))
    >>> mesh.group("inner", 6)
    (4, 5, 6, 7)

    Args:
        axes: axis sizes by axis name, outermost axis first; or a ``jax.sharding.Mesh``, whose devices are the ranks in order.
            ``Mesh({})`` has one rank.

    Attributes:
        axes: pairs of a name and a size, outermost axis first.
        names: names of the axes, outermost first.
        shape: sizes of the axes, outermost first.
        size: number of ranks.

    Raises:
        MeshError: ``axes`` has no sizes by name, a name is empty or repeats, or a size is not a positive integer.
    """

    axes: tuple[tuple[str, int], ...]
    names: tuple[str, ...] = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)
    size: int = field(compare=False)

    @signature_checked
    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
        sizes: Any = getattr(axes, "shape", None) if isinstance(getattr(axes, "shape", None), Mapping) else axes
        try:
            pairs = tuple((name, size) for name, size in (sizes.items() if isinstance(sizes, Mapping) else sizes))
        except (TypeError, ValueError) as error:
            raise MeshError(f"Mesh(): got {axes!r:.80}, expected sizes by axis name, such as {{'dp': 8}}.") from error
        names = [name for name, _ in pairs]
        for name, size in pairs:
            if not isinstance(name, str) or not name:
                raise MeshError(f"Mesh(): axis names are non-empty strings, got {name!r}.")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"Mesh(): axis {name!r} has size {size!r}, expected an integer of at least 1.")
        if len(set(names)) != len(names):
            raise MeshError(f"Mesh(): axis names repeat: {names}.")
        shape = tuple(size for _, size in pairs)
        for name, value in (("axes", pairs), ("names", tuple(names)), ("shape", shape), ("size", math.prod(shape))):
            object.__setattr__(self, name, value)

    @api_boundary
    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; MeshError if there is no such axis."""
        return self.shape[self.index(axis)]

    @api_boundary
    def index(self, axis: str) -> int:
        """Return the index of ``axis``, from 0 for the outermost axis; MeshError if there is no such axis."""
        if axis not in self.names:
            raise MeshError(f"unknown mesh axis {axis!r}: {self} has {list(self.names)}.")
        return self.names.index(axis)

    @api_boundary
    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of ``rank``, one for each axis; MeshError if there is no such rank."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is outside {self}, whose ranks are 0 to {self.size - 1}.")
        result = []
        for size in reversed(self.shape):
            rank, coord = divmod(rank, size)
            result.append(coord)
        return tuple(reversed(result))

    def coord(self, axis: str, rank: int) -> int:
        """Return the coordinate of ``rank`` along ``axis``."""
        return self.coords(rank)[self.index(axis)]

    @api_boundary
    def rank(self, coords: Iterable[int]) -> int:
        """Return the rank at ``coords``, the inverse of :meth:`coords`; MeshError for coordinates outside the mesh."""
        given = tuple(coords)
        if len(given) != len(self.axes) or any(not 0 <= c < n for c, n in zip(given, self.shape, strict=False)):
            raise MeshError(f"coordinates {given} are outside {self}.")
        result = 0
        for coord, size in zip(given, self.shape, strict=True):
            result = result * size + coord
        return result

    def index_along(self, axes: Iterable[str], rank: int) -> int:
        """Return the index of ``rank`` in the grid of ``axes`` alone, in the order given; the last axis varies fastest."""
        index = 0
        for axis in axes:
            index = index * self.axis_size(axis) + self.coord(axis, rank)
        return index

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of ``rank`` along ``axis``, in order of coordinate; ``rank`` is one of them."""
        coords, i = list(self.coords(rank)), self.index(axis)
        return tuple(self.rank([*coords[:i], c, *coords[i + 1 :]]) for c in range(self.shape[i]))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``; each rank is in one of these groups."""
        return tuple(self.group(axis, rank) for rank in range(self.size) if self.coord(axis, rank) == 0)

    @api_boundary
    def check_world_size(self, world_size: int) -> None:
        """Raise a MeshError if the number of processes differs from the number of ranks in this mesh."""
        if world_size != self.size:
            facts = [("axes", " x ".join(f"{name}={size}" for name, size in self.axes) or "none")]
            remedy = (
                f"Start {self.size} processes, by torchrun --nproc-per-node {self.size} or fs.launch(fn, {self.size}), or "
                f"choose axis sizes whose product is {world_size}."
            )
            formed = "1 process cannot form" if world_size == 1 else f"{world_size} processes cannot form"
            what = f"{formed} {self}, which has {self.size} ranks."
            raise MeshError(problem("Mesh", what, facts, remedy))

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    __repr__ = __str__
