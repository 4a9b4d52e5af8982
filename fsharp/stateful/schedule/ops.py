"""The kinds of ops: one record for each kind, which the emitter, the verifier, estimates, traces and pictures read.

[Note: ops]
Ops are in the order in which the host issues them. An op starts when the ops in ``after`` and the earlier ops on its stream
have finished; the host waits for nothing else.

- ``gather``: copy full parameters into ``memory``; in phase ``update``: updated parameters to where they rest.
- ``wait``: the compute stream (on CPUs the host) waits for a gather.
- ``decode``: decode gathered parameters after their ``wait``, if their format is not plain.
- ``compute``: run the caller's own code, from entering the unit to the next op on this stream.
- ``release``: free the ``memory`` of a gathered unit.
- ``cast``: write gradients of a use, as its backward ends, to ``memory`` (first use copies, later ones add) or where they rest.
- ``encode``: encode a gradient for the first collective of its reduction, if this collective sends a format that is not plain.
- ``reduce``: begin to reduce the gradient of a microbatch, from ``memory``; in phase ``finish``: to the optimizer's shards.
- ``decode_sum``: decode the parts that arrive in the last collective of a reduction, and add them in order of rank.
- ``accumulate``: add the result of the reduction (or ``memory`` itself) to the gradient at rest, and free ``memory``.
- ``fetch``, ``offload``: copy a unit's optimizer state and main copies from host memory to the device, and back.
- ``update``: run the caller's optimizer step.

[Note: codecs]
``encode`` and ``decode`` read and fill memory of the arena, and memory that the unit's gradient or parameter buffer owns. Other
ops encode and decode as well: see "Formats" in docs/design_results.md. Field ``codes`` of their records has the bytes.

[Note: a new kind]
A new kind is a record here, given to :func:`declare_op`, and a function in ``BIND`` of :mod:`fsharp.stateful.runtime.executor`.
An op whose record has ``follows`` is emitted after each op of that kind. Any other record needs code in the emitter, and in
EagerOps for steps without a schedule. An op that changes or frees a buffer waits for the ops on other streams that read the
buffer. Gathers for the next step are the last ops of a step, and no ops follow them: ``follows="gather"`` needs
``SchedulePolicy(gather_at_start=False)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

from fsharp.errors import ScheduleError
from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.program import EVENTS_WITHOUT_UNIT, EventKind, UnitFacts
from fsharp.type_checks import describe_wrong_field

Stream = Literal["compute", "gather", "reduce", "host"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
Phase = Literal["forward", "backward", "finish", "update"]

Cost = Literal["", "compute", "update", "send", "memory", "code", "copy"]
"""The quantity on which an op's time depends: the caller's own code, the caller's optimizer step, collectives, bytes in memory,
bytes that are encoded or decoded, or bytes between host memory and the device. Empty if the op takes no time."""
Look = Literal["unit", "dark", "coded", "grey", "faint", "hatched"]
"""The look of an op in a picture: the colour of its unit, paler in the forward; the same colour, darker; one colour for all
codes; grey, faint or hatched."""


@dataclass(frozen=True, slots=True)
class BufferKind:
    """A kind of buffer of a unit in a step, such as full parameters. Each unit has one buffer of each kind.

    Attributes:
        description: the contents, in words for errors.
        size_fact: field of :class:`UnitFacts` with the buffer's bytes in the arena; empty if the buffer is not in the arena.
        has_fixed_address: whether the buffer keeps one address for a whole step, as tensors saved by autograd point there.
        is_opened: whether ``Op.opens`` has the address, and not ``Op.memory``. Such a buffer is live to the step's end.
        source: another buffer, from which an op fills this buffer. If the source is changed, filled or freed, this buffer is
            out of date and counts as empty. An empty text means no source.
        is_consumed: whether ops of one event fill and read the buffer. If a step abandons its schedule, the buffer is empty.
    """

    description: str
    size_fact: str = ""
    has_fixed_address: bool = False
    is_opened: bool = False
    source: str = ""
    is_consumed: bool = False


RESTING, PARAMS, STATE = "resting", "params", "state"
OUTGOING, REST, FINISHING, FINAL = "outgoing", "rest", "finishing", "final"
DECODED, ENCODED, SUMMED = "decoded", "encoded", "summed"
ENCODED_REST, FINAL_SUMMED = "encoded_rest", "final_summed"
BUFFERS = {
    RESTING: BufferKind("parameters where they rest"),
    PARAMS: BufferKind("parameters", "gathered", has_fixed_address=True),
    STATE: BufferKind("optimizer state on the device"),
    OUTGOING: BufferKind("outgoing gradient", "outgoing"),
    REST: BufferKind("gradient at rest", "rest", is_opened=True),
    FINISHING: BufferKind("finishing gradient", "finishing"),
    FINAL: BufferKind("gradient at the optimizer's place"),
    DECODED: BufferKind("decoded parameters", source=PARAMS),
    ENCODED: BufferKind("encoded gradient", source=OUTGOING, is_consumed=True),
    SUMMED: BufferKind("decoded sum", source=OUTGOING),
    ENCODED_REST: BufferKind("encoded gradient at rest", source=REST, is_consumed=True),
    FINAL_SUMMED: BufferKind("decoded final sum", source=FINISHING),
}


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The properties of the ops of one kind, in some phases of a step. A buffer is a key of :data:`BUFFERS`, of the op's unit.

    Attributes:
        kind: name of the kind.
        phases: phases of a step with such ops.
        stream: stream on which the ops run.
        when: names of fields of :class:`UnitFacts`. A unit has such ops if one of these fields is not 0 or empty; ``()``: all.
        events: kinds of events. At each event of these kinds one such op is issued; ``()``: the compiler decides.
        follows: another kind. An op of this record is issued after each op of kind ``follows``; empty: the emitter decides.
        reads: buffers that have to be filled before the op.
        joins: buffer that is being filled. The op waits until it is filled, so that compute may use the buffer afterwards.
        fills: buffer that is filled when the op ends.
        changes: buffer that the op changes in place.
        frees: buffer that is free after the op.
        opens: whether the op may be the first to write a gradient at rest, to which later ops add.
        calls: name of the field of :class:`UnitFacts` with the op's collectives.
        codes: name of the UnitFacts field with the bytes that the op itself encodes or decodes; see [Note: codecs].
        casts: name of the UnitFacts field with the bytes of summands that the op casts and adds.
        cost: the quantity on which the op's time depends.
        may_wait: whether the host may block in the op.
        look: name and colour in pictures.
    """

    kind: str
    phases: tuple[Phase, ...]
    stream: Stream = "compute"
    when: tuple[str, ...] = ()
    events: tuple[EventKind, ...] = ()
    follows: str = ""
    reads: tuple[str, ...] = ()
    joins: str = ""
    fills: str = ""
    changes: str = ""
    frees: str = ""
    opens: bool = False
    calls: str = ""
    codes: str = ""
    casts: str = ""
    cost: Cost = ""
    may_wait: bool = False
    look: Look = "unit"

    @property
    def has_unit(self) -> bool:
        """Whether each op of this kind belongs to a unit. The optimizer's update, for example, does not."""
        leaders = [each for each in OPS.values() if each.kind == self.follows]
        return not any(event in EVENTS_WITHOUT_UNIT for event in self.events) and all(each.has_unit for each in leaders)

    def has_ops_for(self, facts: UnitFacts) -> bool:
        """Return whether the unit with ``facts`` has ops of this kind."""
        return not self.when or any(getattr(facts, name) for name in self.when)

    def collectives(self, facts: UnitFacts) -> tuple[Call, ...]:
        """Return the collectives of an op of this kind, for the unit with ``facts``."""
        return getattr(facts, self.calls) if self.calls else ()

    def nbytes_through_codec(self, facts: UnitFacts) -> int:
        """Return the encoded bytes that an op of this kind encodes or decodes, for the unit with ``facts``."""
        return getattr(facts, self.codes) if self.codes else 0

    def nbytes_cast_in_sums(self, facts: UnitFacts) -> int:
        """Return the bytes, before the cast, of summands that an op of this kind casts, for the unit with ``facts``."""
        return getattr(facts, self.casts) if self.casts else 0

    @cached_property
    def memory_buffer_kind(self) -> str:
        """The kind of buffer whose address ops of this kind have in ``Op.memory``; empty if they have none."""
        used = (each for each in (self.frees, self.changes, self.fills) if each)
        return next((each for each in used if BUFFERS[each].size_fact and not BUFFERS[each].is_opened), "")

    def nbytes(self, facts: UnitFacts) -> int:
        """Return the bytes of ``Op.memory`` of an op of this kind, for the unit with ``facts``."""
        return buffer_nbytes(self.memory_buffer_kind, facts) if self.memory_buffer_kind else 0

    def filled_buffer(self, facts: UnitFacts) -> str:
        """Return ``fills``. If that buffer has 0 bytes, an op of a kind with ``opens`` fills the gradient at rest instead."""
        return REST if self.opens and self.fills == self.memory_buffer_kind and not self.nbytes(facts) else self.fills


