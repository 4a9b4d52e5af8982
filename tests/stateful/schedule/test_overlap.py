"""The order of ops shows what overlaps with what: gathers ahead of their use, reductions beneath the next backward."""

from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import fsharp as fs
from examples.gpt import model
from fsharp.functional.comm.protocol import sent_nbytes
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.program import Event
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.units.unit_gradient import UnitGradient as Gradient
from fsharp.stateful.units.unit_state import UnitState
from fsharp.stateful.verify.verify import verify
from fsharp.testing import DebugPolicy, simulate
from tests.edited_schedules import in_a_row
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import HYBRID, STRATEGIES, every, gathers, make_layout, make_state, make_tx, my_batches, train
from tests.stateful.runtime.test_scheduler_programs import tied_loss, tied_params

LAYERS = 5
NAMES = ["embed", *(f"layers.{i}" for i in range(LAYERS)), "head"]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_number = pytest.mark.parametrize("microbatches", [1, 2])


@cache
def planned(strategy, microbatches=1, prefetch=1, **policy):
    """What a scheduler follows after a step of the model with ``LAYERS`` layers: see ``tests/planning/test_tune.py``."""
    layout = make_layout(*STRATEGIES[strategy], make_params(layers=LAYERS))
    policy = fs.SchedulePolicy(prefetch=prefetch, **policy)
    order = ("embed", "layers.*", "head")
    return fs.schedules.plan_step(layout, policy, order=order, microbatches=microbatches, backend="gloo")


def positions(schedule, kind, unit=None, phase=None):
    return [i for i, op in enumerate(schedule.ops) if op.kind == kind and unit in (None, op.unit) and phase in (None, op.phase)]


def ends(schedule):
    """For each use, forward and backward, in order: the unit, the position of its compute op, the event that ends it."""
    computes = {schedule.ops[i].event_index: i for i in positions(schedule, "compute")}
    spans = sorted(schedule.program.forward_backward_ranges(), key=lambda span: span[1])
    return [(unit, computes[first], last) for unit, first, last in spans]


def moves_parameters(strategy):
    return bool(STRATEGIES[strategy][1].params.sharded_axes)


def moves_gradients(strategy):
    return bool(STRATEGIES[strategy][1].grads.sharded_axes)


@every(5, strategy=[name for name in STRATEGIES if moves_parameters(name)], prefetch=[1, 2, 3], microbatches=[1, 2])
def test_gathers_are_under_way_while_the_units_before_compute(strategy, prefetch, microbatches):
    """None is issued when its unit is wanted: forward and backward, over turning points, from one step to the next."""
    schedule = planned(strategy, microbatches, prefetch=prefetch)
    uses = ends(schedule)
    for (unit, compute, _), earlier in zip(uses, [-1, *(before for _, before, _ in uses)], strict=False):
        assert not any(earlier < i < compute for i in positions(schedule, "gather", unit, "forward"))
        assert not any(earlier < i < compute for i in positions(schedule, "gather", unit, "backward"))
    carried = [schedule.ops[i].unit for i in positions(schedule, "gather") if i > positions(schedule, "update")[-1]]
    assert carried[-prefetch:] == NAMES[:prefetch]


def test_without_prefetch_they_are_not():
    schedule = planned("zero3", prefetch=0, release="forward")
    uses = ends(schedule)
    late = [
        unit
        for (unit, compute, _), (_, earlier, _) in zip(uses[1:], uses)
        if any(earlier < i < compute for i in positions(schedule, "gather", unit))
    ]
    assert late == [*NAMES[1:], *NAMES[-2::-1]]


@every(4, prefetch=[0, 1, 2], strategy=["zero3", "hfsdp", "zero3x2"], microbatches=[1, 2])
def test_resident_units_are_not_gathered_again(strategy, prefetch, microbatches):
    """Units around a turning point, as many as there are buffers, go both ways in one piece."""
    found = gathers(planned(strategy, microbatches, prefetch=prefetch, release="forward"))
    expected = Counter(dict.fromkeys(NAMES, 2 * microbatches))
    expected.subtract(dict.fromkeys(NAMES[-prefetch - 1 :], microbatches))
    expected.subtract(dict.fromkeys(NAMES[: prefetch + 1], microbatches - 1))
    assert found == expected


