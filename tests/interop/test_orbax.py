"""from_orbax and to_orbax, against what Orbax itself writes and reads."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp_0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import torch

import fsharp as fs
from fsharp.errors import CheckpointError, OptionError
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


def test_all_pytrees_of_a_checkpoint_are_converted(tmp_path, monkeypatch):
    """Those of a CheckpointManager's step, and of save_checkpointables. JSON is left out."""
    monkeypatch.setattr("fsharp.interop.orbax._READ_NBYTES", 16)
    params, opt = {"w": jnp.arange(6.0).reshape(2, 3)}, {"mu": {"w": jnp.ones((2, 3))}, "count": jnp.int32(4), "name": "adam"}
    save = ocp_0.args.StandardSave
    with ocp_0.CheckpointManager(tmp_path / "steps") as manager:
        for step in (9, 10):
            items = {"params": save(params), "opt": save({**opt, "name": 1}), "meta": ocp_0.args.JsonSave({"a": 1})}
            manager.save(step, args=ocp_0.args.Composite(**items))
        manager.wait_until_finished()
    ocp.save_checkpointables(tmp_path / "theirs", {"params": params, "opt": opt})
    for folder, name in [("steps/10", 1), ("theirs", "adam")]:
        found = from_orbax(tmp_path / folder, tmp_path / "ours")
        assert found.tensor_names == ["opt.count", "opt.mu.w", "params.w"]
        assert dict(found.manifest.values) == {"opt.name": name}
        assert found.tensor("params.w").tolist() == [[0, 1, 2], [3, 4, 5]]
        like = {"count": torch.zeros((), dtype=torch.int32), "mu": {"w": torch.zeros(2, 3)}, "name": name}
        assert fs.checkpoint.load(found, like, comm=COMM, subtree="opt")["count"] == 4
    with pytest.raises(CheckpointError, match=r"steps: there is no checkpoint here. Pass one inside of it, .*/steps/10\."):
        from_orbax(tmp_path / "steps", tmp_path / "ours")


def test_json_beside_a_pytree_is_left_out(tmp_path):
    with ocp_0.CheckpointManager(tmp_path / "steps") as manager:
        items = {"meta": ocp_0.args.JsonSave({"a": 1}), "weights": ocp_0.args.StandardSave({"w": jnp.ones(2)})}
        manager.save(3, args=ocp_0.args.Composite(**items))
        manager.wait_until_finished()
    assert from_orbax(tmp_path / "steps/3", tmp_path / "ours").tensor_names == ["w"]


def test_one_array_stays_one_array(tmp_path):
    ocp.save(tmp_path / "first", jnp.arange(3))
    made = from_orbax(tmp_path / "first", tmp_path / "ours")
    assert fs.checkpoint.load(made, torch.zeros(3, dtype=torch.int32), comm=COMM).tolist() == [0, 1, 2]
    to_orbax(made, tmp_path / "again")
    assert ocp.load(tmp_path / "again").tolist() == [0, 1, 2]


def _saved(tmp_path):
    ocp.save(tmp_path / "first", TREE)
    return from_orbax(tmp_path / "first", tmp_path / "start").path


def test_what_is_refused_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"none: Orbax says"):
        from_orbax(tmp_path / "none", tmp_path / "ours")
    ocp.save(tmp_path / "theirs", {"w": np.ones(3, jnp.float4_e2m1fn)})
    ocp.save(tmp_path / "four bits", {"w": jnp.ones(4, jnp.int4)})  # a name that torch has, without memory
    with pytest.raises(CheckpointError, match=r"'w' is int4, which torch does not have"):
        from_orbax(tmp_path / "four bits", tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"'w' is float4_e2m1fn, which torch does not have. ignore='w' leaves it out"):
        from_orbax(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    tree = {"full": {"a": torch.ones(2), "b": torch.ones(2)}, "e": torch.empty(0)}
    made = fs.checkpoint.save(tmp_path / "root", tree, step=0, comm=COMM)
    with pytest.raises(CheckpointError, match=r"'a.b' lies within another tensor"):
        to_orbax(made, tmp_path / "out", subtree="full", rename=lambda name: {"a": "a", "b": "a.b"}[name])
    with pytest.raises(CheckpointError, match=r"'e' has no elements, which Orbax cannot save"):
        to_orbax(made, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"'a\.x\.x.*\.\.\. nests 301 levels, of which Orbax can read 300"):
        to_orbax(made, tmp_path / "out", subtree="full", rename=lambda name: name + 301 * ".x")
    for name, special in {"out/lr[1e-3]": r"'\['", "out/a\\b": r"'\\\\'", "out/a*": r"'\*'", "out/a?": r"'\?'"}.items():
        with pytest.raises(CheckpointError, match=rf"has {special}. Orbax takes paths for patterns"):
            to_orbax(made, tmp_path / name, subtree="full")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"theirs exists already"):
        to_orbax(made, tmp_path / "theirs")


def block(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"])


def stacked_tree():
    w, b = jax.random.normal(jax.random.key(0), (5, 6, 6)) / 3, jnp.linspace(0, 1, 30).reshape(5, 6)
    layers = {"w": w, "b": b.astype(jnp.bfloat16)}
    return {
        "params": {"head": jnp.arange(6.0), "layers": layers},
        "mu": jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), layers),
    }


STACKS = {"params.layers": 0, "mu": 1}


