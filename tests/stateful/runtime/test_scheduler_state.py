"""What a scheduler holds between calls: whose tensors are whose, however many trees, functions and steps go by."""

from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F

import fsharp as fs
from fsharp.errors import LossError, ScheduleError
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import block, logits, loss_fn, make_batches, make_params, through
from tests.scheduling import (
    DP,
    HYBRID,
    STRATEGIES,
    buffers,
    evaluate,
    events,
    every,
    full_params,
    gathers,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    run_both,
    training,
    turned,
)


def strategies(*names):
    """Parametrize by some strategies; ``make test-all`` has the others as well."""
    return pytest.mark.parametrize(
        "strategy", [pytest.param(s, marks=[pytest.mark.deep] * (s not in names)) for s in STRATEGIES]
    )


CARRIES = ({}, {"gather_at_start": False}, {"prefetch": 2})


@every(18, strategy=turned(STRATEGIES, "zero3"), policy=CARRIES, mode=(torch.no_grad, torch.inference_mode))
def test_evaluation_between_steps(strategy, policy, mode):
    """Its mode is entered inside of the function, or around it."""

    def program(run):
        state = make_state(run.comm, strategy)
        step, score = run.wrap(fs.train_step(loss_fn, make_tx(), donate=True)), run.wrap(partial(evaluate, mode=mode))
        seen = []
        for i, batch in enumerate(my_batches(run.comm, 3)):
            if i != 1:
                with mode():
                    seen += [score(state.params, batch).clone() for _ in range(2)]
            state, metrics = step(state, batch)
            seen += [metrics.loss, score(state.params, batch)]
        return seen, full_params(state, run.comm)

    (_, _), scheduled = run_both(program, mesh_of(strategy), **policy)
    # Where parameters rest whole an evaluation gathers nothing, and has no schedule.
    assert [each.num_unscheduled_calls for each in scheduled] == [1, bool(STRATEGIES[strategy][1].params.sharded_axes)]


def distill(student, teacher, batch, comm):
    with torch.no_grad():
        target = logits(teacher, batch["x"], comm).softmax(-1)
    return F.cross_entropy(logits(student, batch["x"], comm), target)


@every(18, strategy=turned(STRATEGIES, "zero2"), way=["argument", "closed over"], other=[2, 3])
def test_a_teacher(strategy, way, other):
    """Units of two trees have the same names; they are told apart, whether they are arguments or not."""

    def program(run):
        teacher = make_state(run.comm, strategy, params=make_params(5, layers=other)).params

        def step(state, teacher, batch, comm):
            loss = lambda params, batch, comm: distill(params, teacher, batch, comm)  # noqa: E731
            return fs.train_step(loss, make_tx(), donate=True)(state, batch, comm)

        state = make_state(run.comm, strategy)
        call = run.wrap(step if way == "argument" else lambda state, batch, comm: step(state, teacher, batch, comm))
        losses = []
        for batch in my_batches(run.comm, 4):
            state, metrics = call(state, *([teacher] if way == "argument" else []), batch)
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm), buffers(teacher)

    (_, _, _), [step] = run_both(program, mesh_of(strategy))
    assert step.num_unscheduled_calls == 1
    assert sum("#1" in event for event in events(step.schedule)) == 2 * (other + 2)


def test_moving_averages_as_teacher():
    """A tree that is a new one in each step, made from the other."""

    def program(run):
        def step(state, ema, batch, comm):
            loss = lambda params, batch, comm: distill(params, ema, batch, comm)  # noqa: E731
            new, metrics = fs.train_step(loss, make_tx())(state, batch, comm)
            return new, optree.tree_map(lambda a, b: a * 0.9 + b * 0.1, ema, new.params), metrics

        state = make_state(run.comm, "zero3")
        ema, call, losses = optree.tree_map(torch.clone, state.params), run.wrap(step), []
        for batch in my_batches(run.comm, 4):
            state, ema, metrics = call(state, ema, batch)
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm), buffers(ema)

    assert run_both(program)[1][0].num_unscheduled_calls == 1


