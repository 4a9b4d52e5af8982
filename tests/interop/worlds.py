"""What tests of optimizers of other libraries share: meshes with strategies, and a tree with its gradients."""

import numpy as np
import optree
import torch

import fsharp as fs

STEPS = 10
WORLDS = {
    "one rank": (fs.Mesh({"dp": 1}), fs.zero3("dp")),
    "zero1 on 2": (fs.Mesh({"dp": 2}), fs.zero1("dp")),
    "zero3 on 3": (fs.Mesh({"dp": 3}), fs.zero3("dp")),
    "hfsdp on 2 x 2": (fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner")),
    "ddp on 2": (fs.Mesh({"dp": 2}), fs.ddp("dp")),
}


def params():
    """With a scalar, a leaf that no rank but one has, and sizes that no number of ranks divides."""
    g = torch.Generator().manual_seed(0)
    sizes = {"embed": {"w": (7, 5)}, "layers": [{"w": (5, 6), "b": (6,)}], "scale": ()}
    return optree.tree_map(lambda size: torch.randn(size, generator=g), sizes, is_leaf=lambda x: type(x) is tuple)


def grads_at(step):
    g = torch.Generator().manual_seed(100 + step)
    scale = 3.0 if step % 3 == 0 else 0.1  # some are clipped
    return optree.tree_map(lambda x: torch.randn(x.shape, generator=g) * scale, params())


def begin(comm, strategy, tx, frozen=()):
    layout = fs.plan(params(), comm.mesh, strategy, units=["embed", "layers.*"], frozen=frozen)
    return layout, fs.init_state(tx, fs.shard(params(), layout, comm, place="optim"), comm=comm)


def sharded(comm, strategy, tx, frozen=(), **options):
    """The parameters in full after some updates, and the state."""
    layout, state = begin(comm, strategy, tx, frozen)
    for step in range(STEPS):
        grads = fs.trainable(fs.shard(grads_at(step), layout, comm, place="optim"))
        state = fs.update(tx, grads, state, comm=comm, **options)
    return fs.full_tree(state.params, comm=comm), state


def difference(found, expected):
    """The largest, of the largest parameter of each leaf."""
    pairs = zip(*(map(np.asarray, optree.tree_leaves(tree)) for tree in (found, expected)), strict=True)
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
