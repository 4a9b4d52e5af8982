"""Tracebacks of errors that pass through this library: the user's frames in their order, none of the library, and one hint."""

import copy
import gc
import inspect
import os
import subprocess
import sys
import traceback
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import (
    AgreementError,
    CheckpointError,
    CommError,
    LayoutError,
    LossError,
    MeshError,
    OptionError,
    RunError,
    ScheduleError,
    TreeError,
)
from fsharp.stateful.runtime.engine import ScheduledEngine
from fsharp.testing import processes, simulate
from fsharp.tracebacks import HINT, api_boundary, api_context
from tests.forked_python import run_forked
from tests.test_architecture import PUBLIC

ONE, TWO = fs.SingleComm(), fs.Mesh({"dp": 2})
TREE = {"w": torch.ones(2, 2)}
TX = fs.optim.sgd(0.1)


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.delenv("FSHARP_TRACEBACK")


def params():
    return fs.shard(TREE, fs.plan(TREE, ONE.mesh, fs.zero3("dp")), ONE)


def state():
    return fs.init_state(TX, params(), comm=ONE)


def broken(tree, *args):
    raise ValueError("of the user")


def loss_fn(params, batch, comm):
    return fs.forward(broken, params, batch, comm=comm).sum()


def lazy_loss_fn(params, batch, comm):
    x = fs.forward(lambda tree, x: x @ tree["w"], params, batch, comm=comm)
    return Broken.apply(x).sum()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return broken(grad)


