"""A prediction is a contract: bytes at rest, bytes on the wire and collectives are what the layout says, exactly."""

import gc
import weakref

import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError
from fsharp.testing import simulate
from tests.gpt_like import block, embed, head, loss_fn, make_batches, make_params
from tests.scheduling import ON_TWO_AXES, every

MESHES = {1: fs.Mesh({"dp": 4}), 2: fs.Mesh({"outer": 2, "inner": 2})}
STRATEGIES = {
    "ddp": fs.ddp("dp"),
    "zero1": fs.zero1("dp"),
    "zero2": fs.zero2("dp"),
    "zero3": fs.zero3("dp"),
    "late": fs.Strategy({"dp": fs.layouts.AxisRule(fs.layouts.Shard, fs.layouts.Partial, fs.layouts.Shard)}),
    "hsdp": fs.hsdp("outer", "inner"),
    "hfsdp": fs.hfsdp("outer", "inner"),
    "ddp on two axes": fs.ddp("outer", "inner"),
    "mixed": ON_TWO_AXES["mixed"][1],
}
PRECISIONS = {
    "float32": fs.Precision(),
    "bfloat16": fs.Precision(compute=torch.bfloat16),
    "float32 wire": fs.Precision(compute=torch.bfloat16, wire=torch.float32),
    "8 and 4 bits": fs.Precision(stored=fs.formats.mxint8, wire=fs.formats.mxint4),
}


def setup(name, precision="float32", frozen=()):
    strategy = STRATEGIES[name]
    mesh = MESHES[len(strategy.axis_order)]
    params = make_params()
    return mesh, fs.plan(params, mesh, strategy, units="layers.*", precision=PRECISIONS[precision], frozen=frozen), params


def traffic_of_a_step(layout, params, microbatches, comm):
    tx = fs.optim.adamw(1e-2)
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    batch = {k: v.chunk(4)[comm.rank] for k, v in make_batches(1, 32)[0].items()}
    counting = fs.collectives.CountingComm(comm)
    fs.train_step(loss_fn, tx, microbatches=microbatches)(state, batch, counting)
    return counting.calls


@every(8, name=STRATEGIES, precision=PRECISIONS, frozen=[(), "layers.0"])
def test_traffic_of_a_step(name, precision, frozen):
    mesh, layout, params = setup(name, precision, frozen)
    for microbatches in (1, 2):
        expected = fs.inspect.step_traffic(layout, microbatches=microbatches)
        for calls in simulate(mesh, lambda comm, m=microbatches: traffic_of_a_step(layout, params, m, comm)):
            assert calls == expected


def test_traffic_in_numbers():
    """By hand: 24 float32 on 4 ranks, nothing padded; each rank sends (n - 1)/n of a buffer in each direction."""
    params = {"w": torch.zeros(24)}
    part = 3 * 6 * 4
    loss = fs.collectives.Call("all_reduce", "dp", 2 * 3 * 8)
    expected = {
        "ddp": {fs.collectives.Call("all_reduce", "dp", 2 * part): 1},
        "zero1": {fs.collectives.Call("reduce_scatter", "dp", part): 1, fs.collectives.Call("all_gather", "dp", part): 1},
        "zero2": {fs.collectives.Call("reduce_scatter", "dp", part): 1, fs.collectives.Call("all_gather", "dp", part): 1},
        "zero3": {fs.collectives.Call("reduce_scatter", "dp", part): 1, fs.collectives.Call("all_gather", "dp", part): 2},
    }
    for name, calls in expected.items():
        assert dict(fs.inspect.step_traffic(fs.plan(params, MESHES[1], STRATEGIES[name]))) == {**calls, loss: 1}


@pytest.mark.parametrize("options", [{"microbatches": 0}, {"uses": {"w": -1}}], ids=str)
def test_traffic_of_no_step_is_refused(options):
    with pytest.raises(OptionError, match=r"microbatches is [01] and uses is \{.*expected at least one microbatch"):
        fs.inspect.step_traffic(fs.plan({"w": torch.zeros(24)}, MESHES[1], fs.zero3("dp")), **options)


