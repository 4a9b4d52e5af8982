"""torch.compile: what it is given, before or after sharding, computes what plain torch computes, or is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

import fsharp as fs
from fsharp.testing import simulate
from tests.as_torch import DIM, Block, changed, keep, make, same_as_torch
from tests.ranks import on_ranks
from tests.scheduling import DP, every

BACKEND = "aot_eager"
# Dynamo hides this warning of its own by not showing it, which does nothing where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh():
    """Each test has caches of its own."""
    torch._dynamo.reset()
    counters.clear()


def blocks(model, **options):
    for layer in model.layers:
        layer.compile(**{"backend": BACKEND, **options})


def in_place(model):
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=BACKEND)


def whole(model):
    return torch.compile(model, backend=BACKEND)


def method(model):
    model.compile(backend=BACKEND)


def wrapped(model):
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda each: isinstance(each, Block)
    )


def both(*changes):
    def change(model):
        for each in changes:
            model = changed(model, each)
        return model

    return change


def nothing(model):
    return model


def fullgraph(model):
    blocks(model, fullgraph=True)


WAYS = {
    "blocks before": (blocks, nothing, [Block]),
    "blocks before, in one graph": (fullgraph, nothing, [Block]),
    "blocks after": (nothing, blocks, [Block]),
    "in place before, by class": (in_place, nothing, [Block]),
    "in place before, by path": (in_place, nothing, "layers.*"),
    "in place after": (nothing, in_place, [Block]),
    "all after": (nothing, whole, [Block]),
    "all before": (whole, nothing, [Block]),
    "all before, one unit": (whole, nothing, None),
    "model.compile() after": (nothing, method, [Block]),
    "model.compile() before": (method, nothing, [Block]),
    "wrapped, compiled": (both(wrapped, blocks), nothing, "layers.*"),
    "wrapped, compiled in place": (both(wrapped, in_place), nothing, "layers.*"),
    "compiled, wrapped": (both(blocks, wrapped), nothing, [Block]),
    "compiled, wrapped afterwards": (blocks, wrapped, [Block]),
}


@every(9, strategy=["zero3", "ddp", "zero2"], way=WAYS)
def test_as_in_torch(strategy, way):
    """From the second step on the schedule is followed, as without a compiler."""
    before, after, units = WAYS[way]
    for step in same_as_torch(strategy, before, after, units=units, exact=False, options={"layers": 1}):
        assert step.num_unscheduled_calls == 1
        assert step.last_call_status().kind == "planned"
    assert counters["stats"]["unique_graphs"]


def test_one_graph_for_all_blocks():
    """Not one for each block or step: there are more of them than Dynamo keeps graphs of one function."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(BACKEND)
    same_as_torch("zero3", after=lambda model: blocks(model, backend=counter), exact=False, options={"layers": 9})
    assert counter.frame_count <= 3  # with the one of the module alone


@pytest.mark.deep
def test_dynamic_shapes():
    same_as_torch(
        "zero3", after=lambda model: torch.compile(model, backend=BACKEND, dynamic=True), exact=False, sizes=(4, 6, 9)
    )


@every(2, way=["blocks before", "all after"])
def test_a_checkpoint_within_a_unit(way):
    before, after, units = WAYS[way]
    checkpointed = {"checkpointed": lambda self, h: keep(self.mlp, h)}
    same_as_torch("zero3", before, after, units=units, exact=False, options=checkpointed)


def test_a_loss_function():
    loss_fn = torch.compile(F.cross_entropy, backend=BACKEND)
    same_as_torch("zero3", exact=False, loss_fn=loss_fn)
    assert counters["stats"]["unique_graphs"]


def refusal(change, after, match, units="layers.*"):
    def rank_fn(comm):
        model = make(change)
        model = fs.shard_module(model, mesh=comm, strategy=fs.zero3("dp"), units=units)
        with pytest.raises(Exception, match=match):
            changed(model, after)(torch.arange(4)).sum().backward()

    simulate(DP, rank_fn)


def test_one_graph_of_several_units_is_refused():
    refusal(
        nothing,
        lambda model: torch.compile(model, backend=BACKEND, fullgraph=True),
        r"Leave out fullgraph=True, or compile what computes within a unit: `unit\.compile\(fullgraph=True\)`",
    )


def test_a_compiled_part_of_a_checkpoint_within_a_unit_is_refused():
    message = (
        r"'layers\.2\..*' is used by a compiled part of a checkpoint within its unit.*choose the compiled module as the unit"
    )
    if torch.__version__ < "2.13":  # whichever of Dynamo and torch.utils.checkpoint is the first to meet the released parameter
        message = "Guard failed on the same frame it was created|Recomputed values for the following tensors have different"
    refusal(both(blocks, wrapped), nothing, message)


def hidden(tree, x):
    return torch.tanh(x @ tree["w"] + tree["b"])


def train(comm, compiled, strategy, mode):
    """Steps of a function, some of which is compiled; ``mode`` says where."""
    g = torch.Generator().manual_seed(0)
    shapes = {"w": torch.randn(DIM, DIM, generator=g), "b": torch.zeros(DIM)}
    params = {"layers": [{k: v.clone() for k, v in shapes.items()} for _ in range(2)]}
    layout = fs.plan(params, comm.mesh, strategy, units="layers.*")
    tx = fs.optim.adamw(1e-2)
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
    fn = compiled(hidden) if mode == "fn" else hidden

    def loss_fn(params, batch, comm):
        for layer in params["layers"]:
            batch = fs.forward(fn, layer, batch, comm=comm, remat=mode == "remat")
        return batch.square().mean()

    loss_fn = compiled(loss_fn) if mode in ("loss", "remat") else loss_fn

    def own_step(state, batch, comm):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return fs.update(tx, grads, state, comm=comm), metrics

    step = own_step if "own" in mode else fs.train_step(loss_fn, tx)
    step = compiled(step) if "step" in mode else step
    scheduler = fs.Scheduler(comm)
    scheduled = scheduler(step)
    losses = []
    for i in range(4):
        batch = torch.linspace(-1, 1, 3 * DIM).view(3, DIM) + comm.rank + i
        state, metrics = step(state, batch, comm) if "blocking" in mode else scheduled(state, batch)
        losses.append(metrics)
    return losses, [node.buffers[0] for node in fs.gather(state.params, comm=comm)["layers"]]


@every(2, mode=["fn", "own step", "loss", "remat", "step", "blocking step"])
@on_ranks(DP)
def test_functions(comm, mode):
    """The function of a unit, a loss function and a whole step that are compiled, under a scheduler."""
    compiled = lambda f: torch.compile(f, backend=BACKEND)  # noqa: E731
    (_, mine), (_, expected) = (train(comm, how, fs.zero3("dp"), mode) for how in (compiled, lambda f: f))
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] or mode == "remat"  # which computes nothing in another way than its backward


@pytest.mark.deep
@pytest.mark.parametrize("way", ["blocks before", "all after"])
def test_inductor(way, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BACKEND", "inductor")
    before, after, units = WAYS[way]
    same_as_torch("zero3", before, after, units=units, exact=False)
