"""Offload: optimizer state and main copies are in host memory between updates; values, bytes and order do not change."""

import copy
import pickle
from functools import partial
from itertools import product
from typing import NamedTuple

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import ScheduleError
from fsharp.functional.layout.sharded import tree_nbytes
from fsharp.functional.moves import host_buffers_to_device
from fsharp.stateful.runtime.captured_step import _check_capturable
from fsharp.stateful.transport.streams import Lanes
from fsharp.stateful.units.host_copies import HostStateBuffers, StateOffload
from fsharp.testing import DebugPolicy, RaceError, checking_races, processes, simulate
from fsharp.testing.ordering import RecordStreamCall, Wait, replay
from tests import modules
from tests.gpt_like import loss_fn
from tests.ranks import on_ranks
from tests.scheduling import (
    DP,
    FLAT,
    HYBRID,
    STRATEGIES,
    assert_same,
    assert_same_training,
    counting_host_copies,
    every,
    make_state,
    mesh_of,
    my_batches,
    train,
)
from tests.stateful.runtime.test_races import train as train_on_streams, train_module as train_module_on_streams

PRECISIONS = {"fp32": fs.Precision(), "bf16": fs.Precision(compute=torch.bfloat16, main=torch.float32)}


MATRICES = {"**": "default", "**.w": "matrix", "**.v": "matrix"}


RULES = {
    "adamw": (fs.optim.adamw(1e-2), {}),
    "momentum": (fs.optim.sgd(1e-2, momentum=0.9), {}),
    "chain": (fs.optim.chain(fs.optim.clip_by_global_norm(1.0, deterministic=True), fs.optim.adamw(1e-2)), {}),
    "partition": (
        fs.optim.partition({"matrix": fs.optim.sgd(1e-2, momentum=0.9), "default": fs.optim.adamw(1e-2)}),
        {"labels": MATRICES},
    ),
    "muon": (
        fs.optim.partition({"matrix": fs.optim.muon(1e-2), "default": fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9)}),
        {
            "labels": MATRICES,
            "atoms": {"**": fs.layouts.ElementAtom(), "**.w": fs.layouts.LeafAtom(), "**.v": fs.layouts.LeafAtom()},
        },
    ),
}


def both(strategy, precision, rule, donate, run=simulate):
    """The same training by the blocking path and with offload."""
    tx, plan = RULES[rule]
    options = {"tx": tx, "precision": PRECISIONS[precision], "donate": donate, "microbatches": 2, "steps": 3, **plan}
    mesh = STRATEGIES[strategy][0]
    return run(mesh, lambda comm: (train(comm, strategy, **options), train(comm, strategy, {"offload": True}, **options)))


CASES = list(product([*FLAT, "hfsdp"], RULES, PRECISIONS, (False, True)))


