"""One rank alone does something to a module: with the next step, or where parts are put together, all ranks hear of it."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError
from fsharp.testing import processes, simulate
from tests import modules
from tests.modules import Block, batches, descend, wrap
from tests.scheduling import DP, assert_same, every


def unsharded(model, optimizer, comm, folder):
    with model.unsharded():
        pass


def all_but_a_gain(model):
    model.requires_grad_(False)
    model.layers[0].gain.requires_grad_(True)


def halved(p):
    p.grad.mul_(0.5)


ALONE = {  # before a step, or behind its backward
    "a module is paused": (0, lambda model, optimizer: model.layers[1].requires_grad_(False)),
    "a parameter is paused": (0, lambda model, optimizer: model.head.weight.requires_grad_(False)),
    "all are paused": (0, lambda model, optimizer: all_but_a_gain(model)),
    "a hook": (0, lambda model, optimizer: model.head.weight.register_post_accumulate_grad_hook(halved)),
    "a write": (0, lambda model, optimizer: model.layers[0].gain.mul_(2)),
    "a write of nothing": (0, lambda model, optimizer: model.embed.weight.mul_(1.0)),
    "writes to parts": (0, lambda model, optimizer: [p.local.mul_(2) for p in model.parameters()]),
    "another rate": (1, lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5)),
    "another clipping": (1, lambda model, optimizer: model.clip_grad_norm_(0.01)),
    "no gradient": (1, lambda model, optimizer: setattr(model.head.weight, "grad", None)),
    "a norm": (1, lambda model, optimizer: model.embed.weight.norm()),
    "a sum of a gradient": (1, lambda model, optimizer: model.layers[0].gain.grad.sum()),
    "a write to a gradient": (1, lambda model, optimizer: halved(model.layers[0].gain)),
    "foreach": (1, lambda model, optimizer: torch._foreach_mul_([model.embed.weight.grad], 2.0)),
}


@every(4, strategy=("ddp", "zero1", "zero2", "zero3"), name=ALONE)
def test_what_one_rank_alone_does_is_found(strategy, name):
    """Under ddp, where nothing travels, with the next training step."""
    when, act = ALONE[name]

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        for i, (x, y) in enumerate(batches(comm, 4)):
            for now in (0, 1):
                if now:
                    model(x, y)["loss"].backward()
                if comm.rank == 1 and i == 1 and now == when:
                    with torch.no_grad():
                        act(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)

    if strategy == "ddp" and name in ("a norm", "a sum of a gradient"):
        simulate(DP, rank_fn)  # every rank has all of it
        return
    for error in simulate(DP, rank_fn, outcomes=True):
        assert isinstance(error, fs.errors.CommError), error
        assert "ranks called different collectives" in str(error)
        if name == "a parameter is paused":
            assert "with 1 parameters paused, such as 'head.weight'" in str(error)
        if name == "another clipping" and strategy == "ddp":  # elsewhere its norm is a collective of one rank alone
            assert "rank 1 has  changes of gradients=['clip_grad_norm_(0.01, 2.0)'], writes=" in str(error)
        elif name == "another clipping":
            assert "clip_grad_norm_(): global_norm()'" in str(error)


def test_a_rank_that_leaves_out_the_update_of_a_recorded_step_is_told_so():
    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        [(x, y)] = batches(comm, 1)
        model(x, y)["loss"].backward()
        if comm.rank == 0:
            optimizer.step()
        optimizer.zero_grad()

    for error in simulate(DP, rank_fn, outcomes=True):
        assert isinstance(error, fs.errors.AgreementError), error
        assert "  events    rank 0: update\n  events    rank 1: (nothing more)\n" in str(error)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("act", ["another number", "unsharded"])
def test_ranks_that_do_the_same_with_other_values_are_found(strategy, act):
    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        for x, y in batches(comm, 3):
            model(x, y)["loss"].backward()
            if act == "another number":
                with torch.no_grad():
                    model.embed.weight.grad.mul_(0.5 if comm.rank else 0.25)
            optimizer.step()
            optimizer.zero_grad()
            if act == "unsharded":
                with model.unsharded(write=comm.rank == 0):
                    pass

    for error in simulate(DP, rank_fn, outcomes=True):
        assert isinstance(error, fs.errors.CommError), error


LAST = {
    "full_state_dict": lambda model, optimizer, comm, folder: model.full_state_dict(),
    "the optimizer's": lambda model, optimizer, comm, folder: optimizer.full_state_dict(),
    "named_full_parameters": lambda model, optimizer, comm, folder: list(model.named_full_parameters()),
    "unsharded": unsharded,
    "a norm": lambda model, optimizer, comm, folder: torch.nn.utils.get_total_norm(list(model.parameters())),
    "save": lambda model, optimizer, comm, folder: fs.checkpoint.save(folder, {"model": model}, step=1, comm=comm),
}


@every(2, last=LAST, what=["another rate", "a write"])
def test_the_last_step_of_one_rank_is_noticed_by_what_follows(last, what, tmp_path):
    """The rate is as before again when ranks compare their options."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        if comm.rank == 1 and what == "another rate":
            optimizer.param_groups[0]["lr"] = 0.5
        modules.train(model, optimizer, batches(comm, 1))
        optimizer.param_groups[0]["lr"] = modules.ADAMW["lr"]
        with torch.no_grad():
            if comm.rank == 1 and what == "a write":
                model.head.weight.mul_(0.5)
            LAST[last](model, optimizer, comm, tmp_path / "checkpoints")

    names = "lr=0.5" if what == "another rate" else r"mul_ \[0.5\] head.weight"
    for error in simulate(DP, rank_fn, outcomes=True):
        with pytest.raises((fs.errors.AgreementError, fs.errors.CommError), match=names):
            raise error
    assert not list(fs.checkpoint.list_checkpoints(tmp_path / "checkpoints"))


