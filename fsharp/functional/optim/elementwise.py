"""Adam, AdamW, SGD and Lion on flat buffers: fused kernels where torch has them, hyper-parameters per path.

[Note: whole vectors]
torch's fused CPU kernels compute the last elements of a tensor, which do not fill a SIMD vector, by scalar code. This code may
round differently. The end of a buffer depends on the sharding. So kernels here get only whole vectors: remainders are copied
to a padded scratch tensor. Then an element's update depends on the element alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import OptionError, TreeError
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import Sharded, units_of
from fsharp.functional.optim.base import Transform, exact_texts, value_per_leaf
from fsharp.type_checks import options_checked

ScalarOrSchedule = float | Callable[[int], float]
"""A number, or a function from the number of updates so far to a number."""
PerPath = float | Mapping[str, float] | Callable[[str], float]
"""A number; numbers by path pattern, of which the last match counts; or a function from a leaf's path to a number."""

_shape_of = attrgetter("shape")
_VECTOR_NBYTES = 128  # torch's loops take two of the widest SIMD registers at once


class AdamState(NamedTuple):
    """State of :func:`adam`, :func:`adamw` and :func:`~fsharp.optim.scale_by_adam`: number of updates, and both moments."""

    count: int | torch.Tensor  # type: ignore[assignment]  # tuple.count, which nobody calls on a state
    mu: Any
    nu: Any


class MomentumState(NamedTuple):
    """State of :func:`sgd`, :func:`lion` and :func:`~fsharp.optim.muon`: number of updates, and the momentum or None."""

    count: int  # type: ignore[assignment]  # tuple.count, which nobody calls on a state
    mu: Any


def schedule_value(schedule: ScalarOrSchedule, count: Any, name: str = "learning_rate") -> Any:
    """Return the value of ``schedule`` after ``count`` updates: a tensor if ``count`` and the value are tensors, else a float.

    Raises OptionError, with ``name``, if the value is not a finite number. A tensor is not checked: the host would wait for it.
    """
    value: Any = schedule(count) if callable(schedule) else schedule
    return value if isinstance(count, torch.Tensor) and isinstance(value, torch.Tensor) else as_float(name, count, value)


def as_float(option: str, argument: Any, value: Any) -> float:
    """Return ``value`` as a float: the value of an optimizer's ``option``, such as "lr_scale", for a path or a step count.

    Raises OptionError, with ``option`` and ``argument``, the path or step count, if ``value`` is not a number, or is infinite
    or NaN. An update with such a value would destroy all parameters.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"update(): {option}({argument!r}) is {value!r:.80}, expected a number.") from error
    if not math.isfinite(number):
        raise OptionError(f"update(): {option}({argument!r}) is {number}, expected a finite number.")
    return number


def check_decays(where: str, **decays: float) -> None:
    """Raise an OptionError if one of ``decays`` is outside of [0, 1)."""
    for name, decay in decays.items():
        if not 0 <= decay < 1:
            raise OptionError(f"{where}: {name} is {decay!r}, expected a number in [0, 1).")


def numbers_per_leaf(params: Any, **rules: PerPath) -> dict[str, dict[str, float]]:
    """Return, by name of a rule and by path, the number that the rule gives to each leaf of ``params``."""
    return {
        name: {path: as_float(name, path, value) for path, value in value_per_leaf(f"{name}=", params, rule).items()}
        for name, rule in rules.items()
    }


@options_checked
def adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    lr_scale: PerPath = 1.0,
    capturable: bool = False,
) -> Transform:
    """Return the Adam optimizer: :func:`adamw` without weight decay.

    Args:
        learning_rate: a number, or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: number that is added to the square root.
        lr_scale: factor of the learning rate, as for :func:`adamw`.
        capturable: as for :func:`adamw`.

    Raises the errors of :func:`adamw`.
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay=0.0, lr_scale=lr_scale, capturable=capturable)


