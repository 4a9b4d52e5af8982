"""Times on hardware that nobody has: hand-made schedules with times worked out by hand, and laws that hold for any."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsharp.errors import PatternError, ScheduleError
from fsharp.functional.comm.protocol import Call
from fsharp.inspect.drawing import timeline_in_order
from fsharp.inspect.hardware import Hardware, predict
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule

GATHER, REDUCE = (Call("all_gather", "dp", 100),), (Call("reduce_scatter", "dp", 100),)
HARDWARE = Hardware(compute_times=(2.0, 4.0), bandwidth=100.0, memory_bandwidth=200.0, update_s=0.5)


def unit(name, **changes):
    return replace(UnitFacts(name, 100, 100, 0, True, GATHER, REDUCE), **changes)


def sequential(units, microbatches=1, *, nested=(), tail=("reduce", "update")):
    """Units one after the other, forth and back; those in ``nested`` are used inside of the one before them."""
    events, use = [], 0
    for _ in range(microbatches):
        for direction in ("forward", "backward"):
            order = [[u] for u in units if u.name not in nested]
            for u in units:
                if u.name in nested:
                    order[[o[0].name for o in order].index(nested[u.name])].append(u)
            numbers = {u.name: use + i for i, u in enumerate(units)}
            for group in order if direction == "forward" else reversed(order):
                for u in group:
                    events.append(Event(direction, u.name, numbers[u.name]))
                for u in reversed(group):
                    is_bare = direction == "backward" and not u.trainable
                    events.append(Event(f"{direction}_end", u.name, numbers[u.name], is_bare))
        use += len(units)
        events.append(Event("microbatch_end"))
    return Program(tuple(units), tuple(events) + tuple(Event(kind) for kind in tail))


TWO = sequential([unit("a"), unit("b")])
A, B, C, D = (Memory(100 * i, 100) for i in range(4))
BY_HAND = Schedule(
    TWO,
    SchedulePolicy(),
    (
        Op("gather", "a", "forward", 0, -1, "gather", A),
        Op("gather", "b", "forward", 0, -1, "gather", B),
        Op("wait", "a", "forward", 0, after=(0,)),
        Op("compute", "a", "forward", 0, 0),
        Op("wait", "b", "forward", 2, after=(1,)),
        Op("compute", "b", "forward", 2, 1),
        Op("compute", "b", "backward", 4, 1),
        Op("cast", "b", "backward", 5, 1, memory=C),
        Op("reduce", "b", "backward", 5, -1, "reduce", C, (7,)),
        Op("release", "b", "backward", 5, memory=B),
        Op("compute", "a", "backward", 6, 0),
        Op("cast", "a", "backward", 7, 0, memory=D),
        Op("reduce", "a", "backward", 7, -1, "reduce", D, (11,)),
        Op("release", "a", "backward", 7, memory=A),
        Op("accumulate", "b", "backward", 8, -1, "reduce", C, (8,)),
        Op("accumulate", "a", "backward", 8, -1, "reduce", D, (12,)),
        Op("update", "", "update", 10, after=(15,)),
    ),
    arena=400,
    peak_nbytes=400,
)


def times(timeline, kind):
    return [(s.unit, s.start_s, s.stop_s) for s in timeline.spans if s.kind == kind and s.seconds]


def test_second_gather_and_first_reduce_hide_the_others_do_not():
    timeline = predict(BY_HAND, HARDWARE)
    assert times(timeline, "gather") == [("a", 0, 1), ("b", 1, 2)]
    assert times(timeline, "compute") == [("a", 1, 3), ("b", 3, 5), ("b", 5, 9), ("a", 9.5, 13.5)]
    assert times(timeline, "cast") == [("b", 9, 9.5), ("a", 13.5, 14)]
    assert times(timeline, "reduce") == [("b", 9.5, 10.5), ("a", 14, 15)]
    assert times(timeline, "accumulate") == [("b", 15, 15.5), ("a", 15.5, 16)]
    assert times(timeline, "update") == [("", 16, 16.5)]
    assert times(timeline, "wait") == [("a", 0, 1), ("", 14, 16)]
    assert (timeline.step_s, timeline.exposed_s, timeline.overlap) == (16.5, 3, 0.5)


def test_slow_link_exposes_the_second_gather():
    timeline = predict(BY_HAND, replace(HARDWARE, bandwidth=25.0))
    assert times(timeline, "gather") == [("a", 0, 4), ("b", 4, 8)]
    assert times(timeline, "wait")[:2] == [("a", 0, 4), ("b", 6, 8)]
    assert times(timeline, "reduce") == [("b", 14.5, 18.5), ("a", 19, 23)]
    assert timeline.exposed_s == 4 + 2 + (24 - 19)


def test_synchronous_host_adds_gradients_itself_as_they_arrive():
    timeline = predict(BY_HAND, replace(HARDWARE, computes_on_host=True))
    assert times(timeline, "accumulate") == [("b", 14, 14.5), ("a", 15, 15.5)]
    assert {span.stream for span in timeline.spans if span.kind == "accumulate"} == {"compute"}
    assert times(timeline, "wait") == [("a", 0, 1), ("a", 14.5, 15)]
    assert (timeline.step_s, timeline.exposed_s) == (16, 1.5)


@pytest.mark.parametrize(("is_synchronous", "start"), [(False, 1), (True, 3)])
def test_synchronous_host_issues_nothing_while_it_computes(is_synchronous, start):
    ops = [*BY_HAND.ops[:1], *(replace(op, after=(0,) if op.kind == "wait" else ()) for op in BY_HAND.ops[2:4])]
    ops += [replace(BY_HAND.ops[1], event_index=1), replace(BY_HAND.ops[4], after=(3,)), BY_HAND.ops[5]]
    timeline = predict(BY_HAND.replace_ops(ops), replace(HARDWARE, computes_on_host=is_synchronous))
    assert times(timeline, "gather") == [("a", 0, 1), ("b", start, start + 1)]


def test_host_and_collectives_on_one_core_take_as_long_as_one_after_the_other():
    timeline = predict(BY_HAND, replace(HARDWARE, computes_on_host=True, contention=1.0))
    assert times(timeline, "gather") == [("a", 0, 1), ("b", 1, 3)]
    assert times(timeline, "compute") == [("a", 1, 4), ("b", 4, 6), ("b", 6, 10), ("a", 10.5, 15.5)]
    assert times(timeline, "reduce") == [("b", 10.5, 12.5), ("a", 16, 17.5)]
    assert times(timeline, "accumulate") == [("b", 16, 17), ("a", 17.5, 18)]
    assert (timeline.step_s, timeline.exposed_s) == (14.5 + 4, 1.5)


def test_half_a_contention_costs_a_quarter_of_the_speed_while_both_work():
    timeline = predict(BY_HAND, replace(HARDWARE, computes_on_host=True, contention=0.5))
    assert times(timeline, "compute")[0] == ("a", 1, pytest.approx(1 + 4 / 3 + 1))
    assert times(timeline, "gather")[1] == ("b", 1, pytest.approx(1 + 4 / 3))


def test_an_all_reduce_without_numbers_is_a_reduce_scatter_and_an_all_gather():
    reduce, gather, both = (Call(op, "dp", n) for op, n in (("reduce_scatter", 50), ("all_gather", 50), ("all_reduce", 100)))
    halves = ("reduce_scatter", "dp"), ("all_gather", "dp")
    numbers = {
        "bandwidth": dict(zip(halves, (10.0, 50.0), strict=True)),
        "latency": dict(zip(halves, (0.5, 0.25), strict=True)),
    }
    hardware = replace(HARDWARE, **numbers)
    assert hardware.collective_s([both]) == pytest.approx(hardware.collective_s([reduce]) + hardware.collective_s([gather]))
    assert hardware.collective_s([Call("all_to_all", "dp", 50)]) == hardware.collective_s([reduce])
    own = {name: {**value, ("all_reduce", "dp"): 1.0} for name, value in numbers.items()}
    assert replace(HARDWARE, **own).collective_s([both]) == 101.0


@pytest.mark.parametrize(("is_synchronous", "second"), [(False, (1.5, 3.0)), (True, (1.0, 2.5))])
def test_latency_passes_in_the_queue_of_a_synchronous_host(is_synchronous, second):
    ops = [BY_HAND.ops[0], replace(BY_HAND.ops[1], after=(), event_index=0), *BY_HAND.ops[2:4]]
    schedule = BY_HAND.replace_ops([replace(op, after=(0,) if op.kind == "wait" else ()) for op in ops])
    timeline = predict(schedule, replace(HARDWARE, computes_on_host=is_synchronous, latency=0.5))
    assert times(timeline, "gather") == [("a", 0, 1.5), ("b", *second)]


def test_host_is_busy_with_what_it_begins():
    timeline = predict(BY_HAND, replace(HARDWARE, computes_on_host=True, issue_s=0.75))
    assert times(timeline, "gather") == [("a", 0, 1), ("b", 1, 2)]
    assert times(timeline, "compute")[0] == ("a", 1.5, 3.5)
    assert times(timeline, "reduce")[0] == ("b", 10, 11)
    assert times(timeline, "compute")[3] == ("a", 10.75, 14.75)


def test_gradients_in_another_dtype_are_cast_where_they_are_added():
    units = [replace(each, reduce_cast=50) for each in TWO.units]
    timeline = predict(replace(BY_HAND, program=replace(TWO, units=tuple(units))), replace(HARDWARE, cast_bandwidth=100.0))
    assert times(timeline, "reduce") == [("b", 9.5, 11), ("a", 14, 15.5)]


def test_gradients_at_rest_in_another_dtype_are_cast_where_they_are_issued():
    def timeline(finish_cast, **options):
        late = unit("a", outgoing=0, finishing=100, reduce=(), finish=REDUCE, finish_cast=finish_cast)
        hardware = replace(HARDWARE, computes_on_host=True, cast_bandwidth=100.0, **options)
        return predict(compile_schedule(sequential([late]), SchedulePolicy(bucket_nbytes=0), has_streams=False), hardware)

    plain, cast = timeline(0), timeline(50)
    assert cast.seconds("reduce") - plain.seconds("reduce") == pytest.approx(50 / 100)
    assert cast.step_s - plain.step_s == pytest.approx(50 / 100)  # the host casts while the collective is under way
    slow = {"memory_bandwidth": 10.0, "issue_s": 1e-9}
    assert timeline(50, **slow).step_s - timeline(0, **slow).step_s >= 50 / 10 - 1  # a second of it while gradients travel


def test_a_gradient_is_cast_and_added_without_the_scratch_of_its_reduction():
    """The arena's memory of a gradient holds scratch too, which no cast fills and no accumulate reads."""
    program = replace(TWO, units=tuple(replace(each, gradient=40, rest=20) for each in TWO.units))
    timeline = predict(replace(BY_HAND, program=program), HARDWARE)
    assert times(timeline, "cast")[0] == ("b", 9, 9.2)
    assert [stop - start for _, start, stop in times(timeline, "accumulate")] == pytest.approx([0.1, 0.1])


