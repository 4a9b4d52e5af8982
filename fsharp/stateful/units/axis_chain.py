"""ReductionChain: the collectives, along one axis after another, that reduce a flat gradient from one place to the next."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fsharp.functional.comm.protocol import Call
from fsharp.functional.comm.residuals import ResidualsByAxis
from fsharp.functional.formats.format import ResidualAndNoise
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.functional.layout.stages import padding_in_decoded_sum, reduction_stages
from fsharp.functional.layout.unit_layout import UnitLayout
from fsharp.functional.traffic import calls_of_stages
from fsharp.stateful.transport.base import Summand, Transport, Work
from fsharp.stateful.units.full_unit import FlatSizes


class ReductionChain:
    """A chain of collectives that reduces a group's gradient from one place to another, stage by stage.

    The stages are those of :func:`reduction_stages`. On a host without streams, all stages are blocking, except the last.

    Attributes:
        size: number of elements of the gradient before the first stage.
        always_has_out: whether each :class:`ChainInput` has memory for the result.
        first: the dtype of the first stage's input; the accumulation dtype if there are no stages.
        casts_first: whether the input has another dtype than the result.
        casts_last: whether the input of the last stage has another dtype than the result.
        rounds_gradients: whether a gradient is rounded to the accumulation dtype, before it is added or sent.
    """

    def __init__(
        self,
        transport: Transport,
        unit: UnitLayout,
        group: int,
        places: tuple[MeshPlacement, MeshPlacement],
        *,
        trivial: bool,
        always_has_out: bool = False,
    ) -> None:
        self.transport, self.unit, self.group, self.always_has_out = transport, unit, group, always_has_out
        self.size = unit.local_size(group, places[0])
        self.dtypes = dtypes = unit.groups[group].dtypes
        self.stages = list(reduction_stages(unit, group, *places, trivial=trivial))
        self.first, last = (self.stages[0].dtype, self.stages[-1].dtype) if self.stages else (dtypes.accumulate,) * 2
        self.casts_first, self.casts_last = self.first != dtypes.accumulate, last != dtypes.accumulate
        self.rounds_gradients = torch.promote_types(dtypes.compute, dtypes.accumulate) != dtypes.accumulate

    def scratch_sizes(self) -> FlatSizes:
        """Return ``(number of elements, dtype)`` of each tensor that the chain needs: scratch, and buffers between stages."""
        result, accumulate = list[tuple[int, torch.dtype]](), self.dtypes.accumulate
        for i, stage in enumerate(self.stages):
            following = self.stages[i + 1].dtype if i < len(self.stages) - 1 else None
            itemsize = stage.dtype.itemsize
            into_out = stage.dtype == accumulate and (self.always_has_out or following is not None)
            nbytes = self.transport.scratch_nbytes(stage.op, stage.axis, stage.size, itemsize, sums_into_out=into_out)
            result.append((0 if stage.op in ("all_to_all", "all_gather") else nbytes, torch.uint8))
            if following is not None:
                result.append((stage.out, accumulate))
                result.append((stage.out if following != accumulate else 0, following))
        return result

    def encode(self, x: torch.Tensor, residuals: Mapping[int, ResidualsByAxis], k: int = 0) -> torch.Tensor | None:
        """Return ``x`` encoded for stage number ``k``; None if this stage sends plain buffers. Residuals are overwritten.

        The result has a row for each receiver, in whole blocks of the wire's format; the end of ``x`` is padded.
        """
        if not self.stages or self.stages[k].op != "all_to_all":
            return None
        _, axis, n, size, part, _, wire, _ = self.stages[k]
        carried = residuals.get(self.group, {}).get(axis, ResidualAndNoise())
        facts = partial(self.unit.error_facts, self.group, axis)
        padded = torch.nn.functional.pad(x, (0, n * part - size))
        return wire.store_summand(padded, part, carried.residual, facts, carried.noise_fn).view(n, -1)

    def decode_sum(self, k: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``rows``, one from each rank, that stage number ``k`` has received: see :meth:`encode`."""
        stage = self.stages[k]
        total = stage.wire.sum(rows, stage.out, stage.dtype, partial(self.unit.error_facts, self.group, stage.axis))
        for gap in padding_in_decoded_sum(self.unit, self.group, stage, self.transport.comm.rank):
            total[gap] = 0
        return total


def facts_of_reduction(name: str, chains: Iterable[ReductionChain]) -> dict[str, Any]:
    """Return fields of ``UnitFacts`` about a reduction. ``name``: ``"finish"`` for the final reduction, else ``"reduce"``."""
    calls: list[Call] = []
    found = dict.fromkeys((f"{name}_encoded", f"{name}_recoded", f"{name}_decoded", f"{name}_cast"), 0)
    for chain in chains:
        calls += calls_of_stages(chain.stages, chain.dtypes.accumulate)
        for k, stage in enumerate(chain.stages):
            if stage.dtype != chain.dtypes.accumulate:
                found[f"{name}_cast"] += stage.size * stage.dtype.itemsize
            if stage.op == "all_to_all":
                nbytes = stage.n * stage.wire.size(stage.out) * stage.wire.buffer_dtype.itemsize
                found[f"{name}_{'encoded' if k == 0 else 'recoded'}"] += nbytes
                found[f"{name}_{'decoded' if k == len(chain.stages) - 1 else 'recoded'}"] += nbytes
    return {name: tuple(calls), **found}


