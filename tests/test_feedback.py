"""What formats lose of gradients is added to the next ones: nothing is lost for good, on any path."""

from functools import partial
from itertools import pairwise, product

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import LayoutError, OptionError, ScheduleError, TreeError
from fsharp.functional.formats.format import Format, Plane
from fsharp.functional.layout.stages import residual_sizes
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import loss_fn, make_params
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    FLAT,
    FORMAT_POLICIES,
    HYBRID,
    ON_TWO_AXES,
    STRATEGIES,
    assert_same,
    every,
    make_layout,
    make_state,
    make_tx,
    my_batches,
    turned,
)
from tests.stateful.runtime.test_scheduler_equivalence import assert_as_predicted
from tests.test_format import BLOCKS

MXINT4, MXFP4 = fs.formats.mxint4, fs.formats.mxfp4
FORMATS = {each.name: each for each in (MXINT4, MXFP4, fs.formats.mxint8, fs.formats.hadamard(MXINT4), BLOCKS)}
POLICIES = {**FORMAT_POLICIES, "offload": {"offload": True}}
EXACT = Format("exact", (Plane(torch.float32, 32),), lambda values: [values], lambda planes: planes[0], block=32)
WIRES = {
    "mxint4": MXINT4,
    "between hosts": {"outer": MXINT4, "inner": torch.bfloat16},
    "two formats": {"outer": fs.formats.hadamard(MXINT4), "inner": BLOCKS},
}


def of(wire=MXINT4, feedback=True, **rest):
    return fs.Precision(main=torch.float32, wire=wire, feedback=feedback, **rest)


@given(
    wire=st.sampled_from(list(FORMATS.values())),
    parts=st.integers(1, 3),
    blocks=st.integers(1, 3),
    steps=st.integers(1, 6),
    seed=st.integers(0, 99),
    short=st.integers(0, 31),
)
def test_what_was_sent_and_the_last_residual_add_up_to_all_gradients(wire, parts, blocks, steps, seed, short):
    generator, part = torch.Generator().manual_seed(seed), 32 * blocks
    size = parts * part - short
    grads = [torch.randn(size, generator=generator) for _ in range(steps)]
    residual, sent = torch.zeros(size), torch.zeros(size, dtype=torch.float64)
    for grad in grads:
        given_ = torch.nn.functional.pad(grad, (0, short))
        before = given_.clone()
        stored = wire.store_summand(given_, part, residual)
        assert torch.equal(given_, before)
        sent += wire.load(stored, part, torch.float32)[:size]
    torch.testing.assert_close(sent + residual, torch.stack(grads).double().sum(0), rtol=1e-5, atol=1e-5)


@given(wire=st.sampled_from([MXINT4, MXFP4, fs.formats.mxint8]), steps=st.integers(1, 8), seed=st.integers(0, 99))
def test_with_scales_that_are_powers_of_two_they_add_up_exactly(wire, steps, seed):
    grads = torch.randint(-1000, 1001, (steps, 64), generator=torch.Generator().manual_seed(seed)) / 256
    residual, sent = torch.zeros(64), torch.zeros(64)
    for grad in grads:
        sent += wire.load(wire.store_summand(grad, 64, residual), 64, torch.float32)
    assert torch.equal(sent + residual, grads.sum(0))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_kept(bad):
    grad, residual = torch.linspace(-1, 1, 64), torch.zeros(64)
    grad[3] = bad
    stored = MXINT4.store_summand(grad, 64, residual)
    assert not MXINT4.load(stored, 64, torch.float32).isfinite().all()
    assert residual.isfinite().all()
    assert residual[32:].count_nonzero()


