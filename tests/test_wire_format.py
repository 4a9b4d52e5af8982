"""Gradients that travel in a format of several planes: the same bits on every path, and the bytes that are predicted."""

import pickle
import re

import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import LayoutError
from fsharp.formats import stochastic
from fsharp.functional.comm.collectives import reduce_scatter_encoded
from fsharp.functional.formats.format import Format, Plane, plain_format
from fsharp.testing import simulate
from tests.gpt_like import make_params
from tests.ranks import on_ranks
from tests.scheduling import ON_TWO_AXES, STRATEGIES, assert_same_training, every, make_layout, mesh_of, train, turned
from tests.stateful.runtime.test_scheduler_equivalence import assert_as_predicted
from tests.test_format import BLOCKS, HALVES

POLICIES = {"default": {}, "buckets": {"prefetch": 2, "bucket_nbytes": 2000}, "sums at once": {"sum_late": False}}
OPS = ("reduce_scatter", "all_to_all")
LOSSLESS = fs.Precision(wire=HALVES)  # of values in bfloat16
ROUNDED = fs.Precision(wire=BLOCKS)
RANDOM = stochastic(fs.formats.mxint4)


@every(9, strategy=turned(STRATEGIES, "zero3"), policy=POLICIES)
@on_ranks(mesh_of)
def test_rounded_gradients_have_the_same_bits_on_every_path(comm, strategy, policy):
    ways = {"params": make_params(layers=1), "steps": 3, "microbatches": 2}
    blocking = train(comm, strategy, precision=ROUNDED, **ways)
    assert_same_training(train(comm, strategy, POLICIES[policy], precision=ROUNDED, **ways), blocking)
    exact = train(comm, strategy, **ways)
    assert blocking.losses != exact.losses
    torch.testing.assert_close(blocking.losses, exact.losses, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("wire", [BLOCKS, RANDOM, stochastic(torch.bfloat16), fs.formats.hadamard(RANDOM)], ids=str)
@on_ranks(STRATEGIES["ddp"][0])
def test_strategies_have_the_same_bits(comm, wire):
    """Leaves are cut between elements, so blocks lie at the same places wherever gradients and updates rest."""
    ways = {"params": make_params(layers=1), "steps": 3, "precision": fs.Precision(wire=wire)}
    found = [train(comm, strategy, **ways) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    for each in found[1:]:
        assert_same_training(each, found[0])


@every(9, strategy=turned(STRATEGIES, "zero2"), microbatches=[1, 3], wire=[HALVES, BLOCKS])
def test_a_step_makes_the_predicted_calls(strategy, microbatches, wire):
    calls = assert_as_predicted(strategy, microbatches, fs.Precision(wire=wire))
    assert any(call.op == "all_to_all" for call in calls)


def test_gradients_in_blocks_send_a_third_of_the_bytes():
    """Blocks of 8 numbers of 8 bits, and a scale in float32, are 12 bytes; 8 numbers in float32 are 32."""
    mesh, how = STRATEGIES["zero3"]
    layouts = [fs.plan({"w": torch.zeros(4096)}, mesh, how, precision=precision) for precision in (ROUNDED, fs.Precision())]
    sent = [sum(call.nbytes for call in fs.inspect.step_traffic(layout) if call.op in OPS) for layout in layouts]
    assert sent == [2048 * 12 // 8, 2048 * 4]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), n=st.integers(1, 3), block=st.integers(1, 9))
def test_blocks_are_not_cut_whatever_the_sizes(sizes, n, block):
    """The sum of what each rank has rounded by itself, in blocks of the whole buffer."""

    def encode(values):
        scales = values.view(-1, block).abs().amax(1)
        return [(values.view(-1, block) / scales.clamp(min=1e-30)[:, None] * 100).round().to(torch.int8).view(-1), scales]

    def decode(planes):
        return (planes[0].view(-1, block) * planes[1][:, None] / 100).view(-1)

    wire = Format("odd", (Plane(torch.int8, block), Plane(torch.float32)), encode, decode, block=block)
    params = {str(i): torch.zeros(size) for i, size in enumerate(sizes)}
    mesh = fs.Mesh({"dp": n})
    grads = [
        {k: torch.randn(len(x), generator=torch.Generator().manual_seed(10 * r + int(k))) for k, x in params.items()}
        for r in range(n)
    ]
    rounds = n > 1

    def rank_fn(comm):
        found = []
        for how in ("ddp", "zero1", "zero3"):
            layout = fs.plan(params, mesh, getattr(fs, how)("dp"), precision=fs.Precision(wire=wire))
            node = fs.shard(params, layout, comm)
            leaves = node.unit.leaves
            own = fs.shard_for(grads[comm.rank], layout, 0, place=node.unit.strategy.full.cotangent_place)
            found.append(fs.full_tree(fs.reduce_scatter(own, comm=comm, to="optim"), comm=comm))
            size = node.unit.groups[0].size if leaves and node.unit.groups else 0
            want = torch.zeros(size)
            for each in grads:
                flat = torch.zeros(size)
                for leaf in leaves:
                    flat[leaf.offset : leaf.offset + leaf.numel] = each[leaf.path]
                want += decode(encode(flat)) if rounds and size else flat
            for leaf in leaves:
                assert torch.equal(found[-1][leaf.path], want[leaf.offset : leaf.offset + leaf.numel])
        return found

    simulate(mesh, rank_fn)


@pytest.mark.parametrize("batched", [False, True])
def test_its_gradient_is_a_gather(batched):
    mesh, shape = fs.Mesh({"dp": 3}), (4, 48) if batched else (48,)

    def rank_fn(comm):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank))
        fn = lambda x: reduce_scatter_encoded(x, comm, "dp", BLOCKS)  # noqa: E731
        out, pullback = torch.func.vjp(torch.func.vmap(fn) if batched else fn, x)
        rows = torch.stack([fn(row) for row in x]) if batched else fn(x)
        assert torch.equal(out, rows)
        cotangent = torch.full_like(out, comm.rank + 1.0)
        [grad] = pullback(cotangent)
        assert torch.equal(grad, torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(16).expand(shape))
        tangent = torch.ones(48)
        _, moved = torch.func.jvp(lambda x: reduce_scatter_encoded(x, comm, "dp", BLOCKS), (x.reshape(-1)[:48],), (tangent,))
        assert torch.equal(moved, torch.full((16,), 3.0))
        return x, out

    results = simulate(mesh, rank_fn)
    for rank, (_, out) in enumerate(results):
        want = sum(x.view(*x.shape[:-1], 3, 16)[..., rank, :] for x, _ in results)
        assert (out - want).abs().max() < 3 * 4 / 127


@on_ranks(fs.Mesh({"dp": 2}))
def test_parts_that_are_no_whole_blocks_are_refused(comm):
    with pytest.raises(fs.errors.TreeError, match="a last dim of 20 does not divide"):
        reduce_scatter_encoded(torch.ones(20), comm, "dp", BLOCKS)


BY_AXIS = {
    "between hosts": {"outer": fs.formats.mxint4},
    "within a host": {"inner": torch.bfloat16},
    "both": {"outer": fs.formats.mxint4, "inner": fs.formats.mxint8},
    "rotated": {"outer": fs.formats.hadamard(fs.formats.mxint4), "inner": fs.formats.mxint8},
    "in two dtypes": {"outer": torch.bfloat16, "inner": torch.float32},
    "blocks of two sizes": {"outer": BLOCKS, "inner": fs.formats.mxint8},
}


@every(20, strategy=ON_TWO_AXES, wire=BY_AXIS, compute=[None, torch.bfloat16], policy=["default", "buckets"])
def test_a_wire_for_each_axis(strategy, wire, compute, policy):
    mesh, how = STRATEGIES[strategy]
    precision = fs.Precision(compute=compute, main=torch.float32, wire=BY_AXIS[wire])
    layout = make_layout(mesh, how, precision=precision)
    assert fs.Layout.from_json(layout.to_json()) == layout

    def rank_fn(comm):
        ways = {"params": make_params(layers=1), "steps": 3, "microbatches": 2, "precision": precision}
        assert_same_training(train(comm, strategy, POLICIES[policy], **ways), train(comm, strategy, **ways))

    simulate(mesh, rank_fn)
    assert_as_predicted(strategy, 1, precision)


def test_an_axis_that_is_not_of_the_mesh_is_refused():
    with pytest.raises(LayoutError, match="has a wire along 'outer', expected one of"):
        make_layout(*STRATEGIES["zero3"], precision=fs.Precision(wire={"outer": torch.bfloat16}))
    with pytest.raises(LayoutError, match=re.escape("wire['outer'] is 'bf16', expected a Format, ")):
        fs.Precision(wire={"outer": "bf16"})


@on_ranks(STRATEGIES["zero3"][0])
def test_some_units_travel_encoded(comm):
    precision = {"**": fs.Precision(), "layers.0.*": ROUNDED, "layers.1.*": fs.Precision(wire=HALVES, stored=BLOCKS)}
    ways = {"params": make_params(layers=2), "steps": 3, "microbatches": 2, "precision": precision}
    blocking = train(comm, "zero3", **ways)
    for policy in ({}, {"bucket_nbytes": 10**6, "prefetch": 2}):
        assert_same_training(train(comm, "zero3", policy, **ways), blocking)


def test_what_is_no_wire_is_refused():
    with pytest.raises(LayoutError, match="wire is 'halves', expected a Format, a floating-point torch"):
        fs.Precision(wire="halves")
    with pytest.raises(LayoutError, match="8 bits and less need a scale"):
        fs.Precision(wire=plain_format(torch.float8_e4m3fn))
    assert fs.Precision(wire=plain_format(torch.bfloat16)).resolve(torch.float32) == fs.Precision(wire=torch.bfloat16).resolve(
        torch.float32
    )


def test_an_overflow_arrives_as_such():
    """What a format cannot hold is for the format to say; ours gives no number that hides it."""

    def rank_fn(comm):
        x = torch.ones(16)
        x[3] = float("inf") if comm.rank else 1.0
        return reduce_scatter_encoded(x, comm, "dp", HALVES)

    first, _ = simulate(fs.Mesh({"dp": 2}), rank_fn)
    assert torch.isinf(first[3])


def test_layouts_travel_between_processes():
    layout = make_layout(*STRATEGIES["zero3"], precision=fs.Precision(wire=torch.bfloat16))
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert again.units[0].groups[0].dtypes.wire.is_plain
