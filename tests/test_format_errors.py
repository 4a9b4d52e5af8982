"""Errors in a format's functions name format, unit, leaves and axis, on every path; what fails on one rank is heard by all."""

import re
from datetime import timedelta

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import FormatError
from fsharp.functional.formats.format import Format, LeafCodec, Plane
from fsharp.testing import processes, simulate
from tests.modules import descend
from tests.scheduling import STRATEGIES, every, train
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
        codec = BY_LEAF.leaf_codec
        made = {"encode": codec.encode, "decode": codec.decode}
        made[name] = checked(made[name])
        codec = LeafCodec(codec.scales_nbytes, codec.agreed_maxima, made["encode"], made["decode"])
        return fs.Precision(stored=Format("picky", BY_LEAF.planes, leaf_codec=codec))
    made = {"encode": HALVES.encode, "decode": HALVES.decode}
    made[name] = checked(made[name])
    return fs.Precision(**{kind: Format("picky", (Plane(torch.uint8), Plane(torch.uint8)), made["encode"], made["decode"])})


def module_step(comm, how, precision):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    model = fs.shard_module(model, mesh=comm, strategy=how, units=[torch.nn.Linear], precision=precision)
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-1))
    for _ in range(3):
        descend(model(torch.ones(2, 6)).square().mean(), optimizer)


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
    axes = "|".join(STRATEGIES[strategy][1].axis_order)
    over = rf"axes .*\b({axes})\b"
    assert re.search(rf"gradients +along axis '({axes})'" if kind == "wire" else over, text), text


@every(2, what=WHAT, way=WAYS)
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


@every(3, what=WHAT, way=WAYS)
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


TREE = {"a": {"w": torch.linspace(-1, 1, 54).view(6, 9)}, "b": {"w": torch.linspace(-1, 1, 36).view(9, 4)}}
X = torch.ones(2, 6)


def laid_out(comm, precision, strategy="zero3"):
    return fs.plan(TREE, comm.mesh, STRATEGIES[strategy][1], units="*", precision=precision)


def loss_fn(params, x, comm):
    for name in "ab":
        x = fs.forward(lambda p, x: torch.tanh(x @ p["w"]), params[name], x, comm=comm)
    return x.square().mean()


TX = fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9)
STEP = fs.train_step(loss_fn, TX)


def begin(comm, precision, strategy="zero3"):
    params = fs.shard(TREE, laid_out(comm, precision, strategy), comm, place="optim")
    return fs.init_state(TX, params, comm=comm)


def of_init_state(comm, precision, arm, folder):
    params = fs.shard(TREE, laid_out(comm, precision), comm, place="optim")
    arm()
    state = fs.init_state(TX, params, comm=comm)
    fs.Scheduler(comm)(STEP)(state, X)


def of_init_state_then_saver(comm, precision, arm, folder):
    params = fs.shard(TREE, laid_out(comm, precision), comm, place="optim")
    arm()
    fs.init_state(TX, params, comm=comm)
    fs.checkpoint.Saver(folder, comm)


def of_shard(comm, precision, arm, folder):
    arm()
    fs.full_tree(fs.shard(TREE, laid_out(comm, precision), comm, dtype="compute"), comm=comm)


def of_init_params(comm, precision, arm, folder):
    arm()
    fs.full_tree(fs.init_params(fs.init.ones, laid_out(comm, precision), comm, key=0, dtype="compute"), comm=comm)


def of_state(act):
    def door(comm, precision, arm, folder):
        state = begin(comm, precision)
        arm()
        act(state, comm, folder)

    return door


def of_load(comm, precision, arm, folder):
    state = begin(comm, precision)
    fs.checkpoint.save(folder, state.params, step=1, comm=comm)
    arm()
    fs.checkpoint.load(folder, state.params, comm=comm)


def reshard(state, comm, folder):
    fs.reshard(state.params, laid_out(comm, fs.Precision(main=torch.float32, stored=HALVES), "ddp"), comm=comm)


def after_a_schedule(act):
    """Differences are added when somebody looks at the parameters."""

    def door(comm, precision, arm, folder):
        step = fs.Scheduler(comm)(STEP)
        state = begin(comm, precision, "zero1")
        for _ in range(3):
            state, _ = step(state, X)
        arm()
        act(state, comm)

    return door


