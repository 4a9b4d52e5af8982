"""tune: the layout and the policy whose predicted step is the fastest among those that fit into memory."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from fsharp.errors import ScheduleError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.paths import assign
from fsharp.functional.layout.text import columns, nbytes_text
from fsharp.stateful.inspect.estimate import Hardware, predict
from fsharp.stateful.planning.plan_step import Backend, plan_step
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

POLICIES: Mapping[str, Policy] = {
    "prefetch 1": Policy(),
    "prefetch 2": Policy(prefetch=2),
    "gathered once": Policy(release="backward"),
    "gathered twice": Policy(release="forward"),
    "state on the host": Policy(offload=True),
}
"""The policies that :func:`tune` tries by default."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout under one policy.

    Attributes:
        layout: the layout's name.
        policy: the policy's name.
        step_s: predicted seconds of a step; infinite if its state alone is over the budget, where nothing more is predicted.
        memory: predicted bytes of one rank by kind: ``params``, ``main``, ``optimizer``, ``arena``, ``activations``.
        peak_nbytes: the most of these bytes that are there at one time.
        sent_nbytes: bytes that one rank sends in a step.
        lost: why another candidate was chosen; empty for the choice.
    """

    layout: str
    policy: str
    step_s: float
    memory: Mapping[str, int]
    peak_nbytes: int
    sent_nbytes: int
    lost: str = ""


@api_boundary
@dataclass(frozen=True)
class Choice:
    """What :func:`tune` has chosen, and what it has chosen from.

    ``print(choice)`` shows a table. ``fs.Scheduler(comm, policy=choice.policy)`` makes the step that was predicted.

    Attributes:
        name: the name of the chosen layout.
        layout: the chosen layout.
        policy: the chosen policy.
        candidates: all candidates: those that fit first, the fastest first.
    """

    name: str
    layout: Layout
    policy: Policy
    candidates: tuple[Candidate, ...]
    _planned: Mapping[str, Any]

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the chosen step."""
        return plan_step(self.layout, self.policy, **self._planned)

    def to_json(self) -> str:
        """Return the candidates as JSON: objects with the attributes of :class:`Candidate`, null for infinite seconds."""
        rows = [asdict(each) for each in self.candidates]
        return json.dumps(
            [{**row, "step_s": row["step_s"] if math.isfinite(row["step_s"]) else None} for row in rows], indent=1
        )

    def __str__(self) -> str:
        head = ("layout", "policy", "ms a step", "memory", "sent", "")
        rows = []
        for x in self.candidates:
            predicted = (f"{1e3 * x.step_s:.2f}", nbytes_text(x.sent_nbytes)) if math.isfinite(x.step_s) else ("", "")
            rows.append((x.layout, x.policy, predicted[0], nbytes_text(x.peak_nbytes), predicted[1], x.lost or "chosen"))
        return "\n".join(columns([head, *rows], right={2, 3, 4}))


