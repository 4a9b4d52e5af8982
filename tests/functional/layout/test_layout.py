import hashlib
import math
import sys
import time

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import LayoutError, TreeError
from fsharp.testing.generate import cases, layouts, precisions, trees
from tests.scheduling import few_examples


@given(st.data())
def test_digests_differ_where_layouts_do(data):
    tree = data.draw(trees(max_leaves=4))
    one, two = data.draw(layouts(tree)), data.draw(layouts(tree))
    assert (one == two) is (one.digest == two.digest) is (one.to_json() == two.to_json())
    assert one.digest == hashlib.sha256(one.to_json().encode()).hexdigest()  # all of it: a short one would often be another's


@few_examples
@given(cases(precision=precisions()))
def test_every_group_is_one_kind_and_every_leaf_has_its_place(case):
    tensors = dict(zip(map(".".join, (map(str, p) for p in optree.tree_paths(case.tree))), optree.tree_leaves(case.tree)))
    seen = 0
    for unit in case.layout.units:
        keys = [(group.dtypes, group.trainable, group.label) for group in unit.groups]
        assert len(set(keys)) == len(keys)
        for group in unit.groups:
            assert group.num_parts == math.prod(unit.mesh.axis_size(axis) for axis in unit.strategy.optim.sharded_axes)
            assert group.used <= group.size
        for leaf in unit.leaves:
            tensor = tensors[unit.path_in_tree(leaf)]
            assert (leaf.shape, leaf.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert (leaf.tied_to is None) is (leaf.group >= 0)
            if leaf.group >= 0:
                group = unit.groups[leaf.group]
                assert 0 <= leaf.offset <= leaf.offset + leaf.numel <= group.size
                assert tensor.is_floating_point() or not group.trainable
                seen += leaf.numel * math.prod(unit.mesh.axis_size(axis) for axis in unit.strategy.full.varying_axes)
        if unit.groups:
            assert unit.strategy.full.sharded_axes == ()
    assert case.layout.num_params == seen


@few_examples
@given(cases(precision=precisions()))
def test_nbytes_are_those_of_the_buffers(case):
    layout, ranks = case.layout, case.layout.mesh.size
    params = [fs.shard_for(case.tree, layout, rank, dtype="compute") for rank in range(ranks)]
    assert {sum(node.nbytes for node in fs.layouts.units_of(tree)) for tree in params} == {layout.nbytes("params")}
    optim = fs.trainable(fs.shard_for(case.tree, layout, 0, place="optim"))
    assert layout.nbytes("optim") == sum(node.nbytes for node in fs.layouts.units_of(optim))
    grads = fs.layouts.units_of(fs.trainable(fs.shard_for(case.tree, layout, 0, place="grads")))
    sizes = [(b.numel(), node.unit.groups[g].dtypes) for node in grads for g, b in zip(node.groups, node.buffers, strict=True)]
    assert layout.nbytes("grads") == sum(n * dtypes.accumulate.itemsize for n, dtypes in sizes)
    assert layout.nbytes("grads", torch.float64) == sum(n * 8 for n, _ in sizes)
    sizes = [(b, node.unit.groups[g].dtypes) for node in fs.layouts.units_of(optim) for g, b in zip(node.groups, node.buffers)]
    assert layout.nbytes("main") == sum(b.nbytes for b, dtypes in sizes if dtypes.compute != dtypes.main)
    assert layout.nbytes("main", torch.float64) == sum(8 * len(b) for b, dtypes in sizes if dtypes.compute != dtypes.main)


def test_nbytes_by_hand():
    tree = {"w": torch.empty(100, 7), "b": torch.empty(3), "n": torch.empty(5, dtype=torch.int64)}
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 4}), fs.hfsdp("o", "i"), precision=precision)
    part, ids = math.ceil(703 / 8), 1  # elements in an eighth
    assert layout.nbytes("params") == 2 * part * 2 + 2 * ids * 8
    assert layout.nbytes("grads") == 2 * part * 4
    assert layout.nbytes("main") == layout.nbytes("optim") == part * 4
    assert layout.nbytes("optim", torch.bfloat16) == part * 2
    assert layout.nbytes_unsharded == 703 * 2 + 5 * 8
    assert (layout.num_params, layout.num_padding) == (708, 8 * part - 703 + 8 - 5)


