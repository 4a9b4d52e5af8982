"""Softmax of attention scores, in float32; attention itself is TransformerEngine's own Python, without fused kernels."""

import torch

from .registry import MODELLED, modelled


@modelled
def scaled_softmax_forward(x, scale):
    return (x.float() * scale).softmax(-1).to(x.dtype)


@modelled
def scaled_masked_softmax_forward(x, mask, scale):
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


@modelled
def scaled_aligned_causal_masked_softmax_forward(x, scale):
    queries, keys = x.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return (x.float() * scale).masked_fill(later, float("-inf")).softmax(-1).to(x.dtype)


def backward(grad, output, scale):
    dtype, grad, output = output.dtype, grad.float(), output.float()
    return (scale * output * (grad - (grad * output).sum(-1, keepdim=True))).to(dtype)


MODELLED["scaled_upper_triang_masked_softmax_forward"] = scaled_aligned_causal_masked_softmax_forward
for kind in ("scaled", "scaled_masked", "scaled_aligned_causal_masked", "scaled_upper_triang_masked"):
    MODELLED[f"{kind}_softmax_backward"] = backward
