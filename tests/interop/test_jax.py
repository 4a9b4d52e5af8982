"""to_jax and from_jax: shards as global arrays in the same memory, in one process with several devices and in several."""

import gc
import socket

import jax
import jax.numpy as jnp
import optree
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import fsharp as fs
from fsharp.errors import LayoutError, TreeError
from fsharp.interop.jax import from_jax, shardings, to_jax, unflatten
from fsharp.testing import processes, simulate
from tests import gpt_like

ONE, TWO, BOTH = fs.Mesh({"dp": 3}), fs.Mesh({"outer": 2, "inner": 2}), fs.Mesh({"dp": 2, "ep": 2})
LAYOUTS = {
    "ddp": (ONE, fs.ddp("dp")),
    "zero3": (ONE, fs.zero3("dp")),
    "hsdp": (TWO, fs.hsdp("outer", "inner")),
    "hfsdp": (TWO, fs.hfsdp("outer", "inner")),
    "one rank": (fs.Mesh({"dp": 1}), fs.zero3("dp")),
}


def layout_of(name, params=None, **options):
    mesh, strategy = LAYOUTS[name]
    return fs.plan(gpt_like.make_params() if params is None else params, mesh, strategy, units="layers.*", **options)


def shards(layout, params=None, place="params"):
    params = gpt_like.make_params() if params is None else params
    trees = [fs.shard_for(params, layout, rank, place=place) for rank in range(layout.mesh.size)]
    return trees if len(trees) > 1 else trees[0]


def buffers(trees):
    return [buffer for node in fs.layouts.units_of(trees) for buffer in node.buffers]


def pointers(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for k in range(len(jax.tree.leaves(tree)[0].addressable_shards))
        for shard in [x.addressable_shards[k] for x in jax.tree.leaves(tree)]
    ]


