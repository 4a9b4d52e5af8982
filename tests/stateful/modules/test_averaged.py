"""EMA and steps left out, by a ShardedOptimizer: what they are on the functional path, and how averages are looked at."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import ScheduleError, TreeError
from fsharp.functional.tree.paths import flatten_with_paths, nested_dicts
from tests import modules
from tests.modules import descend, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every, mesh_of

TRANSFORMS = {
    "ema": lambda: fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9),
    "ema of what is skipped": lambda: fs.optim.with_ema(fs.optim.apply_if_finite(fs.optim.adamw(1e-2), 5), decay=0.9),
    "skipped with its ema": lambda: fs.optim.chain(
        fs.optim.clip_by_global_norm(0.5, deterministic=True),
        fs.optim.apply_if_finite(fs.optim.with_ema(fs.optim.adamw(1e-2), decay=0.9), 5),
    ),
}
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


def pair(comm, strategy, tx, **options):
    """A model and an optimizer of an (init, update) pair."""
    model, _ = wrap(comm, strategy, **options)
    return model, fs.ShardedOptimizer(model.parameters(), tx)


def weight(i, comm):
    """Of the loss in a step: infinite in the second one, on the last rank alone."""
    return torch.inf if i == 1 and comm.rank == comm.mesh.size - 1 else 1.0


def train(model, optimizer, comm, steps=4, finite=False):
    """``steps`` of them."""
    for i, (x, y) in enumerate(modules.batches(comm, steps)):
        descend(model(x, y)["loss"] * (1.0 if finite else weight(i, comm)), optimizer)


def averages(model, optimizer):
    """Parameters in full inside of averaged()."""
    with optimizer.averaged():
        return values(model)


def functional(comm, strategy, tx, finite, **options):
    """The same training as a pure function: parameters and averages in full, and the number of steps left out."""
    model, _ = wrap(comm, strategy, **options)
    call, params = model.functional()
    tree = nested_dicts({tuple(name.split(".")): x for name, x in values(model).items()})
    state = fs.init_state(tx, fs.shard(tree, model.layout, comm, place="optim"), comm=comm)
    del params
    step = fs.train_step(lambda params, batch, comm: call(params, *batch[:2], comm=comm)["loss"] * batch[2], tx)
    for i, batch in enumerate(modules.batches(comm, 4)):
        state, _ = step(state, (*batch, 1.0 if finite else weight(i, comm)), comm)
    return {
        name: dict(zip(*flatten_with_paths(fs.full_tree(tree, comm=comm))[:2]))
        for name, tree in {"params": state.params, "ema": found(state.opt)[0]}.items()
    }, found(state.opt)[1]


def found(opt):
    """Average and number of steps left out."""
    opt = opt[1] if type(opt) is tuple else opt
    if hasattr(opt, "total_notfinite"):
        return opt.inner_state.ema, opt.total_notfinite
    return opt.ema, getattr(opt.inner_state, "total_notfinite", 0)


@every(9, strategy=STRATEGIES, name=TRANSFORMS)
@on_ranks(mesh_of)
def test_the_same_bits_as_the_functional_path(comm, strategy, name):
    finite = name == "ema"
    model, optimizer = pair(comm, strategy, TRANSFORMS[name]())
    train(model, optimizer, comm, finite=finite)
    mine = {"params": values(model), "ema": averages(model, optimizer)}
    assert_same(values(model), mine["params"])
    expected, skipped = functional(comm, strategy, TRANSFORMS[name](), finite)
    assert_same(mine, expected)
    assert found(model.train_state.opt)[1] == skipped == (0 if finite else 1)
    assert not torch.equal(mine["ema"]["head.weight"], mine["params"]["head.weight"])


def looked_at(comm, strategy, **options):
    """What the model computes with averages, what a model with these values computes, and whether training goes on."""
    tx = TRANSFORMS["ema"]
    (model, optimizer), (undisturbed, second) = pair(comm, strategy, tx(), **options), pair(comm, strategy, tx(), **options)
    [(x, _)] = modules.batches(comm, 1)
    scores = []
    for _ in range(2):
        train(model, optimizer, comm, 2, finite=True)
        train(undisturbed, second, comm, 2, finite=True)
        with torch.no_grad():
            now = model(x)
            with optimizer.averaged():
                mine, whole = model(x), values(model)
                with model.unsharded():
                    exported = {name: each.clone() for name, each in model.state_dict().items() if name in whole}
                fn, params = model.functional()
                assert_same(fn(params, x, comm=comm), mine)
            assert_same(model(x), now)
        other, _ = wrap(comm, strategy, **options)
        with other.unsharded(write=True):
            other.load_state_dict(exported, strict=False)
        assert_same(exported, whole)
        with torch.no_grad():
            scores.append((mine, other(x), now))
    return scores, values(model), values(undisturbed), model.scheduled_step.num_unscheduled_calls


@pytest.mark.filterwarnings("ignore:.*frozen parameters such as:UserWarning")
@every(
    10,
    strategy=("zero3", "hfsdp", "zero1", "zero2", "ddp"),
    kind=("plain", "tied", "frozen"),
    precision=(fs.Precision(), MIXED),
)
@on_ranks(mesh_of)
def test_a_forward_with_averages(comm, strategy, kind, precision):
    scores, mine, expected, recordings = looked_at(comm, strategy, kind=kind, precision=precision)
    for averaged, as_parameters, now in scores:
        assert_same(averaged, as_parameters)
        assert not torch.equal(averaged, now)
    assert_same(mine, expected)
    assert recordings == 1


@on_ranks(DP)
def test_parameters_without_an_average_stay_as_they_are(comm):
    tx = fs.optim.partition({"bias": fs.optim.sgd(1e-2), "rest": fs.optim.with_ema(fs.optim.sgd(1e-2), decay=0.5)})
    labels = {"**": "rest", "**.bias": "bias"}
    model, optimizer = pair(comm, "zero1", tx, labels=labels)
    train(model, optimizer, comm, 2, finite=True)
    mine, average = values(model), averages(model, optimizer)
    assert {name for name in mine if torch.equal(mine[name], average[name])} == {n for n in mine if n.endswith("bias")}


@on_ranks(DP)
def test_refused(comm):
    model, optimizer = pair(comm, "zero3", TRANSFORMS["ema"]())
    [(x, y)] = modules.batches(comm, 1)
    with optimizer.averaged():
        with pytest.raises(ScheduleError, match=r"called inside of averaged\(\), without torch.no_grad"):
            model(x, y)
        with pytest.raises(ScheduleError, match=r"unsharded\(write=True\): inside of averaged"), model.unsharded(write=True):
            pass
        with pytest.raises(ScheduleError, match=r"averaged\(\): the call is inside of another averaged"), optimizer.averaged():
            pass
    model(x, y)["loss"].backward()
    with pytest.raises(ScheduleError, match=r"averaged\(\): a step is under way"), optimizer.averaged():
        pass
    optimizer.step()
    optimizer.zero_grad()
    for tx in (fs.optim.adamw(1e-2), torch.optim.AdamW):
        another, _ = wrap(comm, "zero3")
        other = fs.ShardedOptimizer(another.parameters(), tx)
        with pytest.raises(TreeError, match="keeps no average"), other.averaged():
            pass
    twice = fs.optim.chain(fs.optim.with_ema(fs.optim.sgd(0.1), decay=0.1), fs.optim.with_ema(fs.optim.sgd(0.1), decay=0.1))
    another, other = pair(comm, "zero3", twice)
    with pytest.raises(TreeError, match=r"several averages of 'embed\.weight'"), other.averaged():
        pass


@on_ranks(DP)
def test_an_error_inside_puts_parameters_back(comm):
    model, optimizer = pair(comm, "zero1", TRANSFORMS["ema"]())
    train(model, optimizer, comm, 2, finite=True)
    before = values(model)
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        raise ZeroDivisionError
    assert_same(values(model), before)
    train(model, optimizer, comm, 1, finite=True)
