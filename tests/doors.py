"""Models whose tensors leave units by other doors than what is returned, and come back elsewhere.

One model is run four ways: plain torch, the blocking path, a scheduler, and a module. What differs between them is how a unit
is called, and nothing else.
"""

import contextlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import FsharpError
from fsharp.testing import DebugPolicy, simulate
from tests.scheduling import DP, FLAT

UNITS, DIM, STEPS, RATE = 3, 4, 3, 0.1
PATHS = ("blocking", "scheduled", "module")

WHATS: dict[str, Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "activation": lambda p, h, x: h,
    "view of an activation": lambda p, h, x: h[:, 1:],
    "detached activation": lambda p, h, x: h.detach(),
    "part of a loss": lambda p, h, x: h.square().mean(),
    "input": lambda p, h, x: x,
    "weight": lambda p, h, x: p["w"],
    "transposed weight": lambda p, h, x: p["w"].T,
    "row of a weight": lambda p, h, x: p["w"][1],
    "detached weight": lambda p, h, x: p["w"].detach(),
    "function of a weight": lambda p, h, x: p["w"].sin(),
}


Named = namedtuple("Named", ["t"])
Data, Slots = make_dataclass("Data", ["t"]), make_dataclass("Slots", ["t"], slots=True)


class Box:
    """Outside of all units: what is put here is not returned."""

    def __init__(self) -> None:
        self.list: list[torch.Tensor] = []
        self.dict: dict[str, torch.Tensor] = {}
        self.t: torch.Tensor | None = None


RETURNED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda t: (t,), lambda c: c[0]),
    "dict": (lambda t: {"t": [t]}, lambda c: c["t"][0]),
    "named tuple": (Named, lambda c: c.t),
    "dataclass": (Data, lambda c: c.t),
    "slots": (Slots, lambda c: c.t),
    "set": (lambda t: {t}, lambda c: next(iter(c))),
    "generator": (lambda t: (each for each in (t,)), lambda c: next(c)),
    "function": (lambda t: lambda: t, lambda c: c()),
}
KEPT: dict[str, tuple[Callable[[Box, torch.Tensor], None], Callable[[Box], Any]]] = {
    "list": (lambda box, t: box.list.append(t), lambda box: box.list.pop()),
    "dictionary": (lambda box, t: box.dict.update(t=t), lambda box: box.dict.pop("t")),
    "attribute": (lambda box, t: setattr(box, "t", t), lambda box: box.t),
    "argument": (lambda box, t: box.list.append(t), lambda box: box.list.pop()),
}
WAYS = (*RETURNED, *KEPT, "hook")
SINKS = ("loss", "between units", "argument of the next unit", "closure of the next unit")
WRAPS = ("none", "checkpoint", "reentrant checkpoint")


@dataclass(frozen=True)
class Door:
    """One tensor's way.

    Attributes:
        unit: that it leaves.
        what: it is.
        way: out of the unit.
        sink: where it comes back.
    """

    unit: int
    what: str
    way: str
    sink: str


@dataclass(frozen=True)
class Model:
    """A model, and how it is trained.

    Attributes:
        doors: of its units, at most one each.
        wraps: what is around the call of each unit.
        target: the unit that is used first without gradients, for a target.
        num_losses: two are added up; a module has a backward for each.
    """

    doors: tuple[Door, ...] = ()
    wraps: tuple[str, ...] = ("none",) * UNITS
    target: int | None = None
    num_losses: int = 1

    def door(self, unit: int) -> Door | None:
        """That of a unit."""
        return next((door for door in self.doors if door.unit == unit), None)


Call = Callable[..., Any]
"""``call(unit, body, x, *args)``: ``body(parameters of the unit, x, *args)``."""


def body(
    model: Model,
    unit: int,
    box: Box,
    closed: tuple[torch.Tensor, ...],
    p: Any,
    x: torch.Tensor,
    given: Any = (),
    bag: Any = None,
) -> Any:
    """What a unit computes; ``(y, container)`` if something leaves by what it returns."""
    door, h = model.door(unit), _tanh(p, x)
    y = x + h
    for t in (*given, *closed):
        y = y + 0.3 * t.square().mean()
    if door is None or door.way == "hook":
        return y
    t = WHATS[door.what](p, h, x)
    if door.way in RETURNED:
        return y, RETURNED[door.way][0](t)
    if door.way == "argument":
        bag.append(t)
    else:
        KEPT[door.way][0](box, t)
    return y


