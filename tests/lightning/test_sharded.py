"""fsharp.lightning.sharded: state dicts of modules that have several names for a sharded module or a part of one."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, OptionError
from fsharp.lightning.sharded import check_sharded_submodules, full_state_dict, load_state_dict
from tests.ranks import on_ranks


class Task(nn.Module):
    """A module with a sharded one, which it also calls ``net``, and whose last layer it also calls ``head``."""

    def __init__(self, comm=None):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        for i, parameter in enumerate(self.model.parameters()):
            nn.init.constant_(parameter, i)
        if comm is not None:
            self.model = fs.shard_module(self.model, mesh=comm, strategy=fs.zero3("dp"))
        self.net, self.head, self.scale = self.model, self.model[2], nn.Parameter(torch.ones(2), requires_grad=False)


@on_ranks(fs.Mesh({"dp": 2}))
def test_each_name_of_a_parameter_has_the_whole_tensor_and_is_loaded(comm):
    task, plain = Task(comm), Task()
    check_sharded_submodules("Trainer", task, "32-true")
    found = full_state_dict(task)
    if comm.rank == 0:
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)
    else:
        assert not {"model.0.weight", "net.0.weight", "head.weight"} & found.keys()
        assert "scale" in found
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    load_state_dict(task, other, strict=True)
    loaded = full_state_dict(task)
    if comm.rank == 0:
        torch.testing.assert_close(loaded, other, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="keys are missing or unexpected: stranger"):
        load_state_dict(task, other | {"stranger": torch.ones(1)}, strict=True)


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_part_without_its_sharded_module_is_refused(comm):
    task = Task(comm)
    other = nn.Sequential(fs.shard_module(nn.LayerNorm(2), mesh=comm, strategy=fs.zero3("dp")), task.head)
    with pytest.raises(OptionError, match=r"parameter '1\.weight' belongs to a sharded module that is not a submodule"):
        check_sharded_submodules("Trainer", other, "32-true")


@on_ranks(fs.Mesh({"dp": 2}))
def test_a_frozen_parameter_that_differs_between_ranks_is_refused(comm):
    """DDP sends the values of rank 0; each rank trained with values of its own."""
    task = Task(comm)
    task.scale.data += comm.rank
    with pytest.raises(AgreementError, match=r"scale +rank 1: other values than rank 0"):
        check_sharded_submodules("Trainer", task, "32-true")
