"""Options of the wrong type: each public function names the option, its value, and what was expected, before any collective."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import fsharp as fs
from fsharp import type_checks
from fsharp.errors import OptionError, ScheduleError, StrategyError, TreeError
from fsharp.type_checks import annotation_in_words, predicate_of_annotation
from tests.test_architecture import PUBLIC


class Wrong:
    """Of a type that no option has."""

    def __repr__(self):
        return "<wrong>"


RESULTS = {
    "Layout", "TrainState", "Loss", "Metrics", "ShardedModule", "ShardedTensor", "ShardedParameter", "ScheduleHandle",
    "ScheduledFunction", "Sharded", "Checkpoint", "PerRank", "RefreshNbytes", "Call", "LeafSharding", "TreeSharding",
    "Timeline", "TimeSpan", "MeshPlacement", "Placement", "Dtypes", "Group", "Leaf", "Span", "UnitLayout", "NonFinite",
    "TimesByRank", "Event", "Program", "UnitFacts", "Schedule", "RaceError", "RaceReport", "Candidate", "Choice", "Comm",
    "Transform",
}  # fmt: skip
"""Public names that are no functions of users: what the library returns, and types of annotations."""

OWN_WORDS = {"Mesh", "SchedulePolicy", "DebugPolicy", "Precision", "RowsAtom", "fold_in", "seeded", "sharding", "map_units"}
"""Classes that check their arguments by themselves, and have tests of their own; a loop that calls what it is given."""

CHECKED = {name: getattr(module, name) for module, name in PUBLIC if callable(getattr(module, name))}
CHECKED = {name: fn for name, fn in CHECKED.items() if name not in RESULTS | OWN_WORDS}
OPTIONS = [
    pytest.param(fn, parameter.name, id=f"{name}, {parameter.name}")
    for name, fn in CHECKED.items()
    for parameter in inspect.signature(fn, eval_str=True).parameters.values()
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if parameter.annotation is not parameter.empty and not predicate_of_annotation(parameter.annotation)(Wrong())
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
    "a similar name": (lambda: fs.plan({}, ONE.mesh, None, unit="*"), r"^plan\(\) has no argument 'unit'. Closest: units.$"),
    "a name of a policy": (
        lambda: fs.Scheduler(ONE, pre_fetch=2),
        r"Policy\(\) has no argument 'pre_fetch'. Closest: prefetch",
    ),
    "a name of a step": (
        lambda: fs.gather(PARAMS, com=ONE),
        r"gather\(\) has no argument 'com'. Closest: comm",
    ),
    "a name of torch": (
        lambda: fs.optim.adamw(1e-3, betas=(0.9, 0.99)),
        r"^adamw\(\) has no argument 'betas'. It is called as adamw\(learning_rate, b1, b2, eps, weight_decay=weight_decay, lr",
    ),
    "a name of FSDP": (
        lambda: fs.shard_module(torch.nn.Linear(2, 2), auto_wrap_policy=3),
        r"^shard_module\(\) has no argument 'auto_wrap_policy'. It is called as shard_module\(module, mesh=mesh, strategy=st",
    ),
    "a name of FSDP2": (
        lambda: fs.Precision(param_dtype=torch.bfloat16),
        r"^Precision\(\) has no argument 'param_dtype'. It is called as Precision\(compute, main, wire, ",
    ),
    "a size by name": (lambda: fs.Mesh(dp=8), r"^Mesh\(\) has no argument 'dp'. It is called as fs.Mesh\(\{'dp': 8\}\).$"),
    "a missing argument": (
        lambda: fs.gather(PARAMS),
        r"^gather\(\): missing a required (keyword-only )?argument: 'comm'. It is called as gather\(tree, comm=comm, to=to\).$",
    ),
    "a keyword by position": (
        lambda: fs.gather(PARAMS, ONE),
        r"^gather\(\): too many positional arguments. It is called as ga",
    ),
    "full_tree with the Comm by position": (
        lambda: fs.full_tree(PARAMS, ONE),
        r"^full_tree\(\): too many positional arguments. It is called as full_tree\(tree, comm=comm\).$",
    ),
    "unshard of one rank's shards": (
        lambda: fs.unshard(PARAMS),
        r"^unshard\(\): shards is Sharded.*, expected a sequence with .* call fs.full_tree\(tree, comm=comm\).$",
    ),
    "unshard with a Comm": (
        lambda: fs.unshard([PARAMS], comm=ONE),
        r"^unshard\(\) has no argument 'comm'. .*; fs.full_tree\(tree, comm=comm\) gathers",
    ),
    "a word for a strategy": (
        lambda: fs.shard_module(torch.nn.Linear(2, 2), strategy="zero3"),
        r"strategy is 'zero3', expected a Strategy .*, such as fs.zero3\('dp'\).$",
    ),
    "a strategy without a call": (
        lambda: fs.shard_module(torch.nn.Linear(2, 2), strategy=fs.zero3),
        r"strategy is the function zero3, expected a Strategy .*, such as fs.zero3\('dp'\).$",
    ),
    "words for placements": (
        lambda: fs.layouts.AxisRule("shard", "shard", "shard"),
        r"^AxisRule\(\): params is 'shard', expected a Placement",
    ),
    "a list of axes that vary": (
        lambda: fs.zero3("dp").varying(["ep"]),
        r"varying\(\): axes is \['ep'\], expected a str",
    ),
    "a name of a dtype": (
        lambda: fs.plan({"w": torch.ones(2)}, ONE.mesh, fs.zero3("dp")).nbytes("params", "float32"),
        r"nbytes\(\): dtype is 'float32', expected a dtype",
    ),
    "a word for a precision": (
        lambda: fs.plan({}, ONE.mesh, fs.zero3("dp"), precision="bf16"),
        r"precision is 'bf16', expected a Precision .*, such as fs.Precision\(torch.bfloat16, torch.float32\).$",
    ),
    "parameters for a state": (
        lambda: fs.train_step(lambda params, batch, comm: 0, fs.optim.sgd(0.1))(PARAMS, None, ONE),
        r"step\(\): state is Sharded.*, expected a TrainState, such as fs.init_state\(tx, params, comm=comm\).$",
    ),
}


@pytest.mark.parametrize(("call", "match"), WRONG.values(), ids=WRONG)
def test_common_mistakes(call, match):
    with pytest.raises(OptionError, match=match):
        call()


def test_a_rule_of_a_strategy_has_its_axis_in_the_error():
    with pytest.raises(StrategyError, match=r"axis 'dp' has 1, expected an AxisRule"):
        fs.Strategy({"dp": 1})


@pytest.mark.parametrize(
    "fail", [lambda tree: torch.add(), lambda tree: fs.forward(dict), lambda: 0], ids=["torch", "fs", "own"]
)
def test_an_error_of_the_users_function_stays_as_it_is(fail):
    with pytest.raises(TypeError) as alone:
        fail(1)
    with pytest.raises(TypeError, match=rf"^{re.escape(str(alone.value))}$"):
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
    for name in ("prefetch", "bucket_nbytes", "memory_budget"):
        with pytest.raises(ScheduleError, match=rf"{name} is -1"):
            kind(**{name: -1})


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
    (tuple[int, str], (1, "2"), True),
    (tuple[int, str], (1, 2), False),
    (tuple[int, str], (1,), False),
    (tuple[int, str], [1, "2"], False),
    (fs.Comm, 3, False),
    (fs.Comm, fs.SingleComm(), True),
]


@pytest.mark.parametrize(("hint", "value", "expected"), FITS)
def test_what_fits_an_annotation(hint, value, expected):
    assert predicate_of_annotation(hint)(value) is expected


def test_annotations_in_words():
    assert annotation_in_words(int | None) == "an int or None"
    assert annotation_in_words(None | str | torch.dtype) == "a str or a dtype or None"
    assert annotation_in_words(str | Sequence[str]) == "a str or a Sequence of str"
    assert annotation_in_words(Mapping[str, tuple[float, float]]) == "a Mapping of str to tuple (number, number)"
    assert annotation_in_words(dict[str, int | None] | int) == "a dict of str to (int or None) or an int"
    assert annotation_in_words(list[Any]) == "a list"


def test_a_precision_is_no_dictionary_of_dtypes():
    with pytest.raises(OptionError, match=r"plan\(\): precision\['compute'\] is torch.bfloat16, expected a Precision"):
        fs.plan({"w": torch.ones(2)}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision={"compute": torch.bfloat16})
