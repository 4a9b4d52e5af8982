"""What holds for every format wherever it is used: at rest, on the wire of gradients, for updates, and with feedback."""

from collections import Counter

import pytest
import torch

import fsharp as fs
from fsharp.testing import DebugPolicy, checking_races, processes, simulate
from tests.gpt_like import loss_fn, make_params
from tests.ranks import on_ranks
from tests.scheduling import (
    FORMAT_POLICIES,
    STRATEGIES,
    assert_same,
    assert_same_training,
    every,
    make_layout,
    make_state,
    make_tx,
    mesh_of,
    my_batches,
    train,
    turned,
)
from tests.test_feedback import WIRES, of as fed_back
from tests.test_format import HALVES, PLAIN, STORED
from tests.test_leaf_format import BUILT_IN, BY_LEAF, STORED as STORED_BY_LEAF
from tests.test_update_format import MXINT4, MXINT8, of as updated
from tests.test_wire_format import LOSSLESS, ROUNDED

DTYPES = {"compute": torch.bfloat16, "main": torch.float32}
EXACT = {
    "by block": (STORED, PLAIN),
    "by leaf": (STORED_BY_LEAF, PLAIN),
    "wire": (LOSSLESS, fs.Precision(wire=torch.bfloat16)),
    "wire of bfloat16": (fs.Precision(**DTYPES, wire=HALVES), fs.Precision(**DTYPES, wire=torch.bfloat16)),
}
"""Precisions whose formats hold what bfloat16 holds, and the precisions with bfloat16 in their place."""
POLICIES = {"blocking": None, **FORMAT_POLICIES, "release after forward": {"release": "forward"}}


@every(36, strategy=turned(STRATEGIES, "zero3"), policy=POLICIES, name=EXACT)
@on_ranks(mesh_of)
def test_training_has_the_bits_of_bfloat16(comm, strategy, policy, name):
    ways = {"params": make_params(layers=1), "steps": 3, "microbatches": 2}
    ours, theirs = (train(comm, strategy, POLICIES[policy], precision=each, **ways) for each in EXACT[name])
    assert_same_training(ours, theirs)
    if ours.schedule is not None:
        assert ours.num_unscheduled_calls == 1
        fs.schedules.verify(ours.schedule)


