"""Random programs and policies: units that nest, come back, are skipped, frozen or recomputed, in several microbatches."""

from dataclasses import dataclass
from functools import cache
from itertools import count

from hypothesis import strategies as st

from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.policy import DebugPolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts

GATHER, REDUCE = Call("all_gather", "dp", 64), Call("reduce_scatter", "dp", 64)
FINAL_REDUCE, UPDATE_GATHER = Call("all_reduce", "outer", 32), Call("all_gather", "outer", 32)
ALIGN = 64
# Strategies that a draw makes anew take longer than the draw: these are made once.
NBYTES = st.integers(1, 12).map(lambda n: n * ALIGN)
RARELY_ZERO, SOMETIMES_ZERO, OFTEN_ZERO = (st.one_of(st.just(0), *[NBYTES] * n) for n in (3, 2, 1))


@st.composite
def unit_facts(draw, name):
    """Facts that a layout can have: what does not move has no bytes to move and no collectives; axes of size 1 have none."""
    gathered = draw(RARELY_ZERO)
    gather = draw(st.sampled_from([(GATHER,), (GATHER,), ()])) if gathered else ()
    coded = dict.fromkeys(["decoded"], draw(st.sampled_from([0, 0, 8])) if gathered else 0)
    if not draw(st.sampled_from([True, True, True, False])):
        return UnitFacts(name, gathered, trainable=False, gather=gather, **coded)
    outgoing = draw(SOMETIMES_ZERO)
    reduce = draw(st.sampled_from([(REDUCE,), (REDUCE, FINAL_REDUCE), ()])) if outgoing else ()
    finish, update_gather = draw(st.sampled_from([(), (FINAL_REDUCE,)])), draw(st.sampled_from([(), (UPDATE_GATHER,)]))
    finishing = draw(OFTEN_ZERO) if finish else 0
    rest = draw(SOMETIMES_ZERO)
    host = draw(st.sampled_from([0, 0, 1])) * draw(NBYTES)
    for move, calls in {"reduce": reduce, "finish": finish}.items():
        coded |= {f"{move}_{how}": draw(st.sampled_from([0, 0, 8])) * bool(calls) for how in ("encoded", "recoded", "decoded")}
    return UnitFacts(name, gathered, outgoing, finishing, True, gather, reduce, finish, update_gather, rest, host, **coded)


@dataclass(frozen=True)
class Use:
    """One use of a unit, what it uses inside, and what becomes of it in the backward.

    ``way``: ``back`` goes back; ``bare`` does, for its inputs alone; ``skip`` does not; ``again`` is used again in the
    backward, and that use goes back; ``inside`` goes back and uses the unit once more, forward, in the middle of that.
    """

    unit: str
    inner: tuple["Use", ...]
    way: str


@cache
def uses(names, depth=2):
    """A few uses one after another."""
    inner = uses(names, depth - 1) if depth else st.just(())
    ways = st.sampled_from(["back"] * 7 + ["bare", "skip", "again", "inside"])
    one = st.builds(Use, st.sampled_from(names), st.one_of(st.just(()), inner), ways)
    return st.lists(one, min_size=0 if depth < 2 else 1, max_size=2 if depth < 2 else 5).map(tuple)


class _Writer:
    def __init__(self):
        self.events = []
        self.number = count()

    def forward(self, use):
        """Write a use; returns how to write its backward."""
        number = next(self.number)
        self.events.append(Event("forward", use.unit, number))
        inner = [self.forward(each) for each in use.inner]
        self.events.append(Event("forward_end", use.unit, number))

        def back():
            if use.way == "skip":
                return
            if use.way == "again":
                self.forward(Use(use.unit, use.inner, "back"))()
                return
            self.events.append(Event("backward", use.unit, number))
            if use.way == "inside":
                self.forward(Use(use.unit, (), "skip"))
            for each in reversed(inner):
                each()
            self.events.append(Event("backward_end", use.unit, number, use.way == "bare"))

        return back

    def microbatch(self, order):
        for back in reversed([self.forward(use) for use in order]):
            back()
        self.events.append(Event("microbatch_end"))


@st.composite
def programs(draw, max_units=5, **fixed):
    """A program. ``fixed``: fields that each of its units is to have."""
    names = tuple(f"u{i}" for i in range(draw(st.integers(1, max_units))))
    units = [draw(unit_facts(name)) for name in names]
    units = [UnitFacts(**{**{k: getattr(u, k) for k in UnitFacts.__slots__}, **fixed}) for u in units]
    writer = _Writer()
    order = draw(uses(names))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            writer.microbatch(order)
            order = draw(st.one_of(st.just(order), st.just(order), uses(names)))
        reduces, updates = draw(st.sampled_from([(True, True), (True, True), (True, True), (True, False), (False, False)]))
        fetches = [Event("fetch", unit.name) for unit in units if unit.host]
        writer.events += [Event("reduce")] * reduces + [*fetches, Event("update")] * updates
    if draw(st.sampled_from([False] * 7 + [True])):
        for use in order:  # an evaluation
            writer.forward(use)
    frozen = {unit.name for unit in units if not unit.trainable}
    events = (
        event._replace(no_gradient=True) if event.has_gradient and event.unit in frozen else event for event in writer.events
    )
    return Program(tuple(units), tuple(events))


@st.composite
def policies(draw, **fixed):
    """A policy without a memory budget. ``fixed``: fields that are given."""
    fields = {
        "prefetch": draw(st.integers(0, 3)),
        "release": draw(st.sampled_from(["room", "room", "forward", "backward"])),
        "bucket_nbytes": draw(st.sampled_from([0, None, 2 * ALIGN, 8 * ALIGN])),
        "gather_at_start": draw(st.sampled_from([True, True, False])),
        "sum_late": draw(st.sampled_from([None, True, False])),
        "separate_groups": draw(st.booleans()),
    }
    return DebugPolicy(**{**fields, **fixed})
