"""Partition specs of JAX mean what they mean there: the same blocks of the same shape."""

import jax
import jax.numpy as jnp
import numpy as np
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


SHAPES = {"embed": (6, 4), "layers": [{"w": (4, 4), "b": (4,)}, {"w": (4, 4), "b": (4,)}]}
DESCRIBED = {
    "JAX arrays": lambda shape: jnp.zeros(shape, jnp.bfloat16),
    "ShapeDtypeStruct": lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
    "NumPy arrays": lambda shape: np.zeros(shape, jnp.bfloat16),
}


def tree_of(leaf):
    return jax.tree.map(leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


@pytest.mark.parametrize("kind", DESCRIBED)
def test_what_jax_describes_is_planned_as_tensors_are(kind):
    options = {"units": "layers.*", "precision": fs.Precision(compute=torch.bfloat16, main=torch.float32)}
    tensors = tree_of(lambda shape: torch.empty(shape, dtype=torch.bfloat16))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("outer", "inner"))
    layout = fs.plan(tree_of(DESCRIBED[kind]), mesh, fs.hfsdp("outer", "inner"), **options)
    assert layout == fs.plan(tensors, fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner"), **options)


def test_one_array_at_two_paths_is_two_leaves():
    """Arrays of JAX are values: nothing ties them."""
    one = jnp.zeros((4, 4))
    assert fs.plan({"a": one, "b": one}, fs.Mesh({"dp": 2}), fs.ddp("dp")).num_params == 32


@pytest.mark.parametrize("spec", [fs.P, PartitionSpec])
def test_a_tree_of_specs_is_one_of_patterns(spec):
    tree = {"embed": spec("dp"), "layers": [spec(), {"w": spec("dp"), "b": spec("dp")}]}
    patterns = {"embed": spec("dp"), "layers.0": spec(), "layers.1": spec("dp")}
    params, mesh = tree_of(lambda shape: torch.empty(shape)), fs.Mesh({"dp": 2})
    assert fs.plan(params, mesh, tree, units="layers.*") == fs.plan(params, mesh, patterns, units="layers.*")
    with pytest.raises(fs.errors.PatternError, match=r"no pattern selects 'layers.1.b'"):
        fs.plan(params, mesh, {"embed": spec("dp"), "layers": [spec(), {"w": spec("dp")}]}, units="layers.*")
    with pytest.raises(fs.errors.PatternError, match=r"'layers.2'"):
        fs.plan(params, mesh, {"**": spec("dp"), "layers": [spec(), spec("dp"), spec("dp")]}, units="layers.*")


def test_what_is_no_shape_no_mesh_and_no_spec_is_refused():
    mesh = fs.Mesh({"dp": 2})
    with pytest.raises(fs.errors.TreeError, match=r"params\['key'\] is not a tensor"):
        fs.plan({"key": jax.random.key(0)}, mesh, fs.ddp("dp"))
    with pytest.raises(fs.errors.MeshError, match=r"got 4, expected sizes by axis name"):
        fs.plan(torch.empty(4), 4, fs.ddp("dp"))
    with pytest.raises(fs.errors.LayoutError, match=r"strategy has 'dp', expected a Strategy"):
        fs.plan({"w": torch.empty(4)}, mesh, {"w": ["dp"]})
