"""One GPT, written twice: as an ``nn.Module`` for the peers and as pure functions. Both call the same kernels in one order."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and of what one rank computes in a step."""

    vocab: int = 256
    dim: int = 384
    layers: int = 6
    heads: int = 6
    time: int = 128
    batch: int = 4


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to what it reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, self.heads = shape.dim, shape.heads
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Embedding, blocks, head; the forward gives the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(shape.time, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=False)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(shape: Shape, seed: int = 0) -> GPT:
    """The module with initial values that depend on the seed alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        module = GPT(shape)
    scale = shape.dim**-0.5
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            generator = torch.Generator().manual_seed(seed + sum(name.encode()))
            with torch.no_grad():
                parameter.normal_(0, 0.02 if "head" in name else scale, generator=generator)
    return module


def tree_of(module: GPT) -> dict[str, Any]:
    """The module's parameters as the tree that the pure functions take; the same memory."""

    def weights(parent: nn.Module, *names: str) -> dict[str, torch.Tensor]:
        return {name: parent.get_submodule(name).weight.detach() for name in names}

    return {
        "embed": weights(module, "tokens", "positions"),
        "layers": [weights(block, "norm1", "qkv", "out", "norm2", "up", "down") for block in module.blocks],
        "head": weights(module, "norm", "head"),
    }


def embed(params: Any, inputs: torch.Tensor) -> torch.Tensor:
    """``[batch, time]`` tokens to ``[batch, time, dim]``."""
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    return F.embedding(inputs, params["tokens"]) + F.embedding(positions, params["positions"])


def block(params: Any, x: torch.Tensor, *, heads: int) -> torch.Tensor:
    """:class:`Block` as a pure function."""
    b, t, d = x.shape
    h = F.linear(F.layer_norm(x, (d,), params["norm1"]), params["qkv"])
    q, k, v = h.view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(b, t, d), params["out"])
    h = F.linear(F.layer_norm(x, (d,), params["norm2"]), params["up"])
    return x + F.linear(F.gelu(h, approximate="tanh"), params["down"])


def head(params: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    scores = F.linear(F.layer_norm(x, x.shape[-1:], params["norm"]), params["head"])
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def loss(params: Any, batch: Any, comm: fs.Comm, *, heads: int, remat: bool = False) -> torch.Tensor:
    """The model over sharded parameters: ``fs.train_step`` takes it. ``remat``: recompute all activations in the backward."""
    one_block = partial(block, heads=heads)
    x = fs.forward(embed, params["embed"], batch["inputs"], comm=comm, remat=remat)
    for layer in params["layers"]:
        x = fs.forward(one_block, layer, x, comm=comm, remat=remat)
    return fs.forward(head, params["head"], x, batch["targets"], comm=comm, remat=remat)


def plain_loss(params: Any, batch: Any, *, heads: int) -> torch.Tensor:
    """The same functions on a tree of ordinary tensors."""
    x = embed(params["embed"], batch["inputs"])
    for layer in params["layers"]:
        x = block(layer, x, heads=heads)
    return head(params["head"], x, batch["targets"])


def batches(shape: Shape, rank: int, count: int = 8) -> list[dict[str, torch.Tensor]]:
    """Sequences that count in strides which the model has to find out: a rank's own, the same in every run."""
    generator = torch.Generator().manual_seed(1 + rank)
    result = []
    for _ in range(count):
        start, stride = (torch.randint(1, shape.vocab, (shape.batch, 1), generator=generator) for _ in range(2))
        tokens = (start + stride * torch.arange(shape.time + 1)) % shape.vocab
        result.append({"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return result