@options_checked
def tune(
    layouts: Mapping[str, Layout],
    hardware: Hardware,
    *,
    budget: float,
    policies: Mapping[str, Policy] = POLICIES,
    activations: float | Mapping[str, float] = 0,
    order: Sequence[str] = (),
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    backend: Backend = "nccl",
) -> Choice:
    """Return the layout and the policy with the fastest predicted step among those that fit into memory.

    Layouts are made by :func:`~fsharp.plan`: of one tree, for any strategies, meshes, units and precisions. All meshes have the
    same number of ranks, and each rank the same batch.

    >>> import torch, fsharp as fs
    >>> shapes = {"layers": [torch.empty(512, 512, device="meta") for _ in range(8)]}
    >>> mesh = fs.Mesh({"dp": 8})
    >>> strategies = fs.ddp, fs.zero2, fs.zero3
    >>> layouts = {each.__name__: fs.plan(shapes, mesh, each("dp"), units="layers.*") for each in strategies}
    >>> hardware = fs.inspect.Hardware(compute=(1e-3, 2e-3), bandwidth=10e9, latency=2e-5)
    >>> choice = fs.tune(layouts, hardware, budget=20e6)
    >>> choice.name, choice.candidates[-1].lost
    ('zero3', '24.00 MiB, and the budget is 19.07 MiB')

    Args:
        layouts: by a name of your choice.
        hardware: seconds of each unit and the bandwidth of each axis that some mesh has: see :class:`~fsharp.inspect.Hardware`.
            Its ``update_s`` is for all parameters on one rank: a rank that has a part of them takes that part of the seconds.
        budget: bytes that one rank may take.
        policies: by a name of your choice.
        activations: bytes that a unit keeps from its forward to its backward: one number, or by pattern of unit names.
        order: as :func:`~fsharp.schedules.plan_step` takes it.
        microbatches: as ``train_step`` takes it.
        optimizer_buffers: buffers of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        backend: the backend of the process groups.

    Returns:
        The choice. Candidates that are equally fast are ordered by memory. The same arguments give the same choice on every
        rank.

    Raises:
        ScheduleError: no layout, meshes with different numbers of ranks, or no candidate that fits: the error names the
            smallest one.
        PatternError: a pattern that selects no unit.

    Cost: nothing is sent. About 3 ms for each candidate, unit and microbatch; a candidate whose state alone is over the budget
    costs nothing.
    """
    sizes = {layout.mesh.size for layout in layouts.values()}
    if len(sizes) != 1:
        found = ", ".join(f"{name}: {layout.mesh}" for name, layout in layouts.items()) or "no layout"
        raise ScheduleError(problem("tune()", f"expected layouts for one number of ranks, got {found}."))
    planned = {"order": order, "microbatches": microbatches, "optimizer_buffers": optimizer_buffers, "backend": backend}
    found_all = []
    for (name, layout), (how, policy) in product(layouts.items(), policies.items()):
        found_all.append(_candidate(name, layout, how, policy, hardware, budget, activations, planned))
    ranked = sorted(found_all, key=lambda x: (x.peak_nbytes > budget, x.step_s, x.peak_nbytes))
    best = ranked[0]
    if best.peak_nbytes > budget:
        least = min(ranked, key=lambda x: x.peak_nbytes)
        raise ScheduleError(
            problem(
                "tune()",
                "no candidate fits into the budget.",
                [
                    ("budget", nbytes_text(budget)),
                    ("smallest", f"{nbytes_text(least.peak_nbytes)}: {least.layout}, {least.policy}"),
                ],
                "Raise the budget, add layouts that shard more or have smaller units, or lower the activations.",
            )
        )
    rows = [best, *(replace(x, lost=_lost(x, best, budget)) for x in ranked[1:])]
    return Choice(best.layout, layouts[best.layout], policies[best.policy], tuple(rows), planned)


def _candidate(
    name: str,
    layout: Layout,
    how: str,
    policy: Policy,
    hardware: Hardware,
    budget: float,
    activations: float | Mapping[str, float],
    planned: Mapping[str, Any],
) -> Candidate:
    units = [unit.name or "(root)" for unit in layout.units]
    kept = assign("tune(activations=)", activations, units, default=0.0)
    memory = {
        "params": layout.nbytes("params"),
        "main": layout.nbytes("main"),
        "optimizer": planned["optimizer_buffers"] * layout.nbytes("optim"),
        "arena": 0,
        "activations": round(sum(kept.values())),
    }
    if _peak(memory, policy) > budget:
        return Candidate(name, how, math.inf, memory, _peak(memory, policy), 0)
    schedule = plan_step(layout, policy, **planned)
    everything = sum(group.used for unit in layout.units for group in unit.groups if group.trainable)
    share = layout.nbytes("optim", torch.uint8) / everything if everything else 0.0
    hardware = replace(hardware, update_s=share * hardware.update_s)
    memory["arena"] = schedule.arena
    sent = sum(call.nbytes * count for call, count in schedule.calls().items())
    return Candidate(name, how, predict(schedule, hardware).step_s, memory, _peak(memory, policy), sent)


def _peak(memory: Mapping[str, int], policy: Policy) -> int:
    """Return the most bytes at one time. Offloaded state is on the device in the update alone, where activations are not."""
    state = memory["main"] + memory["optimizer"]
    work = max(state, memory["activations"]) if policy.offload else state + memory["activations"]
    return memory["params"] + memory["arena"] + work


def _lost(candidate: Candidate, best: Candidate, budget: float) -> str:
    if candidate.peak_nbytes > budget:
        return f"{nbytes_text(candidate.peak_nbytes)}, and the budget is {nbytes_text(budget)}"
    if candidate.step_s > best.step_s:
        return f"{candidate.step_s / best.step_s - 1:.1%} slower"
    return "as fast, with more memory" if candidate.peak_nbytes > best.peak_nbytes else "as fast"
