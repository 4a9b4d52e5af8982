"""Hardware.fit: what a simulated machine measures gives that machine back; noise, and what is missing."""

import math
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from fsharp.errors import ScheduleError
from fsharp.functional.comm.protocol import Call
from fsharp.inspect.hardware import Hardware, predict
from fsharp.inspect.tables import compare
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.timing.trace import Trace
from tests.inspect.test_simulate_schedule import BY_HAND, HARDWARE, sequential, unit
from tests.inspect.test_trace import add_step

GATHER, REDUCE = ("all_gather", "dp"), ("reduce_scatter", "dp")
MACHINE = Hardware(
    compute_times={"**": (0.5, 1.0), "u.1": (2.0, 3.0)},
    bandwidth={GATHER: 2000.0, REDUCE: 500.0},
    latency={GATHER: 0.25, REDUCE: 0.125},
    memory_bandwidth=1000.0,
    update_s=0.5,
)


def sized(name, nbytes, axes=("dp",)):
    """A unit whose gathers and reductions send this much along each axis, and more along those that follow."""
    sizes = [nbytes * 3**i for i in range(len(axes))]
    return unit(
        name,
        gathered=sum(sizes),
        outgoing=sum(sizes),
        gather=tuple(Call("all_gather", axis, size) for axis, size in zip(axes, sizes)),
        reduce=tuple(Call("reduce_scatter", axis, size) for axis, size in zip(axes, sizes)),
    )


UNITS = [sized(f"u.{i}", nbytes) for i, nbytes in enumerate((64, 1024, 256, 1024, 512))]
POLICIES = [
    SchedulePolicy(bucket_nbytes=0),
    SchedulePolicy(prefetch=2, bucket_nbytes=0),
    SchedulePolicy(release="forward", bucket_nbytes=0),
    SchedulePolicy(separate_groups=False, bucket_nbytes=0),
    SchedulePolicy(bucket_nbytes=1400),
    SchedulePolicy(gather_at_start=False, bucket_nbytes=0),
]


def measure(schedule, hardware, steps=3, noise=lambda seconds: seconds):
    """The trace of some steps that went as simulated, but for noise in how long collectives take."""
    timeline, trace = predict(schedule, hardware), Trace()
    for step in range(steps):
        start, rows = step * timeline.step_s, []
        for span in timeline.spans:
            stop = span.start_s + (noise(span.seconds) if span.stream != "compute" else span.seconds)
            rows.append((*span[:5], start + span.start_s, start + stop))
        add_step(trace, start, start + timeline.step_s, *rows)
    return trace


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("host", [{}, {"computes_on_host": True}])
def test_a_machine_is_found_again(policy, microbatches, host):
    schedule = compile_schedule(sequential(UNITS, microbatches), policy)
    machine = replace(MACHINE, **host)
    found = Hardware.fit(measure(schedule, machine), schedule, **host)
    assert found.latency == pytest.approx(machine.latency)
    assert found.bandwidth == pytest.approx(machine.bandwidth)
    assert found.memory_bandwidth == pytest.approx(machine.memory_bandwidth)
    assert found.compute_times == {
        u.name: pytest.approx(machine.compute_times.get(u.name, machine.compute_times["**"])) for u in UNITS
    }
    assert found.update_s == pytest.approx(machine.update_s)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_collective_begins_when_those_before_it_on_its_queue_have_ended(policy):
    """A host measures from when it issues it; and of several that are one, the first may be seen to end before the others."""
    schedule = compile_schedule(sequential(UNITS), policy)
    trace = measure(schedule, MACHINE, steps=4)
    is_one_queue = not policy.separate_groups
    sent = {(row[5], row[6], is_one_queue or row[4]) for row in trace.rows if row[1] in ("gather", "reduce")}
    ends = {(stop, queue): start for start, stop, queue in sent}
    seen, rows = set(), []
    for row in trace.rows:
        start, stop = row[5:7]
        if row[1] in ("gather", "reduce"):
            queue = is_one_queue or row[4]
            start = ends.get((start, queue), start)
            stop = stop if (row[6], queue) in seen or schedule.ops[row[0]].bucket < 0 else (row[5] + stop) / 2
            seen.add((row[6], queue))
        rows.append((*row[:5], start, stop, row[7]))
    assert rows != trace.rows
    trace.rows = rows
    found = Hardware.fit(trace, schedule)
    assert found.latency == pytest.approx(MACHINE.latency)
    assert found.bandwidth == pytest.approx(MACHINE.bandwidth)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("contention", [0.5, 1.0])
