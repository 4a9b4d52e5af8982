"""Property tests of shard and unshard, for trees of your own. Run: pytest examples/property_test_roundtrip.py

`fsharp.testing.generate` draws meshes, strategies and trees. All ranks run in one process, no process group needed.
"""

import optree
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.testing import generate, simulate


def my_tree(width, layers):
    """Whatever you train: here a small recurrent network with odd sizes and two dtypes."""
    cell = {"w": torch.randn(width, 2 * width + 1), "b": torch.randn(2 * width + 1).to(torch.bfloat16)}
    return {"cells": [optree.tree_map(torch.clone, cell) for _ in range(layers)], "steps": torch.tensor(3)}


@given(st.data(), st.integers(0, 7), st.integers(1, 3))
def test_my_tree_survives_sharding(data, width, layers):
    """Cut it anywhere, put it together again: every bit is there."""
    tree = my_tree(width, layers)
    mesh = data.draw(generate.meshes())
    strategy, atoms = data.draw(generate.strategies(mesh)), data.draw(generate.sharding_atoms())
    layout = fs.plan(tree, mesh, strategy, units="cells.*", atoms=atoms)
    shards = [fs.shard_for(tree, layout, rank) for rank in range(mesh.size)]
    same(fs.unshard(shards), tree)
    assert fs.Layout.from_json(layout.to_json()) == layout


@given(st.data(), st.integers(1, 5))
def test_gather_is_the_inverse_of_shard_on_every_rank(data, width):
    tree = my_tree(width, 2)
    mesh = data.draw(generate.meshes())
    layout = fs.plan(tree, mesh, data.draw(generate.strategies(mesh)), units="cells.*")
    for whole in simulate(mesh, lambda comm: fs.full_tree(fs.shard(tree, layout, comm), comm=comm)):
        same(whole, tree)


@given(st.data())
def test_any_tree_at_all(data):
    """Scalars, empty and tied leaves, views, many dtypes, nested containers."""
    tree, mesh = data.draw(generate.trees()), data.draw(generate.meshes())
    layout = fs.plan(tree, mesh, data.draw(generate.strategies(mesh)))
    same(fs.unshard([fs.shard_for(tree, layout, rank) for rank in range(mesh.size)]), tree)


def same(a, b):
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert torch.equal(x, y)
