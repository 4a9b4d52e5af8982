"""Watch: ranks that take part in different collectives, of which one has failed, stopped or died, hear of it.

Each collective has a *label*, which says what it is for, and a number, which all ranks count alike. Both are in the tag under which
its messages travel, so a rank never receives what another believes to be something else: it receives nothing. A rank that
has waited for half a second writes its last labels on a board that all ranks can read, and looks at those of others. Then either
some label differs, and all raise both orders; or some ranks have not come yet, and it waits on, up to a limit.
"""

import json
import logging
import time
import traceback
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from fsharp.functional.errors import AgreementError, CommError, problem

_log = logging.getLogger("fsharp")
_KEPT_LABELS = 64
_SHOWN_LABELS = 8
_READ_AT_ONCE = 16
"""Ranks whose notes are read in one look: waiting ranks of a large mesh look at others by turns."""
_WARN_AFTER_S = 10.0
_SHOWN_TRACEBACK = 4000
"""Characters."""


class Board(Protocol):
    """Texts that all ranks can read."""

    def write(self, key: str, text: str) -> None:
        """Replace what is under a key."""

    def read(self, key: str) -> str | None:
        """What is under a key, if something is."""

    def claim(self, key: str, text: str) -> str:
        """Write under a key if nothing is there; what is there then."""


class Call:
    """A collective that this rank takes part in.

    Attributes:
        label: what it is for.
        number: how many there were before it, on every rank.
        tag: under which its messages travel, 31 bits.
    """

    __slots__ = ("_since", "_warned", "_watch", "label", "number", "tag")

    def __init__(self, watch: "Watch", label: str, number: int) -> None:
        self._watch, self.label, self.number = watch, label, number
        self.tag = zlib.crc32(f"{watch.name} {number} {label}".encode()) & 0x7FFFFFFF or 1
        self._since: float | None = None
        self._warned = False

    def check(self) -> None:
        """Called twice a second while somebody waits for it.

        Raises:
            AgreementError: another rank has failed, or takes part in something else.
            CommError: the limit has passed.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        late = self._watch.look(self)
        if waited_s > self._watch.limit_s:
            raise self._watch.refuse(CommError, f"waited {self._watch.limit_s:g} s in {self.label!r}; {late}")
        if not self._warned and waited_s > min(_WARN_AFTER_S, self._watch.limit_s / 2):
            self._warned = True
            _log.warning("rank %d has waited %.0f s in %r; %s", self._watch.rank, waited_s, self.label, late)

    def lost(self, error: BaseException) -> Exception:
        """What to raise for an error of the connection: why another rank has ended, if it has said so."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            try:
                self._watch.look(self)
            except (AgreementError, CommError) as known:
                return known
            time.sleep(0.05)
        return self._watch.refuse(CommError, f"lost a rank in {self.label!r}: {error}. Has that process ended?")


class Watch:
    """The collectives of one Comm, as one rank sees them.

    Args:
        name: the same on all ranks, of this Comm alone.
        rank: this one.
        size: number of ranks.
        board: where notes are left; None if ranks have none, and compare labels as they meet.
        limit_s: seconds that a rank waits for others.

    Attributes:
        error: why no more collective can be called, once one has failed.
    """

    def __init__(self, name: str, rank: int, size: int, board: Board | None, limit_s: float) -> None:
        self.name, self.rank, self.size, self.board, self.limit_s = name, rank, size, board, limit_s
        self.error: Exception | None = None
        self._count = 0
        self._labels: deque[str] = deque(maxlen=_KEPT_LABELS)
        self._written = -1
        self._next = 0
        self._seen: dict[int, tuple[int, list[str]]] = {}

    def begin(self, label: str) -> Call:
        """This rank is about to take part in a collective.

        Raises:
            AgreementError: one has failed before.
        """
        if self.error is not None:
            raise self.error
        call = Call(self, label, self._count)
        self._count += 1
        self._labels.append(label)
        return call

    @property
    def last(self) -> str:
        """The label of the collective that was begun last."""
        return self._labels[-1] if self._labels else "no collective yet"

    def look(self, call: Call) -> str:
        """Leave a note, and look at those of others. Who has not come, in words.

        Raises:
            AgreementError: another rank has failed, or takes part in something else.
        """
        if self.error is not None:
            raise self.error
        if self.board is None:
            return "others have not come"
        failed = self.board.read("failed")
        if failed is not None:
            self.error = AgreementError(failed)
            raise self.error
        if self._written != self._count:
            self.board.write(f"at {self.rank}", json.dumps([self._count, list(self._labels)]))
            self._written = self._count
        others = [rank for rank in range(self.size) if rank != self.rank]
        for i in range(min(_READ_AT_ONCE, len(others))):
            self._compare(others[(self._next + i) % len(others)])
        self._next += _READ_AT_ONCE
        late = [rank for rank in others if self._seen.get(rank, (0, []))[0] <= call.number]
        return f"ranks {_some(late)} have not come to it{self._whereabouts(late)}"

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        known = [f"rank {rank} was last seen in {self._seen[rank][1][-1]!r}" for rank in ranks[:4] if rank in self._seen]
        return f" ({'; '.join(known)})" if known else ""

    def _compare(self, rank: int) -> None:
        assert self.board is not None
        text = self.board.read(f"at {rank}")
        if text is None:
            return
        count, labels = json.loads(text)
        self._seen[rank] = count, labels
        mine, theirs = _numbered(self._count, list(self._labels)), _numbered(count, labels)
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                orders = sorted([(self.rank, mine), (rank, theirs)], key=lambda each: each[0])
                raise self.refuse(AgreementError, _different(number, orders), whole=True)

    def refuse(self, kind: type[Exception], text: str, *, whole: bool = False) -> Exception:
        """No more collectives from here on, on any rank; the error to raise, whose text all of them get."""
        text = text if whole else f"rank {self.rank} of {self.size} {text}"
        if self.board is not None:
            won = self.board.claim("failed", text)
            text, kind = won, (kind if won == text else AgreementError)
        self.error = kind(text)
        return self.error

    def fail(self, error: BaseException, where: str) -> None:
        """This rank gives up because of an error of its own, or of one that others know of."""
        if error is self.error:
            return
        trace = "".join(traceback.format_exception(error))[-_SHOWN_TRACEBACK:]
        text = f"rank {self.rank} of {self.size} failed in {where}, after {self.last!r}; it says:\n{trace}"
        known = self.error
        self.refuse(AgreementError, text, whole=True)
        self.error = known or self.error


def _numbered(count: int, labels: Sequence[str]) -> dict[int, str]:
    return dict(enumerate(labels, count - len(labels)))


def _some(ranks: Sequence[int]) -> str:
    return f"{list(ranks[:8])}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _different(first: int, orders: Sequence[tuple[int, Mapping[int, str]]]) -> str:
    rows = []
    for rank, labels in orders:
        shown = [labels[i] for i in range(first - 2, first + _SHOWN_LABELS) if i in labels]
        rows.append((f"rank {rank}", "; ".join(["..."] * (first - 2 > min(labels)) + shown)))
    return problem(
        "fsharp",
        f"ranks take part in different collectives; the first difference is number {first}.",
        rows,
        "Every rank has to make the same calls in the same order: the same functions, steps, microbatches, units and policies. A "
        "rank that has nothing to compute in a unit takes part by skip(params, x, comm=comm).",
    )
