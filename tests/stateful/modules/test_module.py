"""ShardedModule: the same numbers as the functional path and as the module alone, in the words of torch."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError, LossError, ScheduleError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import ADAMW, Block, Net, alone, close, descend, each_strategy, train, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every


@every(7, kind=modules.KINDS, strategy=STRATEGIES)
def test_as_the_module_alone(strategy, kind):
    """To rounding: losses are means of the ranks' ones, and parameters are the same."""
    mesh = STRATEGIES[strategy][0]

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy, kind)
        losses = train(model, optimizer, modules.batches(comm, 4, size=8 // comm.mesh.size))
        return losses, values(model), model.scheduled_step.num_unscheduled_calls, model.calls

    losses, params = alone(kind, 4)
    found = simulate(mesh, rank_fn)
    for _, mine, recordings, calls in found:
        close(mine, params)
        assert recordings == 1
        assert calls == 4
    close([sum(column) / mesh.size for column in zip(*(losses for losses, *_ in found))], losses)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "NAdam": (torch.optim.NAdam, {"foreach": False}),
}


@every(2, name=OPTIMIZERS, strategy=["zero1", "zero3"])
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
        close(mine, modules.detached(model))


@on_ranks(fs.Mesh({"dp": 1}))
def test_no_step_without_gradients(comm):
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
    with pytest.raises(ScheduleError, match="not summed over ranks yet"):
        [p.grad for p in model.parameters()]
    with pytest.raises(LossError, match="were inside of accumulate"):
        optimizer.step()
    model(x, y)["loss"].backward()
    optimizer.step()
    assert any(not torch.equal(values(model)[name], each) for name, each in before.items())


@each_strategy
@on_ranks(DP)
def test_evaluation_and_hooks_and_methods(comm, strategy):
    """In between, under no_grad, and of a part of the model alone. The class and its attributes are the module's own."""
    (model, optimizer), (expected, other) = wrap(comm, strategy), wrap(comm, strategy)
    assert isinstance(model, Net)
    assert isinstance(model.layers[0], Block)
    assert type(model).__name__ == "Net"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in modules.make().named_parameters()]
    seen, net = [], modules.make()
    model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    for x, y in modules.batches(comm, 3):
        net.load_state_dict(values(expected), strict=False)
        model.eval()
        with torch.no_grad():
            scores = model(x)
            assert_same((scores, model.layers[0](scores[:, :6])), (net(x), net.layers[0](scores[:, :6])))
        model.train()
        train(model, optimizer, [(x, y)])
        train(expected, other, [(x, y)])
    assert_same(values(model), values(expected))
    assert len(seen) == 6


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
    modules.assert_trains_as_alone("zero3", train, count=3, units=units)


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "twice"])
def test_blocks_are_gathered_while_the_ones_before_compute(kind):
    """The root has parameters of its own and is in use all the time: that is no reason not to look ahead."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, "zero3", kind)
        train(model, optimizer, modules.batches(comm, 2))
        return model.scheduled_step.schedule

    schedule = simulate(DP, rank_fn)[0]
    gathers = [op for op in schedule.ops if op.kind == "gather" and op.phase != "update" and op.unit.startswith("layers.")]
    waits = {op.after[0]: op.event_index for op in schedule.ops if op.kind == "wait" and op.after}
    assert len(gathers) >= 3
    assert all(waits[schedule.ops.index(op)] > op.event_index for op in gathers)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_functional_shares_memory_and_is_transformed(strategy):
    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy)
        train(model, optimizer, modules.batches(comm, 2))
        fn, params = model.functional()
        [(x, y)] = modules.batches(comm, 1)
        grads = torch.func.grad(lambda params: fn(params, x, y, comm=comm)["loss"])(params)
        held = {b.untyped_storage().data_ptr() for node in fs.layouts.units_of(params) for b in node.buffers}
        shown = {p.local.untyped_storage().data_ptr() for p in model.parameters() if p.local.numel()}
        return values(model), fs.full_tree(grads, comm=comm), shown <= held, (x, y)

    results = simulate(DP, rank_fn)
    for mine, grads, shares, _ in results:
        assert shares
        model = modules.make()
        model.load_state_dict(mine, strict=False)
        for *_, (x, y) in results:  # what is differentiated is the sum over ranks
            model(x, y)["loss"].backward()
        paths, leaves, _ = fs.functional.tree.paths.flatten_with_paths(grads)
        close(dict(zip(paths, leaves)), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("kind", ["adapted", "frozen", "tied"])
@each_strategy
@on_ranks(DP)
def test_trained_parameters_alone_are_exported_and_nothing_else_is_gathered(comm, strategy, kind):
    counting = fs.collectives.CountingComm(comm)
    model, optimizer = wrap(counting, strategy, kind)
    train(model, optimizer, modules.batches(comm, 2))
    counting.calls.clear()
    every, before = values(model), counting.nbytes
    counting.calls.clear()
    trained = dict(model.named_full_parameters(trained=True))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(trained) == sorted(names, key=list(trained).index)
    assert set(trained) == set(names)
    assert_same(trained, {name: every[name] for name in names})
    all_alike = kind == "tied" or strategy in ("ddp", "zero1", "zero2")
    assert counting.nbytes == before if all_alike else counting.nbytes < before


@each_strategy
@on_ranks(DP)
def test_unsharded(comm, strategy):
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
    changed = {"head.weight": before["head.weight"] * 2, "layers.1.gain": torch.full((), 3.0)}
    assert_same(after, {**before, **changed})


@on_ranks(DP)
def test_unsharded_parameters_are_replaced_and_loaded(comm):
    model, _ = wrap(comm, "zero3")
    other = modules.make(seed=7)
    with model.unsharded(write=True):
        model.load_state_dict(other.state_dict(), assign=True)
        model.head.bias = nn.Parameter(torch.full((modules.VOCAB,), 5.0))
    expected = {**dict(other.named_parameters()), "head.bias": torch.full((modules.VOCAB,), 5.0)}
    assert_same(values(model), {name: p.detach() for name, p in expected.items()})


@pytest.mark.parametrize("kind", ["blocks", "lstm"])
def test_it_goes_when_nobody_has_it(kind):
    """Without the collector's help."""

    def rank_fn(comm):
        gc.collect()
        gc.disable()
        try:
            net = modules.make() if kind == "blocks" else nn.LSTM(3, 4)
            model = fs.shard_module(net, mesh=comm, strategy=fs.zero1("dp"), policy=DebugPolicy(poison=True))
            optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
            for x, y in modules.batches(comm, 3):
                loss = model(x, y)["loss"] if kind == "blocks" else model(torch.ones(2, 1, 3))[0].sum()
                descend(loss, optimizer)
                del loss
            held = [weakref.ref(x) for x in (model, optimizer, model.__dict__["_fsharp"][0], model.scheduled_step.scheduler)]
            del model, optimizer, net
            return [ref() is not None for ref in held]
        finally:
            gc.enable()

    assert simulate(fs.Mesh({"dp": 1}), rank_fn) == [[False] * 4]


