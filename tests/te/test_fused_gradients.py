"""Gradients of weights that modules write by themselves, with fuse_wgrad_accumulation=True, have the bits of returned ones."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import fsharp as fs
from fsharp.stateful.modules import calls
from fsharp.stateful.runtime.boundary import UnitUse
from tests.te.test_steps import DOORS, MODULES, SHARDED, STEPS, THREE, TWO, UNEVEN
from tests.te.training import DELAYED, FEW, RECIPES, Case, compare, differences, linear, loss_of, on_ranks, shard, train_alone

ONE_WEIGHT = Case(lambda: [linear(bias=False), linear(bias=False), linear(bias=False)])
CASES = MODULES | STEPS | UNEVEN | {"one weight in a unit": ONE_WEIGHT, "returned": DOORS["returned"]}
PLAIN = {name: replace(case, quantized=False) for name, case in CASES.items() if name != "frozen"}
SOME = {
    name: CASES[name] for name in ("LayerNormMLP", "GroupedLinear", "microbatches", "layers used twice", "one weight in a unit")
}
TWICE_IN_A_UNIT = Case(THREE, units=(), how="twice")
_, RECIPE = RECIPES["current"]


def fused(case):
    """The case with modules that write gradients of weights by themselves."""

    def prepare(model):
        case.prepare(model)
        for each in model.modules():
            if hasattr(each, "fuse_wgrad_accumulation"):
                each.fuse_wgrad_accumulation = True

    return replace(case, prepare=prepare)


def train_few(comm):
    some = differences(comm, SOME, FEW[:1], [fs.zero3("dp")], fused)
    some += differences(comm, {"one weight in a unit": ONE_WEIGHT}, FEW, [fs.zero2("dp")], fused)
    return some + differences(comm, {"plain": PLAIN["LayerNormMLP"]}, FEW[:1], [fs.zero3("dp")], fused)


def test_gradients_have_the_bits_of_the_whole_model():
    assert on_ranks({"dp": 2}, train_few) == [[], []]


def train_all(comm):
    found = differences(comm, CASES, FEW, SHARDED, fused) + differences(comm, SOME, ["block"], as_sharded=fused)
    return found + differences(comm, PLAIN, FEW[:1], SHARDED, fused)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:You are using quantized weights without quantized compute")  # in evaluations
@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 2}, {"dp": 3}, {"outer": 2, "inner": 2}], ids=str)
def test_every_case_has_the_bits_of_the_whole_model(sizes):
    found = on_ranks(sizes, train_all)
    assert found == [[]] * len(found)


@pytest.mark.deep
def test_delayed_scaling_with_fused_gradients_has_the_bits_of_the_whole_model():
    assert on_ranks({"dp": 2}, differences, cases={"Linear": Case(TWO)}, names=list(DELAYED), as_sharded=fused) == [[], []]


def dirty(patch):
    """Let memory for gradients have NaN in it."""
    clean = UnitUse.make_gradient_allocator
    patch.setattr(UnitUse, "make_gradient_allocator", lambda use, leaf: lambda make=clean(use, leaf): make().fill_(torch.nan))


def same_as_not_fused(case):
    """Name what differs from gradients that modules return."""
    expected, _ = train_alone(case, RECIPES["current"])
    found, model = train_alone(fused(case), RECIPES["current"])
    assert model.scheduled_step.num_unscheduled_calls == 1
    different = []
    for (outputs, grads), (wanted, means) in zip(found, expected, strict=True):
        whole = {name: mean for name, (_, mean) in means.items()}
        different += compare((outputs, grads), (wanted, whole))
    return different


def test_a_second_use_in_a_unit_adds_and_memory_need_not_be_clean(monkeypatch):
    dirty(monkeypatch)
    assert same_as_not_fused(TWICE_IN_A_UNIT) == []


def take_nothing(patch):
    patch.setattr(UnitUse, "add_written_gradients", lambda use, grads: grads)


def take_the_last_alone(patch):
    take = UnitUse.add_written_gradients

    def last(use, grads):
        use._written = {i: each[-1:] for i, each in use._written.items()}
        return take(use, grads)

    patch.setattr(UnitUse, "add_written_gradients", last)


def lending(patch, change):
    """Change weights once they have TransformerEngine's attributes."""
    lend = calls.lending_gradient_memory

    @contextmanager
    def changed(weights):
        with lend(weights):
            for _, weight in weights:
                change(weight)
            yield

    patch.setattr(calls, "lending_gradient_memory", changed)


def let_it_add(patch):
    lending(patch, lambda weight: weight.__dict__.pop("overwrite_main_grad", None))


def ask_for_a_dummy(patch):
    from transformer_engine.pytorch.module import linear as module

    lending(patch, lambda weight: setattr(weight, "grad_added_to_main_grad", False))
    patch.setattr(module, "get_dummy_wgrad", lambda shape, dtype, zero=False: torch.full(shape, torch.nan, dtype=dtype))


@pytest.mark.parametrize("omission", [take_nothing, take_the_last_alone, let_it_add, ask_for_a_dummy])
def test_an_omission_is_found(omission, monkeypatch):
    dirty(monkeypatch)
    omission(monkeypatch)
    assert any("weight" in name for name in same_as_not_fused(TWICE_IN_A_UNIT))


@pytest.mark.parametrize("quantized", [True, False])
def test_a_weight_lives_until_its_backward(quantized, monkeypatch):
    case = fused(replace(ONE_WEIGHT, quantized=quantized))
    forget = lambda use, leaf: lambda shape=leaf.shape: torch.empty(shape, dtype=torch.bfloat16)  # noqa: E731
    monkeypatch.setattr(UnitUse, "make_gradient_allocator", forget)
    with pytest.raises(AssertionError, match="weight was removed while fuse_wgrad_accumulation=True"):
        train_alone(case, RECIPES["current"])


class FirstOfTwo(torch.nn.Module):
    """Two layers, of which the second is not used."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList([linear(bias=False), linear(bias=False)])

    def forward(self, x):
        return self.inner[0](x)


def test_a_weight_that_is_not_used_has_no_gradient():
    [(_, grads)], _ = train_alone(
        fused(Case(lambda: [FirstOfTwo(), linear(bias=False)], (FirstOfTwo,))), RECIPES["current"], steps=[0]
    )
    assert sorted(grads) == ["layers.0.inner.0.weight", "layers.1.weight"]


def test_what_would_go_wrong_is_refused_by_name():
    comm = fs.SingleComm()
    split = Case(lambda: [linear(fuse_wgrad_accumulation=True, parameters_split=("a_", "b_"))], quantized=False)
    with pytest.raises(
        fs.errors.OptionError, match=r"module 'layers\.0' has fuse_wgrad_accumulation=True, and no weight of its"
    ):
        shard(split, RECIPE, comm, fs.zero3("dp"))
    late = Case(lambda: [linear(delay_wgrad_compute=True)])
    with pytest.raises(fs.errors.OptionError, match=r"module 'layers\.0' has delay_wgrad_compute=True"):
        shard(late, RECIPE, comm, fs.zero3("dp"))
    fn, params = shard(fused(Case(TWO, quantized=False)), RECIPE, comm, fs.zero3("dp")).functional()
    gradient = fs.value_and_grad(lambda params, x, comm: loss_of(fn(params, x, comm=comm)))
    with pytest.raises(fs.errors.TreeError, match=r"parameter 'layers\.0\.weight' belongs to a module with fuse_wgrad_acc"):
        gradient(params, Case(TWO).batch(0, 0, 0), comm=comm)
