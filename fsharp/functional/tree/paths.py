"""Key paths of pytrees, and the patterns that select them.

A path is the chain of keys from the root, joined by dots: ``layers.0.attn.q``. A pattern is written the same way;
``*``, ``?`` and ``[...]`` match within one segment, ``**`` matches any number of segments, none included. A pattern that is the
text of a path matches that path, whatever characters it has.
"""

import difflib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import optree

from fsharp.errors import PatternError, TreeError, problem

T = TypeVar("T")
Patterns = str | Sequence[str] | Mapping[str, bool] | Callable[[str], bool]
"""A pattern, several patterns, booleans by pattern (the last match counts), or a predicate on the path."""

REGISTER = (
    "register the class by optree.register_pytree_node(..., namespace=optree.registry.__GLOBAL_NAMESPACE): other namespaces of "
    "optree are not looked at."
)
"""The remedy in errors about an object that holds tensors, and is no pytree."""


def join_path(entries: Iterable[Any]) -> str:
    """Return the dotted form of a key path; the root is the empty string."""
    return ".".join(str(entry) for entry in entries)


def flatten_with_paths(tree: Any) -> tuple[tuple[str, ...], list[Any], optree.PyTreeSpec]:
    """Return paths, leaves and structure of ``tree``. Raises TreeError for equal paths, empty keys, and keys with a dot."""
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    for path in paths:
        for entry in path:
            if str(entry) == "" or "." in str(entry):
                raise TreeError(
                    f"the key {entry!r} in the path {path} is empty or contains a dot, which separates keys: nest the tree, "
                    "as make_functional() nests the names of a module's parameters."
                )
    dotted = tuple(map(join_path, paths))
    if len(set(dotted)) != len(dotted):
        twice = next(path for path in dotted if dotted.count(path) > 1)
        raise TreeError(f"two leaves have the path {twice!r}: a dict has keys that differ in type alone. Use keys of one type.")
    return dotted, leaves, spec


def named_leaves(tree: Any, separator: str = ".", keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and a leaf of nested dicts, lists and tuples, with dicts in their order.

    A name is the leaf's keys and indices, after ``keys``, joined by ``separator``.
    """
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_leaves(value, separator, (*keys, str(key)))
    else:
        yield separator.join(keys), tree


def nested_dicts(by_path: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return nested dicts of the values in ``by_path``, whose keys are key paths."""
    tree: dict[Any, Any] = {}
    for path, value in by_path.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


_PATTERN_TOKEN = re.compile(r"\[(!?)([^\]]+)\]|.", re.DOTALL)


def _regex_of_token(token: re.Match[str]) -> str:
    negated, characters = token.groups()
    if characters is None:
        return {"*": "[^.]*", "?": "[^.]"}.get(token[0]) or re.escape(token[0])
    inside = re.escape(characters).replace(r"\-", "-")  # '-' makes a range, every other character stands for itself
    return rf"(?!\.)[{'^' if negated else ''}{inside}]"


def is_literal(pattern: str) -> bool:
    """Return whether a pattern is not empty, and has no ``*``, ``?`` or ``[``. Such a pattern matches only itself."""
    return bool(pattern) and not any(each in pattern for each in "*?[")


@lru_cache(maxsize=4096)
def _regex_of_pattern(pattern: str) -> re.Pattern[str]:
    parts = []
    for segment in pattern.split("."):
        if segment == "**":
            parts.append(r"(?:[^.]+\.)*")
            continue
        parts.append(_PATTERN_TOKEN.sub(_regex_of_token, segment) + r"\.")
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise PatternError(
            f"the pattern {pattern!r} is malformed: {error}. Patterns have '*', '?', '[...]' and '**'."
        ) from error


def literal_pattern(path: str) -> str:
    """Return a pattern that matches only ``path``, also as the beginning of a longer pattern.

    >>> literal_pattern("a[0].b")
    'a[[]0].b'
    """
    return re.sub(r"[*?[]", r"[\g<0>]", path)


def matches(pattern: str, path: str) -> bool:
    """Return whether ``pattern`` matches the whole of ``path``; PatternError for a malformed pattern.

    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.w"), matches("**.w", "layers.0.w")
    (True, False, True)
    """
    return pattern == path != "" or _regex_of_pattern(pattern).fullmatch(path + "." if path else "") is not None


def self_and_ancestors(path: str) -> Iterator[str]:
    """Yield ``path``, then each of its ancestors, up to the root ``""``.

    >>> list(self_and_ancestors("layers.0.w"))
    ['layers.0.w', 'layers.0', 'layers', '']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def parents_of_all_prefixes(paths: Iterable[str]) -> dict[str, str | None]:
    """Return the next shorter prefix of each path and of each of its prefixes; None for the root, ``""``.

    >>> parents_of_all_prefixes(["a.b", "a.c"])
    {'a.b': 'a', 'a': '', '': None, 'a.c': 'a'}
    """
    around: dict[str, str | None] = {}
    for path in paths:
        for each in self_and_ancestors(path):
            if each in around:
                break  # with its prefixes
            around[each] = each.rpartition(".")[0] if each else None
    return around


def innermost_prefix(path: str, among: Container[str]) -> str | None:
    """Return the longest path in ``among`` that is ``path`` or one of its prefixes; None if no path is.

    >>> innermost_prefix("layers.0.w", {"", "layers.0", "layers.1"})
    'layers.0'
    """
    return next((each for each in self_and_ancestors(path) if each in among), None)


def matches_self_or_ancestor(pattern: str, path: str) -> bool:
    """Return whether ``pattern`` matches ``path``, or the path of a subtree that contains ``path``."""
    return any(matches(pattern, prefix) for prefix in self_and_ancestors(path))


def as_patterns(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one pattern or several as a tuple; None gives an empty tuple."""
    return () if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)


