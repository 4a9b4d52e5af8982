"""Where autograd meets the scheduler: the leaves a function gets, and the gradients that come back for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsharp.functional.errors import ScheduleError

Receive = Callable[[Sequence[torch.Tensor | None]], None]


class _Boundary(torch.autograd.Function):
    """Leaves out, gradients in. They go to the scheduler and not to the sinks, which only make autograd come here.

    The engine runs what was made last first, and this was made before anything that the function did: when it is called
    the whole backward of this use is over, and nothing of what came earlier in the forward has begun.
    """

    @staticmethod
    def forward(ctx: Any, receive: Receive, leaves: list[torch.Tensor], *sinks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.receive, ctx.num_sinks = receive, len(sinks)
        ctx.set_materialize_grads(False)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_graph()
        ctx.receive(grads)
        return (None,) * (2 + ctx.num_sinks)


def refuse_graph() -> None:
    """Refuse a backward that is to be differentiated itself: what it saves would point at memory that is released.

    Raises:
        ScheduleError: such a backward is under way.
    """
    if torch.is_grad_enabled():
        raise ScheduleError(
            "forward(): a graph of the backward was asked for (create_graph=True), which the scheduler does not keep. "
            "The blocking path can be differentiated again: of a ShardedModule take `fn, params = model.functional()`, and "
            "call fn(params, ..., comm=model.comm); in functions pass comm=scheduler.comm to forward() there."
        )


def differentiable(receive: Receive, leaves: list[torch.Tensor], sinks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves as outputs of a node whose backward hands their gradients, None where there is none, to ``receive``."""
    return list(_Boundary.apply(receive, leaves, *sinks))


def before_backward(outputs: Sequence[Any], inputs: Sequence[Any], call: Callable[[], None]) -> None:
    """Have ``call`` called when a backward comes to the function that made ``outputs``; once for each that it comes to."""
    mine = {id(x) for x in inputs if isinstance(x, torch.Tensor)}
    for out in outputs:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None and id(out) not in mine:
            out.grad_fn.register_prehook(lambda _: call())


def in_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
