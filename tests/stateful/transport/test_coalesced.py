"""Buckets as they run: one collective for several units, with the bits, the bytes and the order of each alone."""

import re
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import fsharp as fs
from fsharp.errors import FsharpError, ScheduleError
from fsharp.functional.layout.sharded import trainable
from fsharp.inspect.tables import compare
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.schedule import group_ops_by_bucket
from fsharp.stateful.transport import gloo
from fsharp.stateful.transport.base import Summand
from fsharp.stateful.transport.blocking import BlockingTransport
from fsharp.testing import DebugPolicy, checking_races, processes, simulate
from tests.gpt_like import block, in_order, loss_fn, make_params, through
from tests.modules import Net, descend
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    FLAT,
    ON_TWO_AXES,
    PRECISIONS,
    STRATEGIES,
    assert_same,
    assert_same_training,
    every,
    full_params,
    make_state,
    mesh_of,
    my_batches,
    run_both,
    train,
    training,
    turned,
)
from tests.stateful.runtime.test_scheduler_equivalence import assert_as_planned, measure, of_the_loss

LAYERS, LATE_S = 4, 0.05
JOINED = {"bucket_nbytes": 700}
"""Some two or three blocks."""


def together(schedule, kind, phase):
    """How many units share a collective at most."""
    return max(
        (len(ops) for ops in group_ops_by_bucket(schedule.ops) if (ops[0].kind, ops[0].phase) == (kind, phase)), default=0
    )


def assert_joined(schedule):
    """Every way in which units of this schedule move, they move together."""
    facts = schedule.program.facts["layers.0"]
    moves = {("gather", "forward"): facts.gather, ("reduce", "backward"): facts.reduce, ("reduce", "finish"): facts.finish}
    moves["gather", "update"] = facts.update_gather
    assert any(moves.values())
    for (kind, phase), calls in moves.items():
        assert not calls or together(schedule, kind, phase) > 1, (kind, phase)


SIZES = ([5, 1, 8], [7], [4, 4], [1, 1, 1, 1])


def summands(rank, size, seed, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + seed)).to(dtype)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@on_ranks(lambda n: fs.Mesh({"dp": n}))
def test_what_is_joined_has_the_bits_and_the_bytes_of_each_alone(comm, n, sizes, wire):
    def run(groups):
        counting = fs.collectives.CountingComm(comm)
        transport, found = BlockingTransport(counting), []
        for group in groups:
            xs = [summands(comm.rank, size, i, wire) for i, size in group]
            outs = [x.new_empty(n * len(x)) for x in xs]
            transport.gather(xs, outs, "dp", "").wait()
            found.append(outs)
            whole = [summands(comm.rank, n * size, i, wire) for i, size in group]
            targets = [torch.empty(size) if i % 2 else None for i, size in group]
            nothing = [torch.empty(0, dtype=torch.uint8)] * len(xs)
            works = transport.reduce_scatter(list(map(Summand, whole, targets, nothing)), "dp", n, torch.float32)
            parts = [each.wait() for each in works]
            assert all(out is None or out is part for out, part in zip(targets, parts, strict=True))
            sums = [torch.empty(len(x)) for x in xs]
            for work in transport.all_reduce(list(map(Summand, xs, sums, nothing)), "dp", n):
                work.wait()
            found += [parts, sums]
        return found, counting

    every = list(enumerate(sizes))
    alone, each = run([[one] for one in every])
    joined, once = run([every])
    assert [torch.cat(alone[k::3][i]).tolist() for k in range(3) for i in range(len(sizes))] == [
        joined[k][i].tolist() for k in range(3) for i in range(len(sizes))
    ]
    assert once.nbytes == each.nbytes
    assert once.num_calls * len(sizes) == each.num_calls


