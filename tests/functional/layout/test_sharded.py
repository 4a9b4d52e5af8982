import optree
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils import _pytree as torch_pytree

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.functional.layout.plan import find_tie_owners
from fsharp.functional.tree.paths import flatten_with_paths
from fsharp.testing.generate import cases, precisions, trees
from tests.scheduling import few_examples

PLACES = ("params", "grads", "optim", "full")


def bits(tensor):
    return tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_same_trees(actual, expected):
    """The same structure, paths, shapes, dtypes and bits."""
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    for path, a, b in zip(
        flatten_with_paths(expected)[0], optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert torch.equal(bits(a), bits(b)), path


def all_ranks(case, place="params", dtype="main"):
    return [fs.shard_for(case.tree, case.layout, rank, place=place, dtype=dtype) for rank in range(case.layout.mesh.size)]


@few_examples
@given(cases(), st.sampled_from(PLACES))
def test_unshard_is_the_inverse_of_shard_for_bit_for_bit(case, place):
    before = optree.tree_map(torch.clone, case.tree)
    shards = all_ranks(case, place)
    assert_same_trees(case.tree, before)
    if any(node.place.partial_axes for node in fs.layouts.units_of(shards[0])):
        with pytest.raises(TreeError, match="rests partial"):
            fs.unshard(shards)
        return
    full = fs.unshard(shards)
    assert_same_trees(full, case.tree)
    leaves = optree.tree_leaves(full)
    ties = find_tie_owners(flatten_with_paths(case.tree)[0], optree.tree_leaves(case.tree))
    by_path = dict(zip(flatten_with_paths(full)[0], leaves, strict=True))
    assert all(by_path[path].data_ptr() == by_path[owner].data_ptr() for path, owner in ties.items()), "ties stay ties"


@few_examples
@given(cases(precision=precisions()), st.sampled_from(["params", "optim", None]), st.sampled_from(["main", "compute"]))
def test_dtypes_at_rest_are_those_of_the_precision(case, place, kind):
    for node in fs.layouts.units_of(all_ranks(case, place, kind)[0]):
        for group, buffer in zip(node.groups, node.buffers, strict=True):
            assert buffer.dtype == getattr(node.unit.groups[group].dtypes, kind)
    # The values are integers that every dtype holds.
    for a, b in zip(optree.tree_leaves(fs.unshard(all_ranks(case, place, kind))), optree.tree_leaves(case.tree), strict=True):
        assert torch.equal(a.to(b.dtype), b)


@few_examples
@given(cases(), st.sampled_from(PLACES))
def test_local_leaves_tile_each_leaf_and_padding_is_zero(case, place):
    units = {unit.name: unit for unit in case.layout.units}
    by_path = dict(zip(*flatten_with_paths(case.tree)[:2], strict=True))
    seen = {path: [] for path in by_path}
    for rank, tree in enumerate(all_ranks(case, place)):
        for node in fs.layouts.units_of(tree):
            assert node.unit is units[node.name]
            rest = [buffer.clone() for buffer in node.buffers]
            for i, group in enumerate(node.groups):
                assert node.buffers[i].shape == (node.unit.local_size(group, node.place),)
                spans = {span.leaf: (span.first, span.last) for span in node.unit.leaf_spans(group, node.place, rank)}
                for leaf in node.unit.leaves_of_group(group):
                    assert node.unit.leaf_range_on_rank(leaf, node.place, rank) == spans.get(leaf, (0, 0))
                for span in node.unit.leaf_spans(group, node.place, rank):
                    path = node.unit.path_in_tree(span.leaf)
                    piece = node.local_leaves(rank)[path]
                    assert piece.data_ptr() == node.buffers[i][span.start :].data_ptr(), "a view"
                    assert torch.equal(piece, by_path[path].reshape(-1)[span.first : span.last])
                    seen[path].append((span.first, span.last))
                    rest[i][span.start : span.stop] = 0
            assert not any(bool(buffer.any()) for buffer in rest), "padding is zero"
            assert node.nbytes == sum(b.nbytes for b in node.buffers)
    for unit in case.layout.units:
        for leaf in unit.leaves:
            runs = sorted(set(seen[unit.path_in_tree(leaf)]))
            ends = [0, *(last for _, last in runs)]
            expected = 0 if leaf.tied_to else leaf.numel
            assert ends[-1] == expected
            assert [first for first, _ in runs] == ends[:-1], "without gaps or overlaps"


@pytest.mark.parametrize("library", [optree, torch_pytree], ids=["optree", "torch"])
@given(case=cases(max_ranks=4))
def test_pytree_libraries_see_the_buffers(library, case):
    tree = fs.shard_for(case.tree, case.layout, 0)
    leaves, spec = library.tree_flatten(tree)
    expected = [buffer for node in fs.layouts.units_of(tree) for buffer in node.buffers]
    assert {id(leaf) for leaf in leaves if leaf is not None} == {id(b) for b in expected}  # each library has its order of keys
    again = library.tree_unflatten(spec, leaves) if library is optree else library.tree_unflatten(leaves, spec)
    for a, b in zip(fs.layouts.units_of(again), fs.layouts.units_of(tree), strict=True):
        assert (a.unit, a.place, a.groups) == (b.unit, b.place, b.groups)
    zeros = library.tree_map(lambda x: None if x is None else torch.zeros_like(x), tree)  # to torch None is a leaf
    assert all(isinstance(a, fs.Sharded) for a in fs.layouts.units_of(zeros))
    buffers = [buffer for node in fs.layouts.units_of(zeros) for buffer in node.buffers]
    assert [(b.shape, b.dtype, bool(b.any())) for b in buffers] == [(b.shape, b.dtype, False) for b in expected]
    if library is optree:
        assert spec == optree.tree_structure(fs.shard_for(case.tree, case.layout, 0)), "contexts compare by value"
        assert hash(spec) == hash(optree.tree_structure(zeros))


def test_trees_in_other_places_have_other_structures():
    layout = fs.plan({"w": torch.ones(4)}, fs.Mesh({"dp": 2}), fs.zero1("dp"))
    specs = [optree.tree_structure(fs.shard_for({"w": torch.ones(4)}, layout, 0, place=p)) for p in ("params", "optim")]
    assert specs[0] != specs[1]


@few_examples
@given(cases(max_ranks=4))
def test_merge_is_the_inverse_of_trainable(case):
    tree = fs.shard_for(case.tree, case.layout, 0)
    part = fs.trainable(tree)
    for node in fs.layouts.units_of(part):
        assert node.groups == node.unit.trainable_groups
        assert all(node.unit.groups[g].trainable for g in node.groups)
    merged = fs.layouts.merge(tree, part)
    assert [id(x) for x in optree.tree_leaves(merged)] == [id(x) for x in optree.tree_leaves(tree)]
    doubled = fs.layouts.merge(tree, optree.tree_map(lambda x: x * 2, part))
    for new, old in zip(fs.layouts.units_of(doubled), fs.layouts.units_of(tree), strict=True):
        assert new.groups == old.groups
        for group, a, b in zip(new.groups, new.buffers, old.buffers, strict=True):
            assert torch.equal(a, b * 2) if group in new.unit.trainable_groups else a is b


@pytest.mark.parametrize(("strategy", "place"), [(fs.zero1, "optim"), (fs.zero3, "full")])
def test_merge_refuses_a_part_in_another_place(strategy, place):
    tree = {"w": torch.arange(3.0), "steps": torch.arange(3)}
    layout = fs.plan(tree, fs.Mesh({"dp": 2}), strategy("dp"))
    part = fs.trainable(fs.shard_for(tree, layout, 0, place=place))
    with pytest.raises(TreeError, match=r"merge\(\): unit .* rests dp:.*, and its part dp:.* to one place"):
        fs.layouts.merge(fs.shard_for(tree, layout, 0), part)


def test_repr_shows_places_and_no_values():
    tree = {"w": torch.full((5,), 7777.0), "n": torch.tensor([8888])}
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 2}), fs.hsdp("o", "i"))
    shown = repr(fs.shard_for(tree, layout, 0))
    assert shown == "Sharded('', i:Shard, o:Replicate, int64[1] of 2; float32[3] of 6)"
    assert repr(fs.trainable(fs.shard_for({"n": tree["n"]}, fs.plan({"n": tree["n"]}, layout.mesh, fs.ddp("o", "i")), 0))) == (
        "Sharded('', o:Replicate, i:Replicate, empty)"
    )


