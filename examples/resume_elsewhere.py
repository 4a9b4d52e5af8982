"""Train on four ranks under ZeRO-3 and save; go on on three ranks under another strategy, from the same bits.

python examples/resume_elsewhere.py                     four processes, then three
python examples/resume_elsewhere.py --then zero1        another strategy for the three

It prints that all 42 parameters and moments have the saved bits, and the losses of both runs. They differ by rounding only,
about 2e-7.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import launch_example
import optree
import torch
from functional_train_step import DIM, loss_fn, make_batch, shapes, tx

import fsharp as fs

SEQUENCES = 48  # of all ranks; four share them, and three


@dataclass
class Options:
    """Train a small model on four ranks, save it, and train it further on three."""

    steps: int = 20
    """Steps before, and as many after."""
    then: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"
    """The strategy of the three ranks."""
    out: Path = Path("runs/resume")
    """Folder for checkpoints."""
    resume: bool = False
    """Go on with the newest checkpoint there: what the second processes do."""


def begin(strategy, comm):
    """A state, and the step that trains it."""
    layout = fs.plan(shapes(), comm.mesh, strategy, units="layers.*")
    state = fs.init_state(tx, fs.init_params(fs.init.normal(DIM**-0.5), layout, comm, key=0), comm=comm)
    return state, fs.train_step(loss_fn, tx)


def train(state, train_step, steps, comm):
    losses = []
    for step in steps:
        parts = [make_batch(step, i) for i in range(3)]
        batch = optree.tree_map(lambda *x: torch.cat(x)[comm.rank : SEQUENCES : comm.mesh.size].to(comm.device), *parts)
        state, metrics = train_step(state, batch, comm)
        losses.append(metrics.loss)
    return state, torch.stack(losses)


def whole(state, comm):
    """Return parameters and moments, unsharded, on the CPU."""
    adam = state.opt[1]
    trees = [fs.full_tree(tree, comm=comm) for tree in (state.params, adam.mu, adam.nu)]
    return [x.cpu() for x in optree.tree_leaves(trees)]


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])}))
    strategy = getattr(fs, options.then if options.resume else "zero3")("dp")
    state, train_step = begin(strategy, comm)
    if not options.resume:
        state, _ = train(state, train_step, range(options.steps), comm)
        fs.checkpoint.save(options.out, state, step=state.step, comm=comm)
        values = whole(state, comm)
        if comm.rank == 0:
            torch.save(values, options.out / "whole.pt")  # to compare with; a checkpoint needs no such file
        return
    state = fs.checkpoint.load(options.out, state, comm=comm)
    values = whole(state, comm)
    state, losses = train(state, train_step, range(state.step, 2 * options.steps), comm)
    if comm.rank == 0:
        expected = torch.load(options.out / "whole.pt")
        equal = sum(map(torch.equal, values, expected))
        where = f"{comm.mesh.size} ranks under {options.then}"
        print(f"{equal} of {len(expected)} parameters and moments have the saved bits on {where}")
        one = fs.SingleComm(device=comm.device)
        unsharded = train(*begin(fs.ddp("dp"), one), range(2 * options.steps), one)[1][options.steps :]
        launch_example.show(losses, unsharded, "unsharded", first_step=options.steps)


if __name__ == "__main__":
    if "RANK" in os.environ:
        launch_example.main(main, Options)
    else:
        launch_example.parse(Options)  # so that nothing is started on a bad option
        for nproc, more in ((4, []), (3, ["--resume"])):
            if status := launch_example.start(nproc, os.path.abspath(sys.argv[0]), *sys.argv[1:], *more):
                sys.exit(status)
