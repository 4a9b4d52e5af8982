"""Errors in a format's functions name format, unit, leaves and axis, on every path; what fails on one rank is heard by all."""

import re

import pytest
import torch

import fsharp as fs
from fsharp.errors import FormatError
from fsharp.functional.formats.format import Format, LeafCodec, Plane
from fsharp.testing import processes, simulate
from tests.scheduling import STRATEGIES, train
from tests.test_format import HALVES
from tests.test_leaf_format import BY_LEAF

WHAT = {
    "encode of gradients": ("wire", "encode"),
    "decode of gradients": ("wire", "decode"),
    "encode of parameters": ("stored", "encode"),
    "decode of parameters": ("stored", "decode"),
    "encode of differences": ("update", "encode"),
    "decode of differences": ("update", "decode"),
    "encode of whole leaves": ("leaves", "encode"),
    "decode of whole leaves": ("leaves", "decode"),
}
WAYS = ["blocking", "schedule", "module"]


def failing(what, when):
    """Precision with a format one of whose functions raises an error when ``when()`` says so."""
    kind, name = WHAT[what]

    def checked(fn):
        def call(*args):
            if when():
                raise KeyError("no codebook")
            return fn(*args)

        return call

    if kind == "leaves":
        codec = BY_LEAF.leaves
        made = {"encode": codec.encode, "decode": codec.decode}
        made[name] = checked(made[name])
        codec = LeafCodec(codec.scales_nbytes, codec.agreed, made["encode"], made["decode"])
        return fs.Precision(stored=Format("picky", BY_LEAF.planes, leaves=codec))
    made = {"encode": HALVES.encode, "decode": HALVES.decode}
    made[name] = checked(made[name])
    return fs.Precision(**{kind: Format("picky", (Plane(torch.uint8), Plane(torch.uint8)), made["encode"], made["decode"])})


def module_step(comm, how, precision):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    model = fs.shard_module(model, mesh=comm, strategy=how, units=[torch.nn.Linear], precision=precision)
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-1))
    for _ in range(3):
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(comm, what, way, strategy, when):
    precision = failing(what, when)
    if way == "module":
        module_step(comm, STRATEGIES[strategy][1], precision)
    else:
        train(comm, strategy, None if way == "blocking" else {}, steps=3, precision=precision)


def check_named(text, what, strategy):
    kind, name = WHAT[what]
    assert re.search(rf"Format 'picky': {name}\(\) raised KeyError: 'no codebook'", text), text
    assert re.search(r"units?  +'", text), text
    assert re.search(r"leaves  +\S", text), text
    axes = "|".join(STRATEGIES[strategy][1].order)
    over = rf"axes .*\b({axes})\b"
    assert re.search(rf"gradients +along axis '({axes})'" if kind == "wire" else over, text), text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WHAT)
def test_unit_leaves_axis_and_format_are_named(what, way):
    strategy = "hfsdp"

    def rank_fn(comm):
        with pytest.raises(FormatError) as caught:
            run(comm, what, way, strategy, lambda: True)
        return str(caught.value)

    for text in simulate(STRATEGIES[strategy][0], rank_fn, outcomes=True):
        if isinstance(text, str):  # the first that fails
            check_named(text, what, strategy)
            break
    else:
        raise AssertionError("no rank has failed")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WHAT)
def test_all_ranks_hear_of_one_whose_format_fails(what, way):
    """Also if the rank goes on after the error, in which case nobody would notice that it leaves."""
    strategy = "zero1" if "differences" in what else "zero3"

    def rank_fn(comm):
        calls = []

        def when():
            calls.append(1)
            most = (
                2 if "differences" in what or what == "encode of whole leaves" else 5 if what == "encode of parameters" else 4
            )
            return comm.rank == 1 and len(calls) > most  # in a step

        try:
            run(comm, what, way, strategy, when)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("nothing was raised")

    first, second = processes(STRATEGIES[strategy][0], rank_fn)
    assert second.startswith("FormatError")
    check_named(second, what, strategy)
    assert "rank 1 of 2 failed" in first, first
    assert "no codebook" in first
    assert "picky" in first
