"""What is saved under any strategy on any mesh is loaded under any other, to the bit."""

import re
import tempfile
from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st

import fsharp as fs
from fsharp.checkpoint.reading import Reader
from fsharp.errors import AgreementError, CheckpointError, FsharpError, PatternError, TreeError
from fsharp.testing import generate, processes, simulate
from tests.checkpoint.counted import CountingFiles
from tests.gpt_like import loss_fn, make_batches, make_params
from tests.ranks import on_ranks
from tests.scheduling import every

WORLDS = {
    "one": (fs.Mesh({"dp": 1}), fs.zero3("dp"), None),
    "ddp on 2": (fs.Mesh({"dp": 2}), fs.ddp("dp"), "layers.*"),
    "zero1 on 3": (fs.Mesh({"dp": 3}), fs.zero1("dp"), None),
    "zero2 on 2": (fs.Mesh({"dp": 2}), fs.zero2("dp"), ["embed", "head"]),
    "zero3 on 4": (fs.Mesh({"dp": 4}), fs.zero3("dp"), "layers.*"),
    "hsdp on 2 x 2": (fs.Mesh({"outer": 2, "inner": 2}), fs.hsdp("outer", "inner"), "layers.*"),
    "hfsdp on 2 x 3": (fs.Mesh({"outer": 2, "inner": 3}), fs.hfsdp("outer", "inner"), "*"),
}
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


def optimizer():
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, deterministic=True), fs.optim.adamw(1e-2, weight_decay=0.1))
    return fs.optim.with_ema(fs.optim.MultiSteps(tx, 2), decay=0.9)


def layout_of(world, params=None, precision=MIXED, **options):
    mesh, strategy, units = WORLDS[world] if isinstance(world, str) else world
    return fs.plan(params or make_params(), mesh, strategy, units=units, precision=precision, **options)


def state_of(layout, comm, tx):
    return fs.init_state(tx, fs.shard(make_params(), layout, comm, place="optim"), comm=comm)


def updated(state, layout, comm, tx, steps):
    """After some updates with gradients that depend on the step alone."""
    for seed in steps:
        grads = fs.trainable(fs.shard(make_params(seed=seed + 1), layout, comm, place="optim"))
        state = fs.update(tx, grads, state, comm=comm)
    return state


def whole(state, comm):
    """Every tensor of a state, whole, and every number; padding is gone."""
    return optree.tree_leaves(fs.full_tree(state._replace(made_by=None), comm=comm))


def scrambled(tree):
    """The same shapes, other values."""
    return optree.tree_map(lambda x: torch.full_like(x, 77) if isinstance(x, torch.Tensor) else x, tree)


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def assert_moves(root, old, new):
    """A trained state of one world, loaded into another, has its bits, and still has them two updates later."""
    tx = optimizer()

    def save(comm):
        layout = layout_of(old)
        state = updated(state_of(layout, comm, tx), layout, comm, tx, range(3))
        fs.checkpoint.save(root, state, step=state.step, comm=comm)
        return whole(state, comm), whole(updated(state, layout, comm, tx, [3, 4]), comm)

    def load(comm):
        layout = layout_of(new)
        state = fs.checkpoint.load(root, scrambled(state_of(layout, comm, tx)), comm=comm)
        assert state.step == 3
        return whole(state, comm), whole(updated(state, layout, comm, tx, [3, 4]), comm)

    saved, loaded = (simulate(layout_of(world).mesh, act) for world, act in ((old, save), (new, load)))
    assert fs.checkpoint.verify(fs.checkpoint.latest(root).path).step == 3
    assert all(same(a, b) for each in loaded for a, b in zip(saved[0], each, strict=True)), (old, new)


@every(7, old=WORLDS, new=WORLDS)
def test_a_trained_state_of_any_world_loads_into_any_other(tmp_path, old, new):
    assert_moves(tmp_path, old, new)


