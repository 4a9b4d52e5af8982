"""Comm: the object through which pure functions call collectives.

A collective is a linear map on the tuple of all ranks' tensors. It takes and returns plain tensors, without autograd, and never
changes its arguments; :mod:`fsharp.functional.comm.collectives` makes collectives differentiable.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch

from fsharp.errors import AgreementError, FormatError, MeshError, OptionError
from fsharp.functional.layout.mesh import Mesh
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked

ReduceOp = Literal["sum", "max", "min"]


@runtime_checkable
class Comm(Protocol):
    """The object through which one rank calls collectives: a protocol.

    All ranks of a group along an axis have to call the same collectives in the same order, with equal shapes, dtypes and
    labels. A label says what a call is for. If labels differ, ranks get an error in place of wrong data. Along an axis of size
    1 callers skip the call.
    """

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""

    @property
    def rank(self) -> int:
        """Number of this rank in the mesh."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that collectives take."""

    def all_gather(self, x: torch.Tensor, axis: str, *, label: str = "") -> torch.Tensor:
        """Return ``x`` of all ``n`` ranks of the axis as ``[n, *x.shape]``, in order of coordinate. Any dtype can be sent."""

    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None, label: str = "") -> torch.Tensor:
        """Sum over the ``n`` ranks of the axis, and return this rank's part of the sum.

        On each rank ``x`` has shape ``[n, *s]``. The result is the sum of ``x[c]`` of all these ranks, where ``c`` is the
        coordinate of this rank. The result has shape ``s`` and dtype ``dtype``, by default the dtype of ``x``.
        """

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum", label: str = "") -> torch.Tensor:
        """Return the elementwise sum, maximum or minimum of ``x`` over the ranks of the axis, with equal bits on every rank."""

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, axis: str | None = None, label: str = ""
    ) -> torch.Tensor:
        """Send elements of ``x`` to all other ranks, and return the elements that they send to this rank.

        Args:
            x: a 1-D tensor; the first ``send[0]`` elements go to rank 0, the next ``send[1]`` to rank 1, and so on.
            send: number of elements for each rank; the sum is the size of ``x``.
            receive: number of elements from each rank. ``receive[r]`` equals the number that rank ``r`` sends to this rank: the
                entry for this rank in ``send`` of rank ``r``.
            axis: exchange between ranks along this axis, in order of coordinate; None means all ranks of the mesh.
            label: what the call is for.

        Returns:
            A 1-D tensor: the elements from rank 0, then those from rank 1, and so on.

        If a number in ``receive`` is not the number that is sent, all these ranks raise an AgreementError. Over NCCL ranks do
        not compare the numbers: then values may be undefined, or ranks wait until the time limit.
        """