class ChainInput(NamedTuple):
    """A buffer to reduce by a :class:`ReductionChain`.

    Attributes:
        x: the buffer, in the dtype ``chain.first``.
        out: memory for the result; None leaves the result in the memory of the last stage.
        memory: tensors with the sizes and dtypes of :meth:`ReductionChain.scratch_sizes`.
        residuals: by group and axis, the ``ResidualAndNoise`` with which to encode. The reduction overwrites each residual.
        encoded: the buffer from :meth:`ReductionChain.encode`, if the first stage sends it encoded.
    """

    chain: ReductionChain
    x: torch.Tensor
    out: torch.Tensor | None
    memory: Sequence[torch.Tensor]
    residuals: Mapping[int, ResidualsByAxis] = MappingProxyType({})
    encoded: torch.Tensor | None = None


def reduce_along_chains(inputs: Sequence[ChainInput], transport: Transport, *, label: str, coalesced: bool) -> list[Work]:
    """Begin to reduce buffers, each by its chain. Return a Work of the last stage for each buffer.

    With ``coalesced`` all buffers share the collectives of each stage; their stages and dtypes have to be equal. If the last
    stage sends encoded parts, the first wait for a returned Work decodes and adds the parts.
    """
    if not coalesced:
        groups = enumerate(inputs)
        found = [reduce_along_chains([item], transport, label=f"{label} group {i}", coalesced=True) for i, item in groups]
        return [work for works in found for work in works]
    moving = [item for item in inputs if item.chain.size]
    works = iter(_run_stages(moving, transport, label) if moving else ())
    return [next(works) if item.chain.size else Work(result=item.x if item.out is None else item.out) for item in inputs]


def _run_stages(inputs: Sequence[ChainInput], transport: Transport, label: str) -> list[Work]:
    chain, xs = inputs[0].chain, [item.x for item in inputs]
    last: list[Work] = []
    for k, stage in enumerate(chain.stages):
        op, axis, n = stage.op, stage.axis, stage.n
        at, is_last = 3 * k, k == len(chain.stages) - 1  # at: the stage's first position in ReductionChain.scratch_sizes
        outs = [item.out if is_last else item.memory[at + 1] for item in inputs]
        summands = list(map(Summand, xs, outs, [item.memory[at] for item in inputs]))
        if op == "reduce_scatter":
            last = transport.reduce_scatter(summands, axis, n, chain.dtypes.accumulate, label=label)
        elif op == "all_to_all":
            pairs = list(zip(inputs, xs, strict=True))
            stored = [
                item.chain.encode(x, item.residuals, k) if k or item.encoded is None else item.encoded for item, x in pairs
            ]
            sent = [each for each in stored if each is not None]
            decode_sums = [partial(item.chain.decode_sum, k) for item in inputs]
            parts = [x[: item.chain.stages[k].out] for item, x in pairs]  # where there is no other memory for the sum
            rooms = [part if out is None else out for part, out in zip(parts, outs, strict=True)]
            last = transport.reduce_scatter_encoded(sent, decode_sums, rooms, axis, label)
        elif op == "all_reduce":
            last = transport.all_reduce(summands, axis, n, label=label)
        else:
            last = [transport.gather_without_padding(xs, [each.required_out for each in summands], axis, n, label)] * len(xs)
        if not is_last:
            for work in last:
                work.wait()
            between = [(item.memory[at + 1], item.memory[at + 2]) for item in inputs]
            xs = [narrow.copy_(wide) if len(narrow) else wide for wide, narrow in between]
    return last


GatherInput = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""This rank's part of a buffer, and for each axis the buffer that the gather along the axis fills."""


def gather_along(
    axes: Sequence[str], inputs: Sequence[GatherInput], transport: Transport, *, label: str, coalesced: bool
) -> list[Work]:
    """Begin to gather buffers along one axis after another. The buffers are filled once the returned Works are done.

    With ``coalesced`` all buffers share collectives; their dtypes have to be equal. On a host without streams, all
    collectives are blocking, except the last.
    """
    together = [(inputs, label)] if coalesced and inputs else [([each], f"{label} group {i}") for i, each in enumerate(inputs)]
    works = []
    for several, text in together:
        work, xs = Work(), [x for x, _ in several]
        for k, axis in enumerate(axes):
            work.wait()
            outs = [each[k] for _, each in several]
            gather = transport.gather if len(xs) > 1 or transport.counters else transport.gather_unpacked  # faster
            work = gather(xs, outs, axis, text)
            xs = outs
        works.append(work)
    return works
