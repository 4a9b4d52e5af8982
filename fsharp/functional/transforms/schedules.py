"""Learning-rate schedules: functions of the number of updates made."""

import math
from collections.abc import Callable


def warmup_cosine(peak: float, *, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """Linear from 0 to ``peak``, then a half cosine down to ``floor``.

    Args:
        peak: the highest rate.
        warmup: updates until it is reached.
        total: updates until ``floor`` is.
        floor: the rate from then on.

    >>> rate = warmup_cosine(1.0, warmup=2, total=6)
    >>> [round(rate(count), 3) for count in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def warmup_cosine_at(count: int) -> float:
        if count < warmup:
            return peak * (count + 1) / warmup
        done = min(1.0, (count - warmup) / max(1, total - warmup))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return warmup_cosine_at


def warmup_linear(peak: float, *, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """Linear from 0 to ``peak``, then linear down to ``floor``.

    Args:
        peak: the highest rate.
        warmup: updates until it is reached.
        total: updates until ``floor`` is.
        floor: the rate from then on.

    >>> rate = warmup_linear(1.0, warmup=2, total=6)
    >>> [rate(count) for count in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def warmup_linear_at(count: int) -> float:
        if count < warmup:
            return peak * (count + 1) / warmup
        done = min(1.0, (count - warmup) / max(1, total - warmup))
        return peak + (floor - peak) * done

    return warmup_linear_at
