"""The command ``fsharp``. Each subcommand is a function that returns the text to print. Needs tyro (``fsharp[cli]``)."""

import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Annotated, Any, TextIO, Union

from fsharp.cli.checkpoints import checkpoint_list_text, convert, diff, export, prune_checkpoints, show, verify_checkpoints
from fsharp.cli.diagnosis import doctor
from fsharp.cli.machine import calibrate
from fsharp.cli.plans import plan, schedule, tune
from fsharp.cli.reports import report
from fsharp.errors import FsharpError, LayoutError, OptionError, PatternError, TreeError

_ABOUT = "Plan how to shard a model, measure this machine, report on a run, and look at checkpoints. Needs no process group."
_MAX_LINE = 240
"""Characters of an error of tyro that are shown."""
COMMANDS: dict[str, Callable[..., str]] = {
    "plan": plan,
    "schedule": schedule,
    "tune": tune,
    "calibrate": calibrate,
    "report": report,
    "doctor": doctor,
}
CHECKPOINTS: dict[str, Callable[..., str]] = {
    "list": checkpoint_list_text,
    "show": show,
    "verify": verify_checkpoints,
    "diff": diff,
    "prune": prune_checkpoints,
    "export": export,
    "convert": convert,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, print its text, and return the exit status: 1 for an error, 2 for bad input, 130 after Ctrl-C.

    For bad input stderr has one line, which says what was expected. If the options cannot be parsed, or after ``--help``,
    SystemExit is raised with the status.
    """
    try:
        import tyro
    except ImportError:
        print("error: the command needs tyro: pip install 'fsharp[cli]'", file=sys.stderr)
        return 1
    conf: Any = tyro.conf

    def choice(functions: dict[str, Callable[..., str]]) -> Any:
        shown = {name: _with_readable_help(fn, conf) for name, fn in functions.items()}
        return Union[tuple(Annotated[Any, conf.subcommand(name, constructor=fn)] for name, fn in shown.items())]  # noqa: UP007

    def ckpt(command: Any) -> str:
        """Look at checkpoints, compare them with their digests or with each other, convert them, and remove old ones."""
        return str(command())

    ckpt.__annotations__["command"] = conf.OmitSubcommandPrefixes[choice(CHECKPOINTS)]
    said = io.StringIO()
    try:
        with redirect_stderr(said):  # tyro prints its errors in boxes of many lines
            command = tyro.cli(choice({**COMMANDS, "ckpt": ckpt}), prog="fsharp", description=_ABOUT, args=argv)
    except SystemExit as exit_:
        if exit_.code == 2:
            _print_escaped(f"error: {_line_of_box(said.getvalue())}", sys.stderr)
        raise
    try:
        text = command()
    except (OptionError, PatternError, LayoutError, TreeError) as error:
        _print_escaped(f"error: {_line_of_error(str(error))}", sys.stderr)
        return 2
    except (FsharpError, ImportError, OSError) as error:
        _print_escaped(f"error: {error}", sys.stderr)
        return 1
    except OverflowError as error:
        print(f"error: a number among the options is too large to compute with: {error}.", file=sys.stderr)
        return 2
    except RecursionError:
        print("error: a tree or a folder nests more levels than Python can follow.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if text:
        try:
            _print_escaped(text, sys.stdout)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes stdout at its exit
            if not isinstance(error, BrokenPipeError):  # a reader such as head has stopped reading
                print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _line_of_box(box: str) -> str:
    """Return the text in a box that tyro prints as one short line, without frame and footer. ``". "`` joins paragraphs."""
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"^[\s\u2500-\u257f|+]+|[\s\u2500-\u257f|+]+$", "", line) for line in box.splitlines()[1:-1]]
    parts = [" ".join(part.split()) for part in re.split(r"(?:^|\n)-*\n", "\n".join(lines))]
    parts = [part.removeprefix("Error ") for part in parts if part and not part.startswith("For full helptext")]
    return textwrap.shorten(". ".join(part.rstrip(".") for part in parts), _MAX_LINE, placeholder=" ...")


def _line_of_error(error: str) -> str:
    """Return the text of an error as one line, with its table of facts in parentheses.

    >>> from fsharp.errors import problem
    >>> _line_of_error(problem("plan()", "it does not fit.", [("needed", 8), ("found", 4)], "Make it smaller."))
    'plan(): it does not fit. (needed 8; found 4) Make it smaller.'
    """
    lines = error.splitlines()
    facts = "; ".join(" ".join(line.split()) for line in lines if line.startswith("  "))
    first, *others = (line for line in lines if not line.startswith("  "))
    return " ".join([first, *[f"({facts})"] * bool(facts), *others])


def _with_readable_help(command: Callable[..., str], conf: Any) -> Callable[..., Callable[[], str]]:
    """Return a function from whose signature tyro makes a subcommand, with line breaks removed from the help.

    The function returns ``command`` bound to the options that it gets. ``conf``: tyro's module of annotations.
    """

    def call(*args: Any, **options: Any) -> Callable[[], str]:
        return partial(command, *args, **options)

    signature = inspect.signature(command)
    parameters = [
        each.replace(annotation=Annotated[each.annotation, conf.arg(metavar=each.name.upper())])
        if each.kind is each.POSITIONAL_ONLY and each.annotation is str
        else each
        for each in signature.parameters.values()
    ]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    call.__annotations__.update({each.name: each.annotation for each in parameters})
    call.__doc__ = re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(command.__doc__ or ""))
    return call


def _print_escaped(text: str, file: TextIO) -> None:
    """Print text. Control characters except line breaks, and characters that ``file`` cannot encode, are printed as escapes.

    Names in a checkpoint may have any characters, and a terminal would obey control characters.
    """
    encoding = file.encoding or "utf-8"
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", lambda found: found[0].encode("unicode_escape").decode(), text)
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
