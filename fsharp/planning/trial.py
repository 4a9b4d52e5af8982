"""Trial: run a loss or a module once, to record its uses of units, with the FLOPs and kept bytes of each use.

A trial on meta tensors takes no memory and computes nothing: it counts FLOPs and bytes. A trial on a device runs one call of
each kind of unit, with random values, and measures seconds and bytes.
"""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import optree
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsharp.errors import FsharpError, ScheduleError, problem
from fsharp.functional.comm.protocol import Engine, SingleComm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.sharded import Sharded, is_sharded, units_of
from fsharp.functional.layout.slicing import shard_for
from fsharp.functional.loss import split_batch
from fsharp.planning.plan_step import ROOT, Use, use_of_units, walk_nested_uses

_NUM_MEASUREMENTS = 3
_META_REMEDY = (
    "If the code makes tensors, make them on the device of its inputs (device=x.device). If it reads values, pass "
    "batch=number of tokens, and order= and activations= yourself."
)
_HOLDS_TENSORS_REMEDY = "If the arguments are objects that hold tensors, such as a cache, turn them off, or leave out device=."


@dataclass(eq=False)
class UnitCall:
    """One call that uses units, in a trial.

    Attributes:
        units: names of the units that the call uses; units that own tied leaves come before units that share them.
        fn: the called function, which takes ``operands`` or other tensors.
        operands: parameters and arguments, with tensors on the meta device.
        ties: names of units that the call gathers only because leaves of its other units are tied to their leaves.
        inner: the calls inside of this call.
        has_backward: whether a backward reaches the call.
        flops: FLOPs of the forward, without those of inner calls.
        kept_nbytes: bytes that autograd keeps for the backward. Parameters, inner calls, and tensors that an earlier call keeps
            do not count.
        input_nbytes: bytes of the tensors in the arguments, which a recomputation needs.
        known_inputs: for each tensor in the arguments, whether the tensor is part of the batch, or is kept by an earlier call.
        forward_s: measured seconds of the forward; nan without a measurement.
        backward_s: measured seconds of the backward.
        recompute_s: measured seconds by which forward and backward take longer if a checkpoint recomputes the call.
    """

    units: tuple[str, ...]
    fn: Callable[..., Any]
    operands: Any
    ties: tuple[str, ...] = ()
    inner: list["UnitCall"] = field(default_factory=list)
    has_backward: bool = True
    flops: float = 0.0
    kept_nbytes: int = 0
    input_nbytes: int = 0
    known_inputs: tuple[bool, ...] = ()
    forward_s: float = float("nan")
    backward_s: float = float("nan")
    recompute_s: float = float("nan")

    @property
    def planned_use(self) -> Use:
        """The use for :func:`~fsharp.schedules.plan_step`."""
        return Use(self.units, tuple(each.planned_use for each in self.inner), self.has_backward, self.ties)

    def set_has_backward(self, results: Any) -> None:
        """Record whether a backward may reach the call: one of its results requires a gradient, or is no tensor."""
        leaves = optree.tree_leaves(results)  # an object that is no pytree may hold tensors
        self.has_backward = any(not isinstance(x, torch.Tensor) or x.requires_grad for x in leaves)

    def set_known_inputs(self, known: Iterable[bool]) -> None:
        """Set :attr:`known_inputs`: which tensors in the arguments are part of the batch, or are kept by an earlier call."""
        self.known_inputs = tuple(known)

    def add_kept_nbytes(self, nbytes: int) -> None:
        """Count bytes that autograd keeps."""
        self.kept_nbytes += nbytes

    def add_forward(self, flops: float, input_nbytes: int) -> None:
        """Add a forward. ``flops``: FLOPs with those of inner calls, which are subtracted. ``input_nbytes``: of arguments."""
        self.flops += flops - sum(each.flops for each in walk_nested_uses(self.inner))
        self.input_nbytes += input_nbytes

    def set_measured(self, forward_s: float, backward_s: float, recompute_s: float, *, kept_nbytes: int) -> None:
        """Set the values that a run on a device has measured."""
        self.forward_s, self.backward_s, self.recompute_s, self.kept_nbytes = forward_s, backward_s, recompute_s, kept_nbytes


