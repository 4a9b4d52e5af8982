"""Steps that leave their schedule with gradients under way, and backwards that come after those were handed out."""

from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.testing import simulate
from tests.gpt_like import block, loss_fn, make_params, through
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    HYBRID,
    assert_close,
    buffers,
    copied,
    evaluate,
    every,
    full_params,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    run_both,
)
from tests.stateful.runtime.test_scheduler_rest import ARRIVALS


def departing(state, batch, comm):
    """Off the plan in the forward (by ``order``), in the backward (``early``), or right after it (``extra``)."""
    early = batch.get("early")

    @through
    def loss(x, layers, batch, comm):
        for i in batch["order"]:
            y = fs.forward(block, layers[i], x, comm=comm)
            # Without gradient: in the backward this unit is not come back to, nor, for an early one, what is before it.
            x = y.detach() if early == i else y
        return x

    value, grads = fs.value_and_grad(loss)(state.params, batch, comm=comm)
    kept = copied(grads) if batch.get("look") else []
    extra = evaluate(state.params, batch, comm) if batch.get("extra") else value.sum
    reduced = fs.reduce_scatter(grads, comm=comm)
    more = evaluate(state.params, batch, comm) if batch.get("later") else value.sum
    metrics, averaged = fs.average(value, reduced, comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), [metrics.loss, extra, more, kept], grads, reduced


DEPARTURES = {
    "in the forward": {"order": (0, 2, 1)},
    "other order": {"order": (2, 1, 0)},
    "shorter": {"order": (0, 1)},
    "longer": {"order": (0, 1, 2, 0)},
    "in the backward, early": {"early": 2},
    "in the backward": {"early": 1},
    "in the backward, late": {"early": 0},
    "after value_and_grad": {"extra": True},
    "after value_and_grad, looked at": {"extra": True, "look": True},
    "after reduce_scatter": {"later": True},
    "everywhere": {"early": 1, "extra": True, "later": True},
}


DEPARTED = dict(zip(list(DEPARTURES)[::2], ["zero1", "zero3"] * 3, strict=True))
"""Those that processes are tried with, and under which strategy."""


def off_the_plan(run, strategy, departure, keep):
    """Once, in the middle of training."""
    state, step, seen = make_state(run.comm, strategy), run.wrap(departing), []
    for i, batch in enumerate(my_batches(run.comm, 5)):
        state, *rest = step(state, {**batch, "order": (0, 1, 2), **(DEPARTURES[departure] if i == 2 else {})})
        seen.append([rest[0], *map(buffers if keep else copied, rest[1:])])
        del rest
    return seen, full_params(state, run.comm)


@every(
    33,
    departure=DEPARTURES,
    strategy=("zero3", "hsdp", "ddp", "zero1", "hfsdp", "mixed"),
    keep=(False, True),
    arrival=ARRIVALS,
)
def test_a_step_that_leaves_the_plan(strategy, departure, keep, arrival):
    """What it had handed out before or hands out after that stays as well."""
    program = partial(off_the_plan, strategy=strategy, departure=departure, keep=keep)
    assert run_both(program, mesh_of(strategy), change=ARRIVALS[arrival])[1][0].num_unscheduled_calls == 3


@every(2, strategy=["zero3", "hsdp", "ddp"], arrival=ARRIVALS)
def test_a_departure_with_a_unit_that_nobody_uses(strategy, arrival):
    """Its gradient, zero, is on its way to the optimizer all the same."""

    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 4)):
            state, *rest = step(state, {**batch, "order": (0, 1), "extra": i == 2})
            seen.append([rest[0], *map(copied, rest[1:])])
            del rest
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy), change=ARRIVALS[arrival])


def looking_back(state, batch, comm, *, unit):
    """A unit is used by itself first; its backward comes after value_and_grad, if it comes."""
    x = torch.ones(4, 6, requires_grad=True)
    y = fs.forward(block, state.params["layers"][unit], x, comm=comm)
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
    if batch["late"]:
        y.sum().backward()
    metrics, averaged = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
    return fs.update(make_tx(), averaged, state, comm=comm), metrics.loss, x.grad if batch["late"] else 0


def look_back(run, *, unit, late=(2,), strategy="zero3"):
    state, seen = make_state(run.comm, strategy, params=make_params(layers=6)), []
    step = run.wrap(partial(looking_back, unit=unit))
    for i, batch in enumerate(my_batches(run.comm, 4)):
        state, *rest = step(state, {**batch, "late": i in late})
        seen.append(rest)
    return seen, full_params(state, run.comm)


