"""per_sample_norms against a loop of torch.autograd.grad over samples on the unsharded model."""

from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsharp as fs
from fsharp.errors import LayoutError, LossError
from fsharp.testing import simulate
from tests.gpt_like import block, embed, make_batches, make_params
from tests.ranks import on_ranks
from tests.scheduling import every

MESHES = {
    "one rank": (fs.Mesh({"dp": 1}), fs.zero3("dp")),
    "ddp": (fs.Mesh({"dp": 3}), fs.ddp("dp")),
    "zero2": (fs.Mesh({"dp": 3}), fs.zero2("dp")),
    "zero3": (fs.Mesh({"dp": 3}), fs.zero3("dp")),
    "hfsdp": (fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner")),
}
SIZES = (5, 0, 3, 4)
"""Samples of each rank."""


def make_tree(dtype=torch.float32):
    """Uneven, a scalar, a leaf tied within a unit, one tied between units, and one that is not trained."""
    tree = make_params(dtype=dtype)
    tree["head"] = {"w": tree["embed"], "b": tree["head"]["b"], "frozen": torch.ones(3, dtype=dtype)}
    return tree


def make_layout(tree, mesh, strategy, **kwargs):
    return fs.plan(tree, mesh, strategy, units=["layers.*", "embed", "head"], frozen="head.frozen", **kwargs)


def head(p, x):
    return x @ p["w"].T * p["frozen"].sum() + p["b"]


def model(forward, p, tokens):
    """The first layer is used twice, the table at both ends."""
    x = forward(embed, p["embed"], tokens)
    for layer in (*p["layers"], p["layers"][0]):
        x = forward(block, layer, x)
    return forward(head, p["head"], x, ties=[p["embed"]])


def loss_fn(params, batch, comm, **options):
    def forward(fn, unit, *args, ties=()):
        return fs.forward(fn, unit, *args, comm=comm, ties=ties, **options)

    losses = F.cross_entropy(model(forward, params, batch["x"]).float(), batch["y"], reduction="none")
    return fs.Loss((losses * batch["w"]).sum(), batch["w"].sum())


def plain(fn, unit, *args, ties=()):
    return fn(unit, *args)


def batch_of(rank):
    return {name: x[: SIZES[rank]] for name, x in make_batches(1, max(SIZES), seed=rank + 1)[0].items()}


def sample_gradients(tree, batch):
    """One sample after the other, the table's first; tied leaves are one tensor."""
    params = optree.tree_map(lambda x: x.clone().requires_grad_(), tree)
    for layer in params["layers"]:
        layer["t"] = layer["s"]
    params["head"]["w"] = params["embed"]
    leaves = zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True)
    own = {id(x): x for path, x in leaves if path[-1] != "frozen"}
    for x, y, w in zip(batch["x"], batch["y"], batch["w"], strict=True):
        loss = w * F.cross_entropy(model(plain, params, x[None]).float(), y[None])
        yield torch.autograd.grad(loss, list(own.values()))


def expected_norms(tree, batch):
    norms = [torch.cat([g.flatten() for g in grads]).double().norm() for grads in sample_gradients(tree, batch)]
    return torch.tensor(norms, dtype=torch.float64)


@every(2, name=MESHES, chunk_size=[None, 2], scheduled=[False, True])
@on_ranks(lambda name: MESHES[name][0])
def test_norms_are_those_of_a_loop_over_samples(comm, name, chunk_size, scheduled):
    mesh, strategy = MESHES[name]
    tree = make_tree()
    layout = make_layout(tree, mesh, strategy)
    norms = fs.per_sample_norms(loss_fn, chunk_size=chunk_size)
    params = fs.shard(tree, layout, comm)
    run = fs.Scheduler(comm)(norms) if scheduled else lambda *args: norms(*args, comm=comm)
    results = [run(params, batch_of(comm.rank)) for _ in range(3 if scheduled else 1)]
    expected = expected_norms(tree, batch_of(comm.rank))
    for got in results:
        assert (got.dtype, len(got)) == (torch.float32, SIZES[comm.rank])
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def run_on_ranks(norms, tree, layout):
    """``(rank, norms, CountingComm)`` of each rank."""

    def rank_fn(comm):
        counting, params = fs.collectives.CountingComm(comm), fs.shard(tree, layout, comm, dtype="compute")
        return comm.rank, norms(params, batch_of(comm.rank), comm=counting), counting

    return simulate(layout.mesh, rank_fn)


BFLOAT16 = fs.Precision(main=torch.float32)


def test_bfloat16_parameters_with_float32_main_copies():
    tree = make_tree(torch.bfloat16)
    layout = make_layout(tree, *MESHES["zero3"], precision=BFLOAT16)
    for rank, got, _ in run_on_ranks(fs.per_sample_norms(loss_fn), tree, layout):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected_norms(tree, batch_of(rank)), rtol=2e-2, atol=1e-2)


