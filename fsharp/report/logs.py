"""Loggers: objects that record named values of steps, to a file of JSON lines, to TensorBoard or to wandb."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fsharp.errors import OptionError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.tree.paths import named_leaves
from fsharp.report.values import plain_layout, plain_timeline
from fsharp.stateful.timing.timeline import Timeline
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, short_repr

LOG_FILE = "log.jsonl"
"""Name of the file that a run writes, in the folder of its checkpoints."""
STEP_LIMIT = 2**53
"""From here on a double, as browsers have, does not hold every whole number."""
_MAX_DEPTH = 100
"""Most lists and dicts, one in another, that hold a value."""
_LINE_NAMES = ("step", "time")
RUN_NAMES = (*_LINE_NAMES, "start", "event", "saved", "own_s", "steps_per_s")
"""Names under which a run itself records. A user's values need other names."""


class Logger(Protocol):
    """The protocol of objects that record named values of steps. Any object with a method ``log`` can be passed to a Run."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values of a step.

        Args:
            step: number of the step.
            values: dict from a name to a number, a tensor with one element, a text, None, a
                :class:`~fsharp.inspect.Timeline` or a :class:`~fsharp.Layout`. Also nested lists and dicts of numbers, tensors,
                texts and None.
        """


class JsonlLogger:
    """A :class:`Logger` that appends one line of JSON to a file in each call. ``fsharp report`` makes a page from the file.

    A line has the step, the time in seconds since 1970, and the values. Infinite numbers and NaN are texts, such as ``"nan"``.
    If a killed process has written only a part of a line, the next call begins a new line, and readers skip the part.

    Args:
        path: path of the file. Missing folders are made with the first line.
    """

    @options_checked
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @api_boundary
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line with the step and the values. OptionError if JSON cannot hold a value, OSError if writing fails.

        OptionError for a value named ``step`` or ``time``, which each line has. OptionError for a step that is not an int below
        2**53: a reader that keeps numbers as doubles would take it for another step.
        """
        check_names("log()", values, _LINE_NAMES)
        if type(step) is not int or abs(step) >= STEP_LIMIT:
            raise OptionError(f"log(): step is {short_repr(step)}, expected a whole number below 2**53.")
        plain = _nonfinite_as_text(plain_values(values))
        line = json.dumps({"step": step, "time": time.time(), **plain}, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)  # in one call, so that readers see whole lines, unless the process is killed


class TensorBoardLogger:
    """A :class:`Logger` that passes values to a ``SummaryWriter`` of TensorBoard: numbers as scalars, other values as text.

    ::

        writer = torch.utils.tensorboard.SummaryWriter("runs/tensorboard")  # needs the package tensorboard
        logger = fs.resilience.TensorBoardLogger(writer)

    Timelines and layouts are left out: TensorBoard has no chart for them. The writer remains yours to close.

    Args:
        writer: a SummaryWriter, or an object with its methods ``add_scalar`` and ``add_text``.
    """

    def __init__(self, writer: Any) -> None:
        _check_methods("TensorBoardLogger()", "writer", writer, "add_scalar", "add_text")
        self._writer = writer

    @api_boundary
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add numbers to the writer as scalars, and all other values as text. Timelines, layouts and None are left out."""
        for name, value in named_leaves(plain_values(_without_timelines_layouts(values)), "/"):
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            elif value is not None:
                self._writer.add_text(name, str(value), step)


class WandbLogger:
    """A :class:`Logger` that passes values to a run of Weights & Biases: ``WandbLogger(wandb.init(project="a"))``.

    Timelines and layouts are left out. wandb takes no step twice: after a restart it ignores the steps that a run makes again.

    Args:
        run: the run that ``wandb.init`` returned, or an object with the same method ``log``.
    """

    def __init__(self, run: Any) -> None:
        _check_methods("WandbLogger()", "run", run, "log")
        self._run = run

    @api_boundary
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass the values to the run, without timelines and layouts. Names of nested values are joined by ``/``."""
        if found := dict(named_leaves(plain_values(_without_timelines_layouts(values)), "/")):
            self._run.log(found, step=step)


def _check_methods(where: str, name: str, value: Any, *methods: str) -> None:
    for method in methods:
        if not callable(getattr(value, method, None)):
            raise OptionError(f"{where}: {name} is {short_repr(value)}, expected an object with a method {method!r}.")


def _without_timelines_layouts(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, Timeline | Layout)}


def check_names(where: str, values: Mapping[str, Any], taken: tuple[str, ...]) -> None:
    """Raise an OptionError if ``values`` is no mapping, or has a name in ``taken``."""
    if not isinstance(values, Mapping):
        raise OptionError(f"{where}: values is {short_repr(values)}, expected values by name, such as {{'loss': 0.5}}.")
    for name in taken:
        if name in values:
            raise OptionError(f"{where}: the name {name!r} is taken, expected names other than {', '.join(taken)}.")


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for :meth:`Logger.log` as numbers, texts, None, lists and dicts, nested as before.

    Infinite numbers and NaN are kept. A timeline or a layout becomes a dict.

    Raises:
        OptionError: a value is of a kind that :meth:`Logger.log` does not take, or is nested in more than 100 lists and dicts.
        OptionError: two values would have the same name if the names of nested values were joined by ``/``.
    """
    plain = {str(name): _plain_value(str(name), value) for name, value in _without_timelines_layouts(values).items()}
    names = Counter(name for name, _ in named_leaves(plain, "/"))
    if repeated := [name for name, times in names.items() if times > 1]:
        raise OptionError(f"log(): two values have the name {short_repr(repeated[0])} once joined by '/', expected two names.")
    kept: dict[str, Any] = {str(name): value for name, value in values.items() if str(name) not in plain}
    return plain | {name: plain_timeline(x) if isinstance(x, Timeline) else plain_layout(x) for name, x in kept.items()}


def _nonfinite_as_text(value: Any) -> Any:
    """Return plain values with texts in place of infinite numbers and NaN, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _nonfinite_as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_nonfinite_as_text(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain_value(name: str, value: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        what = f"is nested in more than {_MAX_DEPTH} lists and dicts, or holds itself"
        raise OptionError(f"log(): {short_repr(name)} {what}; expected a number, a text, or a list or dict of these.")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(f"{name}.{key}", each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(f"{name}.{i}", each, depth + 1) for i, each in enumerate(value)]
    try:
        number = value.item() if isinstance(value, torch.Tensor) else value
        if isinstance(number, bytes | bytearray):
            raise TypeError("float() would read the text of a number")
        return number if isinstance(number, bool | int) else float(number)  # also numbers of numpy and other libraries
    except (TypeError, ValueError, OverflowError, RuntimeError):  # also a tensor without values, such as one on meta
        expected = (
            "a number, a tensor with one element, a text, a list or dict of these, or under a name of its own a Timeline or a "
            "Layout"
        )
        raise OptionError(f"log(): {name!r} is {short_repr(value)}, expected {expected}.") from None
