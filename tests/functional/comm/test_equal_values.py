"""Ranks start from the same values: compared to the bit, or taken from one of them."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, MeshError, OptionError, TreeError
from fsharp.functional.comm import equal_values as module_values
from fsharp.functional.comm.equal_values import broadcast_from_rank, bytes_digest, check_same_on_ranks
from fsharp.testing import simulate
from tests import modules
from tests.modules import Block, Net, train, values
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID, assert_same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]
REMEDY = r"\nSeed all ranks alike before the module is made, load the same checkpoint, or pass sync_from=0,"


def bits(tensor):
    """As bytes, which are equal for not-a-numbers and not for zeros of different sign."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def samples(dtype):
    """Tensors of many lengths; random bits where these are values."""
    g = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 3, 5, 37, 1000):
        if dtype is torch.bool:
            yield torch.randint(0, 2, (size,), generator=g).bool()
        else:
            yield torch.randint(0, 256, (size * dtype.itemsize,), generator=g, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_sees_every_bit(dtype, monkeypatch):
    monkeypatch.setattr(module_values, "_CHUNK_NBYTES", 64)  # several pieces
    for x in samples(dtype):
        assert bytes_digest(x) == bytes_digest(x.clone()) == bytes_digest(torch.stack([x, x], -1)[..., 0])
        assert bytes_digest(torch.cat([x[:0], x])[0:]) == bytes_digest(x)
        for i in {0, len(x) // 2, len(x) - 1} if len(x) else ():
            other = x.clone()
            last = bits(other)
            other.view(torch.uint8).view(-1)[i * dtype.itemsize] = last[i * dtype.itemsize] ^ 1
            assert bytes_digest(other) != bytes_digest(x)
        if len(x) > 36:
            assert bytes_digest(x.flip(0) if dtype is not torch.float8_e4m3fn else x.view(torch.uint8).flip(0)) != bytes_digest(
                x
            )
            assert bytes_digest(x[1:]) != bytes_digest(x[:-1])  # not aligned


def test_a_digest_sees_constants_and_signs():
    all_of = [torch.zeros(4), torch.ones(4), torch.full((4,), 2.0), -torch.ones(4), torch.zeros(4) * -1]
    some = [torch.ones(8).index_fill(0, torch.tensor(each), -1.0) for each in ([0], [1], [0, 1], [0, 7], [2, 3], [0, 1, 2, 3])]
    assert len({bytes_digest(x) for x in (*all_of, *some)}) == len(all_of) + len(some)


@pytest.mark.parametrize("source", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taken_to_the_bit(dtype, source, monkeypatch):
    monkeypatch.setattr(module_values, "_CHUNK_NBYTES", 64)

    def rank_fn(comm):
        mine = list(samples(dtype))
        return [
            broadcast_from_rank(x if comm.rank == source else torch.empty_like(x, device="meta"), source, comm) for x in mine
        ]

    for found in simulate(HYBRID, rank_fn):
        for mine, expected in zip(found, samples(dtype)):
            assert mine.dtype == dtype
            assert torch.equal(bits(mine), bits(expected))


def make(seed):
    """A model with frozen parameters, some of them integers, and buffers."""
    net = modules.make("frozen", seed)
    net.codes = nn.Parameter(torch.full((5,), seed, dtype=torch.int8), requires_grad=False)
    net.register_buffer("scale", torch.full((3,), float(seed)))
    net.register_buffer("also", net.scale, persistent=False)
    return net


def everything(model):
    """Parameters and buffers, whole."""
    return values(model) | {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_differ_hear_of_it(size, strategy):
    def rank_fn(comm):
        net = make(seed=comm.rank)
        where = getattr(fs, strategy)("dp")
        with pytest.raises(AgreementError, match=r"of \d+ parameters do not have the same values on all ranks") as caught:
            fs.shard_module(net, mesh=comm, strategy=where, units=[Block])
        assert type(net) is Net
        net = modules.make(seed=3)
        with torch.no_grad():
            net.layers[1].up.bias[2] += 1e-6 * (comm.rank == size - 1)
        one = rf"1 of \d+ parameters do not .*\n  layers\.1\.up\.bias  rank {size - 1}: other values than rank 0{REMEDY}"
        with pytest.raises(AgreementError, match=one):
            fs.shard_module(net, mesh=comm, strategy=where, units=[Block])
        fs.shard_module(modules.make(), mesh=comm, strategy=where, units=[Block])
        return str(caught.value)

    first, *others = simulate(fs.Mesh({"dp": size}), rank_fn)
    assert set(others) == {first}
    assert "codes" in first
    assert "more" in first


def synced(comm, source, meta):
    """What a module has that takes its values from one rank."""
    if meta and comm.rank != source:
        with torch.device("meta"):
            net = make(0)
    else:
        net = make(seed=comm.rank + 5)
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3(*comm.mesh.names), units=[Block], sync_from=source)
    assert model.also is model.scale
    before = everything(model)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, optimizer, modules.batches(comm, 2))
    return before, values(model)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize(("mesh", "source"), [(DP, 0), (DP, 1), (HYBRID, 2)])
def test_sync_from(mesh, source, meta):
    alone = make(seed=source + 5)
    expected = {name: each.detach() for name, each in alone.named_parameters()}
    expected |= dict(alone.named_buffers(remove_duplicate=False))
    (_, trained), *_ = found = simulate(mesh, lambda comm: synced(comm, source, meta))
    for mine, after in found:
        assert_same(mine, expected)
        assert_same(after, trained)


REFUSED = {
    "no such rank": (lambda rank: make(0), lambda rank: 2, r"rank is 2, expected a rank of Mesh\(dp=2\), 0 to 1"),
    "no rank": (lambda rank: make(0), lambda rank: True, r"sync_from is True, expected an int or None"),
    "several": (lambda rank: make(0), lambda rank: rank, r"different values\.\n  sync_from  rank 0: 0\n  sync_from  rank 1: 1"),
    "meta": (lambda rank: on_meta(), lambda rank: 1, r"'codes' of rank 1 is on the meta device\. Make the module on a real"),
    "partly meta": (lambda rank: on_meta() if rank else make(0), lambda rank: None, r"on the meta device"),
    "other buffers": (
        lambda rank: with_buffer(rank),
        lambda rank: 0,
        r"different values\.\n  buffers  rank 0: more: torch\.float32\[1\]",
    ),
}


def on_meta():
    with torch.device("meta"):
        return make(0)


def with_buffer(rank):
    net = make(0)
    net.register_buffer("more", torch.zeros(rank + 1))
    return net


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(DP)
def test_refused(comm, name):
    make_net, source, match = REFUSED[name]
    with pytest.raises((AgreementError, MeshError, OptionError, TreeError), match=match):
        fs.shard_module(make_net(comm.rank), mesh=comm, strategy=fs.zero3("dp"), sync_from=source(comm.rank))


@on_ranks(HYBRID)
def test_values_that_may_differ_along_an_axis(comm):
    """As those of experts do."""
    outer, inner = comm.mesh.coord("outer", comm.rank), comm.mesh.coord("inner", comm.rank)
    tensors = {"shared": torch.zeros(3), "expert": torch.full((3,), float(inner)), "both": torch.full((3,), float(comm.rank))}
    check_same_on_ranks("f()", tensors, comm, remedy="Seed alike.", varying={"expert": ("inner",), "both": ("inner", "outer")})
    with pytest.raises(
        AgreementError,
        match=r"f\(\): 1 of 3 .*\n  expert  rank 1: other values than rank 0; rank 3: other values than rank 2\n",
    ):
        check_same_on_ranks(
            "f()", tensors, comm, remedy="Seed alike.", varying={"expert": ("outer",), "both": ("inner", "outer")}
        )
    tensors["expert"] = tensors["expert"] + outer
    with pytest.raises(
        AgreementError, match=r"\n  expert  rank 2: other values than rank 0; rank 3: other values than rank 1\n"
    ):
        check_same_on_ranks(
            "f()", tensors, comm, remedy="Seed alike.", varying={"expert": ("inner",), "both": ("inner", "outer")}
        )


def test_shard_compares_values():
    """A rank with another seed would train a mixture; values that vary along an axis may differ."""
    mesh = fs.Mesh({"ep": 2, "dp": 2})

    def sharded(comm, of=lambda comm: comm.rank == 3, strategy=None, **options):
        params = {"w": torch.ones(4, 3), "experts": torch.ones(4) + float(of(comm))}
        strategies = {"**": fs.zero3("dp", "ep"), "experts": strategy or fs.zero3("dp", "ep")}
        layout = fs.plan(params, comm.mesh, strategies, units="*")
        return fs.shard(params, layout, comm, **options)

    message = r"(?s)1 of 2 parameters do not have the same values.*experts +rank 3: other values than rank 0\nDraw them"
    for result in simulate(mesh, sharded, outcomes=True):
        with pytest.raises(AgreementError, match=message):
            raise result
    simulate(mesh, lambda comm: sharded(comm, check_values=False))
    own = {"strategy": fs.zero3("dp").varying("ep")}
    simulate(mesh, lambda comm: sharded(comm, lambda comm: comm.mesh.coord("ep", comm.rank), **own))
    with pytest.raises(AgreementError, match=r"experts +rank 3: other values than rank 2"):
        simulate(mesh, lambda comm: sharded(comm, **own))
