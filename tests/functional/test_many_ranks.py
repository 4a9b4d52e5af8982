"""Jobs of many ranks, of which one is here: torch's backend "fake" takes its messages, and the others are taken to be alike."""

import gc
import math
from collections import Counter

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsharp as fs
from benchmarks.memory import StorageTracker
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.functional.layout.sharded import is_sharded
from fsharp.functional.layout.slicing import shard_for
from tests.functional.layout.test_layout import llama
from tests.te_cpu import ranks

RANK = 5


class Alike(ProcessGroupComm):
    """A Comm that receives from each rank what this one sends to itself, and counts the bytes of its messages."""

    sent = 0

    def _send_and_receive(self, send, receive, axis, text):
        mine = self.rank if axis is None else self.mesh.coord(axis, self.rank)
        for x in receive:
            x.copy_(send[mine])
        self.sent += sum(x.numel() for i, x in enumerate(send) if i != mine)
        super()._send_and_receive(send, receive, axis, text)


def connect(mesh):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", rank=RANK, world_size=mesh.size, store=dist.HashStore())
    sizes = dict(mesh.axes)
    return Alike(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def block(params, x):
    return (x @ params["w"].to(x.dtype)).repeat(1, 2)


def loss_fn(params, x, comm):
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm)
    return x.float().square().mean()


def calls_of_a_step(mesh, strategy, precision):
    """The calls that this rank makes, the predicted ones, the bytes of its messages, and the bytes of its state."""
    comm = connect(mesh)
    tree = {"layers": [{"w": torch.zeros(1024, 512)} for _ in range(2)]}
    layout = fs.plan(tree, mesh, strategy, units="layers.*", precision=precision)
    tx = fs.optim.sgd(0.1)
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    counting, before = fs.collectives.CountingComm(comm), comm.sent
    state, _ = fs.train_step(loss_fn, tx)(state, torch.ones(2, 1024).to(precision.compute or torch.float32), counting)
    return (
        Counter(counting.calls),
        fs.inspect.step_traffic(layout),
        comm.sent - before,
        nbytes(state.params),
        layout.nbytes("params"),
    )


def nbytes(tree):
    nodes = [node for node in optree.tree_leaves(tree, is_leaf=is_sharded) if is_sharded(node)]
    return sum(x.numel() * x.element_size() for node in nodes for x in node.raw_buffers)


PLAIN = fs.Precision()
CODED = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=fs.formats.mxint8, wire=fs.formats.mxint4)
FLOAT8 = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=fs.formats.float8_e4m3_by_tensor)
TWO = {"outer": 2048, "inner": 8}


@pytest.mark.parametrize(
    ("sizes", "strategy", "precision"),
    [
        (TWO, fs.hsdp("outer", "inner"), PLAIN),
        (TWO, fs.hfsdp("outer", "inner"), CODED),
        pytest.param(TWO, fs.zero3("outer", "inner"), FLOAT8, marks=pytest.mark.deep),
        pytest.param(TWO, fs.hsdp("outer", "inner"), CODED, marks=pytest.mark.deep),
        pytest.param(TWO, fs.hfsdp("outer", "inner"), PLAIN, marks=pytest.mark.deep),
        pytest.param({"dp": 16384}, fs.zero3("dp"), PLAIN, marks=pytest.mark.deep),
        pytest.param({"dp": 16384}, fs.zero3("dp"), CODED, marks=pytest.mark.deep),
    ],
    ids=["hsdp", "hfsdp, coded", "zero3, float8", "hsdp, coded", "hfsdp", "zero3", "zero3, coded"],
)
def test_a_step_of_one_of_16384_ranks_makes_the_predicted_calls(sizes, strategy, precision):
    mesh = fs.Mesh(sizes)
    [found] = fs.testing.processes(fs.Mesh({"one": 1}), lambda _: calls_of_a_step(mesh, strategy, precision))
    calls, predicted, sent, held, planned = found
    assert calls == predicted
    assert held == planned
    assert sent == sum(call.nbytes * count for call, count in predicted.items())


def calls_of_transformer_engine(_):
    """The calls of three steps under a scheduler, and the predicted ones."""
    from tests.te.test_traffic import RECIPES, te_cpu, train_functions

    comm, (architecture, recipe) = connect(fs.Mesh(TWO)), RECIPES["current"]
    with te_cpu.architecture(*architecture):
        _, calls, layout = train_functions(comm, recipe, fs.zero3("outer", "inner"), separate_groups=False)
    return calls, fs.inspect.step_traffic(layout)


