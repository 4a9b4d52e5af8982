"""Stochastic rounding: unbiased, within a bound, with the same bits on every path, and refused where there is no step."""

from itertools import pairwise

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st

import fsharp as fs
from fsharp.errors import FsharpError, ScheduleError, TreeError
from fsharp.functional.formats import microscaling
from fsharp.functional.formats.stochastic import make_noise_fn, stochastic
from fsharp.stateful.runtime.captured_step import _check_capturable
from fsharp.testing import simulate
from tests.functional.layout.test_formats import finite, numbers
from tests.gpt_like import loss_fn, make_params
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    FORMAT_POLICIES,
    HYBRID,
    STRATEGIES,
    assert_same,
    assert_same_training,
    every,
    make_layout,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    train,
    turned,
)
from tests.virtual_device import VirtualDevice

MXINT4, MXINT8 = fs.formats.mxint4, fs.formats.mxint8
BASES = {
    each.name: each
    for each in (MXINT8, MXINT4, fs.formats.mxfp8, fs.formats.mxfp8_e5m2, fs.formats.mxfp4, fs.formats.hadamard(MXINT4))
}
FORMATS = {**{name: stochastic(each) for name, each in BASES.items()}, "bfloat16": stochastic(torch.bfloat16)}
# Of the value, and of the largest magnitude of its block: what the error is less than.
BOUNDS = {
    "mxint8": (0, 2 / 127),
    "mxint4": (0, 2 / 7),
    "mxfp8": (1 / 8, 1 / 114_000),
    "mxfp8_e5m2": (1 / 4, 1 / 1.8e9),
    "mxfp4": (1 / 2, 1 / 6),
    "bfloat16": (1 / 128, 0),
}
WIRE = stochastic(MXINT4)
TWO_LEVELS = {"outer": fs.formats.hadamard(WIRE), "inner": stochastic(MXINT8, seed=3)}


def some_noise(path="w", step=0, **rest):
    return make_noise_fn("gradient", step, 0, [(0, 1 << 20, path, 0)], **rest)


def decoded(form, values, noise=None):
    return form.load(form.store(values, len(values), noise_fn=noise), len(values), torch.float32)


@settings(max_examples=50)
@given(
    name=st.sampled_from(list(BOUNDS)),
    values=st.one_of(*(st.lists(each, min_size=32, max_size=32) for each in (finite, numbers))),
    step=st.integers(0, 1 << 40),
)
def test_the_error_is_within_the_bound(name, values, step):
    values = torch.tensor(values)
    found = decoded(FORMATS[name], values, some_noise(step=step))
    is_special = ~values.isfinite()
    assert torch.equal(found[is_special].nan_to_num(nan=1.5), values[is_special].nan_to_num(nan=1.5))
    if is_special.any() and name != "bfloat16":
        assert not found[~is_special].any()  # as without stochastic rounding
        return
    found, values = found[~is_special], values[~is_special]
    of_value, of_block = BOUNDS[name]
    most = torch.cat([values, values.new_zeros(1)]).double().abs().max()
    bound = torch.maximum(of_value * values.double().abs(), of_block * most) + 2.0**-126
    beyond = torch.finfo(torch.bfloat16).max if name == "bfloat16" else torch.inf
    assert ((found.double() - values.double().clamp(-beyond, beyond)).abs() <= bound).all()


@settings(max_examples=25)
@given(name=st.sampled_from(list(FORMATS)), seed=st.integers(0, 99), step=st.integers(0, 9))
def test_what_a_code_stands_for_stays_as_it_is(name, seed, step):
    """However random numbers fall: zeros, and largest values too."""
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(-3, 5).repeat(8)
    values[::7] = 0
    once = decoded(FORMATS[name], values, some_noise(step=step))
    if not name.startswith("hadamard"):  # whose rotation is rounded
        assert torch.equal(decoded(FORMATS[name], once, some_noise(step=step + 1)), once)
    again = decoded(FORMATS[name], values, some_noise(step=step))
    assert torch.equal(again, once)


@pytest.mark.parametrize("name", FORMATS)
def test_the_mean_of_what_is_decoded_is_the_value(name):
    """By the mean of 2^14 draws, in standard errors of the mean. The nearest code is off by far more."""
    times = 1 << 14
    values = torch.linspace(-1, 1, 64) ** 3 + 1e-3
    rows = values.repeat(times)
    found = decoded(FORMATS[name], rows, some_noise()).view(times, 64).double()
    error = found.mean(0) - values.double()
    spread = found.std(0).clamp(min=1e-7) / times**0.5
    distance = (found.max(0).values - found.min(0).values).clamp(min=1e-7)
    assert (error.abs() <= 5 * spread + 2.0**-16 * distance).all(), (error / spread).abs().max()
    nearest = BASES[name].load(BASES[name].store(values, 64), 64, torch.float32) if name in BASES else values.bfloat16()
    assert ((nearest.double() - values.double()).abs() > 5 * spread + 2.0**-16 * distance).float().mean() > 0.5


