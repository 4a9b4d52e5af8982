"""Kinds of ops declared outside of the package: a record and a function each take them from the emitter to real steps."""

import json
import math
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.stateful.runtime.executor import BIND
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.ops import OPS, OUTGOING, PARAMS, RESTING, OpSpec, declare_op, kinds_where
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Schedule, group_ops_by_bucket
from fsharp.stateful.verify.verify import verify
from fsharp.testing import DebugPolicy, checking_races, simulate
from fsharp.testing.ordering import Access
from tests.edited_schedules import chain, drop, edit, move, of
from tests.gpt_like import loss_fn
from tests.inspect.test_simulate_schedule import HARDWARE
from tests.scheduling import DP, STRATEGIES, assert_same_training, make_state, make_tx, my_batches, run_both, train
from tests.stateful.runtime.test_eager import emitted
from tests.stateful.runtime.test_scheduler_departures import DEPARTURES, departing
from tests.stateful.schedule.test_codec_ops import traced
from tests.test_format import HALVES

STEP = ("forward", "backward")
CODED = kinds_where(lambda spec: spec.cost == "code")
COUNT = OpSpec(kind="count", phases=STEP, when=("gathered",), follows="wait", reads=(PARAMS,), cost="memory", look="dark")
"""Counts elements of full parameters, on the compute stream."""
SUM = OpSpec(kind="checksum", phases=STEP, stream="gather", follows="count", reads=(PARAMS,), cost="memory")
"""Adds them up, on another stream than the one that releases them."""


@contextmanager
def declared(spec, bind):
    declare_op(spec)
    BIND[spec] = bind
    try:
        yield
    finally:
        BIND.pop(spec, None)
        for phase in spec.phases:
            del OPS[spec.kind, phase]


def flats(bound):
    return [flat for flat in bound.unsharded.full.flats if len(flat)]


class Found(NamedTuple):
    """What the two kinds have found, in the order of their ops: rank, phase, unit, and a number."""

    counts: list
    sums: list


@pytest.fixture
def found():
    """Declares both kinds."""
    result = Found([], [])

    def count(executor, bound):
        def action():
            number = sum(int((flat == flat).sum()) for flat in flats(bound))  # not those that are poisoned
            result.counts.append((executor.comm.rank, bound.op.phase, bound.op.unit, number))

        return executor.action_after_waits(bound, action)

    def add(executor, bound):
        def start():
            total = sum(float(flat.double().sum()) for flat in flats(bound))
            result.sums.append((executor.comm.rank, bound.op.phase, bound.op.unit, total))

        return executor.action_on_lane(bound, start)

    with declared(COUNT, count), declared(SUM, add):
        yield result
    assert not {"count", "checksum"} & {*kinds_where()}


def refused(schedule, match):
    with pytest.raises(ScheduleError, match=match):
        verify(schedule)


def test_the_emitter_writes_them_behind_what_they_are_behind(found):
    schedule = compile_schedule(chain(3))
    for i in of(schedule, "wait"):
        wait, count, add = schedule.ops[i : i + 3]
        assert str(count) == f"count {wait.unit} {wait.phase} [compute]"
        assert str(add) == f"checksum {wait.unit} {wait.phase} [gather]"
        assert (count.event_index, count.after, add.after) == (wait.event_index, (), (i + 1,))
    assert len(of(schedule, "count")) == len(of(schedule, "checksum")) == len(of(schedule, "wait")) > 0
    for i in of(schedule, "release"):
        last = [j for j in of(schedule, "checksum") if j < i and schedule.ops[j].unit == schedule.ops[i].unit][-1]
        assert last in schedule.ops[i].after, "another stream reads what is released"


def test_a_schedule_differs_by_them_alone(found):
    schedule = compile_schedule(chain(3))
    without = drop(schedule, *of(schedule, "count"), *of(schedule, "checksum"))
    verify(without)
    lines = [line for line in without.diff(schedule).splitlines() if line[0] in "+-"][2:]
    assert Counter(line.split()[0] for line in lines) == Counter(
        {"+count": len(of(schedule, "count")), "+checksum": len(of(schedule, "checksum"))}
    )
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert f"{len(of(schedule, 'count'))} count, {len(of(schedule, 'checksum'))} checksum" in fs.inspect.table(schedule)


