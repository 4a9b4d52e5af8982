"""Links: memory that ranks of one machine share two by two, with a socket to say what is in it.

A link holds a few slots for each way. A chunk is copied into a slot by one rank and read where it is by the other, which gives
the slot back; the kernel passes on sixteen bytes about it each time, where TCP copies the chunk itself twice. Nothing is left
behind when processes die: the memory has no name, and neither has the socket.
"""

import hashlib
import mmap
import os
import secrets
import select
import socket
import struct
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fsharp.functional.agree import gather_bytes
from fsharp.functional.comm import Comm
from fsharp.functional.errors import CommError
from fsharp.functional.mesh import Mesh

SLOTS = 2
_SLOTS_NBYTES = 1 << 20
"""Bytes that a rank writes into, for each group and kind of collective, of all slots together."""
_LEAST = 1 << 16
_PATIENCE = 30.0
"""Seconds for ranks that have just met to connect."""
_MESSAGE = struct.Struct("<qq")  # a collective's number and the bytes of a chunk of it, or _FREE and 0
_HELLO = struct.Struct("<iii")  # the axis, the kind, the rank
_FREE = -1


class Link:
    """This rank's end of the memory that it shares with another rank. One thread at a time.

    Args:
        sock: connected to the other end.
        memory: all slots, ``[2, SLOTS, nbytes]``: of the rank with the lower number, then of the other one.
        is_lower: whether that is this rank.
        peer: the other one.
    """

    def __init__(self, sock: socket.socket, memory: torch.Tensor, *, is_lower: bool, peer: int) -> None:
        self._sock, self.peer = sock, peer
        ours, theirs = (0, 1) if is_lower else (1, 0)
        self._out: list[torch.Tensor] = list(memory[ours])
        self._in: list[torch.Tensor] = list(memory[theirs])
        self._num_free, self._put, self._taken = SLOTS, 0, 0
        self._arrived: deque[tuple[int, int]] = deque()
        self.is_closed = False
        weakref.finalize(self, sock.close).atexit = False

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    def put(self, chunk: torch.Tensor, number: int) -> bool:
        """Hand over a chunk of collective ``number``; False if no slot is free.

        Raises:
            CommError: the other rank is gone.
        """
        if not self._num_free:
            self._check()
            return False
        self._out[self._put][: len(chunk)].copy_(chunk)
        self._put, self._num_free = (self._put + 1) % SLOTS, self._num_free - 1
        self._say(number, len(chunk))
        self._check()
        return True

    def head(self, number: int, nbytes: int) -> torch.Tensor | None:
        """The oldest chunk that has arrived, where it is; None if there is none.

        Raises:
            CommError: it is of another collective or length than expected, or the other rank is gone.
        """
        if not self._arrived:
            self._check()
            return None
        if self._arrived[0] != (number, nbytes):
            theirs, size = self._arrived[0]
            raise CommError(
                f"ranks called different collectives: rank {self.peer} sent {size} bytes of its collective {theirs}, expected "
                f"{nbytes} of {number}. Every rank has to make the same calls with tensors of the same size."
            )
        return self._in[self._taken][:nbytes]

    def free(self) -> None:
        """Give the slot of :meth:`head` back."""
        self._arrived.popleft()
        self._taken = (self._taken + 1) % SLOTS
        self._say(_FREE, 0)  # who is gone does not need it

    def listen(self) -> None:
        """Take note of what the other rank has said; there has to be something, or this blocks."""
        try:
            said = self._sock.recv(_MESSAGE.size * 4 * SLOTS)  # more than can be on its way, each written at once
        except OSError:
            said = b""
        self.is_closed = self.is_closed or not said
        for number, nbytes in _MESSAGE.iter_unpack(said):
            if number == _FREE:
                self._num_free += 1
            else:
                self._arrived.append((number, nbytes))

    def close(self) -> None:
        """Have both ends find out, also a thread that is waiting at one."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.is_closed = True  # the other one has been first

    def _say(self, number: int, nbytes: int) -> None:
        try:
            self._sock.send(_MESSAGE.pack(number, nbytes))
        except OSError:
            self.is_closed = True

    def _check(self) -> None:
        if self.is_closed:
            raise CommError(f"rank {self.peer} has closed the memory that it shared with this rank, or is gone.")


class Links:
    """Those of one rank with all others of its group, for one kind of collective. Calls block; one thread at a time.

    Args:
        links: in order of the other's coordinate.
        mine: this rank's coordinate.
    """

    def __init__(self, links: Sequence[Link], mine: int) -> None:
        self._links, self._mine, self._number = list(links), mine, 0
        self._slot_nbytes = slot_nbytes(len(links) + 1)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, add: Callable[..., None]) -> None:
        """The sum over ranks of this rank's part into ``out``.

        Args:
            parts: for each rank its part, ``[c]``; all but this rank's are sent.
            out: ``[c]``, of any dtype; may be this rank's part.
            add: called with summands in order of rank and where their sum goes, for one chunk after another.
        """
        mine = parts[self._mine]
        width = self._slot_nbytes // mine.itemsize
        owns, outs = (_cut(x, width) for x in (mine, out))
        taken = 0

        def take() -> bool:
            nonlocal taken
            if taken == len(owns):
                return False
            own = owns[taken]
            heads = [link.head(self._number, own.nbytes) for link in self._links]
            if any(head is None for head in heads):
                return False
            summands = [head.view(own.dtype) for head in heads if head is not None]
            summands.insert(self._mine, own)
            add(summands, outs[taken])
            for link in self._links:
                link.free()
            taken += 1
            return True

        self._swap([parts[i] for i in self._others()], take, lambda: taken == len(owns))

    def share(self, parts: Sequence[torch.Tensor]) -> None:
        """Send this rank's part to all others and receive theirs, ``parts[r]`` of any size that all ranks know."""
        outs = [_cut(parts[i].view(torch.uint8), self._slot_nbytes) for i in self._others()]
        taken = [0] * len(outs)

        def take() -> bool:
            moved = False
            for i, (link, chunks) in enumerate(zip(self._links, outs, strict=True)):
                if taken[i] < len(chunks):
                    chunk = chunks[taken[i]]
                    head = link.head(self._number, len(chunk))
                    if head is not None:
                        chunk.copy_(head)
                        link.free()
                        taken[i], moved = taken[i] + 1, True
            return moved

        self._swap(
            [parts[self._mine]] * len(outs), take, lambda: all(n == len(each) for n, each in zip(taken, outs, strict=True))
        )

    def close(self) -> None:
        """Have both ends of each link find out."""
        for link in self._links:
            link.close()

    def _others(self) -> list[int]:
        return [i for i in range(len(self._links) + 1) if i != self._mine]

    def _swap(self, outgoing: Sequence[torch.Tensor], take: Callable[[], bool], has_all: Callable[[], bool]) -> None:
        """Hand each link what is for it and take what arrives, as slots allow."""
        queues = [deque(_cut(x.view(torch.uint8), self._slot_nbytes)) for x in outgoing]
        while any(queues) or not has_all():
            moved = False
            for link, queue in zip(self._links, queues, strict=True):
                if queue and link.put(queue[0], self._number):
                    queue.popleft()
                    moved = True
            if not (take() or moved):
                self._listen()
        self._number += 1

    def _listen(self) -> None:
        poll = select.poll()
        by_file = {link.fileno(): link for link in self._links if not link.is_closed}
        for file in by_file:
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll():
            by_file[file].listen()


