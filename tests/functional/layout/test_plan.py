"""Partition specs in plan(): the layouts they mean, and what they cannot mean."""

import re

import cloudpickle
import pytest
import torch

import fsharp as fs
from fsharp.errors import LayoutError, PatternError, StrategyError, TreeError
from fsharp.layouts import ElementAtom, LeafAtom, RowsAtom

DP, GRID = fs.Mesh({"dp": 3}), fs.Mesh({"outer": 2, "inner": 4})


def tree():
    layers = [
        {"w": torch.ones(5, 3), "b": torch.ones(5, dtype=torch.bfloat16), "steps": torch.ones(1, dtype=int)} for _ in "ab"
    ]
    return {"embed": torch.ones(24, 2), "layers": layers, "none": torch.ones(0, 3), "cube": torch.ones(3, 2, 2)}


@pytest.mark.parametrize("units", [None, "layers.*", "**.w"])
@pytest.mark.parametrize(
    ("mesh", "spec", "strategy", "atoms"),
    [
        (DP, fs.P(), fs.ddp("dp"), ElementAtom()),
        (DP, fs.P("dp"), fs.zero3("dp"), RowsAtom(1)),
        (DP, fs.P(("dp",)), fs.zero3("dp"), RowsAtom(1)),
        (GRID, fs.P(), fs.ddp("outer", "inner"), ElementAtom()),
        (GRID, fs.P("inner"), fs.hsdp("outer", "inner"), RowsAtom(1)),
        (GRID, fs.P("outer"), fs.hsdp("inner", "outer"), RowsAtom(1)),
        (GRID, fs.P(("outer", "inner")), fs.zero3("outer", "inner"), RowsAtom(1)),
        (GRID, fs.P(("inner", "outer")), fs.zero3("inner", "outer"), RowsAtom(1)),
    ],
    ids=repr,
)
def test_a_spec_is_a_strategy_and_an_atom(mesh, spec, strategy, atoms, units):
    expected = fs.plan(tree(), mesh, strategy, units=units, atoms=atoms, frozen="embed")
    assert fs.plan(tree(), mesh, spec, units=units, frozen="embed") == expected
    assert fs.plan(tree(), mesh, {"**": spec}, units=units, frozen="embed") == expected


def test_specs_beside_strategies_by_pattern():
    spec = {
        "**": fs.zero1("outer", "inner"),
        "layers": fs.P("inner"),
        "embed.**": fs.P(("outer", "inner"), None),
        "cube": fs.P(),
    }
    named = {"embed": fs.zero3("outer", "inner"), "layers": fs.hsdp("outer", "inner"), "cube": fs.ddp("outer", "inner")}
    layout = fs.plan(tree(), GRID, spec, units="layers.*")
    atoms = {"layers": RowsAtom(1), "embed": RowsAtom(1)}
    assert layout == fs.plan(tree(), GRID, {"**": fs.zero1("outer", "inner"), **named}, units="layers.*", atoms=atoms)


def test_a_tree_of_specs_may_have_numbers_as_keys():
    params, specs = ({0: x, 1: y} for x, y in ((torch.ones(6, 2), torch.ones(6)), (fs.P("dp"), fs.P())))
    assert fs.plan(params, DP, specs, units="*") == fs.plan(params, DP, {"0": fs.P("dp"), "1": fs.P()}, units="*")


def test_two_formats_of_one_name_are_refused():
    """Leaves would share a buffer, and one of the two formats."""
    planes = (fs.formats.Plane(torch.float32),)
    one, two = (
        fs.formats.Format("unregistered", planes, encode, lambda planes: planes[0])
        for encode in (lambda x: [x], lambda x: [x / 2])
    )
    copy = cloudpickle.loads(cloudpickle.dumps(one))  # as from another process
    fs.plan(tree(), DP, fs.zero3("dp"), precision={"embed": fs.Precision(stored=one), "cube": fs.Precision(stored=copy)})
    precision = {"embed": fs.Precision(stored=one), "cube": fs.Precision(wire={"dp": two})}
    with pytest.raises(LayoutError, match="two formats with different functions have the name 'unregistered'"):
        fs.plan(tree(), DP, fs.zero3("dp"), precision=precision)


def scaled(scale):
    """A format whose functions have captured a number, and a function that has captured a tensor."""
    times = torch.full((2,), scale)
    shrink = lambda x: x / times[0]  # noqa: E731
    return fs.formats.Format("scaled", (fs.formats.Plane(torch.float32),), lambda x: [shrink(x)], lambda p: p[0] * scale)


@pytest.mark.parametrize("other", [2.0, 100.0])
def test_formats_of_one_factory_are_the_same_if_they_have_captured_equal_values(other):
    precision = {"embed": fs.Precision(stored=scaled(2.0)), "cube": fs.Precision(stored=scaled(other))}
    if other == 2.0:
        leaves = {leaf.path: leaf for leaf in fs.plan(tree(), DP, fs.zero3("dp"), precision=precision).units[0].leaves}
        assert leaves["embed"].group == leaves["cube"].group
        return
    with pytest.raises(LayoutError, match="two formats with different functions have the name 'scaled'"):
        fs.plan(tree(), DP, fs.zero3("dp"), precision=precision)


