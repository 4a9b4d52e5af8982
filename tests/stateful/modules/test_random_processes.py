"""Random programs of wrapped modules in processes, beside plain torch: own experts, hooks, meta tensors, files, failures.

``tests/user_programs.py`` has more statements, and simulated ranks. Here are those that need processes, or other modules.
"""

import random
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import FsharpError
from fsharp.testing import DebugPolicy, processes

DIM, RANKS = 4, 2
POLICIES = ({}, {"prefetch": 0}, {"prefetch": 3, "release": "backward"}, {"bucket_nbytes": 400}, {"separate_groups": True})
HOOKS = ("input", "output", "gradient", "gradient of output", "tensor")
BETWEEN = ("evaluate", "infer", "look", "write", "pause", "resume", "load", "optimizer", "file", "function", "raise", "decay")


class Planted(Exception):
    """What a hook of one rank raises."""


class Affine(nn.Module):
    """Uneven parameters: a scalar, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(DIM, DIM)), nn.Parameter(torch.randn(DIM))
        self.gain, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.bias) * self.gain + x


class Expert(Affine):
    """Each coordinate along ``ep`` has its own."""


class Nested(nn.Module):
    """Uses the unit inside of it twice, and counts on each rank the mean of what it sees."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.norm = Affine(), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x):
        return self.norm(self.outer(self.inner(x))) + self.inner(x)


class Recurrent(nn.Module):
    """A module of torch that keeps a list of its parameters."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x):
        return x + self.cell(x[None])[0][0]


KINDS = (Affine, Nested, Recurrent)


class Program:
    """What the ranks do, by seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed, self.has_experts = seed, draw.random() < 0.3
        self.mesh = fs.Mesh({"dp": 1, "ep": RANKS} if self.has_experts else draw.choice([{"dp": RANKS}, {"dp": RANKS, "b": 1}]))
        self.strategy = getattr(fs, draw.choice(["ddp", "zero1", "zero2", "zero3", "zero3"]))
        self.kinds = [*draw.choices(KINDS, k=draw.randint(1, 3)), *[Expert] * self.has_experts]
        self.is_meta, self.checkpointed = draw.random() < 0.4, draw.choice([None, None, False, True])
        self.policy, self.hooks = draw.choice(POLICIES), draw.choices(HOOKS, k=draw.randint(0, 2))
        self.hooked, self.is_chained = draw.randrange(len(self.kinds)), draw.random() < 0.3
        self.optimizer = draw.choice([torch.optim.AdamW, torch.optim.SGD])
        self.clips, self.rounds = draw.random() < 0.5, draw.choice([2, 3, 3, 12])
        self.parts = [(draw.random() < 0.5, draw.random() < 0.2) for _ in range(draw.randint(0, 2))]  # accumulate, retain
        self.between = [(draw.choice(BETWEEN), draw.randrange(RANKS)) for _ in range(draw.randint(0, 3))]


