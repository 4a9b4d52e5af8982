import pickle
import sys
from collections import OrderedDict
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh

import fsharp as fs
from fsharp.errors import FsharpError, LayoutError, TreeError
from fsharp.functional.layout.sharded import is_sharded
from fsharp.functional.reshard.outline import outline_from_bytes, outline_to_bytes
from fsharp.functional.state import MadeBy
from fsharp.testing import processes, simulate
from fsharp.testing.generate import layouts, meshes, precisions, trees
from tests.gpt_like import make_batches, make_params, plain_logits
from tests.scheduling import every

MESH = fs.Mesh({"dp": 4})
GRID = fs.Mesh({"outer": 2, "inner": 2})
NAMED = {
    "ddp": (MESH, fs.ddp("dp")),
    "zero1": (MESH, fs.zero1("dp")),
    "zero2": (MESH, fs.zero2("dp")),
    "zero3": (MESH, fs.zero3("dp")),
    "hsdp": (GRID, fs.hsdp("outer", "inner")),
    "hfsdp": (GRID, fs.hfsdp("outer", "inner")),
}


def loss_fn(params, batch, comm):
    """Of a tree in any units."""
    out = fs.forward(plain_logits, params, batch["x"], comm=comm)
    losses = F.cross_entropy(out.float(), batch["y"], reduction="none")
    return fs.Loss((losses * batch["w"]).sum(), batch["w"].sum())


MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


def assert_same(actual, expected):
    for a, b in zip(fs.layouts.units_of(actual), fs.layouts.units_of(expected), strict=True):
        assert (a.unit, a.place, a.groups) == (b.unit, b.place, b.groups)
        for x, y in zip(a.buffers, b.buffers, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def sent(counting):
    """Bytes of shards, without those by which ranks agree and the tree that newcomers get."""
    return sum(call.nbytes * count for call, count in counting.calls.items() if call.op == "all_to_all")


def planned_alike(tree, layout, mesh, strategy, units, precision):
    """Another layout whose leaves are trained and labelled as those of the first one."""
    stored = [
        (unit.path_in_tree(leaf), unit.groups[leaf.group]) for unit in layout.units for leaf in unit.leaves if leaf.group >= 0
    ]
    tied = {unit.path_in_tree(leaf): leaf.tied_to for unit in layout.units for leaf in unit.leaves if leaf.tied_to}
    groups = dict(stored)
    groups |= {path: groups[".".join(filter(None, owner))] for path, owner in tied.items()}
    frozen = [path or "**" for path, group in groups.items() if not group.trainable]
    labels = {path or "**": group.label for path, group in groups.items()}
    return fs.plan(tree, mesh, strategy, units=units, frozen=frozen, labels=labels, precision=precision)


@settings(max_examples=20)
@given(st.data())
def test_reshard_has_the_bits_of_shard_under_the_new_layout(data):
    tree = data.draw(trees())
    precision = data.draw(precisions())
    place = data.draw(st.sampled_from(["params", "optim"]))
    rests = {"place": place, "dtype": "main" if place == "optim" else "compute"}
    old = data.draw(layouts(tree, mesh=meshes(max_ranks=4), precision=st.just(precision)))
    new = data.draw(layouts(tree, mesh=meshes(max_ranks=4), precision=st.just(precision)))
    if place == "optim":
        units = data.draw(st.sampled_from([None, "*"])) if isinstance(tree, dict) else None
        new = planned_alike(tree, old, new.mesh, new.units[0].strategy, units, precision)
    world = fs.Mesh({"any": max(old.mesh.size, new.mesh.size) + data.draw(st.integers(0, 1))})
    everyone = st.permutations(range(world.size))
    before, after = (sorted(data.draw(everyone)[: layout.mesh.size]) for layout in (old, new))
    donate = data.draw(st.booleans())

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        mine = fs.shard_for(tree, old, before.index(comm.rank), **rests) if comm.rank in before else None
        kept = optree.tree_map(torch.clone, mine)
        moved = fs.reshard(mine, new, comm=counting, ranks=after, place=place, donate=donate, buffer_nbytes=176)
        if comm.rank in after:
            assert_same(moved, fs.shard_for(tree, new, after.index(comm.rank), **rests))
        else:
            assert moved is None
        if not donate and mine is not None:
            assert_same(mine, kept)
        return sent(counting)

    example = fs.shard_for(tree, old, 0, **rests)
    expected = [
        fs.inspect.reshard_sent_nbytes(example, new, r, old_ranks=before, ranks=after, place=place) for r in range(world.size)
    ]
    for rank, nbytes in enumerate(simulate(world, rank_fn)):
        # The first of the old ranks tells newcomers which tree it is.
        assert nbytes == expected[rank] or (rank == before[0] and len(before) < world.size and nbytes > expected[rank])


def values(trees):
    """By path: the elements of all leaves of a slot, from all ranks' parts of it."""
    result = {}
    for rank, tree in enumerate(trees):
        for node in fs.layouts.units_of(tree):
            for group in node.groups:
                for leaf in node.unit.leaves_of_group(group):
                    dtype = node.buffers[node.groups.index(group)].dtype
                    result.setdefault(node.unit.path_in_tree(leaf), torch.zeros(leaf.numel, dtype=dtype))
                for span in node.unit.leaf_spans(group, node.place, rank):
                    path = node.unit.path_in_tree(span.leaf)
                    result[path][span.first : span.last] = node.local_leaves(rank)[path]
    return result


def plan_of(name, units, **options):
    return fs.plan(make_params(), *NAMED[name], units=units, frozen="layers.0.b", **options)


ATOMS = {"layers.*.w": fs.layouts.LeafAtom(), "layers.*.v": fs.layouts.RowsAtom(2)}
TX = fs.optim.partition({"default": fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9), "matrix": fs.optim.sgd(0.1, 0.9)})


