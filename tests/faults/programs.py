"""What ranks do until something happens to one of them."""

import hashlib
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import optree
import torch

import fsharp as fs
from tests.gpt_like import loss_fn
from tests.modules import batches, wrap
from tests.scheduling import make_state, make_tx, my_batches

torch.set_num_threads(1)


def train(comm: Any, step_done: Callable[[], Any], *, way: str, steps: int) -> str:
    """Train under ZeRO-3, by one of the three ways; a digest of the parameters that came of it."""
    return {"module": _train_module}.get(way, _train_functions)(comm, step_done, way, steps)


def leave(comm: Any, step_done: Callable[[], Any], *, way: str, steps: int, leaves: int, fails: bool) -> None:
    """As :func:`train`; one rank leaves after three steps, or fails in what is none of this library's."""

    def done() -> None:
        step_done()
        left = 3 - next(count)
        if comm.rank == leaves and left == 1:
            raise ZeroDivisionError("no more data") if fails else Left

    count = itertools.count()
    with suppress(Left):
        train(comm, done, way=way, steps=steps)


def make_groups(comm: Any, step_done: Callable[[], Any]) -> None:
    """Process groups of the Comm's own, one after another."""
    while True:
        comm.new_group("dp")
        step_done()


class Left(Exception):
    """Ends a program, which is no error."""


def _train_functions(comm: Any, step_done: Callable[[], Any], way: str, steps: int) -> str:
    state, step = make_state(comm, fs.zero3("dp")), fs.train_step(loss_fn, make_tx())
    call = fs.Scheduler(comm)(step) if way == "scheduled" else lambda state, batch: step(state, batch, comm)
    given = my_batches(comm, 4)
    for i in range(steps):
        state, _ = call(state, given[i % 4])
        step_done()
    return _digest(optree.tree_leaves(fs.full_tree(state.params, comm=comm)))


def _train_module(comm: Any, step_done: Callable[[], Any], way: str, steps: int) -> str:
    model, optimizer = wrap(comm, fs.zero3("dp"))
    given = batches(comm, 4)
    for i in range(steps):
        x, y = given[i % 4]
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        step_done()
    return _digest([x for _, x in model.named_full_parameters()])


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