@every(3, strategy=["ddp", "zero1", "zero2", "zero3", "hsdp"], name=[name for name in EXACT if name != "wire of bfloat16"])
@on_ranks(mesh_of)
def test_modules_have_the_bits_of_bfloat16(comm, strategy, name):
    _, how = STRATEGIES[strategy]

    def trained(comm, precision):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
        model = fs.shard_module(model, mesh=comm, strategy=how, units=[torch.nn.Linear], precision=precision)
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.with_ema(fs.optim.adamw(1e-1), decay=0.5))
        found = []
        for step in range(4):
            for half in range(2):
                x = torch.arange(12.0).view(2, 6) * (step + half + 1 + comm.rank) / 20
                loss = model(x).float().square().mean()
                loss.backward()
            found += [loss.detach(), *(p.grad.norm() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.averaged(), torch.no_grad():
            found.append(model(x))
        with model.unsharded(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            found.append(model(x))
            next(model.parameters()).mul_(2)
            found.append(model(x))
        return found, dict(model.named_full_parameters())

    assert_same(*(trained(comm, precision) for precision in EXACT[name]))


@every(2, strategy=["ddp", "zero1", "zero3", "hsdp", "hfsdp"], form=[HALVES, BY_LEAF, *BUILT_IN])
@on_ranks(mesh_of)
def test_what_rests_and_travels_is_what_is_predicted(comm, strategy, form):
    mesh, how = STRATEGIES[strategy]
    precision = fs.Precision(**DTYPES, stored=form)
    layout = make_layout(mesh, how, precision=precision)
    counting = fs.collectives.CountingComm(comm)
    tx = fs.optim.adamw(1e-2)
    state = make_state(comm, strategy, tx=tx, precision=precision)
    buffers = [b for node in fs.layouts.units_of(state.params) for b in node.buffers]
    assert {b.dtype for b in buffers} == {torch.uint8}
    assert sum(b.nbytes for b in buffers) == layout.nbytes("params")
    fs.train_step(loss_fn, tx)(state, my_batches(comm, 1)[0], counting)
    assert Counter(counting.calls) == fs.inspect.step_traffic(layout)


ROUNDING = {
    "wire": ROUNDED,
    "update": updated(MXINT4),
    "feedback": fed_back(),
    "feedback in two formats": fed_back(WIRES["two formats"]),
}
IN_PROCESSES = {
    "wire": ("zero1", "ddp", "zero3", "hfsdp"),
    "update": ("zero1", "hfsdp"),
    "feedback": ("zero3", "ddp", "zero1", "zero2"),
    "feedback in two formats": ("hsdp",),
}
"""Strategies for each; of all but the first ``make test-all`` alone."""


@pytest.mark.parametrize(
    ("name", "strategy", "policy"),
    [
        pytest.param(name, strategy, policy, marks=[pytest.mark.deep] * (i > 0 or (k + number) % 2))
        for number, (name, strategies) in enumerate(IN_PROCESSES.items())
        for i, strategy in enumerate(strategies)
        for k, policy in enumerate(["default", "buckets"])
    ],
)
def test_processes_have_the_bits_of_simulated_ranks(name, strategy, policy):
    mesh, _ = STRATEGIES[strategy]

    def rank_fn(comm):
        ways = {"params": make_params(layers=1), "steps": 3, "microbatches": 2, "precision": ROUNDING[name]}
        return [train(comm, strategy, each, **ways)[:2] for each in (None, POLICIES[policy])]

    for found, want in zip(processes(mesh, rank_fn), simulate(mesh, rank_fn), strict=True):
        assert_same(found, want)


WATCHED = [
    ("wire", "ddp"),
    ("wire", "zero1"),
    ("update", "zero1"),
    ("update", "hfsdp"),
    ("wire", "zero3"),
    ("feedback", "zero1"),
]


@every(2, donate=[True, False], case=WATCHED)
@on_ranks(lambda case: STRATEGIES[case[1]][0])
def test_schedules_are_free_of_races(comm, donate, case):
    name, strategy = case
    how = STRATEGIES[strategy][1]
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False))
    state = make_state(comm, how, params=make_params(layers=1), precision=ROUNDING[name])
    step = scheduler(fs.train_step(loss_fn, make_tx(), donate=donate))
    with checking_races(scheduler) as report:
        for batch in my_batches(comm, 3):
            state, _ = step(state, batch)
    assert report.num_ops


@pytest.mark.parametrize(
    ("one", "other", "shown", "compared"),
    [
        (STORED, PLAIN, "halves (main float32)", "halves"),
        (LOSSLESS, fs.Precision(), "", "halves"),
        (
            updated(MXINT4, wire={"dp": MXINT8}),
            updated(MXINT8, wire={"dp": MXINT8}),
            "float32 (main float32, updates mxint4)",
            "mxint4",
        ),
        (fed_back(), fed_back(feedback=False), "residuals", "feedback"),
    ],
    ids=["stored", "wire", "update", "feedback"],
)
def test_layouts_print_and_serialise_and_ranks_compare_formats(one, other, shown, compared):
    layout = make_layout(*STRATEGIES["zero1"], precision=one)
    assert shown in str(layout)
    assert fs.Layout.from_json(layout.to_json()) == layout
    assert layout != make_layout(*STRATEGIES["zero1"], precision=other)
    mesh, _ = STRATEGIES["zero1"]
    with pytest.raises(fs.errors.AgreementError, match=compared):
        simulate(mesh, lambda comm: make_state(comm, "zero1", precision=one if comm.rank else other))


@pytest.mark.parametrize(
    ("sizes", "how", "precision", "is_exact"),
    [
        *(
            pytest.param((dp, inner), how, fs.Precision(wire=wire), dp * inner == 1, marks=[pytest.mark.deep] * (i != first))
            for first, wire in enumerate((torch.bfloat16, MXINT4))
            for i, dp, inner, how in (
                (0, 1, 1, fs.zero3("dp", "inner")),
                (1, 1, 2, fs.hfsdp("dp", "inner")),
                (1, 2, 1, fs.hsdp("dp", "inner")),
                (0, 1, 1, fs.hfsdp("dp", "inner")),
            )
        ),
        ((1, 1), fs.zero1("dp", "inner"), fs.Precision(update=MXINT4), True),
        ((2, 1), fs.hfsdp("inner", "dp"), fs.Precision(update=MXINT4), True),
        ((1, 2), fs.zero2("dp", "inner"), fs.Precision(update=MXINT4), False),
        ((2, 1), fs.zero1("dp", "inner"), fs.Precision(update=MXINT4), False),
    ],
)
@on_ranks(lambda sizes: fs.Mesh(dict(zip(("dp", "inner"), sizes))))
def test_nothing_is_rounded_along_an_axis_of_one_rank(comm, sizes, how, precision, is_exact):
    ways = {"params": make_params(layers=1), "steps": 3}
    blocking = train(comm, how, precision=precision, **ways)
    for policy in ({}, {"trivial_axes": True}, {"trivial_axes": True, "bucket_nbytes": 2000}):
        assert_same_training(train(comm, how, policy, precision=precision, **ways), blocking)
    if is_exact:
        assert_same_training(blocking, train(comm, how, **ways))
