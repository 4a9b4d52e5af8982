"""Costs of collectives, as far as they decide what is sent together: latency against bandwidth.

[Note: buckets pay]
Joining two units in one collective saves a latency. What it costs is overlap: the first of them is there only when both
are, and memory, as both are live from then on. A collective that takes ``k`` latencies to send is slower by a part
``1 / (k + 1)`` at most for not being joined with others. So neighbours are joined as long as what they send together takes
no more than two latencies, and no bucket is more than a quarter of what all of them send: a model is never resident in
full for the sake of a few messages, and something is left to overlap.

Small buffers that are joined are also copied, into what travels and out of it, some three times the bytes that are sent. A step
of 24 blocks of 33 thousand parameters over gloo on two ranks took a fifth less processor time when they were joined than alone;
one of blocks of 308 thousand a few percent less when they were joined and packed, and another 4 % less as messages.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from fsharp.annotated import check_fields
from fsharp.errors import ScheduleError

_LATENCIES = 2.0  # for which a bucket is sent at most
_BUCKETS = 4  # into which all that is sent is cut at least


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective costs.

    >>> Link(latency_s=1e-3, bandwidth=1e9).seconds(1_000_000)
    0.002

    Args:
        latency_s: seconds that a collective takes beside sending.
        bandwidth: bytes per second that a rank sends.

    Raises:
        ScheduleError: a number out of range.
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 <= self.latency_s < math.inf and self.bandwidth > 0):
            raise ScheduleError(
                f"Link(): latency_s is {self.latency_s}, expected at least 0 and finite; bandwidth is {self.bandwidth}, "
                "expected more than 0 bytes per second."
            )

    def seconds(self, nbytes: int) -> float:
        """Seconds of a collective for which a rank sends so many bytes."""
        return self.latency_s + nbytes / self.bandwidth


GLOO = Link(latency_s=1e-3, bandwidth=1e9)
"""Between processes on CPUs."""
NCCL = Link(latency_s=20e-6, bandwidth=50e9)
"""Between GPUs of one machine."""


def bucket_limit(sent: Iterable[int], link: Link) -> int:
    """Bytes that a rank sends in one bucket at most. See [Note: buckets pay].

    Args:
        sent: bytes that a rank sends for each unit.
        link: what a collective costs.
    """
    return int(min(_LATENCIES * link.latency_s * link.bandwidth, sum(sent) / _BUCKETS))


@dataclass(frozen=True, slots=True)
class Bundling:
    """Units that move as one.

    Attributes:
        of: the bundle of each unit; it has the name of its first.
        members: its units, in order.
    """

    of: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]


def bundles(
    order: Iterable[str],
    sent: Mapping[str, int],
    channels: Mapping[str, Hashable],
    most: int,
    groups: Mapping[str, int] = {},
) -> Bundling:
    """Neighbours that share a channel, joined while a rank sends no more than so many bytes for them.

    Args:
        order: units, in the order in which they move.
        sent: bytes that a rank sends for each; what sends nothing is alone.
        channels: what units of one bundle agree in; None for those that are alone.
        most: bytes of one bundle.
        groups: group number by unit. Units of a group are joined whatever they send, and only with units of the same group.
    """
    members: dict[str, list[str]] = {}
    last, filled = "", 0
    for unit in dict.fromkeys(order):
        joins = last and sent[unit] and channels[unit] is not None and channels[unit] == channels[last]
        group = groups.get(unit)
        if joins and group == groups.get(last) and (group is not None or filled + sent[unit] <= most):
            members[last].append(unit)
            filled += sent[unit]
        else:
            last, filled = unit, sent[unit]
            members[last] = [unit]
    of = {unit: name for name, units in members.items() for unit in units}
    return Bundling(of, {name: tuple(units) for name, units in members.items()})
