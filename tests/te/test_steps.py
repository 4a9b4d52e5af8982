"""Steps of modules of TransformerEngine that do more than a forward and a backward have the bits of the whole model."""

import pytest
import torch

import fsharp as fs
from tests.te.training import (
    RATE,
    TOKENS,
    WIDTH,
    Case,
    Experts,
    differences,
    layer,
    linear,
    norm_linear,
    norm_mlp,
    on_ranks,
    te,
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


TWO = lambda: [linear(2 * WIDTH), te.Linear(2 * WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu")]  # noqa: E731
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
    "offload": Case(THREE, options={"policy": fs.Policy(offload=True)}, optimizer=lambda: (fs.optim.sgd(RATE), {})),
    "no prefetch": Case(THREE, options={"policy": fs.Policy(prefetch=0)}),
    "kept from forward to backward": Case(THREE, options={"policy": fs.Policy(release="backward")}),
}
SHARDED = [fs.zero3("dp"), fs.hsdp("outer", "inner"), fs.zero3("outer", "inner")]
BOTH = pytest.mark.parametrize("architecture", [(9, 0), (10, 0)], ids=str)
SIZES = [
    {"dp": 1},
    {"dp": 2},
    pytest.param({"dp": 3}, marks=pytest.mark.deep),
    pytest.param({"outer": 2, "inner": 2}, marks=pytest.mark.deep),
]


@BOTH
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_training_has_the_bits_of_the_whole_model(architecture, sizes):
    found = on_ranks(sizes, differences, cases={"Linear": Case(TWO)}, architecture=architecture)
    assert found == [[]] * len(found)


@BOTH
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_modules(architecture, sizes):
    found = on_ranks(sizes, differences, cases=MODULES, architecture=architecture, strategies=SHARDED)
    assert found == [[]] * len(found)


@BOTH
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_steps(architecture, sizes):
    found = on_ranks(sizes, differences, cases=STEPS, architecture=architecture, strategies=SHARDED)
    assert found == [[]] * len(found)


@pytest.mark.deep
@BOTH
def test_modules_and_steps_under_every_strategy(architecture):
    found = on_ranks({"dp": 2}, differences, cases=MODULES | STEPS, architecture=architecture)
    assert found == [[]] * len(found)


UNEVEN = {
    "uneven parts": Case(lambda: [linear(96), te.Linear(96, WIDTH, params_dtype=torch.bfloat16, device="cpu")], units=()),
    "ranks without a part": Case(
        lambda: [
            te.Linear(WIDTH, 32, bias=False, params_dtype=torch.bfloat16, device="cpu"),
            te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu"),
        ],
        units=(),
    ),
}


@BOTH
@pytest.mark.parametrize("sizes", [{"dp": 3}, pytest.param({"dp": 5}, marks=pytest.mark.deep)], ids=str)
def test_uneven_parts(architecture, sizes):
    found = on_ranks(sizes, differences, cases=UNEVEN, architecture=architecture, strategies=SHARDED)
    assert found == [[]] * len(found)
