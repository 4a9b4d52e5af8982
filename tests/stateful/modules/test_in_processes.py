"""What other files try on simulated ranks, on two processes, where collectives are asynchronous: the same bits."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError
from fsharp.testing import processes, simulate
from tests import modules
from tests.functional.comm import test_equal_values
from tests.scheduling import DP, assert_same
from tests.stateful.modules import test_averaged, test_entries, test_meta, test_module_gradients, test_scaler


def steps(comm, strategy):
    model, optimizer = modules.wrap(comm, strategy)
    return modules.train(model, optimizer, modules.batches(comm, 3), parts=2), modules.values(model)


def entries(comm, strategy):
    model, optimizer = test_entries.sharded(comm, strategy)
    test_entries.train(model, optimizer, modules.batches(comm, 3), "apart")
    with torch.no_grad():
        return modules.values(model), model.encode(torch.arange(4))


def values_of_one_rank(comm):
    with pytest.raises(AgreementError, match="do not have the same values on all ranks"):
        fs.shard_module(test_equal_values.make(seed=comm.rank), mesh=comm, strategy=fs.zero3("dp"))
    return test_equal_values.synced(comm, 1, meta=True)


PROGRAMS = {
    "steps": lambda comm: [steps(comm, strategy) for strategy in ("ddp", "zero1", "zero3")],
    "entries": lambda comm: entries(comm, "zero1"),
    "averages": lambda comm: test_averaged.looked_at(comm, "zero3"),
    "torch.autograd.grad": lambda comm: test_module_gradients.mean_gradients(comm, "zero3"),
    "an infinity on one rank": lambda comm: [test_scaler.infinite_on_one_rank(comm, strategy) for strategy in ("ddp", "zero1")],
    "values of the meta device": lambda comm: test_meta.everything(comm, fs.zero3("dp"), "layers.*"),
    "values of one rank": values_of_one_rank,
}


@pytest.fixture(scope="module")
def found():
    """The results of all programs, in one start of the processes."""
    return processes(DP, lambda comm: {name: program(comm) for name, program in PROGRAMS.items()})


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_have_the_bits_of_simulated_ranks(found, name):
    assert_same([each[name] for each in found], simulate(DP, PROGRAMS[name]))
