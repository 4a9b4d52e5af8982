"""What is computed with parameters and gradients outside of a forward: as with whole tensors, or refused by name."""

import inspect
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import FsharpError, LayoutError, OptionError, TreeError
from fsharp.testing import simulate
from tests import modules
from tests.modules import batches, descend, make, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, every

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MESHES = {n: fs.Mesh({"dp": n}) for n in (1, 2, 3)}


def with_gradients(comm, strategy):
    """A model with the mean gradients of a step, and plain torch's."""
    n = comm.mesh.size if comm is not None else 0
    data = [(x, y) for rank in range(n) for x, y in batches(modules.RankOf(comm.mesh, rank), 1)]
    model, optimizer = wrap(comm, strategy)
    x, y = data[comm.rank]
    model(x, y)["loss"].backward()
    plain = make()
    (sum(plain(x, y)["loss"] for x, y in data) / n).backward()
    return model, optimizer, plain


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


REDUCTIONS = {
    "sum": torch.sum,
    "sum in float64": lambda x: x.sum(dtype=torch.float64),
    "mean": torch.mean,
    "max": torch.max,
    "min": lambda x: x.min(),
    "amax": torch.amax,
    "amin": torch.amin,
    "any": lambda x: (x > 0.1).any(),
    "all": lambda x: torch.isfinite(x).all(),
    "how many": lambda x: torch.count_nonzero(x > 0),
    "norm": torch.norm,
    "norm of order 3": lambda x: x.norm(3),
    "largest": lambda x: x.norm(p=torch.inf),
    "smallest": lambda x: torch.linalg.vector_norm(x, -torch.inf),
    "order 1": lambda x: torch.linalg.vector_norm(x, ord=1),
    "order 0": lambda x: torch.linalg.vector_norm(x, 0),
    "order 0.5, float64": lambda x: torch.linalg.vector_norm(x, 0.5, dtype=torch.float64),
    "linalg.norm": torch.linalg.norm,
    "of what is computed": lambda x: ((2 * x - 1).square() / (1 + x.abs())).sum(),
    "of a difference": lambda x: (x - x.detach().clone().mul_(0.5)).norm(),
    "of a part in float64": lambda x: x.detach().double().norm(),
    "several": lambda x: torch.stack(torch._foreach_norm([x, x.detach() * 2])),
}


@every(3, strategy=STRATEGIES, ranks=(1, 2, 3))
@on_ranks(lambda ranks: MESHES[ranks])
@torch.no_grad()
def test_reductions_are_those_of_the_whole(comm, strategy, ranks):
    """Of parameters and gradients, leaves of which most ranks have nothing included; on every rank the same."""
    with torch.enable_grad():
        model, _, plain = with_gradients(comm, strategy)
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    for path in ("embed.weight", "layers.0.gain", "layers.1.up.weight", "layers.2.norm.bias"):
        for reduce in REDUCTIONS.values():
            close(reduce(mine[path]), reduce(theirs[path].detach()))
            close(reduce(mine[path].grad), reduce(theirs[path].grad))
    mine["embed.weight"].grad.data.fill_(torch.nan)
    assert mine["embed.weight"].grad.max().isnan()
    assert mine["embed.weight"].grad.norm(torch.inf).isnan()


WRITES = {
    "mul_": lambda p, g: p.mul_(0.5),
    "in place operators": lambda p, g: p.__imul__(2).__isub__(g),
    "add_": lambda p, g: p.add_(g, alpha=-0.1),
    "addcdiv_": lambda p, g: p.addcdiv_(g, g.abs().sqrt_().add_(1e-3), value=-0.1),
    "lerp_": lambda p, g: p.lerp_(g, 0.3),
    "copy_": lambda p, g: p.copy_(g),
    "zero_": lambda p, g: p.zero_(),
    "clamp_": lambda p, g: p.clamp_(-0.1, 0.1),
    "a tensor without dims": lambda p, g: p.mul_(torch.tensor(0.25)),
    "of the norm": lambda p, g: p.div_(p.norm() + 1),
    "through data": lambda p, g: p.data.sub_(g.data),
    "where": lambda p, g: p.copy_(torch.where(g > 0, p, g)),
    "foreach": lambda p, g: torch._foreach_add_([p], [g], alpha=2),
    "foreach lerp": lambda p, g: torch._foreach_lerp_([p], [g], 0.5),
    "foreach scalars": lambda p, g: torch._foreach_mul_([p], [0.5]),
    "a gradient": lambda p, g: g.mul_(0.5),
    "a mask on a gradient": lambda p, g: g.masked_fill_(g < 0, 0),
    "a gradient by another": lambda p, g: g.copy_(p.sign() * g.abs()),
}


