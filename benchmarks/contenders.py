"""What is compared: each contender owns a copy of the model and makes training steps on it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import optree
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsharp as fs
from benchmarks import gpt

Batch = dict[str, torch.Tensor]
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""AdamW is a fused kernel everywhere, and all parameters decay."""


class Contender(Protocol):
    """Something that trains. ``is_global``: whether the loss that a step returns is the mean over ranks, or this rank's."""

    name: str
    is_global: bool

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step; the loss."""

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Forward, backward and the reduction of gradients, which are then thrown away; the loss."""

    def settle(self) -> None:
        """Wait until nothing of the last step is under way."""

    def optimizer_nbytes(self) -> int:
        """Bytes of optimizer state on this rank."""


class ModuleContender:
    """A module, its backward, and ``torch.optim.AdamW(fused=True)``. The module takes inputs and targets, and gives the loss.

    ``synced``: whether ranks train together. Otherwise every rank trains its own, and nothing is sent.
    """

    def __init__(self, name: str, module: torch.nn.Module, *, synced: bool = True) -> None:
        self.name, self.module, self.is_global, self.synced = name, module, False, synced
        self.optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run the forward."""
        loss: torch.Tensor = self.module(batch["inputs"], batch["targets"])
        return loss

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradients(self, batch: Batch) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        pass  # these peers have waited for everything when step() returns

    def optimizer_nbytes(self) -> int:
        state = [x for entry in self.optimizer.state.values() for x in entry.values() if isinstance(x, torch.Tensor)]
        return sum(local(x).nbytes for x in state)


class ShardedContender(ModuleContender):
    """A module under ``fs.ShardedModule``, with the same optimizer; ``options`` are those of ``fs.shard_module``."""

    def __init__(
        self, name: str, module: torch.nn.Module, comm: fs.Comm, strategy: fs.Strategy, units: Any, **options: Any
    ) -> None:
        self.name, self.is_global, self.synced = name, False, True
        self.sharded = fs.shard_module(module, mesh=comm, strategy=strategy, units=units, **options)
        self.scheduler = self.sharded.scheduled_step.scheduler
        self.module = self.sharded
        self.optimizer: Any = fs.ShardedOptimizer(self.sharded.parameters(), torch.optim.AdamW, fused=True, **ADAMW)

    def settle(self) -> None:
        for node in fs.layouts.units_of(self.sharded.functional()[1]):
            _ = node.buffers

    def optimizer_nbytes(self) -> int:
        kept = self.optimizer.state_dict()["state"].values()
        return sum(x.nbytes for each in kept for x in each.values() if isinstance(x, torch.Tensor))


class FunctionContender(ModuleContender):
    """The pure functions on ordinary tensors: what fsharp's host time is held against."""

    def __init__(self, name: str, shape: gpt.Shape) -> None:
        self.name, self.is_global, self.synced, self.heads = name, False, False, shape.heads
        self.params = optree.tree_map(lambda x: x.clone().requires_grad_(), gpt.tree_of(gpt.build(shape)))
        self.optimizer = torch.optim.AdamW(optree.tree_leaves(self.params), fused=True, **ADAMW)

    def loss(self, batch: Batch) -> torch.Tensor:
        return gpt.plain_loss(self.params, batch, heads=self.heads)


