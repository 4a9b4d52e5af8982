"""Views of shardings: what they say of each rank is what shard_for() puts there."""

import math
from functools import partial

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import LayoutError, MeshError, OptionError
from fsharp.functional.layout.plan import find_tie_owners
from fsharp.functional.tree.paths import flatten_with_paths
from fsharp.testing.generate import cases


def numbered(tree):
    """The tree with another number, from 1 on, in each element, ties kept; and the first number of each path."""
    paths, leaves, spec = flatten_with_paths(tree)
    owners, made, firsts, count = find_tie_owners(paths, leaves), {}, {}, 1
    for path, leaf in zip(paths, leaves):
        owner = owners.get(path, path)
        if owner == path:
            made[path], firsts[path] = torch.arange(count, count + leaf.numel()).view(leaf.shape).to(leaf.dtype), count
            count += leaf.numel()
        made[path], firsts[path] = made[owner], firsts[owner]
    return optree.tree_unflatten(spec, [made[path] for path in paths]), firsts


def block(mesh, axes, rank):
    """Which of how many blocks a rank has along these axes."""
    index = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + mesh.coord(axis, rank)
    return index, math.prod(mesh.axis_size(axis) for axis in axes)


def is_in_blocks(held, shape, mesh, axes):
    """Whether each rank has an equal block of rows, in order of its coordinates."""
    if not shape or shape[0] % block(mesh, axes, 0)[1]:
        return False
    rows = torch.arange(math.prod(shape)).view(shape)
    blocks = [block(mesh, axes, rank) for rank in range(mesh.size)]
    return held == [rows.chunk(count)[index].flatten().tolist() for index, count in blocks]


@given(cases(dtypes=(torch.float64, torch.int64), max_ranks=12), st.sampled_from(["params", "grads", "optim", "full"]))
def test_views_say_what_ranks_hold(case, place):
    layout, mesh = case.layout, case.layout.mesh
    tree, firsts = numbered(case.tree)
    view = fs.inspect.sharding(layout, place)
    assert list(view.leaves) == [unit.path_in_tree(leaf) for unit in layout.units for leaf in unit.leaves]
    on_rank = []
    for rank in range(mesh.size):
        buffers = [b for node in fs.layouts.units_of(fs.shard_for(tree, layout, rank, place=place)) for b in node.buffers]
        on_rank.append(sorted(int(n) for buffer in buffers for n in buffer.tolist() if n))
    for path, leaf in view.leaves.items():
        numel = math.prod(leaf.shape)
        held = [[n - firsts[path] for n in numbers if 0 <= n - firsts[path] < numel] for numbers in on_rank]
        assert [list(range(*leaf.elements(rank))) for rank in range(mesh.size)] == held
        is_whole = numel == 0 or (all(len(each) == numel for each in held) and not leaf._partial_or_varying_words)
        assert leaf.is_fully_replicated is is_whole
        if leaf.spec is None:
            assert not is_whole
            assert leaf._partial_or_varying_words or not is_in_blocks(held, leaf.shape, mesh, leaf.place.sharded_axes)
            assert leaf.shard_shape is None
        elif leaf.spec.axes:
            assert is_in_blocks(held, leaf.shape, mesh, leaf.spec.axes)
            assert {math.prod(leaf.shard_shape)} == {len(each) for each in held}
        else:
            assert is_whole
            assert leaf.shard_shape == leaf.shape
        assert f"spec {leaf.spec}" in str(leaf)
    widths = [len(line) for text in (view, *view.leaves.values()) for line in str(text).split("\n")]
    assert max(widths) <= 100


