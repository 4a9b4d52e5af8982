"""ShardedModule: the same numbers as the functional path and as the module alone, in the words of torch."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError, LossError, PatternError, ScheduleError, TreeError
from fsharp.testing import processes, simulate
from tests import modules
from tests.modules import Block, Net
from tests.scheduling import DP, STRATEGIES, assert_same, every

each_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def wrap(comm, strategy, kind="plain", *, units=(Block,), optimizer=torch.optim.AdamW, **options):
    """A sharded model and its optimizer."""
    strategy = STRATEGIES[strategy][1] if isinstance(strategy, str) else strategy
    model = fs.shard_module(
        modules.make(kind), mesh=comm, strategy=strategy, units=units and list(units), policy=fs.Policy(poison=True), **options
    )
    return model, fs.ShardedOptimizer(model.parameters(), optimizer, **ADAMW)


def values(model):
    """All parameters in full, by name."""
    whole = dict(model.full_parameters())
    return {name: whole[name] for name, _ in model.named_parameters()}


def train(model, optimizer, data, *, parts=1):
    """Losses of some steps in the usual loop, each of some microbatches."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts))):
            if i < parts - 1:
                with model.accumulate():
                    (model(xs, ys)["loss"] / parts).backward()
                continue
            loss = model(xs, ys)["loss"] / parts
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def alone(kind, steps, **options):
    """The module trained by itself, on the batches of both ranks."""
    model = modules.make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, **options})
    losses = []
    for x, y in modules.batches(None, steps):
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every(2, kind=modules.KINDS, strategy=STRATEGIES)
def test_as_the_module_alone(strategy, kind):
    """To rounding: losses are means of the ranks' ones, and parameters are the same."""
    mesh = STRATEGIES[strategy][0]

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy, kind)
        losses = train(model, optimizer, modules.batches(comm, 4, size=8 // comm.mesh.size))
        return losses, values(model), model.step.num_recordings, model.calls

    losses, params = alone(kind, 4)
    found = simulate(mesh, rank_fn)
    for _, mine, recordings, calls in found:
        close(mine, params)
        assert recordings == 1
        assert calls == 4
    close([sum(column) / mesh.size for column in zip(*(losses for losses, *_ in found))], losses)


def functional(comm, strategy, steps, parts):
    """The same training as a pure function, blocking; its parameters in full, by name."""
    model, _ = wrap(comm, strategy)
    call, params = model.functional()
    tx = fs.optim.adamw(ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
    state = fs.init_state(tx, params, comm=comm)

    def loss_fn(params, batch, comm):
        return call(params, *batch, comm=comm)["loss"]

    step = fs.train_step(loss_fn, tx, microbatches=parts)
    for batch in modules.batches(comm, steps):
        state, _ = step(state, batch, comm)
    paths, leaves, _ = fs.functional.layout.paths.flatten(fs.full(state.params, comm=comm))
    return dict(zip(paths, leaves))


@pytest.mark.parametrize("parts", [1, 2])
@each_strategy
def test_the_same_bits_as_the_functional_path(strategy, parts):
    def rank_fn(comm):
        expected = functional(comm, strategy, 3, parts)
        model, _ = wrap(comm, strategy)
        optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(ADAMW["lr"], weight_decay=ADAMW["weight_decay"]))
        train(model, optimizer, modules.batches(comm, 3), parts=parts)
        return values(model), expected

    for mine, expected in simulate(DP, rank_fn):
        assert_same(mine, expected)


# What torch's users write


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "NAdam": (torch.optim.NAdam, {"foreach": False}),
}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_groups_and_a_schedule(name, strategy):
    kind, options = OPTIMIZERS[name]

    def run(model, make, data):
        groups = [
            {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")], "weight_decay": 0.1},
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 3e-2},
        ]
        optimizer = make(groups, lr=1e-2, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for x, y in data:
            optimizer.zero_grad()
            loss = optimizer.step(partial(closure, model, x, y))
            schedule.step()
        return loss.detach(), optimizer.param_groups[1]["lr"]

    def closure(model, x, y):
        loss = model(x, y)["loss"]
        loss.backward()
        return loss

    def rank_fn(comm):
        model = fs.shard_module(modules.make(), mesh=comm, strategy=STRATEGIES[strategy][1], units=[Block])
        result = run(model, lambda groups, **options: fs.ShardedOptimizer(groups, kind, **options), modules.batches(comm, 4))
        return result, values(model)

    model = modules.make()
    _, lr = run(model, kind, modules.batches(None, 4))
    for (_, found), mine in simulate(DP, rank_fn):
        assert found == lr
        close(mine, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, None])
@each_strategy
def test_training_goes_on_with_the_state_of_an_optimizer(strategy, kind, groups):
    def make(model):
        if kind is None:
            return fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))
        by_bias = [[p for n, p in model.named_parameters() if n.endswith("bias") is way] for way in (True, False)]
        params = [{"params": each} for each in by_bias] if groups else model.parameters()
        return fs.ShardedOptimizer(params, kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}), lr=1e-2)

    def rank_fn(comm):
        data = modules.batches(comm, 4)
        straight, _ = wrap(comm, strategy)
        train(straight, make(straight), data)
        model, _ = wrap(comm, strategy)
        optimizer = make(model)
        train(model, optimizer, data[:2])
        saved, whole = optimizer.state_dict(), values(model)
        again, _ = wrap(comm, strategy)
        with again.unsharded(write=True), torch.no_grad():
            for name, parameter in again.named_parameters():
                parameter.copy_(whole[name])
        optimizer = make(again)
        optimizer.load_state_dict(saved)
        train(again, optimizer, data[2:])
        return values(straight), values(again)

    for expected, mine in simulate(DP, rank_fn):
        assert_same(mine, expected)