class FsharpContender:
    """``fs.train_step`` under the scheduler, or blocking.

    Args:
        name: in tables.
        params: initial values; every unit under ``layers`` is gathered by itself.
        loss_fn: as ``fs.train_step`` takes it.
        comm: the ranks.
        strategy: where state rests.
        policy: None calls the step with ``comm`` itself, which blocks in every collective.
        scheduler: runs the step, instead of a scheduler of its own.
        precision: dtypes.
        tx: the optimizer; None is :func:`adamw`.
        microbatches: into which the batch of a step is split.
    """

    is_global = True

    def __init__(
        self,
        name: str,
        params: Any,
        loss_fn: Callable[..., Any],
        comm: fs.Comm,
        strategy: fs.Strategy,
        *,
        policy: fs.SchedulePolicy | None,
        scheduler: fs.Scheduler | None = None,
        precision: fs.Precision = fs.Precision(),
        tx: fs.optim.Transform | None = None,
        microbatches: int = 1,
    ) -> None:
        self.name = name
        layout = fs.plan(params, comm.mesh, strategy, units="layers.*", precision=precision)
        tx = tx or adamw()
        self.state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm, donate=True)

        def gradients(state: fs.TrainState, batch: Batch, comm: fs.Comm) -> fs.Metrics:
            loss, grads = fs.value_and_grad(loss_fn, microbatches=microbatches)(state.params, batch, comm=comm)
            return fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)[0]

        if scheduler is None and policy is not None:
            scheduler = fs.Scheduler(comm, policy=policy)
        self.scheduler = scheduler

        def run(step: Callable[..., Any]) -> Any:
            return partial(step, comm=comm) if scheduler is None else scheduler(step)

        self.scheduled: Any = run(fs.train_step(loss_fn, tx, microbatches=microbatches, donate=True))
        self._gradients = run(gradients)

    def step(self, batch: Batch) -> torch.Tensor:
        self.state, metrics = self.scheduled(self.state, batch)
        return metrics.loss

    def gradients(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self._gradients(self.state, batch).loss
        return loss

    def settle(self) -> None:
        for node in fs.layouts.units_of(self.state.params):
            _ = node.buffers

    def optimizer_nbytes(self) -> int:
        return fs.inspect.tree_nbytes(self.state.opt)


def adamw(**options: Any) -> fs.optim.Transform:
    """What ``torch.optim.AdamW(fused=True, **ADAMW)`` does, over shards."""
    b1, b2 = ADAMW["betas"]
    return fs.optim.adamw(ADAMW["lr"], b1, b2, ADAMW["eps"], weight_decay=ADAMW["weight_decay"], **options)


def sharded(
    name: str,
    shape: gpt.Shape,
    comm: fs.Comm,
    strategy: fs.Strategy,
    policy: fs.SchedulePolicy | None = fs.SchedulePolicy(),
    *,
    remat: bool = False,
    **options: Any,
) -> FsharpContender:
    """The GPT with a strategy of fsharp's; ``options`` are precision, optimizer and microbatches."""
    loss_fn = partial(gpt.loss, heads=shape.heads, remat=remat)
    return FsharpContender(name, gpt.tree_of(gpt.build(shape)), loss_fn, comm, strategy, policy=policy, **options)


def wrapped(name: str, shape: gpt.Shape, comm: fs.Comm, strategy: fs.Strategy) -> Contender:
    """The GPT as a module, with a strategy of fsharp's."""
    return ShardedContender(name, gpt.build(shape), comm, strategy, [gpt.Block])


def local(x: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank."""
    return x.to_local() if isinstance(x, torch.distributed.tensor.DTensor) else x


def ddp(shape: gpt.Shape) -> Contender:
    """``DistributedDataParallel``."""
    return ModuleContender("DDP", DistributedDataParallel(gpt.build(shape), gradient_as_bucket_view=True))


def fsdp2(
    shape: gpt.Shape,
    *,
    name: str = "FSDP2",
    apart: bool = False,
    eager: bool = False,
    reduce_buffers: int | None = None,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> Contender:
    """``fully_shard`` on every block and on the root, over all processes.

    Args:
        shape, name: of the model, and in tables.
        apart: embedding and head as groups of their own, as torchtitan does.
        eager: asynchronous gathers, each issued one block ahead: what FSDP2 has for overlap where there are no streams.
        reduce_buffers: a process group of its own for reduce-scatters, and this many of their inputs under way at most: what
            torch 2.13 has added, and older ones lack.
        precision: dtypes of parameters in gathers and of gradients in reductions.
    """
    module, mesh = gpt.build(shape), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if apart:
        fully_shard([module.tokens, module.positions], mesh=mesh, mp_policy=precision)
        fully_shard([module.norm, module.head], mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    if eager:
        blocks: list[Any] = list(module.blocks)
        module._set_unshard_async_op(True)
        for before, after in pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    if reduce_buffers is not None:
        module.set_separate_reduce_scatter_group(True)
        module.set_reduce_scatter_max_input_buffers(reduce_buffers)
    return ModuleContender(name, module)
