"""Every field of a schedule changed, every op dropped, doubled and moved: refused by name, or followed with the same bits."""

from dataclasses import replace

import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError, ScheduleError
from fsharp.stateful.runtime.bound_schedule import describe_first_mismatch
from fsharp.stateful.schedule.schedule import Memory, Schedule
from fsharp.stateful.verify.verify import verify
from fsharp.testing import DebugPolicy, checking_races, simulate
from tests.edited_schedules import edit, move
from tests.gpt_like import loss_fn, make_params
from tests.ranks import on_ranks
from tests.schedule_mutants import mutants, texts
from tests.scheduling import STRATEGIES, assert_same, full_params, make_state, make_tx, my_batches

CODED = {"precision": fs.Precision(stored=fs.formats.mxint8, wire=fs.formats.mxint4)}
STEPS = {  # strategy, policy and options of plan, microbatches; and of how many mutants one is tried by default
    "zero3": ("zero3", {}, 1, 300),
    "zero2": ("zero2", {}, 2, 400),
    "zero1, offload": ("zero1", {"offload": True}, 1, 400),
    "buckets": ("zero3", {"bucket_nbytes": 2000, "release": "forward"}, 1, 400),
    "8 and 4 bits": ("zero3", CODED, 1, 400),
    "zero1 in 8 and 4 bits": ("zero1", CODED, 2, 0),
    "late in 8 and 4 bits": ("late", CODED, 1, 0),
    "ddp": ("ddp", {"keep_gradients": True}, 2, 0),
    "hsdp": ("hsdp", {"release": "backward"}, 1, 0),
    "late": ("late", {}, 2, 0),
    "mixed": ("mixed", {"prefetch": 2, "gather_at_start": False}, 2, 0),
}
CASES = [pytest.param(*step, id=name) for name, step in STEPS.items() if step[3]]
CASES += [
    pytest.param(*step[:3], 1, id=f"{name}, all", marks=[pytest.mark.deep, pytest.mark.timeout(1800)])
    for name, step in STEPS.items()
]


class Trainer:
    """A scheduled train step on one rank, which has been recorded."""

    def __init__(self, comm, strategy, policy, microbatches):
        self.comm, tx = comm, make_tx()
        plan = {name: policy[name] for name in policy if name in CODED}
        policy = {name: policy[name] for name in policy if name not in CODED}
        self.state = make_state(comm, strategy, tx=tx, params=make_params(layers=2), **plan)
        self.batches = my_batches(comm, 2, size=2 * microbatches)
        self.fn = fs.train_step(loss_fn, tx, microbatches=microbatches)
        self.scheduler = fs.Scheduler(comm, policy=DebugPolicy(**{"poison": True, "sum_late": False, **policy}))
        self.step = self.scheduler(self.fn)
        self.step(self.state, self.batches[0])

    def run(self, step):
        state, losses = self.state, []
        for batch in self.batches:
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        return torch.stack(losses), full_params(state, self.comm)

    def expected(self):
        return self.run(lambda state, batch: self.fn(state, batch, comm=self.comm))

    def follow(self, schedule):
        """What steps by a schedule give, which have no race."""
        self.step.follow(schedule)
        with checking_races(self.scheduler):
            return self.run(self.step)


def accepted(schedule, every):
    """The mutants that ``verify`` does not refuse, of one in so many."""
    found, number = [], 0
    for number, mutant in enumerate([*mutants(schedule), *texts(schedule)]):
        if number % every:
            continue
        try:
            made = mutant.make()
            verify(made)
        except (ScheduleError, OptionError):
            continue
        except Exception as error:
            raise AssertionError(f"{mutant.what}: {error!r}") from error
        if made != schedule:
            found.append((mutant.what, made))
    assert len(found) < number / every / 2
    return found


