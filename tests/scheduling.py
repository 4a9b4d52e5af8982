"""What tests of the scheduler share: strategies and policies by name, training by either path, programs run by both."""

from collections import Counter
from dataclasses import fields
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings

import fsharp as fs
from fsharp.functional.loss import split_batch
from fsharp.layouts import AxisRule, Partial, Replicate, Shard
from fsharp.testing import DebugPolicy, simulate
from tests.gpt_like import logits, loss_fn, make_batches, make_params

DP = fs.Mesh({"dp": 2})
HYBRID = fs.Mesh({"outer": 2, "inner": 2})
FLAT = {name: (DP, getattr(fs, name)("dp")) for name in ("ddp", "zero1", "zero2", "zero3")}
LATE = AxisRule(Shard, Partial, Shard)
ON_TWO_AXES = {
    "hsdp": (HYBRID, fs.hsdp("outer", "inner")),
    "hfsdp": (HYBRID, fs.hfsdp("outer", "inner")),
    "zero3x2": (HYBRID, fs.zero3("outer", "inner")),
    "mixed": (
        HYBRID,
        fs.Strategy({"outer": AxisRule(Replicate, Partial, Shard), "inner": AxisRule(Replicate, Shard, Shard)}),
    ),
    "late": (HYBRID, fs.Strategy({"outer": LATE, "inner": LATE})),
}
STRATEGIES = {**FLAT, **ON_TWO_AXES}

POLICIES = {
    "default": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "release after forward": {"release": "forward"},
    "release after backward": {"release": "backward"},
    "buckets": {"bucket_nbytes": 2000},
    "nothing carried": {"gather_at_start": False},
    "sums at once": {"sum_late": False},
    "offload": {"offload": True},
    "one group": {"separate_groups": False},
}
FORMAT_POLICIES = {"default": {}, "buckets": {"prefetch": 2, "bucket_nbytes": 2000}, "sums at once": {"sum_late": False}}
"""Those under which formats are tried."""

PRECISIONS = {
    "float32": fs.Precision(),
    "bfloat16": fs.Precision(compute=torch.bfloat16, main=torch.float32),
    "float32 wire": fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32),
    "8 and 4 bits": fs.Precision(stored=fs.formats.mxfp8, wire=fs.formats.mxint4),
}


def every(n, /, **values):
    """Parametrize by one of ``n`` combinations; ``make test-all`` has the others as well.

    They are chosen one by one: next comes the combination with most values that none before it has, and among those the one
    with most new pairs of values. So every value is there where enough are chosen, and then every pair. Among equals those in
    diagonals come first.
    """
    columns = [list(each) for each in values.values()]
    table = [(i, *rest) for i in range(len(columns[0])) for rest in product(*(range(len(each)) for each in columns[1:]))]
    width = len(table) // len(columns[0])
    diagonals = {row: (row[0] + number % width) % n for number, row in enumerate(table)}
    order = sorted(table, key=diagonals.__getitem__)
    chosen, seen = set(), set()
    while len(chosen) < len(table) / n:
        facts = {row: (set(enumerate(row)) - seen, set(combinations(enumerate(row), 2)) - seen) for row in order}
        best = max((row for row in order if row not in chosen), key=lambda row: tuple(map(len, facts[row])))
        chosen.add(best)
        seen |= set.union(*facts[best])
    cases = [
        pytest.param(*(column[i] for column, i in zip(columns, row)), marks=[pytest.mark.deep] * (row not in chosen))
        for row in table
    ]
    return pytest.mark.parametrize(list(values), cases)


few_examples = settings(max_examples=settings.default.max_examples // 2)
"""Hypothesis tests whose examples take long: 12 examples by default."""


def turned(values, first):
    """Return the names ``values`` from ``first`` on, then the others: so tests of one file have different ones by default."""
    names = list(values)
    at = names.index(first)
    return [*names[at:], *names[:at]]


def mesh_of(strategy):
    return STRATEGIES[strategy][0]


def buffers(tree):
    return [buffer for node in fs.layouts.units_of(tree) for buffer in node.buffers]


def copied(tree):
    return [buffer.clone() for buffer in buffers(tree)]


def make_tx():
    return fs.optim.sgd(0.1, momentum=0.9)


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, deterministic=True), fs.optim.adamw(1e-2))
"""With collectives of its own, which take a while."""


def make_layout(mesh, strategy, params=None, **plan_options):
    """``strategy``: one, or the name of one."""
    strategy = STRATEGIES[strategy][1] if isinstance(strategy, str) else strategy
    return fs.plan(params or make_params(layers=3), mesh, strategy, **{"units": "layers.*", **plan_options})


def make_state(comm, strategy, *, tx=None, params=None, **plan_options):
    """A state to start from."""
    params = params or make_params(layers=3)
    layout = make_layout(comm.mesh, strategy, params, **plan_options)
    return fs.init_state(tx or make_tx(), fs.shard(params, layout, comm, place="optim"), comm=comm)


def my_batches(comm, count, size=8, seed=1):
    """This rank's part of each of ``count`` batches."""
    return [split_batch(batch, comm.mesh.size)[comm.rank] for batch in make_batches(count, size * comm.mesh.size, seed)]


