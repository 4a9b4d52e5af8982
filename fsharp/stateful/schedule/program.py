"""Program: the order in which a step uses its units, runs their backwards, and reduces and updates them.

A program is recorded, or written by hand. A program does not say when data move: a schedule does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsharp.errors import ScheduleError
from fsharp.functional.comm.protocol import Call
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import describe_wrong_field

EventKind = Literal["forward", "forward_end", "backward", "backward_end", "microbatch_end", "reduce", "move", "fetch", "update"]
EVENTS_WITHOUT_UNIT: tuple[EventKind, ...] = ("microbatch_end", "reduce", "move", "update")


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """Sizes and collectives of one unit, for the compiler of schedules.

    Attributes:
        name: path of the unit; in a second tree with a unit of this path, ``#1`` follows the path.
        gathered: bytes of the unit's full parameters in the arena; 0 if parameters are stored in full, so never gathered.
        outgoing: bytes of the gradient that is reduced after every microbatch; 0 if there is no such reduction.
        finishing: bytes of the gradient that is reduced once a step to the optimizer's shards; 0 if there is no such reduction.
        trainable: whether the unit has gradients.
        gather: collectives of one gather of parameters.
        reduce: collectives of the reduction after a microbatch.
        finish: collectives of the reduction once a step.
        update_gather: collectives that gather updated parameters.
        rest: bytes of the arena for the gradient at rest, the sum over microbatches; 0 if gradients have their own memory.
        host: bytes of optimizer state and main copies in host memory between updates; 0 without offload.
        sent_dtypes: text of the dtypes or formats that the unit's collectives send. Units with equal texts may share
            collectives; a unit with None shares none.
        decoded: encoded bytes that are decoded after a gather. This field and the fields below are 0 for plain formats.
        reduce_encoded: encoded bytes that are made before the first collective of the reduction after a microbatch.
        reduce_recoded: encoded bytes that are decoded and encoded again between two collectives of this reduction.
        reduce_decoded: encoded bytes that are decoded after the last collective of this reduction.
        finish_encoded, finish_recoded, finish_decoded: the same bytes for the reduction once a step.
        update_coded: encoded bytes of the differences by which an update changes parameters.
        gradient: bytes of the unit's gradient before any reduction, in the dtype in which it is collected; 0 if unknown.
        reduce_cast, finish_cast: bytes of summands that a reduction sends unencoded, in another dtype than that of the sums.
            gloo casts such summands as it adds them.
    """

    name: str
    gathered: int = 0
    outgoing: int = 0
    finishing: int = 0
    trainable: bool = True
    gather: tuple[Call, ...] = ()
    reduce: tuple[Call, ...] = ()
    finish: tuple[Call, ...] = ()
    update_gather: tuple[Call, ...] = ()
    rest: int = 0
    host: int = 0
    sent_dtypes: str | None = ""
    decoded: int = 0
    reduce_encoded: int = 0
    reduce_recoded: int = 0
    reduce_decoded: int = 0
    finish_encoded: int = 0
    finish_recoded: int = 0
    finish_decoded: int = 0
    update_coded: int = 0
    gradient: int = 0
    reduce_cast: int = 0
    finish_cast: int = 0


class Event(NamedTuple):
    """One event of a program, such as the start of a unit's forward.

    Attributes:
        kind: ``forward`` and ``forward_end`` enclose a use of a unit. ``backward`` and ``backward_end`` enclose the backward of
            this use. ``microbatch_end`` is the end of a backward pass. ``reduce`` is the reduction of gradients to the
            optimizer's shards. ``fetch`` copies a unit's optimizer state to the device, for the next ``update``. ``update`` is
            the optimizer step. ``move`` is a reduction that no schedule contains, such as that of another tree.
        unit: name of the unit; empty for a kind without a unit.
        use_index: number of the use within the step, counted from 0 in the order of ``forward``; -1 for a kind without a use.
        no_gradient: whether a ``backward_end`` of a trained unit leaves no gradient of the unit's parameters.
        units: names of the units that a ``reduce`` or an ``update`` event is about, sorted; None: all units.
    """

    kind: EventKind
    unit: str = ""
    use_index: int = -1
    no_gradient: bool = False
    units: tuple[str, ...] | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of the unit's parameters is complete at this event."""
        return self.kind == "backward_end" and not self.no_gradient

    def is_about(self, unit: str) -> bool:
        """Whether a ``reduce`` or an ``update`` event is about ``unit``."""
        return self.units is None or unit in self.units

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".rstrip()


