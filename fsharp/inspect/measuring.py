"""measure: the speeds of the ranks' machines, from steps of a small model."""

import os
from collections.abc import Mapping
from statistics import median
from typing import Any

import optree
import torch

from fsharp.errors import ScheduleError
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, SingleComm
from fsharp.functional.formats.microscaling import mxint8
from fsharp.functional.forward import forward
from fsharp.functional.layout.placement import zero3
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.precision import Precision
from fsharp.functional.layout.sharded import is_sharded
from fsharp.functional.materialize import shard
from fsharp.functional.optim.elementwise import sgd
from fsharp.functional.state import init_state
from fsharp.functional.train import train_step
from fsharp.inspect.hardware import ComputeTimes, Hardware
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.trace import Trace
from fsharp.type_checks import options_checked

_LAYER_WIDTHS = (32, 256, 64, 512, 128, 1024)
"""Widths of square weights, each a unit of 4 KiB to 4 MiB. Different sizes tell latency and bandwidth apart."""
_NARROW_WIDTHS = (512, 1024)
"""Widths of further weights, whose gradients travel in bfloat16. They tell what casts in sums cost."""
_CODED_WIDTHS = (256, 512, 1024)
"""Widths of further weights, whose gradients travel in 8 bits. They tell what a codec costs."""
_WARMUP_STEPS = 3
_MEASURED_RATES = ("bandwidth", "memory_bandwidth", "codec_bandwidth", "cast_bandwidth", "issue_bandwidth")
_MEASURED_FIELDS = (*_MEASURED_RATES, "latency", "issue_s", "host_share")


@options_checked
def measure(
    comm: Comm, *, compute_times: ComputeTimes, update_s: float = 0.0, contention: float | None = None, steps: int = 20
) -> Hardware:
    """Return the hardware of ``comm``: the measured speeds of collectives, and the times of compute that you pass.

    Each rank trains a small model under ZeRO-3 along all axes, and without communication. :meth:`Hardware.fit` finds the speeds
    of each rank. The result has the medians over ranks, and is the same on every rank. ``host_bandwidth`` is not measured: it
    has its default. The call takes seconds. A bandwidth is infinite if noise hides how seconds depend on bytes: then pass more
    ``steps``. No other program should use the processors while the call runs: the speeds would come out too low.

    Args:
        comm: the ranks. All ranks call this function.
        compute_times: seconds of your model's units, as for :class:`Hardware`.
        update_s: seconds of your model's optimizer step, for all parameters on one rank.
        contention: as for :class:`Hardware`. None means 1 if a CPU host has fewer than two processors for each of its ranks,
            and else 0. Without ``LOCAL_WORLD_SIZE`` in the environment all ranks count as ranks of this host.
        steps: number of steps that are measured.

    Raises:
        ScheduleError: ``steps`` is less than 1, or a number is out of range.
        AgreementError: ranks pass different arguments. All ranks raise. Functions in ``compute_times`` are not compared.

    Cost: 32 MiB of memory, for parameters and gradients; ``2 * (steps + 3)`` steps.
    """
    is_synchronous = comm.device.type == "cpu"

    def check_arguments() -> dict[str, str]:
        if steps < 1:
            raise ScheduleError(f"measure(): steps is {steps!r}, expected at least 1.")
        Hardware(
            compute_times=compute_times,
            bandwidth=1.0,
            update_s=update_s,
            contention=contention or 0.0,
            computes_on_host=is_synchronous,
        )
        given = {"compute_times": compute_times, "update_s": update_s, "contention": contention, "steps": steps}
        return {name: _text_to_compare(value) for name, value in given.items()}

    check_on_all_ranks("measure()", comm, check_arguments, lambda given: given)
    if contention is None:
        ranks = check_on_all_ranks("measure()", comm, lambda: _num_ranks_here(comm.mesh.size))
        found_here = is_synchronous and len(os.sched_getaffinity(0)) < 2 * ranks
        contention = max(float(text) for text in all_gather_texts(str(float(found_here)), comm))
    known: dict[str, Any] = {"computes_on_host": is_synchronous, "contention": contention}
    alone, _ = _trace_small_model(SingleComm(device=comm.device), steps)
    trace, schedule = _trace_small_model(comm, steps)
    mine = check_on_all_ranks("measure()", comm, lambda: Hardware.fit(trace, schedule, alone=alone, **known))
    everyones = [Hardware.from_json(text) for text in all_gather_texts(mine.to_json(), comm)]
    found = {name: _median_by_key([getattr(each, name) for each in everyones]) for name in _MEASURED_FIELDS}
    return Hardware(compute_times=compute_times, update_s=update_s, **known, **found)


def _num_ranks_here(num_ranks: int) -> int:
    """Return ``LOCAL_WORLD_SIZE`` of the environment, the number of ranks of this host; ``num_ranks`` if it is missing."""
    text = os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))
    if not text.isdecimal():
        raise ScheduleError(f"measure(): the environment has LOCAL_WORLD_SIZE={text!r}, expected a number of processes.")
    return int(text)


def _trace_small_model(comm: Comm, steps: int) -> tuple[Trace, Schedule]:
    widths = {"layers": _LAYER_WIDTHS, "narrow": _NARROW_WIDTHS, "coded": _CODED_WIDTHS}
    params = {name: [torch.eye(width, device=comm.device) for width in each] for name, each in widths.items()}
    precision = {"**": Precision(), "narrow": Precision(wire=torch.bfloat16), "coded": Precision(wire=mxint8)}
    strategy = zero3(*(axis for axis, _ in comm.mesh.axes))
    layout = plan(params, comm.mesh, strategy, units=[f"{name}.*" for name in widths], precision=precision)
    tx = sgd(1e-3)
    state = init_state(tx, shard(params, layout, comm), comm=comm, donate=True)
    step = Scheduler(comm, policy=SchedulePolicy(bucket_nbytes=0))(train_step(_loss, tx, donate=True))
    x = torch.ones(64, max(_LAYER_WIDTHS), device=comm.device)
    for _ in range(_WARMUP_STEPS):
        state, _ = step(state, x)
    trace = step.start_trace()
    for _ in range(steps):
        state, _ = step(state, x)
    assert step.schedule is not None
    return trace, step.schedule


def _loss(params: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
    total = x.new_zeros(())
    for weight in optree.tree_leaves(params, is_leaf=is_sharded):
        total = total + forward(_layer_loss, weight, x, comm=comm)
    return total


def _layer_loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x[:, : len(weight)] @ weight).square().mean()


def _text_to_compare(value: Any) -> str:
    """Return an argument as text for comparison between ranks. All functions have the same text."""
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        return "\n".join(f"{pattern}: {_text_to_compare(each)}" for pattern, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_text_to_compare, value))
    return "None" if value is None else repr(float(value))


def _median_by_key(values: list[Any]) -> Any:
    """Return the median of ``values``: of numbers, or, for tables with equal keys, a table of medians."""
    if not isinstance(values[0], dict):
        return median(values)
    return {link: median(table[link] for table in values) for link in values[0]}
