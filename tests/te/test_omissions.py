"""Omissions of TransformerEngine's protocol for sharded weights, planted: training differs from that of the whole model."""

import pytest

import fsharp as fs
from fsharp.functional.formats import te as formats
from fsharp.functional.formats.te_delayed import ModuleScales
from fsharp.stateful.units.full_unit import FullUnit
from tests import te_cpu
from tests.te.training import (
    ABOUT,
    DELAYED,
    FEW,
    OUTSIDE,
    RECIPES,
    WIDTH,
    Case,
    Door,
    compare,
    linear,
    loss_of,
    on_ranks,
    strategies_on,
    te,
    tensor_utils,
    train_sharded,
    train_whole,
)


def layers():
    return [linear(2 * WIDTH), te.Linear(2 * WIDTH, WIDTH, **ABOUT), linear()]


CASE = Case(layers)
LONG_STEPS = Case(layers, loss=lambda model, y: 1000 * loss_of(y))
"""So that the maxima of weights change, of which delayed scaling has a history."""


def agree_on_nothing(patch, rank):
    patch.setattr(formats.MaxReduceGroup, "allreduce", lambda self, tensors, options=None: None)


def gather_nothing(patch, rank, planes=slice(None)):
    """Half of the bytes, which the other rank has, are zeros."""
    attach = FullUnit.give_memory_to_leaves

    def without(self):
        for _, part in self._classed.values():
            for plane in part.planes[planes]:
                half = len(plane) // 2
                plane[half:].zero_() if rank == 0 else plane[:half].zero_()
        attach(self)

    patch.setattr(FullUnit, "give_memory_to_leaves", without)


def gather_no_columns(patch, rank):
    gather_nothing(patch, rank, slice(1, None))


def derive_once(patch, rank):
    """What was derived in the first step that follows a schedule serves the following ones.

    Without any processing nothing differs: weights get new tensors, for which modules themselves derive what is lacking.
    """
    derived, derive = {}, tensor_utils.post_all_gather_processing

    def stale(tensor):
        derive(tensor)
        for name in ("_transpose", "_columnwise_data", "_columnwise_scale_inv"):
            if getattr(tensor, name, None) is not None:
                setattr(tensor, name, derived.setdefault((name, tensor.shape), getattr(tensor, name)))

    patch.setattr(tensor_utils, "post_all_gather_processing", stale)


def keep_no_history(patch, rank):
    """Maxima of new weights do not reach the module."""
    quantizer = ModuleScales.quantizer

    def apart(self, path):
        found = quantizer(self, path)
        found.amax = found.amax.clone()
        return found

    patch.setattr(ModuleScales, "quantizer", apart)


def cast_with_the_first_scale(patch, rank):
    quantizer, first = ModuleScales.quantizer, {}

    def stale(self, path):
        found = quantizer(self, path)
        found.scale = first.setdefault(path, found.scale.clone())
        return found

    patch.setattr(ModuleScales, "quantizer", stale)


OMISSIONS = {
    "delayed, each rank by itself": {
        agree_on_nothing: ("y 0", 2),
        gather_nothing: ("y 0", 0),
        derive_once: ("dx 0", 2),
        keep_no_history: ("y 0", 2),
        cast_with_the_first_scale: ("y 0", 1),
    },
    "current": {agree_on_nothing: ("y 0", 0), gather_nothing: ("y 0", 0), derive_once: ("dx 0", 2)},
    "block": {agree_on_nothing: ("y 0", 0), gather_nothing: ("y 0", 0), derive_once: ("dx 0", 2)},
    "mxfp8": {agree_on_nothing: ("y 0", 0), gather_nothing: ("y 0", 0), gather_no_columns: ("dx 0", 0)},
    "nvfp4": {agree_on_nothing: ("y 0", 0), gather_nothing: ("y 0", 0), derive_once: ("dx 0", 2)},
}
"""By recipe: each omission, what differs first, and in which step."""


def plant(comm, names):
    """Return the omissions that were not found where they should have been."""
    found, [*_, (strategy, groups, reduces_first)] = [], strategies_on(comm.mesh)
    for name in names:
        omissions, (architecture, recipe) = OMISSIONS[name], (RECIPES | DELAYED)[name]
        with te_cpu.architecture(*architecture):
            case, own = (LONG_STEPS, comm) if recipe.delayed() else (CASE, None)
            whole = train_whole(case, recipe, groups, reduces_first=reduces_first, comm=own)
            for omission, (what, step) in omissions.items():
                with pytest.MonkeyPatch.context() as patch:
                    omission(patch, comm.rank)
                    sharded, _ = train_sharded(case, recipe, comm, strategy, policy=fs.SchedulePolicy(release="forward"))
                differing = [compare(mine, expected) for mine, expected in zip(sharded, whole, strict=True)]
                first = next((i for i, each in enumerate(differing) if each), -1)
                if first != step or differing[first][0] != what:
                    found.append(f"{name}, {omission.__name__}: {differing}")
    return found


@pytest.mark.parametrize(
    "names", [(*FEW, "delayed, each rank by itself"), pytest.param(tuple(OMISSIONS), marks=pytest.mark.deep)], ids=str
)
def test_an_omission_is_found(names):
    assert on_ranks({"dp": 2}, plant, names=names) == [[], []]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
def test_what_was_derived_goes_with_the_memory(name, is_kept, monkeypatch):
    architecture, recipe = RECIPES[name]
    if is_kept:
        [kind] = [kind for kind in formats.KIND_BY_QUANTIZER_CLASS.values() if kind.name.endswith(name)]
        monkeypatch.setattr(kind, "derived", ())
    case = Case(lambda: [linear(), Door("unseen"), linear()], units=("layers.*",))
    comm, policy = fs.SingleComm(fs.Mesh({"dp": 1})), fs.testing.DebugPolicy(trivial_axes=True)
    with te_cpu.architecture(*architecture):
        train_sharded(case, recipe, comm, fs.zero3("dp"), steps=range(2), policy=policy)
    [weight] = OUTSIDE
    derived = [getattr(weight, attribute, None) for attribute in ("_transpose", "_columnwise_data")]
    assert any(x is not None for x in derived) == is_kept
