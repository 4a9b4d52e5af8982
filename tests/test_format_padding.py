"""Padding stays zero under formats that decode a zero as another number: norms are right, and runs go on from checkpoints."""

from dataclasses import replace
from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fsharp as fs
from fsharp.formats import Format, Plane, hadamard, mxfp4, mxint4, stochastic
from fsharp.testing import DebugPolicy, generate, simulate
from tests.ranks import on_ranks
from tests.scheduling import DP, ON_TWO_AXES, STRATEGIES, assert_same, buffers, every, mesh_of

SIZE = 107
"""Elements of the leaf: no number of ranks of the tests divides it, and no block."""


def _encode(values):
    """Blocks of 8 values in 8 bits, from the least of them to the largest."""
    blocks = values.float().view(-1, 8)
    least, most = blocks.aminmax(dim=1, keepdim=True)
    steps = (most - least).clamp(min=1e-20) / 255
    return [((blocks - least) / steps).round().to(torch.uint8).view(-1), torch.cat([least, steps], 1).view(-1)]


def _decode(planes):
    least, steps = planes[1].view(-1, 2).split(1, dim=1)
    return (least + planes[0].view(-1, 8) * steps).view(-1)


AFFINE = fs.formats.register_format(
    Format("affine8", (Plane(torch.uint8, 8), Plane(torch.float32, 2)), _encode, _decode, block=8)
)
FORMATS = {each.name: each for each in (hadamard(mxint4), hadamard(mxfp4, 8), stochastic(hadamard(mxint4, 16)), AFFINE)}
BETWEEN_HOSTS = {
    "between hosts": lambda form: {"outer": form, "inner": torch.float32},
    "within hosts": lambda form: {"outer": torch.bfloat16, "inner": form},
}
WIRES = {"everywhere": lambda form: form, **BETWEEN_HOSTS}
CASES = [(strategy, wire) for strategy in STRATEGIES for wire in WIRES if wire == "everywhere" or strategy in ON_TWO_AXES]
WIDER = ("zero1", "zero2", "hfsdp", "mixed")
"""Strategies under which updates travel."""
PATHS = {
    "blocking": None,
    "scheduled": {},
    "buckets": {"prefetch": 2, "bucket_nbytes": 2000},
    "sums at once": {"sum_late": False},
}


def make_tx():
    return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2))


def loss_fn(params, x, comm):
    def of_unit(leaves, x):
        return sum((leaf * x.mean() - 1).square().sum() for leaf in optree.tree_leaves(leaves))

    return sum(fs.forward(of_unit, node, x, comm=comm) for node in fs.layouts.units_of(params))


def make_state(comm, strategy, precision, params=None, **options):
    params = {"w": torch.linspace(-1, 1, SIZE)} if params is None else params
    layout = fs.plan(params, comm.mesh, strategy, precision=precision, **options)
    return fs.init_state(make_tx(), fs.shard(params, layout, comm, place="optim"), comm=comm)


def by_path(comm, path, fn):
    """Return ``fn`` as this path calls it, without its argument ``comm``."""
    if PATHS[path] is None:
        return partial(fn, comm=comm)
    return fs.Scheduler(comm, policy=DebugPolicy(**{"poison": True, **PATHS[path]}))(fn)


def trained(step, state, comm, first, last):
    """Return the state after the steps ``first`` to ``last``."""
    for i in range(first, last):
        state, _ = step(state, torch.tensor([1 + 0.3 * comm.rank + 0.1 * i, 2.0]))
    return state


def assert_no_padding(tree, rank):
    """Return the number of elements of padding, all of which have to be zero."""
    count = 0
    for node in fs.layouts.units_of(tree):
        for g, buffer in zip(node.groups, node.buffers, strict=True):
            is_padding = torch.ones(len(buffer), dtype=torch.bool)
            for span in node.unit.leaf_spans(g, node.place, rank):
                is_padding[span.start : span.stop] = False
            assert not buffer[is_padding].count_nonzero(), node.name
            count += int(is_padding.sum())
    return count


def gradients(state, x, comm):
    """Mean gradients in the optimizer's place, of two microbatches."""
    loss, grads = fs.value_and_grad(loss_fn, microbatches=2)(state.params, x, comm=comm, step=state.step)
    return fs.average(loss, fs.reduce_scatter(grads, comm=comm, step=state.step), comm=comm)[1]


@every(16, case=CASES, path=PATHS, name=FORMATS)
def test_the_norm_of_gradients_is_that_of_whole_leaves(case, path, name):
    (strategy, wire), form = case, FORMATS[name]
    mesh, how = STRATEGIES[strategy]

    def rank_fn(comm):
        state = make_state(comm, how, fs.Precision(main=torch.float32, wire=WIRES[wire](form)))
        grads = by_path(comm, path, gradients)(state, torch.tensor([1 + 0.3 * comm.rank, 2.0]))
        [whole] = optree.tree_leaves(fs.full_tree(grads, comm=comm))
        norm = fs.optim.global_norm(grads, comm=comm)
        torch.testing.assert_close(norm.double(), whole.double().norm(), rtol=1e-6, atol=0)
        return assert_no_padding(grads, comm.rank)

    assert sum(simulate(mesh, rank_fn)) > 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(DP)
def test_the_norm_of_parameters_at_rest_is_that_of_whole_leaves(comm, strategy, deterministic):
    state = make_state(comm, STRATEGIES[strategy][1], fs.Precision(stored=hadamard(mxint4)))
    [whole] = optree.tree_leaves(fs.full_tree(state.params, comm=comm))
    for tree in (state.params, fs.gather(state.params, comm=comm)):
        norm = fs.optim.global_norm(tree, comm=comm, deterministic=deterministic)
        torch.testing.assert_close(norm.double(), whole.double().norm(), rtol=1e-6, atol=0)


