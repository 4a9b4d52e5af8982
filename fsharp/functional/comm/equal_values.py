"""Values that have to be equal on all ranks: tensors, by digest or taken from one rank; settings, by their exact text."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from fsharp.errors import AgreementError, problem
from fsharp.functional.comm.agree import all_gather_fixed_size, ranks_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.formats.format import as_bytes, tensor_text
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.functional.layout.mesh import Mesh

_CHUNK_NBYTES = 1 << 22  # bytes that are digested or sent at once
_MAX_SHOWN_TENSORS = 8
_MAX_WRITTEN_ELEMENTS = 8


def bytes_digest(tensor: torch.Tensor) -> bytes:
    """Return eight bytes that depend on every bit of a tensor of any dtype, and on the order of its elements: the XXH3 digest.

    Cost: one pass over the tensor on the host. A tensor on a GPU is first copied to the host, 4 MiB at a time.
    """
    digest = xxhash.xxh3_64()
    for piece in as_bytes(tensor.detach()).split(_CHUNK_NBYTES):
        on_host = piece.cpu()
        digest.update(bytes_of(on_host))
    return digest.digest()


def exact_text(value: Any) -> str:
    """Return the text of a setting, for ranks to compare. Arrays with equal texts have equal bits, except the bits of NaN.

    The text has all elements of an array of at most 8 elements, and the digest of a larger array. Arrays are found in
    dictionaries, lists, tuples, sets, dataclasses and ``functools.partial``. The text of any other object is its repr without
    addresses, which differ between processes.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return f"on meta {tensor_text(value)}"
        found = value.tolist() if value.numel() <= _MAX_WRITTEN_ELEMENTS else bytes_digest(value).hex()
        return f"{found} {tensor_text(value)}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "shape"):
        found = value.tolist() if value.size <= _MAX_WRITTEN_ELEMENTS else hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return f"{found} {value.dtype}{list(value.shape)}"
    if isinstance(value, partial):
        return f"partial({exact_text(value.func)}, {exact_text(value.args)}, {exact_text(value.keywords)})"
    if is_dataclass(value) and not isinstance(value, type):
        own = ", ".join(f"{field.name}={exact_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({own})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{exact_text(key)}: {exact_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(exact_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(exact_text, value))
        return f"[{inner}]" if type(value) is list else f"{type(value).__name__}({inner})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def check_same_on_ranks(
    where: str,
    tensors: Mapping[str, torch.Tensor],
    comm: Comm,
    *,
    remedy: str,
    varying: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Raise an AgreementError on all ranks if ``tensors`` differ between ranks. The error names the tensors and the ranks.

    Args:
        where: name of the calling function, for the message.
        tensors: the tensors to compare, by path.
        comm: the ranks.
        remedy: last line of the message.
        varying: by path, the axes along which a tensor may differ.

    Cost: one pass over the tensors, except tensors that may differ along all axes. A collective of 8 bytes for each axis; if
    digests differ, another one for each axis, of 8 bytes for each tensor.
    """
    axes, varying = [axis for axis, size in comm.mesh.axes if size > 1], varying or {}
    shared = {path: tensor for path, tensor in tensors.items() if not {*axes} <= {*varying.get(path, ())}}
    if not shared:
        return
    mine = b"".join(map(bytes_digest, shared.values()))
    if len(set(all_gather_fixed_size(hashlib.sha256(mine).digest()[:8], comm))) == 1:
        return
    everyone = all_gather_fixed_size(mine, comm)
    rows = []
    for i, path in enumerate(shared):
        found = [each[8 * i : 8 * i + 8] for each in everyone]
        different = _differing_ranks_text(found, comm.mesh, varying.get(path, ()))
        if different is not None:
            rows.append((path, different))
    if rows:
        more = [("...", f"{len(rows) - _MAX_SHOWN_TENSORS} more")] if len(rows) > _MAX_SHOWN_TENSORS else []
        what = f"{len(rows)} of {len(tensors)} parameters do not have the same values on all ranks."
        raise AgreementError(problem(where, what, [*rows[:_MAX_SHOWN_TENSORS], *more], remedy))


def _differing_ranks_text(digests: list[bytes], mesh: Mesh, varying_axes: tuple[str, ...]) -> str | None:
    """Return a text that names the ranks whose digest differs from that of the first rank of their group; None if none does.

    A group is all ranks with equal coordinates along ``varying_axes``. ``digests``: the digest of each rank.
    """
    firsts: dict[int, int] = {}
    others: dict[int, list[int]] = {}
    for rank, each in enumerate(digests):
        first = firsts.setdefault(mesh.index_along(varying_axes, rank), rank)
        if each != digests[first]:
            others.setdefault(first, []).append(rank)
    rows = [f"{ranks_text(ranks)}: other values than rank {first}" for first, ranks in others.items()]
    return "; ".join(rows[:2]) + (f"; and {len(rows) - 2} more" if len(rows) > 2 else "") if rows else None


def broadcast_from_rank(tensor: torch.Tensor, source: int, comm: Comm, *, varying: tuple[str, ...] = ()) -> torch.Tensor:
    """Return rank ``source``'s ``tensor`` on all ranks, with all its bits.

    Other ranks pass a tensor of the same shape and dtype, which may be on the meta device. Along the axes ``varying`` ranks
    keep different tensors. On a mesh ``(dp, tp)``, with ``source=0`` and ``varying=("tp",)``, the rank at (1, 3) gets the
    tensor of the rank at (0, 3).

    Ranks sum bytes as integers; all but one add zero. Cost: an ``all_reduce`` for each 4 MiB and each axis not in ``varying``.
    """
    axes = [axis for axis, size in comm.mesh.axes if size > 1 and axis not in varying]
    if not axes:
        return tensor.detach()
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=comm.device)
    flat = result.view(-1).view(torch.uint8)
    is_source = all(comm.mesh.coord(axis, comm.rank) == comm.mesh.coord(axis, source) for axis in axes)
    mine = as_bytes(tensor.detach()) if is_source else None
    for start in range(0, len(flat), _CHUNK_NBYTES):
        piece = flat[start : start + _CHUNK_NBYTES]
        words = torch.zeros(-(-len(piece) // 4), dtype=torch.int32, device=comm.device)
        if mine is not None:
            words.view(torch.uint8)[: len(piece)].copy_(mine[start : start + _CHUNK_NBYTES])
        for axis in axes:
            words = comm.all_reduce(words, axis)
        piece.copy_(words.view(torch.uint8)[: len(piece)])
    return result
