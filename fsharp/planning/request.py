"""TuneRequest: the arguments of tune(). From these it makes layouts, costs of units, and combinations to predict."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError, ScheduleError, TreeError, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, SingleComm
from fsharp.functional.formats.format import tensor_text
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.precision import Precision, Precisions
from fsharp.functional.tree.paths import Patterns, select_paths, value_by_path
from fsharp.inspect.hardware import Hardware
from fsharp.inspect.presets import EFFICIENCY_FROM_SHAPES, EFFICIENCY_FROM_TRIAL, GPUS
from fsharp.planning.choice import StepArguments
from fsharp.planning.costs import Activations, MicrobatchCosts, costs_of_calls, estimated_costs, given_costs
from fsharp.planning.plan_step import ROOT, Backend, Use, uses_of_modules, walk_nested_uses
from fsharp.planning.search import Combination
from fsharp.planning.space import (
    CostKey,
    LayoutOption,
    Model,
    Strategies,
    UnitPatterns,
    layout_options,
    meshes_to_try,
    model_of,
    unit_patterns_to_try,
    units_in_dict_order,
    unsharded_trial_layout,
)
from fsharp.planning.trial import UnitCall, measure_calls, record_calls_of_loss, record_calls_of_module
from fsharp.stateful.modules.selection import chosen_modules, gathered_units_by_module
from fsharp.stateful.schedule.policy import SchedulePolicy

HardwareSource = Hardware | str | Callable[[Layout], Hardware]
"""The hardware; or the name of a GPU, as for :meth:`Hardware.preset`; or a function that returns the hardware of a layout."""


class LayoutsToTry(NamedTuple):
    """The layouts that :func:`~fsharp.tune` tries, and the costs of their units.

    Attributes:
        options: the layouts to try.
        refused: dict from names of layouts that cannot be made to the reasons.
        calls: dict from a :data:`CostKey` to the calls of units that a trial has recorded; empty without trials.
        costs: dict from a :data:`CostKey` to the costs of units before a measurement.
    """

    options: list[LayoutOption]
    refused: dict[str, str]
    calls: dict[CostKey, list[UnitCall]]
    costs: dict[CostKey, MicrobatchCosts]


@dataclass(frozen=True, eq=False, kw_only=True)
class TuneRequest:
    """The arguments of :func:`~fsharp.tune`."""

    model: Any
    hardware: HardwareSource
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
    device: torch.device | str | None
    comm: Comm | None
    tolerance: float
    effort: float

    @property
    def tokens(self) -> float | None:
        """The batch, if it is given as a number of tokens; else None."""
        return self.batch if isinstance(self.batch, int | float) and not isinstance(self.batch, bool) else None

    @property
    def measured_on(self) -> torch.device | None:
        """The device of the measurement; None without one. OptionError for a device that does not compute."""
        try:
            found = None if self.device is None else torch.device(self.device)
        except RuntimeError:
            found = torch.device("meta")
        if found is not None and found.type == "meta":
            raise OptionError(f"tune(): device is {self.device!r}, expected a device that computes, such as 'cpu' or 'cuda'.")
        return found

    def layouts_to_try(self) -> LayoutsToTry:
        """Check the arguments, and return the layouts to try, with their costs. Trials run on meta tensors."""
        self._check_arguments()
        if isinstance(self.model, Mapping) and all(isinstance(each, Layout) for each in self.model.values()):
            return self._layouts_as_given(self.model)
        return self._layouts_of_model(model_of(self.model, self.frozen))

    def _check_arguments(self) -> None:
        _ = self.measured_on
        if not self.budget > 0 or self.optimizer_buffers < 0 or not self.policies:
            got = f"a budget of {self.budget!r}, {self.optimizer_buffers!r} optimizer buffers and {len(self.policies)} policies"
            raise ScheduleError(problem("tune()", f"got {got}, expected more than 0, at least 0, and at least one policy."))
        if not 0 <= self.tolerance < math.inf:
            raise ScheduleError(f"tune(): tolerance is {self.tolerance!r}, expected at least 0 and finite.")
        if not self.effort > 0:
            raise ScheduleError(f"tune(): effort is {self.effort!r}, expected more than 0.")
        if self.remat is not None and not self.remat:
            raise ScheduleError("tune(): remat is {}, expected a choice: {'': ()} recomputes nothing.")
        if self.microbatches < 1:
            raise ScheduleError(f"tune(): microbatches is {self.microbatches}, expected at least 1.")
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ScheduleError(f"tune(): batch is {self.tokens!r} tokens, expected more than 0 and finite.")
        if isinstance(self.hardware, str) and self.hardware not in GPUS:
            raise ScheduleError(f"tune(): hardware is {self.hardware!r}, expected a Hardware, or one of {', '.join(GPUS)}.")

    def _layouts_as_given(self, layouts: Mapping[str, Layout]) -> LayoutsToTry:
        if len({layout.mesh.size for layout in layouts.values()}) != 1:
            found = ", ".join(f"{name}: {layout.mesh}" for name, layout in layouts.items()) or "no layout"
            raise ScheduleError(problem("tune()", f"expected layouts for one number of ranks, got {found}."))
        of_model = ("mesh", "strategies", "units", "formats", "batch", "loss_fn", "device")
        if wrong := [name for name in of_model if getattr(self, name) is not None] + ["frozen"] * (self.frozen != ()):
            raise ScheduleError(f"tune(): got {wrong[0]}= beside layouts. Leave it out, or pass the model in place of layouts.")
        if isinstance(self.hardware, str):
            raise ScheduleError(
                f"tune(): got hardware {self.hardware!r} with layouts, expected a Hardware, which has the seconds of units."
            )
        options = [LayoutOption(name, layout, (name, ""), {}) for name, layout in layouts.items()]
        return LayoutsToTry(
            options, {}, {}, {each.cost_key: given_costs(each.layout, self.order, self.activations or 0.0) for each in options}
        )

    def _layouts_of_model(self, model: Model) -> LayoutsToTry:
        has_trial = self.batch is not None and self.tokens is None
        meshes = self._meshes_to_try()
        self._check_trial(model, has_trial=has_trial)
        choices = self._unit_patterns_by_choice(model)
        formats = {"": Precision()} if self.formats is None else self.formats
        options, refused = layout_options(model, meshes, self.strategies, choices, formats)
        if not any(option.layout.num_params for option in options):
            raise ScheduleError("tune(): the model has no parameters, or there is no strategy, choice of units or format.")
        calls: dict[CostKey, list[UnitCall]] = {}
        costs: dict[CostKey, MicrobatchCosts] = {}
        for (units, patterns), (form, precision) in product(choices.items(), formats.items()):
            cost_key = units, form
            alone = unsharded_trial_layout(model, meshes[0], patterns, precision)
            order = self.order or self._assumed_unit_order(model, alone, patterns)
            if has_trial:
                calls[cost_key] = self._run_trial(model, alone, patterns)
                used = {name for call in walk_nested_uses(calls[cost_key]) for name in call.units}
                if unused := [unit.name for unit in alone.units if unit.groups and unit.name not in used]:
                    raise ScheduleError(
                        f"tune(): the trial used no parameter of unit {unused[0] or ROOT!r} ({len(unused)} units are unused). "
                        "Leave their parameters out of the model, or pass a number of tokens, which counts each unit once."
                    )
                costs[cost_key] = costs_of_calls(calls[cost_key], "estimated by a trial on meta tensors")
            elif self.tokens is not None:
                costs[cost_key] = estimated_costs(alone, order, self.tokens)
            else:
                costs[cost_key] = given_costs(alone, order, self.activations or 0.0)
        return LayoutsToTry(options, refused, calls, self._costs_with_given_activations(costs, options))

    def _meshes_to_try(self) -> tuple[Mesh, ...]:
        if self.mesh is None and self.comm is None:
            raise ScheduleError("tune(): pass mesh=, a mesh or a number of ranks; or comm=.")
        meshes = meshes_to_try(self.comm.mesh if self.mesh is None and self.comm is not None else self.mesh)  # type: ignore[arg-type]
        if isinstance(self.mesh, int) and isinstance(self.hardware, Hardware) and isinstance(self.hardware.bandwidth, Mapping):
            axes = {key if isinstance(key, str) else key[1] for key in self.hardware.bandwidth}
            meshes = tuple(each for each in meshes if axes.issuperset(each.names)) or meshes
        return meshes

    def _check_trial(self, model: Model, *, has_trial: bool) -> None:
        """Raise a ScheduleError if arguments of a trial contradict each other, or an argument is missing."""
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

    def _unit_patterns_by_choice(self, model: Model) -> Mapping[str, UnitPatterns]:
        """Return choices of units by name. With ``activations``, or a Hardware without ``device``, derive only one choice."""
        if isinstance(self.units, Mapping):
            return self.units
        if self.units is not None:
            patterns = [self.units] if isinstance(self.units, str) else list(self.units)
            return {", ".join(patterns): patterns}
        found = unit_patterns_to_try(model, has_loss_fn=self.loss_fn is not None)
        is_derived = not isinstance(self.hardware, Hardware) or self.device is not None
        return found if is_derived and self.activations is None else dict(list(found.items())[:1])

    def _assumed_unit_order(self, model: Model, alone: Layout, patterns: UnitPatterns) -> Sequence[str | Use]:
        if model.module is None:
            return units_in_dict_order(model.tree, alone)
        return uses_of_modules(alone, self._gathered_units_by_module(model.module, alone, patterns))

    def _gathered_units_by_module(
        self, module: torch.nn.Module, alone: Layout, patterns: UnitPatterns
    ) -> Mapping[str, list[str]]:
        chosen = chosen_modules(module, [patterns] if isinstance(patterns, str) else list(patterns or ()))
        return gathered_units_by_module(alone, chosen)

    def _run_trial(self, model: Model, alone: Layout, patterns: UnitPatterns) -> list[UnitCall]:
        if model.module is None:
            assert self.loss_fn is not None
            try:
                return record_calls_of_loss(self.loss_fn, model.tree, alone, self.batch, microbatches=self.microbatches)
            except TreeError as error:
                if self.units is not None:
                    raise
                tried = "the whole tree as one unit" if patterns is None else f"units={patterns!r}"
                what = f"loss_fn fails with {tried}: {str(error).splitlines()[0]}"
                remedy = "Pass units=, the patterns of the subtrees that loss_fn passes to fs.forward(), such as 'layers.*'."
                raise ScheduleError(problem("tune()", what, remedy=remedy)) from error
        owners = self._gathered_units_by_module(model.module, alone, patterns)
        return record_calls_of_module(model.module, alone, owners, self.batch)

    def _costs_with_given_activations(
        self, costs: Mapping[CostKey, MicrobatchCosts], options: Sequence[LayoutOption]
    ) -> dict[CostKey, MicrobatchCosts]:
        """Return ``costs``, in which the user's bytes of activations, if given, replace estimates. ``options``: the layouts."""
        if self.activations is None:
            return dict(costs)
        layouts = {option.cost_key: option.layout for option in options}
        found = {}
        for cost_key, each in costs.items():
            given = given_costs(layouts[cost_key], each.uses, self.activations)
            found[cost_key] = given._replace(flops=each.flops, seconds=each.seconds)
        return found

    def costs(self, to_try: LayoutsToTry) -> dict[CostKey, MicrobatchCosts]:
        """Return the costs of units, by key. With ``device`` ranks measure: the median of their seconds, and the most bytes."""
        device = self.measured_on
        if device is None:
            return to_try.costs
        for each in to_try.calls.values():
            self._measure_calls(each, device)
        source = f"measured on {device}, one call of each kind of unit"
        return self._costs_with_given_activations(
            {cost_key: costs_of_calls(calls, source) for cost_key, calls in to_try.calls.items()}, to_try.options
        )

    def _measure_calls(self, calls: Sequence[UnitCall], device: torch.device) -> None:
        comm = self.comm or SingleComm()
        remat = self.remat is None or any(self.remat.values())
        check_on_all_ranks("tune(device=)", comm, lambda: measure_calls(calls, device, remat=remat))
        mine = [call for call in walk_nested_uses(calls) if not call.inner]
        rows = [[call.forward_s, call.backward_s, call.recompute_s, call.kept_nbytes] for call in mine]
        everyones = [json.loads(text) for text in all_gather_texts(json.dumps(rows), comm)]
        for i, call in enumerate(mine):
            seconds = [median(rank[i][k] for rank in everyones) for k in range(3)]
            call.set_measured(*seconds, kept_nbytes=max(rank[i][3] for rank in everyones))

    def combinations(self, to_try: LayoutsToTry, costs: Mapping[CostKey, MicrobatchCosts]) -> list[Combination]:
        """Return the combinations of layout, policy and recomputation to predict. ScheduleError if activations are unknown."""
        result = []
        machines = {option: self._hardware_of(option.layout, costs[option.cost_key]) for option in to_try.options}
        recomputed = {cost_key: self._units_to_recompute(each, cost_key[0]) for cost_key, each in costs.items()}
        for option in to_try.options:
            mine = costs[option.cost_key]
            for again, names in recomputed[option.cost_key].items():
                kept = mine.activation_nbytes(names)
                if not math.isfinite(kept):
                    remedy = "Pass activations= as pairs: bytes without recomputation, and with it."
                    what = "the bytes that recomputed units keep are unknown."
                    raise ScheduleError(problem("tune(remat=)", what, [("recomputed", ", ".join(names))], remedy))
                is_module = isinstance(self.model, torch.nn.Module)
                step = (self.microbatches, self.optimizer_buffers, self.backend, round(kept), is_module)
                arguments = StepArguments(mine.uses, names, machines[option], *step)
                result += [
                    Combination((option.name, how, again), option, policy, arguments) for how, policy in self.policies.items()
                ]
        return result

    def _units_to_recompute(self, costs: MicrobatchCosts, units: str) -> dict[str, tuple[str, ...]]:
        """Return, by name of a choice of recomputation, the units that are recomputed. ``units``: name of a choice of units.

        If ``remat`` is None, the choice ``""`` recomputes no unit. The choice ``"all"`` recomputes the units of all innermost
        calls, and is tried if it saves memory.
        """
        if self.remat is None:
            every = tuple(sorted({name for call in walk_nested_uses(costs.kept) if not call.inner for name in call.units}))
            saves = 0 < costs.activation_nbytes(every) < costs.activation_nbytes(())
            return {"": (), **({"all": every} if saves else {})}
        known = sorted({name for call in walk_nested_uses(costs.kept) for name in call.units})
        where = f"tune(remat=), with the units of {units!r}" if units else "tune(remat=)"
        return {name: tuple(sorted(select_paths(where, patterns, known))) for name, patterns in self.remat.items()}

    def _hardware_of(self, layout: Layout, costs: MicrobatchCosts) -> Hardware:
        """Return the hardware for a layout: the user's Hardware, a preset, or the result of the user's function.

        A preset gets the compute times of units from their FLOPs in ``costs``. Measured seconds of units in ``costs``, if any,
        replace the compute times of any hardware.
        """
        if isinstance(self.hardware, Hardware):
            found = self.hardware
        elif isinstance(self.hardware, str):
            found = Hardware.preset(self.hardware, layout, tokens=1)
            efficiency = EFFICIENCY_FROM_SHAPES if self.tokens is not None else EFFICIENCY_FROM_TRIAL
            seconds = {name: flops / (efficiency * GPUS[self.hardware].flops) for name, flops in costs.flops.items()}
            found = replace(found, compute_times={name: (forward_s, 2 * forward_s) for name, forward_s in seconds.items()})
        else:
            found = self.hardware(layout)
            if not isinstance(found, Hardware):
                raise ScheduleError(f"tune(): hardware is a function that returned {found!r:.80}, expected a Hardware.")
        return replace(found, compute_times=dict(costs.seconds)) if costs.seconds else found

    def argument_texts_to_compare(self, to_try: LayoutsToTry) -> dict[str, str]:
        """Return the arguments as texts. The texts of two ranks are equal if the arguments are equal."""
        settings = ("budget", "policies", "remat", "microbatches", "optimizer_buffers", "backend", "tolerance", "effort")
        texts = {name: _text_to_compare(getattr(self, name)) for name in settings}
        texts["device"] = "" if self.measured_on is None else self.measured_on.type
        leaves = [(unit.name, leaf) for unit in to_try.options[0].layout.units for leaf in unit.leaves]
        texts["model"] = "\n".join(f"{'.'.join(filter(None, (name, leaf.path)))}: {tensor_text(leaf)}" for name, leaf in leaves)
        batch = optree.tree_leaves(self.batch)
        texts["batch"] = "\n".join(map(_batch_leaf_text, batch))
        texts["layouts"] = "\n".join(f"{each.name} on {each.layout.mesh}: {each.layout.digest}" for each in to_try.options)
        costs = to_try.costs.items()
        texts["costs of units"] = "\n".join(f"{', '.join(filter(None, cost_key))}: {each}" for cost_key, each in costs)
        return texts

    def hardware_texts_to_compare(self, combinations: Sequence[Combination]) -> dict[str, str]:
        """Return the hardware of all layouts as text, for ranks to compare."""
        machines = {each.option.name: (each.option.layout, each.arguments.hardware) for each in combinations}
        return {"hardware": "\n".join(f"{name}: {_hardware_text(*each)}" for name, each in machines.items())}


def _text_to_compare(value: Any) -> str:
    return "\n".join(f"{name}: {each}" for name, each in value.items()) if isinstance(value, Mapping) else repr(value)


def _batch_leaf_text(x: Any) -> str:
    """Return the text by which ranks compare a leaf of a batch: without the values of tensors and objects, which may differ."""
    if isinstance(x, torch.Tensor):
        return tensor_text(x)
    return repr(x) if isinstance(x, bool | int | float | str) else type(x).__qualname__


def _hardware_text(layout: Layout, hardware: Hardware) -> str:
    units = [unit.name or ROOT for unit in layout.units]
    compute = value_by_path("Hardware.compute_times", hardware.compute_times, units)
    return "; ".join(
        f"{each.name} {compute if each.name == 'compute_times' else getattr(hardware, each.name)}" for each in fields(hardware)
    )
