"""Whose parameters are whose: old states beside new ones, copies of states, readers in other threads, late arrivals."""

import copy
import pickle
import threading
import time
from functools import cache, partial

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import CommError, ScheduleError, TreeError
from fsharp.stateful.runtime.engine import ScheduledEngine
from fsharp.stateful.transport.base import Work
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.units.future_buffers import is_pending
from fsharp.testing import processes, simulate
from tests.gpt_like import block, loss_fn, make_params, through
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    assert_same,
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
    training,
)

each_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hfsdp"])


@every(2, strategy=["ddp", "zero1", "zero3", "hfsdp"], way=["wrapped", "plain"])
def test_old_parameters_are_used_after_an_update(strategy, way):
    def program(run):
        step = fs.train_step(loss_fn, make_tx())

        def fn(state, batch, comm):
            new, _ = step(state, batch, comm)
            return new, evaluate(state.params, batch, comm), evaluate(new.params, batch, comm)

        state, out = make_state(run.comm, strategy), []
        call = run.wrap(fn) if way == "wrapped" else lambda state, batch: fn(state, batch, run.engine)
        for batch in my_batches(run.comm, 3):
            state, *scores = call(state, batch)
            out.append(scores)
        return out

    run_both(program, mesh_of(strategy))


@on_ranks(DP)
def test_a_scheduler_that_is_a_plain_comm_keeps_nothing_of_trees_that_are_gone(comm):
    scheduler, state = fs.Scheduler(comm), make_state(comm, "zero3")
    for batch in my_batches(comm, 4):
        state, _ = fs.train_step(loss_fn, make_tx())(state, batch, scheduler)
        evaluate(state.params, batch, scheduler)
    assert len(scheduler.engine.steps.registry.units) == len(fs.layouts.units_of(state.params))