def test_leaves_of_a_unit_may_be_named_apart_if_they_agree():
    rules = {"**": fs.P("dp"), "**.w": fs.P("dp", None), "**.steps": fs.zero3("dp")}
    layout = fs.plan(tree(), DP, rules, units="layers.*", atoms={"**.w": LeafAtom(), "cube": RowsAtom(2)})
    atoms = {leaf.path: leaf.atom for leaf in layout["layers.1"].leaves}
    assert atoms == {"w": LeafAtom(), "b": RowsAtom(1), "steps": ElementAtom()}
    assert (layout["cube"].leaves[0].atom, layout["embed"].leaves[0].atom) == (RowsAtom(2), RowsAtom(1))


def test_a_tree_that_is_one_leaf():
    w = torch.ones(6, 2)
    assert fs.plan(w, DP, fs.P("dp", None)) == fs.plan(w, DP, fs.zero3("dp"), atoms=RowsAtom(1))


REFUSED = {
    "another dim": (
        fs.P(None, "dp"),
        LayoutError,
        r"cuts another dim than dim 0.*\n.*params\['w'\] of shape \[4, 4\]\n.*P\(None, 'dp'\)",
    ),
    "another dim too": (fs.P("dp", "tp"), LayoutError, r"cuts another dim than dim 0"),
    "unknown axis": (fs.P("pd"), StrategyError, r"unknown axis 'pd'\.\n(.*\n)*Name axes of the mesh: \['dp', 'tp'\]"),
    "unknown axis of a dim that is not there": (fs.P("dp", None, "pd"), StrategyError, "unknown axis 'pd'"),
    "more dims": (fs.P("dp", None, None), LayoutError, r"of 3 dims is given to a leaf of 2\.\n.*params\['w'\]"),
    "a scalar": (
        {"w": fs.P(), "**": fs.P("dp")},
        LayoutError,
        r"of 1 dims is given to a leaf of 0\.\n.*params\['s'\] of shape \[\]",
    ),
    "leaves that differ": (
        {"w": fs.P("dp"), "s": fs.P()},
        LayoutError,
        r"leaves of unit \(root\) have different strategies.*\n +params\['s'\] +P\(\)\n +params\['w'\] +P\('dp'\)\n.*units=",
    ),
    "a spec and a strategy": ({"w": fs.P("dp"), "s": fs.zero1("dp", "tp")}, LayoutError, r"params\['s'\] +dp: RPS, tp: RPS\n"),
    "a tuple": (("dp",), LayoutError, r"strategy has 'dp', expected a Strategy such as zero3\('dp'\), or a partition spec"),
    "a function": (fs.zero3, LayoutError, r"strategy has the function zero3, expected a Strategy such as zero3\('dp'\)"),
    "a tree of another shape": ({"a": {"b": fs.P("dp")}}, PatternError, r"the pattern 'a.b' matches nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    rules, error, text = REFUSED[case]
    tree = {"w": torch.ones(4, 4)} | ({"s": torch.ones(())} if isinstance(rules, dict) else {})
    with pytest.raises(error, match=text):
        fs.plan(tree, fs.Mesh({"dp": 2, "tp": 2}), rules)


def test_tied_leaves_have_one_spec():
    w = torch.ones(4, 4)
    shapes = {"embed": w, "head": w}
    rules = {"embed": fs.P("inner"), "head": fs.P("outer")}
    with pytest.raises(LayoutError, match=re.escape("tied leaves disagree on the partition spec.\n  'embed'  P('inner')")):
        fs.plan(shapes, GRID, rules, units="*")
    with pytest.raises(LayoutError, match=r"'embed'  None\n  'head'   P\('inner'\)"):
        fs.plan(shapes, GRID, {"embed": fs.zero3("outer", "inner"), "head": fs.P("inner")}, units="*")
    assert fs.plan(shapes, GRID, fs.P("inner"), units="*").num_params == 16


@pytest.mark.parametrize("name", ["compute", "main", "wire", "accumulate", "output"])
def test_dtypes_that_need_a_scale_are_refused(name):
    with pytest.raises(LayoutError, match=rf"{name} is torch\.float8_e5m2\. .*need a scale.*pass torch\.bfloat16"):
        fs.Precision(**{name: torch.float8_e5m2})


def test_a_trained_leaf_of_float8_is_refused_and_a_frozen_one_is_bytes():
    tree = {"w": torch.full((4,), 0.5).to(torch.float8_e4m3fn), "b": torch.ones(4)}
    for precision in (fs.Precision(), fs.Precision(main=torch.float32), fs.Precision(compute=torch.bfloat16)):
        with pytest.raises(LayoutError, match=r"'w' is torch\.float8_e4m3fn and would be trained.*frozen="):
            fs.plan(tree, DP, fs.zero3("dp"), precision=precision)
    fs.plan(tree, DP, fs.zero3("dp"), precision=fs.Precision(torch.bfloat16, torch.float32))
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), frozen="w")
    back = fs.unshard([fs.shard(tree, layout, comm=comm)])
    assert back["w"].dtype == torch.float8_e4m3fn
    assert torch.equal(back["w"].view(torch.uint8), tree["w"].view(torch.uint8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(TreeError, match=rf"params\['s'\] has a nested tensor of layout {layout}, expected a plain tensor"):
        fs.plan({"s": nested}, DP, fs.zero3("dp"))