@every(12, write=WRITES, strategy=STRATEGIES, ranks=(1, 2, 3))
@on_ranks(lambda ranks: MESHES[ranks])
def test_writes_are_seen(comm, strategy, ranks, write):
    """By the next evaluation and by training that goes on."""
    model, optimizer, plain = with_gradients(comm, strategy)
    reference = torch.optim.AdamW(plain.parameters(), **modules.ADAMW)
    for each in (model, plain):
        with torch.no_grad():
            for p in each.parameters():
                WRITES[write](p, p.grad)
    x = torch.arange(5)
    with torch.no_grad():
        close(model(x), plain(x))
    optimizer.step()
    reference.step()
    torch.testing.assert_close(values(model), modules.detached(plain), rtol=1e-3, atol=1e-5)


WAYS = ("torch", "foreach", "in two", "model", "value")


@every(30, strategy=STRATEGIES, ranks=(1, 2, 3), norm_type=(2.0, 1.0, torch.inf, 3), way=WAYS)
@on_ranks(lambda ranks: MESHES[ranks])
def test_clipping(comm, strategy, ranks, norm_type, way):
    """By torch's functions and by the module's own: the gradients and norms of plain torch."""

    def clip(model, way):
        if way == "value":
            return torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if way == "in two":
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
            return norm
        if way == "model" and isinstance(model, fs.ShardedModule):
            return model.clip_grad_norm_(0.1, norm_type, error_if_nonfinite=True, foreach=None)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=True if way == "foreach" else None)

    model, optimizer, plain = with_gradients(comm, strategy)
    torch.testing.assert_close(clip(model, way), clip(plain, way), rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(mine.grad.norm(), theirs.grad.norm())
    optimizer.step()
    reference = torch.optim.AdamW(plain.parameters(), **modules.ADAMW)
    reference.step()
    torch.testing.assert_close(values(model), modules.detached(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_the_largest_gradient_beside_a_parameter_without_elements(comm, strategy):
    """torch knows no maximum of no elements, so plain torch raises an error."""
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[3.0], [-4.0]])
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 2)))
    model.forward = lambda: model.weight.square().sum() + model.empty.sum()
    model = fs.shard_module(model, mesh=comm, strategy=getattr(fs, strategy)("dp"))
    model().backward()
    assert model.clip_grad_norm_(1.0, torch.inf) == 8


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3"])
def test_parameters_that_vary_are_reduced_over_all_ranks(kind):
    """Experts, of which ranks along an axis have others: the total is one, or ranks would clip differently."""

    def rank_fn(comm):
        net = nn.ModuleDict({"dense": nn.Linear(3, 3), "experts": nn.Linear(3, 3)})
        with torch.no_grad():
            for p in net.dense.parameters():
                p.fill_(0.5)
            for p in net.experts.parameters():
                p.fill_(1.0 + comm.mesh.coord("ep", comm.rank))
        make_strategy = getattr(fs, kind)
        strategy = {"**": make_strategy("dp", "ep"), "experts": make_strategy("dp").varying("ep")}
        net = fs.shard_module(net, mesh=comm, strategy=strategy, units="*")
        with torch.no_grad():
            assert [float(p.mean()) for p in net.parameters()] == [0.5, 0.5, 1.5, 1.5]
            assert float(net.experts.weight.max()) == 2
        net.experts(net.dense(torch.ones(2, 3) * comm.rank)).square().mean().backward()
        total = nn.utils.get_total_norm([p.grad for p in net.parameters()])
        close(total, net.clip_grad_norm_(1.0))
        return float(total)

    assert len(set(simulate(fs.Mesh({"dp": 2, "ep": 2}), rank_fn))) == 1


