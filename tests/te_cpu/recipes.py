"""Recipes and modules that tests go through, and what is compared of them."""

import torch

CAPABILITY = {"delayed": (9, 0), "current": (9, 0), "block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
RECIPES = tuple(CAPABILITY)


def make_recipe(name):
    from transformer_engine.common import recipe

    return {
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    }[name]()


def run(te, module, x, recipe, steps=1):
    """Return output and gradients of the input and of the first weight, after some forwards and backwards."""
    for _ in range(steps):
        module.zero_grad()
        x = x.detach().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.float().square().mean().backward()
    weight = next(p for name, p in module.named_parameters() if name.endswith(("weight", "weight0")) and p.dim() == 2)
    return y.detach(), x.grad, weight.grad


def distance(actual, expected):
    """Return the norm of the difference, relative to what is expected."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