@pytest.mark.parametrize("within", [True, False])
@each_strategy
def test_backward_passes_add_up(strategy, within):
    """In ``accumulate()`` or not, as one backward of the sum; and forwards may all come before the backward."""

    def rank_fn(comm):
        (one, optimizer), (other, second) = wrap(comm, strategy), wrap(comm, strategy)
        grads = []
        for (x1, y1), (x2, y2) in zip(modules.batches(comm, 4)[::2], modules.batches(comm, 4)[1::2]):
            if within:
                with one.accumulate():
                    one(x1, y1)["loss"].backward()
            else:
                one(x1, y1)["loss"].backward()
            one(x2, y2)["loss"].backward()
            first, last = other(x1, y1)["loss"], other(x2, y2)["loss"]
            (first + last).backward()
            grads.append([[p.grad.local.clone() for p in model.parameters()] for model in (one, other)])
            optimizer.step()
            second.step()
        return grads, values(one), values(other)

    for grads, mine, others in simulate(DP, rank_fn):
        for a, b in grads:
            close(a, b)
        close(mine, others)


def test_no_step_without_gradients():
    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3")
        before, (x, y) = values(model), modules.batches(comm, 1)[0]
        optimizer.step()
        model(x, y)
        optimizer.step()
        model(x, y)["loss"].backward()
        optimizer.zero_grad()
        optimizer.step()
        assert_same(values(model), before)
        with model.accumulate():
            model(x, y)["loss"].backward()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(LossError, match="were told to accumulate"):
            optimizer.step()
        model(x, y)["loss"].backward()
        optimizer.step()
        assert any(not torch.equal(values(model)[name], each) for name, each in before.items())

    simulate(fs.Mesh({"dp": 1}), rank_fn)


@each_strategy
def test_clipping(strategy):
    def rank_fn(comm):
        model, _ = wrap(comm, strategy)
        [(x, y)] = modules.batches(comm, 1)
        model(x, y)["loss"].backward()
        norm = model.clip_grad_norm_(0.1)
        return norm, fs.optim.global_norm(model.__dict__["_fsharp"][0].means.tree, comm=comm)

    model = modules.make()
    [(x, y)] = modules.batches(None, 1)
    model(x, y)["loss"].backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for norm, after in simulate(DP, rank_fn):
        close(norm, expected)
        close(after, torch.tensor(0.1))