@given(trees())
def test_full_tree_is_made_of_views(tree):
    layout = fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    node = fs.shard_for(tree, layout, 0, place="full")
    storages = {buffer.untyped_storage().data_ptr() for buffer in node.buffers}
    leaves = optree.tree_leaves(node.tree())
    assert all(leaf.untyped_storage().data_ptr() in storages for leaf in leaves if leaf.numel())
    assert_same_trees(node.tree(), tree)


def test_leading_dims_are_carried_along():
    tree = {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(5.0)}
    node = fs.shard_for(tree, fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp")), 0, place="full")
    batched = node.replace([torch.stack([b, b + 1]) for b in node.buffers])
    assert torch.equal(batched.tree()["w"], torch.stack([tree["w"], tree["w"] + 1]))
    assert batched.tree()["s"].tolist() == [5.0, 6.0]
    assert batched.local_leaves(0)["w"].shape == (2, 6)


def test_any_nested_place_of_the_strategy_is_a_place():
    tree = {"w": torch.arange(7.0)}
    mesh = fs.Mesh({"o": 2, "i": 2})
    layout = fs.plan(tree, mesh, fs.zero3("o", "i"))
    place = fs.layouts.MeshPlacement(("o", "i"), (fs.layouts.Shard, fs.layouts.Replicate))
    parts = [fs.shard_for(tree, layout, rank, place=place) for rank in range(4)]
    assert [p.buffers[0].tolist() for p in parts] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 0]] * 2
    assert_same_trees(fs.unshard(parts), tree)


def test_a_unit_used_outside_of_a_forward_names_its_leaves_and_the_remedy():
    tree = {"a": {"w": torch.ones(4, 4), "b": torch.ones(4)}, "head": torch.ones(4, 4)}
    layout = fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp"), units=["a", "head"])
    shards = fs.shard_for(tree, layout, 0)
    with pytest.raises(
        TreeError, match=r"(?s)unit 'a': used in \['w'\].* leaves  b, w\n.*fs\.forward\(fn, unit, \.\.\., comm=comm\)"
    ):
        shards["a"]["w"]
    for product in (lambda: torch.ones(2, 4) @ shards["head"], lambda: shards["head"] @ torch.ones(4)):
        with pytest.raises(TreeError, match=r"unit 'head': used in a sum or a product, but outside of fs\.forward\(\)"):
            product()
