"""Parameters with FSDP2's hooks have the bits of the whole model and of FSDP2; the rest is refused."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree

import fsharp as fs
from tests.modules import descend

RATE = 0.5
ops = torch.ops.aten


class Settings(NamedTuple):
    """What a :class:`Weight` gathers: "scaled", "by row", or "half"; and what of it is wrong."""

    kind: str
    wrong: str = ""


class Inside(torch.Tensor):
    """A tensor around others, of which functions of tensors see ``value()``."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        if func in (ops.detach.default, ops.view.default, ops.alias.default, ops.as_strided.default):  # as FSDP2 calls it
            return args[0].same()
        plain = lambda x: x.value() if isinstance(x, Inside) else x  # noqa: E731
        if func is ops.t.default:
            return args[0].transposed()
        return func(*_pytree.tree_map(plain, args), **_pytree.tree_map(plain, kwargs))


class Quantized(Inside):
    """8-bit integers with scales, which a linear layer uses as they are."""

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device)

    def __init__(self, data, scale, dtype):
        self.data_, self.scale = data, scale

    def same(self):
        return Quantized(self.data_.view(self.data_.shape), self.scale.view(self.scale.shape), self.dtype)

    def value(self):
        return (self.data_.float() * self.scale).to(self.dtype)

    dequantize = value

    def transposed(self):
        return Quantized(self.data_.t(), self.scale.t() if self.scale.ndim else self.scale, self.dtype)

    def __tensor_flatten__(self):
        return ["data_", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, about, size, stride):
        return Quantized(inner["data_"], inner["scale"], about)


class Weight(Inside):
    """Values of a weight with FSDP2's hooks, modelled on torchao's."""

    @staticmethod
    def __new__(cls, inner, settings):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner, settings):
        self.inner, self.settings = inner, settings

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        found = {id(x): x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Weight)}
        cls, settings = type(next(iter(found.values()))), next(iter(found.values())).settings
        plain = lambda x: x.inner if isinstance(x, Weight) else x  # noqa: E731
        out = func(*_pytree.tree_map(plain, args), **_pytree.tree_map(plain, kwargs or {}))
        keeps = ("detach", "view", "split", "slice", "new_zeros", "clone", "copy_", "_to_copy", "as_strided", "empty_like")
        if func is ops.copy_.default:
            return args[0]
        if func.__name__.split(".")[0] in keeps:
            return _pytree.tree_map(lambda x: cls(x, settings) if isinstance(x, torch.Tensor) else x, out)
        return out

    def __tensor_flatten__(self):
        return ["inner"], self.settings

    @staticmethod
    def __tensor_unflatten__(inner, settings, size, stride):
        return Weight(inner["inner"], settings)

    def fsdp_pre_all_gather(self, mesh):
        values, wrong = self.inner, self.settings.wrong
        if self.settings.kind == "half":
            return (values.to(torch.bfloat16),), None
        if self.settings.kind == "by row":
            scale = values.abs().amax(1, keepdim=True) / 127 + 1e-9
            return ((values / scale).round().to(torch.int8), scale), None
        most = values.abs().amax()
        if mesh is not None:
            dist.all_reduce(most, op=dist.ReduceOp.SUM if wrong == "sum" else dist.ReduceOp.MAX, group=mesh.get_group())
        scale = most / 127 + 1e-9
        data = (values / scale).round().to(torch.int8)
        data = torch.cat([data, data[:1]]) if wrong == "rows" else data
        return (data,), (scale, scale.item()) if wrong == "a number" else (scale,)

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        if self.settings.kind == "half":
            (data,) = outputs
            if out is not None:
                return None
            return data, (data,)
        data, scale = outputs if self.settings.kind == "by row" else (outputs[0], metadata[0])
        if out is not None:
            out.scale = scale
            return None
        return Quantized(data, scale, torch.float64 if self.settings.wrong == "dtype" else dtype), (data,)


class NewWeight(Weight):
    """With the hook of five arguments."""

    @staticmethod
    def __tensor_unflatten__(inner, settings, size, stride):
        return NewWeight(inner["inner"], settings)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mp_policy.param_dtype == torch.bfloat16
        assert outer_size[1:] == self.shape[1:]
        assert len(outer_stride) == self.ndim
        if self.settings.wrong == "module":
            return module.anything
        if self.settings.wrong == "mesh":
            return mesh.get_rank()
        return super().fsdp_pre_all_gather(mesh)


class Alone(Weight):
    """Without the first hook."""

    fsdp_pre_all_gather = property()


KINDS = ("scaled", "by row", "half")
PRECISION = fs.Precision(compute=torch.bfloat16, main=torch.float32, wire=torch.float32)


def make(kind, sizes=(16, 24, 8), cls=Weight, wrong=""):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer in layers:
        layer.weight = nn.Parameter(cls(layer.weight.detach(), Settings(kind, wrong)))
    return nn.Sequential(*layers)