def test_an_accumulate_takes_no_time_if_the_reduction_has_written_its_sum_where_gradients_rest():
    ops = [replace(op, opens=Memory(400, 100)) if (op.kind, op.unit) == ("reduce", "a") else op for op in BY_HAND.ops]
    timeline = predict(BY_HAND.replace_ops(ops), HARDWARE)
    assert [unit for unit, _, _ in times(timeline, "accumulate")] == ["b"]
    again = [*ops[:16], replace(ops[12], opens=None), *ops[14:]]
    assert [unit for unit, _, _ in times(predict(BY_HAND.replace_ops(again), HARDWARE), "accumulate")] == ["b", "b", "a"]


def test_what_is_handed_on_is_in_the_way_of_the_next_step():
    ops = (
        Op("compute", "a", "forward", 0, 0),
        Op("wait", "a", "forward", 2, after=(5,)),
        Op("wait", "b", "forward", 2, after=(6,)),
        Op("compute", "b", "forward", 2, 1),
        Op("update", "", "update", 10),
        Op("gather", "a", "forward", 10, -1, "gather", A, (4,)),
        Op("gather", "b", "forward", 10, -1, "gather", B, (4,)),
    )
    timeline = predict(Schedule(TWO, SchedulePolicy(), ops, 100, 100), replace(HARDWARE, computes_on_host=True, contention=1.0))
    assert times(timeline, "compute") == [("a", 0, 4), ("b", 4, 6)]
    assert times(timeline, "gather") == [("a", 6.5, 8.5), ("b", 8.5, 10.5)]
    assert (timeline.step_s, timeline.exposed_s) == (6.5, 0)