def test_layers_that_lax_scan_takes_become_units_and_go_back(tmp_path, monkeypatch):
    tree, x = stacked_tree(), np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    ocp.save(tmp_path / "theirs", tree)
    asked, load = [], ocp.load

    def recording_load(path, target, **options):
        asked.extend(name for name, leaf in _named(target).items() if leaf is not ocp.PLACEHOLDER)
        return load(path, target, **options)

    monkeypatch.setattr(orbax, "_READ_NBYTES", 200)  # a slice of a leaf or two
    monkeypatch.setattr(orbax.ocp, "load", recording_load)
    made = from_orbax(tmp_path / "theirs", tmp_path / "ours", unstack=STACKS)
    assert sorted(asked) == sorted(_named(tree)), "each leaf is read once, however many slices it has"

    def layer():
        return {"w": torch.empty(6, 6), "b": torch.empty(6, dtype=torch.bfloat16)}

    shapes = {"head": torch.empty(6), "layers": [layer() for _ in range(5)]}

    def run(comm):
        layout = fs.plan(shapes, comm.mesh, fs.zero3("dp"), units="layers.*")
        params = fs.checkpoint.load(made, fs.shard(shapes, layout, comm), comm=comm, subtree="params")
        out = torch.from_numpy(x)
        for each in params["layers"]:
            out = fs.forward(lambda p, out: out + torch.tanh(out @ p["w"] + p["b"]), each, out, comm=comm)
        return out.detach()

    expected, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, tree["params"]["layers"])
    for found in simulate(fs.Mesh({"dp": 2}), run):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    to_orbax(made, tmp_path / "back", stack=STACKS)
    found = ocp.load(tmp_path / "back")
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def _named(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize(
    ("tree", "unstack", "error"),
    [
        (
            {"a": {"w": (3, 2), "b": (4, 2)}},
            {"a": 0},
            r"asks for the layers of 'a.w', whose shape is \[3, 2\]; 'a.b' has .*\[4, 2\]",
        ),
        ({"a": {"w": (3, 2), "b": (3,)}}, {"a": 1}, r"asks for the layers of 'a.b', whose shape is \[3\]"),
        ({"a": {"w": (3, 2)}}, {"b": 0}, r"unstack names 'b', which has no arrays. Arrays: \['a.w'\]"),
        ({"a": {"b": (3, 2)}}, {"a": 0, "a.b": 0}, r"unstack has 'a' and 'a.b', of which both contain 'a.b'"),
        ({"a": {"b": (2, 2), "0": {"b": (2, 2)}}}, {"a.b": 0, "a": 0}, r"both contain 'a.b'"),
        (
            {"a": {"0": {"w": (2,)}, "w": (2, 2)}},
            {"a": 0},
            r"layer 0 of 'a.w' would have the name 'a.0.w', which another array has",
        ),
    ],
)
def test_subtrees_that_are_not_stacks_are_refused(tmp_path, tree, unstack, error):
    ocp.save(tmp_path / "theirs", jax.tree.map(np.ones, tree, is_leaf=lambda leaf: isinstance(leaf, tuple)))
    with pytest.raises(CheckpointError, match=error):
        from_orbax(tmp_path / "theirs", tmp_path / "ours", unstack=unstack)
    assert not (tmp_path / "ours").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of coroutines that Orbax leaves
def test_a_python_bool_is_refused(tmp_path):
    ocp.save(tmp_path / "theirs", {"w": jnp.ones(4), "flag": True})
    with pytest.raises(CheckpointError, match=r"theirs: Orbax .*\. Orbax describes no tree with a Python bool: load it"):
        from_orbax(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    gc.collect()  # ends the coroutines in this test


@pytest.mark.parametrize(
    ("dims", "error"), [({"a": "0"}, r"stack has 'a': '0', expected"), ("a", r"stack is 'a', expected a Map")]
)
def test_the_dim_of_layers_is_a_number(tmp_path, dims, error):
    ocp.save(tmp_path / "theirs", {"a": np.ones((2, 2))})
    with pytest.raises(OptionError, match=f"un{error}"):
        from_orbax(tmp_path / "theirs", tmp_path / "ours", unstack=dims)
    made = fs.checkpoint.save(tmp_path / "root", {"a": [torch.ones(2)]}, step=0, comm=COMM)
    with pytest.raises(OptionError, match=error):
        to_orbax(made, tmp_path / "out", stack=dims)


@pytest.mark.parametrize(
    ("tree", "stack", "error"),
    [
        (
            [{"w": torch.ones(2)}, {"w": torch.ones(3)}],
            {"a": 0},
            r"'a' cannot be stacked: layer 1 is {'w': 'float32 \[3\]'}, and layer 0",
        ),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2).half()}], {"a": 0}, r"layer 1 is {'w': 'float16 \[2\]'}"),
        ([{"w": torch.ones(2)}, {"v": torch.ones(2)}], {"a": 0}, r"layer 1 is {'v'"),
        ([{"w": torch.ones(2)}], {"a": 2}, r"stack={'a': 2} asks for a dim that not all leaves can have"),
        ([{"w": torch.ones(2)}], {"a.0.w": 0}, r"stack names 'a.0.w', which is not a list of layers"),
        ([{"w": torch.ones(2)}], {"b.c": 0}, r"stack names 'b.c', which is not a list of layers"),
        ({"w": torch.ones(2)}, {"a": 0}, r"stack names 'a', which is not a list of layers"),
    ],
)
def test_layers_that_cannot_be_stacked_are_refused(tmp_path, tree, stack, error):
    made = fs.checkpoint.save(tmp_path / "root", {"a": tree}, step=0, comm=COMM)
    with pytest.raises(CheckpointError, match=error):
        to_orbax(made, tmp_path / "out", stack=stack)
    assert not (tmp_path / "out").exists()
