"""The formats that come with the library: error bounds, numbers that are not finite, the same bytes again, bytes a value."""

import copy
import io
import math
import pickle

import cloudpickle
import pytest
import torch
from hypothesis import example, given, strategies as st

import fsharp as fs
from fsharp.formats import mxfp4, mxfp8, mxfp8_e5m2, mxint4, mxint8, nvfp4
from fsharp.functional.formats import microscaling
from fsharp.testing import simulate
from tests.ranks import on_ranks
from tests.scheduling import every
from tests.virtual_device import VirtualDevice

FORMATS = [mxfp8, mxfp8_e5m2, mxint8, mxint4, mxfp4]
BLOCK = 32
RELATIVE = {"mxfp8": 1 / 16, "mxfp8_e5m2": 1 / 8, "mxfp4": 1 / 5}
OF_LARGEST = {"mxfp8": 1 / 230_000, "mxfp8_e5m2": 1 / 4e9, "mxint8": 1 / 127, "mxint4": 1 / 7, "mxfp4": 1 / 14}
LEAST = 2.0**-127
"""Scales of blocks do not go further down."""

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.one_of(
    st.lists(numbers, min_size=BLOCK, max_size=BLOCK),
    st.lists(finite, min_size=BLOCK, max_size=BLOCK),
    st.lists(st.floats(-1, 1, width=32), min_size=BLOCK, max_size=BLOCK),
    st.builds(lambda x, e: [x * 2.0**e] + [0.0] * (BLOCK - 1), st.floats(0.5, 1, width=32), st.integers(-150, 127)),
)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@given(values=st.lists(blocks, min_size=1, max_size=3))
@example(values=[[0.0] * BLOCK])
@example(values=[[3.4028234663852886e38] * BLOCK])
@example(values=[[math.inf, -math.inf, math.nan, 1.0] * 8, [1.0] * BLOCK])
@example(values=[[464.0] + [232.0] * 31])
def test_values_arrive_within_the_bound_that_is_stated(wire, values):
    x = torch.tensor(values)
    stored = wire.store(x.view(-1), x.numel())
    y = wire.load(stored, x.numel(), torch.float32).view(-1, BLOCK)
    assert torch.equal(wire.store(y.view(-1), x.numel()), stored)
    for given_block, found in zip(x, y, strict=True):
        is_special = ~torch.isfinite(given_block)
        assert torch.equal(found[is_special].nan_to_num(nan=1.5), given_block[is_special].nan_to_num(nan=1.5))
        if is_special.any():
            assert torch.equal(found[~is_special], torch.zeros(int((~is_special).sum())))
            continue
        bound = given_block.abs() * RELATIVE.get(wire.name, 0.0)
        bound = torch.maximum(bound, given_block.abs().max() * OF_LARGEST[wire.name]).double() + LEAST
        assert ((found.double() - given_block.double()).abs() <= bound).all()


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
def test_every_code_comes_back(wire):
    """Numbers that a block can have are kept to the bit."""
    if wire in (mxfp8, mxfp8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn if wire is mxfp8 else torch.float8_e5m2).float()
        codes = codes[torch.isfinite(codes)]
    elif wire is mxfp4:
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    else:
        most = 127 if wire is mxint8 else 7
        codes = torch.arange(-most, most + 1).float()
    for power in (-20, 0, 100):
        for start in range(0, len(codes), BLOCK - 1):
            block = torch.zeros(BLOCK)
            piece = codes[start : start + BLOCK - 1]
            block[: len(piece)], block[-1] = piece, codes.max()
            x = torch.ldexp(block, torch.tensor(power))
            assert torch.equal(wire.load(wire.store(x, BLOCK), BLOCK, torch.float32), x)


