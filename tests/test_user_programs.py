"""Random programs of users against plain torch: the same values, or an error that names what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, seed, settings

from tests.scheduling import every
from tests.user_programs import (
    Backward,
    Clip,
    Evaluate,
    Forward,
    Grad,
    Load,
    Save,
    Update,
    UserProgram,
    Zero,
    check,
    user_programs,
)

REFUSALS = {
    r"(step|unscale_)\(\): all backward passes .* inside of accumulate": "also if the last loss depends on no parameter",
    r"grad of parameter .*: all backward passes .* inside of accumulate": "Inside of `accumulate()` there is no `p.grad`",
    r"clip_grad_norm_\(\): there are no gradients": "`clip_grad_norm_()` is refused if no loss depends on a parameter",
    r"had been changed, as by clip_grad_norm_\(\)": "Do not change gradients between two backward passes of one step",
    r"forward that unsharded\(\) had abandoned": "the forward is abandoned, and its backward is an **error**",
    "The backward of its unit is not under way": "A checkpoint of a part of a unit may raise this error",
    r"unsharded\(\): a step is under way": "between a backward and its update or `zero_grad()` | **Error**",
    r"optimizer\.step\(\) has used up the gradients": "A step of a `ShardedOptimizer` releases the gradients",
    r"autograd\.grad\(\) with respect to .*: .*other backward": "does not mix with backward passes that accumulate gradients",
    "was frozen when its module was sharded": "`requires_grad_(True)` is refused for a parameter that was frozen",
    "were changed in place between their gather": "change parameters in place between two uses in a step",
}
"""What may be refused of a program whose ranks all do the same, and the known limit that says so."""


def test_each_refusal_is_a_known_limit():
    limits = re.sub(r"\s+", " ", Path("docs/limits.md").read_text())
    assert [words for words in REFUSALS.values() if words not in limits] == []


SEEDS = [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(1, 24))]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*rest rounded in float32:UserWarning"),  # frozen parameters beside main copies
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),  # a scaler with nothing to step
]
each_way = pytest.mark.parametrize("functions", [False, True], ids=["module", "functions"])


def examples(number, count):
    """Programs drawn by a seed: ``count`` of them, and eight times as many in the deep run."""
    return lambda test: seed(number)(settings(max_examples=count * (1 if settings.default.max_examples <= 60 else 8))(test))


@each_way
@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.timeout(900)
def test_programs(functions, number):
    @examples(number, 10)
    @given(user_programs(functions=functions))
    def run(program):
        for text in check(program, functions=functions):
            assert re.search("|".join(REFUSALS), text), text

    run()


@every(2, strategy=["ddp", "zero1", "zero2", "zero3"], functions=[False, True])
def test_backward_passes_over_different_units(functions, strategy):
    passes = [Forward((1,)), Backward(), Forward((0,)), Backward(), Forward((1, 0)), Backward()]
    for order in (passes, passes[2:], passes[4:] + passes[:2]):
        assert not check(UserProgram(3, frozenset(), (*order, Update()), strategy=strategy), functions=functions)


STEP = (Forward((0, 1)), Backward(), Update())


def test_a_tree_that_is_evaluated_is_not_reduced():
    # In each round another of the two trees is used first, so that a scheduler takes each for the one of the round before.
    statements = (Evaluate((0,), average=True), *STEP, Evaluate((0,)), Evaluate((1,), average=True))
    program = UserProgram(2, frozenset(), statements, strategy="zero1", precision="main copy")
    assert not check(program, functions=True)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(UserProgram(2, frozenset(), STEP, tied=True), id="writes to a tied parameter in unsharded()"),
        pytest.param(
            UserProgram(2, frozenset(), (Forward((0, 1), checkpointed="part"), *STEP[1:]), precision="main copy"),
            id="a part of a cell computed again, cast to a parameter's dtype",
        ),
        pytest.param(
            UserProgram(2, frozenset(), (Save(), *STEP, Update(), *STEP, Load(), *STEP), optimizer="adamw", groups=True),
            id="back to an earlier state, of two groups",
        ),
        pytest.param(
            UserProgram(
                2, frozenset(), (Zero(True), Forward((0,), both=True), *STEP[1:2] * 2, Clip(0.1), Update()), scaled=True
            ),
            id="scaled losses of one graph",
        ),
        pytest.param(
            UserProgram(2, frozenset(), (Forward((1, 0)), Grad(0), *STEP, Evaluate((0,), eval=True, inference=True)), depth=2),
            id="gradients by autograd, and means in evaluations",
        ),
    ],
)
def test_what_users_do(program):
    assert not check(program, functions=False)


DIFFERENT = "ranks called different collectives|ranks were given different values"


@each_way
@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.timeout(900)
def test_a_rank_that_evaluates_in_another_order(functions, number):
    """One rank alone swaps two evaluations, of parameters and of their averages: its own values, or an error on all ranks."""

    @examples(number, 5)
    @given(user_programs(functions=functions, differing=True))
    def run(program):
        for text in check(program, functions=functions):
            assert re.search("|".join([*REFUSALS, DIFFERENT]), text), text

    run()


@each_way
@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.timeout(900)
def test_programs_on_virtual_streams(functions, number):
    """The collectives of one rank as copies on streams of their own, which a race checker watches."""

    @examples(number, 4)
    @given(user_programs(functions=functions))
    def run(program):
        for text in check(replace(program, ranks=1), functions=functions, watched=True):
            assert re.search("|".join(REFUSALS), text), text

    run()
