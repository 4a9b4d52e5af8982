"""Loading: each rank reads its elements, whichever rank wrote them. If a rank finds damage, all load an earlier checkpoint."""

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import optree
import torch

from fsharp.checkpoint.catalog import (
    Checkpoint,
    complete_sibling_hint,
    is_foreign_checkpoint,
    newest_except,
    open_checkpoint,
    open_if_complete,
    opening_errors,
)
from fsharp.checkpoint.entries import (
    PerRank,
    TensorEntry,
    TreeContents,
    apply_rename,
    contents_of,
    has_state_dict,
    is_node_saved_as_leaf,
    leaves_with_both_paths,
    load_if_object,
    tree_to_load_into,
)
from fsharp.checkpoint.formats.planes import EncodedElements, format_of
from fsharp.checkpoint.manifest import MANIFEST_NAME, Manifest
from fsharp.checkpoint.matching import (
    PARAMS_FROM_MAIN,
    SourceNames,
    check_matches,
    manifest_of_values,
    manifest_without_ignored,
    rename_argument_hint,
    shorten_error_rows,
    source_names,
)
from fsharp.checkpoint.reading import BUFFER_NBYTES, NeededElements, cast_without_overflow
from fsharp.checkpoint.storage import absolute_path, os_error_behind, storage_of
from fsharp.errors import AgreementError, CheckpointError, CommError, log as _log, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.tree_labels import label_new_tree
from fsharp.functional.encoding import encode_block_format_groups, encode_leaf_format_groups
from fsharp.functional.layout.lent_memory import check_not_lent_to_jax
from fsharp.functional.layout.sharded import decode_tree, is_sharded, mark_donated, units_of
from fsharp.functional.state import MadeBy, TrainState
from fsharp.functional.tree.paths import as_patterns, self_and_ancestors
from fsharp.stateful.modules.parameter import ShardedTensor
from fsharp.type_checks import options_checked

T = TypeVar("T")


