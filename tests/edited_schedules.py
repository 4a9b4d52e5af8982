"""Schedules with ops left out, doubled, moved or changed, and schedules of random programs."""

from dataclasses import replace

from hypothesis import assume, strategies as st

from fsharp.errors import ScheduleError
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.verify.verify import verify
from tests.random_programs import GATHER, REDUCE, policies, programs


def rearrange(schedule, positions):
    """The ops at ``positions``, with ``after`` still about the same ops; what follows a dropped op does not."""
    place = {old: new for new, old in enumerate(positions)}
    ops = [schedule.ops[old] for old in positions]
    return schedule.replace_ops([replace(op, after=tuple(place[j] for j in op.after if j in place)) for op in ops])


def drop(schedule, *dropped):
    return rearrange(schedule, [j for j in range(len(schedule.ops)) if j not in dropped])


def move(schedule, i, to):
    """Op ``i`` moved to position ``to``."""
    positions = [j for j in range(len(schedule.ops)) if j != i]
    return rearrange(schedule, [*positions[:to], i, *positions[to:]])


def twice(schedule, i):
    """Op ``i`` and a copy of it right behind it."""
    later = [replace(op, after=tuple(j + (j > i) for j in op.after)) for op in schedule.ops]
    return schedule.replace_ops([*later[: i + 1], *later[i:]])


def edit(schedule, *positions, **fields):
    ops = list(schedule.ops)
    for i in positions:
        ops[i] = replace(ops[i], **fields)
    return schedule.replace_ops(ops)


def in_a_row(units, microbatches=1):
    """A step that uses units one after another, and comes back to them in the backward, in each microbatch."""
    events = []
    for start in range(0, microbatches * len(units), len(units)):
        uses = [(unit.name, start + i) for i, unit in enumerate(units)]
        events += [Event(kind, *use) for use in uses for kind in ("forward", "forward_end")]
        events += [Event(kind, *use) for use in reversed(uses) for kind in ("backward", "backward_end")]
        events.append(Event("microbatch_end"))
    return Program(tuple(units), (*events, Event("reduce"), Event("update")))


def chain(num_units, **facts):
    return in_a_row([UnitFacts(f"u{i}", 64, 64, gather=(GATHER,), reduce=(REDUCE,), **facts) for i in range(num_units)])


def schedules(facts, policy):
    """Schedules that pass: that all compiled ones do is the test above."""
    return st.builds(compile_schedule, programs(**facts), policies(**policy)).filter(passes)


def choose(data, positions):
    assume(positions)
    return data.draw(st.sampled_from(positions))


def of(schedule, kind, *phases):
    return [i for i, op in enumerate(schedule.ops) if op.kind == kind and op.phase in (phases or (op.phase,))]


def opening(schedule):
    return [i for i, op in enumerate(schedule.ops) if op.opens]


def passes(schedule):
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True
