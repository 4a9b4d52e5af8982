"""plan_step: the schedule of a training step, from a layout alone, before any rank exists."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, cast

from fsharp.errors import LayoutError, problem
from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.tree.paths import select_paths
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.transport.base import Transport
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.transport.nccl import NcclTransport
from fsharp.stateful.units.unit_state import UnitState
from fsharp.type_checks import options_checked

Backend = Literal["nccl", "gloo"]


@options_checked
def plan_step(
    layout: Layout,
    policy: SchedulePolicy = SchedulePolicy(),
    *,
    order: Sequence[str] = (),
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    backend: Backend = "nccl",
) -> Schedule:
    """Return the schedule of a training step, from a layout alone: without ranks, process groups and memory.

    The step uses each unit once in each microbatch. :class:`~fsharp.Scheduler` compiles the same schedule at the first call of
    this step. A step that uses units in another way gets another schedule.

    Args:
        layout: layout of the parameters.
        policy: policy of the schedule.
        order: patterns of unit names in the order in which the loss uses the units, such as
            ``("embed", "layers.*", "head")``. If empty, the order is that of the tree, where keys of dicts are sorted.
        microbatches: number of microbatches, as for ``train_step``.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum. Only ``offload`` uses it.
        backend: backend of the process groups. ``"gloo"`` has no streams.

    Raises:
        LayoutError: ``order`` does not match a unit, or matches it twice.
        PatternError: a pattern matches no unit.
        ScheduleError: even the schedule with the least memory exceeds ``policy.memory_budget``.

    Cost: about 2.5 ms for each unit and microbatch.
    """
    if microbatches < 1:
        raise LayoutError(f"plan_step(): microbatches is {microbatches}, expected at least 1.")
    if tied := [unit for unit in layout.units if unit.tied_units]:
        what = f"unit {tied[0].name!r} has leaves of {', '.join(map(repr, sorted(tied[0].tied_units)))}, and uses them as well."
        raise LayoutError(problem("plan_step()", what, remedy="Record such a step: call it once under a scheduler."))
    if policy.separate_groups is None:
        policy = replace(policy, separate_groups=backend == "gloo")
    # How much scratch a reduction needs depends on the mesh alone, which a layout has, too.
    kind: type[NcclTransport | GlooTransport] = NcclTransport if backend == "nccl" else GlooTransport
    transport = kind(cast(ProcessGroupComm, layout), groups=None)  # type: ignore[arg-type]
    names = _in_order(layout, order)
    trained = [name for name in names if layout[name].trainable_groups]
    keys = {name: name or "(root)" for name in names}
    units = {name: _unit(layout, name, transport, optimizer_buffers if policy.offload else None) for name in names}
    known = {"several_uses": False, "several_microbatches": microbatches > 1}
    facts = tuple(unit.facts(policy, trained=name in trained, updated=name in trained, **known) for name, unit in units.items())
    events = [event for i in range(microbatches) for event in _microbatch(keys, trained, first_use=i * len(names))]
    fetches = [Event("fetch", keys[unit.name]) for unit in layout.units if policy.offload and unit.name in trained]
    program = Program(facts, (*events, Event("reduce"), *fetches, Event("update")))
    return compile_schedule(program, policy, has_streams=backend == "nccl")


def _in_order(layout: Layout, order: Sequence[str]) -> list[str]:
    """Return the names of the units with elements, in the order of their use."""
    names = [unit.name for unit in layout.units if unit.groups]
    if not order:
        return names
    selected = [select_paths("plan_step()", (pattern,), names) for pattern in order]
    found = [name for each in selected for name in names if name in each]
    if missing := [name for name in names if name not in found]:
        what, remedy = f"order says nothing of unit {missing[0]!r}.", "Add its name, or a pattern, where the loss uses it."
        raise LayoutError(problem("plan_step()", what, [("order", ", ".join(order))], remedy))
    if len(found) > len(names):
        twice = next(name for i, name in enumerate(found) if name in found[:i])
        raise LayoutError(problem("plan_step()", f"order selects unit {twice!r} twice.", [("order", ", ".join(order))]))
    return found


def _unit(layout: Layout, name: str, transport: Transport, buffers: int | None) -> UnitState:
    """Return a trained unit. ``buffers``: number of its buffers of optimizer state in host memory; None: all on the device."""
    unit = UnitState(name or "(root)", layout[name], trivial=False)
    unit.begin_gradient(transport, None)
    if buffers is not None:
        alone = Layout(layout.mesh, (layout[name],), layout.spec)
        unit.set_offloaded_nbytes(alone.nbytes("main") + buffers * alone.nbytes("optim"))
    return unit


def _microbatch(keys: dict[str, str], trained: Sequence[str], *, first_use: int) -> Iterator[Event]:
    """Yield the events of a forward and a backward. No gradient passes through units in front of the first trained one.

    ``keys``: keys of units by name, in order of use. ``first_use``: number of the first use.
    """
    uses = [(name, key, first_use + i) for i, (name, key) in enumerate(keys.items())]
    for _, key, use in uses:
        yield Event("forward", key, use)
        yield Event("forward_end", key, use)
    passed = [each for i, each in enumerate(uses) if any(name in trained for name, _, _ in uses[: i + 1])]
    for name, key, use in reversed(passed):
        yield Event("backward", key, use)
        yield Event("backward_end", key, use, bare=name not in trained)
    yield Event("microbatch_end")
