"""MicrobatchCosts: FLOPs and seconds of the units of a layout, and the bytes that they keep from forward to backward."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import mean, median_low
from typing import Any, NamedTuple

from fsharp.errors import ScheduleError, problem
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.tree.paths import value_by_path
from fsharp.planning.plan_step import ROOT, Use, uses_in_order, walk_nested_uses
from fsharp.planning.trial import UnitCall
from fsharp.type_checks import predicate_of_annotation, short_repr

Activations = float | tuple[float, float]
"""Bytes that a unit keeps from its forward to its backward; or a pair: these bytes without and with recomputation."""


class KeptBytes(NamedTuple):
    """The bytes that one use of units keeps from its forward to its backward.

    Attributes:
        use: the use.
        kept_nbytes: bytes if the use is not recomputed. The bytes of inner uses are not included.
        input_nbytes: bytes if the use is recomputed, which keeps its inputs; nan if unknown.
        inner: the kept bytes of each use inside of this use.
    """

    use: Use
    kept_nbytes: float
    input_nbytes: float
    inner: "tuple[KeptBytes, ...]" = ()

    @property
    def units(self) -> list[str]:
        """Names of the use's units, as in programs, where the name of the root unit is ``(root)``."""
        return [name or ROOT for name in self.use.units]


class MicrobatchCosts(NamedTuple):
    """FLOPs, seconds and kept bytes of the units of a layout in a microbatch.

    Attributes:
        kept: the bytes that each use of units keeps, in order of the uses.
        flops: FLOPs of the forward of each unit, by name as in programs; empty if unknown.
        seconds: measured seconds ``(forward, backward, recomputation)`` of each unit, by name as in programs; empty if unknown.
        source: source of the numbers, in words.
    """

    kept: tuple[KeptBytes, ...]
    flops: Mapping[str, float]
    seconds: Mapping[str, tuple[float, float, float]]
    source: str

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses of units, in order."""
        return tuple(each.use for each in self.kept)

    def activation_nbytes(self, recomputed: Collection[str]) -> float:
        """Return the most bytes of activations at one time; nan if unknown.

        Units in ``recomputed`` keep only their inputs. Their activations are recomputed for one unit at a time.
        """
        kept, largest, todo = 0.0, 0.0, list(self.kept)
        while todo:
            call = todo.pop()
            if recomputed and any(name in recomputed for name in call.units):
                kept += call.input_nbytes
                largest = max(largest, sum(each.kept_nbytes for each in walk_nested_uses([call])))
            else:
                kept += call.kept_nbytes
                todo += call.inner
        return kept + largest


def given_costs(
    layout: Layout, order: Sequence[str | Use], activations: Activations | Mapping[str, Activations]
) -> MicrobatchCosts:
    """Return costs with the user's bytes of activations, without FLOPs and seconds. ``order``: uses of units, in order.

    The bytes of a use are those that ``activations`` has for the last unit of the use.
    """
    uses = uses_in_order(layout, order)
    units = [unit.name or ROOT for unit in layout.units]
    given: Any = activations
    kept: dict[str, Any] = value_by_path("tune(activations=)", given, units, default=0.0)
    for unit, found in kept.items():
        if not predicate_of_annotation(Activations)(found):
            expected = "a number of bytes; or a tuple of two: without and with recomputation"
            raise ScheduleError(f"tune(): activations of unit {unit!r} are {short_repr(found)}, expected {expected}.")
        for nbytes in found if isinstance(found, tuple) else (found,):
            if not 0 <= nbytes < math.inf:
                what = f"activations of unit {unit!r} are {nbytes!r} bytes, expected a finite number of at least 0."
                raise ScheduleError(problem("tune()", what))

    def kept_by_use(use: Use) -> KeptBytes:
        mine = kept[use.units[-1] or ROOT]
        kept_nbytes, input_nbytes = mine if isinstance(mine, tuple) else (mine, math.nan if mine else 0.0)
        return KeptBytes(use, kept_nbytes, input_nbytes, tuple(map(kept_by_use, use.inner)))

    return MicrobatchCosts(tuple(map(kept_by_use, uses)), {}, {}, "given")


def estimated_costs(layout: Layout, order: Sequence[str | Use], tokens: float) -> MicrobatchCosts:
    """Return costs estimated from shapes: each matrix multiplies and keeps the vectors of all tokens; attention is left out.

    A leaf that an embedding shares with a head multiplies once, as the embedding only looks vectors up. A leaf that repeated
    layers share, such as ``layers.0`` and ``layers.1``, multiplies in each of them.
    Shapes do not tell which leaf of a unit comes first. So the median of the inputs of a unit's leaves counts as the input of a
    recomputed unit. In a block with a wider hidden layer the median is the width of the model.
    """
    uses = uses_in_order(layout, order)
    shares = called_use_fractions(uses)
    flops = {
        unit.name or ROOT: 2.0 * tokens * shares.get(unit.name, 1.0) * sum(group.used for group in unit.groups)
        for unit in layout.units
    }

    def kept_by_use(use: Use) -> KeptBytes:
        inputs = [tokens * each for name in use.units for each in _leaf_input_nbytes_per_token(layout[name])] or [0.0]
        return KeptBytes(use, sum(inputs), median_low(inputs), tuple(map(kept_by_use, use.inner)))

    return MicrobatchCosts(tuple(map(kept_by_use, uses)), flops, {}, "estimated from shapes")


def called_use_fractions(uses: Sequence[Use]) -> dict[str, float]:
    """Return, for each unit, the fraction of the unit's uses that call this unit, or a repeated layer like this unit.

    In all other uses the unit only lends leaves to a unit of another kind, as an embedding does to a head. Names of repeated
    layers differ only in numbers.
    """
    numbers, own = Counter[str](), Counter[str]()
    for use in walk_nested_uses(uses):
        kinds = {re.sub(r"\d+", "*", name) for name in use.units if name not in use.ties}
        numbers.update(use.units)
        own.update(name for name in use.units if re.sub(r"\d+", "*", name) in kinds)
    return {name: own[name] / number for name, number in numbers.items()}


def _leaf_input_nbytes_per_token(unit: UnitLayout) -> list[float]:
    """Return the bytes of one token's input to each stored leaf but scalars: ``shape[-1]`` elements for each matrix."""
    return [
        math.prod(leaf.shape[:-2]) * leaf.shape[-1] * unit.groups[leaf.group].dtypes.compute.itemsize
        for leaf in unit.leaves
        if leaf.tied_to is None and leaf.shape
    ]


