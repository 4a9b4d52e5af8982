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
from fsharp.functional.layout.text import align_columns, nbytes_text, table_html
from fsharp.functional.tree.paths import value_by_path
from fsharp.stateful.inspect.estimate import Hardware, predict
from fsharp.stateful.planning.plan_step import Backend, plan_step
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

POLICIES: Mapping[str, SchedulePolicy] = {
    "prefetch 1": SchedulePolicy(),
    "prefetch 2": SchedulePolicy(prefetch=2),
    "gathered once": SchedulePolicy(release="backward"),
    "gathered twice": SchedulePolicy(release="forward"),
    "state on the host": SchedulePolicy(offload=True),
}
"""The policies that :func:`tune` tries by default."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The prediction for one layout under one policy.

    Attributes:
        layout: name of the layout.
        policy: name of the policy.
        step_s: predicted seconds of a step; infinite if parameters and optimizer state alone exceed the budget.
        memory: predicted bytes of one rank by kind: ``params``, ``main``, ``optimizer``, ``residuals``, ``arena``,
            ``activations``.
        peak_nbytes: the largest sum of these bytes at any one time.
        sent_nbytes: bytes that one rank sends in a step, without those of collectives in the loss.
        lost: why another candidate was chosen; empty for the chosen one.
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
    """The result of :func:`tune`: the chosen layout and policy, and the predictions for all candidates.

    ``print(choice)`` shows a table. ``fs.Scheduler(comm, policy=choice.policy)`` runs the predicted step.

    Attributes:
        name: name of the chosen layout.
        layout: the chosen layout.
        policy: the chosen policy.
        candidates: all candidates; candidates that fit into the budget come first, in order of their speed.
    """

    name: str
    layout: Layout
    policy: SchedulePolicy
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

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layout", "policy", "ms a step", "memory", "sent", "")]
        for x in self.candidates:
            predicted = (f"{1e3 * x.step_s:.2f}", nbytes_text(x.sent_nbytes)) if math.isfinite(x.step_s) else ("", "")
            rows.append((x.layout, x.policy, predicted[0], nbytes_text(x.peak_nbytes), predicted[1], x.lost or "chosen"))
        return rows

    def __str__(self) -> str:
        return "\n".join(align_columns(self._rows(), right={2, 3, 4}))

    def _repr_html_(self) -> str:
        return table_html(f"The fastest that fits is {self.name}", self._rows(), right={2, 3, 4})


@options_checked
def tune(
    layouts: Mapping[str, Layout],
    hardware: Hardware,
    *,
    budget: float,
    policies: Mapping[str, SchedulePolicy] = POLICIES,
    activations: float | Mapping[str, float] = 0,
    order: Sequence[str] = (),
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    backend: Backend = "nccl",
) -> Choice:
    """Predict a step for each layout and policy, and return the fastest pair that fits into memory.

    Layouts come from :func:`~fsharp.plan`, for one tree under any strategies, meshes, units and precisions. All meshes need the
    same number of ranks. All candidates have the same batch on a rank.

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
        layouts: candidate layouts, by names of your choice.
        hardware: seconds of each unit, and bandwidths of the axes of all meshes: see :class:`~fsharp.inspect.Hardware`.
            ``update_s`` is the time for all parameters on one rank; a rank with a part of them takes that part of the time.
        budget: most bytes that one rank may use.
        policies: candidate policies, by names of your choice.
        activations: bytes that a unit keeps from its forward to its backward: one number, or numbers by pattern of unit names.
        order: order of units in the loss, as for :func:`~fsharp.schedules.plan_step`.
        microbatches: number of microbatches, as for ``train_step``.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        backend: backend of the process groups.

    Returns:
        The choice. Equally fast candidates are ordered by memory. The same arguments give the same choice on every rank.

    Raises:
        ScheduleError: there is no layout, meshes have different numbers of ranks, or no candidate fits into the budget; the
            message names the smallest candidate.
        PatternError: a pattern matches no unit.

    Cost: no collective. About 3 ms for each candidate, unit and microbatch; nothing for a candidate whose parameters and
    optimizer state exceed the budget.
    """
    sizes = {layout.mesh.size for layout in layouts.values()}
    if len(sizes) != 1:
        found = ", ".join(f"{name}: {layout.mesh}" for name, layout in layouts.items()) or "no layout"
        raise ScheduleError(problem("tune()", f"expected layouts for one number of ranks, got {found}."))
    if not budget > 0 or optimizer_buffers < 0 or not policies:
        got = f"a budget of {budget!r}, {optimizer_buffers!r} optimizer buffers and {len(policies)} policies"
        raise ScheduleError(problem("tune()", f"got {got}, expected more than 0, at least 0, and at least one policy."))
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
    policy: SchedulePolicy,
    hardware: Hardware,
    budget: float,
    activations: float | Mapping[str, float],
    planned: Mapping[str, Any],
) -> Candidate:
    units = [unit.name or "(root)" for unit in layout.units]
    kept = value_by_path("tune(activations=)", activations, units, default=0.0)
    if wrong := [unit for unit, nbytes in kept.items() if not 0 <= nbytes < math.inf]:
        what = f"activations of unit {wrong[0]!r} are {kept[wrong[0]]!r} bytes, expected a finite number of at least 0."
        raise ScheduleError(problem("tune()", what))
    memory = {
        "params": layout.nbytes("params"),
        "main": layout.nbytes("main"),
        "optimizer": planned["optimizer_buffers"] * layout.nbytes("optim"),
        "residuals": layout.nbytes("residuals"),
        "arena": 0,
        "activations": round(sum(kept.values())),
    }
    if _peak_nbytes(memory, policy) > budget:
        return Candidate(name, how, math.inf, memory, _peak_nbytes(memory, policy), 0)
    schedule = plan_step(layout, policy, **planned)
    everything = sum(group.used for unit in layout.units for group in unit.groups if group.trainable)
    share = layout.nbytes("optim", torch.uint8) / everything if everything else 0.0
    hardware = replace(hardware, update_s=share * hardware.update_s)
    memory["arena"] = schedule.arena
    sent = sum(call.nbytes * count for call, count in schedule.calls().items())
    return Candidate(name, how, predict(schedule, hardware).step_s, memory, _peak_nbytes(memory, policy), sent)


def _peak_nbytes(memory: Mapping[str, int], policy: SchedulePolicy) -> int:
    """Return the most bytes of memory that a rank needs at one time.

    Offloaded state is on the device only during the update, when there are no activations.
    """
    state = memory["main"] + memory["optimizer"]
    work = max(state, memory["activations"]) if policy.offload else state + memory["activations"]
    return memory["params"] + memory["residuals"] + memory["arena"] + work


def _lost(candidate: Candidate, best: Candidate, budget: float) -> str:
    if candidate.peak_nbytes > budget:
        return f"{nbytes_text(candidate.peak_nbytes)}, and the budget is {nbytes_text(budget)}"
    if candidate.step_s > best.step_s:
        return f"{candidate.step_s / best.step_s - 1:.1%} slower"
    return "as fast, with more memory" if candidate.peak_nbytes > best.peak_nbytes else "as fast"