@pytest.mark.parametrize("when", ["recorded", "planned"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_parameters_changed_between_a_forward_and_its_backward_are_refused(comm, strategy, when):
    state, (batch, *_) = make_state(comm, strategy), my_batches(comm, 1)

    def fn(params, change, comm):
        def loss(params, batch, comm):
            result = loss_fn(params, batch, comm)
            if change:
                with torch.no_grad():
                    params["layers"][0].buffers[0].mul_(1.5)
            return result

        return fs.value_and_grad(loss)(params, batch, comm=comm)

    call = fs.Scheduler(comm)(fn)
    for _ in range(2 if when == "planned" else 0):
        call(state.params, False)
    with pytest.raises(ScheduleError, match=r"unit 'layers\.0' were changed or replaced between a forward"):
        call(state.params, True)


@on_ranks(DP)
def test_a_backward_after_the_end_does_not_touch_what_was_handed_out(comm):
    state, (batch, *_) = make_state(comm, "ddp"), my_batches(comm, 1)

    def fn(params, comm):
        kept = []

        def loss(params, batch, comm):
            result = loss_fn(params, batch, comm)
            kept.append(loss_fn(params, batch, comm)[0])
            return result

        return fs.value_and_grad(loss)(params, batch, comm=comm)[1], kept[0]

    grads, late = fs.Scheduler(comm)(fn)(state.params)
    before = copied(grads)
    with pytest.raises(ScheduleError, match="after the step that used it was over"):
        late.backward()
    assert_same(before, buffers(grads))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda state: pickle.loads(pickle.dumps(state))}


@cache
def copied_right_after_steps():
    """Which buffers of copies are those of the state, by the way in which it was copied; in one start of the processes."""

    def compared(comm, way):
        state = make_state(comm, "zero1")
        call = fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
        equal = []
        for batch in my_batches(comm, 3):
            state, _ = call(state, batch)
            equal += [torch.equal(a, b) for a, b in zip(buffers(way(state.params)), buffers(state.params), strict=True)]
        return equal

    return processes(DP, lambda comm: {name: compared(comm, way) for name, way in COPIES.items()})


@pytest.mark.parametrize("way", COPIES)
def test_a_state_is_copied_right_after_a_step(way):
    for found in copied_right_after_steps():
        assert all(found[way])
        assert len(found[way]) >= 15


def late_flights(monkeypatch, is_late, wait):
    """Have this rank's sends of some flights come late, as a busy machine might: after a wait."""
    fly = GlooTransport._run_in_two_workers

    def slow(self, kind, post, finish, crew):
        waits = is_late(kind)

        def late():
            if waits:
                wait()
            return post()

        return fly(self, kind, late, finish, crew)

    monkeypatch.setattr(GlooTransport, "_run_in_two_workers", slow)


def test_two_threads_wait_for_parameters_that_are_on_their_way():
    def rank_fn(comm):
        with pytest.MonkeyPatch.context() as monkeypatch:
            armed, both_wait = [], threading.Event()
            late_flights(monkeypatch, lambda kind: bool(armed), both_wait.wait)
            state = make_state(comm, "zero1")
            call = fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
            for batch in my_batches(comm, 3):
                state, _ = call(state, batch)
            nodes = fs.layouts.units_of(state.params)
            [node.buffers for node in nodes]
            update_gather = ScheduledEngine.gather_updated_params
            monkeypatch.setattr(
                ScheduledEngine, "gather_updated_params", lambda *a, **k: (armed.append(1), update_gather(*a, **k))[1]
            )
            state, _ = call(state, my_batches(comm, 1, seed=7)[0])
            node = fs.layouts.units_of(state.params)[0]
            was_arriving = is_pending(node)
            other = threading.Thread(target=lambda: node.buffers)
            other.start()
            threading.Timer(0.1, both_wait.set).start()
            mine = [buffer.clone() for buffer in node.buffers]
            other.join()
            return was_arriving, [torch.equal(a, b) for a, b in zip(mine, node.buffers)]

    for was_arriving, equal in processes(DP, rank_fn):
        assert was_arriving
        assert equal
        assert all(equal)


WAYS = [{}, {"separate_groups": False}]


@pytest.mark.parametrize("policy", WAYS)
def test_two_schedulers_on_one_comm_do_not_take_each_others_messages(policy):
    """Both train, and what one of them gathers for its next step comes late, while the other makes the same collectives."""

    def rank_fn(comm):
        with pytest.MonkeyPatch.context() as monkeypatch:
            late = []
            late_flights(
                monkeypatch, lambda kind: bool(late) and kind == "gather" and comm.rank == 0, partial(time.sleep, 0.05)
            )
            out = []
            for is_scheduled in (False, True):
                step, losses = fs.train_step(loss_fn, fs.optim.sgd(0.1)), []
                states = [make_state(comm, "zero3", tx=fs.optim.sgd(0.1), params=make_params(seed)) for seed in (0, 1)]
                calls = [partial(step, comm=comm)] * 2
                if is_scheduled:
                    calls = [fs.Scheduler(comm, **policy)(step) for _ in states]
                for i, batch in enumerate(my_batches(comm, 6)):
                    for k in range(2):
                        late[:] = [1] if is_scheduled and i > 2 and k == 0 else []
                        states[k], metrics = calls[k](states[k], batch)
                        losses.append(float(metrics.loss))
                out.append(losses)
            return out

    for blocking, scheduled in processes(DP, rank_fn):
        assert blocking == scheduled


@every(2, strategy=["ddp", "zero1", "zero3", "hfsdp"], way=["one function", "two functions"])
def test_trees_with_the_same_names_and_other_shapes(strategy, way):
    """Large and small in turn, each in its own memory, whoever comes first."""

    def program(run):
        tx = make_tx()
        states = {dim: make_state(run.comm, strategy, tx=tx, params=make_params(layers=3, dim=dim)) for dim in (16, 24)}
        step = run.wrap(fs.train_step(loss_fn, tx))
        steps = dict.fromkeys(states, step) if way == "one function" else {16: step, 24: run.wrap(fs.train_step(loss_fn, tx))}
        out = []
        for dim, batch in zip((16, 24, 24, 16, 16, 24), my_batches(run.comm, 6), strict=True):
            states[dim], metrics = steps[dim](states[dim], batch)
            out.append(metrics.loss)
        return out, [full_params(state, run.comm) for state in states.values()]

    run_both(program, mesh_of(strategy))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_another_call_between_a_forward_and_its_backward(strategy):
    """The scheduler as a plain comm; in between it runs a function that it wraps, on the same tree and on a larger one.

    Its first call sweeps up units that no function uses. The backward has its own units, and looks none up.
    """

    def program(run):
        state, other = (make_state(run.comm, strategy, params=make_params(layers=3, dim=dim)) for dim in (6, 16))
        other_function, out = run.wrap(evaluate), []
        for batch in my_batches(run.comm, 3):

            def loss(params, batch, comm):
                result = loss_fn(params, batch, comm)
                out.append([other_function(tree, batch) for tree in (other.params, state.params)])
                return result

            _, grads = fs.value_and_grad(loss)(state.params, batch, comm=run.engine)
            out.append(copied(grads))
        return out

    run_both(program, mesh_of(strategy))


@pytest.mark.parametrize("at", [0, 2])
def test_a_first_call_of_a_function_in_a_loss_outside_of_functions(at):
    """``at``: before which layer. The units of the loss are in no schedule."""

    def program(run):
        state, teacher = (make_state(run.comm, "zero3", params=make_params(layers=3, dim=dim)) for dim in (6, 16))
        teach, out = run.wrap(evaluate), []
        for batch in my_batches(run.comm, 3):

            @through
            def loss(x, layers, batch, comm):
                for i, layer in enumerate(layers):
                    if i == at:
                        out.append(teach(teacher.params, batch))
                    x = fs.forward(block, layer, x, comm=comm)
                return x

            _, grads = fs.value_and_grad(loss)(state.params, batch, comm=run.engine)
            out.append(copied(grads))
        return out

    run_both(program)


@each_strategy
def test_gradients_are_reduced_again_after_they_were_divided_in_place(strategy):
    """Where gradients rest sharded, what was divided in place is they themselves; elsewhere it was a sum of them."""

    def program(run):
        state = make_state(run.comm, strategy)

        def fn(state, batch, comm):
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            once = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
            return once[1], fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)[1]

        call = run.wrap(fn)
        return [[copied(grads) for grads in call(state, batch)] for batch in my_batches(run.comm, 4)]

    run_both(program, mesh_of(strategy))


