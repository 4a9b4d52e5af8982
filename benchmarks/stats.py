"""Medians of what was measured in turns, and of the ratios within each turn. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[Mapping[str, float]]
"""For each round, a number for each contender."""
FSDP2 = "FSDP2"


@dataclass(frozen=True)
class Spread:
    """A median with the range around it."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return Spread(median(values), min(values), max(values))


def times(rounds: Rounds, name: str) -> Spread:
    """Of one contender."""
    return spread([each[name] for each in rounds])


def ratio(rounds: Rounds, name: str, base: str) -> Spread:
    """Of one contender's number to another's in the same round: what slows a round down slows both."""
    return paired(rounds, lambda each: each[name] / each[base])


def paired(rounds: Rounds, of: Callable[[Mapping[str, float]], float]) -> Spread:
    """Of a function of the numbers of one round."""
    return spread([of(each) for each in rounds])


def best_fsdp2(rounds: Rounds) -> str:
    """The fastest of FSDP2's variants, which is the measure."""
    return min((name for name in rounds[0] if name.startswith(FSDP2)), key=lambda name: times(rounds, name).median)


def turn(names: Sequence[str], round_: int) -> list[str]:
    """The order of a round. Each starts one further on, and every second one runs backwards, so that all follow all."""
    start = (round_ // 2) % len(names)
    order = [*names[start:], *names[:start]]
    return order if round_ % 2 == 0 else order[::-1]