PAIRS = [(i, j, s, r) for i, s in enumerate(FLAT) for j, r in enumerate(RULES) if (i + j) % 4 == 0]
CHOSEN = [(s, r, [*PRECISIONS][j % 2], i // 2 != j // 2) for i, j, s, r in PAIRS]


@pytest.mark.parametrize(
    ("strategy", "rule", "precision", "donate"),
    [case if case in CHOSEN else pytest.param(*case, marks=pytest.mark.deep) for case in CASES],
)
def test_functions_have_the_same_bits(strategy, rule, precision, donate):
    for expected, found in both(strategy, precision, rule, donate):
        assert_same_training(found, expected)
        assert found.num_unscheduled_calls == 1
        assert found.schedule.host_copy_nbytes > 0


def test_so_have_processes():
    def rank_fn(comm):
        here = lambda mesh, fn: fn(comm)  # noqa: E731
        return [both(*case, True, here) for case in (("zero1", "bf16", "muon"), ("zero3", "fp32", "chain"))]

    for cases in processes(DP, rank_fn):
        for expected, found in cases:
            assert_same_training(found, expected)
            assert found.num_unscheduled_calls == 1


def train_module(comm, strategy, precision, tx, *, offload):
    model = fs.shard_module(
        modules.make(), mesh=comm, strategy=STRATEGIES[strategy][1], units=[modules.Block], precision=PRECISIONS[precision],
        policy=DebugPolicy(offload=offload, poison=True),
    )  # fmt: skip
    optimizer = fs.ShardedOptimizer(model.parameters(), tx)
    for x, y in modules.batches(comm, 3):
        model(x, y)["loss"].backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


MODULE_RULES = [fs.optim.adamw(1e-2), fs.optim.sgd(1e-2, momentum=0.9), fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.5)]


@every(5, strategy=FLAT, precision=PRECISIONS, tx=MODULE_RULES)
def test_modules_have_the_same_bits(strategy, precision, tx):
    """Parameters, whole and as parts, the optimizer's state, averages, and what a state dict brings back."""

    def rank_fn(comm, offload):
        model, optimizer = train_module(comm, strategy, precision, tx, offload=offload)
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        found = [dict(model.named_full_parameters()), [p.local.clone() for p in model.parameters()], saved["state"]]
        if hasattr(saved["state"], "ema"):
            with optimizer.averaged(), torch.no_grad():
                found.append(dict(model.named_full_parameters()))
        x, y = modules.batches(comm, 1)[0]
        optimizer.load_state_dict(saved)
        modules.descend(model(x, y)["loss"], optimizer)
        return [*found, dict(model.named_full_parameters())], [
            isinstance(node.lazy, HostStateBuffers) for node in fs.layouts.units_of(model.train_state.opt)
        ]

    expected = simulate(DP, lambda comm: rank_fn(comm, False))
    for (found, away), (want, here) in zip(simulate(DP, lambda comm: rank_fn(comm, True)), expected, strict=True):
        assert_same(found, want)
        assert all(away)
        assert not any(here)


@on_ranks(DP)
def test_main_copies_of_a_module_stay_where_it_shows_them(comm):
    model, _ = train_module(comm, "zero3", "bf16", fs.optim.adamw(1e-2), offload=True)
    assert model.train_state.main is not None
    held = {b.untyped_storage().data_ptr() for node in fs.layouts.units_of(model.train_state.main) for b in node.buffers}
    assert {p.local.untyped_storage().data_ptr() for p in model.parameters() if p.local.numel()} <= held
    assert not any(isinstance(node.lazy, HostStateBuffers) for node in fs.layouts.units_of(model.train_state.main))


class Seen(NamedTuple):
    """What was there after each step."""

    copied: list[int]
    states: list[fs.TrainState]
    addresses: list[list[int]]
    schedule: fs.schedules.Schedule


def steps(comm, strategy, precision="bf16", *, tx=RULES["chain"][0], donate=True, between=lambda state: state, **policy):
    state = make_state(comm, strategy, tx=tx, precision=PRECISIONS[precision])
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(offload=True, poison=True, **policy))
    call = scheduler(fs.train_step(loss_fn, tx, donate=donate))
    seen, copied_nbytes = Seen([], [], [], None), counting_host_copies(scheduler)
    for batch in my_batches(comm, 3):
        state, _ = call(between(state), batch)
        seen.copied.append(copied_nbytes())
        seen.states.append(state)
        seen.addresses.append([b.data_ptr() for node in held(state) for b in node.buffers if b.numel()])
    return seen._replace(schedule=call.schedule)


def held(state):
    return fs.layouts.units_of((state.main, state.opt))


@every(2, strategy=STRATEGIES, precision=PRECISIONS)
@on_ranks(mesh_of)
def test_bytes_copied_are_those_planned(comm, strategy, precision):
    copied, states, _, schedule = steps(comm, strategy, precision)
    nbytes = tree_nbytes([node.buffers for node in held(states[-1])])
    assert copied == [nbytes, 2 * nbytes, 2 * nbytes], "the first step finds its state on the device"
    assert schedule.host_copy_nbytes == 2 * nbytes
    assert sum(facts.host for facts in schedule.program.units) == nbytes
    assert all(isinstance(node.lazy, HostStateBuffers) for node in held(states[-1]) if any(map(len, node.buffers)))
    assert not any(isinstance(node.lazy, HostStateBuffers) for node in fs.layouts.units_of(states[-1].params))


@pytest.mark.parametrize("donate", [False, True])
@on_ranks(DP)
def test_donated_host_memory_is_filled_again(comm, donate):
    assert len(set(map(tuple, steps(comm, "zero3", donate=donate).addresses))) == (1 if donate else 3)


