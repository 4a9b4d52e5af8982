"""Partition specs of JAX mean what they mean there: the same blocks of the same shape."""

import pytest
import torch
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import fsharp as fs

MESH = {"outer": 2, "inner": 4}


@pytest.mark.parametrize(
    "entries", [(), ("inner",), ("outer", None), (("outer", "inner"),), (("inner", "outer"), None), (None,)]
)
def test_a_spec_of_jax_gives_its_shards(entries):
    theirs = NamedSharding(AbstractMesh(tuple(MESH.values()), tuple(MESH)), PartitionSpec(*entries))
    tree = {"w": torch.empty(16, 3), "v": torch.empty(8, 2, 5)}
    layout = fs.plan(tree, fs.Mesh(MESH), {"**": theirs.spec}, units="*")
    assert layout == fs.plan(tree, fs.Mesh(MESH), fs.P(*entries), units="*")
    for path, found in fs.inspect.sharding(layout).leaves.items():
        assert found.shard_shape == theirs.shard_shape(tuple(tree[path].shape))
        assert found.is_fully_replicated == theirs.is_fully_replicated


def test_what_only_jax_has_is_refused():
    with pytest.raises(fs.errors.StrategyError, match="dim 0 is UNCONSTRAINED, expected the name of an axis"):
        fs.plan(torch.empty(4), fs.Mesh({"dp": 2}), PartitionSpec(PartitionSpec.UNCONSTRAINED))
    with pytest.raises(ValueError, match="unreduced"):
        fs.plan(torch.empty(4), fs.Mesh({"dp": 2}), PartitionSpec(unreduced={"dp"}))
