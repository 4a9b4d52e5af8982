"""Choose which units share a collective, by latency and bandwidth.

[Note: buckets pay] One collective for two units saves a latency. Sharing costs overlap, as the first unit arrives only with the
second. It also costs memory, as both units are live from then on. If a unit's bytes take as long as ``k`` latencies, the saved
latency is ``1 / (k + 1)`` of its time. So neighbours are joined if their bytes take at most five latencies, and are at most a
quarter of the bytes of all units. Thus a model is never resident in full to save a few messages. A unit that takes more than
two latencies stays alone. An all_reduce, or collectives along two axes, are two messages: twice the bytes are allowed.

Measured over gloo on 2 and 4 ranks, zero3 and zero1, models of 24 blocks of 308,000 parameters and of 12 blocks of 788,000.
With buckets of up to 4 MB a step took 0 to 10 % less time than with 2 MB. With 5 MB it took 5 to 12 % less.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Program, split_by_microbatch
from fsharp.stateful.schedule.schedule import coalescing_key

_MAX_BUCKET_NBYTES = 5_000_000  # of a bucket, sent in five latencies: 1 ms at 1 GB/s, as gloo; 20 us at 50 GB/s, as NCCL
_MAX_JOINED_NBYTES = 2_000_000  # of a unit that shares a bucket
_MIN_BUCKETS = 4  # least number of buckets


def bucket_and_unit_limits(sent: Iterable[int], *, num_messages: int = 1) -> tuple[int, int]:
    """Return two limits in bytes: for all units of a bucket together, and for each unit that shares a bucket.

    ``sent``: bytes that each unit sends. ``num_messages``: messages, one after the other, in which a bucket travels.
    """
    return min(num_messages * _MAX_BUCKET_NBYTES, sum(sent) // _MIN_BUCKETS), num_messages * _MAX_JOINED_NBYTES


Bucket = tuple[str, ...]
"""Names of the units that share one collective, in order."""
BucketOfUnit = Mapping[str, Bucket]
"""The bucket of each unit, by the unit's name."""


def group_into_buckets(
    order: Iterable[str],
    sent: Mapping[str, int],
    coalescing_keys: Mapping[str, Hashable],
    max_nbytes: int,
    max_unit_nbytes: int,
    groups: Mapping[str, int] = {},
) -> BucketOfUnit:
    """Return buckets of neighbouring units with equal ``coalescing_keys``: a rank sends at most ``max_nbytes`` for a bucket.

    ``sent``: the bytes that a rank sends, by unit. A unit that sends nothing or over ``max_unit_nbytes``, or has the key None,
    is alone. ``groups``: numbers by unit. Units with equal numbers are joined whatever their bytes, and with no other units.
    """
    found: list[list[str]] = []
    last, filled = "", 0
    for unit in dict.fromkeys(order):
        joins = last and sent[unit] and coalescing_keys[unit] is not None and coalescing_keys[unit] == coalescing_keys[last]
        group, fits = groups.get(unit), filled + sent[unit] <= max_nbytes and sent[unit] <= max_unit_nbytes
        if joins and group == groups.get(last) and (group is not None or (fits and sent[last] <= max_unit_nbytes)):
            found[-1].append(unit)
            filled += sent[unit]
        else:
            found.append([unit])
            filled = sent[unit]
        last = unit
    return {unit: tuple(units) for units in found for unit in units}


class BucketsByCollective:
    """The buckets of units, for ``gathers``, ``reduces`` of microbatches, ``final_reduces``, and ``update_gathers``."""

    def __init__(self, program: Program, policy: SchedulePolicy) -> None:
        self._policy, self._facts, units = policy, program.facts, program.units
        used = [event.unit for event in program.events if event.kind in ("forward", "backward")]
        done = _units_in_gradient_order(program)
        self.gathers = self._group_units({unit.name: unit.gather for unit in units if unit.gathered}, used)
        self.reduces = self._group_units({unit.name: unit.reduce for unit in units}, done)
        self.final_reduces = self._group_units({unit.name: unit.finish for unit in units}, done)
        touched = [event.unit for event in program.events]
        self.update_gathers = self._group_units({unit.name: unit.update_gather for unit in units}, touched)

    def _group_units(self, calls: Mapping[str, Sequence[Call]], order: Iterable[str]) -> BucketOfUnit:
        """Return buckets of the units in ``calls``, which has their collectives. Units in ``order`` come first, in order."""
        order = [unit for unit in dict.fromkeys([*order, *calls]) if unit in calls]
        sent = {unit: sum(call.nbytes for call in calls[unit]) for unit in order}
        most = max([calls[unit] for unit in order], key=len, default=())
        num_messages, given = sum(2 if call.op == "all_reduce" else 1 for call in most), self._policy.bucket_nbytes
        limits = (given, given) if given is not None else bucket_and_unit_limits(sent.values(), num_messages=num_messages)
        groups = {unit: i for i, group in enumerate(self._policy.together) for unit in group}
        keys = {unit: coalescing_key(calls[unit], self._facts[unit]) for unit in order}
        return group_into_buckets(order, sent, keys, *limits, groups)


def _units_in_gradient_order(program: Program) -> list[str]:
    """Return units in the order in which gradients are complete, microbatch by microbatch; each unit at its first place."""
    result = dict[str, None]()
    for events in split_by_microbatch(program.events):
        last = {event.unit: i for i, event in enumerate(events) if event.has_gradient}
        result |= dict.fromkeys(sorted(last, key=last.__getitem__))
    return list(result)