@every(18, strategy=turned(STRATEGIES, "mixed"), microbatches=(1, 2), precision=PRECISIONS)
@on_ranks(mesh_of)
def test_same_bits_as_the_blocking_path_and_the_calls_that_were_planned(comm, strategy, microbatches, precision):
    options = {"microbatches": microbatches, "precision": PRECISIONS[precision], "params": make_params(layers=LAYERS)}
    options["steps"] = 3
    found = train(comm, strategy, JOINED, **options)
    assert_joined(found.schedule)
    assert_same_training(found, train(comm, strategy, **options))
    assert found.num_unscheduled_calls == 1
    assert_as_planned(measure(comm, strategy, microbatches, precision, **JOINED), comm.mesh)


def test_units_of_other_dtypes_stay_alone():
    """And units with several dtypes; the others are joined around them."""
    params = make_params(layers=LAYERS)
    params["layers"][1]["b"] = params["layers"][1]["b"].double()
    params["layers"][3] = {name: leaf.double() for name, leaf in params["layers"][3].items()}

    @through
    def loss(x, layers, batch, comm):
        for layer in layers:
            x = fs.forward(lambda p, x: block({k: v.float() for k, v in p.items()}, x), layer, x, comm=comm)
        return x

    def rank_fn(comm):
        options = {"loss": loss, "params": params, "microbatches": 2}
        return train(comm, "zero3", {"bucket_nbytes": 10**9}, **options), train(comm, "zero3", **options)

    for found, expected in simulate(DP, rank_fn):
        assert_same_training(found, expected)
        facts = {unit.name: unit.sent_dtypes for unit in found.schedule.program.units}
        assert facts["layers.1"] is None
        assert facts["layers.3"] != facts["layers.0"] == facts["embed"]
        joined = {tuple(op.unit for op in ops) for ops in group_ops_by_bucket(found.schedule.ops) if len(ops) > 1}
        assert joined == {("embed", "layers.0"), ("layers.0", "embed")}, joined


ORDERS = {
    "leaves at its first unit": [(0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3)],
    "leaves in the middle of a bucket": [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)],
    "leaves at the end": [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 3), (0, 1, 2, 3)],
    "goes on after a part": [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1), (0, 1)],
}


@every(8, donate=(False, True), order=ORDERS, strategy=("zero1", "zero2", "zero3", "hfsdp"))
def test_a_step_that_leaves_its_schedule(order, strategy, donate):
    changes, params = lambda i: {"order": ORDERS[order][i]}, make_params(layers=LAYERS)
    program = training(in_order, strategy, 4, changes, tx=fs.optim.adamw(1e-2), donate=donate, params=params)
    (_, _), [step] = run_both(program, mesh_of(strategy), **JOINED)
    assert step.num_unscheduled_calls > 1
    assert_joined(step.schedule)


@through
def cut(x, layers, batch, comm):
    """A backward ends where the block is cut off from those before."""
    for i, layer in enumerate(layers):
        x = fs.forward(block, layer, x.detach() if batch["cut"] == (i,) else x, comm=comm)
    return x


@every(6, strategy=("zero1", "zero2", "zero3"), policy=({}, {"sum_late": False}))
def test_a_backward_that_leaves_while_buckets_are_reduced(strategy, policy):
    """What is under way is finished, what of a bucket was collected is reduced by itself, and the rest is zero."""

    def program(p, *, at):
        tx = fs.optim.adamw(1e-2)
        state = make_state(p.comm, strategy, tx=tx, params=make_params(layers=2 * LAYERS))
        step, losses = p.wrap(fs.train_step(cut, tx, microbatches=2)), []
        for where, batch in zip([(), (), at, ()], my_batches(p.comm, 4), strict=True):
            state, metrics = step(state, {**batch, "cut": where})
            losses.append(metrics.loss.clone())
            if p.scheduled and where == at:
                assert step.last_call_status().kind == "left"
        return losses, full_params(state, p.comm)

    for at in (1, 5):
        _, [step] = run_both(partial(program, at=(at,)), DP, **JOINED, **policy)
        assert_joined(step.schedule)