@on_ranks(DP)
def test_state_that_comes_on_the_device_is_right_in_a_planned_step(comm):
    """From a checkpoint, or changed by the user: plain tensors."""
    plain, again = steps(comm, "zero2"), steps(comm, "zero2", between=lambda state: optree.tree_map(copy.copy, state))
    assert_same(optree.tree_leaves(again.states[-1]), optree.tree_leaves(plain.states[-1]))
    assert len(set(again.copied)) == 1, "down alone"
    assert again.schedule.host_copy_nbytes == 2 * again.copied[0]


@on_ranks(DP)
def test_a_state_of_other_size_leaves_the_schedule_and_is_planned_for(comm):
    """A rule that begins to keep something."""

    def update(grads, state, params, *, comm):
        state = state or optree.tree_map(torch.zeros_like, params)
        state = optree.tree_map(torch.Tensor.add, state, grads)
        return optree.tree_map(lambda x: -0.1 * x, state), state

    tx = fs.optim.Transform(lambda params: None, update, {})
    expected = train(comm, "zero3", tx=tx, steps=6)
    found = train(comm, "zero3", {"offload": True}, tx=tx, steps=6)
    assert_same_training(found, expected)
    assert found.num_unscheduled_calls <= 3
    assert found.schedule.host_copy_nbytes > 0


@on_ranks(DP)
def test_tensors_that_occur_twice_are_copied_once_and_stay_one(comm):
    def init(params):
        zeros = optree.tree_map(torch.zeros_like, params)
        return {"a": zeros, "b": zeros, "count": 0}

    def update(grads, state, params, *, comm):
        optree.tree_map(torch.Tensor.add_, state["a"], grads)
        return optree.tree_map(lambda x: -0.1 * x, state["b"]), {**state, "count": state["count"] + 1}

    tx = fs.optim.Transform(init, update, {})
    expected, found = (train(comm, "zero3", p, tx=tx) for p in (None, {"offload": True}))
    assert_same_training(found, expected)
    seen = steps(comm, "zero3", "fp32", tx=tx)
    for a, b in zip(*(fs.layouts.units_of(seen.states[-1].opt[key]) for key in "ab"), strict=True):
        assert [x.data_ptr() for x in a.buffers] == [x.data_ptr() for x in b.buffers]
    assert seen.schedule.host_copy_nbytes == 2 * tree_nbytes(seen.states[-1].opt["a"])


@pytest.mark.parametrize("kept", ["params", "grads"])
@on_ranks(DP)
def test_state_that_is_parameters_or_gradients_stays_with_them(comm, kept):
    """A copy of it would free nothing, and a gradient's memory is another's in the next step."""

    def init(params):
        return optree.tree_map(torch.zeros_like, params)

    def apply(grads, state, params, *, comm, donate):
        new = optree.tree_map(lambda p, g, s: p - 0.1 * g - 0.01 * s, params, grads, state)
        return new, new if kept == "params" else grads

    tx = fs.optim.Transform(init, lambda *a, **k: None, {}, apply)
    expected, found = (train(comm, "zero3", p, tx=tx, donate=False, steps=6) for p in (None, {"offload": True}))
    assert_same_training(found, expected)
    assert found.num_unscheduled_calls <= 2, "the state to start from is another's"
    assert found.schedule.host_copy_nbytes == 0


@on_ranks(DP)
def test_what_is_not_sharded_and_what_has_no_state_stays(comm):
    state = make_state(comm, "zero3", tx=fs.optim.sgd(0.1))
    call = fs.Scheduler(comm, offload=True)(fs.train_step(loss_fn, fs.optim.sgd(0.1)))
    for batch in my_batches(comm, 3):
        state, _ = call(state, batch)
    assert call.schedule.host_copy_nbytes == 0
    assert not any(op.stream == "host" for op in call.schedule.ops)
    assert state.opt.count == 3


