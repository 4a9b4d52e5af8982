"""Options of the wrong type: each public function names the option, its value, and what was expected, before any collective."""

import inspect

import pytest
import torch

import fsharp as fs
from fsharp import type_checks
from fsharp.errors import OptionError, ScheduleError, StrategyError, TreeError
from fsharp.type_checks import annotation_in_words, fits_annotation
from tests.test_architecture import PUBLIC


class Wrong:
    """Of a type that no option has."""

    def __repr__(self):
        return "<wrong>"


RESULTS = {
    "Layout", "TrainState", "Loss", "Metrics", "ShardedModule", "ShardedTensor", "ShardedParameter", "ScheduledCalls",
    "ScheduledFunction", "Sharded", "Checkpoint", "PerRank", "RefreshNbytes", "Call", "LeafSharding", "TreeSharding",
    "Timeline", "TimeSpan", "Place", "Placement", "Dtypes", "Group", "Leaf", "Span", "UnitLayout", "NonFinite", "RankTimes",
    "Event", "Program", "UnitFacts", "Schedule", "RaceError", "RaceReport", "Candidate", "Choice", "Comm", "Transform",
}  # fmt: skip
"""Public names that are no functions of users: what the library returns, and types of annotations."""

OWN_WORDS = {"Mesh", "SchedulePolicy", "DebugPolicy", "Precision", "Rows", "fold_in", "seeded", "sharding", "map_units"}
"""Classes that check their arguments by themselves, and have tests of their own; a loop that calls what it is given."""

CHECKED = {name: getattr(module, name) for module, name in PUBLIC if callable(getattr(module, name))}
CHECKED = {name: fn for name, fn in CHECKED.items() if name not in RESULTS | OWN_WORDS}
OPTIONS = [
    pytest.param(fn, parameter.name, id=f"{name}, {parameter.name}")
    for name, fn in CHECKED.items()
    for parameter in inspect.signature(fn, eval_str=True).parameters.values()
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if parameter.annotation is not parameter.empty and not fits_annotation(parameter.annotation)(Wrong())
]


@pytest.mark.parametrize(("fn", "name"), OPTIONS)
def test_an_option_of_the_wrong_type_is_refused_by_name(fn, name):
    with pytest.raises(OptionError, match=rf"\(\): {name} is <wrong>, expected .") as raised:
        fn(**{name: Wrong()})
    assert isinstance(raised.value, TypeError)


def test_there_are_options():
    assert len(CHECKED) > 100
    assert len(OPTIONS) > 250
    assert {name for _, name in PUBLIC} >= RESULTS | OWN_WORDS


ONE = fs.SingleComm()
LAYOUT = fs.plan({"w": torch.ones(2, 2)}, ONE.mesh, fs.zero3("dp"))
PARAMS = fs.shard({"w": torch.ones(2, 2)}, LAYOUT, ONE)
STATE = fs.init_state(fs.optim.sgd(0.1), PARAMS, comm=ONE)
LOSS = fs.Loss(torch.ones(()), torch.ones(()))
TREES = {
    "forward": lambda tree: fs.forward(dict, tree, comm=ONE),
    "dummy_forward": lambda tree: fs.dummy_forward(tree, torch.ones(2), comm=ONE),
    "gather": lambda tree: fs.gather(tree, comm=ONE),
    "reduce_scatter": lambda tree: fs.reduce_scatter(tree, comm=ONE),
    "full": lambda tree: fs.full_tree(tree, comm=ONE),
    "average": lambda tree: fs.average(LOSS, tree, comm=ONE),
    "init_state": lambda tree: fs.init_state(fs.optim.sgd(0.1), tree, comm=ONE),
    "update": lambda tree: fs.update(fs.optim.sgd(0.1), tree, STATE, comm=ONE),
    "merge": lambda tree: fs.layouts.merge(tree, PARAMS),
    "merged": lambda tree: fs.layouts.merge(PARAMS, tree),
    "trainable": fs.trainable,
    "reshard": lambda tree: fs.reshard(tree, LAYOUT, comm=ONE),
}


@pytest.mark.parametrize("tree", ["w", 3, torch.ones(2), ONE.mesh], ids=["str", "int", "Tensor", "Mesh"])
@pytest.mark.parametrize("name", TREES)
def test_what_is_no_tree_of_units_is_refused_by_type(name, tree):
    with pytest.raises(TreeError, match=rf"(?s){type(tree).__name__}"):
        TREES[name](tree)


WRONG = {
    "a Mesh is no Comm": (
        lambda: fs.forward(dict, PARAMS, comm=ONE.mesh),
        r"forward\(\): comm is Mesh\(dp=1\), expected a Comm",
    ),
    "a list of axes": (lambda: fs.ddp(["dp"]), r"ddp\(\): axes is \['dp'\], expected a str"),
    "a loss": (lambda: fs.resilience.find_nonfinite("1", PARAMS, comm=ONE), r"find_nonfinite\(\): loss is '1', expected"),
    "rules": (lambda: fs.Strategy("dp"), r"Strategy\(\): rules is 'dp', expected a Mapping"),
}


@pytest.mark.parametrize(("call", "match"), WRONG.values(), ids=WRONG)
def test_common_mistakes(call, match):
    with pytest.raises(OptionError, match=match):
        call()


def test_a_rule_of_a_strategy_has_its_axis_in_the_error():
    with pytest.raises(StrategyError, match=r"axis 'dp' has 1, expected an AxisRule"):
        fs.Strategy({"dp": 1})


def test_an_error_of_the_users_function_stays_as_it_is():
    def fail(tree):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        fs.forward(fail, PARAMS, comm=ONE)


def test_a_call_without_an_error_looks_at_no_hints(monkeypatch):
    monkeypatch.setattr(type_checks, "check_arguments", None)
    fs.gather(fs.layouts.merge(PARAMS, PARAMS), comm=ONE)
    fs.forward(lambda tree: tree["w"].sum(), PARAMS, comm=ONE)


@pytest.mark.parametrize("kind", [fs.SchedulePolicy, fs.testing.DebugPolicy])
def test_every_field_of_a_policy(kind):
    for name in inspect.signature(kind).parameters:
        with pytest.raises(OptionError, match=rf"Policy\(\): {name} is <wrong>, expected "):
            kind(**{name: Wrong()})
    with pytest.raises(OptionError, match=r"release is 'never', expected 'forward' or 'backward' or 'room'"):
        kind(release="never")
    with pytest.raises(ScheduleError, match=r"prefetch is -1"):
        kind(prefetch=-1)


FITS = [
    (int, 3, True),
    (int, True, False),
    (int, 3.0, False),
    (float, 3, True),
    (float, False, False),
    (int | None, None, True),
    (tuple[int, ...], (1, 2), True),
    (tuple[int, ...], (1, "2"), False),
    (list[str], "ab", False),
    (torch.dtype | None, "bfloat16", False),
    (fs.Comm, 3, False),
    (fs.Comm, fs.SingleComm(), True),
]


@pytest.mark.parametrize(("hint", "value", "expected"), FITS)
def test_what_fits_an_annotation(hint, value, expected):
    assert fits_annotation(hint)(value) is expected


def test_annotations_in_words():
    assert annotation_in_words(int | None) == "an int or None"
    assert annotation_in_words(None | str | torch.dtype) == "a str or a dtype or None"


def test_a_precision_is_no_dictionary_of_dtypes():
    with pytest.raises(OptionError, match=r"plan\(\): precision\['compute'\] is torch.bfloat16, expected a Precision"):
        fs.plan({"w": torch.ones(2)}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision={"compute": torch.bfloat16})