@options_checked
def load(
    where: str | os.PathLike[str],
    like: Any,
    *,
    comm: Comm,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    ignore: str | Sequence[str] = (),
    cast: bool = False,
    strict: bool = True,
    donate: bool = False,
    buffer_nbytes: int = BUFFER_NBYTES,
) -> Any:
    """Load a checkpoint into a tree like ``like``, under any strategy, mesh and number of ranks, and return the tree.

    >>> import tempfile, fsharp as fs
    >>> layout = fs.plan({"w": torch.arange(6.)}, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    >>> params = fs.shard({"w": torch.arange(6.)}, layout, fs.SingleComm())
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = fs.checkpoint.save(root, {"params": params, "seen": 512}, step=7, comm=fs.SingleComm())
    ...     zeros = fs.layouts.map_units(lambda node: node.replace([torch.zeros_like(b) for b in node.buffers]), params)
    ...     found = fs.checkpoint.load(root, {"params": zeros, "seen": 0}, comm=fs.SingleComm())
    >>> fs.full_tree(found["params"], comm=fs.SingleComm())["w"], found["seen"]
    (tensor([0., 1., 2., 3., 4., 5.]), 512)

    Args:
        where: a checkpoint, or its path; the root of several checkpoints, to load the newest undamaged one; or a file or folder
            of another library.

            - Under a root, incomplete checkpoints are skipped, with a warning in the log. If the tensors of a checkpoint turn
              out to be damaged, the next older one is loaded. The damaged checkpoint is then renamed to end in ``.damaged``,
              with a warning. If a rank cannot read a checkpoint, for lack of a permission or a mount, an error names this rank.
            - Of another library: a folder of Hugging Face (safetensors, else ``pytorch_model.bin``, with or without an index),
              or a file of safetensors or ``torch.save``. The file of ``torch.save`` has tensors, numbers and texts in dicts,
              lists and tuples. Keys are joined by dots: for ``{"model": model.state_dict()}`` pass ``subtree="model"``.
              In a root such a file is loaded only by its own path.
            - With planes of ``save(planes=True)``: values are decoded in float32, and cast to the dtype in ``like``.
        like: a tree with the names, shapes, dtypes and places to load. The values do not matter; tensors may be on the meta
            device. An object with ``load_state_dict()`` loads the names of its ``state_dict()``, and is returned. So a plain
            torch optimizer has to make a step before this call; a ShardedOptimizer need not. A number is returned as it was
            saved: where ``like`` has an int, such as a learning rate of 1, the checkpoint may have a float, and the reverse.
        comm: the ranks.
        subtree: load this part of the checkpoint alone: ``subtree="params"`` with parameters for ``like``.
        rename: function from a name in ``like`` to the name in the checkpoint, below ``subtree``:
            ``lambda name: f"model.{name}"``.
        ignore: patterns of names in the checkpoint, below ``subtree``, to treat as missing. Each pattern has to match a name.
        cast: convert values whose dtype differs; if False, another dtype is an error. Six casts are always errors. They are
            fractions to integers, complex numbers to real ones, integers to an integer dtype with a smaller range, numbers to
            bool, anything to float8 or float4, and finite values that would be infinite.
        strict: if False, leaves that the checkpoint lacks keep the values in ``like``, and names that only the checkpoint has
            are skipped. A warning lists these leaves and names. Different shapes and dtypes are still errors, and so is a
            checkpoint without any leaf of ``like``.
        donate: read into the tensors of ``like``; ``like`` cannot be used afterwards, and its values are lost if loading fails.
            So with ``strict=False`` a damaged checkpoint is an error, and no older checkpoint is loaded in its place.
            Modules and their optimizers copy their values in any case.
        buffer_nbytes: memory to read into, beside the loaded values.

    Returns:
        The tree with the loaded values. Padding is zero.

    Raises:
        CheckpointError: there is no undamaged checkpoint, or leaves that share a value have several values there.
        TreeError: names, shapes or dtypes differ, or ``cast`` would make a finite value infinite.
        PatternError: a pattern of ``ignore`` matches no name.
        AgreementError: ranks have different arguments, or another rank has failed.

    Cost: a rank reads headers, and the blocks of 4 KiB that hold its elements, and compares headers and blocks with digests.
    There are two collectives of 40 bytes for each axis, and two more in which rank 0 sends the path. Memory: the loaded values,
    and ``buffer_nbytes``. Values of modules and optimizers are read into new memory, and then copied. Parameters of a layout
    with a format are read in the dtype ``Precision.main``, and those of ``like`` are decoded as well, to compare dtypes.
    """
    how: Any = {"subtree": subtree, "rename": rename, "ignore": ignore, "cast": cast, "strict": strict, "donate": donate}
    return load_checkpoint_and_tree(where, like, comm=comm, buffer_nbytes=buffer_nbytes, **how)[1]


def load_checkpoint_and_tree(
    where: str | os.PathLike[str], like: Any, *, comm: Comm, strict: bool = True, donate: bool = False, **options: Any
) -> tuple[Checkpoint, Any]:
    """Load as :func:`load` does, and return the checkpoint that was loaded, and the tree."""
    given, damaged, has_tried = absolute_path(where), dict[str, str](), False
    while True:
        (path, is_asked_for), damage = _agree_on_path(given, comm, damaged), list[str]()
        if donate and has_tried:  # this checkpoint is read into the same memory
            mark_donated(units_of(like), new=units_of(like))
        has_tried = True
        load_it = partial(
            load_checkpoint_at, path, like, damage, comm=comm, where=given, strict=strict, donate=donate, **options
        )
        if is_asked_for:
            return load_it()
        loaded, texts = load_or_collect_damage(load_it, damage, comm, path)
        if loaded is not None:
            rename_damaged_on_rank_0(damaged, path, comm)
            return loaded
        if donate and not strict:
            what = texts[0] if texts else f"{path} was removed by another process."
            remedy = "Make like again, as its values are lost, and pass donate=False, or another checkpoint by its path."
            raise CheckpointError(problem("load(strict=False, donate=True)", what, remedy=remedy))
        if texts:
            damaged[path] = texts[0]


