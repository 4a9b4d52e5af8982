"""Memory of buffers that another library, such as JAX, treats as constant, and that nobody may overwrite meanwhile."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from fsharp.errors import TreeError
from fsharp.functional.layout.sharded import Sharded

_LOAN_BY_ADDRESS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Memory that another library treats as constant: by address, an object that lives as long as the library reads there."""


class _LoanToken:
    """An object that all holders of the same lent memory share, so that it lives until the last holder is freed."""


def mark_read_only(address: int, holder: Any) -> None:
    """Mark the memory at an address as read-only while ``holder`` lives. The mark is kept in the attribute ``holder.loan``."""
    holder.loan = _LOAN_BY_ADDRESS.setdefault(address, _LoanToken())


def check_not_lent_to_jax(where: str, nodes: Iterable[Sharded]) -> None:
    """Raise a TreeError if buffers, which the caller is about to overwrite, are lent to another library."""
    if not _LOAN_BY_ADDRESS:
        return
    for node in nodes:
        if any(buffer.numel() and buffer.data_ptr() in _LOAN_BY_ADDRESS for buffer in node.buffers):
            raise TreeError(
                f"{where}: JAX arrays have the memory of unit {node.unit.display_name}, which JAX takes for constant. Leave "
                "out donate=True, delete these arrays, or convert a copy: optree.tree_map(torch.clone, tree)."
            )