def test_two_functions_in_turns():
    def program(p):
        tx = fs.optim.adamw(1e-2)
        states = [make_state(p.comm, "zero3", tx=tx, params=make_params(seed, layers=LAYERS)) for seed in (0, 1)]
        steps = [p.wrap(fs.train_step(fn, tx, donate=True)) for fn in (loss_fn, loss_fn)]
        losses = []
        for batch in my_batches(p.comm, 5):
            for i, step in enumerate(steps):
                states[i], metrics = step(states[i], batch)
                losses.append(metrics.loss.clone())
        return losses, [full_params(state, p.comm) for state in states]

    _, steps = run_both(program, DP, **JOINED)
    for step in steps:
        assert step.num_unscheduled_calls == 1
        assert_joined(step.schedule)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", pytest.param("hfsdp", marks=pytest.mark.deep)])
def test_modules(strategy):
    mesh, chosen = STRATEGIES[strategy]

    def rank_fn(comm, policy):
        torch.manual_seed(0)
        with torch.random.fork_rng():
            model = Net(LAYERS)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p) * (1 + i / 10))
        model = fs.shard_module(model, mesh=comm, strategy=chosen, units="layers.*", policy=policy)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        losses = []
        for batch in my_batches(comm, 4):
            loss = model(batch["x"], batch["y"])["loss"]
            descend(loss, optimizer)
            losses.append(loss.detach().clone())
        return losses, {name: p.detach().clone() for name, p in model.named_full_parameters()}

    alone = simulate(mesh, partial(rank_fn, policy=DebugPolicy(bucket_nbytes=0, poison=True)))
    joined = simulate(mesh, partial(rank_fn, policy=DebugPolicy(poison=True, **JOINED)))
    assert_same(joined, alone)


def doubled(state, name):
    """The state with twice the parameters of one unit."""
    node = state.params[name]
    return state._replace(params={**state.params, name: node.replace([2 * b for b in node.buffers])})


@pytest.mark.parametrize("hidden", [False, True])
def test_one_unit_of_a_bucket_has_other_values_than_were_gathered_for_it(hidden):
    """It is gathered by itself then: before the step, or, of a tree that is not among the arguments, when it is waited for."""

    def program(p):
        tx = fs.optim.adamw(1e-2)
        state = make_state(p.comm, "zero3", tx=tx, params=make_params(layers=LAYERS))
        plain, held, losses = fs.train_step(loss_fn, tx), [state], []
        step = p.wrap((lambda batch, comm: plain(held[0], batch, comm)) if hidden else plain)
        for i, batch in enumerate(my_batches(p.comm, 5)):
            held[0] = doubled(held[0], "embed") if i == 3 else held[0]
            held[0], metrics = step(batch) if hidden else step(held[0], batch)
            losses.append(metrics.loss.clone())
        return losses, full_params(held[0], p.comm)

    _, [step] = run_both(program, DP, **JOINED)
    assert step.num_unscheduled_calls == 1
    carried = [
        ops for ops in group_ops_by_bucket(step.schedule.ops) if ops[0].event_index == len(step.schedule.program.events) - 1
    ]
    assert ("embed", "layers.0") in {tuple(op.unit for op in ops)[:2] for ops in carried if ops[0].phase == "forward"}


def first_error(comm, num_steps, differ):
    """Which step fails, and with what, if ``differ(i, step, state)`` gives the state to go on with."""
    tx = fs.optim.adamw(1e-2)
    state = make_state(comm, "zero3", tx=tx, params=make_params(layers=LAYERS))
    step = fs.Scheduler(comm, **JOINED)(fs.train_step(loss_fn, tx))
    for i, batch in enumerate(my_batches(comm, num_steps)):
        state = differ(i, step, state)
        try:
            state, _ = step(state, batch)
        except FsharpError as error:
            return i, str(error)
    return None


def test_a_rank_that_alone_has_other_values_is_an_error_on_all():
    def rank_fn(comm):
        return first_error(comm, 5, lambda i, _, state: doubled(state, "embed") if i == 3 and comm.rank == 1 else state)

    for found in processes(DP, rank_fn):
        assert found is not None
        assert found[0] == 3
        assert "gather embed" in found[1]