def batch(step, rank, width=16):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def train_whole(kind, ranks, steps=3, **options):
    """For each step and rank the output and the gradient of the input; then the main copies."""
    model = make(kind, **options)
    main = {name: p.inner.detach() if isinstance(p, Weight) else p.detach() for name, p in model.named_parameters()}
    found = []
    for step in range(steps):
        grads = []
        for rank in range(ranks):
            leaves = {}
            for name, p in model.named_parameters():
                leaves[name] = main[name].to(torch.bfloat16)
                if isinstance(p, Weight):
                    like = Weight(main[name], p.settings)
                    leaves[name] = like.fsdp_post_all_gather(*Weight.fsdp_pre_all_gather(like, None), torch.bfloat16)[0]
                leaves[name] = leaves[name].detach().requires_grad_()
            x = batch(step, rank)
            y = torch.func.functional_call(model, leaves, x.bfloat16())
            y.float().square().mean().backward()
            found.append((y.detach(), x.grad))
            grads.append({name: leaf.grad.float() for name, leaf in leaves.items()})
        main = {name: value - RATE * (sum(g[name] for g in grads) / ranks) for name, value in main.items()}
    return found, main


def train(comm, kind, strategy=None, steps=3, policy=None, counted=None, **options):
    """The same of this rank."""
    model = make(kind, **options)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for each in (*model, model):
            fully_shard(each, mesh=init_device_mesh("cpu", (comm.mesh.size,)), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    else:
        model = fs.shard_module(model, mesh=comm, strategy=strategy, units=[nn.Linear], precision=PRECISION, policy=policy)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    found = []
    for step in range(steps):
        x = batch(step, comm.rank)
        y = model(x)
        descend(y.float().square().mean(), optimizer)
        found.append((y.detach(), x.grad))
    if strategy == "fsdp2":
        parameters = {name: p.full_tensor() for name, p in model.named_parameters()}
        return found, {name: p.inner.detach() if isinstance(p, Weight) else p.detach() for name, p in parameters.items()}
    assert model.scheduled_step.num_unscheduled_calls == 1, model.scheduled_step.last_call_status()
    return found, dict(model.named_full_parameters())


def check(results, expected):
    """Compare what each rank has found with what all of them should find."""
    outputs, main = expected
    for rank, (found, parameters) in enumerate(results):
        for step, (y, dx) in enumerate(found):
            assert torch.equal(y, outputs[step * len(results) + rank][0]), f"output of rank {rank}, step {step}"
            assert torch.equal(dx, outputs[step * len(results) + rank][1]), f"gradient of rank {rank}, step {step}"
        for name, value in main.items():
            assert torch.equal(parameters[name], value), name


CASES = [("scaled", Weight), ("scaled", NewWeight), ("by row", NewWeight), ("half", Weight)]


@pytest.mark.parametrize("diagonal", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(1, 4))])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"outer": 2, "inner": 2}], ids=str)
def test_every_strategy_has_the_bits_of_the_whole_model(sizes, diagonal):
    mesh = fs.Mesh(sizes)
    of_two = [fs.hsdp("outer", "inner"), fs.hfsdp("outer", "inner")]
    strategies = of_two if len(sizes) == 2 else [fs.zero3("dp"), fs.zero2("dp"), fs.zero1("dp"), fs.ddp("dp")]
    chosen = [
        (case, strategy)
        for i, case in enumerate(CASES)
        for j, strategy in enumerate(strategies)
        if (i + len(CASES) // len(strategies) * j) % len(CASES) == diagonal
    ]
    runs = [(*case, strategy) for case, strategy in chosen]
    found = fs.testing.processes(mesh, lambda comm: [train(comm, kind, each, cls=cls) for kind, cls, each in runs])
    whole = {kind: train_whole(kind, mesh.size) for kind in KINDS}
    for i, (kind, _, _) in enumerate(runs):
        check([rank[i] for rank in found], whole[kind])


def test_rows_may_be_uneven_and_ranks_may_have_none():
    sizes = (16, 2, 7)
    found = fs.testing.processes(
        fs.Mesh({"dp": 3}), lambda comm: [train(comm, kind, fs.zero3("dp"), sizes=sizes) for kind in KINDS]
    )
    for i, kind in enumerate(KINDS):
        check([rank[i] for rank in found], train_whole(kind, 3, sizes=sizes))


def test_fsdp2_has_the_same_bits():
    found = fs.testing.processes(fs.Mesh({"dp": 2}), lambda comm: [train(comm, kind, "fsdp2") for kind in KINDS])
    for i, kind in enumerate(KINDS):
        check([rank[i] for rank in found], train_whole(kind, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_where_it_is_released(kind):
    policy = fs.testing.DebugPolicy(trivial_axes=True, poison=True)
    check([train(fs.SingleComm(fs.Mesh({"dp": 1})), kind, fs.zero3("dp"), policy=policy)], train_whole(kind, 1))


def test_what_cannot_be_done_is_refused_by_name():
    def refused(change, match, error=fs.errors.OptionError, cls=Weight, kind="scaled", comm=None, **options):
        model = make(kind, cls=cls, wrong=options.pop("wrong", ""))
        change(model)
        with pytest.raises(error, match=match):
            fs.shard_module(model, mesh=comm or fs.SingleComm(), precision=options.pop("precision", PRECISION), **options)

    def nothing(model):
        pass

    def freeze(model):
        model[0].weight.requires_grad_(False)

    def already_quantized(model):
        Quantized.fsdp_pre_all_gather = Quantized.fsdp_post_all_gather = None
        model[1].weight = nn.Parameter(Quantized(torch.ones(8, 24, dtype=torch.int8), torch.ones(()), torch.float32))

    refused(freeze, r"'0\.weight' is a Weight with FSDP2 hooks and requires no gradient")
    try:
        refused(already_quantized, r"'1\.weight' is a Quantized .* Its class keeps data_, scale by __tensor_flatten__")
    finally:
        del Quantized.fsdp_pre_all_gather, Quantized.fsdp_post_all_gather
    refused(nothing, "of which fsdp_pre_all_gather is missing", cls=Alone)
    refused(nothing, "a reduction over ranks that is not MAX", wrong="sum")
    refused(nothing, r"NewWeight\.fsdp_pre_all_gather asks for module\.anything", cls=NewWeight, wrong="module")
    refused(nothing, r"NewWeight\.fsdp_pre_all_gather asks for mesh\.get_rank", cls=NewWeight, wrong="mesh")
    refused(nothing, r"makes tensors of \[\[25, 16\], \[\]\] of a tensor of \[24, 16\]", wrong="rows")
    refused(nothing, r"'1\.weight': Weight\.fsdp_pre_all_gather returns metadata \(0\.\d+,\) beside tensors", wrong="a number")
    refused(nothing, r"Weight\.fsdp_post_all_gather returned torch\.float64\[24, 16\]", wrong="dtype")
    stored = fs.Precision(compute=torch.bfloat16, main=torch.float32, stored=fs.formats.mxint8)
    refused(nothing, r"'0\.weight' is a Weight with FSDP2 hooks.* has stored='mxint8'", precision=stored)
    refused(nothing, r"'1\.weight' is a Weight with .* has stored='mxint8'", precision={"**": PRECISION, "1": stored})
    with pytest.raises(fs.errors.TreeError, match=r"parameter '0\.weight' is a Weight with FSDP2 hooks"):
        fs.make_functional(make("scaled"))


def test_an_update_makes_one_reduction_of_maxima_and_gathers_have_the_bytes_of_the_hook():
    def calls_of(comm, kind):
        counting, policy = fs.collectives.CountingComm(comm), fs.SchedulePolicy(release="forward", bucket_nbytes=0)
        model = fs.shard_module(make(kind), mesh=counting, units=[nn.Linear], precision=PRECISION, policy=policy)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
        for step in range(2):
            counting.calls.clear()
            descend(model(batch(step, comm.rank)).float().square().mean(), optimizer)
        return counting.calls, fs.inspect.step_traffic(model.layout)

    loss, of_gradients = (fs.collectives.Call("all_reduce", "dp", n) for n in (16, 4))  # which ranks have found
    for found in fs.testing.processes(fs.Mesh({"dp": 2}), lambda comm: [calls_of(comm, kind) for kind in KINDS]):
        for kind, (calls, predicted) in zip(KINDS, found, strict=True):
            predicted = predicted - Counter([loss])
            assert set(calls) - {of_gradients} == set(predicted), kind
            assert sum(n for call, n in predicted.items() if call.op == "all_reduce") == (1 if kind == "scaled" else 0)
            assert all(calls[call] == n for call, n in predicted.items() if "reduce" in call.op)


def test_checkpoints_have_main_copies_and_a_frozen_weight_keeps_its_hooks(tmp_path):
    comm = fs.SingleComm()
    model, other = (
        fs.shard_module(make(kind), mesh=comm, units=[nn.Linear], precision=PRECISION) for kind in ("scaled", "by row")
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    fs.checkpoint.save(tmp_path, {"model": model}, step=1, comm=comm)
    fs.checkpoint.load(tmp_path, {"model": other}, comm=comm)
    for (name, mine), (_, theirs) in zip(model.named_full_parameters(), other.named_full_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    before = model(batch(0, 0)).detach()
    model.requires_grad_(False)
    assert torch.equal(model(batch(0, 0)), before)


def test_weights_on_the_meta_device_are_made_as_plain_ones_are_or_taken_from_a_rank():
    def whole(comm, model, **options):
        return dict(fs.shard_module(model, mesh=comm, precision=PRECISION, **options).named_full_parameters())

    def rank_fn(comm):
        with torch.device("meta"):
            plain, empty, other = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)), make("scaled"), make("scaled")
        expected, found = whole(comm, plain), whole(comm, empty)
        synced = whole(comm, make("scaled") if comm.rank == 0 else other, sync_from=0)
        weights = {name: p.inner for name, p in make("scaled").named_parameters() if isinstance(p, Weight)}
        pairs = [(found[name], x) for name, x in expected.items()] + [(synced[name], x) for name, x in weights.items()]
        return [torch.equal(*pair) for pair in pairs]

    assert fs.testing.processes(fs.Mesh({"dp": 2}), rank_fn) == [[True] * 6] * 2