@each_strategy
def test_evaluation_and_hooks_and_methods(strategy):
    """In between, under no_grad, and of a part of the model alone. The class and its attributes are the module's own."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        assert isinstance(model, Net)
        assert isinstance(model.layers[0], Block)
        assert type(model).__name__ == "Net"
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in modules.make().named_parameters()]
        seen = []
        model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.shape))
        scores = []
        for x, y in modules.batches(comm, 3):
            model.eval()
            with torch.no_grad():
                scores.append(model(x))
                scores.append(model.layers[0](scores[-1][:, :6]))
            model.train()
            train(model, optimizer, [(x, y)])
        return scores, values(model), len(seen)

    def reference(comm):
        model, optimizer = wrap(comm, strategy)
        scores = []
        for x, y in modules.batches(comm, 3):
            with model.unsharded():
                net = modules.make()
                net.load_state_dict({name: p.clone() for name, p in model.named_parameters()}, strict=False)
            scores.append(net(x).detach())
            scores.append(net.layers[0](scores[-1][:, :6]).detach())
            train(model, optimizer, [(x, y)])
        return scores, values(model), 6

    for found, expected in zip(simulate(DP, rank_fn), simulate(DP, reference)):
        assert_same(found, expected)


@pytest.mark.parametrize(
    "units",
    [
        None,
        [Block, nn.Embedding],
        ["layers.*", nn.Linear],
        lambda path, module: path.endswith(".up"),
        [Block, nn.LayerNorm, "head"],
    ],
    ids=["none", "classes", "nested", "predicate", "nested, apart"],
)
def test_any_units(units):
    def rank_fn(comm):
        model = fs.shard_module(modules.make(), mesh=comm, strategy=fs.zero3("dp"), units=units)
        optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        train(model, optimizer, modules.batches(comm, 3))
        return values(model)

    for mine in simulate(DP, rank_fn):
        close(mine, alone("plain", 3)[1])


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "twice"])
def test_blocks_are_gathered_while_the_ones_before_compute(kind):
    """The root has parameters of its own and is in use all the time: that is no reason not to look ahead."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3", kind)
        train(model, optimizer, modules.batches(comm, 2))
        return model.step.schedule

    schedule = simulate(DP, rank_fn)[0]
    gathers = [op for op in schedule.ops if op.kind == "gather" and op.phase != "update" and op.unit.startswith("layers.")]
    waits = {op.after[0]: op.at for op in schedule.ops if op.kind == "wait" and op.after}
    assert len(gathers) >= 3
    assert all(waits[schedule.ops.index(op)] > op.at for op in gathers)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_lower_precision(strategy):
    """bfloat16 to compute, float32 for the optimizer: as near to float32 as bfloat16 is."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy, precision=fs.Precision(compute=torch.bfloat16, main=torch.float32))
        seen = []
        model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        train(model, optimizer, modules.batches(comm, 3))
        return values(model), set(seen)

    for mine, seen in simulate(DP, rank_fn):
        assert seen == {torch.bfloat16}
        torch.testing.assert_close(mine, alone("plain", 3)[1], rtol=0.1, atol=0.03)


# Crossing over


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_functional_shares_memory_and_is_transformed(strategy):
    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        train(model, optimizer, modules.batches(comm, 2))
        fn, params = model.functional()
        [(x, y)] = modules.batches(comm, 1)
        grads = torch.func.grad(lambda params: fn(params, x, y, comm=comm)["loss"])(params)
        held = {b.untyped_storage().data_ptr() for node in fs.units_of(params) for b in node.buffers}
        shown = {p.local.untyped_storage().data_ptr() for p in model.parameters() if p.local.numel()}
        return values(model), fs.full(grads, comm=comm), shown <= held, (x, y)

    results = simulate(DP, rank_fn)
    for mine, grads, shares, _ in results:
        assert shares
        model = modules.make()
        model.load_state_dict(mine, strict=False)
        for *_, (x, y) in results:  # what is differentiated is the sum over ranks
            model(x, y)["loss"].backward()
        paths, leaves, _ = fs.functional.layout.paths.flatten(grads)
        close(dict(zip(paths, leaves)), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("kind", ["adapted", "frozen", "tied"])
@each_strategy
def test_trained_parameters_alone_are_exported_and_nothing_else_is_gathered(strategy, kind):
    def rank_fn(comm):
        counting = fs.CountingComm(comm)
        model, optimizer = wrap(counting, strategy, kind)
        train(model, optimizer, modules.batches(comm, 2))
        counting.calls.clear()
        every, before = values(model), counting.nbytes
        counting.calls.clear()
        trained = dict(model.full_parameters(trained=True))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert list(trained) == sorted(names, key=list(trained).index)
        assert set(trained) == set(names)
        assert_same(trained, {name: every[name] for name in names})
        return before, counting.nbytes, kind == "tied" or strategy in ("ddp", "zero1", "zero2")

    for whole, trained, all_alike in simulate(DP, rank_fn):
        assert trained == whole if all_alike else trained < whole


@each_strategy
def test_unsharded(strategy):
    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy, precision=fs.Precision(compute=torch.bfloat16, main=torch.float32))
        [(x, y)] = modules.batches(comm, 1)
        before = values(model)
        with model.unsharded(write=True), torch.no_grad():
            assert model.head.weight.shape == (modules.VOCAB, modules.DIM)
            model.head.weight.mul_(2)
            model.layers[1].gain.fill_(3.0)
        with model.unsharded():
            model.head.bias.data.fill_(7.0)  # and is not kept
        after = values(model)
        train(model, optimizer, [(x, y)])
        return before, after

    for before, after in simulate(DP, rank_fn):
        changed = {"head.weight": before["head.weight"] * 2, "layers.1.gain": torch.full((), 3.0)}
        assert_same(after, {**before, **changed})


class Gain(nn.Module):
    """Has a parameter and initializes it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(modules.DIM))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)

    def forward(self, x):
        return x * self.gain


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_module_on_the_meta_device(strategy):
    """Values depend on the key alone, not on the mesh, the strategy or the units."""

    def rank_fn(comm, strategy, units, key=3):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(5, modules.DIM), Gain(), nn.Linear(modules.DIM, 3, bias=False))
        model = fs.shard_module(net, mesh=comm, strategy=strategy, units=units, key=key)
        return values(model)

    [expected] = simulate(fs.Mesh({"dp": 1}), lambda comm: rank_fn(comm, fs.ddp("dp"), None))
    for mine in simulate(fs.Mesh({"dp": 3}), lambda comm: rank_fn(comm, getattr(fs, strategy)("dp"), [nn.Linear])):
        assert_same(mine, expected)
    [other] = simulate(fs.Mesh({"dp": 1}), lambda comm: rank_fn(comm, fs.ddp("dp"), None, key=4))
    assert all(not torch.equal(other[name], each) and each.std() > 0 for name, each in expected.items())