def test_memory_is_live_from_the_start_of_what_fills_it_to_the_end_of_what_frees_it():
    timeline = predict(BY_HAND, HARDWARE)
    assert timeline.memory == (*((0, 100), (1, 200), (9, 300), (9.5, 200), (13.5, 300), (14, 200), (15.5, 100), (16, 0)),)
    assert timeline.peak_nbytes == 300


def test_gather_at_the_end_delays_the_next_step_alone():
    ops = (
        Op("wait", "a", "forward", 0, after=(4,)),
        Op("compute", "a", "forward", 0, 0),
        Op("release", "a", "forward", 1, memory=A),
        Op("update", "", "update", 10),
        Op("gather", "a", "forward", 10, -1, "gather", A, (2, 3)),
    )
    timeline = predict(Schedule(TWO, SchedulePolicy(), ops, 100, 100), HARDWARE)
    assert (timeline.step_s, timeline.exposed_s, timeline.overlap) == (3.5, 1, 0)
    (gather,) = (span for span in timeline.spans if span.kind == "gather")
    assert (gather.start_s, gather.stop_s) == (3.5, 4.5)
    assert list(timeline.wrap_span_into_step(gather)) == [(0, 1)]
    assert timeline.memory == ((0, 100), (3, 0))


def test_step_without_update_ends_with_its_last_reduction():
    timeline = predict(BY_HAND.replace_ops(BY_HAND.ops[:-1]), HARDWARE)
    assert timeline.step_s == 16
    assert times(timeline, "wait")[-1] == ("a", 14, 16)


