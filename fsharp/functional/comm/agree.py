"""Agreement: before the first collective, ranks compare the settings and values that they were given."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from fsharp.errors import AgreementError, CommError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.type_checks import options_checked

T = TypeVar("T")
_MAX_SHOWN_CHARACTERS = 160


def all_gather_fixed_size(data: bytes, comm: Comm) -> list[bytes]:
    """Return every rank's ``data``, in order of rank. All ranks pass equally many bytes. Cost: a collective for each axis."""
    x = torch.tensor(list(data), dtype=torch.uint8, device=comm.device)
    for axis, size in reversed(comm.mesh.axes):
        x = comm.all_gather(x, axis) if size > 1 else x.unsqueeze(0)
    return [bytes(row) for row in x.reshape(comm.mesh.size, -1).tolist()]


def all_gather_texts(text: str, comm: Comm) -> list[str]:
    """Return the ``text`` of every rank, in order of rank. Cost: two collectives for each axis, the first of 8 bytes."""
    body = text.encode()
    lengths = [int.from_bytes(length, "little") for length in all_gather_fixed_size(len(body).to_bytes(8, "little"), comm)]
    if not any(lengths):
        return [""] * comm.mesh.size
    bodies = all_gather_fixed_size(body.ljust(max(lengths), b"\0"), comm)
    return [each[:length].decode() for each, length in zip(bodies, lengths, strict=True)]


def max_over_ranks(x: torch.Tensor, comm: Comm, *, label: str = "") -> torch.Tensor:
    """Return the elementwise maximum of ``x`` over all ranks of the mesh. Cost: one collective for each axis."""
    for axis, size in comm.mesh.axes:
        if size > 1:
            x = comm.all_reduce(x, axis, op="max", label=label)
    return x


@options_checked
def agree(where: str, fields: Mapping[str, str], comm: Comm, *, failure: str | None = None) -> None:
    """Compare values between ranks. If a value differs, or a rank has failed, raise one error with equal text on all ranks.

    Args:
        where: name of the calling function, for the message.
        fields: the values to compare, as texts by name.
        comm: the ranks.
        failure: an error text, if this rank has failed; None otherwise.

    Raises:
        AgreementError: the message names the fields that differ, their values and ranks; or the ranks that failed, and the
            first error text.

    On a mesh of one rank nothing is compared or raised, not even ``failure``.
    Cost: one collective of 40 bytes for each axis; more if an error is raised.
    """
    if comm.mesh.size > 1:
        restart_replay.record_and_call(
            lambda: _compare_fields(where, fields, comm, failure), replay=lambda: _compare_fields(where, fields, comm, None)
        )


def _compare_fields(where: str, fields: Mapping[str, str], comm: Comm, failure: str | None) -> None:
    fields = {"function": where, **fields}
    body = json.dumps({"failure": failure, "fields": fields}, sort_keys=True).encode()
    digest = hashlib.sha256(body).digest()
    heads = all_gather_fixed_size(digest + len(body).to_bytes(8, "little"), comm)
    if len(set(heads)) == 1 and failure is None:
        return
    length = max(int.from_bytes(head[32:], "little") for head in heads)
    bodies = [json.loads(b.rstrip(b"\0")) for b in all_gather_fixed_size(body.ljust(length, b"\0"), comm)]
    failed = {rank: each["failure"] for rank, each in enumerate(bodies) if each["failure"]}
    if failed:
        first = min(failed)
        who = "every rank" if len(failed) == len(bodies) else ranks_text(failed)
        raise AgreementError(f"{where}: failed on {who}; rank {first} says:\n{failed[first]}")
    rows = []
    for name in sorted({name for each in bodies for name in each["fields"]}):
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(bodies):
            values.setdefault(each["fields"].get(name, "(absent)"), []).append(rank)
        if len(values) > 1:
            for value, ranks in _without_shared_lines(values).items():
                rows.append((name, f"{ranks_text(ranks)}: {value}"))
    raise AgreementError(
        problem(where, "ranks were given different values.", rows, "Give every rank the same configuration and tree.")
    )


def check_on_all_ranks(
    where: str, comm: Comm, check: Callable[[], T], fields: Callable[[T], Mapping[str, str]] = lambda _: {}
) -> T:
    """Return ``check()``. If ``check`` raises on a rank, or ``fields`` of the result differ between ranks, all ranks raise.

    If ``check`` raises on all ranks, each rank raises its own error. Otherwise all ranks raise an :class:`AgreementError` with
    the text of the first error. On a rank whose ``check`` has raised, the cause of the AgreementError is the rank's own error.
    On this rank the error's attribute ``is_own`` is True, unless a collective within ``check`` has raised because of another
    rank.
    """
    try:
        result = check()
        texts = fields(result) if comm.mesh.size > 1 else {}
    except Exception as error:  # of any kind: other ranks have to get it
        try:
            agree(where, {}, comm, failure=str(error) or repr(error))
        except AgreementError as seen:
            if "failed on every rank" not in str(seen):
                seen.is_own = is_own_failure(error)
                raise seen from error
        raise
    if comm.mesh.size > 1:
        agree(where, texts, comm)
    return result


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, the cause of the cause, and so on."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # causes may go in a circle
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def is_own_failure(error: BaseException) -> bool:
    """Return whether ``error`` began on this rank. False if all ranks found it together, or if another rank reported it."""
    found = [each for each in error_chain(error) if isinstance(each, CommError | AgreementError)]
    return not found or any(isinstance(each, AgreementError) and each.is_own for each in found)


def _without_shared_lines(values: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return ``values``, a dict from a text to the ranks that have it, with shorter texts.

    Lines that all texts share are left out. Longer texts are then cut to an excerpt around the first difference.
    """
    lines = {text: text.split("\n") for text in values}
    shared = set.intersection(*(set(each) for each in lines.values()))
    rests = {text: "; ".join(line for line in lines[text] if line not in shared) or "(nothing more)" for text in values}
    if len(set(rests.values())) < len(values):  # texts of the same lines, in another order or repeated
        rests = {text: text for text in values}
    alike = (len(set(characters)) == 1 for characters in zip(*rests.values()))
    same = next((i for i, is_same in enumerate(alike) if not is_same), min(map(len, rests.values())))
    first = max(0, same - _MAX_SHOWN_CHARACTERS // 2) if max(map(len, rests.values())) > _MAX_SHOWN_CHARACTERS else 0
    shown: dict[str, list[int]] = {}
    for text, ranks in values.items():  # excerpts of different texts may be equal
        shown.setdefault(_excerpt(rests[text], first), []).extend(ranks)
    return shown


def _excerpt(text: str, start: int) -> str:
    shown = text[start:]
    return "..." * (start > 0) + (shown if len(shown) <= _MAX_SHOWN_CHARACTERS else shown[: _MAX_SHOWN_CHARACTERS - 3] + "...")


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words, for an error: ``rank 3``, or ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more``."""
    shown = sorted(ranks)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"rank{'s' * (len(shown) > 1)} {', '.join(map(str, shown[:8]))}{more}"