@pytest.mark.parametrize("wire", FORMATS.values(), ids=FORMATS)
def test_a_gradient_of_zeros_sends_zeros_and_keeps_its_residual(wire):
    residual = torch.randn(60, generator=torch.Generator().manual_seed(0))
    before, zeros = residual.clone(), torch.zeros(64)
    zeros[7] = -0.0
    assert not wire.load(wire.store_summand(zeros, 32, residual), 32, torch.float32).count_nonzero()
    assert torch.equal(residual, before)
    zeros[7] = 1e-30
    assert wire.load(wire.store_summand(zeros, 32, residual), 32, torch.float32).count_nonzero()
    assert residual.norm() < 0.5 * before.norm()


def reduced(comm, state, batch, residuals):
    """Gradients of a state's parameters, whole, and new residuals."""
    if residuals is None:
        _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        grads = fs.reduce_scatter(grads, comm=comm)
    else:
        _, grads, residuals = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, residuals=residuals)
        grads, residuals = fs.reduce_scatter(grads, comm=comm, residuals=residuals)
    return [b.clone() for node in fs.layouts.units_of(fs.gather(grads, comm=comm)) for b in node.buffers], residuals


@pytest.mark.parametrize("strategy", FLAT)
def test_over_steps_gradients_are_those_of_an_exact_wire(strategy):
    """Up to the residuals of all ranks, which are as large after 6 steps as after one."""

    def rank_fn(comm):
        precisions = (of(), of(feedback=False), of(EXACT, False))
        state, exact, plain = (make_state(comm, strategy, params=make_params(layers=1), precision=each) for each in precisions)
        residuals, totals = state.residuals, [0, 0, 0]
        for batch in my_batches(comm, 6):
            fed_back, residuals = reduced(comm, state, batch, residuals)
            for i, found in enumerate((fed_back, reduced(comm, exact, batch, None)[0], reduced(comm, plain, batch, None)[0])):
                totals[i] = totals[i] + torch.cat(found)
        left = [comm.all_reduce(x, "dp") for x in optree.tree_leaves(residuals)]
        return totals, torch.cat(left)

    layout = make_layout(DP, strategy, precision=of())
    assert {unit.name for unit in layout.units if residual_sizes(unit)} == {unit.name for unit in layout.units}
    for (fed_back, lossy, plain), left in simulate(DP, rank_fn):
        assert len(plain) == len(left)
        torch.testing.assert_close(fed_back + left, plain, rtol=1e-4, atol=1e-4)
        assert (fed_back - plain).norm() < 0.5 * (lossy - plain).norm()


def run(comm, strategy, policy=None, *, steps=5, microbatches=1, donate=True, precision=None, watched=False):
    """Losses, parameters and residuals after some steps."""
    state = make_state(comm, strategy, params=make_params(layers=1), precision=precision or of())
    step = fs.train_step(loss_fn, make_tx(), microbatches=microbatches, donate=donate)
    call = partial(step, comm=comm)
    if policy is not None:
        call = fs.Scheduler(comm, policy=DebugPolicy(**{"poison": True, **policy}))(step)
    losses = []
    for batch in my_batches(comm, steps):
        before = None if donate else optree.tree_map(torch.clone, state.residuals)
        old = state
        state, metrics = call(state, batch)
        if before is not None:
            assert_same(old.residuals, before)
        losses.append(float(metrics.loss))
    if policy is not None:
        assert call.num_unscheduled_calls == 1
        fs.schedules.verify(call.schedule)
    leaves = [leaf.clone() for leaf in optree.tree_leaves(fs.full_tree(state.params, comm=comm))]
    return losses, leaves, state.residuals


def check_training(comm, strategy, wire, policy, microbatches, donate):
    stored = {"stored": fs.formats.mxint8} if policy == "buckets" else {}
    ways = {"microbatches": microbatches, "precision": of(WIRES[wire], **stored), "steps": 3}
    blocking = run(comm, strategy, donate=not donate, **ways)
    assert_same(run(comm, strategy, POLICIES[policy], donate=donate, **ways), blocking)
    if len(comm.mesh.axes) == 2:  # on one axis gradients over steps are compared above
        without = run(comm, strategy, microbatches=microbatches, precision=of(WIRES[wire], False, **stored), steps=3)
        assert without[2] is None
        assert blocking[0][:1] == without[0][:1]
        assert blocking[0] != without[0]


