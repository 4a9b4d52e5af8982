"""An infinity or NaN on one rank is found on all of them, with where it is."""

import math

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.resilience import find_nonfinite
from fsharp.testing import simulate
from tests.ranks import on_ranks

DP3 = fs.Mesh({"dp": 3})
TREE = {"a": torch.ones(7), "empty": torch.ones(0), "layers": [{"w": torch.ones(3, 5), "b": torch.ones(())} for _ in range(2)]}


def sharded(comm, strategy, tree=TREE, frozen=()):
    units = "layers.*" if "layers" in tree else None
    return fs.shard(tree, fs.plan(tree, comm.mesh, strategy("dp"), units=units, frozen=frozen), comm)


def fill(node, path, value, rank):
    """Write to the elements of one leaf that a rank holds; whether it holds some."""
    held = node.local_leaves(rank).get(path)
    if held is not None:
        held.fill_(value)
    return held is not None


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero3], ids=["ddp", "zero3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(DP3)
def test_what_is_finite_costs_one_reduction(comm, strategy, dtype):
    counting = fs.collectives.CountingComm(comm)
    tree = sharded(comm, strategy, {"a": torch.ones(7, dtype=dtype)})
    loss = fs.Loss(torch.tensor(1.0), torch.tensor(0.0))
    assert find_nonfinite(loss, (tree, 3, "text", None, 2.5, torch.ones(2).int()), comm=counting) is None
    assert counting.num_calls == 1


def test_float4_is_always_finite():
    packed = torch.arange(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert find_nonfinite(None, {"x": packed}, comm=fs.SingleComm()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_large_values_are_finite_though_their_sum_is_not(dtype):
    tree = {"a": torch.full((70,), torch.finfo(dtype).max).to(dtype)}
    frozen = "a" if dtype.itemsize == 1 else ()
    assert simulate(DP3, lambda comm: find_nonfinite(None, sharded(comm, fs.zero3, tree, frozen), comm=comm)) == [None] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero2, fs.zero3], ids=["ddp", "zero1", "zero2", "zero3"])
def test_the_first_leaf_and_who_holds_it_are_named_on_all_ranks(strategy, value):
    def rank_fn(comm):
        tree = sharded(comm, strategy)
        holds = {leaf: fill(tree["layers"][1], f"layers.1.{leaf}", value, comm.rank) for leaf in "wb"}
        return find_nonfinite(None, {"params": tree}, comm=comm), holds["b"]

    results = simulate(DP3, rank_fn)
    [found] = {found for found, _ in results}
    assert found.leaf == "params.layers.1.b"  # which comes before w in order of the tree
    assert found.leaf_ranks == tuple(rank for rank, (_, holds) in enumerate(results) if holds)
    assert found.loss_ranks == ()


def test_one_rank_is_enough():
    def rank_fn(comm):
        tree = sharded(comm, fs.zero3)
        if comm.rank == 2:
            assert fill(tree["layers"][0], "layers.0.w", math.nan, 2)
        return find_nonfinite(torch.tensor(1.0), tree, comm=comm)

    [found] = set(simulate(DP3, rank_fn))
    assert (found.leaf, found.leaf_ranks, found.loss_ranks) == ("layers.0.w", (2,), ())
    assert str(found) == "'layers.0.w' is the first leaf that is not finite, held by rank 2"


def test_the_rank_of_a_loss_is_named_though_gradients_are_sums():
    def loss_fn(params, batch, comm):
        return fs.forward(lambda p, x: (x @ p["a"]).mean(), params, batch, comm=comm)

    def rank_fn(comm):
        x = torch.full((2, 7), math.nan if comm.rank == 1 else 1.0)
        loss, grads = fs.value_and_grad(loss_fn)(sharded(comm, fs.zero3, {"a": torch.ones(7)}), x, comm=comm)
        return find_nonfinite(loss, fs.reduce_scatter(grads, comm=comm), comm=comm)

    [found] = set(simulate(DP3, rank_fn))
    assert (found.loss_ranks, found.leaf, found.leaf_ranks) == ((1,), "a", (0, 1, 2))
    assert str(found).startswith("the loss of rank 1 is not finite, and 'a'")


def test_padding_is_left_out():
    def rank_fn(comm):
        tree = sharded(comm, fs.zero3, {"a": torch.ones(7)})
        [node] = fs.layouts.units_of(tree)
        used = sum(len(x) for x in node.local_leaves(comm.rank).values())
        node.buffers[0][used:] = math.nan
        return find_nonfinite(None, tree, comm=comm), bool(node.buffers[0].isnan().any())

    results = simulate(DP3, rank_fn)
    assert [found for found, _ in results] == [None] * 3
    assert any(has_nan for _, has_nan in results)


class Keeper:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"kept": self.value}

    def load_state_dict(self, state):
        self.value = state["kept"]


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"x": 1.0, "y": math.nan}, "y"),
        ([torch.tensor([1.0, math.inf])], "0"),
        ({"k": Keeper(torch.tensor(math.nan))}, "k.kept"),
        ({"k": fs.checkpoint.PerRank({"own": torch.tensor([math.nan])})}, "k.own"),
        ({"z": torch.tensor([complex(1, math.inf)])}, "z"),
        ({"x": torch.tensor([1.0, math.inf, -math.inf]).to(torch.float8_e5m2)}, "x"),
        ({"x": torch.tensor([0.0, math.nan]).to_sparse()}, "x"),
        ({"n": 10**400, "x": complex(0, math.nan)}, "x"),
        ({"x": np.float32("nan"), "y": True}, "x"),
    ],
)
def test_leaves_of_other_kinds(tree, path):
    found = find_nonfinite(None, tree, comm=fs.SingleComm())
    assert (found.leaf, found.leaf_ranks) == (path, (0,))


def test_a_module_by_the_gradients_of_its_parameters():
    model = fs.shard_module(torch.nn.Linear(3, 2), mesh=fs.Mesh({"dp": 1}), strategy=fs.zero3("dp"))
    loss = model(torch.tensor([[1.0, math.nan, 0.0]])).sum()
    loss.backward()
    found = find_nonfinite(loss, {name: p.grad for name, p in model.named_parameters()}, comm=fs.SingleComm())
    assert (found.loss_ranks, found.leaf) == ((0,), "weight")


def test_what_it_cannot_look_at_is_refused():
    with pytest.raises(TreeError, match=r"'a\.1' is a ndarray"):
        find_nonfinite(None, {"a": [1.0, np.ones(2)]}, comm=fs.SingleComm())


def test_a_loss_alone_and_nothing_at_all():
    assert find_nonfinite((torch.tensor(math.nan), torch.tensor(2)), {}, comm=fs.SingleComm()) == ((0,), None, ())
    assert find_nonfinite(10**400, {}, comm=fs.SingleComm()) is None
    assert find_nonfinite(None, {}, comm=fs.SingleComm()) is None
    assert find_nonfinite(math.inf, {}, comm=fs.SingleComm()) == ((0,), None, ())
