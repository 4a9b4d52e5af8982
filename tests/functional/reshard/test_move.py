import optree
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests.functional.reshard.test_reshard import assert_same


class Live(TorchDispatchMode):
    """The bytes of storages that operations have made, and the most that there were at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    @property
    def nbytes(self):
        self.alive = {ref: nbytes for ref, nbytes in self.alive.items() if not ref.expired()}
        return sum(self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(t.untyped_storage()) for t in optree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        made = [t.untyped_storage() for t in optree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.alive |= {ref: x.nbytes() for x in made if (ref := StorageWeakRef(x)) not in given}
        self.most = max(self.most, self.nbytes)
        return out


class Uncopied:
    """A simulated Comm in whose all_to_all nothing has memory but what goes in and what comes out, as in a process."""

    def __init__(self, comm):
        self.mesh, self.rank, self.device = comm.mesh, comm.rank, comm.device
        self.all_gather, self.all_reduce, self._comm = comm.all_gather, comm.all_reduce, comm

    def all_to_all(self, x, send, receive, *, label=""):
        with _disable_current_modes():
            out = self._comm.all_to_all(x, send, receive, label=label)
        return out.clone()


SIZES = {f"{i}": 500 + i for i in range(8)} | {"large": 20_000}


@pytest.mark.parametrize("target", [fs.ddp, fs.zero3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_by_the_buffer(target, dtype):
    """Beside the new shards, also where they are cast, and where a leaf is ten times as large as the bound."""
    tree, bound = {name: torch.arange(float(n)) for name, n in SIZES.items()}, 8_000
    old = fs.plan(tree, fs.Mesh({"dp": 3}), fs.zero3("dp"), units="*")
    precision = fs.Precision(compute=dtype)
    new = fs.plan(tree, fs.Mesh({"dp": 3}), target("dp"), precision=precision)

    def rank_fn(comm):
        params = fs.shard_for(tree, old, comm.rank)
        with Live() as live:
            moved = fs.reshard(params, new, comm=Uncopied(comm), cast=True, buffer_nbytes=bound)
        assert_same(moved, fs.shard_for(tree, new, comm.rank, dtype="compute"))
        assert live.nbytes == fs.inspect.tree_nbytes(moved)
        return live.most - fs.inspect.tree_nbytes(moved)

    for most in simulate(old.mesh, rank_fn):
        assert bound / 5 < most <= bound + 16 * len(old.units)  # beside numbers in which ranks agree


def test_donated_buffers_are_let_go_unit_by_unit():
    tree = {name: torch.arange(float(n)) for name, n in SIZES.items()}
    old, new = (fs.plan(tree, fs.Mesh({"dp": 2}), strategy("dp"), units="*") for strategy in (fs.zero3, fs.zero1))

    def rank_fn(comm):
        params = fs.shard_for(tree, old, comm.rank)
        freed = [StorageWeakRef(n.buffers[0].untyped_storage()) for n in fs.layouts.units_of(params)]
        seen = []

        class Watched:
            mesh, rank, device, all_gather, all_reduce = comm.mesh, comm.rank, comm.device, comm.all_gather, comm.all_reduce

            def all_to_all(self, *args, **keywords):
                seen.append(sum(ref.expired() for ref in freed))
                return comm.all_to_all(*args, **keywords)

        moved = fs.reshard({"ema": params, "same": params}, new, comm=Watched(), donate=True)
        for each in moved.values():
            assert_same(each, fs.shard_for(tree, new, comm.rank))
        with pytest.raises(TreeError, match="donated state"):
            fs.full_tree(params, comm=comm)
        assert "empty" in repr(fs.layouts.units_of(params)[0])
        return seen

    # The second tree has the same buffers, which go while it moves.
    for seen in simulate(old.mesh, rank_fn):
        assert seen == [0] * 9 + list(range(9))