def buffer_nbytes(buffer: str, facts: UnitFacts) -> int:
    """Return the bytes of a unit's buffer in the arena; 0 if the buffer is not in the arena."""
    return int(getattr(facts, BUFFERS[buffer].size_fact)) if BUFFERS[buffer].size_fact else 0


_USE_PHASES: tuple[Phase, ...] = ("forward", "backward")
GATHER = OpSpec(
    "gather", _USE_PHASES, "gather", when=("gathered",), reads=(RESTING,), fills=PARAMS, calls="gather", cost="send"
)
UPDATE_GATHER = OpSpec(
    "gather",
    ("update",),
    "gather",
    when=("update_gather",),
    fills=RESTING,
    calls="update_gather",
    codes="update_coded",
    cost="send",
)
WAIT = OpSpec("wait", _USE_PHASES, when=("gathered",), joins=PARAMS, may_wait=True, look="hatched")
UPDATE_WAIT = OpSpec("wait", ("update",), when=("update_gather",), joins=RESTING, may_wait=True, look="hatched")
DECODE = OpSpec(
    "decode",
    _USE_PHASES,
    when=("decoded",),
    follows="wait",
    reads=(PARAMS,),
    fills=DECODED,
    codes="decoded",
    cost="code",
    look="coded",
)
COMPUTE = OpSpec("compute", _USE_PHASES, events=("forward", "backward"), reads=(RESTING, PARAMS, DECODED), cost="compute")
RELEASE = OpSpec("release", (*_USE_PHASES, "update"), when=("gathered",), frees=PARAMS, look="faint")
CAST = OpSpec("cast", ("backward",), fills=OUTGOING, opens=True, cost="memory", look="dark")
_ENCODE_BASE = OpSpec("encode", ("backward",), "reduce", cost="code", look="coded")
ENCODE = replace(_ENCODE_BASE, when=("reduce_encoded",), reads=(OUTGOING,), fills=ENCODED, codes="reduce_encoded")
FINAL_ENCODE = replace(
    _ENCODE_BASE, phases=("finish",), when=("finish_encoded",), reads=(REST,), fills=ENCODED_REST, codes="finish_encoded"
)
_REDUCE_BASE = OpSpec("reduce", ("backward",), "reduce", cost="send")
REDUCE = replace(
    _REDUCE_BASE,
    when=("reduce",),
    reads=(ENCODED,),
    changes=OUTGOING,
    opens=True,
    calls="reduce",
    codes="reduce_recoded",
    casts="reduce_cast",
)
FINAL_REDUCE = replace(
    _REDUCE_BASE,
    phases=("finish",),
    when=("finish",),
    reads=(REST, ENCODED_REST),
    fills=FINISHING,
    calls="finish",
    codes="finish_recoded",
    casts="finish_cast",
)
_DECODE_SUM_BASE = OpSpec("decode_sum", ("backward",), "reduce", cost="code", may_wait=True, look="coded")
DECODE_SUM = replace(_DECODE_SUM_BASE, when=("reduce_decoded",), reads=(OUTGOING,), fills=SUMMED, codes="reduce_decoded")
FINAL_DECODE_SUM = replace(
    _DECODE_SUM_BASE,
    phases=("finish",),
    when=("finish_decoded",),
    reads=(FINISHING,),
    fills=FINAL_SUMMED,
    codes="finish_decoded",
)
_ACCUMULATE_BASE = OpSpec("accumulate", ("backward",), "reduce", cost="memory", may_wait=True, look="dark")
ACCUMULATE = replace(_ACCUMULATE_BASE, when=("reduce", "outgoing"), reads=(SUMMED,), fills=REST, frees=OUTGOING, opens=True)
FINAL_ACCUMULATE = replace(
    _ACCUMULATE_BASE, phases=("finish",), when=("finish",), reads=(FINAL_SUMMED,), fills=FINAL, frees=FINISHING, cost=""
)
FETCH = OpSpec("fetch", ("update",), "host", when=("host",), fills=STATE, cost="copy")
UPDATE = OpSpec("update", ("update",), events=("update",), reads=(FINAL, STATE), changes=RESTING, cost="update", look="grey")
OFFLOAD = OpSpec("offload", ("update",), "host", when=("host",), frees=STATE, cost="copy")

