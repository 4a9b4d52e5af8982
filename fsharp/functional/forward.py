"""forward: run a pure function on a unit. Gather, call, release; and in the backward gather again, call, reduce."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fsharp.functional.comm import Comm, Engine
from fsharp.functional.errors import TreeError
from fsharp.functional.moves import check_comm, gather, with_handles
from fsharp.functional.sharded import Sharded, is_sharded, map_units, units_of


def forward(
    fn: Callable[..., Any],
    sharded: Any,
    *args: Any,
    comm: Comm,
    ties: Sequence[Sharded] = (),
    release: bool = True,
    **kwargs: Any,
) -> Any:
    """``fn(tree, *args, **kwargs)`` with the unit's subtree gathered.

    Args:
        fn: a pure function of the subtree and other arguments. Randomness in it comes from torch's global generator, or
            from a ``torch.Generator`` that is an argument.
        sharded: a :class:`Sharded`, or a pytree of some, in any place that is not partial; ``fn`` gets the same pytree
            with the user's subtrees in it.
        args: pytrees for ``fn``; tensors among them are differentiated.
        comm: the ranks.
        ties: units that hold leaves to which leaves of this one are tied.
        release: let go of gathered parameters when the call ends; the backward gathers them again and calls ``fn`` again
            (activation recomputation: only the unit's inputs are kept). False keeps them, and what ``fn`` saved, until
            the backward: one gather and one call less, a whole unit's memory more. Without effect where nothing is
            gathered, and under ``torch.func`` transforms, which keep what they need.
        kwargs: more arguments for ``fn``.

    Returns:
        What ``fn`` returns: any pytree; its tensors must not be views of parameters that are released.

    Raises:
        TreeError: nothing sharded was passed, a tied leaf's unit is missing, or, with ``release``, a function that
            closes over tensors to be differentiated or changes its arguments.
        MeshError: ``comm`` is on another mesh.

    Cost: one gather; with ``release`` a second one in the backward, which also calls ``fn`` again. One reduction of
    gradients in the backward.
    """
    if not isinstance(sharded, Sharded):
        check_comm("forward()", sharded, comm)
    units = (sharded, tuple(ties))
    if isinstance(comm, Engine) and comm.takes(units):
        return comm.run_forward(fn, units, args, kwargs)
    call = _Call(fn, comm)
    if not (release and torch.is_grad_enabled() and _is_gathered(units) and not is_transformed()):
        return call(units, args, kwargs)
    inputs: Any = (map_units(lambda x: with_handles(x, comm) if is_sharded(x) else x, units), args, kwargs)
    leaves, spec = optree.tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(t.requires_grad for t in tensors):
        return call(units, args, kwargs)
    _refuse_captured(fn)
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    result = _Result()
    out = _Recompute.apply(_Static(call, spec, others, result), *tensors)
    filled = iter(out)
    return optree.tree_unflatten(result.spec, [next(filled) if hole else leaf for hole, leaf in result.leaves])


def skip(sharded: Any, x: torch.Tensor, *, comm: Comm, ties: Sequence[Sharded] = ()) -> torch.Tensor:
    """``x``, after taking part in the collectives of :func:`forward` on a unit, in this direction and in the backward.

    For a rank that has nothing to compute in a unit that other ranks use, such as an expert without tokens.

    Args:
        sharded: as for :func:`forward`.
        x: any floating-point tensor that the loss depends on: the unit's reduction takes place when the backward comes by.
        comm: the ranks.
        ties: as for :func:`forward`.

    Cost: that of :func:`forward` without the function. Gradient: that of ``x`` passes; the unit's is zero.
    """
    out: torch.Tensor = forward(_nothing, sharded, x, comm=comm, ties=ties)
    return out


def _nothing(tree: Any, x: torch.Tensor) -> torch.Tensor:
    leaves = [leaf for leaf in optree.tree_leaves(tree) if leaf.requires_grad]
    out: torch.Tensor = _Nothing.apply(x, *leaves)
    return out


class _Nothing(torch.autograd.Function):
    """Its first argument; the gradients of the others are zero, and not absent."""

    @staticmethod
    def forward(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cotangents[0], *(torch.zeros_like(leaf) for leaf in ctx.saved_tensors)


class _Call:
    """Gather the units, call the function."""

    def __init__(self, fn: Callable[..., Any], comm: Comm) -> None:
        self.fn, self.comm = fn, comm

    def __call__(self, units: tuple[Any, tuple[Sharded, ...]], args: Any, kwargs: Any) -> Any:
        sharded, ties = gather(units, comm=self.comm)
        owners = (*ties, *units_of(sharded))
        tree = map_units(lambda node: node.tree(owners) if is_sharded(node) else node, sharded)
        return self.fn(tree, *args, **kwargs)


class _Result:
    """Structure and non-tensor leaves of what the function returned; True marks the place of a tensor."""

    spec: optree.PyTreeSpec
    leaves: list[tuple[bool, Any]]


class _Static:
    """What a call needs besides tensors."""

    def __init__(self, call: _Call, spec: optree.PyTreeSpec, others: list[Any], result: _Result) -> None:
        self.call, self.spec, self.others, self.result = call, spec, others, result

    def run(self, tensors: Sequence[torch.Tensor], others: list[Any] | None = None) -> tuple[torch.Tensor, ...]:
        filled = iter(tensors)
        leaves = [next(filled) if leaf is None else leaf for leaf in others or self.others]
        inputs: Any = optree.tree_unflatten(self.spec, leaves)
        out, self.result.spec = optree.tree_flatten(self.call(*inputs))
        self.result.leaves = [(isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x) for x in out]
        return tuple(x for x in out if isinstance(x, torch.Tensor))


class _Ambient:
    """Random state (torch's own and that of generators among the arguments) and autocast of a call.

    Calling again with it computes the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> None:
        self.generators = {i: x.get_state() for i, x in enumerate(others) if isinstance(x, torch.Generator)}
        self.devices = sorted({t.device.index for t in tensors if t.device.type not in ("cpu", "meta")})
        self.cpu = torch.get_rng_state()
        self.device = torch.get_device_module()  # of the accelerator, or of the CPU
        self.on_devices = [self.device.get_rng_state(i) for i in self.devices]
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    def replay(self, static: "_Static", tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        others = list(static.others)
        for i, state in self.generators.items():
            others[i] = torch.Generator(others[i].device)
            others[i].set_state(state)
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            for i, state in zip(self.devices, self.on_devices, strict=True):
                self.device.set_rng_state(state, i)
            (k1, on1, d1), (k2, on2, d2) = self.autocast
            with torch.autocast(k1, dtype=d1, enabled=on1), torch.autocast(k2, dtype=d2, enabled=on2):
                return static.run(tensors, others)


class _Recompute(torch.autograd.Function):
    """Keeps the inputs of a call and nothing else. Its backward calls again; that can itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, static: _Static, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.static, ctx.ambient = static, _Ambient(tensors, static.others)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        versions = [_version(t) for t in tensors]
        out = static.run(tensors)
        if versions != [_version(t) for t in tensors]:
            raise TreeError(
                "forward(): the function changed one of its arguments in place; calling it again in the backward would not "
                "compute the same. Write it as a pure function, or pass release=False."
            )
        ctx.mark_non_differentiable(*(x for x in out if not _is_differentiable(x)))
        return tuple(x.clone() if any(x is t for t in tensors) else x for x in out)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()  # a graph of this backward is wanted
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        with torch.enable_grad():
            inputs = [t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            out = ctx.ambient.replay(ctx.static, inputs)
            pairs = [(y, c) for y, c in zip(out, cotangents, strict=True) if c is not None and y.requires_grad]
            if not pairs:
                return (None,) * (len(inputs) + 1)
            ys, cs = zip(*pairs, strict=True)
            wanted = [inputs[i] for i in needed]
            grads = torch.autograd.grad(ys, wanted, cs, create_graph=again, allow_unused=True)
        result: list[torch.Tensor | None] = [None] * (len(inputs) + 1)
        for i, grad in zip(needed, grads, strict=True):
            result[i + 1] = grad
        return tuple(result)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _refuse_captured(fn: Any) -> None:
    """Refuse a function that closes over tensors to be differentiated: calling it again cannot reach them.

    Raises:
        TreeError: names the variable.
    """
    held: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        held |= {**{f"partial argument {i}": x for i, x in enumerate(fn.args)}, **fn.keywords}
        fn = fn.func
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or ()):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name, value in held.items():
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in optree.tree_leaves(value)):
            raise TreeError(
                f"forward(): the function closes over {name!r}, which requires a gradient and would silently get none. "
                "Pass it as an argument, or pass release=False."
            )


def _is_differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_gathered(units: Any) -> bool:
    """Whether a gather makes anything that could be released."""
    nodes = optree.tree_leaves(units, is_leaf=is_sharded)
    return any(node.unit.mesh.axis_size(axis) > 1 for node in nodes if is_sharded(node) for axis in node.place.sharded)


def is_transformed() -> bool:
    """Whether a torch.func transform is active: its levels own what is saved, and a second call has nothing to free."""
    return bool(torch._C._are_functorch_transforms_active())
