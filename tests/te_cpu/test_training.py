"""Fused gradients of weights, weights that are sharded tensors, optimizers, meta tensors and state dicts."""

import io

import pytest
import torch

from tests import te_cpu
from tests.te_cpu.recipes import CAPABILITY, RECIPES, make_recipe, random, run

X = random(64, 256)


def make_linear(te, **options):
    torch.manual_seed(3)
    return te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, **options)


@pytest.fixture
def grad(hopper):
    """The gradient of the weight as it is without main_grad, in float32."""
    return run(hopper, make_linear(hopper), X, make_recipe("current"))[2].float()


def test_gradients_are_added_to_main_grad(hopper, grad):
    linear = make_linear(hopper, fuse_wgrad_accumulation=True)
    weight = linear.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(128, 256), False
    run(hopper, linear, X, make_recipe("current"), steps=2)
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape  # its values mean nothing: hooks wait for it
    assert torch.equal(weight.main_grad.bfloat16().float(), 2 * grad)


def test_gradients_overwrite_a_main_grad_that_is_fetched_in_the_backward(hopper, grad):
    linear = make_linear(hopper, fuse_wgrad_accumulation=True)
    weight, fetched = linear.weight, []

    def get_main_grad():
        fetched.append(torch.full((128, 256), float("nan")))
        return fetched[-1]

    weight.get_main_grad, weight.__fsdp_param__ = get_main_grad, True
    weight.overwrite_main_grad, weight.zero_out_wgrad, weight.grad_added_to_main_grad = True, True, False
    run(hopper, linear, X, make_recipe("current"))
    assert len(fetched) == 1
    assert torch.equal(fetched[0].bfloat16().float(), grad)
    assert not weight.grad.any()


def test_without_the_flag_there_is_no_grad(hopper, grad):
    linear = make_linear(hopper, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.zeros(128, 256)
    assert run(hopper, linear, X, make_recipe("current"))[2] is None
    assert torch.equal(linear.weight.main_grad.bfloat16().float(), grad)


class HalfOfAWeight(torch.Tensor):
    """A ``DistributedWeight``: half of the rows are here, and the others elsewhere."""

    is_distributed_weight = True

    def whole(self):
        return torch.cat([self.detach().as_subclass(torch.Tensor), self.elsewhere])

    def materialize_group_for_forward(self):
        self.calls.append("forward")
        return self.whole()

    def materialize_group_for_backward(self):
        self.calls.append("backward")
        return self.whole()

    def grad_buffer(self):
        self.calls.append("grad_buffer")
        return self.buffer

    def finalize_group_grads(self, grad):
        self.calls.append("finalize")
        self.finalized = grad
        return None if grad is self.buffer else grad[: self.shape[0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [None, "current", "block"])
def test_a_distributed_weight_is_materialized_and_its_gradient_finalized(hopper, recipe, fused):
    recipe = recipe and make_recipe(recipe)
    y, dx, dw = run(hopper, make_linear(hopper), X, recipe)
    linear = make_linear(hopper, fuse_wgrad_accumulation=fused)
    whole = linear.weight.detach().clone()
    half = torch.Tensor._make_subclass(HalfOfAWeight, whole[:64].clone(), True)
    half.calls, half.elsewhere, half.buffer = [], whole[64:], torch.zeros(128, 256)
    del linear.weight
    object.__setattr__(linear, "weight", half)
    x = X.clone().requires_grad_()
    with hopper.autocast(enabled=recipe is not None, recipe=recipe):
        out = linear(x)
    out.float().square().mean().backward()
    assert half.calls == ["forward", *["grad_buffer"] * fused, "backward", "finalize"]
    assert (half.finalized is half.buffer) == fused
    assert torch.equal(out, y)
    assert torch.equal(x.grad, dx)
    assert torch.equal(half.buffer.bfloat16(), dw) if fused else torch.equal(half.grad, dw[:64])


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fused_adam_updates_main_copies_as_torch_does(hopper, recipe):
    recipe = make_recipe(recipe)
    with hopper.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
        linear = make_linear(hopper)
    weight = linear.weight
    main = torch.nn.Parameter(weight.get_high_precision_init_val().float())
    optimizer = hopper.optimizers.FusedAdam(linear.parameters(), lr=1e-2, weight_decay=0.1, master_weights=True)
    expected = torch.optim.AdamW([main], lr=1e-2, weight_decay=0.1)
    optimizer.initialize_state(weight, False)
    optimizer.state[weight]["master_param"].copy_(main.detach())
    for _ in range(3):
        optimizer.zero_grad()
        run(hopper, linear, X, recipe)
        main.grad = weight.grad.float()
        optimizer.step()
        expected.step()
    torch.testing.assert_close(optimizer.get_unscaled_state(weight, "master_param"), main.detach(), rtol=1e-5, atol=1e-7)
    assert (weight.dequantize().float() - main).norm() < 0.05 * main.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_meta_tensors_and_state_dicts(recipe, monkeypatch):
    te = te_cpu.load()
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # without it those of delayed scaling are refused
    with te_cpu.architecture(*CAPABILITY[recipe]):
        recipe = make_recipe(recipe)
        with te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
            linear, loaded = make_linear(te, device="meta"), make_linear(te)
        assert linear.weight.is_meta
        linear.reset_parameters()
        assert type(linear.weight) is type(loaded.weight)
        assert linear.weight.get_high_precision_init_val().shape == (128, 256)
        run(te, linear, X, recipe)
        file = io.BytesIO()
        torch.save(linear.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=False))
        for one, other in zip(run(te, linear, X, recipe), run(te, loaded, X, recipe)):
            assert torch.equal(one, other)


def test_as_strided_gives_a_transpose_wrong_strides(hopper):
    """TransformerEngine 2.20.2 does so, and kernels do not see it; this fails once it is repaired."""
    quantizer = hopper.Float8CurrentScalingQuantizer(hopper.DType.kFloat8E4M3, torch.device("cpu"))
    weight = quantizer(random(48, 32))
    view = torch.as_strided(weight, weight.shape, weight.stride(), 0)
    assert torch.equal(view._data, weight._data)
    assert not view._transpose_invalid
    assert not torch.equal(view._transpose, weight._transpose)
