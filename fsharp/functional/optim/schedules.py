"""Schedules with the names, arguments and values of optax: functions of the number of updates so far.

A schedule is an object whose repr shows its numbers, so that ranks can compare them. A schedule takes a number, or a scalar
tensor from :func:`~fsharp.optim.adamw` with ``capturable=True``. Optax schedules work as well, but take only numbers, and ranks
compare only their names.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsharp.errors import OptionError
from fsharp.type_checks import options_checked

Schedule = Callable[[Any], Any]


@options_checked
@dataclass(frozen=True, slots=True)
class constant_schedule:
    """A schedule that always returns ``value``.

    >>> constant_schedule(0.5)(7)
    0.5
    """

    value: float

    def __call__(self, count: Any) -> Any:
        """Return the value after ``count`` updates."""
        return self.value


@options_checked
@dataclass(frozen=True, slots=True)
class linear_schedule:
    """A schedule that changes linearly from ``init_value`` to ``end_value``.

    Args:
        init_value: value until update ``transition_begin``.
        end_value: value from update ``transition_begin + transition_steps`` on.
        transition_steps: number of updates in which the value changes. With 0 or less the value stays ``init_value``, as in
            optax.
        transition_begin: number of updates before the value begins to change.

    Raises:
        OptionError: ``transition_begin`` is negative.

    >>> rate = linear_schedule(0.0, 1.0, 4, transition_begin=1)
    >>> [rate(count) for count in range(7)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int = 0

    def __post_init__(self) -> None:
        if self.transition_begin < 0:
            raise OptionError(f"linear_schedule(): transition_begin is {self.transition_begin!r}, expected 0 or more.")

    def __call__(self, count: Any) -> Any:
        """Return the value after ``count`` updates."""
        if self.transition_steps <= 0:
            return self.init_value
        left = 1 - _clip_count(count - self.transition_begin, self.transition_steps) / self.transition_steps
        return (self.init_value - self.end_value) * left + self.end_value


@options_checked
@dataclass(frozen=True, slots=True)
class cosine_decay_schedule:
    """A schedule that falls from ``init_value`` to ``alpha * init_value`` along half a cosine. Source: arXiv 1608.03983.

    Args:
        init_value: value at the start.
        decay_steps: number of updates until the end. An OptionError is raised unless this number is positive.
        alpha: fraction of ``init_value`` that is left at the end.
        exponent: power to which the cosine factor is raised; the factor falls from 1 to 0.

    >>> rate = cosine_decay_schedule(1.0, 4, alpha=0.1)
    >>> [round(rate(count), 3) for count in range(6)]
    [1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """

    init_value: float
    decay_steps: int
    alpha: float = 0.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not self.decay_steps > 0:
            raise OptionError(f"cosine_decay_schedule(): decay_steps is {self.decay_steps!r}, expected a positive number.")

    def __call__(self, count: Any) -> Any:
        """Return the value after ``count`` updates."""
        angle = math.pi * _clip_count(count, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + (torch.cos(angle) if isinstance(angle, torch.Tensor) else math.cos(angle)))
        return self.init_value * ((1 - self.alpha) * cosine**self.exponent + self.alpha)


@options_checked
@dataclass(frozen=True, slots=True)
class join_schedules:
    """A schedule that follows several schedules in turn. Each one counts updates from its own start.

    Args:
        schedules: the schedules.
        boundaries: numbers of updates after which the second, the third and each later schedule begins. An OptionError is
            raised unless there is one boundary less than schedules.

    >>> rate = join_schedules([constant_schedule(1.0), linear_schedule(0.5, 0.0, 2)], [2])
    >>> [rate(count) for count in range(6)]
    [1.0, 1.0, 0.5, 0.25, 0.0, 0.0]
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.schedules) - 1:
            raise OptionError(
                f"join_schedules(): got {len(self.boundaries)} boundaries for {len(self.schedules)} schedules, expected one "
                "boundary less than schedules."
            )

    def __call__(self, count: Any) -> Any:
        """Return the value after ``count`` updates."""
        value = self.schedules[0](count)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            if isinstance(count, torch.Tensor):
                value = torch.where(count < boundary, value, schedule(count - boundary))
            elif count >= boundary:
                value = schedule(count - boundary)
        return value


@options_checked
def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0, exponent: float = 1.0
) -> join_schedules:
    """Return a schedule that rises linearly to ``peak_value``, and then falls to ``end_value`` along half a cosine.

    Args:
        init_value: value at the start.
        peak_value: value at the end of the warm-up. After a peak of 0 the value stays 0, whatever ``end_value`` is.
        warmup_steps: number of updates of the warm-up.
        decay_steps: number of updates until ``end_value``, with the warm-up. An OptionError is raised unless this number is
            more than ``warmup_steps``.
        end_value: value after ``decay_steps`` updates.
        exponent: power to which the cosine factor is raised; the factor falls from 1 to 0.

    >>> rate = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(rate(count), 3) for count in range(8)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    if not decay_steps > warmup_steps:
        raise OptionError(
            f"warmup_cosine_decay_schedule(): decay_steps is {decay_steps!r}, expected more than warmup_steps, "
            f"{warmup_steps!r}: the warm-up is part of decay_steps."
        )
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    rising = linear_schedule(init_value, peak_value, warmup_steps)
    return join_schedules(
        (rising, cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)), (warmup_steps,)
    )


def _clip_count(count: Any, high: int) -> Any:
    return count.double().clamp(0, high) if isinstance(count, torch.Tensor) else min(max(count, 0), high)