REST = {"policy": POLICIES, "microbatches": [1, 2], "donate": [True, False]}


@every(48, strategy=ON_TWO_AXES, wire=WIRES, **REST)
@on_ranks(HYBRID)
def test_training_on_two_axes_has_the_same_bits_on_every_path(comm, strategy, wire, policy, microbatches, donate):
    check_training(comm, strategy, wire, policy, microbatches, donate)


@every(16, strategy=FLAT, **REST)
@on_ranks(DP)
def test_training_has_the_same_bits_on_every_path(comm, strategy, policy, microbatches, donate):
    check_training(comm, strategy, "mxint4", policy, microbatches, donate)


@on_ranks(DP)
def test_a_rank_that_does_not_use_a_unit_keeps_its_residual_there(comm):
    """Under ddp and zero1 such a rank leaves the unit out; else it has a gradient of zeros, of dummy_forward."""

    def loss_of(needs_all_ranks):
        def loss(params, batch, comm):
            total = torch.zeros(())
            for i, layer in enumerate(params["layers"]):
                if i != 1 or comm.rank == 0 or not batch["apart"]:
                    total = total + fs.forward(lambda p, x: torch.tanh(x @ p["w"]).square().sum(), layer, batch["x"], comm=comm)
                elif needs_all_ranks:
                    total = fs.dummy_forward(layer, total, comm=comm)
            return total

        return loss

    def trained(comm, strategy, policy):
        params = {"layers": [{"w": torch.randn(6, 7, generator=torch.Generator().manual_seed(i))} for i in range(3)]}
        state, kept = make_state(comm, strategy, params=params, precision=of()), []
        step = fs.train_step(loss_of(strategy not in ("ddp", "zero1")), make_tx())
        call = partial(step, comm=comm) if policy is None else fs.Scheduler(comm, policy=DebugPolicy(**policy))(step)
        for i in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + comm.rank))
            state, _ = call(state, {"x": x, "apart": i in (2, 3)})
            kept.append([x.clone() for key, each in state.residuals.value.items() if "layers.1" in key for x in each])
        changed = [not all(map(torch.equal, *pair)) for pair in pairwise(kept)]
        assert changed == ([True] * 4 if comm.rank == 0 else [True, False, False, True])
        return optree.tree_leaves(fs.full_tree(state.params, comm=comm)), kept

    expected = trained(comm, "ddp", None)
    for strategy, policy in [("zero1", None), ("zero2", None), ("zero3", None), ("zero2", {}), ("zero3", {})]:
        assert_same(trained(comm, strategy, policy), expected)


@pytest.mark.parametrize("policy", [None, {}], ids=["blocking", "scheduled"])
@on_ranks(DP)
def test_what_is_kept_of_a_leaf_is_sent_with_the_other_leaves_of_its_unit(comm, policy):
    """Nothing is lost in functions, and no strategy has other bits."""

    def loss(params, batch, comm):
        def fn(p, x):
            return (x * p["a"]).sum() + ((x * p["b"]).sum() if batch["both"] else 0)

        return fs.forward(fn, params["layers"][0], batch["x"], comm=comm)

    def moved(comm, strategy, precision):
        """The sum of all gradients after each step, of both leaves: they do not depend on the parameters."""
        params = {"layers": [{"a": torch.zeros(64), "b": torch.zeros(64)}]}
        tx = fs.optim.sgd(1.0)
        state = make_state(comm, strategy, tx=tx, params=params, precision=precision)
        step, found = fs.train_step(loss, tx), []
        call = partial(step, comm=comm) if policy is None else fs.Scheduler(comm, policy=DebugPolicy(**policy))(step)
        for i in range(5):
            x = torch.randn(64, generator=torch.Generator().manual_seed(10 * i + comm.rank))
            state, _ = call(state, {"x": x, "both": i in (0, 4)})
            found.append(torch.cat(optree.tree_leaves(fs.full_tree(state.params, comm=comm))))
        return found

    exact, first, *others = [moved(comm, *each) for each in [("ddp", of(EXACT, False)), *((name, of()) for name in FLAT)]]
    for each in others:
        assert_same(each, first)
    assert torch.equal(exact[0][64:], exact[1][64:])
    assert not torch.equal(first[0][64:], first[1][64:])
    apart = [(a - b).abs()[64:].max() for a, b in zip(exact, first, strict=True)]
    assert apart[1] < 0.3 * apart[0]


