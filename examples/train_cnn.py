"""Train a residual CNN with BatchNorm: each rank has running statistics of its own, which are averaged in the end.

python examples/train_cnn.py                                            two processes
torchrun --nproc-per-node 4 examples/train_cnn.py --strategy hfsdp      2 x 2

It prints the losses of both runs. They are equal, or differ by rounding only.
"""

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import launch_example
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import fsharp as fs

BATCH, SIZE, CLASSES = 32, 20, 8


@dataclass
class Options:
    """Train a CNN to tell how stripes in noise are turned, sharded and unsharded."""

    steps: int = 60
    """Steps of the optimizer."""
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"] = "zero3"
    """Where state rests. The hybrids arrange the processes as outer=2 x inner=nproc/2."""
    dtype: Literal["float32", "float64"] = "float32"
    """In float64 it is easy to see that sharded and unsharded runs differ by rounding alone."""
    out: Path = Path("runs/cnn.pt")
    """File for the trained weights and buffers."""


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride)

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def build():
    torch.manual_seed(0)
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def images(count, seed, device):
    """Stripes of random width and phase in noise; the class is their angle."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=g)
    angle, width, phase = labels * math.pi / CLASSES, 0.6 + torch.rand(count, generator=g), 7 * torch.rand(count, generator=g)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    stripes = torch.sin(along * width[:, None, None] + phase[:, None, None])
    return (stripes + torch.randn(count, SIZE, SIZE, generator=g)).unsqueeze(1).to(device), labels.to(device)


def groups(parameters):
    """Matrices and kernels decay; the rest does not."""
    parts = {True: [], False: []}
    for parameter in parameters:
        parts[parameter.ndim > 1].append(parameter)
    return [{"params": parts[True], "weight_decay": 1e-3}, {"params": parts[False], "weight_decay": 0.0}]


def train(models, optimizer, batches):
    """The loss of each step: a mean over the parts of a batch, each of which goes to the model that keeps its statistics."""
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(batches))
    losses = []
    for parts in batches:
        loss = sum(F.cross_entropy(model(x), labels) for model, (x, labels) in zip(models, parts)) / len(parts)
        loss.backward()
        optimizer.step()
        cycle.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def average(x, comm):
    for axis in comm.mesh.names:
        x = fs.collectives.all_reduce(x, comm, axis)
    return x / comm.mesh.size


@torch.no_grad()
def accuracy(model, x, labels):
    return (model.eval()(x).argmax(1) == labels).double().mean()


def main(options):
    torch.set_default_dtype(getattr(torch, options.dtype))
    size = int(os.environ["WORLD_SIZE"])
    mesh = fs.Mesh({"outer": 2, "inner": size // 2} if options.strategy in ("hsdp", "hfsdp") else {"dp": size})
    comm = fs.connect(mesh)
    strategy = getattr(fs, options.strategy)(*mesh.names)
    model = fs.shard_module(build().to(comm.device), mesh=comm, strategy=strategy, units=[Block])
    sgd = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    optimizer = fs.ShardedOptimizer(groups(model.parameters()), torch.optim.SGD, **sgd)
    seeds = [[1 + size * step + part for part in range(size)] for step in range(options.steps)]
    batches = [[images(BATCH // size, seed, comm.device) for seed in each] for each in seeds]

    losses = average(train([model], optimizer, [[parts[comm.rank]] for parts in batches]), comm)
    test = images(1024, 0, comm.device)
    own = accuracy(model, *test)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():  # not the number of batches
                buffer.copy_(average(buffer, comm))
    together = accuracy(model, *test)
    with model.unsharded():  # on every rank
        weights = {name: x.clone() for name, x in model.state_dict().items()}
    if comm.rank == 0:
        compare(options, batches, sgd, losses, weights)
        print(f"accuracy with BatchNorm statistics of rank 0: {own:.4f}, of all ranks: {together:.4f}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.out)
        loaded = build().to(comm.device)
        loaded.load_state_dict(torch.load(options.out))
        print(f"accuracy of the unsharded model, loaded from {options.out}: {accuracy(loaded, *test):.4f}")


def compare(options, batches, sgd, losses, weights):
    """With the unsharded model: one set of parameters, and running statistics for each part of a batch."""
    alone = build().to(losses.device)
    statistics = [{name: x.clone() for name, x in alone.named_buffers()} for _ in batches[0]]
    models = [partial(functional_call, alone, each) for each in statistics]
    unsharded = train(models, torch.optim.SGD(groups(alone.parameters()), **sgd), batches)
    launch_example.show_losses(losses, unsharded, "unsharded")
    expected = dict(alone.named_parameters()) | {
        name: sum(each[name] for each in statistics) / len(statistics) for name in statistics[0]
    }
    apart = max((weights[name] - x).abs().max() for name, x in expected.items())
    loss = (losses - unsharded).abs().max()
    print(f"largest difference between losses: {loss:.1e}, between parameters and statistics: {apart:.1e}")


if __name__ == "__main__":
    launch_example.main(main, Options)
