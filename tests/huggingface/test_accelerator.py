"""fsharp.huggingface.accelerator: the same training as accelerate's own with DistributedDataParallel, in real processes."""

import os
from functools import partial

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, OptionError
from fsharp.huggingface.accelerator import Accelerator, broadcast_buffers_from_rank_0
from fsharp.testing import processes, simulate

IMPORTS = "import datasets"  # by a DataLoader that is prepared
STRATEGIES = {"zero3": fs.zero3("dp"), "zero2": fs.zero2("dp"), "ddp": fs.ddp("dp")}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.head(x).squeeze(-1) - y).square().mean()


def data():
    made = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, generator=made), "y": torch.randn((), generator=made)} for _ in range(32)]


def trained(accelerator, model, optimizer, *, epochs=2, load_from="", save_to=""):
    """Train, and return losses and norms."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4), schedule)
    if load_from:
        accelerator.load_state(load_from)
    found = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    found.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
    if save_to:
        accelerator.save_state(save_to)
    whole = accelerator.get_state_dict(model)
    return found, {name.removeprefix("module."): value for name, value in whole.items()}


def sharded(strategy, steps, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = fs.shard_module(Net(), strategy=strategy, units="layers.*")
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return trained(accelerator, model, optimizer, **options)


def as_torchrun(comm):
    """Set what torchrun sets. Several processes have a process group already; one makes its own, on any free port."""
    size, rank = str(comm.mesh.size), str(comm.rank)
    os.environ |= {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def plain(kind, steps=1):
    accelerator, model = kind(cpu=True, gradient_accumulation_steps=steps), Net()
    return trained(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def on_two_ranks(folder, comm):
    as_torchrun(comm)
    found = {}
    for steps in (1, 2):
        found["DDP", steps] = plain(accelerate.Accelerator, steps)
        for name, strategy in STRATEGIES.items():
            found[name, steps] = sharded(strategy, steps)
    found["not sharded"] = plain(Accelerator)
    sharded(fs.zero3("dp"), 1, epochs=1, save_to=f"{folder}/a")
    for name in ("zero3", "zero1"):
        found["loaded", name] = sharded(getattr(fs, name)("dp"), 1, epochs=1, load_from=f"{folder}/a")
    sharded(fs.zero3("dp"), 1, epochs=1, save_to=f"{folder}/a")
    with pytest.raises(OptionError) as error:
        Accelerator(cpu=True).join_uneven_inputs([fs.shard_module(Net(), strategy=fs.zero3("dp"))], even_batches=False)
    found["uneven"] = str(error.value)
    return found


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_training_as_with_ddp(name, steps, found):
    (numbers, state), (elsewhere, nothing) = found[0][name, steps], found[1][name, steps]
    expected, whole = found[0]["DDP", steps]
    assert numbers == elsewhere
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected))
    torch.testing.assert_close(state, whole)
    assert nothing == {}


def test_ranks_cannot_join_with_uneven_inputs(found):
    """On GPUs torch's Join raised an AttributeError, and on CPUs accelerate ignored the call with a warning."""
    for each in found:
        assert "keep even_batches=True of DataLoaderConfiguration" in each["uneven"]


def test_a_plain_module_is_prepared_as_accelerate_does(found):
    assert found[0]["not sharded"][0] == found[0]["DDP", 1][0]


def test_a_loaded_state_goes_on(found):
    numbers, state = found[0]["zero3", 1]
    assert found[0]["loaded", "zero3"][0] == numbers[len(numbers) // 2 :]
    torch.testing.assert_close(found[0]["loaded", "zero3"][1], state, rtol=0, atol=0)
    torch.testing.assert_close(found[0]["loaded", "zero1"][1], state)


def on_one_rank(folder, comm):
    as_torchrun(comm)
    return sharded(fs.ddp("dp"), 1, epochs=1, load_from=f"{folder}/a")[1]


def test_another_number_of_ranks_loads_a_state_and_a_folder_keeps_the_last_one(found, folder):
    [state] = processes(fs.Mesh({"dp": 1}), partial(on_one_rank, str(folder)))
    assert {name: value.shape for name, value in state.items()} == {name: x.shape for name, x in found[0]["DDP", 1][1].items()}
    assert len(list((folder / "a" / "fsharp").iterdir())) == 1


def refusals(comm):
    as_torchrun(comm)
    accelerator = Accelerator(cpu=True)
    model = fs.shard_module(Net(), strategy=fs.zero3("dp"), units="layers.*")
    accelerator.prepare(model)
    local = LocalSGD(accelerator, model, local_sgd_steps=2)
    local.enabled, local.model = True, model  # as on several ranks
    texts = []
    for call in (
        local.__enter__,
        lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        lambda: accelerator.prepare(torch.optim.AdamW(model.parameters())),
        lambda: accelerator.prepare(torch.compile(model, backend="eager")),
    ):
        with pytest.raises(OptionError) as error:
            call()
        texts.append(str(error.value))
    accelerator.state._mixed_precision = "bf16"
    with pytest.raises(OptionError, match=r"fs\.Precision"):
        accelerator.prepare(fs.shard_module(Net(), strategy=fs.zero3("dp")))
    return texts


def test_what_would_be_wrong_is_refused():
    [texts] = processes(fs.Mesh({"dp": 1}), refusals)
    assert "ranks share the parameters of a sharded module, so accelerate's LocalSGD cannot train them apart" in texts[0]
    assert "expected all parameters of one prepared module, got 1 other parameters" in texts[1]
    assert "clipped only by their norm" in texts[2]
    assert "expected a ShardedOptimizer for sharded parameters, got a AdamW" in texts[3]
    assert "expected a module of fs.shard_module, got a OptimizedModule that contains one" in texts[4]


def compiled(comm):
    as_torchrun(comm)
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = fs.shard_module(Net(), strategy=fs.zero3("dp"))
    assert accelerator.prepare(model) is model
    batch = torch.utils.data.default_collate(data()[:4])
    accelerator.backward(model(**batch))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_dynamo_backend_compiles_a_sharded_module():
    """It was ignored without a word."""
    [num_graphs] = processes(fs.Mesh({"dp": 1}), compiled)
    assert num_graphs


def with_statistics(folder, comm):
    as_torchrun(comm)
    accelerator, module = Accelerator(cpu=True), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = accelerator.prepare(fs.shard_module(module, strategy=fs.zero3("dp"), sync_from=0))
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(comm.rank)))
    mine = model[1].running_mean.clone()
    accelerator.save_state(f"{folder}/statistics")
    model[1].running_mean.zero_()
    accelerator.load_state(f"{folder}/statistics")
    return mine, model[1].running_mean


