"""Importing TransformerEngine changes nothing else in a process; what is not modelled raises."""

import importlib
import os
import sys
import types
import warnings

import pytest
import torch

import fsharp as fs
from fsharp.testing import processes
from tests import te_cpu
from tests.te_cpu.recipes import make_recipe, random

ONE = fs.Mesh({"dp": 1})


def settings():
    config = torch._dynamo.config
    return {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "random": torch.get_rng_state().tolist(),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.cuda.is_available()),
        "compile": config.error_on_nested_jit_trace,
        "path": (list(sys.path), list(sys.path_hooks), sys.pycache_prefix),
        "modules": [name in sys.modules for name in ("jax", "triton", "transformer_engine.jax")],
    }


def functions():  # submodules appear as they are imported
    owners = (torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.distributed, torch.autograd)
    pairs = [((owner.__name__, name), value) for owner in owners for name, value in vars(owner).items()]
    return {key: value for key, value in pairs if not isinstance(value, types.ModuleType)}


def test_loading_changes_nothing_else():
    def load(comm):
        assert not any(name.startswith("transformer_engine.") for name in sys.modules)
        settings_before, functions_before = settings(), functions()
        te = te_cpu.load()
        assert settings() == settings_before, [name for name, value in settings().items() if value != settings_before[name]]
        after = functions()
        changed = [key for key, value in functions_before.items() if after.get(key) is not value]
        # TransformerEngine itself replaces these, on a GPU as well: they cast its quantized tensors, and others as before.
        assert changed == [("Module", "float"), ("Module", "half"), ("Module", "bfloat16")], changed
        assert te.Linear(32, 32)(torch.ones(32, 32)).shape == (32, 32)
        assert importlib.import_module("this")  # the import hook lets others be

    processes(ONE, load)


def test_loading_after_an_import_in_another_way_is_refused():
    def load(comm):
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        with pytest.raises(RuntimeError, match=r"load\(\) comes after transformer_engine was imported"):
            te_cpu.load()

    processes(ONE, load)


def test_architecture_is_switched_back():
    te = te_cpu.load()
    with te_cpu.architecture(10, 0):
        assert te.is_mxfp8_available()
        with te_cpu.architecture(9, 0):
            assert not te.is_mxfp8_available()
            assert te.is_fp8_block_scaling_available()
        assert te.is_nvfp4_available()


def test_what_is_not_modelled_raises(hopper):
    import transformer_engine_torch as tex

    with pytest.raises(NotImplementedError, match=r"does not model transformer_engine_torch\.fused_attn_fwd: choose"):
        tex.fused_attn_fwd(1, 2)
    with pytest.raises(NotImplementedError, match=r"grouped_mlp_experimental\.anything"):
        tex.grouped_mlp_experimental.anything()
    assert not hasattr(tex, "flash_attention")


def test_triton_kernels_raise_when_launched(hopper):
    from transformer_engine.common.triton import cross_entropy

    with pytest.raises(NotImplementedError, match="the Triton kernel cross_entropy_forward_kernel"):
        cross_entropy.cross_entropy_forward_kernel[(1,)](torch.ones(1))


def test_stochastic_rounding_raises(blackwell):
    from transformer_engine.common.recipe import NVFP4BlockScaling

    linear = blackwell.Linear(64, 64, params_dtype=torch.bfloat16)
    with blackwell.autocast(enabled=True, recipe=NVFP4BlockScaling()):
        y = linear(random(32, 64))
    with pytest.raises(NotImplementedError, match="disable_stochastic_rounding=True"):
        y.sum().backward()


def test_swizzled_scales_are_not_dequantized(blackwell):
    import transformer_engine_torch as tex

    quantized = blackwell.MXFP8Quantizer(blackwell.DType.kFloat8E4M3)(random(32, 32))
    quantized.dequantize()
    tex.swizzle_scales_for_gemm_(quantized)
    with pytest.raises(RuntimeError, match="cannot dequantize swizzled scales"):
        quantized.dequantize()


def test_recipe_of_another_architecture_is_refused(hopper):
    context = hopper.autocast(enabled=True, recipe=make_recipe("mxfp8"))
    with pytest.raises(RuntimeError, match=r"compute capability 10\.0"), context:
        pass
