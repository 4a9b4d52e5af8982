"""Loading: each rank reads what it holds, whoever wrote it."""

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch

from fsharp.checkpoint.catalog import Checkpoint, instead_of, newest_but, open_checkpoint, problems
from fsharp.checkpoint.entries import (
    Contents,
    Entry,
    PerRank,
    Value,
    contents_of,
    give_state,
    is_node,
    is_object,
    leaves_of,
    renamed,
    template_of,
)
from fsharp.checkpoint.falling_back import noted, set_aside, unless_damaged
from fsharp.checkpoint.huggingface import is_folder
from fsharp.checkpoint.manifest import NAME, Manifest
from fsharp.checkpoint.reading import BUFFER_NBYTES, Need, read_needs
from fsharp.checkpoint.storage import full_path, storage_of
from fsharp.errors import CheckpointError, TreeError, problem
from fsharp.functional.comm.agree import exchange, together
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_names import name_trees
from fsharp.functional.layout.paths import ancestors, as_patterns, chosen
from fsharp.functional.layout.precision import dtype_name
from fsharp.functional.layout.sharded import donate_nodes, is_sharded, units_of
from fsharp.functional.lent import check_not_lent
from fsharp.functional.state import MadeBy
from fsharp.stateful.modules.parameter import Part

_SHOWN = 12


def load(
    where: str | os.PathLike[str],
    like: Any,
    *,
    comm: Comm,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    ignore: str | Sequence[str] = (),
    cast: bool = False,
    donate: bool = False,
    buffer_nbytes: int = BUFFER_NBYTES,
) -> Any:
    """A tree like ``like`` with the values of a checkpoint, whatever strategy, mesh and number of ranks that was saved under.

    >>> import tempfile, fsharp as fs
    >>> layout = fs.plan({"w": torch.arange(6.)}, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.shard({"w": torch.arange(6.)}, layout, fs.SingleComm())
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = fs.checkpoint.save(root, {"params": params, "seen": 512}, step=7, comm=fs.SingleComm())
    ...     zeros = fs.map_units(lambda node: node.replace([torch.zeros_like(b) for b in node.buffers]), params)
    ...     found = fs.checkpoint.load(root, {"params": zeros, "seen": 0}, comm=fs.SingleComm())
    >>> fs.full(found["params"], comm=fs.SingleComm())["w"], found["seen"]
    (tensor([0., 1., 2., 3., 4., 5.]), 512)

    Args:
        where: a checkpoint or its path, or the root of several, of which the newest is taken whose bytes are right. Damaged
            ones are set aside: renamed to end in ``.damaged``, with a warning that names each. A folder of safetensors that
            Hugging Face's libraries have written will do as well.
        like: names, shapes, dtypes and where each rank's parts rest; its values do not matter, and tensors may be on the meta
            device. Objects with ``load_state_dict()`` are given what was loaded, and returned; what their ``state_dict()`` has
            before is what is loaded, so a plain optimizer of torch has to have made a step (a ShardedOptimizer need not).
        comm: the ranks.
        subtree: load this part of the checkpoint alone: ``subtree="params"`` with parameters for ``like``.
        rename: the name in the checkpoint, below ``subtree``, of a name of ``like``: ``lambda name: f"model.{name}"``.
        ignore: patterns of names in the checkpoint that are left alone as if they were not there; each has to match one.
        cast: convert values whose dtype differs, but not fractions to integers or complex numbers to real ones; else that is
            an error.
        donate: read into the tensors of ``like``, which are refused afterwards. If loading fails their values are lost. Modules
            and their optimizers copy what was loaded all the same.
        buffer_nbytes: memory to read into, besides what is loaded.

    Returns:
        The tree. Numbers and strings are those that were saved; padding is zero.

    Raises:
        CheckpointError: there is none, or it is incomplete or damaged, as are all under a root; names the file and the
            tensors. Nothing is renamed then. On all ranks.
        TreeError: names, shapes or dtypes that differ, in either direction; on all ranks. A tied leaf needs a value under one
            of its names.
        PatternError: a pattern of ``ignore`` that matches nothing.
        AgreementError: ranks with different arguments, or of which one has failed.

    Cost: a rank reads what it holds, rounded to blocks of 4 KiB, and headers, and compares it with digests; two collectives of
    40 bytes for each axis, and two for the path. Memory: what is loaded and ``buffer_nbytes``.
    """
    return load_newest(
        where,
        like,
        comm=comm,
        subtree=subtree,
        rename=rename,
        ignore=ignore,
        cast=cast,
        donate=donate,
        buffer_nbytes=buffer_nbytes,
    )[1]


