"""Generations of a job whose launcher restarts single ranks.

A *generation* of a job lasts until the process of a rank ends before its function has returned, as after a crash. The launcher
then restarts that rank, and announces the next generation, in which all ranks join the job again. Ranks and launcher talk
through keys of a store that the launcher hosts, so that the store outlives every rank:

====================  =======================================================================================
key                   value
====================  =======================================================================================
``news``              written by the launcher: the newest generation, and why it has begun
``end``               why no rank is restarted any more; the first text counts, of a rank or of the launcher
``can rejoin/r``      a generation: rank ``r`` runs steps, and can join later generations without a restart
``here/g/r``          seconds for which rank ``r``, which is about to join generation ``g``, waits for the other ranks
``stopped/g/r``       rank ``r`` has stopped in generation ``g``: by its ``own`` error, or one that it has ``heard`` of
====================  =======================================================================================
"""

import json
import os
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from fsharp.errors import CommError

GENERATION_VARIABLE = "FSHARP_GENERATION"
"""The environment variable with the generation in which a process begins; a launcher that restarts single ranks sets it."""
StopKind = Literal["own", "heard"]
_MAX_ERROR_CHARS = 8000
_POLL_INTERVAL_S = 0.02


class KeyStore(Protocol):
    """A store of values by key: the methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: str, /) -> None:
        """Replace the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key. If there is none yet, wait; RuntimeError after the store's timeout."""

    def check(self, keys: list[str], /) -> bool:
        """Return at once whether all keys have values."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key to ``desired`` if its value is ``expected`` (empty: no value yet). Return the key's value afterwards."""


class Announcement(NamedTuple):
    """The launcher's message to all ranks about the newest generation of a job, which begins when ranks are restarted.

    Attributes:
        number: number of the generation.
        why: why the generation has begun.
        why_restarts_ended: why the launcher restarts no more ranks; None while the launcher still restarts ranks.
    """

    number: int
    why: str
    why_restarts_ended: str | None


def shorten_error(text: str) -> str:
    """Return the text of an error. Of more than 8,000 characters cut the middle, as the store refuses values of several MiB."""
    half = _MAX_ERROR_CHARS // 2
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"


def announce_generation(store: KeyStore, number: int, why: str) -> None:
    """Announce generation ``number`` to all ranks. ``why``: what ended the last one. The launcher calls this function."""
    store.set("news", json.dumps([number, why]))


def end_restarts(store: KeyStore, reason: str) -> str:
    """Announce that no rank is restarted from now on. Return the ``reason`` of the first such announcement."""
    return store.compare_set("end", "", reason).decode()


def why_restarts_ended(store: KeyStore) -> str | None:
    """Return why the launcher restarts no more ranks; None while the launcher still restarts ranks."""
    return store.get("end").decode() if store.check(["end"]) else None