def test_leaves_that_vary_count_for_all_their_ranks():
    mesh, strategy = fs.Mesh({"dp": 2, "ep": 4}), {"gate": fs.zero3("dp", "ep"), "experts": fs.zero3("dp").varying("ep")}
    layout = fs.plan({"experts": torch.ones(5, 3), "gate": torch.ones(7)}, mesh, strategy, units="*")
    assert (layout.num_params, layout.num_padding) == (4 * 15 + 7, 4 * 1 + 1)
    assert layout.nbytes_unsharded == 4 * layout.num_params
    assert layout.nbytes("params") == 4 * (8 + 1), "half of one expert, and an eighth of the gate"
    assert str(layout).startswith("Layout of 67 parameters")


def test_ties_within_a_unit_and_across_units():
    shared, other = torch.ones(4, 3), torch.ones(5)
    tree = {"embed": shared, "layers": [{"a": other, "b": other}], "head": {"w": shared, "v": torch.ones(2)}}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"), units=["embed", "layers.*", "head"])
    ties = {unit.path_in_tree(leaf): leaf.tied_to for unit in layout.units for leaf in unit.leaves}
    assert ties == {"embed": None, "head.v": None, "head.w": ("embed", ""), "layers.0.a": None, "layers.0.b": ("layers.0", "a")}
    assert layout.num_params == 12 + 5 + 2
    nodes = fs.layouts.units_of(fs.shard_for(tree, layout, 0, place="full"))
    by_name = {node.name: node for node in nodes}
    assert torch.equal(by_name["head"].tree(ties=[by_name["embed"]])["w"], shared)
    assert fs.Layout.from_json(layout.to_json()) == layout


def test_what_is_no_tie():
    base = torch.arange(12.0)
    tree = {"q": base[:4], "k": base[4:8], "e": base[:0], "f": base[:0], "c": torch.ones(3), "d": torch.ones(3)}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    assert not any(leaf.tied_to for leaf in layout[""].leaves)


def test_meta_leaves_are_planned_like_real_ones():
    real = {"w": torch.ones(3, 5), "s": torch.ones(()), "h": torch.ones(4, dtype=torch.float16), "e": torch.ones(0, 2)}
    real["tied"] = real["w"]
    memo = {id(t): t.to("meta") for t in real.values()}
    meta = {name: memo[id(t)] for name, t in real.items()}
    args = (fs.Mesh({"dp": 3}), fs.zero3("dp"))
    assert fs.plan(meta, *args, atoms=fs.layouts.RowsAtom(1)) == fs.plan(real, *args, atoms=fs.layouts.RowsAtom(1))


def test_groups_of_frozen_integer_and_labelled_leaves():
    tree = {
        "w": torch.ones(2, 2),
        "b": torch.ones(2),
        "half": torch.ones(3).half(),
        "ids": torch.arange(4),
        "old": torch.ones(5),
    }
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"), frozen="old", labels={"w": "matrix"})
    groups = {leaf.path: layout[""].groups[leaf.group] for leaf in layout[""].leaves}
    assert [path for path, group in groups.items() if group.trainable] == ["b", "half", "w"]
    assert groups["w"].label == "matrix"
    assert len({id(group) for group in groups.values()}) == 5
    assert layout[""].trainable_groups == tuple(i for i, g in enumerate(layout[""].groups) if g.trainable)
    predicate = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"), frozen=lambda path: path == "old", labels={"w": "matrix"})
    assert predicate == layout


def test_strategies_by_unit():
    tree = {"embed": torch.ones(6), "layers": [torch.ones(6), torch.ones(6)]}
    rules = {"**": fs.zero3("dp"), "embed": fs.ddp("dp")}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), rules, units="layers.*")
    assert [(unit.name, str(unit.strategy)) for unit in layout.units] == [
        ("embed", "dp: RPR"),
        ("layers.0", "dp: SSS"),
        ("layers.1", "dp: SSS"),
    ]
    assert layout.nbytes("params") == 24 + 12 + 12


