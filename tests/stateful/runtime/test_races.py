"""Whole steps under the race checker, every wait of a step left out, and what is told of a race."""

import itertools
import re
from contextlib import nullcontext

import pytest
import torch

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.testing import DebugPolicy, RaceError, RaceReport, checking_races, simulate
from fsharp.testing.ordering import Access, replay
from fsharp.testing.races import VirtualLanes
from tests import scheduling
from tests.gpt_like import loss_fn
from tests.modules import Net, descend
from tests.scheduling import make_state, my_batches

STRATEGIES = {name: scheduling.STRATEGIES[name][1] for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")}
PRECISIONS = {"fp32": fs.Precision(), "bf16": fs.Precision(compute=torch.bfloat16, main=torch.float32)}


def train(name, *, precision="fp32", microbatches=1, steps=3, donate=True, loss=loss_fn, comm=None, **policy):
    strategy = STRATEGIES[name]
    comm = comm or fs.SingleComm(fs.Mesh({axis: 1 for axis, _ in strategy.rules}))
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2))
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, trivial_axes=True, **policy))
    state = make_state(comm, strategy, tx=tx, precision=PRECISIONS[precision])
    step = scheduler(fs.train_step(loss, tx, microbatches=microbatches, donate=donate))
    with checking_races(scheduler) as report:
        for batch in my_batches(comm, steps):
            state, _ = step(state, batch)
    assert step.num_unscheduled_calls == 1
    assert scheduler.engine.steps.executor.lanes.__class__ is not VirtualLanes
    return report


def train_module(name, *, precision="fp32", microbatches=1, tx=None, accumulate=True, **policy):
    strategy = STRATEGIES[name]
    comm = fs.SingleComm(fs.Mesh({axis: 1 for axis, _ in strategy.rules}))
    policy = DebugPolicy(sum_late=False, trivial_axes=True, **policy)
    torch.manual_seed(0)
    model = fs.shard_module(
        Net(3), mesh=comm, strategy=strategy, units="layers.*", precision=PRECISIONS[precision], policy=policy
    )
    optimizer = fs.ShardedOptimizer(model.parameters(), *([tx] if tx else [torch.optim.AdamW]), **({} if tx else {"lr": 1e-2}))
    with checking_races(model) as report:
        for batch in my_batches(comm, 3):
            parts = list(zip(batch["x"].chunk(microbatches), batch["y"].chunk(microbatches), strict=True))
            with model.accumulate() if accumulate else nullcontext():
                for x, y in parts[:-1]:
                    model(x, y)["loss"].backward()
            descend(model(*parts[-1])["loss"], optimizer)
    return report


GRID = list(itertools.product(STRATEGIES, PRECISIONS, (1, 2), (0, 1, 2)))
SAMPLE = [
    ("ddp", "fp32", 2, 1),
    ("zero1", "bf16", 1, 2),
    ("zero2", "fp32", 1, 1),
    ("zero3", "fp32", 2, 2),
    ("zero3", "bf16", 1, 0),
    ("hsdp", "bf16", 2, 1),
    ("hfsdp", "bf16", 1, 0),
]
CASES = [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.deep) for case in GRID]


@pytest.mark.parametrize("train", [train, train_module], ids=["functions", "module"])
@pytest.mark.parametrize(("name", "precision", "microbatches", "prefetch"), CASES)
def test_steps_are_free_of_races(train, name, precision, microbatches, prefetch):
    report = train(name, precision=precision, microbatches=microbatches, prefetch=prefetch)
    assert report.races == []
    assert report.num_ops > 300
    lanes = {entry.lane for entry in report.log if isinstance(entry, Access)}
    expected = {"reduce"} if name == "ddp" else {"gather", "reduce"}
    assert lanes == {"compute", *expected}


@scheduling.every(2, name=STRATEGIES, precision=PRECISIONS)
def test_backwards_after_a_reduction_are_free_of_races(name, precision):
    """Sums of the first backward wait for the sums of the next one, which are added on the stream of reductions."""
    assert train_module(name, precision=precision, microbatches=3, accumulate=False).races == []


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("zero3", {"release": "forward", "bucket_nbytes": 2000}),
        ("zero3", {"poison": True}),
        ("zero2", {"gather_at_start": False}),
        ("hfsdp", {"keep_gradients": True}),
    ],
)
def test_other_policies_are_free_of_races(name, policy):
    assert train(name, microbatches=2, **policy).races == []


