"""One step, every strategy, every world: bitwise where sums have one order, to a tolerance where they do not."""

import math
from functools import cache

import pytest
import torch

import fsharp as fs
from fsharp.testing import assert_equivalent, equivalence, processes, simulate
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.scheduling import FLAT, ON_TWO_AXES, assert_same

DECAY = {"**": 0.1, "**.b": 0.0, "**.gain": 0.0}


def make_tx():
    return fs.optim.chain(fs.optim.clip_by_global_norm(0.5, deterministic=True), fs.optim.adamw(1e-2, weight_decay=DECAY))


def flat_runs(n):
    return {name: (fs.Mesh({"dp": n}), strategy) for name, (_, strategy) in FLAT.items()}


def hybrid_runs(outer, inner):
    mesh = fs.Mesh({"outer": outer, "inner": inner})
    return {name: (mesh, strategy) for name, (_, strategy) in ON_TWO_AXES.items()}


def equivalent(runs, *, steps=3, microbatches=1, tx=None, **options):
    return assert_equivalent(
        loss_fn, tx or make_tx(), make_params(), make_batches(steps, 48), runs=runs, units="layers.*",
        microbatches=microbatches, **options,
    )  # fmt: skip


def deep(*cases):
    """Those that ``make test-all`` has besides."""
    return [pytest.param(*case, marks=pytest.mark.deep) for case in cases]


@pytest.mark.parametrize(("n", "microbatches"), [(2, 1), (4, 2), *deep((2, 2), (4, 1), (8, 1), (8, 2))])
def test_flat_strategies_simulated(n, microbatches):
    results = equivalent(flat_runs(n), microbatches=microbatches)
    if microbatches == 1:
        assert all(torch.equal(results["ddp"]["embed"], results[name]["embed"]) for name in FLAT)
    assert not torch.equal(results["ddp"]["embed"], make_params()["embed"])


@pytest.mark.parametrize(("n", "microbatches"), [(2, 2), *deep((2, 1), (4, 1), (4, 2))])
def test_flat_strategies_in_processes_have_the_bits_of_simulated_ones(n, microbatches):
    runs = flat_runs(n)
    # One start for all four strategies: the outer function runs them one after another on the same processes.
    real = processes(fs.Mesh({"dp": n}), lambda comm: train_all(runs, comm, microbatches))
    fake = simulate(fs.Mesh({"dp": n}), lambda comm: train_all(runs, comm, microbatches))
    for name in FLAT:
        for a, b in zip(real, fake, strict=True):
            assert_same(a[name], b[name])
    assert_same(real[0]["ddp"], real[0]["zero1"])
    assert_same(real[0]["zero2"], real[0]["zero3"])
    if microbatches == 1:
        assert_same(real[0]["ddp"], real[0]["zero3"])


@pytest.mark.parametrize("microbatches", [2, *deep((1,))])
def test_hybrid_meshes_in_processes_have_the_bits_of_simulated_ones(microbatches):
    runs = hybrid_runs(2, 2)
    mesh = fs.Mesh({"outer": 2, "inner": 2})
    real = processes(mesh, lambda comm: train_all(runs, comm, microbatches))
    fake = simulate(mesh, lambda comm: train_all(runs, comm, microbatches))
    for name in runs:
        assert_same(real[0][name], fake[0][name])


def train_all(runs, comm, microbatches):
    out = {}
    for name, (mesh, strategy) in runs.items():
        tx = make_tx()
        layout = fs.plan(make_params(), mesh, strategy, units="layers.*")
        state = fs.init_state(tx, fs.shard(make_params(), layout, comm), comm=comm)
        step = fs.train_step(loss_fn, tx, microbatches=microbatches, donate=True)
        for batch in make_batches(3, 32):
            state, _ = step(state, {k: v.chunk(mesh.size)[comm.rank] for k, v in batch.items()}, comm)
        out[name] = fs.full_tree(state.params, comm=comm)
    return out


@pytest.mark.parametrize(
    ("outer", "inner", "microbatches"),
    [(2, 2, 1), (1, 3, 2), *deep((3, 1, 1), (2, 2, 2), (1, 3, 1), (3, 1, 2), (2, 4, 1), (2, 4, 2))],
)
def test_hybrid_meshes_agree_with_one_process(outer, inner, microbatches):
    equivalent(hybrid_runs(outer, inner), microbatches=microbatches, tx=fs.optim.chain(make_tx()))


@pytest.mark.parametrize("n", [1, 3, 5])
def test_worlds_that_do_not_divide_the_sizes(n):
    batches = make_batches(3, 30)
    assert_equivalent(loss_fn, make_tx(), make_params(), batches, runs=flat_runs(n), units="layers.*")


