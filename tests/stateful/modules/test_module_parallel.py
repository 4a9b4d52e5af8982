"""ShardedModule beside other kinds of parallelism: experts with an axis of their own, DTensors on a tensor-parallel one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import LayoutError, MeshError, TreeError
from fsharp.testing import DebugPolicy, processes, simulate
from tests import modules
from tests.modules import close
from tests.scheduling import assert_same, every

DIM, HIDDEN, VOCAB, EXPERTS = 6, 8, 11, 4
STEPS = 3
GRID = fs.Mesh({"dp": 2, "tp": 2})


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    """As a layer of sequence parallelism: each rank scales its tokens, and their gradients of the weight are partial sums."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        if not isinstance(self.weight, DTensor):
            return x * self.weight
        mesh = self.weight.device_mesh
        mine = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        return (mine * self.weight).redistribute(placements=[Replicate()]).to_local()


class Dense(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.embed, self.scale, self.head = nn.Embedding(VOCAB, DIM), Scale(), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Mlp() for _ in range(2)])
        self.checkpointed = checkpointed

    def forward(self, x, y=None):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        x = self.scale(x)
        out = self.head(x)
        return out if y is None else {"loss": F.cross_entropy(out, y), "logits": out}


def make(kind=Dense, *args):
    return modules.seeded(lambda: kind(*args))


class Experts(nn.Module):
    """``count`` of the experts, from ``first`` on."""

    def __init__(self, first=0, count=EXPERTS):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        up, down = torch.randn(EXPERTS, DIM, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, DIM, generator=g)
        self.up, self.down = (nn.Parameter(0.4 * w[first : first + count].clone()) for w in (up, down))

    def forward(self, x, gates):
        return torch.einsum("eth,ehd,te->td", torch.einsum("td,edh->eth", x, self.up).relu(), self.down, gates)


class Moe(nn.Module):
    """A router, and experts on ``comm``'s axis ``ep``: all of its ranks see all tokens, and add up what comes of them."""

    def __init__(self, comm):
        super().__init__()
        self.comm, self.n, mine = comm, comm.mesh.axis_size("ep"), comm.mesh.coord("ep", comm.rank)
        self.first, self.count = mine * EXPERTS // self.n, EXPERTS // self.n
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(self.first, self.count)

    def forward(self, x):
        hidden = self.norm(x)
        top = self.router(hidden).topk(2, dim=-1)
        gates = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, top.indices, top.values.softmax(-1))
        everyone = fs.collectives.all_gather_last(torch.cat([hidden, gates], -1).T, self.comm, "ep").T
        out = self.experts(everyone[:, :DIM], everyone[:, DIM + self.first :][:, : self.count])
        return x + fs.collectives.reduce_scatter_last(out.T, self.comm, "ep").T


class Sparse(Dense):
    def __init__(self, comm, checkpointed=None):
        super().__init__(checkpointed)
        self.layers = nn.ModuleList([Moe(comm) for _ in range(2)])


EP = fs.Mesh({"dp": 2, "ep": 2})
ALONE = fs.SingleComm(fs.Mesh({"dp": 1, "ep": 1}))
PLACES = {
    "ddp": (fs.ddp("dp", "ep"), fs.ddp("dp").varying("ep"), None),
    "zero1": (fs.zero1("dp", "ep"), fs.zero1("dp").varying("ep"), None),
    "zero2": (fs.zero2("dp", "ep"), fs.zero2("dp").varying("ep"), None),
    "zero2, experts zero3, checkpointed": (fs.zero2("dp", "ep"), fs.zero3("dp").varying("ep"), False),
    "zero3": (fs.zero3("dp", "ep"), fs.zero3("dp").varying("ep"), None),
    "zero3, checkpointed": (fs.zero3("dp", "ep"), fs.zero3("dp").varying("ep"), False),
    "hsdp, experts zero2": (fs.hsdp("dp", "ep"), fs.zero2("dp").varying("ep"), None),
    "hfsdp, experts zero1": (fs.hfsdp("dp", "ep"), fs.zero1("dp").varying("ep"), None),
}


