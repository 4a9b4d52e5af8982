"""A small model as pure functions on a pytree, with what makes sharding hard: uneven sizes, biases, a tied leaf, scalars."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fsharp as fs

VOCAB, DIM, HIDDEN = 11, 6, 7


def make_params(seed: int = 0, dtype: torch.dtype = torch.float32, *, layers: int = 2, dim: int = DIM) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * 0.4).to(dtype)

    blocks = []
    for _ in range(layers):
        scale = draw(dim)
        blocks.append({"w": draw(dim, HIDDEN), "v": draw(HIDDEN, dim), "b": draw(dim), "gain": draw(), "s": scale, "t": scale})
    return {"embed": draw(VOCAB, dim), "layers": blocks, "head": {"w": draw(dim, VOCAB), "b": draw(VOCAB)}}


def embed(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, table)


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + p["gain"] * (torch.tanh((x * p["s"]) @ p["w"]) @ p["v"] + p["b"]) * p["t"]


def head(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"]


def logits(params: Any, tokens: torch.Tensor, comm: fs.Comm, *, release: bool = True) -> torch.Tensor:
    x = fs.forward(embed, params["embed"], tokens, comm=comm, release=release)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm, release=release)
    return fs.forward(head, params["head"], x, comm=comm, release=release)


def loss_fn(params: Any, batch: Any, comm: fs.Comm) -> fs.Loss:
    return cross_entropy(logits(params, batch["x"], comm), batch)


def cross_entropy(out: torch.Tensor, batch: Any) -> fs.Loss:
    return fs.Loss((F.cross_entropy(out, batch["y"], reduction="none") * batch["w"]).sum(), batch["w"].sum())


def through(middle: Callable[..., torch.Tensor]) -> Callable[[Any, Any, fs.Comm], fs.Loss]:
    """Make a loss of ``middle(x, layers, batch, comm)``, which comes between the embedding and the head."""

    def loss(params: Any, batch: Any, comm: fs.Comm) -> fs.Loss:
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        x = middle(x, params["layers"], batch, comm)
        return cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch)

    return loss


@through
def in_order(x: torch.Tensor, layers: Any, batch: Any, comm: fs.Comm) -> torch.Tensor:
    """The layers whose numbers the batch brings, in that order."""
    for i in batch["order"]:
        x = fs.forward(block, layers[i], x, comm=comm)
    return x


def plain_logits(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The same model on the user's own tree."""
    x = embed(params["embed"], tokens)
    for layer in params["layers"]:
        x = block(layer, x)
    return head(params["head"], x)


def make_batches(count: int, size: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches with uneven weights: some tokens do not count."""
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randint(0, VOCAB, (size,), generator=g),
            "y": torch.randint(0, VOCAB, (size,), generator=g),
            "w": (torch.rand(size, generator=g) < 0.7).float(),
        }
        for _ in range(count)
    ]