OPS: dict[tuple[str, Phase], OpSpec] = {}
"""All records, by kind and phase."""


def kinds_where(chosen: Callable[[OpSpec], bool] = lambda spec: True) -> tuple[str, ...]:
    """Return the kinds of ops with an OpSpec for which ``chosen`` returns True, in the order of declaration."""
    return tuple(dict.fromkeys(spec.kind for spec in OPS.values() if chosen(spec)))


def expected_phases_text(kind: str) -> str:
    """Return text for an error: the phases in which ops of a kind may be; for an unknown kind, how to declare it."""
    phases = [phase for each, phase in OPS if each == kind]
    return " or ".join(map(repr, phases)) or f"a kind that is declared: give `declare_op()` the OpSpec of {kind!r} first"


def declare_op(spec: OpSpec) -> None:
    """Declare a new kind of ops, or new phases of a kind. See [Note: a new kind].

    Raises:
        ScheduleError: a field has an impossible value, or the kind has a record for one of these phases already.
    """
    if why := describe_wrong_field(spec) or _why_fields_invalid(spec):
        raise ScheduleError(f"declare_op(): kind {spec.kind!r}: {why}. Correct this field of the OpSpec.")
    for phase in spec.phases:
        if (spec.kind, phase) in OPS:
            what = f"there are ops of kind {spec.kind!r} in phase {phase!r} already."
            raise ScheduleError(f"declare_op(): {what} Give the OpSpec another kind, or other phases.")
    OPS.update({(spec.kind, phase): spec for phase in spec.phases})


