"""A format that the library does not know: bfloat16 as two planes of bytes, all the way from a layout to a checkpoint.

Nothing is lost by it, so every path has to give the bits of the plain format, and to move the bytes that it predicts.
"""

import re
from functools import cache

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import AgreementError, LayoutError, TreeError
from fsharp.functional.formats.format import Format, Plane, plain_format
from fsharp.functional.formats.registry import format_named, register_format
from fsharp.testing import DebugPolicy, checking_races, simulate
from tests.gpt_like import loss_fn, make_params
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import (
    STRATEGIES,
    assert_same,
    assert_same_training,
    make_layout,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    train,
)
from tests.test_leaf_format import STORED as STORED_BY_LEAF


def halves(values):
    pairs = values.to(torch.bfloat16).view(torch.uint8).view(-1, 2)
    return [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]


def joined(planes):
    return torch.stack(list(planes), 1).view(-1).view(torch.bfloat16)


HALVES = register_format(Format("halves", (Plane(torch.uint8), Plane(torch.uint8)), halves, joined))


def rounded(values):
    """Blocks of 8 values in 8 bits, and for each block a scale that is a power of two, so that no second rounding follows."""
    blocks = values.float().view(-1, 8)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(1).clamp(min=1e-20) / 127)))
    return [(blocks / scales[:, None]).round().to(torch.int8).view(-1), scales]


def spread(planes):
    return (planes[0].view(-1, 8) * planes[1][:, None]).view(-1)


BLOCKS = register_format(Format("blocks", (Plane(torch.int8, 8), Plane(torch.float32)), rounded, spread, block=8))
PLAIN = fs.Precision(compute=torch.bfloat16, main=torch.float32)
STORED = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=HALVES)
either = pytest.mark.parametrize("stored", [STORED, STORED_BY_LEAF], ids=["by block", "by leaf"])


