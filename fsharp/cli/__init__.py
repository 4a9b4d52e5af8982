"""The command ``fsharp``. Each subcommand is a function that returns the text to print.

The command needs tyro (``pip install 'fsharp[cli]'``), and no process group.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TextIO, Union

from fsharp.cli.checkpoints import checkpoint_list_text, convert, diff, export, prune_checkpoints, show, verify_checkpoints
from fsharp.cli.diagnosis import doctor
from fsharp.cli.machine import calibrate
from fsharp.cli.plans import plan, schedule, tune
from fsharp.cli.reports import report
from fsharp.errors import FsharpError, OptionError, PatternError

_ABOUT = (
    "Plan how a model is sharded, measure this machine, report on a run, and look at checkpoints. No process group is needed."
)
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
    """Run the command, print its text, and return the exit status: 1 for an error, 2 for bad arguments, 130 after Ctrl-C."""
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
        return str(command)

    ckpt.__annotations__["command"] = conf.OmitSubcommandPrefixes[choice(CHECKPOINTS)]
    try:
        text = tyro.cli(choice({**COMMANDS, "ckpt": ckpt}), prog="fsharp", description=_ABOUT, args=argv)
    except (FsharpError, ImportError, OSError) as error:
        _print_escaped(f"error: {error}", sys.stderr)
        return 2 if isinstance(error, OptionError | PatternError) else 1
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


def _with_readable_help(command: Callable[..., str], conf: Any) -> Callable[..., str]:
    """Return ``command`` for tyro, whose help then names positional arguments, and has no line breaks within a description.

    ``conf`` is the module ``tyro.conf``.
    """

    def call(*args: Any, **options: Any) -> str:
        return command(*args, **options)

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
