"""Random programs as users write them: what they are, how plain torch runs one, and how fsharp does.

A program is a model of 2 to 6 cells and a list of statements, which is run several times over, so that schedules are compiled
and followed. Each statement is something that plain torch allows at that point.
"""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import FsharpError
from fsharp.testing import DebugPolicy, RaceError, checking_races, simulate

DIM, ROUNDS = 3, 3
POLICY = DebugPolicy(poison=True)
WATCHED = DebugPolicy(sum_late=False, trivial_axes=True)
"""Of a program on virtual streams."""
EPS = 1e-3
"""Of Adam: with 1e-8 it would make an update as large as any other from a gradient that is only float32's rounding."""
_seeds = threading.Lock()  # simulated ranks share the global generator

MESHES: dict[str, Callable[[int], tuple[fs.Mesh, fs.Strategy]]] = {
    **{name: lambda n, name=name: (fs.Mesh({"dp": n}), getattr(fs, name)("dp")) for name in ("ddp", "zero1", "zero2", "zero3")},
    "hsdp": lambda n: (fs.Mesh({"outer": n, "inner": 1}), fs.hsdp("outer", "inner")),
    "hfsdp": lambda n: (fs.Mesh({"outer": n, "inner": 1}), fs.hfsdp("outer", "inner")),
    "hsdp inner": lambda n: (fs.Mesh({"outer": 1, "inner": n}), fs.hsdp("outer", "inner")),
}
PRECISIONS = {"one dtype": None, "main copy": fs.Precision(compute=torch.float32, main=torch.float64)}


@dataclass(frozen=True)
class Forward:
    """Call cells one after another; the loss waits for a :class:`Backward`.

    Attributes:
        cells: numbers of cells, in order.
        detach_at: position in ``cells`` before which the activation is detached; -1: nowhere.
        root: call the root, which calls the cells and has a parameter of its own.
        hooked: the activation after the first cell has a tensor hook that halves its gradient.
        checkpointed: recompute each ``"cell"`` in the backward, or a ``"part"`` of each cell; ``""``: nothing.
        both: two losses wait that share a graph; backwards retain it.
    """

    cells: tuple[int, ...]
    detach_at: int = -1
    root: bool = False
    hooked: bool = False
    checkpointed: str = ""
    both: bool = False


@dataclass(frozen=True)
class Backward:
    """The backward of one of the losses that wait.

    Attributes:
        which: its position among them, modulo how many there are.
        accumulate: within ``model.accumulate()``.
        twice: retain the graph, and run it once more.
    """

    which: int = 0
    accumulate: bool = False
    twice: bool = False


@dataclass(frozen=True)
class Evaluate:
    """A forward without gradients, whose output is looked at.

    Attributes:
        cells: numbers of cells, in order.
        average: of the moving averages, which are another tree.
        inference: under ``torch.inference_mode()``.
        eval: in ``model.eval()``, where cells add the mean of what they have been trained on.
    """

    cells: tuple[int, ...]
    average: bool = False
    inference: bool = False
    eval: bool = False


@dataclass(frozen=True)
class Write:
    """Multiply a cell's parameters in place."""

    cell: int
    factor: float


@dataclass(frozen=True)
class Toggle:
    """Freeze a cell that was trained when the module was sharded, or go on to train it; modules alone."""

    cell: int
    on: bool


@dataclass(frozen=True)
class Norm:
    """Look at the norms of a cell's parameters, and of their gradients if there are any; modules alone."""

    cell: int


@dataclass(frozen=True)
class Clip:
    """Clip the global norm of the gradients."""

    most: float


@dataclass(frozen=True)
class Decay:
    """A step of a learning rate scheduler."""


@dataclass(frozen=True)
class Update:
    """The optimizer's step.

    Attributes:
        zero: call ``zero_grad()`` after it.
    """

    zero: bool = True


@dataclass(frozen=True)
class Zero:
    """``zero_grad()``, of the model or the optimizer."""

    optimizer: bool


@dataclass(frozen=True)
class Grad:
    """``torch.autograd.grad`` of the last loss that waits, with respect to a cell's parameters; their norm is looked at."""

    cell: int


