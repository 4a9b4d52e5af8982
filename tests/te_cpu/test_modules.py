"""Every module under every recipe: forward and backward run, and are as far from full precision as the format lets expect."""

import torch

from tests import te_cpu
from tests.scheduling import every
from tests.te_cpu.recipes import CAPABILITY, distance, make_recipe, random, run

MODULES = {
    "Linear": lambda te: te.Linear(256, 128, params_dtype=torch.bfloat16),
    "LayerNormLinear": lambda te: te.LayerNormLinear(256, 128, params_dtype=torch.bfloat16),
    "LayerNormMLP": lambda te: te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16),
    "GroupedLinear": lambda te: te.GroupedLinear(2, 256, 128, params_dtype=torch.bfloat16),
    "TransformerLayer": lambda te: te.TransformerLayer(
        256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16
    ),
}
ERROR = {"delayed": (0.05, 0.1), "current": (0.05, 0.1), "block": (0.05, 0.1), "mxfp8": (0.05, 0.1), "nvfp4": (0.2, 0.3)}
"""How far output and gradients may be off, for one module; a layer of several is allowed twice as much."""


def test_linear_in_float32_has_the_bits_of_torch(hopper):
    linear, expected = hopper.Linear(64, 32), torch.nn.Linear(64, 32)
    with torch.no_grad():
        expected.weight.copy_(linear.weight)
        linear.bias.copy_(expected.bias)
    for module in (linear, expected):
        module.x = random(16, 64, dtype=torch.float32).requires_grad_()
        module.y = module(module.x)
        module.y.backward(random(16, 32, seed=1, dtype=torch.float32))
    assert torch.equal(linear.y, expected.y)
    assert torch.equal(linear.x.grad, expected.x.grad)
    assert torch.equal(linear.weight.grad, expected.weight.grad)
    assert torch.equal(linear.bias.grad, expected.bias.grad)


@every(2, module=MODULES, case=[*CAPABILITY.items(), *((name, (10, 0)) for name in ("delayed", "current", "block"))])
def test_module_under_recipe(module, case):
    te, (recipe, capability) = te_cpu.load(), case
    with te_cpu.architecture(*capability):
        torch.manual_seed(0)
        built = MODULES[module](te)
        if module == "GroupedLinear":
            grouped = built
            built = torch.nn.Module()
            built.grouped, built.forward = grouped, lambda x: grouped(x, [128, 64])
        x = random(96, 2, 256) if module == "TransformerLayer" else random(192, 256)
        full = run(te, built, x, None)
        quantized = run(te, built, x, make_recipe(recipe), steps=2)  # delayed scaling knows its scales from the second on
        factor = 1 if module.endswith("Linear") else 2
        for actual, expected, allowed in zip(quantized, full, (ERROR[recipe][0], ERROR[recipe][1], ERROR[recipe][1])):
            assert 0 < distance(actual, expected) < factor * allowed