@pytest.mark.parametrize("kind", ["count", "checksum"])
def test_the_verifier_refuses_them_where_parameters_are_not_there(found, kind):
    schedule = compile_schedule(chain(3), SchedulePolicy(release="forward"))
    verify(schedule)
    for i in of(schedule, kind):
        op = schedule.ops[i]
        wait = [j for j in of(schedule, "wait") if j < i][-1]
        refused(move(schedule, i, wait), rf"op {wait}, {kind} {op.unit} {op.phase}.*before its gather, op \d+, is waited for")
        release = next(j for j in of(schedule, "release") if j > i and schedule.ops[j].unit == op.unit)
        late = move(edit(schedule, i, event_index=schedule.ops[release].event_index), i, release)
        refused(late, rf"op {release}, {kind} {op.unit} {op.phase}.*a unit that is not gathered")


def test_the_verifier_refuses_a_release_that_does_not_wait_for_a_reader_on_another_stream(found):
    schedule = compile_schedule(chain(3), SchedulePolicy(prefetch=0, release="forward"))  # nothing else comes to wait for them
    for i in of(schedule, "release"):
        readers = [j for j in schedule.ops[i].after if schedule.ops[j].kind == "checksum"]
        edited = edit(schedule, i, after=tuple(j for j in schedule.ops[i].after if j not in readers))
        what = rf"op {i}, release {schedule.ops[i].unit} .*parameters that may still be read by op {readers[-1]}, checksum"
        refused(edited, what)


def test_the_verifier_follows_what_is_read_of_gradients():
    with declared(replace(SUM, kind="norm", phases=("backward",), follows="cast", reads=(OUTGOING,)), None):
        schedule = compile_schedule(chain(2))
        verify(schedule)
        [norm, *_] = of(schedule, "norm")
        [reduce, *_] = of(schedule, "reduce")
        assert norm in schedule.ops[reduce].after
        refused(move(schedule, norm, norm - 1), rf"op {norm - 1}, norm .*nothing has filled the outgoing gradient")
        refused(edit(schedule, norm, after=()), rf"op {norm}, norm .*may read the outgoing gradient before the end of op")
        alone = tuple(j for j in schedule.ops[reduce].after if j != norm)
        refused(edit(schedule, reduce, after=alone), rf"op {reduce}, reduce .*may still be read by op {norm}, norm")


