"""Units of which ranks along an axis have their own: experts beside dense layers, each with the ranks that share them."""

import copy
from collections import Counter
from functools import cache, partial
from itertools import product

import optree
import pytest
import torch
import torch.nn.functional as F

import fsharp as fs
from fsharp.errors import LayoutError, StrategyError
from fsharp.functional.layout.placement import MeshPlacement
from fsharp.testing import processes, simulate
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.ranks import on_ranks
from tests.scheduling import STRATEGIES, assert_same, every

S, V = fs.layouts.Shard, fs.layouts.Varying
DIM, HIDDEN, EXPERTS, VOCAB = 6, 7, 4, 11
MESH = fs.Mesh({"dp": 2, "ep": 2})
PLACES = {
    "zero3": (fs.zero3("dp", "ep"), fs.zero3("dp").varying("ep")),
    "zero2": (fs.zero2("dp", "ep"), fs.zero2("dp").varying("ep")),
    "zero1": (fs.zero1("dp", "ep"), fs.zero1("dp").varying("ep")),
    "ddp": (fs.ddp("dp", "ep"), fs.ddp("dp").varying("ep")),
    "hsdp, experts zero1": (fs.hsdp("dp", "ep"), fs.zero1("dp").varying("ep")),
    "hfsdp, experts ddp": (fs.hfsdp("dp", "ep"), fs.ddp("dp").varying("ep")),
}


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


def whole_params():
    layers = [
        {
            "router": draw(DIM, EXPERTS, seed=10 * i),
            "experts": {"up": draw(EXPERTS, DIM, HIDDEN, seed=10 * i + 1), "down": draw(EXPERTS, HIDDEN, DIM, seed=10 * i + 2)},
        }
        for i in (1, 2)
    ]
    return {"embed": draw(VOCAB, DIM, seed=1), "layers": layers, "head": draw(DIM, VOCAB, seed=2)}


def own_params(comm):
    """What this rank's coordinate on the expert-parallel axis has."""
    params = whole_params()
    n, mine = comm.mesh.axis_size("ep"), comm.mesh.coord("ep", comm.rank)
    for layer in params["layers"]:
        layer["experts"] = {name: w.chunk(n)[mine].clone() for name, w in layer["experts"].items()}
    return params


def experts(p, x, gates):
    """``x``: tokens ``[t, d]``; ``gates``: ``[t, e]`` of these experts, zero where a token goes elsewhere."""
    hidden = torch.tanh(torch.einsum("td,edh->eth", x, p["up"]))
    return torch.einsum("eth,ehd,te->td", hidden, p["down"], gates)


def gates_of(logits):
    top = logits.topk(2, dim=-1)
    return torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))


def route(router, x):
    return gates_of(x @ router)


def to_all_ranks(p, x, gates, comm):
    """Tokens go to all ranks along ``ep``; each adds what its experts make of them; the sums go back."""
    everyone = fs.collectives.all_gather_last(torch.cat([x, gates], 1).T, comm, "ep").T
    own_gates = everyone[:, DIM:].chunk(comm.mesh.axis_size("ep"), dim=1)[comm.mesh.coord("ep", comm.rank)]
    out = fs.forward(experts, p, everyone[:, :DIM], own_gates, comm=comm)
    return fs.collectives.reduce_scatter_last(out.T, comm, "ep").T


def to_ranks_of_experts(p, x, gates, comm):
    """A token goes to the ranks of its experts alone."""
    n = comm.mesh.axis_size("ep")
    parts = gates.chunk(n, dim=1)
    ids = [part.any(1).nonzero()[:, 0] for part in parts]
    send = [len(each) for each in ids]
    receive = fs.collectives.all_to_all_last(torch.tensor(send), [1] * n, [1] * n, comm, "ep").tolist()
    rows = torch.cat([torch.cat([x[each], part[each]], 1) for each, part in zip(ids, parts, strict=True)])
    rows = fs.collectives.all_to_all_last(rows.T, send, receive, comm, "ep").T
    out = fs.forward(experts, p, rows[:, :DIM], rows[:, DIM:], comm=comm)
    return torch.zeros_like(x).index_add(0, torch.cat(ids), fs.collectives.all_to_all_last(out.T, receive, send, comm, "ep").T)


