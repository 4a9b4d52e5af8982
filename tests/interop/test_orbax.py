"""from_orbax and to_orbax, against what Orbax itself writes and reads."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp_0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import torch

import fsharp as fs
from fsharp.errors import CheckpointError
from fsharp.interop import orbax
from fsharp.interop.orbax import from_orbax, to_orbax
from fsharp.testing import simulate

COMM = fs.SingleComm()
TREE = {
    "layers": [{"w": np.arange(12.0, dtype=np.float32).reshape(4, 3)}, {"w": np.ones((4, 3), jnp.bfloat16)}],
    "count": np.array(1 << 40),
    "scale": np.array(2.5, np.float16),
}
SAVED_BY = {
    "v1": lambda path, tree: ocp.save(path, tree),
    "StandardCheckpointer": lambda path, tree: save_by_standard(path, tree),
}


def save_by_standard(path, tree):
    with ocp_0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def zeros():
    return {
        "layers": [{"w": torch.zeros(4, 3)}, {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}],
        "count": torch.zeros((), dtype=torch.int64),
        "scale": torch.zeros((), dtype=torch.float16),
    }


def assert_is_tree(found):
    torch.testing.assert_close(found["layers"][0]["w"], torch.arange(12.0).view(4, 3), rtol=0, atol=0)
    torch.testing.assert_close(found["layers"][1]["w"], torch.ones(4, 3, dtype=torch.bfloat16), rtol=0, atol=0)
    assert found["count"] == 1 << 40
    assert found["scale"] == 2.5


@pytest.mark.parametrize("kind", SAVED_BY)
def test_what_orbax_saves_is_loaded(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_READ_NBYTES", 60)  # several reads
    SAVED_BY[kind](tmp_path / "theirs", TREE | {"name": "run 7", "lr": 0.5} if kind == "v1" else TREE)
    made = from_orbax(tmp_path / "theirs", tmp_path / "ours", step=3)
    assert made.step == 3
    assert made.manifest.values == ({"name": "run 7", "lr": 0.5} if kind == "v1" else {})
    assert_is_tree(fs.checkpoint.load(tmp_path / "ours", zeros(), comm=COMM, strict=False))


def test_arrays_of_several_devices_are_loaded_onto_ranks(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("dp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    ocp.save(tmp_path / "theirs", {"w": jax.device_put(jnp.arange(24.0).reshape(8, 3), sharding)})
    from_orbax(tmp_path / "theirs", tmp_path / "ours")

    def run(comm):
        params = fs.shard({"w": torch.zeros(8, 3)}, fs.plan({"w": torch.zeros(8, 3)}, comm.mesh, fs.zero3("dp")), comm)
        return fs.full_tree(fs.checkpoint.load(tmp_path / "ours", params, comm=comm), comm=comm)["w"]

    for found in simulate(fs.Mesh({"dp": 3}), run):
        assert torch.equal(found, torch.arange(24.0).view(8, 3))


def test_orbax_loads_what_is_written(tmp_path):
    tree = fs.checkpoint.load(_saved(tmp_path), zeros(), comm=COMM)
    made = fs.checkpoint.save(tmp_path / "ours", {"params": tree, "step": 4}, step=0, comm=COMM)
    to_orbax(made, tmp_path / "theirs", subtree="params")
    found = ocp.load(tmp_path / "theirs")
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, found, TREE)
    assert_is_tree(fs.checkpoint.load(from_orbax(tmp_path / "theirs", tmp_path / "again").path, zeros(), comm=COMM))


def _saved(tmp_path):
    ocp.save(tmp_path / "first", TREE)
    return from_orbax(tmp_path / "first", tmp_path / "start").path


def test_what_is_refused_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"none: Orbax says"):
        from_orbax(tmp_path / "none", tmp_path / "ours")
    ocp.save(tmp_path / "theirs", {"w": np.ones(3, jnp.float4_e2m1fn)})
    with pytest.raises(CheckpointError, match=r"'w' is float4_e2m1fn, which torch does not have. ignore='w' leaves it out"):
        from_orbax(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    tree = {"full": {"a": torch.ones(2), "b": torch.ones(2)}, "e": torch.empty(0)}
    made = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    with pytest.raises(CheckpointError, match=r"'a.b' lies within another tensor"):
        to_orbax(made, tmp_path / "out", subtree="full", rename=lambda name: {"a": "a", "b": "a.b"}[name])
    with pytest.raises(CheckpointError, match=r"'e' has no elements, and Orbax saves no such array"):
        to_orbax(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"theirs exists already"):
        to_orbax(made, tmp_path / "theirs")