def gathers(**policy):
    ops = [Op("gather", name, "forward", 0, -1, "gather", where, bucket=0) for name, where in (("a", A), ("b", B))]
    ops += [Op("reduce", "a", "backward", 0, -1, "reduce", C)]
    ops += [Op("wait", name, "forward", 0, after=(i,)) for i, name in enumerate("ab")]
    return Schedule(TWO, SchedulePolicy(**policy), tuple(ops), 300, 300)


def test_a_bucket_is_one_collective():
    timeline = predict(gathers(), replace(HARDWARE, latency=0.5))
    assert times(timeline, "gather") == [("a", 0, 2.5), ("b", 0, 2.5)]
    assert times(timeline, "wait")[0] == ("a", 0, 2.5)
    assert timeline.seconds("gather") == 2.5
    assert timeline.seconds("gather", unit="a") == 2.5


def test_collectives_of_one_group_queue():
    assert times(predict(gathers(), HARDWARE), "reduce") == [("a", 0, 1)]
    assert times(predict(gathers(separate_groups=False), HARDWARE), "reduce") == [("a", 2, 3)]


def test_axes_and_units_of_their_own():
    both = unit("a", gather=(Call("all_gather", "dp", 100), Call("all_gather", "tp", 100)))
    ops = (Op("gather", "a", "forward", 0, -1, "gather"), Op("compute", "a", "forward", 0), Op("compute", "b", "backward", 0))
    schedule = Schedule(replace(TWO, units=(both, unit("b"))), SchedulePolicy(), ops, 0, 0)
    hardware = Hardware(
        compute_times={"**": (1.0, 2.0), "b": (3.0, 4.0)}, bandwidth={"dp": 100.0, "tp": 200.0}, latency={"dp": 0.25, "tp": 0.0}
    )
    timeline = predict(schedule, hardware)
    assert times(timeline, "gather") == [("a", 0, 1.75)]
    assert times(timeline, "compute") == [("a", 0, 1), ("b", 1, 5)]


