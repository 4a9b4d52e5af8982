"""A sharded module beside the same in plain torch: all ranks have one batch, so that means over ranks change no bit."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.scheduling import DP, STRATEGIES

DIM = 8


class Part(nn.Module):
    """Two linear maps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A norm and a part; ``checkpointed`` calls the part, by a checkpoint or not."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.norm, self.mlp, self.gain = nn.LayerNorm(DIM), Part(), nn.Parameter(torch.ones(()))
        self.checkpointed = checkpointed

    def forward(self, x):
        h = self.norm(x)
        return x + self.gain * (self.mlp(h) if self.checkpointed is None else self.checkpointed(self, h))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers=3, checkpointed=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11)
        self.layers = nn.ModuleList([Block(checkpointed) for _ in range(layers)])

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def keep(function, *args):
    """A non-reentrant checkpoint."""
    return checkpoint(function, *args, use_reentrant=False)


def changed(model, change):
    """What a change returns, or the model that it has changed."""
    result = change(model)
    return model if result is None else result


def make(change=lambda model: model, **options):
    """A model, the same whenever it is made."""
    with modules._seeds:
        torch.manual_seed(0)
        model = Model(**options)
        return changed(model, change)


def steps(model, optimizer, *, sizes=(4, 4, 4, 4), loss_fn=F.cross_entropy):
    """Losses of a step for each size of a batch."""
    losses, g = [], torch.Generator().manual_seed(1)
    for size in sizes:
        x = torch.randint(0, 11, (size,), generator=g)
        loss = loss_fn(model(x), x * 3 % 11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain(name):
    """A parameter's name without those of wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def same_as_torch(
    strategy,
    change=lambda model: model,
    after=lambda model: model,
    *,
    units=(Block,),
    exact=True,
    options=None,
    policy=DebugPolicy(poison=True),
    **how,
):
    """Hold a module that was sharded between ``change`` and ``after`` to one that was changed by both; both may return another.

    Returns the module's steps, of all ranks.
    """

    def rank_fn(comm):
        model = fs.shard_module(
            make(change, **(options or {})),
            mesh=comm,
            strategy=STRATEGIES[strategy][1],
            units=units if isinstance(units, str) else units and list(units),
            policy=policy,
        )
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        losses = steps(changed(model, after), optimizer, **how)
        return losses, {plain(name): p for name, p in model.named_full_parameters()}, model.scheduled_step

    whole = make(change, **(options or {}))
    whole = changed(whole, after)
    losses = steps(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), **how)
    expected = {plain(name): p.detach() for name, p in whole.named_parameters()}
    found = simulate(DP, rank_fn, timeout=240)  # which compilers of C++ may need
    for mine, parameters, _ in found:
        assert parameters.keys() == expected.keys()
        for name, value in {**expected, **dict(enumerate(losses))}.items():
            other = mine[name] if isinstance(name, int) else parameters[name]
            assert torch.equal(other, value) if exact else torch.allclose(other, value, rtol=1e-5, atol=1e-6), name
    return [step for *_, step in found]