class RankMembership:
    """One rank's membership in the generations of its job. ``number``: the generation that the rank is in, or joins next."""

    def __init__(self, store: KeyStore, rank: int, size: int, number: int) -> None:
        self._store, self._rank, self._size, self.number = store, rank, size, number

    def read_announcement(self) -> Announcement:
        """Return the launcher's newest announcement.

        If the launcher does not answer, return an Announcement that says so, and that no more ranks are restarted.
        """
        try:
            number, why = json.loads(self._store.get("news"))
            return Announcement(number, why, why_restarts_ended(self._store))
        except RuntimeError as error:  # torch's errors of a store
            return Announcement(self.number, "", f"the launcher, which hosts the job's store, does not answer: {error}")

    def why_generation_ended(self) -> str | None:
        """Return why the generation of this rank, or all restarts, have ended; None while the generation lasts."""
        announcement = self.read_announcement()
        return announcement.why_restarts_ended or (announcement.why if announcement.number > self.number else None)

    def join_and_wait_for_all_ranks(self, limit_s: float) -> None:
        """Announce that this rank is ready to join, and wait for all ranks to be ready.

        Raises CommError if this generation ends meanwhile. Raises CommError, and ends all restarts, if ranks are missing after
        ``limit_s`` seconds. Before ``limit_s`` is over, the launcher kills each process that is still in an earlier generation.
        """
        self._store.set(f"here/{self.number}/{self._rank}", str(limit_s))
        deadline = time.monotonic() + limit_s
        while missing := [r for r in range(self._size) if not self._store.check([f"here/{self.number}/{r}"])]:
            if why := self.why_generation_ended():
                raise CommError(why)
            if time.monotonic() > deadline:
                who = f"rank {self._rank} of {self._size} has waited {limit_s:g} s"
                text = f"{who} for ranks {missing} to join generation {self.number} of the job; they never came."
                raise CommError(end_restarts(self._store, text))
            time.sleep(_POLL_INTERVAL_S)

    def announce_can_rejoin(self, *, can: bool) -> None:
        """Tell the launcher whether this rank can join later generations without a restart of its process."""
        self._store.set(f"can rejoin/{self._rank}", str(self.number) if can else "")

    def wait_for_next_generation(self, kind: StopKind, error: Exception, limit_s: float) -> Announcement:
        """Announce that this rank has stopped, and wait until the launcher announces the next generation.

        ``kind`` is ``"own"`` if this rank raised ``error`` itself, and ``"heard"`` if the failure of another rank ended its
        collective. ``limit_s``: seconds that other ranks have to stop as well, before the launcher kills them.

        If ``kind`` is ``"heard"``, ``number`` becomes that of the new generation, and the announcement is returned. If it is
        ``"own"``, ``error`` is raised, so that this process ends and a new process takes the rank's place. ``error`` is also
        raised if all ranks have stopped with the same ``kind``: no single rank is to blame, and a restart would not help. A
        CommError is raised if ranks are no longer restarted.
        """
        self._store.set(f"stopped/{self.number}/{self._rank}", json.dumps([kind, limit_s]))
        while True:
            stopped = stop_kinds_and_limits(self._store, self.number, self._size)
            all_stopped = len(stopped) == self._size
            if all_stopped and len({each for each, _ in stopped.values()}) == 1:  # a new process would often raise it again
                why = f"all ranks have stopped, and none was lost. Rank {self._rank} says:\n{shorten_error(str(error))}"
                end_restarts(self._store, why)
                raise error
            announcement = self.read_announcement()
            if announcement.why_restarts_ended:
                raise CommError(announcement.why_restarts_ended) from error
            if announcement.number > self.number and kind == "heard":
                self.number = announcement.number
                return announcement
            if kind == "own" and (all_stopped or announcement.number > self.number):
                raise error
            time.sleep(_POLL_INTERVAL_S)


def stop_kinds_and_limits(store: KeyStore, number: int, size: int) -> dict[int, tuple[StopKind, float]]:
    """Return, by rank, ``(kind, limit_s)`` of the ranks that have stopped in generation ``number``.

    ``kind``: ``"own"`` if the rank itself raised an error, ``"heard"`` if another rank's failure ended its collective.
    ``limit_s``: seconds that other ranks have to stop as well, before the launcher kills them. ``size``: number of ranks.
    """
    keys = {rank: f"stopped/{number}/{rank}" for rank in range(size)}
    return {rank: tuple(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}


def limit_s_by_joining_rank(store: KeyStore, number: int, size: int) -> dict[int, float]:
    """Return, by rank, the seconds for which the rank waits for all others in generation ``number``.

    Ranks that are not yet ready to join are left out: see :meth:`RankMembership.join_and_wait_for_all_ranks`. ``size``: number
    of ranks of the job.
    """
    keys = {rank: f"here/{number}/{rank}" for rank in range(size)}
    return {rank: float(store.get(key)) for rank, key in keys.items() if store.check([key])}


def can_rejoin_in_process(store: KeyStore, rank: int) -> bool:
    """Return whether a rank can join later generations without a restart of its process."""
    key = f"can rejoin/{rank}"
    return store.check([key]) and store.get(key) != b""


def announce_process_ended(store: KeyStore, rank: int) -> None:
    """Record that the process of a rank has ended, so that the rank cannot rejoin. The launcher calls this function."""
    store.set(f"can rejoin/{rank}", "")


membership: RankMembership | None = None
"""The membership of this process; None if no launcher would restart a rank."""


def begin_membership(make_store: Callable[[], KeyStore]) -> RankMembership | None:
    """Return the :class:`RankMembership` of this process, made on the first call; None if no launcher would restart a rank."""
    global membership
    if membership is None and (number := os.environ.get(GENERATION_VARIABLE)) is not None:
        membership = RankMembership(make_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(number))
    return membership


def why_generation_ended() -> str | None:
    """Return why the generation of this process has ended; None while it lasts, or if no launcher restarts ranks."""
    return None if membership is None else membership.why_generation_ended()
