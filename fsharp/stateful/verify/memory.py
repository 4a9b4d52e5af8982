"""Checks of :func:`~fsharp.schedules.verify`: overlaps in the arena, state in host memory, decoded copies, policy limits."""

from bisect import bisect_left
from collections import Counter
from typing import Any

from fsharp.stateful.schedule.ops import BUFFERS, FINISHING, OPS, OUTGOING, PARAMS, REST, STATE, OpSpec, buffer_nbytes
from fsharp.stateful.schedule.policy import MAX_FINAL_REDUCTIONS, MAX_REDUCTIONS
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule
from fsharp.stateful.verify.check import HappensBefore, ScheduleCheckPass, op_error

BufferKey = tuple[str, str]
"""A key of ``BUFFERS``, and the name of a unit."""


class OffloadedStateCheck(ScheduleCheckPass):
    """Check that offloaded optimizer state is on the device for its update, and is copied back once afterwards."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.fetched: dict[str, int] = {}  # by unit, its fetch, for the update to come
        self.due: dict[str, int] = {}  # by unit, its fetch, until it is offloaded
        self.updated: int | None = None
        self.last_update_at = 0  # the event of the last update
        self.computed: int | None = None  # the last op of compute

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record the copies of optimizer state to the device and back. Raise an error if an update reads state on the host."""
        if op.stream == "compute":
            self.computed = i
        if spec.fills == STATE:
            event = self.events[op.event_index]
            if (event.kind, event.unit) != ("fetch", op.unit) or op.unit in self.fetched:
                raise op_error(i, op, "is not at a fetch event of its unit, or comes twice.", "one for each fetch event")
            self.check_is_before(self.computed, i, "may fill memory still in use by")
            self.fetched[op.unit] = i
        if STATE in spec.reads:
            self._check_offloaded()
            asked = {event.unit for event in self.events[self.last_update_at : op.event_index] if event.kind == "fetch"}
            for unit in sorted(asked - set(self.fetched)):
                raise op_error(i, op, f"updates {unit!r}, whose state is in host memory.", f"a fetch of {unit!r} before it")
            for j in self.fetched.values():
                self.check_is_before(j, i, "may read state before the end of")
            self.updated, self.last_update_at = i, op.event_index
            self.due, self.fetched = self.fetched, {}
        if spec.frees == STATE:
            if op.unit not in self.due or op.event_index != self.last_update_at:
                what = "copies state that was not fetched, or is back already."
                raise op_error(i, op, what, "one for each fetch, at the update")
            self.check_is_before(self.updated, i, "may copy state before the end of")
            del self.due[op.unit]

    def _check_offloaded(self) -> None:
        for unit, j in self.due.items():
            what = f"the state of {unit!r} stays on the device."
            raise op_error(j, self.order.ops[j], what, f"an offload of {unit!r} after the update")

    def check_end(self) -> None:
        """Check that all state is back in host memory, and that each fetch was followed by an update."""
        self._check_offloaded()
        for unit, j in self.fetched.items():
            what = f"no update follows for which {unit!r} is fetched."
            raise op_error(j, self.order.ops[j], what, "an update after it")


class ByteMap:
    """A value for each byte of the arena: ``values[k]`` for the bytes from ``starts[k]`` to ``starts[k + 1]``.

    The compiler has its own class of maps: a fault in a shared class would deceive the compiler and the verifier alike.
    """

    def __init__(self) -> None:
        self.starts, self.values = [0], list[Any]([None])

    def _runs(self, memory: Memory) -> slice:
        """Cut runs at both ends of ``memory``, and return the slice of the runs in it."""
        for at in (memory.start, memory.stop):
            k = bisect_left(self.starts, at)
            if self.starts[k : k + 1] != [at]:
                self.starts.insert(k, at)
                self.values.insert(k, self.values[k - 1])
        return slice(bisect_left(self.starts, memory.start), bisect_left(self.starts, memory.stop))

    def values_in(self, memory: Memory) -> list[Any]:
        """Return the values of the bytes of ``memory``, without None."""
        return [value for value in self.values[self._runs(memory)] if value is not None]

    def set_value(self, memory: Memory, value: Any) -> None:
        """Set the value of all bytes of ``memory``."""
        runs = self._runs(memory)
        self.starts[runs] = [memory.start] * (runs.start < runs.stop)
        self.values[runs] = [value] * (runs.start < runs.stop)