@dataclass(frozen=True)
class Look:
    """Look at whole parameters: by ``unsharded()``, or by ``named_full_parameters()``."""

    unsharded: bool


@dataclass(frozen=True)
class Save:
    """Keep copies of the state dicts of the model and the optimizer."""


@dataclass(frozen=True)
class Load:
    """Go back to what was saved last, if anything was."""


Statement = Forward | Backward | Evaluate | Write | Toggle | Norm | Clip | Decay | Update | Zero | Grad | Look | Save | Load


@dataclass(frozen=True)
class UserProgram:
    """A model, how it is sharded, and what is done with it.

    Attributes:
        num_cells: cells of the model; the first contains one more.
        frozen: numbers of cells that are not trained.
        statements: of one round.
        ranks: how many.
        strategy: a key of :data:`MESHES`.
        precision: a key of :data:`PRECISIONS`.
        optimizer: ``"sgd"`` (with momentum) or ``"adamw"``.
        depth: modules: how many cells are inside of the first one, each in the one before.
        tied: modules: the first cell and the second have one weight.
        groups: modules: two parameter groups, with learning rates of their own.
        scaled: modules: losses are scaled by a GradScaler.
        closure: functions: trees to evaluate come by a closure and not as arguments.
        scheduled: functions: under a scheduler.
        swapped: ``(rank, i)``: this rank alone runs statement ``i + 1`` before statement ``i``, two evaluations.
    """

    num_cells: int
    frozen: frozenset[int]
    statements: tuple[Statement, ...]
    ranks: int = 2
    strategy: str = "zero3"
    precision: str = "one dtype"
    optimizer: str = "sgd"
    closure: bool = False
    scheduled: bool = True
    swapped: tuple[int, int] | None = None
    depth: int = 1
    tied: bool = False
    groups: bool = False
    scaled: bool = False

    def of(self, rank: int) -> tuple[Statement, ...]:
        """The statements that one rank runs in each round."""
        found = list(self.statements)
        if self.swapped is not None and self.swapped[0] == rank:
            i = self.swapped[1]
            found[i : i + 2] = reversed(found[i : i + 2])
        return tuple(found)