class _CallRecorder:
    """A record of the calls of a trial, and of the bytes that autograd keeps for each. ``calls``: the outermost calls."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self.calls: list[UnitCall] = []
        self._open: list[UnitCall] = []
        self._flops = FlopCounterMode(display=False)
        self._seen: dict[Any, torch.Tensor] = {}
        self.add_known(known)

    def add_known(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors that do not count as kept for the backward, such as parameters."""
        self._seen |= {_storage_key(x): x for x in tensors}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count FLOPs, and the bytes that autograd keeps, in this context. Calls can be recorded only here."""
        with saved_tensors_hooks(self._count_kept, lambda x: x), self._flops:
            self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
            yield

    @contextmanager
    def record_call(self, call: UnitCall, inputs: Any) -> Iterator[None]:
        """Record ``call``, whose function runs in this context, with the bytes of its ``inputs``."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) != self._hooks:
            what = f"unit {call.units[-1] or '(root)'!r} is used in a checkpoint, or by forward(remat=)."
            raise ScheduleError(problem("tune()", what, remedy="Leave it out: tune() itself tries recomputation."))
        (self._open[-1].inner if self._open else self.calls).append(call)
        tensors = _tensor_leaves(inputs)
        call.set_known_inputs(_storage_key(x) in self._seen for x in tensors)
        input_nbytes = sum(map(_storage_nbytes, {_storage_key(x): x for x in tensors}.values()))
        before = self._flops.get_total_flops()
        self._open.append(call)
        try:
            yield
        finally:
            self._open.pop()
            call.add_forward(self._flops.get_total_flops() - before, input_nbytes)

    def _count_kept(self, x: torch.Tensor) -> torch.Tensor:
        key = _storage_key(x)
        if key not in self._seen and self._open:
            self._seen[key] = x
            self._open[-1].add_kept_nbytes(_storage_nbytes(x))
        return x


class _TrialComm(SingleComm):
    """A Comm of one rank on the meta device, with an Engine that records calls."""

    def __init__(self, mesh: Mesh, recorder: _CallRecorder) -> None:
        super().__init__(mesh, device="meta")
        self.engine = _TrialEngine(recorder)


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ScheduleError(f"tune(): loss_fn calls {name}(). Pass the loss alone, as for fs.train_step.")

    return refuse


class _TrialEngine(Engine):
    """An Engine that records calls of :func:`~fsharp.forward`, and runs their functions on meta tensors."""

    def __init__(self, recorder: _CallRecorder) -> None:
        self._recorder = recorder

    def handles_forward(self, sharded: Any, ties: Any) -> bool:
        return True

    def run_forward(self, fn: Callable[..., Any], sharded: Any, ties: Any, args: Any, kwargs: Any) -> Any:
        nodes = [*ties, *units_of(sharded)]
        trees = optree.tree_map(lambda node: _meta_subtree_with_grad(node, nodes), sharded, is_leaf=is_sharded)
        self._recorder.add_known(_tensor_leaves(trees))
        ties_only = tuple(node.name for node in ties)
        call = UnitCall(tuple(node.name for node in nodes), fn, (trees, args, kwargs), ties_only)
        with self._recorder.record_call(call, (args, kwargs)):
            out = fn(trees, *args, **kwargs)
            call.set_has_backward(out)
            return out

    def report_failure(self, error: Exception, where: str) -> None:
        raise error

    run_value_and_grad = _refusing("value_and_grad")
    run_reduce_scatter = _refusing("reduce_scatter")
    begin_state_fetch = gather_updated_params = _refusing("update")


def record_calls_of_loss(
    loss_fn: Callable[..., Any], tree: Any, layout: Layout, batch: Any, *, microbatches: int
) -> list[UnitCall]:
    """Run ``loss_fn`` on meta tensors, on the first microbatch, and return its calls of units. ``layout`` is of one rank."""
    given = to_meta(batch)
    part = split_batch(given, microbatches)[0] if microbatches > 1 else given
    recorder = _CallRecorder(_tensor_leaves(part))
    params = shard_for(to_meta(tree), layout, 0, dtype="compute")
    with _explain_errors("on meta tensors", _META_REMEDY), recorder.recording():
        loss_fn(params, part, _TrialComm(layout.mesh, recorder))
    return recorder.calls