@every(2, strategy=["zero3", "hfsdp"], prefetch=[0, 1, 2])
def test_more_units_stay_in_the_memory_that_gradients_will_take(strategy, prefetch):
    """The last of the forward, each gathered once; in no more memory."""
    room, forward = (planned(strategy, prefetch=prefetch, release=release) for release in ("room", "forward"))
    once = {unit for unit, number in gathers(room).items() if number == 1}
    assert once == set(NAMES[-len(once) :])
    assert len(once) > prefetch + 1
    assert room.arena <= forward.arena


@each_number
def test_units_kept_for_the_backward_are_gathered_once(microbatches):
    found = gathers(planned("zero3", microbatches, release="backward"))
    expected = Counter(dict.fromkeys(NAMES, microbatches))
    expected.subtract(dict.fromkeys(NAMES[:2], microbatches - 1))  # resident from one microbatch to the next
    assert found == expected


@every(3, strategy=STRATEGIES, prefetch=[0, 1, 2])
def test_no_more_units_are_resident_than_are_prefetched_and_in_use(strategy, prefetch):
    schedule = planned(strategy, 2, prefetch=prefetch)
    update = positions(schedule, "update")[-1]
    resident = {schedule.ops[i].unit for i in positions(schedule, "gather", phase="forward") if i > update}
    most = len(resident)
    for op in schedule.ops:
        if op.kind == "gather" and op.phase != "update":
            resident.add(op.unit)
        elif op.kind == "release":
            resident.remove(op.unit)
        most = max(most, len(resident))
    assert most == (prefetch + 1 if moves_parameters(strategy) else 0)


@every(2, strategy=STRATEGIES, microbatches=[1, 2])
def test_updated_parameters_are_waited_for_at_the_first_use_of_the_next_step(strategy, microbatches):
    schedule = planned(strategy, microbatches)
    update_gather = [schedule.ops[i].unit for i in positions(schedule, "gather", phase="update")]
    assert update_gather == (
        [] if not schedule.program.facts["embed"].update_gather else NAMES
    )  # in the order in which they will be used
    waits = positions(schedule, "wait", phase="update")
    assert [schedule.ops[i].unit for i in waits] == update_gather
    for i in waits:
        unit = schedule.ops[i].unit
        assert schedule.ops[i].event_index == schedule.program.events.index(Event("forward", unit, NAMES.index(unit)))
        assert schedule.ops[i].after == tuple(positions(schedule, "gather", unit, "update"))


def test_what_has_a_spread():
    spreading = {name for name in STRATEGIES if planned(name).program.facts["embed"].update_gather}
    assert spreading == {"zero1", "zero2", "hfsdp", "mixed"}


@pytest.mark.parametrize("strategy", ["zero1", "hfsdp", "zero3"])
def test_nothing_is_left_under_way_if_nothing_is_to_be_carried(strategy):
    schedule = planned(strategy, gather_at_start=False)
    update = positions(schedule, "update")[-1]
    tail = [(op.kind, op.phase) for op in schedule.ops[update + 1 :]]
    assert tail == ([("gather", "update")] * len(NAMES) + [("wait", "update")] * len(NAMES)) * (strategy != "zero3")
    assert not any(j > i for i, op in enumerate(schedule.ops) for j in op.after)


@every(2, strategy=[name for name in STRATEGIES if moves_gradients(name)], microbatches=[1, 2])
def test_reductions_run_beneath_the_next_backward(strategy, microbatches):
    """Begun when the gradient is there; added, and waited for, after one more backward."""
    schedule = planned(strategy, microbatches)
    uses = ends(schedule)
    backwards = [k for k, (_, compute, _) in enumerate(uses) if schedule.ops[compute].phase == "backward"]
    for number, k in enumerate(backwards):
        unit, compute, last = uses[k]
        reduce = next(i for i in positions(schedule, "reduce", unit, "backward") if i > compute)
        added = next(i for i in positions(schedule, "accumulate", unit, "backward") if i > reduce)
        assert schedule.ops[reduce].event_index == last
        beneath = [i for i in positions(schedule, "compute", phase="backward") if reduce < i < added]
        expected = min(1, len(NAMES) - 1 - number % len(NAMES))
        if schedule.program.facts[unit].finish:  # which takes a turn of its own
            assert min(1, expected) <= len(beneath) <= expected
        else:
            assert len(beneath) == expected


