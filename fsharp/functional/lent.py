"""Memory that another library takes for constant: who may write to it has to be asked."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from fsharp.errors import TreeError
from fsharp.functional.layout.sharded import Sharded

_LENT: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Address of the first byte, and what lives as long as somebody else reads there."""


class _Loan:
    """Lives as long as one of those that hold the same memory."""


def lend(address: int, holder: Any) -> None:
    """From now on, as long as ``holder`` lives, this memory is constant; it is given an attribute ``loan``."""
    holder.loan = _LENT.setdefault(address, _Loan())


def check_not_lent(where: str, nodes: Iterable[Sharded]) -> None:
    """Refuse to write to what another library reads.

    Raises:
        TreeError: names the unit.
    """
    if not _LENT:
        return
    for node in nodes:
        if any(buffer.numel() and buffer.data_ptr() in _LENT for buffer in node.buffers):
            raise TreeError(
                f"{where}: arrays of JAX have the memory of unit {node.name!r}, which JAX takes for constant. Leave out "
                "donate=True, let go of those arrays, or convert a copy: optree.tree_map(torch.clone, tree)."
            )