def mixture(comm, name):
    dense, sparse, checkpointed = PLACES[name]
    model = fs.shard_module(
        make(Sparse, comm, checkpointed),
        mesh=comm,
        strategy={"**": dense, "**.experts": sparse},
        units=[Moe, Experts],
        policy=DebugPolicy(poison=True),
    )
    return model, modules.batches(comm, STEPS, size=8 // comm.mesh.size)


@every(2, name=PLACES)
def test_experts_with_an_axis_of_their_own(name):
    """The same norms (of all experts), and the same parameters, as with all experts in one module."""

    def rank_fn(comm):
        model, data = mixture(comm, name)
        norms = run(model, data, clip=0.2)
        return norms, dict(model.named_full_parameters()), model.scheduled_step.num_unscheduled_calls

    expected, norms = alone(Sparse, ALONE, clip=0.2)
    assert all(norm > 0.2 for norm in norms)
    found = simulate(EP, rank_fn)
    for mine, _, recordings in found:
        close(mine, norms)
        assert recordings == 1
    together = dict(found[0][1])
    for path in [path for path in together if ".experts." in path]:
        together[path] = torch.cat([found[rank][1][path] for rank in EP.group("ep", 0)])
    close({path: together[path] for path in expected}, expected)


class Picky(nn.Module):
    """Experts of which some, or all, get no token in a step, each as it is told: they return early then."""

    def __init__(self, comm):
        super().__init__()
        self.ranks, n = comm, comm.mesh.axis_size("ep")
        self.dense, self.first, self.count = nn.Linear(DIM, DIM), comm.mesh.coord("ep", comm.rank) * EXPERTS // n, EXPERTS // n
        self.experts = self.Own(self.first, self.count)

    class Own(nn.Module):
        def __init__(self, first, count):
            super().__init__()
            g = torch.Generator().manual_seed(5)
            self.w = nn.ParameterList(list(torch.randn(EXPERTS, DIM, generator=g))[first : first + count])

        def forward(self, x, used):
            if not any(used):
                return torch.zeros_like(x)
            return sum(x * w for w, is_used in zip(self.w, used) if is_used)

    def forward(self, x, used):
        hidden = self.dense(x)
        everyone = fs.collectives.all_gather_last(hidden.T, self.ranks, "ep").T
        out = self.experts(everyone, used[self.first :][: self.count])
        return (hidden + fs.collectives.reduce_scatter_last(out.T, self.ranks, "ep").T).square().mean()


USED = {
    "one coordinate never": "1100 1100 1100 1100",
    "now and then": "1011 0010 1111 0001",
    "none at all": "1111 0000 1010 1111",
}
"""For each of four steps, which of the four experts are used."""
USED = {plan: [[used == "1" for used in step] for step in steps.split()] for plan, steps in USED.items()}


@every(2, plan=USED, sparse=["zero3", "ddp", "zero1"])
def test_experts_without_tokens(plan, sparse):
    """Nobody waits for them, and an torch optimizer leaves them alone, each by itself."""
    adamw = {"lr": 0.05, "weight_decay": 0.1}

    def data(steps):
        g = torch.Generator().manual_seed(2)
        return [torch.randn(8, DIM, generator=g) for _ in range(steps)]

    def rank_fn(comm):
        places = {"**": fs.zero3("dp", "ep"), "experts": getattr(fs, sparse)("dp").varying("ep")}
        model = fs.shard_module(
            make(Picky, comm), mesh=comm, strategy=places, units=[Picky.Own], policy=DebugPolicy(poison=True)
        )
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **adamw)
        for x, used in zip(data(4), USED[plan]):
            model(x.chunk(4)[comm.rank], used).backward()
            for i, w in enumerate(model.experts.w):
                assert (w.grad is not None) == used[model.first + i]
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.named_full_parameters()), model.scheduled_step.num_unscheduled_calls

    alone = make(Picky, ALONE)
    optimizer = torch.optim.AdamW(alone.parameters(), **adamw)
    for x, used in zip(data(4), USED[plan]):
        optimizer.zero_grad()
        alone(x, used).backward()
        optimizer.step()
    expected = modules.detached(alone)
    for rank, (found, recordings) in enumerate(simulate(EP, rank_fn)):
        first = EP.coord("ep", rank) * EXPERTS // 2
        for name, value in found.items():
            if name.startswith("experts"):
                name = f"experts.w.{first + int(name.rsplit('.', 1)[1])}"
            close(value, expected[name])
        assert recordings == 1