@settings(max_examples=settings().max_examples // 3)
@given(st.data())
def test_any_tree_in_any_layout(data):
    tree = data.draw(generate.trees())
    old, new = (data.draw(generate.layouts(tree, mesh=generate.meshes(max_ranks=4))) for _ in range(2))
    with tempfile.TemporaryDirectory() as root:

        def save(comm):
            fs.checkpoint.save(root, fs.shard(tree, old, comm), step=0, comm=comm)

        def load(comm):
            like = scrambled(fs.shard(tree, new, comm))
            got, expected = fs.checkpoint.load(root, like, comm=comm), fs.shard(tree, new, comm)
            return optree.tree_leaves(got), optree.tree_leaves(expected)

        simulate(old.mesh, save)
        assert all(same(got, expected) for got, expected in simulate(new.mesh, load))


def test_each_rank_reads_what_it_holds_and_hardly_more(tmp_path, monkeypatch):
    shapes = {f"l{i}": {"w": torch.empty(700, 610), "b": torch.empty(610)} for i in range(4)}
    tx = fs.optim.adamw(1e-3)
    reads = {}

    def counted(reader, needs, **options):
        reader._storage = CountingFiles()
        read(reader, needs, **options)
        held = sum((n.last - n.first) * n.target.element_size() for n in needs)
        reads[held, reader._storage.num_read] = True

    read = Reader.read
    monkeypatch.setattr(Reader, "read", counted)
    for old, new in ((4, 3), (2, 5), (3, 3)):
        worlds = [fs.plan(shapes, fs.Mesh({"dp": n}), fs.zero3("dp"), units="*") for n in (old, new)]
        reads.clear()

        def save(comm, layout=worlds[0]):
            state = fs.init_state(tx, fs.init_params(fs.init.ones, layout, comm, key=0), comm=comm)
            fs.checkpoint.save(tmp_path / f"{old}", state, step=0, comm=comm)

        def load(comm, layout=worlds[1]):
            state = fs.init_state(tx, fs.init_params(fs.init.zeros, layout, comm, key=0), comm=comm)
            fs.checkpoint.load(tmp_path / f"{old}", state, comm=comm)

        simulate(worlds[0].mesh, save)
        simulate(worlds[1].mesh, load)
        assert all(read <= 1.05 * held for held, read in reads), reads


def test_ranks_agree_and_commit_and_plan_nothing(tmp_path):
    def calls(comm, params):
        counting = fs.collectives.CountingComm(comm)
        layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="*")
        tree = fs.shard(params, layout, counting)
        before = counting.num_calls, counting.nbytes
        fs.checkpoint.save(tmp_path, tree, step=len(params), comm=counting)
        saved = counting.num_calls, counting.nbytes
        fs.checkpoint.load(tmp_path, tree, comm=counting)
        loaded = counting.num_calls, counting.nbytes
        return saved[0] - before[0], saved[1] - before[1], loaded[0] - saved[0]

    small, large = ({f"w{i}": torch.ones(9, 5) for i in range(n)} for n in (1, 40))
    few, many = (simulate(fs.Mesh({"dp": 4}), partial(calls, params=params)) for params in (small, large))
    assert few == many  # nothing grows with the tree
    assert few[0] == (5, (3 * 40 + 16 + 24) * 3, 4)


