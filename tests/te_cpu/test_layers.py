"""Norms, activations, attention and lists of tensors in float32, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from tests.te_cpu.recipes import random

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "geglu": lambda x: F.gelu(x[..., :64], approximate="tanh") * x[..., 64:],
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "qgeglu": lambda x: x[..., :64] * torch.sigmoid(1.702 * x[..., :64]) * x[..., 64:],
    "relu": F.relu,
    "reglu": lambda x: F.relu(x[..., :64]) * x[..., 64:],
    "srelu": lambda x: F.relu(x) ** 2,
    "sreglu": lambda x: F.relu(x[..., :64]) ** 2 * x[..., 64:],
    "silu": F.silu,
    "swiglu": lambda x: F.silu(x[..., :64]) * x[..., 64:],
    "glu": lambda x: torch.sigmoid(x[..., :64]) * x[..., 64:],
}


def assert_like(module, function, *shape):
    """Compare outputs and all gradients of a module with those of a function of the input and the module's parameters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = random(*shape, dtype=torch.float32).requires_grad_()
    wanted = [x, *module.parameters()]
    results = []
    for each in (module, lambda x: function(x, dict(module.named_parameters()))):
        y = each(x)
        results.append([y, *torch.autograd.grad(y, wanted, random(*y.shape, seed=1, dtype=torch.float32))])
    for name, actual, expected in zip(("output", "input", *dict(module.named_parameters())), *results):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_norm(hopper, norm, zero_centered):
    def expected(x, p):
        weight = p["layer_norm_weight"] + zero_centered
        if norm == "LayerNorm":
            x = F.layer_norm(x, (32,), weight, p["layer_norm_bias"], 1e-5)
        else:
            x = F.rms_norm(x, (32,), weight, 1e-5)
        return F.linear(x, p["weight"], p["bias"])

    module = hopper.LayerNormLinear(32, 16, normalization=norm, zero_centered_gamma=zero_centered)
    assert_like(module, expected, 8, 3, 32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(hopper, activation):
    def expected(x, p):
        x = F.layer_norm(x, (32,), p["layer_norm_weight"], p["layer_norm_bias"], 1e-5)
        x = ACTIVATIONS[activation](F.linear(x, p["fc1_weight"], p["fc1_bias"]))
        return F.linear(x, p["fc2_weight"], p["fc2_bias"])

    assert_like(hopper.LayerNormMLP(32, 64, activation=activation), expected, 8, 3, 32)


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_attention(hopper, mask):
    def expected(x, p):
        x = F.layer_norm(x, (32,), p["layernorm_qkv.layer_norm_weight"], p["layernorm_qkv.layer_norm_bias"], 1e-5)
        qkv = F.linear(x, p["layernorm_qkv.weight"], p["layernorm_qkv.bias"])
        q, k, v = qkv.reshape(6, 2, 4, 3, 8).permute(3, 1, 2, 0, 4)  # [part, batch, head, position, channel]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
        return F.linear(y.permute(2, 0, 1, 3).reshape(6, 2, 32), p["proj.weight"], p["proj.bias"])

    module = hopper.MultiheadAttention(
        32, 4, attention_dropout=0.0, input_layernorm=True, attn_mask_type=mask, fuse_qkv_params=True
    )
    assert_like(module, expected, 6, 2, 32)


def test_padded_attention(hopper):
    attention = hopper.DotProductAttention(2, 8, attention_dropout=0.0, attn_mask_type="arbitrary", qkv_format="bshd")
    q, k, v = (random(2, 5, 2, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3))
    hidden = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    hidden[0, :, :, 3:] = True  # the first sequence is shorter
    y = attention(q, k, v, attention_mask=hidden)
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=~hidden).transpose(1, 2)
    for actual, wanted in zip(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (y, expected.flatten(2)))):
        torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(y, expected.flatten(2))


@pytest.mark.parametrize("kind", ["scaled", "scaled_masked", "scaled_aligned_causal_masked", "scaled_upper_triang_masked"])
def test_softmax(hopper, kind):
    import transformer_engine_torch as tex

    x = random(2, 3, 5, 5, dtype=torch.float32).requires_grad_()
    hidden = {"scaled": torch.zeros(5, 5), "scaled_masked": torch.eye(5)}.get(kind, torch.ones(5, 5).triu(1)).bool()
    expected = (0.5 * x).masked_fill(hidden, -10000.0).softmax(-1)
    grad = random(2, 3, 5, 5, seed=1, dtype=torch.float32)
    mask = (hidden.expand(2, 1, 5, 5),) if kind == "scaled_masked" else ()
    y = getattr(tex, f"{kind}_softmax_forward")(x.detach(), *mask, 0.5)
    torch.testing.assert_close(y, expected)
    dx = getattr(tex, f"{kind}_softmax_backward")(grad, y, 0.5)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, grad)[0])


def test_grouped_linear(hopper):
    def expected(x, p):
        parts = x.split([3, 0, 5])
        return torch.cat([F.linear(part, p[f"weight{i}"], p[f"bias{i}"]) for i, part in enumerate(parts)])

    module = hopper.GroupedLinear(3, 32, 16)  # the second expert has nothing to do
    forward = module.forward
    module.forward = lambda x: forward(x, [3, 0, 5])
    assert_like(module, expected, 8, 32)


def test_lists_of_tensors(hopper):
    import transformer_engine_torch as tex

    tensors, flag = [random(5, 3, dtype=torch.float32), random(7, seed=1, dtype=torch.float32)], torch.zeros(1, dtype=torch.int)
    norm, each = tex.multi_tensor_l2norm(2048, flag, [tensors], True)
    torch.testing.assert_close(norm[0], torch.cat([t.flatten() for t in tensors]).norm())
    torch.testing.assert_close(each, torch.stack([t.norm() for t in tensors]))
    scaled = [torch.empty_like(t) for t in tensors]
    tex.multi_tensor_scale(2048, flag, [tensors, scaled], 0.5)
    assert all(torch.equal(one, 0.5 * other) for one, other in zip(scaled, tensors))
    assert not flag
    tensors[1][3] = float("inf")
    tex.multi_tensor_scale(2048, flag, [tensors, scaled], 0.5)
    assert flag