def test_a_printed_module_shows_its_units():
    def rank_fn(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LayerNorm(4))
        return repr(fs.shard_module(model, mesh=comm, strategy=fs.hsdp("outer", "inner"), units=["0.0"])).splitlines()

    unit = "unit(parameters inner:Shard, outer:Replicate; optimizer inner:Shard, outer:Replicate)"
    assert simulate(fs.Mesh({"outer": 2, "inner": 2}), rank_fn)[0] == [
        "Sequential(",
        f"  {unit}",
        "  (0): Sequential(",
        f"    (0): Linear(in_features=4, out_features=4, bias=True, {unit})",
        "    (1): ReLU()",
        "  )",
        "  (1): LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)",
        ")",
    ]


@on_ranks(fs.Mesh({"dp": 2}))
def test_lists_and_dicts_of_parameters_are_printed_as_those_of_torch(comm):
    """LoRA of an embedding and IA3 have these; PEFT prints modules in disable_adapter()."""

    def make():
        a, b = torch.ones(4, 3), torch.ones(5)
        return nn.ModuleList([nn.ParameterList([a, b]), nn.ParameterDict({"a": a, "b": b})])

    model = fs.shard_module(make(), mesh=comm)
    for sharded, plain in zip(model, make(), strict=True):
        assert repr(sharded) == repr(plain)
    with pytest.raises(LayoutError, match=r"type\(\)"):
        model[0][0].type(torch.float64)