def test_memory_beyond_the_shards_is_bounded(tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocated(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not any(
                isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for x in args
            ):
                self.largest = max(self.largest, out.untyped_storage().nbytes())
            return out

    comm, tree = fs.SingleComm(), {"w": torch.randn(1 << 20), "v": torch.randn(1 << 18)}
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*")
    params = fs.shard(tree, layout, comm)
    fs.checkpoint.save(tmp_path, params, step=0, comm=comm)
    like = scrambled(params)
    addresses = [b.data_ptr() for b in optree.tree_leaves(like)]
    with Allocated() as allocated:
        got = fs.checkpoint.load(tmp_path, like, comm=comm, donate=True, buffer_nbytes=1 << 16)
    assert allocated.largest <= 1 << 16
    assert [b.data_ptr() for b in optree.tree_leaves(got)] == addresses
    assert torch.equal(fs.full_tree(got, comm=comm)["w"], tree["w"])
    with pytest.raises(TreeError, match="donated state"):
        fs.checkpoint.save(tmp_path, like, step=1, comm=comm)


def test_padding_is_zero_in_memory_that_is_given_as_well(tmp_path):
    def run(comm):
        tree = {"w": torch.ones(5)}
        params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
        fs.checkpoint.save(tmp_path, params, step=0, comm=comm)
        got = fs.checkpoint.load(tmp_path, scrambled(params), comm=comm, donate=True)
        return optree.tree_leaves(got)[0].tolist()

    assert simulate(fs.Mesh({"dp": 3}), run) == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]


def test_a_tree_on_the_meta_device_says_what_to_load(tmp_path):
    comm, tree = fs.SingleComm(), {"w": torch.randn(5, 3)}
    params = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
    fs.checkpoint.save(tmp_path, {"params": params, "x": torch.arange(3)}, step=0, comm=comm)
    like = optree.tree_map(lambda x: x.to("meta"), {"params": params, "x": torch.arange(3)})
    got = fs.checkpoint.load(tmp_path, like, comm=comm)
    assert torch.equal(fs.full_tree(got["params"], comm=comm)["w"], tree["w"])
    assert torch.equal(got["x"], torch.arange(3))


VALUES = {
    "count": 3,
    "flag": True,
    "name": "adam",
    "rates": (0.1, float("inf"), float("-inf"), -0.0, 5e-324),
    "none": None,
    "large": 1 << 60,
    "deep": [{"x": [1, 2]}, ()],
}


def test_numbers_and_texts_come_back_as_they_were(tmp_path):
    comm = fs.SingleComm()
    fs.checkpoint.save(tmp_path, VALUES, step=0, comm=comm)
    zero = optree.tree_map(lambda x: type(x)(), VALUES)
    got = fs.checkpoint.load(tmp_path, zero, comm=comm)
    assert repr(got) == repr(VALUES)
    got = fs.checkpoint.load(fs.checkpoint.save(tmp_path, {"x": float("nan")}, step=1, comm=comm), {"x": 0.0}, comm=comm)
    assert got["x"] != got["x"]


DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.float8_e4m3fnuz,
]  # fmt: skip


def test_tensors_of_every_dtype_come_back_to_the_bit(tmp_path):
    comm = fs.SingleComm()
    bits = torch.randint(0, 2, (7, 16), dtype=torch.uint8)
    tree = {str(d): bits.bool() if d is torch.bool else bits.mul(37).view(-1).view(d) for d in DTYPES}
    fs.checkpoint.save(tmp_path, tree, step=0, comm=comm)
    got = fs.checkpoint.load(tmp_path, optree.tree_map(torch.zeros_like, tree), comm=comm)
    assert same(optree.tree_leaves(got), optree.tree_leaves(tree))
    assert [x.dtype for x in optree.tree_leaves(got)] == [x.dtype for x in optree.tree_leaves(tree)]


def test_each_rank_may_have_its_own(tmp_path):
    def run(comm, path):
        own = torch.arange(4) + 10 * comm.rank
        fs.checkpoint.save(path, {"rng": fs.checkpoint.PerRank({"cpu": own})}, step=0, comm=comm)
        like = {"rng": fs.checkpoint.PerRank({"cpu": torch.zeros(4, dtype=torch.int64)})}
        return own, fs.checkpoint.load(path, like, comm=comm)["rng"].value["cpu"], like

    for own, got, _ in simulate(fs.Mesh({"dp": 3}), partial(run, path=tmp_path)):
        assert torch.equal(own, got)
    like = {"rng": fs.checkpoint.PerRank({"cpu": torch.zeros(4, dtype=torch.int64)})}
    with pytest.raises(TreeError, match=r"'rng.cpu' +int64\[3, 4\] in the checkpoint; expected int64\[1, 4\]"):
        fs.checkpoint.load(tmp_path, like, comm=fs.SingleComm())