class Engine(ABC):
    """Decides when data move and in which memory, for a :class:`Comm` whose attribute ``engine`` is this object.

    A pure function such as ``forward`` passes its whole call to the Engine. Results have the same bits as with any other Comm.
    """

    @abstractmethod
    def report_failure(self, error: Exception, where: str) -> None:
        """Tell other ranks that this rank has failed in ``where``, so that no rank waits for a collective of this engine."""

    @abstractmethod
    def handles_forward(self, sharded: Any, ties: Any) -> bool:
        """Return whether :meth:`run_forward` takes these arguments. If not, ``fs.forward`` calls the Comm's own collectives."""

    @abstractmethod
    def run_forward(self, fn: Callable[..., Any], sharded: Any, ties: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of :func:`~fsharp.forward`. ``ties``: further units, which store tied leaves of ``sharded``."""

    @abstractmethod
    def run_value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        microbatches: list[Any],
        comm: Comm,
        residuals: Any,
        *,
        final_sum_in_place: bool,
    ) -> tuple[Any, Any]:
        """Return the result of :func:`~fsharp.value_and_grad` over the microbatches of a batch, and overwrite ``residuals``.

        ``residuals``: encoding errors of earlier gradients. With ``final_sum_in_place`` the caller passes the gradients to
        :func:`~fsharp.reduce_scatter` without reading them. So the engine may overwrite them with their sums over ranks.
        """

    @abstractmethod
    def run_reduce_scatter(self, tree: Any, to: Any, donated_residuals: Any) -> Any:
        """Return the result of :func:`~fsharp.reduce_scatter` of ``tree``, and overwrite ``donated_residuals``.

        The sums may still be under way: a read of a tensor of the result waits for them.
        """

    @abstractmethod
    def begin_state_fetch(self, state: Any, params: Any, grads: Any, *, donate: bool) -> Any:
        """Begin :func:`~fsharp.update`: return ``state``, the pair ``(main, opt)``, on the device.

        The copy from host memory may still be under way: a read of a tensor of the result waits for it. ``params`` and
        ``grads`` are the arguments of the update. ``donate``: whether the update may overwrite ``state``.
        """

    @abstractmethod
    def gather_updated_params(self, new: Any, params: Any, state: Any, *, donate: bool) -> tuple[Any, Any]:
        """End :func:`~fsharp.update`: gather the updated parameters ``new`` to the place of ``params``, and return them.

        Also return ``state``, the new pair ``(main, opt)``: on the host if the engine offloads state. Gathers and copies may
        still be under way. ``donate``: whether gathers may overwrite the buffers of ``params``.
        """


def engine_of(comm: Comm) -> Engine | None:
    """Return the Engine of a Comm; None if the Comm has none. Wrappers such as :class:`CountingComm` have none."""
    return getattr(comm, "engine", None)


@options_checked
class SingleComm:
    """A Comm for a mesh with one rank: needs no process group, and sends nothing.

    Raises:
        MeshError: the mesh has more than one rank.
    """

    def __init__(self, mesh: Mesh = Mesh({"dp": 1}), *, device: torch.device | str = "cpu") -> None:
        if mesh.size != 1:
            raise MeshError(f"SingleComm(): {mesh} has {mesh.size} ranks; use connect(mesh) in each of {mesh.size} processes.")
        self.mesh, self.rank, self.device = mesh, 0, torch.device(device)

    def __repr__(self) -> str:
        return f"SingleComm({self.mesh}, device={self.device})"

    def all_gather(self, x: torch.Tensor, axis: str, *, label: str = "") -> torch.Tensor:
        """Return ``x`` with a leading dim of size 1."""
        self.mesh.index(axis)
        return x.unsqueeze(0)

    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None, label: str = "") -> torch.Tensor:
        """Return ``x[0]`` in ``dtype``: ``x`` has one row, as the axis has one rank, and no other rank adds to this row."""
        check_row_per_rank(x, self.mesh.axis_size(axis))
        return x[0].to(dtype or x.dtype)

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum", label: str = "") -> torch.Tensor:
        """Return ``x``: the sum, maximum and minimum over one rank."""
        self.mesh.index(axis)
        check_reduce_op(op)
        return x

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, axis: str | None = None, label: str = ""
    ) -> torch.Tensor:
        """Return ``x``: the only rank sends all elements to itself."""
        check_parts(x, send, receive, 1)
        check_sizes_of_ranks([[*send, *receive]])
        return x


class Call(NamedTuple):
    """A kind of collective call: operation, mesh axis, and the bytes that this rank sends to other ranks in one such call.

    The bytes are those of :func:`sent_nbytes`. ``axis`` is empty for an ``all_to_all`` over all ranks of the mesh.
    """

    op: str
    axis: str
    nbytes: int


def check_reduce_op(op: str) -> None:
    """Raise an OptionError unless ``op``, the operation of an all_reduce, is sum, max or min."""
    if op not in get_args(ReduceOp):
        remedy = "For a mean, divide the sum by the number of ranks."
        raise OptionError(f"all_reduce(): op is {op!r}, expected 'sum', 'max' or 'min'. {remedy}")


def check_row_per_rank(x: torch.Tensor, n: int) -> None:
    """Raise a MeshError unless ``x``, the input of a reduce_scatter over ``n`` ranks, has a row for each of these ranks."""
    if x.shape[:1] != (n,):
        what = f"x has shape {tuple(x.shape)}, expected a first dim of size {n}: a row for each rank on the axis."
        raise MeshError(f"reduce_scatter(): {what}")


class EqualParts(tuple[int, ...]):
    """Numbers of elements that are the same on all ranks of an ``all_to_all``, so that ranks need not compare them."""


def check_parts(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], n: int) -> None:
    """Raise a MeshError unless an all_to_all over ``n`` ranks can send all of ``x``, and has a size for each of these ranks."""
    if x.shape != (sum(send),) or len(send) != n or len(receive) != n:
        given = f"x has shape {tuple(x.shape)}, send is {list(send)} and receive is {list(receive)}"
        what = f"expected a 1-D x, and a size for each of {n} ranks in both lists. The sizes in send add up to the size of x."
        raise MeshError(f"all_to_all(): {given}; {what}")


def check_sizes_of_ranks(sizes: Sequence[Sequence[int]]) -> None:
    """Raise an AgreementError if a rank of an all_to_all does not expect what another rank sends.

    ``sizes``: for each rank, first how many elements the rank sends to each rank, then how many it expects from each rank.
    """
    n = len(sizes)
    for source, target in product(range(n), repeat=2):
        sent, expected = sizes[source][target], sizes[target][n + source]
        if sent != expected:
            raise AgreementError(
                f"all_to_all(): rank {source} of {n} sends {sent} elements to rank {target}, which expects {expected}. On each "
                "rank receive[r] has to be the number that rank r has in send for this rank."
            )


def sent_nbytes(op: str, part_nbytes: int, n: int) -> int:
    """Return the bytes that one rank of ``n`` sends in the bandwidth-optimal algorithm (ring or direct exchange).

    ``part_nbytes`` is a size in bytes. For an all_gather it is the size of the input. For a reduce_scatter it is the size of
    the output, in the dtype that travels. For an all_reduce it is the size of ``ceil(numel / n)`` elements. For an all_to_all
    of equal parts it is the size of what one receiver gets.
    """
    return (n - 1) * part_nbytes * (2 if op == "all_reduce" else 1)


class _InnerCommMixin:
    """Base class of wrappers of a Comm: mesh, rank and device are those of ``inner``."""

    inner: Comm
    mesh = property(attrgetter("inner.mesh"))
    rank = property(attrgetter("inner.rank"))
    device = property(attrgetter("inner.device"))


def innermost_comm(comm: Comm) -> Comm:
    """Return the Comm inside of wrappers that count or label calls."""
    while (inner := getattr(comm, "inner", None)) is not None:
        comm = inner
    return comm


@contextmanager
def reporting_format_errors(comm: Comm, where: str) -> Iterator[None]:
    """Return a context for code that encodes or decodes. A FormatError in it is reported to all other ranks, and raised here.

    The other ranks raise the error at their next collective, even if the caller on this rank catches the error. Afterwards no
    Comm of these ranks can be used. But if ``comm`` has an :class:`Engine`, only this Engine cannot be used.

    Every function with a Comm encodes and decodes in this context, or in
    :func:`~fsharp.functional.comm.agree.check_on_all_ranks`.
    """
    try:
        yield
    except FormatError as error:
        comm = innermost_comm(comm)
        if (engine := engine_of(comm)) is not None:
            engine.report_failure(error, where)
        elif (watch := getattr(comm, "watch", None)) is not None:
            watch.statuses.report_failure(error, where)
        raise


_count_lock = Lock()


class DelegatingComm:
    """Base class of Comms that pass each collective to another Comm.

    A subclass defines ``_comm_and_label(label, op, axis, x, send)``, which returns the Comm that runs a call, and the label.
    """

    def _comm_and_label(
        self, label: str, op: str, axis: str | None, x: torch.Tensor, send: Sequence[int] = ()
    ) -> tuple[Comm, str]:
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor, axis: str, *, label: str = "") -> torch.Tensor:
        """Call :meth:`Comm.all_gather` of the wrapped Comm."""
        comm, label = self._comm_and_label(label, "all_gather", axis, x)
        return comm.all_gather(x, axis, label=label)

    def reduce_scatter(self, x: torch.Tensor, axis: str, *, dtype: torch.dtype | None = None, label: str = "") -> torch.Tensor:
        """Call :meth:`Comm.reduce_scatter` of the wrapped Comm."""
        comm, label = self._comm_and_label(label, "reduce_scatter", axis, x)
        return comm.reduce_scatter(x, axis, dtype=dtype, label=label)

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum", label: str = "") -> torch.Tensor:
        """Call :meth:`Comm.all_reduce` of the wrapped Comm."""
        comm, label = self._comm_and_label(label, "all_reduce", axis, x)
        return comm.all_reduce(x, axis, op=op, label=label)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, axis: str | None = None, label: str = ""
    ) -> torch.Tensor:
        """Call :meth:`Comm.all_to_all` of the wrapped Comm. ``axis=None`` means all ranks of the mesh."""
        comm, label = self._comm_and_label(label, "all_to_all", axis, x, send)
        return comm.all_to_all(x, send, receive, axis=axis, label=label)


@options_checked
@dataclass
class CountingComm(DelegatingComm, _InnerCommMixin):
    """A Comm that calls the collectives of another Comm, and counts calls and bytes.

    Attributes:
        inner: the Comm that runs the calls.
        calls: number of calls, by :class:`Call`.
    """

    inner: Comm
    calls: Counter[Call] = field(default_factory=Counter)

    all_gather, reduce_scatter = api_boundary(DelegatingComm.all_gather), api_boundary(DelegatingComm.reduce_scatter)
    all_reduce, all_to_all = api_boundary(DelegatingComm.all_reduce), api_boundary(DelegatingComm.all_to_all)

    @property
    def num_calls(self) -> int:
        """Number of collective calls so far, over all operations and axes."""
        return sum(self.calls.values())

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has sent in all calls so far, as :class:`Call` counts them."""
        return sum(call.nbytes * count for call, count in self.calls.items())

    def _comm_and_label(
        self, label: str, op: str, axis: str | None, x: torch.Tensor, send: Sequence[int] = ()
    ) -> tuple[Comm, str]:
        if op == "all_to_all":
            kept = send[self.rank if axis is None else self.mesh.coord(axis, self.rank)]
            self._add_call(Call(op, axis or "", (x.numel() - kept) * x.itemsize))
        elif axis is not None:
            parts = 1 if op == "all_gather" else self.mesh.axis_size(axis)
            self.count_call(op, axis, -(-x.numel() // parts) * x.itemsize)
        return self.inner, label

    def count_call(self, op: str, axis: str, part_nbytes: int) -> None:
        """Count a collective; ``part_nbytes`` is as in :func:`sent_nbytes`. Safe to call in several threads."""
        self._add_call(Call(op, axis, sent_nbytes(op, part_nbytes, self.mesh.axis_size(axis))))

    def _add_call(self, call: Call) -> None:
        with _count_lock:
            self.calls[call] += 1


@dataclass(frozen=True)
class LabelPrefixComm(DelegatingComm, _InnerCommMixin):
    """A Comm that puts a text, such as ``"step 3: "``, in front of the labels of all calls of ``inner``.

    A call without a label gets the text without its colon: ``"step 3"``.
    """

    inner: Comm
    prefix: str

    def _comm_and_label(self, label: str, *call: Any) -> tuple[Comm, str]:
        return self.inner, self.prefix + label if label else self.prefix.rstrip(" :,")


def sum_in_rank_order(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum ``((parts[0] + parts[1]) + parts[2]) + ...`` in ``dtype``; ``parts`` has one entry for each rank."""
    result = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        result += part
    return result