def load_checkpoint_at(
    path: str, like: Any, damage: list[str], *, comm: Comm, buffer_nbytes: int = BUFFER_NBYTES, **options: Any
) -> tuple[Checkpoint, Any]:
    """Load the checkpoint at ``path`` as :func:`load_with_reader` does, and return the checkpoint and the tree.

    If this rank finds damage while it reads tensors, it appends the text of the error to ``damage``, and raises the error. If
    this rank cannot open or read a file, it raises an error too, which does not count as damage. Rank 0 has opened the
    checkpoint a moment before. So the cause is on this rank's host, such as a missing mount.
    """

    def read(found: Checkpoint, needs: list[NeededElements]) -> None:
        try:
            found.reader.read(needs, buffer_nbytes=buffer_nbytes)
        except CheckpointError as error:
            if os_error_behind(error) is None:
                damage.append(str(error))
            raise CheckpointError(f"{error}{complete_sibling_hint(found.path)}") from error

    return load_with_reader(read, lambda: open_checkpoint(path), like, comm=comm, **options)


def load_with_reader(
    read: Callable[[Checkpoint, list[NeededElements]], None],
    opened: Callable[[], Checkpoint],
    like: Any,
    *,
    comm: Comm,
    where: str,
    subtree: str = "",
    rename: Callable[[str], str] | None = None,
    ignore: str | Sequence[str] = (),
    cast: bool = False,
    strict: bool = True,
    donate: bool = False,
) -> tuple[Checkpoint, Any]:
    """Load as :func:`load` does, with bytes from any source, and return the checkpoint and the tree.

    ``opened()`` returns the checkpoint, whose manifest says what there is to load. ``read(checkpoint, needs)`` fills the
    tensors of this rank. All ranks call ``read``, unless a rank has failed before: then no rank does. ``where`` is a text that
    has to be equal on all ranks, such as the given path.
    """
    prefix = f"{subtree}." if subtree else ""

    def stored_name(name: str) -> str:
        below = apply_rename("load()", name, rename)
        return prefix + below if below else subtree  # a subtree may be a leaf

    def check() -> tuple[Checkpoint, Any, TreeContents, SourceNames, Any]:
        found = opened()
        manifest = manifest_without_ignored(manifest_of_values(found.path, found.manifest), as_patterns(ignore), subtree)
        there = {prefix for name in (*manifest.tensors, *manifest.values) for prefix in self_and_ancestors(name)}
        resting = tree_to_load_into(
            like,
            lambda name: stored_name(name) in there,
            lambda name: manifest.tensors[key].shape if (key := stored_name(name)) in manifest.tensors else None,
        )
        template = decode_tree(resting, comm.rank)
        wanted = contents_of("load()", template, comm)
        if donate:
            check_not_lent_to_jax("load()", units_of(template))
        names = source_names(manifest, wanted, stored_name)
        left, tolerated = check_matches(found.path, manifest, wanted, names, stored_name, prefix, cast=cast, strict=strict)
        _refuse_unpaired_main_copies(found.path, like, left, wanted.entries)
        if tolerated and comm.rank == 0:
            remedy = PARAMS_FROM_MAIN if any(name.startswith("main.") for name, _ in tolerated if name not in left) else ""
            what, rows = f"{len(tolerated)} differences.", shorten_error_rows(tolerated)
            _log.warning(problem(f"load() of {found.path}, strict=False", what, rows, remedy.strip()))
        kept.update({name: wanted.entries[name].local.clone() for name in left if name in wanted.entries})
        tree = _tree_to_fill(template, manifest, stored_name, comm.device, donate=donate, kept=left)
        return found, tree, contents_of("load()", tree, comm), names, resting

    def fields(made: tuple[Checkpoint, Any, TreeContents, SourceNames, Any]) -> dict[str, str]:
        found, _, into, names, _ = made
        read_from = "\n".join(f"{name} from {source}" for name, source in names.by_tensor.items())
        how = {"where": where, "cast": repr(cast), "donate": repr(donate), "subtree": repr(subtree), "names": read_from}
        return {"save": found.manifest.save_id, **how, "strict": repr(strict), **into.texts_to_compare()}

    kept = dict[str, torch.Tensor]()
    found, tree, into, names, resting = check_on_all_ranks("load()", comm, check, fields)

    def fill() -> Any:
        for node in units_of(tree) if donate else ():
            for buffer in node.buffers:
                buffer.zero_()  # for the padding
        for name, value in kept.items():
            into.entries[name].local.copy_(value)
        _fill_tree(found, into, names, comm.rank, partial(_read_values, read), kept)
        return encode_block_format_groups(tree, resting)

    try:
        tree = encode_leaf_format_groups(check_on_all_ranks("load()", comm, fill), comm, resting)
        label_new_tree(tree, comm)
        if any(has_state_dict(leaf) for leaf in optree.tree_leaves(like, is_leaf=is_node_saved_as_leaf)):
            tree = check_on_all_ranks(
                "load()", comm, lambda: optree.tree_map(load_if_object, like, tree, is_leaf=is_node_saved_as_leaf)
            )
        return found, tree
    finally:
        if donate:  # not before: an optimizer in the tree may read parameters of a train state beside it
            mark_donated(units_of(like))