@st.composite
def user_programs(draw: Any, *, functions: bool = False, differing: bool = False) -> UserProgram:
    """A program. ``functions``: one that functions can run as well; ``differing``: one rank swaps two evaluations."""
    num = draw(st.integers(2, 6))
    chain = st.lists(st.integers(0, num - 1), min_size=1, max_size=4).map(tuple)
    statements: list[Statement] = []
    zeroed = "after" if functions else draw(st.sampled_from(["after"] * 5 + ["before", "between", "never"]))
    for _ in range(draw(st.integers(1, 2))):
        waiting, start = 0, len(statements)
        if zeroed == "before":
            statements.append(Zero(draw(st.booleans())))
        for _ in range(draw(st.integers(1, 3))):
            for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
                cells = draw(chain)
                detach_at = draw(st.sampled_from([-1, -1, -1, len(cells) - 1]))
                root, hooked = not functions and draw(st.booleans()), draw(st.booleans())
                checkpointed = "" if functions else draw(st.sampled_from([""] * 4 + ["cell", "part"]))
                both = not functions and draw(one_in(6))
                statements.append(Forward(cells, detach_at, root, hooked, checkpointed, both))
                waiting += 1 + both
                is_first = waiting == 1 and (len(statements) == 1 or isinstance(statements[-2], Update))
                if not functions and draw(one_in(6 if is_first else 60)):
                    statements.append(Grad(draw(st.integers(0, num - 1))))
                    waiting -= 1
            if draw(st.sampled_from([False, False, False, True])):
                statements.append(Evaluate(draw(chain), draw(st.booleans())))
            if not functions and draw(one_in(8)):
                within = (Zero(False), Zero(True), Look(False), Look(False), Look(True), Save(), Save())
                statements.append(draw(st.sampled_from(within)))
            if not waiting:
                continue
            for _ in range(draw(st.integers(1, waiting))):
                twice = not functions and draw(st.sampled_from([False] * 5 + [True]))
                accumulate = not functions and draw(st.sampled_from([False, False, True]))
                statements.append(Backward(draw(st.integers(0, 3)), accumulate, twice))
                waiting -= 1
        if waiting:  # the last backward of a step does not accumulate
            statements.append(Backward(0))
        elif isinstance(statements[-1], Backward):
            statements[-1] = replace(statements[-1], accumulate=False)
        if draw(st.booleans()):
            statements.append(Clip(draw(st.sampled_from([0.01, 100.0]))))
        first = next((i for i in range(start, len(statements)) if isinstance(statements[i], Backward)), start)
        if zeroed == "between":
            statements.insert(first, Zero(draw(st.booleans())))
        statements.append(Update(zero=zeroed == "after"))
        extra: tuple[Statement, ...] = (Evaluate(draw(chain)), Evaluate(draw(chain), average=True), Decay())
        cell = draw(st.integers(0, num - 1))
        extra += (Write(cell, 0.5),)
        extra += () if functions else (Toggle(cell, False), Toggle(cell, True), Norm(cell))
        if not functions:
            extra += (Evaluate(draw(chain), inference=True), Evaluate(draw(chain), eval=True), Update(), Zero(True))
            extra += (Look(False), Look(True), Save(), Load())
        statements += draw(st.lists(st.sampled_from(extra), max_size=3))
    at = draw(st.integers(0, len(statements)))
    if differing:
        cells = draw(chain)
        statements[at:at] = [Evaluate(cells), Evaluate(draw(st.one_of(st.just(cells), chain)), average=True)]
    ranks = draw(st.integers(2 if differing else 1, 3))
    return UserProgram(
        num,
        draw(st.sampled_from([frozenset(), frozenset(), frozenset({num - 1})])),
        tuple(statements),
        ranks,
        draw(st.sampled_from(list(MESHES))),
        draw(st.sampled_from(list(PRECISIONS))),
        draw(st.sampled_from(["sgd", "adamw"])),
        functions and draw(st.booleans()),
        not functions or draw(st.sampled_from([True, True, False])),
        (draw(st.integers(0, ranks - 1)), at) if differing else None,
        *((1, False, False, False) if functions else (draw(st.integers(1, 2)), *(draw(one_in(n)) for n in (4, 3, 6)))),
    )


def one_in(n: int) -> st.SearchStrategy[bool]:
    """True once in so many draws."""
    return st.sampled_from([False] * (n - 1) + [True])


class Cell(nn.Module):
    """An affine map and a tanh, with another cell inside of it or not, and a running mean of what it is trained on."""

    mean: torch.Tensor

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.inner = Cell(depth - 1) if depth else None
        self.weight, self.bias = nn.Parameter(torch.randn(DIM, DIM)), nn.Parameter(torch.randn(DIM))
        self.register_buffer("mean", torch.zeros(DIM))
        self.is_counting = True

    def forward(self, x: torch.Tensor, checkpointed: str = "") -> torch.Tensor:
        x = x if self.inner is None else self.inner(x, checkpointed)
        if self.training and self.is_counting and checkpointed != "cell" and torch.is_grad_enabled():
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        if checkpointed == "part":
            x = checkpoint(lambda x: affine({"weight": self.weight, "bias": self.bias}, x), x, use_reentrant=False)
        else:
            x = affine({"weight": self.weight, "bias": self.bias}, x)
        return x if self.training else x + self.mean


def affine(p: Any, x: torch.Tensor) -> torch.Tensor:
    """What a cell computes of its own parameters."""
    return torch.tanh(x.to(p["weight"].dtype) @ p["weight"] + p["bias"])


class Model(nn.Module):
    """Cells, of which the first has one more inside, and a parameter beside them."""

    def __init__(self, program: UserProgram, *, nested: bool) -> None:
        super().__init__()
        num = program.num_cells
        self.cells = nn.ModuleList([Cell(program.depth if nested and i == 0 else 0) for i in range(num)])
        self.gain = nn.Parameter(torch.ones(DIM))
        if program.tied:
            self.cells[1].weight = self.cells[0].weight
        for i in program.frozen:
            self.cells[i].requires_grad_(False)

    def forward(self, x: torch.Tensor, chain: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        return chain(x * self.gain, self.cells)


def make_model(program: UserProgram, *, nested: bool) -> Model:
    """The model of a program; the same whenever it is made."""
    with _seeds:
        torch.manual_seed(len(program.statements))
        return Model(program, nested=nested).double()


def inputs(rank: int, number: int) -> torch.Tensor:
    """What a rank feeds to the forward of this number."""
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)