def test_a_module_on_the_meta_device_that_nothing_initializes():
    with torch.device("meta"):
        net = Net()
    with pytest.raises(TreeError, match=r"that nothing initializes\.\n  \(root\)    Net: calls\n  layers\.0  Block: gain"):
        fs.shard_module(net, mesh=fs.SingleComm())


# What is refused


def refused(comm, strategy="zero3"):
    model, optimizer = wrap(comm, strategy)
    [(x, y)] = modules.batches(comm, 1)
    return model, optimizer, x, y


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (
            lambda m, x: F.linear(torch.ones(2, 6), m.head.weight),
            r"'head\.weight' is sharded: this rank holds \d+ of the 66 elements",
        ),
        (lambda m, x: m.head.weight + 1, r"'head\.weight' is sharded"),
        (lambda m, x: m.head(torch.ones(2, 6)), r"'head\.weight' is sharded.*linear\(\)"),
        (lambda m, x: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), r"gradient of 'embed\.weight' is sharded"),
        (lambda m, x: torch.optim.SGD(m.parameters(), lr=1.0).step(), r"'embed\.weight' is sharded.*ShardedOptimizer"),
        (
            lambda m, x: setattr(m.head.weight, "data", torch.zeros(11, 6)),
            r"'head\.weight' rests in memory of its ShardedModule",
        ),
        (lambda m, x: setattr(m.head.weight, "grad", torch.zeros(3)), r"'head\.weight': its gradient is the module's"),
        (lambda m, x: m.half(), r"cannot be moved or cast: unit .* is torch\.float32 on cpu, asked for torch\.float16"),
        (lambda m, x: m.to("meta"), r"asked for torch\.float32 on meta"),
        (lambda m, x: fs.shard_module(m), "one of a ShardedModule already"),
        (lambda m, x: fs.ShardedOptimizer(m.parameters(), torch.optim.LBFGS), r"LBFGS computes the loss several"),
        (
            lambda m, x: fs.ShardedOptimizer(modules.make().parameters(), torch.optim.SGD),
            r"parameter 0 is a Parameter of shape \[11, 6\]",
        ),
        (lambda m, x: fs.ShardedOptimizer([], torch.optim.SGD), "no parameters"),
    ],
)
def test_refused(act, match):
    def rank_fn(comm):
        model, _, x, y = refused(comm)
        model(x, y)["loss"].backward()
        with pytest.raises((LayoutError, TreeError), match=match):
            act(model, x)

    simulate(DP, rank_fn)


