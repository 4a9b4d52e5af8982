"""Ranks that part ways hear of it; and when a scheduler goes, so does all that it had."""

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import fsharp as fs
from fsharp.testing import processes, simulate
from tests.gpt_like import block, embed, head, loss_fn
from tests.scheduling import DP, HYBRID, assert_same, full_params, make_state, make_tx, my_batches

# Orders


def in_order(params, batch, comm):
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    for i in batch["order"]:
        x = fs.forward(block, params["layers"][i], x, comm=comm)
    if batch.get("bad"):
        raise ZeroDivisionError("bad luck")
    return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])


def attempt(call):
    """The error that a call raises, and the seconds until then."""
    began = time.perf_counter()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - began
    return "no error", "", time.perf_counter() - began


def part_ways(comm, *, after, strategy="zero3", other=(0, 2), policy=None):
    """The last rank leaves the order after some steps; then all of them train on together."""
    state, scheduler = make_state(comm, strategy), fs.Scheduler(comm, poison=True, **(policy or {}))
    step = scheduler(fs.train_step(in_order, make_tx()))
    batches = [{**batch, "order": (0, 1, 2)} for batch in my_batches(comm, after + 3)]
    for batch in batches[:after]:
        state, _ = step(state, batch)
    order = other if comm.rank == comm.mesh.size - 1 else (0, 1, 2)
    error = attempt(lambda: step(state, {**batches[after], "order": order}))
    for batch in batches[after + 1 :]:
        state, metrics = step(state, batch)
    return error, float(metrics.loss), [x.clone() for x in full_params(state, comm)["layers"][1].values()]


def fail_alone(comm, *, after, strategy="zero3"):
    """Rank 0 raises in its loss, after some steps; then all of them train on together."""
    state, scheduler = make_state(comm, strategy), fs.Scheduler(comm, poison=True)
    step = scheduler(fs.train_step(in_order, make_tx()))
    batches = [{**batch, "order": (0, 1, 2)} for batch in my_batches(comm, after + 3)]
    for batch in batches[:after]:
        state, _ = step(state, batch)
    error = attempt(lambda: step(state, {**batches[after], "bad": not comm.rank}))
    for batch in batches[after + 1 :]:
        state, metrics = step(state, batch)
    return error, float(metrics.loss), [x.clone() for x in full_params(state, comm)["layers"][1].values()]


def undisturbed(comm, *, after, strategy="zero3"):
    state, step = make_state(comm, strategy), fs.train_step(in_order, make_tx())
    batches = [{**batch, "order": (0, 1, 2)} for batch in my_batches(comm, after + 3)]
    for batch in batches[:after] + batches[after + 1 :]:
        state, metrics = step(state, batch, comm)
    return float(metrics.loss), [x.clone() for x in full_params(state, comm)["layers"][1].values()]


def own_way(comm, *, after, strategy, way, calls=1):
    """The last rank does something of its own after some steps, of which the other may hear only later."""
    state, scheduler = make_state(comm, strategy), fs.Scheduler(comm, poison=True)

    def fn(state, batch, comm):
        loss, grads = fs.value_and_grad(in_order)(state.params, batch, comm=comm)
        if batch.get("way") == "changes gradients":
            [buffer.mul_(2) for node in fs.units_of(grads) for buffer in node.buffers]
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        if batch.get("way") == "fails before the update":
            raise ZeroDivisionError("bad luck")
        state = fs.update(make_tx(), grads, state, comm=comm)
        if batch.get("way") == "looks again":
            in_order(state.params, batch, comm)
        if batch.get("way") == "fails at the end":
            raise ZeroDivisionError("bad luck")
        return state, metrics

    step, batches = scheduler(fn), [{**batch, "order": (0, 1, 2)} for batch in my_batches(comm, after + 3)]
    for batch in batches[:after]:
        state, _ = step(state, batch)
    is_other = comm.rank == comm.mesh.size - 1
    batch = {**batches[after], **({"way": way} if is_other else {})}
    error = attempt(lambda: [step(state, batch) for _ in range(1 if is_other else calls)])
    for batch in batches[after + 1 :]:
        state, metrics = step(state, batch)
    return error, float(metrics.loss), [x.clone() for x in full_params(state, comm)["layers"][1].values()]


OWN_WAYS = {
    "changes gradients, planned": {"after": 2, "strategy": "zero1", "way": "changes gradients"},
    "changes gradients, recording": {"after": 0, "strategy": "zero1", "way": "changes gradients"},
    "changes gradients, ddp": {"after": 2, "strategy": "ddp", "way": "changes gradients"},
    "one more use": {"after": 2, "strategy": "ddp", "way": "looks again", "calls": 2},
    "fails at the end": {"after": 2, "strategy": "ddp", "way": "fails at the end", "calls": 2},
    "fails before the update": {"after": 2, "strategy": "zero1", "way": "fails before the update", "calls": 2},
}