def _tanh(p: Any, x: torch.Tensor) -> torch.Tensor:
    inner = p.get("inner", torch.tanh)
    return inner(x @ p["w"] + p["b"])


def losses(model: Model, call: Call, x: torch.Tensor, box: Box) -> list[torch.Tensor]:
    """The model's losses for one batch."""
    total = torch.zeros(())
    given: tuple[torch.Tensor, ...] = ()
    closed: tuple[torch.Tensor, ...] = ()
    if model.target is not None:
        with torch.no_grad():
            bare = Model()
            target = call(model.target, partial(body, bare, model.target, box, ()), x)
            total = total + target.square().mean()
            start = target
    else:
        start = None
    for unit in range(UNITS):
        door, bag = model.door(unit), []
        run = partial(body, model, unit, box, closed)
        args = (given, bag) if door is not None and door.way == "argument" else (given,)
        if model.wraps[unit] == "none":
            out = call(unit, run, x, *args)
        else:
            out = checkpoint(partial(call, unit, run), x, *args, use_reentrant=model.wraps[unit] == "reentrant checkpoint")
        given, closed = (), ()
        if door is None:
            x = out
            continue
        x, container = out if door.way in RETURNED else (out, None)
        if door.way in RETURNED:
            t = RETURNED[door.way][1](container)
        elif door.way == "argument":
            t = bag.pop()
        elif door.way == "hook":
            t = box.list.pop()
        else:
            t = KEPT[door.way][1](box)
        if door.sink == "between units":
            x = x + 0.3 * t.square().mean()
        elif door.sink == "loss" or unit == UNITS - 1:
            total = total + t.square().mean()
        elif door.sink == "argument of the next unit":
            given = (t,)
        else:
            closed = (t,)
    if start is not None:
        total = total + (x - start).square().mean()
    first = total + x.square().mean()
    return [first, x.sin().mean()][: model.num_losses]


class Ran(NamedTuple):
    """What came of training: losses of all steps, those of an evaluation after each, and the parameters."""

    losses: list[torch.Tensor]
    evaluations: list[torch.Tensor]
    params: list[torch.Tensor]


def values() -> dict[str, Any]:
    """Where training starts."""
    g = torch.Generator().manual_seed(3)
    return {
        "layers": [
            {"w": torch.randn(DIM, DIM, generator=g) * 0.6, "b": torch.randn(DIM, generator=g) * 0.6} for _ in range(UNITS)
        ]
    }


def batch(step: int) -> torch.Tensor:
    """The same on every rank, so that what all of them compute is what one does. Reentrant checkpoints need its gradient."""
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(20 + step)).requires_grad_()


def run_plain(model: Model) -> Ran:
    """In plain torch, with hooks as the module has them."""
    tree = optree.tree_map(lambda x: x.clone().requires_grad_(), values())
    flat = optree.tree_leaves(tree)
    found = Ran([], [], [])
    for n in range(STEPS):
        box = Box()

        def call(unit: int, fn: Callable[..., Any], *args: Any, box: Box = box) -> Any:
            door = model.door(unit)
            if door is None or door.way != "hook":
                return fn(tree["layers"][unit], *args)
            inner = nn.Tanh()
            inner.register_forward_hook(lambda m, args, out: box.list.append(out))
            return fn({**tree["layers"][unit], "inner": inner}, *args)

        each = losses(model, call, batch(n), box)
        sum(each).backward()  # type: ignore[union-attr]
        found.losses.append(sum(each).detach().clone())
        with torch.no_grad():
            for leaf in flat:
                leaf -= RATE * (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
            found.evaluations.append(sum(losses(model, call, batch(n), box)).clone())
    return found._replace(params=[leaf.detach().clone() for leaf in flat])


def run_functions(model: Model, strategy: str, policy: fs.SchedulePolicy | None, comm: fs.Comm) -> Ran:
    """As functions, blocking or scheduled."""
    tree, tx = values(), fs.optim.sgd(RATE)
    layout = fs.plan(tree, comm.mesh, FLAT[strategy][1], units="layers.*")
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)

    def loss(params: Any, x: torch.Tensor, comm: fs.Comm) -> torch.Tensor:
        def call(unit: int, fn: Callable[..., Any], *args: Any) -> Any:
            return fs.forward(fn, params["layers"][unit], *args, comm=comm)

        return sum(losses(model, call, x, Box()))  # type: ignore[return-value]

    step: Any = fs.train_step(loss, tx)
    evaluate: Any = loss
    if policy is None:
        step, evaluate = partial(step, comm=comm), partial(loss, comm=comm)
    else:
        scheduler = fs.Scheduler(comm, policy=policy)
        step, evaluate = scheduler(step), scheduler(loss)
    found = Ran([], [], [])
    for n in range(STEPS):
        state, metrics = step(state, batch(n))
        found.losses.append(metrics.loss.float())
        with torch.no_grad():
            found.evaluations.append(evaluate(state.params, batch(n)).clone())
    return found._replace(params=[leaf.clone() for leaf in optree.tree_leaves(fs.full_tree(state.params, comm=comm))])


