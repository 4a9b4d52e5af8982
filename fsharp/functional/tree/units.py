"""Units: the subtrees whose parameters are gathered, used and released together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree

from fsharp.errors import PatternError, problem
from fsharp.functional.tree.paths import as_patterns, innermost_prefix, matches, no_match_error, parents_of_all_prefixes


class UnitPartition(NamedTuple):
    """A tree cut into units: the units' paths in tree order, their subtrees, and the structure above them.

    ``structure`` has a leaf in place of each unit.
    """

    names: tuple[str, ...]
    subtrees: tuple[Any, ...]
    structure: optree.PyTreeSpec


def unit_by_path(paths: Sequence[str], patterns: str | Sequence[str] | None) -> dict[str, str]:
    """Return a dict from the path of each leaf to the path of the unit that contains the leaf.

    A subtree that a pattern matches is a unit. So is each of the largest subtrees that contain no match. Without patterns the
    whole tree is one unit, named ``""``. Raises PatternError for a pattern that matches nothing, if two patterns match one
    subtree, or if a matching subtree lies inside of another one.

    >>> unit_by_path(["embed.w", "layers.0.w", "layers.1.w", "norm"], "layers.*")
    {'embed.w': 'embed', 'layers.0.w': 'layers.0', 'layers.1.w': 'layers.1', 'norm': 'norm'}
    """
    matched: dict[str, str] = {}
    around = parents_of_all_prefixes(paths)
    for pattern in as_patterns(patterns):
        hits = [pattern] if pattern and pattern in around else [path for path in around if matches(pattern, path)]
        if not hits:
            raise no_match_error("plan(units=...)", pattern, paths)
        for hit in hits:
            if hit in matched:
                raise _overlap_error((matched[hit], hit), (pattern, hit))
            matched[hit] = pattern
    for hit in matched:
        above = around[hit]
        if above is not None and (outer := innermost_prefix(above, matched)) is not None:
            raise _overlap_error((matched[outer], outer), (matched[hit], hit))
    split = set(parents_of_all_prefixes(matched).values())
    units: dict[str, str] = {}
    for path in sorted(around, key=len):  # outer paths come before inner ones
        above = around[path]
        units[path] = path if above is None or above in split else units[above]
    return {path: units[path] for path in paths}


def cut_into_units(tree: Any, names: frozenset[str]) -> UnitPartition:
    """Cut ``tree`` into the subtrees whose paths are in ``names``. Each leaf of the tree has to be in one of these subtrees.

    A subtree inside of another one is not cut out by itself. ``structure`` of the result keeps all that is outside of the
    subtrees, such as containers and None.
    """
    # optree's is_leaf sees a node and not its path: find the nodes by walking down one level at a time.
    found: list[tuple[str, Any]] = []

    def walk(node: Any, path: str) -> Any:
        if path in names:
            found.append((path, node))
            return optree.treespec_leaf()
        if optree.tree_is_leaf(node):
            return optree.tree_structure(node)
        children, _, entries, _ = optree.tree_flatten_one_level(node)[:4]
        specs = iter([walk(child, f"{path}.{entry}" if path else str(entry)) for child, entry in zip(children, entries)])
        one_level = optree.tree_structure(node, is_leaf=lambda x: x is not node)
        return one_level.transform(None, lambda _: next(specs))

    spec = walk(tree, "")
    return UnitPartition(tuple(path for path, _ in found), tuple(node for _, node in found), spec)


def _overlap_error(first: tuple[str, str], second: tuple[str, str]) -> PatternError:
    facts = [(f"{pattern!r}", f"matches {path or 'the root'!r}") for pattern, path in (first, second)]
    remedy = "Keep the pattern of the outer unit, or that of the inner one."
    what = "two patterns overlap: a parameter belongs to one unit only."
    return PatternError(problem("plan(units=...)", what, facts, remedy))