def test_blocks_of_a_leaf_in_the_middle_of_a_buffer():
    halves = fs.plan({"a": torch.empty(1), "w": torch.empty(4), "z": torch.empty(1)}, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    thirds = fs.plan({"a": torch.empty(1), "w": torch.empty(6), "z": torch.empty(2)}, fs.Mesh({"dp": 3}), fs.zero3("dp"))
    two, three = (fs.inspect.sharding(layout)["w"] for layout in (halves, thirds))
    assert (two.spec, [two.elements(rank) for rank in range(2)]) == (fs.P("dp"), [(0, 2), (2, 4)])
    assert (three.spec, [three.elements(rank) for rank in range(3)]) == (None, [(0, 2), (2, 5), (5, 6)])


def gpt():
    empty = partial(torch.empty, device="meta")
    return {"embed": empty(256, 64), "layers": [{"w": empty(64, 64), "b": empty(64)} for _ in range(2)], "scale": empty(())}


A_TREE = """\
Sharding of params on Mesh(outer=2, inner=4)
leaf          shape             spec        on a rank              ranks 0 to 7
-------------------------------------------------------------------------------
embed         float32[256, 64]  P('inner')  [64, 64]               ████████
layers.* x2
  b           float32[64]       None        0 to 64 elements       ···█···█
  w           float32[64, 64]   None        832 to 1,088 elements  ████████
scale         float32[]         None        0 to 1 elements        █···█···
a cell is 1 rank: █ with some of the leaf, · with nothing of it"""


def test_the_text_of_a_tree():
    layout = fs.plan(
        gpt(), fs.Mesh({"outer": 2, "inner": 4}), fs.hsdp("outer", "inner"), units="layers.*", atoms=fs.layouts.RowsAtom()
    )
    assert str(fs.inspect.sharding(layout)) == A_TREE


A_LEAF = """\
embed: float32[256, 64], spec P('inner')
inner:Shard, outer:Replicate of Mesh(outer=2, inner=4)
             ┌────────────────────┐
   rows 0:64 │     ranks 0, 4     │
             ├────────────────────┤
 rows 64:128 │     ranks 1, 5     │
             ├────────────────────┤
rows 128:192 │     ranks 2, 6     │
             ├────────────────────┤
rows 192:256 │     ranks 3, 7     │
             └────────────────────┘"""


def test_the_text_of_a_leaf():
    layout = fs.plan(gpt(), fs.Mesh({"outer": 2, "inner": 4}), fs.hsdp("outer", "inner"), units="layers.*")
    where = fs.inspect.sharding(layout)
    assert str(where["embed"]) == A_LEAF
    assert str(where["scale"]).endswith("nothing of it on ranks 1 to 3, 5 to 7")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rule", [fs.P(("outer", "inner")), fs.hsdp("outer", "inner"), fs.ddp("outer", "inner")], ids=str)
def test_llama_70b_on_16384_ranks(rule):
    def empty(*shape):
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    sizes = {
        "q": (8192, 8192),
        "k": (1024, 8192),
        "v": (1024, 8192),
        "up": (28672, 8192),
        "down": (8192, 28672),
        "norm": (8192,),
    }
    layers = [{name: empty(*shape) for name, shape in sizes.items()} for _ in range(80)]
    layout = fs.plan(
        {"layers": layers, "head": empty(128256, 8192)}, fs.Mesh({"outer": 32, "inner": 512}), rule, units="layers.*"
    )
    where = fs.inspect.sharding(layout)
    assert len(where.leaves) == 80 * 6 + 1
    for text in (where, where["layers.79.up"], where["layers.0.norm"]):
        lines = str(text).split("\n")
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100
    assert "layers.* x80" in str(where)


def test_trees_of_many_leaves_are_abbreviated():
    layout = fs.plan({f"p{i}": torch.empty(i) for i in range(100)}, fs.Mesh({"dp": 20}), fs.P("dp"))
    lines = str(fs.inspect.sharding(layout)).split("\n")
    assert lines[-2] == "and 61 rows more; sharding(layout)[path] is one leaf"
    assert lines[-1].startswith("a cell is 1 or 2 ranks: █")
    assert len(lines) == 45


def test_long_paths_are_cut_in_their_middle():
    layout = fs.plan({"a" * 60 + "b" * 60: torch.empty(2, 2)}, fs.Mesh({"dp": 2}), fs.P("dp"))
    row = str(fs.inspect.sharding(layout)).split("\n")[-2]
    assert len(row) <= 100
    assert "aaa…bbb" in row


def test_values_that_differ_between_ranks():
    tree, mesh = {"dense": torch.empty(4, 2), "expert": torch.empty(4, 2)}, fs.Mesh({"dp": 2, "ep": 3})
    layout = fs.plan(tree, mesh, {"dense": fs.ddp("dp", "ep"), "expert": fs.zero3("dp").varying("ep")}, units="*")
    params, grads = fs.inspect.sharding(layout), fs.inspect.sharding(layout, "grads")
    assert (params["dense"].spec, params["expert"].spec, grads["dense"].spec) == (fs.P(), None, None)
    assert params["dense"].is_fully_replicated
    assert not grads["dense"].is_fully_replicated
    assert str(params["expert"]).endswith("each rank along ep has values of its own")
    assert str(grads["dense"]).endswith("each rank along dp has a summand\neach rank along ep has a summand")
    assert [line.split()[3:5] for line in str(grads).split("\n")[3:5]] == [["summands", "8"], ["own", "values"]]


def test_tied_leaves_are_where_their_storage_is():
    w = torch.empty(4, 2)
    layout = fs.plan({"a": w, "b": w}, fs.Mesh({"dp": 2}), {"a": fs.zero3("dp"), "b": fs.ddp("dp")}, units="*")
    where = fs.inspect.sharding(layout)
    assert where["b"].spec == where["a"].spec == fs.P("dp")
    assert str(where["b"]).endswith("tied to 'a', where it is stored")
    assert "b (tied)" in str(where)


def test_refused():
    layout = fs.plan(gpt(), fs.Mesh({"dp": 2}), fs.zero3("dp"), units="layers.*")
    with pytest.raises(LayoutError, match=r"no leaf 'layers.0.c'.\n  closest  layers.0.[bw]"):
        fs.inspect.sharding(layout)["layers.0.c"]
    with pytest.raises(LayoutError, match="unknown place 'gradients'"):
        fs.inspect.sharding(layout, "gradients")
    with pytest.raises(MeshError, match="rank 2 is outside"):
        fs.inspect.sharding(layout)["embed"].elements(2)
    with pytest.raises(OptionError, match=r"layout is \{.*expected a Layout, such as fs.plan\("):
        fs.inspect.sharding(gpt())