def test_the_verifier_refuses_an_update_of_what_another_stream_still_reads():
    with declared(replace(SUM, kind="copy", stream="host", follows="compute", reads=(RESTING,)), None):
        schedule = compile_schedule(chain(2))
        [update], copies = of(schedule, "update"), of(schedule, "copy")
        refused(schedule, rf"op {update}, update .*changes what may still be read by op {copies[-1]}, copy u0 backward")
        verify(edit(schedule, update, after=(*schedule.ops[update].after, copies[-1])))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"kind": ""}, "not empty"),
        ({"kind": 7}, "a str"),
        ({"phases": ()}, "not empty"),
        ({"phases": ("sideways",)}, "a tuple of ('forward' or 'backward' or 'finish' or 'update')"),
        ({"phases": "forward"}, "a tuple of ('forward' or"),
        ({"phases": ["forward"]}, "a tuple of ('forward' or"),
        ({"stream": "gahter"}, "'compute' or 'gather' or"),
        ({"when": ("gatherd",)}, "'name' or 'gathered' or"),
        ({"when": ("",)}, "'name' or 'gathered' or"),
        ({"when": "gathered"}, "a tuple of str"),
        ({"events": ("forwrad",)}, "a tuple of ('forward' or 'forward_end' or"),
        ({"follows": "wiat"}, "'gather' or 'wait' or"),
        ({"follows": "count"}, "'gather' or 'wait' or"),
        (
            {"follows": "cast"},
            "'gather' or 'wait' or 'decode' or 'compute' or 'release' or '': another kind, with ops in all of its phases",
        ),
        ({"reads": ("parms",)}, "'resting' or 'params' or"),
        ({"reads": "params"}, "a tuple of str"),
        ({"joins": "parms"}, "'resting' or 'params' or"),
        ({"fills": "parms"}, "'resting' or 'params' or"),
        ({"changes": "parms"}, "'resting' or 'params' or"),
        ({"frees": "parms"}, "'resting' or 'params' or"),
        ({"opens": "yes"}, "True or False"),
        ({"calls": "gahter"}, "'gather' or 'reduce' or 'finish' or 'update_gather' or ''"),
        ({"calls": "gathered"}, "'gather' or 'reduce' or"),
        ({"codes": "sent_dtypes"}, "'gathered' or 'outgoing' or"),
        ({"cost": "memroy"}, "'' or 'compute' or 'update' or"),
        ({"may_wait": 1}, "True or False"),
        ({"look": "drak"}, "'unit' or 'dark' or"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_record_with_a_wrong_field_is_refused(wrong, expected):
    record, before = replace(COUNT, **wrong), {**OPS}
    [(field, value)] = wrong.items()
    what = f"declare_op(): kind {record.kind!r}: {field} is {value!r}, expected "
    with pytest.raises(ScheduleError, match=f"{re.escape(what)}.*{re.escape(expected)}.*Correct this field of the OpSpec"):
        declare_op(record)
    assert before == OPS


def test_phases_that_a_kind_has_are_refused():
    with pytest.raises(ScheduleError, match=r"ops of kind 'gather' in phase 'forward' already.*another kind, or other phases"):
        declare_op(replace(COUNT, kind="gather", follows="wait"))


@pytest.mark.parametrize("bind", [..., None, lambda executor, bound: None], ids=["no row", "None", "returns None"])
def test_a_kind_that_nothing_binds_is_refused_by_name(bind):
    with declared(COUNT, bind):
        if bind is ...:
            del BIND[COUNT]
        match = r"op count embed forward .*: ops of kind 'count' have no action(?s:.*)Add the kind to .*executor\.BIND"
        with pytest.raises(ScheduleError, match=match):
            simulate(DP, lambda comm: train(comm, "zero3", {}, steps=1))


def test_a_schedule_with_a_kind_that_is_not_declared_is_refused_by_name(found):
    schedule = compile_schedule(chain(2))
    with declared(replace(COUNT, kind="other"), None):
        other = compile_schedule(chain(2))
        text = other.to_json()
    assert Schedule.from_json(schedule.to_json()) == schedule
    with pytest.raises(
        ScheduleError, match=r"^Schedule.from_json\(\): .*kind is 'other', expected .*to `declare_op\(\)` first"
    ) as caught:
        Schedule.from_json(text)
    assert "ScheduleError" not in str(caught.value)
    for function in (verify, fs.inspect.table):
        with pytest.raises(ScheduleError, match=r"has phase 'forward'(?s:.*)give `declare_op\(\)` the OpSpec of 'other' first"):
            function(other)


def test_an_op_may_change_what_it_reads():
    scale = replace(COUNT, kind="scale", changes=PARAMS)
    with declared(scale, None), declared(replace(SUM, follows="scale"), None):
        schedule = compile_schedule(chain(2))
        verify(schedule)
        assert of(schedule, "scale")


def test_whatever_changes_a_buffer_waits_for_an_op_that_reads_and_changes_the_buffer():
    scale = replace(SUM, kind="scale", phases=("backward",), follows="cast", reads=(OUTGOING,), changes=OUTGOING)
    with declared(scale, None):
        schedule = compile_schedule(chain(2))
        verify(schedule)
        [at, *_], [reduce, *_] = of(schedule, "scale"), of(schedule, "reduce")
        assert at in schedule.ops[reduce].after
        alone = tuple(j for j in schedule.ops[reduce].after if j != at)
        refused(edit(schedule, reduce, after=alone), rf"op {reduce}, reduce .*may still be read by op {at}, scale")


def test_they_take_the_time_of_their_cost(found):
    timeline = fs.inspect.predict(compile_schedule(chain(3)), HARDWARE)
    for kind in ("count", "checksum"):
        spans = [span for span in timeline.spans if span.kind == kind]
        assert [span.seconds for span in spans] == pytest.approx([64 / HARDWARE.memory_bandwidth] * len(spans))
        assert len(spans) == len(of(timeline.schedule, kind))
    host = fs.inspect.predict(timeline.schedule, replace(HARDWARE, computes_on_host=True))
    assert {span.stream for span in host.spans if span.kind == "checksum"} == {"compute"}


def test_they_are_drawn(found, tmp_path):
    from matplotlib.image import imread

    schedule = compile_schedule(chain(3))
    without = drop(schedule, *of(schedule, "count"), *of(schedule, "checksum"))
    for name, each in (("with", schedule), ("without", without)):
        fs.inspect.draw(each, tmp_path / f"{name}.png")
        fs.inspect.draw(each, tmp_path / f"{name} times.png", hardware=HARDWARE)
    for name in ("", " times"):
        ours, theirs = (imread(tmp_path / f"{each}{name}.png") for each in ("with", "without"))
        assert ours.shape != theirs.shape or (ours != theirs).any()


def test_perfetto_shows_them(found, tmp_path):
    timeline = fs.inspect.predict(compile_schedule(chain(3)), HARDWARE)
    fs.inspect.perfetto(timeline, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    shown = Counter(event["name"] for event in events if event.get("cat") == "count")
    assert shown == Counter(f"count {timeline.schedule.ops[i].unit}" for i in of(timeline.schedule, "count"))


@pytest.mark.parametrize("strategy", ["zero3", "hfsdp"])
def test_steps_run_them_and_compute_the_same_bits(found, strategy):
    mesh = STRATEGIES[strategy][0]
    expected = simulate(mesh, lambda comm: train(comm, strategy))
    trained = simulate(mesh, lambda comm: train(comm, strategy, {"prefetch": 2}, steps=4))
    for ours, theirs in zip(trained, expected, strict=True):
        assert_same_training(ours, theirs)
    schedule = trained[0].schedule
    numels = {"embed": 66, **dict.fromkeys([f"layers.{i}" for i in range(3)], 97), "head": 77}
    sizes = {unit: mesh.size * math.ceil(numel / mesh.size) for unit, numel in numels.items()}  # cut into equal parts
    assert all(sizes[unit] == number for _, _, unit, number in found.counts)
    planned = [(op.phase, op.unit) for op in schedule.ops if op.kind == "count"]
    eager = [(phase, unit) for phase in STEP for unit in (sizes if phase == "forward" else reversed(sizes))]
    for rank in range(mesh.size):
        assert [row[1:3] for row in found.counts if row[0] == rank] == [*eager, *planned * 3]
        assert [row[1:3] for row in found.sums if row[0] == rank] == [*eager, *planned * 3]
    totals = {tuple(row[1:] for row in found.sums if row[0] == rank) for rank in range(mesh.size)}
    assert len(totals) == 1, "all ranks have the same parameters"


def test_a_step_without_a_schedule_has_them_too(found):
    schedule = simulate(DP, lambda comm: emitted(comm, "zero3")[0])[0]
    verify(schedule)
    for i in of(schedule, "wait"):
        assert [op.kind for op in schedule.ops[i + 1 : i + 3]] == ["count", "checksum"]
        assert schedule.ops[i + 2].after == (i + 1,)
    for i in of(schedule, "release"):
        readers = [j for j in schedule.ops[i].after if schedule.ops[j].kind == "checksum"]
        assert readers
        refused(edit(schedule, i, after=()), f"op {i}, release .*may still be read by op {readers[-1]}, checksum")


@pytest.mark.parametrize("departure", ["in the forward", "in the backward"])
def test_a_step_that_leaves_its_schedule_goes_on_with_them(found, departure):
    def program(run):
        state, step, seen = make_state(run.comm, "zero3"), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 4)):
            state, metrics, *_ = step(state, {**batch, "order": (0, 1, 2), **(DEPARTURES[departure] if i == 3 else {})})
            seen.append((metrics[0], len(found.counts) if run.comm.rank == 0 else 0))
        return [loss for loss, _ in seen]

    _, [step] = run_both(program)
    assert step.last_call_status().kind == "left"
    assert Counter(found.counts).keys() == {(rank, *row[1:]) for row in found.counts for rank in range(2)}
    assert len(found.counts) == len(found.sums) > 4 * 2 * len(step.schedule.program.units)