@options_checked
def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: PerPath = 1e-4,
    lr_scale: PerPath = 1.0,
    capturable: bool = False,
) -> Transform:
    """Return the AdamW optimizer: Adam with decoupled weight decay.

    ``p <- p - lr * (wd * p + m' / (sqrt(v') + eps))`` with bias-corrected moments ``m'``, ``v'`` of the gradient.

    Args:
        learning_rate: a number, or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: number that is added to the square root.
        weight_decay: a number, or a rule per path. A dict has numbers by path pattern, of which the last match counts:
            ``{"**": 0.1, "**.bias": 0.0}``, in place of optax's ``mask``. A function gets the path of a leaf, not a step count.
            The default of ``torch.optim.AdamW`` is 0.01.
        lr_scale: factor of the learning rate: a number, or a rule per path.
        capturable: keep the step count in a float32 tensor on the parameters' device, for CUDA graphs. A schedule is then
            called with this tensor: schedules of ``fs.optim`` take tensors, those of optax do not.

    Returns:
        A transformation with :class:`AdamState`. Memory: two values of state for each parameter, sharded as optimizer state.

    Raises:
        OptionError: ``b1`` or ``b2`` is outside of [0, 1).
        PatternError: in ``init``: a pattern matches no leaf, or no pattern matches a leaf.

    For ``eps_root``, ``mu_dtype`` and ``nesterov`` of optax use ``fs.optim.from_optax(optax.adamw(...))``.

    Source: Loshchilov and Hutter, arXiv 1711.05101. The kernel is torch's fused one: except for elements at the end of a
    tensor, one rank is bitwise equal to ``torch.optim.AdamW(fused=True)``. Names and defaults are those of ``optax.adamw``.
    """
    check_decays("adamw()", b1=b1, b2=b2)

    def init(params: Any, /) -> AdamState:
        device = next((x.device for x in optree.tree_leaves(params) if isinstance(x, torch.Tensor)), torch.device("cpu"))
        count = torch.zeros((), dtype=torch.float32, device=device) if capturable else 0
        return AdamState(count, optree.tree_map(torch.zeros_like, params), optree.tree_map(torch.zeros_like, params))

    def step(grads: Any, state: AdamState, params: Any, decays: PerPath, *, comm: Comm, donate: bool) -> tuple[Any, AdamState]:
        before = state.count
        rate = schedule_value(learning_rate, before)
        count = before.add_(1) if donate and isinstance(before, torch.Tensor) else before + 1
        params, mu, nu = _copy_unless_donated(donate, params, state.mu, state.nu)

        def kernel(lists: Sequence[list[torch.Tensor]], scale: float, decay: float) -> None:
            p, g, m, v = lists
            taken = count if isinstance(count, torch.Tensor) else torch.full((), count, dtype=torch.float32, device=p[0].device)
            steps = [taken] * len(p)
            lr = rate * scale
            torch._fused_adamw_(
                p, g, m, v, [], steps,
                lr=lr.float() if isinstance(lr, torch.Tensor) else lr,  # the CUDA kernel reads float32
                beta1=b1, beta2=b2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip

        _call_per_scale_and_decay(kernel, (params, grads, mu, nu), comm.rank, lr_scale, decays)
        return params, AdamState(count, mu, nu)

    settings = {"b1": b1, "b2": b2, "eps": eps} | ({"capturable": True} if capturable else {})
    return _in_place_transform("adamw", init, step, learning_rate, weight_decay, lr_scale, settings)


@options_checked
def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    *,
    weight_decay: PerPath = 0.0,
    lr_scale: PerPath = 1.0,
) -> Transform:
    """Return stochastic gradient descent with momentum and L2 weight decay.

    ``m <- momentum * m + g + wd * p``, ``p <- p - lr * m``; as ``torch.optim.SGD`` without dampening.

    Args:
        learning_rate: a number, or a schedule.
        momentum: decay of the momentum; None means no momentum, and no state except the step count.
        nesterov: use Nesterov momentum; without ``momentum`` this changes nothing.
        weight_decay: a number, or a rule per path as for :func:`adamw`. It is added to gradients. ``optax.sgd`` has none.
        lr_scale: factor of the learning rate, as for :func:`adamw`.

    Returns:
        A transformation with :class:`MomentumState`. Memory: with momentum one value of state for each parameter.

    Raises:
        PatternError: in ``init``: a pattern matches no leaf, or no pattern matches a leaf.

    For ``accumulator_dtype`` of optax use ``fs.optim.from_optax(optax.sgd(...))``.
    """

    def init(params: Any, /) -> MomentumState:
        return MomentumState(0, None if momentum is None else optree.tree_map(torch.zeros_like, params))

    def step(grads: Any, state: MomentumState, params: Any, decays: PerPath, *, comm: Comm, donate: bool) -> Any:
        trees = (params,) if momentum is None else (params, state.mu)
        params, *buffers = _copy_unless_donated(donate, *trees)
        rate = schedule_value(learning_rate, state.count)

        def kernel(lists: Sequence[list[torch.Tensor]], scale: float, decay: float) -> None:
            if lists[0][0].device.type == "cpu" and lists[0][0].itemsize == 2:
                # torch leaves parameters of 16 bits as they are: https://github.com/pytorch/pytorch/issues/191763
                wide = [[x.float() for x in column] for column in lists]
                kernel(wide, scale, decay)
                for column, result in zip((lists[0], *lists[2:]), (wide[0], *wide[2:]), strict=True):
                    for x, y in zip(column, result, strict=True):
                        x.copy_(y)
                return
            p, g, *m = lists
            if momentum == 0:  # no momentum buffer for the kernel: the momentum is the gradient
                for x, y, w in zip(*m, g, p, strict=True):
                    x.copy_(y + w * decay)
            torch._fused_sgd_(
                p, g, m[0] if momentum else [],
                weight_decay=decay, momentum=momentum or 0.0, lr=rate * scale, dampening=0.0,
                nesterov=nesterov and bool(momentum), maximize=False, is_first_step=False,
            )  # fmt: skip

        _call_per_scale_and_decay(kernel, (params, grads, *buffers), comm.rank, lr_scale, decays)
        return params, MomentumState(state.count + 1, buffers[0] if buffers else None)

    settings = {"momentum": momentum, "nesterov": nesterov}
    tx = _in_place_transform("sgd", init, step, learning_rate, weight_decay, lr_scale, settings, is_decoupled=False)
    return tx if momentum is None else replace(tx, name="sgd with momentum")