def moe_loss(params, batch, comm, send_tokens=to_all_ranks):
    x = fs.forward(lambda table, tokens: F.embedding(tokens, table), params["embed"], batch["x"], comm=comm)
    for layer in params["layers"]:
        gates = fs.forward(route, layer["router"], x, comm=comm)
        x = x + send_tokens(layer["experts"], x, gates, comm)
    logits = fs.forward(lambda w, x: x @ w, params["head"], x, comm=comm)
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    return fs.Loss((losses * batch["w"]).sum(), batch["w"].sum())


def make_tx():
    return fs.optim.chain(fs.optim.clip_by_global_norm(0.05, deterministic=True), fs.optim.adamw(1e-2))


def train(comm, strategies, *, steps=3, scheduled=False, microbatches=1, loss_fn=moe_loss):
    params = own_params(comm)
    dense, sparse = strategies
    layout = fs.plan(
        params, comm.mesh, {"**": dense, "layers.*.experts": sparse}, units=["layers.*.router", "layers.*.experts"]
    )
    tx = make_tx()
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    step = fs.train_step(loss_fn, tx, microbatches=microbatches)
    run = fs.Scheduler(comm)(step) if scheduled else lambda state, batch: step(state, batch, comm)
    losses = []
    for batch in make_batches(steps, 8 * comm.mesh.size):
        mine = {name: x.chunk(comm.mesh.size)[comm.rank] for name, x in batch.items()}
        state, metrics = run(state, mine)
        losses.append(metrics.loss)
    return torch.stack(losses), fs.full_tree(state.params, comm=comm)


@cache
def reference():
    """On one rank, with all experts."""
    comm, params = fs.SingleComm(fs.Mesh({"dp": 1, "ep": 1})), whole_params()
    layout = fs.plan(params, comm.mesh, fs.zero3("dp", "ep"), units="layers.*.*")
    tx = make_tx()
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    losses = []
    for batch in make_batches(3, 8 * MESH.size):
        state, metrics = fs.train_step(moe_loss, tx)(state, batch, comm)
        losses.append(metrics.loss)
    return torch.stack(losses), fs.full_tree(state.params, comm=comm)


def joined(results):
    """The whole tree from what ranks have."""
    tree = copy.deepcopy(results[0][1])
    for i, layer in enumerate(tree["layers"]):
        parts = [results[rank][1]["layers"][i]["experts"] for rank in MESH.group("ep", 0)]
        layer["experts"] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return tree


def assert_close(tree, other):
    torch.testing.assert_close(optree.tree_leaves(tree), optree.tree_leaves(other), rtol=1e-4, atol=1e-6)


@cache
def blocking(name, microbatches=1):
    return simulate(MESH, lambda comm: train(comm, PLACES[name], microbatches=microbatches))


@pytest.mark.parametrize("name", PLACES)
def test_experts_on_their_own_axis_train_as_on_one_rank(name):
    """Gradients have one scale, the norm counts every expert once, and the clipping (which always bites) is the same."""
    losses, tree = reference()
    results = blocking(name)
    for each, _ in results:
        torch.testing.assert_close(each, losses, rtol=1e-5, atol=0.0)  # computed in float32
    assert_close(joined(results), tree)
    start = whole_params()
    assert not any(torch.equal(a, b) for a, b in zip(optree.tree_leaves(tree), optree.tree_leaves(start)))


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_all_to_all_sends_tokens_to_the_ranks_of_their_experts(scheduled):
    losses, tree = reference()
    loss_fn = partial(moe_loss, send_tokens=to_ranks_of_experts)
    results = simulate(MESH, lambda comm: train(comm, PLACES["zero3"], scheduled=scheduled, loss_fn=loss_fn))
    for each, _ in results:
        torch.testing.assert_close(each, losses, rtol=1e-5, atol=0.0)
    assert_close(joined(results), tree)


@every(2, name=PLACES, microbatches=(1, 2))
def test_a_scheduler_gives_the_same_bits(name, microbatches):
    found = simulate(MESH, lambda comm: train(comm, PLACES[name], scheduled=True, microbatches=microbatches))
    assert_same(found, blocking(name, microbatches))


def test_processes_give_the_same_bits():
    names = {"zero3": True, "zero1": False}  # and whether scheduled, which changes no bit
    found = processes(MESH, lambda comm: [train(comm, PLACES[name], scheduled=how) for name, how in names.items()])
    for name, real in zip(names, zip(*found), strict=True):
        assert_same(list(real), blocking(name))


