"""Totals: losses summed over ranks while their backward runs, so that ranks need not wait for each other at its end."""

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fsharp.functional.errors import LossError
from fsharp.functional.train import Loss, sums_of, totals
from fsharp.stateful.transport.patient import Patient
from fsharp.stateful.transport.workers import Flight


class _Sent(NamedTuple):
    """A loss whose totals are on their way.

    Attributes:
        weight: this rank's.
        versions: of its sum and weight when they left.
        flight: whose result the totals are.
    """

    weight: torch.Tensor
    versions: tuple[int, int]
    flight: Flight


class Totals:
    """Those of losses that ``value_and_grad(averaged=True)`` has returned, for as long as somebody has the loss."""

    def __init__(self) -> None:
        self._sent = WeakTensorKeyDictionary()

    def send(self, loss: Loss, comm: Patient) -> None:
        """Begin to sum a loss, whose backward is about to begin."""
        sums = sums_of(loss, comm)
        flight = comm.begin(lambda inner: totals(sums, inner))
        self._sent[loss.sum] = _Sent(loss.weight, _versions(loss), flight)

    def take(self, loss: Loss) -> torch.Tensor | None:
        """The totals of a loss, once; None if they have not been sent.

        Raises:
            LossError: the loss is not what it was.
        """
        sent: _Sent | None = self._sent.pop(loss.sum, None)
        if sent is None:
            return None
        if sent.weight is not loss.weight or sent.versions != _versions(loss):
            raise LossError(
                "average(): the loss was changed after value_and_grad(averaged=True) had sent it to the other ranks. Leave out "
                "averaged=True where it may be changed."
            )
        result: torch.Tensor = sent.flight.wait()
        return result


def _versions(loss: Loss) -> tuple[int, int]:
    return loss.sum._version, loss.weight._version