def test_collectives_with_numbers_of_their_own():
    hardware = replace(
        HARDWARE, bandwidth={"dp": 100.0, ("reduce_scatter", "dp"): 50.0}, latency={"dp": 0.0, GATHER[0][:2]: 0.5}
    )
    timeline = predict(BY_HAND, hardware)
    assert {stop - start for _, start, stop in times(timeline, "gather")} == {1.5}
    assert {stop - start for _, start, stop in times(timeline, "reduce")} == {2.0}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"bandwidth": {"tp": 1.0}}, ScheduleError, "no bandwidth for axis 'dp'"),
        ({"bandwidth": {("all_gather", "dp"): 1.0}}, ScheduleError, r"(?s)no bandwidth for axis 'dp'.*reduce_scatter"),
        ({"latency": {"tp": 1.0}}, ScheduleError, "no latency for axis 'dp'"),
        ({"compute_times": {"layers.*": (1.0, 1.0)}}, PatternError, r"'layers\.\*' matches nothing"),
        ({"compute_times": {"a": (1.0, 1.0)}}, PatternError, "no pattern selects 'b'"),
    ],
)
def test_what_the_hardware_does_not_say(change, error, match):
    with pytest.raises(error, match=match):
        predict(BY_HAND, replace(HARDWARE, **change))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bandwidth": 0.0}, "bandwidth is 0.0, expected more than 0"),
        ({"bandwidth": {"dp": "1e9"}}, "bandwidth is .*1e9.*, expected more than 0"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth is -1.0"),
        ({"latency": {"dp": -1e-6}}, "latency is {'dp': -1e-06}, expected at least 0"),
        ({"update_s": math.inf}, "update_s is inf"),
        ({"contention": 1.5, "computes_on_host": True}, "contention is 1.5, expected 0 to 1"),
        ({"contention": 0.5}, "contention is 0.5, which needs computes_on_host=True"),
        ({"host_share": -0.5}, "host_share is -0.5, expected 0 to 1"),
        ({"issue_s": 0.5}, "issue_s is 0.5, which needs computes_on_host=True"),
        ({"issue_bandwidth": 1.0}, "issue_bandwidth is 1.0, which needs computes_on_host=True"),
        ({"issue_s": -0.5, "computes_on_host": True}, "issue_s is -0.5, expected at least 0"),
    ],
)
def test_numbers_out_of_range(change, match):
    with pytest.raises(ScheduleError, match=match):
        replace(HARDWARE, **change)


positive = st.integers(1, 400)


@st.composite
def schedules(draw):
    units = []
    for i in range(draw(st.integers(1, 5))):
        size, is_sharded = 64 * draw(st.integers(1, 9)), draw(st.booleans())
        call = Call("all_gather", draw(st.sampled_from(["dp", "tp"])), size)
        trainable = draw(st.booleans())
        facts = UnitFacts(f"u.{i}", size if is_sharded else 0, trainable=trainable, gather=(call,) if is_sharded else ())
        if trainable and draw(st.booleans()):
            facts = replace(facts, outgoing=size, reduce=(call._replace(op="reduce_scatter"),))
        if trainable and draw(st.booleans()):
            facts = replace(facts, finishing=size, finish=(call._replace(op="reduce_scatter"),), update_gather=(call,))
        units.append(facts)
    nested = {units[1].name: units[0].name} if len(units) > 1 and draw(st.booleans()) else {}
    program = sequential(units, draw(st.integers(1, 3)), nested=nested, tail=draw(st.sampled_from([("reduce", "update"), ()])))
    policy = SchedulePolicy(
        prefetch=draw(st.integers(0, 3)),
        release=draw(st.sampled_from(["forward", "backward"])),
        bucket_nbytes=draw(st.sampled_from([0, 512])),
        gather_at_start=draw(st.booleans()),
        separate_groups=draw(st.booleans()),
    )
    return compile_schedule(program, policy)