@options_checked
def lion(
    learning_rate: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.99, *, weight_decay: PerPath = 1e-3, lr_scale: PerPath = 1.0
) -> Transform:
    """Return the Lion optimizer: the sign of an interpolated momentum, with decoupled weight decay.

    ``p <- p - lr * (sign(b1 * m + (1 - b1) * g) + wd * p)``, then ``m <- b2 * m + (1 - b2) * g``.

    Args:
        learning_rate: a number, or a schedule.
        b1: weight of the momentum in the sum whose sign is taken.
        b2: decay of the momentum.
        weight_decay: a number, or a rule per path as for :func:`adamw`.
        lr_scale: factor of the learning rate, as for :func:`adamw`.

    Returns:
        A transformation with :class:`MomentumState`. Memory: one value of state for each parameter.

    Raises:
        OptionError: ``b1`` or ``b2`` is outside of [0, 1).
        PatternError: in ``init``: a pattern matches no leaf, or no pattern matches a leaf.

    For ``mu_dtype`` of optax use ``fs.optim.from_optax(optax.lion(...))``.

    Source: Chen et al., arXiv 2302.06675, algorithm 2. Names and defaults are those of ``optax.lion``.
    """
    check_decays("lion()", b1=b1, b2=b2)

    def init(params: Any, /) -> MomentumState:
        return MomentumState(0, optree.tree_map(torch.zeros_like, params))

    def step(grads: Any, state: MomentumState, params: Any, decays: PerPath, *, comm: Comm, donate: bool) -> Any:
        params, momentum = _copy_unless_donated(donate, params, state.mu)
        rate = schedule_value(learning_rate, state.count)

        def kernel(lists: Sequence[list[torch.Tensor]], scale: float, decay: float) -> None:
            for p, g, m in zip(*lists, strict=True):
                direction = torch.lerp(g, m, b1)
                is_nan = direction.isnan()
                direction.sign_().masked_fill_(is_nan, math.nan)  # torch's sign of a NaN is 0
                p.mul_(1 - rate * scale * decay).sub_(direction, alpha=rate * scale)
                m.lerp_(g, 1 - b2)

        _call_per_scale_and_decay(kernel, (params, grads, momentum), comm.rank, lr_scale, decays)
        return params, MomentumState(state.count + 1, momentum)

    return _in_place_transform("lion", init, step, learning_rate, weight_decay, lr_scale, {"b1": b1, "b2": b2})