def _why_fields_invalid(spec: OpSpec) -> str:
    """Return what is wrong with the first field of ``spec`` that is empty or has an unknown name; "" if all are right."""
    for field in ("kind", "phases"):
        if not getattr(spec, field):
            return f"{field} is {getattr(spec, field)!r}, expected a value that is not empty"
    facts = {each.name: each.type for each in fields(UnitFacts)}
    leaders = [kind for kind in kinds_where() if kind != spec.kind and all((kind, phase) in OPS for phase in spec.phases)]
    known: dict[str, Sequence[str]] = {"when": [*facts], "follows": leaders}
    known["calls"] = [name for name in facts if facts[name] == tuple[Call, ...]]
    known["codes"] = known["casts"] = [name for name in facts if facts[name] is int]
    known |= dict.fromkeys(("reads", "joins", "fills", "changes", "frees"), (*BUFFERS,))
    for field, names in known.items():
        value = getattr(spec, field)
        allowed = (*names, "") if isinstance(value, str) else names
        if {*([value] if isinstance(value, str) else value)} - {*allowed}:
            why = ": another kind, with ops in all of its phases" if field == "follows" else ""
            return f"{field} is {value!r}, expected {' or '.join(map(repr, allowed))}{why}"
    return ""


for _spec in (
    *(GATHER, WAIT, DECODE, COMPUTE, RELEASE),
    *(CAST, ENCODE, REDUCE, DECODE_SUM, ACCUMULATE, FINAL_ENCODE, FINAL_REDUCE, FINAL_DECODE_SUM, FINAL_ACCUMULATE),
    *(FETCH, UPDATE, OFFLOAD, UPDATE_GATHER, UPDATE_WAIT),
):
    declare_op(_spec)
