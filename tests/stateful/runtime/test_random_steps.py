"""Random programs by seed, of several trees and losses: by a scheduler, by the blocking path, and by torch on whole tensors.

To look at a program that fails: ``draw(seed)``.
"""

import random
from dataclasses import dataclass
from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.functional.loss import split_batch
from tests.scheduling import POLICIES, PRECISIONS, STRATEGIES, make_state, mesh_of, run_both

DIM, UNITS, STEPS = 4, 3, 5
SEEDS = range(300)
FORMATS = {**PRECISIONS, "feedback": fs.Precision(wire=fs.formats.mxint8, feedback=True)}
CLIPPED = 0.05
OPTIMIZERS = {  # with an eps by which rounding errors stay small
    "sgd": (fs.optim.sgd(0.05, momentum=0.9), partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "adamw": (fs.optim.adamw(1e-2, eps=1e-3), partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=1e-4)),
}
TIED = 2  # layers.2.w is layers.0.w


@dataclass(frozen=True)
class Call:
    """A use of a unit in a loss; ``inside``: uses within its function."""

    way: str
    tree: int
    unit: int
    inside: tuple["Call", ...] = ()


@dataclass(frozen=True)
class Statement:
    """A part of a step. ``trees``: those that are trained. ``losses``: uses of units, by branch."""

    kind: str
    trees: tuple[int, ...]
    microbatches: int
    losses: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True)
class Program:
    """What a seed stands for. ``steps``: the function of each step, and the number that is added to its branches."""

    strategy: str
    precision: str
    policy: str
    tx: str
    is_clipped: bool
    trees: int
    is_tied: bool
    frozen: tuple[str, ...]
    donate: bool
    in_closure: bool
    functions: tuple[tuple[Statement, ...], ...]
    steps: tuple[tuple[int, int], ...]


def draw_calls(r, units, comes_back, depth=1):
    ways, calls = ["use"] * 4 + ["kept", "remat", "no gradient", "moved", "detached", *["nest"] * depth], []
    for _ in range(r.randint(depth, 4)):
        if units:
            way, unit = r.choice(ways), r.choice(units) if comes_back else units.pop()
            calls.append(Call(way, *unit, draw_calls(r, units, comes_back, 0) if way == "nest" else ()))
    return tuple(calls)


def draw_statement(r, trees, kinds, comes_back, is_tied):
    kind, tree = r.choice(kinds), r.randrange(trees)
    trained = tuple(range(trees)) if kind == "joint" else (tree,)
    last = tuple(Call("use", t, UNITS - 1) for t in trained)  # each tree that is trained has a gradient
    losses = []
    for _ in range(1 if comes_back else r.choice([1, 2, 3])):
        units = [(t, unit) for t in {*trained, r.randrange(trees)} for unit in range(UNITS)]
        if not comes_back:
            units = [(t, unit) for t, unit in units if unit < UNITS - 1 and not (is_tied and unit == 0)]
            r.shuffle(units)
        losses.append((*draw_calls(r, units, comes_back), *last))
    return Statement(kind, trained, r.choice([1, 1, 2, 3]), tuple(losses))


def draw(seed):
    """The program of a seed. Units come back within a loss, or losses differ from step to step and within a step.

    Both at once may change the last bits: see docs/limits.md.
    """
    r = random.Random(seed)
    trees, precision, comes_back, is_tied = (
        r.choice([1, 2, 3]),
        r.choice(["float32", *FORMATS]),
        r.random() < 0.5,
        r.random() < 0.3,
    )
    kinds = ["train"] if precision == "feedback" else ["train", "train", "own", "late", "joint", "evaluate"]
    functions = tuple(
        tuple(draw_statement(r, trees, kinds, comes_back, is_tied) for _ in range(r.randint(1, 3)))
        for _ in range(r.choice([1, 1, 2]))
    )
    return Program(
        strategy=r.choice(list(STRATEGIES)),
        precision=precision,
        policy=r.choice(list(POLICIES)),
        tx=r.choice(list(OPTIMIZERS)),
        is_clipped=r.random() < 0.5,
        trees=trees,
        is_tied=is_tied,
        frozen=r.choice([(), (), ("layers.1",), ("layers.1.b",)]),
        donate=r.random() < 0.5,
        in_closure=r.random() < 0.4,
        functions=functions,
        steps=tuple((r.randrange(len(functions)), r.choice([0, 0, 1])) for _ in range(STEPS)),
    )


