"""Order: ranks that use units in different orders, or of which one has failed, hear of it instead of waiting for ever.

Where there is no plan, ranks compare their events before each collective. Where there is one they do not: a rank that has
to leave it, or that fails, leaves a note in the store of the job, and whoever has waited for half a second looks there.
"""

import hashlib
import json
import time
from itertools import count
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fsharp.functional.agree import gather_bytes
from fsharp.functional.errors import AgreementError, problem
from fsharp.functional.mesh import Mesh

if TYPE_CHECKING:
    from fsharp.stateful.run import Run

_numbers = count()
_SHOWN = 12
_END = "the end"


class Order:
    """What the ranks of a scheduler tell each other.

    Args:
        mesh: the ranks.
        rank: of this process.
        has_store: whether ranks are processes of a job with a store; without one a note reaches nobody, and ranks compare
            by collectives alone.
    """

    def __init__(self, mesh: Mesh, rank: int, *, has_store: bool) -> None:
        number = next(_numbers)  # the same on all ranks, which make their schedulers in the same order
        self.mesh, self.rank = mesh, rank
        self._store: Store | None = None
        if has_store:
            self._store = PrefixStore(f"fsharp/order/{number}", _get_default_store())
        self._run: Run | None = None
        self._step = -1

    def begin(self, run: "Run") -> None:
        """A run begins: notes are about this one from now on."""
        self._run = run
        self._step += 1

    def end(self) -> None:
        """The run is over."""
        self._run = None

    def confirm(self, run: "Run", *, ended: bool = False) -> None:
        """Compare the events up to here with those of all other ranks.

        Raises:
            AgreementError: with the orders; the same text on every rank.
        """
        if self.mesh.size == 1:
            return
        comm = run.scheduler.own
        mine = "\n".join(_texts(run, ended)).encode()
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
        mine = _texts(run, ended)
        self._leave_note(mine)
        missing = set(range(self.mesh.size)) - {self.rank}
        while missing:
            for rank in sorted(missing):
                theirs = self._note(rank)
                if theirs is not None:
                    self._compare(mine, rank, theirs)
                    missing.discard(rank)
            time.sleep(0.005)

    def fail(self, run: "Run", error: BaseException) -> None:
        """This rank gives up: tell the others why, unless they have told this one."""
        if self._store is not None and not isinstance(error, AgreementError):
            self._leave_note(_texts(run, False), failure=f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """Look for notes of others.

        Raises:
            AgreementError: one has failed, or is in another order.
        """
        if self._store is None or self._run is None or not self._store.check([f"{self._step}/any"]):
            return
        mine = _texts(self._run, False)
        for rank in range(self.mesh.size):
            theirs = None if rank == self.rank else self._note(rank)
            if theirs is not None:
                self._compare(mine, rank, theirs)

    def _leave_note(self, events: list[str], failure: str | None = None) -> None:
        assert self._store is not None
        self._store.set(f"{self._step}/{self.rank}", json.dumps({"events": events, "failure": failure}))
        self._store.set(f"{self._step}/any", "1")

    def _note(self, rank: int) -> list[str] | None:
        assert self._store is not None
        key = f"{self._step}/{rank}"
        if not self._store.check([key]):
            return None
        note = json.loads(self._store.get(key))
        if note["failure"] is not None:
            raise AgreementError(f"Scheduler: rank {rank} failed in this step; it says:\n{note['failure']}")
        return list(note["events"])

    def _compare(self, mine: list[str], rank: int, theirs: list[str]) -> None:
        n = min(len(mine), len(theirs))
        if mine[:n] != theirs[:n]:
            self._leave_note(mine)
            raise AgreementError(_different({self.rank: mine, rank: theirs}))


def _texts(run: "Run", ended: bool) -> list[str]:
    return [*map(str, run.events), *([_END] if ended else [])]


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
