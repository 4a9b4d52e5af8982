"""Whatever a loss does with its units, step after step: the bits of the blocking path, or those of plain torch."""

from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import LossError, ScheduleError
from fsharp.stateful.transport.blocking import BlockingTransport
from fsharp.stateful.transport.nccl import NcclTransport
from fsharp.testing import simulate
from tests.gpt_like import DIM, block, cross_entropy, embed, head, in_order, logits, loss_fn, make_params, through
from tests.random_programs import policies
from tests.scheduling import (
    DP,
    STRATEGIES,
    assert_close,
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
)

each_strategy = pytest.mark.parametrize("strategy", ["zero3", "hfsdp", pytest.param("zero2", marks=pytest.mark.deep)])


ORDERS = {
    "turned round": ([(0, 1, 2), (2, 1, 0)], 2),
    "early exit": ([(0, 1, 2), (0,)], 2),
    "longer": ([(0,), (0, 1, 2)], 2),
    "none": ([(0, 1, 2), ()], 2),
    "in a row": ([(0, 0, 1, 1, 1)], 1),
    "apart": ([(0, 1, 0, 2, 1)], 1),
    "once, twice": ([(0, 1, 2), (0, 1, 2, 0)], 2),
    "twice, once": ([(0, 1, 2, 0), (0, 1, 2)], 2),
}