def _cut(x: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    return x.split(width) if len(x) else ()


def slot_nbytes(n: int) -> int:
    """Bytes of a slot in a group of ``n`` ranks."""
    return max(_SLOTS_NBYTES // SLOTS // (n - 1) // mmap.PAGESIZE * mmap.PAGESIZE, _LEAST)


# ---------------------------------------------------------------- connecting


def near_axes(mesh: Mesh, machines: Sequence[bytes]) -> list[str]:
    """Axes of more than one rank along which every rank has all others of its group on its own machine.

    Args:
        mesh: the ranks.
        machines: for each rank a name of its machine; empty: unknown.
    """
    return [
        axis
        for axis, n in mesh.axes
        if n > 1 and all(len({machines[rank] for rank in group}) == 1 and machines[group[0]] for group in mesh.groups(axis))
    ]


def link(comm: Comm, kinds: Sequence[str]) -> dict[tuple[str, str], Links]:
    """Links along all axes that stay within a machine, by kind and axis. All ranks call it at one point.

    Where memory cannot be shared on any rank, no rank has any, and a warning says why.

    Args:
        comm: to agree through.
        kinds: of collectives, each with links of its own.

    Cost: two small collectives.
    """
    mesh, name = comm.mesh, secrets.token_bytes(16)
    listener, error = None, ""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(name))
        listener.listen(mesh.size * len(kinds))
        mine = machine()
    except (AttributeError, OSError):  # no such sockets here
        mine = b""
    rows = gather_bytes(mine.ljust(16, b"\0") + name, comm)
    axes = near_axes(mesh, [row[:16].rstrip(b"\0") for row in rows])
    made: dict[tuple[str, str], Links] = {}
    if axes:
        assert listener is not None
        try:
            made = _connect(comm, axes, kinds, listener, [row[16:] for row in rows])
        except OSError as raised:
            error = f"rank {comm.rank}: {raised}"[:256]
        errors = [row.rstrip(b"\0").decode() for row in gather_bytes(error.encode().ljust(256, b"\0")[:256], comm)]
        error = next((text for text in errors if text), "")
    if listener is not None:
        listener.close()
    if error:
        warnings.warn(f"Ranks of one machine could not share memory, and use gloo: {error}", stacklevel=2)
        return {}
    return made


def _connect(
    comm: Comm, axes: Sequence[str], kinds: Sequence[str], listener: socket.socket, names: Sequence[bytes]
) -> dict[tuple[str, str], Links]:
    """The lower rank of each pair is called by the higher one, which brings the memory."""
    mesh, rank = comm.mesh, comm.rank
    groups = {axis: mesh.group(axis, rank) for axis in axes}
    found: dict[tuple[int, int, int], Link] = {}
    calls = 0
    for a, axis in enumerate(axes):
        nbytes = slot_nbytes(len(groups[axis]))
        for peer in groups[axis]:
            for k in range(len(kinds)):
                if peer > rank:
                    calls += 1
                elif peer < rank:
                    file = os.memfd_create("fsharp")
                    try:
                        os.ftruncate(file, 2 * SLOTS * nbytes)
                        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                        sock.settimeout(_PATIENCE)
                        sock.connect(_address(names[peer]))
                        socket.send_fds(sock, [_HELLO.pack(a, k, rank)], [file])
                        found[a, k, peer] = _link(sock, file, nbytes, is_lower=False, peer=peer)
                    finally:
                        os.close(file)
    listener.settimeout(_PATIENCE)
    for _ in range(calls):
        sock, _ = listener.accept()
        sock.settimeout(_PATIENCE)
        hello, files, _, _ = socket.recv_fds(sock, _HELLO.size, 1)
        try:
            a, k, peer = _HELLO.unpack(hello)
            found[a, k, peer] = _link(sock, files[0], slot_nbytes(len(groups[axes[a]])), is_lower=True, peer=peer)
        finally:
            for file in files:
                os.close(file)
    return {
        (kind, axis): Links([found[a, k, peer] for peer in groups[axis] if peer != rank], mesh.coord(axis, rank))
        for a, axis in enumerate(axes)
        for k, kind in enumerate(kinds)
    }


def _link(sock: socket.socket, file: int, nbytes: int, *, is_lower: bool, peer: int) -> Link:
    sock.setblocking(True)
    memory = torch.frombuffer(mmap.mmap(file, 2 * SLOTS * nbytes), dtype=torch.uint8)
    return Link(sock, memory.view(2, SLOTS, nbytes), is_lower=is_lower, peer=peer)


def _address(name: bytes) -> bytes:
    return b"\0fsharp-" + name.hex().encode()  # of no file: gone with the socket


def machine() -> bytes:
    """16 bytes that tell this kernel and network, in which sockets of :func:`link` are seen, from others; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot} {Path('/proc/self/ns/net').stat().st_ino}".encode()).digest()[:16]
    except OSError:
        return b""