@every(2, wire=[MXINT4, MXFP4], strategy=["ddp", "zero3"])
def test_a_quadratic_problem_is_solved_where_it_stalls_without(strategy, wire):
    """Ranks have targets far apart, so that at the optimum, their mean, each rank's gradient is as coarse as ever."""
    generator = torch.Generator().manual_seed(0)
    middle, apart = torch.randn(96, generator=generator), 10 * torch.randn(96, generator=generator)

    def distance(comm, feedback):
        tx = fs.optim.sgd(6e-2)
        layout = fs.plan({"w": torch.zeros(96)}, comm.mesh, FLAT[strategy][1], precision=of(wire, feedback))
        state = fs.init_state(tx, fs.shard({"w": torch.zeros(96)}, layout, comm, place="optim"), comm=comm)

        def loss(params, target, comm):
            return fs.forward(lambda p: 0.5 * (p["w"] - target).square().sum(), params, comm=comm)

        step, target = fs.train_step(loss, tx, donate=True), middle + (apart if comm.rank else -apart)
        for _ in range(60):
            state, _ = step(state, target, comm)
        return float((fs.full_tree(state.params, comm=comm)["w"] - middle).abs().max())

    for without, with_feedback in simulate(DP, lambda comm: (distance(comm, False), distance(comm, True)), timeout=60):
        assert without > 1
        assert with_feedback < 0.2


@every(6, strategy=turned(STRATEGIES, "zero2"), microbatches=[1, 3])
def test_nothing_more_travels(strategy, microbatches):
    assert_as_predicted(strategy, microbatches, of())
    layouts = [make_layout(*STRATEGIES[strategy], precision=of(feedback=each)) for each in (True, False)]
    assert fs.inspect.step_traffic(layouts[0]) == fs.inspect.step_traffic(layouts[1])
    assert [[group.capacity for unit in each.units for group in unit.groups] for each in layouts[:1]] == [
        [group.capacity for unit in each.units for group in unit.groups] for each in layouts[1:]
    ]


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [
        *((strategy, "mxint4") for strategy in FLAT),
        *(pytest.param(*each, marks=[pytest.mark.deep] * (i % 2)) for i, each in enumerate(product(ON_TWO_AXES, WIRES))),
    ],
)
def test_memory_is_predicted(strategy, wire):
    mesh, how = STRATEGIES[strategy]
    layout = make_layout(mesh, how, make_params(layers=1), precision=of(WIRES[wire]))

    def rank_fn(comm):
        state = make_state(comm, strategy, params=make_params(layers=1), precision=of(WIRES[wire]))
        before = fs.inspect.tree_nbytes(state.residuals)
        state, _ = fs.train_step(loss_fn, make_tx())(state, my_batches(comm, 1)[0], comm)
        return before, fs.inspect.tree_nbytes(state.residuals)

    for found in simulate(mesh, rank_fn):
        assert found == (layout.nbytes("residuals"),) * 2
    if mesh == DP:
        assert layout.nbytes("residuals") == 4 * sum(group.size for unit in layout.units for group in unit.groups)
        assert "residuals" in str(layout)
    assert make_layout(*STRATEGIES[strategy], precision=of(WIRES[wire], False)).nbytes("residuals") == 0


