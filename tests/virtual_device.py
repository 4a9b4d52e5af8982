"""VirtualDevice: a CUDA device that a host makes believe it has, and what it would have to wait for.

Tensors have host memory. A mark on their storage says on which side they are, and ``x.device`` reads it. Ops that take tensors
of both sides are refused. Each call for which a host waits for its device, or would copy pageable memory, is noted.
"""

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fsharp as fs
from fsharp.distributed import job_store, process_group
from fsharp.stateful.transport import nccl
from tests.virtual_streams import Illegal, Streams, VirtualEvent, VirtualGraph, VirtualStream, tensors_of

CUDA = torch.device("cuda", 0)
_ON, _OFF = torch.device("cpu", 0), torch.device("cpu", 1)  # how ops are told a side
_WAIT = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "allclose",
}  # fmt: skip
_COPY = {"copy_", "_to_copy", "_foreach_copy_", "set_"}
_TO_HOST = {"tolist", "numpy", "__array__", "__dlpack__"}
_here = threading.local()


class Sync(NamedTuple):
    """A call for which the host waits for its device.

    Attributes:
        what: the call.
        where: file and line of the package, or of the test.
    """

    what: str
    where: str


class VirtualDevice:
    """The device of the calling thread, while the context is entered.

    Attributes:
        syncs: what the host has waited for.
        streams: the streams.
        allocated: bytes of the device in use.
        peak: the most of them since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self.syncs: list[Sync] = []
        self.streams = Streams(self.note)
        self.frames: list[bool | None] = []
        self.allocated = self.peak = 0
        self._stack = ExitStack()

    def note(self, what: str) -> None:
        if self.streams.current.is_captured:
            raise Illegal(f"cudaErrorStreamCaptureUnsupported: {what} within a capture, at {_where()}")
        self.syncs.append(Sync(what, _where()))

    def mark(self, x: torch.Tensor, is_on_device: bool) -> None:
        """Say on which side a new storage is."""
        if x.layout is torch.strided and not x.is_meta and is_on(x) is None:
            storage = x.untyped_storage()
            storage.is_on_device = is_on_device
            if is_on_device:
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())

    def _count(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def __enter__(self) -> "VirtualDevice":
        _here.device = self
        for mode in (_Ops(self), _Calls(self)):
            self._stack.enter_context(mode)
        return self

    @contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Let a compiler look at functions: it sees no device, and no mode."""
        _here.device = None
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                yield
        finally:
            _here.device = self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
        _here.device = None


def _where() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if ("/fsharp/" in path or "/tests/" in path) and "/tests/virtual_" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def is_on(x: torch.Tensor) -> bool | None:
    """Whether a tensor is on the device; None if nobody knows."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    try:
        return getattr(x.untyped_storage(), "is_on_device", None)
    except (NotImplementedError, RuntimeError):  # without a storage
        return None


@cache
def _name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


class _Ops(TorchDispatchMode):
    """Marks what ops make."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch imports it, for seconds

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # in a backward the other mode would see each attribute that is read here
            to = self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        if to is not None:
            with torch._C.DisableTorchFunction():
                for x in tensors_of(result):
                    self.device.mark(x, to)
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """Refuse and note what a device would. Return on which side the results are."""
        name, given = _name(func), tensors_of((*args, *kwargs.values()))
        sides = [is_on(x) for x in given]
        on = True in sides
        frame = self.device.frames[-1] if self.device.frames else None
        told = kwargs.get("device")
        if told == _ON:
            to: bool | None = True
        elif told == _OFF:
            to = False
        elif given:
            to = True if on else False if False in sides else frame
        else:
            to = frame
        if on and name in _WAIT:
            self.device.note(name)
        if on and name in ("index", "index_put", "index_put_") and any(x.dtype == torch.bool for x in given[1:]):
            self.device.note(f"{name} by a mask")
        if name in ("copy_", "_to_copy", "_foreach_copy_"):
            self._copy(name, given, sides, to, is_free=kwargs.get("non_blocking", False) or True in args[2:3])
        elif on and name not in _COPY:
            for x, side in zip(given, sides, strict=True):
                if side is False and (x.ndim or name in ("cat", "stack")):
                    raise Illegal(f"{name}: expected all tensors to be on the same device, at {_where()}")
        return to

    def _copy(self, name: str, given: list[torch.Tensor], sides: list[bool | None], to: bool | None, *, is_free: bool) -> None:
        half = len(given) // 2
        if name == "_to_copy":
            pairs = [(given[0], sides[0], to)]
        else:
            pairs = [(x, side, target) for x, side, target in zip(given[half:], sides[half:], sides[:half], strict=True)]
        for x, source, target in pairs:
            if source is False and target is True and not (is_free and _is_pinned(x)):
                self.device.note(f"{name} of pageable memory" if not _is_pinned(x) else f"blocking {name} of pinned memory")
            if source is True and target is False and not is_free:
                self.device.note(f"{name} to the host")


