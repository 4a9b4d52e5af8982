"""ModuleState: the state that a module trains, and whether somebody has changed it behind the module's back."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.comm.protocol import Comm, Labelled
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import Sharded, map_units, trainable, units_by_name, units_of
from fsharp.functional.moves import gather, on_device
from fsharp.functional.state import TrainState, update
from fsharp.functional.stored import stored


class ModuleState:
    """The parameters and states that a module trains, between two steps.

    Attributes:
        state: parameters, main copies, the state of an ``(init, update)`` pair; replaced by each step.
        generation: how often it has been replaced by one from outside.
        is_written: whether somebody has written to parameters since the last step.
        loaded: which of "parameters" and "optimizer" ranks have loaded since the last step.
    """

    def __init__(self, layout: Layout, state: TrainState, comm: Comm) -> None:
        self.layout, self.state, self._comm, self.generation = layout, state, comm, 0
        self.is_written, self.loaded = False, set[str]()
        self.stamp()

    def stamp(self) -> None:
        """Take the tensors as they are now for right: who writes to them later is noticed."""
        self._stamp = self._versions()

    def whole(self, name: str, comm: Comm) -> Sharded:
        """One unit's parameters in full, in the optimizer's dtype where they are trained. A collective of ``comm``."""
        unit = self.layout[name]
        return Sharded(list(self.gathered(name, unit.all_groups, comm).values()), unit, unit.strategy.full)

    def gathered(self, name: str, groups: Sequence[int], comm: Comm) -> dict[int, torch.Tensor]:
        """The same of some of its groups: full buffers, which nobody else has."""
        position = next(i for i, unit in enumerate(self.layout.units) if unit.name == name)
        rest, main = (units_of(tree)[position] for tree in (self.state.params, self.state.main))
        parts = rest.select([g for g in groups if g not in main.groups]), main.select([g for g in groups if g in main.groups])
        with torch.no_grad():
            full = [gather(part, comm=comm) for part in parts if part.groups]
        found = {g: buffer.clone() for part in full for g, buffer in zip(part.groups, part.buffers, strict=True)}
        return {g: found[g] for g in groups}

    def write(self, nodes: Sequence[Sharded]) -> None:
        """These full parameters are the new ones; every rank has the same."""
        rank = self._comm.rank
        for node, kept, main in zip(nodes, units_of(self.state.params), units_of(self.state.main), strict=True):
            whole = dict(zip(node.groups, node.buffers, strict=True))
            for target in (kept, main):
                own = []
                for group in target.groups:
                    start, size = node.unit.local_start(group, target.place, rank), node.unit.local_size(group, target.place)
                    own.append(whole[group][start : start + size])
                values = target.with_buffers(own)
                new = stored(values, self._comm) if target is kept else values
                for buffer, value in zip(target.buffers, new.buffers, strict=True):
                    buffer.copy_(value)
        self.is_written = True
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
        mains = units_by_name(self.state.main)

        def one(node: Sharded) -> Sharded:
            main = mains.get(node.name)
            found = dict(zip(main.groups, main.buffers, strict=True)) if main is not None else {}
            return node.replace([found.get(g, b) for g, b in zip(node.groups, node.buffers, strict=True)])

        return map_units(one, held)

    def spread(self) -> None:
        """Have parameters at rest take the values that the optimizer's copies have, a unit at a time. A collective."""
        with torch.no_grad():
            for held, kept in zip(units_of(self.visible()), units_of(trainable(self.state.params)), strict=True):
                named = Labelled(self._comm, "parameters that were written in place: ")
                for buffer, value in zip(
                    kept.buffers, gather(stored(held, named), comm=named, to="params").buffers, strict=True
                ):
                    if buffer is not value:
                        buffer.copy_(value)
        self.stamp()

    def keep_optimizer(self, opt: Any, **about: Any) -> None:
        """Go on with this state of the optimizer; ``about``: other fields of the :class:`TrainState` that belong to it."""
        self.state = self.state._replace(opt=opt, **about)

    def update(self, tx: Any, gradients: Any, comm: Comm) -> None:
        """Update by a transformation of the gradients. Buffers of the state are donated."""
        self.state = update(tx, gradients, self.state, comm=comm, donate=True)

    def account_for_writes(self, account: Callable[[str], None]) -> None:
        """Have labels say that parameters were written to since the last step, if they were: a rank that is alone is found."""
        if self.is_written:
            account("parameters written in place=True")
            self.is_written = False

    def adopt(self, state: TrainState) -> None:
        """Take over a state of this layout, whose buffers are the module's from here on. Refuse another place or dtype."""
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

    def take_writes(self) -> bool:
        """Have what rests follow what was written to parameters in place.

        Return whether anything was: then it is a collective.
        """
        is_written = self.notice_writes()
        if is_written:
            self.spread()
        return is_written

    def notice_writes(self) -> bool:
        """Return whether somebody has written to parameters since they were looked at. Refuse writes to anything else."""
        now = self._versions()
        if now == self._stamp:
            return False
        mains = {(node.name, g) for node in units_of(self.state.main) for g in node.groups}
        for key, (address, version) in now.items():
            kind, unit, group = key
            is_copy = kind == "params" and (unit, group) in mains
            if address != self._stamp[key][0] or (is_copy and version != self._stamp[key][1]):
                raise ScheduleError(
                    f"what unit {unit!r} computes with was changed in place since the last step. It follows the optimizer's "
                    "copy in another dtype. Write to the module's parameters, or in `with model.unsharded(write=True):`."
                )
        self.is_written = True
        self.stamp()
        return True

    def _versions(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        trees = ("params", self.state.params), ("main", self.state.main)
        return {
            (kind, node.name, g): (b.data_ptr(), b._version)
            for kind, tree in trees
            for node in units_of(tree)
            for g, b in zip(node.groups, node.raw_buffers, strict=True)
        }


def _about(node: Sharded) -> tuple[Any, ...]:
    return node.unit, node.place, node.groups, [(b.dtype, b.device, b.shape) for b in node.raw_buffers]