def test_steps_that_make_new_states_are_free_of_races():
    """The old state is freed while gathers of the new one run."""
    assert train("hfsdp", precision="bf16", donate=False).races == []
    assert train("zero3", donate=False).races == []


def test_ranks_with_others_are_checked_each_by_itself():
    strategy = STRATEGIES["hfsdp"]
    mesh = fs.Mesh({axis: 2 for axis, _ in strategy.rules})
    for report in simulate(mesh, lambda comm: train("hfsdp", precision="bf16", comm=comm)):
        assert report.races == []
        assert {entry.lane for entry in report.log if isinstance(entry, Access)} == {"compute", "gather", "reduce"}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zero3", "bf16"),
        pytest.param("zero3", "fp32", marks=pytest.mark.deep),
        pytest.param("zero2", "bf16", marks=pytest.mark.deep),
        pytest.param("hsdp", "fp32", marks=pytest.mark.deep),
        pytest.param("hfsdp", "bf16", marks=pytest.mark.deep),
    ],
)
def test_each_join_of_compute_left_out_is_a_race(name, precision):
    """With poison, also of units whose backward does not look at their parameters."""
    report = train(name, precision=precision, microbatches=2, poison=True, steps=4)
    joins = {why for why in report.waits if why.startswith("compute joins ") and " all of " not in why}
    joins = {why for why in joins if " of an earlier plan " not in why}  # of the first step, which has no slots to poison
    assert len(joins) >= 5
    needed = joins - report.implied_waits()
    assert len(needed) >= 5
    for why in needed:
        races = report.races_without(why)
        assert races, why
        assert all("compute" in (race.first.lane, race.second.lane if race.second else race.owner) for race in races)


@pytest.mark.parametrize(
    "name", ["zero1", *(pytest.param(name, marks=pytest.mark.deep) for name in STRATEGIES if name != "zero1")]
)
def test_each_reduction_that_does_not_wait_for_compute_is_a_race(name):
    report = train(name, precision="bf16", microbatches=2, steps=4)
    begins = [why for why in report.waits if why.startswith("reduce waits for compute before reduce of ")]
    assert begins
    implied = report.implied_waits()
    for why in begins:
        assert bool(report.races_without(why)) != (why in implied), why


def test_gradients_that_are_looked_at_need_the_join_at_the_end_of_the_pass():
    """So do those of a step in which nobody looks: two joins behind each other, one of them is enough."""

    def joins(looks):
        comm = fs.SingleComm(fs.Mesh({"dp": 1}))
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, trivial_axes=True))
        state = make_state(comm, STRATEGIES["zero3"])

        def step(state, batch, comm):
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            if looks:
                [buffer.norm() for node in fs.layouts.units_of(grads) for buffer in node.buffers]
            fs.reduce_scatter(grads, comm=comm, to="optim")
            return loss

        step = scheduler(step)
        with checking_races(scheduler) as report:
            for batch in my_batches(comm, 4):
                step(state, batch)
        at = "compute joins all of reduce at microbatch_end"
        assert at in report.waits
        return report.races_without(at)

    assert joins(looks=True)
    assert not joins(looks=False)


def test_no_kind_of_wait_can_be_left_out_altogether():
    report = train("zero3")
    for kind in ("compute joins gather", "compute joins all of", "gather waits for compute", "reduce waits for compute"):
        waits = {i for i, entry in enumerate(report.log) if str(entry).startswith(kind)}
        assert len(waits) > 5, kind
        assert replay(report.log, without=waits).races, kind


def kind_of(wait):
    """A wait without the names of units, and without numbers."""
    wait = re.sub(r" #?\d+|'[^']*'", "", wait)
    return re.sub(r"(at (?:forward|backward|forward_end|backward_end|update|fetch)) .*", r"\1", wait)


@pytest.mark.deep
def test_every_kind_of_wait_is_needed_by_some_configuration():
    """But for those of which one of two is enough: for gradients that are looked at, see above, and for units one by one.

    The first step has compute join the gathers of updated parameters for whoever looks at them before the next step. Here
    nobody does, and the next step joins the gathers again.
    """
    issued, needed = set(), set()
    options = [{}, {"microbatches": 2}, {"prefetch": 0}, {"prefetch": 2}]
    for name, chosen in itertools.product(("zero1", "zero2", "zero3", "hfsdp"), options):
        report = train(name, **chosen)
        unneeded = {each.why for each in report.unneeded_waits()}
        issued |= {kind_of(why) for why in report.waits}
        needed |= {kind_of(why) for why in report.waits if why not in unneeded}
    looks = {f"compute joins all of reduce at {at}" for at in ("microbatch_end", "reduce")}
    first_step = {"compute joins all of gather at update", "compute joins op of an earlier plan at reduce"}
    assert issued - needed == looks | first_step