def test_ranks_name_all_units_of_a_bucket():
    """One rank has another bucket than the others: nothing of it is received."""

    def rank_fn(comm):
        def differ(i, step, state):
            if i == 2 and comm.rank:
                step.follow(compile_schedule(step.schedule.program, replace(step.schedule.policy, bucket_nbytes=0)))
            return state

        return first_error(comm, 4, differ)

    for found in processes(DP, rank_fn):
        assert found is not None
        assert re.search(r"(gather|reduce) \S+\.\.\S+, [2-6] units", found[1]), found[1]


@on_ranks(DP)
def test_a_schedule_of_units_with_other_dtypes_is_not_followed(comm):
    """As many bytes, but not the same: to join them would mix dtypes."""
    options = {"precision": fs.Precision(wire=torch.float32), "params": make_params(layers=LAYERS)}
    schedule = train(comm, "zero3", JOINED, **options).schedule
    units = [replace(facts, sent_dtypes="another") for facts in schedule.program.units]
    state = make_state(comm, "zero3", tx=fs.optim.adamw(1e-2), params=make_params(layers=LAYERS))
    step = fs.Scheduler(comm, **JOINED)(fs.train_step(loss_fn, fs.optim.adamw(1e-2)))
    batch = my_batches(comm, 1)[0]
    state, _ = step(state, batch)
    step.follow(replace(schedule, program=replace(schedule.program, units=tuple(units))))
    with pytest.raises(
        ScheduleError, match=r"sent_dtypes of unit '[a-z0-9.]+' is another, and here float32 float32 float32 float32"
    ):
        step(state, batch)


def in_processes(comm, strategies, worth):
    gloo._MIN_MESSAGE_NBYTES = worth
    found = {}
    for strategy in strategies:
        options = {"microbatches": 2, "params": make_params(layers=LAYERS), "steps": 3}
        trained = train(comm, strategy, JOINED, **options)
        assert_joined(trained.schedule)
        alone = train(comm, strategy, {"bucket_nbytes": 0}, **options)
        found[strategy] = trained._replace(schedule=None), alone._replace(schedule=None)
    return found, [measure(comm, strategy, 2, "float32 wire", **JOINED) for strategy in strategies]


PACKED = gloo._MIN_MESSAGE_NBYTES
DEEP = [(list(chosen), worth) for chosen in (FLAT, ON_TWO_AXES) for worth in (0, PACKED)]


@pytest.mark.parametrize(
    ("strategies", "worth"),
    [(["ddp", "zero2"], 0), (["zero1", "zero3"], PACKED), *(pytest.param(*case, marks=pytest.mark.deep) for case in DEEP)],
)
def test_processes(strategies, worth):
    mesh = mesh_of(strategies[0])

    def blocking(comm):
        options = {"microbatches": 2, "params": make_params(layers=LAYERS), "steps": 3}
        return {strategy: train(comm, strategy, **options) for strategy in strategies}

    expected = simulate(mesh, blocking)
    for want, (found, measured) in zip(
        expected, processes(mesh, partial(in_processes, strategies=strategies, worth=worth)), strict=True
    ):
        for strategy, (joined, alone) in found.items():
            assert_same_training(joined, want[strategy])
            assert_same_training(alone, want[strategy])
        for each in measured:
            assert_as_planned(each, mesh)


def traced(comm):
    tx, counting = fs.optim.adamw(1e-2), fs.collectives.CountingComm(comm)
    state = make_state(comm, "zero3", tx=tx, params=make_params(layers=2 * LAYERS))
    step = fs.Scheduler(counting, bucket_nbytes=900)(fs.train_step(loss_fn, tx, donate=True))
    [state, _], trace = step(state, my_batches(comm, 1)[0]), step.start_trace()
    for batch in my_batches(comm, 4):
        counting.calls.clear()
        state, _ = step(state, batch)
    return trace, step.schedule, Counter(counting.calls)


