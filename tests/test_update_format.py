"""Updates that travel as encoded differences: the same bits on every path, predicted bytes, and an error that does not grow."""

import re
from contextlib import contextmanager, suppress
from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import LayoutError
from fsharp.functional.formats.format import plain_format
from fsharp.stateful.units import update_gather
from fsharp.stateful.units.update_gather import UpdateGather
from fsharp.testing import simulate
from tests.gpt_like import loss_fn, make_params
from tests.modules import descend
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
    my_batches,
    train,
)
from tests.stateful.runtime.test_scheduler_equivalence import assert_as_predicted
from tests.test_format import BLOCKS
from tests.test_leaf_format import STORED as STORED_BY_LEAF

WIDER = {name: STRATEGIES[name] for name in ("zero1", "zero2", "hfsdp", "mixed")}
"""Strategies under which parameters rest wider than optimizer state."""
MXINT4, MXINT8 = fs.formats.mxint4, fs.formats.mxint8
FORMATS = {each.name: each for each in (MXINT4, MXINT8, BLOCKS, plain_format(torch.bfloat16))}
POLICIES = {**FORMAT_POLICIES, "nothing carried": {"gather_at_start": False}, "offload": {"offload": True}}
PRECISION = fs.Precision(update=MXINT4)


def of(update, compute=None, **rest):
    return fs.Precision(compute=compute, main=torch.float32, update=update, **rest)


@every(64, strategy=WIDER, policy=POLICIES, update=FORMATS, compute=[None, torch.bfloat16], donate=[True, False])
@on_ranks(lambda strategy: WIDER[strategy][0])
def test_training_has_the_same_bits_on_every_path(comm, strategy, policy, update, compute, donate):
    ways = {"params": make_params(layers=1), "steps": 3, "microbatches": 2}
    precision = of(FORMATS[update], compute)
    blocking = train(comm, strategy, precision=precision, donate=not donate, **ways)
    scheduled = train(comm, strategy, POLICIES[policy], precision=precision, donate=donate, **ways)
    assert_same_training(scheduled, blocking)
    assert scheduled.num_unscheduled_calls == 1
    fs.schedules.verify(scheduled.schedule)
    exact = train(comm, strategy, precision=of(None, compute), **ways)
    assert any(not torch.equal(a, b) for a, b in zip(blocking.params, exact.params, strict=True))


STOCHASTIC = fs.formats.stochastic(MXINT4)


@pytest.mark.parametrize(("update", "wire"), [(MXINT4, None), (MXINT4, MXINT4), (STOCHASTIC, STOCHASTIC)], ids=str)
@on_ranks(DP)
def test_zero1_and_zero2_have_the_same_bits(comm, update, wire):
    ways = {"params": make_params(layers=1), "steps": 3, "precision": of(update, wire=wire)}
    first = train(comm, "zero1", **ways)
    for strategy, policy in (("zero2", None), ("zero1", {}), ("zero2", {})):
        assert_same_training(train(comm, strategy, policy, **ways), first)


@pytest.mark.parametrize("policy", [{}, {"bucket_nbytes": 10**6}], ids=str)
def test_ctrl_c_while_differences_are_added_adds_none_twice(policy, monkeypatch):
    """Ctrl-C during an operation of torch is raised right after it. The next read goes on where it was interrupted."""
    interrupts, wait = [], UpdateGather.wait

    @contextmanager
    def interrupted_at_end(params):
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(params):
            yield
        interrupts.append(params)
        if len(interrupts) % 2:
            raise KeyboardInterrupt

    def wait_again(gather):
        for _ in range(2 * len(gather.differences)):
            with suppress(KeyboardInterrupt):
                wait(gather)
        wait(gather)

    expected = simulate(DP, partial(train, strategy="zero1", policy=policy, precision=PRECISION))
    monkeypatch.setattr(update_gather, "_unsafe_preserve_version_counter", interrupted_at_end)
    monkeypatch.setattr(UpdateGather, "wait", wait_again)
    for found, right in zip(simulate(DP, partial(train, strategy="zero1", policy=policy, precision=PRECISION)), expected):
        assert_same_training(found, right)
    assert interrupts


