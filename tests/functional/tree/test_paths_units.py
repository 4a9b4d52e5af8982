import fnmatch
import re
from collections import OrderedDict

import optree
import pytest
import torch
from hypothesis import given, strategies as st

from fsharp.errors import PatternError
from fsharp.functional.tree.paths import (
    flatten_with_paths,
    innermost_prefix,
    is_literal,
    matches,
    matches_self_or_ancestor,
    named_leaves,
    parents_of_all_prefixes,
    select_paths,
    self_and_ancestors,
    value_by_path,
)
from fsharp.functional.tree.units import cut_into_units, unit_by_path
from fsharp.testing.generate import trees, unit_patterns

PATHS = ["embed.w", "layers.0.attn.q", "layers.0.mlp.w", "layers.1.attn.q", "layers.1.mlp.w", "layers.10.mlp.w", "norm"]


def cut(tree, patterns):
    return cut_into_units(tree, frozenset(unit_by_path(flatten_with_paths(tree)[0], patterns).values()))


@pytest.mark.parametrize(
    ("pattern", "path", "yes"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.w", False),
        ("layers.*", "layers", False),
        ("layers.?", "layers.10", False),
        ("layers.??", "layers.10", True),
        ("layers.[0-3]", "layers.2", True),
        ("layers.[0-3]", "layers.4", False),
        ("layers.[13]", "layers.3", True),
        ("layers.[13]", "layers.2", False),
        ("layers.[!13]", "layers.2", True),
        ("layers.[!13]", "layers.3", False),
        ("a[!x]b", "a.b", False),
        ("a[+-9]b", "a.b", False),
        ("a?b", "a.b", False),
        ("a*b", "a.b", False),
        ("w*", "weight", True),
        ("*norm*", "attn_norm_1", True),
        ("w+", "ww", False),
        ("w+", "w+", True),
        ("a[", "a[", True),
        ("**", "", True),
        ("**", "a.b.c", True),
        ("**.w", "w", True),
        ("**.w", "a.b.w", True),
        ("**.w", "a.bw", False),
        ("a.**.w", "a.w", True),
        ("a.**.w", "a.b.c.w", True),
        ("a.**", "a", True),
        ("a.**", "ab", False),
        ("", "a", False),
        ("a", "", False),
    ],
)
def test_matches(pattern, path, yes):
    assert matches(pattern, path) is yes


segments = st.text("ab*?[]!-1", min_size=1, max_size=5).filter(lambda s: "**" not in s and "[]" not in s and "[!]" not in s)


@given(segments, st.text("ab1-!", min_size=1, max_size=5))
def test_one_segment_matches_as_file_names_do(pattern, segment):
    try:
        expected = fnmatch.fnmatchcase(segment, pattern)
    except re.error:
        return
    if re.search(r"\[[^\]]*-", pattern):
        return  # fnmatch mends ranges that run backwards
    assert matches(pattern, segment) is expected


@given(st.lists(st.text("ab1", min_size=1, max_size=3), max_size=4))
def test_a_path_is_selected_by_itself_and_by_its_ancestors_alone(segments):
    path = ".".join(segments)
    assert list(self_and_ancestors(path)) == [".".join(segments[:n]) for n in reversed(range(len(segments) + 1))]
    for prefix in filter(None, self_and_ancestors(path)):
        assert matches_self_or_ancestor(prefix, path)
        assert matches(prefix, path) is (prefix == path)
    assert not matches_self_or_ancestor(f"{path}.w" if path else "w", path)


@given(st.lists(st.lists(st.text("ab", min_size=1, max_size=2), max_size=4).map(".".join), max_size=6), st.data())
def test_each_prefix_of_paths_is_found_with_the_path_around_it(paths, data):
    every = [each for path in paths for each in self_and_ancestors(path)]
    assert list(parents_of_all_prefixes(paths)) == list(dict.fromkeys(every))
    assert all(
        list(self_and_ancestors(path))[1:2] == [around] for path, around in parents_of_all_prefixes(paths).items() if path
    )
    among = set(data.draw(st.lists(st.sampled_from(every)))) if every else set()
    for path in every:
        assert innermost_prefix(path, among) == max(
            (each for each in self_and_ancestors(path) if each in among), key=len, default=None
        )


@given(segments, st.text("ab*?[]!-1", min_size=1, max_size=5))
def test_a_literal_pattern_matches_its_own_path_alone(pattern, path):
    if is_literal(pattern):
        assert matches(pattern, path) is (pattern == path)
        assert matches(pattern, pattern)
    assert not is_literal("")