def record_calls_of_module(
    module: nn.Module, layout: Layout, owners: Mapping[str, Sequence[str]], batch: Any
) -> list[UnitCall]:
    """Return the calls of a module on meta tensors. ``owners``: by path of a module, the units that its call gathers."""
    dtypes = {
        unit.path_in_tree(leaf): unit.groups[leaf.group].dtypes.compute
        for unit in layout.units
        for leaf in unit.leaves
        if leaf.tied_to is None
    }
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        empty = torch.empty_like(parameter, device="meta", dtype=dtypes.get(name))
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    memo |= {id(x): torch.empty_like(x, device="meta") for x in module.buffers()}
    skeleton = copy.deepcopy(module, memo)
    given = to_meta(batch)
    recorder = _CallRecorder([*skeleton.parameters(), *skeleton.buffers(), *_tensor_leaves(given)])
    open_: list[Any] = []

    def before_call(use: Use, each: nn.Module, args: Any, kwargs: Any) -> Any:
        first = next((p.dtype for p in each.parameters() if p.is_floating_point()), None)

        def cast(x: Any) -> Any:
            return x.to(first) if isinstance(x, torch.Tensor) and x.is_floating_point() and first is not None else x

        both: Any = args, kwargs
        args, kwargs = optree.tree_map(cast, both)
        tensors = dict(each.named_parameters(remove_duplicate=False)) | dict(each.named_buffers(remove_duplicate=False))
        call = UnitCall(use.units, partial(_call_module, each), (tensors, args, kwargs), use.ties)
        context = recorder.record_call(call, (args, kwargs))
        context.__enter__()
        open_.append((call, context))
        return args, kwargs

    def after_call(each: nn.Module, args: Any, out: Any) -> None:
        call, context = open_.pop()
        call.set_has_backward(out)
        context.__exit__(None, None, None)

    for path, names in owners.items():
        if names:
            each = skeleton.get_submodule(path)
            each.register_forward_pre_hook(partial(before_call, use_of_units(layout, names)), with_kwargs=True)
            each.register_forward_hook(after_call)
    args, kwargs = ((), given) if isinstance(given, Mapping) else (given if isinstance(given, tuple) else (given,), {})
    with _explain_errors("on meta tensors", _META_REMEDY), recorder.recording():
        skeleton(*args, **kwargs)
    for call in walk_nested_uses(recorder.calls):
        call.fn.args[0]._forward_hooks.clear()  # type: ignore[attr-defined]
        call.fn.args[0]._forward_pre_hooks.clear()  # type: ignore[attr-defined]
    return recorder.calls


def measure_calls(calls: Sequence[UnitCall], device: torch.device, *, remat: bool) -> None:
    """Measure calls on a device, and set the seconds and ``kept_nbytes`` of each.

    Calls of one kind run one function, on tensors of equal shapes and dtypes. One call of each kind is run a few times, and
    all calls of the kind get its median seconds. Kept bytes are measured once for each ``known_inputs`` in a kind. A call that
    contains other calls is not measured, and its seconds stay nan. Without ``remat``, ``recompute_s`` is set to ``forward_s``.
    Random generators get their old states back.
    """
    kinds: dict[Any, list[UnitCall]] = {}
    for call in (each for each in walk_nested_uses(calls) if not each.inner):
        kinds.setdefault(_kind_of_unit_call(call), []).append(call)
    generators = [device] if device.type == "cuda" else []  # without an index: that of the current GPU
    for alike in kinds.values():
        what = f"of unit {alike[0].units[-1] or ROOT!r} on {device}"
        with _explain_errors(what, _HOLDS_TENSORS_REMEDY), torch.random.fork_rng(generators):
            kept = {known: _kept_nbytes(call, device) for known, call in {each.known_inputs: each for each in alike}.items()}
            forward_s, backward_s = _median_forward_backward_s(alike[0], alike[0].fn, device)
            recompute_s = forward_s
            if remat:
                recomputed = partial(checkpoint, alike[0].fn, use_reentrant=False)
                recompute_s = max(sum(_median_forward_backward_s(alike[0], recomputed, device)) - forward_s - backward_s, 0.0)
        for call in alike:
            call.set_measured(forward_s, backward_s, recompute_s, kept_nbytes=kept[call.known_inputs])