@each_number
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp", "mixed"])
def test_outer_collectives_of_gradients_run_once_a_step(strategy, microbatches):
    """In the last microbatch, each as soon as its inner sum is complete."""
    schedule = planned(strategy, microbatches)
    inner, outer = (Counter(), Counter())
    last = [i for i, event in enumerate(schedule.program.events) if event.kind == "microbatch_end"][-2:][0]
    for op in schedule.ops:
        if op.kind == "reduce":
            facts = schedule.program.facts[op.unit]
            calls = facts.finish if op.phase == "finish" else facts.reduce
            (outer if op.phase == "finish" else inner)[op.unit] += 1
            assert {call.axis for call in calls} == {"outer" if op.phase == "finish" else "inner"}
            assert op.phase == "backward" or op.event_index >= (last if microbatches > 1 else 0)
    assert inner == Counter(dict.fromkeys(NAMES, microbatches))
    assert outer == Counter(NAMES)
    first = positions(schedule, "reduce", phase="finish")[0]
    assert first < positions(schedule, "compute", phase="backward")[-2]  # while the backward still runs


@each_number
def test_a_tied_unit_is_reduced_once(microbatches):
    """Used twice in each microbatch, by itself and for the head, and reduced after the second backward."""

    def rank_fn(comm):
        policy = {"release": "forward"}
        return train(comm, "zero3", policy, loss=tied_loss, params=tied_params(), steps=1, microbatches=microbatches).schedule

    schedule = simulate(STRATEGIES["zero3"][0], rank_fn)[0]
    assert len(positions(schedule, "cast", "embed")) == 2 * microbatches
    assert len(positions(schedule, "reduce", "embed")) == microbatches
    assert gathers(schedule)["embed"] == 3 * microbatches - (microbatches - 1)  # for itself, for the head, for its backward
    assert positions(schedule, "reduce", "embed")[0] > positions(schedule, "cast", "embed")[1]


@every(2, strategy=STRATEGIES, microbatches=[1, 2])
def test_one_rank_moves_nothing(strategy, microbatches):
    mesh = fs.Mesh(dict.fromkeys(STRATEGIES[strategy][0].names, 1))

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        state = make_state(comm, strategy)
        step = fs.Scheduler(counting, policy=DebugPolicy(poison=True))(
            fs.train_step(loss_fn, make_tx(), microbatches=microbatches)
        )
        for batch in my_batches(comm, 3):
            state, _ = step(state, batch)
        return counting.calls, step.schedule

    [(calls, schedule)] = simulate(mesh, rank_fn)
    assert calls == schedule.collective_counts() == Counter()
    assert {op.kind for op in schedule.ops} == {"compute", "cast", "update"}
    facts = schedule.program.units
    assert schedule.arena == schedule.peak_nbytes == sum(each.rest for each in facts) > 0
    assert {(op.kind, op.opens.nbytes) for op in schedule.ops if op.opens} == {("cast", each.rest) for each in facts}


@pytest.mark.parametrize("sizes", [{"outer": 1, "inner": 2}, {"outer": 2, "inner": 1}])
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp", "zero3x2"])
def test_an_axis_of_one_rank_moves_nothing(strategy, sizes):
    schedule = simulate(fs.Mesh(sizes), lambda comm: train(comm, strategy, {}, steps=1, microbatches=2).schedule)[0]
    assert {call.axis for call in schedule.collective_counts()} == {axis for axis, n in sizes.items() if n > 1}


class Anywhere(GlooTransport):
    """What a rank over gloo would need, without one."""

    def __init__(self, mesh):
        self.comm = SimpleNamespace(mesh=mesh, rank=0)