def num_gradients_by_microbatch(events: Sequence[Event]) -> list[Counter[str]]:
    """Return the number of gradients of each unit, for each microbatch and for the events after the last microbatch."""
    return [Counter([event.unit for event in part if event.has_gradient]) for part in split_by_microbatch(events)]


def split_by_microbatch(events: Sequence[Event]) -> list[list[Event]]:
    """Return the events of each microbatch without its ``microbatch_end``, and the events after the last microbatch."""
    result: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "microbatch_end":
            result.append([])
        else:
            result[-1].append(event)
    return result


@api_boundary
@dataclass(frozen=True, slots=True)
class Program:
    """The events of a step in order, and facts of its units.

    Attributes:
        units: facts of each unit that is used, reduced or updated.
        events: events in order. Uses nest: a use that begins inside of another use ends before that use does.
    """

    units: tuple[UnitFacts, ...]
    events: tuple[Event, ...]

    def __hash__(self) -> int:
        return hash(self.events)  # fast. Programs with equal events and other units differ when they are compared.

    def __post_init__(self) -> None:
        calls = [call for u in self.units for call in (*u.gather, *u.reduce, *u.finish, *u.update_gather)]
        for row in (self, *self.units, *self.events, *calls):
            if why := describe_wrong_field(row):
                raise ScheduleError(f"Program(): a {type(row).__name__}'s {why}.")
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ScheduleError(f"Program(): units have to have different names, got {names}.")
        self._check_nesting()

    @property
    def facts(self) -> dict[str, UnitFacts]:
        """Facts by name of the unit. The empty name has facts without bytes and collectives, for ops without a unit."""
        return {"": UnitFacts("")} | {unit.name: unit for unit in self.units}

    def _check_nesting(self) -> None:
        facts, names = self.facts, {unit.name for unit in self.units}
        open_: list[tuple[str, str, int]] = []
        began: dict[int, str] = {}  # the unit of each use
        for i, event in enumerate(self.events):
            where = f"Program(): event {i}, {event}"
            if event.kind not in EVENTS_WITHOUT_UNIT and event.unit not in names:
                raise ScheduleError(f"{where}: no such unit; there are {sorted(names)}.")
            if event.kind in EVENTS_WITHOUT_UNIT and (event.unit or event.use_index != -1):
                raise ScheduleError(f"{where}: has unit {event.unit!r} and use {event.use_index}, expected no unit and no use.")
            if unknown := sorted(set(event.units or ()) - names):
                raise ScheduleError(f"{where}: is about unit {unknown[0]!r}; there are {sorted(names)}.")
            if event.has_gradient and not facts[event.unit].trainable:
                raise ScheduleError(f"{where}: gives a gradient to a unit whose facts say trainable=False.")
            if event.kind in ("forward", "backward"):
                if event.kind == "forward" and event.use_index in began:
                    raise ScheduleError(f"{where}: use {event.use_index} has begun before.")
                if event.kind == "backward" and began.get(event.use_index) != event.unit:
                    raise ScheduleError(f"{where}: use {event.use_index} of this unit has had no forward.")
                began[event.use_index] = event.unit
                open_.append((event.kind, event.unit, event.use_index))
            elif event.kind in ("forward_end", "backward_end"):
                want = (event.kind.removesuffix("_end"), event.unit, event.use_index)
                if not open_ or open_.pop() != want:
                    raise ScheduleError(f"{where}: uses have to nest.")
            elif open_:
                raise ScheduleError(f"{where}: inside of {open_[-1][1]!r}. Call it outside, or with comm=scheduler.comm.")
        if open_:
            raise ScheduleError(f"Program(): the {open_[-1][0]} of {open_[-1][1]!r} has no end.")

    def forward_backward_ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``(unit, first event, last event)`` of each forward and each backward of a use, in order of the last events."""
        open_: list[int] = []
        for i, event in enumerate(self.events):
            if event.kind in ("forward", "backward"):
                open_.append(i)
            elif event.kind in ("forward_end", "backward_end"):
                yield event.unit, open_.pop(), i