def test_what_is_in_each_others_way_is_told_apart(policy, contention):
    schedule = compile_schedule(sequential(UNITS), policy)
    machine = replace(MACHINE, computes_on_host=True, contention=contention)
    found = Hardware.fit(measure(schedule, machine, steps=8), schedule, computes_on_host=True, contention=contention)
    assert found.compute_times == {
        u.name: pytest.approx(machine.compute_times.get(u.name, machine.compute_times["**"])) for u in UNITS
    }
    assert found.latency == pytest.approx(machine.latency)
    assert found.bandwidth == pytest.approx(machine.bandwidth)
    assert found.update_s == pytest.approx(machine.update_s)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


def test_a_host_that_begins_collectives_is_busy():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    machine = replace(MACHINE, computes_on_host=True, issue_s=0.25)
    found = Hardware.fit(measure(schedule, machine, steps=8), schedule, computes_on_host=True)
    assert found.issue_s == pytest.approx(0.25)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


def test_the_bytes_of_an_issue_are_told_from_what_each_issue_costs():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    machine = replace(MACHINE, computes_on_host=True, issue_s=0.25, issue_bandwidth=4096.0)
    assert predict(schedule, machine).step_s > predict(schedule, replace(machine, issue_bandwidth=math.inf)).step_s
    found = Hardware.fit(measure(schedule, machine, steps=8), schedule, computes_on_host=True)
    assert (found.issue_s, found.issue_bandwidth) == (pytest.approx(0.25), pytest.approx(4096.0))
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


def cast(name, nbytes):
    """A unit whose gradients travel in a dtype of half the bytes."""
    return replace(sized(name, nbytes), reduce_cast=2 * nbytes)


@pytest.mark.parametrize("host", [{}, {"computes_on_host": True}, {"computes_on_host": True, "contention": 1.0}])
def test_casts_in_sums_are_told_from_bytes_by_units_of_both_kinds(host):
    both = [*UNITS, cast("c.0", 256), cast("c.1", 64)]
    schedule = compile_schedule(sequential(both), SchedulePolicy(bucket_nbytes=0))
    machine = replace(MACHINE, **host, cast_bandwidth=300.0)
    assert predict(schedule, machine).step_s > predict(schedule, replace(machine, cast_bandwidth=math.inf)).step_s + 0.5
    found = Hardware.fit(measure(schedule, machine, steps=8), schedule, **host)
    assert found.cast_bandwidth == pytest.approx(300.0)
    assert found.bandwidth == pytest.approx(machine.bandwidth)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if not policy.bucket_nbytes])
def test_if_all_gradients_are_cast_the_bandwidth_has_the_time_of_casts(policy):
    schedule = compile_schedule(sequential([cast(f"c.{i}", nbytes) for i, nbytes in enumerate((64, 512, 256))]), policy)
    machine = replace(MACHINE, compute_times=(0.5, 1.0), cast_bandwidth=300.0)
    found = Hardware.fit(measure(schedule, machine), schedule)
    assert found.cast_bandwidth == math.inf
    assert 1 / found.bandwidth[REDUCE] == pytest.approx(1 / 500 + 2 / 300)
    assert found.latency == pytest.approx(machine.latency)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_hosts_share_is_found_with_a_step_that_sends_nothing(share):
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    nothing = [replace(each, gathered=0, gather=(), outgoing=0, reduce=()) for each in UNITS]
    machine = replace(MACHINE, computes_on_host=True, contention=1.0, host_share=share)
    unsent = compile_schedule(sequential(nothing), SchedulePolicy(bucket_nbytes=0))
    trace = measure(schedule, machine, steps=8)
    found = Hardware.fit(trace, schedule, computes_on_host=True, contention=1.0, alone=measure(unsent, machine))
    assert found.host_share == pytest.approx(share, abs=0.02)
    assert found.latency == pytest.approx(machine.latency, rel=0.05)
    assert found.bandwidth == pytest.approx(machine.bandwidth, rel=0.05)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s, rel=0.02)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_collectives_that_took_long_as_other_ranks_computed_do_not_make_the_step_longer(factor):
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    nothing = [replace(each, gathered=0, gather=(), outgoing=0, reduce=()) for each in UNITS]
    machine = replace(MACHINE, computes_on_host=True, contention=1.0)
    unsent = compile_schedule(sequential(nothing), SchedulePolicy(bucket_nbytes=0))
    trace = measure(schedule, machine, steps=8, noise=lambda seconds: factor * seconds)
    known = {"computes_on_host": True, "contention": 1.0}
    expected = predict(schedule, machine).step_s
    assert predict(schedule, Hardware.fit(trace, schedule, **known)).step_s != pytest.approx(expected, rel=0.05)
    found = Hardware.fit(trace, schedule, **known, alone=measure(unsent, machine))
    assert predict(schedule, found).step_s == pytest.approx(expected, rel=0.02)
    assert found.compute_times == {
        u.name: pytest.approx(machine.compute_times.get(u.name, machine.compute_times["**"])) for u in UNITS
    }


