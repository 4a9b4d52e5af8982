"""Links: memory that ranks of one machine share two by two, with a socket to say what is in it.

A link holds a few slots for each way. A chunk is copied into a slot by one rank and read where it is by the other, which gives
the slot back; the kernel passes on a few bytes about it, where TCP copies the chunk itself twice. Nothing is left behind when
processes die: the memory has no name, and that of the socket goes with it.
"""

import mmap
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove

import torch

from fsharp.functional.errors import CommError

SLOTS = 2
_SLOTS_NBYTES = 1 << 21
"""Bytes that a rank's slots for all others of its group have together; each costs some 50 us while others compute."""
_LEAST = 1 << 16
_MESSAGE = struct.Struct("<qqq")  # a collective's number, the bytes of a chunk of it or 0, and slots given back

_Chunk = tuple[int, int]
"""Address and bytes. Copied as such: a tensor for each would cost as much again as the copy."""


class Link:
    """This rank's end of the memory that it shares with another rank. One thread at a time.

    Args:
        sock: connected to the other end.
        file: of all slots: of the rank with the lower number, then of the other one.
        nbytes: of a slot.
        is_lower: whether that is this rank.
        peer: the other one.
    """

    def __init__(self, sock: socket.socket, file: int, nbytes: int, *, is_lower: bool, peer: int) -> None:
        self._sock, self.peer = sock, peer
        ours, theirs = (
            torch.frombuffer(mmap.mmap(file, SLOTS * nbytes, offset=i * SLOTS * nbytes), dtype=torch.uint8)
            for i in ((0, 1) if is_lower else (1, 0))
        )
        self._mapped = ours  # or it would be unmapped
        self._out = [ours.data_ptr() + i * nbytes for i in range(SLOTS)]
        self._in: Sequence[torch.Tensor] = theirs.split(nbytes)
        self._num_free, self._put, self._taken, self._owed = SLOTS, 0, 0, 0
        self._arrived: deque[tuple[int, int]] = deque()
        self.is_closed = False
        weakref.finalize(self, sock.close).atexit = False

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    def put(self, chunk: _Chunk, number: int) -> bool:
        """Hand over a chunk of collective ``number``; False if no slot is free.

        Raises:
            CommError: the other rank is gone.
        """
        if not self._num_free:
            self._check()
            return False
        address, nbytes = chunk
        memmove(self._out[self._put], address, nbytes)
        self._put, self._num_free = (self._put + 1) % SLOTS, self._num_free - 1
        self._say(number, nbytes)
        self._check()
        return True

    def head(self, number: int, nbytes: int) -> torch.Tensor | None:
        """The slot of the oldest chunk that has arrived, ``nbytes`` of it or more; None if there is none.

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
        return self._in[self._taken]

    def free(self) -> None:
        """Give the slot of :meth:`head` back, with the next chunk or when it is time to :meth:`flush`."""
        self._arrived.popleft()
        self._taken, self._owed = (self._taken + 1) % SLOTS, self._owed + 1

    def flush(self) -> None:
        """Tell of slots that have been given back."""
        if self._owed:
            self._say(0, 0)  # who is gone does not need them

    def listen(self) -> None:
        """Take note of what the other rank has said; there has to be something, or this blocks."""
        try:
            said = self._sock.recv(_MESSAGE.size * 4 * SLOTS)  # more than can be on its way, each written at once
        except OSError:
            said = b""
        self.is_closed = self.is_closed or not said
        for number, nbytes, freed in _MESSAGE.iter_unpack(said):
            self._num_free += freed
            if nbytes:
                self._arrived.append((number, nbytes))

    def close(self) -> None:
        """Have both ends find out, also a thread that is waiting at one."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.is_closed = True  # the other one has been first

    def _say(self, number: int, nbytes: int) -> None:
        try:
            self._sock.send(_MESSAGE.pack(number, nbytes, self._owed), socket.MSG_NOSIGNAL)
            self._owed = 0
        except OSError:
            self.is_closed = True

    def _check(self) -> None:
        if self.is_closed:
            raise CommError(f"rank {self.peer} has closed the memory that it shared with this rank, or is gone.")


class Links:
    """Those of one rank with all others of its group. Calls block; one thread at a time. After an error they are closed.

    Args:
        links: in order of the other's coordinate.
        mine: this rank's coordinate.
    """

    def __init__(self, links: Sequence[Link], mine: int) -> None:
        self._links, self._mine, self._number, self._is_broken = list(links), mine, 0, False
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
        owns, outs = (x.split(width) if len(x) else () for x in (mine, out))
        taken = 0

        def take() -> bool:
            nonlocal taken
            if taken == len(owns):
                return False
            own = owns[taken]
            heads = [link.head(self._number, own.nbytes) for link in self._links]
            summands = [head.view(own.dtype)[: len(own)] for head in heads if head is not None]
            if len(summands) < len(heads):
                return False
            summands.insert(self._mine, own)
            add(summands, outs[taken])
            for link in self._links:
                link.free()
            taken += 1
            return True

        self._swap([parts[i] for i in self._others()], take, lambda: taken == len(owns))

    def share(self, parts: Sequence[torch.Tensor]) -> None:
        """Send this rank's part to all others and receive theirs, ``parts[r]`` of any size that all ranks know."""
        outs = [self._chunks(parts[i]) for i in self._others()]

        def take() -> bool:
            moved = False
            for link, chunks in zip(self._links, outs, strict=True):
                if chunks:
                    address, nbytes = chunks[0]
                    head = link.head(self._number, nbytes)
                    if head is not None:
                        memmove(address, head.data_ptr(), nbytes)
                        link.free()
                        chunks.popleft()
                        moved = True
            return moved

        self._swap([parts[self._mine]] * len(outs), take, lambda: not any(outs))

    def close(self) -> None:
        """Have both ends of each link find out."""
        for link in self._links:
            link.close()

    def _others(self) -> list[int]:
        return [i for i in range(len(self._links) + 1) if i != self._mine]

    def _chunks(self, x: torch.Tensor) -> deque[_Chunk]:
        if not x.is_contiguous():
            raise CommError(f"a collective was given a tensor with strides {x.stride()}, expected a contiguous one.")
        start, nbytes, width = x.data_ptr(), x.nbytes, self._slot_nbytes
        return deque((start + i, min(width, nbytes - i)) for i in range(0, nbytes, width))

    def _swap(self, outgoing: Sequence[torch.Tensor], take: Callable[[], bool], has_all: Callable[[], bool]) -> None:
        """Hand each link what is for it and take what arrives, as slots allow."""
        if self._is_broken:
            raise CommError("a collective before this one has failed; nothing can be told from what arrives now.")
        self._is_broken = True
        try:
            queues = [self._chunks(x) for x in outgoing]
            while any(queues) or not has_all():
                moved = False
                for link, queue in zip(self._links, queues, strict=True):
                    if queue and link.put(queue[0], self._number):
                        queue.popleft()
                        moved = True
                if not (take() or moved):
                    self._flush()
                    self._listen()
            self._flush()
            self._number, self._is_broken = self._number + 1, False
        finally:
            if self._is_broken:
                self.close()

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

    def _listen(self) -> None:
        if len(self._links) == 1:
            self._links[0].listen()
            return
        poll = select.poll()
        by_file = {link.fileno(): link for link in self._links if not link.is_closed}
        for file in by_file:
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll():
            by_file[file].listen()


def slot_nbytes(n: int) -> int:
    """Bytes of a slot in a group of ``n`` ranks."""
    return max(_SLOTS_NBYTES // SLOTS // (n - 1) // mmap.PAGESIZE * mmap.PAGESIZE, _LEAST)