@every(2, wire=FORMATS, special=[None, 0, 4_000, 17_000])
def test_buffers_longer_than_a_cache_have_the_bits_of_their_parts(wire, special, monkeypatch):
    """A CPU encodes and decodes as many blocks at once as its cache has room for."""
    monkeypatch.setattr(microscaling, "_BLOCKS_IN_CPU_CACHE", 1 << 9)
    part, n = 8 * BLOCK, 75
    assert n * part // BLOCK > microscaling._BLOCKS_IN_CPU_CACHE
    x = torch.randn(n * part, generator=torch.Generator().manual_seed(0))
    x[1::5] *= 1e-30
    x[: 2 * BLOCK] = torch.finfo(torch.float32).max  # decoded values may be rounded up
    if special is not None:
        x[special : special + 3] = torch.tensor([math.inf, -math.inf, math.nan])
    stored = wire.store(x, part)
    parts = [wire.store(each, part) for each in x.split(part)]
    assert torch.equal(stored, torch.cat(parts))
    found = wire.load(stored, part, torch.float32)
    expected = torch.cat([wire.load(each, part, torch.float32) for each in parts])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.isfinite(found).sum() == len(x) - (special is not None) * 3


def test_four_bit_numbers_are_rounded_to_the_nearest_and_ties_to_even():
    x = torch.cat([torch.linspace(-6.4, 6.4, 12801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    found = microscaling.decode_e2m1(microscaling.encode_e2m1(x.clone()))
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (x.abs().clamp(max=6)[:, None] - numbers).abs().amin(1)
    assert torch.equal((found - x.clamp(-6, 6)).abs(), nearest)
    assert torch.equal(found[-7:], torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]))
    assert torch.equal(found.signbit(), x.signbit())


PER_VALUE = {"mxfp8": 4.0625, "mxfp8_e5m2": 4.0625, "nvfp4": 3.125}


@pytest.mark.parametrize("stored", [mxfp8, mxfp8_e5m2, nvfp4], ids=lambda form: form.name)
def test_bytes_a_value(stored):
    """What NVIDIA counts of two gathers and a reduction in bfloat16: 4.0625 bytes a value in MXFP8, 3.125 in NVFP4."""
    n, tx = 1 << 12, fs.optim.sgd(0.1)
    assert [wire.size(n) / n for wire in FORMATS] == [33 / 32, 33 / 32, 33 / 32, 17 / 32, 17 / 32]
    params = {"w": torch.linspace(-1, 1, 2 * n)}
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=stored, wire=torch.bfloat16)
    layout = fs.plan(params, fs.Mesh({"dp": 2}), fs.zero3("dp"), precision=precision)

    def loss_fn(params, batch, comm):
        return fs.forward(lambda p, x: (p["w"] * x).square().mean(), params, batch, comm=comm)

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
        counting.calls.clear()
        fs.train_step(loss_fn, tx)(state, torch.ones(()), counting)
        return counting.calls

    for calls in (fs.inspect.step_traffic(layout), *simulate(layout.mesh, rank_fn)):  # all_reduce: of the loss and of scales
        sent = sum(call.nbytes * count for call, count in calls.items() if call.op != "all_reduce")
        assert sent / n == PER_VALUE[stored.name]


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@on_ranks(fs.Mesh({"dp": 2}))
def test_an_overflow_of_one_rank_is_found_in_its_leaf(comm, wire):
    params = {"a": torch.zeros(20), "b": torch.zeros(30)}
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), precision=fs.Precision(wire=wire))
    grads = {"a": torch.ones(20), "b": torch.ones(30)}
    if comm.rank:
        grads["b"][3] = math.inf  # beside values of "a" in one block
    own = fs.shard_for(grads, layout, 0, place=layout.units[0].strategy.full.cotangent_place)
    assert fs.resilience.find_nonfinite(None, fs.reduce_scatter(own, comm=comm), comm=comm).leaf == "b"


SCRATCH = {"encode": (3.5, 6.5), "encode with feedback": (11.0, 14.0), "decode": (7.5, 9.5)}
"""Bytes for each value beside the values themselves, as docs/limits.md has them: without a Hadamard rotation, and with one."""


