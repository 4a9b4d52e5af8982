"""ReferenceOptimizer: a class of torch.optim on whole parameters, whose first updates are compared with those of shards."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsharp.functional.comm.agree import together
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.optim.elementwise_check import refuse_difference, whole_leaves
from fsharp.functional.optim.probe import are_close


class ReferenceOptimizer:
    """An optimizer of the same class and options as the one on shards, with whole parameters and state on every rank."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        groups: Iterable[Mapping[str, Any]],
        defaults: Mapping[str, Any],
        params: Any,
        comm: Comm,
    ) -> None:
        self._comm, self._where = comm, f"ShardedOptimizer(check_steps=): {optimizer.__name__}"
        self._parameters = {path: nn.Parameter(value) for path, value in self._whole(params).items()}
        known = self._parameters
        rows = [{**group, "params": [known[path] for path in group["params"] if path in known]} for group in groups]
        self._optimizer = optimizer(rows, **defaults)

    def _whole(self, tree: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for node in units_of(tree):
            paths = {leaf.path: node.unit.full_path(leaf) for leaf in node.unit.leaves}
            found |= {paths[path]: value for path, value in whole_leaves(node, self._comm).items()}
        return found

    def step(self, options: Iterable[Mapping[str, Any]], grads: Any, missing: Iterable[str]) -> None:
        """Update the whole parameters by these gradients, with the options of each group at present."""
        for group, mine in zip(self._optimizer.param_groups, options, strict=True):
            group.update({name: value for name, value in mine.items() if name != "params"})
        values, absent = self._whole(grads), set(missing)
        self._before = {path: parameter.detach().clone() for path, parameter in self._parameters.items()}
        for path, parameter in self._parameters.items():
            parameter.grad = None if path in absent else values[path].to(parameter.dtype)
        self._optimizer.step()

    def compare(self, params: Any) -> None:
        """Refuse, on all ranks, shards whose update differs from that of the whole parameters."""
        found = self._whole(params)

        def check() -> None:
            for path, before in self._before.items():
                x, y = self._parameters[path].detach() - before, found[path] - before
                if not bool(are_close(x, y).all()):
                    refuse_difference(self._where, path, x, y)

        together(self._where, self._comm, check)
