"""The plan of which bundles of units are resident at each event of a program: bundles in use, and the next bundles to use."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fsharp.stateful.schedule.costs import Bundle, Bundles
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program

_STARTS = ("forward", "backward")


class ResidencyChange(NamedTuple):
    """Bundles that are released at an event, and bundles that are gathered, in the order in which they are needed."""

    released: tuple[Bundle, ...]
    gathered: tuple[Bundle, ...]


class Residency(NamedTuple):
    """The plan of which bundles of units are resident at each event. A bundle is units that are gathered in one collective.

    Attributes:
        changes: for each event, the bundles to release and to gather.
        carried: bundles that the first event needs, and that the previous step has gathered.
    """

    changes: list[ResidencyChange]
    carried: tuple[Bundle, ...]


def plan_residency(
    program: Program, policy: SchedulePolicy, bundles: Bundles, kept: Collection[int], carried: Sequence[Bundle]
) -> Residency:
    """Return the plan of which bundles are resident at each event.

    Bundles in use are always resident. So are the next ``policy.prefetch`` different bundles that the program uses before its
    parameters are updated. There is room for these and for one bundle in use. If no bundle in use is gathered, a resident
    bundle that will be used again stays. Uses around the innermost use take up no room: a root that is always in use would
    leave no room for prefetch. Uses in ``kept`` take up no room from their forward to the end of their backward.

    ``carried``: bundles that the previous step may have gathered.
    """
    events = program.events
    in_use, staying = _in_use(events, bundles), _staying_bundles(events, bundles, frozenset(kept))
    wanted = _wanted_bundles(events, policy, bundles, in_use, staying)
    after = _needed_next(events, wanted)
    held: dict[Bundle, None] = {}
    near: tuple[Bundle, ...] = ()  # bundles in use or ahead at the previous event
    updated: tuple[Bundle, ...] = ()  # bundles that stay, and have to be gathered again after an update
    result = []
    for i, event in enumerate(events):
        (stays, ended), here = staying[i], wanted[i]
        if here is None:
            now = dict.fromkeys([*in_use[i], *(b for b in after[i] if b in held)])
            counted = [b for b in now if b not in in_use[i] and b not in stays]
            room = max(policy.prefetch + 1 - min(len(in_use[i]), 1) - len(counted), 0)
            now.update(dict.fromkeys([b for b in after[i] if b not in now][:room]))
            here = tuple(now)
        released: tuple[Bundle, ...] = tuple(held)
        gathered: tuple[Bundle, ...] = ()
        if event.kind == "update":
            here, updated = (), tuple(stays)
        else:
            released = tuple(b for b in (*near, *ended) if b in held and b not in here and b not in stays)
            gathered, updated = tuple(dict.fromkeys(b for b in (*here, *updated) if b not in held)), ()
        if i == 0:
            carried = tuple(b for b in carried if b in gathered)
            gathered = tuple(b for b in gathered if b not in carried)
            held.update(dict.fromkeys(carried))
        for b in released:
            held.pop(b, None)
        held.update(dict.fromkeys(gathered))
        result.append(ResidencyChange(tuple(dict.fromkeys(released)), gathered))
        near = here
    return Residency(result, tuple(carried) if events else ())


def _staying_bundles(
    events: Sequence[Event], bundles: Bundles, kept: Collection[int]
) -> list[tuple[Mapping[Bundle, int], tuple[Bundle, ...]]]:
    """Return for each event the bundles that stay from here to the end of their backward, and the bundle whose stay ends."""
    ends = {event.use: i for i, event in enumerate(events) if event.kind == "backward_end" and event.use in kept}
    counts: Mapping[Bundle, int] = {}  # by bundle, number of uses that keep the bundle
    result = []
    for i, event in enumerate(events):
        name, ended = bundles.get(event.unit, ()), tuple[Bundle, ...]()
        change = (event.kind == "forward") - (ends.get(event.use) == i)
        if name and event.use in ends and change:
            counts = {**counts, name: counts.get(name, 0) + change}
            if not counts[name]:
                counts, ended = {each: count for each, count in counts.items() if count}, (name,)
        result.append((counts, ended))
    return result


def _wanted_bundles(
    events: Sequence[Event],
    policy: SchedulePolicy,
    bundles: Bundles,
    in_use: Sequence[tuple[Bundle, ...]],
    staying: Sequence[tuple[Mapping[Bundle, int], tuple[Bundle, ...]]],
) -> list[tuple[Bundle, ...] | None]:
    """Return the bundles to hold at each start of a forward or backward, without bundles that stay; None for other events."""
    upcoming = _upcoming_bundles(events, bundles, policy.prefetch + 1 + max(map(len, in_use), default=0))
    wanted: list[tuple[Bundle, ...] | None] = []
    before: tuple[Bundle, ...] = ()
    ended: set[Bundle] = set()
    for i, event in enumerate(events):
        ended.update(staying[i][1])
        if event.kind not in _STARTS:
            wanted.append(None)
            continue
        now = dict.fromkeys(in_use[i])
        room = policy.prefetch + 1 - min(len(now), 1)
        ahead = [b for b in upcoming[i] if b not in now]
        chosen = ahead[: policy.prefetch]
        there = [b for b in ahead[len(chosen) :] if b in before or b in staying[i][0] or b in ended]
        chosen += there[: room - len(chosen)]
        wanted.append(before := (*now, *chosen))
        ended = set()
    return wanted


def _needed_next(events: Sequence[Event], wanted: Sequence[tuple[Bundle, ...] | None]) -> list[tuple[Bundle, ...]]:
    """Return for each event the bundles that the next forward or backward needs; none if an update comes first."""
    after: list[tuple[Bundle, ...]] = []
    following: tuple[Bundle, ...] = ()
    for event, here in zip(reversed(events), reversed(wanted), strict=True):
        after.append(following)
        following = here if here is not None else () if event.kind == "update" else following
    after.reverse()
    return after


def bundles_before_step(program: Program, policy: SchedulePolicy, bundles: Bundles) -> tuple[Bundle, ...]:
    """Return the bundles that a step needs first, to be gathered before the step begins."""
    order = dict.fromkeys(bundles[e.unit] for e in program.events if e.kind in _STARTS and e.unit in bundles)
    return tuple(order)[: max(policy.prefetch, 1)]


def uses_in_backward_order(program: Program, bundles: Bundles) -> list[list[int]]:
    """Return for each microbatch the uses of gathered units whose backward is in it, in order of the backwards."""
    result: list[list[int]] = [[]]
    for event in program.events:
        if event.kind == "microbatch_end":
            result.append([])
        elif event.kind == "backward" and event.unit in bundles:
            result[-1].append(event.use)
    return result


def _in_use(events: Sequence[Event], bundles: Bundles) -> list[tuple[Bundle, ...]]:
    open_: list[str] = []
    result = []
    for event in events:
        if event.kind in _STARTS:
            open_.append(event.unit)
        elif event.kind.endswith("_end") and event.unit:
            open_.pop()
        result.append(tuple(dict.fromkeys(bundles[unit] for unit in reversed(open_) if unit in bundles)))
    return result


def _upcoming_bundles(events: Sequence[Event], bundles: Bundles, most: int) -> list[tuple[Bundle, ...]]:
    """Return for each event the next ``most`` different bundles that have a use after the event and before the next update."""
    result: list[tuple[Bundle, ...]] = []
    ahead: tuple[Bundle, ...] = ()
    for event in reversed(events):
        result.append(ahead)
        if event.kind == "update":
            ahead = ()
        elif event.kind in _STARTS and event.unit in bundles:
            name = bundles[event.unit]
            ahead = (name, *(b for b in ahead if b != name))[:most]
    result.reverse()
    return result
