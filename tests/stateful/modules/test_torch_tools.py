"""torch's own tools over sharded modules, and sharded modules over what they made: right, or refused by name."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import fsharp as fs
from fsharp.errors import LayoutError, TreeError
from fsharp.functional.layout.slicing import boxes_covering_run
from fsharp.testing import processes
from tests.modules import batches, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, assert_same


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_boxes_tile_a_run(shape, data):
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    numbers = torch.arange(size).view(shape)
    found = list(boxes_covering_run(shape, first, last))
    inside = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.equal(torch.cat([torch.arange(0), *inside]), torch.arange(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def plain_pair():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refusals(comm):
    """What each torch tool says of a sharded module, whole or cut on a rank."""
    cut, whole = (fs.shard_module(plain_pair(), mesh=comm, strategy=s("dp"), sync_from=0) for s in (fs.zero3, fs.ddp))
    full = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    cpu = torch.device("cpu")
    acts = {
        "DDP": lambda: DistributedDataParallel(cut),
        "DDP of a submodule": lambda: DistributedDataParallel(cut[0]),
        "DDP around it": lambda: DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), whole)),
        "DDP by shard_module": lambda: fs.shard_module(DistributedDataParallel(plain_pair()), mesh=comm),
        "DataParallel": lambda: DataParallel(cut),
        "FSDP1": lambda: FullyShardedDataParallel(cut, device_id=cpu),
        "FSDP2": lambda: fully_shard(cut),
        "FSDP2, whole": lambda: fully_shard(whole),
        "FSDP2 by shard_module": lambda: fs.shard_module(fully_shard(plain_pair()), mesh=comm),
        "get_model_state_dict": lambda: torch_state_dict.get_model_state_dict(cut, options=full),
        "get_optimizer_state_dict": lambda: torch_state_dict.get_optimizer_state_dict(cut, optimizer(cut)),
        "set_model_state_dict": lambda: torch_state_dict.set_model_state_dict(cut, {}, options=full),
    }
    assert DataParallel(plain_pair()).module is not None
    said = {}
    for name, act in acts.items():
        with pytest.raises((LayoutError, TreeError), match=EXPECTED[name]) as info:
            act()
        said[name] = str(info.value)
    return said


def optimizer(model):
    return fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


EXPECTED = {
    "DDP": r"DistributedDataParallel\(\): parameter '0\.weight' belongs to a ShardedModule.*strategy=fs\.ddp",
    "DDP of a submodule": r"DistributedDataParallel\(\): parameter 'weight' belongs to a ShardedModule",
    "DDP around it": r"DistributedDataParallel\(\): parameter '1\.0\.weight' belongs to a ShardedModule",
    "DDP by shard_module": r"'the root' is a DistributedDataParallel.*model\.module",
    "DataParallel": r"^DataParallel\(\): parameter '0\.weight' belongs to a ShardedModule",
    "FSDP1": r"'0\.weight' is sharded.*flatten\(\) of FSDP would take for the whole tensor\. The module is sharded already",
    "FSDP2": r"'0\.weight' is sharded.*chunk\(\) of FSDP would take for the whole tensor\. The module is sharded already",
    "FSDP2, whole": r"'0\.weight' is used by chunk\(\) of FSDP.*The module is sharded already",
    "FSDP2 by shard_module": r"'the root' is a FSDPSequential, made by fully_shard\(\).*Leave out fully_shard",
    "get_model_state_dict": r"get_state_dict\(\) and similar functions.*full_state_dict",
    "get_optimizer_state_dict": r"get_state_dict\(\) and similar functions.*dcp\.save",
    "set_model_state_dict": r"get_state_dict\(\) and similar functions.*load_full_state_dict",
}


@pytest.mark.filterwarnings("ignore:.*load in a single process")
def test_with_processes(tmp_path):
    """A DCP checkpoint by two ranks is read under another strategy, and by one process; no refused wrapper waits."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        train(model, optimizer, batches(comm, 2))
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
        expected = values(model)
        [(x, y)] = batches(comm, 1)
        for strategy in ("zero1", "zero3"):
            other, its = wrap(comm, strategy)
            target = {"model": other.state_dict(), "optimizer": its.state_template()}
            dcp.load(target, checkpoint_id=tmp_path / "saved")
            other.load_state_dict(target["model"])
            its.load_state_dict(target["optimizer"])
            assert_same(values(other), expected)
            train(other, its, [(x, y)])
        train(model, optimizer, [(x, y)])
        return expected, values(model), values(other), refusals(comm)

    results = processes(DP, rank_fn)
    for _, straight, resumed, _ in results:
        assert_same(straight, resumed)
    mine, its = wrap(fs.SingleComm(), fs.zero3("dp"))
    target = {"model": mine.state_dict(), "optimizer": its.state_template()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    mine.load_state_dict(target["model"])
    assert_same(values(mine), results[0][0])
    assert target["optimizer"]["state"]["head.weight"]["exp_avg"].local.abs().sum() > 0


@on_ranks(fs.Mesh({"dp": 1, "ep": 2}))
def test_what_a_chunk_cannot_say_is_refused(comm):
    model = fs.shard_module(plain_pair(), mesh=comm, strategy=fs.zero3("dp").varying("ep"))
    with pytest.raises(
        TreeError, match=r"checkpoint cannot describe '0\.weight', which has different values on ranks along \['ep'\]"
    ):
        model.state_dict()["0.weight"].__create_chunk_list__()


class Marked(torch.Tensor):
    """A class of tensors with a meaning of its own."""


def changed(change):
    module = nn.Sequential(nn.Linear(3, 3))
    change(module[0])
    return module


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: changed(lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 3).as_subclass(Marked)))),
            r"parameter '0\.weight' is a Marked, and would become a plain",
        ),
        (
            lambda: changed(lambda m: setattr(m, "weight", nn.Parameter(torch.eye(3).to_sparse()))),
            r"parameter '0\.weight' has the layout torch\.sparse_coo",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"parameter '0\.weight' has no shape yet"),
    ],
    ids=["subclass", "sparse", "lazy"],
)
def test_parameters_that_are_no_plain_tensors_are_refused(make, match):
    with pytest.raises(TreeError, match=match):
        fs.shard_module(make(), mesh=fs.SingleComm())