@pytest.mark.parametrize("unit", [0, 2, 5, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 3, 4))])
def test_a_backward_that_comes_when_gradients_are_where_its_parameters_were(unit):
    """What callers hold of them has memory of its own by then."""
    run_both(partial(look_back, unit=unit), gather_at_start=False)  # what is carried is beside all gradients


@every(3, strategy=["zero3", "zero3x2"], unit=[0, 2, 5])
def test_with_gradients_in_memory_of_their_own_a_late_backward_is_right(unit, strategy):
    program = partial(look_back, unit=unit, strategy=strategy)
    run_both(program, mesh_of(strategy), keep_gradients=True, gather_at_start=False)


@pytest.mark.parametrize("unit", [0, 5])
def test_a_late_backward_that_was_recorded_is_planned(unit):
    """Then the unit's address is nobody else's."""
    assert run_both(partial(look_back, unit=unit, late=range(4)))[1][0].num_unscheduled_calls == 1


def test_a_late_backward_where_gradients_are_reduced_once_a_step():
    run_both(partial(look_back, unit=2, late=range(4), strategy="hsdp"), HYBRID)


def scaled(leaves, x):
    return (x @ leaves["w"]).tanh() * leaves["s"].sum()


def in_pieces(params, batch, comm):
    """Backwards of their own inside of the loss: the second use of ``a`` first, and ``early`` that of ``b`` before the rest."""
    x, early = batch
    b, d, a = (fs.forward(scaled, params[name], x, comm=comm) for name in "bda")
    cut = a.detach().requires_grad_()
    fs.forward(scaled, params["a"], cut, comm=comm).square().mean().backward()
    pieces = [(a * cut.grad).sum(), d.square().mean(), b.square().mean()]
    *first, last = [pieces[2], pieces[1], pieces[0]] if early else pieces
    for piece in first:
        piece.backward()
    return last


def test_what_a_unit_has_collected_is_not_where_another_is_gathered_after_a_departure():
    """A schedule may put the gradient of ``a`` where ``b`` was, which its own order needs only when ``a`` is summed."""
    sizes = {"a": 80, "b": 120, "d": 1}

    def program(run):
        params = {name: {"w": torch.eye(4), "s": torch.linspace(0, 2 / size, size)} for name, size in sizes.items()}
        state = make_state(run.comm, "zero3", params=params, units="*")
        step, losses = run.wrap(fs.train_step(in_pieces, make_tx())), []
        for i in range(4):
            state, metrics = step(state, (torch.arange(24.0).sin().view(6, 4) * (1 + i + run.comm.rank), i == 2))
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    _, [step] = run_both(program, compare=assert_close, prefetch=0, release="forward")
    assert step.num_unscheduled_calls == 3
    memory = {(op.kind, op.unit): op.memory for op in step.schedule.ops}
    assert memory["cast", "a"].overlaps(memory["gather", "b"])


@on_ranks(DP)
def test_a_step_that_leaves_its_schedule_is_not_in_the_trace(comm):
    state, step = make_state(comm, "zero3"), fs.Scheduler(comm)(departing)
    plain, kinds = {"order": (0, 1, 2)}, []
    departures = [each for each in DEPARTURES.values() if "look" not in each]  # which is another one to the scheduler
    steps = [plain] * 3 + [each for departure in departures for each in (plain, {**plain, **departure}, plain)]
    for i, (batch, how) in enumerate(zip(my_batches(comm, len(steps)), steps, strict=True)):
        if i == 3:
            trace = step.start_trace()
        state, *_ = step(state, {**batch, **how})
        kinds.append(step.last_call_status().kind)
    assert kinds[3:] == ["planned", "left", "left"] * len(departures)
    before, *after = (len(rows) for _, rows in trace.ended_steps())
    assert len(after) == len(departures) - 1
    assert {*after} <= {before, before - 1}  # the gather that the step before begins is not measured
    step.stop_trace()
    rows, num_steps = len(trace.rows), len(trace.steps)
    for batch in my_batches(comm, 3):
        state, *_ = step(state, {**batch, **plain})
    assert step.last_call_status().kind == "planned"
    assert (len(trace.rows), len(trace.steps)) == (rows, num_steps)


def times(weight, x):
    return (x @ weight).tanh()


def slope(weight, x, comm):
    """A derivative by torch.func, whose gradient does not come through the scheduler."""
    return torch.func.grad(lambda y: fs.forward(times, weight, y, comm=comm).sum())(x)


