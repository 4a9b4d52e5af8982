"""Groups of units: modules that run after one another share one gather."""

import re

import pytest
from torch import nn

import fsharp as fs
from fsharp.errors import OptionError, PatternError
from fsharp.schedules import Schedule
from fsharp.testing import DebugPolicy
from tests.as_torch import Block, make, same_as_torch

UNITS = ["layers.0", "layers.1", ("layers.2", "head")]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_group_moves_as_one(strategy):
    """The bits of plain torch, and one collective for the group, though nothing else is joined."""
    for step in same_as_torch(strategy, units=UNITS, policy=DebugPolicy(poison=True, bucket_nbytes=0)):
        ops = step.schedule.ops
        buckets = {(op.kind, op.bucket): set() for op in ops if op.bucket != -1}
        for op in ops:
            if op.bucket != -1:
                buckets[op.kind, op.bucket].add(op.unit)
        assert all(units == {"layers.2", "head"} for units in buckets.values())
        assert {kind for kind, _ in buckets} == {"gather", "reduce"}
        assert Schedule.from_json(step.schedule.to_json()) == step.schedule


def test_a_group_is_not_joined_with_others():
    for step in same_as_torch("zero3", units=UNITS, policy=DebugPolicy(poison=True, bucket_nbytes=10**6)):
        of = {op.unit: op.bucket for op in step.schedule.ops if (op.kind, op.phase) == ("gather", "forward")}
        assert of["layers.2"] == of["head"] != of["layers.1"]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_groups_of_classes_and_of_what_is_apart(strategy):
    """A group whose modules are no neighbours changes nothing but what is gathered together."""
    same_as_torch(strategy, units=[[Block], ("embed", "head")])


@pytest.mark.parametrize("wrong", [1, None, {"embed"}, nn.Linear(1, 1)], ids=str)
@pytest.mark.parametrize("around", [lambda x: [x, Block], lambda x: [Block, ("embed", x)]], ids=["rule", "rule of a group"])
def test_values_that_are_no_rules_are_refused_by_name(wrong, around):
    match = (
        rf"^shard_module\(\): units has {re.escape(repr(wrong))}, expected a class of modules, .* or a tuple or list of these\."
    )
    with pytest.raises(OptionError, match=match):
        fs.shard_module(make(), mesh=fs.SingleComm(), units=around(wrong))


def test_a_group_in_a_group_is_refused_by_name():
    with pytest.raises(OptionError, match=r"units has \['embed'\], expected"):
        fs.shard_module(make(), mesh=fs.SingleComm(), units=[[["embed"]]])


@pytest.mark.parametrize(
    ("units", "match"),
    [
        ([("layers.0", "layers.0.mlp")], r"'layers\.0\.mlp' is inside of 'layers\.0', which is in the same group"),
        ([("layers.0", "head"), ["head", "embed"]], r"'head' is in two groups"),
        ([("layers.0", "tail")], r"'tail' matches no module"),
    ],
)
def test_refused(units, match):
    with pytest.raises(PatternError, match=match):
        fs.shard_module(make(), mesh=fs.SingleComm(), units=units)