def test_traces_measure_them(found):
    schedule, trace = simulate(DP, traced)[0]
    measured = trace.timeline(schedule)
    for kind in ("count", "checksum"):
        spans = [span for span in measured.spans if span.kind == kind]
        assert [span.op for span in spans] == of(schedule, kind)
        assert all(span.seconds > 0 and span.stream == "compute" for span in spans)
    predicted = fs.inspect.predict(schedule, fs.inspect.Hardware.fit(trace, schedule, computes_on_host=True))
    rows = [line.split()[0] for line in fs.inspect.compare(predicted, measured).splitlines()]
    assert {"count", "checksum"} <= {*rows}


def test_races_of_them_are_found(found):
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, trivial_axes=True, poison=True))
    state, step = make_state(comm, fs.zero3("dp")), scheduler(fs.train_step(loss_fn, make_tx()))
    with checking_races(scheduler) as report:
        for batch in my_batches(comm, 3):
            state, _ = step(state, batch)
    assert report.races == []
    lanes = Counter(entry.lane for entry in report.log if isinstance(entry, Access) and "checksum of" in str(entry.during))
    assert lanes.keys() == {"gather"}
    joins = {why for why in report.waits if why.startswith("compute joins checksum of")} - report.implied_waits()
    assert joins
    assert all(report.races_without(why) for why in joins), "a release is poison for who still reads"


