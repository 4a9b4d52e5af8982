"""Order: ranks make sure that they are about to call the same collectives, before they do."""

import hashlib
from typing import TYPE_CHECKING

from fsharp.functional.agree import gather_bytes
from fsharp.functional.comm import Comm
from fsharp.functional.errors import AgreementError, problem

if TYPE_CHECKING:
    from fsharp.stateful.run import Run

_SHOWN = 12


class Order:
    """What the ranks of a scheduler tell each other of the order they are in.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def confirm(self, run: "Run", *, ended: bool = False) -> None:
        """Compare the events up to here with those of all other ranks: where there is no plan, before each collective.

        Raises:
            AgreementError: with the orders; the same text on every rank.
        """
        if self.comm.mesh.size == 1:
            return
        mine = "\n".join([*map(str, run.events), "the end"] if ended else map(str, run.events)).encode()
        heads = gather_bytes(hashlib.sha256(mine).digest()[:16] + len(mine).to_bytes(8, "little"), self.comm)
        if len(set(heads)) == 1:
            return
        length = max(int.from_bytes(head[16:], "little") for head in heads)
        texts = [row.rstrip(b"\0").decode() for row in gather_bytes(mine.ljust(length, b"\0"), self.comm)]
        raise AgreementError(differing_orders([text.split("\n") for text in texts]))

    def depart(self, run: "Run", why: str) -> None:
        """Leave the plan: with all other ranks, or not at all."""
        self.confirm(run)

    def fail(self, run: "Run", error: BaseException) -> None:
        """This rank has failed."""

    def explain(self, error: RuntimeError) -> Exception:
        """What is behind a collective that failed."""
        return error


def differing_orders(orders: list[list[str]]) -> str:
    """The text of the error: for each order the ranks that have it, from shortly before the first difference on."""
    first = next((i for i, row in enumerate(zip(*orders)) if len(set(row)) > 1), min(map(len, orders)))
    by_order: dict[tuple[str, ...], list[int]] = {}
    for rank, order in enumerate(orders):
        by_order.setdefault(tuple(order), []).append(rank)
    rows = []
    for order, ranks in by_order.items():
        shown = order[max(first - 3, 0) : first + _SHOWN - 3]
        text = ", ".join([*(["..."] if first > 3 else []), *shown, *(["..."] if len(order) > first + _SHOWN - 3 else [])])
        rows.append((f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}", text))
    return problem(
        "Scheduler",
        f"ranks use units in different orders; the first difference is event {first}.",
        rows,
        "Every rank has to enter the same units in the same order; skip(params, x, comm=comm) lets a rank that has nothing to "
        "compute take part in a unit's collectives.",
    )
