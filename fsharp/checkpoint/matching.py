"""Match the leaves of a tree with the names in a checkpoint, and find differences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fsharp.checkpoint.entries import TreeContents, type_with_ints_as_float
from fsharp.checkpoint.formats.planes import format_of, specs_in_files
from fsharp.checkpoint.manifest import Manifest, TensorRecord
from fsharp.errors import CheckpointError, TreeError, problem
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.tree.paths import select_paths

_MAX_SHOWN_ROWS = 12
MAIN_FROM_PARAMS = " Main copies are made from parameters by rename=lambda name: re.sub('^main', 'params', name), cast=True."
PARAMS_FROM_MAIN = (
    " Parameters are made from main copies by rename=lambda name: re.sub('^params', 'main', name), ignore='params.**', and "
    "cast=True if they have a narrower dtype."
)


def rename_argument_hint(wanted: str, source: str) -> str:
    """Return the text, for an error, of arguments of load() that read the leaf ``wanted`` from the leaf ``source``."""
    return f"rename=lambda name: {{{wanted!r}: {source!r}}}.get(name, name), with an item for each such leaf, and cast=True"


def manifest_without_ignored(manifest: Manifest, ignore: tuple[str, ...], subtree: str) -> Manifest:
    """Return the manifest without the names that the patterns in ``ignore`` match, relative to ``subtree``.

    If the leaf that stores a tied value is left out, the other names of the value get the record of the tensor.
    """
    prefix = f"{subtree}." if subtree else ""
    names = (*manifest.tensors, *manifest.values, *manifest.aliases)
    below = {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
    left = {below[name] for name in select_paths("load(ignore=)", ignore, list(below))}
    kept: dict[str, Any] = {
        kind: {name: each for name, each in getattr(manifest, kind).items() if name not in left}
        for kind in ("tensors", "values", "aliases")
    }
    for name in [name for name, owner in kept["aliases"].items() if owner in left]:
        kept["tensors"][name] = manifest.tensors[kept["aliases"].pop(name)]
    return replace(manifest, **kept)


def manifest_of_values(path: str, manifest: Manifest) -> Manifest:
    """Return the manifest with one float32 tensor, the decoded values, in place of the planes and scales of each encoded leaf.

    Raises CheckpointError if the checkpoint at ``path`` has other tensors than the format of such a leaf.
    """
    tensors, aliases = dict(manifest.tensors), dict(manifest.aliases)
    for name, leaf in manifest.encoded.items():
        form = format_of(f"load() of {path}", name, leaf)
        names, wanted = (*leaf.planes, *leaf.scales), specs_in_files(form, leaf)
        there = [(manifest.tensors[each].dtype, manifest.tensors[each].shape) for each in names if each in manifest.tensors]
        if there != wanted:
            facts = [("tensors", ", ".join(names)), ("got", there), ("expected", wanted)]
            remedy = "Save the checkpoint again, or export it with all tensors of the leaf."
            raise CheckpointError(problem(f"load() of {path}", f"{name!r:.200} does not have planes of {form}.", facts, remedy))
        for each in names:
            tensors.pop(each, None)
        aliases = {alias: owner for alias, owner in aliases.items() if owner not in (*leaf.planes[1:], *leaf.scales)}
        tensors[name] = TensorRecord(torch.float32, leaf.shape, ())
    return replace(manifest, tensors=tensors, aliases=aliases)


class SourceNames(NamedTuple):
    """The names in a checkpoint from which the tensors of a tree are read.

    Attributes:
        by_tensor: for the name of each tensor in the tree, its name in the checkpoint, which the checkpoint may lack.
        of_tied: further names of tied tensors, as triples: name of the tensor, name of the tied leaf, name in the checkpoint.
    """

    by_tensor: dict[str, str]
    of_tied: list[tuple[str, str, str]]


def source_names(manifest: Manifest, wanted: TreeContents, stored: Callable[[str], str]) -> SourceNames:
    """Return the names under which a checkpoint stores the tensors of a tree.

    A tied tensor has several names in the tree, and is read under the first of them that the checkpoint has. ``stored``:
    function from the name of a leaf in the tree to its name in the checkpoint.
    """
    names = {name: [name] for name in wanted.entries}
    for alias, owner in wanted.aliases.items():
        names[owner].append(alias)
    of, others = dict[str, str](), list[tuple[str, str, str]]()
    for owner, each in names.items():
        sources = [manifest.aliases.get(source, source) for source in map(stored, reversed(each))]
        there = {source: name for name, source in zip(reversed(each), sources) if source in manifest.tensors}
        of[owner], *more = [*reversed(there)] or sources[-1:]
        others += [(owner, there[source], source) for source in more]
    return SourceNames(of, others)


def check_matches(
    path: str,
    manifest: Manifest,
    wanted: TreeContents,
    names: SourceNames,
    stored: Callable[[str], str],
    prefix: str,
    *,
    cast: bool,
    strict: bool,
) -> tuple[set[str], list[tuple[str, str]]]:
    """Compare the tree ``wanted`` with the checkpoint at ``path``. If there are errors, raise one TreeError that lists all.

    Return the names of leaves that keep their given values, as the checkpoint lacks them. Also return rows
    ``(name, difference)`` for a warning. With ``strict`` such differences are errors, and both results are empty. A checkpoint
    without any leaf of the tree is always an error.

    ``stored`` returns the name in the checkpoint for a name in the tree. ``names``: names of tensors in the checkpoint, from
    :func:`source_names`. Other names in the checkpoint are compared only if they begin with ``prefix``.
    """
    rows, kept, passed = list[tuple[str, str]](), set[str](), list[tuple[str, str]]()

    def is_new(name: str, source: str) -> bool:
        if strict or source in manifest.tensors or source in manifest.values:
            return False
        entry = wanted.entries.get(name)
        if entry is not None and entry.local.is_meta:
            rows.append((name, "not in the checkpoint, and on the meta device: there is no value to keep"))
        kept.add(name)
        passed.append((name, "not in the checkpoint: keeps the value that was given"))
        return True

    pairs = [(name, name, names.by_tensor[name]) for name in wanted.entries]
    for owner, name, source in (*pairs, *names.of_tied):
        entry, record = wanted.entries[owner], manifest.tensors.get(source)
        if is_new(name, source):
            continue
        if record is None:
            kind = "a number or text in the checkpoint" if source in manifest.values else "not in the checkpoint"
            rows.append((name, f"{kind}; expected {tensor_text(entry)}"))
            continue
        may_cast = cast or source in manifest.encoded  # decoded values have no dtype of their own
        is_right = record.dtype == entry.dtype or (may_cast and _can_cast(record.dtype, entry.dtype))
        if record.shape != entry.shape or not is_right:
            is_of_others = entry.is_per_rank and record.shape[1:] == entry.shape[1:]
            why = f": a value of each rank, so load on {record.shape[0]} ranks, or without this leaf" if is_of_others else ""
            rows.append((name, f"{tensor_text(record)} in the checkpoint; expected {tensor_text(entry)}{why}"))
    for name, value in wanted.values.items():
        there = manifest.values.get(stored(name))
        if not is_new(name, stored(name)) and type_with_ints_as_float(there) is not type_with_ints_as_float(value):
            kind = "not in the checkpoint" if there is None else f"{there!r:.80} in the checkpoint"
            rows.append((name, f"{kind}; expected a value like {value!r:.80}"))
    expected = {stored(name) for name in (*wanted.entries, *wanted.values, *wanted.aliases)}
    for name in (*manifest.tensors, *manifest.values, *manifest.aliases):
        if name.startswith(prefix) and name not in expected:
            (rows if strict else passed).append((name[len(prefix) :], "in the checkpoint alone"))
    if len(kept) == len(wanted.entries) + len(wanted.values) > 0:
        rows += passed
    if rows:
        remedy = (
            "Build the tree as it was when it was saved; subtree= loads a part of it, rename= and ignore= are for other names, "
            "cast=True converts dtypes, strict=False keeps values of new leaves."
        )
        for name in (name for name, _ in rows if name.startswith("main.")):
            if (name in wanted.entries) != (stored(name) in manifest.tensors):
                if stored(name) in manifest.tensors:
                    remedy += PARAMS_FROM_MAIN
                elif any(each.startswith("main.") and stored(each) in manifest.tensors for each in wanted.entries):
                    parameter = f"params.{name.removeprefix('main.')}"  # frozen, and so saved without a main copy
                    remedy += f" A main copy is made from its parameter by {rename_argument_hint(name, parameter)}."
                else:
                    remedy += MAIN_FROM_PARAMS
                break
        what = f"{path} is not of this tree: {len(rows)} differences."
        raise TreeError(problem("load()", what, shorten_error_rows(rows), remedy))
    return kept, passed


def _can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast is allowed: not to float8, and none that loses fractions or imaginary parts, or wraps integers."""
    is_float8 = wanted.is_floating_point and wanted.itemsize == 1  # without scales, small values become zero
    if is_float8 or not torch.can_cast(stored, wanted):
        return False
    if wanted.is_floating_point or wanted.is_complex or stored == torch.bool:
        return True
    old, new = torch.iinfo(stored), torch.iinfo(wanted)
    return new.min <= old.min and old.max <= new.max


def shorten_error_rows(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Shorten rows ``(name, problem)``: names that differ only in numbers share a row.

    Of more than 12 rows the last one counts those left out.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        alike.setdefault((pattern, text), []).append(name)
    lines = [
        (f"{names[0]!r:.200}", text) if len(names) == 1 else (f"{pattern!r:.200}", f"{text} ({len(names)} of them)")
        for (pattern, text), names in alike.items()
    ]
    more = [("...", f"and {len(lines) - _MAX_SHOWN_ROWS} more lines")] if len(lines) > _MAX_SHOWN_ROWS else []
    return lines[:_MAX_SHOWN_ROWS] + more