def _in_place_transform(
    name: str,
    init: Any,
    step: Callable[..., tuple[Any, Any]],
    learning_rate: ScalarOrSchedule,
    weight_decay: PerPath,
    lr_scale: PerPath,
    settings: Mapping[str, Any],
    *,
    is_decoupled: bool = True,
) -> Transform:
    """Return a transformation made of ``step``, which runs a kernel on parameters: in place if they are donated.

    ``apply`` runs ``step`` on the parameters. ``update`` runs ``step`` on zeros, and returns the results as updates: new
    minus old parameters would lose digits. On zeros ``step`` cannot decay. So ``update`` adds weight decay to the updates, or
    to gradients if not ``is_decoupled``.
    """

    def checked_init(params: Any, /) -> Any:
        numbers_per_leaf(params, lr_scale=lr_scale, weight_decay=weight_decay)
        return init(params)

    def apply(grads: Any, state: Any, params: Any, *, comm: Comm, donate: bool) -> tuple[Any, Any]:
        return step(grads, state, params, weight_decay, comm=comm, donate=donate)

    def update(grads: Any, state: Any, params: Any, *, comm: Comm) -> tuple[Any, Any]:
        if not is_decoupled:
            grads = optree.tree_map(lambda g, p: g.to(p.dtype, copy=True), grads, params)
            grads = add_scaled_parameters_(grads, params, 1.0, comm.rank, 1.0, weight_decay)
        updates, new = step(grads, state, optree.tree_map(torch.zeros_like, params), 0.0, comm=comm, donate=False)
        if is_decoupled:
            rate = schedule_value(learning_rate, state.count)
            updates = add_scaled_parameters_(updates, params, -rate, comm.rank, lr_scale, weight_decay)
        return updates, new

    texts = exact_texts(learning_rate=learning_rate, **settings, weight_decay=weight_decay, lr_scale=lr_scale)
    return Transform(checked_init, update, {name: texts}, apply, name)


def add_scaled_parameters_(tree: Any, params: Any, factor: Any, rank: int, lr_scale: PerPath, weight_decay: PerPath) -> Any:
    """Add ``factor * lr_scale * weight_decay * params`` to ``tree`` in place, and return ``tree``."""

    def kernel(lists: Sequence[list[torch.Tensor]], scale: float, decay: float) -> None:
        for x, p in zip(*lists, strict=True):
            x.add_(p * (factor * scale * decay))

    _call_per_scale_and_decay(kernel, (tree, params), rank, lr_scale, weight_decay)
    return tree


def _copy_unless_donated(donate: bool, *trees: Any) -> list[Any]:
    return list(trees) if donate else [optree.tree_map(torch.clone, tree) for tree in trees]


