"""Layout: the units of a tree, and their bytes on each rank. Static, hashable, integers only."""

import difflib
import hashlib
from dataclasses import dataclass
from functools import cached_property

import optree
import torch

from fsharp.errors import LayoutError, problem
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.serial import layout_from_json, layout_to_json
from fsharp.functional.layout.stages import residual_sizes
from fsharp.functional.layout.text import align_columns, nbytes_text, table_html, unit_table_rows
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.tree.paths import innermost_prefix
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked_on_failure


@api_boundary
@dataclass(frozen=True)
class Layout:
    """A description of which rank holds which elements of each leaf of a tree. :func:`~fsharp.plan` makes a layout.

    A layout is hashable, holds integers and no tensors, and prints as a table of its units.

    Attributes:
        mesh: the mesh.
        units: layouts of the units, in tree order.
        structure: tree structure of the user's tree above the units.
    """

    mesh: Mesh
    units: tuple[UnitLayout, ...]
    structure: optree.PyTreeSpec

    @cached_property
    def _by_name(self) -> dict[str, UnitLayout]:
        return {unit.name: unit for unit in self.units}

    def __getitem__(self, unit: str) -> UnitLayout:
        if unit not in self._by_name:
            near = difflib.get_close_matches(str(unit), self._by_name, n=4, cutoff=0.3) or list(self._by_name)[:4]
            raise LayoutError(problem("layout[unit]", f"no unit {unit!r}.", [("closest", ", ".join(map(repr, near)))]))
        return self._by_name[unit]

    def unit_around(self, path: str) -> UnitLayout | None:
        """Return the innermost unit at ``path`` or around it; None if there is none."""
        name = innermost_prefix(path, self._by_name)
        return None if name is None else self._by_name[name]

    @options_checked_on_failure
    def nbytes(self, kind: str, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one kind of state that one rank holds at rest.

        Args:
            kind: ``"params"``, ``"grads"``, ``"main"`` (main copies), ``"optim"`` or ``"residuals"``. ``"optim"`` is one value
                of optimizer state for each trained element, such as Adam's first moment. ``"residuals"`` are those of
                gradients, with ``Precision(feedback=True)``.
            dtype: count elements of this dtype in place of the layout's own.

        Raises:
            LayoutError: ``kind`` is unknown.
        """
        if kind not in _DTYPE_BY_KIND:
            raise LayoutError(f"nbytes(): unknown kind {kind!r}, expected one of {list(_DTYPE_BY_KIND)}.")
        total = 0
        for unit in self.units:
            place = {"params": unit.strategy.params, "grads": unit.strategy.grads}.get(kind, unit.strategy.optim)
            groups = {"params": unit.all_groups, "main": unit.groups_with_main_copy}.get(kind, unit.trainable_groups)
            for g in groups:
                if kind == "params" and dtype is None:
                    total += unit.stored_nbytes(g, place)
                    continue
                size = sum(residual_sizes(unit).get(g, {}).values()) if kind == "residuals" else unit.local_size(g, place)
                total += size * (dtype or getattr(unit.groups[g].dtypes, _DTYPE_BY_KIND[kind])).itemsize
        return total

    @property
    def nbytes_unsharded(self) -> int:
        """Bytes of all parameters that :attr:`num_params` counts, without padding, in the ``compute`` dtype."""
        return sum(u.num_variants * group.used * group.dtypes.compute.itemsize for u in self.units for group in u.groups)

    @property
    def num_params(self) -> int:
        """Number of elements of all leaves. Tied leaves count once, and a leaf that varies once for each of its variants.

        A leaf that varies along axes has a variant for each rank along these axes.
        """
        return sum(unit.num_variants * group.used for unit in self.units for group in unit.groups)

    @property
    def num_padding(self) -> int:
        """Number of elements of padding in all buffers. A buffer that varies counts once for each of its variants."""
        return sum(unit.num_variants * (group.size - group.used) for unit in self.units for group in unit.groups)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the layout's JSON; equal layouts have equal digests."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the layout as JSON; :meth:`from_json` is the inverse. LayoutError for containers that JSON cannot name."""
        return layout_to_json(self.mesh, self.units, self.structure)

    @staticmethod
    @api_boundary
    def from_json(text: str) -> "Layout":
        """Return the layout in a text of :meth:`to_json`; LayoutError if the text is not a layout."""
        return Layout(*layout_from_json(text))

    def _repr_html_(self) -> str:
        title = f"{self.num_params:,} parameters on {self.mesh}; at rest on a rank {nbytes_text(self.nbytes('params'))} of them"
        return table_html(title, unit_table_rows(self.units), right={1, 3, 4, 6})

    def __str__(self) -> str:
        lines = align_columns(unit_table_rows(self.units), lines_above=[1])
        waste = 100 * self.num_padding / max(1, self.num_params + self.num_padding)
        kinds = ("params", "grads", "main", "residuals") if self.nbytes("residuals") else ("params", "grads", "main")
        at_rest = ", ".join(f"{kind} {nbytes_text(self.nbytes(kind))}" for kind in kinds)
        lines.insert(0, f"Layout of {self.num_params:,} parameters on {self.mesh}")
        lines.append(f"padding {self.num_padding:,} elements ({waste:.3g} %)")
        optim, whole = nbytes_text(self.nbytes("optim")), nbytes_text(self.nbytes_unsharded)
        lines.append(f"at rest on each rank: {at_rest}, each optimizer buffer {optim}; unsharded params {whole}")
        return "\n".join(lines)


_DTYPE_BY_KIND = {"params": "compute", "grads": "accumulate", "main": "main", "optim": "main", "residuals": "accumulate"}
"""By kind of state, the attribute with its dtype in the :class:`~fsharp.functional.layout.precision.Dtypes` of a group."""