@every(3, order=ORDERS, strategy=["zero3", "hfsdp", "zero2"])
def test_orders_that_change_from_step_to_step(order, strategy):
    choices, num = ORDERS[order]
    steps = 5 if num > 1 else 3
    program = training(in_order, strategy, steps, lambda i: {"order": choices[i // 2 % len(choices)]}, microbatches=1)
    (_, _), [step] = run_both(program, mesh_of(strategy))
    assert step.num_unscheduled_calls == (3 if num > 1 else 1)  # the first step, and each in another order than the one before


def test_an_order_that_changes_within_a_step():
    """Departing in the second microbatch: what the plan has collected in the first stays."""

    def loss(params, batch, comm):
        order = (0, 1, 2) if batch["turn"][0] < 3 else (2, 0)
        return in_order(params, {**batch, "order": order}, comm)

    turns = [(0, 1), (0, 1), (3, 0), (0, 3), (0, 1)]
    for strategy in ("zero1", "hfsdp"):
        changes = lambda i: {"turn": torch.tensor(turns[i]).repeat_interleave(4)}  # noqa: E731
        (_, _), [step] = run_both(training(loss, strategy, 5, changes, microbatches=2), mesh_of(strategy))
        assert step.num_unscheduled_calls == 4


@settings(max_examples=7 if settings.default.max_examples <= 60 else 200)
@given(st.data())
def test_any_orders_under_any_policy(data):
    strategy = data.draw(st.sampled_from(sorted(STRATEGIES)))
    orders = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=3))
    steps = data.draw(st.lists(st.sampled_from(orders), min_size=3, max_size=5))
    policy = data.draw(policies())
    program = training(
        in_order,
        strategy,
        len(steps),
        lambda i: {"order": steps[i]},
        microbatches=data.draw(st.sampled_from([1, 2])),
        donate=data.draw(st.booleans()),
        frozen=data.draw(st.lists(st.sampled_from(["embed", "layers.0", "layers.1.w", "head.b"]), max_size=2, unique=True)),
    )
    run_both(program, STRATEGIES[strategy][0], policy=policy)


def nested(p, x, inner, comm):
    return block(p, fs.forward(block, inner, x, comm=comm))


@through
def nested_loss(x, layers, batch, comm):
    return fs.forward(block, layers[2], fs.forward(nested, layers[0], x, layers[1], comm, comm=comm), comm=comm)


def two_losses(params, batch, comm):
    one = cross_entropy(logits(params, batch["x"], comm), batch)
    other = cross_entropy(logits(params, batch["x"].flip(0), comm), batch)
    return fs.Loss(one[0] + 0.5 * other[0], one[1])


def target_without_gradient(params, batch, comm):
    out = logits(params, batch["x"], comm)
    with torch.no_grad():
        target = logits(params, batch["x"].flip(0), comm).softmax(-1)
    return fs.Loss(cross_entropy(out, batch)[0] + (out.softmax(-1) - target).square().sum(), batch["w"].sum())


@through
def some_gathered(x, layers, batch, comm):
    x = block(fs.gather(layers[0], comm=comm).tree(), x)
    x = fs.forward(block, layers[1], x, comm=comm)
    return x + block(fs.gather(layers[2], comm=comm).tree(), x)


@through
def both_ways(x, layers, batch, comm):
    return fs.forward(block, layers[0], block(fs.gather(layers[0], comm=comm).tree(), x), comm=comm)


@through
def several_in_one_call(x, layers, batch, comm):
    return fs.forward(lambda layers, x: block(layers[2], block(layers[0], x)), layers, x, comm=comm)


@through
def side_outputs(x, layers, batch, comm):
    """Two outputs, one of which goes nowhere, and one unit whose output does."""
    x, _ = fs.forward(lambda p, x: (block(p, x), p["w"].sum()), layers[0], x, comm=comm)
    fs.forward(block, layers[1], x, comm=comm)
    return fs.forward(block, layers[2], x, comm=comm)


def gradient_of_the_input(params, batch, comm):
    """A penalty from an inner backward, which goes by the same units as the real one that follows."""
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    y = x
    for layer in params["layers"]:
        y = fs.forward(block, layer, y, comm=comm)
    total, weight = cross_entropy(fs.forward(head, params["head"], y, comm=comm), batch)
    (slope,) = torch.autograd.grad(total, x, retain_graph=True)
    return fs.Loss(total * (1 + slope.detach().square().mean()), weight)


USES = {
    "nested": nested_loss,
    "two losses": two_losses,
    "target": target_without_gradient,
    "gathered": some_gathered,
    "several in one call": several_in_one_call,
    "side outputs": side_outputs,
    "inner gradient": gradient_of_the_input,
}


@every(
    20,
    use=USES,
    microbatches=[1, 2],
    strategy=["zero3", "hfsdp"],
    policy=[{}, {"prefetch": 2}, {"prefetch": 0}, {"release": "backward"}, {"bucket_nbytes": 1500}],
)
def test_ways_to_use_units(use, microbatches, strategy, policy):
    run_both(training(USES[use], strategy, microbatches=microbatches), mesh_of(strategy), **policy)


@every(3, strategy=["zero3", "hfsdp", "zero2"], microbatches=[1, 2])
def test_a_unit_by_forward_and_by_gather(microbatches, strategy):
    """Compared with whole parameters on every rank: the blocking path reduces these uses of one unit one by one."""

    def program(run):
        mesh = run.comm.mesh
        place = fs.ddp(*mesh.names) if run.scheduler is None else strategy
        return training(both_ways, place, microbatches=microbatches)(run)

    run_both(program, mesh_of(strategy), compare=assert_close)


@every(
    8,
    strategy=["zero1", "hfsdp", "zero3", "zero2"],
    to=["optim", "full"],
    frozen=[(), ("layers.0", "head")],
    where=["around the loss", "in the loss"],
)
def test_units_that_were_gathered_to_another_place(strategy, to, frozen, where):
    """Parts and whole buffers of parameters, some of which begin at the address of the parameters."""

    def loss(params, batch, comm):
        moved = fs.gather(params, to=to, comm=comm)
        with torch.no_grad():
            target = logits(moved, batch["x"], comm)
        seen = fs.forward(block, moved["layers"][0], target.new_ones(2, DIM), comm=comm).sum() if frozen else 0.0
        return loss_fn(params, batch, comm).sum + (target - logits(params, batch["x"], comm)).square().sum() + seen

    def own_step(state, batch, comm):
        value, grads = fs.value_and_grad(loss)(fs.gather(state.params, to=to, comm=comm), batch, comm=comm)
        metrics, grads = fs.average(value, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return fs.update(make_tx(), grads, state, comm=comm), metrics.loss

    def program(run):
        state, step = make_state(run.comm, strategy, frozen=frozen), run.wrap(own_step)
        losses = []
        for batch in my_batches(run.comm, 3):
            state, value = step(state, batch)
            losses.append(value)
        return losses, full_params(state, run.comm)

    if where == "around the loss":
        run_both(program, mesh_of(strategy))
    else:
        run_both(training(loss, strategy, frozen=frozen), mesh_of(strategy), compare=assert_close)


@every(2, strategy=["zero3", "zero1"], empty=[0, 1, 2])
def test_a_microbatch_that_no_parameter_reaches(strategy, empty):
    """Its loss has a gradient, of something else; only if no microbatch depends on a parameter it is an error."""

    def loss(params, batch, comm):
        if int(batch["number"][0]) in (empty, 3):
            return torch.ones((), requires_grad=True)
        return loss_fn(params, batch, comm)

    numbers = torch.arange(3).repeat_interleave(4)
    run_both(training(loss, strategy, 3, lambda i: {"number": numbers}, microbatches=3, size=12))
    with pytest.raises(LossError, match="depends on no parameter"):
        run_both(training(loss, strategy, 1, lambda i: {"number": numbers * 0 + 3}, microbatches=3, size=12))


@every(
    3,
    frozen=[["embed"], ["layers.1"], ["embed", "layers.0"], ["layers.1", "head"], ["layers.0.w"]],
    strategy=["zero3", "hfsdp", "zero2"],
)
def test_frozen_units(frozen, strategy):
    """In front nothing flows back; in the middle gradients flow through."""
    program = training(loss_fn, strategy, microbatches=2, frozen=frozen)
    (_, params), [step] = run_both(program, mesh_of(strategy))
    text = events(step.schedule)
    assert ("backward embed" in text) is ("embed" not in frozen)
    assert "backward layers.1" in text
    start = make_params(layers=3)
    assert torch.equal(params["embed"], start["embed"]) is ("embed" in frozen)
    assert torch.equal(params["layers"][1]["w"], start["layers"][1]["w"]) is ("layers.1" in frozen)


def tied_params():
    params = make_params(layers=2)
    params["head"]["w"] = params["embed"]
    return params


def tied_loss(params, batch, comm):
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm)
    out = fs.forward(lambda p, x: x @ p["w"].T + p["b"], params["head"], x, comm=comm, ties=[params["embed"]])
    return cross_entropy(out, batch)


@each_strategy
def test_a_tie_between_units(strategy):
    program = training(tied_loss, strategy, microbatches=2, params=tied_params())
    (_, params), [step] = run_both(program, mesh_of(strategy))
    assert torch.equal(params["embed"], params["head"]["w"])
    assert events(step.schedule).count("forward embed") == 4


@through
def mixture(x, layers, batch, comm):
    """Only the first rank has tokens for the second layer."""
    x = fs.forward(block, layers[0], x, comm=comm)
    return (fs.dummy_forward if comm.rank else partial(fs.forward, block))(layers[1], x, comm=comm)


@each_strategy
def test_a_rank_without_tokens_skips(strategy):
    run_both(training(mixture, strategy, microbatches=2), mesh_of(strategy))


def checkpointed(x, layers, batch, comm, *, use_reentrant):
    def inside(x, layers):
        for layer in layers:
            x = fs.forward(block, layer, x, comm=comm)
        return x

    x = checkpoint(inside, x, layers[:1], use_reentrant=use_reentrant)
    return checkpoint(inside, x, layers[1:], use_reentrant=use_reentrant)


@every(
    6, use_reentrant=[False, True], policy=[{}, {"prefetch": 2}, {"release": "backward"}], strategy=["zero3", "hfsdp", "zero2"]
)
def test_activation_checkpointing(use_reentrant, policy, strategy):
    """Compared with no checkpointing: the blocking path cannot be run inside of a reentrant backward."""
    loss = through(partial(checkpointed, use_reentrant=use_reentrant))

    def program(run):
        return training(loss_fn if run.scheduler is None else loss, strategy, microbatches=2)(run)

    (_, _), [step] = run_both(program, mesh_of(strategy), **policy)
    assert step.num_unscheduled_calls == 1
    assert events(step.schedule).count("forward layers.1") == 4


def test_a_graph_of_the_backward_is_refused():
    def loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        y = fs.forward(block, params["layers"][0], x, comm=comm)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum()

    def rank_fn(comm):
        fs.Scheduler(comm)(fs.train_step(loss, make_tx()))(make_state(comm, "zero3"), my_batches(comm, 1)[0])

    with pytest.raises(ScheduleError, match=r"create_graph=True.*comm=scheduler\.comm"):
        simulate(DP, rank_fn)


def test_a_graph_of_the_backward_by_the_blocking_path():
    def loss(params, batch, comm):
        comm = getattr(comm, "comm", comm)
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        y = fs.forward(block, params["layers"][0], x, comm=comm)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum() + cross_entropy(y @ x.T, {**batch, "y": batch["y"] % len(x)})[0]

    run_both(training(loss, "zero3"))


def test_function_transforms_take_the_blocking_path():
    def program(run):
        state = make_state(run.comm, "zero3")
        batch = my_batches(run.comm, 1)[0]

        def f(params, batch, comm):
            g = torch.func.grad(lambda p: loss_fn(p, batch, comm)[0])(params)
            per_sample = torch.func.vmap(lambda x: logits(params, x, comm).sum())(batch["x"].view(4, 2))
            return [node.buffers for node in fs.layouts.units_of(g)], per_sample

        wrapped = run.wrap(f)
        return [wrapped(state.params, batch) for _ in range(2)]

    run_both(program)


@through
def drops_out(x, layers, batch, comm):
    def noisy(p, x, generator):
        return block(p, x) * (torch.rand(x.shape, generator=generator) < 0.7)

    generator = torch.Generator().manual_seed(comm.rank)
    for layer in layers:
        x = fs.forward(noisy, layer, x, generator, comm=comm)
    return x


def under_autocast(params, batch, comm):
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(logits(params, batch["x"], comm), batch)


@pytest.mark.parametrize("loss", [drops_out, under_autocast])
def test_random_numbers_and_autocast(loss):
    run_both(training(loss, "zero3", microbatches=2))


def test_a_backward_outside_of_any_function():
    """As a plain Comm a scheduler gathers again whenever a backward comes by; a function that has returned does not."""

    def program(run):
        state, seen, generator = make_state(run.comm, "zero3"), [], torch.Generator().manual_seed(run.comm.rank)
        for _ in range(2):
            x = y = torch.randn(4, 6, generator=generator).requires_grad_()
            for layer in state.params["layers"]:
                y = fs.forward(block, layer, y, comm=run.engine)
            y.sum().backward()
            seen.append(x.grad)
        return seen

    run_both(program)

    def rank_fn(comm):
        state, call = make_state(comm, "zero3"), fs.Scheduler(comm)(partial(fs.forward, block))
        call(state.params["layers"][1], torch.ones(2, 6).requires_grad_()).sum().backward()

    with pytest.raises(ScheduleError, match=r"unit 'layers\.1' after the step that used it was over"):
        simulate(DP, rank_fn)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracer looks at it
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_a_compiled_unit_function(backend):
    compiled = torch.compile(block, backend=backend, fullgraph=True)

    @through
    def loss(x, layers, batch, comm):
        for layer in layers:
            x = fs.forward(compiled, layer, x, comm=comm)
        return x

    # One rank, since threads cannot compile at the same time; with gathers all the same.
    (_, _), [step] = run_both(training(loss, fs.zero3("dp")), fs.Mesh({"dp": 1}), trivial_axes=True, release="forward")
    assert gathers(step.schedule)["layers.1"] == 2


TWO_TREES = {"two steps": None, "first, second": ("a", "b"), "second, first": ("b", "a")}


@every(5, order=TWO_TREES, strategy=["ddp", "zero1", "zero3", "hsdp"], feedback=[False, True])
def test_two_trees_in_one_call(order, strategy, feedback):
    """Each reduction is of one tree, as of a GAN. The optimizer keeps the gradients themselves, as an optimistic one does."""
    tx = (
        lambda params: optree.tree_map(torch.zeros_like, params),
        lambda grads, last, params: (optree.tree_map(lambda g, before: -0.1 * (2 * g - before), grads, last), grads),
    )
    precision = fs.Precision(wire=fs.formats.mxint8, feedback=True) if feedback else fs.Precision()

    def loss(params, x, comm):
        for name in sorted(params):
            x = fs.forward(lambda w, x: torch.tanh(x @ w), params[name], x, comm=comm)
        return x.square().mean()

    def program(run):
        seeds = torch.Generator().manual_seed(0)
        trees = {k: {f"{k}{i}": torch.randn(16, 16, generator=seeds) / 4 for i in range(2)} for k in "ab"}
        plan = {"tx": tx, "units": "*", "precision": precision}
        states = {k: make_state(run.comm, strategy, params=tree, **plan) for k, tree in trees.items()}
        step, grad = fs.train_step(loss, tx), fs.value_and_grad(loss)

        def whole_steps(states, x, comm):
            return {k: step(state, x, comm)[0] for k, state in states.items()}

        def own_step(states, x, comm):
            found, new = {}, {}
            for k, state in states.items():
                found[k] = grad(state.params, x, comm=comm, **({"residuals": state.residuals} if feedback else {}))
            for k in TWO_TREES[order]:
                value, grads, *residuals = found[k]
                if feedback:
                    grads, left = fs.reduce_scatter(grads, comm=comm, residuals=residuals[0])
                    new[k] = states[k]._replace(residuals=left)
                else:
                    grads, new[k] = fs.reduce_scatter(grads, comm=comm), states[k]
                new[k] = fs.update(tx, fs.average(value, grads, comm=comm)[1], new[k], comm=comm)
            return {k: new[k] for k in states}

        call = run.wrap(own_step if TWO_TREES[order] else whole_steps)
        for i in range(3):
            states = call(states, torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * i + run.comm.rank)))
        return [x.clone() for x in optree.tree_leaves([[each.params, each.opt] for each in states.values()])]

    _, [call] = run_both(program, mesh_of(strategy))
    assert call.last_call_status().kind == "planned"
    schedule = call.schedule
    assert fs.schedules.Schedule.from_json(schedule.to_json()) == schedule
    for kind, phase in (("reduce", "finish"), ("gather", "update")):
        sent = [op.unit for op in schedule.ops if op.kind == kind and op.phase == phase]
        assert len(set(sent)) == len(sent)