class Net(nn.Module):
    """The cells of a program, and parameters beside them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.cells, self.head = nn.ModuleList([kind() for kind in program.kinds]), nn.Linear(DIM, 2)
        self.checkpointed = program.checkpointed

    def forward(self, x):
        for cell in self.cells:
            x = cell(x) if self.checkpointed is None else checkpoint(cell, x, use_reentrant=self.checkpointed)
        return self.head(x)


def install_hooks(program: Program, cell: nn.Module) -> None:
    for hook in program.hooks:
        match hook:
            case "input":
                cell.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            case "output":
                cell.register_forward_hook(lambda module, args, out: out + args[0] * 0.25)
            case "gradient":
                cell.register_full_backward_hook(lambda module, grads, _: tuple(g if g is None else g * 0.5 for g in grads))
            case "gradient of output":
                cell.register_full_backward_pre_hook(lambda module, grads: tuple(g if g is None else g * 0.5 for g in grads))
            case "tensor":
                cell.register_forward_hook(
                    lambda module, args, out: (out.register_hook(lambda g: g * 0.3), None)[1] if out.requires_grad else None
                )


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


class Plain:
    """The program in plain torch: a module for each rank, with the buffers of this rank; the modules share parameters."""

    def __init__(self, program: Program, starts: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> None:
        self.nets = [Net(program).double() for _ in starts]
        for net, (parameters, _) in zip(self.nets, starts):
            for name, value in parameters.items():
                with torch.no_grad():
                    net.get_parameter(name).copy_(value)
                if not (program.has_experts and name.startswith(f"cells.{len(program.kinds) - 1}.")):
                    owner, _, last = name.rpartition(".")
                    setattr(net.get_submodule(owner), last, self.nets[0].get_parameter(name))
            install_hooks(program, net.cells[program.hooked])
        self.set_buffers([buffers for _, buffers in starts])
        self.parameters = list({id(p): p for net in self.nets for p in net.parameters()}.values())
        self.optimizer = program.optimizer(self.parameters, lr=0.02, weight_decay=0.01)

    def set_buffers(self, by_rank: list[dict[str, torch.Tensor]]) -> None:
        for net, buffers in zip(self.nets, by_rank):
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])


class Runner:
    """One rank's run of a program, statement by statement beside plain torch."""

    def __init__(self, program: Program) -> None:
        self.program, self.comm = program, fs.connect(program.mesh)
        torch.manual_seed(program.seed)
        with torch.device("meta") if program.is_meta else nullcontext():
            net = Net(program).double()
        strategy: Any = program.strategy(*program.mesh.names)
        if program.has_experts:
            own = len(program.kinds) - 1
            strategy = {"**": strategy, f"cells.{own}": program.strategy("dp").varying("ep")}
            if not program.is_meta:
                torch.manual_seed(self.comm.rank)
                net.cells[own].reset_parameters()
        self.model = fs.shard_module(
            net, mesh=self.comm, strategy=strategy, units=list({type(x) for x in net.modules()} & {*KINDS, Expert}),
            policy=DebugPolicy(poison=True, **program.policy), key=program.seed,
        )  # fmt: skip
        self.optimizer = fs.ShardedOptimizer(self.model.parameters(), program.optimizer, lr=0.02, weight_decay=0.01)
        values = {name: x.clone() for name, x in self.model.named_full_parameters()}
        self.plain = Plain(program, gathered((values, dict(self.model.named_buffers()))))
        self.mine = self.plain.nets[self.comm.rank]
        install_hooks(program, self.model.cells[program.hooked])
        torch.manual_seed(1)
        second, self.plain_second = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
        self.plain_second.load_state_dict(second.state_dict())
        self.second = fs.shard_module(second, mesh=self.comm, strategy=fs.zero3(*program.mesh.names))
        self.number = 0

    def run(self) -> None:
        for _ in range(self.program.rounds):
            for accumulate, again in (*self.program.parts, (False, False)):
                self.backward(accumulate, again)
            if self.program.clips:
                norm = nn.utils.clip_grad_norm_(self.plain.parameters, 0.3)
                same("norm", self.model.clip_grad_norm_(0.3), norm)
            for each in (self.optimizer, self.plain.optimizer):
                each.step()
                each.zero_grad()
            for each in (self.second, self.plain_second):
                each.zero_grad()
            self.look()
            for what, rank in self.program.between:
                self.do(what, rank)

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's loss, and the mean loss of all ranks in plain torch."""
        xs = list(self.inputs())
        out, outs = self.model(xs[self.comm.rank]), [net(x) for net, x in zip(self.plain.nets, xs)]
        same("output", out, outs[self.comm.rank])
        if self.program.is_chained:
            out, outs = self.second(out), [self.plain_second(x) for x in outs]
        self.number += 1
        return out.sin().square().mean(), sum(x.sin().square().mean() for x in outs) / RANKS

    def inputs(self) -> Iterator[torch.Tensor]:
        for rank in range(RANKS):
            yield torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * self.number + rank), dtype=torch.float64)

    def backward(self, accumulate: bool, again: bool) -> None:
        loss, plain_loss = self.losses()
        contexts = [each.accumulate() if accumulate else nullcontext() for each in (self.model, self.second)]
        with contexts[0], contexts[1]:
            for is_last in (False, True) if again else (True,):
                if loss.requires_grad:
                    loss.backward(retain_graph=not is_last)
                    plain_loss.backward(retain_graph=not is_last)

    def look(self) -> None:
        for name, value in self.model.named_full_parameters():
            same(name, value, self.mine.get_parameter(name))
        for name, buffer in self.model.named_buffers():
            same(name, buffer, self.mine.get_buffer(name))

    def do(self, what: str, rank: int) -> None:
        cells, plain_cells = self.model.cells, [net.cells for net in self.plain.nets]
        match what:
            case "evaluate" | "infer":
                x = list(self.inputs())[self.comm.rank]
                with torch.inference_mode() if what == "infer" else torch.no_grad():
                    same(what, self.model.eval()(x), self.mine.eval()(x))
                self.model.train(), self.mine.train()
            case "look":
                self.look()
            case "write":
                with torch.no_grad():
                    every = [p for each in plain_cells for p in each[0].parameters()]
                    for p in (*cells[0].parameters(), *{id(p): p for p in every}.values()):
                        p.mul_(0.9)
            case "pause" | "resume":
                for each in (cells, *plain_cells):
                    each[rank % len(cells)].requires_grad_(what == "resume")
            case "load":
                if not self.program.has_experts:
                    self.model.load_full_state_dict(self.model.full_state_dict(rank=rank), rank=rank)
                    self.plain.set_buffers(gathered(dict(self.model.named_buffers())))
                self.model.load_state_dict(self.model.state_dict())
            case "optimizer":
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            case "file":
                tree = {"model": fs.checkpoint.ModuleWithPerRankBuffers(self.model), "optimizer": self.optimizer}
                folder = gathered(tempfile.mkdtemp(prefix="fsharp-"))[0]
                fs.checkpoint.save(folder, tree, comm=self.comm, step=self.number)
                with torch.no_grad():
                    for p in self.model.parameters():
                        p.zero_()
                fs.checkpoint.load(folder, tree, comm=self.comm)
            case "function":
                fn, params = self.model.functional()
                x = list(self.inputs())[self.comm.rank]
                with torch.no_grad():
                    same(what, fn(params, x, comm=self.model.comm), self.model(x))
                self.plain.set_buffers(gathered(dict(self.model.named_buffers())))
            case "raise":
                self.fail(rank)
            case "decay":
                for group in (*self.optimizer.param_groups, *self.plain.optimizer.param_groups):
                    group["lr"] *= 0.8

    def fail(self, rank: int) -> None:
        """A hook of one rank raises in a forward: all ranks get an error by the end of the step, and go on."""

        def hook(*_: object) -> None:
            raise Planted

        handle = self.model.cells[-1].register_forward_hook(hook) if self.comm.rank == rank else None
        with pytest.raises(Planted if handle is not None else FsharpError):
            self.step_with_error()
        if handle is not None:
            handle.remove()
        self.optimizer.zero_grad()
        self.plain.set_buffers(gathered(dict(self.model.named_buffers())))

    def step_with_error(self) -> None:
        self.model(next(self.inputs())).sum().backward()
        self.optimizer.state_dict()  # calls a collective


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-9, msg=lambda text: f"{what}: {text}")


def assert_as_plain(seeds: range) -> None:
    def rank_fn(comm: fs.Comm) -> None:
        for seed in seeds:
            program = Program(seed)
            try:
                Runner(program).run()
            except BaseException as error:
                error.add_note(f"program {seed}: {vars(program)}")
                raise

    processes(fs.Mesh({"ranks": RANKS}), rank_fn, timeout=300)


def test_programs_are_as_in_plain_torch():
    assert_as_plain(range(4))


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(10, 90, 10))
def test_more_programs_are_as_in_plain_torch(first):
    assert_as_plain(range(first, first + 10))