def no_match_error(where: str, pattern: str, paths: Sequence[str]) -> PatternError:
    """Return the error for a pattern that selects no path; the text names the most similar paths."""

    def with_wildcards(path: str) -> str:
        keys, own = path.split("."), pattern.split(".")
        return ".".join(o if "*" in o else key for key, o in zip(keys, own)) if len(keys) == len(own) else path

    known = sorted(set(map(with_wildcards, filter(None, parents_of_all_prefixes(paths)))))
    near = difflib.get_close_matches(pattern, known, n=4, cutoff=0.3) or known[:4]
    facts = [("closest", ", ".join(near) or "there are none")]
    remedy = "In a pattern '*' stands for one key, and '**' for any number of keys."
    return PatternError(problem(where, f"the pattern {pattern!r} matches nothing.", facts, remedy))


def select_paths(where: str, patterns: Patterns, paths: Sequence[str]) -> frozenset[str]:
    """Return the paths that ``patterns`` select: a pattern, several, a predicate on the path, or a mapping to booleans.

    A pattern selects the paths that it matches, and all paths below them. In a mapping, the last pattern that selects a path
    decides; a path that no pattern selects is left out. Raises PatternError if a pattern selects nothing, or if a value in the
    mapping is not a boolean.
    """
    if not isinstance(patterns, Mapping):
        if callable(patterns):
            return frozenset(filter(patterns, paths))
        patterns = dict.fromkeys(as_patterns(patterns), True)
    for pattern, value in patterns.items():
        if not isinstance(value, bool):
            raise PatternError(f"{where}: the pattern {pattern!r} stands for {value!r}, expected True or False.")
    return frozenset(path for path, value in value_by_path(where, patterns, paths, default=False).items() if value)


def value_by_path(
    where: str, rules: T | Mapping[str, T] | Callable[[str], T], paths: Sequence[str], default: T | None = None
) -> dict[str, T]:
    """Return a value for each path. ``rules``: one value for all paths, a function from a path to its value, or a mapping.

    A mapping has values by pattern. A pattern selects the paths that it matches, and all paths below them; of several patterns
    the last counts. A pattern that is a path of the tree, such as ``"a[0]"``, is not read as a pattern: it selects this path
    and the paths below it. ``default``: value of a path that no pattern selects; None: there has to be a pattern for each path.
    Raises PatternError if a pattern selects nothing, or if a path has no value.
    """
    if isinstance(rules, Mapping):
        result: dict[str, T] = {} if default is None else dict.fromkeys(paths, default)
        for pattern, value in rules.items():
            if not isinstance(pattern, str):
                raise PatternError(
                    f"{where}: the pattern {pattern!r} is not a str. A path of numbers has them as text: '{pattern}'."
                )
            # First without regular expressions: there may be a pattern for each path, with brackets in its keys.
            within = f"{pattern}."
            hit = [path for path in paths if path == pattern != "" or path.startswith(within)]
            if not hit and not is_literal(pattern):
                hit = [path for path in paths if matches_self_or_ancestor(pattern, path)]
            if not hit:
                raise no_match_error(where, pattern, paths)
            result.update(dict.fromkeys(hit, value))
        missing = [path for path in paths if path not in result]
        if missing:
            remedy = "Add the pattern '**' in front of the others: it selects all leaves, and the last match counts."
            raise PatternError(problem(where, f"no pattern selects {missing[0]!r}.", [("patterns", list(rules))], remedy))
        return result
    if callable(rules):
        return {path: rules(path) for path in paths}
    return dict.fromkeys(paths, rules)