def _kept_nbytes(call: UnitCall, device: torch.device) -> int:
    """Return the bytes kept from a call's forward to its backward on a device. Inputs in ``known_inputs`` do not count."""
    params, args, kwargs = _materialize(call, device)
    known = [x for x, is_known in zip(_tensor_leaves((args, kwargs)), call.known_inputs, strict=True) if is_known]
    recorder = _CallRecorder([*_tensor_leaves(params), *known])
    recorder._open.append(kept := UnitCall((), call.fn, ()))
    with saved_tensors_hooks(recorder._count_kept, lambda x: x):
        call.fn(params, *args, **kwargs)
    return kept.kept_nbytes


def _median_forward_backward_s(call: UnitCall, run: Callable[..., Any], device: torch.device) -> tuple[float, float]:
    """Return the median seconds on a device that ``run`` takes with the operands of a call: its forward and its backward."""
    found = []
    for _ in range(_NUM_MEASUREMENTS):
        params, args, kwargs = _materialize(call, device)
        _synchronize(device)
        began = time.perf_counter()
        out = run(params, *args, **kwargs)
        _synchronize(device)
        middle = time.perf_counter()
        results = [x for x in _tensor_leaves(out) if x.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        _synchronize(device)
        found.append((middle - began, time.perf_counter() - middle))
    return median(x for x, _ in found), median(x for _, x in found)


def _materialize(call: UnitCall, device: torch.device) -> Any:
    """Return a call's operands on a device: random floating-point values, and zeros of other dtypes."""
    generator = torch.Generator().manual_seed(0)

    def materialize_tensor(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not x.is_floating_point():  # zeros, as integers may be indices
            return torch.zeros(x.shape, dtype=x.dtype, device=device)
        filled = torch.randn(x.shape, generator=generator).mul_(0.02).to(device, x.dtype)
        return filled.requires_grad_(x.requires_grad)

    return optree.tree_map(materialize_tensor, call.operands)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _kind_of_unit_call(call: UnitCall) -> Any:
    """Return the kind of a call: equal for calls of one function or module class on operands of equal shapes."""
    run = call.fn
    if isinstance(run, partial) and run.func is _call_module:
        what: Any = type(run.args[0])
    else:
        while isinstance(run, partial):
            run = run.func
        what = run
    leaves, spec = optree.tree_flatten(call.operands)
    shapes = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return what, tuple(shapes), spec


def _call_module(module: nn.Module, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)


def _meta_subtree_with_grad(node: Sharded, ties: Sequence[Sharded]) -> Any:
    """Return the subtree of a node on the meta device. Its trained leaves require gradients."""
    trainable = {leaf.path for leaf in node.unit.leaves if leaf.tied_to or node.unit.groups[leaf.group].trainable}
    leaves, spec = optree.tree_flatten(node.tree(tuple(ties)))
    paths = [leaf.path for leaf in node.unit.leaves]
    return spec.unflatten(
        [x.detach().requires_grad_(path in trainable and x.is_floating_point()) for path, x in zip(paths, leaves, strict=True)]
    )


@contextmanager
def _explain_errors(where: str, remedy: str) -> Iterator[None]:
    """Turn an error of the user's code in a trial into a ScheduleError with a remedy. Errors of fsharp stay as they are."""
    try:
        yield
    except FsharpError:
        raise
    except Exception as error:
        what = f"the trial {where} failed: {type(error).__name__}: {error}"
        raise ScheduleError(problem("tune()", what, remedy=remedy)) from error


def to_meta(tree: Any) -> Any:
    """Return a tree with its tensors on the meta device. Tied tensors stay tied."""
    storages: dict[Any, torch.Tensor] = {}

    def tensor_to_meta(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type == "meta":
            return x
        key = (_storage_key(x), x.storage_offset(), tuple(x.shape), x.dtype)
        if key not in storages:
            storages[key] = torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)
        return storages[key]

    return optree.tree_map(tensor_to_meta, tree)


def _tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _storage_key(x: torch.Tensor) -> Any:
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def _storage_nbytes(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes() if x.layout is torch.strided else x.numel() * x.element_size()
