import json
import re
import sys
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given

import fsharp as fs
from fsharp.errors import FsharpError, LayoutError
from fsharp.testing.generate import cases, precisions
from tests.scheduling import few_examples


class Block(NamedTuple):
    w: Any
    b: Any


Plain = namedtuple("Plain", "x y")

CONTAINERS = {
    "dict": {"b": 0, "a": 1},
    "int keys": {3: 0, 1: 1},
    "ordered": OrderedDict(b=0, a=1),
    "list": [0, [1, []]],
    "tuple": (0, (), (1,)),
    "none": {"a": None, "b": [None, 0]},
    "namedtuple": Block(w=0, b=Plain(1, None)),
    "leaf": 0,
    "empty": {},
    "mixed": OrderedDict(z=Block([0, (1, None)], {"k": Plain(2, {})}), a=[OrderedDict()]),
}
HAVE_KEYS = [name for name in CONTAINERS if name not in ("leaf", "empty")]


def fill(skeleton):
    return optree.tree_map(lambda i: torch.full((2 + i, 3), float(i)), skeleton)


@pytest.mark.parametrize(("name", "units"), [*((name, None) for name in CONTAINERS), *((name, "*") for name in HAVE_KEYS)])
def test_containers_survive_json(name, units):
    tree = fill(CONTAINERS[name])
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 2}), fs.hfsdp("o", "i"), units=units, atoms=fs.layouts.RowsAtom(1))
    again = fs.Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()
    rebuilt = fs.unshard([fs.shard_for(tree, again, rank) for rank in range(4)])
    assert optree.tree_structure(rebuilt) == optree.tree_structure(tree)


@few_examples
@given(cases(precision=precisions()))
def test_layouts_are_values_and_json_keeps_them(case):
    layout = case.layout
    again = fs.Layout.from_json(layout.to_json())
    assert (again, hash(again), again.digest) == (layout, hash(layout), layout.digest)
    assert str(again) == str(layout)
    assert [unit.name for unit in again.units] == [unit.name for unit in layout.units]
    for unit, other in zip(layout.units, again.units, strict=True):
        assert (other, hash(other)) == (unit, hash(unit))
        assert [type(leaf.shape) for leaf in other.leaves] == [tuple] * len(other.leaves)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda d: d.update(fsharp_layout=99), "version 99, expected 1"),
        (lambda d: d.pop("mesh"), "KeyError 'mesh'"),
        (lambda d: d["units"][0]["leaves"][0].pop(), "ValueError not enough values"),
        (lambda d: d["units"][0]["leaves"][0].__setitem__(2, "float33"), "'float33' is not a dtype"),
        (lambda d: d["units"][0]["leaves"][0].__setitem__(3, "half"), "KeyError 'half'"),
        (lambda d: d["units"][0]["strategy"].update(dp=["shard", "shard", "cut"]), "'cut' is not a valid Placement"),
        (
            lambda d: d["units"][0].update(spec={"kind": "namedtuple", "type": "no.such:T", "children": []}),
            "import the module 'no.such' first",
        ),
        (
            lambda d: d["units"][0].update(spec={"kind": "namedtuple", "type": "os:PathLike", "children": []}),
            "'os:PathLike' is not a class of the expected kind",
        ),
        (lambda d: d["units"][0].update(spec={"kind": "set", "children": []}), "'set' is not a kind of container"),
        (lambda d: d.update(mesh=[["dp", 0]]), "axis 'dp' has size 0"),
        (lambda d: d["mesh"].__setitem__(0, ["dp", 4]), "not divided into 4 parts"),
        (lambda d: d["units"][0]["leaves"][0].__setitem__(5, -1), "'w' lies outside its buffer"),
        (lambda d: d["mesh"].__setitem__(0, ["tp", 2]), "unknown axis 'dp'"),
    ],
)
def test_json_that_is_no_layout(edit, text):
    data = json.loads(fs.plan({"w": torch.ones(3)}, fs.Mesh({"dp": 2}), fs.zero3("dp")).to_json())
    edit(data)
    with pytest.raises(FsharpError, match=re.escape(text)):
        fs.Layout.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "null"])
def test_text_that_is_no_layout(text):
    with pytest.raises(LayoutError, match=r"Layout\.from_json\(\): not a layout"):
        fs.Layout.from_json(text)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (defaultdict(list, a=torch.ones(1)), "collections.defaultdict has no JSON form"),
        ({(1, 2): torch.ones(1)}, "dict keys have to be strings or integers, got [(1, 2)]"),
        ({True: torch.ones(1)}, "dict keys have to be strings or integers, got [True]"),
    ],
)
def test_containers_without_json_form(tree, text):
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    with pytest.raises(LayoutError, match=re.escape(text)):
        layout.to_json()


def test_a_namedtuples_module_is_never_imported():
    """Reading a layout runs no code that its text names."""
    text = fs.plan(Plain(torch.ones(2), torch.ones(3)), fs.Mesh({"dp": 1}), fs.ddp("dp")).to_json()
    assert fs.Layout.from_json(text).num_params == 5
    assert "antigravity" not in sys.modules
    with pytest.raises(LayoutError, match="import the module 'antigravity' first"):
        fs.Layout.from_json(text.replace(f"{__name__}:Plain", "antigravity:Plain"))
    assert "antigravity" not in sys.modules


def test_json_that_is_nested_too_deeply_is_refused():
    # 100,000 levels each: Python 3.14 reads 10,000.
    deep = '{"fsharp_layout": 1, "mesh": [], "units": [], "spec": ' + '{"kind": "list", "children": [' * 50_000
    for text in ("[" * 100_000, deep):
        with pytest.raises(LayoutError, match="not a layout: RecursionError"):
            fs.Layout.from_json(text)