@every(2, name=["ddp", "zero3", "hsdp", "hfsdp", "mixed"], scheduled=[False, True])
def test_a_tree_that_varies_is_as_many_trainings_as_there_are_coordinates(name, scheduled):
    """All units vary along one axis, and the optimizer looks at no other rank: coordinates know nothing of each other."""
    mesh, strategy = STRATEGIES[name]
    wide = fs.Mesh([("own", 2), *mesh.axes])

    def steps(comm, params, batches, strategy):
        layout = fs.plan(params, comm.mesh, strategy, units="layers.*")
        tx = fs.optim.adamw(1e-2)
        state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)

        def step(state, batch, comm):
            _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            sums = optree.tree_map(torch.clone, fs.reduce_scatter(grads, comm=comm))  # as they are: update() refuses its own
            return fs.update(tx, sums, state, comm=comm)

        run = fs.Scheduler(comm)(step) if scheduled else lambda state, batch: step(state, batch, comm)
        for batch in batches:
            state = run(state, batch)
        return fs.full_tree(state.params, comm=comm)

    def batches_of(own, rank):
        return make_batches(3 if scheduled else 2, 4, seed=100 * own + rank)

    def varying(comm):
        own, rank = divmod(comm.rank, mesh.size)
        return steps(comm, make_params(seed=own), batches_of(own, rank), strategy.varying("own"))

    found = simulate(wide, varying)
    for own in range(2):
        alone = simulate(mesh, lambda comm: steps(comm, make_params(seed=own), batches_of(own, comm.rank), strategy))
        for rank, tree in enumerate(alone):
            assert_same(tree, found[own * mesh.size + rank])


@pytest.mark.parametrize("name", PLACES)
@on_ranks(MESH)
def test_traffic_is_predicted_to_the_byte(comm, name):
    dense, sparse = PLACES[name]
    params = own_params(comm)
    layout = fs.plan(params, comm.mesh, {"**": dense, "layers.*.experts": sparse}, units="layers.*.*")
    tx = fs.optim.adamw(1e-2)
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    counting = fs.collectives.CountingComm(comm)
    batch = make_batches(1, 4)[0]

    def loss(params, batch, inner):  # tokens' own way is not a step's
        return moe_loss(params, batch, _Split(inner, comm))

    fs.train_step(loss, tx)(state, batch, counting)
    assert counting.calls == fs.inspect.step_traffic(layout)
    own = fs.Layout(layout.mesh, tuple(unit for unit in layout.units if unit.strategy == sparse), layout.structure)
    assert {call.axis for call in fs.inspect.step_traffic(own) if call.nbytes != 2 * 8} == {"dp"}  # 16 bytes: the loss


class _Split:
    """Exchange of tokens through one Comm, and units' collectives through another."""

    def __init__(self, units, tokens):
        self.mesh, self.rank, self.device, self._units, self._tokens = units.mesh, units.rank, units.device, units, tokens

    def all_gather(self, x, axis, *, label=""):
        return (self._tokens if x.dim() > 1 else self._units).all_gather(x, axis)

    def reduce_scatter(self, x, axis, *, dtype=None, label=""):
        return (self._tokens if x.dim() > 2 else self._units).reduce_scatter(x, axis, dtype=dtype)

    def all_reduce(self, x, axis, *, op="sum", label=""):
        return self._units.all_reduce(x, axis, op=op)


def test_round_trip_of_what_varies():
    layout = fs.plan(whole_params(), fs.Mesh({"dp": 3, "ep": 2}), fs.zero3("dp").varying("ep"))
    trees = [{**whole_params(), "embed": draw(VOCAB, DIM, seed=50 + ep)} for ep in range(2)]
    parts = [fs.shard_for(trees[layout.mesh.coord("ep", rank)], layout, rank) for rank in range(6)]
    for rank in range(6):
        assert torch.equal(fs.unshard(parts, rank=rank)["embed"], trees[layout.mesh.coord("ep", rank)]["embed"])
    assert torch.equal(fs.unshard(parts)["embed"], trees[0]["embed"])


