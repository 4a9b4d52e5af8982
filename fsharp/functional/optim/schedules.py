"""Learning-rate schedules: functions of the number of updates made, whose repr tells ranks apart that were given others."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch


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
    return _Warmup("cosine", peak, warmup, total, floor)


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
    return _Warmup("linear", peak, warmup, total, floor)


@dataclass(frozen=True, slots=True)
class _Warmup:
    shape: Literal["cosine", "linear"]
    peak: float
    warmup: int
    total: int
    floor: float

    def __call__(self, count: Any) -> Any:
        if isinstance(count, torch.Tensor):
            return self._of_tensor(count.double())
        if count < self.warmup:
            return self.peak * (count + 1) / self.warmup
        done = min(1.0, (count - self.warmup) / max(1, self.total - self.warmup))
        left = 1 - done if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.floor + (self.peak - self.floor) * left

    def _of_tensor(self, count: torch.Tensor) -> torch.Tensor:
        rising = self.peak * (count + 1) / max(1, self.warmup)
        done = ((count - self.warmup) / max(1, self.total - self.warmup)).clamp(0.0, 1.0)
        left = 1 - done if self.shape == "linear" else 0.5 * (1 + torch.cos(math.pi * done))
        return torch.where(count < self.warmup, rising, self.floor + (self.peak - self.floor) * left)