class Layer(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(2, 2), where

    def forward(self, x):
        if self.where == "forward":
            broken(x)
        x = self.linear(x)
        return Broken.apply(x) if self.where == "backward" else x


class Net(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.layers = nn.ModuleList([Layer(""), Layer(where)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def module(where=""):
    return fs.shard_module(Net(where), mesh=ONE.mesh, strategy=fs.zero3("dp"), units=[Layer])


def optimizer(model):
    return fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def frames(error):
    """The functions in a traceback, from this file's call on; with their module if that is another one."""
    found = [(f.f_globals["__name__"], f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
    return [name if module == __name__ else f"{module}.{name}" for module, name in found]


def raised(call):
    """The error of a call, and the functions in its traceback without this one."""
    try:
        call()
    except Exception as error:
        return error, frames(error)[1:]
    raise AssertionError("no error")


class BrokenPair(fs.SingleComm):
    """A Comm of the user."""

    def __init__(self):
        super().__init__()
        self.mesh = TWO

    def all_gather(self, x, axis, *, label=""):
        return broken(x)


USERS = {
    "forward": (lambda: fs.forward(broken, params(), 1, comm=ONE), ["broken"]),
    "value_and_grad": (lambda: fs.value_and_grad(loss_fn)(params(), torch.ones(2), comm=ONE), ["loss_fn", "broken"]),
    "backward within value_and_grad": (
        lambda: fs.value_and_grad(lazy_loss_fn)(params(), torch.ones(2, 2), comm=ONE),
        ["backward", "broken"],
    ),
    "train_step": (lambda: fs.train_step(loss_fn, TX)(state(), torch.ones(2), ONE), ["loss_fn", "broken"]),
    "scheduled": (lambda: fs.Scheduler(ONE)(fs.train_step(loss_fn, TX))(state(), torch.ones(2)), ["loss_fn", "broken"]),
    "remat": (lambda: fs.forward(broken, params(), 1, comm=ONE, remat=True), ["broken"]),
    "map_units": (lambda: fs.layouts.map_units(broken, params()), ["broken"]),
    "per_sample_norms": (lambda: fs.per_sample_norms(loss_fn)(params(), torch.ones(2, 2), comm=ONE), ["loss_fn", "broken"]),
    "init_params": (lambda: fs.init_params(broken, fs.plan(TREE, ONE.mesh, fs.zero3("dp")), ONE, key=0), ["broken"]),
    "a module": (lambda: module("forward")(torch.ones(1, 2)), ["forward", "forward", "broken"]),
    "a module as a function": (
        lambda: (lambda fn, tree: fn(tree, torch.ones(1, 2), comm=ONE))(*module("forward").functional()),
        ["<lambda>", "forward", "forward", "broken"],
    ),
    "a hook of a module": (
        lambda: (lambda model: (model.register_forward_hook(broken), model(torch.ones(1, 2))))(module()),
        ["<lambda>", "broken"],
    ),
    "a torch layer": (
        lambda: fs.shard_module(nn.Sequential(nn.Linear(2, 3)), mesh=ONE.mesh, strategy=fs.zero3("dp"))(torch.ones(1, 4)),
        [
            "torch.nn.modules.container.forward",  # its calls are torch's own, as without this library
            "torch.nn.modules.module._wrapped_call_impl",
            "torch.nn.modules.module._call_impl",
            "torch.nn.modules.linear.forward",
        ],
    ),
    "a closure of step": (
        lambda: optimizer(module()).step(lambda: broken(1)),
        ["torch.optim.optimizer.wrapper", "<lambda>", "broken"],
    ),
    "simulate": (lambda: simulate(TWO, lambda comm: broken(comm)), ["<lambda>", "broken"]),
    "a Comm": (lambda: fs.shard(TREE, fs.plan(TREE, TWO, fs.zero3("dp")), BrokenPair()), ["all_gather", "broken"]),
}


@pytest.mark.parametrize("name", USERS)
def test_an_error_of_the_user_shows_the_users_frames_alone(name):
    call, expected = USERS[name]
    error, shown = raised(call)
    assert [each for each in shown if "fsharp" in each] == []
    assert shown[0] == "<lambda>"
    assert shown[1:] == expected
    assert "".join(traceback.format_exception(error)).count(HINT) == 1


def grads_of(model):
    return torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()), create_graph=True)


def averaged():
    with optimizer(module()).averaged():
        pass


OWN = {
    "a function": (lambda: fs.forward(broken, TREE, comm=ONE), TreeError),
    "another": (lambda: fs.layouts.merge(params(), 3), TreeError),
    "an option": (lambda: fs.optim.sgd("0.1"), OptionError),
    "a Comm that is none": (lambda: fs.forward(broken, params(), comm="dp"), OptionError),
    "a missing argument": (lambda: fs.update(TX), OptionError),
    "a class": (lambda: fs.Mesh({"dp": 0}), MeshError),
    "a dataclass": (lambda: fs.SchedulePolicy(prefetch=-1), ScheduleError),
    "a method": (lambda: ONE.mesh.index("tp"), MeshError),
    "a property": (lambda: setattr(optimizer(module()), "state", 1), TreeError),
    "a loss": (lambda: fs.value_and_grad(lambda p, x, comm: x)(params(), torch.ones(()), comm=ONE), LossError),
    "a scheduled function": (lambda: fs.Scheduler(ONE)(lambda x, comm: fs.forward(broken, x, comm=comm))(1), TreeError),
    "a generator": (lambda: list(fs.resilience.IndexSampler(4, 2, seed=0).batches(-1)), RunError),
    "a module": (lambda: fs.shard_module(module(), mesh=ONE.mesh, strategy=fs.zero3("dp")), TreeError),
    "a copy of a module": (lambda: copy.deepcopy(module()), TreeError),
    "an optimizer": (lambda: optimizer(module()).zero_grad(set_to_none=False), ScheduleError),
    "a parameter": (lambda: next(iter(module().parameters())).register_hook(broken), LayoutError),
    "torch.autograd.grad": (lambda: grads_of(module()), ScheduleError),
    "a backward": (lambda: module()(torch.ones(1, 2)).sum().backward(create_graph=True), ScheduleError),
    "a context": (averaged, TreeError),
    "a checkpoint": (lambda: fs.checkpoint.load("/nowhere", state(), comm=ONE), CheckpointError),
    "simulate": (lambda: simulate(TWO, lambda comm: comm.rank == 0 or comm.all_reduce(torch.ones(1), "dp")), CommError),
}


@pytest.mark.parametrize("name", OWN)
def test_an_error_of_the_library_ends_where_the_user_called_it(name):
    call, kind = OWN[name]
    error, shown = raised(call)
    assert type(error) is kind
    assert [each for each in shown if "fsharp" in each] == []
    text = "".join(traceback.format_exception(error))
    assert "/fsharp/" not in text, "nor are there any in what led to it"
    assert text.count(HINT) == 1


@pytest.mark.parametrize("name", ["a function", "a backward", "a Comm that is none"])
def test_all_frames_are_shown_if_asked_for(name, monkeypatch):
    monkeypatch.setenv("FSHARP_TRACEBACK", "full")
    error, shown = raised(OWN[name][0])
    assert any("fsharp" in each for each in shown)
    assert HINT not in "".join(traceback.format_exception(error))


def test_a_backward_of_the_user_through_a_module():
    loss = module("backward")(torch.ones(1, 2)).sum()
    error, shown = raised(lambda: loss.backward())
    assert shown[-2:] == ["backward", "broken"]
    assert [each for each in shown if "fsharp" in each] == []
    assert error.args == ("of the user",)


def test_a_function_that_fails_in_the_backward_alone():
    calls = []

    def second_time(tree, x):
        if calls:
            broken(x)
        calls.append(1)
        return x @ tree["w"]

    x = torch.ones(2, 2, requires_grad=True)
    loss = fs.forward(second_time, params(), x, comm=ONE, remat=True).sum()
    _, shown = raised(lambda: loss.backward())
    assert shown[-2:] == ["second_time", "broken"]
    assert [each for each in shown if "fsharp" in each] == []


def test_what_led_to_an_error_is_shown_without_frames_as_well():
    def handled(tree):
        try:
            fs.forward(broken, params(), comm=ONE)
        except ValueError as error:
            raise KeyError("another") from error

    error, shown = raised(lambda: fs.forward(handled, params(), comm=ONE))
    assert shown == ["<lambda>", "handled"]
    assert frames(error.__cause__) == ["handled", "broken"]
    assert "".join(traceback.format_exception(error)).count(HINT) == 1


def test_an_internal_error_that_was_handled_is_left_out():
    text = "".join(traceback.format_exception(raised(OWN["a Comm that is none"][0])[0]))
    assert "During handling" not in text


def test_what_the_user_handled_before_stays():
    def call():
        try:
            broken(1)
        except ValueError:
            fs.forward(broken, TREE, comm=ONE)

    error, shown = raised(call)
    assert shown == ["call"]
    assert frames(error.__context__) == ["call", "broken"]
    assert "During handling" in "".join(traceback.format_exception(error))


def test_a_group_of_errors():
    def several(tree):
        found = []
        for _ in range(2):
            try:
                fs.forward(broken, params(), comm=ONE)
            except ValueError as error:
                found.append(error)
        raise ExceptionGroup("two", found)

    error, shown = raised(lambda: fs.forward(several, params(), comm=ONE))
    assert shown == ["<lambda>", "several"]
    assert [frames(each) for each in error.exceptions] == [["several", "broken"]] * 2
    assert "".join(traceback.format_exception(error)).count(HINT) == 1


def test_an_error_that_is_raised_twice():
    kept, _ = raised(lambda: fs.forward(broken, params(), comm=ONE))

    def again(tree):
        raise kept

    error, shown = raised(lambda: fs.forward(again, params(), comm=ONE))
    assert error is kept
    assert shown[:2] == ["<lambda>", "again"]
    assert error.__notes__ == [HINT]


@dataclass(frozen=True)
class Frozen(Exception):
    """Nothing of it can be set."""

    number: int


def test_an_error_that_cannot_be_written_to():
    def fail(tree):
        raise Frozen(3)

    error, shown = raised(lambda: fs.forward(fail, params(), comm=ONE))
    assert error == Frozen(3)
    assert shown == ["<lambda>", "fail"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_keeps_its_frames(kind):
    def stop(tree):
        raise kind

    with pytest.raises(kind) as caught:
        fs.forward(stop, params(), comm=ONE)
    assert any("fsharp" in each for each in frames(caught.value))


def test_a_debugger_comes_to_the_users_frame():
    def fail(tree, x):
        here = x + 1
        raise ValueError(here)

    error, _ = raised(lambda: fs.forward(fail, params(), 1, comm=ONE))
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    assert frame.f_locals["here"] == 2
    assert line == fail.__code__.co_firstlineno + 2


def test_an_error_in_the_block_of_a_context_is_the_users_alone():
    model = module()
    for context in (model.unsharded, model.accumulate, lambda: fs.resilience.seeded(0)):

        def call(context=context):
            with context():
                broken(1)

        error, shown = raised(call)
        assert shown == ["call", "broken"]
        assert not hasattr(error, "__notes__")


def test_a_context_decorates_a_function():
    @api_context
    def doubled(x):
        yield 2 * x

    @doubled(3)
    def call():
        return "called"

    assert [call(), call()] == ["called", "called"]
    with doubled(3) as value:
        assert value == 6


def test_an_error_holds_nothing_for_longer_than_before():
    class Value:
        """Can be referred to weakly."""

    value = Value()
    alive = weakref.ref(value)
    gc.collect()
    gc.disable()
    try:
        raised(lambda value=value: fs.Scheduler(ONE)(lambda x, comm: fs.forward(broken, params(), x, comm=comm))(value))
        del value
        assert alive() is None, "there is no cycle"
    finally:
        gc.enable()


INTERNAL = """
@api_boundary
def internal():
    value = Value()
    refs.append(weakref.ref(value))
    raise ValueError
"""


def test_what_frames_that_are_left_out_hold_is_released():
    class Value:
        """Can be referred to weakly."""

    refs = []
    library = {"__name__": "fsharp.internal", "api_boundary": api_boundary, "refs": refs, "Value": Value, "weakref": weakref}
    exec(INTERNAL, library)
    error, shown = raised(lambda: library["internal"]())
    assert isinstance(error, ValueError)
    assert shown == ["<lambda>"]
    assert refs[0]() is None


def test_the_error_of_another_rank():
    def step(comm):
        layout = fs.plan(TREE, comm.mesh, fs.zero3("dp"))
        scheduler = fs.Scheduler(comm)
        part = fs.shard(TREE, layout, comm)

        def other_loss(params, batch, comm):
            if comm.rank == 1:
                broken(batch)
            return fs.forward(lambda tree, x: (x @ tree["w"]).sum(), params, batch, comm=comm)

        try:
            scheduler(lambda p, x, comm: fs.value_and_grad(other_loss)(p, x, comm=comm))(part, torch.ones(2, 2))
        except Exception as error:
            return type(error), "".join(traceback.format_exception(error))
        return None

    (kind, text), (own, _) = processes(TWO, step)
    assert (kind, own) == (AgreementError, ValueError)
    assert "rank 1 of 2 failed" in text
    assert text.count("Traceback (most recent call last)") == 2
    assert "in other_loss" in text
    assert "in broken" in text
    assert "/fsharp/" not in text
    assert text.count(HINT) == 1


def test_an_error_that_each_later_call_raises_shows_that_call_alone():
    def use(comm):
        comm.watch.refuse_calls_on_all_ranks(CommError, "it is over")
        return [raised(lambda: comm.all_reduce(torch.ones(1), "dp"))[1] for _ in range(2)]

    for shown in processes(TWO, use):
        assert shown == [["<lambda>", "torch.utils._contextlib.decorate_context"]] * 2


def test_what_the_interpreter_prints(tmp_path):
    program = tmp_path / "program.py"
    program.write_text('import torch\nimport fsharp as fs\n\nfs.forward(len, {"w": torch.ones(2)}, comm=fs.SingleComm())\n')
    env = {name: value for name, value in os.environ.items() if name != "FSHARP_TRACEBACK"}
    options = {"env": env, "capture_output": True, "text": True, "check": False}
    done = run_forked(lambda: subprocess.run([sys.executable, str(program)], **options))
    lines = [line for line in done.stderr.splitlines() if line.strip(" ^~")]
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{program}", line 4, in <module>',
        '    fs.forward(len, {"w": torch.ones(2)}, comm=fs.SingleComm())',
        "fsharp.errors.TreeError: forward(): expected a tree of Sharded, got dict, which is not sharded. "
        "Pass fs.shard(tree, layout, comm), with layout = fs.plan(tree, comm.mesh, strategy).",
        HINT,
    ]


DUNDER = ("__init__", "__new__", "__call__", "__enter__", "__exit__")


def entry_points():
    """By name, the public functions and the methods that say what they raise, but for those that only functions call."""
    found = {}
    for module, name in PUBLIC:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            found[f"{module.__name__}.{name}"] = thing
        for kind in thing.__mro__ if inspect.isclass(thing) else ():
            if kind.__module__.partition(".")[0] != "fsharp" or issubclass(kind, BaseException) or kind is ScheduledEngine:
                continue
            for method, value in vars(kind).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                is_public = inspect.isfunction(function) and (method in DUNDER or not method.startswith("_"))
                if is_public and "Raises:" in (function.__doc__ or ""):
                    found[f"{kind.__name__}.{method}"] = function
    return found


@pytest.mark.parametrize(("name", "function"), entry_points().items(), ids=entry_points())
def test_every_entry_point_is_a_boundary(name, function):
    assert {"hide_frames", "_BoundaryContext"}.intersection(function.__code__.co_names), f"decorate {name} with @api_boundary"


def test_there_are_entry_points():
    assert len(entry_points()) > 140
