"""How long the way is from a user's call to the collective, in frames of this library; and how many calls a unit costs."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import fsharp as fs
from benchmarks import calls, contenders, gpt
from fsharp.distributed.worker_threads import Worker
from fsharp.stateful.runtime import function_record
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.units import unit_state
from fsharp.testing import processes

ROOT = Path(fs.__file__).parent
DP = fs.Mesh({"dp": 2})
SHAPE = gpt.Shape(vocab=32, dim=16, layers=4, heads=2, time=8, batch=1)
BATCHES = 5
FEW, MANY = 16, 24  # layers: so many that units share collectives alike in both models


def frames_between(called, name):
    """The frames of the library from the user's call, the function of the library that ``called`` names last, to here."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            found.append((str(path.relative_to(ROOT)), frame.f_code.co_qualname))
        elif found and path.name in ("gpt.py", "contenders.py", Path(__file__).name):
            break
        frame = frame.f_back
    called[name] = found[::-1]


def ways(comm):
    """By how a program calls the library, the frames from a user's call to the first collective of a gather."""
    found = {}
    whole = gpt.tree_of(gpt.build(SHAPE))
    tree = fs.shard(whole, fs.plan(whole, DP, fs.zero3("dp")), comm)

    def watch(owner, method, name):
        original = getattr(owner, method)

        def watched(self, *args, **kwargs):
            if name not in found:
                frames_between(found, name)
            return original(self, *args, **kwargs)

        setattr(owner, method, watched)
        return lambda: setattr(owner, method, original)

    for name, call in {
        "gather": lambda: fs.gather(tree, comm=comm),
        "forward": lambda: fs.forward(lambda params: params, tree, comm=comm),
    }.items():
        end = watch(Worker, "submit", name)
        call()
        end()
    batches = gpt.batches(SHAPE, comm.rank, BATCHES)
    strategy = fs.zero3("dp")
    for name, contender in {
        "scheduled": contenders.sharded("functions", SHAPE, comm, strategy, fs.SchedulePolicy()),
        "module": contenders.wrapped("module", SHAPE, comm, strategy),
    }.items():
        for batch in batches[:-1]:
            contender.step(batch)
        contender.settle()
        end = watch(GlooTransport, "_run_in_two_workers", name)
        contender.step(batches[-1])
        end()
    return found


def test_few_frames_lie_between_a_call_and_its_collective():
    most = {"gather": (9, 5), "forward": (9, 5), "scheduled": (11, 7), "module": (11, 7)}
    for found in processes(DP, ways):
        for name, (frames, files) in most.items():
            way = found[name]
            assert 4 < len(way) <= frames, (name, way)
            assert len({file for file, _ in way}) <= files, (name, way)


def calls_a_unit(comm):
    """By how a program calls the library, the calls of Python functions that one more unit costs in a step."""
    found, batches = {}, gpt.batches(SHAPE, comm.rank, BATCHES)
    for layers in (FEW, MANY):
        shape, strategy = replace(SHAPE, layers=layers), fs.zero3("dp")
        functions = contenders.sharded("functions", shape, comm, strategy, fs.SchedulePolicy())
        for each in functions, contenders.wrapped("module", shape, comm, strategy):
            found.setdefault(each.name, []).append(calls.counted(each, batches))
    return {name: (more - few) / (MANY - FEW) for name, (few, more) in found.items()}


def test_a_unit_costs_few_calls():
    for found in processes(DP, calls_a_unit, timeout=200):
        assert 100 < found["functions"] <= 180
        assert 150 < found["module"] <= 285


def test_a_first_call_looks_few_times_at_each_unit(monkeypatch):
    """And not at each unit for each other one."""
    seen, found = Counter(), []

    def memory_key(node):
        seen["addresses"] += 1
        return unit_state.memory_key(node)

    def key(unit):
        seen["keys"] += 1
        return unit.__dict__["key"]

    monkeypatch.setattr(function_record, "memory_key", memory_key)
    monkeypatch.setattr(
        unit_state.UnitState, "key", property(key, lambda unit, key: unit.__dict__.update(key=key)), raising=False
    )
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    for num_units in (20, 40):
        seen.clear()
        params = [torch.ones(4) for _ in range(num_units)]
        tree = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp"), units="*"), comm)
        fs.Scheduler(comm)(lambda tree, comm: [fs.forward(torch.sum, unit, comm=comm) for unit in tree])(tree)
        found.append(dict(seen))
    assert all(0 < found[1][name] <= 2 * found[0][name] for name in ("addresses", "keys"))
