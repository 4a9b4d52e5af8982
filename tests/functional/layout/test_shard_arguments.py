"""What shard(), shard_for() and init_params() return: where shards rest (place=), and in which dtype (dtype=)."""

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError, TreeError
from tests.ranks import on_ranks

MESH = fs.Mesh({"dp": 2})
STRATEGIES = {"ddp": fs.ddp("dp"), "zero1": fs.zero1("dp"), "zero3": fs.zero3("dp")}
PRECISION = {
    "plain": fs.Precision(),
    "half": fs.Precision(compute=torch.bfloat16),
    "frozen": fs.Precision(compute=torch.bfloat16),
    "bytes": fs.Precision(stored=fs.formats.mxfp8),
}
TREE = {name: torch.linspace(-1, 1, 64).view(8, 8) for name in PRECISION}
AT_REST = {"plain": torch.float32, "half": torch.bfloat16, "frozen": torch.bfloat16, "bytes": torch.uint8}


def layout_of(how, mesh=MESH):
    return fs.plan(TREE, mesh, STRATEGIES[how], units="*", precision={"**": fs.Precision(), **PRECISION}, frozen="frozen")


def loss_fn(params, x, comm):
    for name in TREE:
        x = fs.forward(lambda w, x: torch.tanh(x.to(w.dtype) @ w).float(), params[name], x, comm=comm)
    return x.square().mean()


@pytest.mark.parametrize("how", STRATEGIES)
@on_ranks(MESH)
def test_what_shard_returns_is_what_init_state_needs(comm, how):
    layout, tx = layout_of(how), fs.optim.adamw(1e-2)
    made = fs.shard(TREE, layout, comm), fs.init_params(lambda t, g: TREE["plain"].clone(), layout, comm, key=0)
    expected = fs.shard_for(TREE, layout, comm.rank, place="optim")
    for params in (*made, fs.shard_for(TREE, layout, comm.rank)):
        for name, node in params.items():
            assert node.place == (STRATEGIES[how].params if name == "plain" else STRATEGIES[how].optim), name
            assert node.is_main_copy == (name != "plain")
            if name != "plain":
                assert torch.equal(node.buffers[0], expected[name].buffers[0])
        state = fs.init_state(tx, params, comm=comm)
        assert {name: node.buffers[0].dtype for name, node in state.params.items()} == AT_REST
        state, metrics = fs.train_step(loss_fn, tx)(state, torch.ones(4, 8), comm)
        assert metrics.loss.isfinite()


@pytest.mark.parametrize("how", STRATEGIES)
@pytest.mark.parametrize("dtype", ["main", "compute"])
def test_a_place_says_where_and_a_dtype_says_which_values(how, dtype):
    """A name of a place and the place itself are the same."""
    layout = layout_of(how)
    for place in ("params", "grads", "optim", "full"):
        as_object = getattr(STRATEGIES[how], place)
        if as_object.partial_axes:
            continue
        shards = [fs.shard_for(TREE, layout, 1, place=each, dtype=dtype) for each in (place, as_object)]
        for name in TREE:
            by_name, by_object = (each[name] for each in shards)
            assert by_name.place == by_object.place == as_object
            assert torch.equal(by_name.buffers[0], by_object.buffers[0])
            assert by_name.buffers[0].dtype == (torch.float32 if dtype == "main" else AT_REST[name])


@pytest.mark.parametrize("how", STRATEGIES)
@on_ranks(MESH)
def test_parameters_without_an_optimizer_are_those_of_a_state(comm, how):
    layout = layout_of(how)
    params = fs.shard(TREE, layout, comm, dtype="compute")
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(TREE, layout, comm), comm=comm)
    for name, node in params.items():
        assert (node.place, node.is_main_copy) == (STRATEGIES[how].params, False)
        assert torch.equal(node.buffers[0], state.params[name].buffers[0])
    x = torch.ones(4, 8)
    assert torch.equal(loss_fn(params, x, comm), loss_fn(state.params, x, comm))


ONE = fs.SingleComm(fs.Mesh({"dp": 1}))


def test_main_copies_do_not_take_the_place_of_parameters_unseen():
    """They would take twice the memory, and the loss would be computed in another dtype."""
    params = fs.shard(TREE, layout_of("zero3", ONE.mesh), ONE)
    message = r"(?s)unit 'half' has main copies.* float32\n.* bfloat16\n.*init_state.*dtype='compute'"
    x = torch.ones(4, 8)
    for call in (
        lambda: fs.forward(lambda w: w, params["half"], comm=ONE),
        lambda: fs.forward(lambda tree: tree["half"], {"half": params["half"]}, comm=ONE),
        lambda: fs.value_and_grad(loss_fn)({"half": params["half"]}, x, comm=ONE),
        lambda: fs.per_sample_norms(loss_fn)({"half": params["half"]}, x, comm=ONE),
        lambda: fs.Scheduler(ONE)(lambda p, comm: fs.forward(lambda w: w, p, comm=comm))(params["half"]),
    ):
        with pytest.raises(TreeError, match=message):
            call()
    assert fs.full_tree(params, comm=ONE)["half"].dtype == torch.float32
    moved = optree.tree_map(lambda b: b + 0, params)["half"]  # values of the user's own
    assert fs.forward(lambda w: w, moved, comm=ONE).dtype == torch.float32


def test_parameters_at_rest_make_no_main_copies():
    params = fs.shard({"w": torch.ones(2)}, fs.plan({"w": torch.ones(2)}, ONE.mesh, fs.ddp("dp")), ONE, dtype="compute")
    assert fs.init_state(fs.optim.sgd(0.1), params, comm=ONE).params.buffers[0].dtype == torch.float32
    params = fs.shard(TREE, layout_of("ddp", ONE.mesh), ONE, dtype="compute")
    with pytest.raises(
        TreeError, match=r"(?s)'bytes' has a torch.float32 main copy.*from torch.uint8.*without dtype='compute'"
    ):
        fs.init_state(fs.optim.sgd(0.1), params, comm=ONE)
    with pytest.raises(OptionError, match=r"dtype is torch.bfloat16, expected 'main' or 'compute'"):
        fs.shard(TREE, layout_of("ddp", ONE.mesh), ONE, dtype=torch.bfloat16)