def test_what_is_not_finite_arrives_as_such():
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, *[0.5] * 28])
    for name, form in FORMATS.items():
        found = decoded(form, values, some_noise())
        if name.startswith("hadamard"):
            assert not found.isfinite().any()
        else:
            assert torch.equal(found[1:3], values[1:3])
            assert found[3].isnan()


@given(cuts=st.lists(st.integers(0, 500), max_size=4), first=st.integers(0, 1 << 40), step=st.integers(0, 1 << 40))
def test_random_numbers_do_not_depend_on_where_a_leaf_is_cut(cuts, first, step):
    cpu = torch.device("cpu")
    whole = make_noise_fn("gradient", step, 0, [(3, 503, "w", first)])(7, 510, cpu)
    bounds = [0, *sorted(cuts), 500]
    parts = [make_noise_fn("gradient", step, 0, [(0, b - a, "w", first + a)])(7, b - a, cpu) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole[3:503])
    assert (whole[:3] == 0.5).all()
    assert (whole[503:] == 0.5).all()
    assert whole.min() > 0
    assert whole.max() < 1


def test_random_numbers_are_uniform_and_of_their_own():
    cpu, runs = torch.device("cpu"), [(0, 1 << 16, "w", 0)]
    found = {
        "as it is": make_noise_fn("gradient", 0, 0, runs)(0, 1 << 16, cpu),
        "seed": make_noise_fn("gradient", 0, 0, runs)(1, 1 << 16, cpu),
        "what": make_noise_fn("update", 0, 0, runs)(0, 1 << 16, cpu),
        "step": make_noise_fn("gradient", 1, 0, runs)(0, 1 << 16, cpu),
        "number": make_noise_fn("gradient", 0, 1, runs)(0, 1 << 16, cpu),
        "path": make_noise_fn("gradient", 0, 0, [(0, 1 << 16, "v", 0)])(0, 1 << 16, cpu),
        "index": make_noise_fn("gradient", 0, 0, [(0, 1 << 16, "w", 1)])(0, 1 << 16, cpu),
    }
    names = [*found]
    together = torch.stack([*found.values()]).double() - 0.5
    assert (together.mean(1).abs() < 5 * (1 / 12) ** 0.5 / 256).all()
    assert ((together.var(1) - 1 / 12).abs() < 5 * (1 / 180) ** 0.5 / 256).all()
    correlation = torch.corrcoef(together).fill_diagonal_(0).abs()
    assert correlation.max() < 5 / 256, names
    neighbours = torch.corrcoef(torch.stack([together[0, 1:], together[0, :-1]]))[0, 1]
    assert abs(neighbours) < 5 / 256


@every(18, strategy=turned(STRATEGIES, "zero3"), policy=FORMAT_POLICIES, wire=["one", "two levels"])
@on_ranks(mesh_of)
def test_paths_have_the_same_bits(comm, strategy, policy, wire):
    mesh = STRATEGIES[strategy][0]
    precision = fs.Precision(wire=TWO_LEVELS if wire == "two levels" and mesh is HYBRID else WIRE, main=torch.float32)
    ways = {"params": make_params(layers=1), "microbatches": 2}
    blocking = train(comm, strategy, steps=3, precision=precision, **ways)
    assert_same_training(train(comm, strategy, FORMAT_POLICIES[policy], steps=3, precision=precision, **ways), blocking)
    other = fs.Precision(wire=stochastic(MXINT4, seed=1), main=torch.float32)
    assert train(comm, strategy, steps=2, precision=other, **ways).losses != blocking.losses[:2]


@every(2, strategy=["zero1", "zero3", "hfsdp"], feedback=[False, True])
@on_ranks(mesh_of)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(comm, strategy, feedback, tmp_path):
    update = {} if strategy == "zero3" else {"update": stochastic(MXINT8)}
    precision = fs.Precision(wire=WIRE, main=torch.float32, feedback=feedback, **update)
    small = {"params": make_params(layers=1), "precision": precision}
    state, batches = make_state(comm, strategy, **small), my_batches(comm, 4)
    step = fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
    for batch in batches[:2]:
        state, _ = step(state, batch)
    fs.checkpoint.save(str(tmp_path), state, step=2, comm=comm)
    again = fs.checkpoint.load(str(tmp_path), make_state(comm, strategy, **small), comm=comm)
    found = []
    for start, call in ((state, step), (again, lambda *args: fs.train_step(loss_fn, make_tx())(*args, comm))):
        losses = []
        for batch in batches[2:]:
            start, metrics = call(start, batch)
            losses.append(metrics.loss)
        found.append((losses, optree.tree_leaves(fs.full_tree(start.params, comm=comm))))
    assert_same(found[1], found[0])