def test_hosts_keep_what_they_send_between_them():
    """Along the outer axis a rank encodes its part alone, which is half of the parameters on two inner ranks."""
    params = {"w": torch.zeros(4096)}

    def kept(strategy, wire):
        return fs.plan(params, HYBRID, strategy, precision=of(wire)).nbytes("residuals")

    outer = {"outer": MXINT4, "inner": torch.bfloat16}
    assert kept(fs.hsdp("outer", "inner"), outer) == kept(fs.zero3("inner", "outer"), outer) == 2048 * 4
    assert kept(fs.zero3("outer", "inner"), outer) == 4096 * 4
    assert kept(fs.hsdp("outer", "inner"), MXINT4) == (2048 + 4096) * 4
    assert fs.plan(params, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision=of()).nbytes("residuals") == 0


def test_tune_counts_residuals():
    hardware = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e9, latency=2e-5)
    layouts = {name: make_layout(DP, "zero3", precision=of(feedback=name == "fed back")) for name in ("fed back", "without")}
    choice = fs.tune(layouts, hardware, budget=1e9)
    assert choice.name == "without"
    peaks = {(x.layout, x.policy): x.peak_nbytes for x in choice.candidates}
    kept = layouts["fed back"].nbytes("residuals")
    assert all(peaks["fed back", policy] - peaks["without", policy] == kept > 0 for _, policy in peaks)


def test_one_rank_has_no_residuals():
    comm = fs.SingleComm()
    state = make_state(comm, fs.zero3("dp"), precision=of())
    assert state.residuals is None
    fs.train_step(loss_fn, make_tx())(state, my_batches(comm, 1)[0], comm)


def small_state(comm, strategy, feedback=True):
    return make_state(comm, strategy, params=make_params(layers=1), precision=of(feedback=feedback))


@every(2, strategy=["zero1", "zero3", "hsdp"], scheduled=[False, True])
def test_a_checkpoint_goes_on_with_the_same_bits(strategy, scheduled, tmp_path):
    tx = make_tx()

    def rank_fn(comm):
        def call():
            step = fs.train_step(loss_fn, tx, microbatches=2)
            return fs.Scheduler(comm)(step) if scheduled else partial(step, comm=comm)

        state, batches = small_state(comm, strategy), my_batches(comm, 4)
        step = call()
        for batch in batches[:2]:
            state, _ = step(state, batch)
        fs.checkpoint.save(str(tmp_path), state, step=2, comm=comm)
        loaded = fs.checkpoint.load(str(tmp_path), small_state(comm, strategy), comm=comm)
        assert_same(loaded.residuals, state.residuals)
        again = call()
        for batch in batches[2:]:
            state, first = step(state, batch)
            loaded, second = again(loaded, batch)
            assert first.loss == second.loss
        assert_same(loaded, state)
        other = fs.checkpoint.load(str(tmp_path), small_state(comm, strategy, False), comm=comm, ignore="residuals")
        assert other.residuals is None

    simulate(STRATEGIES[strategy][0], rank_fn)


def test_another_number_of_ranks_loads_without_residuals(tmp_path):
    tx = make_tx()

    def save(comm):
        state, _ = fs.train_step(loss_fn, tx)(small_state(comm, "zero1"), my_batches(comm, 1)[0], comm)
        fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)

    simulate(DP, save)

    def on_one(comm):
        like = small_state(comm, fs.zero3("dp"))
        with pytest.raises(TreeError, match="residuals"):
            fs.checkpoint.load(str(tmp_path), like, comm=comm)
        return fs.checkpoint.load(str(tmp_path), like, comm=comm, ignore="residuals").step

    assert on_one(fs.SingleComm()) == 1

    def on_four(comm):
        like = small_state(comm, fs.zero3("dp"))
        with pytest.raises(TreeError, match="residuals"):
            fs.checkpoint.load(str(tmp_path), like, comm=comm)
        bare = fs.checkpoint.load(str(tmp_path), like._replace(residuals=None), comm=comm, ignore="residuals")
        found, _ = fs.train_step(loss_fn, tx)(bare._replace(residuals=like.residuals), my_batches(comm, 1)[0], comm)
        return found.step

    assert simulate(fs.Mesh({"dp": 4}), on_four) == [2] * 4