def test_scheduled_steps_with_weights_of_transformer_engine_make_the_predicted_calls():
    [(calls, predicted)] = ranks.processes(fs.Mesh({"one": 1}), calls_of_transformer_engine, timeout=250)
    others = {"inner": 7, "outer": 2047 * 8}
    agreement = [fs.collectives.Call("all_gather", axis, n * num) for axis, num in others.items() for n in (1, 40)]
    assert calls[0] - Counter(agreement) == predicted  # ranks compare schedules, as in other calls
    assert sum(n for call, n in predicted.items() if call.op == "all_reduce") == 4  # of scales and loss, along two axes
    reduced = [{call: n for call, n in each.items() if "reduce" in call.op} for each in (predicted, *calls)]
    assert reduced == reduced[:1] * 4
    assert not any(later - predicted for later in calls[1:])  # and units that are gathered still are not gathered again


def bytes_of_llama(mesh, strategy):
    comm, tree = connect(mesh), llama(4096, 14336, 32)
    layout = fs.plan(tree, mesh, strategy, units="layers.*", precision=fs.Precision(torch.bfloat16, torch.float32))
    state = fs.init_state(fs.optim.adamw(1e-3), shard_for(tree, layout, RANK, place="optim"), comm=comm)  # compares no values
    held = nbytes(state.params), nbytes(state.main), nbytes(state.opt)
    return held, (layout.nbytes("params"), layout.nbytes("main"), 2 * layout.nbytes("optim")), layout.num_params


def test_a_llama_of_8b_on_8_ranks_has_its_planned_bytes():
    run = lambda _: bytes_of_llama(fs.Mesh({"dp": 8}), fs.zero3("dp"))  # noqa: E731
    [(held, planned, num_params)] = fs.testing.processes(fs.Mesh({"one": 1}), run)
    assert num_params == 8_030_261_248
    assert held == planned
    assert sum(held) <= (2 + 4 + 8) * num_params / 8 * 1.0001


def memory_of_a_step(_):
    """Schedule, bytes of its arena, and bytes that are alive after steps of layers as wide as those of 8 billion parameters."""
    comm, policy = connect(fs.Mesh({"dp": 8})), fs.SchedulePolicy(bucket_nbytes=0, separate_groups=False)
    make = lambda device: {"layers": [{"w": torch.empty(4096, 14336, dtype=torch.bfloat16, device=device)} for _ in range(2)]}  # noqa: E731
    precision, tx = fs.Precision(torch.bfloat16, torch.float32), fs.optim.adamw(1e-3)
    layout = fs.plan(make("meta"), comm.mesh, fs.zero3("dp"), units="layers.*", precision=precision)
    scheduler = fs.Scheduler(comm, policy=policy)
    step = scheduler(fs.train_step(narrow_loss_fn, tx, donate=True))
    with StorageTracker() as tracker:
        state = fs.init_state(tx, shard_for(make("cpu"), layout, RANK, place="optim"), comm=comm)
        for _ in range(2):
            state, _ = step(state, torch.ones(1, 4096, dtype=torch.bfloat16))
        assert state.params["layers"][0].buffers  # waits until nothing is under way
        gc.collect()
        alive_nbytes = tracker.nbytes()
    planned = fs.schedules.plan_step(layout, policy, backend="gloo")
    options = {"budget": 1e12, "activations": 0.0, "backend": "gloo", "effort": math.inf, "policies": {"": policy}}
    hardware = fs.inspect.Hardware(compute_times=(1.0, 1.0), bandwidth=1e10, latency=1e-5)
    [predicted] = fs.tune({"": layout}, hardware, **options).candidates
    arena_nbytes = len(scheduler.engine.steps.arena.memory)
    return (step.schedule == planned, arena_nbytes, alive_nbytes), (True, planned.arena, predicted.peak_nbytes)


def narrow_loss_fn(params, x, comm):
    for layer in params["layers"]:
        x = fs.forward(lambda p, x: x + (x @ p["w"])[:, :4096], layer, x, comm=comm)
    return x.float().square().mean()


def test_steps_of_8b_layers_on_8_ranks_stay_within_their_plan():
    [((*found, alive), (*planned, peak))] = fs.testing.processes(fs.Mesh({"one": 1}), memory_of_a_step, timeout=250)
    assert found == planned
    assert alive - peak in range(100)  # the loss, and counts
