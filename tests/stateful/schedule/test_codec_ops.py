"""Ops that encode and decode: where formats are not plain, with bytes, times, pictures and order; and nowhere else."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.stateful.schedule.ops import kinds_where
from fsharp.stateful.verify.verify import verify
from fsharp.testing import DebugPolicy, simulate
from tests.edited_schedules import drop, edit, move, of, twice
from tests.gpt_like import loss_fn
from tests.scheduling import DP, STRATEGIES, make_layout, make_state, make_tx, my_batches, run_both
from tests.stateful.runtime.test_eager import emitted
from tests.stateful.runtime.test_scheduler_departures import DEPARTURES, departing
from tests.test_format import BLOCKS, HALVES

MXINT4, MXINT8 = fs.formats.mxint4, fs.formats.mxint8
CODED = kinds_where(lambda spec: spec.cost == "code")
PRECISION = fs.Precision(stored=MXINT8, wire=MXINT4)
HARDWARE = fs.inspect.Hardware(compute_times=(2.0, 4.0), bandwidth=1e3, memory_bandwidth=1e4, update_s=0.5, codec_bandwidth=1e2)


def planned(strategy, precision=PRECISION, backend="nccl", **options):
    mesh, how = STRATEGIES[strategy]
    return fs.schedules.plan_step(make_layout(mesh, how, precision=precision), backend=backend, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_formats_have_none(strategy):
    schedule = planned(strategy, fs.Precision(), microbatches=2)
    assert CODED == ("decode", "encode", "decode_sum")
    assert not {op.kind for op in schedule.ops} & {*CODED}
    assert not any(op.spec.nbytes_through_codec(schedule.program.facts[op.unit]) for op in schedule.ops)
    assert "coded" not in fs.inspect.table(schedule)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("strategy", "found"),
    {
        # An all_reduce is an exchange, and a gather of sums: these are decoded between the two.
        "ddp": {"encode finish"},
        "zero1": {"encode finish", "decode_sum finish"},
        "zero3": {"encode backward", "decode_sum backward", "decode forward", "decode backward"},
        "hsdp": {"encode backward", "decode_sum backward", "decode forward", "decode backward", "encode finish"},
        # Two exchanges: the sums of the first are decoded, and encoded for the second, between the two.
        "zero3x2": {"encode backward", "decode_sum backward", "decode forward", "decode backward"},
    }.items(),
)
def test_each_move_in_a_format_has_its_own(strategy, found, backend):
    schedule = planned(strategy, backend=backend)
    verify(schedule)
    plain = planned(strategy, fs.Precision(), backend=backend)
    number = Counter(f"{op.kind} {op.phase}" for op in schedule.ops if op.kind in CODED)
    assert number.keys() == found
    for what in found:
        kind, phase = what.split()
        of_which = {"encode": "reduce", "decode_sum": "reduce", "decode": "wait"}[kind]
        assert number[what] == len(of(schedule, of_which, phase)) > 0
    for i, op in enumerate(schedule.ops):
        if op.kind == "decode":
            assert (schedule.ops[i - 1].kind, schedule.ops[i - 1].unit) == ("wait", op.unit)
        if op.kind == "decode_sum":
            assert schedule.ops[i + 1].kind in ("accumulate", "decode_sum")
    assert {op.kind for op in schedule.ops} - {*CODED} == {op.kind for op in plain.ops}


def test_bytes_are_those_of_the_planes():
    """Encoded parts are 17 bytes for 32 values in 4 bits, and 33 in 8; two ranks, whose parts are whole blocks."""
    layout = fs.plan({"w": torch.zeros(4096)}, fs.Mesh({"dp": 2}), fs.zero3("dp"), precision=PRECISION)
    [facts] = fs.schedules.plan_step(layout).program.units
    assert (facts.decoded, facts.reduce_encoded, facts.reduce_decoded) == (4096 // 32 * 33, 4096 // 32 * 17, 4096 // 32 * 17)
    assert (facts.reduce_recoded, facts.finish_encoded, facts.update_coded) == (0, 0, 0)
    layout = fs.plan({"w": torch.zeros(4096)}, fs.Mesh({"dp": 2}), fs.ddp("dp"), precision=PRECISION)
    [facts] = fs.schedules.plan_step(layout).program.units
    assert (facts.finish_encoded, facts.finish_recoded, facts.finish_decoded) == (2176, 2176, 0)
    update = fs.Precision(update=MXINT4)
    layout = fs.plan({"w": torch.zeros(4096)}, fs.Mesh({"dp": 2}), fs.zero1("dp"), precision=update)
    [facts] = fs.schedules.plan_step(layout).program.units
    assert facts.update_coded == 2176


def without(schedule, i):
    """A schedule without op ``i``; what has waited for it waits for what it has waited for."""
    behind = [replace(op, after=(*op.after, *schedule.ops[i].after)) if i in op.after else op for op in schedule.ops]
    return drop(schedule.replace_ops(behind), i)


def refused(schedule, match):
    with pytest.raises(ScheduleError, match=match):
        verify(schedule)


@pytest.mark.parametrize(
    ("kind", "words"), [("decode", "decoded parameters"), ("encode", "encoded gradient"), ("decode_sum", "decoded sum")]
)
def test_the_verifier_misses_each_of_them(kind, words):
    schedule = planned("zero3", microbatches=2)
    for i in of(schedule, kind):
        refused(
            without(schedule, i), rf"nothing has filled the {words} that it reads(?s:.*){kind} {schedule.ops[i].unit} before"
        )
        refused(twice(schedule, i), rf"{kind} .*happens twice: op {i} has done it")
    schedule = planned("late")
    for i in of(schedule, kind, "finish"):
        refused(without(schedule, i), r"nothing has filled the (encoded gradient at rest|decoded final sum) that it reads")


def test_the_verifier_refuses_them_too_early_and_apart():
    schedule = planned("zero3")
    cast, encode = of(schedule, "cast")[0], of(schedule, "encode")[0]
    first = edit(schedule, encode + 1, after=(*schedule.ops[encode + 1].after, cast))
    refused(move(edit(first, encode, after=()), encode, cast), r"nothing has filled the (outgoing|encoded) gradient that it")
    reduce, added = of(schedule, "reduce")[0], of(schedule, "decode_sum")[0]
    refused(move(schedule, added, reduce), r"nothing has filled the decoded sum that it reads")
    schedule = planned("zero3", policy=fs.SchedulePolicy(bucket_nbytes=0), backend="gloo")
    reduce = of(schedule, "reduce")[0]
    later = next(op.event_index for op in schedule.ops[reduce + 1 :] if op.event_index > schedule.ops[reduce].event_index)
    there = next(i for i, op in enumerate(schedule.ops) if op.event_index == later)
    apart = move(edit(schedule, reduce, event_index=later), reduce, there - 1)
    refused(apart, r"reads the encoded gradient, which op \d+ fills at another event(?s:.*)Issue both at one event")


def test_a_step_without_a_schedule_has_them_too():
    schedule = simulate(DP, lambda comm: emitted(comm, "zero3", precision=PRECISION)[0])[0]
    verify(schedule)
    for kind in CODED:
        for i in of(schedule, kind):
            refused(drop(schedule, i), "nothing has filled the (decoded|encoded)")
    assert {op.kind for op in schedule.ops} >= {*CODED}


@pytest.mark.parametrize("departure", ["in the forward", "in the backward"])
def test_a_step_that_leaves_its_schedule_goes_on_with_them(departure):
    def program(run):
        state, step, losses = make_state(run.comm, "zero3", precision=PRECISION), run.wrap(departing), []
        for i, batch in enumerate(my_batches(run.comm, 4)):
            state, metrics, *_ = step(state, {**batch, "order": (0, 1, 2), **(DEPARTURES[departure] if i == 3 else {})})
            losses.append(metrics[0])
        return losses

    _, [step] = run_both(program)
    assert step.last_call_status().kind == "left"


def test_they_take_time():
    schedule = planned("zero3")
    timeline = fs.inspect.predict(schedule, HARDWARE)
    facts = schedule.program.facts
    for kind in CODED:
        spans = [span for span in timeline.spans if span.kind == kind]
        assert len(spans) == len(of(schedule, kind)) > 0
        for span in spans:
            assert span.seconds == pytest.approx(schedule.ops[span.op].spec.nbytes_through_codec(facts[span.unit]) / 1e2)
    host = fs.inspect.predict(schedule, replace(HARDWARE, computes_on_host=True))
    assert {span.stream for span in host.spans if span.kind in CODED} == {"compute"}


def test_a_collective_that_codes_inside_takes_longer():
    schedule = planned("ddp")
    facts = schedule.program.facts
    for span in fs.inspect.predict(schedule, HARDWARE).spans:
        if span.kind == "reduce":
            sent = sum(call.nbytes for call in facts[span.unit].finish)
            assert facts[span.unit].finish_recoded > 0
            if schedule.ops[span.op].bucket == -1:
                assert span.seconds == pytest.approx(sent / 1e3 + facts[span.unit].finish_recoded / 1e2)


def test_tables_and_pictures_show_them(tmp_path):
    from matplotlib.image import imread

    for strategy in ("zero3",):
        schedule = planned(strategy)
        head = fs.inspect.table(schedule).splitlines()[0]
        assert head.split() == ["#", "event", "op", "unit", "phase", "stream", "memory", "sent", "coded", "after"]
        units = schedule.program.units
        bare = [replace(unit, finish_recoded=0, decoded=0, reduce_encoded=0, reduce_decoded=0) for unit in units]
        without = replace(schedule, program=replace(schedule.program, units=tuple(bare)))
        for name, each in (("with", schedule), ("without", without)):
            fs.inspect.draw(each, tmp_path / f"{name}.png")
        ours, theirs = imread(tmp_path / "with.png"), imread(tmp_path / "without.png")
        assert ours.shape != theirs.shape or (ours != theirs).any(), strategy


def traced(comm, **plan_options):
    """The schedule of a step, and a trace of three."""
    state = make_state(comm, "zero3", **plan_options)
    call = fs.Scheduler(comm, policy=DebugPolicy(prefetch=1))(fs.train_step(loss_fn, make_tx()))
    first, *batches = my_batches(comm, 4)
    state, _ = call(state, first)
    trace = call.start_trace()
    for batch in batches:
        state, _ = call(state, batch)
    return call.schedule, trace


def test_traces_measure_them_and_fit_their_speed():
    precision = fs.Precision(stored=HALVES, wire=BLOCKS, main=torch.float32)
    schedule, trace = simulate(DP, lambda comm: traced(comm, precision=precision))[0]
    measured = trace.timeline(schedule)
    for kind in ("encode", "decode"):
        assert [span.op for span in measured.spans if span.kind == kind] == of(schedule, kind)
    fitted = fs.inspect.Hardware.fit(trace, schedule, computes_on_host=True)
    coded = sum(
        schedule.ops[i].spec.nbytes_through_codec(schedule.program.facts[schedule.ops[i].unit]) for i in of(schedule, "encode")
    )
    assert 0 < coded / fitted.codec_bandwidth < measured.step_s