@cache
def trained_without_probes(is_coded):
    return simulate(DP, lambda comm: train(comm, LATE, PROBED, **options_of(is_coded)))


LATE = fs.Strategy({"dp": fs.layouts.AxisRule(fs.layouts.Shard, fs.layouts.Partial, fs.layouts.Shard)})
PROBED = {"bucket_nbytes": 2000, "gather_at_start": False, "offload": True}


def options_of(is_coded):
    return {"steps": 3, **({"precision": fs.Precision(stored=HALVES, wire=HALVES)} if is_coded else {})}


@pytest.mark.parametrize("kind", kinds_where())
def test_there_may_be_one_behind_each_kind(kind):
    """Also behind those that are one collective; and behind all that steps without a schedule make up."""
    phases = tuple(phase for name, phase in OPS if name == kind)
    calls = Counter()

    def bind(executor, bound):
        return lambda: calls.update([executor.comm.rank])

    expected = trained_without_probes(kind in CODED)
    with declared(OpSpec(kind="probe", phases=phases, follows=kind), bind):
        found = simulate(DP, lambda comm: train(comm, LATE, PROBED, **options_of(kind in CODED)))
        schedule = found[0].schedule
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_training(ours, theirs)
        wanted = []
        for issued in group_ops_by_bucket([op for op in schedule.ops if op.kind != "probe"]):
            wanted += issued
            wanted += [("probe", op.unit, op.phase, op.event_index) for op in issued if op.kind == kind]
        assert [op if op.kind != "probe" else ("probe", op.unit, op.phase, op.event_index) for op in schedule.ops] == wanted
        assert len(of(schedule, "probe")) == len(of(schedule, kind)) > 0
        assert calls[0] >= 2 * len(of(schedule, kind)) + 1, "the first step has them as well"