def _is_pinned(x: torch.Tensor) -> bool:
    return getattr(x.untyped_storage(), "is_pinned_here", False)


class _Calls(TorchFunctionMode):
    """Translates devices in calls, and knows the calls that ops do not tell of."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        kwargs = dict(kwargs or {})
        if func is torch.device or isinstance(func, OpOverload) or name in ("data_ptr", "untyped_storage"):
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on = any(is_on(x) for x in tensors_of((*args, *kwargs.values())))
        if func is torch.Tensor.backward:
            with self:
                return torch.autograd.backward(first, kwargs.pop("gradient", None), **kwargs)
        if (name == "cpu" or any(map(_is_cpu, (*args, *kwargs.values())))) and _is_stand_in():
            name = "cuda" if name == "cpu" else name
            args = tuple(CUDA if _is_cpu(x) else x for x in args)
            kwargs = {key: CUDA if _is_cpu(x) else x for key, x in kwargs.items()}
        if name == "cpu" and first is not None:
            return self._call(torch.Tensor.to, (first, _OFF if on else "cpu"), {}, on)
        if name == "cuda" and first is not None:
            return self._call(torch.Tensor.to, (first, "cpu" if on else _ON), {}, on)
        if name in _TO_HOST and on:
            self.device.note(name)
        if name == "is_pinned":
            return _is_pinned(first)
        if name == "pin_memory":
            return _pin(func=first.clone)
        if name in ("tensor", "as_tensor") and "device" in kwargs and _is_cuda(kwargs["device"]):
            return self._value(func, args, kwargs)
        is_pinned = kwargs.pop("pin_memory", False)
        told = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device) or (name == "to" and isinstance(x, str))]
        args = tuple(self._translated(x, name, first) for x in args)
        kwargs = {key: self._translated(x, name, first) if key == "device" else x for key, x in kwargs.items()}
        side = True if any(map(_is_cuda, told)) else on or None
        result = self._call(func, args, kwargs, side if side is not None else False if first is None else None)
        return _pin(result) if is_pinned else result

    def _call(self, func: Any, args: Any, kwargs: Any, side: bool | None) -> Any:
        self.device.frames.append(side)
        try:
            return func(*args, **kwargs)
        finally:
            self.device.frames.pop()

    def _attribute(self, func: Any, args: Any) -> Any:
        found = func(*args)
        if func == torch.Tensor.device.__get__ and is_on(args[0]) and not _is_stand_in():
            return CUDA
        if func == torch.Tensor.is_cuda.__get__:
            return bool(is_on(args[0]))
        return found

    def _translated(self, x: Any, name: str, first: torch.Tensor | None) -> Any:
        is_named = isinstance(x, str) and (x == "cpu" or x.startswith("cuda"))
        if name == "to" and isinstance(x, torch.Tensor) and x is not first and first is not None:
            if is_on(x) != is_on(first):
                raise NotImplementedError("to(other)")
            return x
        if not isinstance(x, torch.device) and not is_named:
            return x
        if torch.device(x).type == "meta":
            return x
        on = first is not None and bool(is_on(first))
        if _is_cuda(x):
            return torch.device("cpu") if on else _ON
        return _OFF if on else torch.device("cpu")

    def _value(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """``torch.tensor(value, device="cuda")``."""
        value = args[0]
        if hasattr(value, "__cuda_array_interface__"):
            memory = value.memory
            array: Any = (ctypes.c_uint8 * len(memory)).from_address(memory.data_ptr())
            array.memory = memory
            result = torch.frombuffer(array, dtype=torch.uint8)
            result.untyped_storage().over = memory
        elif isinstance(value, torch.Tensor):
            with self:
                return value.to(kwargs.pop("device"), **kwargs)
        else:
            self.device.note(f"torch.{func.__name__}({type(value).__name__}) on the device")
            result = func(*args, **{**kwargs, "device": "cpu"}).clone()
        result.untyped_storage().is_on_device = True
        return result


def _pin(x: Any = None, *, func: Any = None) -> torch.Tensor:
    result: torch.Tensor = func() if func is not None else x
    result.untyped_storage().is_pinned_here = True
    return result


def _is_cuda(x: Any) -> bool:
    return torch.device(x).type == "cuda" if isinstance(x, (torch.device, str)) else False


def _is_cpu(x: Any) -> bool:
    return isinstance(x, (torch.device, str)) and str(x).startswith("cpu")


def _is_stand_in() -> bool:
    """Return whether the caller is TransformerEngine on its stand-in, which says "cpu" where it means its device."""
    frame: Any = sys._getframe(2)
    while (name := frame.f_globals["__name__"]).startswith(("torch.", __name__)) or frame.f_code.co_name == "device":
        frame = frame.f_back
    return name.startswith(("transformer_engine", "tests.te_cpu"))


def current() -> VirtualDevice:
    device: VirtualDevice = _here.device
    return device


@contextmanager
def _stream(stream: VirtualStream) -> Iterator[None]:
    with stream:
        yield


def _swap(real: Any, replacement: Any) -> Any:
    """The replacement where this thread has a virtual device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (real if getattr(_here, "device", None) is None else replacement)(*args, **kwargs)

    return call


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes a :class:`VirtualDevice` in this thread: to be entered by each rank."""
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> type[VirtualDevice]:
    """Have threads in a :class:`VirtualDevice` find a GPU, NCCL with one rank, and a compiler that only traces."""

    def put(owner: Any, name: str, replacement: Any) -> None:
        monkeypatch.setattr(owner, name, _swap(getattr(owner, name), replacement))

    put(torch.autograd, "has_torch_function", lambda _: False)  # else a backward is one call to the modes
    # A checkpoint looks at what autograd saves below the modes, which alone know a tensor's device.
    seen = {"default": lambda x: {"shape": x.shape, "dtype": x.dtype}}
    monkeypatch.setattr(torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", seen)
    # Classes stay classes: torch derives from them where it is imported late.
    stream = _swap(torch.Stream, lambda device=None, priority=0: VirtualStream(current().streams, priority))
    event = _swap(torch.Event, lambda device=None, **_: VirtualEvent(current().streams))
    monkeypatch.setattr(torch, "Stream", type("Stream", (torch.Stream,), {"__new__": lambda _, *a, **kw: stream(*a, **kw)}))
    monkeypatch.setattr(torch, "Event", type("Event", (torch.Event,), {"__new__": lambda _, *a, **kw: event(*a, **kw)}))
    generator = _swap(torch.Generator, lambda device="cpu", real=torch.Generator: real())
    monkeypatch.setattr(torch, "Generator", type("Generator", (torch.Generator,), {"__new__": lambda _, *a: generator(*a)}))
    put(torch, "autocast", lambda kind, dtype, real=torch.autocast: real("cpu", dtype))
    put(torch, "compile", partial(_traced, torch.compile))
    put(torch.profiler, "profile", lambda activities, real=torch.profiler.profile: real(activities=activities[:1]))
    put(torch.Tensor, "record_stream", lambda x, stream: None)
    put(torch.accelerator, "current_stream", lambda device=None: current().streams.current)
    put(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.accelerator, "set_device_index", lambda index: None)
    put(torch.accelerator, "device_count", lambda: 1)
    put(torch.accelerator, "synchronize", lambda device=None: current().note("synchronize"))
    put(torch.cuda, "is_available", lambda: True)
    put(torch.cuda, "is_initialized", lambda: True)
    put(torch.cuda, "device_count", lambda: 1)
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "set_device", lambda device: None)
    put(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 of a test")
    put(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    put(torch.cuda, "Event", lambda **_: VirtualEvent(current().streams))
    put(torch.cuda, "Stream", lambda device=None, priority=0: VirtualStream(current().streams, priority))
    put(torch.cuda, "current_stream", lambda device=None: current().streams.current)
    put(torch.cuda, "stream", _stream)
    put(torch.cuda, "synchronize", lambda device=None: current().note("synchronize"))
    put(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    put(torch.cuda, "set_rng_state", lambda state, device=None: None)
    put(torch.cuda, "empty_cache", lambda: None)
    put(torch.cuda, "memory_allocated", lambda: current().allocated)
    put(torch.cuda, "max_memory_allocated", lambda: current().peak)
    put(torch.cuda, "reset_peak_memory_stats", lambda: current().reset_peak())
    put(torch.cuda, "CUDAGraph", VirtualGraph)
    put(torch.cuda, "graph", lambda graph, **_: graph.capture(current().streams))
    put(dist, "init_process_group", lambda backend, real=dist.init_process_group, **options: real("gloo", **options))
    put(dist, "get_backend", lambda group=None: "nccl")
    put(dist, "all_reduce", lambda x, op=None, group=None: None)
    copy = lambda out, x, group=None: out.view(-1).copy_(x.view(-1))  # noqa: E731
    for module, name in (
        (nccl, "_all_gather"),
        (job_store, "all_gather_into"),
        (nccl, "_reduce_scatter"),
        (process_group, "_reduce_scatter"),
    ):
        put(module, name, copy)
    return VirtualDevice


def _traced(compile_: Any, function: Any, **options: Any) -> Any:
    """A function that torch.compile has traced, run op by op."""
    traced = compile_(function, **{**options, "backend": "eager"})

    def call(*args: Any) -> torch.Tensor:
        device = current()
        with device.out_of_the_way():
            result: torch.Tensor = traced(*args)
        device.mark(result, is_on_device=True)
        return result

    return call


GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
SIDES = ["virtual", pytest.param("cuda", marks=GPU)]
"""Where a test of a GPU runs: everywhere on a virtual one, so that what is wrong without any GPU fails at once."""


@pytest.fixture(params=SIDES)
def gpu(request: pytest.FixtureRequest, accelerator: Any) -> Iterator[None]:
    """A GPU for this process alone, or a virtual one."""
    with accelerator() if request.param == "virtual" else nullcontext():
        yield


@pytest.fixture(params=SIDES)
def comm(request: pytest.FixtureRequest, tmp_path: Any, accelerator: Any) -> Iterator[Any]:
    """One rank on a GPU, over NCCL, or on a virtual one."""
    with accelerator() if request.param == "virtual" else nullcontext(), over_nccl(tmp_path) as made:
        yield made


@contextmanager
def over_nccl(folder: Any) -> Iterator[fs.ProcessGroupComm]:
    """One rank. On a virtual device its collectives are copies."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield fs.ProcessGroupComm(init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)))
    finally:
        fs.destroy()