@every(8, strategy=WIDER, path=PATHS, name=FORMATS)
@on_ranks(mesh_of)
def test_a_run_goes_on_from_a_checkpoint_with_the_bits_it_would_have_had(comm, strategy, path, name, tmp_path):
    mesh, how = STRATEGIES[strategy]
    precision = fs.Precision(main=torch.float32, wire=FORMATS[name], update=FORMATS[name])
    start = make_state(comm, how, precision)
    step = by_path(comm, path, fs.train_step(loss_fn, make_tx()))
    half = trained(step, start, comm, 0, 3)
    assert_no_padding((half.params, half.main, half.opt), comm.rank)
    fs.checkpoint.save(tmp_path, half, step=3, comm=comm)
    loaded = fs.checkpoint.load(tmp_path, start, comm=comm)
    moved = fs.reshard(half, fs.plan({"w": torch.zeros(SIZE)}, mesh, how, precision=precision), comm=comm)
    runs = [trained(step, each, comm, 3, 5) for each in (half, loaded, moved)]
    for other in runs[1:]:
        assert_same(buffers((other.params, other.main, other.opt)), buffers((runs[0].params, runs[0].main, runs[0].opt)))


@every(3, strategy=["ddp", "zero1", "zero3", "hfsdp"], name=[name for name, form in FORMATS.items() if form.seed is None])
@on_ranks(mesh_of)
def test_a_module_clips_and_goes_on_from_a_checkpoint_alike(comm, strategy, name, tmp_path):
    _, how = STRATEGIES[strategy]
    precision = fs.Precision(main=torch.float32, wire=FORMATS[name], update=FORMATS[name] if strategy in WIDER else None)

    def made(comm):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))  # 35 and 6 elements
        model = fs.shard_module(model, mesh=comm, strategy=how, units=[nn.Linear], precision=precision)
        return model, fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))

    def train(comm, model, optimizer, first, last):
        for i in range(first, last):
            model(torch.arange(12.0).view(2, 6) * (i + comm.rank + 1) / 20).square().sum().backward()
            expected = torch.stack([p.grad.norm().double() for p in model.parameters()]).norm()
            torch.testing.assert_close(model.clip_grad_norm_(0.1).double(), expected, rtol=1e-6, atol=0)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made(comm)
    train(comm, model, optimizer, 0, 3)
    fs.checkpoint.save(tmp_path, model.train_state, step=3, comm=comm)
    other, its_optimizer = made(comm)
    other.train_state = fs.checkpoint.load(tmp_path, other.train_state, comm=comm)
    for each in ((model, optimizer), (other, its_optimizer)):
        train(comm, *each, 3, 6)
    states = [each.train_state for each in (other, model)]
    assert_same(*[buffers((state.params, state.main, state.opt)) for state in states])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_under_transforms_of_torch_func_padding_is_zero_as_well(strategy):
    def rank_fn(comm):
        state = make_state(comm, STRATEGIES[strategy][1], fs.Precision(wire=hadamard(mxint4)))
        loss = partial(loss_fn, x=torch.tensor([1 + 0.3 * comm.rank]), comm=comm)
        grads = torch.func.grad(loss)(state.params)
        padding = assert_no_padding(grads, comm.rank)
        summands = fs.gather(state.params, comm=comm)
        [node], scales = fs.layouts.units_of(summands), torch.arange(1.0, 4.0)
        [found] = torch.func.vmap(lambda s: fs.reduce_scatter(node.with_buffers([node.buffers[0] * s]), comm=comm).buffers)(
            scales
        )
        alone = fs.reduce_scatter(node.with_buffers([node.buffers[0] * 3]), comm=comm)
        assert_no_padding(alone, comm.rank)
        torch.testing.assert_close(found[2], alone.buffers[0], rtol=0, atol=0)
        return padding

    assert sum(simulate(STRATEGIES[strategy][0], rank_fn)) > 0


@st.composite
def programs(draw):
    """A tree, the options of a layout, and a path: any mesh, strategy, units, atoms and formats."""
    tree = draw(generate.trees(dtypes=[torch.float32], ties=False, max_leaves=4))
    mesh = draw(generate.meshes(max_ranks=4))
    strategy = draw(generate.strategies(mesh))
    forms = st.sampled_from(list(FORMATS.values()))
    wire = draw(st.one_of(forms, st.fixed_dictionaries({axis: forms for axis, _ in mesh.axes})))
    atoms = {"**": draw(generate.sharding_atoms())}
    options = {"units": draw(generate.unit_patterns(tree)), "atoms": atoms}
    precision = fs.Precision(main=torch.float32, wire=wire)
    units = fs.plan(tree, mesh, strategy, precision=precision, **options).units
    if units and all(any(mesh.axis_size(axis) > 1 for axis in unit.update_gather_axes) for unit in units):
        precision = replace(precision, update=draw(forms))
    return tree, mesh, strategy, {"precision": precision, **options}, draw(st.sampled_from(list(PATHS)))


@settings(max_examples=12, deadline=None)
@given(programs())
def test_random_programs_keep_padding_zero(program):
    tree, mesh, strategy, options, path = program

    def rank_fn(comm):
        state = make_state(comm, strategy, params=tree, **options)
        x = torch.tensor([1 + 0.3 * comm.rank, 2.0])
        blocking, grads = (by_path(comm, each, gradients)(state, x) for each in ("blocking", path))
        assert_same(buffers(grads), buffers(blocking))
        assert_no_padding(grads, comm.rank)
        state = trained(by_path(comm, path, fs.train_step(loss_fn, make_tx())), state, comm, 0, 2)
        assert_no_padding((state.params, state.main, state.opt), comm.rank)

    simulate(mesh, rank_fn)
