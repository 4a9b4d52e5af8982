"""An oracle for schedules: it runs their ops over symbolic values, and says whether a step computes what its program says.

It shares nothing with the verifier. Every stream runs its ops in order, each after those in its ``after``; beside that,
streams run in orders of priority such that of any two ops that nothing orders each is first in one of them. What is in
memory is a tag for each run of 64 bytes. Two steps run one after the other, and what the first one hands on is used.
"""

from itertools import permutations

GRAIN = 64
FREE = "free"


class WrongValue(Exception):
    """What the oracle has seen."""


def find_wrong(schedule):
    """What goes wrong in a step of a schedule; None if nothing does. Ops may be in any order and have any fields."""
    try:
        _check_rules(schedule)
        copies = any(op.stream == "host" for op in schedule.ops)
        for order in permutations(("compute", "gather", "reduce")):
            for priority in ((*order, "host"), ("host", *order))[: 1 + copies]:
                _Machine(schedule, priority).run()
    except WrongValue as wrong:
        return str(wrong)
    return None


def _check_rules(schedule):
    """What no value shows: gradients of a use exist at the end of its backward alone, and ops have phases of their kind."""
    events = schedule.program.events
    phases = {"compute": ("forward", "backward"), "cast": ("backward",), "update": ("update",)}
    phases |= dict.fromkeys(("gather", "wait"), ("forward", "backward", "update"))
    phases |= dict.fromkeys(("encode", "reduce", "decode_sum", "accumulate"), ("backward", "finish"))
    phases |= {"decode": ("forward", "backward")}
    phases |= dict.fromkeys(("fetch", "offload"), ("update",))
    units = [facts.name for facts in schedule.program.units]
    for i, op in enumerate(schedule.ops):
        if op.unit not in units and op.kind != "update":
            raise WrongValue(f"op {i}, {op}: about nothing")
        if op.phase not in phases.get(op.kind, (op.phase,)):
            raise WrongValue(f"op {i}, {op}: no phase of this kind")
        if not all(0 <= j < len(schedule.ops) and j != i for j in op.after) or (
            i and op.event_index < schedule.ops[i - 1].event_index
        ):
            raise WrongValue(f"op {i}, {op}: out of order")
        if op.kind == "cast":
            event = events[op.event_index]
            if (event.kind, event.unit, event.use_index, event.no_gradient) != ("backward_end", op.unit, op.use_index, False):
                raise WrongValue(f"op {i}, {op}: its gradient is not there at event {op.event_index}")