def test_units_that_match_nothing():
    comm = fs.SingleComm()
    with pytest.raises(PatternError, match=r"Conv2d matches no module of Net\. Classes of modules in it: Block, Embedding"):
        fs.shard_module(modules.make(), mesh=comm, units=[nn.Conv2d])
    with pytest.raises(PatternError, match=r"'blocks\.\*' matches no module"):
        fs.shard_module(modules.make(), mesh=comm, units="blocks.*")
    net = modules.make()
    net.layers.append(nn.Identity())
    with pytest.raises(PatternError, match=r"module 'layers\.3', a Identity, has no parameters to gather"):
        fs.shard_module(net, mesh=comm, units="layers.*")
    assert type(net) is Net
    assert not isinstance(net.head.weight, fs.ShardedParameter)


def test_names_that_it_would_hide():
    net = modules.make()
    net.step = 3
    with pytest.raises(TreeError, match="would hide step of Net"):
        fs.shard_module(net, mesh=fs.SingleComm())
    assert net.step == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_parameters_say_what_the_whole_ones_are(strategy):
    """Whoever sorts parameters by their dims, or counts them, gets the same as without sharding."""
    expected = [
        (n, p.shape, p.ndim, p.dim(), p.numel(), p.size(-1) if p.ndim else 0, p.stride())
        for n, p in modules.make().named_parameters()
    ]

    def rank_fn(comm):
        model, _ = wrap(comm, strategy)
        every = model.named_parameters()
        found = [(n, p.shape, p.ndim, p.dim(), p.numel(), p.size(-1) if p.ndim else 0, p.stride()) for n, p in every]
        assert found == expected
        assert len(model.embed.weight) == modules.VOCAB
        [(x, y)] = modules.batches(comm, 1)
        model(x, y)["loss"].backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        return sum(p.local.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())

    held = simulate(DP, rank_fn)
    assert sum(mine for mine, _ in held) == held[0][1] * (2 if strategy == "ddp" else 1)


def test_what_is_derived_from_a_part_is_one():
    def rank_fn(comm):
        model, *_ = refused(comm, "zero3")
        for derive in (lambda p: p, lambda p: p.detach(), lambda p: p.data, lambda p: p.data.detach()):
            for use in (
                torch.sum,
                torch.clone,
                lambda p: p.T,
                lambda p: p.norm(),
                lambda p: p + 1,
                lambda p: p.view(-1),
                torch.Tensor.tolist,
            ):
                with (
                    torch.no_grad(),
                    pytest.raises(LayoutError, match=r"'head.weight' is sharded: this rank holds \d+ of the"),
                ):
                    use(derive(model.head.weight))
        whole = fs.shard_module(modules.make(), mesh=comm, strategy=fs.ddp("dp")).head.weight
        with torch.no_grad():
            assert torch.equal(whole.detach().T.sum(), modules.make().head.weight.sum())

    simulate(DP, rank_fn)


