"""reported_failures: if ranks fail, print the traceback of the rank that failed first, as the last output."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.distributed.watch import StatusExchange
from fsharp.errors import CommError
from fsharp.functional.comm.agree import error_chain
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.tracebacks import api_context
from fsharp.type_checks import options_checked

_WAIT_FOR_OTHERS_S = 2.0  # seconds for which the first rank that fails waits for the output of other ranks
_WAIT_FOR_FIRST_S = 4.0
_POLL_INTERVAL_S = 0.05
_MAX_SHOWN_CHARS = 4000


@options_checked
@api_context
def reported_failures(comm: Comm, where: Callable[[], str]) -> Iterator[None]:
    """Return a context that tells all ranks of an error in its body. The error of the rank that failed first is printed once.

    Another rank raises an AgreementError, with the failed rank's traceback, as soon as a collective waits for the failed rank.
    If the errors end the processes, each of the other ranks prints one line. Then the rank that failed first prints its
    traceback, with its number, step and last collective. Under torchrun each rank writes its error file, as
    ``torch.distributed.elastic.multiprocessing.errors.record`` does, and torchrun reports the first error as the root cause.

    A killed rank reports nothing; the other ranks then print the collective in which they lost the rank. Without process groups
    this context does nothing. Over NCCL waiting ranks do not get the errors of other ranks. After an error no rank can use the
    Comm: to continue, a program has to call :func:`~fsharp.destroy`, which leaves the job, and then :func:`~fsharp.connect`.

    ``where`` is a function that returns what this rank is doing, such as ``"step 7"``; it is called when an error is raised.
    """
    found = innermost_comm(comm)
    if not isinstance(found, ProcessGroupComm):
        yield
        return
    earlier = sys.excepthook
    if isinstance(earlier, _OneTracebackExcepthook) and earlier.error is not None:
        earlier.remove()  # the program has handled the earlier error, and goes on
    hook = _OneTracebackExcepthook(found, sys.excepthook)
    sys.excepthook = hook
    try:
        yield
    except Exception as error:
        raised_at = time.time()  # taken before another rank can know of this error
        hook.tell_other_ranks(error, where())
        _write_error_file(error, raised_at, is_from_this_rank=hook.is_from_this_rank)
        raise  # the hook stays: it prints the error if nobody handles it
    except BaseException:
        hook.remove()
        raise
    hook.remove()


class _OneTracebackExcepthook:
    """The excepthook of a rank: it prints the error, with a traceback if no other rank has failed before."""

    def __init__(self, comm: ProcessGroupComm, before: Callable[..., None]) -> None:
        self._comm: ProcessGroupComm | None = comm
        self.before = before
        self.error: BaseException | None = None
        self.is_from_this_rank = False

    @property
    def statuses(self) -> StatusExchange:
        """The statuses of ranks in this generation of the job."""
        assert self._comm is not None
        return self._comm.watch.statuses

    def remove(self) -> None:
        """Restore the earlier excepthook, and release this hook's Comm and error.

        A thread keeps the excepthook that was set when the thread started. Some threads live until the interpreter ends. If the
        hook kept the Comm, its process group would also live until then, and its release would abort the process.
        """
        sys.excepthook = self.before
        self._comm = self.error = None

    def tell_other_ranks(self, error: BaseException, where: str) -> None:
        """Report ``error`` to other ranks, unless one of them has reported it. Add a note to ``error``.

        The note names this rank, ``where``, and the last collective.
        """
        heard = {id(watch.error) for watch in list(self.statuses.watches.values()) if watch.error is not None}
        self.is_from_this_rank = not any(id(each) in heard for each in error_chain(error))
        self.error = error
        me = f"rank {self.statuses.rank} of {self.statuses.size}"
        told = f"in {where}; its last collective: {self.statuses.last or 'none yet'!r}"
        if self.is_from_this_rank:
            told = f"{me} failed first, {told}"
            is_first = self._claim_first_failure(told)
            _add_note(error, told if is_first else told.replace(" first,", ","))
            self.statuses.report_failure(error, where)
            return
        _add_note(error, f"{me}, {told}")
        if isinstance(error, CommError):  # a killed rank reports nothing: the first rank that lost it reports in its place
            self._claim_first_failure(f"{me}, {told}: {_error_message(error)}")

    def _claim_first_failure(self, told: str) -> bool:
        """Record ``told`` as the job's first failure, if there is none yet. Return whether this rank has recorded the first."""
        me = f"{self.statuses.rank} "
        return self.statuses.board.write_if_absent("first failure", f"{me}{told}").startswith(me)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not self.error:
            self.before(kind, error, trace)
            return
        self._wait_for_keys(["first failure"], _WAIT_FOR_OTHERS_S)
        if self._claim_first_failure(_error_message(error)):
            if self.is_from_this_rank:
                others = [rank for rank in range(self.statuses.size) if rank != self.statuses.rank]
                self._wait_for_keys([f"rank {rank} has spoken" for rank in others], _WAIT_FOR_OTHERS_S)
            self.before(kind, error, trace)
            sys.stderr.flush()
            self.statuses.board.write("the first has spoken", "")
            return
        _, _, told = (self.statuses.board.read("first failure") or "").partition(" ")
        me, heading = f"rank {self.statuses.rank} of {self.statuses.size}", (told.splitlines() or ["unknown"])[0]
        print(f"{me} ends because of another rank: {heading}", file=sys.stderr, flush=True)
        self.statuses.board.write(f"rank {self.statuses.rank} has spoken", "")
        # torchrun ends all processes when one has ended: wait until the rank that failed first has printed its traceback.
        self._wait_for_keys(["the first has spoken"], _WAIT_FOR_FIRST_S)

    def _wait_for_keys(self, keys: list[str], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(self.statuses.board.read(key) is None for key in keys):
            time.sleep(_POLL_INTERVAL_S)


def _error_message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as other:
        text = f"(it cannot be printed: {type(other).__name__})"
    return text[:_MAX_SHOWN_CHARS]


def _add_note(error: BaseException, text: str) -> None:
    with suppress(Exception):  # some exceptions take no notes
        error.add_note(text)


def _write_error_file(error: Exception, raised_at: float, *, is_from_this_rank: bool) -> None:
    """Write the file from which torchrun reads this rank's error, as torchrun's ErrorHandler does.

    torchrun reports the error with the earliest time, in whole seconds, as the root cause. So an error about another rank
    (``is_from_this_rank`` is False) is dated one second after ``raised_at``.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    trace = "".join(traceback.format_exception(error)) if is_from_this_rank else _error_message(error)
    extra = {"py_callstack": trace, "timestamp": str(int(raised_at) + (not is_from_this_rank))}
    message = {"message": f"{type(error).__name__}: {_error_message(error)}", "extraInfo": extra}
    with suppress(OSError):  # a failed write must not hide the error itself
        Path(path).write_text(json.dumps({"message": message}))