def test_residuals_of_equal_size_and_another_order_are_refused(tmp_path):
    """Rows are not cut, so with other atoms leaves lie elsewhere in buffers that are as large."""
    params = {"a": torch.zeros(3, 10), "b": torch.zeros(5, 7), "c": torch.zeros(31)}
    found = [fs.plan(params, DP, fs.zero3("dp"), precision=of(), atoms=atoms) for atoms in ({}, {"**": fs.layouts.RowsAtom(1)})]
    assert found[0].nbytes("residuals") == found[1].nbytes("residuals")
    assert [leaf.offset for leaf in found[0].units[0].leaves] != [leaf.offset for leaf in found[1].units[0].leaves]

    def rank_fn(comm):
        states = [fs.init_state(make_tx(), fs.shard(params, each, comm, place="optim"), comm=comm) for each in found]
        fs.checkpoint.save(str(tmp_path), states[0], step=1, comm=comm)
        with pytest.raises(TreeError, match="residuals"):
            fs.checkpoint.load(str(tmp_path), states[1], comm=comm)
        with pytest.raises(TreeError, match="residuals of another layout"):
            fs.value_and_grad(loss_fn)(states[1].params, None, comm=comm, residuals=states[0].residuals)

    simulate(DP, rank_fn)


@on_ranks(DP)
def test_reshard_begins_from_zeros(comm):
    tx, state = make_tx(), make_state(comm, "zero3", precision=of())
    step = fs.train_step(loss_fn, tx)
    batches = my_batches(comm, 3)
    state, _ = step(state, batches[0], comm)
    assert any(x.count_nonzero() for x in optree.tree_leaves(state.residuals))
    layout = make_layout(DP, "zero1", precision=of())
    new = fs.reshard({"state": state, "seen": 1}, layout, comm=comm)["state"]
    assert fs.inspect.tree_nbytes(new.residuals) == layout.nbytes("residuals")
    assert not any(x.count_nonzero() for x in optree.tree_leaves(new.residuals))
    new, _ = step(new, batches[1], comm)
    assert any(x.count_nonzero() for x in optree.tree_leaves(new.residuals))
    assert fs.reshard(state, make_layout(DP, "zero1", precision=of(feedback=False)), comm=comm).residuals is None


@on_ranks(HYBRID)
def test_gradients_of_any_function_are_reduced_with_residuals(comm):
    """Those that torch.func.grad gives of gathered parameters are reduced in one move."""
    for strategy in ("hsdp", "hfsdp", "zero3x2"):
        state = make_state(comm, strategy, params=make_params(layers=1), precision=of(WIRES["two formats"]))
        [batch] = my_batches(comm, 1)
        gathered = fs.gather(state.params, comm=comm)
        _, mine, lost = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, residuals=state.residuals)
        mine, lost = fs.reduce_scatter(mine, comm=comm, residuals=lost)
        summand = torch.func.grad(lambda tree, batch=batch: loss_fn(tree, batch, comm).sum)(gathered)
        before = optree.tree_map(torch.clone, state.residuals)
        other, kept = fs.reduce_scatter(summand, comm=comm, residuals=state.residuals)
        assert_same(state.residuals, before)
        assert_same(optree.tree_leaves(other), optree.tree_leaves(mine))
        assert_same(kept, lost)


def test_a_layout_keeps_it():
    layout = make_layout(DP, "zero3", precision={"**": of(), "layers.1.*": of(feedback=False)})
    again = fs.Layout.from_json(layout.to_json())
    assert again == layout
    assert [bool(residual_sizes(unit)) for unit in again.units] == [unit.name != "layers.1" for unit in layout.units]
    for each in (of(update=fs.formats.mxint8), of(stored=fs.formats.mxfp8), of({"dp": MXINT4})):
        layout = make_layout(DP, "zero3" if each.update is None else "zero1", precision=each)
        assert fs.Layout.from_json(layout.to_json()) == layout