def test_the_table_says_what_rests_where():
    block = {"w": torch.empty(64, 64), "b": torch.empty(7)}
    tree = {"embed": torch.empty(100, 8, dtype=torch.bfloat16), "layers": [block, {k: v.clone() for k, v in block.items()}]}
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 4}), fs.hfsdp("o", "i"), units="layers.*", frozen="embed", precision=precision)
    assert str(layout).splitlines() == [
        "Layout of 9,006 parameters on Mesh(o=2, i=4)",
        "unit         leaves  buffers                  elements  padding  strategy P/G/O  params/rank",
        "-" * 92,
        "embed        1       bfloat16 frozen          800       0        o: RPS, i: SSS  400 B",
        "layers.* x2  2       bfloat16 (main float32)  8,206     2        o: RPS, i: SSS  4.01 KiB",
        "padding 2 elements (0.0222 %)",
        "at rest on each rank: params 4.40 KiB, grads 8.02 KiB, main 4.01 KiB, each optimizer buffer 4.01 KiB; "
        "unsharded params 17.59 KiB",
    ]


def test_an_empty_tree_has_an_empty_layout():
    layout = fs.plan({}, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    assert (layout.units, layout.num_params, layout.nbytes("params")) == ((), 0, 0)
    assert "Layout of 0 parameters" in str(layout)
    assert fs.unshard([fs.shard_for({}, layout, rank) for rank in range(2)]) == {}


def test_an_empty_tree_is_not_trained():
    layout = fs.plan({}, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    comm = fs.SingleComm()
    with pytest.raises(TreeError, match=r"init_state\(\): the tree is empty, {}: expected at least one Sharded"):
        fs.init_state(fs.optim.adamw(1e-3), fs.shard({}, layout, comm), comm=comm)


def test_a_tree_that_nests_deeply():
    tree, comm = torch.ones(3), fs.SingleComm()
    for _ in range(900):
        tree = {"a": tree}
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"))
    assert layout.num_params == 3
    if sys.version_info >= (3, 13):  # JSON nests there as deeply as optree
        assert type(layout).from_json(layout.to_json()) == layout
        return
    with pytest.raises(LayoutError, match=r"the tree nests too deeply for JSON.*sys.setrecursionlimit\(\), which is [0-9]+"):
        layout.to_json()


def llama(d, f, num_layers):
    """Shapes of a Llama of this width, and of this width of its feed-forward layers."""

    def empty(*shape):
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    shapes = {"wq": (d, d), "wk": (d, 1024), "wv": (d, 1024), "wo": (d, d), "w1": (d, f), "w2": (f, d), "w3": (d, f)}
    shapes |= {"attn_norm": (d,), "mlp_norm": (d,)}
    layers = [{name: empty(*shape) for name, shape in shapes.items()} for _ in range(num_layers)]
    return {"embed": empty(128256, d), "layers": layers, "norm": empty(d), "head": empty(d, 128256)}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("atom", [fs.layouts.ElementAtom(), fs.layouts.RowsAtom(1)], ids=str)
def test_llama_405b_on_16384_ranks(atom):
    tree = llama(16384, 53248, 126)
    kwargs = {"units": "layers.*", "atoms": atom, "precision": fs.Precision(torch.bfloat16, torch.float32)}
    grid = (fs.Mesh({"outer": 32, "inner": 512}), fs.hfsdp("outer", "inner"))
    start = time.monotonic()
    many = [fs.plan(tree, fs.Mesh({"dp": 16384}), fs.zero3("dp"), **kwargs), fs.plan(tree, *grid, **kwargs)]
    print(f"two plans in {time.monotonic() - start:.2f} s", file=sys.stderr)
    few = fs.plan(tree, fs.Mesh({"dp": 2}), fs.zero3("dp"), **kwargs)
    for layout in many:
        assert layout.num_params == 405_853_388_800
        assert len(layout.units) == 126 + 3
        if atom == fs.layouts.ElementAtom():
            assert layout.num_padding < 129 * 16384
        text = layout.to_json()
        digits = sum(map(str.isdigit, text)) - sum(map(str.isdigit, few.to_json()))
        assert len(text) - len(few.to_json()) - digits < 129 * 200, "no rank is written down"
        assert fs.Layout.from_json(text) == layout
    assert many[0].nbytes("params") == pytest.approx(2 * 405_853_388_800 / 16384, rel=0.5)
    assert "layers.* x126" in str(many[0])
