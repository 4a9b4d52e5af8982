"""Which units are resident between any two events of a program: units in use, and the next units that the program uses."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fsharp.stateful.schedule.costs import Bundling
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, Program

_STARTS = ("forward", "backward")


class ResidencyChange(NamedTuple):
    """Bundles that are released at an event, and bundles that are gathered, in the order in which they are needed."""

    leave: tuple[str, ...]
    enter: tuple[str, ...]


def residency(
    program: Program, policy: Policy, bundles: Bundling, kept: Collection[int], carried: Sequence[str]
) -> tuple[list[ResidencyChange], tuple[str, ...]]:
    """For each event, how the bundles change that are resident until the next one.

    Those in use always are. Beside them the next ``policy.prefetch`` different ones that the program comes to before
    its parameters are updated. There is room for these and for one in use: if none in use is gathered, something that is
    resident already and will be wanted again stays. Uses around the innermost one take up no room: a root that is in use
    all the time would leave none to look ahead. Nor do the uses ``kept``, from their forward to the end of their backward.

    The step before may have gathered bundles ``carried``. Return the changes, and those of them that the first event wants.
    """
    events = program.events
    in_use = _in_use(events, bundles)
    wanted = _wanted(events, policy, bundles, in_use, kept)
    after = _after(events, wanted)
    stays = _Stays(events, bundles, kept)
    held: dict[str, None] = {}
    near: tuple[str, ...] = ()  # those of them that are not held as they stay alone
    updated: tuple[str, ...] = ()  # those that stay and that an update has released: they have to be gathered again
    result = []
    for i, event in enumerate(events):
        ended = stays.advance(i)
        here = wanted[i]
        if here is None:
            now = dict.fromkeys([*in_use[i], *(b for b in after[i] if b in held)])
            counted = [b for b in now if b not in in_use[i] and b not in stays.now]
            room = max(policy.prefetch + 1 - min(len(in_use[i]), 1) - len(counted), 0)
            now.update(dict.fromkeys([b for b in after[i] if b not in now][:room]))
            here = tuple(now)
        leave: tuple[str, ...] = tuple(held)
        enter: tuple[str, ...] = ()
        if event.kind == "update":
            here, updated = (), tuple(stays.now)
        else:
            leave = tuple(b for b in (*near, *ended) if b in held and b not in here and b not in stays.now)
            enter, updated = tuple(dict.fromkeys(b for b in (*here, *updated) if b not in held)), ()
        if i == 0:
            carried = tuple(b for b in carried if b in enter)
            enter = tuple(b for b in enter if b not in carried)
            held.update(dict.fromkeys(carried))
        for b in leave:
            held.pop(b, None)
        held.update(dict.fromkeys(enter))
        result.append(ResidencyChange(tuple(dict.fromkeys(leave)), enter))
        near = here
    return result, tuple(carried) if events else ()


class _Stays:
    """The bundles of kept uses, from their forward to the end of their backward."""

    def __init__(self, events: Sequence[Event], bundles: Bundling, kept: Collection[int]) -> None:
        self.events, self.bundles, self.kept = events, bundles, frozenset(kept)
        self.ends = {event.use: i for i, event in enumerate(events) if event.kind == "backward_end"} if kept else {}
        self.now = Counter[str]()

    def advance(self, i: int) -> tuple[str, ...]:
        """Go on to an event; those that stay no longer."""
        event = self.events[i]
        if event.use not in self.kept or event.unit not in self.bundles.of or self.ends.get(event.use, -1) < i:
            return ()
        name = self.bundles.of[event.unit]
        if event.kind == "forward":
            self.now[name] += 1
        elif event.kind == "backward_end" and self.ends[event.use] == i:
            self.now[name] -= 1
            if not self.now[name]:
                del self.now[name]
                return (name,)
        return ()


def _wanted(
    events: Sequence[Event], policy: Policy, bundles: Bundling, in_use: Sequence[tuple[str, ...]], kept: Collection[int]
) -> list[tuple[str, ...] | None]:
    """What is wanted where a use begins, beside what stays; None at other events."""
    upcoming = _upcoming(events, bundles, policy.prefetch + 1 + max(map(len, in_use), default=0))
    stays = _Stays(events, bundles, kept)
    wanted: list[tuple[str, ...] | None] = []
    before: tuple[str, ...] = ()
    ended: set[str] = set()
    for i, event in enumerate(events):
        ended.update(stays.advance(i))
        if event.kind not in _STARTS:
            wanted.append(None)
            continue
        now = dict.fromkeys(in_use[i])
        room = policy.prefetch + 1 - min(len(now), 1)
        ahead = [b for b in upcoming[i] if b not in now]
        chosen = ahead[: policy.prefetch]
        there = [b for b in ahead[len(chosen) :] if b in before or b in stays.now or b in ended]
        chosen += there[: room - len(chosen)]
        wanted.append(before := (*now, *chosen))
        ended = set()
    return wanted


def _after(events: Sequence[Event], wanted: Sequence[tuple[str, ...] | None]) -> list[tuple[str, ...]]:
    """What is wanted at the next beginning of a use, as long as no update comes before it."""
    after: list[tuple[str, ...]] = []
    following: tuple[str, ...] = ()
    for event, here in zip(reversed(events), reversed(wanted), strict=True):
        after.append(following)
        following = here if here is not None else () if event.kind == "update" else following
    after.reverse()
    return after


def first_wanted(program: Program, policy: Policy, bundles: Bundling) -> tuple[str, ...]:
    """The bundles that a step needs first: those to gather before it begins."""
    order = dict.fromkeys(bundles.of[e.unit] for e in program.events if e.kind in _STARTS and e.unit in bundles.of)
    return tuple(order)[: max(policy.prefetch, 1)]


def returns(program: Program, bundles: Bundling) -> list[list[int]]:
    """For each microbatch, the uses of gathered units that a backward comes back to, in the order in which it does."""
    result: list[list[int]] = [[]]
    for event in program.events:
        if event.kind == "microbatch_end":
            result.append([])
        elif event.kind == "backward" and event.unit in bundles.of:
            result[-1].append(event.use)
    return result


def _in_use(events: Sequence[Event], bundles: Bundling) -> list[tuple[str, ...]]:
    open_: list[str] = []
    result = []
    for event in events:
        if event.kind in _STARTS:
            open_.append(event.unit)
        elif event.kind.endswith("_end") and event.unit:
            open_.pop()
        result.append(tuple(dict.fromkeys(bundles.of[unit] for unit in reversed(open_) if unit in bundles.of)))
    return result


def _upcoming(events: Sequence[Event], bundles: Bundling, most: int) -> list[tuple[str, ...]]:
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