@given(parts=st.integers(1, 4), part=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_part_is_stored_by_itself(parts, part, seed):
    values = torch.randn(parts * part, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    stored = HALVES.store(values, part)
    assert stored.dtype is torch.uint8
    assert stored.numel() == parts * HALVES.size(part)
    assert torch.equal(HALVES.load(stored, part, torch.bfloat16), values)
    one_by_one = [HALVES.store(each, part) for each in (values.split(part) if part else [])]
    assert torch.equal(torch.cat([*one_by_one, stored[:0]]), stored)
    assert torch.equal(HALVES.store(HALVES.load(stored, part, torch.bfloat16), part), stored)


@given(parts=st.integers(1, 3), blocks=st.integers(1, 9), seed=st.integers(0, 99))
def test_blocks_are_encoded_by_themselves(parts, blocks, seed):
    values = torch.randn(parts * blocks * 8, generator=torch.Generator().manual_seed(seed))
    stored = BLOCKS.store(values, blocks * 8)
    assert stored.numel() == parts * BLOCKS.size(blocks * 8)
    found = BLOCKS.load(stored, blocks * 8, torch.float32)
    assert torch.equal(BLOCKS.store(found, blocks * 8), stored)
    assert (found - values).abs().amax() <= values.abs().amax() / 127
    last = BLOCKS.load(BLOCKS.store(values[-8:], 8), 8, torch.float32)
    assert torch.equal(found[-8:], last)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
@on_ranks(mesh_of)
def test_a_format_of_blocks_in_some_units(comm, strategy):
    precision = {"**": fs.Precision(), "layers.*": fs.Precision(stored=BLOCKS), "layers.1.*": fs.Precision(stored=HALVES)}
    params = make_params(layers=2)
    layout = make_layout(*STRATEGIES[strategy], params, precision=precision)
    assert all(group.capacity % group.dtypes.stored_format.block == 0 for unit in layout.units for group in unit.groups)
    ways = {"params": params, "steps": 3, "microbatches": 2}
    blocking = train(comm, strategy, precision=precision, **ways)
    assert_same_training(train(comm, strategy, {"bucket_nbytes": 2000}, precision=precision, **ways), blocking)
    plain_losses = train(comm, strategy, **ways).losses
    assert blocking.losses != plain_losses
    assert all(abs(a - b) < 0.1 * abs(b) for a, b in zip(blocking.losses, plain_losses, strict=True))


def test_plain_formats_are_the_dtypes():
    x = torch.randn(6)
    assert plain_format(torch.float32).store(x, 3) is x
    assert plain_format(torch.bfloat16).store(x, 3).dtype is torch.bfloat16
    assert plain_format(torch.bfloat16).is_plain
    assert not HALVES.is_plain


@cache
def schedule_without_races(precision, strategy, picture=None):
    """Of a step that is watched, traced, and drawn if there is a ``picture`` to write."""
    scheduler = fs.Scheduler(fs.SingleComm(fs.Mesh({"dp": 1})), policy=DebugPolicy(trivial_axes=True, sum_late=False))
    state = make_state(scheduler.comm, getattr(fs, strategy)("dp"), params=make_params(layers=1), precision=precision)
    step = scheduler(fs.train_step(loss_fn, make_tx(), donate=True))
    batches = my_batches(scheduler.comm, 4)
    with checking_races(scheduler) as report:
        for batch in batches[:3]:
            state, _ = step(state, batch)
    assert report.num_ops
    trace = step.start_trace()
    step(state, batches[3])
    if picture is not None:
        fs.inspect.draw(step.schedule, str(picture))
    assert trace.steps
    hardware = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e9, codec_bandwidth=1e9)
    predicted = fs.inspect.predict(step.schedule, hardware).spans
    decodes = [i for i, op in enumerate(step.schedule.ops) if op.kind == "decode"]
    assert [span.op for span in predicted if span.kind == "decode" and span.seconds > 0] == decodes
    return step.schedule


@either
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_schedules_are_drawn_estimated_traced_and_free_of_races(stored, strategy, tmp_path):
    ours = schedule_without_races(stored, strategy, tmp_path / "schedule.png")
    theirs = schedule_without_races(PLAIN, strategy)
    # Under zero1 parameters rest whole, and are decoded outside of the arena.
    assert (ours.arena > theirs.arena) is (strategy == "zero3")
    if stored is STORED:  # scales take room, with which other orders are best
        assert [op.kind for op in ours.ops if op.kind != "decode"] == [op.kind for op in theirs.ops]


@either
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(mesh_of)
def test_functions_of_values_do_not_apply_to_stored_parameters(comm, stored, strategy):
    params = make_state(comm, strategy, precision=stored).params
    halved = fs.layouts.map_units(lambda node: node.replace([b * 0.5 for b in node.buffers]), params)
    with pytest.raises(TreeError, match=r"neither \d+ values nor what format '(halves|by_leaf)' stores"):
        fs.full_tree(halved, comm=comm)


@either
@pytest.mark.parametrize(("before", "after"), [("zero3", "ddp"), ("zero1", "zero3"), ("ddp", "zero1")])
@on_ranks(lambda before: STRATEGIES[before][0])
def test_reshard(comm, stored, before, after):
    params = make_params(layers=1)
    states = [make_state(comm, before, params=params, precision=precision) for precision in (stored, PLAIN)]
    layouts = [make_layout(*STRATEGIES[after], params, precision=precision) for precision in (stored, PLAIN)]
    states = [fs.reshard(state, layout, comm=comm) for state, layout in zip(states, layouts, strict=True)]
    assert {b.dtype for node in fs.layouts.units_of(states[0].params) for b in node.buffers} == {torch.uint8}
    step = fs.train_step(loss_fn, make_tx())
    stepped = [step(state, my_batches(comm, 1)[0], comm) for state in states]
    ours, theirs = [(fs.full_tree(state.params, comm=comm), metrics.loss) for state, metrics in stepped]
    assert_same(ours, theirs)


@either
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("before", "after"), [("zero3", "ddp"), ("zero1", "zero3")])
def test_checkpoints_have_values(stored, before, after, donate, tmp_path):
    def save(comm):
        state = make_state(comm, before, params=make_params(layers=1), precision=stored)
        fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)
        return fs.full_tree(state.params, comm=comm)

    def load(comm, precision):
        like = make_state(comm, after, params=make_params(5, layers=1), precision=precision)
        is_plain = precision is PLAIN  # its parameters are bfloat16, those saved float32
        state = fs.checkpoint.load(str(tmp_path), like, comm=comm, donate=donate, cast=is_plain)
        step = fs.train_step(loss_fn, make_tx())
        values = fs.full_tree(state.params, comm=comm)
        state, metrics = step(state, my_batches(comm, 1)[0], comm)
        return values, metrics.loss, [b.dtype for node in fs.layouts.units_of(state.params) for b in node.buffers]

    saved = simulate(STRATEGIES[before][0], save)
    stored = simulate(STRATEGIES[after][0], lambda comm: load(comm, stored))
    ours = simulate(STRATEGIES[after][0], lambda comm: load(comm, PLAIN))
    for want, (values, loss, dtypes), (others, other_loss, _) in zip(saved, stored, ours, strict=True):
        assert_same(values, want)
        assert_same((values, loss), (others, other_loss))
        assert set(dtypes) == {torch.uint8}


