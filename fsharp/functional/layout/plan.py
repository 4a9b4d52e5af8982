"""plan: make a layout from a tree of tensors, a mesh and a strategy. Reads shapes, dtypes and storages, never values."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError, TreeError, problem
from fsharp.functional.formats.format import Format, tensor_text
from fsharp.functional.formats.hadamard import needs_float32_main
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.packing import Atom, ElementAtom, LeafAtom, RowsAtom, pack
from fsharp.functional.layout.placement import P, Strategy
from fsharp.functional.layout.precision import Precision, Precisions, check_precisions, is_float8_or_smaller
from fsharp.functional.layout.unit_layout import Group, Leaf, UnitLayout
from fsharp.functional.tree.paths import REGISTER, Patterns, flatten_with_paths, join_path, select_paths, value_by_path
from fsharp.functional.tree.units import cut_into_units, unit_by_path
from fsharp.type_checks import options_checked, short_repr


@options_checked
def plan(
    params: Any,
    mesh: Mesh | Any,
    strategy: Strategy | P | Any,
    *,
    units: str | Sequence[str] | None = None,
    frozen: Patterns = (),
    atoms: Atom | Mapping[str, Atom] = ElementAtom(),
    labels: str | Mapping[str, str] | Callable[[str], str] = "default",
    precision: Precisions = Precision(),
) -> Layout:
    """Return the layout of a tree of tensors on a mesh: which rank holds which elements.

    Patterns match key paths such as ``layers.0.w``. A pattern that matches a subtree selects all leaves below the subtree. If
    several rules select a leaf, the last rule counts.

    >>> from fsharp import zero3
    >>> params = {"embed": torch.empty(10, 4), "layers": [{"w": torch.empty(4, 4)}, {"w": torch.empty(4, 4)}]}
    >>> layout = plan(params, Mesh({"dp": 3}), zero3("dp"), units="layers.*")
    >>> [unit.name for unit in layout.units], layout.num_params, layout.num_padding
    (['embed', 'layers.0', 'layers.1'], 72, 6)

    Args:
        params: any pytree of tensors. Only shapes, dtypes and storages are read, so tensors may be on the meta device. Arrays
            of JAX or numpy, and ``jax.ShapeDtypeStruct``, also serve as leaves, which are never tied.
        mesh: the ranks, as a :class:`Mesh` or a ``jax.sharding.Mesh``.
        strategy: a strategy, a partition spec, a dict of these by pattern, or a tree of these that is a prefix of ``params``.
            All leaves of a unit need the same strategy.
        units: patterns of subtrees; each match is one unit, gathered and released as one. The rest of the tree is cut into the
            largest subtrees that contain no match, and each of these is a unit. None makes the whole tree one unit.
        frozen: leaves without gradients and optimizer state: patterns, booleans by pattern, or a predicate on the path. Leaves
            whose dtype is not floating-point are frozen in any case.
        atoms: the atom of all leaves, or atoms by pattern. A leaf that a partition spec cuts has at least ``RowsAtom(1)``.
        labels: labels by which :func:`~fsharp.optim.partition` selects an optimizer: one label, labels by pattern, or a
            function from the path to a label.
        precision: dtypes of parameters, main copies and gradients: one :class:`Precision`, or precisions by pattern.

    Returns:
        The layout. Tied leaves (the same view of the same storage) are stored once.

    Raises:
        TreeError: a leaf is neither a strided tensor nor an array with a dtype of torch.
        PatternError: a pattern matches nothing, or patterns of units overlap.
        StrategyError: axes of a strategy or partition spec are not axes of the mesh.
        LayoutError: leaves of a unit have different rules, or a rule or precision does not fit.
        LayoutError: a complex leaf requires a gradient, and ``frozen`` does not name it.
        OptionError: an option has a wrong type.

    Cost: no tensor is read or allocated. Time grows with the number of leaves, and not with the number of ranks.
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    paths, given, _ = flatten_with_paths(params)
    leaves = [_leaf_as_tensor(path, leaf) for path, leaf in zip(paths, given)]
    ties = find_tie_owners(paths, leaves)
    unit_of = unit_by_path(paths, units)
    names = tuple(dict.fromkeys(unit_of[path] for path in paths))
    specs, strategies = _leaf_specs_and_unit_strategies(strategy, mesh, paths, leaves, unit_of)
    frozen_paths = select_paths("plan(frozen=...)", frozen, paths)
    no_cut: Atom = ElementAtom()
    atom_of: dict[str, Atom] = value_by_path("plan(atoms=...)", atoms, paths, default=no_cut)
    for path, atom in atom_of.items():
        if not isinstance(atom, ElementAtom | RowsAtom | LeafAtom):
            raise LayoutError(f"plan(): the atom of {path!r} is {atom!r}, expected ElementAtom(), RowsAtom(n) or LeafAtom().")
    atom_of |= {path: RowsAtom(1) for path, spec in specs.items() if spec.axes and atom_of[path] == ElementAtom()}
    label_by_path = value_by_path("plan(labels=...)", labels, paths, default="default")
    for path, label in label_by_path.items():
        if not isinstance(label, str):
            raise LayoutError(f"plan(): the label of {path!r} is {label!r}, expected a str.")
    precision_of = _precision_by_path(precision, paths)

    def group_key(path: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        trainable = tensor.is_floating_point() and path not in frozen_paths
        if tensor.is_complex() and tensor.requires_grad and path not in frozen_paths:
            raise LayoutError(
                f"plan(): {path!r} is {tensor.dtype} and requires a gradient, and complex leaves are not trained. Pass "
                "torch.view_as_real(leaf), and call torch.view_as_complex() in the function; or name the leaf in frozen=."
            )
        dtypes = precision_of[path].resolve(tensor.dtype)
        if unknown := [axis for axis, _ in dtypes.wires if axis not in mesh.names]:
            raise LayoutError(
                f"plan(): the precision of {path!r} has a wire along {unknown[0]!r}, expected one of {mesh.names}."
            )
        if not trainable:
            dtypes = replace(dtypes, format=None, update=None, feedback=False)
        if dtypes.format is not None and dtypes.main.itemsize < 4 and needs_float32_main(dtypes.format):
            raise LayoutError(
                f"plan(): {path!r} would be stored in {dtypes.format.name!r} with a main copy in {dtypes.main}, which does not "
                "hold all decoded values, so a load would change parameters. Pass Precision(main=torch.float32)."
            )
        if trainable and (is_float8_or_smaller(dtypes.compute) or is_float8_or_smaller(dtypes.main)):
            raise LayoutError(
                f"plan(): {path!r} is {tensor.dtype} and would be trained in it: without a scale small values and "
                "gradients become zero. Pass precision=Precision(compute=torch.bfloat16, main=torch.float32), or its path "
                "in frozen=."
            )
        return dtypes, trainable, label_by_path[path]

    rules = {path: (*group_key(path, tensor), atom_of[path]) for path, tensor in zip(paths, leaves)}
    _check_ties_agree(ties, rules, {path: strategies[unit_of[path]].full.varying_axes for path in paths}, specs)
    sections = cut_into_units(params, frozenset(names))
    built = []
    of_unit: dict[str, list[tuple[str, torch.Tensor]]] = {name: [] for name in names}
    for path, tensor in zip(paths, leaves):
        of_unit[unit_of[path]].append((path, tensor))
    for name, subtree in zip(sections.names, sections.subtrees, strict=True):
        built.append(_unit_layout(name, subtree, of_unit[name], mesh, strategies[name], rules, ties, unit_of))
    _check_update_gather_formats(built, precision_of, {path for path, rule in rules.items() if rule[1]})
    return Layout(mesh, tuple(built), sections.structure)


def _unit_layout(
    name: str,
    subtree: Any,
    members: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    strategy: Strategy,
    rules: Mapping[str, tuple[Any, ...]],
    ties: Mapping[str, str],
    unit_of: Mapping[str, str],
) -> UnitLayout:
    stored = [(path, tensor) for path, tensor in members if path not in ties]
    keys = list(dict.fromkeys(rules[path][:3] for path, _ in stored))
    num_parts = math.prod(mesh.axis_size(axis) for axis in strategy.optim.sharded_axes)
    groups, offsets = [], {}
    for dtypes, trainable, label in keys:
        mine = [(path, t) for path, t in stored if rules[path][:3] == (dtypes, trainable, label)]
        step = dtypes.stored_format.leaf_alignment  # leaves begin, and are cut, at multiples of this number of elements
        sizes = tuple(-(-t.numel() // step) * step for _, t in mine)
        atoms = [math.lcm(rules[path][3].size(tuple(t.shape)), step) for path, t in mine]
        packing = pack(sizes, tuple(map(min, atoms, sizes)), num_parts, dtypes.block)
        offsets.update({path: offset for (path, _), offset in zip(mine, packing.offsets)})
        groups.append(Group(dtypes, trainable, label, num_parts, packing.capacity, sum(t.numel() for _, t in mine)))
    leaves = []
    for path, tensor in members:
        owner = ties.get(path)
        group, offset = (-1, 0) if owner else (keys.index(rules[path][:3]), offsets[path])
        tied_to = (unit_of[owner], relative_path(owner, unit_of[owner])) if owner else None
        about = relative_path(path, name), tuple(tensor.shape), tensor.dtype, rules[path][3]
        leaves.append(Leaf(*about, group, offset, tied_to))
    return UnitLayout(name, mesh, strategy, tuple(leaves), tuple(groups), optree.tree_structure(subtree))


def _precision_by_path(precision: Precisions, paths: Sequence[str]) -> dict[str, Precision]:
    check_precisions("plan()", precision)
    found: dict[str, Precision] = value_by_path("plan(precision=...)", precision, paths, default=Precision())
    for path, each in found.items():
        if each != each.without_module_options:
            raise LayoutError(
                f"plan(): the precision of {path!r} is {each!r}, whose output or cast_inputs is for modules: "
                "shard_module(precision=...) casts what they take and return. In a function, write x.to(dtype) there."
            )
    by_name: dict[str, Format] = {}
    for each in {id(each): each for each in found.values()}.values():
        for form in each.formats:
            other = by_name.setdefault(form.name, form)
            if not (_is_copy(form.encode, other.encode) and _is_copy(form.decode, other.decode)):
                raise LayoutError(f"plan(): two formats with different functions have the name {form.name!r}. Rename one.")
    return found


def _is_copy(one: Any, two: Any) -> bool:
    """Return whether two functions have the same code and have captured equal values, or two captured values are equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    if one is two or not (hasattr(one, "__code__") and hasattr(two, "__code__")):
        return one is two or bool(one == two)
    values = [[*(cell.cell_contents for cell in fn.__closure__ or ()), *(fn.__defaults__ or ())] for fn in (one, two)]
    return one.__code__ == two.__code__ and len(values[0]) == len(values[1]) and all(map(_is_copy, *values))


def _check_update_gather_formats(
    units: Sequence[UnitLayout], precision_of: Mapping[str, Precision], trainable: Collection[str]
) -> None:
    for unit in units:
        for i, dtypes in enumerate([group.dtypes for group in unit.groups]):
            if dtypes.update is None:
                continue
            asked = f"{unit.path_in_tree(unit.leaves_of_group(i)[0])!r} has update={dtypes.update.name}"
            if not unit.update_gather_axes:
                facts = [("unit", unit.display_name), ("strategy", unit.strategy)]
                remedy = (
                    "Leave out update=, or choose a strategy that shards optimizer state along an axis along which "
                    "parameters are replicated, such as zero1 or zero2. Under zero3, stored= encodes what travels."
                )
                what = f"the precision of {asked}, and no updated parameters of this unit travel."
                raise LayoutError(problem("plan()", what, facts, remedy))
            if dtypes.format is not None:
                raise LayoutError(
                    f"plan(): the precision of {asked} and stored={dtypes.format.name}. Parameters that rest in a format "
                    "travel in that format: leave out one of the two."
                )
    asked_for = [(path, each, each.update) for path, each in precision_of.items() if each.update is not None]
    used = {each for path, each, _ in asked_for if path in trainable}
    for path, each, update in asked_for:
        if each not in used:
            raise LayoutError(
                f"plan(): the precision of {path!r} has update={update.name}, and no leaf of this precision is trained. "
                "Leave out update= where leaves are frozen or not floating-point."
            )


def relative_path(path: str, unit: str) -> str:
    """Return ``path``, of a leaf in the user's tree, without ``unit``, the path of the unit that contains the leaf."""
    return path[len(unit) :].removeprefix(".") if unit else path


def _is_strategy_or_spec(node: Any) -> bool:
    return isinstance(node, Strategy) or hasattr(node, "partitions")


def flatten_rule_tree(rules: Any) -> Any:
    """Return a tree of rules as a dict by key path. A single rule, and a dict of rules by pattern, are returned unchanged.

    A rule is a Strategy or a partition spec. Raises LayoutError if a leaf of the tree is neither.
    """
    paths, found, _ = optree.tree_flatten_with_path(rules, is_leaf=_is_strategy_or_spec)
    for rule in found or [rules]:
        if not _is_strategy_or_spec(rule):
            raise LayoutError(
                f"plan(): strategy has {short_repr(rule)}, expected a Strategy such as zero3('dp'), or a partition spec such "
                "as P('dp'). Pass one of these, a tree of these, or a dict by path pattern: {'**': P('dp'), 'layers.*.b': P()}."
            )
    is_flat = isinstance(rules, Mapping) and all(isinstance(k, str) and _is_strategy_or_spec(x) for k, x in rules.items())
    if is_flat or _is_strategy_or_spec(rules):
        return rules
    return dict(zip(map(join_path, paths), found))


def _leaf_specs_and_unit_strategies(
    rules: Any, mesh: Mesh, paths: Sequence[str], leaves: Sequence[torch.Tensor], unit_of: Mapping[str, str]
) -> tuple[dict[str, P], dict[str, Strategy]]:
    """Return the partition specs by leaf, for leaves that have one, and the strategy of each unit."""
    rules = flatten_rule_tree(rules)
    rule_of: dict[str, Any] = value_by_path("plan(strategy=...)", rules, paths)
    specs: dict[str, P] = {}
    chosen_by: dict[str, tuple[str, Strategy]] = {}
    for path, leaf in zip(paths, leaves):
        rule = rule_of[path]
        if not isinstance(rule, Strategy):
            specs[path] = P(*rule)  # converts a PartitionSpec of JAX
            rule = specs[path].strategy(mesh, path=path, shape=tuple(leaf.shape))
        first, strategy = chosen_by.setdefault(unit_of[path], (path, rule))
        if rule != strategy:
            unit = repr(unit_of[path]) if unit_of[path] else "(root)"
            facts = [(f"params[{p!r}]", specs.get(p, rule_of[p])) for p in (first, path)]
            remedy = "Give them one strategy, or put them into units of their own by units=."
            what = f"leaves of unit {unit} have different strategies, and a unit is gathered as one."
            raise LayoutError(problem("plan()", what, facts, remedy))
    result = {unit: strategy for unit, (_, strategy) in chosen_by.items()}
    for strategy in dict.fromkeys(result.values()):
        strategy.check_mesh(mesh)
    return specs, result


def _leaf_as_tensor(path: str, leaf: Any) -> torch.Tensor:
    """Return a tensor with the shape and dtype of a leaf: the leaf itself, or a meta tensor for another library's array.

    Raises TreeError for a leaf of another kind, or a tensor that is not strided.
    """
    if not isinstance(leaf, torch.Tensor):
        dtype = getattr(torch, str(getattr(leaf, "dtype", None)), None)
        if not isinstance(dtype, torch.dtype) or not hasattr(leaf, "shape"):
            facts = [("got", f"{type(leaf).__name__} {leaf!r:.60}")]
            remedy = "Keep configuration out of the tree: close over it, or pass it to the function as an argument."
            if not path:
                remedy = "Pass a tree of tensors, such as {'w': torch.ones(2)}, or the parameters of fs.make_functional()."
            if isinstance(leaf, torch.nn.Module):
                remedy = "Pass the parameters that fs.make_functional(module) returns; or call fs.shard_module(module)."
            elif (isinstance(leaf, Collection) and not isinstance(leaf, str | bytes)) or is_dataclass(leaf):
                remedy = f"This class is no pytree. Pass a dict, list, tuple or namedtuple, or {REGISTER}"
            name = f"params[{path!r}]" if path else "params"
            raise TreeError(problem("plan()", f"{name} is not a tensor.", facts, remedy))
        return torch.empty(tuple(leaf.shape), dtype=dtype, device="meta")
    if leaf.layout is not torch.strided or leaf.is_nested:
        nested = "a nested tensor of " * leaf.is_nested
        raise TreeError(f"plan(): params[{path!r}] has {nested}layout {leaf.layout}, expected a plain tensor of torch.strided.")
    return leaf


def find_tie_owners(paths: Sequence[str], leaves: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return a dict from the path of each tied leaf to the path of the first leaf with the same view of the same storage.

    Raises LayoutError if two leaves begin at one element of a storage, but differ in shape, strides or dtype.
    """
    ties: dict[str, str] = {}
    owners: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    for path, leaf in zip(paths, leaves):
        place = (leaf.untyped_storage()._cdata, int(leaf.storage_offset()) * leaf.dtype.itemsize)
        if leaf.numel() == 0:  # views without elements share none, so only one tensor at two paths is tied
            place = (id(leaf), -1)
        owner, other = owners.setdefault(place, (path, leaf))
        if owner == path:
            continue
        if _shape_strides_dtype(leaf) != _shape_strides_dtype(other):
            facts = [(f"{p!r}", _view_text(t)) for p, t in ((owner, other), (path, leaf))]
            remedy = "Tie leaves by using one tensor at both paths and taking the view in the function, or clone one."
            what = f"params[{owner!r}] and params[{path!r}] share storage but are different views of it."
            raise LayoutError(problem("plan()", what, facts, remedy))
        ties[path] = owner
    return ties


def _view_text(tensor: torch.Tensor) -> str:
    marks = ", conjugated" * tensor.is_conj() + ", negated" * tensor.is_neg()
    return f"{tensor_text(tensor)}, strides {tensor.stride()}{marks}"


def _shape_strides_dtype(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _check_ties_agree(
    ties: Mapping[str, str],
    rules: Mapping[str, tuple[Any, ...]],
    varying: Mapping[str, tuple[str, ...]],
    specs: Mapping[str, P],
) -> None:
    for path, owner in ties.items():
        both = (
            ("frozen", not rules[owner][1], not rules[path][1]),
            ("precision", rules[owner][0], rules[path][0]),
            ("label", rules[owner][2], rules[path][2]),
            ("the partition spec", specs.get(owner), specs.get(path)),
            ("atom", rules[owner][3], rules[path][3]),
            ("the axes along which they vary", varying[owner], varying[path]),
        )
        for what, a, b in both:
            if a != b:
                facts = [(repr(owner), a), (repr(path), b)]
                remedy = "Tied leaves are one tensor: give both paths the same rule."
                raise LayoutError(problem("plan()", f"tied leaves disagree on {what}.", facts, remedy))
