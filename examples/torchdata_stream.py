"""A stream of files, read by workers of torchdata's StatefulDataLoader: a run that was stopped goes on at the same byte.

python examples/torchdata_stream.py                                     two processes

It prints that all parameters of the stopped run have the bits of a run that was not stopped.
"""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shutil import rmtree

import launch_example
import torch
from gpt.data import load
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import fsharp as fs


@dataclass
class Options:
    """Train a bigram model on the source of Python's standard library."""

    steps: int = 20
    out: Path = Path("runs/stream")

    def __post_init__(self):
        if self.steps < 2:
            raise SystemExit(f"error: --steps is {self.steps}, expected at least 2: a run is stopped after half of the steps")


class Windows(IterableDataset):
    """Windows of 64 bytes. Each worker of each rank takes every n-th window. State: the number of its next window."""

    def __init__(self, comm):
        self.comm, self.next = comm, 0

    def __iter__(self):
        worker, text = get_worker_info(), load().train.long()
        first, stride = self.comm.rank * worker.num_workers + worker.id, self.comm.mesh.size * worker.num_workers
        for row in islice(text.unfold(0, 64, 64), first + stride * self.next, None, stride):
            self.next += 1
            yield row.clone()

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def train(root, comm, total):
    loader = StatefulDataLoader(Windows(comm), batch_size=8, num_workers=2)
    loader_state = fs.resilience.PerRankState(loader)
    params, tx = {"table": torch.zeros(256, 256, device=comm.device)}, fs.optim.adamw(1e-1)
    state = fs.init_state(tx, fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm), comm=comm)
    loss = lambda p, x: cross_entropy(p["table"][x[:, :-1]].flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
    train_step, steps = fs.train_step(lambda params, x, comm: fs.forward(loss, params, x, comm=comm), tx), []
    with fs.resilience.Run(root, comm=comm, total=total, save_every=total) as run:
        state, loader_state = run.resume((state, loader_state))
        for step, batch in zip(run.steps(), loader, strict=False):
            state, metrics = train_step(state, batch.to(comm.device), comm)
            steps.append((step, metrics.loss.item()))
            state, loader_state = run.end_step((state, loader_state))
    return fs.full_tree(state.params, comm=comm)["table"], steps


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}))
    if comm.rank == 0:
        for name in ("whole", "stopped"):
            rmtree(options.out / name, ignore_errors=True)  # of the run before
    whole, steps = train(options.out / "whole", comm, options.steps)
    train(options.out / "stopped", comm, options.steps // 2)
    table, rest = train(options.out / "stopped", comm, options.steps)
    if comm.rank == 0:
        print(f"loss {steps[0][1]:.4f} to {steps[-1][1]:.4f}; the second run went on with step {rest[0][0]}")
        same, losses = int((table == whole).sum()), rest == steps[-len(rest) :]
        print(f"{same} of {whole.numel()} parameters have the same bits; losses too: {losses}")


if __name__ == "__main__":
    launch_example.main(main, Options)