class ArenaOverlapCheck(ScheduleCheckPass):
    """Check that no byte of the arena has two owners at a time. Earlier checks have seen each buffer filled and freed once."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.live: dict[BufferKey, tuple[int, Memory | None]] = {}  # the op that filled a buffer, and where
        self.owners = ByteMap()  # of live bytes: the buffer, and the op that filled it
        self.freed = ByteMap()  # of freed bytes: the last ops that filled and freed them
        self.slots: dict[str, Memory] = {}
        self.changed: dict[BufferKey, int] = {}  # the op that last filled or changed a buffer
        self.readers: dict[BufferKey, list[int]] = {}  # ops that have read a buffer since its last change
        for unit, i in order.carried_gathers().items():
            self._mark_live(i, (PARAMS, unit), order.ops[i].memory)

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record the owner and the readers of the bytes that ``op`` uses. Raise an error if two owners overlap in time.

        Other errors: a read before the fill, a change or free during a read, a moved buffer, a gradient opened twice or never.
        """
        self._check_filled_before_reads(i, op, spec)
        self._check_buffer_use(i, op, spec)
        self._check_opens(i, op, spec)

    def _mark_live(self, i: int, key: BufferKey, memory: Memory | None) -> None:
        self.live[key], self.changed[key] = (i, memory), i
        if memory:
            self.owners.set_value(memory, (key, i))

    def _check_opens(self, i: int, op: Op, spec: OpSpec) -> None:
        """Check that one op opens the memory of a gradient at rest (``Op.opens``): the first writer, or an earlier op."""
        facts, key = self.facts[op.unit], (REST, op.unit)
        if op.opens:
            if key in self.live:
                at = self.live[key][0]
                raise op_error(i, op, f"opens what op {at}, {self.order.ops[at]}, has opened.", "one op that opens it")
            self._check_can_fill(i, op, op.opens)
            self._mark_live(i, key, op.opens)
        elif spec.filled_buffer(facts) == REST and facts.rest and key not in self.live:
            what = "writes a gradient at rest whose memory no op has opened."
            raise op_error(i, op, what, "memory in its `opens`, or in the `opens` of an earlier op")

    def _check_filled_before_reads(self, i: int, op: Op, spec: OpSpec) -> None:
        """Raise an error if a buffer that an op reads is empty or still changes. ``GradientCheck`` checks gradients at rest."""
        facts = self.facts[op.unit]
        for buffer in [each for each in spec.reads if not BUFFERS[each].is_opened and buffer_nbytes(each, facts)]:
            key, description = (buffer, op.unit), BUFFERS[buffer].description
            if key not in self.live:
                raise op_error(i, op, f"nothing has filled the {description} that it reads.", "an op before it")
            self.check_is_before(self.changed[key], i, f"may read the {description} before the end of")
            self.readers.setdefault(key, []).append(i)

    def _check_buffer_use(self, i: int, op: Op, spec: OpSpec) -> None:
        if op.memory is None:
            return
        fills, key = spec.fills == spec.memory_buffer_kind, (spec.memory_buffer_kind, op.unit)
        buffer, readers = BUFFERS[spec.memory_buffer_kind], self.readers.get(key, [])
        for j in readers:
            if j != i:
                self.check_is_before(j, i, f"changes or frees the {buffer.description} that may still be read by")
        self.readers[key] = [i] if i in readers else []
        self.changed[key] = i
        if fills and buffer.has_fixed_address and self.slots.setdefault(op.unit, op.memory) != op.memory:
            what = "the unit's copy changes its address within a step, and saved tensors point at the old one."
            raise op_error(i, op, what, f"{self.slots[op.unit]}")
        if key not in self.live and not fills:
            raise op_error(i, op, f"nothing has filled the {buffer.description} that it uses.", "an op before it")
        if key not in self.live:
            self._check_can_fill(i, op, op.memory)
            self._mark_live(i, key, op.memory)
        elif self.live[key][1] != op.memory:
            what = f"its memory is not the memory that op {self.live[key][0] % len(self.order.ops)} has filled."
            raise op_error(i, op, what, f"{self.live[key][1]}")
        if spec.frees == spec.memory_buffer_kind:
            filled, _ = self.live.pop(key)
            self.owners.set_value(op.memory, None)
            # The op that filled these bytes has waited for earlier frees, so the last one is enough.
            self.freed.set_value(op.memory, (filled, i))

    def _check_can_fill(self, i: int, op: Op, memory: Memory) -> None:
        for (buffer, unit), j in self.owners.values_in(memory):
            since = j % len(self.order.ops)
            what = f"fills memory in which the {BUFFERS[buffer].description} of {unit!r} is live, since op {since}."
            expected = f"no byte of {self.live[buffer, unit][1]}"
            raise op_error(i, op, what, expected, "Move the op's memory, or release the other buffer first.")
        for filled, freed in self.freed.values_in(memory):
            for j in (freed, filled):
                self.check_is_before(j, i, "may fill memory still in use by")