def test_experts_that_vary_are_one_tensor_along_dim_0(tmp_path):
    """Two experts on each of two ranks are loaded as four on one, or as one on each of four."""

    def layout(n):
        tree = {"experts": torch.zeros(4 // n, 3, 2)}
        return fs.plan(tree, fs.Mesh({"dp": 2, "ep": n}), fs.zero3("dp").varying("ep"))

    def save(comm):
        own = torch.arange(12.0).view(2, 3, 2) + 100 * comm.mesh.coord("ep", comm.rank)
        fs.checkpoint.save(tmp_path, fs.shard({"experts": own}, layout(2), comm), step=0, comm=comm)

    def load(comm):
        n = comm.mesh.axis_size("ep")
        like = fs.shard({"experts": torch.zeros(4 // n, 3, 2)}, layout(n), comm)
        return fs.full_tree(fs.checkpoint.load(tmp_path, like, comm=comm), comm=comm)["experts"]

    simulate(fs.Mesh({"dp": 2, "ep": 2}), save)
    expected = torch.cat([torch.arange(12.0).view(2, 3, 2) + 100 * i for i in range(2)])
    for n in (1, 4):
        mesh = fs.Mesh({"dp": 2, "ep": n})
        got = simulate(mesh, load)
        for rank in range(mesh.size):
            assert torch.equal(got[rank], expected.chunk(n)[mesh.coord("ep", rank)])


def test_a_number_for_a_whole_unit_is_kept_for_each_leaf(tmp_path):
    """As TorchOpt keeps counts: units may be cut otherwise as long as their numbers are equal."""
    tree = {"a": torch.zeros(4), "b": torch.zeros(6)}
    comm = fs.SingleComm()

    def counts(units, *numbers):
        nodes = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units=units), comm)
        values = iter(numbers)
        return fs.layouts.map_units(lambda node: node.replace([torch.tensor([next(values)]) for _ in node.buffers]), nodes)

    fs.checkpoint.save(tmp_path, counts("*", 5, 5), step=0, comm=comm)
    got = fs.checkpoint.load(tmp_path, counts(None, 0), comm=comm)
    assert optree.tree_leaves(got)[0].tolist() == [5]
    fs.checkpoint.save(tmp_path, counts("*", 5, 6), step=1, comm=comm)
    with pytest.raises(CheckpointError, match="'a' was saved with 5, 'b' with 6, and the unit that has both keeps one"):
        fs.checkpoint.load(tmp_path, counts(None, 0), comm=comm)


class Counter:
    """What has a state of its own."""

    def __init__(self, n):
        self.n, self.seen = n, torch.full((2,), float(n))

    def state_dict(self):
        return {"n": self.n, "seen": self.seen}

    def load_state_dict(self, state):
        self.n, self.seen = state["n"], state["seen"]


def test_objects_stand_for_their_states(tmp_path):
    comm = fs.SingleComm()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model, "optimizer": optimizer, "counter": Counter(4)}
    fs.checkpoint.save(tmp_path, saved, step=0, comm=comm)
    other = torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 3)).sum().backward()
    again.step()
    got = fs.checkpoint.load(tmp_path, {"model": other, "optimizer": again, "counter": Counter(0)}, comm=comm)
    assert got["model"] is other
    assert got["counter"].n == 4
    assert torch.equal(got["counter"].seen, torch.full((2,), 4.0))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(again.state[other.weight]["exp_avg_sq"], optimizer.state[model.weight]["exp_avg_sq"])


