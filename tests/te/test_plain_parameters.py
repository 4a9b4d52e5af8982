"""TransformerEngine modules with plain bfloat16 parameters, which each forward casts: the bits of the whole model."""

import pytest
import torch

import fsharp as fs
from tests import te_cpu
from tests.te.training import (
    FEW,
    RECIPES,
    TOKENS,
    WIDTH,
    Case,
    differences,
    layer,
    linear,
    on_ranks,
    recipes,
    te,
    train_sharded,
)

CASES = {
    "Linear": Case(lambda: [linear(), linear(), linear()], quantized=False),
    "TransformerLayer": Case(lambda: [layer(), layer()], (te.TransformerLayer,), shape=(TOKENS, 2, WIDTH), quantized=False),
    "TransformerEngine's checkpoints": Case(lambda: [linear(), linear()], how="te", quantized=False),
}


def train_each(comm, names):
    return differences(comm, CASES, names, [fs.zero3("dp")]) + train_delayed(comm)


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(RECIPES), marks=pytest.mark.deep)], ids=str)
def test_training_has_the_bits_of_the_whole_model_and_delayed_scaling_agrees_on_amaxes(names):
    assert on_ranks({"dp": 2}, train_each, names=names) == [[], []]


def train_delayed(comm):
    """Train under delayed scaling; every rank has the same batches, so that a whole model has the same amaxes."""
    recipe, found = recipes.DelayedScaling(amax_history_len=4), []
    with te_cpu.architecture(9, 0):
        for name, case in CASES.items():
            runs = []
            for strategy in (fs.ddp("dp"), fs.zero3("dp")):
                te.quantization.FP8GlobalStateManager.reset()
                sharded, model = train_sharded(case, recipe, comm, strategy)
                runs.append(sharded)
                scales = [state.scale for m in model.modules() for state in scaling_of(m)]
                other = comm.all_reduce(torch.cat(scales), "dp", op="max")
                if not torch.equal(other, torch.cat(scales)) or bool((other == 1).all()):
                    found.append(f"{name}: ranks have other scales, or none")
            for step, (a, b) in enumerate(zip(*runs, strict=True)):
                for key in a[0]:
                    if not all(map(torch.equal, a[0][key], b[0][key])):
                        found.append(f"{name}, step {step}")
    return found


def scaling_of(module):
    meta = getattr(module, "fp8_meta", {})
    return [meta[key] for key in ("scaling_fwd", "scaling_bwd") if key in meta]
