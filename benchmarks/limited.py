"""Steps over a limited network: two ranks in a network namespace each, joined by a veth pair that ``tc`` limits.

The namespaces have no names: each is that of a process, and is gone, with its end of the link, as soon as the process is.
Processes end with the one that has started them, even if that one is killed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.codecs import BF16, CODECS, EXACT, FSDP2
from benchmarks.stats import Rounds, Spread, best_fsdp2, ratio
from benchmarks.steps import LossMismatch, in_turns, over_ranks

TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")
DEVICES, ADDRESSES, PORT = ("fsharp0", "fsharp1"), ("10.77.0.1", "10.77.0.2"), 29500
ALONE = "no communication, bfloat16"
TIMED = (
    EXACT,
    "bfloat16, zero3",
    "mxint8, zero3",
    "mxint8, gradients mxint4, zero3",
    "mxint4, zero3",
    "bfloat16, zero2",
    "mxint8, zero2",
    "mxint8, gradients mxint4, zero2",
    "updates mxint8, gradients mxint4, zero2",
)
"""Timed by default: float32, bfloat16 and formats of integers."""
SETUP_S, RENDEZVOUS_S, GRACE_S = 20.0, 120.0, 5.0
"""Seconds at most: to make the link, for ranks to meet and for a collective, and for a rank to fail after another one."""
FIRST_LOSS = 0.02
"""Largest relative difference of the first step's losses, before rounding has grown."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Steps over a limited network."""

    rate_mbit: int = 1000
    """Of the link, each way. 0 leaves this part out."""
    dim: int = 768
    """Width of the model."""
    layers: int = 3
    """Number of blocks."""
    heads: int = 12
    """Attention heads in a block."""
    time: int = 128
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences in a step and rank."""
    codecs: tuple[str, ...] = TIMED
    """Codecs that are timed, float32's among them."""
    rounds: int = 5
    """Times that each contender has its turn."""
    steps: int = 2
    """Steps in a turn."""
    warmup: int = 2
    """Steps that each contender makes before."""
    link_mb: int = 64
    """Megabytes of the plain transfers that measure the link."""
    limit_s: float = 600
    """Seconds until ranks that have not ended are killed."""


class NoLink(Exception):
    """Why there is no limited network on this machine."""


class RanksFailed(Exception):
    """A rank failed, or ran out of time. The text is what the rank printed last."""


# ---------------------------------------------------------------- the link


def missing() -> str:
    """Return why this process cannot make a link, in a few words, or nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"there is no {' and no '.join(absent)}" if absent else ""


@contextmanager
def ranks_apart(command: Callable[[int], Sequence[str]], rate_mbit: int, logs: Sequence[Path]) -> Iterator[list[Any]]:
    """Yield a process for each rank, in joined network namespaces. All end with the context. NoLink if the kernel refuses."""
    if reason := missing():
        raise NoLink(reason)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            env = os.environ | {"GLOO_SOCKET_IFNAME": DEVICES[rank], "OMP_NUM_THREADS": "1"}
            alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *command(rank)]
            with log.open("wb") as out:
                ranks.append(subprocess.Popen(alone, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        _join([process.pid for process in ranks], rate_mbit)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _join(pids: Sequence[int], rate_mbit: int) -> None:
    deadline, own = time.monotonic() + SETUP_S, os.readlink("/proc/self/ns/net")
    while any(os.readlink(f"/proc/{pid}/ns/net") == own for pid in pids):
        if time.monotonic() > deadline:
            raise NoLink(f"a process had no network namespace after {SETUP_S:g} s")
        time.sleep(0.01)
    (a, b), (pid_a, pid_b) = DEVICES, pids
    _call("ip", "link", "add", a, "netns", str(pid_a), "type", "veth", "peer", "name", b, "netns", str(pid_b))
    for device, address, pid in zip(DEVICES, ADDRESSES, pids, strict=True):
        inside = partial(_call, "nsenter", "--net", "--target", str(pid))
        inside("ip", "address", "add", f"{address}/24", "dev", device)
        limit = ("rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "20ms")
        inside("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        for each in ("lo", device):
            inside("ip", "link", "set", each, "up")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_S)
    if done.returncode:
        raise NoLink(f"'{' '.join(command)}' said: {done.stderr.strip()}")


def sent_nbytes(device: str) -> int:
    """Return the bytes that have left by a device of this process's network namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{device}:"))