def evaluate(params, batch, comm, mode=torch.no_grad):
    with mode():
        return F.cross_entropy(logits(params, batch["x"], comm), batch["y"])


def training(loss, strategy, steps=3, changes=lambda step: {}, *, tx=None, microbatches=1, donate=True, size=8, **plan_options):
    """A program that trains by ``loss``; ``changes`` are made to the batch of each step. Returns losses and parameters."""

    def program(run):
        state = make_state(run.comm, strategy, tx=tx, **plan_options)
        step = run.wrap(fs.train_step(loss, tx or make_tx(), microbatches=microbatches, donate=donate))
        losses = []
        for i, batch in enumerate(my_batches(run.comm, steps, size)):
            state, metrics = step(state, {**batch, **changes(i)})
            losses.append(metrics.loss)
        return losses, full_params(state, run.comm)

    return program


class Trained(NamedTuple):
    """What came of some steps."""

    losses: list[float]
    params: list[torch.Tensor]
    num_unscheduled_calls: int
    schedule: fs.schedules.Schedule | None


def train(
    comm, strategy, policy=None, *, loss=loss_fn, steps=4, microbatches=1, donate=True, tx=None, params=None, **plan_options
) -> Trained:
    """Some steps by a scheduler with a policy, or, without one, by the blocking path."""
    tx = tx or CLIPPED
    state = make_state(comm, strategy, tx=tx, params=params, **plan_options)
    step = fs.train_step(loss, tx, microbatches=microbatches, donate=donate)
    blocking = policy is None
    scheduler = None if blocking else fs.Scheduler(comm, policy=DebugPolicy(**{"poison": True, **policy}))
    call = partial(step, comm=comm) if blocking else scheduler(step)
    losses = []
    for batch in my_batches(comm, steps):
        state, metrics = call(state, batch)
        losses.append(float(metrics.loss))
    leaves = [leaf.clone() for leaf in optree.tree_leaves(fs.full_tree(state.params, comm=comm))]
    return Trained(losses, leaves, *((0, None) if blocking else (call.num_unscheduled_calls, call.schedule)))


def counting_host_copies(scheduler):
    """Count the bytes of copies from and to host memory from now on. Return a function that returns those of this step."""
    executor, by_step = scheduler.engine.steps.executor, Counter()
    begin = executor.set_host_copies

    def set_host_copies(host_copies, *update_gathers):
        by_step[executor.number] += sum(source.nbytes for each in host_copies.values() for _, source in each.copies)
        begin(host_copies, *update_gathers)

    executor.set_host_copies = set_host_copies
    return lambda: by_step[executor.number]


def assert_same(a: Any, b: Any) -> None:
    """The same structure, and the same bits."""
    paths, ours, spec = optree.tree_flatten_with_path(a)
    theirs, other = optree.tree_flatten(b)
    assert spec == other, f"{spec} and {other}"
    for path, x, y in zip(paths, ours, theirs, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, path
            assert torch.equal(x, y), f"{path}: {int((x != y).sum())} of {x.numel()} elements differ: {x} and {y}"
        else:
            assert x == y, f"{path}: {x} and {y}"


def assert_same_training(a: Trained, b: Trained) -> None:
    assert_same((a.losses, a.params), (b.losses, b.params))


class Program:
    """What a program of a test is given, on one rank.

    Attributes:
        comm: for what is not scheduled.
        scheduled: what :meth:`wrap` has made; empty in the blocking run.
    """

    def __init__(self, comm, scheduler=None):
        self.comm, self.scheduler, self.scheduled = comm, scheduler, []

    def wrap(self, fn):
        """``fn`` without its argument ``comm``."""
        if self.scheduler is None:
            return partial(fn, comm=self.comm)
        self.scheduled.append(self.scheduler(fn))
        return self.scheduled[-1]

    @property
    def engine(self):
        """The scheduler as a plain Comm, or the Comm."""
        return self.scheduler or self.comm


def run_both(program, mesh=DP, *, compare=assert_same, policy=None, change=lambda scheduler: None, **options):
    """``program(Program)`` by the blocking path and by a scheduler, on every rank.

    What it returns, a tree of tensors and numbers, has to be the same. Returns that, of rank 0, and its scheduled functions.
    ``change``: is made to the scheduler.
    """

    def scheduled(comm):
        settings = {field.name: getattr(policy, field.name) for field in fields(policy)} if policy else options
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(**{"poison": True, **settings}))
        change(scheduler)
        here = Program(comm, scheduler)
        return program(here), here.scheduled

    expected = simulate(mesh, lambda comm: program(Program(comm)))
    found = simulate(mesh, scheduled)
    for want, (got, _) in zip(expected, found, strict=True):
        compare(got, want)
    return found[0]


def assert_close(a: Any, b: Any) -> None:
    """For what the blocking path adds up in another order."""
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def full_params(state, comm):
    """Copies of all parameters."""
    return optree.tree_map(torch.clone, fs.full_tree(state.params, comm=comm))


def events(schedule):
    """The order that was recorded, as text."""
    return [str(event) for event in schedule.program.events]


def gathers(schedule):
    """How often each unit is gathered for use in a step."""
    return Counter(op.unit for op in schedule.ops if op.kind == "gather" and op.phase != "update")
