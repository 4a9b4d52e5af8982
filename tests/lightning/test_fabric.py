"""fsharp.lightning.fabric.Strategy: the training of Fabric's DDPStrategy, in real processes."""

import pytest
import torch
from torch.utils.data import DataLoader

import fsharp as fs
from fsharp.errors import FsharpError, OptionError
from tests.huggingface.test_accelerator import Net, as_torchrun, data

IMPORTS = "import fsharp.lightning.fabric"


def made(strategy):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def trained(fabric, model, optimizer, *, epochs=2, load_from="", save_to=""):
    """Train, and return losses and norms."""
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=4))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    if load_from:
        fabric.load(load_from, state)
    found = []
    for _ in range(epochs):
        for index, batch in enumerate(loader):
            is_last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model(**batch)
                fabric.backward(loss / 2)
            found.append(float(fabric.all_reduce(loss.detach())))
            if is_last:
                found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        state["epoch"] += 1
    if save_to:
        fabric.save(save_to, state)
    return found, state["epoch"]


def sharded(strategy, **options):
    from fsharp.lightning.fabric import Strategy

    fabric = made(Strategy())
    model = fs.shard_module(Net(), strategy=strategy, units="layers.*")
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    found, epoch = trained(fabric, model, optimizer, **options)
    return found, model.full_state_dict(), epoch


def plain(strategy, **options):
    model = Net()
    return *trained(made(strategy), model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options), dict(model.state_dict())


def on_two_ranks(folder, comm):
    from fsharp.lightning.fabric import Strategy

    as_torchrun(comm)
    found = {"ddp": plain("ddp"), "not sharded": plain(Strategy())}
    found["zero3"], found["zero1"] = sharded(fs.zero3("dp")), sharded(fs.zero1("dp"))
    sharded(fs.zero3("dp"), epochs=1, save_to=f"{folder}/a.ckpt")
    for name in ("zero3", "zero1"):
        found["loaded", name] = sharded(getattr(fs, name)("dp"), epochs=1, load_from=f"{folder}/a.ckpt")
    found["loaded", "ddp"] = plain("ddp", epochs=1, load_from=f"{folder}/a.ckpt")
    found["refused"] = refusals(made(Strategy()))
    found["clipped"] = clipped_by_value(made(Strategy()))
    return found


def clipped_by_value(fabric):
    """Return the largest gradient, after a clip to 0.01, of a sharded module and of one under DDP."""
    found = []
    for model in (fs.shard_module(Net(), strategy=fs.zero3("dp"), units="layers.*"), Net()):
        kind = (
            fs.ShardedOptimizer
            if isinstance(model, fs.ShardedModule)
            else lambda params, kind, **options: kind(params, **options)
        )
        whole, optimizer = fabric.setup(model, kind(model.parameters(), torch.optim.SGD, lr=1.0))
        [batch] = DataLoader(data()[:4], batch_size=4)
        fabric.backward(whole(**batch))
        fabric.clip_gradients(whole, optimizer, clip_val=0.01)
        optimizer.step()
        found.append(model.full_state_dict(rank=None) if isinstance(model, fs.ShardedModule) else dict(model.state_dict()))
    return found


def refusals(fabric):
    model = fs.shard_module(Net(), strategy=fs.zero3("dp"), units="layers.*")
    part = torch.nn.Sequential(fs.shard_module(Net(), strategy=fs.zero3("dp")), torch.nn.Linear(2, 2))
    texts = []
    for call in (lambda: fabric.setup(model, torch.optim.AdamW(model.parameters())), lambda: fabric.setup(part)):
        with pytest.raises(OptionError) as error:
            call()
        texts.append(str(error.value))
    sharded, optimizer = fabric.setup(model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW))
    with fabric.no_backward_sync(sharded):
        [batch] = DataLoader(data()[:4], batch_size=4)
        fabric.backward(sharded(**batch))
    with pytest.raises(FsharpError) as error:
        optimizer.step()
    return [*texts, str(error.value)]


@pytest.mark.parametrize("name", ["zero3", "zero1"])
def test_the_same_training_as_with_ddp(name, found):
    numbers, state, _ = found[0][name]
    expected, _, whole = found[0]["ddp"]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected))
    torch.testing.assert_close(state, whole)
    assert numbers == found[1][name][0]


def test_a_plain_module_is_trained_as_by_ddp(found):
    assert found[0]["not sharded"][0] == found[0]["ddp"][0]


def test_a_file_is_loaded_under_any_strategy_and_by_ddp(found):
    numbers, state, _ = found[0]["zero3"]
    again, loaded, epoch = found[0]["loaded", "zero3"]
    assert epoch == 2
    assert again == numbers[len(numbers) // 2 :]
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    torch.testing.assert_close(found[0]["loaded", "zero1"][1], state)
    torch.testing.assert_close(found[0]["loaded", "ddp"][2], state)


def test_what_would_be_wrong_is_refused(found):
    assert "expected a ShardedOptimizer for sharded parameters, got a AdamW" in found[0]["refused"][0]
    assert "parameter '1.weight' is trained and belongs to no sharded module" in found[0]["refused"][1]


def test_gradients_stay_on_the_rank_without_backward_sync(found):
    assert "all backward passes so far were inside of accumulate()" in found[0]["refused"][2]


def test_gradients_are_clipped_by_value(found):
    torch.testing.assert_close(*found[0]["clipped"])