def test_a_part_of_a_checkpoint(tmp_path):
    comm, tree = fs.SingleComm(), make_params()
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), units="layers.*", precision=MIXED)
    state = state_of(layout, comm, fs.optim.adamw(1e-3))
    fs.checkpoint.save(tmp_path, {"train": state}, step=0, comm=comm)
    got = fs.checkpoint.load(tmp_path, scrambled(state.params), comm=comm, subtree="train.params")
    assert same(optree.tree_leaves(got), optree.tree_leaves(state.params))
    exact = fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm)
    with pytest.raises(TreeError, match=r"(?s)'embed' +bfloat16\[11, 6\] in the checkpoint; expected float32.*cast=True"):
        fs.checkpoint.load(tmp_path, exact, comm=comm, subtree="train.params")
    got = fs.checkpoint.load(tmp_path, exact, comm=comm, subtree="train.params", cast=True)
    assert torch.equal(fs.full_tree(got, comm=comm)["embed"], tree["embed"].bfloat16().float())


def test_a_leaf_of_a_checkpoint(tmp_path):
    comm = fs.SingleComm()
    fs.checkpoint.save(tmp_path, {"a": {"b": torch.arange(3.0)}, "n": 4}, step=0, comm=comm)
    assert torch.equal(fs.checkpoint.load(tmp_path, torch.empty(3), comm=comm, subtree="a.b"), torch.arange(3.0))
    assert fs.checkpoint.load(tmp_path, 0, comm=comm, subtree="n") == 4


