"""Which units are resident between any two events of a program: those in use, and the next that it will come to."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, Program

_STARTS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Bundles:
    """Units that are gathered and released as one.

    Attributes:
        of: the bundle of each unit that is gathered at all.
        members: its units, in order of first use.
    """

    of: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]


def bundle(program: Program, policy: Policy) -> Bundles:
    """Neighbours in the order of first use, joined while they are together no larger than ``policy.bucket_nbytes``."""
    sizes = {unit.name: unit.gathered for unit in program.units if unit.gathered}
    order = dict.fromkeys(e.unit for e in program.events if e.kind in _STARTS and e.unit in sizes)
    members: dict[str, list[str]] = {}
    last, filled = "", 0
    for unit in order:
        if last and filled + sizes[unit] <= policy.bucket_nbytes:
            members[last].append(unit)
            filled += sizes[unit]
        else:
            last, filled = unit, sizes[unit]
            members[last] = [unit]
    of = {unit: name for name, units in members.items() for unit in units}
    return Bundles(of, {name: tuple(units) for name, units in members.items()})


def residency(program: Program, policy: Policy, bundles: Bundles, kept: Collection[int] = ()) -> list[tuple[str, ...]]:
    """For each event, the bundles that are to be resident until the next one, those needed first in the lead.

    Those in use always are. Beside them the next ``policy.prefetch`` different ones that the program comes to before
    its parameters are updated, as far as ``policy.num_buffers`` allows; what is resident already and will be wanted
    again stays while there is room. Uses around the innermost one take up no room: a root that is in use all the time
    would leave none to look ahead. Nor do those of the uses ``kept``, which stay from their forward to the end of their
    backward.
    """
    events = program.events
    in_use = _in_use(events, bundles)
    stays = _kept_for_backward(events, bundles, kept)
    upcoming = _upcoming(events, bundles, policy.num_buffers + max(map(len, in_use), default=0))
    wanted: list[tuple[str, ...] | None] = []
    before: tuple[str, ...] = ()
    for i, event in enumerate(events):
        if event.kind not in _STARTS:
            wanted.append(None)
            continue
        now = dict.fromkeys(in_use[i])
        room = max(policy.num_buffers - min(len(now), 1), 0)
        ahead = [b for b in upcoming[i] if b not in now]
        chosen = ahead[: min(policy.prefetch, room)]
        chosen += [b for b in ahead[len(chosen) :] if b in before][: room - len(chosen)]
        wanted.append(before := tuple(dict.fromkeys([*now, *chosen, *stays[i]])))
    result: list[tuple[str, ...]] = []
    following: tuple[str, ...] = ()
    after: list[tuple[str, ...]] = []
    for i in reversed(range(len(events))):  # what is wanted at the next start, as long as no update comes before it
        after.append(following)
        here = wanted[i]
        following = here if here is not None else () if events[i].kind == "update" else following
    after.reverse()
    held: tuple[str, ...] = ()
    for i in range(len(events)):
        here = wanted[i]
        if here is None:
            now = dict.fromkeys([*in_use[i], *(b for b in after[i] if b in held)])
            counted = [b for b in now if b not in in_use[i] and b not in stays[i]]
            room = max(policy.num_buffers - min(len(in_use[i]), 1) - len(counted), 0)
            now.update(dict.fromkeys([b for b in after[i] if b not in now][:room]))
            here = tuple(dict.fromkeys([*now, *stays[i]])) if events[i].kind != "update" else ()
        result.append(here)
        held = here
    return result


def first_wanted(program: Program, policy: Policy, bundles: Bundles) -> tuple[str, ...]:
    """The bundles that a step needs first: those to gather before it begins."""
    order = dict.fromkeys(bundles.of[e.unit] for e in program.events if e.kind in _STARTS and e.unit in bundles.of)
    return tuple(order)[: max(policy.prefetch, 1)]


def _in_use(events: Sequence[Event], bundles: Bundles) -> list[tuple[str, ...]]:
    open_: list[str] = []
    result = []
    for event in events:
        if event.kind in _STARTS:
            open_.append(event.unit)
        elif event.unit:
            open_.pop()
        result.append(tuple(dict.fromkeys(bundles.of[unit] for unit in reversed(open_) if unit in bundles.of)))
    return result


def returns(program: Program, bundles: Bundles) -> list[list[int]]:
    """For each microbatch, the uses of gathered units that a backward comes back to, in the order in which it does."""
    result: list[list[int]] = [[]]
    for event in program.events:
        if event.kind == "microbatch_end":
            result.append([])
        elif event.kind == "backward" and event.unit in bundles.of:
            result[-1].append(event.use)
    return result


def _kept_for_backward(events: Sequence[Event], bundles: Bundles, kept: Collection[int]) -> list[tuple[str, ...]]:
    if not kept:
        return [()] * len(events)
    ends = {event.use: i for i, event in enumerate(events) if event.kind == "backward_end"}
    result: list[tuple[str, ...]] = []
    waiting: dict[int, str] = {}
    for i, event in enumerate(events):
        if event.kind == "forward" and event.use in kept and event.unit in bundles.of and ends.get(event.use, -1) > i:
            waiting[event.use] = bundles.of[event.unit]
        elif event.kind == "backward_end":
            waiting.pop(event.use, None)
        result.append(tuple(dict.fromkeys(waiting.values())))
    return result


def _upcoming(events: Sequence[Event], bundles: Bundles, most: int) -> list[tuple[str, ...]]:
    """The first ``most`` different bundles that are entered after each event and before the next update."""
    result: list[tuple[str, ...]] = []
    ahead: tuple[str, ...] = ()
    for event in reversed(events):
        result.append(ahead)
        if event.kind == "update":
            ahead = ()
        elif event.kind in _STARTS and event.unit in bundles.of:
            name = bundles.of[event.unit]
            ahead = (name, *(b for b in ahead if b != name))[:most]
    result.reverse()
    return result
