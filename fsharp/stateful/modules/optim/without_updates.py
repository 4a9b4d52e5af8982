"""without_updates: a transformation that does not update some parameters, as torch.optim does without a gradient."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.optim.base import Transform, apply_transform


def without_updates(tx: Transform, paths: Container[str]) -> Transform:
    """Return ``tx`` without updates of the parameters at ``paths``, and of the state for each of their elements.

    State that is not by element, such as a number of steps, is updated. Memory: a copy of these elements and their state.
    """

    def of(node: Sharded, comm: Comm) -> dict[str, Any]:
        return {path: here for path, here in node.local_leaves(comm.rank).items() if path in paths}

    def apply(grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool, **extra: Any) -> tuple[Any, Any]:
        before = [{path: x.clone() for path, x in of(node, comm).items()} for node in units_of((params, state))]
        params, state = apply_transform(tx, grads, state, params, comm=comm, donate=donate, **extra)
        for node, old in zip(units_of((params, state)), before, strict=True):
            for path, x in of(node, comm).items():
                x.copy_(old[path])
        return params, state

    return replace(tx, apply=apply)
