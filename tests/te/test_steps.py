"""Steps of TransformerEngine modules that do more than a forward and a backward have the bits of the whole model."""

from itertools import pairwise

import pytest
import torch

import fsharp as fs
from fsharp.stateful.modules.values.side_outputs import SideOutputFinder
from tests import te_cpu
from tests.te.training import (
    ABOUT,
    FEW,
    RATE,
    RECIPES,
    TOKENS,
    WIDTH,
    Case,
    Door,
    Experts,
    differences,
    layer,
    linear,
    loss_with_weight,
    norm_linear,
    norm_mlp,
    on_ranks,
    recipes,
    shard,
    te,
    train_alone,
)

MODULES = {
    "LayerNormLinear": Case(lambda: [norm_linear(), linear()], (te.LayerNormLinear, te.Linear)),
    "LayerNormMLP": Case(lambda: [norm_mlp(), norm_mlp()], (te.LayerNormMLP,)),
    "TransformerLayer": Case(lambda: [layer(), layer()], (te.TransformerLayer,), shape=(TOKENS, 2, WIDTH)),
    "GroupedLinear": Case(lambda: [Experts(), linear()], (Experts, te.Linear), shape=(2 * TOKENS, WIDTH)),
}


def evaluate(model, step):
    with torch.no_grad():
        model(Case.batch(Case(None), step, 7, 0))


def evaluate_in_inference_mode(model, step):
    with torch.inference_mode():
        model(Case.batch(Case(None), step, 7, 0).detach())


def freeze(model):
    model.layers[1].weight.requires_grad_(False)


TWO = lambda: [linear(2 * WIDTH), te.Linear(2 * WIDTH, WIDTH, bias=False, **ABOUT)]  # noqa: E731
THREE = lambda: [linear(), linear(), linear()]  # noqa: E731
STEPS = {
    "microbatches": Case(TWO, microbatches=3),
    "torch's checkpoints": Case(THREE, how="torch"),
    "TransformerEngine's checkpoints": Case(THREE, how="te"),
    "layers used twice": Case(THREE, how="twice"),
    "evaluation": Case(THREE, before_step=evaluate),
    "evaluation in inference mode": Case(THREE, before_step=evaluate_in_inference_mode),
    "frozen": Case(THREE, prepare=freeze),
    "paused": Case(THREE, change=freeze),
    "one unit": Case(THREE, units=()),
    "offload": Case(THREE, options={"policy": fs.SchedulePolicy(offload=True)}, optimizer=lambda: (fs.optim.sgd(RATE), {})),
    "no prefetch": Case(THREE, options={"policy": fs.SchedulePolicy(prefetch=0)}),
    "kept from forward to backward": Case(THREE, options={"policy": fs.SchedulePolicy(release="backward")}),
}
DOORS = {
    door: Case(lambda door=door: [linear(), Door(door), linear()], units=("layers.*",), loss=loss_with_weight)
    for door in ("returned", "alias returned", "attribute", "list", "computed", "unseen, computed")
}


def other(*widths, **options):
    """Layers of these widths."""
    return [te.Linear(a, b, **ABOUT, **options) for a, b in pairwise(widths)]


WHOLE = {"atoms": {"**": fs.layouts.LeafAtom()}}
UNEVEN = {
    "uneven parts": Case(lambda: other(WIDTH, 192, WIDTH), units=()),
    "ranks without a part of a leaf": Case(lambda: other(64, 64, 64, bias=False), units=(), shape=(TOKENS, 64)),
    "ranks without a part of the unit": Case(lambda: other(64, 64, 64, bias=False), options=WHOLE, shape=(TOKENS, 64)),
}
CASES = MODULES | STEPS | DOORS | UNEVEN
IN_GROUPS = pytest.mark.parametrize("cases", [MODULES, STEPS, DOORS, UNEVEN], ids=["modules", "steps", "doors", "parts"])
SHARDED = [fs.zero3("dp"), fs.hsdp("outer", "inner"), fs.hfsdp("outer", "inner"), fs.zero3("outer", "inner")]