def scaled(values):
    """Blocks of 8 values in 8 bits and any scale: encoding decoded values again gives the same bytes in float32 alone."""
    assert values.dtype is torch.float32
    blocks = values.view(-1, 8)
    scales = (blocks.abs().amax(1) / 127).clamp(min=1e-20)
    return [(blocks / scales[:, None]).round().to(torch.int8).view(-1), scales]


SCALED = Format("scaled", (Plane(torch.int8, 8), Plane(torch.float32)), scaled, spread, block=8)


@on_ranks(STRATEGIES["zero3"][0])
def test_formats_are_encoded_from_the_main_dtype(comm, tmp_path):
    """So a checkpoint and a reshard into the same layout keep every byte, whatever dtype functions compute in."""
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=SCALED)
    state = make_state(comm, "zero3", precision=precision)
    fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)
    loaded = fs.checkpoint.load(str(tmp_path), make_state(comm, "zero3", precision=precision), comm=comm)
    layout = make_layout(*STRATEGIES["zero3"], precision=precision)
    for other in (loaded, fs.reshard(state, layout, comm=comm)):
        for ours, theirs in zip(fs.layouts.units_of(other.params), fs.layouts.units_of(state.params), strict=True):
            assert_same(list(ours.buffers), list(theirs.buffers))
    params = fs.shard(make_params(layers=3), layout, comm, dtype="compute")
    cast = fs.reshard(params, layout, comm=comm, cast=True)
    for ours, theirs in zip(fs.layouts.units_of((params, cast)), fs.layouts.units_of((state.params, params)), strict=True):
        assert_same(list(ours.buffers), list(theirs.buffers))


@pytest.mark.parametrize("what", ["decode", "encode"])
@pytest.mark.parametrize("how", ["load", "reshard"])
@on_ranks(STRATEGIES["zero3"][0])
def test_a_format_that_fails_on_one_rank_fails_on_all(comm, what, how, tmp_path):
    def moved(state, comm, precision):
        if how == "load":
            return fs.checkpoint.load(str(tmp_path), state, comm=comm)
        return fs.reshard(state, make_layout(*STRATEGIES["ddp"], precision=precision), comm=comm)

    failing = []

    def checked(name, fn):
        def call(values):
            if name in failing and comm.rank == 1:
                raise ValueError("not this value")
            return fn(values)

        return call

    format = Format("picky", HALVES.planes, checked("encode", halves), checked("decode", joined))
    precision = fs.Precision(stored=format)
    state = make_state(comm, "zero3", precision=precision)
    fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)
    failing.append(what)
    with pytest.raises(AgreementError, match="not this value"):
        moved(state, comm, precision)
    failing.clear()
    comm.all_gather(torch.zeros(8), "dp")  # no rank is in a collective of its own
    assert fs.checkpoint.load(str(tmp_path), state, comm=comm).step == state.step


def as_bits(values):
    return [values.float().view(torch.int32)]


def of_bits(planes):
    return planes[0].view(torch.float32)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(mesh_of)
