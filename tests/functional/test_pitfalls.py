"""Ways in which sharded training goes wrong without a word: each was possible once, or is in other libraries."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, LossError, MeshError, TreeError
from fsharp.functional.layout.packing import pack
from fsharp.testing import processes, simulate
from tests.ranks import on_ranks

ONE = fs.SingleComm()
DP = fs.Mesh({"dp": 2})


def sharded(tree, strategy=fs.zero3, comm=ONE, **options):
    return fs.shard_for(tree, fs.plan(tree, comm.mesh, strategy("dp"), **options), comm.rank)


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("widths", [(997, 2987, 4744), (769, 3073, 50257), (13, 17, 19, 23, 29)])
@pytest.mark.parametrize("num_parts", [2, 4, 1000])
def test_padding_of_unrelated_row_widths_is_bounded(widths, rows, num_parts):
    """All atoms fit into parts of the average size and one more atom for each leaf, and never more than everything."""
    sizes = tuple(rows * width for width in widths)
    packing = pack(sizes, widths, num_parts)
    assert packing.capacity <= min(sum(sizes), sum(sizes) // num_parts + sum(widths) + max(sizes))


def test_a_pickled_layout_is_equal_in_another_process():
    """Hashes of strings differ between processes."""
    layout = fs.plan({"w": torch.ones(3)}, DP, fs.zero3("dp"))
    hash(layout.units[0])
    node = sharded({"w": torch.ones(3)})
    hash(node.unit)
    code = (
        "import sys, pickle, torch, fsharp as fs\n"
        "old = pickle.load(sys.stdin.buffer)\n"
        "new = fs.plan({'w': torch.ones(3)}, fs.Mesh({'dp': 2}), fs.zero3('dp'))\n"
        "assert old == new and hash(old) == hash(new) and old.digest == new.digest\n"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(layout), env=env, check=True, timeout=250)


@pytest.mark.parametrize(("dtype", "weight"), [(torch.float16, 100_000.0), (torch.bfloat16, 257.0)])
def test_a_large_weight_divides_half_precision_gradients(dtype, weight):
    params = sharded({"w": torch.zeros(3, dtype=dtype)})

    def loss(p, batch, comm):
        return fs.forward(lambda q: (q["w"].float() * 192.0).sum(), p, comm=comm), weight

    total, grads = fs.value_and_grad(loss)(params, None, comm=ONE)
    _, grads = fs.average(total, grads, comm=ONE)
    assert torch.equal(grads.buffers[0], torch.full((3,), 192.0 / weight).to(dtype))


def test_clipping_half_precision_gradients_and_extreme_ones():
    def clipped(value, dtype, limit):
        grads = sharded({"w": torch.full((4,), value, dtype=dtype)})
        tx = fs.optim.clip_by_global_norm(limit)
        return tx.update(grads, tx.init(grads), grads, comm=ONE)[0].buffers[0]

    torch.testing.assert_close(clipped(60000.0, torch.float16, 1e-3), torch.full((4,), 5e-4, dtype=torch.float16))
    torch.testing.assert_close(clipped(1e20, torch.float32, 1.0), torch.full((4,), 0.5))
    torch.testing.assert_close(clipped(3e38, torch.float32, 1.0), torch.full((4,), 0.5))  # the norm is beyond float32
    tiny = fs.optim.global_norm(sharded({"w": torch.full((4,), 1e-30)}), comm=ONE)
    assert float(tiny) == pytest.approx(2e-30)


def test_tied_leaves_of_equal_bits_are_equal():
    a, nan = torch.zeros(3), torch.full((3,), torch.nan)
    fs.shard({"a": nan, "b": nan.clone()}, fs.plan({"a": a, "b": a}, ONE.mesh, fs.zero3("dp")), ONE)


@on_ranks(DP)
def test_gradients_that_autograd_shares_between_units_are_not_added_twice(comm):
    tree = {"a": torch.ones(3), "b": torch.ones(3)}

    params = fs.shard(tree, fs.plan(tree, DP, fs.ddp("dp"), units=["a", "b"]), comm)

    def loss(p, batch, comm):
        g = fs.gather(p, comm=comm)
        return ((g["a"].buffers[0] + g["b"].buffers[0]) * batch[0]).sum() + g["a"].buffers[0].sum()

    total, grads = fs.value_and_grad(loss, microbatches=2)(params, torch.ones(2), comm=comm)
    first = fs.average(total, fs.reduce_scatter(grads, comm=comm), comm=comm)[1]
    again = fs.average(total, fs.reduce_scatter(grads, comm=comm), comm=comm)[1]
    summed, first, again = (fs.full_tree(g, comm=comm) for g in (fs.reduce_scatter(grads, comm=comm), first, again))
    assert torch.equal(summed["a"], torch.full((3,), 8.0))
    assert torch.equal(summed["b"], torch.full((3,), 4.0))
    assert torch.equal(first["a"], torch.full((3,), 2.0))
    assert torch.equal(first["a"], again["a"])


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero3])
@pytest.mark.parametrize("n", [1, 2])
def test_donation_reaches_nothing_that_was_not_donated(strategy, n):
    tree = {"w": torch.ones(4)}
    mesh = fs.Mesh({"dp": n})

    def rank_fn(comm):
        params = fs.shard(tree, fs.plan(tree, mesh, strategy("dp")), comm)
        state = fs.init_state(fs.optim.sgd(0.1), params, comm=comm)
        snapshot = fs.full_tree(state.params, comm=comm)
        step = fs.train_step(lambda p, b, c: fs.forward(lambda q: q["w"].sum(), p, comm=c), fs.optim.sgd(0.1), donate=True)
        new, _ = step(state, None, comm)
        return params.buffers[0], snapshot["w"], fs.full_tree(new.params, comm=comm)["w"]

    for start, snapshot, new in simulate(mesh, rank_fn):
        assert start.eq(1).all()
        assert snapshot.eq(1).all()
        assert new.ne(1).all()
    assert tree["w"].eq(1).all()


def test_a_skipped_step_shares_nothing_with_the_state_before():
    tx = fs.optim.apply_if_finite(fs.optim.sgd(0.1, momentum=0.9), 5)
    state = fs.init_state(tx, sharded({"w": torch.ones(4)}), comm=ONE)
    bad, good = (state.params.replace([torch.full((4,), v)]) for v in (torch.nan, 1.0))
    skipped = fs.update(tx, bad, state, comm=ONE)
    fs.update(tx, good, skipped, comm=ONE, donate=True)
    assert state.params.buffers[0].eq(1).all()
    assert state.opt.inner_state.mu.buffers[0].eq(0).all()


def test_any_exception_on_one_rank_reaches_the_others():
    def rank_fn(comm):
        tree = {"w": torch.ones(4)}

        def fill(t, g):
            return t.zero_()

        rules = fill if comm.rank == 0 else {"w": fill, 3: fill}  # a pattern that is no string: an AttributeError
        try:
            fs.init_params(rules, fs.plan(tree, DP, fs.zero3("dp")), comm, key=0)
        except (AgreementError, AttributeError, TypeError) as error:
            return type(error).__name__, str(error)
        return None

    first, second = simulate(DP, rank_fn)
    assert first[0] == "AgreementError"
    assert "failed on rank 1" in first[1]
    assert second is not None


@on_ranks(DP)
def test_leaves_on_different_devices_are_refused_on_all_ranks(comm):
    tree = {"a": torch.ones(4), "b": torch.ones(4, device="meta")}
    layout = fs.plan(tree, DP, fs.zero3("dp"))
    with pytest.raises(TreeError, match="'b'  on meta, expected all leaves on one device"):
        fs.shard(tree, layout, comm)


@on_ranks(DP)
def test_ranks_with_different_schedules_are_found(comm):
    tx = fs.optim.sgd(fs.optim.cosine_decay_schedule(0.1 * (comm.rank + 1), 5))
    with pytest.raises(AgreementError, match=r"tx  rank 0: .*init_value=0.1"):
        fs.init_state(tx, sharded({"w": torch.ones(4)}, comm=comm), comm=comm)


def test_a_device_mesh_in_another_order_is_refused():
    def rank_fn(comm):
        from torch.distributed.device_mesh import DeviceMesh

        with pytest.raises(MeshError, match=r"its ranks in rising order; got \[1, 0\]"):
            fs.ProcessGroupComm(DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",)))
        return comm.all_gather(torch.ones(2, dtype=torch.complex64).conj() * 1j, "dp").shape

    assert processes(DP, rank_fn) == [(2, 2)] * 2


def test_an_initializer_may_return_its_values():
    layout = fs.plan({"w": torch.empty(4)}, ONE.mesh, fs.zero3("dp"))
    assert fs.full_tree(fs.init_params(lambda t, g: torch.full_like(t, 3.0), layout, ONE, key=0), comm=ONE)["w"].eq(3).all()


@on_ranks(DP)
def test_a_part_that_does_not_divide_is_refused(comm):
    for fn in (fs.collectives.local_slice_last, fs.collectives.reduce_scatter_last):
        with pytest.raises(TreeError, match="a last dim of 5 does not divide into 2 parts"):
            fn(torch.ones(5), comm, "dp")
    with pytest.raises(TreeError, match=r"x is \[2, 5\], expected a last dim of 4, the sum of send"):
        fs.collectives.all_to_all_last(torch.ones(2, 5), [1, 3], [1, 3], comm, "dp")


@on_ranks(DP)
def test_a_tied_unit_among_the_arguments_is_found_and_its_traffic_predicted(comm):
    shared = torch.ones(4, 2)
    tree = {"a": {"w": shared}, "b": {"w": shared, "v": torch.ones(3)}}
    layout = fs.plan(tree, DP, fs.zero3("dp"), units=["a", "b"])

    def loss(p, batch, comm):
        together = fs.forward(
            lambda t: (t["b"]["w"] * t["a"]["w"]).sum() + t["b"]["v"].sum(), {"a": p["a"], "b": p["b"]}, comm=comm
        )
        return together + fs.forward(lambda t: t["w"].sum() + t["v"].sum(), p["b"], comm=comm, ties=[p["a"]])

    counting = fs.collectives.CountingComm(comm)
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm), comm=comm)
    fs.train_step(loss, fs.optim.sgd(0.1))(state, None, counting)
    assert counting.calls == fs.inspect.step_traffic(layout, uses={"a": 2, "b": 2})


def test_a_metric_is_no_weight():
    """A pair of floating tensors would be a sum and its weight: the loss and all gradients would be divided by the metric."""
    p = fs.init_params(fs.init.ones, fs.plan({"w": torch.ones(3)}, fs.Mesh({"dp": 1}), fs.zero3("dp")), fs.SingleComm(), key=0)

    def run(second, wrap=tuple):
        def loss(p, batch, comm):
            return wrap((fs.forward(lambda q: q["w"].sum(), p, comm=comm), second))

        return fs.value_and_grad(loss)(p, None, comm=fs.SingleComm())[0]

    with pytest.raises(LossError, match=r"(?s)pair with torch.float32\[\]: a weight, or a metric.*fs.Loss\(sum.*has_aux=True"):
        run(torch.tensor(2.0))
    for weight in (2, 2.0, torch.tensor(2), torch.tensor([2])):
        assert run(weight).mean == 1.5
    assert run(torch.tensor(2.0), lambda pair: fs.Loss(*pair)).mean == 1.5


@pytest.mark.parametrize("weight", [-1, torch.tensor(-1)])
def test_a_weight_below_zero_on_one_rank_is_an_error_on_all_ranks(weight):
    """The weights of ranks are added, so a negative weight would make others count for more."""

    def loss(p, batch, comm):
        return fs.forward(lambda q: q["w"].sum(), p, comm=comm), weight if comm.rank == 1 else 0

    def rank_fn(comm):
        p = fs.init_params(fs.init.ones, fs.plan({"w": torch.ones(3)}, DP, fs.zero3("dp")), comm, key=0)
        with pytest.raises(LossError if comm.rank == 1 else AgreementError, match="the weight of the loss is -1, expected a"):
            fs.Scheduler(comm)(fs.value_and_grad(loss))(p, None)

    processes(DP, rank_fn)