def trained(layout, comm, *, steps=1):
    state = fs.init_state(TX, fs.shard(make_params(), layout, comm, place="optim"), comm=comm)
    for batch in make_batches(steps, 16):
        batch = {k: v.chunk(4)[comm.rank] for k, v in batch.items()}
        state = fs.train_step(loss_fn, TX)(state, batch, comm)[0]
    return state


@cache
def untrained(layout):
    return simulate(layout.mesh, lambda comm: trained(layout, comm, steps=0))


LABELS = {"**": "default", "**.w": "matrix"}


@cache
def trained_under(source):
    old = plan_of(source, "layers.*", precision=MIXED, labels=LABELS)
    return simulate(old.mesh, lambda comm: trained(old, comm))


@every(2, source=NAMED, target=NAMED)
def test_reshard_of_a_state_between_strategies(source, target):
    """Whole states with main copies, frozen and tied leaves, whole matrices and two optimizers."""
    states = trained_under(source)
    slots = [lambda s: s.params, lambda s: s.main, lambda s: s.opt.inner_states["default"].ema]
    slots += [lambda s: s.opt.inner_states["default"].inner_state.nu, lambda s: s.opt.inner_states["matrix"].mu]
    expected = [values(map(slot, states)) for slot in slots]
    new = plan_of(target, None, precision=MIXED, labels=LABELS, atoms=ATOMS)

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        moved = fs.reshard(states[comm.rank], new, comm=counting, buffer_nbytes=500)
        assert sent(counting) == fs.inspect.reshard_sent_nbytes(states[comm.rank], new, comm.rank)
        return moved

    moved = simulate(MESH, rank_fn)
    for state, like in zip(moved, untrained(new), strict=True):
        assert optree.tree_structure(state) == optree.tree_structure(like)
        assert state.step == 1
        assert state.opt.inner_states["default"].inner_state.count == 1
    for slot, want in zip(slots, expected, strict=True):
        got = values(map(slot, moved))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[path], want[path]) and got[path].dtype == want[path].dtype for path in want)