def _agree_on_path(path: str, comm: Comm, damaged: Mapping[str, str]) -> tuple[str, bool]:
    """Return the path of the checkpoint to load, and whether it is ``path`` itself. Rank 0 chooses for all ranks.

    If ``path`` is a root, the result is the newest checkpoint below ``path`` that is not in ``damaged``, a dict of errors by
    path. Without a checkpoint below ``path`` the result is ``path``. Raises CheckpointError on all ranks if all checkpoints
    below ``path`` are damaged, or if rank 0 cannot list ``path``.
    """
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            names = storage_of(path).list_names(path)
            is_one = MANIFEST_NAME in names or is_foreign_checkpoint(names)
            newest = None if is_one else newest_except(path, damaged)
            if newest is None and not is_one and (unreadable := [*damaged.values(), *opening_errors(path)]):
                raise CheckpointError(f"{path}: no checkpoint can be read.\n" + "\n".join(unreadable))
            answer = {"path": path if newest is None else newest.path, "is_asked_for": newest is None}
        except Exception as error:  # of any kind: object stores have their own
            answer = {"error": str(error) or repr(error)}
    said = json.loads(all_gather_texts(json.dumps(answer), comm)[0])
    if "error" in said:
        raise CheckpointError(f"load(): rank 0 says: {said['error']}")
    return str(said["path"]), bool(said["is_asked_for"])


def _refuse_unpaired_main_copies(path: str, like: Any, left_out: Collection[str], wanted: Collection[str]) -> None:
    """Raise a CheckpointError if the load would take a parameter of a TrainState without its main copy, or the reverse.

    ``wanted``: names of the tensors in ``like``. ``left_out``: those names that the checkpoint lacks.
    """
    states = leaves_with_both_paths(like, lambda x: isinstance(x, TrainState) or is_node_saved_as_leaf(x)) if left_out else ()
    for prefix in ["".join(f"{key}." for key in keys) for keys, _, state in states if isinstance(state, TrainState)]:
        for main in sorted(name for name in wanted if name.startswith(f"{prefix}main.")):
            parameter = f"{prefix}params.{main[len(f'{prefix}main.') :]}"
            if parameter not in wanted or (main in left_out) == (parameter in left_out):
                continue
            if parameter in left_out:
                what, new, old = f"main copy {main!r} is in the checkpoint and its parameter is not.", "params", "main"
                what += " The next step would use the old parameter."
            else:
                what, new, old = f"{parameter!r} is in the checkpoint and its main copy is not.", "main", "params"
                what += " The next update would overwrite the parameter from the old main copy."
            how = f"rename=lambda name: re.sub('^{prefix}{new}', '{prefix}{old}', name), cast=True"
            if not {name for name in wanted if name.startswith(f"{prefix}{new}.")} <= set(left_out):
                how = rename_argument_hint(*((parameter, main) if parameter in left_out else (main, parameter)))
            raise CheckpointError(f"load() of {path}: {what} Both are read from one by {how}.")


