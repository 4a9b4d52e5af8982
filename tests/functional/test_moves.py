from collections import Counter

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.functional.layout.sharded import resolve_place
from fsharp.functional.traffic import calls_to_gather_buffer, reduce_calls
from fsharp.testing import simulate
from fsharp.testing.generate import FLOATS, cases, integers_on_cpu, precisions
from tests import scheduling
from tests.ranks import on_ranks

NAMES = ("params", "optim", "full")


def prefixes(place):
    """Every place that replicates and shards, from whole to as fine as ``place``."""
    n = len(place.sharded_axes)
    return [
        fs.layouts.MeshPlacement(
            place.axis_order, tuple(fs.layouts.Shard if i < k else fs.layouts.Replicate for i in range(len(place.axis_order)))
        )
        for k in range(n + 1)
    ]


def assert_same(actual, expected):
    for a, b in zip(fs.layouts.units_of(actual), fs.layouts.units_of(expected), strict=True):
        assert (a.name, a.place, a.groups) == (b.name, b.place, b.groups)
        for x, y in zip(a.buffers, b.buffers, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@given(st.data())
def test_gather_moves_between_any_two_places(data):
    case = data.draw(cases())
    unit = case.layout.units[0]
    places = [*NAMES, *prefixes(unit.strategy.optim)]
    source, target = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    expected = Counter()
    for each in case.layout.units:
        for group in each.all_groups:
            places = resolve_place(each, source), resolve_place(each, target)
            nbytes = each.gather_input_nbytes(group, places[0])
            expected += Counter(calls_to_gather_buffer(each, nbytes, each.gather_axes(*places)))

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        tree = fs.shard_for(case.tree, case.layout, comm.rank, place=source)
        before = optree.tree_map(torch.clone, tree)
        moved = fs.gather(tree, comm=counting, to=target)
        assert_same(tree, before)
        assert counting.calls == expected
        return moved

    for rank, moved in enumerate(simulate(case.layout.mesh, rank_fn)):
        assert_same(moved, fs.shard_for(case.tree, case.layout, rank, place=target))


def is_a_sum(source, target):
    """Whether reduce_scatter() goes there: partial sums to anywhere, copies to shards."""
    pairs = zip(source.placements, target.placements, strict=True)
    return all(a is b or (a is not fs.layouts.Shard and b is not fs.layouts.Partial) for a, b in pairs)


@given(st.data())
def test_reduce_scatter_sums_what_ranks_hold(data):
    case = data.draw(cases(dtypes=(*FLOATS, torch.int64), precision=precisions()))
    layout, mesh = case.layout, case.layout.mesh
    strategy = layout.units[0].strategy
    places = [strategy.full.cotangent_place, strategy.grads, strategy.optim, strategy.params, *prefixes(strategy.optim)]
    source = data.draw(st.sampled_from([strategy.full.cotangent_place, strategy.grads, *places]))
    target = data.draw(st.sampled_from([place for place in places if is_a_sum(source, place)]))
    trees = [optree.tree_map(lambda t, r=rank: integers_on_cpu(t, 7 * r + t.numel()), case.tree) for rank in range(mesh.size)]
    tied = fs.unshard([fs.shard_for(case.tree, layout, r, place="full", dtype="compute") for r in range(mesh.size)])
    trees = [_tie(tree, tied) for tree in trees]
    summed = [axis for axis in source.partial_axes if target[axis] is not fs.layouts.Partial]

    def total(rank):
        ranks = [rank]
        for axis in summed:
            ranks = [other for r in ranks for other in mesh.group(axis, r)]
        return optree.tree_map(lambda *leaves: torch.stack(leaves).sum(0, dtype=leaves[0].dtype), *(trees[r] for r in ranks))

    expected_calls = Counter()
    for unit in layout.units:
        for group in unit.trainable_groups:
            expected_calls += reduce_calls(unit, group, source, target)

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        mine = fs.trainable(fs.shard_for(trees[comm.rank], layout, comm.rank, place=source, dtype="compute"))
        before = optree.tree_map(torch.clone, mine)
        moved = fs.reduce_scatter(mine, comm=counting, to=target)
        assert_same(mine, before)
        assert counting.calls == expected_calls
        return moved

    for rank, moved in enumerate(simulate(mesh, rank_fn)):
        want = fs.trainable(fs.shard_for(total(rank), layout, rank, place=target, dtype="compute"))
        accumulate = [node.unit.groups[g].dtypes.accumulate for node in fs.layouts.units_of(want) for g in node.groups]
        flat = iter(accumulate)
        assert_same(moved, optree.tree_map(lambda x, d=flat: x.to(next(d)), want))


def _tie(tree, like):
    """``tree`` with the same tensor where ``like`` has one: random values for each leaf would untie it."""
    owners = {}
    new = [
        owners.setdefault((b.data_ptr(), b.shape, b.dtype) if b.numel() else object(), a)
        for a, b in zip(optree.tree_leaves(tree), optree.tree_leaves(like), strict=True)
    ]
    return optree.tree_unflatten(optree.tree_structure(tree), new)


@scheduling.few_examples
@given(cases(max_ranks=8))
def test_full_gives_every_rank_the_tree(case):
    for tree in simulate(case.layout.mesh, lambda comm: fs.full_tree(fs.shard(case.tree, case.layout, comm), comm=comm)):
        scheduling.assert_same(tree, case.tree)


@scheduling.few_examples
@given(cases(dtypes=FLOATS), st.integers(0, 1 << 40))
def test_init_depends_on_key_and_path_alone(case, key):
    def whole(layout, comm, key):
        return fs.full_tree(fs.init_params(fs.init.normal(), layout, comm, key=key), comm=comm)

    paths_of = optree.tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), case.tree)
    alone = fs.plan(paths_of, fs.Mesh({"one": 1}), fs.ddp("one"))
    layout = fs.plan(paths_of, case.layout.mesh, case.layout.units[0].strategy, atoms=fs.layouts.RowsAtom(2))
    expected, other = (whole(alone, fs.SingleComm(alone.mesh), each) for each in (key, key + 1))
    for tree in simulate(layout.mesh, lambda comm: whole(layout, comm, key)):
        scheduling.assert_same(tree, expected)
    pairs = zip(optree.tree_leaves(other), optree.tree_leaves(expected), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs if a.numel() >= 8), "another key gives other values"


