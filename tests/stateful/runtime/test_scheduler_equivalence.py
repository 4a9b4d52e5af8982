"""Whatever the strategy, policy and precision: a scheduler gives the bits of the blocking path, with the traffic it planned."""

from collections import Counter
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsharp as fs
from fsharp.functional.comm.protocol import Call, sent_nbytes
from fsharp.testing import DebugPolicy, processes, simulate
from tests.gpt_like import loss_fn
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    FLAT,
    HYBRID,
    ON_TWO_AXES,
    POLICIES,
    PRECISIONS,
    STRATEGIES,
    Trained,
    assert_same_training,
    every,
    make_layout,
    make_state,
    mesh_of,
    my_batches,
    train,
)

BITS = list(product((1, 2), PRECISIONS, (False, True)))
ALL = [(*case, *rest) for case in product(STRATEGIES, POLICIES) for rest in BITS]
FOR_PROCESSES = ("one group",)  # which is the same to ranks that are threads
ON_ONE_HOST = [p for p in POLICIES if p not in FOR_PROCESSES]
# Each strategy with three policies, of which two are compared with the same blocking steps.
CHOSEN = [
    (s, ON_ONE_HOST[(i + 2 * k) % 9], 1 + (i + k) % 2, [*PRECISIONS][(3 * i + i // 2 + 2 * k) % 4], (3 * i + k) // 2 % 2 == 1)
    for i, s in enumerate(STRATEGIES)
    for k in range(3)
]
STEPS = 3  # one that is recorded, one that gathers what that has not gathered for it, and one like all that follow


@cache
def blocking(strategy, microbatches, precision) -> list[Trained]:
    def rank_fn(comm):
        return train(comm, strategy, steps=STEPS, microbatches=microbatches, precision=PRECISIONS[precision])

    return simulate(STRATEGIES[strategy][0], rank_fn)


@pytest.mark.parametrize("field", [2, 4])
@pytest.mark.parametrize(("by", "names"), [(0, STRATEGIES), (1, ON_ONE_HOST), (3, PRECISIONS)])
def test_the_chosen_cases_are_spread(by, names, field):
    assert {(case[by], case[field]) for case in CHOSEN} == set(product(names, {case[field] for case in ALL}))


@pytest.mark.parametrize(
    ("strategy", "policy", "microbatches", "precision", "donate"),
    [case if case in CHOSEN else pytest.param(*case, marks=pytest.mark.deep) for case in ALL],
)
def test_same_bits_as_the_blocking_path(strategy, policy, microbatches, precision, donate):
    def rank_fn(comm):
        options = {"microbatches": microbatches, "donate": donate, "precision": PRECISIONS[precision]}
        return train(comm, strategy, POLICIES[policy], steps=STEPS, **options)

    found = simulate(STRATEGIES[strategy][0], rank_fn)
    for got, expected in zip(found, blocking(strategy, microbatches, precision), strict=True):
        assert_same_training(got, expected)
        assert got.num_unscheduled_calls == 1
    assert len({got.schedule.to_json() for got in found}) == 1


@every(4, strategy=["ddp", "zero2", "zero3", "hfsdp"], microbatches=[2, 1], wire=[None, torch.float16])
def test_each_gradient_is_rounded_to_a_narrower_dtype_of_the_sum(strategy, microbatches, wire):
    """Before it is sent or added, as on the blocking path, and not when its sum is."""
    precision = fs.Precision(accumulate=torch.bfloat16, wire=wire)

    def run(comm, policy):
        return train(comm, strategy, policy, steps=STEPS, microbatches=microbatches, precision=precision)

    expected, found = (simulate(STRATEGIES[strategy][0], partial(run, policy=policy)) for policy in (None, {}))
    for got, want in zip(found, expected, strict=True):
        assert_same_training(got, want)


# What a step sends, and the memory that it uses, are what its schedule says.


class WatchedMemory:
    """Which bytes of the arena the ops of a scheduler's step use, as they are run."""

    def __init__(self, executor):
        self.bind, self.begin, self.live = executor.action_of, executor.begin_step, {}
        executor.action_of, executor.begin_step = self.watched, self.begin_step
        self.restart()

    def restart(self):
        self.live = {start: (op, memory) for start, (op, memory) in self.live.items() if op.spec.fills == "params"}
        self.total = self.peak_nbytes = sum(memory.nbytes for _, memory in self.live.values())
        self.top = max((memory.stop for _, memory in self.live.values()), default=0)

    def begin_step(self, step):
        self.restart()
        self.begin(step)

    def watched(self, bound):
        action = self.bind(bound)

        def run():
            for op in [each.op for each in bound.bucket_members]:
                for memory in (op.memory, op.opens):
                    if memory is not None and memory.start not in self.live:
                        self.live[memory.start] = op, memory
                        self.total += memory.nbytes
                        self.top = max(self.top, memory.stop)
            self.peak_nbytes = max(self.peak_nbytes, self.total)
            action()
            for op in [each.op for each in bound.bucket_members if each.spec.frees and each.op.memory is not None]:
                self.total -= self.live.pop(op.memory.start)[1].nbytes

        return run


class Measured(NamedTuple):
    """A step that follows its schedule, as it was seen from outside."""

    calls: Counter
    schedule: fs.schedules.Schedule
    top: int
    peak_nbytes: int


def measure(comm, strategy, microbatches, precision="float32", **policy):
    """The third step: the first records, the second gathers what the first has not gathered for it."""
    counting, tx = fs.collectives.CountingComm(comm), fs.optim.adamw(1e-2)
    state = make_state(comm, strategy, tx=tx, precision=PRECISIONS.get(precision, precision))
    scheduler = fs.Scheduler(counting, policy=DebugPolicy(poison=True, **policy))
    memory = WatchedMemory(scheduler.engine.steps.executor)
    step = scheduler(fs.train_step(loss_fn, tx, microbatches=microbatches, donate=True))
    for batch in my_batches(comm, 3, size=12):
        counting.calls.clear()
        state, _ = step(state, batch)
    return Measured(Counter(counting.calls), step.schedule, memory.top, memory.peak_nbytes)


def of_the_loss(mesh):
    """The loss and its weight, two float64."""
    return Counter(Call("all_reduce", axis, sent_nbytes("all_reduce", -(-2 // n) * 8, n)) for axis, n in mesh.axes if n > 1)


def assert_as_planned(measured, mesh):
    assert measured.calls == measured.schedule.collective_counts() + of_the_loss(mesh)
    assert measured.top == measured.schedule.arena
    assert measured.peak_nbytes == measured.schedule.peak_nbytes


def assert_as_predicted(strategy, microbatches, precision):
    """A blocking step makes the calls of ``step_traffic``, a scheduled one those of its schedule. Return the former."""
    mesh, how = STRATEGIES[strategy]
    expected = fs.inspect.step_traffic(make_layout(mesh, how, precision=precision), microbatches=microbatches)

    def rank_fn(comm):
        counting, tx = fs.collectives.CountingComm(comm), fs.optim.adamw(1e-2)
        state = make_state(comm, strategy, tx=tx, precision=precision)
        fs.train_step(loss_fn, tx, microbatches=microbatches)(state, my_batches(comm, 1, size=12)[0], counting)
        return Counter(counting.calls), measure(comm, strategy, microbatches, precision)

    for calls, scheduled in simulate(mesh, rank_fn):
        assert calls == expected
        assert_as_planned(scheduled, mesh)
    return expected


@every(6, microbatches=(1, 2), precision=("float32", "float32 wire"), strategy=STRATEGIES)
@on_ranks(mesh_of)
def test_traffic_and_memory_are_those_planned(comm, strategy, precision, microbatches):
    assert_as_planned(measure(comm, strategy, microbatches, precision), comm.mesh)


@every(3, strategy=STRATEGIES, microbatches=[1, 3])
def test_with_one_buffer_only_the_turning_points_save_a_gather(strategy, microbatches):
    """The unit that a forward ends with begins the backward, and the one that a backward ends with the next forward."""
    mesh = STRATEGIES[strategy][0]
    measured = simulate(mesh, lambda comm: measure(comm, strategy, microbatches, prefetch=0, release="forward"))[0]
    saved = Counter()
    for _ in range(microbatches):
        saved.update(measured.schedule.program.facts["head"].gather)
    for _ in range(microbatches - 1):
        saved.update(measured.schedule.program.facts["embed"].gather)
    assert measured.calls + saved == fs.inspect.step_traffic(make_layout(mesh, strategy), microbatches=microbatches)


# Real processes: what is under way at the same time really is.

IN_PROCESSES = ("default", "prefetch 2", "buckets", "sums at once", "one group")


def train_all(comm, cases):
    """What each case came to. Schedules stay behind."""
    options = {"steps": STEPS, "microbatches": 2}
    return {case: train(comm, case[0], POLICIES[case[1]], **options)._replace(schedule=None) for case in cases}


def assert_right(found):
    for (strategy, policy), trained in found.items():
        assert trained.losses == blocking(strategy, 2, "float32")[0].losses, (strategy, policy)
        assert_same_training(trained, blocking(strategy, 2, "float32")[0])
        assert trained.num_unscheduled_calls == 1


def make_module():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 12), *layers, nn.Linear(12, 3))


def module_batches(comm, steps=6):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(32, 5, generator=g)
    return [{"x": x.chunk(comm.mesh.size)[comm.rank], "y": x[:, :3].argmax(-1).chunk(comm.mesh.size)[comm.rank]}] * steps


def by_fsdp2(comm):
    module, losses = make_module(), []
    device_mesh = init_device_mesh("cpu", (comm.mesh.size,))
    for layer in module:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(module, mesh=device_mesh)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.01)
    for batch in module_batches(comm):
        loss = F.cross_entropy(module(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(comm.all_reduce(loss.detach(), "dp") / comm.mesh.size))
    return losses


def by_scheduler(comm):
    fns, params = zip(*(fs.make_functional(layer) for layer in make_module()))

    def loss(params, batch, comm):
        x = batch["x"]
        for fn, layer in zip(fns, params):
            x = fs.forward(fn, layer, x, comm=comm)
        return F.cross_entropy(x, batch["y"])

    tx, losses = fs.optim.adamw(1e-2, weight_decay=0.01), []
    state = make_state(comm, "zero3", tx=tx, params=list(params), units="*")
    step = fs.Scheduler(comm, policy=DebugPolicy(poison=True))(fs.train_step(loss, tx))
    for batch in module_batches(comm):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses


def test_two_processes():
    cases = list(zip([*FLAT, *FLAT], IN_PROCESSES, strict=False))

    def rank_fn(comm):
        return train_all(comm, cases), [measure(comm, name, 2) for name in FLAT], by_scheduler(comm), by_fsdp2(comm)

    for trained, measured, ours, theirs in processes(DP, rank_fn):
        assert_right(trained)
        for each in measured:
            assert_as_planned(each, DP)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours[-1] < ours[0] - 0.01


@pytest.mark.deep
def test_four_processes():
    cases = [*zip(ON_TWO_AXES, IN_PROCESSES), ("hfsdp", "one group"), ("late", "default")]

    def rank_fn(comm):
        return train_all(comm, cases), [measure(comm, name, 2, "float32 wire") for name in ("hsdp", "hfsdp")]

    for trained, measured in processes(HYBRID, rank_fn):
        assert_right(trained)
        for each in measured:
            assert_as_planned(each, HYBRID)


@pytest.mark.deep
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_with_every_policy(strategy):
    mesh = STRATEGIES[strategy][0]
    for trained in processes(mesh, lambda comm: train_all(comm, [(strategy, policy) for policy in POLICIES])):
        assert_right(trained)