def _tree_to_fill(
    template: Any,
    manifest: Manifest,
    stored: Callable[[str], str],
    device: torch.device,
    *,
    donate: bool,
    kept: Collection[str],
) -> Any:
    """Return a tree like ``template`` with tensors to fill from a checkpoint, and with all other values from ``manifest``.

    ``stored``: function from a leaf's name to its name in the checkpoint. ``donate``: let the tensors take the memory of
    ``template``'s tensors, in place of new memory. ``kept``: names of the leaves that keep the values of ``template``.
    """
    taken = dict[int, list[tuple[int, int]]]()

    def is_free(x: torch.Tensor) -> bool:
        """Return whether no earlier leaf has the memory of ``x``. If so, record the memory as taken."""
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        before = taken.setdefault(x.untyped_storage().data_ptr(), [])
        i = bisect_left(before, (begin, begin))
        if begin == end or (i and before[i - 1][1] > begin) or (i < len(before) and before[i][0] < end):
            return begin == end
        before.insert(i, (begin, end))
        return True

    def tensor_to_fill(x: torch.Tensor) -> torch.Tensor:
        if donate and not x.is_meta and x.is_contiguous() and not x.is_conj() and not x.is_neg() and is_free(x):
            return x.detach()
        make = torch.zeros if x.numel() else torch.empty  # zeros() refuses float4 without elements
        return make(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)

    made: list[Any] = []
    for segments, _, leaf in leaves_with_both_paths(template):
        value = manifest.values.get(stored(".".join(segments)))
        if is_sharded(leaf):
            made.append(leaf.replace([tensor_to_fill(buffer) for buffer in leaf.buffers]))
        elif isinstance(leaf, PerRank):
            made.append(PerRank(optree.tree_map(tensor_to_fill, leaf.value)))
        elif isinstance(leaf, torch.Tensor):
            made.append(leaf if isinstance(leaf, ShardedTensor) else tensor_to_fill(leaf))
        elif ".".join(segments) in kept:
            made.append(leaf)
        else:
            made.append(MadeBy(str(value)) if isinstance(leaf, MadeBy) else value)
    return optree.tree_unflatten(optree.tree_structure(template, is_leaf=is_node_saved_as_leaf), made)


def _read_values(
    read: Callable[[Checkpoint, list[NeededElements]], None], found: Checkpoint, needs: list[NeededElements]
) -> None:
    """Read ``needs`` by ``read``. For an encoded leaf, read its planes and scales, and decode the values."""
    manifest, jobs = found.manifest, list[tuple[NeededElements, EncodedElements]]()
    for need in needs:
        if (leaf := manifest.encoded.get(need.name)) is not None:
            form = format_of(found.path, need.name, leaf)
            jobs.append((need, EncodedElements(need.name, form, leaf, need.first, need.last)))
    plain = [need for need in needs if need.name not in manifest.encoded]
    read(found, plain + [NeededElements(*each) for _, job in jobs for each in job.needs])
    for need, job in jobs:
        need.target.copy_(cast_without_overflow(job.decode(), need.target.dtype, need.name))


