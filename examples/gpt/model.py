"""A byte-level GPT as pure functions, one for each kind of unit; parameters are a plain tree of tensors."""

from typing import Any

import torch
import torch.nn.functional as F

import fsharp as fs

VOCAB = 256
IGNORE = -100
"""Target of a position that does not count."""


def shapes(dim: int, layers: int) -> Any:
    """The tree of parameters, without memory."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def layer() -> dict[str, torch.Tensor]:
        return {
            "norm1": empty(dim),
            "qkv": empty(3 * dim, dim),
            "out": empty(dim, dim),
            "norm2": empty(dim),
            "up": empty(4 * dim, dim),
            "down": empty(dim, 4 * dim),
        }

    return {
        "embed": {"weight": empty(VOCAB, dim)},
        "layers": [layer() for _ in range(layers)],
        "head": {"norm": empty(dim), "weight": empty(VOCAB, dim)},
    }


def initializers(dim: int, layers: int) -> dict[str, Any]:
    """Rules for ``fs.init_params``; the last that selects a leaf counts."""
    std = dim**-0.5
    last = std * (2 * layers) ** -0.5  # so that the sum of all branches has the variance of one
    return {
        "**": fs.init.normal(std),
        "layers.*.out": fs.init.normal(last),
        "layers.*.down": fs.init.normal(last / 2),
        "layers.*.norm*": fs.init.ones,
        "head.norm": fs.init.ones,
        "head.weight": fs.init.normal(0.02),
    }


def weight_decay(decay: float) -> dict[str, float]:
    """Decay by path: of matrices, not of gains."""
    return {"**": decay, "layers.*.norm*": 0.0, "head.norm": 0.0}


def embed(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch, time]`` bytes to ``[batch, time, dim]``."""
    return F.embedding(tokens, params["weight"])


def block(params: Any, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], heads: int) -> torch.Tensor:
    """Causal attention and a two-layer network, each added to what it reads."""
    b, t, d = x.shape
    h = F.layer_norm(x, (d,), params["norm1"])
    q, k, v = F.linear(h, params["qkv"]).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(b, t, d), params["out"])
    h = F.layer_norm(x, (d,), params["norm2"])
    return x + F.linear(F.gelu(F.linear(h, params["up"]), approximate="tanh"), params["down"])


def head(params: Any, x: torch.Tensor) -> torch.Tensor:
    """``[batch, time, dim]`` to logits of the next byte."""
    return F.linear(F.layer_norm(x, x.shape[-1:], params["norm"]), params["weight"])


def rotary(time: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of ``position * frequency``, each ``[time, width / 2]``, where ``like`` is and in its dtype."""
    frequency = 10_000 ** -(torch.arange(0, width, 2, device=like.device) / width)
    angles = torch.outer(torch.arange(time, device=like.device), frequency)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn pairs of features by their position, so that attention sees distances. Source: RoFormer, arXiv 2104.09864."""
    cos, sin = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def logits(params: Any, tokens: torch.Tensor, comm: fs.Comm, *, heads: int, release: bool = True) -> torch.Tensor:
    """The whole model: each unit is gathered where it is used, whatever the strategy."""
    x = fs.forward(embed, params["embed"], tokens, comm=comm, release=release)
    turns = rotary(tokens.shape[1], x.shape[-1] // heads, like=x)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, turns, heads, comm=comm, release=release)
    return fs.forward(head, params["head"], x, comm=comm, release=release)


def loss(params: Any, batch: Any, comm: fs.Comm, *, heads: int, release: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropy (nats) of the targets that count, and their number."""
    scores = logits(params, batch["inputs"], comm, heads=heads, release=release)
    targets = batch["targets"]
    total = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()