def differences_of_few(comm):
    """Every case under one recipe; under another, with bytes for each direction and nothing derived, modules and few others."""
    first, second = FEW
    few = MODULES | {name: CASES[name] for name in ("microbatches", "unseen, computed", "ranks without a part of a leaf")}
    return differences(comm, CASES, [first], SHARDED) + differences(comm, few, [second], SHARDED)


def test_training_under_zero3_has_the_bits_of_the_whole_model():
    assert on_ranks({"dp": 2}, differences_of_few) == [[], []]


@pytest.mark.deep
@IN_GROUPS
@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 5}, {"outer": 2, "inner": 2}], ids=str)
def test_training_on_more_ranks_has_the_bits_of_the_whole_model(sizes, cases):
    found = on_ranks(sizes, differences, cases=cases, strategies=SHARDED)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(RECIPES), marks=pytest.mark.deep)], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [{"dp": 2}, *(pytest.param(each, marks=pytest.mark.deep) for each in ({"dp": 1}, {"dp": 3}, {"outer": 2, "inner": 2}))],
    ids=str,
)
def test_training_under_every_strategy_has_the_bits_of_the_whole_model(sizes, names):
    found = on_ranks(sizes, differences, cases={"Linear": Case(TWO)}, names=names)
    assert found == [[]] * len(found)


@pytest.mark.deep
@IN_GROUPS
def test_every_case_under_every_strategy_has_the_bits_of_the_whole_model(cases):
    assert on_ranks({"dp": 2}, differences, cases=cases) == [[], []]


@pytest.mark.parametrize("how", ["te", "torch"])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_checkpoint_of_a_part_of_a_unit_is_refused(how, quantized):
    """Its recomputation has parts in place of weights: gradients were wrong by factors of thousands."""
    case = Case(THREE, units=("layers.0",), how=how, quantized=quantized)
    with pytest.raises(fs.errors.TreeError, match=r"Linear: parameter 'layers\.2\.weight' is a part here, .* whole weight"):
        train_alone(case, RECIPES["current"], steps=[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_used_when_it_is_released_is_refused(recipe):
    case = Case(lambda: [linear(), Door("unseen"), linear()], units=("layers.*",), loss=loss_with_weight)
    with pytest.raises(fs.errors.TreeError, match=r"'layers\.1\.inner\.weight' is used while its memory is released"):
        train_alone(case, RECIPES[recipe], steps=[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_that_writes_to_a_weight_is_refused(recipe):
    case = Case(lambda: [linear(), Door("written"), linear()], units=("layers.*",))
    with pytest.raises(fs.errors.TreeError, match=r"has written to a parameter of unit 'layers\.1"):
        train_alone(case, RECIPES[recipe], steps=[0])


def test_what_would_go_wrong_is_refused_by_name():
    recipe, comm = recipes.Float8CurrentScaling(), fs.SingleComm()
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=fs.te.weight_format(recipe))
    tree = {"w": torch.ones(32, 32)}
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), precision=precision)
    params = fs.init_state(fs.optim.sgd(0.1), fs.shard(tree, layout, comm, place="optim"), comm=comm).params
    with pytest.raises(fs.errors.TreeError, match="scheduler passes such tensors"):
        fs.forward(lambda tree: tree["w"].float(), params, comm=comm)
    with pytest.raises(fs.errors.OptionError, match=r"recipe is DelayedScaling, .* fs\.shard_module\(\), which takes"):
        fs.te.weight_format(recipes.DelayedScaling())
    with pytest.raises(fs.errors.OptionError, match=r"recipe is 'current', expected Float8CurrentScaling\(\)"):
        fs.te.weight_format("current")
    with te_cpu.architecture(10, 0):
        narrow = Case(lambda: other(96, 32))
        with pytest.raises(
            fs.errors.OptionError, match=r"leaf '[\w.]*weight': .* of shape \[32, 96\] cannot be encoded in NVFP4"
        ):
            shard(narrow, RECIPES["nvfp4"][1], comm, fs.zero3("dp"))


def test_modules_of_transformer_engine_are_not_searched_for_stored_tensors():
    module, door = linear(), Door("list")
    module.kept = door.kept_in_list = [torch.zeros(1)]
    assert SideOutputFinder([module]).stored_tensors_by_id([]) == {}
    assert len(SideOutputFinder([door]).stored_tensors_by_id([])) == 1