def test_patterns_choose_initializers_and_the_last_counts():
    shapes = {"w": torch.empty(3, 2), "b": torch.empty(5), "n": torch.empty((), dtype=torch.int64)}
    layout = fs.plan(shapes, fs.Mesh({"dp": 2}), fs.zero3("dp"))
    rules = {"**": fs.init.zeros, "w": fs.init.ones, "b": fs.init.uniform(2.0, 3.0)}
    tree = simulate(layout.mesh, lambda comm: fs.full_tree(fs.init_params(rules, layout, comm, key=1), comm=comm))[1]
    assert torch.equal(tree["w"], torch.ones(3, 2))
    assert tree["n"].item() == 0
    assert bool(((tree["b"] >= 2) & (tree["b"] < 3)).all())


REDUCTIONS = {
    "ddp": (fs.ddp("o", "i"), None, [("all_reduce", "o", 1024), ("all_reduce", "i", 1024)]),
    "hsdp": (fs.hsdp("o", "i"), None, [("reduce_scatter", "i", 512), ("all_reduce", "o", 512)]),
    "hfsdp": (fs.hfsdp("o", "i"), None, [("reduce_scatter", "i", 512), ("reduce_scatter", "o", 256)]),
    "hsdp, bfloat16": (
        fs.hsdp("o", "i"),
        torch.bfloat16,
        [("reduce_scatter", "i", 256), ("reduce_scatter", "o", 128), ("all_gather", "o", 256)],
    ),
    "hsdp, bytes between replicas": (
        fs.hsdp("o", "i"),
        {"o": fs.formats.mxint8},
        [("reduce_scatter", "i", 512), ("all_to_all", "o", fs.formats.mxint8.size(64)), ("all_gather", "o", 256)],
    ),
}
"""By hand, for 256 float32: the strategy, the wire, and the collectives in their order, with the bytes that a rank sends."""


@pytest.mark.parametrize("name", REDUCTIONS)
@on_ranks(fs.Mesh({"o": 2, "i": 2}))
def test_sums_are_cut_before_replicas_are_added(comm, name):
    strategy, wire, expected = REDUCTIONS[name]
    tree = {"w": torch.full((256,), 2.0)}
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 2}), strategy, precision=fs.Precision(wire=wire))
    counting = fs.collectives.CountingComm(comm)
    summed = fs.reduce_scatter(fs.shard_for(tree, layout, comm.rank, place=strategy.full.cotangent_place), comm=counting)
    assert list(counting.calls) == expected
    assert list(reduce_calls(layout.units[0], 0, strategy.full.cotangent_place, strategy.optim)) == expected
    assert set(summed.buffers[0].tolist()) == {8.0}


@pytest.mark.parametrize("strategy", [fs.zero3, fs.ddp])
@on_ranks(fs.Mesh({"dp": 3}))
def test_summands_of_a_narrow_dtype_are_added_in_the_accumulate_dtype(comm, strategy):
    """In bfloat16 the second and the third would be lost, one after the other."""
    summand = {"w": torch.full((5,), [1.0, 2**-8, 2**-8][comm.rank])}
    layout = fs.plan(summand, comm.mesh, strategy("dp"), precision=fs.Precision(wire=torch.bfloat16))
    partial = fs.shard_for(summand, layout, comm.rank, place=strategy("dp").full.cotangent_place)
    whole = fs.full_tree(fs.reduce_scatter(partial, comm=comm), comm=comm)
    assert whole["w"].tolist() == [1 + 2**-7] * 5


@pytest.mark.parametrize("axes", [("o", "i"), ("i", "o")])
@on_ranks(fs.Mesh({"o": 2, "i": 2}))
def test_finer_axes_are_gathered_first(comm, axes):
    """The slow axis, if it cuts first, moves n times the bytes only after the fast axis has made parts whole."""
    mesh = fs.Mesh({"o": 2, "i": 2})
    tree = {"w": torch.arange(16.0)}
    layout = fs.plan(tree, mesh, fs.zero3(*axes))
    counting = fs.collectives.CountingComm(comm)
    whole = fs.gather(fs.shard_for(tree, layout, comm.rank), comm=counting)
    assert list(counting.calls) == [("all_gather", axes[1], 16), ("all_gather", axes[0], 32)]
    assert torch.equal(whole.buffers[0], tree["w"])