def test_of_several_rules_the_last_that_selects_counts():
    rules = {"**": 0, "layers": 1, "**.q": 2, "layers.1": 3}
    assert list(value_by_path("here", rules, PATHS).values()) == [0, 2, 1, 3, 3, 1, 0]
    assert value_by_path("here", {"norm": 5}, PATHS, default=7)["embed.w"] == 7
    assert value_by_path("here", len, PATHS) == {path: len(path) for path in PATHS}
    assert value_by_path("here", 4, PATHS) == dict.fromkeys(PATHS, 4)
    assert select_paths("here", ["norm", "layers.*.attn"], PATHS) == {"norm", "layers.0.attn.q", "layers.1.attn.q"}
    assert select_paths("here", lambda path: path.endswith("w"), PATHS) == {p for p in PATHS if p.endswith("w")}
    assert select_paths("here", (), PATHS) == frozenset()


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (None, [""]),
        ("layers.*", ["embed", "layers.0", "layers.1", "layers.10", "norm"]),
        ("layers", ["embed", "layers", "norm"]),
        ("layers.0", ["embed", "layers.0", "layers.1", "layers.10", "norm"]),
        (["layers.0.*", "norm"], ["embed", "layers.0.attn", "layers.0.mlp", "layers.1", "layers.10", "norm"]),
        ("**.q", ["embed", "layers.0.attn.q", "layers.0.mlp", "layers.1.attn.q", "layers.1.mlp", "layers.10", "norm"]),
    ],
)
def test_what_no_pattern_matches_becomes_the_largest_units(patterns, expected):
    assert list(dict.fromkeys(unit_by_path(PATHS, patterns).values())) == expected


@given(st.data())
def test_units_partition_the_leaves(data):
    tree = data.draw(trees())
    patterns = data.draw(unit_patterns(tree))
    paths, leaves, spec = flatten_with_paths(tree)
    names = unit_by_path(paths, patterns)
    parts = cut(tree, patterns)
    assert set(parts.names) == set(names.values())
    for path, name in names.items():
        assert name in self_and_ancestors(path)
    again = [leaf for subtree in parts.subtrees for leaf in optree.tree_leaves(subtree)]
    assert [id(leaf) for leaf in again] == [id(leaf) for leaf in leaves], "in tree order, each once"
    rebuilt = optree.tree_unflatten(parts.structure, parts.subtrees)
    assert optree.tree_structure(rebuilt) == spec
    for name, subtree in zip(parts.names, parts.subtrees, strict=True):
        assert cut_into_units(tree, frozenset(parts.names)).subtrees[parts.names.index(name)] is subtree


def test_empty_containers_stay_where_they_are():
    tree = OrderedDict(b=[torch.ones(1), None, {}], a=(), c=None)
    parts = cut(tree, "b.*")
    assert parts.names == ("b.0",)
    rebuilt = optree.tree_unflatten(parts.structure, parts.subtrees)
    assert optree.tree_structure(rebuilt) == optree.tree_structure(tree)
    assert cut({}, None).names == ()


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ("layer.*", "the pattern 'layer.*' matches nothing.\n  closest  layers.*"),
        (["layers.*", "head"], "the pattern 'head' matches nothing"),
        (["layers", "layers.0"], "'layers'    matches 'layers'\n  'layers.0'  matches 'layers.0'"),
        (["layers.0.attn", "layers.*"], "'layers.*'       matches 'layers.0'\n  'layers.0.attn'  matches 'layers.0.attn'"),
        (["layers.0", "layers.0"], "two patterns overlap: a parameter belongs to one unit only"),
        ("**", "'**'  matches 'embed'\n  '**'  matches 'embed.w'"),
    ],
)
def test_unit_patterns_that_match_nothing_or_overlap(patterns, text):
    with pytest.raises(PatternError, match=re.escape(text)):
        unit_by_path(PATHS, patterns)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: select_paths("f(x=)", "embd.w", PATHS), "f(x=): the pattern 'embd.w' matches nothing.\n  closest  embed.w"),
        (lambda: select_paths("f()", "w", []), "there are none"),
        (lambda: value_by_path("f()", {"**": 1, "nrm": 2}, PATHS), "the pattern 'nrm' matches nothing"),
        (lambda: value_by_path("f()", {"layers": 1}, PATHS), "no pattern selects 'embed.w'"),
        (
            lambda: value_by_path("f()", {0: 1}, ["0"]),
            "f(): the pattern 0 is not a str. A path of numbers has them as text: '0'.",
        ),
    ],
)
def test_patterns_of_rules_that_do_not_fit(run, text):
    with pytest.raises(PatternError, match=re.escape(text)):
        run()


def test_named_leaves_have_all_keys_in_the_order_of_the_dicts():
    tree = {"b": [1, (2,)], "": {"a": 3, "none": None}, "a": {0: 4}}
    names = {"b.0": 1, "b.1.0": 2, ".a": 3, ".none": None, "a.0": 4}  # the empty key, too, has its place in a name
    assert list(named_leaves(tree)) == list(names.items())
    assert list(named_leaves(tree, "/", ("root",))) == [
        (f"root/{name.replace('.', '/')}", leaf) for name, leaf in names.items()
    ]
    assert list(named_leaves(5, keys=("root",))) == [("root", 5)]