def _fill_tree(
    found: Checkpoint,
    into: TreeContents,
    names: SourceNames,
    rank: int,
    read: Callable[[Checkpoint, list[NeededElements]], None],
    kept: Collection[str],
) -> None:
    """Fill the tensors of a tree, with the contents ``into``, from the checkpoint ``found``.

    Tensors with names in ``kept`` stay.

    Raises CheckpointError for damage, or if the checkpoint has different values for tied leaves or for leaves for which a unit
    keeps one number.
    """
    needs, numbers, again = list[NeededElements](), list[tuple[TensorEntry, torch.Tensor]](), list[torch.Tensor]()
    owners = found.manifest.aliases  # ignore= may leave out an owner, under whose name the file has the elements
    for name, entry in into.entries.items():
        if name in kept:
            continue
        piece, target = entry.piece_of_rank(rank), entry.local
        if entry.is_group_scalar:
            target = torch.empty_like(target)
            numbers.append((entry, target))
        source = names.by_tensor[name]
        needs.append(NeededElements(owners.get(source, source), piece.first, piece.last, target))
    for owner, _, source in names.of_tied:
        piece = into.entries[owner].piece_of_rank(rank)
        again.append(torch.empty_like(into.entries[owner].local))
        needs.append(NeededElements(owners.get(source, source), piece.first, piece.last, again[-1]))
    read(found, needs)
    seen: dict[int, tuple[TensorEntry, torch.Tensor]] = {}
    for entry, value in numbers:
        first, before = seen.setdefault(entry.local.data_ptr(), (entry, value))
        if not torch.equal(before, value):
            raise CheckpointError(
                f"{found.path}: {first.name!r} was saved with {before.item()}, {entry.name!r} with {value.item()}, and the "
                "unit that has both keeps one number for them. Plan them as units of their own."
            )
        entry.local.copy_(value)
    for (owner, alias, source), value in zip(names.of_tied, again, strict=True):
        expected = into.entries[owner].local
        if not torch.equal(expected.view(torch.uint8), value.view(torch.uint8)):
            raise CheckpointError(
                f"{found.path}: {owner!r:.200} and {alias!r:.200} are tied, and the checkpoint has different values for them, "
                f"as {names.by_tensor[owner]!r:.200} and {source!r:.200}. Leave out one of these by ignore=, or untie them."
            )


def load_or_collect_damage(
    load: Callable[[], T], damage: list[Any], comm: Comm, path: str | None
) -> tuple[T | None, list[Any]]:
    """Call ``load``, which loads the checkpoint at ``path``, and return its result, or the damage that ranks have found.

    All ranks call this function, and ``load`` fails on all ranks or on none. If this rank finds damage, ``load`` appends it to
    the list ``damage``, as values that JSON can hold, before it fails. There are four cases:

    - ``load`` succeeds: return ``(load(), [])``.
    - ``load`` fails, and rank 0 finds the checkpoint incomplete, as another process removes it: return ``(None, [])``.
    - ``load`` fails, ranks have found damage, and no rank has failed for another reason: return ``(None, found)``. ``found`` is
      the damage of all ranks.
    - Otherwise each rank raises the error of its ``load``. A CommError is raised at once.

    Cost: the cost of ``load``, and one exchange if ``load`` fails.
    """
    try:
        return load(), []
    except CommError:
        raise
    except Exception as error:  # any kind: all ranks come here, and each reports its reason
        own = error.__cause__ if isinstance(error, AgreementError) else error  # other ranks report their errors themselves
        is_removed = comm.rank == 0 and path is not None and _is_checkpoint_removed(path)
        mine = json.dumps([own is not None and not damage, damage, is_removed])
        said = [json.loads(text) for text in all_gather_texts(mine, comm)]
        found = [each for _, texts, _ in said for each in texts]
        if said[0][2]:
            return None, []
        if not found or any(has_failed_otherwise for has_failed_otherwise, _, _ in said):
            raise
        return None, found


def _is_checkpoint_removed(path: str) -> bool:
    try:
        return open_if_complete(path) is None
    except Exception:  # of an object store, whose files cannot be looked at
        return False


def rename_damaged_on_rank_0(damaged: Mapping[str, str], used_instead: str, comm: Comm) -> None:
    """On rank 0 rename checkpoints, and warn of each. ``damaged``: errors by path. ``used_instead``: words for the warnings."""
    for path, text in damaged.items() if comm.rank == 0 else ():
        _log.warning("%s is damaged, %s: %s Used instead: %s.", path, set_aside_and_describe(path), text, used_instead)


def set_aside_and_describe(path: str) -> str:
    """Rename a damaged folder or file. Return text with the new path, or why it could not be renamed."""
    try:
        return f"set aside as {storage_of(path).set_aside_damaged(path)}"
    except Exception as error:  # of any kind: object stores have their own, and the values are loaded
        return f"and could not be renamed ({error})"
