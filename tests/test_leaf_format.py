"""Formats that encode whole leaves, with scales on which ranks agree: the same bits on every path, and bytes as predicted."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.functional.formats import microscaling
from fsharp.functional.formats.format import Format, LeafCodec, LeafPart, Plane
from fsharp.functional.formats.registry import register_format
from fsharp.testing import simulate
from tests.gpt_like import make_params
from tests.ranks import on_ranks
from tests.scheduling import STRATEGIES, train
from tests.virtual_device import VirtualDevice


def _encode(parts, agree):
    most = torch.stack([part.values.abs().amax().float() if len(part.values) else torch.zeros(()) for part in parts])
    agree(most)
    for part, scale in zip(parts, most, strict=True):
        part.scales.view(torch.float32).copy_(scale)
        pairs = part.values.to(torch.bfloat16).view(torch.uint8).view(-1, 2)
        for plane, half in zip(part.planes, pairs.unbind(1), strict=True):
            plane.copy_(half)


def _decode(part):
    values = torch.stack(part.planes, 1).view(-1).view(torch.bfloat16)
    assert values.abs().amax() <= part.scales.view(torch.float32).to(torch.bfloat16), "scales of another leaf or step"
    return values


_CODEC = LeafCodec(lambda shape: 4, lambda shape: [(1, torch.float32)], _encode, _decode)
BY_LEAF = register_format(Format("by_leaf", (Plane(torch.uint8), Plane(torch.uint8)), leaf_codec=_CODEC))
PLAIN = fs.Precision(compute=torch.bfloat16, main=torch.float32)
STORED = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=BY_LEAF)
F = fs.formats
BY_TENSOR = [F.float8_e4m3_by_tensor, F.float8_e5m2_by_tensor, F.int8_by_tensor]
BY_ROW = [F.float8_e4m3_by_row, F.float8_e5m2_by_row, F.int8_by_row]
BUILT_IN = [*BY_TENSOR, *BY_ROW, F.nvfp4]
KEEP_INFINITY = (F.float8_e5m2_by_tensor, F.float8_e5m2_by_row, F.nvfp4)


SMALL = {"params": make_params(layers=1), "steps": 3}


@pytest.fixture(scope="module")
def plain_losses():
    return simulate(STRATEGIES["ddp"][0], lambda comm: train(comm, "ddp", **SMALL).losses)[0]


def test_each_tensor_of_scales_begins_at_a_multiple_of_16_bytes():
    specs = {"_a": ((3,), torch.float32), "_b": ((2, 9), torch.uint8), "_c": ((), torch.float32)}
    codec = LeafCodec(lambda shape: 52, lambda shape: [], _encode, _decode, scale_tensors=lambda shape: specs)
    memory = torch.arange(52, dtype=torch.uint8)
    found = codec.scales_by_suffix((3,), memory)
    assert {name: x.view(-1).view(torch.uint8)[0].item() for name, x in found.items()} == {"_a": 0, "_b": 16, "_c": 48}
    assert {name: (tuple(x.shape), x.dtype) for name, x in found.items()} == specs


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
@on_ranks(STRATEGIES["zero3"][0])
def test_scales_are_those_of_whole_leaves_wherever_these_are_cut(comm, form, plain_losses):
    precision, paths = fs.Precision(stored=form), [("ddp", None), ("zero1", {}), ("zero3", None), ("zero3", {})]
    first, *others = [train(comm, strategy, policy, precision=precision, **SMALL) for strategy, policy in paths]
    for other in others:
        assert other.losses == first.losses
    assert first.losses != plain_losses
    tolerance = 0.2 if form is fs.formats.nvfp4 else 0.05
    torch.testing.assert_close(first.losses, plain_losses, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", [*BY_TENSOR, *BY_ROW], ids=lambda form: form.name)
def test_a_device_encodes_and_decodes_in_pieces(form, monkeypatch):
    """No index of a scale is made for each element. A decode takes the 4 bytes of its values, as docs/limits.md says."""
    monkeypatch.setattr(microscaling, "_BLOCKS_ON_DEVICE", 1 << 7)
    codec, values = form.leaf_codec, torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    with VirtualDevice() as device:
        x = values.to("cuda")
        codes = torch.zeros(x.numel(), dtype=form.planes[0].dtype).to("cuda")
        scales = torch.zeros(codec.scales_nbytes((512, 256)), dtype=torch.uint8).to("cuda")
        part = LeafPart("w", (512, 256), torch.float32, 0, x.numel(), (codes,), scales, x.view(-1))
        peaks = []
        for call in (lambda: codec.encode([part], lambda maxima: None), lambda: codec.decode(part)):
            device.reset_peak()
            before = device.allocated
            call()
            peaks.append((device.peak - before) / x.numel())
    assert 0 < peaks[0] < 1
    assert 4 <= peaks[1] < 5


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
def test_unshard_gives_the_values_of_stored_parameters(form):
    tree = {"w": torch.linspace(-3, 4, 35).view(5, 7), "b": torch.linspace(0, 9, 6)}

    def rank_fn(comm):
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), precision=fs.Precision(stored=form))
        params = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm, place="optim"), comm=comm).params
        return params, fs.full_tree(params, comm=comm)

    shards, values = zip(*simulate(fs.Mesh({"dp": 2}), rank_fn))
    found = fs.unshard(shards)
    assert all(torch.equal(found[name], values[0][name]) for name in tree)


def test_a_value_is_one_byte_on_the_wire():
    layout = fs.plan(
        {"w": torch.empty(64, 64)},
        fs.Mesh({"dp": 4}),
        fs.zero3("dp"),
        precision=fs.Precision(stored=fs.formats.float8_e4m3_by_tensor),
    )
    gathers = [call for call in fs.inspect.step_traffic(layout) if call.op == "all_gather"]
    assert [call.nbytes for call in gathers] == [3 * 64 * 64 // 4]
    assert sum(fs.inspect.step_traffic(layout)[call] for call in gathers) == 2


BOUNDS = {
    "float8_e4m3_by_tensor": (1 / 16, 1 / 450_000),
    "float8_e4m3_by_row": (1 / 16, 1 / 450_000),
    "float8_e5m2_by_tensor": (1 / 8, 1 / 7e9),
    "float8_e5m2_by_row": (1 / 8, 1 / 7e9),
    "int8_by_tensor": (0.0, 1 / 253),
    "int8_by_row": (0.0, 1 / 253),
    "nvfp4": (1 / 5, 1 / 356_000),
}
"""Of the value, and of the largest magnitude that has the same scale."""
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 3.4028234663852886e38, -3.4e38, 1.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("form", [*BY_TENSOR, *BY_ROW], ids=lambda form: form.name)
def test_pieces_of_a_part_have_the_bits_of_the_whole(form, monkeypatch):
    x = torch.randn(9, 70, generator=torch.Generator().manual_seed(0)) * 1e36
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    found = []
    for blocks in (1 << 13, 1):
        monkeypatch.setattr(microscaling, "_BLOCKS_IN_CPU_CACHE", blocks)
        found.append(simulate(fs.Mesh({"dp": 4}), lambda comm: _stored_values(comm, form, x))[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)


def _stored_values(comm, form, x):
    layout = fs.plan({"w": x}, comm.mesh, fs.zero3("dp"), precision=fs.Precision(stored=form))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard({"w": x}, layout, comm, place="optim"), comm=comm)
    return fs.full_tree(state.params, comm=comm)["w"].clone()


@given(data=st.data(), form=st.sampled_from(BUILT_IN), scale=st.sampled_from([1e-30, 1.0, 1e30]), seed=st.integers(0, 999))
def test_error_bounds(data, form, scale, seed):
    columns = data.draw(st.integers(1, 40))
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)) * scale
    x[1] *= data.draw(st.sampled_from([1.0, 1e-3, 1e-6]))
    for at in data.draw(st.lists(st.integers(0, 3 * columns - 1), max_size=8)):
        x.view(-1)[at] = data.draw(st.sampled_from(SPECIAL))
    found, again = _round_trip(form, x), _round_trip(form, _round_trip(form, x))
    torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)
    is_special = ~x.isfinite()
    arrives_as = x if form in KEEP_INFINITY else torch.full_like(x, math.nan)
    torch.testing.assert_close(found[is_special], arrives_as[is_special], rtol=0, atol=0, equal_nan=True)
    if form.name == "nvfp4":  # such a number takes its block with it
        is_special = torch.nn.functional.pad(is_special.view(-1), (0, -x.numel() % 16)).view(-1, 16)
        is_special = is_special.any(1, keepdim=True).expand(-1, 16).reshape(-1)[: x.numel()].view_as(x)
    x, found = x.nan_to_num(0.0, 0.0, 0.0), found.masked_fill(is_special, 0.0)
    most = x.abs().amax(1, keepdim=True) if form in BY_ROW else x.abs().amax()
    of_value, of_largest = BOUNDS[form.name]
    bound = torch.maximum(of_value * x.abs().double(), of_largest * most.double())
    if form.name == "nvfp4":
        blocks = torch.nn.functional.pad(x.view(-1), (0, -x.numel() % 16)).view(-1, 16)
        of_block = blocks.abs().amax(1, keepdim=True).expand(-1, 16).reshape(-1)[: x.numel()].view_as(x).double() / 22
        bound = torch.maximum(bound, of_block)
    bound = bound * (1 + 1e-5) + 2.0**-126
    assert ((found.double() - x.double()).abs() <= bound)[~is_special].all()


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
def test_decoded_values_that_are_zero_have_the_same_bytes_again(form):
    def buffers(x):
        layout = fs.plan({"x": x}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision=fs.Precision(stored=form))
        sharded = fs.shard({"x": x}, layout, fs.SingleComm(), place="optim")
        return [
            b
            for node in fs.layouts.units_of(fs.init_state(fs.optim.sgd(0.1), sharded, comm=fs.SingleComm()).params)
            for b in node.buffers
        ]

    x = torch.tensor([[1e-42, -1e-42, 0.0], [0.0, 0.0, 0.0]])
    assert all(torch.equal(a, b) for a, b in zip(buffers(x), buffers(_round_trip(form, x)), strict=True))


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_arrive(form, special):
    x = torch.linspace(-1, 1, 120).view(3, 40)
    x[1, 7] = special
    found = _round_trip(form, x)
    assert not found[1, 7].isfinite()
    if form in KEEP_INFINITY[:2]:
        torch.testing.assert_close(found[1, 7], x[1, 7], equal_nan=True)
    if form.name == "nvfp4":
        torch.testing.assert_close(found[1, 7], x[1, 7], equal_nan=True)
        assert torch.equal(_round_trip(form, found).nan_to_num(nan=2.0), found.nan_to_num(nan=2.0))
        x.view(-1)[32:48] = 0  # what shares its block
        found.view(-1)[47] = 0
    found[1, 7], x[1, 7] = 0, 0
    torch.testing.assert_close(found, x, rtol=0.21 if form.name == "nvfp4" else 0.13, atol=0.02)


@pytest.mark.parametrize("special", [None, 70_000])
def test_long_leaves_in_nvfp4_have_the_bytes_of_their_parts(special):
    form, n = fs.formats.nvfp4, 300_003

    def planes_of(values):
        sizes = [-(-len(values) // 16) * plane.per_block for plane in form.planes]
        planes = tuple([torch.empty(size, dtype=plane.dtype) for size, plane in zip(sizes, form.planes, strict=True)])
        scale = torch.empty(4, dtype=torch.uint8)
        part = fs.formats.LeafPart("x", (n,), torch.float32, 0, len(values), planes, scale, values)
        form.leaf_codec.encode([part], lambda largest: largest.fill_(5.0))
        return [plane.view(torch.uint8) for plane in planes], form.leaf_codec.decode(part)

    values = torch.randn(n, generator=torch.Generator().manual_seed(0))
    if special is not None:
        values[special : special + 2] = torch.tensor([math.inf, math.nan])
    planes, found = planes_of(values)
    pieces = [planes_of(piece) for piece in values.split(80_000)]
    assert all(torch.equal(plane, torch.cat(each)) for plane, each in zip(planes, zip(*[p for p, _ in pieces]), strict=True))
    torch.testing.assert_close(found, torch.cat([decoded for _, decoded in pieces]), rtol=0, atol=0, equal_nan=True)


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5),
    n=st.integers(1, 5),
    atom=st.sampled_from([fs.layouts.ElementAtom(), fs.layouts.RowsAtom(1), fs.layouts.RowsAtom(2), fs.layouts.LeafAtom()]),
)
def test_blocks_of_leaves_are_not_cut_and_belong_to_one_leaf(shapes, n, atom):
    """Whatever the shapes: each begins at a multiple of 16 in its buffer, and so do the parts of ranks."""
    params = {str(i): torch.ones(shape) for i, shape in enumerate(shapes)}
    precision = fs.Precision(stored=fs.formats.nvfp4)
    layout = fs.plan(params, fs.Mesh({"dp": n}), fs.zero3("dp"), precision=precision, atoms={"**": atom})
    [unit] = layout.units
    assert all(leaf.offset % 16 == 0 for leaf in unit.leaves)
    assert all(group.capacity % 16 == 0 for group in unit.groups)
    for leaf in unit.leaves:
        group = unit.groups[leaf.group]
        cuts = [part * group.capacity - leaf.offset for part in range(group.num_parts)]
        assert all(cut % 16 == 0 and cut % atom.size(leaf.shape) == 0 for cut in cuts if 0 < cut < leaf.numel)


def _round_trip(form, x):
    comm, layout = fs.SingleComm(), fs.plan({"x": x}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision=fs.Precision(stored=form))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard({"x": x}, layout, comm, place="optim"), comm=comm)
    return fs.full_tree(state.params, comm=comm)["x"]


def test_ranks_that_update_trees_in_another_order_do_not_mix_their_scales():
    """Under ZeRO-3 an update of parameters in such a format has no collective but the agreement on scales."""
    layout = fs.plan({"x": torch.zeros(4, 8)}, fs.Mesh({"dp": 2}), fs.zero3("dp"), precision=fs.Precision(stored=BUILT_IN[0]))
    tx = fs.optim.sgd(0.1)

    def rank_fn(comm):
        states = [
            fs.init_state(tx, fs.shard({"x": torch.full((4, 8), v)}, layout, comm, place="optim"), comm=comm)
            for v in (1.0, 9.0)
        ]
        grads = [
            fs.layouts.map_units(lambda x: x.with_buffers([torch.ones_like(b) for b in x.buffers]), s.main) for s in states
        ]
        for i in (0, 1) if comm.rank == 0 else (1, 0):
            fs.update(tx, grads[i], states[i], comm=comm)

    with pytest.raises((fs.errors.CommError, fs.errors.AgreementError), match="scales of float8_e4m3_by_tensor"):
        simulate(layout.mesh, rank_fn)


@pytest.mark.parametrize("donate", [False, True])
@on_ranks(fs.Mesh({"dp": 2}))
def test_a_reshard_to_other_ranks_is_refused_before_anything_moves(comm, donate):
    """Scales are agreed on by the ranks of a layout, and the Comm of such a reshard has others as well."""
    params, precision = {"x": torch.ones(4, 8)}, fs.Precision(stored=BUILT_IN[0])
    layouts = [fs.plan(params, fs.Mesh({"dp": n}), fs.zero3("dp"), precision=precision) for n in (2, 1)]
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(params, layouts[0], comm, place="optim"), comm=comm)
    with pytest.raises(fs.errors.LayoutError, match="to other ranks go by a checkpoint"):
        fs.reshard(state, layouts[1], comm=comm, donate=donate)
    torch.testing.assert_close(fs.full_tree(state.params, comm=comm)["x"], params["x"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", BUILT_IN, ids=str)
def test_a_state_of_later_ranks_is_resharded_to_all(form):
    """The numbers of ranks in the old mesh are not those in the Comm: here ranks 1 and 2 are its ranks 0 and 1."""
    x, precision = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), fs.Precision(stored=form)
    old, new = (fs.plan({"x": x}, fs.Mesh({"dp": n}), fs.zero3("dp"), precision=precision) for n in (2, 3))

    def make(comm):
        state = fs.init_state(fs.optim.sgd(0.1), fs.shard({"x": x}, old, comm, place="optim"), comm=comm)
        return state, fs.full_tree(state.params, comm=comm)["x"].clone()

    made = simulate(old.mesh, make)

    def move(comm):
        moved = fs.reshard(made[comm.rank - 1][0] if comm.rank else None, new, comm=comm)
        return fs.full_tree(moved.params, comm=comm)["x"].clone()

    assert all(torch.equal(found, made[0][1]) for found in simulate(new.mesh, move))


@pytest.mark.parametrize("form", BUILT_IN, ids=str)
@on_ranks(fs.Mesh({"dp": 2}))
def test_a_unit_with_empty_leaves_alone(comm, form):
    params = {"empty": {"x": torch.ones(0, 3)}, "full": {"x": torch.ones(4, 8)}}
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="*", precision=fs.Precision(stored=form))
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(params, layout, comm, place="optim"), comm=comm)
    whole = fs.full_tree(state.params, comm=comm)
    assert whole["empty"]["x"].shape == (0, 3)
    torch.testing.assert_close(whole["full"]["x"], params["full"]["x"], rtol=0.21, atol=0)
