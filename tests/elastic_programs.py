"""Elastic runs of which ranks are killed: what each process does, by three ways of training."""

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fsharp as fs
from fsharp.checkpoint import Replicas
from fsharp.distributed import generations
from fsharp.resilience import IndexSampler, Run
from tests.resilience.test_run import X, make_state, train_step

SIZE = 4
WAYS = {"functions": {"dp": SIZE}, "two axes": {"outer": 2, "inner": 2}, "scheduled": {"dp": SIZE}, "module": {"dp": SIZE}}
"""Ways of training, each with the axes of its mesh."""
IN_FIRST_SETUP, IN_SETUP, AFTERWARDS = -1, -2, -3
"""In place of the number of a step: in the setup, in that of a process that was restarted, or after the last step."""


class Fault(NamedTuple):
    """What happens to a rank, once in all its lives: a signal, some seconds after it begins a step. None: an error in it."""

    step: int
    rank: int
    delay_s: float = 0.0
    sign: signal.Signals | None = signal.SIGKILL


class End(NamedTuple):
    """What a rank returns: its process, a digest of all values, and the numbers of the steps that this process made."""

    pid: int
    digest: str
    steps: list[int]


def train(
    root: str,
    way: str,
    total: int,
    faults: Sequence[Fault] = (),
    *,
    limit_s: float = 60.0,
    copies: int = 0,
    lose_hosts: bool = False,
    config: Callable[[int], dict[str, int]] = lambda life: {},
    **options: Any,
) -> End:
    """Train as one rank of four, elastically, and have the faults of this rank.

    ``lose_hosts``: a rank that has a fault loses the memory of its host as well, together with the other ranks that have a
    fault in this step. ``config`` takes the number of a rank's life, from 1.
    """
    torch.set_num_threads(1)
    folder, done = Path(root), list[int]()
    note(folder / f"pids-{os.environ['RANK']}", str(os.getpid()))
    comm = fs.connect(fs.Mesh(WAYS[way]), device_type="cpu", timeout=timedelta(seconds=limit_s))
    life = len((folder / f"pids-{comm.rank}").read_text().split())
    note_that_a_restart_is_not_needed(folder / "can-stay")
    host = folder / (f"host-{comm.rank}" if copies else "host")

    def have_fault(number: int) -> None:
        for fault in faults:
            if (fault.step, fault.rank) == (number, comm.rank):
                at_once = [each for each in faults if each.step == number] if lose_hosts else [fault]
                have(fault, folder, host if lose_hosts else None, at_once)

    have_fault(IN_SETUP if life > 1 else IN_FIRST_SETUP)
    with Replicas(host, comm, copies=copies, domain_size=1 if copies else SIZE, root=folder / "disk") as replicas:
        kept = {"replicas": replicas, "elastic": True, "config": config(life), **options}
        tree = run_steps(comm, folder / "disk", way, total, have_fault, done.append, **kept)
    have_fault(AFTERWARDS)
    return End(os.getpid(), digest(tree, comm, way), done)


def run_steps(
    comm: Any,
    root: Path,
    way: str,
    total: int,
    begin: Callable[[int], Any] = lambda number: None,
    end: Callable[[int], Any] = lambda number: None,
    **options: Any,
) -> Any:
    """Make a run, and return its tree; ``begin`` and ``end`` are called in each step, with its number."""
    tree, step = (_module if way == "module" else _functions)(comm, way)
    with Run(root, comm=comm, total=total, **{"save_every": 1000, "refresh_every": 1, "signals": (), **options}) as run:

        def one(tree: Any, number: int) -> Any:
            begin(number)
            tree = run.end_step(step(tree, number))
            end(number)
            note(root.parent / f"times-{comm.rank}", f"{number} {time.time()}")
            return tree

        return run.train(one, tree)


def note(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(f"{text}\n")


def note_that_a_restart_is_not_needed(path: Path) -> None:
    """Note this process once its launcher knows that it stays when another rank is lost: from the end of its setup on."""
    announce = generations.RankMembership.announce_can_rejoin

    def announce_and_note(self: generations.RankMembership, *, can: bool) -> None:
        announce(self, can=can)
        if can:
            note(path, str(os.getpid()))

    generations.RankMembership.announce_can_rejoin = announce_and_note  # type: ignore[method-assign]


def have(fault: Fault, folder: Path, host: Path | None, at_once: Sequence[Fault]) -> None:
    """Send this process the signal of a fault, now or later, unless an earlier process of this rank got it.

    ``at_once``: faults of which none comes before all their ranks are here.
    """
    path, *others = [folder / f"fault-{each.step}-{each.rank}" for each in (fault, *at_once)]
    if path.exists():
        return
    path.touch()
    deadline = time.monotonic() + 60
    while not all(each.exists() for each in others):
        assert time.monotonic() < deadline, f"of the ranks that are lost together some have not come: {at_once}"
        time.sleep(0.01)

    def strike() -> None:
        if host is not None:
            shutil.rmtree(host)
        path.write_text(f"{time.time()} {os.getpid()}")
        if fault.sign is None:
            raise ZeroDivisionError("of this rank alone")
        os.kill(os.getpid(), fault.sign)

    if fault.delay_s:
        threading.Timer(fault.delay_s, strike).start()
    else:
        strike()


def _functions(comm: Any, way: str) -> tuple[Any, Any]:
    sampler = IndexSampler(len(X), 8, seed=3)
    scheduler = fs.Scheduler(comm, prefetch=1) if way == "scheduled" else None
    scheduled = None if scheduler is None else scheduler(train_step)

    def step(tree: Any, number: int) -> Any:
        state, sampler = tree
        x = X[sampler.indices(number, rank=comm.rank, num_ranks=SIZE)]
        state, _ = train_step(state, x, comm) if scheduled is None else scheduled(state, x)
        return state, sampler

    strategy = fs.zero3 if way != "two axes" else lambda axis: fs.hfsdp("outer", "inner")
    return (make_state(comm, strategy), sampler), step


def _module(comm: Any, way: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[torch.nn.Linear])
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    def step(tree: Any, number: int) -> Any:
        model, optimizer = tree
        optimizer.zero_grad()
        (model(X[number % 12 + comm.rank :: 4][:3]) - 1).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        return tree

    return (model, optimizer), step


def digest(tree: Any, comm: Any, way: str) -> str:
    """A digest of what all ranks hold together."""
    found = hashlib.sha256()
    if way == "module":
        tensors = [x for _, x in tree[0].named_full_parameters()]
    else:
        tensors = torch.utils._pytree.tree_leaves(fs.full_tree((tree[0].params, tree[0].opt), comm=comm))
    for x in tensors:
        if isinstance(x, torch.Tensor):
            found.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def recovery_s(folder: Path, faults: Sequence[Fault]) -> list[float]:
    """For each fault, the seconds from it to the end of the next step of that rank."""
    found = []
    for fault in faults:
        at = float((folder / f"fault-{fault.step}-{fault.rank}").read_text().split()[0])
        ends = [float(line.split()[1]) for line in (folder / f"times-{fault.rank}").read_text().splitlines()]
        found.append(min(each for each in ends if each > at) - at)
    return found