@on_ranks(DP)
def test_a_state_goes_on_without_the_scheduler_and_comes_back(comm):
    tx = fs.optim.adamw(1e-2)
    step = fs.train_step(loss_fn, tx, donate=True)
    away = fs.Scheduler(comm, offload=True)(step)
    calls = [away, lambda *a: step(*a, comm), away, fs.Scheduler(comm)(step), fs.Scheduler(comm, offload=True)(step), away]
    calls.append(partial(step, comm=fs.Scheduler(comm, offload=True)))  # outside of a scheduled function
    ours, theirs = (make_state(comm, "zero3", tx=tx, precision=PRECISIONS["bf16"]) for _ in range(2))
    for call, batch in zip(calls, my_batches(comm, len(calls)), strict=True):
        (ours, _), (theirs, _) = call(ours, batch), step(theirs, batch, comm)
        assert_same(optree.tree_leaves(ours), optree.tree_leaves(theirs))
        full = fs.gather(ours.main, comm=comm)
        assert_same(optree.tree_leaves(full), optree.tree_leaves(fs.gather(theirs.main, comm=comm)))


@on_ranks(DP)
def test_a_checkpoint_of_what_rests_on_the_host_is_that_of_any_state(comm):
    seen = steps(comm, "zero3")
    saved = pickle.loads(pickle.dumps(seen.states[-1]))
    copied = copy.deepcopy(seen.states[-1])
    for each in (saved, copied):
        assert_same(optree.tree_leaves(each), optree.tree_leaves(seen.states[-1]))


@on_ranks(DP)
def test_two_updates_in_a_step_each_move_their_own(comm):
    tx = fs.optim.adamw(1e-2)

    def step(states, batch, comm):
        new = []
        for state in states:
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            _, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm, donate=True)
            new.append(fs.update(tx, grads, state, comm=comm, donate=True))
        return new

    def run(call):
        states = [make_state(comm, "zero2", tx=tx, precision=PRECISIONS["bf16"]) for _ in range(2)]
        for batch in my_batches(comm, 4):
            states = call(states, batch)
        return states

    scheduler = fs.Scheduler(comm, offload=True)
    scheduled, copied_nbytes = scheduler(step), counting_host_copies(scheduler)
    found = run(scheduled)
    assert_same(optree.tree_leaves(found), optree.tree_leaves(run(lambda *a: step(*a, comm))))
    assert scheduled.num_unscheduled_calls == 1
    assert copied_nbytes() == scheduled.schedule.host_copy_nbytes
    assert scheduled.schedule.host_copy_nbytes == 2 * sum(tree_nbytes([n.buffers for n in held(s)]) for s in found)


def test_host_memory_comes_to_the_device_where_it_is_used():
    """The meta device stands for one that is not the host."""
    meta = torch.device("meta")
    unit = fs.plan({"w": torch.zeros(8)}, fs.Mesh({"dp": 1}), fs.ddp("dp")).units[0]
    host, there = (fs.Sharded([torch.zeros(8, device=device)], unit, unit.strategy.optim) for device in ("cpu", meta))
    first, second, count = host_buffers_to_device((host, there, 3), meta)
    assert (first.buffers[0].device, second, count) == (meta, there, 3)
    assert host_buffers_to_device(host, torch.device("cpu")) is host
    assert fs.gather(host, comm=fs.SingleComm(device=meta)).buffers[0].device == meta


def test_a_device_that_is_not_the_host_gets_copies_and_gives_them_back(monkeypatch):
    """Into pinned memory, and into the same when that was donated; a checkpoint's memory is not."""
    pinned, empty, meta = [], torch.empty, torch.device("meta")
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: (pinned.append(pin_memory), empty(*a, **k))[1])
    unit = fs.plan({"w": torch.zeros(8)}, fs.Mesh({"dp": 1}), fs.ddp("dp")).units[0]
    lanes, state = Lanes(), fs.Sharded([torch.zeros(8)], unit, unit.strategy.optim)
    given, taken = state.raw_buffers[0], []
    for _ in range(3):
        offload = StateOffload({"": ""}, (), lanes, meta, donate=True)
        up, moves = offload.move_state(state, (), to_host=False)
        assert up.buffers[0].device == meta
        assert [(target.device.type, source.device.type) for target, source in moves[""].copies] == [("meta", "cpu")]
        state, moves = offload.move_state(up, (), to_host=True)
        assert [(target.device.type, source.device.type) for target, source in moves[""].copies] == [("cpu", "meta")]
        assert (pinned[-1], moves[""].nbytes) == (not taken, 32)
        taken.append(state.raw_buffers[0])
    assert taken[0] is not given
    assert taken[1] is taken[0]
    assert taken[2] is taken[0]