@pytest.mark.parametrize("place", ["params", "optim"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_to_jax_has_the_memory_of_the_shards(name, place):
    layout = layout_of(name)
    trees = shards(layout, place=place)
    arrays = to_jax(trees, layout)
    assert pointers(arrays) == [x.data_ptr() for x in buffers(trees)]
    mesh, strategy = LAYOUTS[name]
    axes = getattr(strategy, place).sharded_axes
    for node in fs.layouts.units_of(arrays):
        for group, x in zip(node.groups, node.buffers, strict=True):
            assert x.shape == (node.unit.groups[group].size,)
            assert x.sharding.spec == PartitionSpec(axes or None)
            assert x.sharding.mesh.shape == dict(mesh.axes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_unflatten_gives_the_leaves_that_jax_computes_with(name):
    params = gpt_like.make_params()
    layout = layout_of(name)
    arrays = to_jax(shards(layout), layout)
    whole = jax.jit(unflatten)(arrays)
    want = optree.tree_leaves(params)
    assert [x.shape for x in jax.tree.leaves(whole)] == [x.shape for x in want]
    for x, y in zip(jax.tree.leaves(whole), want, strict=True):
        assert torch.equal(torch.tensor(x.__array__()), y)


def test_a_step_of_jax_on_the_shards():
    params = gpt_like.make_params()
    layout = layout_of("hfsdp")
    trees = shards(layout)

    def loss(tree):
        return sum(jnp.square(x).sum() * (i + 1) for i, x in enumerate(jax.tree.leaves(unflatten(tree))))

    @jax.jit
    def step(tree):
        return jax.tree.map(lambda p, g: p - 0.1 * g, tree, jax.grad(loss)(tree))

    arrays = jax.device_put(step(to_jax(trees, layout)), shardings(layout))
    after = fs.unshard(from_jax(arrays, layout))
    leaves = optree.tree_leaves(params)
    for x, new in zip(leaves, optree.tree_leaves(after), strict=True):
        factor = sum(i + 1 for i, y in enumerate(leaves) if x is y)  # of a tied leaf gradients are added
        torch.testing.assert_close(new, x * (1 - 0.2 * factor))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_from_jax_is_the_inverse(name, donate):
    layout = layout_of(name)
    trees = shards(layout)
    arrays = to_jax(trees, layout)
    back = from_jax(arrays, layout, donate=donate)
    assert all(torch.equal(x, y) for x, y in zip(buffers(back), buffers(trees), strict=True))
    assert [x.data_ptr() == y.data_ptr() for x, y in zip(buffers(back), buffers(trees), strict=True)] == [donate] * len(
        buffers(trees)
    )
    assert all(x.is_deleted() == donate for x in jax.tree.leaves(arrays))
    if donate:
        with pytest.raises(RuntimeError, match="deleted"):
            jax.tree.leaves(arrays)[0].sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_to_jax_of_other_dtypes(dtype):
    params = {"a": torch.arange(10).to(dtype), "b": torch.zeros(0).to(dtype)}
    layout = fs.plan(params, ONE, fs.zero3("dp"), frozen="**" if dtype.itemsize == 1 else ())
    trees = shards(layout, params)
    arrays = to_jax(trees, layout)
    assert [x.dtype.name for x in jax.tree.leaves(arrays)] == [str(dtype).removeprefix("torch.")] * len(jax.tree.leaves(arrays))
    assert pointers(arrays) == [x.data_ptr() for x in buffers(trees)]
    back = from_jax(arrays, layout)
    assert all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(buffers(back), buffers(trees), strict=True)
    )


def test_to_jax_of_a_tree_of_more_ranks_than_elements():
    params = {"a": torch.ones(2), "b": torch.zeros(0), "c": torch.tensor(3.0)}
    layout = fs.plan(params, fs.Mesh({"dp": 4}), fs.zero3("dp"), units=["a", "b", "c"])
    whole = jax.jit(unflatten)(to_jax(shards(layout, params), layout))
    assert [x.tolist() for x in jax.tree.leaves(whole)] == [[1, 1], [], 3]


def test_to_jax_gives_what_varies_a_leading_dim():
    params = {"experts": torch.zeros(6), "router": torch.arange(4.0)}
    strategies = {"experts": fs.zero3("dp").varying("ep"), "router": fs.zero3("dp", "ep")}
    layout = fs.plan(params, BOTH, strategies, units=["experts", "router"])
    trees = []
    for rank in range(4):
        trees.append(fs.shard_for(params | {"experts": torch.full((6,), float(BOTH.coord("ep", rank)))}, layout, rank))
    arrays = to_jax(trees, layout)
    assert unflatten(arrays)["experts"].tolist() == [[0.0] * 6, [1.0] * 6]
    assert unflatten(arrays)["router"].tolist() == [0, 1, 2, 3]
    assert pointers(arrays) == [x.data_ptr() for x in buffers(trees)]
    assert all(torch.equal(x, y) for x, y in zip(buffers(from_jax(arrays, layout)), buffers(trees), strict=True))


def test_update_refuses_to_donate_what_jax_reads():
    comm = fs.SingleComm()
    layout = layout_of("one rank")
    tx = fs.optim.sgd(0.1)
    state = fs.init_state(tx, fs.shard(gpt_like.make_params(), layout, comm), comm=comm)
    arrays, others = to_jax(state.params, layout), to_jax(state.params, layout)
    step = {donate: fs.train_step(gpt_like.loss_fn, tx, donate=donate) for donate in (False, True)}
    (batch,) = gpt_like.make_batches(1, 8)
    before = [x.sum().item() for x in jax.tree.leaves(arrays)]
    with pytest.raises(TreeError, match=r"JAX arrays have the memory of unit 'embed'.*donate=True"):
        step[True](state, batch, comm)
    new, _ = step[False](state, batch, comm)
    assert [x.sum().item() for x in jax.tree.leaves(arrays)] == before
    step[True](new, batch, comm)
    del others
    gc.collect()
    with pytest.raises(TreeError, match="memory of unit 'embed'"):
        step[True](state, batch, comm)
    assert [x.sum().item() for x in jax.tree.leaves(arrays)] == before
    derived = [x.addressable_shards[0].data for x in jax.tree.leaves(arrays)]
    del arrays
    gc.collect()
    with pytest.raises(TreeError, match="memory of unit 'embed'"):
        step[True](state, batch, comm)
    del derived
    gc.collect()
    step[True](state, batch, comm)


@pytest.mark.parametrize("name", ["zero3", "one rank"])
def test_optimizer_state_there_and_back(name):
    layout = layout_of(name)
    world = layout.mesh.size
    tx = fs.optim.adamw(0.1)

    def run(comm):
        state = fs.init_state(tx, fs.shard(gpt_like.make_params(), layout, comm), comm=comm)
        (batch,) = gpt_like.make_batches(1, 12)
        mine = {key: x.chunk(world)[comm.rank] for key, x in batch.items()}
        return fs.train_step(gpt_like.loss_fn, tx)(state, mine, comm)[0]

    states = simulate(layout.mesh, run)
    arrays = to_jax(states if world > 1 else states[0], layout)
    arrays = arrays._replace(opt=jax.jit(lambda opt: opt)(arrays.opt)) if name == "one rank" else arrays
    back = from_jax(arrays, layout)
    for old, new in zip(states, back if world > 1 else [back], strict=True):
        assert optree.tree_structure(old) == optree.tree_structure(new)
        assert all(torch.equal(x, y) for x, y in zip(buffers(old), buffers(new), strict=True))
        assert (new.step, new.opt.count) == (1, 1)
        assert type(new.opt.count) is int


def test_donation_to_jit_leaves_the_tensors():
    layout = layout_of("one rank")
    mine = shards(layout)
    before = [x.clone() for x in buffers(mine)]
    arrays = to_jax(mine, layout)
    out = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(arrays)
    assert [x.sum().item() for x in jax.tree.leaves(out)] == pytest.approx([2 * x.sum().item() for x in before], abs=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(buffers(mine), before, strict=True))
    with pytest.raises(TreeError, match=r"from_jax\(\): unit 'embed' has a deleted array"):
        from_jax(arrays, layout)


def test_average_refuses_to_donate_what_jax_reads():
    comm = fs.SingleComm()
    layout = layout_of("one rank")
    (batch,) = gpt_like.make_batches(1, 8)
    loss, grads = fs.value_and_grad(gpt_like.loss_fn)(fs.shard(gpt_like.make_params(), layout, comm), batch, comm=comm)
    arrays = to_jax(grads, layout)
    before = [x.sum().item() for x in jax.tree.leaves(arrays)]
    with pytest.raises(TreeError, match=r"average\(\): JAX arrays have the memory of unit 'embed'"):
        fs.average(loss, grads, comm=comm, donate=True)
    fs.average(loss, grads, comm=comm)
    assert [x.sum().item() for x in jax.tree.leaves(arrays)] == before


def test_a_checkpoint_is_not_read_into_what_jax_reads(tmp_path):
    comm, layout = fs.SingleComm(), layout_of("one rank")
    params = fs.shard(gpt_like.make_params(), layout, comm)
    fs.checkpoint.save(tmp_path, params, step=0, comm=comm)
    arrays = to_jax(params, layout)
    before = [x.sum().item() for x in jax.tree.leaves(arrays)]
    with pytest.raises(TreeError, match=r"load\(\): JAX arrays have the memory of unit 'embed'"):
        fs.checkpoint.load(tmp_path, params, comm=comm, donate=True)
    assert [x.sum().item() for x in jax.tree.leaves(arrays)] == before


def test_to_jax_refuses():
    layout, other = layout_of("zero3"), layout_of("hfsdp")
    trees = shards(layout)
    with pytest.raises(TreeError, match="devices of 3 ranks, expected a list of 3 trees, got 2"):
        to_jax(trees[:2], layout)
    with pytest.raises(TreeError, match="devices of 3 ranks, expected a list of 3 trees, got dict"):
        to_jax(trees[0], layout)
    with pytest.raises(TreeError, match="unit 'embed' is not of the layout"):
        to_jax(shards(other), layout_of("hsdp"))
    with pytest.raises(LayoutError, match="has 8 ranks, and JAX 4 devices"):
        to_jax(trees, fs.plan(gpt_like.make_params(), fs.Mesh({"dp": 8}), fs.zero3("dp")))
    partial = [fs.shard_for(gpt_like.make_params(), layout_of("ddp"), rank) for rank in range(3)]
    grads = [fs.layouts.map_units(lambda s: s.replace(s.buffers, s.unit.strategy.grads), tree) for tree in partial]
    with pytest.raises(TreeError, match="rests partial"):
        to_jax(grads, layout_of("ddp"))
    double = {"a": torch.zeros(8, dtype=torch.float64)}
    with pytest.raises(TreeError, match="JAX would make float64 narrower"):
        to_jax(shards(fs.plan(double, ONE, fs.zero3("dp")), double), fs.plan(double, ONE, fs.zero3("dp")))
    shifted = fs.layouts.map_units(lambda s: s.replace([torch.cat([b.new_zeros(1), b])[1:] for b in s.buffers]), trees[0])
    with pytest.raises(TreeError, match="is not a multiple of 64 bytes"):
        to_jax([shifted, *trees[1:]], layout)
    with pytest.raises(TreeError, match=r"to_jax\(\): unit 'embed' has a ArrayImpl, expected tensors"):
        to_jax([to_jax(trees, layout)] * 3, layout)
    with pytest.raises(TreeError, match=r"from_jax\(\): unit 'embed' has a Tensor, expected JAX arrays"):
        from_jax(trees[0], layout)
    with pytest.raises(TreeError, match=r"a Tensor of layout torch\.strided on device meta has no memory"):
        to_jax([optree.tree_map(lambda x: x.to("meta"), tree) for tree in trees], layout)
    with pytest.raises(TreeError, match="no Sharded in the tree"):
        from_jax({"a": jnp.ones(3)}, layout)


def test_from_jax_refuses_arrays_that_rest_elsewhere():
    layout = layout_of("zero3")
    arrays = to_jax(shards(layout), layout)
    everywhere = NamedSharding(jax.tree.leaves(arrays)[0].sharding.mesh, PartitionSpec())
    with pytest.raises(TreeError, match=r"an array of unit 'embed'.*expected.*device_put"):
        from_jax(jax.device_put(arrays, everywhere), layout)


def across_processes(comm, port):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"localhost:{port}", comm.mesh.size, comm.rank)
    params = gpt_like.make_params()
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*")
    mine = fs.shard(params, layout, comm)
    arrays = to_jax(mine, layout)
    assert pointers(arrays) == [x.data_ptr() for x in buffers(mine)]
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), out_shardings=shardings(layout))(arrays)
    total = float(jax.jit(lambda tree: sum(x.sum() for x in jax.tree.leaves(tree)))(arrays))
    result = fs.full_tree(from_jax(doubled, layout), comm=comm)
    return total, [torch.equal(x, 2 * y) for x, y in zip(optree.tree_leaves(result), optree.tree_leaves(params), strict=True)]


