"""Muon: momentum whose matrices are orthogonalised, each on the rank that holds it whole."""

import math
from typing import Any, Literal

import optree
import torch

from fsharp.errors import LayoutError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.packing import Whole
from fsharp.functional.layout.sharded import map_units, units_of
from fsharp.functional.optim.base import Transform, per_leaf
from fsharp.functional.optim.elementwise import MomentumState, PerPath, ScalarOrSchedule, _text, at


def orthogonalise(matrix: torch.Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Push all singular values of ``matrix`` towards 1 by a quintic Newton-Schulz iteration.

    ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``, from ``X = matrix / |matrix|``. Singular values end up in about
    [0.7, 1.2], which the coefficients trade for speed of convergence.

    Args:
        matrix: ``[m, n]``.
        steps: iterations.
        dtype: in which to iterate.

    Returns:
        ``[m, n]`` in the dtype of ``matrix``.

    Source: Jordan et al., Muon, 2024; the coefficients are theirs, as in ``torch.optim.Muon``.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def muon(
    lr: ScalarOrSchedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: PerPath = 0.1,
    lr_scale: PerPath = 1.0,
    steps: int = 5,
    adjust: Literal["original", "match_rms_adamw"] = "original",
    dtype: torch.dtype = torch.float32,
) -> Transform:
    """Momentum, orthogonalised matrix by matrix, with decoupled weight decay.

    ``m <- momentum * m + (1 - momentum) * g``, ``p <- p - lr * wd * p - lr * scale(shape) * orthogonalise(m)``.

    Args:
        lr: learning rate, or a schedule.
        momentum: decay.
        nesterov: orthogonalise the interpolation of gradient and momentum instead of the momentum.
        weight_decay: per path.
        lr_scale: factor on the learning rate, per path.
        steps: Newton-Schulz iterations.
        adjust: ``"original"`` scales by ``sqrt(max(1, m / n))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(m, n))``.
        dtype: in which to iterate; ``torch.bfloat16`` is much faster on GPUs.

    Returns:
        A transform with :class:`MomentumState`. State: one buffer at the optimizer's place.

    Raises:
        LayoutError: at ``init``: a leaf that is not a matrix, or that may be cut: plan it with ``atoms=Whole()``. Use
            labels and :func:`~fsharp.partition` for the others.

    Cost: no communication: each rank orthogonalises the matrices it holds.
    Source: Jordan et al., Muon, 2024; Moonlight, arXiv 2502.16982, for ``match_rms_adamw``.
    """

    def init(params: Any, /) -> MomentumState:
        _check(params)
        return MomentumState(0, optree.tree_map(torch.zeros_like, params))

    def update(grads: Any, state: MomentumState, params: Any, *, comm: Comm) -> tuple[Any, MomentumState]:
        rate = at(lr, state.count)
        scale, decay = (per_leaf(f"{n}=", params, r) for n, r in (("lr_scale", lr_scale), ("weight_decay", weight_decay)))
        moved = optree.tree_map(lambda m, g: torch.lerp(m, g.to(m.dtype), 1 - momentum), state.momentum, grads)
        ahead = optree.tree_map(lambda g, m: torch.lerp(g.to(m.dtype), m, momentum), grads, moved) if nesterov else moved

        def one(node: Any, parameter: Any) -> Any:
            out = node.replace([torch.zeros_like(b) for b in node.buffers])
            for i, group in enumerate(node.groups):
                for span in node.unit.spans(group, node.place, comm.rank):
                    path, shape = node.unit.full_path(span.leaf), span.leaf.shape
                    part = slice(span.start, span.stop)
                    direction = orthogonalise(node.buffers[i][part].view(shape), steps=steps, dtype=dtype)
                    factor = -rate * scale[path]
                    step = direction.reshape(-1) * (factor * _adjustment(shape, adjust))
                    out.buffers[i][part] = step.add_(parameter.buffers[i][part], alpha=factor * decay[path])
            return out

        return map_units(one, ahead, params), MomentumState(state.count + 1, moved)

    config = _text(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, lr_scale=lr_scale)
    return Transform(init, update, {"muon": {**config, **_text(steps=steps, adjust=adjust, dtype=dtype)}}, name="muon")


def _adjustment(shape: tuple[int, ...], adjust: str) -> float:
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def _check(params: Any) -> None:
    for node in units_of(params):
        for group in node.groups:
            for leaf in node.unit.leaves_of(group):
                name = node.unit.full_path(leaf)
                facts = [("leaf", f"{name}: {list(leaf.shape)}"), ("atom", leaf.atom), ("place", node.place)]
                if len(leaf.shape) != 2:
                    remedy = "Give matrices a label of their own and use partition({'muon': muon(...), 'default': adamw(...)})."
                    raise LayoutError(problem("muon()", f"{name!r} is not a matrix.", facts, remedy))
                if node.place.sharded and not isinstance(leaf.atom, Whole):
                    remedy = f"Plan it with atoms={{{name!r}: Whole()}}."
                    raise LayoutError(problem("muon()", f"{name!r} may be cut between ranks.", facts, remedy))
