"""What steps took: cut into steps and parts, made into hardware, compared with the prediction."""

import random
from dataclasses import replace

import pytest

from fsharp.errors import ScheduleError
from fsharp.inspect.hardware import predict
from fsharp.inspect.tables import compare
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Op
from fsharp.stateful.timing.trace import Trace
from tests.inspect.test_simulate_schedule import BY_HAND, HARDWARE, sequential, unit


def add_step(trace, start, stop, *rows):
    """Add a step to the trace, with rows that lack its number. Returns the number."""
    trace.steps.append((start, stop))
    number = len(trace.steps) - 1
    trace.rows += [(*row, number) for row in rows]
    return number


def follow(trace, timeline, start):
    """Record a timeline as a run does: from ``start`` on, in no particular order."""
    rows = [(*span[:5], span.start_s + start, span.stop_s + start) for span in timeline.spans]
    random.Random(start).shuffle(rows)
    return add_step(trace, start, start + timeline.step_s, *rows[::2]), rows[1::2]


def test_a_run_that_goes_as_predicted_looks_like_the_prediction():
    schedule = compile_schedule(sequential([unit("a"), unit("b"), unit("c")]), SchedulePolicy(prefetch=2))
    predicted, trace, late = predict(schedule, HARDWARE), Trace(), []
    for step in range(3):
        for number, rows in late:
            for row in rows:
                trace.rows.append((*row, number))
        late = [follow(trace, predicted, 64.0 * step)]
    measured = trace.timeline(schedule, step=1)
    assert set(measured.spans) == set(predicted.spans)
    assert (measured.step_s, measured.exposed_s, measured.overlap) == (predicted.step_s, predicted.exposed_s, predicted.overlap)
    assert measured.memory == predicted.memory
    assert trace.compute_times() == dict.fromkeys("abc", (2.0, 4.0))
    assert trace.update_time() == 0.5
    again = replace(HARDWARE, compute_times=trace.compute_times(), update_s=trace.update_time())
    assert predict(schedule, again) == predicted


def test_what_ran_inside_of_a_unit_is_taken_out_of_it():
    program = sequential([unit("a"), unit("b")], nested={"b": "a"})
    ops = (Op("compute", "a", "forward", 0, 0), Op("wait", "b", "forward", 1), Op("compute", "b", "forward", 1, 1))
    schedule = replace(BY_HAND, program=program).replace_ops(ops)
    trace = Trace()
    inner = (2, "compute", "b", "forward", "compute", 4.0, 6.0)
    wait = (1, "wait", "b", "forward", "compute", 3.0, 4.0)
    add_step(trace, 1.0, 9.0, inner, wait, (0, "compute", "a", "forward", "compute", 1.0, 9.0))
    timeline = trace.timeline(schedule)
    parts = [(span.op, span.start_s, span.stop_s) for span in timeline.spans]
    assert parts == [(0, 0, 2), (1, 2, 3), (2, 3, 5), (0, 5, 8)]
    assert (timeline.step_s, timeline.exposed_s) == (8, 1)
    assert trace.compute_times() == {"a": (5.0, 0.0), "b": (2.0, 0.0)}


def test_times_are_medians_over_uses_and_steps():
    trace = Trace()
    for step, seconds in enumerate((1.0, 9.0, 2.0)):
        start, stop = 100.0 * step, 100.0 * step + seconds
        add_step(trace, start, stop, (3, "compute", "a", "forward", "compute", start, stop))
    assert trace.compute_times() == {"a": (2.0, 0.0)}
    assert trace.timeline(BY_HAND).step_s == 2.0
    assert trace.timeline(BY_HAND, step=1).step_s == 9.0


def test_an_update_that_is_recorded_in_parts_is_their_sum_without_waits():
    """The code between two events and what the plan does at the second are rows of one op."""
    trace = Trace()
    for start, seconds in ((0.0, 2.0), (100.0, 4.0), (200.0, 3.0)):
        update = (16, "update", "", "update", "compute", start + 1, start + 1 + seconds)
        more = (16, "update", "", "update", "compute", start + 1 + seconds, start + 1.25 + seconds)
        wait = (15, "wait", "a", "backward", "compute", start + 1.5, start + 2.0)
        add_step(trace, start, start + 10 + seconds, update, more, wait)
    assert trace.update_time() == 2.75


def test_a_step_without_an_update_has_no_time_for_it():
    trace = Trace()
    add_step(trace, 0.0, 1.0, (3, "compute", "a", "forward", "compute", 0.0, 1.0))
    assert trace.update_time() == 0.0


def test_ops_without_a_measurement_take_no_time():
    trace, predicted = Trace(), predict(BY_HAND, HARDWARE)
    add_step(trace, 0.0, predicted.step_s, *[span for span in predicted.spans if span.kind not in ("release", "wait")])
    assert trace.timeline(BY_HAND).memory == predicted.memory


def test_measurements_of_another_schedule_are_refused():
    trace = Trace()
    add_step(trace, 0.0, 1.0, (2, "wait", "b", "forward", "compute", 0.0, 1.0))
    with pytest.raises(ScheduleError, match=r"(?s)another schedule.*op 2: wait b forward.*wait a forward"):
        trace.timeline(BY_HAND)
    with pytest.raises(ScheduleError, match=r"(?s)op 2: wait b forward.*1 ops"):
        trace.timeline(BY_HAND.replace_ops(BY_HAND.ops[:1]))


def test_nothing_to_show():
    trace = Trace()
    with pytest.raises(ScheduleError, match="nothing was recorded"):
        trace.timeline(BY_HAND)
    add_step(trace, 0.0, 1.0, (2, "wait", "a", "forward", "compute", 0.0, 1.0))
    with pytest.raises(ScheduleError, match="step is 3, and 1 steps have ended"):
        trace.timeline(BY_HAND, step=3)


def test_comparison_sets_both_beside_each_other():
    schedule = compile_schedule(sequential([unit("embed"), *(unit(f"layers.{i}") for i in range(3))]))
    text = compare(predict(schedule, HARDWARE), predict(schedule, replace(HARDWARE, compute_times=(4.0, 8.0))))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "predicted measured ratio"
    assert [line.split()[0] for line in lines[2:6]] == ["step", "exposed", "overlap", "peak"]
    assert "layers.* x3 forward 6.00 s 12.00 s 2.00" in lines
    assert "embed backward 4.00 s 8.00 s 2.00" in lines
    for kind in {op.kind for op in schedule.ops} - {"release"}:
        assert any(line.startswith(f"{kind} ") for line in lines), kind
