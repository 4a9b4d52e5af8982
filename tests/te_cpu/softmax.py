"""Softmax of attention scores, in float32; attention itself is TransformerEngine's own Python, without fused kernels."""

import torch

from .registry import modelled


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


@modelled
def scaled_upper_triang_masked_softmax_forward(x, scale):
    return scaled_aligned_causal_masked_softmax_forward(x, scale)


def backward(grad, output, scale):
    grad, output = grad.float(), output.float()
    return scale * output * (grad - (grad * output).sum(-1, keepdim=True))


@modelled
def scaled_softmax_backward(grad, output, scale):
    return backward(grad, output, scale).to(output.dtype)


@modelled
def scaled_masked_softmax_backward(grad, output, scale):
    return backward(grad, output, scale).to(output.dtype)


@modelled
def scaled_aligned_causal_masked_softmax_backward(grad, output, scale):
    return backward(grad, output, scale).to(output.dtype)


@modelled
def scaled_upper_triang_masked_softmax_backward(grad, output, scale):
    return backward(grad, output, scale).to(output.dtype)
