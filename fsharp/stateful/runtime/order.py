"""Order: ranks that use units in different orders, or of which one has failed, hear of it instead of waiting for ever.

Where there is no plan, ranks compare their events before each collective. Where there is one they do not: a rank that has
to leave it, or that fails, leaves a note in the store of the job, and whoever has waited for half a second looks there.
"""

import hashlib
import json
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fsharp.functional.agree import gather_bytes
from fsharp.functional.comm import Comm
from fsharp.functional.errors import AgreementError, problem
from fsharp.stateful.schedule.program import Event

if TYPE_CHECKING:
    from fsharp.stateful.runtime.run import Run

_numbers: "defaultdict[tuple[int, ...], count[int]]" = defaultdict(count)
_orders: "weakref.WeakKeyDictionary[Comm, weakref.WeakSet[Order]]" = weakref.WeakKeyDictionary()
_SHOWN = 12
_END = "the end"
_LONGEST = 1800.0
"""Seconds that a rank which leaves the plan waits for the others: what torch.distributed allows a collective."""


class _Note(NamedTuple):
    """What a rank has said since the last error.

    Attributes:
        step: the last one in which it has left the plan; -1 for none.
        events: its events in that step, up to there.
        failure: why it has given up, if it has.
    """

    step: int
    events: list[str]
    failure: str | None


