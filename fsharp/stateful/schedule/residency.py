"""The plan of which buckets of units are resident at each event of a program: buckets in use, and the next buckets to use."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fsharp.stateful.schedule.costs import Bucket, BucketOfUnit
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, split_by_microbatch

_START_KINDS = ("forward", "backward")


class ResidencyChange(NamedTuple):
    """The buckets to release at an event, and the buckets to gather, in the order in which these are needed."""

    released: tuple[Bucket, ...]
    gathered: tuple[Bucket, ...]


def plan_residency(
    program: Program, policy: SchedulePolicy, buckets: BucketOfUnit, kept_uses: Collection[int]
) -> list[ResidencyChange]:
    """Return, for each event, the buckets to release and to gather. ``buckets``: bucket by unit.

    A bucket is *resident* while it is gathered in full. At most ``policy.prefetch + 1`` buckets are resident: the one in use,
    and the next different buckets that the program uses before the next update. While no bucket is in use, one more bucket that
    is resident and will be used again may stay.

    Two kinds of buckets do not count in this limit. First, buckets of all uses but the innermost one: the root is in use during
    all other uses, and would leave no room for prefetch. Second, buckets of ``kept_uses``, from forward to end of backward.
    """
    events = program.events
    in_use, staying = _buckets_of_open_uses(events, buckets), _staying_buckets(events, buckets, frozenset(kept_uses))
    wanted = _resident_buckets_at_starts(events, policy, buckets, in_use, staying)
    after = _buckets_of_next_event(events, wanted)
    held: dict[Bucket, None] = {}
    updated: tuple[Bucket, ...] = ()  # buckets that stay, and have to be gathered again after an update
    result = []
    for i, event in enumerate(events):
        stays, here = staying[i], wanted[i]
        if here is None:
            now = dict.fromkeys([*in_use[i], *(b for b in after[i] if b in held)])
            counted = [b for b in now if b not in in_use[i] and b not in stays]
            room = max(policy.prefetch + 1 - min(len(in_use[i]), 1) - len(counted), 0)
            now.update(dict.fromkeys([b for b in after[i] if b not in now][:room]))
            here = tuple(now)
        if event.kind == "update":
            change, updated = ResidencyChange(tuple(held), ()), tuple(stays)
        else:
            released = tuple(b for b in held if b not in here and b not in stays)
            gathered = dict.fromkeys(b for b in (*here, *updated) if b not in held)
            change, updated = ResidencyChange(released, tuple(gathered)), ()
        for b in change.released:
            del held[b]
        held.update(dict.fromkeys(change.gathered))
        result.append(change)
    return result


def _staying_buckets(events: Sequence[Event], buckets: BucketOfUnit, kept_uses: Collection[int]) -> list[Mapping[Bucket, int]]:
    """Return, for each event, the buckets that ``kept_uses`` keep resident, with the number of such uses."""
    ends = {
        event.use_index: i for i, event in enumerate(events) if event.kind == "backward_end" and event.use_index in kept_uses
    }
    counts: Mapping[Bucket, int] = {}
    result = []
    for i, event in enumerate(events):
        name = buckets.get(event.unit, ())
        change = (event.kind == "forward") - (ends.get(event.use_index) == i)
        if name and event.use_index in ends and change:
            counts = {**counts, name: counts.get(name, 0) + change}
            counts = {each: count for each, count in counts.items() if count}
        result.append(counts)
    return result


def _resident_buckets_at_starts(
    events: Sequence[Event],
    policy: SchedulePolicy,
    buckets: BucketOfUnit,
    in_use: Sequence[tuple[Bucket, ...]],  # from _buckets_of_open_uses
    staying: Sequence[Mapping[Bucket, int]],  # from _staying_buckets
) -> list[tuple[Bucket, ...] | None]:
    """Return, for each start of a forward or backward, the buckets that should be resident; None for any other event."""
    upcoming = _upcoming_buckets(events, buckets, policy.prefetch + 1 + max(map(len, in_use), default=0))
    wanted: list[tuple[Bucket, ...] | None] = []
    before: set[Bucket] = set()  # buckets that are resident at the previous start
    for i, event in enumerate(events):
        if event.kind not in _START_KINDS:
            wanted.append(None)
            continue
        now = dict.fromkeys(in_use[i])
        room = policy.prefetch + 1 - min(len(now), 1)
        ahead = [b for b in upcoming[i] if b not in now]
        chosen = ahead[: policy.prefetch]
        there = [b for b in ahead[len(chosen) :] if b in before or b in staying[i]]
        chosen += there[: room - len(chosen)]
        wanted.append((*now, *chosen))
        before = {*now, *chosen, *staying[i]}
    return wanted


def _buckets_of_next_event(events: Sequence[Event], wanted: Sequence[tuple[Bucket, ...] | None]) -> list[tuple[Bucket, ...]]:
    """Return, for each event, the buckets of the next event with buckets in ``wanted``; none if an update comes earlier."""
    after: list[tuple[Bucket, ...]] = []
    following: tuple[Bucket, ...] = ()
    for event, here in zip(reversed(events), reversed(wanted), strict=True):
        after.append(following)
        following = here if here is not None else () if event.kind == "update" else following
    after.reverse()
    return after


def backward_uses_by_microbatch(program: Program, buckets: BucketOfUnit) -> list[list[int]]:
    """Return, for each microbatch, the uses of gathered units whose backward is in the microbatch, in order of backwards."""
    parts = split_by_microbatch(program.events)
    return [[event.use_index for event in part if event.kind == "backward" and event.unit in buckets] for part in parts]


def _buckets_of_open_uses(events: Sequence[Event], buckets: BucketOfUnit) -> list[tuple[Bucket, ...]]:
    """Return, for each event, the buckets of the uses that have begun and not ended, the innermost use first."""
    open_: list[str] = []
    result = []
    for event in events:
        if event.kind in _START_KINDS:
            open_.append(event.unit)
        elif event.kind.endswith("_end") and event.unit:
            open_.pop()
        result.append(tuple(dict.fromkeys(buckets[unit] for unit in reversed(open_) if unit in buckets)))
    return result


def _upcoming_buckets(events: Sequence[Event], buckets: BucketOfUnit, limit: int) -> list[tuple[Bucket, ...]]:
    """Return, for each event, the next ``limit`` different buckets that are used after the event, before the next update."""
    result: list[tuple[Bucket, ...]] = []
    ahead: tuple[Bucket, ...] = ()
    for event in reversed(events):
        result.append(ahead)
        if event.kind == "update":
            ahead = ()
        elif event.kind in _START_KINDS and event.unit in buckets:
            name = buckets[event.unit]
            ahead = (name, *(b for b in ahead if b != name))[:limit]
    result.reverse()
    return result
