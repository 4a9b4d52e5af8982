"""GlooTransport: collectives over gloo as asynchronous sends and receives, with sums in order of rank.

Workers take the place of streams. One worker posts sends and receives, which may block while gloo is busy with earlier ones.
One worker for each kind of collective waits for messages and adds them. Every collective has a tag of its own, so its parts may
be posted in any order. Tags are equal on all ranks, as all ranks begin the same collectives in the same order.

Summands arrive in chunks that fit a core's cache, two at a time. A chunk is added while it is in the cache, and takes little
memory. Buffers of one collective travel as a message each, all under one tag, unless they are so small that packing costs less
than messages.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fsharp.functional.comm.process_group import Messages, ProcessGroupComm
from fsharp.functional.comm.protocol import CountingComm
from fsharp.functional.comm.watch import WatchedCall
from fsharp.functional.comm.worker_threads import InFlight, Outcome, Worker
from fsharp.functional.formats.format import dtype_name
from fsharp.stateful.transport.base import ProcessGroups, Summand, Transport, Work

_CHUNK = 1 << 20
"""Bytes."""
_WORTH_A_MESSAGE = 1 << 17
"""Bytes at which packing costs as much as a message, while ranks compute."""


class GlooTransport(Transport):
    """A Transport over gloo: each rank sends every other rank its part, and adds the parts that arrive, asynchronously.

    Args:
        comm: the ranks.
        groups: process groups for the messages.
        counters: counters of collectives.
    """

    is_async = True
    groups: ProcessGroups

    def __init__(self, comm: ProcessGroupComm, groups: ProcessGroups, counters: Sequence[CountingComm] = ()) -> None:
        self.comm, self.groups, self.counters = comm, groups, counters
        self._on_flight: Callable[[InFlight], None] | None = None
        self._crew = {kind: Worker(kind) for kind in ("posts", "gather", "reduce", "share")}

    def tell(self, on_flight: Callable[[InFlight], None] | None) -> None:
        """Call ``on_flight`` with each later collective; None ends that."""
        self._on_flight = on_flight

    def packs(self, op: str, xs: Sequence[torch.Tensor], n: int) -> bool:
        """Return whether parts of buffers are too small for messages of their own."""
        return op == "all_reduce" or sum([x.nbytes for x in xs]) < _WORTH_A_MESSAGE * n * len(xs)

    def gather_each(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Gather by messages straight into ``outs``."""
        rows = [self._parts_around(x, out, axis) for x, out in zip(xs, outs, strict=True)]
        mine, flight = self.comm.mesh.coord(axis, self.comm.rank), self._begin(label, "all_gather", xs, axis)
        work = self._swap("gather", [[row[mine]] * len(row) for row in rows], rows, axis, flight)
        return self._shared(work, _same) if len(xs) > 1 else work

    def reduce_scatter_each(self, summands: Sequence[Summand], axis: str, dtype: torch.dtype, label: str) -> list[Work]:
        """Sum by messages. Without ``out`` the sum replaces this rank's part, if the part has the dtype of the sum."""
        rows, results = zip(*[self._parts_to(each, axis, dtype) for each in summands], strict=True)
        flight = self._begin(label, "reduce_scatter", [each.x for each in summands], axis)
        if len(summands) == 1:
            return [self._reduce(rows, results, axis, summands, flight, lambda: results[0])]
        return self._shared(self._reduce(rows, results, axis, summands, flight, lambda: results), _same).each(len(summands))

    def all_reduce_each(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Reduce each rank's part, then gather the parts; the last parts may be shorter."""
        x, out = summands[0].x, summands[0].place
        first = self._call(label, "all_reduce", [x], axis)
        # Begun now, too: the order of calls is that of the main thread.
        second = InFlight(self._call(label, "all_gather of sums", [x], axis))
        flight = self._told(InFlight(first, second))
        n, mine = self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)
        size = -(-len(x) // n)
        parts, results = ([each[size * r : size * (r + 1)] for r in range(n)] for each in (x, out))
        share = partial(self._swap, "share", [[results[mine]] * n], [results], axis, second)
        return [self._reduce([parts], [results[mine]], axis, summands, flight, share)]

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange parts by messages, straight into ``out``."""
        n, mine = self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)
        parts, results = list(x.view(n, -1)), list(out.view(n, -1))
        results[mine].copy_(parts[mine])
        return self._swap("reduce", [parts], [results], axis, self._begin(label, "all_to_all", [x], axis))

    def _begin(self, label: str, op: str, xs: Sequence[torch.Tensor], axis: str) -> InFlight:
        return self._told(InFlight(self._call(label, op, xs, axis)))

    def _told(self, flight: InFlight) -> InFlight:
        if self._on_flight is not None:
            self._on_flight(flight)
        return flight

    def _call(self, label: str, op: str, xs: Sequence[torch.Tensor], axis: str) -> WatchedCall:
        sizes = "+".join([str(len(x)) for x in xs])
        return self.comm.watch.begin(f"{label}: {op} along {axis} of {sizes} {dtype_name(xs[0].dtype)}")

    def _parts_around(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """Return each rank's part of the gathered buffers, with this rank's part filled."""
        parts = list(out.view(self.comm.mesh.axis_size(axis), -1))
        mine = parts[self.comm.mesh.coord(axis, self.comm.rank)]
        if x.data_ptr() != mine.data_ptr():
            mine.copy_(x)
        return parts

    def _parts_to(self, one: Summand, axis: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return each rank's part of the reduced buffers, and the memory for this rank's sum."""
        parts = list(one.x.view(self.comm.mesh.axis_size(axis), -1))
        if one.out is not None:
            return parts, one.out
        mine = parts[self.comm.mesh.coord(axis, self.comm.rank)]
        return parts, mine if mine.dtype == dtype else torch.empty_like(mine, dtype=dtype)

    def _swap(
        self,
        kind: str,
        send: Sequence[Sequence[torch.Tensor]],
        receive: Sequence[Sequence[torch.Tensor]],
        axis: str,
        flight: InFlight,
    ) -> Work:
        """Send other ranks their parts of each row in ``send``; receive each other rank's part into the rows of ``receive``."""
        messages = self.comm.messages(self.groups("gather" if kind == "gather" else "reduce", axis), axis, flight.call)

        def post() -> list[Any]:
            posted = []
            for to, source in _partners(self.comm.mesh.coord(axis, self.comm.rank), len(send[0])):
                for row in receive:
                    posted += _receive(messages, row[source], source)
                for row in send:
                    posted += _send(messages, row[to], to)
            return posted

        return self._post_and_finish(kind, post, messages.wait, flight)

    def _reduce(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        axis: str,
        summands: Sequence[Summand],
        flight: InFlight,
        then: Callable[[], Any],
    ) -> Work:
        """Sum this rank's part of each row over ranks, into the row's ``out``. The Work's result is that of ``then``.

        Scratch serves one buffer after the other.
        """
        messages = self.comm.messages(self.groups("reduce", axis), axis, flight.call)
        n, mine = len(rows[0]), self.comm.mesh.coord(axis, self.comm.rank)
        pairs = [(parts[mine], out) for parts, out in zip(rows, outs, strict=True) if len(out)]
        partners = list(_partners(mine, n))
        chunks = [chunk for x, out in pairs for chunk in zip(_chunks(x), _chunks(out, like=x), strict=True)]
        width = max((len(chunk) for chunk, _ in chunks), default=0)
        memory = max([each.scratch for each in summands], key=len).view(rows[0][0].dtype)
        room = (n - 1) * width
        num_rooms = min(2, len(memory) // room) if room else 1
        rooms = memory[: num_rooms * room].view(num_rooms, n - 1, width)

        def receive(k: int) -> list[Any]:
            into, size = rooms[k % num_rooms], len(chunks[k][0])
            return [each for i, (_, source) in enumerate(partners) for each in _receive(messages, into[i][:size], source)]

        def post() -> tuple[list[Any], list[list[Any]]]:
            received = [receive(k) for k in range(min(num_rooms, len(chunks)))]
            sent = []
            for to, _ in partners:
                for chunk in [chunk for parts in rows for chunk in _chunks(parts[to])]:
                    sent += _send(messages, chunk, to)
            return sent, received

        def finish(posted: tuple[list[Any], list[list[Any]]]) -> Any:
            sent, received = posted
            order = sorted(range(n - 1), key=lambda i: partners[i][1])
            for k, (chunk, result) in enumerate(chunks):
                messages.wait(received[k])
                summands = [rooms[k % num_rooms][i][: len(chunk)] for i in order]
                summands.insert(mine, chunk)
                add(summands, result)
                if k + num_rooms < len(chunks):
                    received.append(receive(k + num_rooms))
            messages.wait(sent)
            return then()

        return self._post_and_finish("reduce", post, finish, flight)

    def _post_and_finish(self, kind: str, post: Callable[[], Any], finish: Callable[[Any], Any], flight: InFlight) -> Work:
        """Run a collective on two workers: one posts the messages, and hands them to another one, which completes them."""
        poster, finisher = self._crew["posts"], self._crew[kind]
        poster.start()
        finisher.start()

        def begin() -> None:
            posted = Outcome()
            posted.run(post)
            posted.land()
            finisher.submit(lambda: finish(posted.take()), flight)

        poster.submit(begin, Outcome())
        return Work(then=flight.wait)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, apart: bool = False) -> int:
        """Return the bytes of two chunks from each other rank, or of the whole part if it is no larger than a chunk."""
        n = self.comm.mesh.axis_size(axis)
        part, chunk = -(-numel // n), _CHUNK // itemsize
        return (part if part <= chunk else 2 * chunk) * (n - 1) * itemsize


def _same(result: Any) -> Any:
    return result


def _chunks(x: torch.Tensor, like: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """Cut a tensor into chunks with as many elements as ``like`` has in a chunk."""
    return x.split(_CHUNK // (x if like is None else like).element_size()) if len(x) else ()


def _partners(mine: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield ``(receiver, sender)``: in each round the rank to send to, and the rank to receive from."""
    for shift in range(1, n):
        yield (mine + shift) % n, (mine - shift) % n


def _send(messages: Messages, x: torch.Tensor, to: int) -> list[Any]:
    return [messages.send(x, to)] if x.numel() else []


def _receive(messages: Messages, x: torch.Tensor, source: int) -> list[Any]:
    return [messages.receive(x, source)] if x.numel() else []


def add(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``((s0 + s1) + s2) + ...`` to ``out``, in its dtype. ``out`` may be one of the summands."""
    if summands[0].dtype == out.dtype and len(summands) == 2:
        torch.add(summands[0], summands[1], out=out)
        return
    total = summands[0].to(out.dtype, copy=True)
    for summand in summands[1:]:
        total += summand
    out.copy_(total)
