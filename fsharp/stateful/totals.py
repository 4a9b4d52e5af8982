"""Totals: losses summed over ranks while their backward runs, so that ranks need not wait for each other at its end."""

from collections.abc import Set
from typing import NamedTuple

import torch

from fsharp.functional.comm import Comm
from fsharp.functional.train import Loss, sums_of, totals
from fsharp.stateful.patient import Patient
from fsharp.stateful.workers import Flight


class _Handed(NamedTuple):
    """A loss as ``value_and_grad`` returns it.

    Attributes:
        number: of the call, within its run.
        loss: the sum and weight of this rank.
        versions: of these tensors, then.
        flight: on which its totals are, if they have left.
    """

    number: int
    loss: Loss
    versions: tuple[int, int]
    flight: Flight | None


class Totals:
    """The losses of one run after the other.

    What a function has averaged in one run it is likely to average in the next: there it leaves before its backward begins.
    Ranks average the same losses, so they send them in the same order.

    Args:
        comm: the ranks. Nothing leaves early where their calls are not made by a thread of its own.

    Attributes:
        averaged: numbers of the losses that this run has averaged.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.begin(frozenset())

    def begin(self, expected: Set[int]) -> None:
        """A new run, which will average these losses, or the end of one."""
        self._expected, self._handed = expected, list[_Handed]()
        self.averaged: set[int] = set()

    def send(self, loss: Loss) -> None:
        """The forward of a loss is over, which ``value_and_grad`` will return, and its backward is about to begin."""
        number, flight, comm = len(self._handed), None, self._comm
        if number in self._expected and isinstance(comm, Patient):
            sums = sums_of(loss, comm)
            flight = comm.begin(lambda inner: totals(sums, inner))
        self._handed.append(_Handed(number, loss, _versions(loss), flight))

    def take(self, loss: Loss) -> torch.Tensor:
        """The totals of a loss: those that have left, if it is the same one, or by a call of its own."""
        for handed in self._handed:
            if handed.loss.sum is loss.sum and handed.loss.weight is loss.weight and handed.versions == _versions(loss):
                self.averaged.add(handed.number)
                if handed.flight is not None:
                    result: torch.Tensor = handed.flight.wait()
                    return result
        return totals(sums_of(loss, self._comm), self._comm)


def _versions(loss: Loss) -> tuple[int, int]:
    return loss.sum._version, loss.weight._version
