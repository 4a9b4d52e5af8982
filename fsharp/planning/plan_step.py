"""plan_step: the schedule of a training step, from a layout alone, before any rank exists."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, TypeVar, cast

from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import LayoutError, OptionError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.tree.paths import innermost_prefix, select_paths
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, num_gradients_by_microbatch
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.transport.nccl import NcclTransport
from fsharp.stateful.units.unit_state import UnitState
from fsharp.type_checks import options_checked

Backend = Literal["nccl", "gloo"]
T = TypeVar("T", bound=Any)


@options_checked
@dataclass(frozen=True, slots=True)
class Use:
    """One call of a step that uses units, such as one :func:`~fsharp.forward`.

    Attributes:
        units: names of the units, in the order in which the call gathers them: owners of tied leaves come first.
        inner: the calls inside of this call, as of a module within a module.
        has_backward: whether a backward reaches the call: False if the call's results depend on no trained parameter.
        ties: the units in ``units`` that the call gathers only because leaves of its other units are tied to their leaves.
    """

    units: tuple[str, ...]
    inner: tuple["Use", ...] = ()
    has_backward: bool = True
    ties: tuple[str, ...] = ()


@options_checked
def plan_step(
    layout: Layout,
    policy: SchedulePolicy = SchedulePolicy(),
    *,
    order: Sequence[str | Use] = (),
    remat: str | Sequence[str] = (),
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    backend: Backend = "nccl",
    is_module: bool = False,
) -> Schedule:
    """Return the schedule of a training step from a layout alone, without ranks, process groups and memory.

    :class:`~fsharp.Scheduler` compiles the same schedule at the first call of this step. A step that uses units in another way
    gets another schedule.

    Args:
        layout: layout of the parameters.
        policy: policy of the schedule.
        order: the uses of units in a microbatch, in order: patterns of unit names, such as ``("embed", "layers.*", "head")``,
            or a :class:`~fsharp.schedules.Use` for a call with several units, or with calls inside. A unit with leaves tied to
            other units is used together with these units. If empty, each unit is used once, in the order of the tree, where
            keys of dicts are sorted.
        remat: patterns of units whose activations are recomputed in the backward, as by ``forward(remat=True)``. The root's
            name is ``(root)``.
        microbatches: number of microbatches, as for ``train_step``.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum. Only ``offload`` uses it.
        backend: backend of the process groups. ``"gloo"`` has no streams.
        is_module: whether the parameters are those of a sharded module, which with ``offload`` keeps its main copies.

    Raises:
        LayoutError: ``order`` lacks a unit, or patterns select a unit twice.
        OptionError: ``microbatches`` is less than 1.
        PatternError: a pattern matches no unit.
        ScheduleError: even the schedule with the least memory exceeds ``policy.memory_budget``.

    Cost: about 2.5 ms for each unit and microbatch.
    """
    if microbatches < 1:
        raise OptionError(f"plan_step(): microbatches is {microbatches}, expected at least 1.")
    if policy.separate_groups is None:
        policy = replace(policy, separate_groups=backend == "gloo")
    # The transport says how much scratch a reduction needs, from the mesh alone. A layout has a mesh as a Comm has.
    kind: type[NcclTransport | GlooTransport] = NcclTransport if backend == "nccl" else GlooTransport
    transport = kind(cast(ProcessGroupComm, layout), groups=None)  # type: ignore[arg-type]
    uses = uses_in_order(layout, order)
    names = list(dict.fromkeys(name for use in walk_nested_uses(uses) for name in use.units))
    trained = {name for name in names if layout[name].trainable_groups}
    recomputed = select_paths("plan_step(remat=)", remat, [name or ROOT for name in names])
    numbers = count()
    events = [event for _ in range(microbatches) for event in _microbatch_events(layout, uses, recomputed, numbers)]
    gradients = num_gradients_by_microbatch(events)
    units = {name: UnitState(name or ROOT, layout[name], trivial=False) for name in names}
    facts = []
    for name, unit in units.items():
        unit.begin_gradient(transport, None, final_sum_in_place=True)
        if policy.offload:
            alone = Layout(layout.mesh, (layout[name],), layout.structure)
            unit.set_offloaded_nbytes(offloaded_nbytes(alone, optimizer_buffers, is_module=is_module))
        several = any(each[unit.key] > 1 for each in gradients)
        known = {"several_uses": several, "several_microbatches": microbatches > 1}
        known |= {"trained": name in trained, "updated": name in trained, "keep_gradients": policy.keep_gradients}
        facts.append(unit.facts(**known))
    offloaded = {each.name for each in facts if each.host}
    fetches = [Event("fetch", unit.name or ROOT) for unit in layout.units if (unit.name or ROOT) in offloaded]
    reduce = Event("reduce", units=tuple(sorted(each.name for each in facts if each.trainable and each.finish)))
    update = Event("update", units=tuple(sorted(each.name for each in facts)))
    program = Program(tuple(facts), (*events, reduce, *fetches, update))
    return compile_schedule(program, policy, has_streams=backend == "nccl")


ROOT = "(root)"
"""The name of the root in programs: the unit of a whole tree."""


def uses_in_order(layout: Layout, order: Sequence[str | Use]) -> tuple[Use, ...]:
    """Return the uses of units in a microbatch, in order. An empty ``order`` means each unit once, in the order of the layout.

    Raises LayoutError if ``order`` lacks a unit with leaves, has a Use of an unknown unit, or has patterns that select a unit
    twice. Raises PatternError if a pattern matches no unit.
    """
    names = [unit.name for unit in layout.units if unit.groups or unit.tie_owner_unit_names]
    facts = [("order", ", ".join(map(str, order)))]
    uses: list[Use] = []
    found: list[str] = []
    for each in order or names:
        if isinstance(each, Use):
            uses.append(each)
            continue
        selected = {each} if each in names else select_paths("plan_step()", (each,), names)
        mine = [name for name in names if name in selected]
        uses += [use_of_units(layout, [name]) for name in mine]
        found += mine
    if len(set(found)) < len(found):
        twice = next(name for i, name in enumerate(found) if name in found[:i])
        raise LayoutError(problem("plan_step()", f"order selects unit {twice!r} twice.", facts))
    used = {name for use in walk_nested_uses(uses) for name in use.units}
    if unknown := sorted(used - {unit.name for unit in layout.units}):
        raise LayoutError(problem("plan_step()", f"order has unit {unknown[0]!r}, and the layout has no such unit.", facts))
    if missing := [name for name in names if name not in used]:
        remedy = "Add its name, or a pattern, where the loss uses the unit."
        raise LayoutError(problem("plan_step()", f"order lacks unit {missing[0]!r}.", facts, remedy))
    return tuple(uses)


def walk_nested_uses(uses: Iterable[T]) -> Iterator[T]:
    """Yield each use, followed by its inner uses, recursively. Uses may be of any class with an attribute ``inner``."""
    for use in uses:
        yield use
        yield from walk_nested_uses(use.inner)


def uses_of_modules(layout: Layout, owners: Mapping[str, Sequence[str]]) -> list[Use]:
    """Return a use of each module, inside of the use of the module around it. ``owners``: by path, a module's units."""
    inner: dict[str | None, list[str]] = {}
    for path in (around := {path: None for path, names in owners.items() if names}):
        inner.setdefault(innermost_prefix(path.rpartition(".")[0], around) if path else None, []).append(path)

    def uses_inside(path: str | None) -> tuple[Use, ...]:
        return tuple(use_of_units(layout, owners[each], uses_inside(each)) for each in inner.get(path, ()))

    return list(uses_inside(None))


