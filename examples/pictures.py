"""Draws where a unit rests and what a step does: sharding.png and schedule.png, from one process and no device.

python -m examples.pictures docs
"""

import sys
from pathlib import Path

import fsharp as fs
from examples.functional_train_step import make_batch, shapes, train_step, tx
from fsharp.testing import simulate


def train(comm):
    """Two steps: the first one is recorded, the second follows the schedule."""
    layout = fs.plan(shapes(), comm.mesh, fs.zero3("dp"), units="layers.*")
    state = fs.init_state(tx, fs.init_params(fs.init.normal(0.1), layout, comm, key=0), comm=comm)
    step = fs.Scheduler(comm, release="forward")(train_step)
    for i in range(2):
        state, _ = step(state, make_batch(i, comm.rank))
    return step.schedule


def main(folder="."):
    layout = fs.plan(shapes(), fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner"), units="layers.*")
    fs.inspect.draw_sharding(layout, Path(folder, "sharding.png"), unit="layers.0")

    schedule = simulate(fs.Mesh({"dp": 4}), train)[0]  # four ranks, in threads of this process
    hardware = fs.inspect.Hardware(compute_times={"**": (2e-3, 4e-3)}, bandwidth=60e6, latency=2e-5)
    fs.inspect.draw(schedule, Path(folder, "schedule.png"), hardware=hardware)


if __name__ == "__main__":
    main(*sys.argv[1:])
