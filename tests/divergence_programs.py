"""Programs of which one rank does something else: what it is, and where. One as functions, and the same as a module."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch
from torch import nn

import fsharp as fs
from fsharp.testing import DebugPolicy
from fsharp.testing.simulated_ranks import ThreadComm
from tests.scheduling import HYBRID, ON_TWO_AXES, STRATEGIES

WAYS = ("blocking", "scheduled", "module")
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "kept": {"release": "backward"},
    "buckets": {"bucket_nbytes": 100},
    "nothing carried": {"gather_at_start": False},
}
DIM = 3  # equal units of nine elements: one taken for another has the right shape

ALL, MODULES, ENGINES = WAYS, ("module",), ("scheduled", "module")
KINDS: dict[str, tuple[str, ...]] = {
    "nothing": ALL,
    "an evaluation more": ALL,
    "an evaluation fewer": ALL,
    "a step more": ALL,
    "a step fewer": ALL,
    "another order": ALL,
    "another loss": ALL,
    "a unit more": ALL,
    "a unit fewer": ALL,
    "another prefetch": ENGINES,
    "a memory budget": ENGINES,
    "another batch": ALL,
    "other microbatches": ALL,
    "another learning rate": ALL,
    "an equal copy": ALL,
    "a write in place": ALL,
    "raises": ALL,
    "dies": ALL,
    "stalls": ALL,
    "full parameters": ALL,
    "unsharded": MODULES,
    "clipping": MODULES,
    "a forward more": MODULES,
    "no backward": MODULES,
    "no update": MODULES,
    "forgotten gradients": MODULES,
}
"""What one rank does, and in which ways a program has that."""

FAULTS = ("raises", "dies", "stalls")


class Planted(Exception):
    """What a rank raises."""


@dataclass(frozen=True)
class Scenario:
    """A program, and what one rank does differently.

    Attributes:
        seed: of the order in which ranks go on; the other fields follow from it.
        way: how the program runs.
        strategy: a name.
        ranks: how many; those of hybrid strategies are two by two.
        units: of equal size.
        steps: of training.
        microbatches: of each step.
        donate: whether steps of functions may overwrite their state.
        evaluates: whether all ranks evaluate before each step.
        policy: a name; all ranks'.
        kind: what is different.
        rank: which rank differs.
        step: from which step on, or in which.
        where: behind which unit it fails.
        in_backward: whether it fails in the backward.
    """

    seed: int
    way: str
    strategy: str
    ranks: int
    units: int
    steps: int
    microbatches: int
    donate: bool
    evaluates: bool
    policy: str
    kind: str
    rank: int
    step: int
    where: int
    in_backward: bool

    @property
    def mesh(self) -> fs.Mesh:
        """The ranks."""
        return HYBRID if self.strategy in ON_TWO_AXES else fs.Mesh({"dp": self.ranks})

    @property
    def place(self) -> fs.Strategy:
        """Where state rests. The reference's is the same on any mesh."""
        return fs.ddp(*self.mesh.names) if self.strategy == "ddp" else STRATEGIES[self.strategy][1]


def rank_program(s: Scenario, comm: Any, log: list[torch.Tensor]) -> None:
    """What one rank does.

    Args:
        s: what it is part of.
        comm: the ranks.
        log: gets its losses, one for each microbatch and evaluation, and whole parameters after the last step: each when
            whoever runs the program has it in hand.
    """
    (train_module if s.way == "module" else train_functions)(s, Here(s, comm), log)