def test_changes_behind_its_back():
    def rank_fn(comm):
        model, _, x, y = refused(comm, "zero1")
        with torch.no_grad():
            model.head.weight.local.mul_(2)
        with pytest.raises(ScheduleError, match=r"the parameters of unit 'head' were changed in place since the last step"):
            model(x, y)

    simulate(DP, rank_fn)


def test_calls_at_the_wrong_time():
    def rank_fn(comm):
        model, optimizer, x, y = refused(comm)
        with pytest.raises(ScheduleError, match="there are no gradients"):
            model.clip_grad_norm_(1.0)
        loss = model(x, y)["loss"]
        loss.backward()
        with pytest.raises(ScheduleError, match="a step is under way"), model.unsharded():
            pass
        pending = model(x, y)["loss"]
        with pytest.raises(ScheduleError, match="between a forward and its backward"):
            optimizer.zero_grad()
        pending.backward()
        optimizer.step()

    simulate(fs.Mesh({"dp": 1}), rank_fn)


def test_an_error_in_a_forward_leaves_the_module_as_it_was():
    def rank_fn(comm):
        model, optimizer, x, y = refused(comm)
        train(model, optimizer, [(x, y)] * 2)
        with pytest.raises(IndexError):
            model(x + modules.VOCAB, y)
        assert all(isinstance(p, fs.ShardedParameter) for p in model.parameters())
        train(model, optimizer, [(x, y)] * 2)
        return values(model)

    expected = modules.make()
    optimizer = torch.optim.AdamW(expected.parameters(), **ADAMW)
    [(x, y)] = modules.batches(fs.SingleComm(), 1)
    for _ in range(4):
        optimizer.zero_grad()
        expected(x, y)["loss"].backward()
        optimizer.step()
    [mine] = simulate(fs.Mesh({"dp": 1}), rank_fn)
    close(mine, {name: p.detach() for name, p in expected.named_parameters()})


def test_in_processes():
    """The same bits as simulated, one by one, with everything that is asynchronous."""

    def rank_fn(comm):
        found = {}
        for strategy in ("ddp", "zero1", "zero3"):
            model, optimizer = wrap(comm, strategy)
            found[strategy] = train(model, optimizer, modules.batches(comm, 4), parts=2), values(model)
        return found

    for mine, expected in zip(processes(DP, rank_fn), simulate(DP, rank_fn)):
        assert_same(mine, expected)


# What its users do besides


def both(use, strategy, *, steps=2, optimizer=torch.optim.AdamW):
    """``use(model, x, y)``, which ends with gradients, on a sharded model and on the module alone: the same parameters."""

    def rank_fn(comm):
        model, opt = wrap(comm, strategy, optimizer=optimizer)
        for x, y in modules.batches(comm, steps):
            use(model, x, y)
            opt.step()
            opt.zero_grad()
        return values(model)

    whole = modules.make()
    opt = optimizer(whole.parameters(), **ADAMW)
    for x, y in modules.batches(None, steps):
        use(whole, x, y)
        opt.step()
        opt.zero_grad()
    for mine in simulate(DP, rank_fn):
        close(mine, {name: p.detach() for name, p in whole.named_parameters()})


def two_losses(model, x, y):
    first, second = model(x, y)["loss"], model(x, y.flip(0) * 0)["loss"]
    first.backward()
    second.backward()


def one_graph_twice(model, x, y):
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def of_inputs_first(model, x, y):
    hidden = F.one_hot(x, modules.DIM * 2)[:, : modules.DIM].float().requires_grad_()
    (slope,) = torch.autograd.grad(model.layers[0](hidden).sum(), hidden)
    assert slope.abs().sum() > 0
    model(x, y)["loss"].backward()


