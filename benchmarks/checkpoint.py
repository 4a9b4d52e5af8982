"""Checkpoints of fsharp against those of torch.distributed.checkpoint: the same bytes, sharded alike, in turns.

In memory (/dev/shm), where a library's own work is all there is, so that its figures count; and on a disk, whose own time is in
both and which others use as well. Both call fsync. fsharp reads back what it wrote and compares everything it loads with
digests; DCP does neither. What is loaded was written just before and is in the page cache.
"""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import fsharp as fs
from benchmarks.memory import reset_high_water, status
from benchmarks.options import Options
from benchmarks.stats import Rounds, Spread, paired, ratio, spread, times, turn
from benchmarks.steps import gathered, over_ranks
from fsharp.checkpoint import shard_file

OURS, DCP, DCP_THREADS = "fsharp", "DCP", "DCP, 2 threads"
SAVE, LOAD, FIRST, STEADY = "save", "load", "async, first", "async, steady"
COPY, HASHING = "plain copy", "hashing"
WIDTH = 1024


class Ours:
    """Parameters under zero3."""

    def __init__(self, options: Options, comm: fs.Comm) -> None:
        tree = {"layers": [layer(i) for i in range(num_layers(options))]}
        self.comm = comm
        self.state = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="layers.*"), comm)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [buffer for node in fs.layouts.units_of(self.state) for buffer in node.buffers]

    def save(self, folder: Path) -> None:
        fs.checkpoint.save(folder, self.state, step=0, comm=self.comm)

    def load(self, folder: Path) -> None:
        self.state = fs.checkpoint.load(folder, self.state, comm=self.comm, donate=True)

    @contextmanager
    def asynchronous(self, folder: Path) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
        """What begins a save, and what waits for its end."""
        with fs.checkpoint.Saver(folder, self.comm, keep=1) as saver:
            yield lambda step: saver.save(self.state, step=step), saver.wait


class Theirs:
    """The same parameters as FSDP2 has them: DTensors, sharded by row."""

    def __init__(self, options: Options, comm: fs.Comm, threads: int = 1) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (options.nproc,))
        self.threads = threads
        self.state = {
            f"layers.{i}.{name}": distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
            for i in range(num_layers(options))
            for name, value in layer(i).items()
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value.to_local() for value in self.state.values()]

    def _writer(self, folder: Path) -> Any:
        return dcp.FileSystemWriter(folder, thread_count=self.threads)

    def save(self, folder: Path) -> None:
        dcp.save(self.state, storage_writer=self._writer(folder))

    def load(self, folder: Path) -> None:
        dcp.load(self.state, checkpoint_id=folder)

    @contextmanager
    def asynchronous(self, folder: Path) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
        """As :meth:`Ours.asynchronous`; the copies' memory is kept between saves here too."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        under_way: list[Any] = []

        def save(step: int) -> None:
            writer = self._writer(folder / str(step))
            under_way.append(dcp.async_save(self.state, storage_writer=writer, async_stager=stager))

        yield save, lambda: under_way.pop().result()
        stager.close()


def layer(i: int) -> dict[str, torch.Tensor]:
    """Parameters of one layer, 16.8 MB, the same on all ranks."""
    generator = torch.Generator().manual_seed(i)
    made = {f"w{j}": torch.randn(WIDTH, WIDTH, generator=generator) for j in range(4)}
    return made | {f"b{j}": torch.randn(WIDTH, generator=generator) for j in range(4)}


def num_layers(options: Options) -> int:
    """As many as give each rank the bytes that were asked for."""
    return max(1, round(options.checkpoint_mb * 1e6 * options.nproc / (16 * WIDTH * (WIDTH + 1))))


def places() -> dict[str, str | None]:
    """Folders by what they are on; None for that of temporary files."""
    memory = {"memory": "/dev/shm"} if os.path.isdir("/dev/shm") else {}
    return {**memory, "disk": None}


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``checkpoint``: seconds of each, the largest of all ranks."""
    everyone = {OURS: Ours(options, comm), DCP: Theirs(options, comm), DCP_THREADS: Theirs(options, comm, 2)}
    nbytes = sum(x.nbytes for x in everyone[OURS].tensors)
    result: dict[str, Any] = {"nbytes_of_a_rank": nbytes, "places": {}}
    for place, root in places().items():
        rounds = []
        for number in range(options.checkpoint_rounds + 1):
            gc.collect()
            row: dict[str, float] = {}
            for name in turn(list(everyone), number):
                row |= {f"{name}, {kind}": seconds for kind, seconds in once(everyone[name], root, comm).items()}
            row |= extras(everyone[OURS])
            rounds.append(row)
            say(f"{place}, round {number} of {options.checkpoint_rounds}")
        result["places"][place] = {"rounds": over_ranks(rounds[1:])[1]}  # the first one only warms up
    return result