def test_what_the_host_does_in_front_of_an_op_is_a_part_of_the_op():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(prefetch=0, gather_at_start=False, bucket_nbytes=0))
    machine = replace(MACHINE, computes_on_host=True)
    trace = measure(schedule, machine, steps=2)
    late = [i for i, op in enumerate(schedule.ops) if (op.kind, op.unit, op.phase) == ("compute", "u.1", "forward")]
    trace.rows = [(*row[:5], row[5] + 0.125, *row[6:]) if row[0] in late and row[1] == "compute" else row for row in trace.rows]
    assert Hardware.fit(trace, schedule, computes_on_host=True).compute_times["u.1"] == pytest.approx(
        machine.compute_times["u.1"]
    )


def test_noise_moves_it_by_less_than_itself():
    schedule = compile_schedule(
        sequential([*UNITS, *(sized(f"v.{i}", 768) for i in range(6))]), SchedulePolicy(prefetch=0, bucket_nbytes=0)
    )
    chance = random.Random(1)

    def noise(seconds):
        return seconds * chance.uniform(0.9, 1.1) * (10 if chance.random() < 0.05 else 1)

    found = Hardware.fit(measure(schedule, MACHINE, steps=25, noise=noise), schedule)
    assert found.latency == pytest.approx(MACHINE.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(MACHINE.bandwidth, rel=0.1)


def test_a_latency_is_never_negative_and_a_byte_never_saves_time():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(prefetch=0, bucket_nbytes=0))
    no_latency = replace(MACHINE, latency=0.0)
    found = Hardware.fit(measure(schedule, no_latency, noise=lambda s: s**1.5), schedule)
    assert found.latency == pytest.approx({GATHER: 0.0, REDUCE: 0.0})
    same = replace(MACHINE, latency=1.0, bandwidth=1e12)
    found = Hardware.fit(measure(schedule, same, noise=lambda s: 1 / s), schedule)
    assert all(seconds > 0 for seconds in found.latency.values())
    assert all(rate > 1e9 for rate in found.bandwidth.values())


def test_axes_are_told_apart_where_some_units_use_one_alone():
    units = [sized("u.0", 64), sized("u.1", 512), sized("u.2", 64, ("dp", "tp")), sized("u.3", 700, ("dp", "tp"))]
    schedule = compile_schedule(sequential(units), SchedulePolicy(bucket_nbytes=0))
    machine = replace(
        HARDWARE,
        bandwidth={
            (op, axis): 100.0 * (2 if axis == "tp" else 1) for op in ("all_gather", "reduce_scatter") for axis in ("dp", "tp")
        },
        latency={
            (op, axis): 0.5 * (2 if axis == "tp" else 1) for op in ("all_gather", "reduce_scatter") for axis in ("dp", "tp")
        },
    )
    found = Hardware.fit(measure(schedule, machine), schedule)
    assert found.latency == pytest.approx(machine.latency)
    assert found.bandwidth == pytest.approx(machine.bandwidth)