def look_between(comm):
    """Rank 0 fails before its update; the other one looks at its new parameters, then steps on, then both train on."""
    tx = fs.adamw(1e-2)  # whose update asks nothing of other ranks
    state, scheduler = make_state(comm, "zero1", tx=tx), fs.Scheduler(comm, poison=True)

    def fn(state, batch, comm):
        loss, grads = fs.value_and_grad(in_order)(state.params, batch, comm=comm)
        metrics, grads = fs.average(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)
        if batch.get("fails"):
            raise ZeroDivisionError("bad luck")
        return fs.update(tx, grads, state, comm=comm), metrics

    step, batches = scheduler(fn), [{**batch, "order": (0, 1, 2)} for batch in my_batches(comm, 5)]
    for batch in batches[:2]:
        state, _ = step(state, batch)
    if comm.rank == 0:
        errors = [attempt(lambda: step(state, {**batches[2], "fails": True}))]
    else:
        new, _ = step(state, batches[2])

        def look():
            return [node.buffers for node in fs.units_of(new.params)]

        errors = [attempt(each) for each in (look, lambda: step(state, batches[2]), look)]
    for batch in batches[3:]:
        state, metrics = step(state, batch)
    return errors, float(metrics.loss), [x.clone() for x in full_params(state, comm)["layers"][1].values()]


PARTINGS = {
    "recording": {"after": 0},
    "planned": {"after": 2},
    "planned, far ahead": {"after": 2, "policy": {"prefetch": 2, "reduce": "delayed"}},
    "planned, nothing carried": {"after": 2, "policy": {"gather_at_start": False}},
    "nothing to gather": {"after": 2, "strategy": "zero1"},
    "early": {"after": 2, "other": ()},
    "longer": {"after": 2, "other": (0, 1, 2, 0)},
}
FAILURES = {"recording": {"after": 0}, "planned": {"after": 2}, "zero1": {"after": 2, "strategy": "zero1"}}


def soon(is_so):
    deadline = time.monotonic() + 3
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


def threads_of(comm):
    """The names of a scheduler's threads, and of those that are alive when it is gone."""
    before = set(threading.enumerate())
    state, scheduler = make_state(comm, "zero1"), fs.Scheduler(comm)
    step = scheduler(fs.train_step(loss_fn, make_tx()))
    for batch in my_batches(comm, 2):
        state, _ = step(state, batch)
    mine = [thread for thread in threading.enumerate() if thread not in before]
    del scheduler, step
    [node.buffers for node in fs.units_of(state)]  # what is on its way needs them
    soon(lambda: not any(thread.is_alive() for thread in mine))
    return [thread.name for thread in mine], [thread.name for thread in mine if thread.is_alive()]


def owned(scheduler):
    """All memory that a scheduler holds, as references that do not keep it."""
    gradients = [unit.gradient for unit in scheduler.units.values() if unit.gradient is not None]
    tensors = [scheduler.arena, *(t for g in gradients for t in (*g.rest.tensors, *g.final.tensors))]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]


def left_behind(comm, *, strategy, way="wrapped", donate=False):
    """What is alive after the scheduler was deleted, and what of the user's after a step. The collector does not help."""
    gc.collect()
    gc.disable()
    try:
        state, scheduler = make_state(comm, strategy), fs.Scheduler(comm, poison=True)
        step = fs.train_step(loss_fn, make_tx(), donate=donate)
        call = scheduler(step) if way == "wrapped" else partial(step, comm=scheduler)
        users = []
        for batch in my_batches(comm, 3):
            old = state
            state, metrics = call(old, batch)
            users += [weakref.ref(x) for node in fs.units_of((old.params, old.main, old.opt)) for x in node.buffers]
            users += [weakref.ref(x) for x in batch.values()]
            users.append(weakref.ref(metrics.loss))
        [node.buffers for node in fs.units_of(state)]
        mine, whole = owned(scheduler), weakref.ref(scheduler)
        new = {id(x) for node in fs.units_of((state.params, state.main, state.opt)) for x in node.buffers}
        del old, batch, metrics
        kept = sum(ref() is not None and id(ref()) not in new for ref in users)
        del scheduler, call
        soon(lambda: all(ref.expired() for ref in mine))  # a gather for the next step may have to end first
        return len(mine), kept, sum(not ref.expired() for ref in mine), whole() is not None
    finally:
        gc.enable()


LIVES = {
    "zero3": {"strategy": "zero3"},
    "ddp": {"strategy": "ddp"},
    "hfsdp": {"strategy": "hfsdp"},
    "zero1, donated": {"strategy": "zero1", "donate": True},
    "as a plain comm": {"strategy": "zero3", "way": "plain"},
}


def assert_nothing_is_left(found):
    mine, kept, alive, whole = found
    assert mine > 1
    assert kept == 0, f"{kept} of the user's tensors are kept"
    assert alive == 0, f"{alive} of {mine} blocks of memory are kept"
    assert not whole, "the scheduler is part of a cycle"


@pytest.mark.parametrize("life", LIVES)
def test_a_scheduler_that_goes_leaves_nothing(life):
    mesh = HYBRID if life == "hfsdp" else DP
    for found in simulate(mesh, lambda comm: left_behind(comm, **LIVES[life])):
        assert_nothing_is_left(found)


