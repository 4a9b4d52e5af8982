"""DebugPolicy: what tests and benchmarks ask of a scheduler besides."""

from dataclasses import dataclass

from fsharp.stateful.schedule.policy import Policy


@dataclass(frozen=True, slots=True)
class DebugPolicy(Policy):
    """A :class:`~fsharp.Policy` that costs time, and changes no value either.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), policy=fs.testing.DebugPolicy(poison=True, prefetch=2))

    Args:
        poison: fill memory with NaN when it is released, so that a use after release shows.
        trivial_axes: run collectives along axes of size 1 too, which otherwise cost nothing: to measure on one device.
    """

    poison: bool = False
    trivial_axes: bool = False
