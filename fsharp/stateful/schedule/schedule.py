"""Schedule: the ops of a step as plain data. An op has a stream, memory in the arena, and ops that it waits for.

[Note: ops] in :mod:`~fsharp.stateful.schedule.ops` lists the kinds of ops.

[Note: buckets]
Neighbouring gathers, or reductions, with equal ``bucket`` numbers are one collective along each axis. The collective begins
when all ops in ``after`` of these ops are over. The collective ends for all of these ops at once.
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from fsharp.errors import FsharpError, ScheduleError
from fsharp.functional.comm.protocol import Call
from fsharp.functional.layout.text import NOTEBOOK_HTML_BY_CLASS
from fsharp.stateful.schedule.ops import OPS, OpSpec, Phase, Stream, expected_phases_text, kinds_where
from fsharp.stateful.schedule.policy import SchedulePolicy, policy_from_json
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import describe_wrong_field

VECTOR_NBYTES = 64
"""Alignment of addresses, in bytes. Kernels load vectors of this width, and may round the last elements differently."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A run of ``nbytes`` bytes in the arena from byte ``start`` on. ``start`` is a multiple of :data:`VECTOR_NBYTES`."""

    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + self.nbytes

    def overlaps(self, other: "Memory") -> bool:
        """Return whether two runs share a byte."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a schedule, such as the gather of a unit.

    Attributes:
        kind: kind of the op: one of :func:`~fsharp.stateful.schedule.ops.kinds_where`.
        unit: unit of the op; empty for an op without a unit.
        phase: part of the step: ``forward``, ``backward``, ``finish`` (reductions once a step) or ``update``.
        use_index: number of the unit's use; -1 for an op without a use.
        stream: stream on which the op runs.
        memory: range of the arena that the op fills, reads or frees; None if its parameters or gradients are at rest.
        opens: range of the arena where the unit's gradient rests, from this op to the end of the step. None: this op is not the
            first to write there. A reduction writes its result to ``opens``; if that is None, to ``memory``.
        event_index: position of the program's event at which the host issues the op.
        after: positions of ops that must be over before this op starts; an op that comes later is of the previous step.
        bucket: neighbouring ops of one kind with the same number share one collective; -1 shares none.
    """

    kind: str
    unit: str
    phase: Phase
    event_index: int
    use_index: int = -1
    stream: Stream = "compute"
    memory: Memory | None = None
    after: tuple[int, ...] = ()
    bucket: int = -1
    opens: Memory | None = None

    @property
    def spec(self) -> OpSpec:
        """The record of the op's kind and phase. ScheduleError if there is no such record."""
        spec = OPS.get((self.kind, self.phase))
        if spec is None:
            raise ScheduleError(f"{self}: has phase {self.phase!r}, expected {expected_phases_text(self.kind)}.")
        return spec

    def __str__(self) -> str:
        where = f" @{self.memory.start}+{self.memory.nbytes}" if self.memory else ""
        opens = f" opens @{self.opens.start}+{self.opens.nbytes}" if self.opens else ""
        return f"{self.kind} {self.unit or '-'} {self.phase} [{self.stream}]{where}{opens}"