class Layer(nn.Module):
    """A unit."""

    def __init__(self, p: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.w, self.b, self.inner = nn.Parameter(p["w"].clone()), nn.Parameter(p["b"].clone()), nn.Tanh()

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn({"w": self.w, "b": self.b, "inner": self.inner}, *args)


class Net(nn.Module):
    """The model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.box = model, Box()
        self.layers = nn.ModuleList([Layer(p) for p in values()["layers"]])
        for door in model.doors:
            if door.way == "hook":
                self.layers[door.unit].inner.register_forward_hook(lambda m, args, out: self.box.list.append(out))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return losses(self.model, lambda unit, fn, *args: self.layers[unit](fn, *args), x, self.box)


def run_module(model: Model, strategy: str, policy: fs.SchedulePolicy, comm: fs.Comm) -> Ran:
    """As a module."""
    net: Any = fs.shard_module(Net(model), mesh=comm, strategy=FLAT[strategy][1], units=[Layer], policy=policy)
    optimizer = fs.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=RATE)
    found = Ran([], [], [])
    for n in range(STEPS):
        each = net(batch(n))
        for i, loss in enumerate(each):
            with net.accumulate() if i < len(each) - 1 else contextlib.nullcontext():
                loss.backward(retain_graph=i < len(each) - 1)
        found.losses.append(sum(each).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.evaluations.append(sum(net(batch(n))).clone())
    params = dict(net.named_full_parameters())
    names = [f"layers.{unit}.{name}" for unit in range(UNITS) for name in "bw"]
    return found._replace(params=[params[name].clone() for name in names])


def run(model: Model, path: str, strategy: str) -> list[Any]:
    """What comes of it on each rank, a Ran or what it raised; two ranks on the blocking path, else one that moves data."""
    policy = DebugPolicy(trivial_axes=True, poison=True)
    if path == "blocking":
        one = partial(run_functions, model, strategy, None)
    else:
        one = partial(run_functions if path == "scheduled" else run_module, model, strategy, policy)
    mesh = DP if path == "blocking" else fs.Mesh({"dp": 1})
    return simulate(mesh, one, seed=0, outcomes=True)


def run_on_two_ranks(model: Model, strategy: str) -> list[Any]:
    """By a scheduler on two ranks, as the blocking path runs."""
    return simulate(DP, partial(run_functions, model, strategy, DebugPolicy(poison=True)), seed=0)


def judge(model: Model, expected: Ran, outcome: Any) -> str | None:
    """What is wrong with what a rank has; None if it is as in plain torch, or an error that names a unit with a door."""
    if isinstance(outcome, BaseException):
        if not isinstance(outcome, FsharpError | RuntimeError):
            return f"raises what says nothing to a user: {outcome!r}"
        if model.doors and not any(f"layers.{door.unit}" in str(outcome) for door in model.doors):
            return f"raises without naming the unit: {outcome!r}"
        return None
    for name, got, want in zip(Ran._fields, outcome, expected, strict=True):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                return f"{name}[{i}] is {a.tolist()}, and {b.tolist()} in plain torch"
    return None