LATE = {
    "a use has a gradient": lambda first, weight, x, comm, late: first if late else first.detach(),
    "gather()": lambda first, weight, x, comm, late: first + x @ fs.gather(weight, comm=comm).tree() if late else first,
    "torch.func": lambda first, weight, x, comm, late: first + slope(weight, x, comm),
}
"""Gradients of a unit that come after its last backward in the schedule, at whose end the unit is summed over ranks."""
FED_BACK = fs.Precision(wire=fs.formats.mxint4, feedback=True)


def late_loss(params, batch, comm, *, way):
    x, late = batch
    x = x + LATE[way](fs.forward(times, params["w"], x, comm=comm), params["w"], x, comm, late)
    return fs.forward(times, params["w"], x, comm=comm).square().mean()


@every(3, way=LATE, strategy=["ddp", "zero1", "zero3"], precision=[fs.Precision(), FED_BACK], sum_late=[True, False])
@on_ranks(DP)
def test_a_gradient_that_comes_after_the_sum_of_its_unit_counts_once(comm, way, strategy, precision, sum_late):
    """What parameters move by, and what formats have lost, is the sum of the gradients of the unsharded model."""
    params, one, loss = {"w": torch.eye(4, dtype=torch.float64)}, fs.SingleComm(), partial(late_loss, way=way)
    layout = fs.plan(params, comm.mesh, getattr(fs, strategy)("dp"), units="*", precision=precision)
    state = fs.init_state(fs.optim.sgd(1.0), fs.shard(params, layout, comm), comm=comm)
    step = fs.Scheduler(comm, policy=fs.testing.DebugPolicy(sum_late=sum_late))(fs.train_step(loss, fs.optim.sgd(1.0)))
    exact = torch.zeros(4, 4, dtype=torch.float64)
    for i, x in enumerate(torch.arange(192.0, dtype=torch.float64).sin().view(4, 2, 6, 4)):
        whole = fs.shard(fs.full_tree(state.params, comm=comm), fs.plan(params, one.mesh, fs.ddp("dp"), units="*"), one)
        for part in x:
            _, grads = fs.value_and_grad(loss)(whole, (part, i > 1), comm=one)
            exact += fs.full_tree(fs.reduce_scatter(grads, comm=one), comm=one)["w"] / 2
        state, _ = step(state, (x[comm.rank], i > 1))
    lost = [comm.all_reduce(x, "dp", label="lost")[:16].view(4, 4) / 2 for x in optree.tree_leaves(state.residuals)]
    moved = params["w"] - fs.full_tree(state.params, comm=comm)["w"]
    torch.testing.assert_close(moved + sum(lost), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["a use has a gradient", "gather()"])
def test_a_gradient_that_comes_after_the_sum_on_one_rank_alone_is_an_error_of_all(way):
    def rank_fn(comm):
        tx, params = fs.optim.sgd(1.0), {"w": torch.eye(4, dtype=torch.float64)}
        layout = fs.plan(params, comm.mesh, fs.ddp("dp"), units="*")
        state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
        step = fs.Scheduler(comm)(fs.train_step(partial(late_loss, way=way), tx))
        for i in range(3):
            state, _ = step(state, (torch.ones(6, 4, dtype=torch.float64), i == 2 and comm.rank == 1))
        return fs.full_tree(state.params, comm=comm)

    for outcome in simulate(DP, rank_fn, outcomes=True):
        assert isinstance(outcome, fs.errors.CommError | fs.errors.AgreementError), outcome


@on_ranks(DP)
def test_a_gradient_after_the_sum_is_refused_if_it_has_feedback_and_the_step_reads_summands(comm):
    tx, params = fs.optim.sgd(1.0), {"w": torch.eye(4)}

    def own(state, batch, comm):
        loss, grads, lost = fs.value_and_grad(partial(late_loss, way="gather()"))(
            state.params, batch, comm=comm, residuals=state.residuals
        )
        grads, lost = fs.reduce_scatter(grads, comm=comm, residuals=lost)
        return fs.update(tx, fs.average(loss, grads, comm=comm)[1], state._replace(residuals=lost), comm=comm)

    layout = fs.plan(params, comm.mesh, fs.ddp("dp"), units="*", precision=FED_BACK)
    state, step = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm), fs.Scheduler(comm)(own)
    for _ in range(2):
        state = step(state, (torch.ones(6, 4), False))
    with pytest.raises(fs.errors.ScheduleError, match="gets a gradient after the schedule has sent its gradient"):
        step(state, (torch.ones(6, 4), True))