class Here:
    """The scenario as one rank sees it."""

    def __init__(self, s: Scenario, comm: Any) -> None:
        self.s, self.comm, self.differs = s, comm, comm.rank == s.rank
        self.is_armed = False

    def always(self, kind: str) -> bool:
        """Whether this rank differs in this way from the start."""
        return self.differs and self.s.kind == kind

    def now(self, kind: str, step: int) -> bool:
        """Whether it does so in this step."""
        return self.differs and self.s.kind == kind and self.s.step == step

    def policy(self) -> fs.SchedulePolicy:
        """This rank's."""
        options = dict(POLICIES[self.s.policy])
        if self.always("another prefetch"):
            options["prefetch"] = 2 if options.get("prefetch", 1) < 2 else 0
        if self.always("a memory budget"):
            options["memory_budget"] = 600
        return DebugPolicy(poison=True, **options)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This rank's inputs and targets."""
        size = self.s.microbatches * (4 if self.now("another batch", step) else 2)
        g = torch.Generator().manual_seed(100 * self.comm.rank + step)
        return {"x": torch.randn(size, DIM, generator=g), "y": torch.randn(size, DIM, generator=g)}

    def order(self, step: int) -> tuple[int, ...]:
        """The units, in the order of this rank and step."""
        order = tuple(range(self.s.units))
        if self.now("another order", step):
            return order[::-1]
        if self.now("a unit more", step):
            return (*order, 0)
        return order[:-1] if self.now("a unit fewer", step) else order

    def microbatches(self, step: int) -> int:
        """How many there are in this step."""
        return 3 - self.s.microbatches if self.now("other microbatches", step) else self.s.microbatches

    def arm(self, step: int) -> None:
        """A step begins, in which this rank may fail."""
        self.is_armed = self.differs and self.s.kind in FAULTS and self.s.step == step

    def passes(self, position: int, x: torch.Tensor) -> None:
        """A rank comes past here in its forward."""
        if not self.is_armed or position != self.s.where:
            return
        if self.s.in_backward and x.requires_grad:
            x.register_hook(lambda _: self.fail())
        elif not self.s.in_backward:
            self.fail()

    def fail(self) -> None:
        """Raise, die or stall."""
        simulated = isinstance(self.comm, ThreadComm)
        if self.s.kind == "dies":
            self.comm.simulate_death() if simulated else os.kill(os.getpid(), signal.SIGKILL)
        if self.s.kind == "stalls":
            self.comm.simulate_stall() if simulated else os.kill(os.getpid(), signal.SIGSTOP)
        raise Planted(f"rank {self.comm.rank} raises")


def values(s: Scenario) -> dict[str, Any]:
    """Where training starts."""
    g = torch.Generator().manual_seed(7)
    return {"layers": [{"w": torch.randn(DIM, DIM, generator=g) * 0.5} for _ in range(s.units)]}


def layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A unit."""
    return x + torch.tanh(x @ p["w"])


def learning_rate(here: Here) -> float:
    """Of this rank."""
    return 0.2 if here.always("another learning rate") else 0.1


def train_functions(s: Scenario, here: Here, log: list[torch.Tensor]) -> None:
    """Train by pure functions, scheduled or not."""
    comm, tx, tree = here.comm, fs.optim.sgd(learning_rate(here)), values(s)
    layout = fs.plan(tree, comm.mesh, s.place, units="layers.*")
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    scheduler = fs.Scheduler(comm, policy=here.policy()) if s.way == "scheduled" else None
    seen: list[torch.Tensor] = []  # in a call that may not come to its end
    orders: set[tuple[int, ...]] = {here.order(step) for step in range(s.steps)}

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return partial(fn, comm=comm) if scheduler is None else scheduler(fn)

    def loss_in(order: tuple[int, ...], scale: float, count: int, params: Any, batch: Any, comm: fs.Comm) -> Any:
        x = batch["x"]
        for position, i in enumerate(order):
            x = fs.forward(layer, params["layers"][i], x, comm=comm)
            here.passes(position, x)
        loss = (x - batch["y"]).square().mean() * scale
        seen.append(loss.detach().clone())
        return loss / count, 1 / count  # ranks count alike, as those of a module do, however many microbatches they have

    def step_in(order: tuple[int, ...], scale: float, microbatches: int) -> Callable[..., Any]:
        loss = partial(loss_in, order, scale, microbatches)
        return wrap(fs.train_step(loss, tx, microbatches=microbatches, donate=s.donate))

    evaluate = wrap(partial(loss_in, tuple(range(s.units)), 1.0, 1))
    keys = {(order, scale, count) for order in orders for scale in (1.0, 2.0) for count in (1, 2)}
    steps = {key: step_in(*key) for key in sorted(keys)}
    for n in range(s.steps):
        batch = here.batch(n)
        evaluations = s.evaluates + here.now("an evaluation more", n) - here.now("an evaluation fewer", n)
        for _ in range(evaluations):
            with torch.no_grad():
                evaluate(state.params, batch)
            _move(seen, log)
        if here.now("an equal copy", n):
            state = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
        if here.now("a write in place", n):
            for node in fs.layouts.units_of(state.params):
                node.buffers[0].copy_(node.buffers[0].clone())
        if here.now("full parameters", n):
            fs.full_tree(state.params, comm=comm)
        here.arm(n)
        step = steps[here.order(n), 2.0 if here.now("another loss", n) else 1.0, here.microbatches(n)]
        for _ in range(1 + here.now("a step more", n) - here.now("a step fewer", n)):
            state, _ = step(state, batch)
            _move(seen, log)
    log += [leaf.clone() for leaf in optree.tree_leaves(fs.full_tree(state.params, comm=comm))]


def _move(seen: list[torch.Tensor], log: list[torch.Tensor]) -> None:
    log += seen
    seen.clear()


class Layer(nn.Module):
    """A unit, as a module."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer({"w": self.w}, x)


