"""The stand-in's casts and products, to the bit: against TransformerEngine's own references, and against others in numpy.

TransformerEngine has references of current scaling and NVFP4 in plain torch. Those of the other formats stand here, one
block at a time. None shares code with the stand-in.
"""

import numpy as np
import pytest
import torch

from tests import te_cpu
from tests.te_cpu.recipes import CAPABILITY, distance, make_recipe, random, run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: np.float32(448), E5M2: np.float32(57344)}
EXPONENTS = torch.randint(-90, 60, (64, 160), generator=torch.Generator().manual_seed(1)).bfloat16()
INPUTS = {
    "normal": random(64, 160),
    "wide": random(64, 160) * torch.exp2(EXPONENTS),
    "zero": torch.zeros(64, 160, dtype=torch.bfloat16),
    "zero rows": random(64, 160) * (torch.arange(64) // 16 != 1)[:, None],
    "tiny": random(64, 160) * 2.0**-126,
    "large": random(64, 160).clamp(-3.5, 3.5) * 2.0**126,
    "three dimensions": random(8, 8, 160),
}
inputs = pytest.mark.parametrize("x", INPUTS)


def cast(values, dtype):
    """Return values of numpy rounded to FP8."""
    clipped = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
    return torch.from_numpy(np.ascontiguousarray(clipped, np.float32)).to(dtype).float().numpy()


def cast_whole(x, dtype=E4M3):
    amax = np.abs(x).max()
    scale = min(np.float64(LARGEST[dtype]) / amax, np.finfo(np.float32).max) if amax else 1
    return cast(x * np.float32(scale), dtype) * (np.float32(1) / np.float32(scale))


def cast_block(block, dtype=E4M3):
    """Block scaling: the scale is the power of two below the quotient of the largest numbers."""
    amax = np.abs(block).max()
    scale = np.float32(2 ** min(np.floor(np.log2(np.float64(LARGEST[dtype]) / amax)), 127) if amax else 1)
    return cast(block * scale, dtype) * (np.float32(1) / scale)


def cast_microblock(block, dtype=E4M3):
    """MXFP8: the scale is a power of two, rounded up."""
    mantissa, exponent = np.frexp(np.abs(block).max() * (np.float32(1) / LARGEST[dtype]))
    exponent = exponent - 1 if mantissa == 0.5 else exponent
    return np.ldexp(cast(np.ldexp(block, -exponent), dtype), exponent)


def in_blocks(function, rows, columns):
    def cast_matrix(x, dtype=E4M3):
        result = np.empty_like(x)
        for row in range(0, x.shape[0], rows):
            for column in range(0, x.shape[1], columns):
                block = x[row : row + rows, column : column + columns]
                result[row : row + rows, column : column + columns] = function(block, dtype)
        return result

    return cast_matrix


REFERENCES = {  # for activations by rows and by columns, for weights by rows and by columns
    "current": (cast_whole,) * 4,
    "block": (in_blocks(cast_block, 1, 128), in_blocks(cast_block, 128, 1)) + (in_blocks(cast_block, 128, 128),) * 2,
    "mxfp8": (in_blocks(cast_microblock, 1, 32), in_blocks(cast_microblock, 32, 1)) * 2,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", REFERENCES)
def test_linear_has_the_bits_of_casts_by_hand(recipe, dtype):
    te = te_cpu.load()
    with te_cpu.architecture(*CAPABILITY[recipe]):
        rows, columns, weight_rows, weight_columns = REFERENCES[recipe]
        linear = te.Linear(256, 384, bias=False, params_dtype=dtype)
        x, grad = random(96, 256, dtype=dtype).requires_grad_(), random(96, 384, seed=1, dtype=dtype)
        with te.autocast(enabled=True, recipe=make_recipe(recipe)):
            y = linear(x)
        y.backward(grad)
        a, w, g = (tensor.detach().float().numpy() for tensor in (x, linear.weight, grad))
        backward = E5M2 if recipe == "current" else E4M3
        operands = {
            "y": (rows(a), weight_rows(w).T),
            "dx": (rows(g, backward), weight_columns(w)),
            "dw": (columns(g, backward).T, columns(a)),
        }
        for name, actual in (("y", y), ("dx", x.grad), ("dw", linear.weight.grad)):
            first, second = (torch.from_numpy(np.ascontiguousarray(operand)) for operand in operands[name])
            assert torch.equal(actual, (first @ second).to(dtype)), name


@inputs
@pytest.mark.parametrize("recipe", REFERENCES)
def test_quantized_values_are_those_of_casts_by_hand(recipe, x):
    te = te_cpu.load()
    with te_cpu.architecture(*CAPABILITY[recipe]):
        quantizer = {
            "current": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cpu")),
            "block": lambda: te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
            "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
        }[recipe]()
        source = INPUTS[x]
        quantized = quantizer(source)
        matrix = source.reshape(-1, source.shape[-1]).float().numpy()
        expected = torch.from_numpy(REFERENCES[recipe][0](matrix)).reshape(source.shape)
        assert torch.equal(quantized.dequantize(dtype=torch.float32), expected)
        quantized.update_usage(rowwise_usage=False, columnwise_usage=True)
        if recipe == "mxfp8":  # the others are dequantized by rows alone
            expected = torch.from_numpy(REFERENCES[recipe][1](matrix)).reshape(source.shape)
            assert torch.equal(quantized.dequantize(dtype=torch.float32), expected)


def test_mxfp8_in_squares_has_the_values_of_casts_by_hand(blackwell):
    quantized = blackwell.MXFP8Quantizer(blackwell.DType.kFloat8E4M3, with_2d_quantization=True)(INPUTS["wide"])
    expected = torch.from_numpy(in_blocks(cast_microblock, 32, 32)(INPUTS["wide"].float().numpy()))
    for _ in ("rows", "columns"):
        assert torch.equal(quantized.dequantize(dtype=torch.float32), expected)
        quantized.update_usage(rowwise_usage=False, columnwise_usage=True)


def test_exponents_of_mxfp8_are_rounded_up_and_stop_at_both_ends(blackwell):
    largest = [
        0.0,
        448 * 2.0**-140,
        448 * 2.0**-127,
        449 * 2.0**-127,
        448 * 2.0**-126,
        448.0,
        450.0,
        896.0,
        3.0e38,
        float("inf"),
    ]
    exponents = [0, 0, 0, 1, 1, 127, 128, 128, 247, 254]
    rows = torch.tensor(largest)[:, None].repeat(4, 32)[:32]
    quantized = blackwell.MXFP8Quantizer(blackwell.DType.kFloat8E4M3)(rows)
    assert quantized._rowwise_scale_inv[: len(largest), 0].tolist() == exponents


@inputs
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_has_the_bytes_of_transformer_engines_reference(hopper, x, power_of_two):
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    source = INPUTS[x].float()
    expected = CurrentScalingQuantizerRef(E4M3, pow_2_scales=power_of_two).quantize(source)
    quantizer = hopper.Float8CurrentScalingQuantizer(
        hopper.DType.kFloat8E4M3, torch.device("cpu"), force_pow_2_scales=power_of_two
    )
    actual = quantizer(source)
    assert torch.equal(actual._data.flatten(), expected.data.view(torch.uint8).flatten())
    assert torch.equal(actual._transpose.flatten(), expected.data_t.view(torch.uint8).flatten())
    assert torch.equal(actual._scale_inv, expected.scale)


@inputs
@pytest.mark.parametrize("mode", ["1D", "1D after a Hadamard transform", "2D"])
def test_nvfp4_has_the_bytes_of_transformer_engines_reference(blackwell, x, mode):
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    source, transformed = INPUTS[x], "Hadamard" in mode
    tile = (16, 16) if mode == "2D" else (1, 16)
    expected = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=transformed).quantize(source)
    quantizer = blackwell.NVFP4Quantizer(
        with_rht=transformed, with_post_rht_amax=transformed, with_2d_quantization=mode == "2D", with_random_sign_mask=True
    )
    actual = quantizer(source)
    for side, wanted, wanted_scale, wanted_amax in (
        ("rowwise", expected.data, expected.scale, expected.global_amax_row),
        ("columnwise", expected.data_t, expected.scale_t, expected.global_amax_col),
    ):
        data, scale, amax = (getattr(actual, name) for name in (f"_{side}_data", f"_{side}_scale_inv", f"_amax_{side}"))
        assert torch.equal(data.reshape(wanted.shape), wanted)
        rows, columns = wanted_scale.shape
        assert torch.equal(scale[:rows, :columns], wanted_scale.view(torch.uint8))
        assert not scale[rows:].any()
        assert not scale[:, columns:].any()
        assert torch.equal(amax, wanted_amax)


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_linear_is_that_of_transformer_engines_reference_recipe(recipe, monkeypatch):
    te = te_cpu.load()
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling, reference_nvfp4

    factory = {
        "current": reference_current_scaling.current_scaling_ref_factory,
        "nvfp4": reference_nvfp4.nvfp4_ref_rht_2d_factory,
    }[recipe]
    with te_cpu.architecture(*CAPABILITY[recipe]):
        linear = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16)
        x = random(64, 256)
        with torch.no_grad():  # with some weights sums that are added in another order round to another bfloat16
            linear.weight.copy_(random(128, 256, seed=1) / 16)
        actual = run(te, linear, x, make_recipe(recipe))
        reference = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16)
        reference.load_state_dict(linear.state_dict())
        # On a processor with AMX oneDNN's product of float8, which the reference takes, adds up in another order.
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        expected = run(te, reference, x, CustomRecipe(qfactory=factory))
        for name, one, other in zip(("y", "dx", "dw"), actual, expected):
            if recipe == "current":
                assert torch.equal(one, other), name
            else:  # the reference adds up 16 products at a time
                assert distance(one, other) < 1e-4, name


def test_delayed_scaling_uses_the_largest_amax_of_the_steps_before(hopper):
    from transformer_engine.common.recipe import DelayedScaling

    linear = hopper.Linear(256, 128, bias=False, params_dtype=torch.float32)
    w, recipe, sizes = linear.weight.detach(), DelayedScaling(amax_history_len=2), [1.0, 3.0, 2.0, 1.0]
    scales = [1.0, 448 / 1.0, 448 / 3.0, 448 / 3.0]  # of the step before, then of the two steps before
    for size, scale in zip(sizes, scales):
        x = random(64, 256, dtype=torch.float32)
        x = x / x.abs().max() * size
        weight_scale = torch.tensor(448.0) / w.abs().max() if scale != 1 else torch.tensor(1.0)
        with hopper.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.sum().backward()
        scale = torch.tensor(scale)
        quantized_x = (x * scale).clamp(-448, 448).to(E4M3).float() * (1 / scale)
        quantized_w = (w * weight_scale).clamp(-448, 448).to(E4M3).float() * (1 / weight_scale)
        assert torch.equal(y, quantized_x @ quantized_w.t()), size