def test_a_format_of_one_plane_in_the_dtype_of_values(comm, strategy, tmp_path):
    """Whether a buffer is stored does not depend on the dtype of its planes: here the main copy's, and the opposite numbers."""
    opposite = Format("opposite", (Plane(torch.float32),), lambda values: [-values.float()], lambda planes: -planes[0])
    stored, plain_format = fs.Precision(stored=opposite), fs.Precision()
    ways = {"params": make_params(layers=1), "steps": 3}
    plain_training = train(comm, strategy, precision=plain_format, **ways)
    for policy in (None, {}):
        assert_same_training(train(comm, strategy, policy, precision=stored, **ways), plain_training)
    state = make_state(comm, strategy, precision=stored)
    assert_same(fs.full_tree(state.params, comm=comm), fs.full_tree(make_state(comm, strategy).params, comm=comm))
    fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)
    like = make_state(comm, strategy, params=make_params(5, layers=3), precision=stored)
    loaded = fs.checkpoint.load(str(tmp_path), like, comm=comm)
    assert_same(fs.full_tree(loaded.main, comm=comm), fs.full_tree(state.main, comm=comm))


def test_values_do_not_share_memory_with_what_is_stored():
    bits = Format("bits", (Plane(torch.int32),), as_bits, of_bits)
    values = torch.arange(8.0)
    stored = bits.store(values, 4)
    loaded = bits.load(stored, 4, torch.float32)
    loaded.zero_()
    assert torch.equal(bits.load(stored, 4, torch.float32), values)
    one = bits.load(stored[: bits.size(4)], 4, torch.float32)
    one.zero_()
    assert torch.equal(bits.load(stored, 4, torch.float32), torch.arange(8.0))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(mesh_of)
