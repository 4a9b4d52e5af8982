"""A saved choice is read in other processes, edited, and followed: its step has the bits of a step without tune."""

import dataclasses
import json

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError, ScheduleError
from fsharp.inspect import Choice
from fsharp.planning.choice_json import plan_arguments_from_json, plan_arguments_to_json
from fsharp.testing import DebugPolicy, processes, simulate
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.modules import descend
from tests.scheduling import DP, HYBRID

SLOW = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e6, latency=1e-4)
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire={"dp": torch.float32})
SEARCH = {"budget": 1e9, "mesh": DP, "units": "layers.*", "formats": {"mixed": MIXED}, "backend": "gloo"}
ZERO2 = {"dp": {"params": "replicate", "grads": "shard", "optim": "shard"}}


def edited(text, **changes):
    """The JSON of a choice with other values of fields of its policy and of its ``made_by``."""
    body = json.loads(text)
    for name, value in changes.items():
        body["made_by" if name in body["made_by"] else "policy"][name] = value
    return json.dumps(body)


def assert_same_bits(tree, other):
    torch.testing.assert_close(tree, other, rtol=0, atol=0)


def step_of_functions(comm, layout, policy):
    """The tensors of the state after two steps, and the schedule that they follow."""
    tx = fs.optim.adamw(1e-2)
    state = fs.init_state(tx, fs.shard(make_params(), layout, comm, place="optim"), comm=comm)
    step = fs.Scheduler(comm, policy=policy)(fs.train_step(loss_fn, tx))
    for batch in make_batches(2, 16):
        state, _ = step(state, batch)
    return [x.clone() for x in optree.tree_leaves(state) if isinstance(x, torch.Tensor)], step.schedule


def test_functions_follow_a_choice_that_another_process_saved():
    found = fs.tune(make_params(), SLOW, batch=64, frozen=lambda path: path == "embed", **SEARCH)
    runner_up = found.pick("zero1", "gathered once")
    by_hand = {
        found.to_json(): (getattr(fs, found.name)("dp"), found.policy),
        edited(found.to_json(), prefetch=0): (getattr(fs, found.name)("dp"), fs.SchedulePolicy(prefetch=0)),
        runner_up.to_json(): (fs.zero1("dp"), fs.SchedulePolicy(release="backward")),
        edited(runner_up.to_json(), strategy=ZERO2, prefetch=2): (fs.zero2("dp"), fs.SchedulePolicy(2, "backward")),
    }

    def rank_fn(comm):
        for text, (strategy, policy) in by_hand.items():
            choice = Choice.from_json(text)
            layout = fs.plan(make_params(), comm.mesh, strategy, units="layers.*", precision=MIXED, frozen="embed")
            assert fs.plan(make_params(), **choice.made_by) == layout == choice.layout
            assert choice.policy == policy
            followed, direct = (step_of_functions(comm, x, policy) for x in (choice.layout, layout))
            assert_same_bits(followed[0], direct[0])
            assert followed[1] == direct[1] == choice.schedule
        return len(by_hand)

    assert processes(DP, rank_fn) == [4, 4]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


TOKENS = torch.arange(12).view(2, 6)


def step_of_a_module(**options):
    torch.manual_seed(3)
    model = fs.shard_module(Model(), **options, sync_from=0)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        descend(F.cross_entropy(model(TOKENS).float().flatten(0, 1), TOKENS.flatten()), optimizer)
    return model.full_state_dict(rank=None), model.scheduled_step.schedule


def test_a_module_follows_a_choice_that_another_process_saved():
    found = fs.tune(Model(), SLOW, batch=TOKENS, **SEARCH)
    zero3 = found.pick("zero3", "prefetch 1")
    text = edited(zero3.to_json(), prefetch=0)
    assert plan_arguments_from_json(json.loads(text)["made_by"])["frozen"] == ["embed.weight", "head.weight"]

    def rank_fn(comm):
        choice = Choice.from_json(text)
        followed = step_of_a_module(**{**choice.module_options, "mesh": comm})
        by_hand = {"strategy": fs.zero3("dp"), "units": "layers.*", "policy": fs.SchedulePolicy(prefetch=0), "precision": MIXED}
        direct = step_of_a_module(**by_hand, mesh=comm)
        assert_same_bits(followed[0], direct[0])
        assert followed[1] == direct[1] == choice.schedule
        return True

    assert processes(DP, rank_fn) == [True, True]