def test_one_tree_as_two_arguments():
    """The teacher is the student itself: one unit, used twice."""

    def program(run):
        def step(state, teacher, batch, comm):
            loss = lambda params, batch, comm: distill(params, teacher, batch, comm) + evaluate(params, batch, comm)  # noqa: E731
            return fs.train_step(loss, make_tx())(state, batch, comm)

        state, call, losses = make_state(run.comm, "zero3"), run.wrap(step), []
        for batch in my_batches(run.comm, 4):
            state, metrics = call(state, state.params, batch)
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    run_both(program)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_several_steps_in_one_call(strategy):
    def program(run):
        step = fs.train_step(loss_fn, make_tx(), microbatches=2, donate=True)

        def steps(state, batches, comm):
            losses = []
            for batch in batches:
                state, metrics = step(state, batch, comm)
                losses.append(metrics.loss)
            return state, losses, evaluate(state.params, batches[0], comm)

        state, call, seen = make_state(run.comm, strategy), run.wrap(steps), []
        for i in range(3):
            state, *rest = call(state, my_batches(run.comm, 2, seed=i))
            seen.append(rest)
        return seen, full_params(state, run.comm)

    assert run_both(program)[1][0].num_unscheduled_calls == 1


@strategies("zero1", "hfsdp")
def test_a_scheduler_as_a_plain_comm(strategy):
    """No function is wrapped: every call acts on demand, and nothing is recorded."""

    def program(run):
        state, step = make_state(run.comm, strategy), fs.train_step(loss_fn, make_tx(), microbatches=2, donate=True)
        seen = []
        for batch in my_batches(run.comm, 3):
            state, metrics = step(state, batch, run.engine)
            seen += [metrics.loss, evaluate(state.params, batch, run.engine)]
        whole = fs.gather(state.params, comm=run.engine)
        return seen, full_params(state, run.comm), buffers(whole), fs.full_tree(state.params, comm=run.engine)

    assert run_both(program, mesh_of(strategy))[1] == []


def test_wrapped_functions_inside_of_each_other():
    def program(run):
        step = run.wrap(fs.train_step(loss_fn, make_tx(), donate=True))
        score = run.wrap(evaluate)

        def both(state, batch, comm):
            state, metrics = step(state, batch)
            return state, metrics.loss, score(state.params, batch)

        state, call, seen = make_state(run.comm, "zero3"), run.wrap(both), []
        for batch in my_batches(run.comm, 3):
            state, *rest = call(state, batch)
            seen.append(rest)
        return seen, full_params(state, run.comm)

    _, scheduled = run_both(program)
    assert [each.num_unscheduled_calls for each in scheduled] == [0, 0, 1]


@every(9, strategy=STRATEGIES, place=["first", "last", "all"])
def test_gradients_changed_in_place_before_they_are_reduced(strategy, place):
    """What the schedule has reduced already, on its way, is then not what the caller wants."""

    def explicit(state, batch, comm):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
        tensors = buffers(grads)
        for x in {"first": tensors[:1], "last": tensors[-1:], "all": tensors}[place]:
            x.mul_(0.5).add_(0.001)
        reduced = fs.reduce_scatter(grads, comm=comm)
        metrics, averaged = fs.average(loss, reduced, comm=comm)
        return fs.update(make_tx(), averaged, state, comm=comm), metrics, grads, reduced, averaged

    def program(run):
        state, step, seen = make_state(run.comm, strategy), run.wrap(explicit), []
        for batch in my_batches(run.comm, 3):
            state, metrics, *grads = step(state, batch)
            seen.append([metrics.loss, *map(buffers, grads)])
        return seen, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))


@strategies("zero1", "hfsdp")
def test_gradients_without_an_update(strategy):
    def program(run):
        state, seen = make_state(run.comm, strategy), []
        gradients = run.wrap(lambda params, batch, comm: fs.value_and_grad(loss_fn)(params, batch, comm=comm))
        reduced = run.wrap(lambda p, b, comm: fs.reduce_scatter(fs.value_and_grad(loss_fn)(p, b, comm=comm)[1], comm=comm))
        for batch in my_batches(run.comm, 3):
            loss, grads = gradients(state.params, batch)
            seen.append([loss.sum, buffers(grads), buffers(reduced(state.params, batch))])
            seen.append(buffers(fs.reduce_scatter(grads, comm=run.engine)))  # after the call that made them
        return seen

    assert [each.num_unscheduled_calls for each in run_both(program, mesh_of(strategy))[1]] == [1, 1]


@strategies("zero1", "zero3")
def test_a_state_that_is_not_donated_stays(strategy):
    def program(run):
        states, step = [make_state(run.comm, strategy)], run.wrap(fs.train_step(loss_fn, make_tx()))
        for batch in my_batches(run.comm, 4):
            states.append(step(states[-1], batch)[0])
        again = step(states[1], my_batches(run.comm, 4)[1])[0]
        return [buffers((state.params, state.main, state.opt)) for state in states], full_params(again, run.comm)

    run_both(program, mesh_of(strategy))