def test_a_module_whose_format_gives_views(comm, strategy):
    bits = fs.Precision(stored=Format("bits", (Plane(torch.int32),), as_bits, of_bits))

    def run(comm, precision):
        torch.manual_seed(0)
        model = fs.shard_module(torch.nn.Linear(5, 3), mesh=comm, strategy=STRATEGIES[strategy][1], precision=precision)
        optimizer, found = fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(0.1)), []
        for _ in range(3):
            loss = model(torch.ones(2, 5)).square().mean()
            descend(loss, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            found.append(loss.detach())
        return found, dict(model.named_full_parameters())

    assert_same(run(comm, bits), run(comm, fs.Precision()))


DECODED = {
    "a number": (lambda planes: torch.ones(1), "decode() returned [(torch.float32, (1,))], expected a floating-point"),
    "a scalar": (lambda planes: torch.ones(()), "decode() returned [(torch.float32, ())]"),
    "integers": (lambda planes: planes[0].view(-1).long(), "decode() returned [(torch.int64, (16,))]"),
    "rows": (lambda planes: joined(planes).view(-1, 2), "decode() returned [(torch.bfloat16, (8, 2))]"),
    "nothing": (lambda planes: None, "decode() returned [None]"),
    "a list": (lambda planes: [joined(planes)], "decode() returned [["),
}


@pytest.mark.parametrize("name", DECODED)
def test_what_decode_returns_is_checked(name):
    decode, text = DECODED[name]
    wrong = Format("wrong", HALVES.planes, halves, decode)
    with pytest.raises(LayoutError, match=re.escape(f"Format 'wrong': {text}")):
        wrong.load(wrong.store(torch.arange(16.0), 8), 8, torch.float32)


ENCODED = {"nothing": None, "text": ["a"], "a tensor": torch.ones(4), "one plane": [torch.ones(4, dtype=torch.uint8)]}


@pytest.mark.parametrize("found", ENCODED.values(), ids=ENCODED)
def test_what_encode_returns_is_checked(found):
    with pytest.raises(LayoutError, match=r"Format 'wrong': encode\(\) returned"):
        Format("wrong", HALVES.planes, lambda values: found, joined).store(torch.ones(4), 2)


MADE = {
    "a list of planes": lambda: Format("f", [Plane(torch.uint8)], halves, joined),
    "one plane": lambda: Format("f", Plane(torch.uint8), halves, joined),
    "no planes": lambda: Format("f", (), halves, joined),
    "dtypes": lambda: Format("f", (torch.int16,), halves, joined),
    "no encode": lambda: Format("f", HALVES.planes, None, joined),
    "half a block": lambda: Format("f", HALVES.planes, halves, joined, block=2.5),
    "no name": lambda: Format("not a name", HALVES.planes, halves, joined),
    "an empty plane": lambda: Plane(torch.int16, 0),
    "a plane with scales": lambda: Plane(torch.qint8),
}


@pytest.mark.parametrize("name", MADE)
def test_formats_and_planes_are_checked_when_they_are_made(name):
    with pytest.raises(fs.errors.FsharpError, match=r"^(Format|Plane)\(\): "):
        MADE[name]()


def test_a_name_stands_for_one_format():
    with pytest.raises(LayoutError, match="another format 'halves' already"):
        register_format(Format("halves", HALVES.planes, halves, lambda planes: -joined(planes)))
    assert register_format(Format("halves", HALVES.planes, halves, joined)) == HALVES
    with pytest.raises(fs.errors.OptionError, match="stored is 'halves', expected a Format"):
        fs.Precision(stored="halves")
    with pytest.raises(LayoutError, match="another format 'float32'"):
        register_format(Format("float32", HALVES.planes, halves, joined))
    with pytest.raises(LayoutError, match="no format 'float33'"):
        format_named("float33")


@pytest.mark.parametrize(
    "other",
    [
        Format("halves", (Plane(torch.int8), Plane(torch.uint8)), halves, joined),
        Format("halves", (Plane(torch.uint8, 2), Plane(torch.uint8, 2)), halves, joined, block=2),
    ],
    ids=["planes", "blocks"],
)
@pytest.mark.parametrize("where", ["stored", "wire"])
def test_ranks_compare_planes_and_blocks(other, where):
    def rank_fn(comm):
        return make_state(comm, "zero3", precision=fs.Precision(**{where: other if comm.rank else HALVES}))

    with pytest.raises(fs.errors.AgreementError, match=r"halves \(.*; blocks of 1\)"):
        simulate(STRATEGIES["zero3"][0], rank_fn)


def test_stored_parameters_are_decoded_or_refused_where_values_are_wanted():
    one, poisoned = fs.SingleComm(), make_params(layers=3)
    poisoned["embed"][0, 0] = float("nan")
    stored, plain_state = [make_state(one, fs.zero3("dp"), precision=precision) for precision in (STORED, PLAIN)]
    norms = [fs.optim.global_norm(state.params, comm=one) for state in (stored, plain_state)]
    assert torch.equal(*norms)
    bad = make_state(one, fs.zero3("dp"), params=poisoned, precision=STORED)
    assert fs.resilience.find_nonfinite(None, bad.params, comm=one).leaf == "embed"
    for call in (
        lambda: fs.optim.adamw(1e-2).init(stored.params),
        lambda: fs.reduce_scatter(stored.params, comm=one),
        lambda: fs.average(fs.Loss(torch.ones(()), torch.ones(())), stored.params, comm=one),
    ):
        with pytest.raises(TreeError, match=r"are stored in a format, and not as values. Pass main copies"):
            call()


@pytest.mark.parametrize(("old", "new"), [(PLAIN, STORED), (STORED, PLAIN)], ids=["plain to stored", "stored to plain"])
@on_ranks(STRATEGIES["zero3"][0])
def test_a_state_is_not_resharded_into_another_format(comm, old, new):
    """Nobody would make main copies, or take parameters from them."""
    state = make_state(comm, "zero3", precision=old)
    layout = make_layout(*STRATEGIES["zero1"], precision=new)
    with pytest.raises(LayoutError, match=r"format (bfloat16|halves), in the new layout (halves|bfloat16)"):
        fs.reshard(state, layout, comm=comm)
    moved = fs.reshard(state.params, layout, comm=comm, cast=True)
    assert_same(fs.full_tree(moved, comm=comm), fs.full_tree(state.params, comm=comm))


@pytest.mark.parametrize("new", [STORED, PLAIN], ids=["stored", "bfloat16"])
@on_ranks(STRATEGIES["zero3"][0])
def test_parameters_are_not_loaded_beside_main_copies_that_stay(comm, new, tmp_path):
    """The first update would undo the loading. Parameters at the optimizer's place make a state with main copies."""
    saved = make_state(comm, "zero3")
    fs.checkpoint.save(str(tmp_path), saved, step=1, comm=comm)
    other = make_params(5, layers=3)
    like = make_state(comm, "zero1", params=other, precision=new)
    with pytest.raises(fs.errors.CheckpointError, match=r"'params\.embed' is in the checkpoint and its main copy is not"):
        fs.checkpoint.load(str(tmp_path), like, comm=comm, strict=False, cast=True)
    layout = make_layout(*STRATEGIES["zero1"], other, precision=new)
    params = fs.shard(other, layout, comm, place="optim")
    params = fs.checkpoint.load(str(tmp_path), params, comm=comm, subtree="params")
    state = fs.init_state(make_tx(), params, comm=comm)
    assert_same(fs.full_tree(state.main, comm=comm), fs.full_tree(saved.params, comm=comm))


@on_ranks(STRATEGIES["zero3"][0])
def test_half_of_a_nested_state_is_not_loaded_and_the_remedy_loads_both(comm, tmp_path):
    """A parameter beside an old main copy is overwritten, and an old parameter beside a main copy is used in the next step."""
    saved = make_state(comm, "zero3", precision=PLAIN)
    like = {"a": make_state(comm, "zero1", params=make_params(5, layers=3), precision=PLAIN)}
    for half, what, rename in (
        ("params", r"'a\.params\.embed' is in the checkpoint and its main copy is not", ("^a.main", "a.params")),
        ("main", r"main copy 'a\.main\.embed' is in the checkpoint and its parameter is not", ("^a.params", "a.main")),
    ):
        there = {half: getattr(saved, half), "opt": saved.opt}
        fs.checkpoint.save(str(tmp_path / half), {"a": there}, step=1, comm=comm)
        with pytest.raises(fs.errors.FsharpError, match=what + rf".*re.sub\('\{rename[0]}', '{rename[1]}'"):
            fs.checkpoint.load(str(tmp_path / half), like, comm=comm, strict=False, cast=True)
        how = {"rename": lambda name, rename=rename: re.sub(*rename, name), "cast": True, "strict": False}
        read = fs.checkpoint.load(str(tmp_path / half), like, comm=comm, **how)["a"]
        assert_same(fs.full_tree(read.params, comm=comm), fs.full_tree(saved.params, comm=comm))
        assert_same(
            fs.full_tree(read.main, comm=comm),
            optree.tree_map(torch.Tensor.float, fs.full_tree(there[half], comm=comm)),
        )


@pytest.mark.parametrize("new", [STORED, PLAIN], ids=["stored", "bfloat16"])
@on_ranks(STRATEGIES["zero3"][0])
def test_between_states_with_and_without_main_copies_the_remedy_of_the_error_loads_every_bit(comm, new, tmp_path, caplog):
    plain, mixed = make_state(comm, "zero3"), make_state(comm, "zero1", params=make_params(5, layers=3), precision=new)
    fs.checkpoint.save(str(tmp_path / "plain"), plain, step=1, comm=comm)
    fs.checkpoint.save(str(tmp_path / "mixed"), mixed, step=1, comm=comm)
    to_main = {"rename": lambda name: re.sub("^main", "params", name), "cast": True}
    with pytest.raises(
        TreeError, match=r"copies are made from parameters by rename=lambda name: re.sub\('\^main', 'params', name"
    ):
        fs.checkpoint.load(str(tmp_path / "plain"), mixed, comm=comm)
    read = fs.checkpoint.load(str(tmp_path / "plain"), mixed, comm=comm, **to_main)
    assert_same(fs.full_tree(read.main, comm=comm), fs.full_tree(plain.params, comm=comm))
    expected = make_state(comm, "zero1", params=fs.full_tree(plain.params, comm=comm), precision=new)
    assert_same(fs.full_tree(read.params, comm=comm), fs.full_tree(expected.params, comm=comm))
    from_main = {"rename": lambda name: re.sub("^params", "main", name), "ignore": "params.**"}
    with pytest.raises(
        TreeError, match=r"made from main copies by rename=lambda name: re.sub\('\^params', 'main', .*ignore='params"
    ):
        fs.checkpoint.load(str(tmp_path / "mixed"), plain, comm=comm)
    fs.checkpoint.load(str(tmp_path / "mixed"), plain, comm=comm, cast=True, strict=False)  # rounded parameters: a warning
    assert comm.rank != 0 or "Parameters are made from main copies by rename=" in caplog.text
    read = fs.checkpoint.load(str(tmp_path / "mixed"), plain, comm=comm, **from_main)
    assert_same(fs.full_tree(read.params, comm=comm), fs.full_tree(mixed.main, comm=comm))