class Order:
    """What the ranks of a scheduler tell each other.

    Errors are raised by all ranks, however far each of them has come, and counted; then all ranks meet before they go on.
    Steps are counted from the last error on.

    Args:
        comm: the ranks. Schedulers of one Comm hear of each other's errors.
        has_store: whether ranks are processes of a job with a store; without one a note reaches nobody, and ranks compare
            by collectives alone.

    Attributes:
        is_broken: whether an error has been raised to somebody who looked at a result between two steps: the next step
            has to raise it too.
    """

    def __init__(self, comm: Comm, *, has_store: bool) -> None:
        mesh, rank = comm.mesh, comm.rank
        ranks = getattr(comm, "ranks", ())
        number = next(_numbers[ranks])  # the same on all ranks, which make their schedulers in the same order
        self.mesh, self.rank = mesh, rank
        self._store: Store | None = None
        if has_store and mesh.size > 1:
            name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
            self._store = PrefixStore(f"fsharp/order/{name}/{number}", _get_default_store())
        self._all: weakref.WeakSet[Order] = _orders.setdefault(comm, weakref.WeakSet())
        self._all.add(self)
        self._run: Run | None = None
        self.is_broken = False
        self._has_met = False
        self._errors, self._last = 0, ""
        self._known: AgreementError | None = None  # raised here, and by all others or because others know
        self._step = -1
        self._left: dict[int, list[str]] = {}  # events up to there, of the last two steps: others may be one behind
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

    def meet(self, make: Callable[[], None]) -> None:
        """Wait for all ranks, once at the beginning and once after each error, and make together what they share.

        Args:
            make: makes it. No rank gets lost between meeting and making: nothing of the caller's runs there.

        Raises:
            AgreementError: one has failed again before.
        """
        if self._has_met:
            return
        if self._store is not None:
            if self._store.add(f"{self._errors}/met", 1) == self.mesh.size:
                self._store.set(f"{self._errors}/all", "1")
            deadline = time.monotonic() + _LONGEST
            while not self._store.check([f"{self._errors}/all"]):
                self.check(self._errors)
                if time.monotonic() > deadline:
                    raise self._refusal(f"Scheduler: after {_LONGEST:.0f} s not all ranks have come to where this one is.")
                time.sleep(0.005)
        make()
        self._has_met = True

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
        self._known = AgreementError(_different({rank: text.split("\n") for rank, text in enumerate(texts)}))
        raise self._known

    def depart(self, run: "Run", *, ended: bool) -> None:
        """Leave the plan together with all other ranks.

        Raises:
            AgreementError: others go on, or have left it elsewhere; with both orders.
        """
        if self._store is None:
            self.confirm(run, ended=ended)
            return
        mine = _texts(run.events, ended)
        self._left = {**dict(list(self._left.items())[-1:]), self._step: mine}
        self._leave_note()
        missing = set(range(self.mesh.size)) - {self.rank}
        deadline = time.monotonic() + _LONGEST
        while missing:
            missing = {rank for rank in missing if not self._agrees(mine, rank)}
            if time.monotonic() > deadline:
                raise self._refusal(
                    f"Scheduler: rank {self.rank} has left its plan at {mine[-1]!r}; after {_LONGEST:.0f} s ranks "
                    f"{sorted(missing)} have not said whether they do. Are they still running?"
                )
            time.sleep(0.005)

    def fail(self, error: BaseException) -> None:
        """This rank gives up: tell the others why, unless they have told this one."""
        if error is self._known:
            self._last = str(error)
        else:
            self._last = f"Scheduler: rank {self.rank} failed; it says:\n{type(error).__name__}: {error}"
            if self._store is not None:
                try:
                    self._leave_note(self._last)
                except DistError as lost:
                    self._last += f"\nThe job's store is gone, and others were not told: {lost}"
        self._errors, self._step, self._left, self._ended = self._errors + 1, -1, {}, (-1, ())
        self._run, self._known, self.is_broken, self._has_met = None, None, False, False

    def patience(self) -> Callable[[], None]:
        """What to call while something takes that begins now."""
        return partial(self.check, self._errors)

    def check(self, errors: int) -> None:
        """Look for notes of others.

        Args:
            errors: how many there had been when it began, whatever is being waited for.

        Raises:
            AgreementError: one has failed, or is in another order; or this was so already, and what is waited for was given up.
        """
        if errors < self._errors:
            raise AgreementError(self._last)
        for order in (self, *(self._all - {self})):
            order._look()

    def _look(self) -> None:
        if self._store is None or not self._store.check([f"{self._errors}/any"]):
            return
        mine = _texts(self._ended[1], True) if self._run is None else _texts(self._run.events, False)
        for rank in range(self.mesh.size):
            if rank != self.rank:
                self._agrees(mine, rank)

    def recall(self) -> None:
        """Raise again what was raised between two steps.

        Raises:
            AgreementError: something was.
        """
        if self.is_broken:
            self.check(self._errors)

    def _leave_note(self, failure: str | None = None) -> None:
        assert self._store is not None
        step, events = next(reversed(self._left.items()), (-1, []))
        self._store.set(f"{self._errors}/{self.rank}", json.dumps(_Note(step, events, failure)))
        self._store.set(f"{self._errors}/any", "1")

    def _note(self, rank: int) -> _Note:
        assert self._store is not None
        key = f"{self._errors}/{rank}"
        if not self._store.check([key]):
            return _Note(-1, [], None)
        return _Note(*json.loads(self._store.get(key)))

    def _agrees(self, mine: list[str], rank: int) -> bool:
        """Whether another rank has left the plan in this step as well, as this one has done or may still do."""
        step, theirs, failure = self._note(rank)
        if -1 < step < self._step and step not in self._left:
            ended = _texts(self._ended[1], True) if step == self._ended[0] else [_END]
            raise self._refusal(_different({self.rank: ended, rank: theirs}))
        if step == self._step and mine[: len(theirs)] != theirs[: len(mine)]:
            raise self._refusal(_different({self.rank: mine, rank: theirs}))
        if failure is not None:
            self._known, self.is_broken = AgreementError(failure), self._run is None
            raise self._known
        return step == self._step

    def _refusal(self, text: str) -> AgreementError:
        self._leave_note(text)
        self._known, self.is_broken = AgreementError(text), self._run is None
        return self._known


def _texts(events: Iterable[Event], ended: bool) -> list[str]:
    """As far as ranks have to agree in them."""
    return [*map(_text, events), *([_END] if ended else [])]


def _text(event: Event) -> str:
    if not event.kind.startswith("backward"):  # numbers of uses follow from the order of their beginning
        return str(event)
    return f"{event} (use {event.use}{', for its inputs alone' if event.bare else ''})"


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
        "part all the same: in a ShardedModule by calling that module with a dummy input, such as one token whose result is "
        "multiplied by zero; in functions by skip(params, x, comm=comm).",
    )