def tree_of(p, number):
    """A tree to start from."""
    g = torch.Generator().manual_seed(number)
    layers = [
        {"w": torch.randn(DIM, DIM, generator=g) / 2, "b": torch.randn(DIM, generator=g), "s": torch.randn((), generator=g)}
        for _ in range(UNITS)
    ]
    if p.is_tied:
        layers[TIED]["w"] = layers[0]["w"]
    return {"layers": layers}


def batch_of(statement, branch, *seed):
    """The batch of a rank."""
    rows, g = 2 * statement.microbatches, torch.Generator().manual_seed(hash(seed))
    branches = torch.arange(statement.microbatches).repeat_interleave(2) + branch
    return {"x": torch.randn(rows, DIM, generator=g), "w": torch.randint(0, 3, (rows,), generator=g), "branch": branches}


def layer(p, x):
    x = x.to(p["w"].dtype)
    return x + p["s"] * torch.tanh(x @ p["w"] + p["b"])


def run_calls(calls, x, use):
    """``x`` after some calls. ``use(call, fn, x)``: call ``fn`` on a unit's parameters and on ``x``."""
    for call in calls:
        if call.way == "nest":
            x = use(call, lambda p, x, inside=call.inside: layer(p, run_calls(inside, x, use)), x)
        elif call.way in ("no gradient", "moved"):
            with torch.no_grad():
                y = use(call, layer, x)
            x = x + 0.1 * y
        else:
            x = use(call, layer, x.detach() if call.way == "detached" else x)
    return x


def loss_of(statement, batch, use):
    calls = statement.losses[int(batch["branch"][0]) % len(statement.losses)]
    y = run_calls(calls, batch["x"], use).float()
    return fs.Loss((y.square().mean(-1) * batch["w"]).sum(), batch["w"].sum().float())


def on_shards(p, run):
    """Run a program by the library. Returns losses, norms, results of evaluations, and parameters after each step."""
    tx = OPTIMIZERS[p.tx][0]
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(CLIPPED, deterministic=True), tx) if p.is_clipped else tx
    plan = {"tx": tx, "frozen": p.frozen, "precision": FORMATS[p.precision]}
    states = [make_state(run.comm, p.strategy, params=tree_of(p, t), **plan) for t in range(p.trees)]

    def use_of(trees, comm):
        def use(call, fn, x):
            layers = trees[call.tree]["layers"]
            layers = fs.gather(layers, to="optim", comm=comm) if call.way == "moved" else layers
            ties = layers[:1] if p.is_tied and call.unit == TIED else ()
            how = {"release": call.way != "kept", "remat": call.way == "remat"}
            return fs.forward(fn, layers[call.unit], x, comm=comm, ties=ties, **how)

        return use

    def run_statement(s, batch, comm):
        now = [state.params for state in states]
        [first, *_] = s.trees

        def loss(params, batch, comm):
            given = dict(zip(s.trees, params if s.kind == "joint" else [params]))
            return loss_of(s, batch, use_of([given.get(t, each) for t, each in enumerate(now)], comm))

        if s.kind == "evaluate":
            with torch.no_grad():
                return [run_calls(s.losses[0], batch["x"], use_of(now, comm)).float()]
        if s.kind == "train":
            step = fs.train_step(loss, tx, microbatches=s.microbatches, donate=p.donate)
            states[first], metrics = step(states[first], batch, comm)
            return [metrics.loss]
        trained = tuple(now[t] for t in s.trees) if s.kind == "joint" else now[first]
        value, grads = fs.value_and_grad(loss, microbatches=s.microbatches)(trained, batch, comm=comm)
        seen = []
        if s.kind == "late":  # an evaluation between a gradient and its reduction
            with torch.no_grad():
                seen.append(use_of(now, comm)(Call("use", first, 0), layer, batch["x"]).float())
        metrics, grads = fs.average(value, fs.reduce_scatter(grads, comm=comm), comm=comm)
        for t, grad in zip(s.trees, grads if s.kind == "joint" else [grads]):
            seen.append(fs.optim.global_norm(grad, comm=comm, deterministic=True))
            states[t] = fs.update(tx, grad, states[t], comm=comm)
        return [*seen, metrics.loss]

    def step_of(function):
        def step(given, branch, number, comm):
            seen = []
            for i, s in enumerate(function):
                seen += run_statement(s, batch_of(s, branch, number, i, comm.rank), comm)
            return seen

        return run.wrap(step)

    steps, seen = list(map(step_of, p.functions)), []
    for number, (function, branch) in enumerate(p.steps):
        seen += [x.clone() for x in steps[function](None if p.in_closure else states, branch, number)]
        seen += [x.clone() for state in states for x in optree.tree_leaves(fs.full_tree(state.params, comm=run.comm))]
    return seen