@every(4, strategy=["zero1", "zero2", "zero3", "hfsdp"], carry=[True, False])
def test_two_trees_of_a_closure(strategy, carry):
    """When the first tree is updated, the step has not seen the second yet."""

    def program(run):
        states = {k: make_state(run.comm, strategy) for k in "ab"}

        def step(batch, comm):
            for k, state in states.items():
                states[k], _ = fs.train_step(loss_fn, make_tx())(state, batch, comm)

        call = run.wrap(step)
        for batch in my_batches(run.comm, 3):
            call(batch)
        return [full_params(state, run.comm) for state in states.values()]

    _, [call] = run_both(program, mesh_of(strategy), gather_at_start=carry)
    assert call.last_call_status().kind == "planned"


def with_inner_gradients(of, which, params, batch, comm):
    """A loss that is scaled by the gradients of another loss; ``which``: the Comm of the inner one."""
    early = logits(params, batch["x"], comm)  # units are used before the other loss, and after it
    _, grads = fs.value_and_grad(loss_fn)(of or params, batch, comm=which(comm))
    norm = sum(buffer.square().sum() for node in fs.layouts.units_of(grads) for buffer in node.buffers)
    loss = loss_fn(params, batch, comm)
    return fs.Loss(loss.sum * (1 + norm) + early.square().sum(), loss.weight)