def test_a_diff_fits_on_a_screen(tmp_path):
    comm = fs.SingleComm()

    def params(layers):
        tree = {"layers": [{"w": torch.zeros(3, 2), "b": torch.zeros(2)} for _ in range(layers)]}
        return {"params": fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp")), comm), "step": 1}

    fs.checkpoint.save(tmp_path, params(200), step=0, comm=comm)
    with pytest.raises(TreeError, match=r"'params.layers.\*.b' +in the checkpoint alone \(198 of them\)") as caught:
        fs.checkpoint.load(tmp_path, params(2), comm=comm)
    assert len(str(caught.value).splitlines()) < 20
    with pytest.raises(TreeError, match=r"'step' +1 in the checkpoint; expected a value like True"):
        fs.checkpoint.load(tmp_path, params(200) | {"step": True}, comm=comm)
    with pytest.raises(TreeError, match=r"'step' +a number or text in the checkpoint; expected float32\[\]"):
        fs.checkpoint.load(tmp_path, params(200) | {"step": torch.zeros(())}, comm=comm)


def test_ties_may_come_and_go_where_values_do_not_differ(tmp_path):
    comm, shared = fs.SingleComm(), torch.randn(4, 2)

    def params(tree):
        return fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*"), comm)

    tied, untied = {"a": shared, "b": shared}, {"a": shared, "b": shared.clone()}
    fs.checkpoint.save(tmp_path, params(tied), step=0, comm=comm)
    got = fs.full_tree(fs.checkpoint.load(tmp_path, scrambled(params(untied)), comm=comm), comm=comm)
    assert torch.equal(got["b"], shared)
    fs.checkpoint.save(tmp_path, params(untied), step=1, comm=comm)
    assert torch.equal(fs.full_tree(fs.checkpoint.load(tmp_path, scrambled(params(tied)), comm=comm), comm=comm)["b"], shared)


def test_tied_values_that_differ_where_one_rank_alone_looks(tmp_path):
    shared, mesh = torch.randn(4, 2), fs.Mesh({"dp": 2})

    def params(comm, tree):
        return fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*"), comm)

    def run(comm):
        other = shared.clone()
        other[-1, -1] += 1  # rank 1's
        fs.checkpoint.save(tmp_path, params(comm, {"a": shared, "b": other}), step=0, comm=comm)
        with pytest.raises(FsharpError, match="'a' and 'b' are tied, and the checkpoint has different values for them"):
            fs.checkpoint.load(tmp_path, params(comm, {"a": shared, "b": shared}), comm=comm)
        return fs.full_tree(
            fs.checkpoint.load(tmp_path, params(comm, {"a": shared, "b": shared}), comm=comm, ignore="a"), comm=comm
        )

    for got in simulate(mesh, run):
        assert got["a"][-1, -1] == shared[-1, -1] + 1
    assert len(fs.checkpoint.list_checkpoints(tmp_path)) == 1, "other values are no damage"


def test_ignoring_the_owner_of_a_tie_leaves_its_other_names(tmp_path):
    comm, shared = fs.SingleComm(), torch.randn(4, 2)

    def params(tree):
        return fs.shard(tree, fs.plan(tree, comm.mesh, fs.zero3("dp"), units="*"), comm)

    saved = fs.checkpoint.save(tmp_path, params({"old": shared, "x": shared, "y": shared}), step=0, comm=comm)
    assert saved.manifest.aliases == {"x": "old", "y": "old"}
    tied, untied = {"x": shared, "y": shared}, {"x": shared, "y": shared.clone()}
    for tree in (tied, untied):
        got = fs.full_tree(fs.checkpoint.load(tmp_path, scrambled(params(tree)), comm=comm, ignore="old"), comm=comm)
        assert torch.equal(got["x"], shared)
        assert torch.equal(got["y"], shared)
    with pytest.raises(TreeError, match=r"'old' +not in the checkpoint"):
        fs.checkpoint.load(tmp_path, params({"old": shared.clone()} | untied), comm=comm, ignore="old")
    with pytest.raises(TreeError, match=r"'x' +not in the checkpoint"):
        fs.checkpoint.load(tmp_path, params(untied), comm=comm, ignore=["old", "x"])


@pytest.mark.parametrize("donate", [False, True])
def test_new_leaves_keep_the_values_that_were_given(tmp_path, caplog, donate):
    def tree(comm, new=(), seen=0, value=0.0):
        x = {name: torch.zeros(5) + value for name in ("w", "b", *new)}
        return {"p": fs.shard(x, fs.plan(x, comm.mesh, fs.zero3("dp")), comm), "seen": seen, **dict.fromkeys(new, 3)}

    def run(comm):
        old = tree(comm, ("gone",), 7, 1.0)
        fs.checkpoint.save(tmp_path, old | {"plain": torch.ones(2)}, step=0, comm=comm)
        like = tree(comm, ("adapter",), 0, 2.0) | {"own": torch.tensor([4.0])}
        with pytest.raises(FsharpError, match=r"'p.adapter' +not in the checkpoint"):
            fs.checkpoint.load(tmp_path, like, comm=comm)
        got = fs.checkpoint.load(tmp_path, like, comm=comm, strict=False, donate=donate)
        whole = fs.full_tree(got["p"], comm=comm)
        assert {name: set(x.tolist()) for name, x in whole.items()} == {"w": {1.0}, "b": {1.0}, "adapter": {2.0}}
        assert (got["seen"], got["adapter"], got["own"].tolist()) == (7, 3, [4.0])
        with pytest.raises(FsharpError, match=r"'q' +not in the checkpoint"):
            fs.checkpoint.load(tmp_path, {"q": torch.zeros(1)}, comm=comm, strict=False)  # nothing is of this tree
        with pytest.raises(FsharpError, match=r"'own' .*on the meta device: there is no value to keep"):
            fs.checkpoint.load(tmp_path, tree(comm) | {"own": torch.zeros(1, device="meta")}, comm=comm, strict=False)
        with pytest.raises(FsharpError, match=r"'seen' .*expected float32\[1\]"):
            fs.checkpoint.load(tmp_path, tree(comm) | {"seen": torch.zeros(1)}, comm=comm, strict=False)

    simulate(fs.Mesh({"dp": 2}), run)
    [text] = [record.getMessage() for record in caplog.records]
    for name, what in (("p.adapter", "keeps"), ("adapter", "keeps"), ("own", "keeps"), ("p.gone", "alone"), ("plain", "alone")):
        assert re.search(rf"'{name}' .*{what}", text)


def test_a_leaf_that_is_no_longer_frozen_gets_its_main_copy_and_others_keep_theirs(tmp_path):
    comm, tree, tx = fs.SingleComm(), {"a": torch.randn(9), "b": torch.randn(9)}, fs.optim.sgd(0.1)
    precision = fs.Precision(compute=torch.bfloat16, main=torch.float32)

    def state(frozen):
        layout = fs.plan(tree, comm.mesh, fs.zero1("dp"), units="*", frozen=frozen, precision=precision)
        return fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)

    fs.checkpoint.save(tmp_path, {"s": state("b")}, step=0, comm=comm)
    remedy = r"rename=lambda name: \{'s.main.b': 's.params.b'\}.get\(name, name\), with an item for each such leaf"
    with pytest.raises(CheckpointError, match=f"Both are read from one by {remedy}"):
        fs.checkpoint.load(tmp_path, {"s": state(())}, comm=comm, strict=False)
    with pytest.raises(
        TreeError,
        match=f"A main copy is made from its parameter by {remedy}".replace("s.main", "main").replace("s.params", "params"),
    ):
        fs.checkpoint.load(tmp_path, state(()), comm=comm, subtree="s")
    rename = {"main.b": "params.b"}
    got = fs.checkpoint.load(tmp_path, state(()), comm=comm, subtree="s", rename=lambda x: rename.get(x, x), cast=True)
    main = fs.full_tree(got.main, comm=comm)
    assert torch.equal(main["a"], tree["a"]), "no bit of it is rounded"
    assert torch.equal(main["b"], tree["b"].bfloat16().float())