@on_ranks(DP)
def test_a_step_in_parts(comm):
    precision, tx = fs.Precision(wire=WIRE), make_tx()
    state, batch = make_state(comm, "zero1", precision=precision, tx=tx), my_batches(comm, 1)[0]
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, step=state.step)
    grads = fs.reduce_scatter(grads, comm=comm, step=state.step)
    _, grads = fs.average(loss, grads, comm=comm)
    in_parts = fs.update(tx, grads, state, comm=comm)
    whole, _ = fs.train_step(loss_fn, tx)(state, batch, comm)
    assert_same(*[optree.tree_leaves(fs.full_tree(each.params, comm=comm)) for each in (in_parts, whole)])


@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(DP)
def test_without_a_step_it_is_refused(comm, scheduled):
    engine = fs.Scheduler(comm) if scheduled else comm
    state, batch = make_state(engine, "zero1", precision=fs.Precision(wire=WIRE)), my_batches(comm, 1)[0]
    with pytest.raises(TreeError, match=r"value_and_grad\(\): gradients of unit 'embed' are rounded.*Pass step=state.step"):
        fs.value_and_grad(loss_fn)(state.params, batch, comm=engine)
    for wrong in (-1, 1.0, True):
        with pytest.raises(TreeError, match=rf"step is {wrong}, expected an integer of at least 0"):
            fs.value_and_grad(loss_fn)(state.params, batch, comm=engine, step=wrong)


@on_ranks(DP)
def test_a_reduction_without_a_step_is_refused(comm):
    state, batch = make_state(comm, "zero1", precision=fs.Precision(wire=WIRE)), my_batches(comm, 1)[0]
    _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, step=0)
    with pytest.raises(TreeError, match=r"reduce_scatter\(\): gradients of unit .* are rounded stochastically"):
        fs.reduce_scatter(grads, comm=comm)


EXPECTED = r"stochastic\(\): got format {} and seed {}; expected a format with"
REFUSED = {
    "encoding without a step": (lambda: WIRE.store(torch.ones(32), 32), r"Format 'stochastic_mxint4'.*, and no step says"),
    "nvfp4": (lambda: stochastic(fs.formats.nvfp4), EXPECTED.format("nvfp4", 0)),
    "by row": (lambda: stochastic(fs.formats.int8_by_row), EXPECTED.format("int8_by_row", 0)),
    "twice": (lambda: stochastic(WIRE), EXPECTED.format("stochastic_mxint4, which has seed 0 already", 0)),
    "a seed": (lambda: stochastic(MXINT4, seed=-1), EXPECTED.format("mxint4", -1)),
    **{
        str(dtype): (lambda dtype=dtype: stochastic(dtype), rf"got format {dtype} and seed 0;.*Plain float32 does not round")
        for dtype in (torch.float32, torch.float16, torch.int8)
    },
    "at rest": (lambda: fs.Precision(stored=WIRE), r"stored is 'stochastic_mxint4', which rounds .*pass the format itself"),
    "a mapping of updates": (
        lambda: fs.Precision(update={"outer": MXINT4}),
        r"update is \{'outer'.*expected a Format for all axes: an update that is encoded again",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    act, match = REFUSED[name]
    with pytest.raises(FsharpError, match=match):
        act()


@on_ranks(DP)
def test_graphs_are_refused(comm):
    for precision in (fs.Precision(wire=WIRE), fs.Precision(update=WIRE)):
        state = make_state(comm, "zero1", precision=precision)
        with pytest.raises(ScheduleError, match=r"CapturedStep\(\): unit 'embed' has a format that rounds stochastically"):
            _check_capturable(torch.device("cuda"), fs.SchedulePolicy(gather_at_start=False), state, 2)


def test_ranks_compare_seeds():
    def rank_fn(comm):
        return make_state(comm, "zero3", precision=fs.Precision(wire=stochastic(MXINT4, seed=comm.rank)))

    with pytest.raises(fs.errors.AgreementError, match="stochastic1_mxint4"):
        simulate(DP, rank_fn)


def test_equal_arguments_give_one_format():
    assert stochastic(MXINT4) is WIRE
    assert stochastic(MXINT4, seed=1) != WIRE
    assert fs.formats.hadamard(WIRE).seed == 0
    assert stochastic(fs.formats.hadamard(MXINT4)).size(1024) == MXINT4.size(1024)
    layout = make_layout(DP, "zero3", precision=fs.Precision(wire=WIRE))
    assert fs.Layout.from_json(layout.to_json()) == layout


def test_a_device_makes_random_numbers_in_pieces(monkeypatch):
    """With the bits of a CPU, in hardly more memory than the 4 bytes of each number."""
    monkeypatch.setattr(microscaling, "_BLOCKS_ON_DEVICE", 1 << 7)
    noise, count = make_noise_fn("gradient", 3, 0, [(0, 100_001, "w", 7)]), 1 << 17
    with VirtualDevice() as device:
        device.reset_peak()
        before = device.allocated
        found = noise(1, count, torch.device("cuda"))
        assert device.peak - before < 5 * count
        assert torch.equal(found.cpu(), noise(1, count, torch.device("cpu")))
