"""simulate: run a function as every rank of a mesh, in the threads of one process.

[Note: turns]
One rank runs at a time: it has *the turn*, until it waits in a collective or ends. Then the next rank that need not wait gets
the turn. With a seed a rank also passes the turn on at collectives in which it need not wait, and at :meth:`ThreadComm.pause`.
The seed chooses the next rank. So a run is a function of the program and the seed, and a failure can be repeated.

[Note: how a rank ends]
A rank *returns*, *raises*, *dies* or *stalls*, and then takes part in no collective. Another rank that
needs it in a collective gets a CommError. If all living ranks wait and no collective can complete, all of them get a CommError
at once. A rank that dies or stalls stops in the middle of its function, as a killed process does. Its ``finally`` blocks run
after all other ranks have ended.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, overload

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from fsharp.errors import CommError, problem
from fsharp.functional.comm.agree import ranks_text
from fsharp.functional.comm.protocol import (
    ReduceOp,
    check_parts,
    check_reduce_op,
    check_row_per_rank,
    check_sizes_of_ranks,
    sum_in_rank_order,
)
from fsharp.functional.comm.settings_digests import differing_settings_rows, settings_texts_by_digest
from fsharp.functional.comm.tree_labels import TreeLabelCounters
from fsharp.functional.layout.mesh import Mesh
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

R = TypeVar("R")
_MAX_SHOWN_RANKS = 16  # largest number of ranks that an error describes


@overload
def simulate(mesh: Mesh, fn: Callable[["ThreadComm"], R], *, seed: int | None = None, timeout: float = 60.0) -> list[R]: ...
@overload
def simulate(
    mesh: Mesh, fn: Callable[["ThreadComm"], R], *, seed: int | None = None, timeout: float = 60.0, outcomes: Literal[True]
) -> "list[R | BaseException]": ...
@options_checked
def simulate(
    mesh: Mesh, fn: Callable[["ThreadComm"], Any], *, seed: int | None = None, timeout: float = 60.0, outcomes: bool = False
) -> list[Any]:
    """Run ``fn(comm)`` on every rank of a mesh, all in this process, and return the results in order of rank.

    Ranks are threads that take turns, and meet in collectives. Sums are taken in order of rank, as over gloo. So a simulated
    run is bitwise equal to a run of processes on CPUs.

    >>> import fsharp as fs
    >>> simulate(fs.Mesh({"dp": 3}), lambda comm: int(comm.all_reduce(torch.tensor(comm.rank), "dp")))
    [3, 3, 3]

    Args:
        mesh: the ranks.
        fn: function that each rank calls. All ranks share torch's global random generator. So let each rank make a generator,
            and pass it as an argument to functions: ``forward`` can then replay the random numbers.
        seed: seed of the order in which ranks take turns, at each collective and each :meth:`ThreadComm.pause`. With None each
            rank runs until it has to wait, and then the next rank runs.
        timeout: seconds that may pass without a collective of any rank; :meth:`ThreadComm.pause` does not count. If more
            seconds pass, the waiting ranks raise CommError. A rank must not wait for another rank by other means than
            ``comm``. A deadlock within ``comm`` is found at once.
        outcomes: return the error of each rank that raised one, in place of its result, and a :class:`Killed` for a rank that
            died or stalled (:meth:`ThreadComm.simulate_death`). If False, the first error is raised.

    Raises:
        CommError: ranks called different collectives; the message has all calls.
        CommError: a rank waits for a call that cannot come.
        CommError: a rank died, and no rank raised an error; only without ``outcomes``.
        Exception: the error of the first rank that failed.
    """
    world = _World(mesh, timeout, seed)
    # A new thread has gradients enabled and no autocast, whatever the caller's modes.
    grad, has_cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    def run(rank: int) -> None:
        try:
            world.start(rank)
            with ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(grad))
                for kind, dtype in autocast.items():
                    modes.enter_context(torch.autocast(kind, dtype, cache_enabled=has_cache))
                result = fn(ThreadComm(world, rank))
            world.end(rank, "has returned", result)
        except BaseException as error:
            error.add_note(f"raised by rank {rank} of {mesh} in simulate()")
            first_line = (str(error).splitlines() or [""])[0]
            world.end(rank, f"has failed with {type(error).__name__}: {first_line}", error)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(mesh.size)
    ]
    with _one_forward_ad_level():
        try:
            for thread in threads:
                thread.start()
            world.wait_until_all_ended()
        except BaseException:  # such as Ctrl-C
            world.interrupt()
            raise
        for rank, thread in enumerate(threads):
            if world.has_result[rank]:
                thread.join()
    if outcomes:
        return world.results
    if world.errors:
        raise next((error for error in world.errors if not isinstance(error, Killed)), CommError(str(world.errors[0])))
    return world.results


@contextmanager
def _one_forward_ad_level() -> Iterator[None]:
    """Keep one forward-mode level of autograd open in this context, and let ``torch.func.jvp`` of every rank use it.

    torch counts these levels for the process and not for the thread. The first rank would open the level, and close it while
    other ranks still use it.
    """
    if eager_transforms.JVP_NESTING:
        yield
        return
    with forward_ad.dual_level():
        eager_transforms.JVP_NESTING += 1
        try:
            yield
        finally:
            eager_transforms.JVP_NESTING -= 1


class Killed(BaseException):
    """Raised in a rank that died or stalled, after all other ranks have ended. ``except Exception`` does not catch it."""


class ThreadComm:
    """The Comm that :func:`simulate` passes to each rank.

    Ranks that meet in a collective have to agree in operation, axis, shape, dtype and label. If calls differ, each rank gets an
    error and no data.
    """

    def __init__(self, world: "_World", rank: int) -> None:
        self._world, self.rank = world, rank
        self.mesh, self.device = world.mesh, torch.device("cpu")
        self.tree_label_counters = TreeLabelCounters()

    @api_boundary
    def all_gather(self, x: torch.Tensor, axis: str, *, label: str = "") -> torch.Tensor:
        """Return the tensors of all ``n`` ranks of the axis, in order of coordinate: ``[n, *x.shape]``."""
        return torch.stack(self._meet("all_gather", axis, x, label))

    @api_boundary
    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None, label: str = "") -> torch.Tensor:
        """Return the sum over ranks of ``x[c]``, added in order of rank in ``dtype``.

        ``c``: this rank's coordinate on ``axis``.
        """
        check_row_per_rank(x, self.mesh.axis_size(axis))
        mine = self.mesh.coord(axis, self.rank)
        parts = [other[mine] for other in self._meet("reduce_scatter", axis, x, label)]
        return sum_in_rank_order(torch.stack(parts), dtype or x.dtype)

    @api_boundary
    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum", label: str = "") -> torch.Tensor:
        """Return the sum over ranks, added in order of rank, or the maximum or the minimum."""
        check_reduce_op(op)
        parts = torch.stack(self._meet(f"all_reduce {op}", axis, x, label))
        if op == "sum":
            return sum_in_rank_order(parts, x.dtype)
        return parts.amax(0) if op == "max" else parts.amin(0)

    @api_boundary
    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, axis: str | None = None, label: str = ""
    ) -> torch.Tensor:
        """Send ``send[r]`` elements of ``x`` to each rank ``r``, in order. Return ``receive[r]`` elements from each rank."""
        facts = CollectiveFacts("all_to_all", axis or "", (), x.dtype, label)
        group = tuple(range(self.mesh.size)) if axis is None else self.mesh.group(axis, self.rank)
        check_parts(x, send, receive, len(group))
        sent = self._world.meet(self.rank, group, facts, (x.detach().clone().split(list(send)), [*send, *receive]))
        check_sizes_of_ranks([sizes for _, sizes in sent])
        parts = [each[group.index(self.rank)] for each, _ in sent]
        return torch.cat(parts)

    def pause(self) -> None:
        """Pass the turn to the rank that the seed chooses. Without a seed this does nothing."""
        self._world.pause(self.rank)

    def simulate_death(self) -> NoReturn:
        """End as a killed process does. Ranks that need this rank get a CommError. Raises Killed once all others have ended."""
        self._world.kill(self.rank, "has died")

    def simulate_stall(self) -> NoReturn:
        """Stop as after SIGSTOP. Once all living ranks wait, they get a CommError. Raises Killed once all others have ended."""
        self._world.kill(self.rank, "has stalled")

    def _meet(self, op: str, axis: str, x: torch.Tensor, label: str) -> list[torch.Tensor]:
        group = self.mesh.group(axis, self.rank)
        # A copy, as this rank may overwrite x after its call while other ranks still read x.
        return self._world.meet(self.rank, group, CollectiveFacts(op, axis, tuple(x.shape), x.dtype, label), x.detach().clone())

    def __repr__(self) -> str:
        return f"ThreadComm({self.mesh}, rank={self.rank})"


class CollectiveFacts(NamedTuple):
    """The facts of a collective call that have to be equal on all ranks of its group."""

    op: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str

    def __str__(self) -> str:
        along = f" along {self.axis!r}" if self.axis else ""
        text = f"{self.op}{along} of {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{text} for {self.label!r}" if self.label else text


class _RankCall:
    """A rank's call of a collective. ``outcome``: None, and at the end of the call the tensors of all ranks, or an error."""

    def __init__(self, group: tuple[int, ...], facts: CollectiveFacts, number: int, x: Any) -> None:
        self.group, self.facts, self.number, self.x = group, facts, number, x
        self.outcome: list[Any] | CommError | None = None

    def set_outcome(self, outcome: list[Any] | CommError) -> None:
        """End the call with the tensors of all ranks, in order of coordinate, or with an error."""
        self.outcome = outcome