@on_ranks(DP)
def test_a_function_that_is_not_called_any_more_keeps_no_arena(comm):
    scheduler, params = fs.Scheduler(comm), {dim: make_params(layers=3, dim=dim) for dim in (16, 64)}
    states = {dim: make_state(comm, "zero3", params=params[dim]) for dim in params}
    steps = {dim: scheduler(fs.train_step(loss_fn, make_tx())) for dim in params}
    arenas = []
    for dim in (16, 64):
        for batch in my_batches(comm, 3):
            states[dim], _ = steps[dim](states[dim], batch)
        arenas.append(StorageWeakRef(scheduler.engine.steps.arena.memory.untyped_storage()))
    assert [arena.expired() for arena in arenas] == [True, False]
    assert steps[16].schedule is not None


def storages(tree):
    return [StorageWeakRef(x.untyped_storage()) for x in buffers(tree)]


@on_ranks(DP)
def test_parameters_that_an_update_replaces_are_freed(comm):
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    state, step = (
        make_state(comm, "ddp", precision=precision),
        fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx(), donate=True)),
    )
    for batch in my_batches(comm, 3):
        old = storages(state.params)
        state, _ = step(state, batch)
        assert all(each.expired() for each in old)
    assert step.num_unscheduled_calls == 1


@on_ranks(DP)
def test_parameters_of_a_tree_that_is_gone_are_freed_by_the_next_call(comm):
    score, (batch, *_) = fs.Scheduler(comm)(evaluate), my_batches(comm, 1)
    states = [make_state(comm, "ddp", params=make_params(layers=3, dim=dim)) for dim in (6, 16)]
    gone = storages(states[0].params)
    for state in states:
        score(state.params, batch)
    del state, states[0]
    score(states[0].params, batch)
    assert all(each.expired() for each in gone)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_sparse_gradients_are_refused(comm, strategy):
    params = {"table": torch.ones(10, 4), "out": torch.ones(4)}
    state = make_state(comm, strategy, params=params, units="*")

    def look_up(table, ids):
        return F.embedding(ids, table, sparse=True)

    def loss(params, ids, comm):
        return fs.forward(torch.mul, params["out"], fs.forward(look_up, params["table"], ids, comm=comm), comm=comm).sum()

    with pytest.raises(TreeError, match=r"unit 'table': the gradient of leaf .* is torch\.sparse_coo.*sparse=False"):
        fs.Scheduler(comm)(fs.train_step(loss, make_tx()))(state, torch.tensor([1, 2, 2]))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_buffers_that_are_not_contiguous(strategy):
    """Leaves of replicated parameters are where these are; sharded ones are gathered from anywhere."""

    def rank_fn(comm):
        state, (batch, *_) = make_state(comm, strategy), my_batches(comm, 1)
        strided = optree.tree_map(lambda x: torch.stack([x, x + 1], 1)[:, 0] if x.dim() == 1 else x, state.params)
        call = fs.Scheduler(comm)(lambda params, comm: loss_fn(params, batch, comm)[0])
        expected = loss_fn(state.params, batch, comm)[0]
        if strategy == "zero3":
            return torch.equal(call(strided), expected)
        with pytest.raises(TreeError, match=r"unit 'embed': a buffer has stride 2, expected a contiguous buffer"):
            call(strided)
        return True

    assert simulate(DP, rank_fn) == [True, True]


