"""averaged: replace a module's parameters by the averages in an optimizer's state, in a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch

from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.layout.sharded import trainable, units_of
from fsharp.functional.optim.ema import WithEmaState
from fsharp.stateful.modules.session import ModuleSession
from fsharp.stateful.modules.te import preserving_amax_histories


@contextmanager
def using_averaged_parameters(session: ModuleSession, opt_state: Any) -> Iterator[None]:
    """In this context, replace a module's parameters by the averages in ``opt_state``. At the end restore the parameters."""
    averages, state = _average_buffers(opt_state), session.state
    if session.is_averaged:
        raise ScheduleError("averaged(): the call is inside of another averaged().")
    session.step.abandon_forwards("averaged()")
    state.propagate_main_writes()
    copies = units_of(state.main_parameters())
    shown = {(node.name, g): x for node in copies for g, x in zip(node.groups, node.buffers, strict=True)}
    nodes = units_of((trainable(state.train_state.params), state.train_state.main))
    targets = [buffer for node in nodes for buffer in node.buffers]
    own = [target.detach().clone() for target in targets]
    session.is_averaged = True
    try:
        state.copy_into_buffers([shown[key] for key in averages], list(averages.values()))
        with preserving_amax_histories(session.layout):
            state.gather_main_into_resting_parameters()
        yield
    finally:
        state.copy_into_buffers(targets, own)
        session.is_averaged = False


def _average_buffers(opt_state: Any) -> dict[tuple[str, int], torch.Tensor]:
    is_average = lambda x: isinstance(x, WithEmaState)  # noqa: E731
    states = [x for x in optree.tree_leaves(opt_state, is_leaf=is_average) if is_average(x)]
    if not states:
        raise TreeError(
            "averaged(): the optimizer keeps no average. Make it of fs.optim.with_ema(fs.optim.adamw(...), decay=...). With a "
            "class of torch.optim, average `params` of `fn, params = model.functional()`, and call fn with the averages."
        )
    found = dict[tuple[str, int], torch.Tensor]()
    for state in states:
        for node in units_of(state.ema):
            for group, buffer in zip(node.groups, node.buffers, strict=True):
                if (node.name, group) in found:
                    path = node.unit.path_in_tree(node.unit.leaves_of_group(group)[0])
                    raise TreeError(f"averaged(): the optimizer keeps several averages of {path!r}, expected one.")
                found[node.name, group] = buffer
    return found