@pytest.mark.parametrize(("strategy", "policy", "microbatches", "every"), CASES)
def test_a_mutant_is_refused_or_changes_nothing(strategy, policy, microbatches, every):
    mesh = STRATEGIES[strategy][0]

    def first(comm):
        trainer = Trainer(comm, strategy, policy, microbatches)
        schedule = trainer.step.schedule
        assert_same(trainer.follow(schedule), trainer.expected())
        assert trainer.step.num_unscheduled_calls == 1
        return schedule

    todo = accepted(simulate(mesh, first)[0], every)

    def rank_fn(comm):
        """How many mutants were tried before the scheduler was closed by one that is refused, or has recorded another."""
        trainer = Trainer(comm, strategy, policy, microbatches)
        expected = trainer.expected()
        for number, (what, mutant) in enumerate(todo[done:], 1):
            try:
                found = trainer.follow(mutant)
            except Exception as error:
                if isinstance(error, ScheduleError) and "the schedule does not fit" in str(error):
                    return number
                raise AssertionError(f"{what}: {error!r}") from error
            try:
                assert_same(found, expected)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
        return number

    done = 0
    while done < len(todo):
        [number] = set(simulate(mesh, rank_fn))
        done += number


@pytest.fixture(scope="module")
def schedule():
    return simulate(STRATEGIES["zero3"][0], lambda comm: Trainer(comm, "zero3", {}, 1).step.schedule)[0]


def edited(schedule, kind, **fields):
    i = next(i for i, op in enumerate(schedule.ops) if op.kind == kind)
    return edit(schedule, i, **fields)


FORM = {
    "an empty run of bytes": (
        lambda s: verify(edited(s, "compute", memory=Memory(64, 0))),
        r"compute embed .*: its memory is of the wrong size(?s:.*)expected +None",
    ),
    "an address": (
        lambda s: verify(edited(s, "reduce", memory=Memory(4, 384))),
        r"its memory begins at byte 4\.(?s:.*)a multiple of 64",
    ),
    "a type": (lambda s: edited(s, "gather", event_index="1"), r"Schedule\(\): op [0-9]+: event_index is '1', expected an int"),
    "a word": (lambda s: edit(s, 0, kind="fill"), r"kind is 'fill', expected 'gather' or 'wait' or"),
    "a size": (lambda s: edited(s, "cast", memory=Memory(0, 1.5)), r"nbytes is 1\.5, expected an int"),
    "text": (lambda s: Schedule.from_json(s.to_json().replace('"phase"', '"face"')), r"not a schedule: .*face"),
    "brackets": (lambda s: Schedule.from_json("[" * 100_000), r"not a schedule: Recursion"),
    "a list": (lambda s: Schedule.from_json("[]"), r"not a schedule: TypeError\('list indices"),
}


@pytest.mark.parametrize("name", FORM)
def test_what_is_no_schedule_is_refused_by_name(schedule, name):
    make, match = FORM[name]
    with pytest.raises(ScheduleError, match=match):
        make(schedule)


def test_nothing_follows_what_a_step_hands_on(schedule):
    """A wait in the step that gathers would come before the gather, which is issued at the end."""
    first, last = next(i for i, op in enumerate(schedule.ops) if op.kind == "wait"), len(schedule.ops) - 1
    late = move(edit(schedule, first, event_index=schedule.ops[last].event_index), first, last)
    with pytest.raises(ScheduleError, match=r"wait embed .*: comes after op [0-9]+, a gather for the next step"):
        verify(late)


def test_a_gradient_comes_of_no_frozen_unit(schedule):
    units = schedule.program.units
    with pytest.raises(ScheduleError, match=r"event [0-9]+, backward_end embed: gives a gradient to a unit .*trainable=False"):
        replace(schedule.program, units=(replace(units[0], trainable=False), *units[1:]))


@pytest.mark.parametrize(("name", "value"), [("outgoing", 128), ("rest", 512), ("finishing", 64), ("sent_dtypes", "another")])
@on_ranks(STRATEGIES["zero3"][0])
def test_facts_of_other_units_are_not_followed(comm, name, value):
    trainer = Trainer(comm, "zero3", {}, 1)
    schedule = trainer.step.schedule
    units = tuple(replace(facts, **{name: value}) for facts in schedule.program.units)
    changed = replace(schedule, program=replace(schedule.program, units=units))
    why = describe_first_mismatch(changed, trainer.scheduler.engine.steps.registry.units)
    assert why.startswith(f"{name} of unit 'embed' is {value}, and here "), why