def test_patterns_are_relative_to_the_subtree(tmp_path):
    comm = fs.SingleComm()
    fs.checkpoint.save(tmp_path, {"params": {"w": torch.ones(2), "old": torch.ones(2)}, "n": 1}, step=0, comm=comm)
    like = {"w": torch.zeros(2)}
    assert fs.checkpoint.load(tmp_path, like, comm=comm, subtree="params", ignore="old")["w"].tolist() == [1.0, 1.0]
    with pytest.raises(PatternError, match=r"'params\.old' matches nothing"):
        fs.checkpoint.load(tmp_path, like, comm=comm, subtree="params", ignore="params.old")


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"f": print}, "'f' cannot be in a checkpoint"),
        ({"a.b": 1, "a": {"b": 2}}, "two leaves of the tree have the name 'a.b'"),
        ({"x": torch.zeros(3).to_sparse()}, "'x' is a Tensor of layout torch.sparse_coo"),
        ({"x": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "'x' is a nested tensor of layout torch"),
        ({"fsharp.block_digests": torch.zeros(3)}, "is reserved"),
        ({"r": fs.checkpoint.PerRank({"x": 3})}, "'r.x' is int 3: PerRank is for tensors"),
        ({"q": torch.zeros(2, dtype=torch.int4)}, "'q' has dtype torch.int4"),
        ({"__metadata__": torch.zeros(2)}, "'__metadata__' is reserved"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tree, match):
    with pytest.raises((TreeError, CheckpointError), match=match):
        fs.checkpoint.save(tmp_path, tree, step=0, comm=fs.SingleComm())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "mesh", "match"),
    [
        (
            lambda params: params,
            fs.Mesh({"x": 1}),
            r"unit \(root\) is laid out on Mesh\(dp=1\), and the Comm is on Mesh\(x=1\)",
        ),
        (
            lambda params: params.replace([torch.ones(5)]),
            fs.Mesh({"dp": 1}),
            r"'w' is in a buffer of shape \[5\], expected one value, or one for each of the 3 elements",
        ),
    ],
)
def test_a_unit_that_does_not_fit_is_not_saved(tmp_path, change, mesh, match):
    params = {"w": torch.ones(3)}
    comm = fs.SingleComm()
    params = change(fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm))
    with pytest.raises(TreeError, match=match):
        fs.checkpoint.save(tmp_path, params, step=0, comm=fs.SingleComm(mesh))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("save", "match"),
    [
        (lambda comm, root: fs.checkpoint.save(root, {"x": torch.ones(2) * comm.rank}, step=0, comm=comm), "PerRank"),
        (lambda comm, root: fs.checkpoint.save(root, {"x": print if comm.rank else 1}, step=0, comm=comm), "rank 1 says"),
        (
            lambda comm, root: fs.checkpoint.save(root, {"x": 1}, step=0, comm=comm, config={1, 2}),
            "JSON cannot hold the config",
        ),
        (lambda comm, root: fs.checkpoint.save(root, {"x": 1}, step=-1, comm=comm), "step is -1"),
        (lambda comm, root: fs.checkpoint.save(root, {"x": 1}, step=1 << 62, comm=comm), r"expected .* below 2\*\*62"),
    ],
)
def test_ranks_that_differ_save_nothing(tmp_path, save, match):
    def run(comm):
        with pytest.raises((AgreementError, CheckpointError, TreeError), match=rf"(?s){match}"):
            save(comm, str(tmp_path))

    simulate(fs.Mesh({"dp": 2}), run)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@on_ranks(fs.Mesh({"dp": 2}))
