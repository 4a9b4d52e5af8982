"""make_functional, init, ties between units, and forward's odd corners."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, TreeError
from fsharp.testing import processes, simulate
from tests.gpt_like import make_params
from tests.ranks import on_ranks

ONE = fs.SingleComm()
DP = fs.Mesh({"dp": 3})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def test_a_functionalized_module_computes_what_the_module_does():
    torch.manual_seed(0)
    module = Tied()
    before = {name: b.clone() for name, b in module.named_buffers()}
    fn, params = fs.make_functional(module)
    assert params["head"]["weight"] is params["embed"]["weight"] or (
        params["head"]["weight"].data_ptr() == params["embed"]["weight"].data_ptr()
    )
    tokens = torch.arange(6) % 7
    out = fn(params, tokens)
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())  # a pure function
    assert torch.equal(fn(params, tokens), out)
    torch.testing.assert_close(out, module(tokens), rtol=0, atol=0)


def test_a_functionalized_module_keeps_no_parameters():
    fn, _ = fs.make_functional(nn.Linear(3, 2))
    held = [cell.cell_contents for cell in fn.__closure__]
    skeleton = next(x for x in held if isinstance(x, nn.Module))
    assert all(p.is_meta for p in skeleton.parameters())


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1, fs.zero2, fs.zero3])
def test_leaves_tied_between_units_are_stored_once_and_collect_both_gradients(strategy):
    torch.manual_seed(0)
    shared = torch.randn(7, 4)
    params = {"embed": {"w": shared}, "head": {"w": shared, "b": torch.zeros(7)}}
    layout = fs.plan(params, DP, strategy("dp"), units=["embed", "head"])
    assert layout.num_params == 7 * 4 + 7
    tokens = torch.arange(6)

    def loss(p, batch, comm):
        x = fs.forward(lambda e, t: e["w"][t], p["embed"], batch, comm=comm)
        out = fs.forward(lambda h, x: x @ h["w"].T + h["b"], p["head"], x, comm=comm, ties=[p["embed"]])
        return out.logsumexp(-1).mean()

    def rank_fn(comm):
        sharded = fs.shard(params, layout, comm)
        total, grads = fs.value_and_grad(loss)(sharded, tokens, comm=comm)
        _, grads = fs.average(total, fs.reduce_scatter(grads, comm=comm), comm=comm)
        return fs.full_tree(sharded, comm=comm), fs.full_tree(grads, comm=comm)

    whole, grads = simulate(DP, rank_fn)[0]
    assert whole["head"]["w"].data_ptr() == whole["embed"]["w"].data_ptr()
    assert torch.equal(whole["embed"]["w"], shared)
    leaf = shared.clone().requires_grad_()
    (expected,) = torch.autograd.grad((leaf[tokens] @ leaf.T).logsumexp(-1).mean(), leaf)
    torch.testing.assert_close(grads["embed"]["w"], expected)


def test_a_tied_unit_that_is_not_passed_along_is_named():
    shared = torch.randn(7, 4)
    params = {"embed": {"w": shared}, "head": {"w": shared}}
    sharded = fs.shard(params, fs.plan(params, ONE.mesh, fs.zero3("dp"), units="*"), ONE)
    with pytest.raises(TreeError, match=r"'head.w' is tied .*\n.*'w' of unit 'embed'\n.*ties="):
        fs.forward(lambda h: h["w"].sum(), sharded["head"], comm=ONE)


RULES = {"**": fs.init.normal(0.3), "**.b": fs.init.zeros, "layers.1": lambda t, g: nn.init.uniform_(t, 1.0, 2.0, generator=g)}


def initialised(mesh, strategy, units, place="params", **options):
    shapes = torch.utils._pytree.tree_map(lambda t: t.to("meta"), make_params())
    layout = fs.plan(shapes, mesh, strategy, units=units, **options)
    trees = simulate(mesh, lambda comm: fs.init_params(RULES, layout, comm, key=7, place=place))
    return fs.unshard(trees)


def test_initial_values_depend_on_key_and_path_alone():
    expected = initialised(fs.Mesh({"dp": 1}), fs.ddp("dp"), None)
    assert expected["head"]["b"].eq(0).all()
    assert 1 <= expected["layers"][1]["w"].min() < expected["layers"][1]["w"].max() < 2
    assert not torch.equal(expected["layers"][0]["w"][0], expected["embed"][0])
    for mesh, strategy, units in (
        (DP, fs.zero3("dp"), "layers.*"),
        (DP, fs.zero1("dp"), None),
        (fs.Mesh({"o": 2, "i": 3}), fs.hfsdp("o", "i"), "**.w"),
    ):
        got = initialised(mesh, strategy, units, place="optim")
        torch.utils._pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, expected)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda rank: fs.init.normal(1.0 + rank), r"v: partial.*'std': 1\.0.*\n.*rank 1: v: partial.*'std': 2\.0"),
        (
            lambda rank: {"**": fs.init.uniform(), "w": (fs.init.ones, fs.init.zeros)[rank]},
            r"w: <function ones.*\n.*function zeros",
        ),
    ],
)
@on_ranks(fs.Mesh({"dp": 1, "ep": 2}))
def test_ranks_compare_initializers(comm, make, match):
    layout = fs.plan({"w": torch.empty(4), "v": torch.empty(3)}, comm.mesh, fs.zero3("dp", "ep"), units=["w"])
    with pytest.raises(AgreementError, match=r"initializers  rank 0: " + match):
        fs.init_params(make(comm.rank), layout, comm, key=0)
    vary = fs.plan({"w": torch.empty(4)}, comm.mesh, fs.zero3("dp").varying("ep"))
    mine = fs.init_params(lambda t, g: t.fill_(comm.rank), vary, comm, key=0)
    assert fs.init_params((fs.init.zeros, fs.init.ones)[comm.rank], vary, comm, key=0).buffers[0].eq(mine.buffers[0]).all()


def test_init_holds_one_leaf_beyond_its_shards():
    """Every draw is dead when the next begins."""
    import weakref

    layout = fs.plan(make_params(), DP, fs.zero3("dp"), units="layers.*")

    def rank_fn(comm):
        alive, most = weakref.WeakSet(), []

        def fill(t, g):
            alive.add(t.untyped_storage())
            most.append(len(alive))
            t.zero_()

        fs.init_params(fill, layout, comm, key=0)
        return most

    found = simulate(DP, rank_fn)
    assert all(set(most) == {1} for most in found)
    assert len(found[0]) > 5


def test_a_rank_draws_only_what_it_holds_a_part_of():
    drawn = []
    layout = fs.plan({"a": torch.empty(6), "b": torch.empty(6), "c": torch.empty(6)}, DP, fs.zero3("dp"))

    def fill(comm):
        return lambda t, g: drawn.append(comm.rank)

    simulate(DP, lambda comm: fs.init_params(fill(comm), layout, comm, key=0))
    assert sorted(drawn) == [0, 1, 2]


def test_dropout_and_autocast_are_those_of_the_forward():
    """The function is called once: the gradient belongs to the mask of the output."""
    params = {"w": torch.ones(64)}

    def in_process(comm):
        layout = fs.plan(params, comm.mesh, fs.zero3("dp"))
        torch.manual_seed(comm.rank)
        seen = []

        def fn(p):
            out = torch.nn.functional.dropout(p["w"], 0.5)
            seen.append((out.detach().clone(), (p["w"].reshape(8, 8) @ p["w"].reshape(8, 8)).dtype))
            return out.sum()

        def loss(p, batch, comm):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fs.forward(fn, p, comm=comm)

        state = torch.get_rng_state()
        _, grads = fs.value_and_grad(loss)(fs.shard(params, layout, comm), None, comm=comm)
        moved = not torch.equal(state, torch.get_rng_state())
        return seen, moved, fs.full_tree(grads, comm=comm)["w"]

    results = processes(fs.Mesh({"dp": 2}), in_process)
    for seen, moved, _ in results:
        [(_, kind)] = seen
        assert kind == torch.bfloat16
        assert moved  # and the next call draws other numbers
    assert torch.equal(results[0][2], results[0][0][0][0] + results[1][0][0][0])


@on_ranks(DP)
def test_forward_takes_and_returns_any_tree(comm):
    expected = make_params()
    p = fs.shard(expected, fs.plan(expected, DP, fs.zero3("dp"), units="layers.*"), comm)
    x = torch.ones(2, 6, requires_grad=True)

    def fn(trees, x, *, scale, flag):
        a, b = trees["pair"]
        out = {"y": (x * scale) @ a["w"], "same": x, "n": 3, "flag": flag, "count": (x > 0).sum(), "none": None}
        return out, b["b"] * 2

    out, b2 = fs.forward(fn, {"pair": [p["layers"][0], p["layers"][1]]}, x, scale=torch.tensor(2.0), flag="on", comm=comm)
    (g,) = torch.autograd.grad(out["y"].sum() + out["same"].sum(), x)
    assert (out["n"], out["flag"], out["none"], int(out["count"])) == (3, "on", None, 12)
    torch.testing.assert_close(out["y"], 2 * torch.ones(2, 6) @ expected["layers"][0]["w"])
    torch.testing.assert_close(b2, expected["layers"][1]["b"] * 2)
    torch.testing.assert_close(g, 1 + 2 * expected["layers"][0]["w"].sum(1).expand(2, 6))


class SharesBuffer(nn.Module):
    """Two submodules have one buffer: the first writes, and the second reads."""

    def __init__(self):
        super().__init__()
        self.writer, self.reader = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        self.reader.running_mean = self.writer.running_mean

    def forward(self, x):
        return self.writer(x).sum() + self.reader.running_mean


def test_a_buffer_of_two_submodules_stays_one_buffer():
    module, x = SharesBuffer(), torch.tensor([[1.0], [3.0]])
    fn, params = fs.make_functional(module)
    assert [fn(params, x).item() for _ in range(2)] == [module(x).item()] * 2


class Meets(nn.Module):
    """A forward that another thread's forward interrupts."""

    barrier = threading.Barrier(2, timeout=20)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.barrier.wait()
        before = self.scale * x
        self.barrier.wait()
        return before + self.scale * x


def test_calls_in_two_threads_keep_their_own_parameters():
    fn, _ = fs.make_functional(Meets())
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(fn, {"scale": torch.tensor(float(k))}, torch.tensor(3.0)) for k in (1, 2)]
        assert [result.result().item() for result in results] == [6.0, 12.0]
