"""Parameters of a module that are written to between steps: every forward sees it, or all ranks hear of it."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import simulate
from tests import modules
from tests.modules import batches, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, assert_same, every

MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def doubled(model):
    """All parameters twice as large, each rank its own parts."""
    with torch.no_grad():
        for p in model.parameters():
            (p.local if isinstance(model, fs.ShardedModule) else p).mul_(2)


def biases_zeroed(model):
    """Parameters of which most ranks have nothing."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                (p.local if isinstance(model, fs.ShardedModule) else p).zero_()


def evaluated(model, x, y):
    with torch.no_grad():
        return model(x, y)["loss"].float()


WRITES = {"doubled": doubled, "biases zeroed": biases_zeroed}


@every(6, strategy=STRATEGIES, write=WRITES, precision=(fs.Precision(), MIXED), trained=(False, True))
def test_evaluations_see_writes(strategy, write, precision, trained):
    """As plain torch does; before and after training steps."""

    def rank_fn(comm):
        model, optimizer = wrap(comm, strategy, precision=precision)
        [(x, y), (x2, y2)] = batches(comm, 2)
        if trained:
            modules.train(model, optimizer, [(x, y)])
        plain = modules.make().to(precision.compute or torch.float32)
        for turn in range(2):
            WRITES[write](model)
            found = evaluated(model, x2, y2)
            plain.load_state_dict(values(model), strict=False)
            torch.testing.assert_close(found, evaluated(plain, x2, y2), rtol=2e-2 if precision is MIXED else 1e-5, atol=1e-5)
            assert turn == 0 or write != "doubled" or found > 0
        return dict(values(model))

    before = modules.detached(modules.make())
    for whole in simulate(DP, rank_fn):
        for name, value in whole.items():
            if not trained:
                factor = (0 if name.endswith("bias") else 1) if write == "biases zeroed" else 4
                torch.testing.assert_close(value, before[name] * factor)


@every(4, strategy=STRATEGIES, precision=(fs.Precision(), MIXED), write=WRITES)
def test_the_functional_form_and_the_train_state_see_writes(strategy, precision, write):
    """At once, without a forward between; a teacher that follows a student in place is read as a function."""

    def rank_fn(comm):
        model, _ = wrap(comm, strategy, precision=precision)
        [(x, y)] = batches(comm, 1)
        WRITES[write](model)
        state = model.train_state  # a collective, if parameters at rest are copies
        WRITES[write](model)
        fn, params = model.functional()
        again = fs.full_tree(model.train_state.params, comm=comm)
        with torch.no_grad():
            found = fn(params, x, y, comm=comm)["loss"].float()
        assert state.params is params  # written in place
        return found, evaluated(model, x, y), dict(values(model)), again

    for found, expected, whole, again in simulate(DP, rank_fn):
        assert torch.equal(found, expected)
        resting = again["head"]["weight"]
        torch.testing.assert_close(resting, whole["head.weight"].to(resting.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_tensors_are_written_by_each_rank_to_its_part(strategy):
    """By elementwise functions, lists of tensors, and ``load_state_dict`` of a module in the model."""
    torch.manual_seed(0)
    other = modules.Block()

    def rank_fn(comm):
        model, _ = wrap(comm, strategy)
        with torch.no_grad():
            model.head.weight.mul_(torch.arange(66.0).view(11, 6)).copy_(model.head.weight + torch.ones(11, 6))
            torch._foreach_copy_(list(model.layers[0].parameters()), list(other.parameters()))
        model.layers[1].load_state_dict(other.state_dict())
        model.layers[2].float()  # stays where it is
        return values(model)

    for whole in simulate(DP, rank_fn):
        torch.testing.assert_close(whole["head.weight"], modules.make().head.weight * torch.arange(66.0).view(11, 6) + 1)
        for i, (name, value) in ((i, item) for i in (0, 1) for item in other.named_parameters()):
            assert torch.equal(whole[f"layers.{i}.{name}"], value)


IN_BACKWARDS = {
    "in place": lambda p: p.clamp_(-0.01, 0.01),
    "of a list": lambda p: torch._foreach_mul_([p], 2.0),
    "an element": lambda p: p.__setitem__(0, 1.0),
    "out": lambda p: torch.mul(torch.ones(6), 2.0, out=p),
    "an initializer": lambda p: torch.nn.init.uniform_(p),
    "one of several outs": lambda p: torch.frexp(torch.ones(6), out=(p, torch.ones(6, dtype=torch.int32))),
}


@every(2, strategy=STRATEGIES, write=IN_BACKWARDS, precision=(fs.Precision(), MIXED))
@on_ranks(DP)
def test_a_write_in_the_backward_of_its_unit_is_refused(comm, strategy, write, precision):
    """There gathered parameters stand for the module's. Without the write the training goes on."""
    (model, optimizer), (expected, other) = (wrap(comm, strategy, precision=precision) for _ in range(2))
    first, second = batches(comm, 2)
    hook = lambda module, *_: IN_BACKWARDS[write](module.norm.weight)  # noqa: E731
    for _ in range(2):  # also in a step that follows a schedule
        optimizer.zero_grad()
        handle = model.layers[1].register_full_backward_hook(hook)
        with pytest.raises(TreeError, match=r"'layers\.1\.norm\.weight' is written to in the backward of its unit"):
            model(*first)["loss"].backward()
        handle.remove()
        modules.train(model, optimizer, [second])
        modules.train(expected, other, [second])
    assert_same(values(model), values(expected))
