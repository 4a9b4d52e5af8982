"""Steps without a schedule: what they do is a schedule as well, which the verifier passes and people can look at."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.stateful.units.gradient_route import GradientRoute
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import loss_fn
from tests.scheduling import DP, STRATEGIES, every, make_state, make_tx, my_batches


def emitted(comm, strategy, *, microbatches=1, precision=fs.Precision(), **policy):
    """The schedule that the first step of training leaves, and the scheduled function."""
    state, step = make_state(comm, strategy, precision=precision), fs.train_step(loss_fn, make_tx(), microbatches=microbatches)
    call = fs.Scheduler(comm, policy=DebugPolicy(poison=True, **policy))(step)
    call(state, my_batches(comm, 1)[0])
    return call.last_unscheduled_ops(), call


@every(
    8,
    strategy=STRATEGIES,
    microbatches=[1, 2],
    precision=[fs.Precision(), fs.Precision(compute=torch.bfloat16, main=torch.float32)],
    offload=[False, True],
)
def test_what_an_unplanned_step_has_done_verifies(strategy, microbatches, precision, offload):
    options = {"microbatches": microbatches, "precision": precision, "offload": offload}
    found = simulate(STRATEGIES[strategy][0], lambda comm: emitted(comm, strategy, **options)[0])
    for schedule in found:
        assert schedule.program.events[-1].kind == "update"
        assert offload == ({"fetch", "offload"} <= {op.kind for op in schedule.ops})
        fs.schedules.verify(schedule)
    assert len({tuple(schedule.lines()) for schedule in found}) == 1, "ranks do the same"


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["gather", "wait", "cast", "reduce", "accumulate", "release"])
def test_without_one_of_its_ops_it_does_not(strategy, kind):
    schedule = simulate(DP, lambda comm: emitted(comm, strategy)[0])[0]
    here = [i for i, op in enumerate(schedule.ops) if op.kind == kind]
    if not here:
        assert (strategy, kind) == ("zero1", "release")  # parameters rest in full
        return
    drop = here[0]
    ops = [
        replace(op, after=tuple(j - (j > drop) for j in op.after if j != drop))
        for i, op in enumerate(schedule.ops)
        if i != drop
    ]
    with pytest.raises(ScheduleError, match="verify"):
        fs.schedules.verify(schedule.replace_ops(ops))


def test_it_can_be_looked_at_and_a_planned_step_has_none(tmp_path):
    def rank_fn(comm):
        schedule, call = emitted(comm, "zero3")
        state = make_state(comm, "zero3")
        call(state, my_batches(comm, 1)[0])
        assert call.last_call_status().kind == "planned"
        with pytest.raises(ScheduleError, match="there is no call, or the last call had a schedule"):
            call.last_unscheduled_ops()
        return schedule

    schedule = simulate(DP, rank_fn)[0]
    assert fs.schedules.Schedule.from_json(schedule.to_json()) == schedule
    assert "layers.0" in fs.inspect.table(schedule)
    fs.inspect.draw(schedule, tmp_path / "eager.png")
    assert (tmp_path / "eager.png").stat().st_size > 0


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_of_the_memory_that_gradients_leave_from_there_is_one_block_at_a_time(strategy, monkeypatch):
    alive = []
    make = GradientRoute.outgoing_block

    def block(self, memory, **kwargs):
        assert not any(not storage.expired() and rank == threading.get_ident() for rank, storage in alive), (
            f"{self.unit.name}: the block of a unit before is still there"
        )
        alive.append((threading.get_ident(), StorageWeakRef(memory.untyped_storage())))
        return make(self, memory, **kwargs)

    monkeypatch.setattr(GradientRoute, "outgoing_block", block)
    simulate(DP, lambda comm: emitted(comm, strategy)[0])
    assert len(alive) > 2 * DP.size
