"""Quantized weights under delayed scaling: cast with the scales that modules keep, of which an update makes the history."""

import gc
from dataclasses import replace

import pytest
import torch

import fsharp as fs
from fsharp.functional.formats.te_delayed import ModuleScales
from tests import te_cpu
from tests.te.test_steps import MODULES, SHARDED, STEPS, TWO, UNEVEN
from tests.te.training import (
    DELAYED,
    RATE,
    Case,
    compare,
    differences,
    linear,
    loss_of,
    on_ranks,
    shard,
    te,
    train_alone,
    train_sharded,
    train_whole,
)


def fast(case):
    """The case with steps so long that the maxima of weights change."""
    return replace(case, loss=lambda model, y: 300 * loss_of(y))


CASE = fast(Case(TWO))
ARCHITECTURE, RECIPE = DELAYED["delayed"]
OTHERS = ("layers used twice", "frozen", "paused")
"""What TransformerEngine does not support under delayed scaling, what is refused, and what each update casts anew."""
MORE = {name: fast(case) for name, case in (MODULES | UNEVEN | STEPS).items() if name not in OTHERS}


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 2}, *(pytest.param(each, marks=pytest.mark.deep) for each in ({"dp": 1}, {"dp": 3}, {"outer": 2, "inner": 2}))],
    ids=str,
)
def test_training_under_every_strategy_has_the_bits_of_the_whole_model(sizes):
    found = on_ranks(sizes, differences, cases={"Linear": CASE}, names=list(DELAYED))
    assert found == [[]] * len(found)


@pytest.mark.deep
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 3}], ids=str)
def test_every_case_has_the_bits_of_the_whole_model(sizes):
    found = on_ranks(sizes, differences, cases=MORE, names=["delayed"], strategies=SHARDED)
    assert found == [[]] * len(found)


def scales_of(model):
    return {path: each.fp8_meta["scaling_fwd"] for path, each in model.named_modules() if hasattr(each, "fp8_meta")}


@pytest.mark.parametrize("preserved", [True, False])
def test_scales_change_in_each_step_and_are_those_of_the_whole_model(preserved):
    case, seen = replace(CASE, preserved=preserved), []
    case.before_step = lambda model, step: seen.append(
        [(x.scale.clone(), x.amax_history.clone()) for x in scales_of(model).values()]
    )
    with te_cpu.architecture(*ARCHITECTURE):
        whole = train_whole(case, RECIPE, [[0]], reduces_first=True)
    found, _ = train_alone(case, DELAYED["delayed"])
    expected, mine = seen[:3], seen[3:]
    assert [compare(a, b) for a, b in zip(found, whole, strict=True)] == [[], [], []]
    for step in range(3):
        for (scale, history), (other, wanted) in zip(mine[step], expected[step], strict=True):
            assert torch.equal(scale, other)
            assert torch.equal(history, wanted)
    assert all(not torch.equal(mine[1][i][0], mine[2][i][0]) for i in range(len(mine[0])))


def change_alone(comm):
    """Change a scale on one rank between a forward and its update."""
    with te_cpu.architecture(*ARCHITECTURE):
        model = shard(CASE, RECIPE, comm, fs.zero3("dp"))
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
        with te.autocast(enabled=True, recipe=RECIPE):
            CASE.loss(model, model(CASE.batch(0, 0, comm.rank))).backward()
        if comm.rank == 1:
            model.layers[1].fp8_meta["scaling_fwd"].scale[1] *= 2
        with pytest.raises(fs.errors.AgreementError, match=r"different scales of a weight(.|\n)*layers\.1\.weight"):
            optimizer.step()
    return True


def test_a_scale_that_differs_between_ranks_is_an_error_on_all():
    assert on_ranks({"dp": 2}, change_alone) == [True, True]


@pytest.mark.parametrize("is_averaged", [False, True])
def test_averages_leave_no_trace_in_histories(is_averaged):
    """Between two steps put averages in place of parameters, which are cast, and back."""
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    with te_cpu.architecture(*ARCHITECTURE):
        model = shard(CASE, RECIPE, comm, fs.zero3("dp"), policy=fs.testing.DebugPolicy(trivial_axes=True))
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.sgd(RATE), decay=0.5))
        train_sharded(CASE, RECIPE, comm, None, model=model, optimizer=optimizer, steps=[0])
        before = {path: x.amax_history.clone() for path, x in scales_of(model).items()}
        cast = dict(before)
        if is_averaged:
            with optimizer.averaged():
                pass
        else:
            with model.unsharded(write=True):
                for p in model.parameters():
                    p.data.mul_(0.5)
        cast = {path: x.amax_history for path, x in scales_of(model).items()}
    assert all(torch.equal(cast[path], before[path]) for path in before) == is_averaged


def test_what_would_go_wrong_is_refused_by_name():
    def freeze(model):
        model.layers[1].weight.requires_grad_(False)

    comm = fs.SingleComm()
    with pytest.raises(
        fs.errors.OptionError, match=r"parameter 'layers\.1\.weight': it is frozen under DelayedScaling, and its"
    ):
        shard(replace(CASE, prepare=freeze), RECIPE, comm, fs.zero3("dp"))

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = linear().weight

    with pytest.raises(fs.errors.OptionError, match=r"parameter 'layers\.0\.kept': a Holder does not say where it keeps the"):
        shard(Case(lambda: [Holder()]), RECIPE, comm, fs.zero3("dp"))
    module = CASE.model(RECIPE)
    scales = ModuleScales()
    scales.add("w", module.layers[0], "weight")
    assert scales.quantizer("w").scale.data_ptr() == module.layers[0].fp8_meta["scaling_fwd"].scale[1].data_ptr()
    del module
    gc.collect()
    with pytest.raises(fs.errors.OptionError, match="the module that keeps the scale of 'w' is gone"):
        scales.quantizer("w")


@pytest.mark.parametrize("quantized", [True, False])
def test_a_function_of_a_module_is_refused_before_it_changes_scales(quantized):
    """Scales and histories stayed in the function: no checkpoint had them, and a recomputation changed them again."""
    module = replace(CASE, quantized=quantized).model(RECIPE)
    fn, params = fs.make_functional(module)
    x, refusal = CASE.batch(0, 0, 0), r"Linear 'layers\.0' is called under DelayedScaling, .* fs\.shard_module\(\)"
    with te_cpu.architecture(*ARCHITECTURE):
        whole = fn(params, x)
        with te.autocast(enabled=True, recipe=RECIPE), pytest.raises(fs.errors.OptionError, match=refusal):
            fn(params, x)
        with te.autocast(enabled=False, recipe=RECIPE):
            assert torch.equal(fn(params, x), whole)
        with te.autocast(enabled=True, recipe=RECIPE):
            module(x)