@pytest.mark.parametrize("options", [None, {}, {"offload": True}], ids=["blocking", "scheduled", "offloaded"])
def test_reshard_in_the_middle_of_training(options):
    """Three steps under ZeRO-3, three under ZeRO-1 with other units: the parameters of six steps under ZeRO-3, to the bit."""
    tx, batches = fs.optim.adamw(1e-2), make_batches(6, 16)
    first = fs.plan(make_params(), MESH, fs.zero3("dp"), units="layers.*")
    second = fs.plan(make_params(), MESH, fs.zero1("dp"), units=["embed", "layers"])

    def run(comm, is_moved):
        state = fs.init_state(tx, fs.shard(make_params(), first, comm), comm=comm)
        step = partial(fs.train_step(loss_fn, tx), comm=comm)
        if options is not None:
            comm = fs.Scheduler(comm, **options)
            step = comm(fs.train_step(loss_fn, tx))
        for i, batch in enumerate(batches):
            if is_moved and i == 3:
                state = fs.reshard(state, second, comm=comm, donate=True)
            state = step(state, {k: v.chunk(4)[comm.rank] for k, v in batch.items()})[0]
        return fs.full_tree(state.params, comm=comm)

    for got, want in zip(*(simulate(MESH, partial(run, is_moved=moved)) for moved in (True, False)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True))


def test_reshard_for_inference_in_another_precision():
    tree = make_params()
    old = fs.plan(tree, MESH, fs.zero3("dp"), units="layers.*")
    new = fs.plan(tree, MESH, fs.ddp("dp"), frozen="**", precision=fs.Precision(compute=torch.bfloat16, main=torch.bfloat16))

    def rank_fn(comm):
        counting, params = fs.collectives.CountingComm(comm), fs.shard_for(tree, old, comm.rank)
        with pytest.raises(
            LayoutError, match=r"'embed'\s+compute dtype float32, in the new layout bfloat16\n(.*\n)*.*cast=True"
        ):
            fs.reshard(params, new, comm=comm)
        moved = fs.reshard(params, new, comm=counting, cast=True)
        assert sent(counting) == fs.inspect.reshard_sent_nbytes(params, new, comm.rank, cast=True)
        assert_same(moved, fs.shard_for(tree, new, comm.rank))
        return sent(counting)

    # Each rank sends its elements, of two bytes, to three others.
    assert sum(simulate(MESH, rank_fn)) == 3 * 2 * old.num_params


def test_reshard_of_what_varies():
    """Experts of each rank's own along ``ep`` stay there; along ``dp`` there is one rank fewer, and other ranks."""
    meshes_ = fs.Mesh({"dp": 3, "ep": 2}), fs.Mesh({"ep": 2, "dp": 2})
    rules = {"**": fs.zero3("dp", "ep"), "experts": fs.zero3("dp").varying("ep")}
    rows = [{"experts": torch.arange(7.0) + 100 * ep, "dense": torch.arange(11.0)} for ep in range(2)]
    old, new = (fs.plan(rows[0], mesh, rules, units="*") for mesh in meshes_)

    def rank_fn(comm):
        mine = fs.shard_for(rows[old.mesh.coord("ep", comm.rank)], old, comm.rank)
        moved = fs.reshard(mine, new, comm=comm)
        if moved is not None:
            assert_same(moved, fs.shard_for(rows[new.mesh.coord("ep", comm.rank)], new, comm.rank))
        with pytest.raises(LayoutError, match=r"'experts'\s+varies along {'ep': 2}, in the new layout {}"):
            fs.reshard(mine, fs.plan(rows[0], fs.Mesh({"dp": 6}), fs.zero3("dp"), units="*"), comm=comm)
        return moved is None

    assert simulate(meshes_[0], rank_fn) == [False] * 4 + [True] * 2


def test_nbytes_in_numbers():
    """By hand: 24 float32. What is there already does not travel, and of copies one is sent."""
    tree = {"w": torch.arange(24.0)}

    def total(old, new):
        layouts_ = [fs.plan(tree, fs.Mesh({"dp": n}), strategy("dp")) for n, strategy in (old, new)]
        shards = fs.shard_for(tree, layouts_[0], 0)
        return [fs.inspect.reshard_sent_nbytes(shards, layouts_[1], rank) for rank in range(max(old[0], new[0]))]

    assert total((4, fs.ddp), (4, fs.zero3)) == [0, 0, 0, 0]
    assert total((4, fs.zero3), (4, fs.ddp)) == [3 * 6 * 4] * 4
    # Six each become eight each: 6 to 8 move from rank 1 to 0, 12 to 16 from 2 to 1, all of rank 3 to 2.
    assert total((4, fs.zero3), (3, fs.zero3)) == [0, 2 * 4, 4 * 4, 6 * 4]
    # Of three copies each newcomer takes what it needs from another one.
    assert total((3, fs.ddp), (5, fs.ddp)) == [24 * 4, 24 * 4, 0, 0, 0]