def scheduler_on_streams(**policy):
    return fs.Scheduler(
        fs.SingleComm(fs.Mesh({"dp": 1})), policy=DebugPolicy(**{"sum_late": False, "trivial_axes": True, **policy})
    )


def train_with(scheduler, loss, steps=3):
    tx = fs.optim.adamw(1e-2)
    state = make_state(scheduler.comm, STRATEGIES["zero3"], tx=tx)
    step = scheduler(fs.train_step(loss, tx, donate=True))
    for batch in my_batches(scheduler.comm, steps):
        state, _ = step(state, batch)


def test_an_error_names_ops_units_lanes_bytes_and_the_missing_wait():
    scheduler = scheduler_on_streams()
    gather = scheduler.engine.steps.executor.transport.gather_unpacked

    def late(xs, outs, axis, label):
        """Fills what compute uses on another stream, which nobody waits for."""
        work = gather(xs, outs, axis, label)
        with scheduler.engine.steps.executor.lanes.on_lane("reduce"):
            outs[0].mul_(1)
        return work

    scheduler.engine.steps.executor.transport.gather_unpacked = late
    with pytest.raises(RaceError, match="two streams use the same memory") as caught, checking_races(scheduler):
        train_with(scheduler, loss_fn)
    text = str(caught.value)
    assert "aten.mul_.Tensor on reduce" in text
    assert "aten.mul.Tensor on compute, forward layers.0" in text
    assert "missing    a wait of compute for reduce" in text or "missing  a wait of compute for reduce" in text


def test_memory_freed_in_a_step_under_a_running_stream_is_reported():
    scheduler = scheduler_on_streams()
    seen = torch.zeros(())

    def watched(params, batch, comm):
        total, weight = loss_fn(params, batch, comm)
        activation = torch.ones(100, 100)
        with scheduler.engine.steps.executor.lanes.on_lane("reduce"):
            seen.add_(activation.sum())
        del activation
        return fs.Loss(total, weight)

    with pytest.raises(RaceError, match=r"freed for +compute, which allocates") as caught, checking_races(scheduler):
        train_with(scheduler, watched)
    assert {(race.first.op, race.first.lane) for race in caught.value.report.races if race.second is None} == {
        ("aten.sum", "reduce")
    }


def test_a_report_counts_and_lists_what_could_go():
    report = train("zero3", prefetch=2)
    assert str(report).startswith("no race in ")
    assert f"{sum(report.waits.values()):,} waits" in str(report)
    unneeded = report.unneeded_waits()
    assert {each.why for each in unneeded} < set(report.waits)
    assert all(each.times == report.waits[each.why] for each in unneeded)
    assert any(each.is_implied for each in unneeded)
    assert any(not each.is_implied for each in unneeded)
    assert not any(report.races_without(each.why) for each in unneeded)


def test_races_that_repeat_are_told_once():
    def program(lanes):
        x = torch.zeros(4)
        for _ in range(7):
            with lanes.on_lane("gather"):
                x.add_(1)
            x.sum()

    lanes = VirtualLanes()
    with lanes.log_torch_ops():
        program(lanes)
    report = RaceReport(lanes)
    with pytest.raises(RaceError, match=r"times +7"):
        report.raise_if_races()
    assert str(report).count("earlier") == 1


def test_a_scheduler_that_would_not_follow_the_schedule_of_a_device_is_refused():
    for options, what in [
        ({"sum_late": None}, "sum_late=False"),
        ({"sum_late": True}, "sum_late=False"),
        ({"trivial_axes": False}, "trivial_axes=True"),
    ]:
        with pytest.raises(ScheduleError, match=what), checking_races(scheduler_on_streams(**options)):
            pass
    with (
        pytest.raises(ScheduleError, match="on meta, expected a CPU"),
        checking_races(fs.Scheduler(fs.SingleComm(fs.Mesh({"dp": 1}), device="meta"), policy=DebugPolicy(sum_late=False))),
    ):
        pass


def test_an_error_in_the_step_passes_and_the_lanes_are_those_from_before():
    scheduler = scheduler_on_streams()
    before = scheduler.engine.steps.executor.lanes
    with pytest.raises(ZeroDivisionError, match="division"), checking_races(scheduler):
        train_with(scheduler, lambda *_: 1 / 0)
    assert scheduler.engine.steps.executor.lanes is before
