"""Schedule: the plan of a step as plain data. What runs, on which stream, in which memory, and what it waits for.

[Note: ops]
Ops are in the order in which the host issues them. An op starts when the ops in ``after`` have finished and the ops
before it on its stream have; what the host waits for is that alone.

==============  =========  ==================================================================================
kind            stream     what
==============  =========  ==================================================================================
``gather``      gather     copy full parameters into ``memory``; with phase ``update``: updated ones to where they rest
``wait``        compute    the compute stream (on CPUs the host) waits for a gather
``compute``     compute    the caller's own code, from entering the unit to the next op on this stream
``release``     compute    ``memory`` of a gathered unit is free from here on
``cast``        compute    gradients of a use into ``memory`` (the first use copies, later ones add), or where they rest
``reduce``      reduce     the reduction of a microbatch, from ``memory``; with phase ``finish``: to the optimizer's place
``accumulate``  reduce     its result (or ``memory`` itself) is added to the gradient at rest, and ``memory`` is free
``update``      compute    the caller's optimizer step
==============  =========  ==================================================================================
"""

import difflib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from fsharp.functional.comm import Call
from fsharp.functional.errors import ScheduleError
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts

if TYPE_CHECKING:
    from fsharp.stateful.inspect.estimate import Hardware
    from fsharp.stateful.inspect.timeline import Timeline

OpKind = Literal["gather", "wait", "compute", "release", "cast", "reduce", "accumulate", "update"]
Stream = Literal["compute", "gather", "reduce"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
Phase = Literal["forward", "backward", "finish", "update"]


@dataclass(frozen=True, slots=True)
class Memory:
    """A run of bytes in the arena.

    Attributes:
        start: first byte.
        nbytes: length.
    """

    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + self.nbytes

    def overlaps(self, other: "Memory") -> bool:
        """Whether the two share a byte."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a schedule.

    Attributes:
        kind: see the table above.
        unit: the unit it is about; empty for ``update``.
        phase: where in the step: ``forward``, ``backward``, ``finish`` (reductions once a step) or ``update``.
        use: the use of the unit that a ``compute`` or ``cast`` is about, else -1.
        stream: where it runs.
        memory: the bytes of the arena that it fills, reads or frees; None where parameters or gradients are at rest.
        opens: the bytes of the arena where the unit's gradient rests from here on to the end of the step: of the first op
            that puts something there. A ``reduce`` that opens leaves its result there; one that does not leaves it in
            ``memory`` for its ``accumulate``.
        at: position of the program's event at which the host issues it.
        after: positions of the ops that have to have finished. A position behind the op's own is of the step before.
        bucket: ops of one kind with the same number that is not -1 are issued as one collective, next to each other.
    """

    kind: OpKind
    unit: str
    phase: Phase
    at: int
    use: int = -1
    stream: Stream = "compute"
    memory: Memory | None = None
    after: tuple[int, ...] = ()
    bucket: int = -1
    opens: Memory | None = None

    def __str__(self) -> str:
        where = f" @{self.memory.start}+{self.memory.nbytes}" if self.memory else ""
        opens = f" opens @{self.opens.start}+{self.opens.nbytes}" if self.opens else ""
        return f"{self.kind} {self.unit or '-'} {self.phase} [{self.stream}]{where}{opens}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of one step, ready to be verified, drawn, simulated, edited and run.

    Attributes:
        program: the events that it serves.
        policy: what it was compiled with.
        ops: in the order of issue.
        arena: bytes of the memory that slots are cut from.
        bound: bytes that are live at once at most, whatever the placement: the arena cannot be smaller.
    """

    program: Program
    policy: Policy
    ops: tuple[Op, ...]
    arena: int
    bound: int

    def facts(self, unit: str) -> UnitFacts:
        """The facts of a unit."""
        for facts in self.program.units:
            if facts.name == unit:
                return facts
        raise ScheduleError(f"no unit {unit!r} in this schedule: it has {[u.name for u in self.program.units]}.")

    def calls(self) -> Counter[Call]:
        """Every collective that one rank issues in a step that follows this schedule, the caller's own aside."""
        by_name = {facts.name: facts for facts in self.program.units}
        counter: Counter[Call] = Counter()
        for op in self.ops:
            counter.update(calls_of(op, by_name[op.unit]) if op.unit else ())
        return counter

    @property
    def slots(self) -> dict[str, Memory]:
        """Where each unit's full parameters are: one address for the whole step."""
        return {op.unit: op.memory for op in self.ops if op.kind == "gather" and op.memory}

    def replace_ops(self, ops: "tuple[Op, ...] | list[Op]") -> "Schedule":
        """The schedule with other ops: an edited one, which :func:`~fsharp.stateful.verify.verify` has yet to see."""
        return replace(self, ops=tuple(ops))

    def lines(self) -> list[str]:
        """One line for each op."""
        return [str(op) for op in self.ops]

    def diff(self, other: "Schedule") -> str:
        """A unified diff of the ops of two schedules; empty if they are the same."""
        return "\n".join(difflib.unified_diff(self.lines(), other.lines(), "this", "other", lineterm="", n=2))

    def __str__(self) -> str:
        from fsharp.stateful.inspect.table import table

        return table(self)

    def draw(
        self, path: "str | PathLike[str]", *, hardware: "Hardware | None" = None, measured: "Timeline | None" = None
    ) -> None:
        """A picture of it: lanes for compute, gather and reduce, memory below.

        Args:
            path: a PNG or SVG file.
            hardware: what to simulate it on; None draws the order of ops.
            measured: a step that ran, from :meth:`Trace.timeline`, to draw beneath it.
        """
        from fsharp.stateful.inspect.draw import draw

        draw(self, path, hardware=hardware, measured=measured)

    def to_json(self) -> str:
        """The schedule as JSON; :meth:`from_json` is the inverse."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Schedule":
        """The schedule that :meth:`to_json` wrote.

        Raises:
            ScheduleError: the text is not one.
        """
        try:
            data = json.loads(text)
            units = tuple(map(_facts, data["program"]["units"]))
            program = Program(units, tuple(Event(*event) for event in data["program"]["events"]))
            ops = tuple(
                Op(**{**op, "memory": _memory(op["memory"]), "opens": _memory(op["opens"]), "after": tuple(op["after"])})
                for op in data["ops"]
            )
            return Schedule(program, Policy(**data["policy"]), ops, data["arena"], data["bound"])
        except (ValueError, TypeError, KeyError) as error:
            raise ScheduleError(f"Schedule.from_json(): not a schedule: {error!r}.") from error


def calls_of(op: Op, facts: UnitFacts) -> tuple[Call, ...]:
    """The collectives that an op issues."""
    if op.kind == "gather":
        return facts.spread if op.phase == "update" else facts.gather
    if op.kind == "reduce":
        return facts.finish if op.phase == "finish" else facts.reduce
    return ()


def _memory(row: dict[str, int] | None) -> Memory | None:
    return Memory(**row) if row else None


def _facts(row: dict[str, Any]) -> UnitFacts:
    fields: dict[str, Any] = {k: tuple(Call(*call) for call in v) if isinstance(v, list | tuple) else v for k, v in row.items()}
    return UnitFacts(**fields)