class _World:
    """The state that all simulated ranks share: their calls of collectives, and which rank has the turn."""

    def __init__(self, mesh: Mesh, timeout: float, seed: int | None) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.results: list[Any] = [None] * mesh.size
        self.errors: list[BaseException] = []
        self._random = None if seed is None else random.Random(seed)
        self._calls: list[_RankCall | None] = [None] * mesh.size  # the call in which each rank waits
        self._last: list[CollectiveFacts | None] = [None] * mesh.size  # the last call of each rank that has returned
        self._num_calls = [0] * mesh.size
        self._ended: list[str | None] = [None] * mesh.size  # how each rank has ended; None while it lives
        self.has_result = [False] * mesh.size  # whether a rank's thread has ended, or is about to end
        self._lock = threading.Lock()
        self._has_turn = [threading.Condition(self._lock) for _ in range(mesh.size)]
        self._has_ended = threading.Condition(self._lock)  # notified when a rank ends, and at the end of the run
        self._last_change = time.monotonic()
        self._is_over = False
        self._turn: int | None = 0 if self._random is None else self._random.randrange(mesh.size)

    # ------------------------------------------------------------ called by ranks

    def start(self, rank: int) -> None:
        with self._lock:
            self._await_turn(rank)

    def pause(self, rank: int) -> None:
        with self._lock:
            self._refuse_ended_rank(rank)
            if self._random is not None and self._turn == rank:
                self._pass_turn()
                self._await_turn(rank)

    def meet(self, rank: int, group: tuple[int, ...], facts: CollectiveFacts, x: Any) -> list[Any]:
        with self._lock:
            self._refuse_ended_rank(rank)
            call = self._calls[rank] = _RankCall(group, facts, self._num_calls[rank], x)
            self._num_calls[rank] += 1
            self._settle_calls([rank])
            if self._turn == rank and (self._random is not None or call.outcome is None):
                self._pass_turn()
            self._await_turn(rank)
            self._calls[rank], self._last[rank] = None, facts
            assert call.outcome is not None, "only a rank whose call has ended gets the turn"
            if isinstance(call.outcome, CommError):
                raise call.outcome
            return call.outcome

    def kill(self, rank: int, how: str) -> NoReturn:
        with self._lock:
            self._refuse_ended_rank(rank)
            self._mark_ended(rank, how)
            self._has_ended.wait_for(lambda: self._is_over)
            raise Killed(f"simulate(): rank {rank} {how}")

    def end(self, rank: int, how: str, result: Any) -> None:
        with self._lock:
            if self._ended[rank] is None:
                self._mark_ended(rank, how)
            if isinstance(result, BaseException):
                self.errors.append(result)
            self.results[rank] = result
            self.has_result[rank] = True
            self._has_ended.notify_all()

    # ------------------------------------------------------------ called by simulate()

    def wait_until_all_ended(self) -> None:
        """Wait until every rank has ended.

        After twice ``timeout`` without progress return, with a CommError for each rank that has not ended.
        """
        with self._lock:
            while not all(self._ended):
                left = self._last_change + 2 * self.timeout - time.monotonic()
                if left <= 0:
                    break
                self._has_ended.wait(left)
            self._is_over = True
            self._has_ended.notify_all()
            both = self.has_result, self._ended
            self._has_ended.wait_for(lambda: all(is_done or how is None for is_done, how in zip(*both)), self.timeout)
            for rank, has_result in enumerate(self.has_result):
                if not has_result:
                    text = self._text_with_states(rank, f"rank {rank} has not come to an end in {2 * self.timeout:g} s.")
                    self.results[rank] = CommError(text)
                    self.errors.append(self.results[rank])

    def interrupt(self) -> None:
        """End all ranks: a rank that waits raises Killed at once, any other rank at its next collective or pause."""
        with self._lock:
            self._ended = [how or "was interrupted" for how in self._ended]
            self._is_over = True
            for each in (*self._has_turn, self._has_ended):
                each.notify_all()

    # ------------------------------------------------------------ called under the lock

    def _refuse_ended_rank(self, rank: int) -> None:
        if self._ended[rank] is not None:  # called in a finally block of a killed rank, or in another thread of the rank
            raise Killed(f"simulate(): rank {rank} {self._ended[rank]}, and takes part in nothing more")

    def _mark_ended(self, rank: int, how: str) -> None:
        self._ended[rank] = how
        self._settle_calls(range(self.mesh.size))
        if self._turn == rank:
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Pass the turn to a rank that need not wait: the next in order of rank, or with a seed a random rank."""
        able = [r for r, how in enumerate(self._ended) if how is None and not self._is_waiting(r)]
        if self._random is not None:
            self._turn = self._random.choice(able) if able else None
        else:
            before = self._turn or 0
            self._turn = min(able, key=lambda r: (r - before - 1) % self.mesh.size, default=None)
        if self._turn is not None:
            self._has_turn[self._turn].notify()

    def _await_turn(self, rank: int) -> None:
        """Wait until this rank has the turn. Raise a CommError after the time limit."""
        since = time.monotonic()
        while self._turn != rank:
            self._refuse_ended_rank(rank)
            # The second limit is for a rank that waits while other ranks make progress.
            left = min(self._last_change + self.timeout, since + self.timeout * self.mesh.size) - time.monotonic()
            if left <= 0:
                raise CommError(self._wait_timeout_text(rank, time.monotonic() - since))
            self._has_turn[rank].wait(left)

    def _wait_timeout_text(self, rank: int, waited_s: float) -> str:
        call = self._calls[rank]
        if call is None or call.outcome is not None:
            return self._text_with_states(
                rank, f"rank {self._turn} has had the turn for {self.timeout:g} s; rank {rank} waits for it."
            )
        late = [r for r in call.group if (other := self._calls[r]) is None or other.group != call.group]
        return self._text_with_states(
            rank, f"waited {round(waited_s, 2):g} s, number {call.number} of rank {rank}, for {ranks_text(late)}."
        )

    def _settle_calls(self, ranks: Iterable[int]) -> None:
        """Complete each call of ``ranks`` for which all ranks have come, and fail each call that cannot be completed.

        If every living rank waits, fail all calls.
        """
        self._last_change = time.monotonic()
        for rank in ranks:
            call = self._calls[rank]
            if call is not None and call.outcome is None:
                self._settle_group(rank, call)
        living = [r for r, how in enumerate(self._ended) if how is None]
        if living and all(map(self._is_waiting, living)):
            stalled = [r for r, how in enumerate(self._ended) if how == "has stalled"]
            what = f"{ranks_text(stalled)} did not come" if stalled else "every rank waits, and no call can end"
            text = self._text_with_states(None, f"{what}.")
            for call in filter(None, [self._calls[r] for r in living]):
                call.set_outcome(CommError(text))

    def _is_waiting(self, rank: int) -> bool:
        call = self._calls[rank]
        return call is not None and call.outcome is None

    def _settle_group(self, rank: int, call: _RankCall) -> None:
        gone = [r for r in call.group if self._ended[r] not in (None, "has stalled")]
        if gone:
            are = "are" if len(gone) > 1 else "is"
            what = f"{ranks_text(gone)} {are} gone; {call.facts}, number {call.number} of rank {rank}"
            call.set_outcome(CommError(self._text_with_states(rank, f"{what}, cannot end.")))
            return
        here = [each for r in call.group if (each := self._calls[r]) is not None]
        calls = [each for each in here if each.outcome is None and each.group == call.group]
        if len(calls) < len(call.group):
            return
        parts, text = [each.x for each in calls], ""
        if len({each.facts for each in calls}) > 1:
            labels = {r: str(each.facts) for r, each in zip(call.group, calls, strict=True)}
            rows = [(f"rank {r}", label) for r, label in labels.items()]
            rows += differing_settings_rows(labels, settings_texts_by_digest(labels.values()))
            text = problem("simulate()", "ranks called different collectives.", rows)
        for each in calls:
            each.set_outcome(CommError(text) if text else parts)  # an error of its own for each rank, which notes the rank

    def _text_with_states(self, rank: int | None, what: str) -> str:
        """Return an error text with ``what`` and the state of each rank.

        On more than 16 ranks at most 16 are shown. If ``rank`` waits in a collective, these are ranks of this collective.
        """
        shown: Sequence[int] = range(self.mesh.size)
        if self.mesh.size > _MAX_SHOWN_RANKS:
            call = None if rank is None else self._calls[rank]
            shown = list(shown if call is None else call.group)[:_MAX_SHOWN_RANKS]
        return problem("simulate()", what, [(f"rank {r}", self._what_rank_waits_for(r)) for r in shown])

    def _what_rank_waits_for(self, rank: int) -> str:
        last, call, ended = self._last[rank], self._calls[rank], self._ended[rank]
        after = f", after {last}" if last is not None else ""
        if ended is not None:
            return f"nothing, it {ended}{after}"
        return str(call.facts) if call is not None else f"nothing yet, it computes{after}"