def run_chain(x: torch.Tensor, forward: Forward | Evaluate, cell: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Call the cells of a statement."""
    checkpointed = getattr(forward, "checkpointed", "")
    for i, number in enumerate(forward.cells):
        if i == getattr(forward, "detach_at", -1):
            x = x.detach()
        x = checkpoint(cell, number, x, use_reentrant=False) if checkpointed == "cell" else cell(number, x)
        if i == 0 and getattr(forward, "hooked", False) and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
    return x


class Plain:
    """The unsharded run: every rank's loss, whose mean is differentiated.

    Args:
        program: what to run.
        rank: whose statements, and whose outputs of evaluations.
        functions: as functions see it: no cell is inside of another, and what has no gradient has zero.
    """

    def __init__(self, program: UserProgram, rank: int, *, functions: bool = False) -> None:
        self.program, self.rank, self.functions = program, rank, functions
        nested = not functions
        self.model = make_model(program, nested=nested)
        self.average = make_model(program, nested=nested)
        self.optimizer = make_optimizer(program, groups_of(program, self.model), torch.optim.SGD, torch.optim.AdamW)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=program.scaled)
        self.is_unscaled, self.is_used, self.saved = False, False, ()
        self.retains = any(isinstance(each, Forward) and each.both for each in program.statements)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.seen: list[torch.Tensor] = []
        self.waiting: list[torch.Tensor] = []
        self.number = 0

    def run(self) -> list[torch.Tensor]:
        """Everything that the program looks at."""
        for _ in range(ROUNDS):
            for statement in self.program.of(self.rank):
                self.do(statement)
        return self.seen

    def forward(self, statement: Forward | Evaluate, model: Model, rank: int) -> torch.Tensor:
        """What one rank's cells give."""
        x = inputs(rank, self.number if isinstance(statement, Forward) else 0)
        options = {"checkpointed": statement.checkpointed} if isinstance(statement, Forward) and statement.checkpointed else {}
        if getattr(statement, "root", False):
            return model(x, lambda x, cells: run_chain(x, statement, lambda i, x: cells[i](x, **options)))
        return run_chain(x, statement, lambda i, x: model.cells[i](x, **options))

    def counting(self, rank: int) -> int:
        """Have cells count what this run's rank computes alone; the rank."""
        for module in self.model.modules():
            if isinstance(module, Cell):
                module.is_counting = rank == self.rank
        return rank

    def losses(self, statement: Forward) -> list[torch.Tensor]:
        """The losses of a forward, means over ranks."""
        ranks = range(self.program.ranks)
        outputs = [self.forward(statement, self.model, self.counting(r)) for r in ranks]
        return [sum(f(x).sum() for x in outputs) / len(ranks) for f in (torch.sin, torch.cos)[: 1 + statement.both]]

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to step by: after a step gradients are None to a sharded module."""
        return not self.is_used and any(p.grad is not None for p in self.model.parameters())

    def unscale(self) -> None:
        """Take the scale out of gradients, once before each step."""
        if self.program.scaled and not self.is_unscaled:
            self.scaler.unscale_(self.optimizer)
            self.is_unscaled = True

    def update(self, zero: bool) -> None:
        """A step of the optimizer, by a scaler where there is one, and ``zero_grad()`` or not."""
        self.waiting.clear()
        if self.program.scaled and self.has_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.program.scaled:
            self.optimizer.step()
        self.is_unscaled, self.is_used = False, True
        if zero:
            self.optimizer.zero_grad()

    def whole(self, unsharded: bool) -> list[torch.Tensor]:
        """Copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def do(self, statement: Statement) -> None:
        """Run one statement."""
        match statement:
            case Forward():
                self.waiting += self.losses(statement)
                self.number += 1
            case Backward():
                loss = self.scaler.scale(self.waiting.pop(statement.which % len(self.waiting)))
                if loss.requires_grad:
                    self.is_used = False
                    for again in range(1 + statement.twice):
                        loss.backward(retain_graph=self.retains or (statement.twice and not again))
            case Evaluate():
                model = self.average if statement.average else self.model
                model.train(not statement.eval)
                with torch.inference_mode() if statement.inference else torch.no_grad():
                    self.seen.append(self.forward(statement, model, self.rank).clone())
                model.train()
            case Zero():
                (self.optimizer if statement.optimizer else self.model).zero_grad()
                self.is_unscaled = self.is_used = False
            case Grad():
                loss = self.waiting.pop()
                wanted = [p for p in self.model.cells[statement.cell].parameters() if p.requires_grad]
                if loss.requires_grad and wanted:
                    found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=self.retains)
                    self.seen += [x.detach().norm() for x in found if x is not None]
            case Look():
                self.seen += self.whole(statement.unsharded)
            case Save():
                self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
            case Load() if self.saved:
                self.model.load_state_dict(self.saved[0])
                self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))  # torch takes its tensors as they are
            case Write():
                with torch.no_grad():
                    for parameter in self.model.cells[statement.cell].parameters():
                        parameter.mul_(statement.factor)
            case Toggle() if statement.cell not in self.program.frozen:
                self.model.cells[statement.cell].requires_grad_(statement.on)
            case Norm():
                with torch.no_grad():
                    for parameter in self.model.cells[statement.cell].parameters():
                        grad = None if self.is_used else parameter.grad
                        self.seen += [x.norm() for x in (parameter, grad) if x is not None]
            case Clip() if self.has_gradients:
                self.unscale()
                self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), statement.most).detach())
            case Decay():
                self.decay.step()
            case Update():
                if self.functions and self.has_gradients:
                    for p in self.model.cells.parameters():
                        p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
                self.update(statement.zero)
                with torch.no_grad():
                    for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                        mean.lerp_(parameter, 0.5)
                shown = self.model.cells if self.functions else self.model
                self.seen += [parameter.detach().clone() for parameter in shown.parameters()]