def costs_of_calls(calls: Sequence[UnitCall], source: str) -> MicrobatchCosts:
    """Return the costs of units from the calls of a trial. ``source``: source of the numbers, in words.

    The FLOPs and seconds of a call count for the last unit in the call's ``units``. A call that was not measured
    gets seconds from its FLOPs, at the mean rate of measured calls.
    """
    every = list(walk_nested_uses(calls))
    flops: dict[str, list[float]] = {}
    seconds: dict[str, list[tuple[float, float, float]]] = {}
    rates = [3 * each.flops / (each.forward_s + each.backward_s) for each in every if each.forward_s > 0 and each.flops]
    for call in every:
        spent = call.forward_s, call.backward_s, call.recompute_s
        if math.isnan(call.forward_s):  # a call with inner calls is not measured: assume the mean rate of the others
            forward_s = call.flops / mean(rates) if rates else 0.0
            spent = forward_s, 2 * forward_s, forward_s
        for name in call.units:
            is_last = name == call.units[-1]
            flops.setdefault(name or ROOT, []).append(call.flops * is_last)
            seconds.setdefault(name or ROOT, []).append(spent if is_last else (0.0, 0.0, 0.0))

    def kept_by_call(call: UnitCall) -> KeptBytes:
        return KeptBytes(call.planned_use, call.kept_nbytes, call.input_nbytes, tuple(map(kept_by_call, call.inner)))

    measured = any(not math.isnan(call.forward_s) for call in every)
    return MicrobatchCosts(
        tuple(map(kept_by_call, calls)),
        {name: mean(each) for name, each in flops.items()},
        {name: tuple(map(mean, zip(*each))) for name, each in seconds.items()} if measured else {},
        source,
    )
