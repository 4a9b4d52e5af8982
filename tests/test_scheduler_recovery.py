"""After an error all ranks go on together; and where all do the same, there is none."""

import time

import pytest
import torch
import torch.nn.functional as F

import fsharp as fs
from fsharp.testing import processes
from tests.gpt_like import block, embed, head
from tests.scheduling import assert_same, full_params, make_state, make_tx, my_batches, over

FAIL, LATE, CONSTANT, OTHER = "fails in its loss", "fails once it has reduced", "takes a unit as constant", "other order"


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


# By name: the strategy, and for each step what which rank does (None is all of them), or how long it takes.
PROGRAMS = {
    "fails twice": ("zero1", {2: {-1: FAIL}, 3: {-1: FAIL}}),
    "fails twice while recording": ("ddp", {0: {-1: FAIL}, 1: {-1: FAIL}}),
    "fails twice while others are slow": ("zero3", {2: {0: FAIL, -1: 0.7}, 3: {0: FAIL, -1: 0.7}}),
    "another one fails next": ("zero2", {2: {0: FAIL}, 3: {-1: FAIL}}),
    "the part of another comes late": ("ddp", {3: {0: LATE, -1: 0.3}}),
    "constant": ("zero2", {3: {-1: CONSTANT}}),
    "constant, recording": ("zero2", {0: {-1: CONSTANT}}),
    "leaves the plan, then fails": ("zero3", {2: {None: OTHER}, 3: {-1: FAIL}}),
    "leave the plan in a row, one slowly": ("ddp", {2: {None: OTHER}, 4: {None: OTHER, 0: 0.8}, 5: {0: 0.8}, 6: {None: OTHER}}),
    "leave the plan in a row, zero3": ("zero3", {2: {None: OTHER}, 4: {None: OTHER, 0: 0.8}, 5: {None: OTHER}}),
}
STEPS = 8


def train(comm, strategy, doings, *, counted=False):
    """Errors by step; whether every step was as it is without a scheduler; what the Comm's own collectives give meanwhile."""
    last = comm.mesh.size - 1

    def loss(params, batch, comm):
        x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
        x = Slow.apply(x, batch["slow"])
        for i in (2, 0, 1) if batch["way"] == OTHER else (0, 1, 2):
            layers = batch["constants"] if batch["way"] == CONSTANT and i == 1 else params["layers"]
            x = fs.forward(block, layers[i], x, comm=comm)
        if batch["way"] == FAIL:
            raise ZeroDivisionError("bad luck")
        return F.cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch["y"])

    def fn(state, batch, comm):
        total, grads = fs.value_and_grad(loss)(state.params, batch, comm=comm)
        grads = fs.reduce_scatter(grads, comm=comm)
        if batch["way"] == LATE:
            raise ZeroDivisionError("bad luck")
        metrics, grads = fs.average(total, grads, comm=comm)
        return fs.update(make_tx(), grads, state, comm=comm), metrics

    inner = fs.CountingComm(comm) if counted else comm
    state, expected, step, errors, alive = (
        make_state(comm, strategy),
        make_state(comm, strategy),
        fs.Scheduler(inner)(fn),
        {},
        [],
    )
    for i, batch in enumerate(my_batches(comm, STEPS)):
        doing = {(last if who == -1 else who): what for who, what in doings.get(i, {}).items()}
        mine = [doing[who] for who in (None, comm.rank) if who in doing]
        ways, slow = [x for x in mine if isinstance(x, str)], [x for x in mine if isinstance(x, float)]
        batch |= {"way": ways[0] if ways else "", "slow": slow[0] if slow else 0.0, "constants": state.params["layers"]}
        try:
            state, _ = step(state, batch)
        except Exception as error:
            errors[i] = type(error).__name__
            if ways == [LATE]:
                time.sleep(0.6)  # so that what is late finds nobody at work
        else:
            expected, _ = fn(expected, {**batch, "slow": 0.0}, comm)
        alive.append(int(comm.all_reduce(torch.ones(()), "dp")))
    assert_same(full_params(state, comm), full_params(expected, comm))
    return errors, set(alive)


@pytest.fixture(
    scope="module",
    params=[
        (2, "shared memory"),
        (2, "gloo"),
        *(pytest.param((3, way), marks=pytest.mark.deep) for way in ("shared memory", "gloo")),
    ],
)
def found(request):
    """Everything that this many processes find out, in one start of them."""

    def rank_fn(comm):
        out = {name: train(comm, *program) for name, program in PROGRAMS.items()}
        return out | {"counted": train(comm, *PROGRAMS["fails twice"], counted=True)}

    n, way = request.param
    return processes(fs.Mesh({"dp": n}), over(way, rank_fn), timeout=100)


@pytest.mark.parametrize("name", [*PROGRAMS, "counted"])
def test_all_go_on_together(found, name):
    doings = PROGRAMS["fails twice" if name == "counted" else name][1]
    for rank, result in enumerate(found):
        errors, alive = result[name]
        assert alive == {len(found)}
        for i in range(STEPS):
            ways = {
                who % len(found): what for who, what in doings.get(i, {}).items() if who is not None and isinstance(what, str)
            }
            own = "ZeroDivisionError" if ways.get(rank) in (FAIL, LATE) else "AgreementError"
            assert errors.get(i) == (own if ways else None), f"step {i}"
