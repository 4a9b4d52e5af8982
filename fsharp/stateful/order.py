"""Order: ranks that use units in different orders, or of which one has failed, hear of it instead of waiting for ever.

Where there is no plan, ranks compare their events before each collective. Where there is one they do not: a rank that has
to leave it, or that fails, leaves a note in the store of the job, and whoever has waited for half a second looks there.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fsharp.functional.agree import gather_bytes
from fsharp.functional.errors import AgreementError, problem
from fsharp.functional.mesh import Mesh
from fsharp.stateful.program import Event

if TYPE_CHECKING:
    from fsharp.stateful.run import Run

_numbers = count()
_SHOWN = 12
_END = "the end"
_LONGEST = 1800.0
"""Seconds that a rank which leaves the plan waits for the others: what torch.distributed allows a collective."""


class _Note(NamedTuple):
    """What a rank has said since the last error.

    Attributes:
        left: by step that it has left the plan in, its events up to there; of the last two such steps.
        failure: why it has given up, if it has.
    """

    left: dict[int, list[str]]
    failure: str | None


class Order:
    """What the ranks of a scheduler tell each other.

    Steps are counted from the last error on, which all ranks raise together, however far each of them has come.

    Args:
        mesh: the ranks.
        rank: of this process.
        has_store: whether ranks are processes of a job with a store; without one a note reaches nobody, and ranks compare
            by collectives alone.

    Attributes:
        is_broken: whether an error has been raised to somebody who looked at a result between two steps: the next step
            has to raise it too.
    """

    def __init__(self, mesh: Mesh, rank: int, *, has_store: bool) -> None:
        number = next(_numbers)  # the same on all ranks, which make their schedulers in the same order
        self.mesh, self.rank = mesh, rank
        self._store: Store | None = None
        if has_store:
            self._store = PrefixStore(f"fsharp/order/{number}", _get_default_store())
        self._run: Run | None = None
        self.is_broken = False
        self._errors = 0
        self._step = -1
        self._left: dict[int, list[str]] = {}  # one step more than others are told of, who may be one behind
        self._ended: tuple[int, Sequence[Event]] = (-1, ())

    def begin(self, run: "Run") -> None:
        """A run begins: notes are about this one from now on."""
        self._run = run
        self._step += 1

    def end(self) -> None:
        """The run is over."""
        if self._run is not None:
            self._ended = self._step, self._run.events
        self._run = None

    def confirm(self, run: "Run", *, ended: bool = False) -> None:
        """Compare the events up to here with those of all other ranks.

        Raises:
            AgreementError: with the orders; the same text on every rank.
        """
        if self.mesh.size == 1:
            return
        comm = run.scheduler.own
        mine = "\n".join(_texts(run.events, ended)).encode()
        heads = gather_bytes(hashlib.sha256(mine).digest()[:16] + len(mine).to_bytes(8, "little"), comm)
        if len(set(heads)) == 1:
            return
        length = max(int.from_bytes(head[16:], "little") for head in heads)
        texts = [row.rstrip(b"\0").decode() for row in gather_bytes(mine.ljust(length, b"\0"), comm)]
        raise AgreementError(_different({rank: text.split("\n") for rank, text in enumerate(texts)}))

    def depart(self, run: "Run", *, ended: bool) -> None:
        """Leave the plan together with all other ranks.

        Raises:
            AgreementError: others go on, or have left it elsewhere; with both orders.
        """
        if self._store is None or self.mesh.size == 1:
            self.confirm(run, ended=ended)
            return
        mine = _texts(run.events, ended)
        self._left = {**dict(list(self._left.items())[-2:]), self._step: mine}
        self._leave_note()
        missing = set(range(self.mesh.size)) - {self.rank}
        deadline = time.monotonic() + _LONGEST
        while missing:
            missing = {rank for rank in missing if not self._agrees(mine, rank)}
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"Scheduler: this rank has left its plan at {mine[-1]!r}; after {_LONGEST:.0f} s ranks {sorted(missing)} "
                    "have not said whether they do. Are they still running?"
                )
            time.sleep(0.005)

    def fail(self, run: "Run", error: BaseException) -> None:
        """This rank gives up: tell the others why, unless they have told this one."""
        if self._store is not None and not isinstance(error, AgreementError):
            self._leave_note(f"Scheduler: rank {self.rank} failed; it says:\n{type(error).__name__}: {error}")
        self._errors, self._step, self._left, self._ended = self._errors + 1, -1, {}, (-1, ())
        self._run, self.is_broken = None, False

    def check(self) -> None:
        """Look for notes of others.

        Raises:
            AgreementError: one has failed, or is in another order.
        """
        if self._store is None or not self._store.check([f"{self._errors}/any"]):
            return
        mine = _texts(self._ended[1], True) if self._run is None else _texts(self._run.events, False)
        self.is_broken = True
        for rank in range(self.mesh.size):
            if rank != self.rank:
                self._agrees(mine, rank)
        self.is_broken = False

    def _leave_note(self, failure: str | None = None) -> None:
        assert self._store is not None
        self._store.set(f"{self._errors}/{self.rank}", json.dumps(_Note(dict(list(self._left.items())[-2:]), failure)))
        self._store.set(f"{self._errors}/any", "1")

    def _note(self, rank: int) -> _Note:
        assert self._store is not None
        key = f"{self._errors}/{rank}"
        if not self._store.check([key]):
            return _Note({}, None)
        left, failure = json.loads(self._store.get(key))
        return _Note({int(step): events for step, events in left.items()}, failure)

    def _agrees(self, mine: list[str], rank: int) -> bool:
        """Whether another rank has left the plan in this step as well, as this one has done or may still do."""
        note = self._note(rank)
        for step, theirs in note.left.items():
            if step < self._step and step not in self._left:
                ended = _texts(self._ended[1], True) if step == self._ended[0] else [_END]
                self._refuse({self.rank: ended, rank: theirs})
            if step == self._step and mine[: len(theirs)] != theirs[: len(mine)]:
                self._refuse({self.rank: mine, rank: theirs})
        if note.failure is not None:
            raise AgreementError(note.failure)
        return self._step in note.left

    def _refuse(self, orders: dict[int, list[str]]) -> NoReturn:
        text = _different(orders)
        self._leave_note(text)
        raise AgreementError(text)


def _texts(events: Iterable[Event], ended: bool) -> list[str]:
    return [*map(str, events), *([_END] if ended else [])]


def _different(orders: dict[int, list[str]]) -> str:
    """For each order the ranks that have it, from shortly before the first difference on."""
    rows = list(orders.values())
    first = next((i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1), min(map(len, rows)))
    by_order: dict[tuple[str, ...], list[int]] = {}
    for rank, order in sorted(orders.items()):
        by_order.setdefault(tuple(order), []).append(rank)
    facts = []
    for events, ranks in by_order.items():
        shown = list(events[max(first - 3, 0) : first + _SHOWN])
        shown = ["..."] * (first > 3) + shown + ["..."] * (len(events) > first + _SHOWN)
        facts.append((f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}", ", ".join(shown)))
    return problem(
        "Scheduler",
        f"ranks use units in different orders; the first difference is event {first}.",
        facts,
        "Every rank has to enter the same units in the same order. A rank that has nothing to compute in one of them takes "
        "part in its collectives by skip(params, x, comm=comm).",
    )