def test_a_trace_shows_a_bucket_as_one_collective():
    for trace, schedule, calls in processes(DP, traced):
        assert calls == schedule.collective_counts() + of_the_loss(DP)
        timeline = trace.timeline(schedule)
        for ops in group_ops_by_bucket(schedule.ops):
            if len(ops) > 1:
                positions = {schedule.ops.index(op) for op in ops}
                spans = {(s.start_s, s.stop_s) for s in timeline.spans if s.op in positions and s.kind == ops[0].kind}
                assert len(spans) == 1, ops
        one = [s for s in timeline.spans if s.kind == "reduce"]
        assert timeline.seconds("reduce") < sum(s.seconds for s in one)
        hardware = fs.inspect.Hardware.fit(trace, schedule, computes_on_host=True, contention=1.0)
        assert "gather" in compare(fs.inspect.predict(schedule, hardware), timeline)


def traced_late(comm):
    """A step under ddp whose sums are handed out late, and in which rank 1 computes for longer."""
    fly = gloo.GlooTransport._run_in_two_workers

    def late(transport, kind, post, finish, flight):
        return fly(transport, kind, post, lambda posted: (time.sleep(LATE_S * (kind == "share")), finish(posted))[1], flight)

    def loss(params, batch, comm):
        time.sleep(3 * LATE_S * comm.rank)
        return loss_fn(params, batch, comm)

    tx = fs.optim.adamw(1e-2)
    state = make_state(comm, "ddp", tx=tx, params=make_params(layers=LAYERS))
    step = fs.Scheduler(comm, bucket_nbytes=0)(fs.train_step(loss, tx, donate=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo.GlooTransport, "_run_in_two_workers", late)
        [state, _], trace = step(state, my_batches(comm, 1)[0]), step.start_trace()
        state, _ = step(state, my_batches(comm, 1)[0])
    return trace.timeline(step.schedule)


def test_a_trace_has_both_halves_of_an_all_reduce_and_what_an_update_waits_for():
    """The second half begins in a thread of its own; and the host waits for gradients and losses inside of the update."""
    first, _ = processes(DP, traced_late)
    assert all(span.seconds >= LATE_S for span in first.spans if span.kind == "reduce")
    (update,) = [span for span in first.spans if span.kind == "update"]
    waited = [span for span in first.spans if span.kind == "wait" and span.op == update.op]
    assert sum(span.seconds for span in waited) >= 2 * LATE_S
    assert max(span.stop_s for span in waited) <= update.start_s  # no wait counts as time of the update


@every(6, microbatches=(1, 2), strategy=("hfsdp", "zero3", "zero1"), precision=PRECISIONS)
@on_ranks(mesh_of)
def test_steps_are_free_of_races(comm, strategy, precision, microbatches):
    """Also one that leaves its schedule while buckets are under way."""
    tx = fs.optim.adamw(1e-2)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, poison=True, **JOINED))
    state = make_state(comm, strategy, tx=tx, params=make_params(layers=LAYERS), precision=PRECISIONS[precision])
    step = scheduler(fs.train_step(in_order, tx, microbatches=microbatches, donate=True))
    whole = (0, 1, 2, 3)
    with checking_races(scheduler) as report:
        for order, batch in zip([whole, whole, whole, (0, 1, 3)], my_batches(comm, 4), strict=True):
            state, _ = step(state, {**batch, "order": order})
    assert step.num_unscheduled_calls == 2
    assert report.races == []
    assert_joined(step.schedule)


@on_ranks(DP)
def test_steps_under_inference_mode_unpack_buckets(comm):
    """Whose new buffers have no version counters."""
    tx = fs.optim.adamw(1e-2)

    def fn(state, grads, *, comm):
        return fs.update(tx, grads, state, comm=comm)

    found = []
    for call in (partial(fn, comm=comm), fs.Scheduler(comm, **JOINED)(fn)):
        state = make_state(comm, "zero1", tx=tx, params=make_params(layers=LAYERS))
        with torch.inference_mode():
            for _ in range(3):
                grads = fs.gather(trainable(state.params), comm=comm, to="optim")
                state = call(state, grads)
        found.append(full_params(state, comm))
    assert_same(*found)