@every(4, tree=["another", "the same"], strategy=["ddp", "zero1", "zero2", "zero3"], microbatches=[1, 2])
def test_gradients_inside_of_a_loss(tree, strategy, microbatches):
    """Of another tree, or by the blocking Comm of the same one."""

    def program(run):
        of = make_state(run.comm, strategy).params if tree == "another" else None
        loss = partial(with_inner_gradients, of, lambda comm: run.comm if of is None else comm)
        return training(loss, strategy, microbatches=microbatches)(run)

    run_both(program)


def test_gradients_inside_of_a_unit_are_refused():
    def rank_fn(comm):
        params = make_state(comm, "zero3").params

        def step(params, batch, comm):
            def inside(p, x):
                return block(p, x) * fs.value_and_grad(loss_fn)(params, batch, comm=comm)[0].sum.float()

            with torch.no_grad():
                return fs.forward(inside, params["layers"][0], torch.ones(2, 6), comm=comm)

        [batch] = my_batches(comm, 1)
        return fs.Scheduler(comm)(step)(params, batch)

    with pytest.raises(ScheduleError, match=r"microbatch_end: inside of 'layers\.0'.*comm=scheduler\.comm"):
        simulate(DP, rank_fn)


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_gradients_of_the_same_tree_inside_of_its_loss_are_refused(is_scheduled):
    def rank_fn(comm):
        state, scheduler = make_state(comm, "zero3"), fs.Scheduler(comm)
        step = fs.train_step(partial(with_inner_gradients, None, lambda comm: comm), make_tx())
        [batch] = my_batches(comm, 1)
        return scheduler(step)(state, batch) if is_scheduled else step(state, batch, scheduler)

    with pytest.raises(ScheduleError, match=r"inside of the loss of another .* of unit 'embed'.*scheduler\.comm"):
        simulate(DP, rank_fn)