@every(3, strategy=["zero1", "zero3", "hfsdp"], first=[0, 3, 5])
def test_units_that_are_used_outside_of_a_function_take_no_memory_of_its_schedule(strategy, first):
    """Where there is what the next step has gathered ahead."""

    def program(run):
        state = make_state(run.comm, strategy, params=make_params(layers=6))
        step, out, x = run.wrap(fs.train_step(loss_fn, make_tx(), donate=True)), [], torch.ones(3, 6)
        for batch in my_batches(run.comm, 3):
            state, metrics = step(state, batch)
            out.append(metrics.loss.clone())
            out += [fs.forward(block, layer, x, comm=run.engine).clone() for layer in state.params["layers"][first:]]
        return out, full_params(state, run.comm)

    run_both(program, mesh_of(strategy), poison=True)


@on_ranks(DP)
def test_what_a_schedule_has_put_elsewhere_is_refused_by_a_backward_that_comes_by_a_side_door(comm):
    """After the step, when its memory has what the next one begins with."""
    x, kept = torch.ones(2, 4, requires_grad=True), []
    params = {"first": torch.full((4, 4), 2.0), "second": torch.ones(4, 4)}
    tx = fs.optim.sgd(0.5)

    def loss(params, batch, comm):
        def keep(p, x):
            kept[:] = [torch.sin(x @ p)] if batch else []
            return torch.tanh(x @ p)

        y = fs.forward(keep, params["first"], x, comm=comm)
        return fs.forward(lambda p, y: y @ p, params["second"], y, comm=comm).sum()

    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="*")
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    step = fs.Scheduler(comm, gather_at_start=True)(fs.train_step(loss, tx, donate=True))
    for keeps in (False, False, False, True):
        state, _ = step(state, keeps)
    assert step.last_call_status().kind == "planned"
    with pytest.raises((RuntimeError, ScheduleError), match=r"modified by an inplace operation|after the step"):
        torch.autograd.grad(kept[0].sum(), x)


def test_what_was_under_way_is_refused_when_the_scheduler_has_closed():
    def rank_fn(comm):
        kept = []

        def fn(state, batch, *, comm):
            _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            kept[:] = [grads, fs.reduce_scatter(grads, comm=comm)]
            if batch["fails"]:
                raise ZeroDivisionError
            return state

        state, call = make_state(comm, "zero2"), fs.Scheduler(comm)(fn)
        for i, batch in enumerate(my_batches(comm, 3)):
            try:
                call(state, batch | {"fails": i == 2})
            except ZeroDivisionError:
                assert i == 2
        refused = 0
        for node in fs.layouts.units_of(kept):
            if node.lazy is not None and is_pending(node):
                for _ in range(2):
                    with pytest.raises(ScheduleError, match="this scheduler was closed"):
                        _ = node.buffers
                refused += 1
        return refused

    assert min(processes(DP, rank_fn)) > 0


