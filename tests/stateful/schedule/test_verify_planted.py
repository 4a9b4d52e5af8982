"""Faults that are planted in schedules of random programs: the verifier finds each kind."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from fsharp.errors import ScheduleError
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Memory
from fsharp.stateful.verify.verify import verify
from tests.edited_schedules import choose, drop, edit, move, of, opening, schedules, twice
from tests.random_programs import GATHER, REDUCE, UPDATE_GATHER


def role(op):
    return "parameters" if op.kind in ("gather", "release") else "finish" if op.phase == "finish" else "outgoing"


def live(schedule):
    """For each op, what other memory is live when it runs, with the memory that a step finds when it starts."""
    now, result = {}, []
    for i, op in enumerate(schedule.ops * 2):
        if i == len(schedule.ops):
            now = {key: memory for key, memory in now.items() if key[0] != "rest"}
        result.append({key: memory for key, memory in now.items() if key != (role(op), op.unit)})
        if op.opens:
            now["rest", op.unit] = op.opens
        if op.memory and op.kind in ("release", "accumulate"):
            now.pop((role(op), op.unit), None)
        elif op.memory:
            now[role(op), op.unit] = op.memory
    return result[len(schedule.ops) :]


def ancestors(schedule, i):
    """The ops of this step, and of the one before as negative numbers, that are over when op ``i`` starts: by search."""
    ops, num = schedule.ops, len(schedule.ops)
    updates = [k for k, op in enumerate(ops) if op.kind == "update"]
    tail = [k for k in range(updates[-1], num) if ops[k].kind == "gather"] if updates else []

    def bucket(j):
        mine = ops[j].kind, ops[j].bucket
        return [j, *(k for k, op in enumerate(ops) if op.bucket != -1 and (op.kind, op.bucket) == mine)]

    def search(start, within_step):
        seen, stack = set(), [start]
        while stack:
            k = stack.pop()
            before = [j for j in range(k) if ops[j].stream == ops[k].stream] if k >= 0 else []
            mine = bucket(k) if k >= 0 else ()  # which begins as one
            before += [b if j < m else b - num for m in mine for j in ops[m].after for b in bucket(j)]
            before += [j for j in range(-num, k if k < 0 else 0) if ops[j].stream == ops[k].stream]
            fresh = {j for j in before if j >= (0 if within_step else -num)} - seen
            seen |= fresh
            stack += fresh
        return seen

    computes = [k for k in range(num) if ops[k].stream == "compute"]
    landed = search(computes[-1], within_step=True) if computes else set()
    return search(i, within_step=False) | {k - num for k in range(num) if k not in tail or k in landed}


PARAMETERS = ("forward", "backward")


def at_one(name, change, kind, *phases):
    def plant(data, s):
        return change(s, choose(data, of(s, kind, *phases)))

    plant.__name__ = name
    return plant


without_wait = at_one("without_wait", drop, "wait", *PARAMETERS)
without_gather = at_one("without_gather", drop, "gather", *PARAMETERS)
without_spread = at_one("without_spread", drop, "gather", "update")
without_release = at_one("without_release", drop, "release")
without_cast = at_one("without_cast", drop, "cast")
second_cast = at_one("second_cast", twice, "cast")
without_reduce = at_one("without_reduce", drop, "reduce")
second_reduce = at_one("second_reduce", twice, "reduce")
without_accumulate = at_one("without_accumulate", drop, "accumulate")


def without_wait_for_spread(data, s):
    i = choose(data, of(s, "wait", "update"))
    rest = [*s.ops[i + 1 :], *s.ops[:i]]
    comes = [op.kind for op in rest if op.kind == "update" or (op.kind, op.unit) == ("compute", s.ops[i].unit)]
    assume(comes[0] == "compute")
    return drop(s, i)


def late_gather(data, s):
    i = choose(data, [i for i in of(s, "gather", *PARAMETERS) if s.ops[i].bucket == -1])
    uses = [k for k, op in enumerate(s.ops) if k > i and (op.kind, op.unit) == ("compute", s.ops[i].unit)]
    assume(uses)
    return move(edit(s, i, event_index=s.ops[uses[0]].event_index), i, uses[0])


def early_carried_gather(data, s):
    updates = of(s, "update")
    assume(updates)
    i = choose(data, [i for i in of(s, "gather", *PARAMETERS) if i > updates[-1] and s.ops[i].bucket == -1])
    assume(all(op.kind == "gather" for op in s.ops[updates[-1] + 1 :]))
    return move(s, i, updates[-1])


def early_release(data, s):
    i = choose(data, of(s, "release"))
    uses = [k for k, op in enumerate(s.ops[:i]) if op.unit == s.ops[i].unit and op.kind in ("compute", "gather")]
    assume(uses and s.ops[uses[-1]].kind == "compute")
    return move(edit(s, i, event_index=s.ops[uses[-1]].event_index), i, uses[-1] + 1)


def without_edge(data, s):
    i = choose(data, [i for i, op in enumerate(s.ops) if op.after])
    j = data.draw(st.sampled_from(s.ops[i].after))
    changed = edit(s, i, after=tuple(k for k in s.ops[i].after if k != j))
    assume((j if j < i else j - len(s.ops)) not in ancestors(changed, i))
    return changed


def shared_memory(data, s):
    others = live(s)
    fills = [i for i, op in enumerate(s.ops) if op.memory and op.kind in ("gather", "cast", "reduce") and others[i]]
    i = choose(data, fills)
    start = data.draw(st.sampled_from([memory.start for memory in others[i].values()]))
    mine = [k for k, op in enumerate(s.ops) if op.memory and (role(op), op.unit) == (role(s.ops[i]), s.ops[i].unit)]
    memory = replace(s.ops[i].memory, start=start)
    return edit(replace(s, arena=max(s.arena, memory.stop)), *mine, memory=memory)


def other_address(data, s):
    seen, again = set(), []
    for i in of(s, "gather", *PARAMETERS):
        unit = s.ops[i].unit
        ends = [k for k in of(s, "release") if k > i and s.ops[k].unit == unit]
        again += [(i, ends[0])] if unit in seen and ends else []
        seen.add(unit)
    i, end = choose(data, again)
    memory = replace(s.ops[i].memory, start=s.arena)
    return edit(replace(s, arena=memory.stop), i, end, memory=memory)


def without_opens(data, s):
    return edit(s, choose(data, opening(s)), opens=None)


def second_opens(data, s):
    places = [(op.kind in ("cast", "reduce", "accumulate"), op.unit, op.phase) for op in s.ops]
    i, k = choose(data, [(i, k) for i in opening(s) for k in range(i + 1, len(s.ops)) if places[i] == places[k]])
    return edit(s, k, opens=s.ops[i].opens)


def opens_another_size(data, s):
    i = choose(data, opening(s))
    memory = s.ops[i].opens
    return edit(s, i, opens=replace(memory, nbytes=memory.nbytes + data.draw(st.sampled_from([-64, -1, 1, 64]))))


def opens_of_no_gradient(data, s):
    others = ("gather", "wait", "compute", "release", "update")
    i = choose(data, [k for k, op in enumerate(s.ops) if op.kind in others or op.phase == "finish"])
    return edit(s, i, opens=Memory(0, s.program.facts[s.ops[i].unit].rest if s.ops[i].unit else 0))


def opens_live_memory(data, s):
    others = live(s)
    i = choose(data, [k for k in opening(s) if others[k]])
    memory = replace(s.ops[i].opens, start=data.draw(st.sampled_from([other.start for other in others[i].values()])))
    return edit(replace(s, arena=max(s.arena, memory.stop)), i, opens=memory)


def opens_outside(data, s):
    i = choose(data, opening(s))
    memory = s.ops[i].opens
    start = data.draw(st.sampled_from([-64, s.arena - memory.nbytes + 64, s.arena]))
    return edit(s, i, opens=replace(memory, start=start))


def tiny_budget(data, s):
    assume(s.arena)
    return replace(s, policy=replace(s.policy, memory_budget=data.draw(st.integers(0, s.arena - 1))))


MOVING = {"gathered": 128, "gather": (GATHER,)}
SPREADING = {"trainable": True, "update_gather": (UPDATE_GATHER,)}
SENDING = {"trainable": True, "outgoing": 64, "reduce": (REDUCE,)}
RESTING = {"trainable": True, "rest": 128}


PLANTED = {  # the fault, what is said about it, and facts of units and fields of policies that make room for it
    without_wait: ("uses a unit before its gather, op [0-9]+, is waited for", MOVING, {}),
    without_wait_for_spread: ("uses parameters without a wait for their update", SPREADING, {}),
    without_gather: ("waits for a gather that was not made|releases a unit that is not gathered", MOVING, {}),
    without_spread: ("stale parameters|uses parameters without a wait|never come to where they rest", SPREADING, {}),
    late_gather: (
        "waits for a gather that was not made|may still be read by|releases a unit that is not gathered",
        MOVING,
        {"bucket_nbytes": 0},
    ),
    early_carried_gather: ("is gathered and never released: .* stale", MOVING, {"gather_at_start": True, "bucket_nbytes": 0}),
    without_release: ("is gathered again while|is gathered and never released|survives the update", MOVING, {}),
    early_release: ("is released while in use", MOVING, {}),
    without_cast: ("is never cast|before the cast of use|may start before the end of", {"trainable": True}, {}),
    second_cast: ("casts the gradient of use [0-9]+ twice", {"trainable": True}, {}),
    without_reduce: ("adds a result without a reduction", SENDING, {}),
    second_reduce: ("happens twice", SENDING, {}),
    without_accumulate: ("has no accumulate|is accumulated|may run before the end of", SENDING, {}),
    without_edge: (r"nothing orders op \d+ after op \d+", {}, {}),
    shared_memory: ("fills memory in which the .* is live|may fill memory still in use", {}, {}),
    other_address: ("changes its address within a step", MOVING, {"prefetch": 0, "release": "forward"}),
    without_opens: ("writes a gradient at rest whose memory no op has opened", RESTING, {}),
    second_opens: ("opens what op [0-9]+, .*, has opened", {**SENDING, **RESTING}, {}),
    opens_another_size: ("its `opens` has a wrong size", RESTING, {}),
    opens_of_no_gradient: ("its `opens` has a wrong size, or belongs to no op of this kind", RESTING, {}),
    opens_live_memory: ("fills memory in which the .* is live", RESTING, {}),
    opens_outside: ("its memory is outside of the arena", RESTING, {}),
    tiny_budget: ("larger than the memory budget", MOVING, {}),
}


def test_a_gather_that_nobody_waits_for_is_over_before_its_memory_serves_others():
    """Of a unit that is gathered ahead and makes room again for those inside of the next one."""
    sizes = {"u1": (64, 0), "u2": (64, 0), "u3": (0, 64), "u4": (64, 0)}
    facts = tuple(
        UnitFacts(name, full, out, 0, bool(out) or name == "u4", (GATHER,) if full else (), (REDUCE,) if out else (), (), (), 0)
        for name, (full, out) in sizes.items()
    )
    events, use = [], 0
    for _ in range(2):
        order = [("forward", "u2", 0), ("forward", "u3", 1), ("forward_end", "u3", 1), ("forward", "u4", 2)]
        order += [("forward_end", "u4", 2), ("forward_end", "u2", 0), ("forward", "u1", 3), ("forward_end", "u1", 3)]
        order += [("backward", "u1", 3), ("backward_end", "u1", 3), ("backward", "u2", 0), ("backward", "u4", 2)]
        order += [("backward_end", "u4", 2), ("backward", "u3", 1), ("backward_end", "u3", 1), ("backward_end", "u2", 0)]
        events += [
            Event(kind, unit, use + number, kind == "backward_end" and unit in ("u1", "u2")) for kind, unit, number in order
        ]
        events += [Event("microbatch_end")]
        use += 4
    program = Program(facts, (*events, Event("reduce"), Event("update")))
    schedule = compile_schedule(program, SchedulePolicy(separate_groups=False))
    verify(schedule)
    waited, idle = set(), 0
    for i, op in enumerate(schedule.ops):
        if op.kind == "wait":
            waited.add(op.unit)
        elif op.kind == "release" and op.unit not in waited:
            gather = max(j for j in range(i) if (schedule.ops[j].kind, schedule.ops[j].unit) == ("gather", op.unit))
            assert gather in op.after
            idle += 1
        elif op.kind == "release":
            waited.discard(op.unit)
    assert idle


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@settings(max_examples=max(6, settings().max_examples // 4))
@given(data=st.data())
def test_planted_faults_are_found(plant, data):
    match, facts, policy = PLANTED[plant]
    schedule = plant(data, data.draw(schedules(facts, policy)))
    with pytest.raises(ScheduleError, match=match):
        verify(schedule)