def groups_of(program: UserProgram, model: nn.Module) -> list[Any]:
    """The parameters of a model, or two groups of them: every third parameter learns slower."""
    parameters = list(model.parameters())
    if not program.groups:
        return parameters
    slow = {"params": parameters[::3], "lr": 0.003}
    return [slow, {"params": [p for i, p in enumerate(parameters) if i % 3]}]


def make_optimizer(program: UserProgram, params: Any, sgd: Callable[..., Any], adamw: Callable[..., Any]) -> Any:
    """The optimizer that a program asks for."""
    return sgd(params, lr=0.05, momentum=0.9) if program.optimizer == "sgd" else adamw(params, lr=0.01, eps=EPS)


class Module(Plain):
    """The same program over a sharded module, by one rank."""

    def __init__(self, program: UserProgram, comm: fs.Comm, *, watched: bool = False) -> None:
        super().__init__(program, comm.rank)
        self.watched = watched
        strategy = MESHES[program.strategy](program.ranks)[1]
        precision = PRECISIONS[program.precision]
        options = {"precision": precision} if precision is not None else {}
        shard = lambda module: fs.shard_module(  # noqa: E731
            module, mesh=comm, strategy=strategy, units=[Cell], policy=WATCHED if watched else POLICY, **options
        )
        self.model, self.average = shard(self.model), shard(self.average)
        own = lambda cls: lambda params, **options: fs.ShardedOptimizer(params, cls, **options)  # noqa: E731
        self.optimizer = make_optimizer(program, groups_of(program, self.model), own(torch.optim.SGD), own(torch.optim.AdamW))
        self.scaler = fs.GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=program.scaled)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def run(self) -> list[torch.Tensor]:
        """Everything that the program looks at."""
        with checking_races(self.model) if self.watched else nullcontext():
            return super().run()

    def losses(self, statement: Forward) -> list[torch.Tensor]:
        """This rank's losses."""
        x = self.forward(statement, self.model, self.rank)
        return [f(x).sum() for f in (torch.sin, torch.cos)[: 1 + statement.both]]

    def whole(self, unsharded: bool) -> list[torch.Tensor]:
        """Copies of the parameters."""
        if not unsharded:
            found = dict(self.model.named_full_parameters())
            return [found[name] for name, _ in self.model.named_parameters()]
        with self.model.unsharded():
            return super().whole(unsharded)

    def do(self, statement: Statement) -> None:
        """Run one statement."""
        match statement:
            case Backward():
                with self.model.accumulate() if statement.accumulate else nullcontext():
                    super().do(statement)
            case Write():
                with torch.no_grad():
                    for parameter in self.model.cells[statement.cell].parameters():
                        parameter.mul_(statement.factor)
            case Clip() if self.has_gradients:
                self.unscale()
                self.seen.append(self.model.clip_grad_norm_(statement.most))
            case Update():
                self.update(statement.zero)
                with torch.no_grad():
                    mine = dict(self.model.named_full_parameters())
                    with self.average.unsharded(write=True):
                        for name, mean in self.average.named_parameters():
                            mean.lerp_(mine[name].to(mean.dtype), 0.5)
                self.seen += [mine[name] for name, _ in self.model.named_parameters()]
            case _:
                super().do(statement)


