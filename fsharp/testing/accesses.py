"""Logging of memory accesses: the bytes that each torch op reads and writes, and the storages that it allocates and frees."""

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsharp.distributed.worker_threads import call_when_freed
from fsharp.testing.ordering import Access, ByteSpan, Free, LogEntry

_MAX_SPANS = 1024  # a strided tensor with more runs counts as one run, from its first byte to its last
_OPS_WITHOUT_ACCESS = frozenset(
    ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::set_")
)  # these ops allocate or exchange memory without reading or writing it


def byte_spans(x: torch.Tensor) -> tuple[ByteSpan, ...]:
    """Return the runs of bytes that a strided tensor occupies, in order of address.

    A tensor with more than ``_MAX_SPANS`` runs gets one run, from its first byte to its last.
    """
    if not x.numel():
        return ()
    start, base, run = x.data_ptr(), x.untyped_storage().data_ptr(), x.element_size()
    if x.is_contiguous():
        return (ByteSpan(start, start + run * x.numel(), base),)
    dims = sorted(
        (stride * x.element_size(), size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and stride
    )
    while dims and dims[0][0] <= run:  # this dim continues the run of the inner dim, or overlaps it
        stride, size = dims.pop(0)
        run += stride * (size - 1)
    num_runs = torch.Size([size for _, size in dims]).numel()
    if num_runs > _MAX_SPANS:
        return (ByteSpan(start, start + run + sum(stride * (size - 1) for stride, size in dims), base),)
    offsets = (sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in reversed(dims))))
    return tuple(ByteSpan(at, at + run, base) for at in sorted(start + offset for offset in offsets))


class _SchemaEffects(NamedTuple):
    """The effects of an operator on its arguments, as its schema says.

    Attributes:
        touches_data: whether the operator reads or writes data; False for a view.
        written: names of the arguments that the operator writes.
        names: names of all arguments, in order.
    """

    touches_data: bool
    written: frozenset[str]
    names: tuple[str, ...]


@cache
def _schema_effects(func: Any) -> _SchemaEffects:
    schema = func._schema
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    is_view = bool(schema.returns) and not written and all(r.alias_info is not None for r in schema.returns)
    return _SchemaEffects(
        not is_view and schema.name not in _OPS_WITHOUT_ACCESS, written, tuple(a.name for a in schema.arguments)
    )


def _strided_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strided_tensors(each)


class LiveStorages:
    """The living storages from :meth:`add_storage`, each with the lane that allocated it.

    ``log`` gets a :class:`Free` when a storage is freed, unless the storage has no bytes or shares bytes with one that was
    added before.
    """

    def __init__(self, log: list[LogEntry]) -> None:
        self._log = log
        self._live: dict[int, ByteSpan] = {}
        self._sorted: list[ByteSpan] = []  # without storages inside other storages: memory that was imported twice
        self._finalizers: dict[int, weakref.finalize] = {}

    def has_storage_of(self, x: torch.Tensor) -> bool:
        """Return whether the storage of ``x`` has been added."""
        return x.untyped_storage()._cdata in self._live

    def add_storage(self, x: torch.Tensor, lane: str | None = None) -> ByteSpan:
        """Add the storage of ``x``, and return its bytes. ``lane``: the lane that allocated it; None if this was not logged."""
        storage = x.untyped_storage()
        key, start = storage._cdata, storage.data_ptr()
        span = self._live[key] = ByteSpan(start, start + storage.nbytes(), start)
        i = bisect_left(self._sorted, span)
        is_inside = any(a.start < span.stop and span.start < a.stop for a in self._sorted[max(i - 1, 0) : i + 1])
        is_listed = span.start != span.stop and not is_inside
        if is_listed:
            insort(self._sorted, span)
        self._finalizers[key] = call_when_freed(storage, self._record_free, key, lane, is_listed)
        return span

    def _record_free(self, key: int, lane: str | None, is_listed: bool) -> None:
        del self._finalizers[key]
        span = self._live.pop(key)
        if is_listed:
            self._sorted.remove(span)
            self._log.append(Free(lane, span))

    def stop_logging_frees(self) -> None:
        """Stop logging frees."""
        for finalizer in self._finalizers.values():
            finalizer.detach()


class AccessLoggingMode(TorchDispatchMode):
    """Log the memory accesses of the ops that torch runs in this thread.

    ``where()`` returns the name of the current lane, and in words the work that runs there.
    """

    def __init__(self, log: list[LogEntry], where: Callable[[], tuple[str, object]]) -> None:
        super().__init__()
        self._log, self._where = log, where
        self._storages = LiveStorages(log)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, return its result, and log the bytes that the op reads and writes."""
        if any(getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # the ops of the subclass's inner tensors come here next
        kwargs = kwargs or {}
        effects = _schema_effects(func)
        reads: list[ByteSpan] = []
        writes: list[ByteSpan] = []
        for name, value in (*zip(effects.names, args, strict=False), *kwargs.items()):
            for x in _strided_tensors(value):
                if not self._storages.has_storage_of(x):
                    self._storages.add_storage(x)
                if effects.touches_data:
                    (writes if name in effects.written else reads).extend(byte_spans(x))
        result = func(*args, **kwargs)
        lane, during = self._where()
        made: list[ByteSpan] = []
        for x in _strided_tensors(result):
            if not self._storages.has_storage_of(x):
                made.append(self._storages.add_storage(x, lane))
                # Also for an op of _OPS_WITHOUT_ACCESS, whose memory may have belonged to another tensor of this lane.
                writes.extend(byte_spans(x))
        if reads or writes or made:
            name = str(func).removesuffix(".default")
            self._log.append(Access(lane, name, during, tuple(reads), tuple(writes), tuple(made)))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._storages.stop_logging_frees()