def test_a_choice_may_have_the_policy_of_a_test():
    policy = DebugPolicy(poison=True, prefetch=1)
    found = fs.tune(make_params(), SLOW, batch=64, **{**SEARCH, "policies": {"poisoned": policy}})
    again = Choice.from_json(found.to_json())
    assert again.policy == policy
    assert again.schedule == found.schedule


def test_seconds_by_a_function_are_the_same_on_all_ranks():
    """Each rank has a function of its own."""

    def rank_fn(comm):
        hardware = dataclasses.replace(SLOW, compute_times=lambda path: (1e-3, 2e-3))
        return fs.tune(make_params(), hardware, batch=64, comm=comm, **SEARCH).name

    assert len(set(simulate(DP, rank_fn))) == 1


def test_an_edited_strategy_is_predicted_again():
    found = fs.tune(make_params(), SLOW, batch=64, **SEARCH)
    text, zero2 = found.pick("zero1", "prefetch 1").to_json(), found.pick("zero2", "prefetch 1")
    again = Choice.from_json(edited(text, strategy=ZERO2))
    assert (again.name, again.layout, again.schedule) == ("zero1, edited", zero2.layout, zero2.schedule)
    assert again.candidates[0].memory == zero2.candidates[0].memory
    assert len(again.candidates) == len(found.candidates) + 1
    both = Choice.from_json(edited(text, strategy=ZERO2, prefetch=3)).candidates[0]
    assert (both.layout, both.policy) == ("zero1, edited", "prefetch 1, edited")
    with pytest.raises(ScheduleError, match="the text is not a choice: ValueError: 'sharded' is not a valid Placement"):
        Choice.from_json(edited(text, strategy={"dp": {**ZERO2["dp"], "grads": "sharded"}}))
    with pytest.raises(ScheduleError, match=r"the text is not a choice: .*names the unknown axis 'dp'"):
        Choice.from_json(edited(text, mesh={"x": 2}))
    with pytest.raises(LayoutError, match="order"):
        Choice.from_json(edited(text, units=None))


ARGUMENTS = {
    "specs": (DP, {"strategy": {"**": fs.P(), "embed": fs.P("dp")}, "units": "*"}),
    "a spec of two axes": (HYBRID, {"strategy": {"**": fs.P(), "embed": fs.P(("outer", "inner"), None)}, "units": "*"}),
    "rules by pattern": (DP, {"strategy": {"**": fs.zero3("dp"), "head": fs.P()}, "units": ["layers.*", "head"]}),
    "a tree of rules": (
        DP,
        {"strategy": {"embed": fs.zero1("dp"), "layers": fs.zero3("dp"), "head": fs.ddp("dp")}, "units": "layers.*"},
    ),
    "formats": (HYBRID, {"strategy": fs.hfsdp("outer", "inner"), "precision": fs.Precision(wire={"outer": fs.formats.mxint4})}),
    "stored": (DP, {"strategy": fs.zero3("dp"), "precision": fs.Precision(stored=fs.formats.mxfp8, wire=fs.formats.mxint8)}),
    "precisions by pattern": (
        DP,
        {
            "strategy": fs.zero1("dp"),
            "precision": {
                "**": fs.Precision(torch.bfloat16, main=torch.float32, update=fs.formats.mxint8),
                "layers.*.b": fs.Precision(),
            },
        },
    ),
    "frozen leaves": (DP, {"strategy": fs.zero2("dp"), "frozen": {"layers": True, "layers.*.w": False}}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_arguments_of_plan_are_read_back(name):
    mesh, given = ARGUMENTS[name]
    made_by = {"mesh": mesh, "units": None, "precision": fs.Precision(), "frozen": (), **given}
    layout = fs.plan(make_params(), **made_by)
    text = json.dumps(plan_arguments_to_json(made_by, layout))
    assert fs.plan(make_params(), **plan_arguments_from_json(json.loads(text))) == layout
    again = plan_arguments_from_json(json.loads(text))
    assert json.dumps(plan_arguments_to_json(again, layout)) == text


def test_a_choice_among_layouts_is_read_back_without_the_arguments_that_made_them():
    layouts = {name: fs.plan(make_params(), DP, getattr(fs, name)("dp")) for name in ("zero1", "zero3")}
    found = fs.tune(layouts, SLOW, budget=1e9)
    again = Choice.from_json(found.to_json())
    assert (again.made_by, again.layout, again.schedule) == ({}, found.layout, found.schedule)
    with pytest.raises(ScheduleError, match="the options of the layout are unknown: tune"):
        _ = again.module_options