class Net(nn.Module):
    """The model of the functions, as a module. Where its order is another one, it is this rank's."""

    def __init__(self, s: Scenario, here: Here) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(each["w"]) for each in values(s)["layers"]])
        self.here, self.order, self.scale = here, tuple(range(s.units)), 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for position, i in enumerate(self.order):
            x = self.layers[i](x)
            self.here.passes(position, x)
        return (x - y).square().mean() * self.scale


def train_module(s: Scenario, here: Here, log: list[torch.Tensor]) -> None:
    """Train a module."""
    comm, net = here.comm, Net(s, here)
    model: Any = fs.shard_module(net, mesh=comm, strategy=s.place, units=[Layer], policy=here.policy())
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=learning_rate(here))

    def train(batch: dict[str, torch.Tensor], n: int) -> None:
        count = here.microbatches(n)
        for i, (x, y) in enumerate(zip(batch["x"].chunk(count), batch["y"].chunk(count), strict=True)):
            with model.accumulate() if i < count - 1 else contextlib.nullcontext():
                loss = model(x, y)
                log.append(loss.detach().clone())
                if not here.now("no backward", n):
                    (loss / count).backward()

    for n in range(s.steps):
        batch = here.batch(n)
        net.order, net.scale = tuple(range(s.units)), 1.0
        for _ in range(s.evaluates + here.now("an evaluation more", n) - here.now("an evaluation fewer", n)):
            with torch.no_grad():
                log.append(model(batch["x"], batch["y"]))
        _between_steps(here, n, model, batch)
        here.arm(n)
        net.order, net.scale = here.order(n), 2.0 if here.now("another loss", n) else 1.0
        for _ in range(1 + here.now("a step more", n) - here.now("a step fewer", n)):
            train(batch, n)
            if here.now("clipping", n):
                model.clip_grad_norm_(1e9)
            if here.now("forgotten gradients", n):
                model.zero_grad()
            if not here.now("no update", n):
                optimizer.step()
            optimizer.zero_grad()
    log += [value.clone() for _, value in model.named_full_parameters()]


def _between_steps(here: Here, n: int, model: Any, batch: dict[str, torch.Tensor]) -> None:
    if here.now("an equal copy", n):
        model.train_state = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, model.train_state)
    if here.now("a write in place", n):
        for node in fs.layouts.units_of(model.train_state.params):
            node.buffers[0].copy_(node.buffers[0].clone())
    if here.now("full parameters", n):
        list(model.named_full_parameters())
    if here.now("unsharded", n):
        with model.unsharded():
            pass
    if here.now("a forward more", n):
        model(batch["x"], batch["y"])