def use_of_units(layout: Layout, names: Sequence[str], inner: tuple[Use, ...] = ()) -> Use:
    """Return the :class:`Use` for one call that uses units ``names``.

    If a leaf of these units is tied to a leaf of another unit, the call gathers the other unit first.
    """
    ties = tuple(sorted({tied for name in names for tied in layout[name].tie_owner_unit_names} - set(names)))
    return Use((*ties, *names), inner, ties=ties)


def _units_with_gradient(layout: Layout, use: Use) -> set[str]:
    """Return the units of a use that get a gradient. A unit in ``use.ties`` counts if it lends a leaf that is trained."""
    own = [layout[name] for name in use.units if name not in use.ties]
    tied = [leaf.tied_to for unit in own for leaf in unit.leaves if leaf.tied_to is not None]
    found = {unit.name for unit in own if unit.trainable_groups}
    for owner in set(use.ties):
        mine = {leaf.group for leaf in layout[owner].leaves if (owner, leaf.path) in tied}
        found |= {owner} if mine.intersection(layout[owner].trainable_groups) else set()
    return found


def offloaded_nbytes(layout: Layout, optimizer_buffers: int, *, is_module: bool) -> int:
    """Return the bytes of one rank's state that ``offload`` keeps on the host. A module keeps its main copies on the device."""
    return optimizer_buffers * layout.nbytes("optim") + (0 if is_module else layout.nbytes("main"))


def _microbatch_events(layout: Layout, uses: Sequence[Use], recomputed: Collection[str], numbers: Iterator[int]) -> list[Event]:
    """Return the events of a microbatch: the forwards of ``uses``, then the backwards in reverse order.

    There is no backward of uses before the first use that gets a gradient, nor of uses without ``has_backward``.
    ``recomputed``: names, as in programs, of units whose forward runs again in the backward. ``numbers``: yields a new number
    for each use of a unit.
    """
    events: list[Event] = []

    def add_forward(use: Use) -> Callable[[], None]:
        """Add the events of a use's forward. Return a function that adds the events of the use's backward."""
        keys = [(name or ROOT, next(numbers)) for name in use.units]
        events.extend([Event("forward", key, number) for key, number in keys])
        inner, trained = [add_forward(each) for each in use.inner], _units_with_gradient(layout, use)
        events.extend([Event("forward_end", key, number) for key, number in reversed(keys)])

        def add_backward() -> None:
            if not use.has_backward:
                return
            events.extend([Event("backward", key, number) for key, number in keys])
            if any(key in recomputed for key, _ in keys):
                add_forward(use)
            for add_inner in reversed(inner):
                add_inner()
            for name, (key, number) in reversed(list(zip(use.units, keys, strict=True))):
                events.append(Event("backward_end", key, number, no_gradient=name not in trained))

        return add_backward

    backwards = [add_forward(use) for use in uses]
    has_gradient = [any(_units_with_gradient(layout, each) for each in walk_nested_uses([use])) for use in uses]
    first = has_gradient.index(True) if True in has_gradient else len(uses)
    for add_backward in reversed(backwards[first:]):
        add_backward()
    return [*events, Event("microbatch_end")]
