"""GlooTransport: collectives over gloo as asynchronous sends and receives, with sums in order of rank.

Workers take the place of streams. One worker posts sends and receives, which may block while gloo is busy. One worker for each
kind of collective waits for messages and adds them. Every collective has a tag of its own, so its parts may be posted in any
order. Tags are equal on all ranks, as all ranks begin the same collectives in the same order.

Summands arrive in chunks that fit a core's cache, two at a time. A chunk is added while it is in the cache, and takes little
memory. Buffers of one collective travel as a message each, all under one tag, unless packing small ones costs less.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch

from fsharp.distributed.process_group import P2PChannel, PartsOfBuffers, ProcessGroupComm, TransportGroups, exchange_rounds
from fsharp.distributed.worker_threads import CollectiveOutcome, Outcome, Worker
from fsharp.functional.comm.protocol import CountingComm
from fsharp.functional.formats.format import dtype_name
from fsharp.stateful.transport.base import Summand, Transport, Work

_CHUNK_NBYTES = 1 << 20
"""Bytes of a chunk."""
_MIN_MESSAGE_NBYTES = 1 << 17
"""Bytes of a part for which packing costs as much as a message, while ranks compute."""


class GlooTransport(Transport):
    """A Transport over gloo, asynchronous: each rank sends each other rank its part, and adds the parts that arrive."""

    waits_on_host = True
    comm: ProcessGroupComm
    groups: TransportGroups

    def __init__(self, comm: ProcessGroupComm, groups: TransportGroups, counters: Sequence[CountingComm] = ()) -> None:
        super().__init__(comm, groups, counters)
        self._on_collective: Callable[[CollectiveOutcome], None] | None = None
        self._crew = {kind: Worker(kind) for kind in ("posts", "gather", "reduce", "share")}

    def observe_collectives(self, on_collective: Callable[[CollectiveOutcome], None] | None) -> None:
        """Call ``on_collective`` for each later collective; None ends these calls."""
        self._on_collective = on_collective

    def should_pack(self, xs: Sequence[torch.Tensor], n: int) -> bool:
        """Return whether parts of the buffers are too small for messages of their own."""
        return sum([x.nbytes for x in xs]) < _MIN_MESSAGE_NBYTES * n * len(xs)

    def gather_unpacked(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], axis: str, label: str) -> Work:
        """Begin to gather: each rank sends its parts as messages, which are received directly in their places in ``outs``."""
        n, mine = self._size_and_coord(axis)
        rows = [list(out.view(n, -1)) for out in outs]
        for x, row in zip(xs, rows, strict=True):
            if x.data_ptr() != row[mine].data_ptr():
                row[mine].copy_(x)
        return self._exchange_parts(
            "gather", [[row[mine]] * n for row in rows], rows, mine, self._begin_p2p_call(label, "all_gather", xs, axis)
        )

    def reduce_scatter_unpacked(self, summands: Sequence[Summand], axis: str, out_dtype: torch.dtype, label: str) -> list[Work]:
        """Sum by messages. Without ``out`` the sum replaces this rank's part of ``x``; in another dtype it gets new memory."""
        n, mine = self._size_and_coord(axis)
        rows, outs = [list(each.x.view(n, -1)) for each in summands], []
        for each, row in zip(summands, rows, strict=True):
            out = row[mine] if each.out is None else each.out
            outs.append(out if each.out is not None or out.dtype == out_dtype else torch.empty_like(out, dtype=out_dtype))
        channel = self._begin_p2p_call(label, "reduce_scatter", [each.x for each in summands], axis)
        work = self._exchange_and_sum_parts(rows, outs, mine, summands, channel)
        return [Work(work.wait, out) for out in outs]

    def all_reduce_unpacked(self, summands: Sequence[Summand], axis: str, label: str) -> list[Work]:
        """Sum this rank's part of each buffer over ranks, then gather the sums of all parts. Parts may differ by 1 element."""
        xs, outs = [each.x for each in summands], [each.required_out for each in summands]
        first = self._begin_p2p_call(label, "all_reduce", xs, axis)
        n, mine = self._size_and_coord(axis)
        parts, results = ([x.tensor_split(n) for x in each] for each in (xs, outs))
        second = self._begin_p2p_call(label, "all_gather of sums", xs, axis)  # here, as all ranks begin calls in one order
        sums = CollectiveOutcome(second.call)
        share = partial(self._exchange_parts, "share", [[row[mine]] * n for row in results], results, mine, second, sums)
        summed = self._exchange_and_sum_parts(parts, [row[mine] for row in results], mine, summands, first, share, sums)
        return [Work(lambda: summed.wait().wait())] * len(xs)

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor, axis: str, label: str) -> Work:
        """Exchange parts by messages, directly into ``out``."""
        n, mine = self._size_and_coord(axis)
        parts, results = list(x.view(n, -1)), list(out.view(n, -1))
        results[mine].copy_(parts[mine])
        return self._exchange_parts("reduce", [parts], [results], mine, self._begin_p2p_call(label, "all_to_all", [x], axis))

    def _begin_p2p_call(self, label: str, op: str, xs: Sequence[torch.Tensor], axis: str) -> P2PChannel:
        """Begin a collective of ``xs``, and return the channel for its messages. If a message is late, ranks compare labels."""
        sizes = "+".join([str(len(x)) for x in xs])
        call = self.comm.watch.begin_call(f"{label}: {op} along {axis} of {sizes} {dtype_name(xs[0].dtype)}")
        return self.comm.p2p_channel(self.groups("gather" if op == "all_gather" else "reduce", axis), axis, call)

    def _exchange_parts(
        self,
        kind: str,
        send: PartsOfBuffers,
        receive: PartsOfBuffers,
        mine: int,
        channel: P2PChannel,
        outcome: CollectiveOutcome | None = None,
    ) -> Work:
        """Send to every other rank its part of each row in ``send``, and receive that rank's part of each row in ``receive``.

        ``mine``: this rank's coordinate along the axis. ``kind``: name of the worker that waits for the messages. ``outcome``:
        the outcome of the collective, if it exists already.
        """
        post = partial(channel.exchange, send, receive, mine)
        return self._run_in_two_workers(kind, post, channel.wait, outcome or CollectiveOutcome(channel.call))

    def _exchange_and_sum_parts(
        self,
        rows: PartsOfBuffers,
        outs: Sequence[torch.Tensor],
        mine: int,
        summands: Sequence[Summand],
        channel: P2PChannel,
        then: Callable[[], Any] = lambda: None,
        second_outcome: CollectiveOutcome | None = None,
    ) -> Work:
        """Sum this rank's part of each buffer over ranks, and write the sums to ``outs``. ``mine``: the part's index.

        ``rows`` has the parts of each buffer, and ``summands`` lend scratch memory. For an all_reduce ``then`` is called at the
        end, and begins the gather of the sums. ``second_outcome`` is the outcome of this gather.
        """
        n = len(rows[0])
        partners = list(exchange_rounds(mine, n))
        pairs = [(parts[mine], out) for parts, out in zip(rows, outs, strict=True) if len(out)]
        numel = _CHUNK_NBYTES // rows[0][0].element_size()
        chunks = [chunk for x, out in pairs for chunk in zip(x.split(numel), out.split(numel), strict=True)]
        width = max((len(chunk) for chunk, _ in chunks), default=0)
        memory = max([each.scratch for each in summands], key=len).view(rows[0][0].dtype)
        room = (n - 1) * width
        num_rooms = min(2, len(memory) // room) if room else 1
        rooms = memory[: num_rooms * room].view(num_rooms, n - 1, width)

        def receive(k: int) -> list[Any]:
            into, size = rooms[k % num_rooms], len(chunks[k][0])
            return [channel.receive(into[i][:size], source) for i, (_, source) in enumerate(partners)]

        def post() -> tuple[list[Any], list[list[Any]]]:
            received = [receive(k) for k in range(min(num_rooms, len(chunks)))]
            parts = [(to, row[to]) for to, _ in partners for row in rows if len(row[to])]
            sent = [channel.send(chunk, to) for to, part in parts for chunk in part.split(numel)]
            return sent, received

        def finish(posted: tuple[list[Any], list[list[Any]]]) -> Any:
            sent, received = posted
            order = sorted(range(n - 1), key=lambda i: partners[i][1])
            for k, (chunk, result) in enumerate(chunks):
                channel.wait(received[k])
                summands = [rooms[k % num_rooms][i][: len(chunk)] for i in order]
                summands.insert(mine, chunk)
                add_summands(summands, result)
                if k + num_rooms < len(chunks):
                    received.append(receive(k + num_rooms))
            channel.wait(sent)
            return then()

        return self._run_in_two_workers("reduce", post, finish, CollectiveOutcome(channel.call, second_outcome))

    def _run_in_two_workers(
        self, kind: str, post: Callable[[], Any], finish: Callable[[Any], Any], outcome: CollectiveOutcome
    ) -> Work:
        """Run a collective in two workers: one calls ``post``, to send; then worker ``kind`` calls ``finish``, to wait."""
        poster, finisher = self._crew["posts"], self._crew[kind]
        if self._on_collective is not None and kind != "share":  # the first half reports the second half too
            self._on_collective(outcome)
        self.comm.watch.last_outcomes[kind] = ref(outcome)
        poster.start_thread()
        finisher.start_thread()

        def begin() -> None:
            posted = Outcome()
            posted.run(post)
            posted.wake_waiters()
            finisher.submit(lambda: finish(posted.take_result()), outcome)

        poster.submit(begin, Outcome())
        return Work(finish=outcome.wait)

    def scratch_nbytes(self, op: str, axis: str, numel: int, itemsize: int, *, sums_into_out: bool = False) -> int:
        """Return the bytes of scratch: for each other rank a part of the buffer, or two chunks if a part exceeds a chunk."""
        n = self.comm.mesh.axis_size(axis)
        part, chunk = -(-numel // n), _CHUNK_NBYTES // itemsize
        return (part if part <= chunk else 2 * chunk) * (n - 1) * itemsize


def add_summands(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum ``((s0 + s1) + s2) + ...`` of ``summands`` to ``out``, in its dtype. ``out`` may be one of the summands."""
    if summands[0].dtype == out.dtype and len(summands) == 2:
        torch.add(summands[0], summands[1], out=out)
        return
    # A summand in another dtype has memory of its own, so the sum may grow in `out`.
    total = out.copy_(summands[0]) if summands[0].dtype != out.dtype else summands[0].clone()
    for summand in summands[1:]:
        total += summand
    if total is not out:
        out.copy_(total)
