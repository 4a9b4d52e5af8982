"""Python programs in forked processes: importing torch takes an interpreter more seconds than most programs of tests take.

``run_forked(fn)`` calls ``fn`` in a process where ``subprocess.Popen([sys.executable, ...])`` forks. The new process does what
Python would do with these arguments. Signal handlers, process group, open files, environment, working directory, ``__main__``
and ``sys.argv`` are as in a new interpreter. At the end the process waits for threads and calls functions of atexit, but
destroys no modules unless the program asks for it.
"""

import atexit
import ctypes
import functools
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import fsharp as fs
from fsharp.testing import processes

R = TypeVar("R")
ENDS: list[Callable[[int], None]] = [os._exit]
"""How a forked program ends: the last of these functions takes its status."""
destroy_modules = ctypes.pythonapi.Py_Exit
"""As a new interpreter ends; a program may add this function to ``ENDS``."""
exec_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def run_forked(fn: Callable[[], R], *, imports: str = "", timeout: float = 250.0) -> R:
    """Call ``fn`` where Python programs are forked; return what it returns, or raise what it raises.

    ``imports``: a statement that is run first. Forked programs then have imported these modules already.
    """

    def rank_fn(comm: Any) -> tuple[bool, Any]:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        exec(imports)
        subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
        try:
            return True, fn()
        except BaseException as error:
            error.add_note(f"{traceback.format_exc()}\n{printed()}")
            return False, error
        finally:
            sys.modules[processes.__module__]._launcher.close()

    [(has_returned, result)] = processes(fs.Mesh({"dp": 1}), rank_fn, timeout=timeout)
    if not has_returned:
        raise result
    return result


def forked(fn: Callable[..., R]) -> Callable[..., R]:
    """Return a function that calls ``fn``, such as a test, by :func:`run_forked`."""
    return functools.wraps(fn)(lambda *args, **arguments: run_forked(partial(fn, *args, **arguments)))


def printed() -> str:
    """Return what a function that ``run_forked`` calls, and the programs that it has started, have printed."""
    sys.stdout.flush()
    return Path("/proc/self/fd/1").read_text()


def _fork_child(
    self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session, *rest
) -> None:  # fmt: skip
    """Start the process of a Popen, which calls this method."""
    if isinstance(args, str) or args[0] != sys.executable:
        exec_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
            p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session, *rest
        )  # fmt: skip
        return
    sys.stdout.flush()
    self.pid = os.fork()
    if not self.pid:
        _run_as_interpreter([str(arg) for arg in args[1:]], cwd, env, (p2cread, c2pwrite, errwrite), start_new_session)
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _run_as_interpreter(
    args: list[str], cwd: str | None, env: Mapping[str, str] | None, files: tuple[int, ...], start_new_session: bool
) -> NoReturn:
    """Do what ``python *args`` would do, and end this process, which was forked for it."""
    status = 1
    try:
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders are the parent's
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if start_new_session:
            os.setsid()
        for target, file in enumerate(files):
            if file >= 0:
                os.dup2(file, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(cwd or ".")
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if options := os.environ.get("PYTHONWARNINGS"):
            sys.warnoptions[:] = options.split(",")
            warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
        status = _exit_status(partial(_run_program, [arg for arg in args if arg != "-u"]))
        if ENDS[-1] is os._exit:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
    finally:
        ENDS[-1](status)


def _run_program(args: list[str]) -> None:
    sys.argv = args
    if args[0] == "-m":
        sys.argv, sys.path[:0] = args[1:], [os.getcwd()]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    name, code = ("<string>", args[1]) if args[0] == "-c" else (args[0], Path(args[0]).read_text("utf-8"))
    sys.argv, sys.path[:0] = args[:1] + args[1 + (args[0] == "-c") :], [str(Path(name).resolve().parent)]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = name
    exec(compile(code, name, "exec"), vars(main))


def _exit_status(program: Callable[[], None]) -> int:
    """Run a program, and print its error as Python does."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = _frames_of_program(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _frames_of_program(error: BaseException) -> Any:
    """Return an error's traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frames = frames.tb_next
    return frames