hardwares = st.builds(
    Hardware,
    compute_times=st.tuples(positive, positive).map(lambda pair: (float(pair[0]), float(pair[1]))),
    bandwidth=st.fixed_dictionaries({"dp": positive.map(float), "tp": positive.map(float)}),
    latency=st.integers(0, 3).map(float),
    memory_bandwidth=st.sampled_from([10.0, 100.0, math.inf]),
    update_s=st.integers(0, 9).map(float),
)
hardwares |= st.builds(
    replace,
    hardwares,
    computes_on_host=st.just(True),
    contention=st.sampled_from([0.0, 0.5, 1.0]),
    host_share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)


@given(schedules(), hardwares)
def test_every_timeline_follows_its_schedule(schedule, hardware):
    timeline = predict(schedule, hardware)
    ops, spans = schedule.ops, timeline.spans
    assert {span.op for span in spans} == set(range(len(ops)))
    own = {s.op: s for s in spans if s.kind == ops[s.op].kind}
    for i, op in enumerate(ops):
        for j in op.after:
            carried = timeline.step_s if j >= i else 0.0
            assert own[j].stop_s - carried <= (own[i].stop_s if op.kind == "wait" else own[i].start_s) + 1e-6
    for stream in ("compute", "gather", "reduce"):
        lane = [s for s in spans if s.stream == stream]
        in_order_of_issue = [own[i].start_s for i in sorted(s.op for s in own.values() if s.stream == stream)]
        assert in_order_of_issue == sorted(in_order_of_issue)
        busy = sum(b - a for a, b in {(s.start_s, s.stop_s) for s in lane})
        assert busy <= timeline.step_s * (1 + 1e-9)
    working = sum(s.seconds for s in spans if s.stream == "compute" and s.kind != "wait")
    assert timeline.exposed_s == pytest.approx(timeline.step_s - working)
    assert 0 <= timeline.overlap <= 1 + 1e-9
    assert timeline.peak_nbytes <= schedule.arena


@given(
    schedules(), hardwares, st.sampled_from(["bandwidth", "latency", "memory_bandwidth", "update_s", "compute_times"]), positive
)
def test_better_hardware_is_never_slower(schedule, hardware, what, factor):
    better = {
        "bandwidth": {axis: value * factor for axis, value in hardware.bandwidth.items()},
        "latency": hardware.latency / factor,
        "memory_bandwidth": hardware.memory_bandwidth * factor,
        "update_s": hardware.update_s / factor,
        "compute_times": tuple(seconds / factor for seconds in hardware.compute_times),
    }
    faster = predict(schedule, replace(hardware, **{what: better[what]}))
    assert faster.step_s <= predict(schedule, hardware).step_s * (1 + 1e-9)


@given(schedules(), hardwares)
def test_free_communication_leaves_compute(schedule, hardware):
    free = replace(hardware, bandwidth=math.inf, latency=0.0, memory_bandwidth=math.inf)
    timeline = predict(schedule, free)
    assert timeline.step_s == pytest.approx(timeline.seconds("compute", "update"))
    assert timeline.exposed_s == pytest.approx(0, abs=1e-9)


@given(schedules())
def test_in_the_order_of_ops_the_peak_is_the_bound(schedule):
    assert timeline_in_order(schedule).peak_nbytes == schedule.peak_nbytes