class _Machine:
    def __init__(self, schedule, priority):
        self.schedule, self.ops, self.priority = schedule, schedule.ops, priority
        self.events = schedule.program.events
        self.facts = {facts.name: facts for facts in schedule.program.units}
        self.cells = [FREE] * (schedule.arena // GRAIN + 1)
        self.version = 0
        self.at_rest = dict.fromkeys(self.facts, 0)  # by unit, the version of its parameters where they rest
        self.state = dict.fromkeys(self.facts, 0)  # by unit, the version of its optimizer state
        self.on_host = dict.fromkeys(self.facts, 0)  # the version that is there
        self.on_device = {}  # the same, of those that are there
        self.decoded, self.collected = {}, {}  # by unit, what its decoded parameters are of; where its gradient was cast
        self.ends = [i for i, event in enumerate(self.events) if event.kind == "microbatch_end"]
        self.asked = [i for i, event in enumerate(self.events) if event.kind == "reduce"]
        self.due = {}  # by unit, the (event, use) of its gradients
        for i, event in enumerate(self.events):
            if event.kind == "backward_end" and self.facts[event.unit].trainable and not event.no_gradient:
                self.due.setdefault(event.unit, []).append((i, event.use_index))
        self.bucket = {}
        for i, op in enumerate(self.ops):
            self.bucket.setdefault((op.kind, op.bucket) if op.bucket != -1 else i, []).append(i)
        self.same = {i: members for members in self.bucket.values() for i in members}
        self.first_casts, begun = set(), set()
        for i, op in enumerate(self.ops):
            if op.kind == "cast" and op.unit not in begun:
                self.first_casts.add(i)
                begun.add(op.unit)
            elif op.phase == "backward" and op.kind == "accumulate":
                begun.discard(op.unit)

    def run(self):
        """Two steps, with what the one before them has left under way: gathers behind its last update."""
        last = max((i for i, op in enumerate(self.ops) if op.kind == "update"), default=len(self.ops))
        self.tail = [i for i, op in enumerate(self.ops) if i > last and op.kind == "gather"]
        self.queues = {stream: [] for stream in self.priority}
        self.done = {(-1, i) for i in range(len(self.ops)) if i not in self.tail}
        self.done |= {(-2, i) for i in range(len(self.ops))}  # which gathers of the tail may wait for
        self.queues["gather"] += [(-1, i) for i in self.tail]
        for step in range(2):
            self.open_uses, self.gradients, self.finals, self.opened = {}, {}, {}, {}
            self.encoded, self.summed = {}, {}  # by unit and phase, of what
            for i, op in enumerate(self.ops):
                self.queues[op.stream].append((step, i))
            while any(each == step and i not in self.tail for queue in self.queues.values() for each, i in queue):
                self.start_one()
            self.end()

    def start_one(self):
        for stream in self.priority:
            for step, i in self.queues[stream][:1]:
                if self.may_start(step, i):
                    self.queues[stream].pop(0)
                    self.do(i, self.ops[i])
                    self.done.add((step, i))
                    return
        raise WrongValue("a deadlock")

    def may_start(self, step, i):
        """Whether all that it waits for is over; a bucket is one: nothing of it starts before all of it can."""
        for k in self.same[i]:
            if any((step - (j > k), m) not in self.done for j in self.ops[k].after for m in self.same[j]):
                return False
            earlier = [(s, j) for s, j in self.queues[self.ops[k].stream] if (s, j) < (step, k) and j not in self.same[i]]
            if earlier:
                return False
        return True

    def cells_of(self, memory):
        if memory.start < 0 or memory.stop > self.schedule.arena or memory.start % GRAIN or memory.nbytes % GRAIN:
            raise WrongValue(f"{memory} is outside of the arena, or cut")
        return range(memory.start // GRAIN, memory.stop // GRAIN)

    def write(self, memory, tag):
        for cell in self.cells_of(memory):
            self.cells[cell] = tag

    def read(self, memory, what):
        tags = {self.cells[cell] for cell in self.cells_of(memory)}
        if len(tags) != 1:
            raise WrongValue(f"{what}: {memory} has {tags}")
        return tags.pop()

    def expect(self, memory, tag, what):
        found = self.read(memory, what)
        if found != tag:
            raise WrongValue(f"{what}: {memory} has {found}, expected {tag}")

    def do(self, i, op):
        getattr(self, f"do_{op.kind}")(i, op)
        for key, (memory, last) in list(self.open_uses.items()):
            if op.stream == "compute" and op.event_index >= last:
                del self.open_uses[key]
            else:
                self.expect(memory, ("params", key[0], self.version), f"after op {i}, {op}: in use since event {key[1]}")

    def do_gather(self, i, op):
        if op.phase == "update":
            self.at_rest[op.unit] = self.version
        elif op.memory is None or op.memory.nbytes != self.facts[op.unit].gathered:
            raise WrongValue(f"op {i}, {op}: a copy of another size")
        else:
            self.write(op.memory, ("params", op.unit, self.at_rest[op.unit]))
            self.decoded.pop(op.unit, None)

    def do_wait(self, i, op):
        pass

    def slot(self, i, op):
        slots = {other.memory for other in self.ops if (other.kind, other.unit) == ("gather", op.unit) and other.memory}
        if len(slots) != 1:
            raise WrongValue(f"op {i}, {op}: saved tensors point at one of {slots}")
        return slots.pop()

    def do_decode(self, i, op):
        if not self.facts[op.unit].decoded:
            raise WrongValue(f"op {i}, {op}: nothing is encoded")
        self.decoded[op.unit] = self.read(self.slot(i, op), f"op {i}, {op}")

    def do_encode(self, i, op):
        if not getattr(self.facts[op.unit], f"{'finish' if op.phase == 'finish' else 'reduce'}_encoded"):
            raise WrongValue(f"op {i}, {op}: it travels as it is")
        if op.phase == "finish":
            self.encoded[op.unit, op.phase] = op.event_index, self.gradients.get(op.unit, frozenset())
        elif op.unit not in self.collected:
            raise WrongValue(f"op {i}, {op}: nothing was cast")
        else:
            self.encoded[op.unit, op.phase] = op.event_index, self.read(self.collected[op.unit], f"op {i}, {op}")

    def take_encoded(self, i, op, encoded, what):
        if encoded and self.encoded.pop((op.unit, op.phase), None) != (op.event_index, what):
            raise WrongValue(f"op {i}, {op}: sends something else than {what}, or what another event has encoded")

    def do_decode_sum(self, i, op):
        if not getattr(self.facts[op.unit], f"{'finish' if op.phase == 'finish' else 'reduce'}_decoded"):
            raise WrongValue(f"op {i}, {op}: nothing is encoded")
        reduced = [
            o
            for k, o in enumerate(self.ops)
            if (o.kind, o.phase, o.unit) == ("reduce", op.phase, op.unit) and o.event_index <= op.event_index
        ]
        if not reduced:
            raise WrongValue(f"op {i}, {op}: nothing was sent")
        memory = reduced[-1].memory
        self.summed[op.unit, op.phase] = self.read(memory, f"op {i}, {op}") if memory else ("finishing", op.unit, None)

    def take_sum(self, i, op, decoded, what):
        found = self.summed.pop((op.unit, op.phase), None)
        if decoded and found != what and (found is None or op.memory):
            raise WrongValue(f"op {i}, {op}: adds {found}, expected {what}")

    def do_compute(self, i, op):
        event = self.events[op.event_index]
        if (event.kind, event.unit, event.use_index) != (op.phase, op.unit, op.use_index):
            raise WrongValue(f"op {i}, {op}: no such use")
        if not self.facts[op.unit].gathered:
            if self.at_rest[op.unit] != self.version:
                raise WrongValue(f"op {i}, {op}: stale parameters")
            return
        memory = self.slot(i, op)
        self.expect(memory, ("params", op.unit, self.version), f"op {i}, {op}")
        if self.facts[op.unit].decoded and self.decoded.get(op.unit) != ("params", op.unit, self.version):
            raise WrongValue(f"op {i}, {op}: computes with {self.decoded.get(op.unit)}, decoded")
        kind = "forward_end" if op.phase == "forward" else "backward_end"
        last = next(
            k
            for k, end in enumerate(self.events)
            if k > op.event_index and (end.kind, end.unit, end.use_index) == (kind, op.unit, op.use_index)
        )
        self.open_uses[op.unit, op.event_index] = memory, last

    def do_release(self, i, op):
        if op.memory is not None:
            self.write(op.memory, FREE)

    def add(self, i, op, uses):
        """To the gradient at rest."""
        facts = self.facts[op.unit]
        here = self.gradients.get(op.unit, frozenset())
        if facts.rest:
            if op.opens:
                self.opened[op.unit] = op.opens
            elif op.unit not in self.opened:
                raise WrongValue(f"op {i}, {op}: nothing is open")
            else:
                self.expect(self.opened[op.unit], ("rest", op.unit, here), f"op {i}, {op}")
        if here & uses:
            raise WrongValue(f"op {i}, {op}: {here & uses} are added twice")
        self.gradients[op.unit] = here | uses
        if facts.rest:
            if self.opened[op.unit].nbytes != facts.rest:
                raise WrongValue(f"op {i}, {op}: another size")
            self.write(self.opened[op.unit], ("rest", op.unit, here | uses))

    def do_cast(self, i, op):
        one = frozenset([(op.event_index, op.use_index)])
        if not self.facts[op.unit].outgoing:
            self.add(i, op, one)
            return
        if op.memory is None or op.memory.nbytes != self.facts[op.unit].outgoing:
            raise WrongValue(f"op {i}, {op}: no place for it")
        before = frozenset()
        if i not in self.first_casts:
            tag = self.read(op.memory, f"op {i}, {op}")
            if tag[:2] != ("out", op.unit):
                raise WrongValue(f"op {i}, {op}: adds to {tag}")
            before = tag[2]
        if before & one:
            raise WrongValue(f"op {i}, {op}: twice")
        self.write(op.memory, ("out", op.unit, before | one))
        self.collected[op.unit] = op.memory

    def microbatch(self, op):
        """What the unit's gradient of the microbatch that an op belongs to is made of."""
        number = sum(end < op.event_index for end in self.ends)
        start = self.ends[number - 1] if number else -1
        stop = self.ends[number] if number < len(self.ends) else len(self.events)
        return frozenset((k, use) for k, use in self.due.get(op.unit, ()) if start < k < stop)

    def so_far(self, unit, event):
        last = max((end for end in self.ends if end < event), default=-1)
        return frozenset((k, use) for k, use in self.due.get(unit, ()) if k < last)

    def do_reduce(self, i, op):
        if op.phase == "finish":
            number = sum(event < op.event_index for event in self.asked)
            if number == len(self.asked):
                raise WrongValue(f"op {i}, {op}: nobody wants it")
            wanted = self.so_far(op.unit, self.asked[number])
            if self.gradients.get(op.unit, frozenset()) != wanted:
                raise WrongValue(f"op {i}, {op}: sends {self.gradients.get(op.unit)} instead of {wanted}")
            if self.facts[op.unit].rest and wanted:
                self.expect(self.opened[op.unit], ("rest", op.unit, wanted), f"op {i}, {op}")
            self.take_encoded(i, op, self.facts[op.unit].finish_encoded, wanted)
            if op.memory:
                self.write(op.memory, ("finishing", op.unit, wanted))
            return
        if op.memory is None:
            raise WrongValue(f"op {i}, {op}: reads nothing")
        wanted = self.microbatch(op)
        self.expect(op.memory, ("out", op.unit, wanted), f"op {i}, {op}")
        self.take_encoded(i, op, self.facts[op.unit].reduce_encoded, ("out", op.unit, wanted))
        self.write(op.memory, ("sum", op.unit, wanted))
        if op.opens:
            self.add(i, op, wanted)

    def do_accumulate(self, i, op):
        if op.phase == "finish":
            number = sum(event < op.event_index for event in self.asked)
            if number == len(self.asked):
                raise WrongValue(f"op {i}, {op}: nobody wants it")
            wanted = self.so_far(op.unit, self.asked[number])
            if op.memory:
                self.expect(op.memory, ("finishing", op.unit, wanted), f"op {i}, {op}")
                self.write(op.memory, FREE)
            if not any((o.kind, o.phase, o.unit) == ("reduce", "finish", op.unit) for k, o in enumerate(self.ops) if k < i):
                raise WrongValue(f"op {i}, {op}: nothing was reduced")
            self.take_sum(i, op, self.facts[op.unit].finish_decoded, ("finishing", op.unit, wanted))
            self.finals[op.unit, number] = wanted
            return
        if op.memory is None:
            raise WrongValue(f"op {i}, {op}: reads nothing")
        wanted = self.microbatch(op)
        has_left = "sum" if self.facts[op.unit].reduce else "out"
        self.expect(op.memory, (has_left, op.unit, wanted), f"op {i}, {op}")
        self.take_sum(i, op, self.facts[op.unit].reduce_decoded, (has_left, op.unit, wanted))
        opened_by_reduce = [
            k
            for k, o in enumerate(self.ops)
            if (o.kind, o.phase, o.unit) == ("reduce", "backward", op.unit) and o.opens and self.microbatch(o) == wanted
        ]
        if not opened_by_reduce:
            self.add(i, op, wanted)
        self.write(op.memory, FREE)

    def do_fetch(self, i, op):
        if op.unit in self.on_device:
            raise WrongValue(f"op {i}, {op}: it is on the device")
        self.on_device[op.unit] = self.on_host[op.unit]

    def do_offload(self, i, op):
        if op.unit not in self.on_device:
            raise WrongValue(f"op {i}, {op}: it is not on the device")
        self.on_host[op.unit] = self.on_device.pop(op.unit)

    def do_update(self, i, op):
        if self.events[op.event_index].kind != "update":
            raise WrongValue(f"op {i}, {op}: no update here")
        before = max((k for k, event in enumerate(self.events[: op.event_index]) if event.kind == "update"), default=-1)
        for event in self.events[before + 1 : op.event_index]:
            if event.kind == "fetch":
                if self.on_device.get(event.unit) != self.state[event.unit]:
                    raise WrongValue(f"op {i}, {op}: state of {event.unit!r} is {self.on_device.get(event.unit)}")
                self.state[event.unit] += 1
                self.on_device[event.unit] = self.state[event.unit]
        self.check_gradients(op.event_index, f"op {i}, {op}")
        self.version += 1
        for unit, facts in self.facts.items():
            if not facts.update_gather:
                self.at_rest[unit] = self.version

    def check_gradients(self, event, what):
        """At an update, or at the end of a step, all that was asked for is there, and nothing else."""
        numbers = [n for n, asked in enumerate(self.asked) if asked < event]
        for unit, facts in self.facts.items():
            if not facts.trainable or not numbers:
                continue
            wanted = self.so_far(unit, self.asked[numbers[-1]])
            if facts.finish and self.finals.get((unit, numbers[-1])) != wanted:
                raise WrongValue(f"{what}: {unit!r} is updated by {self.finals.get((unit, numbers[-1]))}, expected {wanted}")
            if not facts.finish and not self.gradients.get(unit, frozenset()) >= wanted:
                raise WrongValue(f"{what}: {unit!r} is updated by {self.gradients.get(unit)}, expected {wanted}")

    def end(self):
        """Gradients are at rest in full at the end of the step, and were so when the host looked at them."""
        self.check_gradients(len(self.events), "at the end")
        if self.on_device or self.on_host != self.state:
            raise WrongValue(f"at the end state is on the device: {self.on_device}, or old: {self.on_host}")
        for unit in self.due:
            wanted = self.so_far(unit, len(self.events))
            if self.gradients.get(unit, frozenset()) != wanted:
                raise WrongValue(f"at the end {unit!r} has {self.gradients.get(unit)}, expected {wanted}")
            if self.facts[unit].rest and wanted:
                self.expect(self.opened[unit], ("rest", unit, wanted), "at the end")
        for i, op in enumerate(self.ops):
            late = [end for end in self.ends if end < op.event_index]
            if op.phase == "backward" and op.kind in ("reduce", "accumulate") and late and not self.microbatch(op):
                raise WrongValue(f"op {i}, {op}: after its microbatch")
