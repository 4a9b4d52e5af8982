"""Doors by hypothesis: whichever way a tensor leaves a unit and comes back, it is as in plain torch, or refused by name."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, reject, settings, strategies as st

from tests import doors
from tests.doors import KEPT, PATHS, RETURNED, SINKS, UNITS, WAYS, WHATS, WRAPS, Door, Model, Ran, judge, run, run_plain

EXAMPLES = 12 if settings.default.max_examples <= 60 else 1000
LAST = UNITS - 1

OF_WEIGHTS = ("weight", "transposed weight", "row of a weight", "detached weight", "function of a weight")


class Pending(NamedTuple):
    """What does not hold yet.

    Attributes:
        paths: where.
        why: it does not.
        of: which models; one with any of these doors or wraps is not drawn for these paths.
    """

    paths: tuple[str, ...]
    why: str
    of: Callable[[Model], bool]


PENDING = [
    Pending(
        PATHS,
        "a parameter that leaves a reentrant checkpoint has no gradient",
        lambda model: any(d.what in OF_WEIGHTS and model.wraps[d.unit] == "reentrant checkpoint" for d in model.doors),
    )
]
"""Take a line out to have them drawn."""


def hides_tensor_from_checkpoint(model: Model) -> bool:
    """Whether an object hides a tensor of another unit from a reentrant checkpoint: torch may refuse a second backward."""
    return any(
        door.way == "slots" and door.sink.endswith("of the next unit") and wrap == "reentrant checkpoint"
        for door in model.doors
        for wrap in model.wraps[door.unit + 1 : door.unit + 2]
    )


def holds(model: Model, path: str) -> bool:
    """Whether a model has to hold on a path."""
    return not any(path in pending.paths and pending.of(model) for pending in PENDING)


@st.composite
def models(draw: st.DrawFn, path: str) -> Model:
    """Models that have to hold on a path."""
    ways = [way for way in WAYS if way != "hook" or path == "module"]
    found = []
    for unit in draw(st.sets(st.integers(0, LAST), min_size=1)):
        wrap = draw(st.sampled_from([wrap for wrap in WRAPS if holds(Model(wraps=(wrap,) * UNITS), path)]))
        every = [Door(unit, what, way, sink) for what in WHATS for way in ways for sink in SINKS]
        wraps = tuple(wrap if i == unit else "none" for i in range(UNITS))
        every = [door for door in every if holds(Model((door,), wraps), path)]
        found.append((draw(st.sampled_from(every)), wrap))
    chosen = {door.unit: wrap for door, wrap in found}
    return Model(
        doors=tuple(door for door, _ in found),
        wraps=tuple(chosen.get(unit, "none") for unit in range(UNITS)),
        target=draw(st.sampled_from([None, None, *range(UNITS)])) if holds(Model(target=0), path) else None,
        num_losses=draw(st.sampled_from([1, 1, 2])),
    )


def check(model: Model, path: str, strategy: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # of reentrant checkpoints
        try:
            expected = run_plain(model)
        except RuntimeError:  # reentrant checkpoints do not take everything
            assert "reentrant checkpoint" in model.wraps
            reject()
        for outcome in run(model, path, strategy):
            problem = judge(model, expected, outcome)
            if problem and path == "module" and hides_tensor_from_checkpoint(model):  # as limits.md says
                assert "backward through the graph a second time" in problem, f"{problem}\n{model} by {strategy}"
                continue
            assert problem is None, f"{problem}\n{model} by {strategy} on the {path} path"


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=EXAMPLES)
@given(st.data())
def test_doors(path, data):
    check(data.draw(models(path)), path, data.draw(st.sampled_from(["zero3", "zero3", "zero2", "zero1", "ddp"])))


@pytest.mark.parametrize("path", PATHS)
def test_a_model_without_doors_is_as_in_plain_torch(path):
    for wraps in [wraps for wraps in WRAPS if holds(Model(wraps=(wraps,) * UNITS), path)]:
        check(Model(wraps=(wraps,) * UNITS, num_losses=2), path, "zero3")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "hook"])
def test_each_way_lets_an_activation_through_the_scheduler(way):
    """Nothing has to be refused where memory is its own."""
    model = Model((Door(0, "activation", way, "loss"),))
    assert all(isinstance(outcome, Ran) for outcome in run(model, "scheduled", "zero3"))
    check(model, "scheduled", "zero3")


def test_the_blocking_path_and_the_scheduler_have_the_same_bits():
    """Of what leaves by the front door."""
    for what in ("activation", "view of an activation", "part of a loss"):
        for way in ("tuple", "dict", "named tuple"):
            model = Model((Door(0, what, way, "argument of the next unit"),))
            blocking, scheduled = run(model, "blocking", "zero3")[0], doors.run_on_two_ranks(model, "zero3")[0]
            for a, b in zip((*blocking.losses, *blocking.params), (*scheduled.losses, *scheduled.params), strict=True):
                assert torch.equal(a, b), (what, way)


# What the harness is worth.


def test_what_is_drawn_covers_all_there_is():
    assert set(WAYS) == {*RETURNED, *KEPT, "hook"}
    for pending in PENDING:
        assert set(pending.paths) <= set(PATHS)
        every = [
            Model((Door(0, what, way, sink),), (wrap,) * UNITS, target)
            for what, way, sink, wrap, target in product(WHATS, WAYS, SINKS, WRAPS, (None, 0))
        ]
        assert any(map(pending.of, every))
        assert not all(map(pending.of, every))


def test_the_judge_refuses_what_must_not_be():
    model = Model((Door(1, "activation", "tuple", "loss"),))
    expected = run_plain(model)
    assert judge(model, expected, expected) is None
    assert judge(model, expected, RuntimeError("unit 'layers.1' is gone")) is None
    other = expected._replace(evaluations=[x + 1e-2 for x in expected.evaluations])
    assert "evaluations[0] is" in judge(model, expected, other)
    assert "losses[0] is nan" in judge(model, expected, expected._replace(losses=[x * torch.nan for x in expected.losses]))
    assert "without naming the unit" in judge(model, expected, RuntimeError("layers.2"))
    assert "says nothing" in judge(model, expected, KeyError("layers.1"))


def test_a_hidden_tensor_of_another_unit_is_right_or_refused_by_torch():
    """By a module with two losses on one graph; the other paths are right."""
    door = Door(0, "function of a weight", "slots", "argument of the next unit")
    model = Model((door,), ("none", "reentrant checkpoint", "none"), num_losses=2)
    for path in PATHS:
        check(model, path, "zero3")
