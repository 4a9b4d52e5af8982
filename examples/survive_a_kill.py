"""A run that is killed again and again, and ends with the bits of one that was not.

python examples/survive_a_kill.py                       two processes, of which one is killed, three times
python examples/survive_a_kill.py --kills 20 --nproc 3

The program trains twice. The second time one of the processes kills itself with SIGKILL, at a moment that a seed decides: in
a step, or while a checkpoint is written. torchrun's agent ends the others and starts all of them again, and they go on from
the newest checkpoint. At the end every tensor of the two last checkpoints is compared.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import launch_example
import torch
import torch.nn.functional as F

import fsharp as fs

SAMPLES, DIM, LAYERS, BATCH = 256, 48, 3, 24


@dataclass
class Options:
    """Train with and without kills, and compare."""

    steps: int = 40
    """Steps of the optimizer."""
    kills: int = 3
    """How often a process is killed."""
    nproc: int = 2
    """Processes."""
    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "zero3"
    """Where state rests."""
    seed: int = 0
    """Of everything: initial values, samples, dropout, moments of the kills."""
    root: str = ""
    """Folder of the checkpoints, without those of an earlier run; a temporary one if it is empty."""
    step_s: float = 0.05
    """Seconds that a step takes at least, so that a kill comes somewhere in the middle."""


def shapes():
    with torch.device("meta"):
        layers = [{"w": torch.empty(DIM, DIM), "b": torch.empty(DIM)} for _ in range(LAYERS)]
        return {"layers": layers, "head": torch.empty(DIM, 1)}


def layer(p, x):
    return x + F.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.2)


def head_loss(w, x, y):
    return F.mse_loss((x @ w).squeeze(-1), y)


def loss_fn(params, batch, comm):
    x = batch["x"]
    for each in params["layers"]:
        x = fs.forward(layer, each, x, comm=comm)
    return fs.forward(head_loss, params["head"], x, batch["y"], comm=comm)


learning_rate = fs.optim.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=10, decay_steps=40)
tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(learning_rate))


def train_step(state, batch, comm):
    """An update, or none if the loss or the gradients are not finite."""
    loss, grads = fs.value_and_grad(loss_fn, microbatches=2)(state.params, batch, comm=comm)
    grads = fs.reduce_scatter(grads, comm=comm)
    bad = fs.resilience.find_nonfinite(loss, grads, comm=comm)
    metrics, grads = fs.average(loss, grads, comm=comm)
    if bad is None:
        state = fs.update(tx, grads, state, comm=comm)
    return state, metrics, bad


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, DIM, generator=g)
    return {"x": x, "y": x[:, :4].sin().sum(1)}


def run(options):
    """What each process does, each time that it is started."""
    mesh = fs.Mesh({"dp": int(os.environ["WORLD_SIZE"])})
    comm = fs.connect(mesh, device_type="cpu")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fate = random.Random(fs.resilience.fold_in(options.seed, attempt))
    is_killed = attempt < options.kills and comm.rank == fate.randrange(mesh.size)
    note = Path(f"{options.root}-killed-{attempt}")
    kill_after, seconds = fate.randrange(5), fate.uniform(0.0, 2 * options.step_s)

    layout = fs.plan(shapes(), mesh, getattr(fs, options.strategy)("dp"), units="layers.*")
    params = fs.init_params(fs.init.normal(DIM**-0.5), layout, comm, key=options.seed)
    state = fs.init_state(tx, params, comm=comm)
    sampler = fs.resilience.IndexSampler(SAMPLES, BATCH, seed=options.seed)
    samples, step_fn = data(), fs.Scheduler(comm)(train_step)
    config = {"strategy": options.strategy, "seed": options.seed}
    with fs.resilience.Run(options.root, comm=comm, total=options.steps, save_every=2, config=config) as run:
        state, sampler = run.resume((state, sampler))
        if comm.rank == 0:
            print(f"attempt {attempt} continues after {run.step} of {options.steps} steps", flush=True)
        kill_step = run.step + kill_after
        for step in run.steps():
            if is_killed and step == kill_step:
                kill_later(seconds, note)
            indices = sampler.indices(step, rank=comm.rank, num_ranks=mesh.size)
            time.sleep(options.step_s)
            with fs.resilience.seeded(options.seed, step, comm.rank):
                state, metrics, bad = step_fn(state, {name: x[indices] for name, x in samples.items()})
            state, sampler = run.end_step((state, sampler), nonfinite=bad)
            if comm.rank == 0 and run.step == run.total:
                print(f"loss {metrics.loss:.4f}", flush=True)
    fs.destroy()


def kill_later(seconds, note):
    def kill():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True  # a run that is over before is not killed
    timer.start()


def main():
    options = launch_example.parse(Options)
    if "RANK" in os.environ:
        run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(options.root or folder)
        if earlier := [*root.glob("killed*"), *root.glob("undisturbed*")]:
            sys.exit(f"error: --root {root} has {earlier[0].name!r} of an earlier run: remove the folder, or pass another one")
        found = []
        for name, kills in (("undisturbed", 0), ("killed", options.kills)):
            print(f"--- {name}", flush=True)
            command = [os.path.abspath(__file__), *sys.argv[1:], "--root", str(root / name), "--kills", str(kills)]
            status = launch_example.start(options.nproc, *command, max_restarts=kills)
            if status:
                sys.exit(status)
            found.append(fs.checkpoint.latest(root / name))
        whole, killed = found
        same = [torch.equal(whole.tensor(name), killed.tensor(name)) for name in whole.tensor_names]
        kills = len(list(root.glob("killed-killed-*")))
        print(f"{sum(same)} of {len(same)} tensors have the same bits after {killed.step} steps and {kills} kills")
        sys.exit(0 if all(same) and whole.tensor_names == killed.tensor_names and whole.step == killed.step else 1)


if __name__ == "__main__":
    main()