def zero3_on_three(**options):
    return equivalent({"zero3": (fs.Mesh({"dp": 3}), fs.zero3("dp"))}, **options)["zero3"]


by_element = cache(zero3_on_three)


@pytest.mark.parametrize(
    "atoms",
    [
        fs.layouts.RowsAtom(1),
        fs.layouts.RowsAtom(2),
        fs.layouts.LeafAtom(),
        {"**": fs.layouts.RowsAtom(1), "layers": fs.layouts.LeafAtom()},
    ],
)
def test_atoms_do_not_change_values(atoms):
    assert_same(zero3_on_three(atoms=atoms), by_element())


def test_frozen_leaves_stay_and_others_train():
    results = equivalent(flat_runs(2), frozen=["layers.0", "head.b"])
    start = make_params()
    for name in FLAT:
        assert torch.equal(results[name]["layers"][0]["w"], start["layers"][0]["w"])
        assert torch.equal(results[name]["head"]["b"], start["head"]["b"])
        assert not torch.equal(results[name]["layers"][1]["w"], start["layers"][1]["w"])


@pytest.mark.parametrize("wire", [torch.float32, pytest.param(None, marks=pytest.mark.deep)])
def test_bfloat16_compute_with_float32_main_copies_is_bitwise_the_same_under_every_strategy(wire):
    """The tolerance is of bfloat16: forward and backward round at every step, so worlds differ by some of its epsilons."""
    equivalent(
        flat_runs(4),
        precision=fs.Precision(compute=torch.bfloat16, wire=wire),
        tolerance=fs.testing.Tolerance(rtol=0.1, atol=0.05),
    )


def test_a_wrong_gradient_scale_is_found():
    def bad_loss(params, batch, comm):
        total, weight = loss_fn(params, batch, comm)
        return total / weight  # a mean of means: wrong where weights are uneven

    with pytest.raises(AssertionError, match="unsharded and ddp differ"):
        assert_equivalent(bad_loss, make_tx(), make_params(), make_batches(3, 32), runs=flat_runs(4), units="layers.*")


def test_a_sum_in_another_order_is_found():
    def skewed(params, batch, comm):
        total, weight = loss_fn(params, batch, comm)
        return fs.Loss(total * (1 + (1e-7 if params["embed"].place.sharded_axes else 0)), weight)

    with pytest.raises(AssertionError, match="ddp and zero3 differ"):
        assert_equivalent(skewed, make_tx(), make_params(), make_batches(3, 32), runs=flat_runs(2), units="layers.*")


def test_the_result_does_not_depend_on_how_tokens_are_spread():
    """Weights are uneven; the parts are dealt to ranks and microbatches in three ways, one of them with an idle rank."""
    mesh = fs.Mesh({"dp": 2})
    batch = make_batches(1, 16)[0]
    layout = fs.plan(make_params(), mesh, fs.zero3("dp"), units="layers.*")

    def run(order, microbatches):
        shuffled = {k: v[order] for k, v in batch.items()}

        def rank_fn(comm):
            state = fs.init_state(fs.optim.sgd(1.0), fs.shard(make_params(), layout, comm), comm=comm)
            mine = {k: v.chunk(2)[comm.rank] for k, v in shuffled.items()}
            state, metrics = fs.train_step(loss_fn, fs.optim.sgd(1.0), microbatches=microbatches)(state, mine, comm)
            return fs.full_tree(state.params, comm=comm)["layers"][1]["w"], metrics.loss

        return simulate(mesh, rank_fn)[0]

    expected, loss = run(torch.arange(16), 1)
    for order, microbatches in ((torch.arange(15, -1, -1), 2), (batch["w"].argsort(), 1), (batch["w"].argsort(), 4)):
        got, other = run(order, microbatches)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other, loss, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_equal_bits_of_any_dtype_are_equivalent_and_other_bits_are_not(dtype):
    values = torch.tensor([1.0, -0.0, math.nan]).to(dtype)
    equivalence._assert_equal_leaves("a", {"w": values}, "b", {"w": values.clone()}, None)
    other = values.clone()
    other[1] = 0.0
    with pytest.raises(AssertionError, match=r"a and b differ in 'w'(.|\n)*the same bits"):
        equivalence._assert_equal_leaves("a", {"w": values}, "b", {"w": other}, None)
    equivalence._assert_equal_leaves("a", {"w": values}, "b", {"w": other}, equivalence.Tolerance())


def test_imaginary_parts_that_differ_are_shown():
    a, b = torch.tensor([1 + 1j]), torch.tensor([1 + 3j])
    with pytest.raises(AssertionError, match=r"largest gap *2 at flat index 0"):
        equivalence._assert_equal_leaves("a", {"w": a}, "b", {"w": b}, equivalence.Tolerance())