def once(contender: Ours | Theirs, root: str | None, comm: fs.Comm) -> dict[str, float]:
    """Seconds of a save, a load, and the part of two saves in the background that holds the caller."""
    found = {}
    with shared_folder(root, comm) as folder:
        found[SAVE] = timed(lambda: contender.save(folder / "sync"))
        found[LOAD] = timed(lambda: contender.load(folder / "sync"))
        with contender.asynchronous(folder / "async") as (save, wait):
            for step, kind in enumerate((FIRST, STEADY)):
                found[kind] = timed(lambda step=step: save(step))
                wait()
    return found


def extras(ours: Ours) -> dict[str, float]:
    """Seconds of a copy into memory that is there already, and of the digests of what a rank writes, once."""
    copies = [x.clone() for x in ours.tensors]

    def copy() -> None:
        for target, value in zip(copies, ours.tensors, strict=True):
            target.copy_(value)

    def digests() -> None:
        for value in ours.tensors:
            shard_file.block_digests(shard_file.bytes_of(value))

    return {COPY: timed(copy), HASHING: timed(digests)}


def timed(run: Callable[[], Any]) -> float:
    """Seconds, from where all ranks are to where this one has ended."""
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextmanager
def shared_folder(root: str | None, comm: fs.Comm) -> Iterator[Path]:
    """A folder that rank 0 makes and removes."""
    made = [tempfile.mkdtemp(prefix="fsharp-bench-", dir=root) if comm.rank == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield Path(made[0])
        dist.barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(made[0])


# ---------------------------------------------------------------- figures


def figures(part: dict[str, Any]) -> dict[str, float]:
    """What the last line has of this part: those of the first place, which is memory where there is any."""
    rounds = next(iter(part["places"].values()))["rounds"]
    found = {
        "save_ratio_vs_dcp": against_dcp(rounds, SAVE),
        "load_ratio_vs_dcp": against_dcp(rounds, LOAD),
        "stall_ratio_vs_dcp_async": against_dcp(rounds, STEADY),
        "first_stall_ratio_vs_dcp_async": against_dcp(rounds, FIRST),
        "copy_ratio": ratio(rounds, f"{OURS}, {STEADY}", COPY),
        "hash_share": ratio(rounds, HASHING, f"{OURS}, {SAVE}"),
    }
    medians = {name: each.median for name, each in found.items()}
    if rss := part.get("rss"):
        medians["save_memory_ratio_vs_dcp"] = rss[OURS][FIRST] / rss[DCP][FIRST]
    return medians


def against_dcp(rounds: Rounds, kind: str) -> Spread:
    """fsharp's time to that of DCP in the faster of its settings."""
    fastest = min((f"{name}, {kind}" for name in (DCP, DCP_THREADS)), key=lambda name: times(rounds, name).median)
    return ratio(rounds, f"{OURS}, {kind}", fastest)


def rows(part: dict[str, Any]) -> Iterator[tuple[str, str, Spread, Spread | str]]:
    """Where, what, milliseconds, and what they are of DCP's; at the end megabytes."""
    for place, each in part["places"].items():
        for name in each["rounds"][0]:
            is_ours = name.startswith(OURS)
            took = paired(each["rounds"], lambda row, name=name: 1e3 * row[name])
            yield place, name, took, against_dcp(each["rounds"], name.removeprefix(f"{OURS}, ")) if is_ours else ""
    for name, rises in part.get("rss", {}).items():
        for kind, rise in rises.items():
            yield "memory taken, MB", f"{name}, {kind}", spread([rise / 1e6]), ""


# ---------------------------------------------------------------- the operating system's view of memory


def measure_rss(options: Options, comm: fs.Comm, name: str) -> dict[str, Any]:
    """The part ``checkpoint_rss``, in processes of one contender: by how much resident memory rises at most in each."""
    contender = {OURS: Ours, DCP: Theirs}[name](options, comm)
    rises = {}
    with shared_folder(None, comm) as folder:
        contender.save(folder / "warm")  # loads whatever code is loaded late
        contender.load(folder / "warm")

        def background() -> None:
            with contender.asynchronous(folder / "async") as (save, wait):
                save(0)
                wait()

        runs = {SAVE: lambda: contender.save(folder / "sync"), LOAD: lambda: contender.load(folder / "sync"), FIRST: background}
        for kind, run in runs.items():
            gc.collect()
            dist.barrier()
            before = status("VmRSS")
            reset_high_water()
            run()
            rises[kind] = status("VmHWM") - before
    everyones = gathered(rises)
    return {name: {kind: max(each[kind] for each in everyones) for kind in rises}}