def measure(options: Options) -> dict[str, Any]:
    """Start two ranks over a limited link, and return what they have measured.

    Raises NoLink if there is no link on this machine, and RanksFailed if a rank failed, or they were not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        Path(folder, "job.json").write_text(json.dumps(asdict(options)))
        logs = [Path(folder, f"log-{rank}") for rank in range(2)]

        def command(rank: int) -> list[str]:
            return [sys.executable, "-m", "benchmarks.limited", folder, str(rank)]

        with ranks_apart(command, options.rate_mbit, logs) as ranks:
            Path(folder, "linked").touch()
            _wait(ranks, logs, options.limit_s)
        return dict(json.loads(Path(folder, "result.json").read_text()))


def _wait(ranks: Sequence[Any], logs: Sequence[Path], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.returncode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    if bad := [rank for rank, process in enumerate(ranks) if process.poll() != 0]:
        tails = "\n".join(f"--- rank {rank}\n{logs[rank].read_text(errors='replace')[-4000:]}" for rank in bad)
        raise RanksFailed(f"steps over a limited network: ranks {bad} failed, or were not done after {limit_s:g} s.\n{tails}")


# ---------------------------------------------------------------- what a rank does


def everyone(shape: gpt.Shape, comm: fs.Comm, names: Sequence[str]) -> list[c.Contender]:
    """Return the contenders: FSDP2 in its variants, with bfloat16 on the wire, and each codec."""
    wire = MixedPrecisionPolicy(BF16, BF16)
    found: list[c.Contender] = [
        c.ModuleContender(ALONE, gpt.build(shape).to(BF16), synced=False),
        c.fsdp2(shape, name=FSDP2, precision=wire),
        c.fsdp2(shape, name=f"{FSDP2}, asynchronous", eager=True, precision=wire),
        c.fsdp2(shape, name=f"{FSDP2}, asynchronous, own group", eager=True, reduce_buffers=3, precision=wire),
    ]
    for name in names:
        strategy, precision = getattr(fs, CODECS[name].strategy)("dp"), CODECS[name].precision
        found.append(c.sharded(name, shape, comm, strategy, precision=precision))
    return found


def link_mbit(nbytes: int) -> dict[str, float]:
    """Return the Mbit/s of plain transfers over gloo between two ranks: one way, and both ways at once, of each."""
    rank, x, y = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    found = {}
    for name, senders in (("one way", (0,)), ("both ways", (0, 1))):
        dist.barrier()
        began = time.perf_counter()
        works = [dist.irecv(y, 1 - rank)] if 1 - rank in senders else []  # first: see ProcessGroupComm._send_and_receive
        works += [dist.isend(x, 1 - rank)] if rank in senders else []
        for work in works:
            work.wait()
        dist.barrier()
        found[name] = nbytes * 8 / (time.perf_counter() - began) / 1e6
    return found


def race(options: Options, comm: fs.Comm, device: str) -> dict[str, Any]:
    """Time the contenders in turns, then look at what each sends and computes. LossMismatch if first losses differ."""
    shape = gpt.Shape(dim=options.dim, layers=options.layers, heads=options.heads, time=options.time, batch=options.batch)
    link = link_mbit(options.link_mb << 20)
    found = everyone(shape, comm, options.codecs)
    rounds, losses = in_turns({each.name: each for each in found}, shape, options, partial(print, flush=True))
    compare_first({name: values[0] for name, values in losses.items()}, [each.name for each in found if not each.is_global])
    looks = {each.name: _look(each, gpt.batches(shape, comm.rank)[: options.steps], device) for each in found}
    return {
        "num_params": sum(p.numel() for p in gpt.build(shape).parameters()),
        "link_mbit": link,
        "sent_mb": {name: nbytes / 1e6 for name, (nbytes, _) in looks.items()},
        "busy_s": {name: seconds for name, (_, seconds) in looks.items()},
        "rounds": over_ranks(rounds)[1],
    }


def compare_first(losses: Mapping[str, torch.Tensor], of_ranks: Sequence[str]) -> None:
    """Compare first losses with each other; those of ``of_ranks`` are of a rank, and are averaged first."""
    means = {}
    for name, loss in losses.items():
        value = loss.detach().double().clone()
        if name in of_ranks:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        means[name] = float(value)
    middle = sorted(means.values())[len(means) // 2]
    if off := {name: value for name, value in means.items() if not abs(value - middle) <= FIRST_LOSS * middle}:
        raise LossMismatch(f"first losses are {off}, expected {middle:.4f} within {FIRST_LOSS:.0%}.")


def _look(contender: c.Contender, batches: Sequence[c.Batch], device: str) -> tuple[float, float]:
    """Return, for one step, the bytes that this rank sends, and the processor's time in the thread that trains."""
    dist.barrier()
    sent, busy = sent_nbytes(device), time.thread_time()
    for batch in batches:
        contender.step(batch)
    contender.settle()
    return (sent_nbytes(device) - sent) / len(batches), (time.thread_time() - busy) / len(batches)


# ---------------------------------------------------------------- figures


def ratios(rounds: Rounds) -> dict[str, Spread]:
    """Return, for each contender, its ratio to FSDP2's fastest variant within a round."""
    peer = best_fsdp2(rounds)
    return {name: ratio(rounds, name, peer) for name in rounds[0]}


def main() -> None:
    """Be one rank: wait for the link, measure, and write the result if this is rank 0."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    options = Options(**json.loads((folder / "job.json").read_text()))
    deadline = time.monotonic() + SETUP_S
    while not (folder / "linked").exists():
        if time.monotonic() > deadline:
            sys.exit(f"rank {rank}: there was no link after {SETUP_S:g} s.")
        time.sleep(0.01)
    torch.set_num_threads(1)
    store, limit = f"tcp://{ADDRESSES[0]}:{PORT}", timedelta(seconds=RENDEZVOUS_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    comm = fs.connect(fs.Mesh({"dp": 2}), device_type="cpu")
    result = race(options, comm, DEVICES[rank])
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    fs.destroy()


if __name__ == "__main__":
    main()