# In real processes, where ranks wait for each other


def lonely(comm):
    """A step that only rank 0 will call; the process of the other one ends."""
    state, scheduler = make_state(comm, "zero3"), fs.Scheduler(comm, poison=True)
    step, batches = scheduler(fs.train_step(loss_fn, make_tx())), my_batches(comm, 3)
    for batch in batches[:2]:
        state, _ = step(state, batch)
    return lambda: attempt(lambda: step(state, batches[2])) if not comm.rank else None


@pytest.fixture(scope="module")
def found():
    """Everything that two processes find out, in one start of them."""

    def rank_fn(comm):
        out = {("parting", name): part_ways(comm, **options) for name, options in PARTINGS.items()}
        out |= {("failure", name): fail_alone(comm, **options) for name, options in FAILURES.items()}
        out |= {("own way", name): own_way(comm, **options) for name, options in OWN_WAYS.items()}
        out["look", ""] = look_between(comm)
        every = (*PARTINGS.values(), *FAILURES.values(), *OWN_WAYS.values())
        kinds = {(o["after"], o.get("strategy", "zero3")) for o in every}
        out |= {("undisturbed", *kind): undisturbed(comm, after=kind[0], strategy=kind[1]) for kind in sorted(kinds)}
        out |= {("left", name): left_behind(comm, **LIVES[name]) for name in LIVES if name != "hfsdp"}
        out["threads"], alone = threads_of(comm), lonely(comm)
        return out | {"lonely": alone()}

    return processes(DP, rank_fn, timeout=60)


def assert_went_on(results, kind, options):
    for rank, result in enumerate(results):
        loss, params = result["undisturbed", options["after"], options.get("strategy", "zero3")]
        assert_same(result[kind][1:], (loss, params)), rank


@pytest.mark.parametrize("name", PARTINGS)
def test_ranks_that_part_ways_hear_of_it(found, name):
    """Both, with both orders, long before any timeout; and then they train on."""
    for result in found:
        kind, text, seconds = result["parting", name][0]
        assert kind == "AgreementError", text
        assert seconds < 5
        rank0, rank1 = (line for line in text.split("\n") if line.startswith("  rank "))
        assert rank0.startswith("  rank 0")
        assert rank1.startswith("  rank 1")
        assert rank0[8:] != rank1[8:]
        assert "ranks use units in different orders; the first difference is event" in text
        assert "skip(params, x, comm=comm)" in text
    assert_went_on(found, ("parting", name), PARTINGS[name])


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_is_heard_of(found, name):
    results = [result["failure", name] for result in found]
    kind, text, _ = results[0][0]
    assert (kind, text) == ("ZeroDivisionError", "bad luck")
    kind, text, seconds = results[1][0]
    assert kind == "AgreementError"
    assert seconds < 5
    assert text == "Scheduler: rank 0 failed; it says:\nZeroDivisionError: bad luck"
    assert_went_on(found, ("failure", name), FAILURES[name])


@pytest.mark.parametrize("name", OWN_WAYS)
def test_a_rank_that_does_something_of_its_own(found, name):
    """Both hear of it, also where one needs nothing from the other any more in that step; and then they train on."""
    texts = []
    for result in found:
        kind, text, seconds = result["own way", name][0]
        assert kind == "AgreementError" or (result is found[1] and text == "bad luck"), text
        assert seconds < 5
        texts.append(text)
    if "fails" in name:
        assert texts[0] == "Scheduler: rank 1 failed; it says:\nZeroDivisionError: bad luck"
    else:
        assert texts[0] == texts[1]
        assert "ranks use units in different orders; the first difference is event" in texts[0]
    if "gradients" in name:
        assert ", move" in texts[0]
    assert_went_on(found, ("own way", name), OWN_WAYS[name])


def test_who_looks_at_what_another_rank_never_sent_hears_of_it(found):
    """There, once more in the next step, from which on both are together again, and whenever it looks there."""
    text = "Scheduler: rank 0 failed; it says:\nZeroDivisionError: bad luck"
    assert [error[:2] for error in found[0]["look", ""][0]] == [("ZeroDivisionError", "bad luck")]
    assert [error[:2] for error in found[1]["look", ""][0]] == [("AgreementError", text)] * 3
    assert_same(found[0]["look", ""][1:], found[1]["look", ""][1:])


@pytest.mark.parametrize("life", [life for life in LIVES if life != "hfsdp"])
def test_a_scheduler_that_goes_leaves_nothing_in_processes(found, life):
    for result in found:
        assert_nothing_is_left(result["left", life])


def test_threads_end_with_their_scheduler(found):
    for result in found:
        names, alive = result["threads"]
        assert {"fsharp posts", "fsharp gather", "fsharp reduce"} <= set(names)
        assert alive == []


def test_a_rank_that_stops_calling_is_missed(found):
    kind, text, seconds = found[0]["lonely"]
    assert kind != "no error"
    assert "closed" in text
    assert seconds < 5
