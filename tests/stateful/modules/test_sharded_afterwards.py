"""What was made of a module before it is sharded, and what is done to it afterwards: kept, or refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

import fsharp as fs
from fsharp.errors import TreeError
from tests import modules
from tests.modules import Block, batches, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_full_parameters_have_what_was_renamed(comm, strategy, kind):
    """An activation-checkpoint wrapper puts its own name in the middle of others."""
    model, optimizer = wrap(comm, strategy, kind)
    before = dict(model.named_full_parameters())
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda each: isinstance(each, Block)
    )
    after = dict(model.named_full_parameters())
    assert after.keys() == dict(model.named_parameters()).keys() != before.keys()
    renamed = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in after.items()}
    assert renamed.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in renamed.items())
    modules.train(model, optimizer, batches(comm, 1))


class Keeps(nn.Module):
    """A linear map that keeps more of its weight than the parameter."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)


def keep_view(module):
    module.transposed = module.inner.weight.T


def keep_data(module):
    module.inner.register_buffer("alias", module.inner.weight.data)


def keep_row(module):
    module.rows = {"last": module.inner.weight.detach()[3]}


def hook(module):
    module.inner.weight.register_hook(lambda grad: grad * 2)


def hook_afterwards(module):
    module.inner.weight.register_post_accumulate_grad_hook(lambda p: None)


KEPT = {
    "a view in an attribute": (keep_view, r"transposed holds parameter 'inner\.weight' or a view"),
    "its data in a buffer": (keep_data, r"inner\.alias holds parameter 'inner\.weight' or a view"),
    "a row in a dict": (keep_row, r"rows holds parameter 'inner\.weight' or a view"),
    "a hook": (hook, r"'inner\.weight' has hooks.*p\.grad"),
    "a hook of the sum": (hook_afterwards, r"'inner\.weight' has hooks.*p\.grad"),
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_would_go_stale_is_refused(kept):
    change, message = KEPT[kept]
    module = Keeps()
    change(module)
    with pytest.raises(TreeError, match=message):
        fs.shard_module(module, mesh=fs.SingleComm(), strategy=fs.zero3("dp"))


def test_neighbours_in_one_storage_are_no_views():
    """Parameters and buffers that were read from one file may lie side by side."""
    flat = torch.arange(24.0)
    module = nn.Module()
    module.w, module.b = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[20:])
    module.register_buffer("between", flat[16:20])
    module.copied = copy.deepcopy(module.w.detach())
    module.forward = lambda: module.w.sum() + module.b.sum()
    sharded = fs.shard_module(module, mesh=fs.SingleComm(), strategy=fs.zero3("dp"))
    assert torch.equal(dict(sharded.named_full_parameters())["w"], flat[:16].view(4, 4))
