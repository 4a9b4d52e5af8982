"""GradScaler: all ranks leave out the same steps, and what they compute is what they compute without scaling."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, LayoutError, LossError, ScheduleError
from fsharp.testing import simulate
from tests import modules
from tests.modules import ADAMW, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every, mesh_of, turned

SCALER = {"init_scale": 2.0**10, "growth_interval": 2}


def train(model, optimizer, scaler, data, *, bad=(), parts=1, clip=None, zero="after"):
    """Steps in torch's own words; the scale after each. ``bad``: steps in which this rank's loss is infinite."""
    scales = []
    for i, (x, y) in enumerate(data):
        if zero == "before":
            optimizer.zero_grad()
        for j, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts))):
            loss = model(xs, ys)["loss"] / parts
            if i in bad:
                loss = loss * torch.inf
            if j < parts - 1:
                with model.accumulate():
                    scaler.scale(loss).backward()
                continue
            scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(clip)
        scaler.step(optimizer)
        scaler.update()
        if zero == "after":
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@every(9, strategy=STRATEGIES, parts=(1, 2), optimizer=("torch", "pair"))
@on_ranks(mesh_of)
def test_the_same_bits_as_without(comm, strategy, parts, optimizer):
    found = []
    for enabled in (False, True):
        model, opt = wrap(comm, strategy)
        if optimizer == "pair":
            opt = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))
        scaler = fs.GradScaler("cpu", enabled=enabled, **SCALER)
        scales = train(model, opt, scaler, modules.batches(comm, 3), parts=parts, clip=0.5)
        found.append(values(model))
        assert model.scheduled_step.num_unscheduled_calls == 1
    assert scales == [2.0**10, 2.0**11, 2.0**11]
    assert_same(*found)


def infinite_on_one_rank(comm, strategy, zero="after"):
    """Parameters after three steps, of which one is left out, and after the other two alone; and the scales."""
    (model, optimizer), (expected, other) = wrap(comm, strategy), wrap(comm, strategy)
    data, scaler = modules.batches(comm, 3), fs.GradScaler("cpu", init_scale=2.0**10)
    bad = (1,) if comm.rank == comm.mesh.size - 1 else ()
    scales = train(model, optimizer, scaler, data, bad=bad, zero=zero)
    train(expected, other, fs.GradScaler("cpu", enabled=False), [data[0], data[2]])
    return scales, values(model), values(expected)


@every(3, strategy=turned(STRATEGIES, "zero3"), zero=("after", "before"))
@on_ranks(mesh_of)
def test_an_infinity_on_one_rank_is_left_out_on_all(comm, strategy, zero):
    scales, mine, expected = infinite_on_one_rank(comm, strategy, zero)
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert_same(mine, expected)


def test_a_not_a_number_in_an_empty_part_of_others():
    """A leaf of one element is on one rank alone, which says so to the others."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        scaler = fs.GradScaler("cpu", init_scale=4.0)
        [(x, y)] = modules.batches(comm, 1)
        scaler.scale(model(x, y)["loss"]).backward()
        part = model.layers[0].gain.grad.local
        part.fill_(torch.nan)
        scaler.step(optimizer)
        scaler.update()
        return part.numel(), scaler.get_scale()

    assert sorted(simulate(DP, rank_fn)) == [(0, 2.0), (1, 2.0)]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ranks_with_different_scales_are_refused_alike(strategy):
    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        train(model, optimizer, fs.GradScaler("cpu", init_scale=2.0 ** (3 + comm.rank)), modules.batches(comm, 1))

    found = simulate(DP, rank_fn, outcomes=True)
    assert {type(error) for error in found} == {AgreementError}
    assert {str(error).splitlines()[0] for error in found} == {
        "GradScaler: ranks have unscaled by scales from 8 to 16. Give all of them the same init_scale, growth_factor, "
        "backoff_factor and growth_interval, and load the same state_dict."
    }


def test_other_optimizers_are_as_with_torch():
    def steps(scaler):
        model = modules.make()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        for i, (x, y) in enumerate(modules.batches(None, 3)):
            scaler.scale(model(x, y)["loss"] * (torch.inf if i == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), modules.detached(model)

    (scale, mine), (expected, theirs) = steps(fs.GradScaler("cpu")), steps(torch.amp.GradScaler("cpu"))
    assert scale == expected
    assert_same(mine, theirs)


@on_ranks(fs.Mesh({"dp": 2}))
def test_refused(comm):
    model, optimizer = wrap(comm, "zero3")
    [(x, y)] = modules.batches(comm, 1)
    scaler = fs.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ScheduleError, match=r"unscale_\(\): there are no gradients"):
        scaler.step(optimizer)
    with model.accumulate():
        scaler.scale(model(x, y)["loss"]).backward()
    with pytest.raises(LossError, match=r"unscale_\(\): all backward passes so far were inside of accumulate"):
        scaler.unscale_(optimizer)
    scaler.scale(model(x, y)["loss"]).backward()
    plain = torch.amp.GradScaler("cpu")
    plain.scale(torch.ones(()))
    with pytest.raises(LayoutError, match=r"'embed\.weight' is sharded.*of torch.s GradScaler would.*Take fs\.GradScaler"):
        plain.unscale_(optimizer)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
        scaler.unscale_(optimizer)
    with pytest.raises(ScheduleError, match="a backward came after gradients had been changed"):
        scaler.scale(model(x, y)["loss"]).backward()


@on_ranks(DP)
def test_gradients_of_half_precision(comm):
    model, optimizer = wrap(comm, "zero3", precision=fs.Precision(compute=torch.float16, main=torch.float16))
    scaler = fs.GradScaler("cpu", init_scale=2.0)
    [(x, y)] = modules.batches(comm, 1)
    scaler.scale(model(x, y)["loss"]).backward()
    with pytest.raises(ValueError, match=r"summed in float16.*accumulate=torch\.float32"):
        scaler.step(optimizer)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(DP)
def test_half_precision_to_compute(comm, strategy):
    """What would underflow in float16 is there: as near to float32 as float16 is."""
    found = []
    for compute, scaler in ((torch.float16, SCALER), (torch.float32, {"enabled": False})):
        model, optimizer = wrap(comm, strategy, precision=fs.Precision(compute=compute, main=torch.float32))
        train(model, optimizer, fs.GradScaler("cpu", **scaler), modules.batches(comm, 3))
        found.append(values(model))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.01)


@on_ranks(DP)
def test_plain_torch_where_parameters_are_whole(comm):
    """Under ddp torch's own scaler sees whole gradients, the same on all ranks, and is right."""
    data, found = modules.batches(comm, 3), []
    for kind in (torch.amp.GradScaler, fs.GradScaler):
        model, optimizer = wrap(comm, "ddp")
        scales = train(model, optimizer, kind("cpu", init_scale=2.0**10), data, bad=(1,) if comm.rank else ())
        found.append((scales, values(model)))
    assert_same(*found)
