"""torch.compile of units with TransformerEngine's modules: the bits of the whole model that is not compiled."""

from functools import partial

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import TreeError
from tests import te_cpu
from tests.te.training import (
    ABOUT,
    FEW,
    RECIPES,
    WIDTH,
    Case,
    distances,
    linear,
    on_ranks,
    shard,
    te,
    train_sharded,
    train_whole,
)


class Block(nn.Module):
    """TransformerEngine modules, with torch functions between them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.up, self.down = linear(2 * WIDTH), te.Linear(2 * WIDTH, WIDTH, **ABOUT)

    def forward(self, x):
        return x + 2 * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def nothing(model):
    pass


def blocks(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def whole(model):
    model.compile(backend="aot_eager")


WAYS = {"blocks before": (blocks, nothing), "blocks after": (nothing, blocks), "all after": (nothing, whole)}


def compiled(comm, way, name):
    """Return how far training is from that of the whole model, and how the last step went."""
    (prepare, change), (architecture, recipe) = WAYS[way], RECIPES[name]
    case = Case(lambda: [Block(), Block()], units=("layers.*",))
    with te_cpu.architecture(*architecture):
        expected = train_whole(case, recipe, [[*range(comm.mesh.size)]], reduces_first=True)
        own = Case(case.make, units=case.units, prepare=prepare, change=change)
        found, model = train_sharded(own, recipe, comm, fs.zero3("dp"), steps=range(5))
    far = [max(distances(*pair).values()) for pair in zip(found, expected, strict=False)]
    return far, len(torch._dynamo.utils.counters["graph_break"]), model.scheduled_step.last_call_status().kind


MORE = [("blocks before", "mxfp8"), *((way, name) for way in ("blocks after", "all after") for name in FEW)]


@pytest.mark.parametrize(
    ("way", "name"), [("blocks before", "current"), *(pytest.param(*each, marks=pytest.mark.deep) for each in MORE)]
)
def test_a_compiled_unit_has_the_same_bits(way, name):
    """Its torch functions are compiled, and TransformerEngine's modules run as they are."""
    for far, num_graph_breaks, kind in on_ranks({"dp": 2}, partial(compiled, way=way, name=name)):
        assert far == [0.0] * 3
        assert num_graph_breaks
        assert kind == "planned"


def test_a_blocking_forward_is_refused():
    """A blocking gather decodes weights, and a module would encode them again."""
    comm, (architecture, recipe) = fs.SingleComm(fs.Mesh({"dp": 1})), RECIPES["current"]
    with te_cpu.architecture(*architecture):
        case = Case(lambda: [linear()], units=("layers.*",))
        model, x = shard(case, recipe, comm, fs.zero3("dp")), case.batch(0, 0, 0)
        fn, params = model.functional()
        [unit] = fs.layouts.units_of(params)
        for call in (
            lambda: fn(params, x, comm=model.comm),
            lambda: fs.value_and_grad(lambda params, x, comm: fn(params, x, comm=comm).sum())(params, x, comm=comm),
            lambda: fs.forward(lambda tree, x: x, unit, x, comm=comm, remat=True),
            lambda: fs.dummy_forward(unit, x, comm=comm),
        ):
            with pytest.raises(TreeError, match=r"weights of unit 'layers\.0' have a tensor class.*fs\.Scheduler\(comm\)"):
                call()
        assert {type(leaf) for leaf in fs.gather(unit, comm=comm).tree().values()} == {torch.Tensor}
        with te.autocast(enabled=True, recipe=recipe):
            assert fn(params, x, comm=fs.Scheduler(comm)).isfinite().all()