def in_torch(p, ranks):
    """Run a program by torch alone, with all batches on one process. Returns what rank 0 has of :func:`on_shards`."""
    trees, trained, optimizers = [tree_of(p, t) for t in range(p.trees)], [], []
    for tree in trees:
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        names = [".".join(map(str, path)) for path in paths]
        frozen = [any(f"{name}.".startswith(f"{each}.") for each in p.frozen) for name in names]
        own = {id(x): x.requires_grad_() for x, is_frozen in zip(leaves, frozen) if not is_frozen}
        trained.append(list(own.values()))
        optimizers.append(OPTIMIZERS[p.tx][1](trained[-1]))

    def use(call, fn, x):
        return fn(trees[call.tree]["layers"][call.unit], x)

    def run_statement(s, batches):
        if s.kind == "evaluate":
            with torch.no_grad():
                return [run_calls(s.losses[0], batches[0]["x"], use)]
        losses = [loss_of(s, part, use) for batch in batches for part in split_batch(batch, s.microbatches)]
        total, weight = sum(loss.sum for loss in losses), sum(loss.weight for loss in losses)
        mean, seen = total / weight if weight else total, []
        mean.backward()
        with torch.no_grad():
            if s.kind == "late":
                seen.append(use(Call("use", s.trees[0], 0), layer, batches[0]["x"]))
            for t in s.trees:
                for x in trained[t]:
                    x.grad = torch.zeros_like(x) if x.grad is None else x.grad
                norm = torch.cat([x.grad.flatten() for x in trained[t]]).norm()
                seen += [norm] if s.kind != "train" else []
                for x in trained[t] if p.is_clipped and norm > CLIPPED else ():
                    x.grad *= CLIPPED / norm
                optimizers[t].step()
        for each in optimizers:
            each.zero_grad()
        return [*seen, mean.detach().double()]

    seen = []
    for number, (function, branch) in enumerate(p.steps):
        for i, s in enumerate(p.functions[function]):
            seen += run_statement(s, [batch_of(s, branch, number, i, rank) for rank in range(ranks)])
        seen += [x.detach().clone() for tree in trees for x in optree.tree_leaves(tree)]
    return seen


FOUND_ONCE = (14,)
"""Parts of parameters that were moved to the optimizer's place were taken for parameters."""
BY_DEFAULT = (*FOUND_ONCE, 8, 17, 31, 76, 109, 123, 131, 150, 209, 252)
"""Small programs, which together have each value of each field, each kind of statement and each way of a call."""


def test_the_programs_by_default_have_each_value_of_each_field():
    def values(seeds):
        programs = [draw(seed) for seed in seeds]
        names = [name for name in Program.__dataclass_fields__ if name not in ("functions", "steps")]
        statements = [s for p in programs for function in p.functions for s in function]
        calls = [call for s in statements for loss in s.losses for call in loss]
        found = {(name, getattr(p, name)) for p in programs for name in names}
        return found | {s.kind for s in statements} | {s.microbatches for s in statements} | {call.way for call in calls}

    assert values(BY_DEFAULT) == values(SEEDS)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.deep] * (n not in BY_DEFAULT)) for n in SEEDS])
def test_random_steps(seed):
    p = draw(seed)
    found, _ = run_both(partial(on_shards, p), mesh_of(p.strategy), **POLICIES[p.policy])
    if p.precision == "float32":
        torch.testing.assert_close(found, in_torch(p, mesh_of(p.strategy).size), rtol=1e-4, atol=1e-5)