def gpt_schedule(monkeypatch, strategy, *, dim, layers, vocab=256, microbatches=1, nbytes=4, **policy):
    """The schedule of a step of the GPT in ``examples``; nothing runs and nothing is allocated."""
    monkeypatch.setattr(model, "VOCAB", vocab)
    mesh = fs.Mesh(dict(zip(STRATEGIES[strategy][0].names, (8,) if STRATEGIES[strategy][0] is not HYBRID else (2, 4))))
    precision = fs.Precision(compute=torch.bfloat16 if nbytes == 2 else torch.float32, main=torch.float32)
    layout = fs.plan(model.shapes(dim, layers), mesh, STRATEGIES[strategy][1], units="layers.*", precision=precision)
    units = {unit.name: UnitState(unit.name, unit, trivial=False) for unit in layout.units}
    for unit in units.values():
        unit.gradient = Gradient(unit.layout, Anywhere(mesh), torch.device("meta"))
    order = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    chosen = fs.SchedulePolicy(**{"bucket_nbytes": 0, **policy})
    how = {"trained": True, "updated": True, "several_uses": False, "several_microbatches": microbatches > 1}
    facts = tuple(units[name].facts(**how, keep_gradients=chosen.keep_gradients) for name in order)
    return layout, compile_schedule(in_a_row(facts, microbatches), chosen)


SIZES = {"default": {"dim": 128, "layers": 4}} | {f"384 x {n}": {"dim": 384, "layers": n} for n in (6, 12, 48)}
VOCABULARIES = [256, 1000, 8192, 50257]
OVER_BOUND = {"late": 1.1}  # where gradients rest in a size that no unit in full has


@every(4, strategy=STRATEGIES, size=SIZES)
def test_the_arena_of_the_example_is_what_is_live_at_once(strategy, size, monkeypatch):
    for vocab in VOCABULARIES if size in ("default", "384 x 6") else (256, 50257):
        for microbatches, nbytes, prefetch in ((1, 4, 1), (2, 2, 2)):
            options = {"vocab": vocab, "microbatches": microbatches, "nbytes": nbytes, "prefetch": prefetch}
            layout, schedule = gpt_schedule(monkeypatch, strategy, **SIZES[size], **options)
            assert schedule.peak_nbytes <= schedule.arena <= OVER_BOUND.get(strategy, 1.05) * schedule.peak_nbytes, options
            verify(schedule)
            sent = sum(call.nbytes * count for call, count in schedule.collective_counts().items())
            loss = sum(sent_nbytes("all_reduce", -(-2 // n) * 8, n) for _, n in layout.mesh.axes)
            most = sum(
                call.nbytes * count for call, count in fs.inspect.step_traffic(layout, microbatches=microbatches).items()
            )
            assert sent <= most - loss
            assert (sent == most - loss) is not moves_parameters(strategy)  # resident units save gathers


def test_the_arena_holds_a_few_units_and_not_the_model(monkeypatch):
    """Two units in full and their gradient, with what arrives of it, whatever the number of layers."""
    arenas = [gpt_schedule(monkeypatch, "zero3", dim=384, layers=n, keep_gradients=True)[1].arena for n in (6, 12, 48)]
    assert arenas[0] == arenas[1] == arenas[2]
    _, schedule = gpt_schedule(monkeypatch, "zero3", dim=384, layers=48, keep_gradients=True)
    assert 3 * schedule.program.facts["layers.0"].gathered <= schedule.arena < 5 * schedule.program.facts["layers.0"].gathered


@pytest.mark.parametrize("layers", [6, 12, 48])
def test_gradients_at_rest_take_what_the_arena_has_to_spare(layers, monkeypatch):
    """Most of them lie where units in full were: the arena is smaller than one without them and they beside it."""
    _, schedule = gpt_schedule(monkeypatch, "zero3", dim=384, layers=layers)
    _, apart = gpt_schedule(monkeypatch, "zero3", dim=384, layers=layers, keep_gradients=True)
    resting = sum(op.opens.nbytes for op in schedule.ops if op.opens)
    assert resting == sum(facts.rest for facts in schedule.program.units)
    assert resting < schedule.arena <= apart.arena + resting - 2 * schedule.program.facts["layers.0"].rest
    assert not any(op.opens for op in apart.ops)
