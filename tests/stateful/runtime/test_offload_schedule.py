"""Offload in schedules: what is fetched when, what that costs in simulated time, and what a person sees of it."""

from dataclasses import replace

import optree
import pytest

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.inspect.drawing import draw
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.units.host_copies import HostStateBuffers
from fsharp.testing import simulate
from tests.edited_schedules import drop, edit, move, twice
from tests.gpt_like import loss_fn
from tests.ranks import on_ranks
from tests.scheduling import DP, assert_same, make_state, my_batches
from tests.stateful.runtime.test_offload import held, steps


@pytest.fixture
def schedule():
    return simulate(DP, lambda comm: steps(comm, "zero1", prefetch=1).schedule)[0]


def first(schedule, kind):
    return next(i for i, op in enumerate(schedule.ops) if op.kind == kind)


def last(schedule, kind):
    return max(i for i, op in enumerate(schedule.ops) if op.kind == kind)


def without_fetches(schedule):
    i = first(schedule, "update")
    return edit(schedule, i, after=tuple(j for j in schedule.ops[i].after if schedule.ops[j].kind != "fetch"))


def fetch_late(schedule):
    i, update = last(schedule, "fetch"), first(schedule, "update")
    return move(edit(schedule, i, event_index=schedule.ops[update].event_index), i, update)


FAULTS = {
    "fetch": (lambda s: drop(s, first(s, "fetch")), r"updates 'embed', whose state is in host memory"),
    "fetch twice": (lambda s: twice(s, first(s, "fetch")), r"fetch embed .*: is not at a fetch event of its unit, or comes"),
    "fetch of another": (lambda s: edit(s, first(s, "fetch"), unit="head"), r"fetch head .*: is not at a fetch event"),
    "fetch late": (fetch_late, r"update .*: updates 'layers.2', whose state is in"),
    "update early": (lambda s: edit(s, first(s, "update"), after=()), r"update .*: may"),
    "update before fetch": (without_fetches, r"update .*: may read state before the end of op"),
    "offload": (lambda s: drop(s, last(s, "offload")), r"fetch layers.2 .*: the state of 'layers.2' stays on the device"),
    "offload twice": (lambda s: twice(s, first(s, "offload")), r"offload embed .*: copies state that was not fetched"),
    "offload early": (lambda s: move(s, first(s, "offload"), first(s, "update")), r"offload embed .*: copies state that"),
    "offload at once": (lambda s: edit(s, first(s, "offload"), after=()), r"offload embed .*: may copy state before the end"),
    "offload of another": (lambda s: edit(s, first(s, "offload"), unit="head"), r"offload head .*: copies state"),
    "stream": (lambda s: edit(s, first(s, "fetch"), stream="gather"), r"fetch embed .*: runs on the wrong stream"),
    "phase": (lambda s: edit(s, first(s, "offload"), phase="backward"), r"offload embed .*: has phase 'backward'"),
    "memory": (lambda s: edit(s, first(s, "fetch"), memory=Memory(0, 64)), r"its memory is of the wrong size"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(schedule, fault):
    change, message = FAULTS[fault]
    fs.schedules.verify(schedule)
    with pytest.raises(ScheduleError, match=message):
        fs.schedules.verify(change(schedule))


def test_state_that_no_update_wants_is_refused():
    program = Program((UnitFacts("a", host=64),), (Event("fetch", "a"), Event("update"), Event("fetch", "a")))
    with pytest.raises(ScheduleError, match=r"no update follows for which 'a' is fetched"):
        fs.schedules.verify(compile_schedule(program))


def test_a_schedule_is_the_same_from_json_and_says_what_it_copies(schedule):
    assert fs.schedules.Schedule.from_json(schedule.to_json()) == schedule
    assert schedule.policy.offload
    assert "copied from host memory and to it" in fs.inspect.table(schedule)


@on_ranks(DP)
def test_a_step_that_leaves_its_schedule_offloads_too(comm):
    def loss(params, batch, comm):
        return (
            loss_fn(params, batch, comm)
            if len(batch["x"]) == 8
            else loss_fn({**params, "layers": params["layers"][:1]}, batch, comm)
        )

    batches = my_batches(comm, 4)
    batches[2] = my_batches(comm, 1, size=4, seed=3)[0]
    tx = fs.optim.adamw(1e-2)
    step = fs.train_step(loss, tx, donate=True)
    scheduler = fs.Scheduler(comm, offload=True)
    scheduled, kinds = scheduler(step), []
    ours, theirs = (make_state(comm, "zero3", tx=tx) for _ in range(2))
    for batch in batches:
        (ours, _), (theirs, _) = scheduled(ours, batch), step(theirs, batch, comm)
        assert_same(optree.tree_leaves(ours), optree.tree_leaves(theirs))
        kinds.append(scheduled.last_call_status().kind)
        assert all(isinstance(node.lazy, HostStateBuffers) for node in held(ours) if any(map(len, node.buffers)))
    assert kinds[:3] == ["recorded", "planned", "left"]


def test_copies_take_the_time_of_their_bytes_and_run_into_the_next_step(schedule):
    nbytes = schedule.host_copy_nbytes / 2
    for is_synchronous in (False, True):
        speeds = {"bandwidth": 1e12, "host_bandwidth": nbytes / 0.5, "update_s": 0.25}
        hardware = fs.inspect.Hardware(compute_times=(1.0, 2.0), **speeds, computes_on_host=is_synchronous)
        without = fs.inspect.predict(schedule, replace(hardware, host_bandwidth=1e30))
        timeline = fs.inspect.predict(schedule, hardware)
        assert timeline.seconds("fetch") == pytest.approx(0.5)
        assert timeline.seconds("offload") == pytest.approx(0.5)
        hidden = 0.0 if is_synchronous else 0.5  # the way down, behind the next forward
        assert timeline.step_s - without.step_s == pytest.approx(1.0 - hidden, rel=1e-3)
        lanes = {span.stream for span in timeline.spans if span.kind in ("fetch", "offload")}
        assert lanes == {"compute" if is_synchronous else "host"}


def test_a_picture_has_a_lane_for_the_host(schedule, tmp_path):
    draw(schedule, tmp_path / "offload.svg")
    assert "<!-- host -->" in (tmp_path / "offload.svg").read_text()


@on_ranks(DP)
def test_what_is_measured_is_fitted(comm):
    state = make_state(comm, "zero3", tx=fs.optim.adamw(1e-2))
    call = fs.Scheduler(comm, offload=True, bucket_nbytes=0)(fs.train_step(loss_fn, fs.optim.adamw(1e-2), donate=True))
    data = my_batches(comm, 6)
    for batch in data[:3]:
        state, _ = call(state, batch)
    trace = call.start_trace()
    for batch in data[3:]:
        state, _ = call(state, batch)
    timeline = trace.timeline(call.schedule)
    copying = [span for span in timeline.spans if span.kind in ("fetch", "offload")]
    assert {span.stream for span in copying} == {"compute"}, "on a host without streams"
    assert sum(span.seconds for span in copying) > 0
    hardware = fs.inspect.Hardware.fit(trace, call.schedule, computes_on_host=True)
    assert 0 < hardware.host_bandwidth < float("inf")


def test_a_bandwidth_that_is_none_is_refused():
    with pytest.raises(ScheduleError, match="host_bandwidth is 0, expected more than 0"):
        fs.inspect.Hardware(compute_times=(1.0, 2.0), bandwidth=1.0, host_bandwidth=0)