@on_ranks(fs.Mesh({"dp": 1}))
def test_what_keeps_its_own_state_or_addresses_is_refused(comm):
    model = fs.shard_module(modules.make(), mesh=comm, policy=fs.SchedulePolicy(offload=True))
    with pytest.raises(ScheduleError, match=r"AdamW keeps its state on the device.*fs\.optim\.adamw"):
        fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    state = make_state(comm, "ddp")
    with pytest.raises(ScheduleError, match="leave out offload=True"):
        _check_capturable(torch.device("cuda"), fs.SchedulePolicy(offload=True, gather_at_start=False), state, 3)


@every(4, strategy=("ddp", "zero1", "zero2", "zero3"), precision=PRECISIONS, donate=[False, True])
def test_steps_are_free_of_races_and_no_wait_of_theirs_can_go(strategy, precision, donate):
    report = train_on_streams(strategy, precision=precision, donate=donate, steps=4, offload=True)
    assert report.races == []
    lanes = {entry.lane for entry in report.log if isinstance(entry, RecordStreamCall)}
    assert lanes <= {"host", "gather"}
    assert "host" in lanes
    waits = {entry.why for entry in report.log if isinstance(entry, Wait) and ("host" in entry.why or "fetch" in entry.why)}
    needed = {why for why in waits if " of an earlier plan" not in why} - report.implied_waits()
    kinds = ("host waits for compute before fetch", "compute joins fetch", "host waits for compute before offload")
    assert [sum(why.startswith(kind) for why in needed) for kind in kinds] == [1, 1, 1]
    assert len(needed) == 3
    assert all(report.races_without(why) for why in needed)
    others = [why for why in report.waits if why.startswith("compute joins all") and "host" in why]
    assert not others, "nothing else waits for copies to the host, which go on into the next step"


def test_of_modules_too():
    report = train_module_on_streams("zero3", precision="bf16", tx=fs.optim.adamw(1e-2), offload=True)
    assert report.races == []
    assert any(isinstance(entry, RecordStreamCall) for entry in report.log)


def test_memory_freed_under_a_copy_is_seen_where_nobody_keeps_it():
    report = train_on_streams("zero3", precision="bf16", donate=False, steps=4, offload=True)
    kept = {i for i, entry in enumerate(report.log) if isinstance(entry, RecordStreamCall) and entry.lane == "host"}
    races = replay(report.log, without=kept).races
    assert races
    assert {(race.first.lane, race.first.op) for race in races} == {("host", "aten.copy_")}
    assert all(race.second is None for race in races)


def test_who_looks_at_what_is_on_its_way_waits():
    def looks(state):
        [b.sum() for node in held(state) for b in node.buffers if b.numel()]

    def run(read):
        comm = fs.SingleComm(fs.Mesh({"dp": 1}))
        scheduler = fs.Scheduler(comm, policy=DebugPolicy(offload=True, sum_late=False, trivial_axes=True))
        tx = fs.optim.adamw(1e-2)
        call, state = scheduler(fs.train_step(loss_fn, tx, donate=True)), make_state(comm, fs.zero3("dp"), tx=tx)
        with checking_races(scheduler) as report:
            for batch in my_batches(comm, 3):
                state, _ = call(state, batch)
                read(state)
        return report

    assert run(looks).races == []
    with pytest.raises(RaceError, match=r"aten\.copy_.* on host"):
        run(lambda state: [b.sum() for node in held(state) for b in node.raw_buffers if b.numel()])


def test_hybrid_strategies_and_policies_have_the_same_bits():
    options = {"precision": PRECISIONS["bf16"], "steps": 3}
    policies = ({"prefetch": 0}, {"sum_late": False, "gather_at_start": False}, {"keep_gradients": True})

    def rank_fn(comm):
        found = [train(comm, "hsdp", {"offload": True, **policy}, **options) for policy in policies]
        return train(comm, "hsdp", **options), found

    for expected, found in simulate(HYBRID, rank_fn):
        for each in found:
            assert_same_training(each, expected)
