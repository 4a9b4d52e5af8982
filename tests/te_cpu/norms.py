"""LayerNorm and RMSNorm, forward and backward, with statistics in float32."""

import torch

from .quantization import in_format_of
from .registry import modelled
from .rounding import TORCH_DTYPE, matrix


def weight_values(weight, zero_centered_gamma):
    return weight.detach().float() + float(zero_centered_gamma)


@modelled
def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """Return ``[output, mean, 1 / standard deviation]``."""
    x = matrix(input.detach()).float()
    mean = x.mean(1)
    inverse = torch.rsqrt(x.var(1, unbiased=False) + eps)
    y = (x - mean[:, None]) * inverse[:, None] * weight_values(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.detach().float()
    return [in_format_of(quantizer, y.reshape(input.shape).to(TORCH_DTYPE[otype]), ln_out), mean, inverse]


@modelled
def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    """Return the gradients of ``[input, weight, bias]``."""
    grad = matrix(dz.detach()).float()
    normed = (matrix(x.detach()).float() - mu[:, None]) * rsigma[:, None]
    scaled = grad * weight_values(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - scaled.mean(1, keepdim=True) - normed * (scaled * normed).mean(1, keepdim=True))
    return [dx.reshape(x.shape).to(x.dtype), (grad * normed).sum(0).to(gamma.dtype), grad.sum(0).to(gamma.dtype)]


@modelled
def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """Return ``[output, None, 1 / root mean square]``."""
    x = matrix(input.detach()).float()
    inverse = torch.rsqrt(x.square().mean(1) + eps)
    y = x * inverse[:, None] * weight_values(weight, zero_centered_gamma)
    return [in_format_of(quantizer, y.reshape(input.shape).to(TORCH_DTYPE[otype]), ln_out), None, inverse]


@modelled
def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    """Return the gradients of ``[input, weight]``."""
    grad = matrix(dz.detach()).float()
    normed = matrix(x.detach()).float() * rsigma[:, None]
    scaled = grad * weight_values(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(1, keepdim=True))
    return [dx.reshape(x.shape).to(x.dtype), (grad * normed).sum(0).to(gamma.dtype)]