def zeroed_in_between(model, x, y):
    loss = model(x, y)["loss"]
    model.zero_grad()
    loss.backward()


USES = [two_losses, one_graph_twice, of_inputs_first, zeroed_in_between]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@each_strategy
def test_backward_passes(use, strategy):
    both(use, strategy)


class Carrier:
    """No pytree."""

    def __init__(self, hidden):
        self.hidden = hidden


class Deep(nn.Linear):
    """Returns an object, its weight, or nothing of its result."""

    way = ""

    def forward(self, x, found):
        out = super().forward(x)
        if self.way == "object":
            return Carrier(out)
        if self.way == "weight":
            return out, self.weight
        if self.way == "list":
            found.append(out.square().mean())
        if self.way == "attribute":
            self.aux = out.square().mean()
        return out


class Wide(nn.Module):
    """A root around :class:`Deep`."""

    def __init__(self, way):
        super().__init__()
        self.deep, self.last = Deep(4, 4), nn.Linear(4, 4)
        self.deep.way = way

    def forward(self, x):
        found = []
        out = self.deep(x, found)
        if self.deep.way == "object":
            return Carrier(self.last(out.hidden))
        if self.deep.way == "weight":
            return self.last(out[0]).mean() + out[1].square().sum()
        if self.deep.way == "attribute":
            self.last(out)
            return None
        return self.last(out).mean() + sum(found)