def test_precisions_without_a_format_are_refused():
    for wire in (None, torch.bfloat16, {"outer": torch.bfloat16}):
        with pytest.raises(LayoutError, match="feedback is True, and wire is"):
            fs.Precision(wire=wire, feedback=True)
    with pytest.raises(OptionError, match="feedback is 1, expected True or False"):
        fs.Precision(wire=MXINT4, feedback=1)


@on_ranks(DP)
def test_residuals_that_are_missing_or_of_another_layout_are_refused(comm):
    state, [batch] = make_state(comm, "zero1", precision=of()), my_batches(comm, 1)
    grad_fn = fs.value_and_grad(loss_fn)
    with pytest.raises(TreeError, match=r"value_and_grad\(\): gradients of unit .* Pass residuals=state.residuals"):
        grad_fn(state.params, batch, comm=comm)
    with pytest.raises(TreeError, match="there are no residuals"):
        fs.train_step(loss_fn, make_tx())(state._replace(residuals=None), batch, comm)
    with pytest.raises(TreeError, match="residuals are dict"):
        grad_fn(state.params, batch, comm=comm, residuals={})
    other = make_state(comm, "zero1", params=make_params(layers=3, dim=16), precision=of()).residuals
    with pytest.raises(TreeError, match=r"residuals of another layout.*\n.*unit +'embed"):
        grad_fn(state.params, batch, comm=comm, residuals=other)
    _, grads, residuals = grad_fn(state.params, batch, comm=comm, residuals=state.residuals)
    with pytest.raises(TreeError, match=r"reduce_scatter\(\): gradients of unit .* Pass residuals=state.residuals"):
        fs.reduce_scatter(grads, comm=comm)
    with pytest.raises(TreeError, match=r"residuals under a torch\.func transform"):
        torch.func.vmap(lambda x: fs.reduce_scatter(grads, comm=comm, residuals=residuals) and x)(torch.ones(2))


@on_ranks(DP)
def test_gradients_changed_after_they_were_sent_are_refused(comm):
    tx, changes = make_tx(), []

    def step(state, batch, comm):
        loss, grads, lost = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, residuals=state.residuals)
        if changes:
            grads = optree.tree_map(lambda g: g * 2, grads)
        grads, lost = fs.reduce_scatter(grads, comm=comm, residuals=lost)
        metrics, grads = fs.average(loss, grads, comm=comm)
        return fs.update(tx, grads, state._replace(residuals=lost), comm=comm), metrics

    scheduled, state = fs.Scheduler(comm)(step), make_state(comm, "ddp", precision=of())
    batches = my_batches(comm, 4)
    for batch in batches[:3]:
        state, _ = scheduled(state, batch)
    changes.append(True)
    with pytest.raises(ScheduleError, match="was changed after the schedule had sent it with feedback"):
        scheduled(state, batches[3])


@on_ranks(DP)
def test_changed_gradients_have_the_bits_of_the_blocking_path(comm):
    """Changed in each step, so that nothing is sent before."""

    def step(state, batch, comm):
        loss, grads, lost = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm, residuals=state.residuals)
        grads = optree.tree_map(lambda g: g * 2, grads)
        for node in fs.layouts.units_of(grads):
            node.reduction = "sum"
        grads, lost = fs.reduce_scatter(grads, comm=comm, residuals=lost)
        metrics, grads = fs.average(loss, grads, comm=comm)
        return fs.update(make_tx(), grads, state._replace(residuals=lost), comm=comm), metrics

    found = []
    for call in (partial(step, comm=comm), fs.Scheduler(comm)(step)):
        state = make_state(comm, "zero1", precision=of())
        for batch in my_batches(comm, 4):
            state, _ = call(state, batch)
        found.append((fs.full_tree(state.params, comm=comm), state.residuals))
    assert_same(*found)
