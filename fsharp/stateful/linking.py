"""Linking: which ranks are on one machine, and how they come by the memory that they share."""

import hashlib
import os
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from fsharp.functional.agree import gather_bytes
from fsharp.functional.comm import Comm
from fsharp.functional.mesh import Mesh
from fsharp.stateful.links import SLOTS, Link, Links, slot_nbytes

_PATIENCE = 30.0
"""Seconds for ranks that have just met to connect."""
_SHOWN = 1000
_HELLO = struct.Struct("<ii16s")  # the axis, the rank, and what only ranks know


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


def link(comm: Comm, *, is_wanted: bool = True) -> dict[str, Links]:
    """Links along all axes that stay within a machine. All ranks call it at one point.

    Where memory cannot be shared on any rank, no rank has any, and a warning says why, after half a minute if one is missing.

    Args:
        comm: to agree through.
        is_wanted: whether this rank wants any; if one does not, none has.

    Cost: two small collectives.
    """
    name, secret, listener, here = secrets.token_bytes(16), secrets.token_bytes(16), None, b""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(name))
        listener.listen(comm.mesh.size)
        here = machine() if is_wanted else b""
    except (AttributeError, OSError):
        here = b""  # no such sockets
    rows = [(row[:16].rstrip(b"\0"), row[16:32], row[32:]) for row in gather_bytes(here.ljust(16, b"\0") + name + secret, comm)]
    axes = near_axes(comm.mesh, [row[0] for row in rows])
    made, error = {}, ""
    if axes and listener is not None:
        try:
            made = _connect(comm, axes, listener, [row[1:] for row in rows])
        except Exception as raised:  # of any kind: others wait for what this rank says
            error = f"rank {comm.rank}: {type(raised).__name__}: {raised}"
        errors = [
            row.rstrip(b"\0").decode(errors="replace") for row in gather_bytes(error.encode().ljust(256, b"\0")[:256], comm)
        ]
        error = "; ".join(filter(None, errors))[:_SHOWN]
    if listener is not None:
        listener.close()
    if error:
        warnings.warn(f"Ranks of one machine could not share memory, and use gloo: {error}", stacklevel=2)
        return {}
    return made


def _connect(
    comm: Comm, axes: Sequence[str], listener: socket.socket, names: Sequence[tuple[bytes, bytes]]
) -> dict[str, Links]:
    """The lower rank of each pair is called by the higher one, which brings the memory.

    Args:
        comm: the ranks.
        axes: to link along.
        listener: this rank's.
        names: of each rank's listener, and what it wants to hear first: anybody on this machine can call.
    """
    mesh, rank = comm.mesh, comm.rank
    groups = [mesh.group(axis, rank) for axis in axes]
    found: dict[tuple[int, int], Link] = {}
    missing = set()
    for a, group in enumerate(groups):
        for peer in group:
            if peer < rank:
                found[a, peer] = _call(peer, names[peer][0], _HELLO.pack(a, rank, names[peer][1]), slot_nbytes(len(group)))
            elif peer > rank:
                missing.add((a, peer))
    deadline = time.monotonic() + _PATIENCE
    while missing:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        sock, _ = listener.accept()
        sock.settimeout(_PATIENCE)
        hello, files, _, _ = socket.recv_fds(sock, _HELLO.size, 1)
        try:
            a, peer, secret = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1, b"")
            if secret != names[rank][1] or (a, peer) not in missing:
                sock.close()
                continue
            if not files:
                raise OSError("too many open files")
            sock.settimeout(None)
            found[a, peer] = Link(sock, files[0], slot_nbytes(len(groups[a])), is_lower=True, peer=peer)
            missing.discard((a, peer))
        except Exception:
            sock.close()
            raise
        finally:
            for file in files:
                os.close(file)
    return {
        axis: Links([found[a, peer] for peer in group if peer != rank], group.index(rank))
        for a, (axis, group) in enumerate(zip(axes, groups, strict=True))
    }


def _call(peer: int, name: bytes, hello: bytes, nbytes: int) -> Link:
    file = os.memfd_create("fsharp")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.ftruncate(file, 2 * SLOTS * nbytes)
        sock.settimeout(_PATIENCE)
        sock.connect(_address(name))
        socket.send_fds(sock, [hello], [file])
        sock.settimeout(None)
        return Link(sock, file, nbytes, is_lower=False, peer=peer)
    except Exception:
        sock.close()
        raise
    finally:
        os.close(file)


def _address(name: bytes) -> bytes:
    return b"\0fsharp-" + name.hex().encode()  # of no file: gone with the socket


def machine() -> bytes:
    """16 bytes that tell this kernel and network, in which sockets of :func:`link` are seen, from others; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot} {Path('/proc/self/ns/net').stat().st_ino}".encode()).digest()[:16]
    except OSError:
        return b""
