"""Schedules that differ from a right one in one place: each field of ops, facts, events and policy, and the order of ops."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.ops import kinds_where
from fsharp.stateful.schedule.schedule import Memory, Op, Schedule
from tests.edited_schedules import drop, edit, move, twice


class Mutant(NamedTuple):
    """What was changed, in words, and how to make it, which may raise."""

    what: str
    make: Callable[[], Schedule]


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """All of one schedule, in an order that is always the same."""
    ops, program = schedule.ops, schedule.program
    names = ["", "nowhere", *(facts.name for facts in program.units)]
    places = [*dict.fromkeys(memory for op in ops for memory in (op.memory, op.opens) if memory)][:6]
    for i, op in enumerate(ops):
        for what, fields in _changes(op, names, [*places, Memory(64, 0)], range(-1, len(ops) + 1)):
            yield Mutant(f"op {i}, {op}: {what}", partial(edit, schedule, i, **fields))
        yield Mutant(f"op {i}, {op}: dropped", partial(drop, schedule, i))
        yield Mutant(f"op {i}, {op}: doubled", partial(twice, schedule, i))
        for j in sorted({i + 1, i + 2, i + 5, len(ops) - 1, 0} & set(range(len(ops))) - {i}):
            yield Mutant(f"op {i}, {op}: moved to {j}", partial(move, schedule, i, j))
            yield Mutant(
                f"op {i}, {op}: moved to {j} at its event",
                partial(move, edit(schedule, i, event_index=ops[j].event_index), i, j),
            )
    for name, rows in (("units", program.units), ("events", program.events)):
        for k, row in enumerate(rows):
            others = [(what, k + 1, (partial(replaced, row, fields),)) for what, fields in _changes(row, names, places)]
            same = partial(replaced, row, {})
            others += [("dropped", k + 1, ()), ("doubled", k + 1, (same, same)), ("doubled at the end", k, (same,))]
            if k + 1 < len(rows):
                others.append(("swapped", k + 2, (partial(replaced, rows[k + 1], {}), same)))
            for what, rest, makers in others:
                yield Mutant(f"{name} {k}, {row}: {what}", partial(_with_rows, schedule, name, rows[:k], makers, rows[rest:]))
    for what, fields in _changes(schedule, names, places):
        yield Mutant(f"schedule: {what}", partial(replace, schedule, **fields))
    for what, fields in _changes(schedule.policy, names, places):
        yield Mutant(f"policy: {what}", lambda fields=fields: replace(schedule, policy=replaced(schedule.policy, fields)))


def replaced(row: Any, fields: dict[str, Any]) -> Any:
    return row._replace(**fields) if isinstance(row, tuple) else replace(row, **fields)


def _with_rows(schedule: Schedule, name: str, before: Any, makers: Any, after: Any) -> Schedule:
    rows = (*before, *(make() for make in makers), *after)
    return replace(schedule, program=replace(schedule.program, **{name: rows}))


def texts(schedule: Schedule) -> Iterator[Mutant]:
    """The schedule as JSON, with another value in each place: of another type, none, or a field more or less."""

    def walk(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, each in items:
            yield (*where, key)
            yield from walk(each, (*where, key))

    def load(where: tuple[Any, ...], value: Any) -> Schedule:
        data = json.loads(whole)
        *outer, last = where
        holder = reduce(getitem, outer, data)
        if value is ...:
            del holder[last]
        else:
            holder[last] = value
        return Schedule.from_json(json.dumps(data))

    whole = schedule.to_json()
    for where in walk(json.loads(whole), ()):
        for value in (None, "1", -1, 1.5, True, [], {}, [1], {"start": 0}, ...):
            yield Mutant(f"{'.'.join(map(str, where))}: {value!r}", partial(load, where, value))
    for text in ("", "[]", "null", "{}", "1", whole[:-10], "[" * 100_000):
        yield Mutant(f"text {text[:9]!r}", partial(Schedule.from_json, text))


def _changes(row: Any, names: list[str], places: list[Memory], positions: range = range(0)) -> Iterator[tuple[str, Any]]:
    """Each other value of each field: in words, and as a field to replace."""
    for name, hint in get_type_hints(type(row)).items():
        value = getattr(row, name)
        known = [*kinds_where(), "other"] if (type(row), name) == (Op, "kind") else []
        for other in known or _others(hint, value, names, places, positions):
            if other != value or type(other) is not type(value):
                yield f"{name}={other!r}", {name: other}


def _others(hint: Any, value: Any, names: list[str], places: list[Memory], positions: range) -> list[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        found = [] if value is None else [None]
        for arg in args:
            if arg is not type(None):
                found += _others(arg, value, names, places, positions)
        return found
    if origin is Literal:
        return [*args, "other"]
    if hint is bool:
        return [not value]
    if hint is int:
        value = value or 0
        return [value + 1, value - 1, value + 64, 2 * value, 0, -1, 1.5, "1"]
    if hint is float:
        return [0.0, 1.0, "1"]
    if hint is str:
        return [*names, "bfloat16", 1]
    if hint is Memory:
        around = [replace(value, start=value.start + step) for step in (-64, -1, 1, 4, 64, 10**9)] if value else []
        around += [replace(value, nbytes=nbytes) for nbytes in (value.nbytes - 64, value.nbytes + 64, 0, -64)] if value else []
        return [*around, *places]
    if origin is tuple and args[0] is int:
        shorter = [tuple(each for each in value if each != gone) for gone in value]
        return [(), *shorter, *[(*value, j) for j in sorted({0, positions.stop - 2, positions.stop, -1}) if positions]]
    if origin is tuple and args[0] is Call:
        return [
            value[1:],
            (*value, Call("all_gather", "dp", 64)),
            *([(value[0]._replace(nbytes=1), *value[1:])] if value else []),
        ]
    return ["other", 1]
