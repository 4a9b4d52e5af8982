"""The JSON of a :class:`~fsharp.inspect.Hardware`: numbers, and tables of numbers by axis, by collective or by unit."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from fsharp.errors import ScheduleError, problem
from fsharp.type_checks import short_repr

_SECONDS = "forward", "backward", "recomputation"


def fields_to_json(fields: Mapping[str, Any]) -> str:
    """Return a Hardware's fields as JSON, with null for infinity and rows for tables. ScheduleError for a function."""
    if callable(fields["compute_times"]):
        remedy = "Pass a dict of seconds by pattern, or a pair for all units."
        raise ScheduleError(problem("Hardware.to_json()", "compute_times is a function, and JSON holds none.", remedy=remedy))
    return json.dumps({name: _value_to_json(value) for name, value in fields.items()}, indent=1, default=float)


def _value_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [[*(key if isinstance(key, tuple) else (key,)), _value_to_json(each)] for key, each in value.items()]
    if isinstance(value, tuple):
        return dict(zip(_SECONDS, value, strict=False))
    return None if value == math.inf else value


def fields_from_json(text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Hardware's fields, whose names are the keys of ``known``, from JSON; ScheduleError for a wrong text."""

    def wrong(what: str) -> ScheduleError:
        return ScheduleError(problem("Hardware.from_json()", what, remedy="Pass a text that Hardware.to_json() returned."))

    try:
        rows = json.loads(text)
    except ValueError as error:
        raise wrong(f"the text is no JSON: {error}.") from error
    if not isinstance(rows, dict):
        raise wrong(f"the text is {short_repr(rows)}, expected an object.")
    if different := sorted(rows.keys() ^ known.keys()):
        raise wrong(f"field {different[0]!r} is {'unknown' if different[0] in rows else 'missing'}.")
    result: dict[str, Any] = {}
    for name, value in rows.items():
        parse, expected = (_parse_seconds, "seconds") if name == "compute_times" else (_parse_number, "numbers")
        try:
            result[name] = _value_from_json(value, parse)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise wrong(f"{name} is {short_repr(value)}, expected {expected}.") from error
    return result


def _value_from_json(value: Any, parse: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return {(row[0] if len(row) == 2 else (row[0], row[1])): parse(row[-1]) for row in value}
    return parse(value)


def _parse_seconds(value: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(value[name] for name in _SECONDS[: 2 + ("recomputation" in value)])


def _parse_number(value: Any) -> Any:
    if value is not None and not isinstance(value, bool | int | float):
        raise TypeError
    return math.inf if value is None else value