@api_boundary
@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of one step with streams, memory and order, as data: print, draw, verify, edit or run it.

    Attributes:
        program: the program that the schedule implements.
        policy: the policy of the schedule. If a memory budget needs this, buckets are off and ``prefetch`` is lower than asked.
        ops: ops, in the order in which the host issues them.
        arena: bytes of the arena, the memory in which all buffers of a step have addresses.
        peak_nbytes: largest number of bytes that are live at once: a lower bound of the arena.
    """

    program: Program
    policy: SchedulePolicy
    ops: tuple[Op, ...]
    arena: int
    peak_nbytes: int

    def __post_init__(self) -> None:
        if why := describe_wrong_field(self):
            raise ScheduleError(f"Schedule(): {why}.")
        known, num_events, units = kinds_where(), len(self.program.events), {"", *(unit.name for unit in self.program.units)}
        for i, op in enumerate(self.ops):
            for row in (op, op.memory, op.opens):
                if row is not None and (why := describe_wrong_field(row)):
                    raise ScheduleError(f"Schedule(): op {i}: {why}.")
            if op.kind not in known:
                what = f"kind is {op.kind!r}, expected {' or '.join(map(repr, known))}"
                raise ScheduleError(f"Schedule(): op {i}: {what}. Give the OpSpec of another kind to `declare_op()` first.")
            if op.unit not in units:
                raise ScheduleError(f"Schedule(): op {i}, {op}: the program has no such unit; it has {sorted(units)[1:]}.")
            if not 0 <= op.event_index < num_events:
                raise ScheduleError(f"Schedule(): op {i}, {op}: is issued at event {op.event_index} of {num_events}.")
            if wrong := [j for j in op.after if not 0 <= j < len(self.ops)]:
                raise ScheduleError(f"Schedule(): op {i}, {op}: runs after op {wrong[0]}, and there are {len(self.ops)} ops.")

    def collective_counts(self) -> Counter[Call]:
        """Return how often one rank issues each collective in a step. Collectives in the user's own code do not count."""
        facts = self.program.facts
        return Counter(call for issued in group_ops_by_bucket(self.ops) for call in collectives_of_bucket(issued, facts))

    @property
    def host_copy_nbytes(self) -> int:
        """Bytes that one rank copies from and to host memory in a step."""
        facts = self.program.facts
        return sum(facts[op.unit].host for op in self.ops if op.spec.cost == "copy")

    def replace_ops(self, ops: "tuple[Op, ...] | list[Op]") -> "Schedule":
        """Return the schedule with other ops, not verified yet: see :func:`~fsharp.schedules.verify`."""
        return replace(self, ops=tuple(ops))

    def lines(self) -> list[str]:
        """Return a line for each op, with its kind, unit, phase, stream and memory. Other fields are left out."""
        return [str(op) for op in self.ops]

    def diff(self, other: "Schedule") -> str:
        """Return a unified diff of the :meth:`lines` of two schedules; empty if ops differ in other fields alone."""
        return "\n".join(difflib.unified_diff(self.lines(), other.lines(), "this", "other", lineterm="", n=2))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return NOTEBOOK_HTML_BY_CLASS[Schedule](self)

    def to_json(self) -> str:
        """Return the schedule as JSON; :meth:`from_json` is the inverse."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    @api_boundary
    def from_json(text: str) -> "Schedule":
        """Return the schedule that :meth:`to_json` wrote.

        Raises:
            ScheduleError: the text is not a schedule, or has ops of an undeclared kind.
        """
        try:
            data = json.loads(text)
            rows: list[dict[str, Any]] = data["program"]["units"]
            calls = [{k: tuple(Call(*x) for x in v) for k, v in row.items() if isinstance(v, list)} for row in rows]
            units = tuple([UnitFacts(**row | own) for row, own in zip(rows, calls, strict=True)])
            events: list[list[Any]] = [
                [tuple(x) if isinstance(x, list) else x for x in event] for event in data["program"]["events"]
            ]
            program = Program(units, tuple(Event(*event) for event in events))
            ops = tuple(map(_op_from_json, data["ops"]))
            return Schedule(program, policy_from_json(data["policy"]), ops, data["arena"], data["peak_nbytes"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = f"{error}" if isinstance(error, FsharpError) else f"{error!r}."
            raise ScheduleError(f"Schedule.from_json(): not a schedule: {why}") from error


def op_positions_by_bucket(ops: Sequence[Op]) -> list[list[int]]:
    """Return the positions of the ops of each bucket, in order. An op that is in no bucket is alone."""
    keys = [i if op.bucket == -1 else (op.kind, op.bucket) for i, op in enumerate(ops)]
    return [list(run) for _, run in groupby(range(len(ops)), keys.__getitem__)]


def group_ops_by_bucket(ops: Sequence[Op]) -> list[tuple[Op, ...]]:
    """Return the ops of each bucket, in order. An op that is in no bucket is alone."""
    return [tuple(ops[i] for i in run) for run in op_positions_by_bucket(ops)]


def buffer_lifetimes(ops: Sequence[Op]) -> Iterator[tuple[int | None, int | None, int]]:
    """Yield ``(fill, free, nbytes)`` for each time that a buffer in the arena is filled and freed.

    ``fill`` and ``free``: positions of the ops that fill and free the buffer; None if this happens outside of this step.
    """
    live: dict[tuple[str, str], tuple[int, int]] = {}
    for i, op in enumerate(ops):
        if op.opens is not None:
            yield i, None, op.opens.nbytes
        if op.memory is None:
            continue
        spec = op.spec
        buffer = spec.memory_buffer_kind, op.unit
        if spec.frees != spec.memory_buffer_kind:
            live.setdefault(buffer, (i, op.memory.nbytes))
        else:
            fill, nbytes = live.pop(buffer, (None, op.memory.nbytes))
            yield fill, i, nbytes
    for fill, nbytes in live.values():
        yield fill, None, nbytes


def collectives_of_bucket(issued: Sequence[Op], facts: Mapping[str, UnitFacts]) -> tuple[Call, ...]:
    """Return the collectives of a bucket (one of each kind along each axis, for all its units), or of an op in no bucket.

    >>> units = {name: UnitFacts(name, 64, gather=(Call("all_gather", "dp", 32),)) for name in "ab"}
    >>> collectives_of_bucket([Op("gather", name, "forward", 0, bucket=7) for name in "ab"], units)
    (Call(op='all_gather', axis='dp', nbytes=64),)
    """
    calls = [call for op in issued for call in op.spec.collectives(facts[op.unit])]
    if len(issued) == 1:
        return tuple(calls)
    return tuple(Call(*link, nbytes) for link, nbytes in sent_nbytes_by_op_and_axis(calls).items())


def sent_nbytes_by_op_and_axis(calls: Iterable[Call]) -> Counter[tuple[str, str]]:
    """Return the bytes that collectives send, by kind of collective and mesh axis."""
    sent: Counter[tuple[str, str]] = Counter()
    for call in calls:
        sent[call.op, call.axis] += call.nbytes
    return sent


def coalescing_key(calls: Iterable[Call], facts: UnitFacts) -> tuple[object, ...] | None:
    """Return what has to be equal for ops with ``calls`` to share a bucket: dtypes, collectives, axes. None: no bucket."""
    stages = tuple(dict.fromkeys((call.op, call.axis) for call in calls))
    return (facts.sent_dtypes, *stages) if stages and facts.sent_dtypes is not None else None


def _op_from_json(row: dict[str, Any]) -> Op:
    memory, opens = (Memory(**row[name]) if row[name] else None for name in ("memory", "opens"))
    return Op(**row | {"memory": memory, "opens": opens, "after": tuple(row["after"])})