def test_uses_are_added_in_the_accumulation_dtype():
    """``1 + 2 ** -10`` is 1 in bfloat16."""
    params = single({"b": torch.ones(4, dtype=torch.bfloat16)}, precision=BFLOAT16)

    def loss(params, batch, comm):
        return sum(fs.forward(lambda p, x: (p["b"] * x).sum(), params, x, comm=comm).float() for x in batch)

    batch = [torch.full((1, 1), x, dtype=torch.bfloat16) for x in (1.0, 2.0**-10)]
    got = fs.per_sample_norms(loss)(params, batch, comm=fs.SingleComm())
    torch.testing.assert_close(got, torch.tensor([2 + 2.0**-9]), rtol=1e-6, atol=0)


def single(tree, **kwargs):
    layout = fs.plan(tree, fs.Mesh({"dp": 1}), fs.zero3("dp"), **kwargs)
    return fs.shard(tree, layout, fs.SingleComm(), dtype="compute")


def test_two_gathers_a_use_and_no_reduction():
    def kept(params, batch, comm):
        return loss_fn(params, batch, comm, release=False)

    tree = make_tree()
    layout = make_layout(tree, *MESHES["zero3"])
    ways = [run_on_ranks(fs.per_sample_norms(fn), tree, layout) for fn in (loss_fn, kept)]
    for released, held in zip(*ways, strict=True):
        assert {call.op for call in released[2].calls} == {"all_gather"}
        assert released[2].num_calls == 2 * held[2].num_calls
        assert torch.equal(released[1], held[1])