@every(6, strategy=STRATEGIES, donate=[False, True])
def test_parameters_read_right_after_the_step(strategy, donate):
    """While they are on their way from the optimizer's place to where they rest."""

    def program(run):
        state, seen = make_state(run.comm, strategy), []
        step = run.wrap(fs.train_step(loss_fn, make_tx(), donate=donate))
        for i, batch in enumerate(my_batches(run.comm, 4)):
            state, _ = step(state, batch)
            if i % 2:
                seen.append(full_params(state, run.comm))
            else:
                seen += [x.clone() for x in optree.tree_leaves(state.params)]
        return seen

    run_both(program, mesh_of(strategy))


@every(27, strategy=turned(STRATEGIES, "hfsdp"), policy=CARRIES, way=("in place", "new", "other", "step back"))
def test_parameters_changed_between_steps(strategy, policy, way):
    """What the step before has gathered ahead is stale then."""

    def program(run):
        state = make_state(run.comm, strategy)
        other = make_state(run.comm, strategy, params=make_params(7, layers=3))
        step, losses = run.wrap(fs.train_step(loss_fn, make_tx())), []
        for i, batch in enumerate(my_batches(run.comm, 4)):
            before = state
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
            if i in (1, 2) and way == "in place":
                for x in buffers(state.params):
                    x.mul_(0.5)
            elif i in (1, 2):
                new = {
                    "new": optree.tree_map(lambda x: x * 0.5, state.params),
                    "other": other.params,
                    "step back": before.params,
                }
                state = state._replace(params=new[way])
        return losses, buffers(state.params)

    (_, _), [step] = run_both(program, mesh_of(strategy), **policy)
    assert step.num_unscheduled_calls == 1


@strategies("zero1", "hfsdp")
def test_optimizers_that_use_other_ranks(strategy):
    """Their collectives are the caller's own: passed on by the scheduler, between its own."""
    averaged = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9))
    program = training(loss_fn, strategy, 4, tx=fs.optim.chain(fs.optim.apply_if_finite(averaged, 5)))
    assert run_both(program, mesh_of(strategy))[1][0].num_unscheduled_calls == 1


def test_another_schedule_can_be_followed():
    """One that was compiled with another policy, written to a file, and read."""

    def program(run):
        state, losses = make_state(run.comm, "zero3"), []
        step = run.wrap(fs.train_step(loss_fn, make_tx(), donate=True))
        for i, batch in enumerate(my_batches(run.comm, 6)):
            if i == 3 and run.scheduler:
                other = compile_schedule(step.schedule.program, fs.SchedulePolicy(prefetch=3))
                step.follow(fs.schedules.Schedule.from_json(other.to_json()))
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    (_, _), [step] = run_both(program)
    assert step.num_unscheduled_calls == 1
    assert step.schedule.policy.prefetch == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_of_one_rank(strategy):
    """With ``trivial_axes`` one rank does all that many would: the same memory, copied instead of sent."""
    mesh = fs.Mesh(dict.fromkeys(mesh_of(strategy).names, 1))
    (_, _), [step] = run_both(training(loss_fn, strategy, microbatches=2), mesh, trivial_axes=True)
    assert bool(gathers(step.schedule)) is bool(STRATEGIES[strategy][1].params.sharded_axes)


def test_a_resumed_state():
    """Written and read again between two steps, by way of a plain tree."""

    def program(run):
        state, step, losses = make_state(run.comm, "hfsdp"), run.wrap(fs.train_step(loss_fn, make_tx(), donate=True)), []
        for batch in my_batches(run.comm, 4):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
            leaves, spec = optree.tree_flatten(state)
            copies = [x.numpy().copy() if isinstance(x, torch.Tensor) else x for x in leaves]
            state = optree.tree_unflatten(
                spec, [torch.from_numpy(x) if isinstance(y, torch.Tensor) else x for x, y in zip(copies, leaves)]
            )
        return losses, full_params(state, run.comm)

    assert run_both(program, HYBRID)[1][0].num_unscheduled_calls == 1