def test_ranks_whose_steps_differed_load_a_checkpoint_and_go_on(tmp_path):
    """One rank raises in its optimizer, so that others are an update ahead."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("planted")
            return super().step(closure)

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        optimizer = fs.ShardedOptimizer(model.parameters(), Failing, lr=0.1, momentum=0.9)
        data, tree = batches(comm, 4), {"model": model, "optimizer": optimizer}
        modules.train(model, optimizer, data[:2])
        fs.checkpoint.save(tmp_path, tree, step=2, comm=comm)
        expected = modules.train(model, optimizer, data[2:])
        fs.checkpoint.load(tmp_path, tree, comm=comm)
        Failing.fails = comm.rank == 1
        with pytest.raises(RuntimeError, match="planted"):
            modules.train(model, optimizer, data[2:])
        Failing.fails = False
        optimizer.zero_grad()
        fs.checkpoint.load(tmp_path, tree, comm=comm)
        return [float(x) for x in expected], [float(x) for x in modules.train(model, optimizer, data[2:])]

    for expected, found in processes(DP, rank_fn):
        assert found == expected


class Between(torch.nn.Module):
    """Blocks, and three small units outside of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 11)
        self.layers = torch.nn.ModuleList([Block(8, 16) for _ in range(3)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_what_is_loaded_or_written_is_not_overwritten_by_a_gather_under_way():
    """Updated parameters of zero1 and zero2 are gathered beneath what follows. The units outside of blocks share one gather."""

    def rank_fn(comm):
        found = []
        for strategy in (fs.zero1("dp"), fs.zero2("dp")):
            torch.manual_seed(0)
            model = fs.shard_module(Between(), mesh=comm, strategy=strategy, units=[Block])
            optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            x, zeros = torch.arange(8), {name: torch.zeros(p.full_shape) for name, p in model.named_parameters()}
            for load in (False, True):
                for _ in range(2):
                    descend(torch.nn.functional.cross_entropy(model(x), x), optimizer)
                with torch.no_grad():
                    if load:
                        model.load_state_dict(zeros)
                    else:
                        for p in model.parameters():
                            p.mul_(0.0)
                    model(x)
                found += [(strategy, load, name) for name, value in modules.values(model).items() if value.any()]
                for unit in fs.layouts.units_of(model.train_state.params):
                    found += [(strategy, load, unit.name)] if any(buffer.any() for buffer in unit.buffers) else []
        return found

    assert processes(DP, rank_fn) == [[], []]


def test_a_rank_whose_loss_fails_outside_of_the_model_goes_on_after_the_error_that_all_ranks_get():
    """The model did not see the error: its step stays open until another rank's error ends the collectives of the step."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        (x, y), second = batches(comm, 2)
        descend(model(x, y)["loss"], optimizer)
        with pytest.raises(ZeroDivisionError if comm.rank == 0 else AgreementError):
            (model(x, y)["loss"] / (1 // comm.rank)).backward()
        optimizer.zero_grad()
        if comm.rank == 0:
            with pytest.raises(AgreementError, match="different collectives"):
                model.full_state_dict()
        model.load_full_state_dict(model.full_state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        descend(model(*second)["loss"], optimizer)
        return modules.values(model)

    def without_error(comm):
        model, optimizer = wrap(comm, "zero3")
        modules.train(model, optimizer, batches(comm, 2))
        return modules.values(model)

    assert_same(processes(DP, rank_fn), simulate(DP, without_error))
