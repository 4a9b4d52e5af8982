"""A Llama-like model for the GPU, written twice: modules that own parameters and pure functions that both ways call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from benchmarks import gpt
from examples.gpt.model import rotary, rotate

Turns = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape(gpt.Shape):
    """Sizes of a model and of a step. ``hidden``: width of the network in a block."""

    hidden: int


LARGE = Shape(vocab=32_000, dim=2048, hidden=5632, layers=24, heads=16, time=2048, batch=4)
"""1.36 billion parameters: the device is busy for longer than the host takes to issue a step."""
SMALL = Shape(vocab=1024, dim=128, hidden=384, layers=32, heads=4, time=64, batch=1)
"""The host cannot issue its kernels as fast as the device runs them."""


class Weights(nn.Module):
    """Parameters under the names by which pure functions know them."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def tree(self) -> dict[str, torch.Tensor]:
        """The parameters, as they are at the moment."""
        return {name: getattr(self, name) for name in self.names}


class Block(Weights):
    """Calls ``function``, which is :func:`block` or what a compiler has made of it."""

    def __init__(self, shape: Shape) -> None:
        d, h = shape.dim, shape.hidden
        super().__init__(norm1=(d,), qkv=(3 * d, d), out=(d, d), norm2=(d,), gate=(h, d), up=(h, d), down=(d, h))
        self.heads, self.function = shape.heads, block

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.function(self.tree(), x, (cos, sin), self.heads)


class Embed(Weights):
    """Calls :func:`embed`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(weight=(shape.vocab, shape.dim))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return embed(self.tree(), inputs)


class Head(Weights):
    """Calls :func:`head`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(norm=(shape.dim,), weight=(shape.vocab, shape.dim))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head(self.tree(), x, targets)


class Llama(nn.Module):
    """Embedding, blocks, head; the forward gives the mean cross-entropy."""

    def __init__(self, shape: Shape, make_block: Callable[[Shape], nn.Module] = Block) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embed(shape)
        self.layers = nn.ModuleList(make_block(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        cos, sin = rotary(inputs.shape[1], self.shape.dim // self.shape.heads, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x, targets)


def build(shape: Shape, *, device: str, dtype: torch.dtype = torch.float32) -> Llama:
    """The module with the same initial values each time."""
    with torch.device(device):
        module = Llama(shape).to(dtype)
    initialize(module, device)
    return module


def initialize(module: nn.Module, device: str) -> None:
    """Fill matrices with the same normal values each time, and vectors with ones."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)
            else:  # drawn in float32 and rounded: the same for every dtype
                values = torch.empty(parameter.shape, device=device).normal_(0, 0.02, generator=generator)
                parameter.copy_(values)


def tree_of(module: Llama) -> dict[str, Any]:
    """The parameters as the tree that :func:`loss` takes; the same memory."""

    def weights(part: Any) -> dict[str, torch.Tensor]:
        return {name: x.detach() for name, x in part.tree().items()}

    return {"embed": weights(module.embed), "layers": [weights(x) for x in module.layers], "head": weights(module.head)}


def embed(p: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """``[batch, time]`` to ``[batch, time, dim]``."""
    return F.embedding(inputs, p["weight"])


def block(p: Mapping[str, torch.Tensor], x: torch.Tensor, turns: Turns, heads: int) -> torch.Tensor:
    """Causal attention with rotary positions, and SwiGLU."""
    d = x.shape[-1]
    x = x + F.linear(attend(F.linear(F.rms_norm(x, (d,), p["norm1"]), p["qkv"]), turns, heads), p["out"])
    h = F.rms_norm(x, (d,), p["norm2"])
    return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])


def attend(qkv: torch.Tensor, turns: Turns, heads: int) -> torch.Tensor:
    """Causal attention: ``[batch, time, 3 * dim]`` to ``[batch, time, dim]``."""
    b, t, width = qkv.shape
    q, k, v = qkv.view(b, t, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
    return attended.transpose(1, 2).reshape(b, t, width // 3)


def head(p: Mapping[str, torch.Tensor], x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in float32."""
    scores = F.linear(F.rms_norm(x, x.shape[-1:], p["norm"]), p["weight"])
    return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def loss(params: Any, batch: Any, comm: fs.Comm, *, heads: int, function: Callable[..., torch.Tensor] = block) -> torch.Tensor:
    """The model over sharded parameters: ``fs.train_step`` takes it. ``function`` is as in :class:`Block`."""
    x = fs.forward(embed, params["embed"], batch["inputs"], comm=comm)
    turns = rotary(x.shape[1], x.shape[2] // heads, x)
    for layer in params["layers"]:
        x = fs.forward(function, layer, x, turns, heads, comm=comm)
    return fs.forward(head, params["head"], x, batch["targets"], comm=comm)


def step_flops(shape: Shape) -> float:
    """Return the floating-point operations of a step's matrix products: forward, and twice as many backward.

    For each token ``6 * weights + 6 * layers * time * dim``: weights are all but the embedding's, which is looked up, and a
    token attends to half of its sequence.
    """
    d, h = shape.dim, shape.hidden
    weights = shape.layers * (4 * d * d + 3 * d * h) + shape.vocab * d
    return shape.batch * shape.time * 6.0 * (weights + shape.layers * shape.time * d)


def batches(shape: Shape, *, device: str) -> list[dict[str, torch.Tensor]]:
    """The sequences of :func:`benchmarks.gpt.batches`, on a device."""
    return [{name: x.to(device) for name, x in batch.items()} for batch in gpt.batches(shape, 0, count=4)]