def test_parameters_changed_within_a_step_are_refused():
    """After they were gathered, and before they are used: what is used would be stale."""

    def rank_fn(comm):
        state = make_state(comm, "zero3")
        armed = []

        @through
        def loss(x, layers, batch, comm):
            if armed:
                with torch.no_grad():
                    buffers(state.params["layers"][0])[0].mul_(2)
            for layer in layers:
                x = fs.forward(block, layer, x, comm=comm)
            return x

        grads = fs.Scheduler(comm, policy=DebugPolicy(poison=True))(
            lambda params, batch, comm: fs.value_and_grad(loss)(params, batch, comm=comm)
        )
        for batch in my_batches(comm, 2):
            grads(state.params, batch)
        armed.append(True)
        grads(state.params, batch)

    with pytest.raises(ScheduleError, match=r"'layers\.0' were changed in place between their gather and their use"):
        simulate(DP, rank_fn)


@every(14, strategy=STRATEGIES, where=["forward", "backward", "loss"], when=[0, 1])
def test_after_a_function_has_raised_training_goes_on_with_a_new_scheduler(strategy, where, when):
    """On all ranks alike, in the first step or in one that follows the plan; the old one says that it is closed."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("in the backward")

    def bad_block(p, x):
        if where == "forward":
            raise ZeroDivisionError("in the forward")
        return Raises.apply(block(p, x)) if where == "backward" else block(p, x)

    @through
    def loss(x, layers, batch, comm):
        for i, layer in enumerate(layers):
            x = fs.forward(bad_block if batch["bad"] and i == 1 else block, layer, x, comm=comm)
        if batch["bad"] and where == "loss":
            raise ZeroDivisionError("in the loss")
        return x

    def program(run):
        state, step, losses = make_state(run.comm, strategy), run.wrap(fs.train_step(loss, make_tx())), []
        for i, batch in enumerate(my_batches(run.comm, 3)):
            if i == when:
                with pytest.raises(ZeroDivisionError, match="in the"):
                    step(state, {**batch, "bad": True})
                if run.scheduler is not None:
                    with pytest.raises(ScheduleError, match=r"this scheduler was closed(.|\n)*ZeroDivisionError: in the"):
                        step(state, {**batch, "bad": False})
                    run.scheduler = fs.Scheduler(run.comm, policy=DebugPolicy(poison=True))
                    step = run.wrap(fs.train_step(loss, make_tx()))
            state, metrics = step(state, {**batch, "bad": False})
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    run_both(program, mesh_of(strategy))


LOSSES = {
    "no use": (lambda p, b, comm: b["w"].sum().requires_grad_() * 1.0, "depends on no parameter"),
    "constant": (lambda p, b, comm: b["w"].sum(), "no parameter reaches it. Use parameters by fs.forward"),
    "detached": (
        lambda p, b, comm: (logits(p, b["x"], comm).detach() * b["w"].requires_grad_()[:, None]).sum(),
        "Were parameters detached",
    ),
    "not a scalar": (lambda p, b, comm: logits(p, b["x"], comm), r"4, 11\] with a gradient, expected a floating-point"),
}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_without_gradient(kind, strategy):
    loss, match = LOSSES[kind]

    def rank_fn(comm):
        state, scheduler = make_state(comm, strategy), fs.Scheduler(comm, policy=DebugPolicy(poison=True))
        fs.value_and_grad(loss)(state.params, make_batches(1, 4)[0], comm=scheduler)

    with pytest.raises(LossError, match=match):
        simulate(DP, rank_fn)


def test_all_frozen():
    def rank_fn(comm):
        state = make_state(comm, "zero3", frozen="**")
        fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))(state, my_batches(comm, 1)[0])

    with pytest.raises(LossError, match="every parameter is frozen"):
        simulate(DP, rank_fn)


def test_the_first_gathers_of_a_step_are_made_once():
    """Evaluation takes over what training has gathered, if it is the same; nothing is gathered for nothing."""

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        scheduler = fs.Scheduler(counting, policy=DebugPolicy(poison=True))
        state, step = make_state(comm, "zero3"), scheduler(fs.train_step(loss_fn, make_tx(), donate=True))
        counts = []
        for batch in my_batches(comm, 4):
            counting.calls.clear()
            state, _ = step(state, batch)
            counts.append(sum(n for call, n in counting.calls.items() if call.op == "all_gather"))
        return counts, gathers(step.schedule)

    counts, planned = simulate(DP, rank_fn)[0]
    assert counts[2] == counts[3] == planned.total()
    assert counts[1] == planned.total() + 1  # the first step gathered nothing for the second