def test_axes_that_always_go_together_get_one_number_that_predicts_the_same():
    schedule = compile_schedule(
        sequential([sized(f"u.{i}", 64 * 2**i, ("dp", "tp")) for i in range(3)]), SchedulePolicy(bucket_nbytes=0)
    )
    machine = replace(HARDWARE, latency={"dp": 0.5, "tp": 0.25}, bandwidth={"dp": 100.0, "tp": 400.0})
    found = Hardware.fit(measure(schedule, machine), schedule)
    assert found.latency["all_gather", "dp"] == found.latency["all_gather", "tp"] == pytest.approx(0.375)
    assert predict(schedule, found).step_s == pytest.approx(predict(schedule, machine).step_s)


def test_medians_over_steps_come_first():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(gather_at_start=False, bucket_nbytes=0))
    trace = measure(schedule, MACHINE, steps=5)
    begin = trace.steps[2][0]
    trace.rows = [
        (*row[:5], begin + 9 * (row[5] - begin), begin + 9 * (row[6] - begin), 2) if row[7] == 2 else row for row in trace.rows
    ]
    late = 8 * (trace.steps[3][0] - begin)
    trace.rows = [(*row[:5], row[5] + late, row[6] + late, row[7]) if row[7] > 2 else row for row in trace.rows]
    trace.steps = [(a + late * (i > 2), b + late * (i >= 2)) for i, (a, b) in enumerate(trace.steps)]
    assert all(a[1] <= b[0] for a, b in pairwise(trace.steps))
    found = Hardware.fit(trace, schedule)
    assert found.latency == pytest.approx(MACHINE.latency)
    assert found.compute_times["u.1"] == pytest.approx((2.0, 3.0))
    assert found.update_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("gone", "named"), [(("gather",), "gather"), (("reduce", "update"), "update or reduce"), (("compute",), "compute")]
)
def test_what_was_not_measured_is_named(gone, named):
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    trace = measure(schedule, MACHINE)
    trace.rows = [row for row in trace.rows if row[1] not in gone]
    with pytest.raises(ScheduleError, match=f"no measurement of {named}, and the schedule has some"):
        Hardware.fit(trace, schedule)


def test_nothing_has_to_be_measured_that_the_schedule_does_not_have():
    alone = [replace(each, gathered=0, gather=(), outgoing=0, reduce=()) for each in UNITS]
    schedule = compile_schedule(sequential(alone, tail=()), SchedulePolicy(bucket_nbytes=0))
    found = Hardware.fit(measure(schedule, MACHINE), schedule)
    assert (found.update_s, found.issue_s) == (0.0, 0.0)
    assert predict(schedule, found).step_s == predict(schedule, MACHINE).step_s


def test_equal_sizes_leave_latency_and_bandwidth_open():
    schedule = compile_schedule(sequential([sized("a", 64), sized("b", 64)]), SchedulePolicy(bucket_nbytes=0))
    with pytest.raises(ScheduleError, match=r"(?s)cannot be told apart.*all_gather dp +64 bytes.*differ in size"):
        Hardware.fit(measure(schedule, MACHINE.__class__(compute_times=(1.0, 2.0), bandwidth=100.0)), schedule)


def test_a_trace_of_another_schedule_is_refused():
    schedule = compile_schedule(sequential(UNITS), SchedulePolicy(bucket_nbytes=0))
    with pytest.raises(ScheduleError, match=r"(?s)Hardware\.fit\(\).*another schedule"):
        Hardware.fit(measure(schedule, MACHINE), BY_HAND)


def num_opcodes(call):
    counter = Counter()

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        counter.update([event])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counter["opcode"]


def test_tables_and_fits_of_twice_as_many_units_take_twice_as_long():
    def taken(num_units):
        units = [sized(f"u{i}x", 64 * (1 + i % 3)) for i in range(num_units)]
        schedule, trace = compile_schedule(sequential(units), SchedulePolicy(bucket_nbytes=0)), Trace()
        timeline = predict(schedule, HARDWARE)
        rows = [(*span[:5], span.start_s + 0.1 * i, span.stop_s + 0.1 * i) for i, span in enumerate(timeline.spans)]
        add_step(trace, 0.0, timeline.step_s + 0.1 * len(rows), *rows)  # with gaps
        compared = num_opcodes(lambda: compare(timeline, timeline))
        return {"compare": compared, "fit": num_opcodes(lambda: Hardware.fit(trace, schedule))}

    few, many = taken(40), taken(80)
    assert all(many[name] < 2.3 * few[name] for name in few), (few, many)