def test_a_collective_that_has_failed_fails_again():
    calls = []

    def fail():
        calls.append(1)
        raise CommError("lost")

    work = Work(finish=fail)
    for _ in range(2):
        with pytest.raises(CommError, match="lost"):
            work.wait()
    assert len(calls) == 2
    done = Work(finish=lambda: calls.append(1) or 7)
    assert [done.wait(), done.wait(), len(calls)] == [7, 7, 3]


@every(2, strategy=["ddp", "zero2", "zero3"], engine=["blocking", "eager", "planned"])
@on_ranks(DP)
def test_a_function_that_writes_to_its_parameters_is_refused(comm, strategy, engine):
    """As it would change them for good where they rest in full, and nowhere else."""

    @through
    def loss(x, layers, batch, comm):
        def fn(p, x):
            out = block(p, x)
            if batch["writes"]:
                with torch.no_grad():
                    p["b"].mul_(0.5)
            return out

        for layer in layers:
            x = fs.forward(fn, layer, x, comm=comm)
        return x

    state, tx = make_state(comm, strategy), make_tx()
    step = fs.train_step(loss, tx)
    call = partial(step, comm=comm) if engine == "blocking" else fs.Scheduler(comm)(step)
    for batch in my_batches(comm, 2) if engine == "planned" else ():
        state, _ = call(state, batch | {"writes": False})
    with pytest.raises(TreeError, match=r"has written to a parameter of unit 'layers.0' in place"):
        call(state, my_batches(comm, 1)[0] | {"writes": True})


@every(2, strategy=["zero2", "zero3"], late=[range(5), (3, 5)])
def test_a_checkpoint_that_computes_again_with_another_unit(strategy, late):
    """Python's closures are bound late: what the blocking path makes of it, planned steps before it or not."""

    @through
    def loss(x, layers, batch, comm):
        for layer in layers:

            def use(x, at=layer):
                return fs.forward(block, layer if batch["late"] else at, x, comm=comm)

            x = checkpoint(use, x, use_reentrant=False)
        return x

    run_both(training(loss, strategy, 6, lambda i: {"late": i in late}, donate=False, params=make_params(layers=5)))


@pytest.mark.parametrize("engine", ["blocking", "scheduled"])
def test_a_hessian_inside_of_a_unit(engine):
    """Autograd saves tensors that have no memory there."""
    params, x = {"w": torch.arange(3.0) + 1}, torch.linspace(-1, 1, 3)

    def total(p, x):
        return torch.func.hessian(lambda a: (a * p["w"]).tanh().sum())(x).sum()

    w = params["w"].clone().requires_grad_()
    total({"w": w}, x).backward()

    def rank_fn(comm):
        sharded = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm)

        def fn(p, x, comm):
            loss, grads = fs.value_and_grad(lambda p, x, comm: fs.forward(total, p, x, comm=comm))(p, x, comm=comm)
            return fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)[1]

        call = partial(fn, comm=comm) if engine == "blocking" else fs.Scheduler(comm)(fn)
        for _ in range(3):
            grads = call(sharded, x)
        return fs.gather(grads, comm=comm).tree()["w"]

    for found in simulate(DP, rank_fn):
        torch.testing.assert_close(found, w.grad)


@every(
    2,
    way=["an old state", "another learning rate", "a step twice"],
    strategy=["ddp", "zero1", "zero3"],
    engine=["blocking", "scheduled"],
)
def test_a_rank_that_updates_something_else(strategy, engine, way):
    """Where no values are compared, as under ddp, either."""

    def rank_fn(comm):
        def make(lr):
            step = fs.train_step(loss_fn, fs.optim.adamw(lr))
            return partial(step, comm=comm) if engine == "blocking" else fs.Scheduler(comm)(step)

        differs = comm.rank == 1
        state = make_state(comm, strategy, tx=fs.optim.adamw(1e-2))
        step, old, done = make(2e-2 if differs and way == "another learning rate" else 1e-2), state, 0
        for i, batch in enumerate(my_batches(comm, 6)):
            if i == 4 and differs and way == "an old state":
                state = old
            old, (state, _) = state, step(state, batch)
            if i == 3 and differs and way == "a step twice":
                state = old
            done += 1
        return done

    found = simulate(DP, rank_fn, outcomes=True)
    assert all(isinstance(each, CommError) for each in found), found
    assert any(text in str(found[0]) for text in ("the loss of update", "after", "at update 4"))