def test_nbytes_of_parameters_that_rest_in_a_format():
    tree = {"w": torch.arange(192.0).view(6, 32), "b": torch.ones(64)}
    plain = fs.Precision(compute=torch.bfloat16, main=torch.float32)
    precision = {"w": replace(plain, stored=fs.formats.mxint8), "b": plain}
    old, new = (fs.plan(tree, fs.Mesh({"dp": 2}), strategy, precision=precision) for strategy in (fs.zero3("dp"), fs.ddp("dp")))

    nbytes = 2 * 96 * 4 + 32 * 2 + 32 * 4  # of w the decoded parameters and main copies; of b parameters in bfloat16

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, old, comm, place="optim"), comm=comm)
        fs.reshard(state, new, comm=counting)
        return sent(counting), fs.inspect.reshard_sent_nbytes(state, new, comm.rank)

    assert simulate(new.mesh, rank_fn) == [(nbytes, nbytes)] * 2


def test_ranks_that_leave_in_processes():
    """From HFSDP on 4 processes to ZeRO-3 on 3 of them, which go on with a Comm of their own."""
    tree = make_params()
    old = fs.plan(tree, GRID, fs.hfsdp("outer", "inner"), units="layers.*", precision=MIXED)
    new = fs.plan(tree, fs.Mesh({"dp": 3}), fs.zero3("dp"), precision=MIXED)
    tx = fs.optim.adamw(1e-2)

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        state = fs.init_state(tx, fs.shard(tree, old, comm, place="optim"), comm=comm)
        moved = fs.reshard(state, new, comm=counting, ranks=(0, 2, 3), buffer_nbytes=200)
        expected = fs.inspect.reshard_sent_nbytes(state, new, comm.rank, ranks=(0, 2, 3))
        small = DeviceMesh("cpu", [0, 2, 3], mesh_dim_names=("dp",))
        if moved is None:
            return sent(counting), expected, None
        comm = fs.ProcessGroupComm(small)
        batch = {k: v.chunk(3)[comm.rank] for k, v in make_batches(1, 18)[0].items()}
        state, _ = fs.train_step(loss_fn, tx)(moved, batch, comm)
        return sent(counting), expected, fs.full_tree(state.params, comm=comm)

    def fresh(comm):
        state = fs.init_state(tx, fs.shard(tree, new, comm, place="optim"), comm=comm)
        batch = {k: v.chunk(3)[comm.rank] for k, v in make_batches(1, 18)[0].items()}
        return fs.full_tree(fs.train_step(loss_fn, tx)(state, batch, comm)[0].params, comm=comm)

    reference = simulate(new.mesh, fresh)[0]
    results = processes(GRID, rank_fn)
    assert results[1][2] is None
    for got, expected, params in results:
        assert got == expected > 0
        if params is not None:
            assert all(map(torch.equal, optree.tree_leaves(params), optree.tree_leaves(reference)))


def test_newcomers_get_what_is_not_sharded():
    tree = make_params()
    old, new = (fs.plan(tree, fs.Mesh({"dp": n}), fs.zero3("dp")) for n in (1, 3))
    tx = fs.optim.adamw(1e-2, capturable=True)
    state = fs.init_state(tx, fs.shard(tree, old, fs.SingleComm(old.mesh)), comm=fs.SingleComm(old.mesh))
    state = state._replace(step=7, opt=state.opt._replace(count=torch.tensor(7.0)))

    def rank_fn(comm):
        return fs.reshard({"state": state, "of": "run 7"} if comm.rank == 1 else None, new, comm=comm)

    for rank, moved in enumerate(simulate(new.mesh, rank_fn)):
        assert moved["of"] == "run 7"
        moved = moved["state"]
        assert (moved.step, moved.opt.count.item(), moved.made_by) == (7, 7.0, state.made_by)
        assert_same(moved.params, fs.shard_for(tree, new, rank))


