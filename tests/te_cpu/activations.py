"""Activations, in float32: each has a forward, a backward, and a backward that also returns the gradient of a bias."""

import torch
import torch.nn.functional as F

from .gemm import backward, gelu
from .quantization import bgrad_quantize, in_format_of
from .registry import modelled


def gated(function):
    def gate(x):
        first, second = x.chunk(2, -1)
        return function(first) * second

    return gate


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x):
    return F.relu(x).square()


ACTIVATIONS = {
    "gelu": gelu,
    "geglu": gated(gelu),
    "qgelu": quick_gelu,
    "qgeglu": gated(quick_gelu),
    "relu": F.relu,
    "reglu": gated(F.relu),
    "srelu": squared_relu,
    "sreglu": gated(squared_relu),
    "silu": F.silu,
    "swiglu": gated(F.silu),
    "glu": gated(torch.sigmoid),
}


def register(name, activation):
    def forward(input, quantizer):
        return in_format_of(quantizer, activation(input.detach().float()).to(input.dtype))

    def grad_of_input(grad, fwd_input, quantizer):
        return in_format_of(quantizer, backward(activation, fwd_input, grad).to(fwd_input.dtype))

    def grads_of_bias_and_input(grad, fwd_input, quantizer):
        return bgrad_quantize(backward(activation, fwd_input, grad).to(fwd_input.dtype), quantizer)

    for prefix, function in (("", forward), ("d", grad_of_input), ("dbias_d", grads_of_bias_and_input)):
        function.__name__ = prefix + name
        modelled(function)


for name, activation in ACTIVATIONS.items():
    register(name, activation)
