import gc
import os
import sys
from functools import partial

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

import fsharp as fs
from fsharp.stateful.modules.optim import class_updates
from fsharp.testing.process_ranks import _Launcher, processes
from tests.forked_python import run_forked

# Ranks are forked from a process that has imported what tests import, and what torch optimizers import when they are made:
# else each rank takes more than half a second to do so.
sys.modules[_Launcher.__module__]._launcher = _Launcher(
    "import hypothesis.strategies, pytest, torch._dynamo, torch.distributed.checkpoint"
)

torch.set_num_threads(1)
os.environ["FSHARP_TRACEBACK"] = "full"  # a test that fails is about this library

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default", max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=_slow
)
settings.register_profile("deep", max_examples=400, deadline=None, database=None, print_blob=True, suppress_health_check=_slow)
settings.load_profile("deep" if os.environ.get("FSHARP_DEEP") else "default")

_PLAIN = (int, float, str, tuple, type(None))
_FOUND = {}


def pytest_collection():
    """Imports make no garbage: collections would look for it again and again."""
    gc.disable()


def pytest_collection_finish():
    """Nor do collections in tests look at the libraries that are alive now, which takes a second each time.

    Collections of all generations, which look at what tests import later, are rarer than by default.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Files of tests have no doctests."""
    return [each for each in (yield) if not isinstance(each, DoctestModule)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A folder for the tests of one file."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="module")
def found(folder, request):
    """Return what ``on_two_ranks(folder, comm)`` of a test file returns in two processes, run once for all its tests.

    A statement ``IMPORTS`` of the file is run before the processes are forked, else each takes its seconds.
    """
    run = partial(processes, fs.Mesh({"dp": 2}), partial(request.module.on_two_ranks, str(folder)), timeout=250)
    return run_forked(run, imports=request.module.IMPORTS) if hasattr(request.module, "IMPORTS") else run()


@pytest.fixture(scope="session", autouse=True)
def trials():
    """Make each trial once: a torch class with the same plain options comes to the same in each test."""
    probe = class_updates.probe_update_scope

    def probe_once(cls, options, defaults, *args):
        chosen = {name: value for name, value in {**defaults, **options}.items() if name != "params"}
        if not cls.__module__.startswith("torch.") or not all(isinstance(value, _PLAIN) for value in chosen.values()):
            return probe(cls, options, defaults, *args)
        key = cls, repr((chosen, args))
        if key not in _FOUND:
            _FOUND[key] = probe(cls, options, defaults, *args)
        return _FOUND[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_updates, "probe_update_scope", probe_once)
        yield