@pytest.mark.parametrize("way", ["object", "weight", "list", "attribute"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_modules_return_and_fill(way, strategy):
    def steps(model, optimizer):
        for i in range(3):
            out = model(torch.linspace(0, 1, 12).view(3, 4) + i)
            loss = {"object": lambda: out.hidden.square().sum(), "attribute": lambda: model.deep.aux}.get(way, lambda: out)()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def make():
        with modules._seeds:
            torch.manual_seed(0)
            return Wide(way)

    def rank_fn(comm):
        model = fs.shard_module(
            make(), mesh=comm, strategy=STRATEGIES[strategy][1], units=[Deep], policy=fs.Policy(poison=True)
        )
        steps(model, fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
        return values(model)

    whole = make()
    steps(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    for mine in simulate(DP, rank_fn):
        close(mine, {name: p.detach() for name, p in whole.named_parameters()})


class Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("bad luck")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_error_in_a_backward(strategy):
    """Until zero_grad there is no step; then all is as if nothing had been."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        expected, other = wrap(comm, strategy)
        for i, (x, y) in enumerate(modules.batches(comm, 4)):
            if i == 2:
                hook = model.layers[1].register_forward_pre_hook(lambda module, args: Fails.apply(args[0]))
                with pytest.raises(ZeroDivisionError):
                    model(x, y)["loss"].backward()
                hook.remove()
                with pytest.raises(LossError, match="an error has cost the gradients"):
                    optimizer.step()
            train(model, optimizer, [(x, y)])
            train(expected, other, [(x, y)])
        return values(model), values(expected)

    for mine, expected in simulate(DP, rank_fn):
        assert_same(mine, expected)


def test_an_error_that_costs_gradients_is_not_passed_over():
    def rank_fn(comm):
        model, optimizer, x, y = refused(comm)
        with model.accumulate():
            model(x, y)["loss"].backward()
        pending = model(x, y)["loss"]
        with pytest.raises(IndexError):
            model(x + modules.VOCAB, y)
        with pytest.raises(ScheduleError, match="after the step that used it was over"):
            pending.backward()
        model(x, y)["loss"].backward()
        with pytest.raises(LossError, match="an error has cost the gradients"):
            optimizer.step()
        train(model, optimizer, [(x, y)])

    simulate(fs.Mesh({"dp": 1}), rank_fn)


def test_frozen_modules_pass_gradients_on():
    def rank_fn(comm):
        net = modules.make().requires_grad_(False)
        model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[Block], policy=fs.Policy(poison=True))
        x = torch.linspace(0, 1, 12).view(2, 6).requires_grad_()
        model.layers[1](model.layers[0](x)).sum().backward()
        return x.grad

    net, x = modules.make(), torch.linspace(0, 1, 12).view(2, 6).requires_grad_()
    net.layers[1](net.layers[0](x)).sum().backward()
    for grad in simulate(DP, rank_fn):
        close(grad, x.grad)


REFUSED_WHERE_WHOLE = {
    "an L2 term": (lambda m, o: sum(p.pow(2).sum() for p in m.parameters()), "is used by pow.. outside of the forward"),
    "a part of the model": (lambda m, o: m.head(torch.ones(2, 6)), "'head.weight' is used by linear.. outside"),
    "a hook": (lambda m, o: m.head.weight.register_hook(print), "is used by register_hook"),
    "freezing": (lambda m, o: m.head.requires_grad_(False), "was trained when its module was sharded"),
    "a second optimizer": (lambda m, o: second_step(m, o), "another optimizer of this module has made the step"),
    "more parameters": (lambda m, o: o.add_param_group({"params": []}), "gets all its groups when it is made"),
    "a state dict": (lambda m, o: m.state_dict(), "call it in `with model.unsharded"),
    "loading": (lambda m, o: m.load_state_dict({}), r"call it in `with model.unsharded\(write=True\)"),
    "calling it when unsharded": (lambda m, o: called_when_unsharded(m), "was called inside of unsharded"),
    "clipping too early": (lambda m, o: clipped_too_early(m), "after gradients had been changed"),
    "other parameters": (lambda m, o: m.head.weight.__setattr__("grad", torch.ones(11, 6)), "its gradient is the module's"),
}


def second_step(model, optimizer):
    other = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.step()
    other.step()


def called_when_unsharded(model):
    model.zero_grad()
    with model.unsharded():
        model(torch.zeros(2, dtype=torch.int64))


def clipped_too_early(model):
    model.clip_grad_norm_(0.1)
    model(torch.zeros(2, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("name", REFUSED_WHERE_WHOLE)
def test_refused_where_parameters_are_whole_too(name):
    act, match = REFUSED_WHERE_WHOLE[name]

    def rank_fn(comm):
        model, optimizer, x, y = refused(comm, "ddp")
        model(x, y)["loss"].backward()
        with pytest.raises((LayoutError, TreeError, ScheduleError), match=match):
            act(model, optimizer)

    simulate(DP, rank_fn)


def test_unsharded_parameters_are_replaced_and_loaded():
    def rank_fn(comm):
        model, _ = wrap(comm, "zero3")
        other = modules.make(seed=7)
        with model.unsharded(write=True):
            model.load_state_dict(other.state_dict(), assign=True)
            model.head.bias = nn.Parameter(torch.full((modules.VOCAB,), 5.0))
        return values(model), {**dict(other.named_parameters()), "head.bias": torch.full((modules.VOCAB,), 5.0)}

    for mine, expected in simulate(DP, rank_fn):
        assert_same(mine, {name: p.detach() for name, p in expected.items()})


@pytest.mark.parametrize("kind", ["blocks", "lstm"])
def test_it_goes_when_nobody_has_it(kind):
    """Without the collector's help."""

    def rank_fn(comm):
        gc.collect()
        gc.disable()
        try:
            net = modules.make() if kind == "blocks" else nn.LSTM(3, 4)
            model = fs.shard_module(net, mesh=comm, strategy=fs.zero1("dp"), policy=fs.Policy(poison=True))
            optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
            for x, y in modules.batches(comm, 3):
                loss = model(x, y)["loss"] if kind == "blocks" else model(torch.ones(2, 1, 3))[0].sum()
                loss.backward()
                optimizer.step()
                del loss
            held = [weakref.ref(x) for x in (model, optimizer, model.__dict__["_fsharp"][0], model.step.scheduler)]
            del model, optimizer, net
            return [ref() is not None for ref in held]
        finally:
            gc.enable()

    assert simulate(fs.Mesh({"dp": 1}), rank_fn) == [[False] * 4]