def _call_per_scale_and_decay(
    kernel: Callable[..., None], trees: tuple[Any, ...], rank: int, lr_scale: PerPath, weight_decay: PerPath
) -> None:
    """Call ``kernel(lists, scale, decay)`` for all elements with the same learning rate scale and the same weight decay.

    ``trees``: the tree that changes, such as parameters; then gradients; then trees of state. The kernel is called once for
    each pair ``(scale, decay)`` and each dtype of the first tree. ``lists[i]`` has the slices of buffers of ``trees[i]`` with
    this pair. Gradients are cast to the dtype. The kernel may overwrite all slices except those of gradients.

    Raises a TreeError if the trees differ in units, places, groups or sizes, as kernels would write beyond buffers.
    """
    of_trees = [units_of(tree) for tree in trees]
    expected, *others = (
        [(node.unit, node.place, node.groups, [*map(_shape_of, node.raw_buffers)]) for node in nodes] for nodes in of_trees
    )
    if any(other != expected for other in others):
        raise TreeError(
            "update(): the optimizer state is that of other parameters, another layout, or another transformation. "
            "Make one for these: init_state(tx, params, comm=comm)."
        )
    uniform = None
    if isinstance(lr_scale, int | float) and isinstance(weight_decay, int | float):
        uniform = (float(lr_scale), float(weight_decay))
    tables = {} if uniform else numbers_per_leaf(trees[0], lr_scale=lr_scale, weight_decay=weight_decay)
    by_value: dict[tuple[float, float], list[list[torch.Tensor]]] = {}
    for nodes in zip(*of_trees, strict=True):
        rows = [node.raw_buffers if node.lazy is None else node.buffers for node in nodes]
        for group, *row in zip(nodes[0].groups, *rows, strict=True):
            row[1] = row[1].to(row[0].dtype)
            for value, start, stop in (
                [(uniform, 0, row[0].numel())] if uniform else _hyperparameter_runs(nodes[0], group, rank, tables)
            ):
                if value not in by_value:
                    by_value[value] = [[] for _ in row]
                if start < stop:
                    for x, into in zip(row, by_value[value], strict=True):
                        into.append(x if stop - start == x.numel() else x[start:stop])
    for (scale, decay), lists in by_value.items():
        run = partial(kernel, scale=scale, decay=decay)
        for dtype in dict.fromkeys([x.dtype for x in lists[0]]):
            chosen = [j for j, x in enumerate(lists[0]) if x.dtype is dtype]
            _run_in_whole_vectors(run, [[column[j] for j in chosen] for column in lists])


def _hyperparameter_runs(node: Sharded, group: int, rank: int, tables: Mapping[str, Mapping[str, float]]) -> list[Any]:
    """Return rows ``((scale, decay), start, stop)`` that cover a buffer with its padding; no rows for padding alone.

    ``tables`` has two dicts from paths to values, by the keys ``"lr_scale"`` and ``"weight_decay"``.
    """
    starts: list[tuple[tuple[float, float], int]] = []
    for span in node.unit.leaf_spans(group, node.place, rank):
        path = node.unit.path_in_tree(span.leaf)
        value = (tables["lr_scale"][path], tables["weight_decay"][path])
        if not starts or starts[-1][0] != value:
            starts.append((value, span.start if starts else 0))
    stops = [*(start for _, start in starts[1:]), node.unit.local_size(group, node.place)]
    return [(value, start, stop) for (value, start), stop in zip(starts, stops, strict=False)]


def _run_in_whole_vectors(kernel: Callable[[Sequence[list[torch.Tensor]]], None], lists: list[list[torch.Tensor]]) -> None:
    """Run an in-place kernel on ``lists``. On a CPU the kernel only gets whole SIMD vectors: see [Note: whole vectors].

    The remaining elements at the ends of tensors are copied to one padded tensor for each list. The kernel runs on this tensor
    too, and the results are copied back, except for ``lists[1]``, the gradients.
    """
    vector = _VECTOR_NBYTES // lists[0][0].itemsize
    rests = [x.numel() % vector for x in lists[0]]
    if lists[0][0].device.type != "cpu" or not any(rests):
        kernel(lists)
        return
    cuts = [x.numel() - rest for x, rest in zip(lists[0], rests, strict=True)]
    bodies = [[x if cut == x.numel() else x[:cut] for x, cut in zip(column, cuts, strict=True) if cut] for column in lists]
    tails = [[x[cut:] for x, cut in zip(column, cuts, strict=True) if cut < x.numel()] for column in lists]
    scratch = []
    for body, column in zip(bodies, tails, strict=True):
        joined = torch.cat(column)
        scratch.append(torch.nn.functional.pad(joined, (0, -joined.numel() % vector)))
        body.append(scratch[-1])
    kernel(bodies)
    for k, column in enumerate(tails):
        if k != 1:
            sizes = [x.numel() for x in column]
            for x, piece in zip(column, scratch[k][: sum(sizes)].split(sizes), strict=True):
                x.copy_(piece)