@every(2, name=STRATEGIES, precision=PRECISIONS)
def test_bytes_at_rest(name, precision):
    mesh, layout, params = setup(name, precision, frozen="head.b")
    tx = fs.optim.adamw(1e-2)

    def rank_fn(comm):
        state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
        _, grads = fs.value_and_grad(loss_fn)(state.params, make_batches(1, 4)[0], comm=comm)
        return [
            sum(node.nbytes for node in fs.layouts.units_of(tree)) for tree in (state.params, grads, state.main, state.opt.mu)
        ]

    expected = [layout.nbytes(kind) for kind in ("params", "grads", "main", "optim")]
    assert all(sizes == expected for sizes in simulate(mesh, rank_fn))


def test_bytes_at_rest_in_numbers():
    """24 float32 and 5 frozen int64 on 4 ranks."""
    params = {"w": torch.zeros(24), "i": torch.zeros(5, dtype=torch.int64)}
    expected = {"ddp": (136, 96, 96), "zero1": (160, 96, 24), "zero2": (160, 24, 24), "zero3": (40, 24, 24)}
    for name, (at_rest, grads, optim) in expected.items():
        layout = fs.plan(params, MESHES[1], STRATEGIES[name])
        # Frozen int64: 5 elements, padded to 8 where the optimizer's place is divided in 4.
        assert (layout.nbytes("params"), layout.nbytes("grads"), layout.nbytes("optim")) == (at_rest, grads, optim)


class Watched:
    """A Comm that knows which gathered buffers there are."""

    def __init__(self, inner):
        self.inner, self.mesh, self.rank, self.device = inner, inner.mesh, inner.rank, inner.device
        self.reduce_scatter, self.all_reduce = inner.reduce_scatter, inner.all_reduce
        self.gathered = weakref.WeakSet()

    def all_gather(self, x, axis, *, label=""):
        out = self.inner.all_gather(x, axis)
        self.gathered.add(out.untyped_storage())
        return out

    @property
    def alive(self):
        gc.collect()
        return len(self.gathered)


@pytest.mark.parametrize("release", [True, False])
def test_gathered_parameters_do_not_outlive_their_call(release):
    """Weak references to every gathered storage: with release at most one unit's lives, in forward and backward."""
    mesh, layout, params = setup("zero3")
    batch = make_batches(1, 8)[0]
    gc.collect()
    gc.freeze()  # what is alive now stays: no need to look at it each time

    def rank_fn(comm):
        comm, counts = Watched(comm), []

        def watched(fn):
            def call(tree, x):
                counts.append(comm.alive)
                x = fn(tree, x)
                x.register_hook(lambda _: counts.append(comm.alive))  # the backward has come to the unit
                return x * 1.0

            return call

        def loss(p, batch, comm):
            x = fs.forward(watched(embed), p["embed"], batch["x"], comm=comm, release=release)
            for layer in p["layers"]:
                x = fs.forward(watched(block), layer, x, comm=comm, release=release)
            return fs.forward(watched(head), p["head"], x, comm=comm, release=release).square().mean()

        fs.value_and_grad(loss)(fs.shard(params, layout, comm), batch, comm=comm)
        return counts, comm.alive

    for counts in simulate(mesh, rank_fn):
        # Kept, they pile up: all but the embedding table, which its own backward does not read.
        assert counts == (([1, 1, 1, 1, 1, 1, 1, 0], 0) if release else ([1, 1, 2, 3, 3, 2, 1, 0], 0))


def test_axes_of_size_one_cost_nothing():
    mesh = fs.Mesh({"outer": 1, "inner": 1})
    layout = fs.plan(make_params(), mesh, fs.hfsdp("outer", "inner"), units="layers.*")
    comm = fs.collectives.CountingComm(fs.SingleComm(mesh))
    tx = fs.optim.chain(
        fs.optim.clip_by_global_norm(1.0, deterministic=True), fs.optim.apply_if_finite(fs.optim.adamw(1e-2), 5)
    )
    state = fs.init_state(tx, fs.shard(make_params(), layout, comm), comm=comm)
    fs.train_step(loss_fn, tx)(state, make_batches(1, 8)[0], comm)
    assert comm.num_calls == 0
    assert fs.inspect.step_traffic(layout) == {}