class Functions:
    """The same program as pure functions over trees, by one rank: a function for each run of statements up to an update."""

    def __init__(self, program: UserProgram, comm: fs.Comm, *, watched: bool = False) -> None:
        self.program, self.comm, self.watched = program, comm, watched
        model = make_model(program, nested=False)
        tree = [{"weight": cell.weight.data, "bias": cell.bias.data} for cell in model.cells]
        strategy = MESHES[program.strategy](program.ranks)[1]
        precision = PRECISIONS[program.precision]
        options = {"precision": precision} if precision is not None else {}
        layout = fs.plan(tree, comm.mesh, strategy, units="*", frozen=[f"{i}.**" for i in program.frozen], **options)
        self.num_decays = 0
        self.state = fs.init_state(self.tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
        self.average = optree.tree_map(torch.clone, self.state.params)
        self.seen: list[torch.Tensor] = []
        self.number = 0
        self.scheduler = fs.Scheduler(comm, policy=WATCHED if watched else POLICY) if program.scheduled else None
        self.parts = [self.wrap(part) for part in cut(program.of(comm.rank))]

    @property
    def tx(self) -> Any:
        """The transformation, with the learning rate of the moment."""
        lr = 0.5**self.num_decays
        if self.program.optimizer == "sgd":
            return fs.optim.sgd(0.05 * lr, momentum=0.9)
        return fs.optim.adamw(0.01 * lr, eps=EPS, weight_decay=0.01)

    def wrap(self, statements: tuple[Statement, ...]) -> Callable[[], None]:
        """A function that runs these statements."""

        def part(trees: Any, *, comm: fs.Comm) -> None:
            self.step(statements, trees, comm)

        fn: Callable[..., None] = (
            self.scheduler(part) if self.scheduler is not None else lambda trees: part(trees, comm=self.comm)
        )
        closure = self.program.closure
        return lambda: fn(None if closure else (self.state.params, self.average))

    def run(self) -> list[torch.Tensor]:
        """Everything that the program looks at."""
        with checking_races(self.scheduler) if self.watched and self.scheduler is not None else nullcontext():
            for _ in range(ROUNDS):
                for part in self.parts:
                    part()
        return self.seen

    def chain(self, statement: Forward | Evaluate, params: Any, comm: fs.Comm, x: torch.Tensor) -> torch.Tensor:
        """Call the cells of a statement."""
        return run_chain(x, statement, lambda i, x: fs.forward(affine, params[i], x, comm=comm))

    def step(self, statements: tuple[Statement, ...], trees: Any, comm: fs.Comm) -> None:
        """Run statements; at most the last of them is an update."""
        params, average = trees if trees is not None else (self.state.params, self.average)
        waiting: list[tuple[Forward, torch.Tensor]] = []
        grads: list[Any] = []
        for statement in statements:
            match statement:
                case Forward():
                    waiting.append((statement, inputs(comm.rank, self.number)))
                    self.number += 1
                case Backward():
                    forward, x = waiting.pop(statement.which % len(waiting))
                    if all(i in self.program.frozen for i in forward.cells[max(forward.detach_at, 0) :]):
                        continue
                    loss_fn = lambda params, x, comm, of=forward: self.chain(of, params, comm, x).sin().sum()  # noqa: E731
                    loss, found = fs.value_and_grad(loss_fn)(params, x, comm=comm)
                    grads.append(fs.average(loss, fs.reduce_scatter(found, comm=comm), comm=comm)[1])
                case Evaluate():
                    with torch.no_grad():
                        tree = average if statement.average else params
                        self.seen.append(self.chain(statement, tree, comm, inputs(comm.rank, 0)))
                case Write():
                    self.state = self.state._replace(
                        params=self.scaled(self.state.params, statement), main=self.scaled(self.state.main, statement)
                    )
                    params = self.state.params
                case Clip() if grads:
                    total = added(grads)
                    norm = fs.optim.global_norm(total, comm=comm)
                    self.seen.append(norm)
                    grads = [optree.tree_map(lambda grad, by=statement.most / (norm + 1e-6): grad * by.clamp(max=1.0), total)]
                case Decay():
                    self.num_decays += 1
                case Update():
                    self.update(grads, comm)

    def scaled(self, tree: Any, statement: Write) -> Any:
        """The tree with the parameters of one cell multiplied, in memory of their own."""
        names = {str(statement.cell)}
        return fs.layouts.map_units(
            lambda node: node.replace([b * statement.factor for b in node.buffers]) if node.name in names else node, tree
        )

    def update(self, grads: list[Any], comm: fs.Comm) -> None:
        """One update by the sum of all gradients, if there are any."""
        if grads:
            self.state = fs.update(self.tx, added(grads), self.state, comm=comm)
        with torch.no_grad():
            self.average = optree.tree_map(lambda mean, new: mean.lerp(new, 0.5), self.average, self.state.params)
        whole = fs.full_tree(self.state.params, comm=comm)
        self.seen += [cell[name] for cell in whole for name in ("weight", "bias")]


def added(grads: list[Any]) -> Any:
    """The sum of some trees."""
    return optree.tree_map(lambda *each: sum(each[1:], each[0]), *grads)


def cut(statements: tuple[Statement, ...]) -> list[tuple[Statement, ...]]:
    """Runs of statements that each end with an update; what follows the last is one of its own."""
    found: list[tuple[Statement, ...]] = []
    part: list[Statement] = []
    for statement in statements:
        part.append(statement)
        if isinstance(statement, Update):
            found.append(tuple(part))
            part = []
    return found + ([tuple(part)] if part else [])


def check(program: UserProgram, *, functions: bool, watched: bool = False) -> list[str]:
    """Run a program by fsharp and by plain torch: each rank sees the same, or ends with an error of this library.

    Args:
        program: what to run.
        functions: as functions, and not as a module.
        watched: on virtual streams, which a race checker watches; a race is no refusal.

    Returns:
        The errors of ranks, as texts.

    Raises:
        AssertionError: other values, a race, or an error that is not this library's.
    """
    refused: list[str] = []
    kind = Functions if functions else Module
    loose = program.precision != "one dtype"
    tolerance = {"rtol": 2e-3, "atol": 2e-4} if loose else {"rtol": 1e-9, "atol": 1e-10}
    runs: dict[int, Module | Functions] = {}

    def run(comm: fs.Comm) -> None:
        runs[comm.rank] = kind(program, comm, watched=watched)
        runs[comm.rank].run()

    ended = simulate(MESHES[program.strategy](program.ranks)[0], run, outcomes=True)
    for rank, error in enumerate(ended):
        if error is not None and (not isinstance(error, FsharpError) or isinstance(error, RaceError)):
            raise AssertionError(f"rank {rank} ended with {error!r}") from error
        found, expected = runs[rank].seen, Plain(program, rank, functions=functions).run()
        assert error is not None or len(found) == len(expected)
        for i, (mine, want) in enumerate(zip(found, expected)):
            where = f"rank {rank}, value {i}: "
            torch.testing.assert_close(mine.double(), want, **tolerance, msg=lambda text, where=where: where + text)
        refused += [str(error)] if error is not None else []
    return refused
