"""A module with the averages of its parameters in their place, as an optimizer's state has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.layout.sharded import Sharded, map_units, units_of
from fsharp.functional.moves import gather
from fsharp.functional.optim.ema import WithEmaState
from fsharp.functional.stored import stored
from fsharp.stateful.modules.session import Session

Buffers = dict[tuple[str, int], torch.Tensor]
"""By unit and group."""


@contextmanager
def averaged(session: Session, opt: Any) -> Iterator[None]:
    """Within this context the session's parameters are the averages in this state; the buffers stay the same ones."""
    averages = _averages(opt)
    if session.is_averaged:
        raise ScheduleError("averaged(): the model has its averages already.")
    session.step.give_up("averaged()")
    session.kept.take_writes()

    def one(node: Sharded) -> Sharded:
        groups = tuple(g for g in node.unit.trainable if (node.name, g) in averages)
        return Sharded([averages[node.name, g] for g in groups], node.unit, node.unit.strategy.optim, groups)

    with torch.no_grad():
        resting = stored(map_units(one, session.kept.state.params), session.scheduler)
        resting = gather(resting, comm=session.scheduler, to="params")
        new = [_buffers(resting), averages]
        old = [_buffers(session.kept.state.params), _buffers(session.kept.state.main)]
        targets = [buffers[key] for buffers, others in zip(old, new, strict=True) for key in buffers if key in others]
        values = [others[key] for buffers, others in zip(old, new, strict=True) for key in buffers if key in others]
    own = [target.detach().clone() for target in targets]
    session.is_averaged = True
    try:
        session.kept.fill(targets, values)
        del values, new, resting
        yield
    finally:
        session.kept.fill(targets, own)
        session.is_averaged = False


def _buffers(tree: Any) -> Buffers:
    return {(node.name, g): b for node in units_of(tree) for g, b in zip(node.groups, node.buffers, strict=True)}


def _averages(opt: Any) -> Buffers:
    is_average = lambda x: isinstance(x, WithEmaState)  # noqa: E731
    states = [x for x in optree.tree_leaves(opt, is_leaf=is_average) if is_average(x)]
    if not states:
        raise TreeError(
            "averaged(): the optimizer keeps no average. Make it of fs.optim.with_ema(fs.optim.adamw(...), decay=...); of a "
            "class of torch.optim, average the tree of `fn, params = model.functional()`, and call fn with that."
        )
    found: Buffers = {}
    for state in states:
        for node in units_of(state.ema):
            for group, buffer in zip(node.groups, node.buffers, strict=True):
                if (node.name, group) in found:
                    path = node.unit.full_path(node.unit.leaves_of(group)[0])
                    raise TreeError(f"averaged(): the optimizer keeps several averages of {path!r}, and one is expected.")
                found[node.name, group] = buffer
    return found
