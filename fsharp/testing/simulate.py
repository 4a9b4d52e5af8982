"""simulate: run a function as every rank of a mesh, in the threads of one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from fsharp.functional.comm import ReduceOp, sum_in_rank_order
from fsharp.functional.errors import CommError, problem
from fsharp.functional.mesh import Mesh

R = TypeVar("R")


def simulate(mesh: Mesh, fn: Callable[["ThreadComm"], R], *, timeout: float = 60.0) -> list[R]:
    """``[fn(comm) for every rank of mesh]``, all ranks running at once and meeting in collectives.

    Sums are taken in order of rank, as process groups on CPUs take them: a simulated run has the bits of a real one.

    >>> import fsharp as fs
    >>> simulate(fs.Mesh({"dp": 3}), lambda comm: int(comm.all_reduce(torch.tensor(comm.rank), "dp")))
    [3, 3, 3]

    Args:
        mesh: the ranks.
        fn: what each rank does. Torch's global random generator is shared by all ranks, which disturb each other's: pass a
            generator of your own to functions that draw numbers, as an argument, so that ``forward`` can replay it.
        timeout: seconds a rank waits in a collective for the others.

    Returns:
        Results in order of rank.

    Raises:
        CommError: ranks that called different collectives, with what each called; or a rank that returned while others
            waited for it.
        Exception: what the first rank to fail raised; the others are stopped.
    """
    world = _World(mesh, timeout)
    results: list[Any] = [None] * mesh.size
    # A thread starts with gradients enabled, whatever the caller's mode.
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = fn(ThreadComm(world, rank))
            world.leave(rank)
        except BaseException as error:
            world.fail(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(mesh.size)]
    with _one_forward_ad_level():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if world.error is not None:
        raise world.error
    return results


@contextmanager
def _one_forward_ad_level() -> Iterator[None]:
    """Let every rank's ``torch.func.jvp`` use one forward-mode level, which is open for as long as they run.

    torch counts these levels for the process and not for the thread: the rank that came first would open the level, and
    on leaving close it under the others.
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


class ThreadComm:
    """The Comm that :func:`simulate` passes to each rank."""

    def __init__(self, world: "_World", rank: int) -> None:
        self._world, self.rank = world, rank
        self.mesh, self.device = world.mesh, torch.device("cpu")

    def all_gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """``[n, *x.shape]`` in order of coordinate."""
        return torch.stack(self._meet("all_gather", axis, x))

    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum over ranks, in their order, of ``x[own coordinate]``."""
        mine = self.mesh.coord(axis, self.rank)
        parts = [other[mine] for other in self._meet("reduce_scatter", axis, x)]
        return sum_in_rank_order(torch.stack(parts), dtype or x.dtype)

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum") -> torch.Tensor:
        """The sum over ranks in their order, the maximum or the minimum."""
        parts = torch.stack(self._meet(f"all_reduce {op}", axis, x))
        return {"sum": lambda: sum_in_rank_order(parts, x.dtype), "max": lambda: parts.amax(0), "min": lambda: parts.amin(0)}[
            op
        ]()

    def _meet(self, op: str, axis: str, x: torch.Tensor) -> list[torch.Tensor]:
        group = self.mesh.group(axis, self.rank)
        # A copy: a rank whose call has returned may overwrite x while others still read it.
        return self._world.meet(self.rank, group, (op, axis, tuple(x.shape), x.dtype), x.detach().clone())

    def __repr__(self) -> str:
        return f"ThreadComm({self.mesh}, rank={self.rank})"


class _Stopped(Exception):
    """Ends the threads of other ranks once one has failed."""


class _World:
    """Where ranks meet: each posts what it calls and its tensor, and waits until its group has."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._posted: dict[int, tuple[tuple[int, ...], Any, torch.Tensor]] = {}
        self._count = [0] * mesh.size
        self._left: dict[tuple[tuple[int, ...], int], tuple[list[torch.Tensor], int]] = {}
        self._gone: set[int] = set()

    def meet(self, rank: int, group: tuple[int, ...], call: Any, x: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            self._posted[rank] = (group, call, x)
            number = self._count[rank]
            self._count[rank] += 1
            posted = [self._posted.get(r) for r in group]
            if all(p is not None and p[0] == group for p in posted):
                calls = {r: self._posted[r][1] for r in group}
                if len(set(calls.values())) > 1:
                    self._stop(_mismatch(calls))
                parts = [self._posted.pop(r)[2] for r in group]
                for r in group:
                    self._left[(group, r)] = (parts, 0)
                self._changed.notify_all()
            else:
                self._changed.notify_all()
            done = self._changed.wait_for(lambda: (group, rank) in self._left or self._stuck(group), self.timeout)
            if (group, rank) in self._left:
                return self._left.pop((group, rank))[0]
            if self.error is not None:
                raise _Stopped
            waiting = {r: self._posted[r][1] if r in self._posted else "nothing" for r in group}
            reason = "some have returned" if done else f"waited {self.timeout:g} s"
            self._stop(_mismatch(waiting, f"; {reason}, number {number} of rank {rank}"))
            raise AssertionError

    def _stuck(self, group: tuple[int, ...]) -> bool:
        return self.error is not None or any(r in self._gone and r not in self._posted for r in group)

    def _stop(self, error: CommError) -> None:
        if self.error is None:
            self.error = error
        self._changed.notify_all()
        raise error

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        with self._changed:
            if self.error is None and not isinstance(error, _Stopped):
                error.add_note(f"raised by rank {rank} of {self.mesh} in simulate()")
                self.error = error
            self._gone.add(rank)
            self._changed.notify_all()


def _mismatch(calls: dict[int, Any], more: str = "") -> CommError:
    rows = [(f"rank {rank}", _show(call)) for rank, call in calls.items()]
    return CommError(problem("simulate()", f"ranks called different collectives{more}.", rows))


def _show(call: Any) -> str:
    if isinstance(call, str):
        return call
    op, axis, shape, dtype = call
    return f"{op} along {axis!r} of {str(dtype).removeprefix('torch.')}{list(shape)}"