def full(state, comm):
    """Under zero1 nothing is gathered: the next collective is that of a norm."""
    fs.full_tree(state.params, comm=comm)
    fs.optim.global_norm(state.main, comm=comm)


def update(state, comm):
    fs.update(TX, optree.tree_map(torch.zeros_like, state.main), state, comm=comm)


def of_module(act, strategy="zero3"):
    """``act``, and then a forward without gradients."""

    def door(comm, precision, arm, folder):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
        model = fs.shard_module(
            model, mesh=comm, strategy=STRATEGIES[strategy][1], units=[torch.nn.Linear], precision=precision
        )
        optimizer = fs.ShardedOptimizer(model.parameters(), TX)
        for _ in range(2):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {name: value.clone() for name, value in model.full_state_dict(rank=None).items()}
        arm()
        act(model, optimizer, values)
        with torch.no_grad():
            model(X)

    return door


def unsharded(model, optimizer, values):
    with model.unsharded(write=True), torch.no_grad():
        model[0].weight.zero_()


def averaged(model, optimizer, values):
    with optimizer.averaged(), torch.no_grad():
        model(X)


def functional(model, optimizer, values):
    fn, params = model.functional()
    with torch.no_grad():
        fn(params, X, comm=model.comm)


DOORS = {
    "init_state": ("encode of parameters", of_init_state),
    "init_state of whole leaves": ("encode of whole leaves", of_init_state),
    "init_state, then a Saver": ("encode of parameters", of_init_state_then_saver),
    "shard": ("encode of parameters", of_shard),
    "init_params": ("encode of parameters", of_init_params),
    "full": ("decode of parameters", of_state(lambda state, comm, _: fs.full_tree(state.params, comm=comm))),
    "forward": ("decode of parameters", of_state(lambda state, comm, _: loss_fn(state.params, X, comm))),
    "global_norm": ("decode of parameters", of_state(lambda state, comm, _: fs.optim.global_norm(state.params, comm=comm))),
    "global_norm of whole leaves": (
        "decode of whole leaves",
        of_state(lambda state, comm, _: fs.optim.global_norm(state.params, comm=comm, deterministic=True)),
    ),
    "find_nonfinite": (
        "decode of parameters",
        of_state(lambda state, comm, _: fs.resilience.find_nonfinite(None, state.params, comm=comm)),
    ),
    "save": (
        "decode of parameters",
        of_state(lambda state, comm, folder: fs.checkpoint.save(folder, state.params, step=1, comm=comm)),
    ),
    "load, decode": ("decode of parameters", of_load),
    "load, encode": ("encode of parameters", of_load),
    "reshard": ("decode of parameters", of_state(reshard)),
    "full after a schedule": ("decode of differences", after_a_schedule(full)),
    "update after a schedule": ("decode of differences", after_a_schedule(update)),
    "unsharded": ("encode of parameters", of_module(unsharded)),
    "unsharded under zero1": ("encode of parameters", of_module(unsharded, "zero1")),
    "averaged": ("encode of parameters", of_module(averaged)),
    "evaluation": ("decode of parameters", of_module(lambda *_: None)),
    "functional": ("decode of parameters", of_module(functional)),
    "load_state_dict": ("encode of parameters", of_module(lambda model, _, values: model.load_state_dict(values))),
}


@pytest.mark.parametrize("door", DOORS)
def test_all_ranks_hear_at_their_next_collective(door, tmp_path):
    """The rank whose format fails neither leaves nor takes part in anything afterwards."""
    what, act = DOORS[door]

    def rank_fn(comm):
        failing_now, store = [], torch.distributed.distributed_c10d._get_default_store()
        precision = failing(what, lambda: bool(failing_now))
        try:
            act(comm, precision, lambda: failing_now.extend([True] * comm.rank), str(tmp_path))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            text = "nothing was raised"
        if comm.rank == 1:
            store.wait(["heard"], timedelta(seconds=20))
        store.set("heard", "")
        return text

    for text in processes(STRATEGIES["zero3"][0], rank_fn, timeout=60):
        assert re.search(r"Format 'picky': (encode|decode)\(\) raised KeyError: 'no codebook'", text), text
        assert re.search(r"leaves  +\S", text), text
