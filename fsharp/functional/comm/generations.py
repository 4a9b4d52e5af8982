"""Generations of a job whose launcher restarts single ranks.

A *generation* of a job lasts until a rank ends early. The launcher then restarts that rank, and announces the next generation,
in which all ranks join the job again. Ranks and launcher talk through keys of a store that the launcher hosts, so that the
store outlives every rank:

====================  =======================================================================================
key                   value
====================  =======================================================================================
``news``              written by the launcher: the newest generation, and why it has begun
``end``               why no rank is restarted any more; the first text counts, of a rank or of the launcher
``can rejoin/r``      a generation: rank ``r`` runs steps, and can join later generations without a restart
``here/g/r``          rank ``r`` is about to join generation ``g``
``stopped/g/r``       rank ``r`` has stopped in generation ``g``; by an error of its ``own``, or ``heard``
====================  =======================================================================================
"""

import json
import os
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from fsharp.errors import CommError

GENERATION = "FSHARP_GENERATION"
"""The environment variable with the generation in which a process begins; a launcher that restarts single ranks sets it."""
Stop = Literal["own", "heard"]
_POLL_INTERVAL_S = 0.02


class KeyStore(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: str, /) -> None:
        """Replace the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if its value is ``expected``, or if it has none and that is empty. Return the value that it has then."""


class News(NamedTuple):
    """The launcher's last announcement.

    Attributes:
        number: the newest generation.
        why: why it has begun.
        end: why no rank is restarted any more; empty while ranks are.
    """

    number: int
    why: str
    end: str


def announce(store: KeyStore, number: int, why: str) -> None:
    """Announce a new generation."""
    store.set("news", json.dumps([number, why]))


def claim_end(store: KeyStore, text: str) -> str:
    """Say that no rank is restarted any more, and why. Return the text that all ranks see: the first one."""
    return store.compare_set("end", "", text).decode()


def read_end(store: KeyStore) -> str:
    """Return why no rank is restarted any more; empty while ranks are."""
    return store.get("end").decode() if store.check(["end"]) else ""


class Membership:
    """The part of one rank in the generations of its job.

    Args:
        store: the launcher's store.
        number: the generation in which this process begins.

    Attributes:
        number: the generation that this rank has joined, or is about to join.
    """

    def __init__(self, store: KeyStore, rank: int, size: int, number: int) -> None:
        self._store, self._rank, self._size, self.number = store, rank, size, number

    def news(self) -> News:
        """Return the newest announcement."""
        try:
            number, why = json.loads(self._store.get("news"))
            return News(number, why, read_end(self._store))
        except RuntimeError as error:  # torch's errors of a store
            return News(self.number, "", f"the launcher, which hosts the job's store, does not answer: {error}")

    def why_over(self) -> str | None:
        """Return why this rank's generation is over; None while it is not."""
        news = self.news()
        return news.end or (news.why if news.number > self.number else None)

    def wait_for_all(self, limit_s: float) -> None:
        """Wait until all ranks are about to join this generation.

        Raises:
            CommError: the generation is over already, or ranks have not come within the limit.
        """
        self._store.set(f"here/{self.number}/{self._rank}", "")
        deadline = time.monotonic() + limit_s
        while missing := [r for r in range(self._size) if not self._store.check([f"here/{self.number}/{r}"])]:
            if why := self.why_over():
                raise CommError(why)
            if time.monotonic() > deadline:
                who = f"rank {self._rank} of {self._size} has waited {limit_s:g} s"
                raise CommError(
                    self.claim_end(f"{who} for ranks {missing} to join generation {self.number} of the job; they never came.")
                )
            time.sleep(_POLL_INTERVAL_S)

    def enter_steps(self) -> None:
        """Say that this rank can join later generations without a restart."""
        self._store.set(f"can rejoin/{self._rank}", str(self.number))

    def leave_steps(self) -> None:
        """Say that this rank cannot join later generations any more without a restart."""
        forget_process(self._store, self._rank)

    def claim_end(self, text: str) -> str:
        """Say that no rank is restarted any more, and why. Return the text that all ranks see."""
        return claim_end(self._store, text)

    def wait_for_next(self, kind: Stop, error: Exception, limit_s: float) -> News:
        """Say that this rank has stopped, and wait for the next generation, which this rank is then about to join.

        Raises ``error`` if it is this rank's own, so that this process ends and is restarted. Raises it, too, if all ranks have
        stopped, and all or none by errors of their own: a restart would not help. Raises a CommError if no rank is restarted
        any more.
        """
        self._store.set(f"stopped/{self.number}/{self._rank}", json.dumps([kind, limit_s]))
        while True:
            stopped = stops(self._store, self.number, self._size)
            all_stopped = len(stopped) == self._size
            if all_stopped and len({each for each, _ in stopped.values()}) == 1:  # a new process would raise the error again
                self.claim_end(f"all ranks have stopped, and none was lost. Rank {self._rank} says:\n{error}")
                raise error
            news = self.news()
            if news.end:
                raise CommError(news.end) from error
            if news.number > self.number and kind == "heard":
                self.number = news.number
                return news
            if kind == "own" and (all_stopped or news.number > self.number):
                raise error
            time.sleep(_POLL_INTERVAL_S)


def stops(store: KeyStore, number: int, size: int) -> dict[int, tuple[Stop, float]]:
    """Return, by rank, how ranks have stopped in a generation, with their time limits in seconds."""
    keys = {rank: f"stopped/{number}/{rank}" for rank in range(size)}
    return {rank: tuple(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}


def can_rejoin(store: KeyStore, rank: int) -> bool:
    """Return whether the process of a rank can join later generations without a restart."""
    key = f"can rejoin/{rank}"
    return store.check([key]) and store.get(key) != b""


def forget_process(store: KeyStore, rank: int) -> None:
    """Say that the process of a rank has ended."""
    store.set(f"can rejoin/{rank}", "")


membership: Membership | None = None
"""The part of this process; None if no launcher would restart a rank."""


def begin_membership(make_store: Callable[[], KeyStore]) -> Membership | None:
    """Return the part of this process in the generations of its job; None if no launcher would restart a rank."""
    global membership
    if membership is None and (number := os.environ.get(GENERATION)) is not None:
        membership = Membership(make_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(number))
    return membership


def why_over() -> str | None:
    """Return why this process's generation is over; None while it is not, or if no launcher would restart a rank."""
    return None if membership is None else membership.why_over()