class Watched(fs.collectives.CountingComm):
    """How many gathered storages are alive whenever another one is gathered."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gathered, self.counts = [], []

    def all_gather(self, x, axis, *, label=""):
        self.counts.append(sum(not ref.expired() for ref in self.gathered))
        out = super().all_gather(x, axis, label=label)
        self.gathered.append(StorageWeakRef(out.untyped_storage()))
        return out


def tower(params, x, comm, **options):
    for unit in params:
        x = fs.forward(lambda p, x: torch.tanh(x @ p["w"]), unit, x, comm=comm, **options)
    return x.sum()


@pytest.mark.parametrize("release", [True, False])
def test_gathered_parameters_do_not_pile_up(release):
    tree = [{"w": torch.randn(8, 8)} for _ in range(4)]
    mesh = fs.Mesh({"dp": 2})
    layout = fs.plan(tree, mesh, fs.zero3("dp"), units="*")

    def rank_fn(comm):
        watched, params = Watched(comm), fs.shard(tree, layout, comm)
        fs.per_sample_norms(partial(tower, release=release))(params, torch.ones(3, 8), comm=watched)
        return watched.counts

    expected = [0] * 8 if release else [0, 0, 1, 2]  # the first unit's input has no gradient: its weight is not saved
    assert simulate(mesh, rank_fn) == [expected] * 2


class LiveBytes(TorchDispatchMode):
    """The most bytes that results of operations have had at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = x.untyped_storage()
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {ref: nbytes for ref, nbytes in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return out


def test_gradients_of_one_unit_at_a_time():
    """Beside the activations less than three units' gradients for each sample; those of all units would be twelve."""
    layers, width, count = 12, 32, 16
    params = single([{"w": torch.randn(width, width)} for _ in range(layers)], units="*")
    with LiveBytes() as live:
        fs.per_sample_norms(tower)(params, torch.ones(count, width), comm=fs.SingleComm())
    activations, gradients = layers * count * width * 4, count * width * width * 4
    assert gradients < live.most < 2 * activations + 3 * gradients


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_random_functions(randomness):
    def loss(params, x, comm):
        return fs.forward(lambda p, x: (F.dropout(x, 0.5) @ p["w"]).sum(), params, x, comm=comm)

    params, batch = single({"w": torch.ones(64, 1)}), torch.ones(8, 64)
    norms = fs.per_sample_norms(loss, randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            norms(params, batch, comm=fs.SingleComm())
    else:
        found = norms(params, batch, comm=fs.SingleComm()).unique()  # by the numbers of elements that are kept
        assert (len(found) == 1) == (randomness == "same")


def refused(loss, batch, match, error=LossError, tree=None, layout=None):
    """The collectives before the error, on each rank."""
    tree = tree or make_tree()
    layout = layout or make_layout(tree, *MESHES["zero3"])

    def norms(params, _, comm):
        with pytest.raises(error, match=match):
            fs.per_sample_norms(loss)(params, batch, comm=comm)

    return [counting.num_calls for *_, counting in run_on_ranks(norms, tree, layout)]


BATCH = make_batches(1, 4)[0]
REFUSED = {
    "two sizes": (loss_fn, {**BATCH, "w": torch.ones(3)}, r"shapes \[\[3\], \[4\], \[4\]\]"),
    "a scalar": (loss_fn, {**BATCH, "w": torch.ones(())}, r"shapes \[\[\], \[4\], \[4\]\]"),
    "no tensor": (loss_fn, {"x": 3}, r"shapes \[\]"),
    "no parameter": (lambda p, b, comm: b["w"].sum(), BATCH, r"per_sample_norms\(\): the loss has no gradient"),
    "an aux": (lambda p, b, comm: (b["w"].sum(), {}), BATCH, "loss is dict.* has_aux=True to value_and_grad"),
    "no scalar": (lambda p, b, comm: b["w"], {"w": torch.ones(4, 2)}, r"norms\(\): the loss is torch.float32\[1, 2\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_collective(name):
    assert refused(*REFUSED[name]) == [0] * 3


def test_units_that_vary_are_refused_before_any_collective():
    mesh = fs.Mesh({"dp": 2, "ep": 2})
    tree = {"dense": torch.ones(4), "experts": torch.ones(4)}
    strategies = {"**": fs.zero3("dp", "ep"), "experts": fs.zero3("dp").varying("ep")}
    layout = fs.plan(tree, mesh, strategies, units="*")
    assert refused(loss_fn, BATCH, r"(?s)unit +'experts'.*varies +ep", LayoutError, tree, layout) == [0] * 4


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_units_in_the_batch_are_no_samples(chunk_size):
    """A teacher's parameters, each of whose buffers has another size than the batch."""

    def distance(params, batch, comm):
        return fs.forward(
            lambda p, x: (p[0]["w"] - p[1]["w"] + x).square().sum(), [params, batch["teacher"]], batch["x"], comm=comm
        )

    def rank_fn(comm):
        student, teacher = ({"w": w} for w in (torch.arange(3.0), torch.ones(3)))
        layout = fs.plan(student, comm.mesh, fs.zero3("dp"))
        params, batch = (
            fs.shard(student, layout, comm),
            {"teacher": fs.shard(teacher, layout, comm), "x": torch.arange(4.0)[:, None]},
        )
        return fs.per_sample_norms(distance, chunk_size=chunk_size)(params, batch, comm=comm)

    expected = torch.stack([2 * (torch.arange(3.0) - 1 + x).norm() for x in range(4)])
    for norms in simulate(fs.Mesh({"dp": 2}), rank_fn):
        torch.testing.assert_close(norms, expected)


def test_a_chunk_of_no_sample_is_refused():
    with pytest.raises(LossError, match="chunk_size is 0"):
        fs.per_sample_norms(loss_fn, chunk_size=0)


def test_parameters_that_are_differentiated_in_another_way_are_refused():
    def penalty(params, batch, comm):
        return loss_fn(params, batch, comm)[0] + params["layers"][0].buffers[0].square().sum()

    def inner_gradient(params, batch, comm):
        g = torch.func.grad(lambda p: loss_fn(p, batch, comm)[0])(params)
        return loss_fn(params, batch, comm)[0] + fs.layouts.units_of(g)[0].buffers[0].square().sum()

    refused(penalty, BATCH, r"units \['layers.0'\] were differentiated for all samples together")
    refused(inner_gradient, BATCH, r"'embed'.* were differentiated for all samples together")


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_a_step_that_clips_by_sample_has_the_same_bits_when_scheduled(name):
    """Norms, then an ordinary gradient of weighted losses, each of which is that of one sample under vmap."""
    mesh, strategy = MESHES[name]
    tree = make_tree()
    layout = make_layout(tree, mesh, strategy)
    tx = fs.optim.sgd(0.1, momentum=0.9)

    def batch_for(rank):
        return make_batches(1, 4, seed=rank)[0] | {"w": torch.ones(4)}

    def clipped(params, batch, comm):
        def one(sample):
            return loss_fn(params, {name: x[None] for name, x in sample.items()}, comm)[0]

        weights = (0.5 / batch["norms"]).clamp(max=1)
        return (torch.vmap(one)({name: batch[name] for name in "xyw"}) * weights).sum(), len(weights)

    def step(state, batch, comm):
        norms = fs.per_sample_norms(loss_fn)(state.params, batch, comm=comm)
        state, metrics = fs.train_step(clipped, tx)(state, {**batch, "norms": norms}, comm)
        return state, metrics.loss

    def rank_fn(comm):
        batch, found, first = batch_for(comm.rank), [], None
        for run in (partial(step, comm=comm), fs.Scheduler(comm)(step)):
            state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
            losses = []
            for _ in range(4):
                state, loss = run(state, batch)
                losses.append(loss)
                first = fs.full_tree(state.params, comm=comm)["embed"] if first is None else first
            found.append([*losses, *optree.tree_leaves(fs.full_tree(state.params, comm=comm))])
        assert all(map(torch.equal, *found))
        return first

    total = torch.zeros_like(tree["embed"])
    for rank in range(mesh.size):
        for grads in sample_gradients(tree, batch_for(rank)):
            norm = torch.cat([g.flatten() for g in grads]).norm()
            total += grads[0] * min(1.0, 0.5 / float(norm))
    for got in simulate(mesh, rank_fn):
        torch.testing.assert_close(got, tree["embed"] - 0.1 * total / (4 * mesh.size), rtol=1e-5, atol=1e-6)