class PolicyLimitsCheck(ScheduleCheckPass):
    """Check the policy's limit of resident units, and limits of reductions under way. The units of a bucket count as one."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.group_of = {unit: _unit_or_bucket(order.ops[i]) for unit, i in order.carried_gathers().items()}  # by resident unit
        self.in_use = Counter[str]()  # by unit, uses under way
        self.pinned = Counter[str]()  # by unit, uses under way, and uses whose backward is to come
        ends = {event.use_index: i for i, event in enumerate(self.events) if event.kind == "backward_end"}
        self.last_ends = ends if self.policy.release != "forward" else {}  # by use that may stay resident, its end
        self.num_events = 0  # events so far
        self.under_way: dict[str, dict[str, str]] = {OUTGOING: {}, FINISHING: {}}  # by unit, the group of its reduction

    def _count_open_uses_until(self, at: int) -> None:
        for i, event in enumerate(self.events[self.num_events : at + 1], self.num_events):
            change = (event.kind in ("forward", "backward")) - (event.kind in ("forward_end", "backward_end"))
            self.in_use[event.unit] += change
            if event.use_index in self.last_ends:
                change += (event.kind == "forward") - (i == self.last_ends[event.use_index])
            self.pinned[event.unit] += change
        self.num_events = max(self.num_events, at + 1)

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Count resident units and reductions under way after the op. Raise an error if their numbers exceed a limit."""
        if spec.fills == PARAMS:
            self._count_open_uses_until(op.event_index)
            self.group_of[op.unit] = _unit_or_bucket(op)
            if op.bucket in {each.bucket for each in self.order.ops[i + 1 : i + 2] if each.kind == op.kind} - {-1}:
                return  # a bucket counts once all of its units are gathered, as any of them may be in use
            kept = {group for unit, group in self.group_of.items() if self.pinned[unit]}
            ahead = set(self.group_of.values()) - kept
            used = {group for unit, group in self.group_of.items() if self.in_use[unit]}
            if ahead and bool(used) + len(ahead) > self.policy.prefetch + 1:  # only the innermost use counts
                what = f"is a unit too many: {sorted(used)} are in use, and {sorted(ahead)} are resident as well."
                raise op_error(i, op, what, f"at most {self.policy.prefetch + 1}, or only units in use", "Gather it later.")
        elif spec.frees == PARAMS:
            self.group_of.pop(op.unit, None)
        elif spec.calls and spec.memory_buffer_kind in self.under_way:
            self.under_way[spec.memory_buffer_kind][op.unit] = _unit_or_bucket(op)
            groups = set(self.under_way[spec.memory_buffer_kind].values())
            most = MAX_FINAL_REDUCTIONS if spec.memory_buffer_kind == FINISHING else MAX_REDUCTIONS
            if len(groups) > most:
                what = f"is a reduction too many: reductions of {sorted(groups)} are under way."
                raise op_error(i, op, what, f"at most {most}", "Accumulate another gradient first.")
        elif spec.frees in self.under_way:
            self.under_way[spec.frees].pop(op.unit, None)


def _unit_or_bucket(op: Op) -> str:
    return op.unit if op.bucket == -1 else f"bucket {op.bucket}"


class DerivedBufferCheck(ScheduleCheckPass):
    """Check before each read of a buffer made from another one (``BufferKind.source``) that it is newer than that one."""

    def __init__(self, schedule: Schedule, order: HappensBefore) -> None:
        super().__init__(schedule, order)
        self.sources = {name: spec.source for name, spec in BUFFERS.items() if spec.source}
        self.makers = {name: [spec for spec in OPS.values() if spec.fills == name] for name in self.sources}
        self.filled: dict[BufferKey, int] = {}  # the op that has filled a buffer

    def check_op(self, i: int, op: Op, spec: OpSpec) -> None:
        """Record which buffers with a source are filled. Raise an error if an op reads such a buffer empty or out of date."""
        facts = self.facts[op.unit]
        for buffer in [each for each in spec.reads if each in self.sources]:
            if any(maker.has_ops_for(facts) for maker in self.makers[buffer]):
                self._check_read(i, op, buffer)
        if spec.fills in self.sources:
            if not spec.has_ops_for(facts):
                raise op_error(i, op, "is of a unit with a plain format.", f"{op.kind} of units whose format is not plain")
            if (spec.fills, op.unit) in self.filled:
                at = self.filled[spec.fills, op.unit]
                raise op_error(i, op, f"happens twice: op {at} has done it.", f"one {op.kind}", "Drop one of them.")
            self.filled[spec.fills, op.unit] = i
        gone = {spec.changes, spec.frees, spec.fills, spec.filled_buffer(facts)} - {""}
        for buffer in [name for name, source in self.sources.items() if source in gone]:
            self.filled.pop((buffer, op.unit), None)

    def _check_read(self, i: int, op: Op, buffer: str) -> None:
        description, maker, is_consumed = BUFFERS[buffer].description, self.makers[buffer][0].kind, BUFFERS[buffer].is_consumed
        if (buffer, op.unit) not in self.filled:
            raise op_error(i, op, f"nothing has filled the {description} that it reads.", f"{maker} {op.unit} before it")
        at = self.filled.pop((buffer, op.unit)) if is_consumed else self.filled[buffer, op.unit]
        self.check_is_before(at, i, f"may read the {description} before the end of")
        filled_at = self.order.ops[at].event_index
        if is_consumed and filled_at != op.event_index:
            what = f"reads the {description}, which op {at} fills at another event."
            remedy = f"Issue both at one event: no event later has the {description}."
            raise op_error(i, op, what, f"event {filled_at}", remedy)
