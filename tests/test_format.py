"""A format that the library does not know: bfloat16 as two planes of bytes, all the way from a layout to a checkpoint.

Nothing is lost by it, so every path has to give the bits of the plain format, and to move the bytes that it predicts.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharp as fs
from fsharp.errors import LayoutError, TreeError
from fsharp.functional.layout.precision import Format, Plane, plain, register_format
from fsharp.testing import DebugPolicy, check_races, simulate
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import STRATEGIES, assert_same, assert_same_training, make_layout, make_state, make_tx, my_batches, train


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


BLOCKS = Format("blocks", (Plane(torch.int8, 8), Plane(torch.float32)), rounded, spread, block=8)
PLAIN = fs.Precision(compute=torch.bfloat16, main=torch.float32)
STORED = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=HALVES)


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
def test_a_format_of_blocks_in_some_units(strategy):
    precision = {"**": fs.Precision(), "layers.*": fs.Precision(stored=BLOCKS), "layers.1.*": fs.Precision(stored=HALVES)}
    layout = make_layout(*STRATEGIES[strategy], precision=precision)
    assert all(group.capacity % group.dtypes.stored.block == 0 for unit in layout.units for group in unit.groups)

    def rank_fn(comm):
        blocking = train(comm, strategy, microbatches=2, precision=precision)
        assert_same_training(train(comm, strategy, {"bucket_nbytes": 2000}, microbatches=2, precision=precision), blocking)
        plain_losses = train(comm, strategy, microbatches=2).losses
        assert blocking.losses != plain_losses
        assert all(abs(a - b) < 0.1 * abs(b) for a, b in zip(blocking.losses, plain_losses, strict=True))

    simulate(STRATEGIES[strategy][0], rank_fn)


def test_plain_formats_are_the_dtypes():
    x = torch.randn(6)
    assert plain(torch.float32).store(x, 3) is x
    assert plain(torch.bfloat16).store(x, 3).dtype is torch.bfloat16
    assert plain(torch.bfloat16).is_plain
    assert not HALVES.is_plain


def test_what_is_no_format_is_refused():
    with pytest.raises(LayoutError, match="one plane at least"):
        Format("none", (), halves, joined)
    with pytest.raises(fs.errors.OptionError, match="stored is 'halves', expected a Format"):
        fs.Precision(stored="halves")
    wrong = Format("wrong", (Plane(torch.uint8),), halves, joined)
    with pytest.raises(LayoutError, match=r"Format 'wrong': encode\(\) returned .* expected"):
        wrong.store(torch.ones(4), 2)
    with pytest.raises(LayoutError, match="another format 'halves'"):
        register_format(Format("halves", (Plane(torch.uint8, 2),), halves, joined))


@pytest.mark.parametrize("policy", [None, {}, {"prefetch": 2, "bucket_nbytes": 2000}, {"release": "forward"}], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"])
def test_training_has_the_bits_of_the_plain_format(strategy, policy):
    def rank_fn(comm):
        found = [train(comm, strategy, policy, microbatches=2, precision=precision) for precision in (PLAIN, STORED)]
        assert_same_training(found[1], found[0])
        if policy is not None:
            assert found[1].num_recordings == 1
            fs.schedule.verify(found[1].schedule)

    simulate(STRATEGIES[strategy][0], rank_fn)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hfsdp"])
def test_what_rests_and_travels_is_what_is_predicted(strategy):
    mesh, how = STRATEGIES[strategy]
    layout = make_layout(mesh, how, precision=STORED)

    def rank_fn(comm):
        counting = fs.CountingComm(comm)
        tx = fs.optim.adamw(1e-2)
        state = make_state(comm, strategy, tx=tx, precision=STORED)
        buffers = [b for node in fs.units_of(state.params) for b in node.buffers]
        assert {b.dtype for b in buffers} == {torch.uint8}
        assert sum(b.nbytes for b in buffers) == layout.nbytes("params")
        fs.train_step(loss_fn, tx)(state, my_batches(comm, 1)[0], counting)
        return Counter(counting.calls)

    for calls in simulate(mesh, rank_fn):
        assert calls == fs.step_traffic(layout)


def test_layouts_print_and_serialise_and_ranks_compare_formats():
    layout = make_layout(*STRATEGIES["zero3"], precision=STORED)
    assert "halves (main float32)" in str(layout)
    assert fs.Layout.from_json(layout.to_json()) == layout
    assert layout != make_layout(*STRATEGIES["zero3"], precision=PLAIN)

    def rank_fn(comm):
        return make_state(comm, "zero3", precision=STORED if comm.rank else PLAIN)

    with pytest.raises(fs.errors.AgreementError, match="halves"):
        simulate(STRATEGIES["zero3"][0], rank_fn)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_schedules_are_drawn_estimated_traced_and_free_of_races(strategy, tmp_path):
    mesh = fs.Mesh({"dp": 1})

    def found(precision):
        scheduler = fs.Scheduler(fs.SingleComm(mesh), policy=DebugPolicy(trivial_axes=True, sum_late=False))
        state = make_state(scheduler.comm, getattr(fs, strategy)("dp"), precision=precision)
        step = scheduler(fs.train_step(loss_fn, make_tx(), donate=True))
        batches = my_batches(scheduler.comm, 5)
        with check_races(scheduler) as report:
            for batch in batches[:4]:
                state, _ = step(state, batch)
        assert report.num_ops
        trace = step.trace()
        step(state, batches[4])
        fs.inspect.draw(step.schedule, str(tmp_path / "schedule.png"))
        assert trace.steps
        return step.schedule

    ours, theirs = found(STORED), found(PLAIN)
    assert (ours.arena > theirs.arena) is (
        strategy == "zero3"
    )  # under zero1 parameters rest whole, and are decoded outside of the arena
    assert [op.kind for op in ours.ops] == [op.kind for op in theirs.ops]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_modules(strategy):
    mesh, how = STRATEGIES[strategy]

    def trained(comm, precision):
        torch.manual_seed(3)
        model = fs.shard_module(
            torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)),
            mesh=comm,
            strategy=how,
            units=[torch.nn.Linear],
            precision=precision,
        )
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-1), decay=0.5))
        found = []
        for step in range(4):
            x = torch.arange(12.0).view(2, 6) * (step + 1 + comm.rank) / 20
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        with optimizer.averaged(), torch.no_grad():
            found.append(model(x))
        with model.unsharded(write=True):
            for parameter in model.parameters():
                with torch.no_grad():
                    parameter.mul_(0.5)
        with torch.no_grad():
            found.append(model(x))
            next(model.parameters()).mul_(2)
            found.append(model(x))
        return found, dict(model.full_parameters())

    def rank_fn(comm):
        assert_same(trained(comm, STORED), trained(comm, PLAIN))

    simulate(mesh, rank_fn)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_functions_of_values_do_not_apply_to_stored_parameters(strategy):
    def rank_fn(comm):
        params = make_state(comm, strategy, precision=STORED).params
        halved = fs.map_units(lambda node: node.replace([b * 0.5 for b in node.buffers]), params)
        with pytest.raises(TreeError, match=r"neither \d+ values nor what format 'halves' stores"):
            fs.full(halved, comm=comm)

    simulate(STRATEGIES[strategy][0], rank_fn)


@pytest.mark.parametrize(("before", "after"), [("zero3", "ddp"), ("zero1", "zero3"), ("ddp", "zero1")])
def test_reshard(before, after):
    def rank_fn(comm):
        states = [make_state(comm, before, precision=precision) for precision in (STORED, PLAIN)]
        layouts = [make_layout(*STRATEGIES[after], precision=precision) for precision in (STORED, PLAIN)]
        states = [fs.reshard(state, layout, comm=comm) for state, layout in zip(states, layouts, strict=True)]
        assert {b.dtype for node in fs.units_of(states[0].params) for b in node.buffers} == {torch.uint8}
        step = fs.train_step(loss_fn, make_tx())
        stepped = [step(state, my_batches(comm, 1)[0], comm) for state in states]
        ours, theirs = [(fs.full(state.params, comm=comm), metrics.loss) for state, metrics in stepped]
        assert_same(ours, theirs)

    simulate(STRATEGIES[before][0], rank_fn)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("before", "after"), [("zero3", "ddp"), ("zero1", "zero3")])
def test_checkpoints_have_values(before, after, donate, tmp_path):
    def save(comm):
        state = make_state(comm, before, precision=STORED)
        fs.checkpoint.save(str(tmp_path), state, step=1, comm=comm)
        return fs.full(state.params, comm=comm)

    def load(comm, precision):
        like = make_state(comm, after, params=make_params(5, layers=3), precision=precision)
        state = fs.checkpoint.load(str(tmp_path), like, comm=comm, donate=donate)
        step = fs.train_step(loss_fn, make_tx())
        values = fs.full(state.params, comm=comm)
        state, metrics = step(state, my_batches(comm, 1)[0], comm)
        return values, metrics.loss, [b.dtype for node in fs.units_of(state.params) for b in node.buffers]

    saved = simulate(STRATEGIES[before][0], save)
    stored = simulate(STRATEGIES[after][0], lambda comm: load(comm, STORED))
    ours = simulate(STRATEGIES[after][0], lambda comm: load(comm, PLAIN))
    for want, (values, loss, dtypes), (others, other_loss, _) in zip(saved, stored, ours, strict=True):
        assert_same(values, want)
        assert_same((values, loss), (others, other_loss))
        assert set(dtypes) == {torch.uint8}