def test_a_function_that_is_wrapped_in_each_step_is_called_slow():
    def program(comm, wrap_once):
        scheduler, state = fs.Scheduler(comm), make_state(comm, "zero3")
        step = None
        for batch in my_batches(comm, 5):
            step = step if step and wrap_once else scheduler(fs.train_step(loss_fn, make_tx()))
            state, _ = step(state, batch)

    simulate(DP, partial(program, wrap_once=True))
    with pytest.warns(
        UserWarning, match="4 functions with the name 'train_step.step'.* wrap it once, before the loop"
    ) as warned:
        simulate(DP, partial(program, wrap_once=False))
    assert {each.filename for each in warned} == {__file__}, "the line of the user's call"


def test_labels_are_made_only_for_a_transport_whose_ranks_compare_them(monkeypatch):
    labels = set()
    gather = BlockingTransport.gather_unpacked

    def spied(self, xs, outs, axis, label):
        labels.add(label.partition(" group ")[0])
        return gather(self, xs, outs, axis, label)

    def program(comm):
        state, step = make_state(comm, "zero3"), fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
        for batch in my_batches(comm, 3):
            state, _ = step(state, batch)

    monkeypatch.setattr(BlockingTransport, "gather_unpacked", spied)
    simulate(DP, program)
    assert len(labels) > 3
    assert all("train_step.step #" in label for label in labels)
    labels.clear()
    monkeypatch.setattr(BlockingTransport, "compares_labels", NcclTransport.compares_labels)
    simulate(DP, program)
    assert labels == {""}