def test_initial_values_differ_along_that_axis_and_no_other():
    shapes = {"w": torch.empty(5, 3, device="meta")}

    def made(mesh, strategy):
        def rank_fn(comm):
            return fs.full_tree(fs.init_params(fs.init.normal(), fs.plan(shapes, mesh, strategy), comm, key=7), comm=comm)["w"]

        return simulate(mesh, rank_fn)

    strategy = fs.zero3("dp").varying("ep")
    small, large = made(fs.Mesh({"dp": 1, "ep": 2}), strategy), made(fs.Mesh({"dp": 2, "ep": 2}), strategy)
    assert not torch.equal(small[0], small[1])
    for rank, value in enumerate(large):
        assert torch.equal(value, small[rank % 2])


@on_ranks(MESH)
def test_norm_counts_each_value_once(comm):
    params = {"own": torch.full((3,), float(comm.rank % 2)), "shared": torch.ones(5)}
    layout = fs.plan(params, comm.mesh, {"own": fs.zero3("dp").varying("ep"), "shared": fs.ddp("dp", "ep")}, units="*")
    tree = fs.shard(params, layout, comm)
    assert [fs.optim.global_norm(tree, comm=comm, deterministic=d).item() for d in (False, True)] == [pytest.approx(8**0.5)] * 2


def test_placements():
    strategy = fs.hsdp("outer", "inner").varying("ep")
    assert strategy.axis_order == ("inner", "outer", "ep")
    assert strategy.params == MeshPlacement(("inner", "outer", "ep"), (S, fs.layouts.Replicate, V))
    assert strategy.full == MeshPlacement(("inner", "outer", "ep"), (fs.layouts.Replicate, fs.layouts.Replicate, V))
    assert strategy.full.cotangent_place == MeshPlacement(("inner", "outer", "ep"), (fs.layouts.Partial, fs.layouts.Partial, V))
    assert strategy.optim.varying_axes == ("ep",)
    assert str(strategy) == "outer: RPR, inner: SSS, ep: VVV"
    assert strategy == fs.Strategy({**dict(fs.hsdp("outer", "inner").rules), "ep": fs.layouts.AxisRule(V, V, V)})


@pytest.mark.parametrize(
    "rule", [r for r in product((fs.layouts.Replicate, S, fs.layouts.Partial, V), repeat=3) if 0 < r.count(V) < 3], ids=str
)
def test_all_three_kinds_vary_or_none(rule):
    with pytest.raises(StrategyError, match="axis 'ep': if one of the three is Varying, all three"):
        fs.Strategy({"ep": fs.layouts.AxisRule(*rule)})


@pytest.mark.parametrize(("axes", "shown"), [(("dp",), r"\['dp'\]"), ((), r"\[\]"), (("ep", "dp"), r"\['ep', 'dp'\]")])
def test_axes_that_the_strategy_has_cannot_vary_too(axes, shown):
    with pytest.raises(StrategyError, match=rf"varying\(\): expected axes other than .*dp: SSS.*got {shown}"):
        fs.zero3("dp").varying(*axes)


def test_ties_between_what_varies_and_what_does_not_are_refused():
    w = torch.ones(3)
    strategies = {"a": fs.zero3("dp", "ep"), "b": fs.zero3("dp").varying("ep")}
    with pytest.raises(LayoutError, match=r"disagree on the axes along which they vary.*\n.*'a'.*\(\).*\n.*'b'.*ep"):
        fs.plan({"a": w, "b": w}, MESH, strategies, units="*")


def test_a_place_that_does_not_vary_is_none_of_the_units():
    layout = fs.plan({"w": torch.ones(8)}, MESH, fs.zero3("dp").varying("ep"))
    part = fs.shard_for({"w": torch.ones(8)}, layout, 0)
    with pytest.raises(LayoutError, match="ep:Replicate"):
        fs.gather(
            part,
            comm=fs.collectives.CountingComm(_Alone()),
            to=MeshPlacement(("dp", "ep"), (fs.layouts.Replicate, fs.layouts.Replicate)),
        )


class _Alone:
    mesh, rank, device = MESH, 0, torch.device("cpu")


def test_json():
    layout = fs.plan({"w": torch.ones(8)}, MESH, fs.zero3("dp").varying("ep"))
    assert fs.Layout.from_json(layout.to_json()) == layout
    assert Counter(p for p in layout.units[0].strategy.params.placements) == {S: 1, V: 1}