def test_a_save_takes_statistics_of_rank_0(tmp_path):
    """As under DDP. The save raised an error, after all training until then."""
    (first, saved), (second, elsewhere) = processes(fs.Mesh({"dp": 2}), partial(with_statistics, str(tmp_path)))
    assert not first.equal(second)
    assert saved.equal(first)
    assert elsewhere.equal(first)


def saved_twice(folder, comm):
    from fsharp.checkpoint.reading import ShardFileReader
    from fsharp.checkpoint.storage import LocalStorage

    as_torchrun(comm)
    accelerator, num_read, find = Accelerator(cpu=True), [], ShardFileReader.find_damaged_block_starts

    def counted(self):
        num_read.append(self.path)
        return find(self)

    def fail(self, path):
        raise CheckpointError(f"{path}: cannot be removed")

    ShardFileReader.find_damaged_block_starts = counted
    accelerator.prepare(fs.shard_module(nn.Linear(3, 4), strategy=fs.zero3("dp")))
    accelerator.save_state(folder)
    accelerator.save_state(folder)
    LocalStorage.remove = fail
    with pytest.raises(AgreementError, match=r"removal of older checkpoints: failed on rank 0.*\n.*: cannot be removed"):
        accelerator.save_state(folder)
    return len(num_read)


def test_a_folder_saved_again_is_read_once_and_a_removal_that_fails_is_an_error_on_all_ranks(tmp_path):
    """Rank 0 read the files of all ranks again, while the others waited, and an error was raised there alone."""
    assert processes(fs.Mesh({"dp": 2}), partial(saved_twice, str(tmp_path))) == [3, 3]
    assert len(fs.checkpoint.list_checkpoints(tmp_path / "fsharp")) == 2


def test_buffers_of_experts_stay_those_of_each_rank():
    def rank_fn(comm):
        torch.manual_seed(0)
        module = nn.ModuleDict({"dense": nn.BatchNorm1d(2), "experts": nn.BatchNorm1d(2)})
        strategy = {"**": fs.zero3("dp", "ep"), "experts": fs.zero3("dp").varying("ep")}
        model = fs.shard_module(module, mesh=comm, strategy=strategy, units=["dense", "experts"])
        for each in module.values():
            each.running_mean.fill_(comm.rank)
        broadcast_buffers_from_rank_0(model)
        return [each.running_mean[0].item() for each in module.values()]

    assert simulate(fs.Mesh({"dp": 2, "ep": 2}), rank_fn) == [[0, 0], [0, 1], [0, 0], [0, 1]]


def half_prepared(folder, comm):
    as_torchrun(comm)
    model = fs.shard_module(Net(), strategy=fs.zero3("dp"), units="layers.*")
    both, optimizer_alone, plain_one = (Accelerator(cpu=True) for _ in range(3))
    _, optimizer = both.prepare(model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))
    optimizer_alone.prepare(optimizer.optimizer)
    plain_one.prepare(Net())
    both.save_state(f"{folder}/both")
    for call in (optimizer_alone.save_state, optimizer_alone.load_state):
        with pytest.raises(OptionError, match="the optimizer of a sharded module was prepared, and the module was not"):
            call(f"{folder}/both")
    with pytest.raises(CheckpointError, match="both' has the state of sharded modules, and none was prepared"):
        plain_one.load_state(f"{folder}/both")


def test_a_state_is_not_saved_or_loaded_in_part(tmp_path):
    """Not a word was said of the optimizer that was left out, and it began anew."""
    processes(fs.Mesh({"dp": 1}), partial(half_prepared, str(tmp_path)))