def test_an_update_of_the_old_state_leaves_the_new_state_as_it_is():
    comm, tree, tx = fs.SingleComm(), {"w": torch.ones(4)}, fs.optim.adamw(1e-2, capturable=True)
    layouts = [fs.plan(tree, comm.mesh, strategy("dp")) for strategy in (fs.zero3, fs.ddp)]
    state = fs.init_state(tx, fs.shard(tree, layouts[0], comm), comm=comm)
    other = fs.reshard(state, layouts[1], comm=comm)

    def loss(params, batch, comm):
        return fs.forward(lambda p: p["w"].square().sum(), params, comm=comm)

    fs.train_step(loss, tx, donate=True)(state, None, comm)
    assert other.opt.count.item() == 0


class Handed(NamedTuple):
    """A container of a user's own."""

    count: int
    rest: object


WITH_EVERYTHING = {
    "state": Handed(3, OrderedDict(b=[1.5, float("inf"), None], a=(True, "\ud800 text"))),
    7: {"bits": torch.arange(3, dtype=torch.int16), "none": torch.empty(0, 2), "one": torch.tensor(2.0, dtype=torch.bfloat16)},
    "made by": MadeBy("adamw"),
}


def test_what_ranks_that_join_are_told_comes_back_as_it_was():
    layout = fs.plan({"a": torch.ones(5), "b": torch.ones(2)}, MESH, fs.zero3("dp"), units="*")
    tree = {**WITH_EVERYTHING, "params": fs.shard_for({"a": torch.ones(5), "b": torch.ones(2)}, layout, 1)}
    again = outline_from_bytes(outline_to_bytes(tree), torch.device("cpu"))
    assert list(again) == list(tree)
    assert optree.tree_structure(again, is_leaf=is_sharded) == optree.tree_structure(tree, is_leaf=is_sharded)
    for x, y in zip(optree.tree_leaves(again, is_leaf=is_sharded), optree.tree_leaves(tree, is_leaf=is_sharded), strict=True):
        assert type(x) is type(y)
        if is_sharded(x):
            assert (x.unit, x.place, x.groups, x.reduction) == (y.unit, y.place, y.groups, y.reduction)
            assert [(b.device.type, b.shape, b.dtype) for b in x.buffers] == [("meta", b.shape, b.dtype) for b in y.buffers]
        elif isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x == y


def test_what_cannot_be_told_is_named_on_all_ranks_and_nothing_of_a_peer_is_run():
    tree, ran = make_params(), []

    class Odd:
        def __reduce__(self):
            return ran.append, ("a peer's code",)

    old, new = (fs.plan(tree, fs.Mesh({"dp": n}), fs.zero3("dp")) for n in (1, 2))

    def rank_fn(comm):
        mine = {"params": fs.shard_for(tree, old, 0), "of": {"x": Odd()}} if comm.rank == 0 else None
        with pytest.raises(FsharpError, match=r"'of\.x' cannot be sent to ranks that join: .*Odd, expected Sharded, tensors"):
            fs.reshard(mine, new, comm=comm)
        return True

    assert simulate(new.mesh, rank_fn) == [True, True]
    for data in (
        pickle.dumps(Odd()),
        b"",
        b"\xff" * 20,
        (5).to_bytes(8, "little") + b"[" * 5,
        outline_to_bytes(Odd.__name__)[:-3],
    ):
        with pytest.raises(TreeError, match="the tree for ranks that join cannot be read"):
            outline_from_bytes(data, torch.device("cpu"))
    told = outline_to_bytes(Handed(1, None)).replace(b"Handed", b"Layout").replace(__name__.encode(), b"antigravity")
    with pytest.raises(TreeError, match="cannot be read"):
        outline_from_bytes(told, torch.device("cpu"))
    assert "antigravity" not in sys.modules
    assert not ran