def test_gradients_are_no_state(comm, tmp_path):
    state = state_of(layout_of("ddp on 2"), comm, fs.optim.sgd(0.1))
    batch = {k: x.chunk(2)[comm.rank] for k, x in make_batches(1, 12)[0].items()}
    _, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
    with pytest.raises(TreeError, match="rests partial"):
        fs.checkpoint.save(tmp_path, grads, step=0, comm=comm)


def test_a_scheduler_is_a_comm(tmp_path):
    def run(comm):
        tx, batches = fs.optim.adamw(1e-2), make_batches(4, 8)
        layout = fs.plan(make_params(), comm.mesh, fs.zero3("dp"), units="layers.*", precision=MIXED)
        scheduler = fs.Scheduler(comm)
        step = scheduler(fs.train_step(loss_fn, tx))
        state = state_of(layout, comm, tx)
        batches = [{k: x.chunk(2)[comm.rank] for k, x in batch.items()} for batch in batches]
        for batch in batches[:2]:
            state, _ = step(state, batch)
        fs.checkpoint.save(tmp_path, state, step=2, comm=scheduler)  # what is under way is waited for
        saved = state
        for batch in batches[2:]:
            state, _ = step(state, batch)
        again = fs.checkpoint.load(tmp_path, saved, comm=scheduler)
        for batch in batches[2:]:
            again, _ = step(again, batch)
        return whole(state, comm), whole(again, comm)

    for a, b in processes(fs.Mesh({"dp": 2}), run):
        assert same(a, b)


@pytest.mark.parametrize("metric", [10**400, 10**5000], ids=["400 digits", "5000 digits"])
def test_a_metric_that_no_float_holds_is_refused_on_all_ranks_before_a_file_is_written(metric, tmp_path):
    def rank_fn(comm):
        with pytest.raises(CheckpointError, match=r"save\(\): metric has \d+ bits, which no float holds"):
            fs.checkpoint.save(tmp_path / "new", {"w": torch.ones(2)}, step=1, comm=comm, metric=metric)
        with pytest.raises(AgreementError, match="which no float holds"):
            fs.checkpoint.save(tmp_path / "new", {"w": torch.ones(2)}, step=1, comm=comm, metric=metric if comm.rank else 1)

    simulate(fs.Mesh({"dp": 2}), rank_fn)
    assert not list(tmp_path.glob("new/*"))