@pytest.mark.parametrize("way", ["torch", "model"])
@on_ranks(DP)
def test_gradients_that_are_not_finite(comm, way):
    """Found on all ranks, by one rank's elements; nothing is scaled."""
    model, *_ = with_gradients(comm, "zero3")
    grad = model.head.weight.grad
    if comm.rank == 1:
        grad.local[0] = torch.inf
    before = grad.local.clone()
    clip = model.clip_grad_norm_ if way == "model" else partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0.* (is inf|non-finite)"):
        clip(1.0, error_if_nonfinite=True)
    assert torch.equal(grad.local, before)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_predicates_need_no_no_grad(comm, strategy):
    """Their results have no gradient, so nothing is lost: such as a search for NaN in a training loop."""
    model, *_ = with_gradients(comm, strategy)
    assert torch.is_grad_enabled()
    assert not any(torch.isnan(p).any() for p in model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())
    p, whole = model.head.weight, model.full_state_dict(rank=None)["head.weight"]
    assert int((p > 0).sum()) == int((whole > 0).sum()) == int(p.count_nonzero()) - int((p < 0).sum())
    assert not (p == 0).requires_grad
    with pytest.raises(LayoutError, match=r"'head\.weight' is used by abs\(\) outside of the forward"):
        p.abs()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_operators_that_write_to_a_gradient(comm, strategy):
    """``p.grad *= 2`` also sets ``p.grad``, to the part that has been written to. Another tensor is refused."""
    model, *_ = with_gradients(comm, strategy)
    p = model.head.weight
    before = p.grad.local.clone()
    p.grad *= 2
    p.grad += 1
    assert torch.equal(p.grad.local, before * 2 + 1)
    with pytest.raises(TreeError, match=r"'head\.weight': the module stores the gradient: write `p\.grad\.copy_"):
        p.grad = p.grad * 2
    assert torch.equal(p.grad.local, before * 2 + 1)


def test_options_of_clipping_are_those_of_torch():
    mine, theirs = (list(inspect.signature(f).parameters.values())[2:] for f in
                    (fs.ShardedModule.clip_grad_norm_, nn.utils.clip_grad_norm_))  # fmt: skip
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_clipping_refuses_norms_that_would_turn_gradients_round_or_lose_them(max_norm):
    model = fs.shard_module(nn.Linear(2, 2), mesh=fs.SingleComm())
    model(torch.ones(2)).sum().backward()
    with pytest.raises(OptionError, match=rf"max_norm is {max_norm}, expected a number of at least 0"):
        model.clip_grad_norm_(max_norm)
    assert model.weight.grad.local.unique().tolist() == [1.0]


@every(4, strategy=STRATEGIES, way=("lerp_", "foreach", "mul_ and add_", "copy_", "shadow"))
def test_a_teacher_follows(strategy, way):
    """Another module of the same layout, or clones of the parameters."""

    @torch.no_grad()
    def follow(teacher, student, shadow):
        ours, theirs = list(teacher.parameters()), list(student.parameters())
        if way == "foreach":
            torch._foreach_lerp_(ours, theirs, 0.5)
        elif way == "shadow":
            for mine, each, new in zip(ours, shadow, theirs, strict=True):
                mine.copy_(each.mul_(0.5).add_(new.detach(), alpha=0.5))
        else:
            for mine, new in zip(ours, theirs, strict=True):
                mine.lerp_(new, 0.5) if way == "lerp_" else mine.copy_(new) if way == "copy_" else mine.mul_(0.5).add_(new / 2)

    def run(teacher, student, optimizer, data):
        seen, shadow = [], [p.detach().clone() for p in teacher.parameters()]
        for x, y in data:
            descend(student(x, y)["loss"], optimizer)
            follow(teacher, student, shadow)
            with torch.no_grad():
                seen.append(teacher(torch.arange(5)))
        return torch.stack(seen)

    def rank_fn(comm):
        return run(wrap(comm, strategy)[0], *wrap(comm, strategy), batches(comm, 3))

    student = make()
    expected = run(make(), student, torch.optim.AdamW(student.parameters(), **modules.ADAMW), batches(None, 3))
    for found in simulate(DP, rank_fn):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(DP)