def test_to_jax_with_a_process_a_rank():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    total = sum(x.sum().item() for x in {id(x): x for x in optree.tree_leaves(gpt_like.make_params())}.values())
    for found, equal in processes(fs.Mesh({"dp": 2}), lambda comm: across_processes(comm, port)):
        assert found == pytest.approx(total, abs=1e-4)
        assert all(equal)


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["", "offload"])
@pytest.mark.parametrize("donate", [False, True])
def test_shards_begin_on_64_bytes_after_scheduled_steps(donate, options):
    def run(comm):
        params = gpt_like.make_params()
        precision = fs.Precision(torch.bfloat16, main=torch.float32)
        layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*", precision=precision)
        tx = fs.optim.adamw(1e-2)
        state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
        step = fs.Scheduler(comm, **options)(fs.train_step(gpt_like.loss_fn, tx, donate=donate))
        for batch in gpt_like.make_batches(3, 24):
            state, _ = step(state, {name: x.chunk(3)[comm.rank] for name, x in batch.items()})
        return [x.data_ptr() % 64 for x in buffers((state.params, state.main, state.opt)) if x.numel()]

    found = simulate(ONE, run)
    assert found == [[0] * len(each) for each in found]
    assert len(found[0]) > 10


def test_unflatten_says_what_a_tree_lacks():
    shared = torch.ones(3)
    params = {"a": {"w": shared, "b": torch.ones(2)}, "c": {"w": shared}}
    layout = fs.plan(params, fs.Mesh({"dp": 1}), fs.zero3("dp"), units="*", frozen="a.b")
    arrays = to_jax(shards(layout, params), layout)
    with pytest.raises(TreeError, match=r"'c.w' is tied to a leaf of a unit that this call was not given"):
        unflatten(arrays["c"])
    with pytest.raises(TreeError, match=r"unflatten\(\): the tree lacks leaves of unit 'a', as gradients lack frozen ones"):
        unflatten(fs.trainable(arrays))