def load_newest(where: str | os.PathLike[str], like: Any, *, comm: Comm, **options: Any) -> tuple[Checkpoint, Any]:
    """Load as :func:`load` does; return the checkpoint that the values are from as well."""
    given, damaged = full_path(where), dict[str, str]()
    while True:
        (path, is_asked_for), damage = _chosen(given, comm, damaged), list[str]()
        load_it = partial(load_one, path, like, damage, comm=comm, where=given, **options)
        if is_asked_for:
            return load_it()
        loaded, texts = unless_damaged(load_it, damage, comm)
        if loaded is not None:
            set_aside(damaged, path, comm)
            return loaded
        damaged[path] = texts[0]


def load_one(
    path: str, like: Any, damage: list[str], *, comm: Comm, buffer_nbytes: int = BUFFER_NBYTES, **options: Any
) -> tuple[Checkpoint, Any]:
    """Load the checkpoint at ``path``, as :func:`load_by` does; append to ``damage`` what this rank finds damaged in it."""
    seen = list[Checkpoint]()

    def opened() -> Checkpoint:
        with noted(damage):
            seen.append(open_checkpoint(path))
        return seen[0]

    def read(found: Checkpoint, needs: list[Need]) -> None:
        try:
            with noted(damage):
                read_needs(found.path, found.manifest, needs, buffer_nbytes=buffer_nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{instead_of(found.path)}") from error

    tree = load_by(read, opened, like, comm=comm, **options)
    return seen[0], tree


def load_by(
    read: Callable[[Checkpoint, list[Need]], None],
    opened: Callable[[], Checkpoint],
    like: Any,
    *,
    comm: Comm,
    where: str,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    ignore: str | Sequence[str] = (),
    cast: bool = False,
    donate: bool = False,
) -> Any:
    """See :func:`load`: wherever the bytes come from.

    Args:
        read: fills what this rank needs. All ranks call it at the same time, unless one has failed before.
        opened: the checkpoint, of which the manifest is looked at alone.
        like: as in :func:`load`, and so are the others.
        comm: the ranks.
        where: what was asked for; the same on all ranks.
        subtree: the part that is loaded.
        rename: the name in the checkpoint of a name of ``like``.
        ignore: patterns of names in the checkpoint that are left alone.
        cast: whether values are converted.
        donate: whether tensors of ``like`` are read into.
    """
    prefix = f"{subtree}." if subtree else ""

    def stored(name: str) -> str:
        below = renamed("load()", name, rename)
        return prefix + below if below else subtree  # a subtree may be a leaf

    def check() -> tuple[Checkpoint, Any, Contents, dict[str, str]]:
        found = opened()
        manifest = _without(found.manifest, as_patterns(ignore))
        there = {prefix for name in (*manifest.tensors, *manifest.values) for prefix in ancestors(name)}
        template = template_of(like, lambda name: stored(name) in there)
        wanted = contents_of("load()", template, comm)
        if donate:
            check_not_lent("load()", units_of(template))
        sources = _sources(manifest, wanted, stored)
        _check_same(found.path, manifest, wanted, sources, stored, prefix, cast=cast)
        tree = _prepared(template, manifest, stored, comm.device, donate=donate)
        return found, tree, contents_of("load()", tree, comm), sources

    def fields(made: tuple[Checkpoint, Any, Contents, dict[str, str]]) -> dict[str, str]:
        found, _, into, sources = made
        names = "\n".join(f"{name} from {source}" for name, source in sources.items())
        how = {"where": where, "cast": repr(cast), "donate": repr(donate), "subtree": repr(subtree), "names": names}
        return {"save": found.manifest.save_id, **how, **into.fields()}

    found, tree, into, sources = together("load()", comm, check, fields)

    def fill() -> None:
        for node in units_of(tree) if donate else ():
            for buffer in node.buffers:
                buffer.zero_()  # nothing is read into padding
        _read(found, into, sources, comm.rank, read)

    together("load()", comm, fill)
    if donate:
        donate_nodes(like)
    name_trees(tree, comm)
    if not any(is_object(leaf) for leaf in optree.tree_leaves(like, is_leaf=is_node)):
        return tree
    return together("load()", comm, lambda: optree.tree_map(_given_back, like, tree, is_leaf=is_node))


def _chosen(path: str, comm: Comm, damaged: Mapping[str, str]) -> tuple[str, bool]:
    """Return the checkpoint to load, ``path`` or the newest below it that is not damaged, and whether that is ``path`` itself.

    Rank 0 looks for all, whatever the others were given.

    Raises:
        CheckpointError: all checkpoints below ``path`` are damaged. On all ranks.
    """
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            names = storage_of(path).names(path)
            is_one = NAME in names or is_folder(names)
            newest = None if is_one else newest_but(path, damaged)
            if newest is None and not is_one and (unreadable := [*damaged.values(), *problems(path)]):
                raise CheckpointError(f"{path}: no checkpoint can be read.\n" + "\n".join(unreadable))
            answer = {"path": path if newest is None else newest.path, "is_asked_for": newest is None}
        except (CheckpointError, OSError) as error:
            answer = {"error": str(error)}
    said = json.loads(exchange(json.dumps(answer), comm)[0])
    if "error" in said:
        raise CheckpointError(f"load(): {said['error']}")
    return str(said["path"]), bool(said["is_asked_for"])


def _stored(manifest: Manifest, name: str) -> str:
    """The name under which a tensor is stored: another one's, if it was tied to that."""
    return manifest.aliases.get(name, name)


def _without(manifest: Manifest, ignore: tuple[str, ...]) -> Manifest:
    """A manifest that has nothing under the names that patterns select."""
    left = chosen("load(ignore=)", ignore, [*manifest.tensors, *manifest.values, *manifest.aliases])
    kept: dict[str, Any] = {
        kind: {name: each for name, each in getattr(manifest, kind).items() if name not in left}
        for kind in ("tensors", "values", "aliases")
    }
    return replace(manifest, **kept)


def _sources(manifest: Manifest, wanted: Contents, stored: Callable[[str], str]) -> dict[str, str]:
    """Of each tensor of a tree the name under which it is stored; of tied leaves, which have several, one that is there."""
    names = {name: [name] for name in wanted.entries}
    for alias, owner in wanted.aliases.items():
        names[owner].append(alias)
    choices = {owner: [_stored(manifest, stored(name)) for name in each] for owner, each in names.items()}
    return {owner: next((name for name in each if name in manifest.tensors), each[0]) for owner, each in choices.items()}


def _check_same(
    path: str,
    manifest: Manifest,
    wanted: Contents,
    sources: Mapping[str, str],
    stored: Callable[[str], str],
    prefix: str,
    *,
    cast: bool,
) -> None:
    """Refuse what differs between a tree and a checkpoint, all of it at once."""
    rows = []
    for name, entry in wanted.entries.items():
        record = manifest.tensors.get(sources[name])
        if record is None:
            kind = "a number or text in the checkpoint" if sources[name] in manifest.values else "not in the checkpoint"
            rows.append((name, f"{kind}; expected {_described(entry.dtype, entry.shape)}"))
            continue
        is_right = record.dtype == entry.dtype or (cast and torch.can_cast(record.dtype, entry.dtype))
        if record.shape != entry.shape or not is_right:
            stored_as = _described(record.dtype, record.shape)
            rows.append((name, f"{stored_as} in the checkpoint; expected {_described(entry.dtype, entry.shape)}"))
    for name, value in wanted.values.items():
        there = manifest.values.get(stored(name))
        if _kind(there) is not _kind(value):
            kind = "not in the checkpoint" if there is None else f"{there!r:.80} in the checkpoint"
            rows.append((name, f"{kind}; expected a value like {value!r:.80}"))
    for name, owner in wanted.aliases.items():
        source = _stored(manifest, stored(name))
        if source in manifest.tensors and source != sources[owner]:
            rows.append((name, f"has values of its own in the checkpoint; expected it to be tied to {owner!r:.200}"))
    expected = {stored(name) for name in (*wanted.entries, *wanted.values, *wanted.aliases)}
    for name in (*manifest.tensors, *manifest.values, *manifest.aliases):
        if name.startswith(prefix) and name not in expected:
            rows.append((name[len(prefix) :], "in the checkpoint alone"))
    if rows:
        shown = _grouped(rows)
        more = [("...", f"and {len(shown) - _SHOWN} more lines")] if len(shown) > _SHOWN else []
        remedy = (
            "Build the tree as it was when it was saved; subtree= loads a part of it, rename= and ignore= are for other names, "
            "cast=True converts dtypes."
        )
        what = f"{path} is not of this tree: {len(rows)} differences."
        raise TreeError(problem("load()", what, [*shown[:_SHOWN], *more], remedy))


def _kind(value: Value) -> type | None:
    """Numbers stand for each other: a learning rate of 1 is 0.9 after a step."""
    if isinstance(value, bool | str):
        return bool if isinstance(value, bool) else str
    return None if value is None else float


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"


def _grouped(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names that differ in numbers alone, and of which the same is said, in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        alike.setdefault((pattern, text), []).append(name)
    return [
        (f"{names[0]!r:.200}", text) if len(names) == 1 else (f"{pattern!r:.200}", f"{text} ({len(names)} of them)")
        for (pattern, text), names in alike.items()
    ]


def _prepared(template: Any, manifest: Manifest, stored: Callable[[str], str], device: torch.device, *, donate: bool) -> Any:
    """The tree to be returned: memory for tensors, and the values that were saved."""
    taken = dict[int, list[tuple[int, int]]]()

    def is_free(x: torch.Tensor) -> bool:
        """Whether nothing else is read into its memory: averages may begin as the parameters themselves."""
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        before = taken.setdefault(x.untyped_storage().data_ptr(), [])
        i = bisect_left(before, (begin, begin))
        if begin == end or (i and before[i - 1][1] > begin) or (i < len(before) and before[i][0] < end):
            return begin == end
        before.insert(i, (begin, end))
        return True

    def fresh(x: torch.Tensor) -> torch.Tensor:
        if donate and not x.is_meta and x.is_contiguous() and not x.is_conj() and not x.is_neg() and is_free(x):
            return x.detach()
        return torch.zeros(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)

    made: list[Any] = []
    for segments, _, leaf in leaves_of(template):
        value = manifest.values.get(stored(".".join(segments)))
        if is_sharded(leaf):
            made.append(leaf.replace([fresh(buffer) for buffer in leaf.buffers]))
        elif isinstance(leaf, PerRank):
            made.append(PerRank(optree.tree_map(fresh, leaf.value)))
        elif isinstance(leaf, Part):
            made.append(leaf)
        elif isinstance(leaf, torch.Tensor):
            made.append(fresh(leaf))
        else:
            made.append(MadeBy(str(value)) if isinstance(leaf, MadeBy) else value)
    return optree.tree_unflatten(optree.tree_structure(template, is_leaf=is_node), made)


def _read(
    found: Checkpoint,
    into: Contents,
    sources: Mapping[str, str],
    rank: int,
    read: Callable[[Checkpoint, list[Need]], None],
) -> None:
    """Fill the tensors of a tree.

    Raises:
        CheckpointError: bytes that are damaged; or leaves of one unit that were saved with different numbers where the unit
            has one for all.
    """
    needs, numbers = list[Need](), list[tuple[Entry, torch.Tensor]]()
    for name, entry in into.entries.items():
        piece, target = entry.piece(rank), entry.local
        if entry.is_of_group:
            target = torch.empty_like(target)
            numbers.append((entry, target))
        needs.append(Need(sources[name], piece.first, piece.last, target))
    read(found, needs)
    seen: dict[int, tuple[Entry, torch.Tensor]] = {}
    for entry, value in numbers:
        first, before = seen.setdefault(entry.local.data_ptr(), (entry, value))
        if not torch.equal(before, value):
            raise CheckpointError(
                f"{found.path}: {first.name!r} was saved with {before.item()}, {entry.name!r} with {value.item()}, and the "
                "unit that has both keeps one number for them. Plan them as units of their own."
            )
        entry.local.copy_(value)


def _given_back(leaf: Any, loaded: Any) -> Any:
    """An object, which takes what was loaded; else that."""
    if not is_object(leaf):
        return loaded
    give_state(leaf, loaded)
    return leaf
