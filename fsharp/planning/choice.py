"""Choice: the result of tune(), with a row for each candidate. A choice can be printed, drawn, edited, and saved as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

from fsharp.errors import OptionError, ScheduleError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.plan import plan
from fsharp.functional.layout.text import align_columns, nbytes_text, table_html
from fsharp.inspect.drawing import draw
from fsharp.inspect.hardware import Hardware, predict
from fsharp.planning.choice_json import meta_tree, plan_arguments_from_json, plan_arguments_to_json, use_from_json
from fsharp.planning.plan_step import Use, offloaded_nbytes, plan_step
from fsharp.planning.space import updated_share
from fsharp.stateful.schedule.policy import SchedulePolicy, policy_from_json
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.timing.timeline import Timeline
from fsharp.tracebacks import api_boundary

_MAX_SHOWN_ROWS = 24
"""Candidates that a printed choice shows."""
_COSTLY = ("remat", "formats", "state on the host")
"""Departures from the defaults that cost operations, digits, or memory and links of the host."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The prediction for one layout under one policy, with or without recomputation.

    Attributes:
        layout: name of the layout.
        policy: name of the policy.
        remat: name of the set of units whose activations are recomputed.
        step_s: predicted seconds of a step; infinite if parameters, optimizer state and activations alone exceed the budget, or
            if no step can run: see ``refused``.
        memory: predicted bytes of one rank by kind: ``params``, ``main``, ``optimizer``, ``residuals``, ``arena``,
            ``gradients`` (outside of the arena), ``activations``.
        peak_nbytes: the largest sum of these bytes at any one time.
        sent_nbytes: bytes that one rank sends in a step, without collectives in the loss.
        why_lost: the reason why another candidate was chosen; empty for the chosen candidate.
        is_unsimulated: whether the step was not simulated: it exceeds the budget at rest, its lower bound is too long, or the
            search had used up its ``effort``. Then ``step_s`` is infinite, or it is the lower bound: the time to compute or the
            time to send, whichever is longer. ``memory`` then has an arena of 0 bytes.
        refused: the reason why no step can run: no schedule fits into the policy's ``memory_budget``; or the strategy and the
            format exclude each other, and then ``policy`` is empty. Otherwise the text is empty.
        non_defaults: what differs from the defaults: ``remat`` if units are recomputed; ``formats`` if the precision is not
            ``Precision()``; ``state on the host``; and other fields of the policy that differ from ``SchedulePolicy()``.
    """

    layout: str
    policy: str
    remat: str
    step_s: float
    memory: Mapping[str, int]
    peak_nbytes: int
    sent_nbytes: int
    why_lost: str = ""
    is_unsimulated: bool = False
    refused: str = ""
    non_defaults: tuple[str, ...] = ()

    @property
    def complexity(self) -> tuple[int, int]:
        """How many :attr:`non_defaults` are costly (``remat``, ``formats``, ``state on the host``), and how many are not."""
        costly = sum(each in _COSTLY for each in self.non_defaults)
        return costly, len(self.non_defaults) - costly


@dataclass(frozen=True)
class StepArguments:
    """The arguments with which :func:`plan_step` and :func:`predict` are called, beside layout and policy.

    Attributes:
        uses: uses of units in a microbatch.
        remat: names, in programs, of the units that are recomputed.
        hardware: the machine. Its ``update_s`` is the time in which one rank would update all parameters.
        microbatches: number of microbatches in a step.
        optimizer_buffers: number of values of optimizer state for each element of a parameter.
        backend: as for :func:`plan_step`.
        activation_nbytes: the most bytes of activations at one time.
        is_module: whether the model is a module.
    """

    uses: tuple[Use, ...]
    remat: tuple[str, ...]
    hardware: Hardware
    microbatches: int
    optimizer_buffers: int
    backend: Any
    activation_nbytes: int
    is_module: bool = False

    def schedule(self, layout: Layout, policy: SchedulePolicy) -> Schedule:
        """Return the schedule of a step with these arguments, under a layout and a policy: see :func:`plan_step`."""
        return plan_step(
            layout,
            policy,
            order=self.uses,
            remat=self.remat,
            microbatches=self.microbatches,
            optimizer_buffers=self.optimizer_buffers,
            backend=self.backend,
            is_module=self.is_module,
        )

    def predict(self, schedule: Schedule, layout: Layout) -> Timeline:
        """Return the predicted step of one rank, in which the update takes ``hardware.update_s`` times the rank's share.

        The share is the fraction of all parameters that the rank updates.
        """
        return predict(schedule, replace(self.hardware, update_s=updated_share(layout) * self.hardware.update_s))

    def memory_and_peak(self, layout: Layout, policy: SchedulePolicy, *, arena_nbytes: int) -> tuple[dict[str, int], int]:
        """Return the bytes of a rank by kind, as in :attr:`Candidate.memory`, and the most bytes that a rank needs at one time.

        The second number is the sum of all kinds, with two exceptions. Offloaded state is on the device only in the update,
        when there are no activations: only the larger of both counts. With ``keep_gradients`` gradients at rest grow while a
        backward releases activations: with one microbatch, only the larger of both counts. With several microbatches both
        count, as gradients rest during the next forward. ``arena_nbytes``: bytes of the schedule's arena.
        """
        at_rest = layout.nbytes("grads") if policy.keep_gradients else 0
        kinds = {
            "params": layout.nbytes("params"),
            "main": layout.nbytes("main"),
            "optimizer": self.optimizer_buffers * layout.nbytes("optim"),
            "residuals": layout.nbytes("residuals"),
            "arena": arena_nbytes,
            "gradients": at_rest + separate_reduced_grad_nbytes(layout),
            "activations": self.activation_nbytes,
        }
        state, activations = kinds["main"] + kinds["optimizer"], kinds["activations"]
        if self.microbatches == 1:
            activations = max(activations - at_rest, 0)
        moved = offloaded_nbytes(layout, self.optimizer_buffers, is_module=self.is_module) if policy.offload else 0
        work = state - moved + max(moved, activations)
        return kinds, kinds["params"] + kinds["residuals"] + arena_nbytes + kinds["gradients"] + work

    def predict_candidate(
        self, schedule: Schedule, layout: Layout, policy: SchedulePolicy, names: tuple[str, str, str]
    ) -> Candidate:
        """Return the prediction for the ``schedule`` of a layout and a policy. ``names``: of layout, policy and remat."""
        memory, peak_nbytes = self.memory_and_peak(layout, policy, arena_nbytes=schedule.arena)
        sent = sum(call.nbytes * count for call, count in schedule.collective_counts().items())
        seconds, non_defaults = self.predict(schedule, layout).step_s, self.non_defaults(layout, policy)
        return Candidate(*names, seconds, memory, peak_nbytes, sent, non_defaults=non_defaults)

    def non_defaults(self, layout: Layout, policy: SchedulePolicy) -> tuple[str, ...]:
        """Return what differs from the defaults, as :attr:`Candidate.non_defaults` lists it."""
        usual, on_host = SchedulePolicy(), ["state on the host"] * policy.offload
        policy = replace(policy, offload=False)
        changed = [each.name for each in fields(usual) if getattr(policy, each.name) != getattr(usual, each.name)]
        has_formats = any(len(set(group.dtypes.names)) > 1 for unit in layout.units for group in unit.groups)
        return (*["remat"] * bool(self.remat), *["formats"] * has_formats, *on_host, *changed)


def separate_reduced_grad_nbytes(layout: Layout) -> int:
    """Return the bytes of one rank's gradients in the place ``"optim"`` that need memory beside the gradients at rest.

    A unit needs such memory if a rank holds more or fewer elements of the unit in ``"optim"`` than in ``"grads"``. Otherwise
    the gradient in ``"optim"`` takes the memory of the gradient at rest.
    """
    return sum(
        unit.local_size(i, unit.strategy.optim) * unit.groups[i].dtypes.accumulate.itemsize
        for unit in layout.units
        if any(
            unit.local_size(i, unit.strategy.grads) != unit.local_size(i, unit.strategy.optim) for i in unit.trainable_groups
        )
        for i in unit.trainable_groups
    )


def sort_candidates(candidates: Sequence[Candidate], budget: float, tolerance: float) -> tuple[Candidate, ...]:
    """Return the chosen candidate, and then all others, each with the reason why that candidate lost.

    Candidates whose step is slower than the fastest by at most the fraction ``tolerance`` count as equally fast. From these the
    candidate with the least :meth:`~Candidate.complexity` is chosen; of several such candidates, the one with the least memory.
    The other candidates follow: those that fit into ``budget``, simulated before not simulated, fast before slow. At the end
    are those that are refused. If no candidate fits into the budget, the first in this order is chosen.
    """
    ranked = sorted(
        candidates, key=lambda x: (bool(x.refused), x.peak_nbytes > budget, x.is_unsimulated, x.step_s, x.peak_nbytes)
    )
    limit = (1 + tolerance) * ranked[0].step_s
    equal = [x for x in ranked if not (x.refused or x.is_unsimulated) and x.peak_nbytes <= budget and x.step_s <= limit]
    best = min(equal, key=lambda x: (x.complexity, x.peak_nbytes), default=ranked[0])
    return replace(best, why_lost=""), *(replace(x, why_lost=_why_lost(x, best, budget)) for x in ranked if x is not best)


def _why_lost(candidate: Candidate, best: Candidate, budget: float) -> str:
    if candidate.refused:
        return candidate.refused
    if candidate.peak_nbytes > budget:
        return f"{nbytes_text(candidate.peak_nbytes)}, and the budget is {nbytes_text(budget)}"
    ratio = candidate.step_s / best.step_s if best.step_s else math.inf  # a step in which nothing takes time
    difference = 0.0 if candidate.step_s == best.step_s else ratio - 1
    if candidate.is_unsimulated and difference <= 0:
        return f"not simulated: at most {abs(difference):.1%} faster"
    shown = f"{abs(difference):.1%}"
    if difference > 0 and (candidate.is_unsimulated or shown != "0.0%"):
        return f"{'at least ' * candidate.is_unsimulated}{shown} slower"
    text = "as fast" if shown == "0.0%" else f"{shown} faster"
    if candidate.complexity > best.complexity:
        further = [each for each in candidate.non_defaults if each not in best.non_defaults]
        return f"{text}, not as simple: {', '.join(further)}"
    return f"{text}, with more memory" if candidate.peak_nbytes > best.peak_nbytes else text


@api_boundary
@dataclass(frozen=True)
class Choice:
    """The result of :func:`~fsharp.tune`: the chosen layout, policy and recomputation, and the predictions for all candidates.

    ``print(choice)`` shows the first rows of the table. To run the predicted step, use
    ``fs.Scheduler(comm, policy=choice.policy)`` for functions, or ``fs.shard_module(module, **choice.module_options)``.

    Attributes:
        name: name of the chosen layout.
        layout: the chosen layout.
        policy: the chosen policy.
        remat: names of the units whose activations are recomputed in the predicted step; ``(root)`` is the root unit. Call
            ``forward(remat=True)`` for these units, or wrap these modules in ``torch.utils.checkpoint``.
        candidates: all candidates: the chosen one; then the others, those that fit into the budget first, fast before slow.
        budget: the most bytes that a rank may use.
        activations: source of the bytes of activations, in words, such as ``"estimated from shapes"``.
        made_by: arguments of :func:`~fsharp.plan` that make the layout: mesh, strategy, units, precision and frozen; empty if
            layouts were passed to :func:`~fsharp.tune`.
    """

    name: str
    layout: Layout
    policy: SchedulePolicy
    remat: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    budget: float
    activations: str
    made_by: Mapping[str, Any]
    _arguments: StepArguments = field(repr=False)
    _others: Mapping[tuple[str, str, str], Any] = field(repr=False, compare=False, default_factory=dict)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the chosen step."""
        return self._arguments.schedule(self.layout, self.policy)

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step, op by op."""
        return self._arguments.predict(self.schedule, self.layout)

    @property
    def module_options(self) -> dict[str, Any]:
        """Arguments of :func:`~fsharp.shard_module`: mesh, strategy, units, precision and policy.

        Raises ScheduleError if layouts were passed to :func:`~fsharp.tune`.
        """
        if not self.made_by:
            what = "the options of the layout are unknown: tune() got layouts."
            raise ScheduleError(problem("Choice.module_options", what, remedy="Pass the module to tune()."))
        return {name: value for name, value in self.made_by.items() if name != "frozen"} | {"policy": self.policy}

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw the predicted step, as :func:`~fsharp.inspect.draw` does."""
        draw(self.timeline, path)

    @api_boundary
    def pick(self, layout: str, policy: str, remat: str = "") -> "Choice":
        """Return a Choice of another candidate: the one with these names in its row of the table.

        Raises:
            ScheduleError: no candidate has these names, the candidate does not fit into the budget, or the choice was read from
                JSON.
        """
        found = self._others.get((layout, policy, remat))
        if found is None:
            known = [("candidates", ", ".join(" / ".join(filter(None, key)) for key in self._others) or "those of a file")]
            what = f"there is no candidate {(layout, policy, remat)}."
            raise ScheduleError(problem("Choice.pick()", what, known, "Pass the names of a row of the table."))
        option, chosen, arguments = found
        changed = replace(self, layout=option.layout, policy=chosen, made_by=option.made_by, _arguments=arguments)
        return changed._with_new_prediction((layout, policy, remat))

    @api_boundary
    def edit(self, **changes: Any) -> "Choice":
        """Return a copy of this choice with other values of fields of its policy, such as ``prefetch=3``, predicted anew.

        >>> choice.edit(prefetch=3, release="backward").candidates[0].step_s  # doctest: +SKIP

        Raises:
            ScheduleError: the edited step does not fit into the budget of :func:`~fsharp.tune`, or a value is out of range.
            OptionError: a field is unknown, or a value has a wrong type.
        """
        if unknown := sorted(changes.keys() - (known := [field.name for field in fields(self.policy)])):
            rows = [("unknown", ", ".join(unknown)), ("known", ", ".join(known))]
            raise OptionError(problem("Choice.edit()", "a policy has no such field.", rows))
        policy = replace(self.policy, **changes)
        first = self.candidates[0]
        text = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        names = (first.layout, f"{first.policy}, {text}" if text else first.policy, first.remat)
        return replace(self, policy=policy)._with_new_prediction(names)

    def _with_new_prediction(self, row_names: tuple[str, str, str]) -> "Choice":
        """Return this choice with a new prediction of its layout and policy as the chosen candidate, under these names."""
        first = self._arguments.predict_candidate(self.schedule, self.layout, self.policy, row_names)
        if first.peak_nbytes > self.budget:
            what = f"the candidate takes {nbytes_text(first.peak_nbytes)}, and the budget is {nbytes_text(self.budget)}."
            raise ScheduleError(problem("Choice", what, [("candidate", f"{first.layout}, {first.policy}")]))
        rest = [x for x in self.candidates if (x.layout, x.policy, x.remat) != row_names]
        rows = (first, *(replace(x, why_lost=_why_lost(x, first, self.budget)) for x in rest))
        return replace(self, name=first.layout, remat=self._arguments.remat, candidates=rows)

    @api_boundary
    def to_json(self) -> str:
        """Return the choice as JSON: ``made_by``, ``layout``, ``policy``, ``remat``, arguments of the step, and ``candidates``.

        A candidate is an object with the attributes of :class:`Candidate`, where null stands for infinite seconds. Users may
        edit ``policy`` and ``made_by`` in the text, such as ``prefetch`` and the placements of the strategy. :meth:`from_json`
        then makes the layout again, and predicts the edited step.

        Raises:
            ScheduleError: the seconds of compute are a function, which JSON cannot hold.
        """
        rows = [asdict(each) for each in self.candidates]
        arguments = {each.name: getattr(self._arguments, each.name) for each in fields(self._arguments)}
        body = {
            "name": self.name,
            "made_by": plan_arguments_to_json(self.made_by, self.layout),
            "policy": asdict(self.policy),
            "remat": list(self.remat),
            "budget": self.budget,
            "activations": self.activations,
            "candidates": [{**row, "step_s": row["step_s"] if math.isfinite(row["step_s"]) else None} for row in rows],
            "step": {
                **arguments,
                "uses": list(map(asdict, arguments["uses"])),
                "hardware": json.loads(arguments["hardware"].to_json()),
            },
            "layout": json.loads(self.layout.to_json()),
        }
        return json.dumps(body, indent=1)

    @classmethod
    @api_boundary
    def from_json(cls, text: str) -> "Choice":
        """Return the choice that :meth:`to_json` has written. An edited step is predicted again.

        The seconds and activations of units are those in the text. So edits in ``made_by`` have to keep the names of units, and
        the names of axes.

        Raises:
            ScheduleError: the text is not a choice, ``remat`` was edited, or the edited step exceeds the budget.
            LayoutError: an edit of ``made_by`` changed the units.
        """
        try:
            body = json.loads(text)
            step = dict(body["step"])
            hardware = Hardware.from_json(json.dumps(step.pop("hardware")))
            uses = tuple(map(use_from_json, step.pop("uses")))
            remat = tuple(step.pop("remat"))
            if body["remat"] != list(remat):
                raise ValueError("remat was edited, which changes the activations: use pick() instead")
            arguments = StepArguments(**{**step, "uses": uses, "hardware": hardware, "remat": remat})
            policy = policy_from_json(body["policy"])
            first, *_ = rows = tuple(map(_candidate_from_json, body["candidates"]))
            planned = Layout.from_json(json.dumps(body["layout"]))
            made_by = plan_arguments_from_json(body["made_by"])
            layout = plan(meta_tree(planned), **made_by) if made_by else planned
            found = cls(body["name"], layout, policy, remat, rows, body["budget"], body["activations"], made_by, arguments)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"the text is not a choice: {type(error).__name__}: {error}."
            raise ScheduleError(problem("Choice.from_json()", what, remedy="Pass a text of Choice.to_json().")) from error
        names = first.layout, first.policy, first.remat
        again = arguments.predict_candidate(arguments.schedule(planned, policy), planned, policy, names)
        has_same_policy = replace(again, why_lost="") == replace(first, why_lost="")
        if layout == planned and has_same_policy:
            return found
        edited = [name + ", edited" * (not same) for name, same in zip(names, (layout == planned, has_same_policy))]
        return found._with_new_prediction((edited[0], edited[1], first.remat))

    def _rows_and_right_columns(self) -> tuple[list[tuple[str, ...]], range]:
        """Return the rows of the table, the head first, and the indices of the columns of numbers."""
        has_remat = any(x.remat for x in self.candidates)
        head = ("layout", "policy", *["recomputed"] * has_remat, "ms a step", "memory", "sent", "")
        rows: list[tuple[str, ...]] = [head]
        for x in self.candidates:
            least = "> " * x.is_unsimulated
            is_known = math.isfinite(x.step_s)
            seconds = f"{least}{1e3 * x.step_s:.2f}" if is_known else ""
            memory = f"{'> ' * (x.is_unsimulated or not is_known)}{nbytes_text(x.peak_nbytes)}" if x.memory else ""
            sent = nbytes_text(x.sent_nbytes) if is_known and not x.is_unsimulated else ""
            rows.append((x.layout, x.policy, *[x.remat] * has_remat, seconds, memory, sent, x.why_lost or "chosen"))
        return rows, range(len(head) - 4, len(head) - 1)

    def table(self, rows: int | None = None) -> str:
        """Return the table of candidates, as text: the first ``rows`` of them, or all."""
        lines = align_columns(*self._rows_and_right_columns())
        if rows is not None and len(lines) > rows + 1:
            lines[rows + 1 :] = [f"... and {len(lines) - rows - 1} more"]
        return "\n".join([*lines, f"activations: {self.activations}"])

    def __str__(self) -> str:
        return self.table(_MAX_SHOWN_ROWS)

    def _repr_html_(self) -> str:
        return table_html(f"The fastest that fits is {self.name}", *self._rows_and_right_columns())


def _candidate_from_json(row: Mapping[str, Any]) -> Candidate:
    step_s = math.inf if row["step_s"] is None else row["step_s"]
    return Candidate(**{**row, "step_s": step_s, "non_defaults": tuple(row["non_defaults"])})