CAUSES = {
    "an optimizer": (
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0, fused=True).step(),
        r"'embed\.weight' is .*_fused_sgd_.*of an optimizer of torch\.optim would.*\. Make a fs\.ShardedOptimizer\(.*\)\.$",
    ),
    "a submodule": (
        lambda m: m.head(torch.ones(2, 6)),
        r"'head\.weight' is sharded.*linear\(\) of a module.*called by itself.*\. Call the model, .*\)\.$",
    ),
    "an initializer": (
        lambda m: nn.init.normal_(m.head.weight),
        r"'head\.weight' .*normal_\(\) of torch\.nn\.init .*\. Fill parameters before shard_module\(\), or in `with",
    ),
    "reset_parameters": (lambda m: m.head.reset_parameters(), r"kaiming_uniform_\(\) of torch\.nn\.init .*\. Fill parameters"),
    "weight_norm": (
        lambda m: parametrizations.weight_norm(m.head),
        r"norm_except_dim\(\) of torch\.nn\.utils .*\. Parametrize before shard",
    ),
    "pruning": (
        lambda m: prune.l1_unstructured(m.head, "weight", 0.5),
        r"'head\.weight' is used by ones_like\(\) of torch\.nn\.utils .*\. Parametrize before shard_module\(\)\.",
    ),
    "a parametrization": (
        lambda m: parametrize.register_parametrization(m.head, "weight", nn.Identity()),
        r"'head\.weight' rests in memory .*swap_tensors\(\) cannot replace its data\. Parametrize before shard_module",
    ),
    "to_empty": (
        lambda m: m.to_empty(device=m.comm.device),
        r"'\S+weight' rests in memory .*its data cannot be replaced\. Move modules before shard_module\(\), or pass",
    ),
    "share_memory": (lambda m: m.share_memory(), r"share_memory_\(\) cannot change it\. Move modules before shard_module"),
    "type": (lambda m: m.type(torch.float64), r"type\(\) of a move of a module would .*\. Move modules before shard_module"),
    "a write": (
        lambda m: m.head.weight.mul_(2),
        r"'head\.weight' is used by mul_\(\) outside .* write values under torch\.no_grad\(\), or whole parameters in",
    ),
    "an average": (
        lambda m: torch.ones(11, 6).lerp_(m.head.weight.detach(), 0.1),
        r"lerp_\(\): .*a tensor of shape \[11, 6\], which is not cut\. .*`part\.detach\(\)\.clone\(\)`, are cut alike\.$",
    ),
    "torch.export": (
        lambda m: torch.export.export(m, (torch.zeros(2, dtype=torch.int64),)),
        r"'\S+weight' is .*\(\) of torch\.export .*\. Export a plain module that has loaded model\.full_state_dict\(\)\.$",
    ),
    "an operation": (
        lambda m: m.head.weight.cumsum(0),
        r"'head\.weight' is sharded: this rank holds \d+ of the 66 .*cumsum\(\) would.* `with model\.unsharded\(\):` .*\)\.$",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
@on_ranks(DP)
def test_a_part_that_is_computed_with_names_who_does_it_and_one_remedy(comm, name):
    act, match = CAUSES[name]
    model, _ = wrap(comm, "zero3")
    [(x, y)] = batches(comm, 1)
    model(x, y)["loss"].backward()
    with pytest.raises((LayoutError, TreeError), match=match):
        act(model)


@pytest.mark.parametrize("change", [lambda part: part, torch.clone], ids=["parts", "copies"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(DP)
def test_safetensors_writes_no_parts(comm, tmp_path_factory, strategy, change):
    """It would read a whole tensor from the address of a part, and what lies behind it in memory."""
    model, _ = wrap(comm, strategy)
    found = {name: change(x) for name, x in model.state_dict().items()}
    file = tmp_path_factory.mktemp("files") / "model.safetensors"
    with pytest.raises(
        LayoutError, match=r"is sharded: .* of safetensors would take for the whole tensor\. Save whole tensors"
    ):
        save_file(found, file)
    save_file(model.full_state_dict(rank=None), file)
    assert_same(load_file(file), dict(sorted(model.full_state_dict(rank=None).items())))
    assert all(isinstance(x.data_ptr(), int) for x in found.values())


class Regularized(nn.Module):
    """A module whose code uses the weight of a module in it."""

    def __init__(self, use):
        super().__init__()
        self.inner, self.use = nn.Linear(4, 4), use
        nn.init.ones_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        return self.inner(x).mean() + self.use(self.inner.weight)


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3])
@on_ranks(DP)
def test_code_that_uses_a_parameter_of_an_inner_unit_is_told_which_module_to_choose(comm, strategy):
    x = torch.ones(2, 4)
    for use in (torch.sum, lambda w: w.t()[0, 0], lambda w: (torch.ones(4, 4, requires_grad=True) * w).mean()):
        model = fs.shard_module(nn.Sequential(Regularized(use)), mesh=comm, strategy=strategy("dp"), units=[nn.Linear])
        with pytest.raises(LayoutError, match=r"in the code of another module than its unit '0\.inner'.*Choose as a unit"):
            model(x)
        right = fs.shard_module(nn.Sequential(Regularized(use)), mesh=comm, strategy=strategy("dp"), units=[Regularized])
        right(x).backward()


@pytest.mark.parametrize("of", ["model", "block", "linear", "optimizer"])
def test_copies_are_refused_with_what_to_write(of):
    model, optimizer = wrap(fs.SingleComm(), fs.zero3("dp"))
    each = {"model": model, "block": model.layers[0], "linear": model.layers[0].up, "optimizer": optimizer}[of]
    copies = (
        [copy.deepcopy] if of == "linear" else [copy.deepcopy, copy.copy, pickle.dumps]
    )  # of whole parameters a file is whole
    for act in copies:
        with pytest.raises(TreeError, match=r"cannot be copied or pickled.*teacher\.load_state_dict\(model\.state_dict\(\)\)"):
            act(each)