def test_transformations_of_torch_func(comm, strategy):
    """Refused by name where a step would have to be differentiated; the function of a module is what they take."""
    net = nn.Sequential(nn.Linear(3, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    model = fs.shard_module(net, mesh=comm, strategy=getattr(fs, strategy)("dp"))
    x = torch.ones(2, 3)
    refused = (
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.vmap(model)(x),
        lambda: torch.func.jacrev(model)(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
    )
    for transformed in refused:
        with pytest.raises(FsharpError, match=r"inside of a transformation of torch\.func.*model\.functional\(\)"):
            transformed()
    with torch.no_grad():
        close(torch.vmap(model)(x), torch.full((2, 3), 2.0))
    fn, params = model.functional()
    close(torch.func.grad(lambda x: fn(params, x, comm=comm).sum())(x), torch.full((2, 3), 1.5))
    model(x).sum().backward()
    close(model[0].weight.grad.sum(), torch.tensor(18.0))


REFUSED = {
    "another shape": (lambda p, q: p.mul_(torch.ones(6)), r"mul_\(\): 'head\.weight'.*tensor of shape \[6\].*slice"),
    "another parameter": (lambda p, q: p.add_(q), r"add_\(\): 'head\.weight'.*'embed\.weight'.*the two are cut differently"),
    "into a plain tensor": (lambda p, q: torch.zeros(11, 6).copy_(p), r"copy_\(\): 'head\.weight'.*of shape \[11, 6\]"),
    "out=": (lambda p, q: torch.add(p, 1, out=p), r"'head\.weight' is sharded.*add\(\)"),
    "random numbers": (lambda p, q: nn.init.normal_(p), r"'head\.weight' is sharded.*normal_\(\).*write=True"),
    "items": (lambda p, q: p.__setitem__(0, 0), r"'head\.weight' is sharded.*__setitem__"),
    "a hook": (lambda p, q: p.register_hook(print), r"register_hook\(\): parameter 'head\.weight'.*p\.grad\.mul_"),
    "a vmap": (
        lambda p, q: torch.vmap(lambda i: p * i)(torch.ones(2)),
        r"mul\(\): 'head\.weight'.*of a torch\.func.*of shape \[\]",
    ),
    "a whole tensor of a jvp": (
        lambda p, q: torch.func.jvp(lambda x: p + x, (torch.ones(11, 6),), (torch.ones(11, 6),)),
        r"add\(\): 'head\.weight'.*of a torch\.func transformation",
    ),
    "foreach of others": (lambda p, q: torch._foreach_copy_([p], [q]), r"_foreach_copy_\(\): 'head\.weight'.*'embed\.weight'"),
}


@on_ranks(DP)
def test_refused(comm):
    model, *_ = with_gradients(comm, "zero3")
    for use, match in REFUSED.values():
        with torch.no_grad(), pytest.raises(LayoutError, match=match):
            use(model.head.weight, model.embed.weight)
    frozen = fs.shard_module(make().requires_grad_(False), mesh=comm, strategy=fs.zero1("dp"), units=[modules.Block])
    with (
        torch.no_grad(),
        pytest.raises(LayoutError, match=r"'head\.weight'.*freeze a teacher by requires_grad_\(False\) after"),
    ):
        frozen.head.weight.lerp_(wrap(comm, "zero1")[0].head.weight, 0.5)
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(LayoutError, match=r"mul\(\) of a tensor that requires a gradient and of the part 'head\.weight'"):
        model.head.weight.grad * scale
    with pytest.raises(FsharpError, match=r"'head\.weight' is used by norm\(\) outside of the forward.*torch\.no_grad"):
        model.head.weight.norm()


@on_ranks(MESHES[2])
def test_sums_of_frozen_complex_and_integer_parameters(comm):
    """A sum keeps the imaginary part, and casts elements before it adds them; integers have no norm, as in torch."""
    whole = {"z": torch.tensor([[0.5 + 2j, 0.3], [1 - 1.25j, 0.7j]]), "i": torch.arange(-3, 4)}
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(4))
    for name, x in whole.items():
        setattr(module, name, nn.Parameter(x.clone(), requires_grad=False))
    module = fs.shard_module(module, mesh=comm, strategy=fs.zero3("dp"))
    for name, x in whole.items():
        for dtype in (None, torch.bool, torch.complex64):
            close(getattr(module, name).sum(dtype=dtype), x.sum(dtype=dtype))
    with pytest.raises(LayoutError, match="'i' is sharded"):
        torch.linalg.vector_norm(module.i, 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(DP)
def test_the_cost_of_a_part_does_not_grow_with_the_units(comm, strategy):
    """An optimizer of torch.optim reads each part some thirty times in a step."""
    found = []
    for layers in (1, 6):
        net, how = modules.Net(layers), getattr(fs, strategy)("dp")
        model = fs.shard_module(net, mesh=comm, strategy=how, units=[modules.Block], sync_from=0)
        optimizer, calls = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), []
        descend(model(*batches(comm, 1)[0])["loss"], optimizer)
        _ = model.head.weight.local  # waits for gathers
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(frame) if event == "call" else None)
        _ = model.head.weight.local
        sys.setprofile(None)
        found.append(len(calls))
    assert found[0] == found[1]
