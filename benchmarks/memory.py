"""Memory of parameters, gradients, optimizer state and buffers: every storage that is alive, counted at every operation.

What is seen: each tensor that an operation takes or makes, in the forward, the backward and the optimizer, for as long as
its storage lives and with the size that it has at the time. What is not: memory inside of a kernel or of gloo.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median_low as median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.steps import gathered, shape_of
from fsharp.stateful.timing.timeline import Interval, total_length, union_of_intervals

STEPS = 6
SEPARATE = "fsharp zero3, separate gradients"


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operations have touched under it and that are still alive.

    Bytes that storages share count once. Looks before and after each operation: FSDP2 frees and allocates by resizing
    storages, which is not an operation.

    Attributes:
        peak_nbytes: the most so far; set it to 0 to begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = 0
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # it calls the operation on the tensors that it is made of, and those we count
        kwargs = kwargs or {}
        self._look((args, kwargs))
        out = func(*args, **kwargs)
        self._look(out)
        return out

    def nbytes(self) -> int:
        """Bytes that are alive now."""
        runs: list[Interval] = []
        for key, ref in list(self._known.items()):
            # Holding the weak reference keeps the address from being given to another storage.
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._known[key]
            else:
                runs.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return int(total_length(union_of_intervals(runs)))

    def _look(self, tree: Any) -> None:
        for x in tree_leaves(tree):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                # Of the storage: fake tensors, on which DTensor works out shapes, say that they are on the CPU.
                if storage.device.type == "cpu" and storage._cdata not in self._known:
                    self._known[storage._cdata] = StorageWeakRef(storage)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes())


def everyone(shape: gpt.Shape, comm: fs.Comm) -> dict[str, Callable[[], c.Contender]]:
    """What builds each contender."""
    ours = partial(c.sharded, "fsharp", shape, comm)
    return {
        "DDP": partial(c.ddp, shape),
        "FSDP2": partial(c.fsdp2, shape),
        "FSDP2, embedding and head apart": partial(c.fsdp2, shape, apart=True),
        "fsharp ddp": partial(ours, fs.ddp("dp")),
        "fsharp zero1": partial(ours, fs.zero1("dp")),
        "fsharp zero2": partial(ours, fs.zero2("dp")),
        "fsharp zero3": partial(ours, fs.zero3("dp")),
        SEPARATE: partial(ours, fs.zero3("dp"), fs.SchedulePolicy(keep_gradients=True)),
        "fsharp zero3, blocking": partial(ours, fs.zero3("dp"), None),
    }


def track(build: Callable[[], c.Contender], batches: list[c.Batch]) -> dict[str, int]:
    """Return bytes of one contender over its first steps.

    ``first``: the peak of the first step; ``later``: the median of the peaks of the others (when gloo lets go of a buffer is
    chance); ``peak``: the larger of both; ``rest``: after the last step; ``optimizer``: how much of it is optimizer state.
    """
    with StorageTracker() as tracker:
        contender = build()
        peaks = []
        for i in range(STEPS):
            gc.collect()  # what cycles keep alive, and for how long, is chance
            tracker.peak_nbytes = 0
            contender.step(batches[i])
            peaks.append(tracker.peak_nbytes)
        contender.settle()
        rest = tracker.nbytes()
    first, later = peaks[0], median(peaks[1:])
    own = contender.optimizer_nbytes()
    return {"peak": max(first, later), "first": first, "later": later, "rest": rest, "optimizer": own}


def thin(options: Options) -> gpt.Shape:
    """The model's parameters and hardly an activation."""
    return gpt.Shape(dim=options.dim, layers=options.layers, heads=options.heads, time=8, batch=1)


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``memory``: this rank's, the largest of which counts; of the thin model, and of the model of the steps."""
    shape, full = thin(options), shape_of(options)
    result: dict[str, Any] = {"num_params": sum(p.numel() for p in gpt.build(shape).parameters())}
    gc.collect()
    gc.freeze()  # what is alive now stays: no need to look at it each time
    for key, each in (("by_rank", shape), ("by_rank_with_activations", full)):
        batches, mine = gpt.batches(each, comm.rank), {}
        for name, build in everyone(each, comm).items():
            say(f"{name}, {each.batch * each.time} tokens")
            mine[name] = track(build, batches)
            gc.collect()
        result[key] = gathered(mine)
    gc.unfreeze()
    return result | {"largest": largest(result["by_rank"]), "with_activations": largest(result["by_rank_with_activations"])}


def largest(by_rank: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The most that any rank needs."""
    return {name: {key: max(each[name][key] for each in by_rank) for key in row} for name, row in by_rank[0].items()}


# ---------------------------------------------------------------- the operating system's view


def measure_rss(options: Options, comm: fs.Comm, name: str) -> dict[str, Any]:
    """The part ``rss``, in processes that hold nothing else: by how much resident memory rises at most over some steps."""
    shape = thin(options)
    batches = gpt.batches(shape, comm.rank)
    tiny = gpt.Shape(vocab=8, dim=8, layers=1, heads=1, time=8, batch=1)
    contender = everyone(tiny, comm)[name]()
    for batch in gpt.batches(tiny, comm.rank)[:STEPS]:
        contender.step(batch)  # loads whatever code is loaded late
    del contender
    gc.collect()
    before = status("VmRSS")
    contender = everyone(shape, comm)[name]()
    gc.collect()
    reset_high_water()
    for i in range(STEPS):
        contender.step(batches[i])
    return {name: {"rise": max(gathered(status("VmHWM") - before))}}


def reset_high_water() -> None:
    """The high-water mark of resident memory starts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """A number of bytes that the operating system knows of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")
