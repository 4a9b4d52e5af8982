"""A rank that is killed comes back, while the processes of the other ranks stay.

python examples/lose_a_rank.py        four processes; rank 2 kills itself in step 5

It prints the process of each rank and its number of steps. The parameters have the bits of a run without a kill.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch

import fsharp as fs

RANKS, TOTAL = 4, 10
tx = fs.optim.adamw(1e-2)
data = torch.linspace(-1, 1, 96).view(32, 3)
sampler = fs.resilience.IndexSampler(len(data), 8, seed=0)  # samples follow from the number of a step


def loss_fn(params, x, comm):
    return fs.forward(lambda p, x: (torch.tanh(x @ p["w"]) - x).square().mean(), params, x, comm=comm)


def main(folder, kill):
    comm = fs.connect(fs.Mesh({"dp": RANKS}), device_type="cpu")
    params = {"w": torch.eye(3)}
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"))
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
    train_step, made = fs.Scheduler(comm)(fs.train_step(loss_fn, tx)), []
    # Every second step the state is copied to the memory of the host. All ranks are on one host, and no other host has copies.
    hosts = fs.checkpoint.Replicas(f"{folder}/memory", comm, copies=0, domain_size=RANKS, root=f"{folder}/run")
    with (
        hosts,
        fs.resilience.Run(
            f"{folder}/run", comm=comm, total=TOTAL, save_every=5, replicas=hosts, refresh_every=2, elastic=True
        ) as run,
    ):

        def step(state, number):
            if kill and number == 5 and comm.rank == 2 and not (killed := Path(folder, "killed")).exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = train_step(state, data[sampler.indices(number, rank=comm.rank, num_ranks=RANKS)])
            made.append(number)
            return run.end_step(state)

        state = run.train(step, state)
    return os.getpid(), len(made), fs.full_tree(state.params, comm=comm)["w"]


if __name__ == "__main__":
    found = []
    for kill in (False, True):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # memory; on Linux
            found.append(fs.launch(main, RANKS, folder, kill, restarts=1))
    for rank, (pid, steps, _) in enumerate(found[1]):
        print(f"rank {rank}: process {pid} has made {steps} steps")
    print("equal bits:", all(torch.equal(x[2], y[2]) for x, y in zip(*found, strict=True)))
