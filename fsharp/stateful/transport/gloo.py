"""GlooTransport: collectives over gloo, as asynchronous sends and receives from and to memory, with sums in order of rank.

Workers stand where a GPU has streams: one posts sends and receives, which may take as long as gloo is busy with earlier ones;
one for each kind of collective waits for them and takes the sums. Every collective has a tag of its own, so it does not matter
in which order their parts are posted; tags count alike on all ranks, which begin the same collectives in the same order.

What is to be summed arrives in chunks that fit a core's cache, two at a time: it is added while it is there, and takes little
memory. Buffers that go together travel as a message each, all under one tag, unless they are so small that packing them costs
less than messages do.

[Note: two ranks]
``a + b`` is ``b + a`` to the bit, so the order of ranks does not matter where there are two. The other's summand arrives in
one message where the sum will be, if that is elsewhere: each message costs some 0.2 ms of processor time while others compute.
An all_reduce sends the other all there is: as many bytes as halves to and fro, in half as many messages.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsharp.functional.comm.process_group import Messages, ProcessGroupComm
from fsharp.functional.comm.watch import WatchedCall
from fsharp.functional.comm.worker_threads import InFlight, Outcome, Worker
from fsharp.functional.formats.format import dtype_name
from fsharp.stateful.transport.base import PackingTransport, ProcessGroups, Summand, Work

_CHUNK = 1 << 20
"""Bytes."""
_WORTH_A_MESSAGE = 1 << 17
"""Bytes: where packing costs what a message does, while others compute."""


class GlooTransport(PackingTransport):
    """Each rank sends every other its part and adds what arrives.

    Args:
        comm: the ranks.
        groups: to send in.
    """

    is_async = True

    def __init__(self, comm: ProcessGroupComm, groups: ProcessGroups) -> None:
        self.comm, self.groups = comm, groups
        self._on_flight: Callable[[InFlight], None] | None = None
        self._crew = {kind: Worker(kind) for kind in ("posts", "gather", "reduce", "share")}

    def tell(self, on_flight: Callable[[InFlight], None] | None) -> None:
        """Call ``on_flight`` with each collective that begins from here on; None: nobody."""
        self._on_flight = on_flight

    def gather_one(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Asynchronous; the parts land in ``out``."""
        return self.gather([x], [out], axis, label=label)

    def gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, *, label: str = "") -> Work:
        """Asynchronous; a message for each buffer, if they are worth it."""
        if len(xs) > 1 and not _worth_messages(xs):
            return super().gather(xs, outs, axis, label=label)
        rows = [self._parts_around(x, out, axis) for x, out in zip(xs, outs, strict=True)]
        work = self._share("gather", rows, axis, self.groups("gather", axis), self._begin(label, "all_gather", xs, axis))
        return self._shared(work, _nothing) if len(xs) > 1 else work

    def reduce_scatter_one(self, one: Summand, axis: str, dtype: torch.dtype, label: str) -> Work:
        """Asynchronous. Without ``out`` the result is where this rank's part was, if that has the dtype."""
        parts, result = self._parts_to(one, axis, dtype)
        call = self._begin(label, "reduce_scatter", [one.x], axis)
        return self._reduce([parts], [result], axis, one.scratch, call, lambda: result)

    def reduce_scatter(
        self, summands: Sequence[Summand], axis: str, n: int, dtype: torch.dtype, *, label: str = ""
    ) -> list[Work]:
        """Asynchronous; messages for each buffer, if they are worth it. Scratch serves one buffer after the other."""
        if len(summands) == 1 or not _worth_messages(xs := [each.x for each in summands], n):
            return super().reduce_scatter(summands, axis, n, dtype, label=label)
        pairs = [self._parts_to(each, axis, dtype) for each in summands]
        rows, results = [parts for parts, _ in pairs], [result for _, result in pairs]
        call, scratch = self._begin(label, "reduce_scatter", xs, axis), max([each.scratch for each in summands], key=len)
        return self._shared(self._reduce(rows, results, axis, scratch, call, lambda: results), list).each(len(xs))

    def all_reduce_one(self, one: Summand, axis: str, label: str) -> Work:
        """Reduces each rank's part, then gathers the parts; of two ranks see [Note: two ranks]. Asynchronous."""
        x, out = one.x, one.place
        call = self._begin(label, "all_reduce", [x], axis)
        if self.comm.mesh.axis_size(axis) == 2 and x.dtype == out.dtype:
            return self._reduce([(x, x)], [out], axis, one.scratch, call, Work)
        mine, parts, results = self._parts_of_both(x, out, axis)
        second = self._begin(label, "all_gather of sums", [x], axis)  # now: the order of calls is that of the main thread
        share = partial(self._share, "share", [results], axis, self.groups("reduce", axis), second)
        return self._reduce([parts], [results[mine]], axis, one.scratch, call, share)

    def all_reduce(self, summands: Sequence[Summand], axis: str, n: int, *, label: str = "") -> list[Work]:
        """Asynchronous; two ranks send a message for each buffer, if they are worth it."""
        if len(summands) == 1:
            return super().all_reduce(summands, axis, n, label=label)
        xs, outs = [each.x for each in summands], [each.place for each in summands]
        if n != 2 or xs[0].dtype != outs[0].dtype or not _worth_messages(xs):
            return super().all_reduce(summands, axis, n, label=label)
        call, scratch = self._begin(label, "all_reduce", xs, axis), max([each.scratch for each in summands], key=len)
        work = self._reduce([(x, x) for x in xs], outs, axis, scratch, call, Work)
        return [self._shared(work, lambda tail: tail)] * len(xs)

    def exchange(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Asynchronous; the parts of others land in ``out``."""
        n, mine = self.comm.mesh.axis_size(axis), self.comm.mesh.coord(axis, self.comm.rank)
        parts, results = list(x.view(n, -1)), list(out.view(n, -1))
        results[mine].copy_(parts[mine])
        call = self._begin(label, "all_to_all", [x], axis)
        messages = self.comm.messages(self.groups("reduce", axis), axis, call)

        def post() -> list[Any]:
            posted = []
            for to, source in _partners(mine, n):
                posted += _receive(messages, results[source], source)
                posted += _send(messages, parts[to], to)
            return posted

        return self._fly("reduce", post, messages.wait, call)

    def _begin(self, label: str, op: str, xs: Sequence[torch.Tensor], axis: str) -> WatchedCall:
        sizes = "+".join([str(len(x)) for x in xs])
        return self.comm.watch.begin(f"{label}: {op} along {axis} of {sizes} {dtype_name(xs[0].dtype)}")

    def _parts_around(self, x: torch.Tensor, out: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """Each rank's part of what is gathered, this rank's filled."""
        parts = list(out.view(self.comm.mesh.axis_size(axis), -1))
        mine = parts[self.comm.mesh.coord(axis, self.comm.rank)]
        if x.data_ptr() != mine.data_ptr():
            mine.copy_(x)
        return parts

    def _parts_to(self, one: Summand, axis: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each rank's part of what is reduced, and where this rank's sum goes."""
        parts = list(one.x.view(self.comm.mesh.axis_size(axis), -1))
        if one.out is not None:
            return parts, one.out
        mine = parts[self.comm.mesh.coord(axis, self.comm.rank)]
        return parts, mine if mine.dtype == dtype else torch.empty_like(mine, dtype=dtype)

    def _parts_of_both(
        self, x: torch.Tensor, out: torch.Tensor, axis: str
    ) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
        """This rank's coordinate, and each rank's part of what is summed and of the sums; the last ones may be shorter."""
        n = self.comm.mesh.axis_size(axis)
        size = -(-len(x) // n)
        parts, results = ([each[size * r : size * (r + 1)] for r in range(n)] for each in (x, out))
        return self.comm.mesh.coord(axis, self.comm.rank), parts, results

    def _share(
        self, kind: str, rows: Sequence[Sequence[torch.Tensor]], axis: str, group: dist.ProcessGroup, call: WatchedCall
    ) -> Work:
        """Of each row send this rank's part to all others, and receive theirs."""
        mine, messages = self.comm.mesh.coord(axis, self.comm.rank), self.comm.messages(group, axis, call)

        def post() -> list[Any]:
            posted = []
            for to, source in _partners(mine, len(rows[0])):
                for parts in rows:
                    posted += _receive(messages, parts[source], source)
                for parts in rows:
                    posted += _send(messages, parts[mine], to)
            return posted

        return self._fly(kind, post, messages.wait, call)

    def _reduce(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        axis: str,
        scratch: torch.Tensor,
        call: WatchedCall,
        then: Callable[[], Any],
    ) -> Work:
        """Of each row the sum of this rank's part over ranks into its ``out``; the Work's result is that of ``then``."""
        messages = self.comm.messages(self.groups("reduce", axis), axis, call)
        n, mine = len(rows[0]), self.comm.mesh.coord(axis, self.comm.rank)
        pairs = [(parts[mine], out) for parts, out in zip(rows, outs, strict=True) if len(out)]
        if n == 2 and all(x.dtype == out.dtype and x.data_ptr() != out.data_ptr() for x, out in pairs):  # alike on both ranks
            return self._reduce_two(rows, outs, mine, messages, then)
        partners = list(_partners(mine, n))
        chunks = [chunk for x, out in pairs for chunk in zip(_chunks(x), _chunks(out, like=x), strict=True)]
        width = max((len(chunk) for chunk, _ in chunks), default=0)
        memory = scratch.view(rows[0][0].dtype)
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

        return self._fly("reduce", post, finish, call)

    def _reduce_two(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        mine: int,
        messages: Messages,
        then: Callable[[], Any],
    ) -> Work:
        """As :meth:`_reduce`: the other rank's summand goes to ``out``, and this rank's is added to it there."""
        other = 1 - mine

        def post() -> list[Any]:
            received = [each for out in outs for each in _receive(messages, out, other)]
            return received + [each for parts in rows for each in _send(messages, parts[other], other)]

        def finish(posted: list[Any]) -> Any:
            messages.wait(posted)
            for parts, out in zip(rows, outs, strict=True):
                add([parts[mine], out] if mine == 0 else [out, parts[mine]], out)
            return then()

        return self._fly("reduce", post, finish, messages.call)

    def _fly(self, kind: str, post: Callable[[], Any], finish: Callable[[Any], Any], call: WatchedCall) -> Work:
        """Have one worker post, and hand what it has posted to another one that finishes."""
        flight, poster, finisher = InFlight(call), self._crew["posts"], self._crew[kind]
        if self._on_flight is not None:
            self._on_flight(flight)
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
        """Two chunks from each of the others, or all of a part that is no larger than one; none of one other if ``apart``."""
        n = self.comm.mesh.axis_size(axis)
        if apart and n == 2:
            return 0
        part, chunk = -(-numel // n), _CHUNK // itemsize
        return (part if part <= chunk else 2 * chunk) * (n - 1) * itemsize

    def make(self) -> None:
        """Make the process groups, which all ranks do together."""
        self.groups.make()


def _nothing(result: Any) -> None:
    """Do nothing: messages have arrived in the tensors that they are for."""


def _worth_messages(xs: Sequence[torch.Tensor], n: int = 1) -> bool:
    """Whether buffers of which ``n`` parts are sent, each to another rank, go as messages of their own: alike on all ranks."""
    return sum([x.nbytes for x in xs]) >= _WORTH_A_MESSAGE * n * len(xs)


def _chunks(x: torch.Tensor, like: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """In chunks of as many elements as ``like`` has in its own."""
    return x.split(_CHUNK // (x if like is None else like).element_size()) if len(x) else ()


def _partners(mine: int, n: int) -> Iterator[tuple[int, int]]:
    """Whom to send to and whom to receive from, each round another pair."""
    for shift in range(1, n):
        yield (mine + shift) % n, (mine - shift) % n


def _send(messages: Messages, x: torch.Tensor, to: int) -> list[Any]:
    return [messages.send(x, to)] if x.numel() else []


def _receive(messages: Messages, x: torch.Tensor, source: int) -> list[Any]:
    return [messages.receive(x, source)] if x.numel() else []


def add(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``((s0 + s1) + s2) + ...`` in the dtype of ``out``, which may be one of them."""
    if summands[0].dtype == out.dtype and len(summands) == 2:
        torch.add(summands[0], summands[1], out=out)
        return
    total = summands[0].to(out.dtype, copy=True)
    for summand in summands[1:]:
        total += summand
    out.copy_(total)
