"""ModuleState: the state that a module trains, and whether somebody has changed it behind the module's back."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import Sharded, map_units, trainable, units_of
from fsharp.functional.moves import gather, on_device
from fsharp.functional.state import TrainState


class ModuleState:
    """A module's parameters between two steps.

    Args:
        layout: of them.
        state: parameters and main copies; the state of an ``(init, update)`` pair, if one updates them.
        comm: the ranks; collectives block.

    Attributes:
        state: replaced by each step.
        generation: how often it has been replaced by one from outside.
    """

    def __init__(self, layout: Layout, state: TrainState, comm: Comm) -> None:
        self.layout, self.state, self._comm, self.generation = layout, state, comm, 0
        self.stamp()

    def stamp(self) -> None:
        """Take the tensors as they are now for right: who writes to them later is noticed."""
        self._stamp = self._versions()

    def whole(self, name: str) -> Sharded:
        """One unit's parameters in full, in the optimizer's dtype where they are trained. A collective."""
        unit = self.layout[name]
        return Sharded(list(self.gathered(name, unit.all_groups).values()), unit, unit.strategy.full)

    def gathered(self, name: str, groups: Sequence[int]) -> dict[int, torch.Tensor]:
        """The same of some of its groups: full buffers, which nobody else has."""
        position = next(i for i, unit in enumerate(self.layout.units) if unit.name == name)
        rest, main = (units_of(tree)[position] for tree in (self.state.params, self.state.main))
        parts = rest.select([g for g in groups if g not in main.groups]), main.select([g for g in groups if g in main.groups])
        with torch.no_grad():
            full = [gather(part, comm=self._comm) for part in parts if part.groups]
        found = {g: buffer.clone() for part in full for g, buffer in zip(part.groups, part.buffers, strict=True)}
        return {g: found[g] for g in groups}

    def write(self, nodes: Sequence[Sharded]) -> None:
        """These full parameters are the new ones; every rank has the same."""
        rank = self._comm.rank
        for node, kept, main in zip(nodes, units_of(self.state.params), units_of(self.state.main), strict=True):
            whole = dict(zip(node.groups, node.buffers, strict=True))
            for target in (kept, main):
                for group, buffer in zip(target.groups, target.buffers, strict=True):
                    start = node.unit.local_start(group, target.place, rank)
                    buffer.copy_(whole[group][start : start + len(buffer)])
        self.stamp()

    def fill(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copy into buffers of the state; all ranks do the same."""
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        self.stamp()

    def visible(self) -> Any:
        """The parameters as the optimizer has them: a tree of trainable groups at its place, in memory that stays."""
        with torch.no_grad():
            held = gather(trainable(self.state.params), comm=self._comm, to="optim")
        mains = {node.name: node for node in units_of(self.state.main)}

        def one(node: Sharded) -> Sharded:
            main = mains.get(node.name)
            found = dict(zip(main.groups, main.buffers, strict=True)) if main is not None else {}
            return node.replace([found.get(g, b) for g, b in zip(node.groups, node.buffers, strict=True)])

        return map_units(one, held)

    def spread(self) -> None:
        """Parameters at rest take the values that the optimizer's copies have. A collective.

        Memory: the resting parameters of one unit.
        """
        with torch.no_grad():
            for held, kept in zip(units_of(self.visible()), units_of(trainable(self.state.params)), strict=True):
                dtypes = [held.unit.groups[g].dtypes.compute for g in held.groups]
                cast = held.replace([b.to(dtype) for b, dtype in zip(held.buffers, dtypes, strict=True)])
                for buffer, value in zip(kept.buffers, gather(cast, comm=self._comm, to="params").buffers, strict=True):
                    buffer.copy_(value)
        self.stamp()

    def adopt(self, state: TrainState) -> None:
        """Take over a state of this layout, whose buffers are the module's from here on.

        Raises:
            TreeError: a state of another layout, place or dtype.
        """
        state = state._replace(main=on_device(state.main, self._comm.device))
        pairs = ("params", state.params, self.state.params), ("main", state.main, self.state.main)
        for kind, tree, mine in pairs:
            for new, old in zip_longest(units_of(tree), units_of(mine)):
                facts = [None if node is None else _about(node) for node in (new, old)]
                if facts[0] != facts[1]:
                    names = [repr(node.name) if node is not None else "none" for node in (new, old)]
                    raise TreeError(
                        f"train_state: {kind} are not those of this module. Got unit {names[0]}, expected {names[1]}, in the "
                        "layout, place and dtypes that the module's own state has: begin with that, and change its values."
                    )
        has_own = self.state.opt is not None  # else a torch.optim class keeps it
        self.state = state if has_own else state._replace(opt=None)
        self.generation += 1
        self.stamp()

    def check_untouched(self) -> None:
        """Refuse to go on with parameters that somebody has changed behind the session's back.

        Raises:
            ScheduleError: names the unit.
        """
        now = self._versions()
        for (name, before), (_, after) in zip(self._stamp, now, strict=True):
            if before != after:
                raise ScheduleError(
                    f"the parameters of unit {name!r} were changed in place since the last step. What other ranks hold, and "
                    "copies in other dtypes, do not follow. Change them in `with model.unsharded(write=True):`."
                )

    def _versions(self) -> list[tuple[str, list[tuple[int, int]]]]:
        nodes = [*units_of(self.state.params), *units_of(self.state.main)]
        return [(node.name, [(b.data_ptr(), b._version) for b in node.raw_buffers]) for node in nodes]


def _about(node: Sharded) -> tuple[Any, ...]:
    return node.unit, node.place, node.groups, [(b.dtype, b.device, b.shape) for b in node.raw_buffers]