def distance(a, b):
    """The largest distance between elements of two trees."""
    return max(float((x.float() - y).abs().max()) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


@every(2, strategy=["zero1", "hfsdp"], update=["mxint4", "mxint8"])
def test_the_error_is_that_of_one_difference_and_does_not_grow(strategy, update):
    """A difference is the last change of a main copy and the error before: both at most this large, and so is the error."""
    rate, bits = 1e-2, {"mxint4": 7, "mxint8": 127}[update]

    def rank_fn(comm):
        tx = fs.optim.adamw(rate, weight_decay=0.0)
        state = make_state(comm, strategy, tx=tx, params=make_params(layers=1), precision=of(FORMATS[update]))
        step = fs.train_step(loss_fn, tx, donate=True)
        main, found = fs.full_tree(state.main, comm=comm), []
        for batch in my_batches(comm, 12):
            before = optree.tree_map(torch.clone, main)
            state, _ = step(state, batch, comm)
            main = fs.full_tree(state.main, comm=comm)
            found.append((distance(fs.full_tree(state.params, comm=comm), main), distance(main, before)))
        at_rest = [
            (node.name, g, b.clone()) for node in fs.layouts.units_of(state.params) for g, b in zip(node.groups, node.buffers)
        ]
        return found, at_rest

    results = simulate(WIDER[strategy][0], rank_fn)
    found, _ = results[0]
    largest = max(change for _, change in found)
    assert all(0 < error <= largest / (bits - 1) * 1.01 for error, _ in found)  # the sum of largest / bits**k
    if strategy == "zero1":
        for _, at_rest in results[1:]:
            assert_same(at_rest, results[0][1])


@every(8, strategy=WIDER, microbatches=[1, 3], update=FORMATS)
def test_a_step_makes_the_predicted_calls(strategy, microbatches, update):
    assert_as_predicted(strategy, microbatches, of(FORMATS[update], torch.bfloat16))


def test_updates_in_four_bits_send_an_eighth_of_the_bytes():
    """17 bytes for 32 values, and 128 bytes for 32 values in float32."""
    layouts = [fs.plan({"w": torch.zeros(4096)}, *WIDER["zero2"], precision=each) for each in (PRECISION, fs.Precision())]
    sent = [sum(call.nbytes for call in fs.inspect.step_traffic(layout) if call.op == "all_gather") for layout in layouts]
    assert sent == [2048 * 17 // 32, 2048 * 4]
    assert layouts[0].nbytes("main") == 2048 * 4
    assert layouts[1].nbytes("main") == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hsdp", "zero3x2"])
def test_where_no_updated_parameters_travel_the_format_is_refused(strategy):
    with pytest.raises(LayoutError, match=r"'embed' has update=mxint4, and no updated parameters of this unit travel"):
        make_layout(*STRATEGIES[strategy], precision=PRECISION)


def test_a_format_is_refused_by_the_name_of_the_leaf():
    params = {"a": torch.ones(40), "b": torch.ones(8), "n": torch.ones(3, dtype=torch.int64)}

    def planned(precision, **options):
        return fs.plan(params, *WIDER["zero1"], precision=precision, **options)

    beside = {"**": fs.Precision(), "a": fs.Precision(update=MXINT4)}
    with pytest.raises(LayoutError, match=r"'b' has update=mxint4 and stored=blocks"):
        planned({"b": fs.Precision(update=MXINT4, stored=BLOCKS)})
    with pytest.raises(LayoutError, match=r"'a' has update=mxint4, and no leaf of this precision is trained"):
        planned(beside, frozen="a")
    with pytest.raises(LayoutError, match=r"'n' has update=mxint4, and no leaf of this precision is trained"):
        planned({"**": fs.Precision(), "n": fs.Precision(update=MXINT4)})
    layout = planned(PRECISION, frozen="b")  # one precision for all: of those without updates nothing is asked
    assert [group.dtypes.update for group in layout.units[0].groups] == [MXINT4, None, None]
    with pytest.raises(LayoutError, match=re.escape("update is 'by_leaf', which encodes whole leaves")):
        fs.Precision(update=STORED_BY_LEAF.stored)
    with pytest.raises(fs.errors.OptionError, match=r"update is torch\.bfloat16, expected a Format"):
        fs.Precision(update=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"update is torch\.float8_e4m3fn\. Values of 8 bits and less need a scale"):
        fs.Precision(update=plain_format(torch.float8_e4m3fn))


@pytest.mark.parametrize("policy", [None, {}, {"bucket_nbytes": 10**6, "prefetch": 2}], ids=str)
@on_ranks(DP)
def test_some_units_and_some_leaves_travel_encoded(comm, policy):
    """Beside units that rest encoded, and a frozen leaf and a tied one."""
    precision = {"**": fs.Precision(), "layers.1.*": PRECISION, "layers.2.*": fs.Precision(stored=BLOCKS), "embed": of(MXINT8)}
    ways = {"params": make_params(layers=3), "frozen": "layers.1.b", "steps": 3}
    found = train(comm, "zero1", policy, precision=precision, **ways)
    assert_same_training(found, train(comm, "zero1", precision=precision, donate=False, **ways))
    plain_losses = train(comm, "zero1", **ways).losses
    torch.testing.assert_close(found.losses, plain_losses, rtol=0.02, atol=0)


@on_ranks(DP)
def test_updates_from_float32_parameters_where_they_rest(comm):
    """A state may begin with parameters where they rest; main copies then have memory of their own, and no more."""
    layout, states = make_layout(*WIDER["zero1"], precision=PRECISION), []
    for place in ("optim", "params"):
        start = fs.shard(make_params(layers=3), layout, comm, place=place)
        states.append(fs.init_state(make_tx(), start, comm=comm, donate=True))
    for node in fs.layouts.units_of(states[1].main):
        assert sum(b.untyped_storage().nbytes() for b in node.buffers) == node.nbytes
    step = fs.train_step(loss_fn, make_tx(), donate=True)
    for batch in my_batches(comm, 2):
        states = [step(state, batch, comm)[0] for state in states]
    assert_same(*[fs.full_tree((state.params, state.main), comm=comm) for state in states])


@pytest.mark.parametrize("policy", [None, {}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@on_ranks(DP)
def test_what_is_not_finite_arrives_as_such(comm, bad, policy):
    """From the step on in which it is in a main copy, and also once the main copy is finite again."""
    state = make_state(comm, "zero1", precision=PRECISION)
    step = fs.train_step(loss_fn, make_tx())
    step = fs.Scheduler(comm)(step) if policy is not None else lambda *args: fs.train_step(loss_fn, make_tx())(*args, comm)
    batches = my_batches(comm, 3)
    state, _ = step(state, batches[0])
    good = state.main
    with torch.no_grad():
        poisoned = fs.layouts.map_units(lambda node: node.with_buffers([b.clone() for b in node.buffers]), state.main)
        fs.layouts.units_of(poisoned)[0].buffers[0][3] = bad
    state, _ = step(state._replace(main=poisoned), batches[1])
    first = fs.full_tree(state.params, comm=comm)["embed"].flatten()
    state, _ = step(state._replace(main=good), batches[2])
    assert not torch.isfinite(first[3])
    assert not torch.isfinite(fs.full_tree(state.params, comm=comm)["embed"].flatten()[3])


@every(2, after=["zero1", "zero2", "hfsdp"], donate=[False, True])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(after, donate, tmp_path):
    """Checkpoints have parameters beside main copies, in coordinates of whole tensors."""
    step = fs.train_step(loss_fn, make_tx())
    mesh, params = STRATEGIES[after][0], make_params(layers=1)

    def save(comm):
        state = make_state(comm, "zero1", params=params, precision=PRECISION)
        for batch in my_batches(comm, 2):
            state, _ = step(state, batch, comm)
        fs.checkpoint.save(str(tmp_path), state, step=2, comm=comm)
        moved = fs.reshard(state, make_layout(*WIDER["zero2"], params, precision=PRECISION), comm=comm)
        results = []
        for each in (state, moved):
            each, metrics = step(each, my_batches(comm, 1, seed=7)[0], comm)
            results.append((fs.full_tree(each.params, comm=comm), float(metrics.loss)))
        assert_same(*results)
        return (fs.full_tree((state.params, state.main), comm=comm), *results[0])

    def load(comm):
        like = make_state(comm, after, params=make_params(5, layers=1), precision=PRECISION)
        state = fs.checkpoint.load(str(tmp_path), like, comm=comm, donate=donate)
        values = fs.full_tree((state.params, state.main), comm=comm)
        state, metrics = step(state, my_batches(comm, 1, seed=7)[0], comm)
        return values, fs.full_tree(state.params, comm=comm), float(metrics.loss)

    saved, loaded = simulate(DP, save), simulate(mesh, load)
    assert_same(loaded[0][0], saved[0][0])
    if mesh == DP:
        assert_same(loaded[0], saved[0])


@pytest.mark.parametrize(("old", "new"), [(PRECISION, fs.Precision()), (fs.Precision(), PRECISION)], ids=["off", "on"])
def test_reshard_turns_it_off_and_on(old, new):
    """A main copy without use is gone with the next update, and a missing one is made of the parameters."""
    after = "zero3" if new.update is None else "zero1"

    def rank_fn(comm):
        state = make_state(comm, "zero2", precision=old)
        step = fs.train_step(loss_fn, make_tx(), donate=True)
        for batch in my_batches(comm, 2):
            state, _ = step(state, batch, comm)
        state = fs.reshard(state, make_layout(*STRATEGIES[after], precision=new), comm=comm)
        for batch in my_batches(comm, 3, seed=4):
            state, metrics = step(state, batch, comm)
        mains = [node.groups for node in fs.layouts.units_of(state.main)]
        assert all(mains) is (new.update is not None)
        return float(metrics.loss)

    def exact(comm):
        state = make_state(comm, "zero2")
        step = fs.train_step(loss_fn, make_tx(), donate=True)
        for batch in [*my_batches(comm, 2), *my_batches(comm, 3, seed=4)]:
            state, metrics = step(state, batch, comm)
        return float(metrics.loss)

    torch.testing.assert_close(simulate(DP, rank_fn), simulate(DP, exact), rtol=0.02, atol=0)


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
        self[2].weight.requires_grad_(False)


def sharded(comm, how, **options):
    torch.manual_seed(3)
    return fs.shard_module(Net(), mesh=comm, strategy=how, units=[torch.nn.Linear], precision=PRECISION, **options)


def steps_of(model, optimizer, comm, count, first=0):
    for step in range(first, first + count):
        x = torch.arange(12.0).view(2, 6) * (step + 1 + comm.rank) / 20
        loss = model(x).square().mean()
        descend(loss, optimizer)
        yield loss.detach()


@pytest.mark.parametrize("policy", [{}, {"offload": True}], ids=str)
@on_ranks(DP)
def test_modules_have_the_bits_of_functions(comm, policy):
    def of_module(comm, how):
        model = sharded(comm, how, policy=fs.SchedulePolicy(**policy))
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-1), decay=0.5))
        losses = list(steps_of(model, optimizer, comm, 3))
        with optimizer.averaged(), torch.no_grad():
            model(torch.ones(1, 6))
        return [*losses, *steps_of(model, optimizer, comm, 2, first=3)], fs.full_tree(model.train_state.params, comm=model.comm)

    def of_functions(comm, how):
        model = sharded(comm, how)
        fn, _ = model.functional()
        tx = fs.optim.with_ema(fs.optim.adamw(1e-1), decay=0.5)
        state = model.train_state._replace(opt=tx.init(fs.trainable(model.train_state.main), comm=comm))
        losses = []
        for step in range(5):
            x = torch.arange(12.0).view(2, 6) * (step + 1 + comm.rank) / 20
            loss, grads = fs.value_and_grad(lambda p, x, comm: fn(p, x, comm=comm).square().mean())(state.params, x, comm=comm)
            losses.append(loss)
            _, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
            state = fs.update(tx, grads, state, comm=comm)
        return losses, fs.full_tree(state.params, comm=comm)

    found = [of_module(comm, STRATEGIES[name][1]) for name in ("zero1", "zero2")]
    assert_same(*found)
    _, params = of_functions(comm, STRATEGIES["zero1"][1])
    assert_same(found[0][1], params)


@on_ranks(DP)
def test_a_module_that_is_written_to_or_loaded_computes_with_its_main_copies(comm):
    model = sharded(comm, STRATEGIES["zero1"][1])
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-1))
    list(steps_of(model, optimizer, comm, 3))
    whole, x = Net(), torch.ones(1, 6)
    shown = {name: value.clone() for name, value in model.named_full_parameters()}
    whole.load_state_dict(shown)
    with torch.no_grad():
        assert not torch.equal(model(x), whole(x))  # the module computes with what has arrived
        for parameter in model.parameters():
            parameter.mul_(1)
        torch.testing.assert_close(model(x), whole(x), rtol=0, atol=0)
        other = sharded(comm, STRATEGIES["zero1"][1])
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(x), whole(x), rtol=0, atol=0)


def test_uneven_shards_of_several_groups():
    """Blocks are counted from the begin of each rank's part, whatever the sizes; ranks may hold padding alone."""
    params = {"a": torch.randn(7, 5), "b": torch.randn(1), "c": torch.randn(33).to(torch.bfloat16), "d": torch.zeros(0)}

    def rank_fn(comm):
        layout = fs.plan(params, comm.mesh, fs.zero1("outer", "inner"), precision=of(MXINT8))
        assert all(group.capacity % 32 == 0 for group in layout.units[0].groups)
        tx = fs.optim.sgd(0.1)
        state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
        for _ in range(3):
            grads = fs.layouts.map_units(lambda node: node.with_buffers([torch.ones_like(b) for b in node.buffers]), state.main)
            state = fs.update(tx, grads, state, comm=comm)
        return fs.full_tree(state.params, comm=comm), fs.full_tree(state.main, comm=comm)

    results = simulate(HYBRID, rank_fn)
    for values, main in results:
        assert_same(values, results[0][0])
        for name, value in values.items():
            torch.testing.assert_close(value.float(), params[name].float() - 0.3, rtol=0.01, atol=1e-3)
            torch.testing.assert_close(value.float(), main[name], rtol=0.01, atol=1e-3)