def test_one_rank_s_values_are_taken_by_those_that_share_them():
    class Kept(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.w = nn.Parameter(torch.full((5,), value))
            self.register_buffer("first", torch.tensor(value))
            self.register_buffer("wide", torch.tensor([value]).expand(3))

    def rank_fn(comm):
        model = nn.ModuleDict({"dense": Kept(float(comm.rank)), "experts": Kept(float(comm.rank))})
        places = {"dense": fs.zero3("dp", "ep"), "experts": fs.zero3("dp").varying("ep")}
        model = fs.shard_module(model, mesh=comm, strategy=places, units=[Kept], sync_from=1)
        whole = dict(model.named_full_parameters())
        return [
            (whole[f"{name}.w"].unique().tolist(), model[name].first.item(), model[name].wide.tolist())
            for name in ("dense", "experts")
        ]

    found = simulate(EP, rank_fn)
    for rank, (dense, experts) in enumerate(found):  # rank 1 is (dp=0, ep=1); who has ep=0 takes from rank 0
        assert dense == ([1.0], 1.0, [1.0] * 3)
        own = float(EP.coord("ep", rank))
        assert experts == ([own], own, [own] * 3)


def test_experts_on_the_meta_device_are_drawn_for_each_coordinate():
    def rank_fn(comm):
        model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
        places = {"0": fs.zero3("dp", "ep"), "1": fs.zero3("dp").varying("ep")}
        return dict(fs.shard_module(model, mesh=comm, strategy=places, units=["0", "1"], key=5).named_full_parameters())

    small, large = simulate(fs.Mesh({"dp": 1, "ep": 2}), rank_fn), simulate(EP, rank_fn)
    assert torch.equal(small[0]["0.weight"], small[1]["0.weight"])
    assert not torch.equal(small[0]["1.weight"], small[1]["1.weight"])
    for rank in range(4):
        assert_same(large[rank], small[rank % 2])


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    model.scale.weight = nn.Parameter(distribute_tensor(model.scale.weight.detach(), mesh, [Replicate()]))
    return model


def wrapped(comm, strategy, *args, **options):
    grid = init_device_mesh("cpu", comm.mesh.shape, mesh_dim_names=comm.mesh.names)
    model = tensor_parallel(make(Dense, *args), grid["tp"])
    return fs.shard_module(model, mesh=grid["dp"], strategy=strategy, units=[Mlp], policy=DebugPolicy(poison=True), **options)


def my_batches(comm, steps):
    """Ranks of one data-parallel coordinate have the same."""
    at = comm.mesh.coord("dp", comm.rank)
    return [(x.chunk(2)[at], y.chunk(2)[at]) for x, y in modules.batches(None, steps)]


def alone(kind=Dense, *args, clip=None):
    model = make(kind, *args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for x, y in modules.batches(None, STEPS):
        model(x, y)["loss"].backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return modules.detached(model), norms


def run(model, data, clip=None):
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    norms = []
    for x, y in data:
        model(x, y)["loss"].backward()
        if clip:
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norms.append(model.clip_grad_norm_(clip))
            close(total, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return norms


KINDS = [("zero1", None), ("zero2", False), ("zero3", None), ("zero3", True)]
OTHERS = [("ddp", None), ("zero3", False)]


def sharded_over_the_other_axis(comm, kinds=KINDS):
    result = {}
    for name, checkpointed in kinds:
        model = wrapped(comm, getattr(fs, name)("dp"), checkpointed)
        norms = run(model, my_batches(comm, STEPS), clip=0.2)
        result[name, checkpointed] = dict(model.named_full_parameters()), norms, model.scheduled_step.num_unscheduled_calls
    return result, model.layers[0].up.weight.local.numel(), list(model.layers[0].up.weight.full_shape)


def an_infinity_on_one_rank(comm):
    """Ranks of another tensor-parallel coordinate leave the step out too, though they do not shard with that one."""
    model = wrapped(comm, fs.zero3("dp"))
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = fs.GradScaler("cpu", init_scale=4.0)
    before = dict(model.named_full_parameters())
    scaler.scale(model(*my_batches(comm, 1)[0])["loss"]).backward()
    grad = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.local.numel())
    if comm.rank == 3:
        grad.local.view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(dict(model.named_full_parameters()), before)
    return scaler.get_scale()


def whole_again(comm):
    model = wrapped(comm, fs.zero3("dp"))
    with model.unsharded(write=True):
        weight = model.layers[0].up.weight
        kind = type(weight), weight.placements, list(weight.shape), list(weight.to_local().shape)
        with torch.no_grad():
            weight.mul_(2)
        state = {name: type(each) for name, each in model.state_dict().items()}  # whole, as its names have DTensors
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    for ask in (model.state_dict, optimizer.state_dict, optimizer.state_template, lambda: model.load_state_dict(state)):
        with pytest.raises(TreeError, match=r"parameter 'layers.0.up.weight' is a DTensor with the placements \[Shard"):
            ask()
    fn, params = model.functional()
    x, _ = my_batches(comm, 1)[0]
    out = fn(params, x, comm=model.comm)
    with torch.no_grad():
        torch.testing.assert_close(out, model(x))
    return kind, state, dict(model.named_full_parameters())["layers.0.up.weight"]


def refused_dtensors(comm):
    grid = init_device_mesh("cpu", comm.mesh.shape, mesh_dim_names=comm.mesh.names)
    with pytest.raises(MeshError, match=r"'scale.weight' is a DTensor on .*tp.*its ranks \[.*\] would.*mesh=device_mesh"):
        fs.shard_module(tensor_parallel(make(), grid["tp"]))
    with pytest.raises(MeshError, match=r"along \['dp', 'tp'\]"):
        fs.shard_module(tensor_parallel(make(), grid["tp"]), mesh=grid)
    meta = nn.Linear(4, 4, device="meta")
    meta.weight = nn.Parameter(DTensor.from_local(torch.empty(2, 4, device="meta"), grid["tp"], [Shard(0)]))
    with pytest.raises(TreeError, match="'weight' is a DTensor on the meta device"):
        fs.shard_module(meta, mesh=grid["dp"])
    with pytest.raises(LayoutError, match=r"'layers.0.up.weight' is sharded: this rank holds \d+ of the 48"):
        wrapped(comm, fs.zero3("dp")).layers[0].up.weight.view(-1)
    return True


@pytest.fixture(scope="module")
def on_the_grid():
    """What each program has found on each rank, in one start of the processes."""
    programs = (sharded_over_the_other_axis, an_infinity_on_one_rank, whole_again, refused_dtensors)
    found = processes(GRID, lambda comm: {program.__name__: program(comm) for program in programs})
    return {program.__name__: [each[program.__name__] for each in found] for program in programs}


def assert_sharded_over_the_other_axis(results):
    expected, norms = alone(clip=0.2)
    assert all(norm > 0.2 for norm in norms)
    assert sum(held for _, held, _ in results) == HIDDEN * DIM, "each element rests once"
    for result, _, shape in results:
        assert shape == [HIDDEN, DIM]
        for found, mine, recordings in result.values():
            close({name: found[name] for name in expected}, expected)
            close(mine, norms)
            assert recordings == 1


def test_dtensors_are_sharded_over_the_other_axis(on_the_grid):
    results = on_the_grid["sharded_over_the_other_axis"]
    assert_sharded_over_the_other_axis(results)
    for result, *_ in results:
        assert_same(result["zero1", None][0], result["zero3", None][0])


@pytest.mark.deep
def test_dtensors_under_other_strategies():
    assert_sharded_over_the_other_axis(processes(GRID, lambda comm: sharded_over_the_other_axis(comm, OTHERS)))


@pytest.mark.deep
def test_dtensors_under_hybrid_strategies():
    """Two axes to shard over, one that is tensor-parallel: eight ranks."""

    def rank_fn(comm):
        grid = init_device_mesh("cpu", comm.mesh.shape, mesh_dim_names=comm.mesh.names)
        at = 2 * comm.mesh.coord("outer", comm.rank) + comm.mesh.coord("inner", comm.rank)
        data = [(x.chunk(4)[at], y.chunk(4)[at]) for x, y in modules.batches(None, STEPS)]
        result = {}
        for name in ("hsdp", "hfsdp", "zero3"):
            strategy = getattr(fs, name)("outer", "inner")
            model = fs.shard_module(
                tensor_parallel(make(), grid["tp"]), mesh=grid["outer", "inner"], strategy=strategy, units=[Mlp]
            )
            norms = run(model, data, clip=0.2)
            result[name] = dict(model.named_full_parameters()), norms
        return result

    expected, norms = alone(clip=0.2)
    for result in processes(fs.Mesh({"outer": 2, "inner": 2, "tp": 2}), rank_fn):
        for found, mine in result.values():
            close({name: found[name] for name in expected}, expected)
            close(mine, norms)


def test_all_ranks_leave_out_a_step_of_which_one_has_an_infinity(on_the_grid):
    assert on_the_grid["an_infinity_on_one_rank"] == [2.0] * 4


def test_whole_parameters_are_dtensors_again(on_the_grid):
    for kind, state, value in on_the_grid["whole_again"]:
        assert kind == (DTensor, (Shard(0),), [HIDDEN, DIM], [HIDDEN // 2, DIM])
        assert {name for name, each in state.items() if each is not torch.Tensor} >= {"layers.0.up.weight"}
        assert torch.equal(value, 2 * make().layers[0].up.weight.detach())


def test_dtensors_that_cannot_be_sharded_are_refused(on_the_grid):
    assert all(on_the_grid["refused_dtensors"])