@pytest.mark.parametrize("form", [*FORMATS, fs.formats.hadamard(mxint4)], ids=lambda form: form.name)
def test_a_device_encodes_and_decodes_in_a_few_bytes_for_each_value(form, monkeypatch):
    monkeypatch.setattr(microscaling, "_BLOCKS_ON_DEVICE", 1 << 7)
    count = 1 << 17
    whole = torch.randn(count, generator=torch.Generator().manual_seed(0))
    expected = form.store(whole, count // 2)
    with VirtualDevice() as device:
        values, residual = whole.to("cuda"), torch.zeros(count, device="cuda")
        stored = expected.to("cuda")

        def scratch(fn):
            device.reset_peak()
            before = device.allocated
            found = fn()
            return found, (device.peak - before) / count

        found, encode = scratch(lambda: form.store(values, count // 2))
        _, feed_back = scratch(lambda: form.store_summand(values, count // 2, residual))
        _, decode = scratch(lambda: form.load(stored, count // 2, torch.bfloat16))
        assert torch.equal(found.cpu(), expected)
        bounds = [bound["hadamard" in form.name] for bound in SCRATCH.values()]
        for found, bound in zip((encode, feed_back, decode), bounds, strict=True):
            assert 0.5 < found < bound


def of_every_kind():
    forms = fs.formats
    rotated, drawn = forms.hadamard(mxint4), forms.stochastic(mxfp4, 3)
    return [
        *FORMATS,
        nvfp4,
        *(forms.int8_by_tensor, forms.int8_by_row),
        *(forms.float8_e4m3_by_tensor, forms.float8_e4m3_by_row),
        *(forms.float8_e5m2_by_tensor, forms.float8_e5m2_by_row),
        *(rotated, drawn, forms.hadamard(drawn, 64), forms.stochastic(rotated), forms.stochastic(torch.bfloat16, 7)),
    ]


@pytest.mark.parametrize("form", of_every_kind(), ids=lambda form: form.name)
def test_copies_and_pickles_of_a_format_are_the_format(form):
    for pickler in (pickle, cloudpickle):
        assert pickler.loads(pickler.dumps(form)) is form
    assert copy.deepcopy(form) is form


def test_layouts_and_shards_with_formats_travel_between_processes():
    precision = fs.Precision(stored=mxfp8, wire={"dp": fs.formats.stochastic(fs.formats.hadamard(mxint4))})
    layout = fs.plan({"w": torch.ones(8)}, fs.Mesh({"dp": 2}), fs.zero3("dp"), precision=precision)
    assert pickle.loads(pickle.dumps(layout)) == layout
    node = fs.shard_for({"w": torch.linspace(0, 1, 8)}, layout, 0, dtype="compute")
    file = io.BytesIO()
    torch.save(node, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.unit == node.unit
    assert torch.equal(loaded.buffers[0], node.buffers[0])


def test_a_format_of_ones_own_says_how_pickles_make_it():
    made = scaled_by(3)
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(made)).encode(torch.ones(2))[0].tolist() == [3, 3]


def scaled_by(factor):
    planes = (fs.formats.Plane(torch.float32),)
    return fs.formats.Format(
        "scaled", planes, lambda x: [x * factor], lambda planes: planes[0] / factor, made_by=(scaled_by, (factor,))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", of_every_kind(), ids=lambda form: form.name)
def test_finite_values_stay_finite_in_narrow_dtypes(form, dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, 0.92 * largest, 1.0] * 16, dtype=dtype)
    precision = fs.Precision(stored=form) if form.seed is None else fs.Precision()
    if form.seed is not None or "hadamard" in form.name:
        found = form.load(form.store(values, 64, noise_fn=lambda *about: torch.full((64,), 0.9)), 64, dtype)
    else:
        layout = fs.plan({"w": values}, ONE.mesh, fs.zero3("dp"), precision=precision)
        state = fs.init_state(fs.optim.sgd(1.0), fs.shard({"w": values}, layout, ONE, place="optim"), comm=ONE)
        found = fs.full_tree(state.params, comm=ONE)["w"]
    assert found.isfinite().all()
    error = (found.double() - values.double()).abs().max()
    assert error <= largest * (2 if "hadamard" in form.name else 1 / 4)
    values[0], values[1], values[2] = torch.inf, -torch.inf, torch.nan
    if form.leaf_codec is None and "hadamard" not in form.name:
        found = form.load(form.store(values, 64, noise_fn=lambda *about: torch.full((64,), 0.9)), 64, dtype)
        assert torch.equal(found[:2], values[:2])
        assert found[2].isnan()


ONE = fs.SingleComm()
