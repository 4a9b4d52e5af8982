"""Request: the arguments of tune(). From these it makes layouts, costs of units, and combinations to predict."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch

from fsharp.errors import ScheduleError, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.precision import Precision, Precisions
from fsharp.functional.tree.paths import Patterns, select_paths, value_by_path
from fsharp.inspect.estimate import Hardware
from fsharp.inspect.presets import EFFICIENCY, GPUS, host_links
from fsharp.planning.choice import Planned
from fsharp.planning.costs import Activations, Costs, costs_of_calls, estimated_costs, given_costs
from fsharp.planning.plan_step import ROOT, Backend, Use
from fsharp.planning.search import Trial
from fsharp.planning.space import (
    Cut,
    Model,
    Option,
    Strategies,
    UnitPatterns,
    meshes_of,
    model_of,
    options_of,
    order_of_use,
    trial_layout,
    units_to_try,
)
from fsharp.planning.trial import UnitCall, measure_calls, trial_of_loss, trial_of_module
from fsharp.stateful.modules.selection import chosen_modules, units_by_module
from fsharp.stateful.schedule.policy import SchedulePolicy

Machine = Hardware | str | Callable[[Layout], Hardware]
"""The hardware; or the name of a GPU, as for :meth:`Hardware.preset`; or a function that returns the hardware of a layout."""


class Space(NamedTuple):
    """The layouts to try; and by :data:`Cut` the calls of a trial, and the costs before a measurement."""

    options: list[Option]
    calls: dict[Cut, list[UnitCall]]
    costs: dict[Cut, Costs]


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """The arguments of :func:`~fsharp.tune`."""

    model: Any
    hardware: Machine
    budget: float
    batch: Any
    mesh: int | Mesh | Sequence[Mesh] | None
    strategies: Strategies | None
    units: str | Sequence[str] | Mapping[str, UnitPatterns] | None
    formats: Mapping[str, Precisions] | None
    policies: Mapping[str, SchedulePolicy]
    remat: Mapping[str, str | Sequence[str]] | None
    loss_fn: Callable[..., Any] | None
    frozen: Patterns
    activations: Activations | Mapping[str, Activations] | None
    order: Sequence[str | Use]
    microbatches: int
    optimizer_buffers: int
    backend: Backend
    device: torch.device | None
    comm: Comm | None
    effort: float

    @property
    def tokens(self) -> float | None:
        """The batch, if it is a number."""
        return self.batch if isinstance(self.batch, int | float) and not isinstance(self.batch, bool) else None

    def space(self) -> Space:
        """Return the layouts to try, with their costs. Trials run on meta tensors."""
        self._check()
        if isinstance(self.model, Mapping) and all(isinstance(each, Layout) for each in self.model.values()):
            return self._space_of_layouts(self.model)
        return self._space_of_model(model_of(self.model, self.frozen))

    def _check(self) -> None:
        if not self.budget > 0 or self.optimizer_buffers < 0 or not self.policies:
            got = f"a budget of {self.budget!r}, {self.optimizer_buffers!r} optimizer buffers and {len(self.policies)} policies"
            raise ScheduleError(problem("tune()", f"got {got}, expected more than 0, at least 0, and at least one policy."))
        if not self.effort > 0:
            raise ScheduleError(f"tune(): effort is {self.effort!r}, expected more than 0.")
        if self.microbatches < 1:
            raise ScheduleError(f"tune(): microbatches is {self.microbatches}, expected at least 1.")
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ScheduleError(f"tune(): batch is {self.tokens!r} tokens, expected more than 0 and finite.")
        if isinstance(self.hardware, str) and self.hardware not in GPUS:
            raise ScheduleError(f"tune(): hardware is {self.hardware!r}, expected a Hardware, or one of {', '.join(GPUS)}.")

    def _space_of_layouts(self, layouts: Mapping[str, Layout]) -> Space:
        of_model = ("mesh", "strategies", "units", "formats", "batch", "loss_fn", "device")
        if wrong := [name for name in of_model if getattr(self, name) is not None] + ["frozen"] * (self.frozen != ()):
            raise ScheduleError(f"tune(): got {wrong[0]}= beside layouts. Leave it out, or pass the model in place of layouts.")
        if isinstance(self.hardware, str):
            raise ScheduleError(
                f"tune(): got hardware {self.hardware!r} with layouts, expected a Hardware, which has the seconds of units."
            )
        if len({layout.mesh.size for layout in layouts.values()}) != 1:
            found = ", ".join(f"{name}: {layout.mesh}" for name, layout in layouts.items()) or "no layout"
            raise ScheduleError(problem("tune()", f"expected layouts for one number of ranks, got {found}."))
        options = [Option(name, layout, (name, ""), {}) for name, layout in layouts.items()]
        return Space(options, {}, {each.cut: given_costs(each.layout, self.order, self.activations or 0.0) for each in options})

    def _space_of_model(self, model: Model) -> Space:
        has_trial = self.batch is not None and self.tokens is None
        meshes = self._meshes()
        self._check_trial(model, has_trial=has_trial)
        cuts = self._cuts(model)
        formats = {"": Precision()} if self.formats is None else self.formats
        options = options_of(model, meshes, self.strategies, cuts, formats)
        if not any(option.layout.num_params for option in options):
            raise ScheduleError(
                "tune(): the model has no parameters, or there is no strategy, choice of units or format to try."
            )
        calls: dict[Cut, list[UnitCall]] = {}
        costs: dict[Cut, Costs] = {}
        for (units, patterns), (form, precision) in product(cuts.items(), formats.items()):
            cut = units, form
            alone = trial_layout(model, meshes[0], patterns, precision)
            order = self.order or order_of_use(model.tree, alone)
            if has_trial:
                calls[cut] = self._trial(model, alone, patterns)
                costs[cut] = costs_of_calls(calls[cut], "estimated by a trial on meta tensors")
            elif self.tokens is not None:
                costs[cut] = estimated_costs(alone, order, self.tokens)
            else:
                costs[cut] = given_costs(alone, order, self.activations or 0.0)
        return Space(options, calls, self._costs_with_given_activations(costs, options))

    def _meshes(self) -> tuple[Mesh, ...]:
        if self.mesh is None and self.comm is None:
            raise ScheduleError("tune(): pass mesh=, a mesh or a number of ranks; or comm=.")
        meshes = meshes_of(self.comm.mesh if self.mesh is None and self.comm is not None else self.mesh)  # type: ignore[arg-type]
        if isinstance(self.mesh, int) and isinstance(self.hardware, Hardware) and isinstance(self.hardware.bandwidth, Mapping):
            axes = {key if isinstance(key, str) else key[1] for key in self.hardware.bandwidth}
            meshes = tuple(each for each in meshes if axes.issuperset(each.names)) or meshes
        return meshes

    def _check_trial(self, model: Model, *, has_trial: bool) -> None:
        """Raise an error if arguments of a trial contradict each other."""
        is_module, what = model.module is not None, ""
        if has_trial and not is_module and self.loss_fn is None:
            what = "batch= of tensors needs loss_fn= for a tree of tensors. Pass it, or a number of tokens."
        elif self.loss_fn is not None and (is_module or not has_trial):
            what = "loss_fn= is for a tree of tensors, with batch= of tensors."
        elif self.device is not None and not has_trial:
            what = "device= measures what a trial runs, which needs batch= of tensors."
        elif isinstance(self.hardware, str) and self.batch is None:
            what = f"hardware {self.hardware!r} needs batch=, of tensors or as a number of tokens."
        elif is_module and self.frozen != ():
            what = "frozen= is for a tree of tensors. In a module call requires_grad_(False) of the parameters."
        elif self.order and has_trial:
            what = "order= and batch= of tensors both tell the order of units. Leave out order=."
        if what:
            raise ScheduleError(f"tune(): {what}")

    def _cuts(self, model: Model) -> Mapping[str, UnitPatterns]:
        """Return the choices of units: only one if the seconds or the activations of units are given."""
        if isinstance(self.units, Mapping):
            return self.units
        if self.units is not None:
            patterns = [self.units] if isinstance(self.units, str) else list(self.units)
            return {", ".join(patterns): patterns}
        found = units_to_try(model, has_own_calls=self.loss_fn is not None)
        is_derived = not isinstance(self.hardware, Hardware) or self.device is not None
        return found if is_derived and self.activations is None else dict(list(found.items())[:1])

    def _trial(self, model: Model, alone: Layout, patterns: UnitPatterns) -> list[UnitCall]:
        if model.module is None:
            assert self.loss_fn is not None
            return trial_of_loss(self.loss_fn, model.tree, alone, self.batch, microbatches=self.microbatches)
        chosen = chosen_modules(model.module, [patterns] if isinstance(patterns, str) else list(patterns or ()))
        return trial_of_module(model.module, alone, units_by_module(alone, chosen), self.batch)

    def _costs_with_given_activations(self, costs: Mapping[Cut, Costs], options: Sequence[Option]) -> dict[Cut, Costs]:
        """Return costs in which the user's bytes of activations, if given, replace estimates."""
        if self.activations is None:
            return dict(costs)
        layouts = {option.cut: option.layout for option in options}
        given = {cut: given_costs(layouts[cut], each.uses, self.activations) for cut, each in costs.items()}
        return {cut: each._replace(kept=given[cut].kept, source=given[cut].source) for cut, each in costs.items()}

    def costs(self, space: Space) -> dict[Cut, Costs]:
        """Return the costs of units. With ``device`` they are measured: over ranks the median seconds and the largest bytes."""
        if self.device is None:
            return space.costs
        for each in space.calls.values():
            self._measure(each, self.device)
        source = f"measured on {self.device}, one call of each kind of unit"
        return self._costs_with_given_activations(
            {cut: costs_of_calls(calls, source) for cut, calls in space.calls.items()}, space.options
        )

    def _measure(self, calls: Sequence[UnitCall], device: torch.device) -> None:
        comm = self.comm
        if comm is None:
            measure_calls(calls, device)
            return
        check_on_all_ranks("tune(device=)", comm, lambda: measure_calls(calls, device))
        mine = [call for outer in calls for call in outer.walk() if not call.inner]
        rows = [[call.forward_s, call.backward_s, call.kept_nbytes] for call in mine]
        everyones = [json.loads(text) for text in all_gather_texts(json.dumps(rows), comm)]
        for i, call in enumerate(mine):
            forward_s, backward_s = (median(rank[i][k] for rank in everyones) for k in (0, 1))
            call.set_measured(forward_s, backward_s, max(rank[i][2] for rank in everyones))

    def trials(self, space: Space, costs: Mapping[Cut, Costs]) -> list[Trial]:
        """Return all combinations of layouts, policies and recomputations."""
        result = []
        machines = {option: self._hardware_of(option.layout, costs[option.cut]) for option in space.options}
        recomputed = {cut: self._recomputed(each) for cut, each in costs.items()}
        for option in space.options:
            mine = costs[option.cut]
            for again, names in recomputed[option.cut].items():
                kept = mine.activation_nbytes(names)
                if not math.isfinite(kept):
                    remedy = "Pass activations= as pairs: bytes without recomputation, and with it."
                    what = "the bytes that recomputed units keep are unknown."
                    raise ScheduleError(problem("tune(remat=)", what, [("recomputed", ", ".join(names))], remedy))
                step = (self.microbatches, self.optimizer_buffers, self.backend, round(kept))
                planned = Planned(mine.uses, names, machines[option], *step)
                result += [Trial((option.name, how, again), option, policy, planned) for how, policy in self.policies.items()]
        return result

    def _recomputed(self, costs: Costs) -> dict[str, tuple[str, ...]]:
        """Return sets of units to recompute, by name. By default none, and all innermost calls if this saves memory."""
        if self.remat is None:
            every = tuple(sorted({name for call in costs.innermost() for name in call.units}))
            saves = 0 < costs.activation_nbytes(every) < costs.activation_nbytes(())
            return {"": (), **({"all": every} if saves else {})}
        known = sorted({name for call in costs.calls() for name in call.units})
        return {name: tuple(sorted(select_paths("tune(remat=)", patterns, known))) for name, patterns in self.remat.items()}

    def _hardware_of(self, layout: Layout, costs: Costs) -> Hardware:
        """Return the hardware of a layout, with measured seconds of units, or seconds from FLOPs on a GPU."""
        if isinstance(self.hardware, Hardware):
            found = self.hardware
        elif isinstance(self.hardware, str):
            found = Hardware.preset(self.hardware, layout, tokens=1, **host_links(layout.mesh))
            seconds = {name: flops / (EFFICIENCY * GPUS[self.hardware].flops) for name, flops in costs.flops.items()}
            found = replace(found, compute={name: (forward_s, 2 * forward_s) for name, forward_s in seconds.items()})
        else:
            found = self.hardware(layout)
            if not isinstance(found, Hardware):
                raise ScheduleError(f"tune(): hardware is a function that returned {found!r:.80}, expected a Hardware.")
        return replace(found, compute=dict(costs.seconds)) if costs.seconds else found

    def texts(self, space: Space) -> dict[str, str]:
        """Return the arguments as texts. The texts of two ranks are equal if the arguments are equal."""
        settings = ("budget", "policies", "remat", "microbatches", "optimizer_buffers", "backend", "effort")
        texts = {name: _text(getattr(self, name)) for name in settings}
        texts["device"] = "" if self.device is None else self.device.type
        texts["layouts"] = "\n".join(f"{option.name}: {option.layout.digest}" for option in space.options)
        texts["units"] = "\n".join(f"{', '.join(filter(None, cut))}: {costs}" for cut, costs in space.costs.items())
        return texts

    def texts_of_hardware(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Return the hardware of all layouts as text."""
        machines = {each.option.name: (each.option.layout, each.planned.hardware) for each in trials}
        return {"hardware": "\n".join(f"{name}: {_hardware_text(*each)}" for name, each in machines.items())}


def _text(value: Any) -> str:
    return "\n".join(f"{name}: {each}" for name, each in value.items()) if isinstance(value, Mapping) else repr(value)


def _hardware_text(layout: Layout, hardware: Hardware) -> str:
    units = [unit.name or ROOT for unit in layout.units]
    compute = value_by_path("Hardware.compute", hardware.compute, units)
    return "; ".join(
        f"{each.name} {compute if each.name == 'compute' else getattr(hardware, each.name)}" for each in fields(hardware)
    )
