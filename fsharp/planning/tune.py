"""tune: find the fastest predicted step that fits into memory, over layouts, policies and recomputations."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from fsharp.errors import ScheduleError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, SingleComm
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.precision import Precisions
from fsharp.functional.layout.text import nbytes_text
from fsharp.functional.tree.paths import Patterns
from fsharp.planning.choice import Candidate, Choice, sort_candidates
from fsharp.planning.costs import Activations
from fsharp.planning.plan_step import Backend, Use
from fsharp.planning.request import HardwareSource, TuneRequest
from fsharp.planning.search import search_candidates
from fsharp.planning.space import Strategies, UnitPatterns
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.type_checks import options_checked

POLICIES: Mapping[str, SchedulePolicy] = {
    "prefetch 1": SchedulePolicy(),
    "prefetch 2": SchedulePolicy(prefetch=2),
    "no prefetch": SchedulePolicy(prefetch=0),
    "gathered once": SchedulePolicy(release="backward"),
    "gathered twice": SchedulePolicy(release="forward"),
    "no buckets": SchedulePolicy(bucket_nbytes=0),
    "buckets of 25 MB": SchedulePolicy(bucket_nbytes=25_000_000),
    "least memory": SchedulePolicy(prefetch=0, release="forward", bucket_nbytes=0),
    "separate gradients": SchedulePolicy(keep_gradients=True),
    "state on the host": SchedulePolicy(offload=True),
}
"""The policies that :func:`tune` tries by default."""
TOLERANCE = 0.02
"""The fraction of a step by which predictions for two candidates have to differ to count."""


@options_checked
def tune(
    model: Any,
    hardware: HardwareSource,
    *,
    budget: float,
    batch: Any = None,
    mesh: int | Mesh | Sequence[Mesh] | None = None,
    strategies: Strategies | None = None,
    units: str | Sequence[str] | Mapping[str, UnitPatterns] | None = None,
    formats: Mapping[str, Precisions] | None = None,
    policies: Mapping[str, SchedulePolicy] = POLICIES,
    remat: Mapping[str, str | Sequence[str]] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    frozen: Patterns = (),
    activations: Activations | Mapping[str, Activations] | None = None,
    order: Sequence[str | Use] = (),
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    backend: Backend = "nccl",
    device: torch.device | str | None = None,
    comm: Comm | None = None,
    tolerance: float = TOLERANCE,
    effort: float = 2500,
    progress: bool | None = None,
) -> Choice:
    """Return the fastest predicted step that fits into memory. Search strategies, meshes, units, policies, remats and formats.

    Candidates that are slower than the fastest by at most ``tolerance`` count as equally fast. The simplest of them is
    chosen, with the fewest of three costly options: recomputation, a precision other than ``Precision()``, and state on the
    host. If several are equally simple, the policy with the fewest fields that differ from ``SchedulePolicy()`` is chosen; then
    the least memory.

    >>> import torch, fsharp as fs
    >>> shapes = {"layers": [torch.empty(512, 512, device="meta") for _ in range(8)]}
    >>> hardware = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=10e9, latency=2e-5)
    >>> choice = fs.tune(shapes, hardware, budget=20e6, batch=64, mesh=fs.Mesh({"dp": 8}))
    >>> choice.name
    'zero3'

    Args:
        model: an ``nn.Module``; or a tree of tensors, of which only shapes and dtypes count; or layouts by name, from
            :func:`~fsharp.plan`. If layouts are passed, only these layouts are tried.
        hardware: a :class:`~fsharp.inspect.Hardware` with bandwidths of the axes of all meshes; or the name of a GPU, as for
            :meth:`~fsharp.inspect.Hardware.preset`, for hosts of 8 ranks; or a function that returns the hardware of a layout.
            ``update_s`` is the time of an update of all parameters on one rank; a rank that updates a half takes half as long.
        budget: the largest number of bytes that one rank may use, activations included.
        batch: the input of one rank, whose tensors may be on the meta device. For a module: the input in a microbatch, as a
            tuple of arguments, a mapping of keyword arguments, or one argument. For ``loss_fn``: the batch of a step, which is
            split into microbatches. A number is the number of tokens of a rank in a microbatch. Each token then counts as
            using all parameters, those of all experts too.
        mesh: a mesh, several meshes of one size, or a number of ranks. A number stands for a mesh of one axis ``dp``, and for
            each mesh of axes ``outer`` and ``inner`` that fits hosts of 8 ranks. The inner size then divides 8, or is a
            multiple of 8. If ``hardware`` has bandwidths by axis, only meshes of these axes are tried. None means the mesh of
            ``comm``.
        strategies: strategies or partition specs by name, or functions of the axes that return a strategy. A function that
            needs another number of axes is not tried on a mesh. By default ``ddp``, ``zero1``, ``zero2``, ``zero3``, and on
            two axes ``hsdp`` and ``hfsdp``.
        units: patterns of units, as for :func:`~fsharp.plan`; or several choices by name. By default each repeated layer is a
            unit. Each part of such a layer is tried as a unit as well, and without ``loss_fn`` the whole tree as one unit.
            Parts and the whole tree are not tried if ``activations`` is given, or a :class:`~fsharp.inspect.Hardware` without
            ``device``.
        formats: precisions by name. By default only ``Precision()``, as other precisions change values. A strategy that does
            not fit a precision loses with this reason, such as ``zero3`` with ``Precision(update=...)``.
        policies: policies by name.
        remat: patterns of units whose activations are recomputed, by name. By default two choices are tried: no units; and, if
            this saves memory, the units of all innermost calls. The bytes that a recomputed unit keeps have to be known.
        loss_fn: ``loss_fn(params, batch, comm)``, as for :func:`~fsharp.train_step`, without recomputation. The function runs
            once on meta tensors for each choice of units. This trial gives the order of units, and their FLOPs and bytes.
        frozen: patterns of leaves without gradients, for a tree of tensors.
        activations: bytes that a unit keeps from its forward to its backward, in place of estimates; or a pair: these bytes
            without and with recomputation. One value for all units, or values by pattern of unit names.
        order: order of units in the loss, as for :func:`~fsharp.schedules.plan_step`, if no trial gives it.
        microbatches: number of microbatches, as for ``train_step``.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        backend: backend of the process groups.
        device: device on which one call of each kind of unit runs. Its measured seconds replace the seconds in ``hardware``,
            and its measured bytes the estimated activations.
        comm: the ranks. If given, all ranks call this function, compare their arguments, and share their measurements.
        tolerance: fraction of the fastest step's time within which candidates count as equally fast. The default is about the
            error of a prediction. With 0 the fastest candidate is chosen.
        effort: number of units to simulate in all steps together; each counts once for each microbatch. ``math.inf`` simulates
            every candidate that may fit, also candidates that cannot be the fastest. Until a candidate fits, all are simulated.
        progress: whether to show a bar on stderr after one second. None means yes on rank 0 if stderr is a terminal.

    Returns:
        The choice. The same arguments give the same choice on every rank.

    Raises:
        ScheduleError: no candidate fits into the budget; the message names the smallest.
        ScheduleError: no schedule fits into the ``memory_budget`` of the policies.
        ScheduleError: an argument is missing or does not fit, or a trial fails.
        OptionError: ``device`` is not a device that computes; the meta device does not.
        PatternError: a pattern matches no unit.
        LayoutError: a format fits no strategy.
        AgreementError: ranks pass different arguments. All ranks raise.

    Cost: no collective without ``comm``. About 4 ms for each unit of ``effort``. A candidate is not simulated if it exceeds the
    budget at rest, or if it would be slower than the fastest even without waits.
    """
    arguments = dict(locals())  # of this call, by name
    request = TuneRequest(**{each.name: arguments[each.name] for each in fields(TuneRequest)})
    ranks = comm or SingleComm()
    # Ranks agree before and after they measure together: if one rank fails or differs, all ranks raise an error.
    to_try = check_on_all_ranks("tune()", ranks, request.layouts_to_try, request.argument_texts_to_compare)
    costs = request.costs(to_try)
    combinations = check_on_all_ranks(
        "tune()", ranks, lambda: request.combinations(to_try, costs), request.hardware_texts_to_compare
    )
    show = sys.stderr.isatty() and ranks.rank == 0 if progress is None else progress
    found = search_candidates(combinations, budget, tolerance, effort=effort, show=show)
    found += [Candidate(name, "", "", math.inf, {}, 0, 0, refused=why) for name, why in to_try.refused.items()]
    candidates = sort_candidates(found, budget, tolerance)
    first = candidates[0]
    if first.refused:
        facts = [(f"{each.layout}, {each.policy}", each.refused) for each in candidates[:8]]
        remedy = "Raise memory_budget, or leave it out."
        raise ScheduleError(problem("tune()", "no schedule fits into the memory_budget of a policy.", facts, remedy))
    if first.peak_nbytes > budget:
        least = min((each for each in candidates if not each.refused), key=lambda x: x.peak_nbytes)
        names = ", ".join(filter(None, (least.layout, least.policy, least.remat and f"recomputed {least.remat}")))
        facts = [
            ("budget", f"{nbytes_text(budget)} ({budget / 1e9:g} GB)"),
            ("smallest", f"{nbytes_text(least.peak_nbytes)}: {names}"),
        ]
        facts += [(kind, nbytes_text(nbytes)) for kind, nbytes in least.memory.items() if nbytes]
        remedy = "Raise the budget, add ranks, strategies that shard more, smaller units or recomputation, or lower the batch."
        raise ScheduleError(problem("tune()", "no candidate fits into the budget.", facts, remedy))
    known = {each.names: each for each in combinations}
    chosen = known[first.layout, first.policy, first.remat]
    return Choice(
        name=first.layout,
        layout=chosen.option.layout,
        policy=chosen.policy,
        remat=chosen.arguments.remat,
        candidates=candidates,
        budget=budget,
        activations=costs[chosen.option.cost_key].source,
        made_by=chosen.option.made_by,
        _arguments=chosen.arguments,
        _others={names: (each.option, each.policy, each.arguments) for names, each in known.items()},
    )
