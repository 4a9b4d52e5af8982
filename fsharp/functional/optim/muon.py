"""Muon: an optimizer that orthogonalizes the momentum of each matrix, on the rank that holds the whole matrix."""

import math
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError, problem
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.packing import LeafAtom
from fsharp.functional.layout.sharded import map_units, units_of
from fsharp.functional.optim.base import Transform, exact_texts
from fsharp.functional.optim.elementwise import (
    MomentumState,
    PerPath,
    ScalarOrSchedule,
    check_decays,
    numbers_per_leaf,
    schedule_value,
)
from fsharp.type_checks import options_checked

_NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = _NEWTON_SCHULZ_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-8,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Push all singular values of ``matrix`` towards 1 by a quintic Newton-Schulz iteration.

    ``X <- a X + (b A + c A^2) X`` with ``A = X X^T`` and ``coefficients`` ``a``, ``b``, ``c``, from ``X = matrix / (|matrix| +
    eps)``, in ``dtype``. Singular values end up in about [0.7, 1.2], not at 1: the coefficients are chosen for few steps.

    Returns ``[m, n]`` in the dtype of ``matrix``. Source: Jordan et al., Muon, 2024; the coefficients are theirs, as in
    ``torch.optim.Muon``.
    """
    a, b, c = coefficients
    x: torch.Tensor = (matrix / (torch.linalg.vector_norm(matrix) + eps)).to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


@options_checked
def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: tuple[float, float, float] = _NEWTON_SCHULZ_COEFFICIENTS,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    *,
    weight_decay: PerPath = 0.0,
    nesterov: bool = True,
    consistent_rms: float | None = None,
    lr_scale: PerPath = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Transform:
    """Return the Muon optimizer: momentum that is orthogonalized for each matrix, with decoupled weight decay.

    ``m <- beta * m + (1 - beta) * g``, ``p <- p - lr * (scale(shape) * orthogonalize(m') + wd * p)``. In update ``t`` ``m'`` is
    ``m / (1 - beta^t)``, or with ``nesterov`` ``beta * m / (1 - beta^(t + 1)) + (1 - beta) * g / (1 - beta^t)``.

    Matrices are ``[out, in]`` as in torch; in optax and Flax they are ``[in, out]``. So the update of a matrix here is the
    transpose of the update that optax computes for the transposed matrix.

    Args:
        learning_rate: a number, or a schedule.
        ns_coeffs: coefficients of the Newton-Schulz iteration.
        ns_steps: number of iterations.
        beta: decay of the momentum.
        eps: number that is added to the norm by which a matrix is divided first.
        weight_decay: a number, or a rule per path as for :func:`~fsharp.optim.adamw`.
        nesterov: orthogonalize an interpolation of gradient and momentum in place of the momentum.
        consistent_rms: None scales by ``sqrt(max(1, out / in))``; a number scales by ``consistent_rms * sqrt(max(out, in))``.
            With 0.2 updates are as large as those of AdamW.
        lr_scale: factor of the learning rate, as for :func:`~fsharp.optim.adamw`.
        dtype: dtype of the iteration; ``torch.bfloat16`` is much faster on GPUs.

    Returns:
        A transformation with :class:`MomentumState`. Memory: one value of state for each parameter.

    Raises:
        OptionError: ``beta`` is outside of [0, 1).
        LayoutError: in ``init``: a leaf is not a matrix, or is sharded without ``atoms=LeafAtom()`` in its plan.
        PatternError: in the first update: a pattern matches no leaf, or no pattern matches a leaf.

    Cost: no communication: each rank orthogonalizes the matrices that it holds.

    For ``adaptive``, ``preconditioning`` and ``muon_weight_dimension_numbers`` of optax use
    ``fs.optim.from_optax(optax.contrib.muon(...))``; leaves then have to rest whole.

    Source: Jordan et al., Muon, 2024; Moonlight, arXiv 2502.16982, for ``consistent_rms``; ``optax.contrib.muon``.
    """
    check_decays("muon()", beta=beta)

    def init(params: Any, /) -> MomentumState:
        _check_whole_matrices(params)
        return MomentumState(0, optree.tree_map(torch.zeros_like, params))

    def update(grads: Any, state: MomentumState, params: Any, *, comm: Comm) -> tuple[Any, MomentumState]:
        rate, count, rms = schedule_value(learning_rate, state.count), state.count + 1, consistent_rms
        scale, decay = numbers_per_leaf(params, lr_scale=lr_scale, weight_decay=weight_decay).values()
        moved = optree.tree_map(lambda m, g: m * beta + g.to(m.dtype) * (1 - beta), state.mu, grads)
        part, rest = beta / (1 - beta ** (count + 1)), (1 - beta) / (1 - beta**count)
        if nesterov:
            seen = optree.tree_map(lambda m, g: m * part + g.to(m.dtype) * rest, moved, grads)
        else:
            seen = optree.tree_map(lambda m: m / (1 - beta**count), moved)

        def update_node(node: Any, parameter: Any) -> Any:
            out = node.replace([torch.zeros_like(b) for b in node.buffers])
            for i, group in enumerate(node.groups):
                for span in node.unit.leaf_spans(group, node.place, comm.rank):
                    path, shape = node.unit.path_in_tree(span.leaf), span.leaf.shape
                    place = slice(span.start, span.stop)
                    direction = orthogonalize(
                        node.buffers[i][place].view(shape), coefficients=ns_coeffs, steps=ns_steps, eps=eps, dtype=dtype
                    )
                    factor = -rate * scale[path]
                    rows, columns = shape
                    size = math.sqrt(max(1.0, rows / columns)) if rms is None else rms * math.sqrt(max(rows, columns))
                    step = direction.reshape(-1) * (factor * size)
                    out.buffers[i][place] = step.add_(parameter.buffers[i][place], alpha=factor * decay[path])
            return out

        return map_units(update_node, seen, params), MomentumState(count, moved)

    settings = {"ns_coeffs": ns_coeffs, "ns_steps": ns_steps, "beta": beta, "eps": eps, "weight_decay": weight_decay}
    settings |= {"nesterov": nesterov, "consistent_rms": consistent_rms, "lr_scale": lr_scale, "dtype": dtype}
    return Transform(init, update, {"muon": exact_texts(learning_rate=learning_rate, **settings)}, name="muon")


def _check_whole_matrices(params: Any) -> None:
    for node in units_of(params):
        for group in node.groups:
            for leaf in node.unit.leaves_of_group(group):
                name = node.unit.path_in_tree(leaf)
                facts = [("leaf", f"{name}: {list(leaf.shape)}"), ("atom", leaf.atom), ("place", node.place)]
                if len(leaf.shape) != 2:
                    remedy = "Give matrices a label of their own, by plan(labels={pattern: 'muon', ...}), and use "
                    remedy += "partition({'muon': muon(...), 'default': adamw(...)})."
                    raise LayoutError(problem("muon()", f"{name!r} is not a matrix.", facts, remedy))
                if node.place.sharded_axes and not isinstance(leaf.atom, LeafAtom):
                    remedy = f"Plan it with atoms={{{name!r}: LeafAtom()}}."
                    raise LayoutError(problem("muon()", f"{name!r} may be cut between ranks.", facts, remedy))
