"""methods=: other entry points than forward gather what they use, as forward does."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharp as fs
from fsharp.errors import LayoutError, PatternError
from fsharp.testing import DebugPolicy
from tests import modules
from tests.modules import Block, Net, close, descend, values, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, assert_same, every, turned

STEP = {"lr": 1e-2}


class Halves(Block):
    """Has an entry point besides forward."""

    def first(self, x, *, scale=1.0):
        """Half of a block."""
        return {"out": F.gelu(self.up(self.norm(x))) * scale, "scale": scale}


class Coder(Net):
    """Encodes and decodes apart; its forward calls both."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Halves() for _ in range(3)])

    def encode(self, x):
        """Tokens to hidden states."""
        return self.hidden(self.embed(x))

    def decode(self, hidden, y):
        """Hidden states to a loss."""
        return F.cross_entropy(self.head(hidden), y)

    def whole(self, x, y):
        """Calls itself."""
        return self(x, y)["loss"]

    def forward(self, x, y=None):
        self.calls += 1
        return {"loss": self.decode(self.encode(x), y)}

    def steps(self):
        """Computes when it is asked."""
        yield self.head.weight.sum()

    @staticmethod
    def still(x):
        """Needs nothing."""
        return x


def make():
    return modules.seeded(Coder)


METHODS = ["encode", "decode", "whole", "first"]
WAYS = {
    "forward": lambda model, x, y: model(x, y)["loss"],
    "apart": lambda model, x, y: model.decode(model.encode(x), y),
    "nested": lambda model, x, y: model.whole(x, y),
    "of a unit": lambda model, x, y: (
        model(x, y)["loss"] + sum(layer.first(torch.ones(2, modules.DIM), scale=0.5)["out"].mean() for layer in model.layers)
    ),
}


def train(model, optimizer, data, way):
    """Steps by one of the ways."""
    for x, y in data:
        descend(WAYS[way](model, x, y), optimizer)


def sharded(comm, strategy, **options):
    """A model with entry points, and its optimizer."""
    options = {"methods": METHODS, "units": [Block], **options}
    model = fs.shard_module(make(), mesh=comm, strategy=STRATEGIES[strategy][1], policy=DebugPolicy(poison=True), **options)
    return model, fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **STEP)


@every(7, way=WAYS, strategy=turned(STRATEGIES, "zero3"))
def test_as_the_module_alone(strategy, way):
    steps = partial(train, way=way)
    for step in modules.assert_trains_as_alone(strategy, steps, Coder, settings=STEP, count=3, units=[Block], methods=METHODS):
        assert step.num_unscheduled_calls == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_a_forward_that_calls_entries_gathers_once(comm, strategy):
    """The bits, and the events, of a forward that does the same by itself."""
    found = []
    for methods in (METHODS, []):
        model, optimizer = sharded(comm, strategy, methods=methods)
        train(model, optimizer, modules.batches(comm, 3), "forward")
        found.append((values(model), [str(event) for event in model.scheduled_step.schedule.program.events]))
    assert_same(*found)


@on_ranks(DP)
def test_without_units_in_lower_precision_and_under_no_grad(comm):
    model, _ = sharded(
        comm, "zero3", units=None, precision=fs.Precision(compute=torch.bfloat16, main=torch.float32), methods="encode"
    )
    with torch.no_grad():
        out = model.encode(torch.arange(3))
    model.eval()
    with model.unsharded():
        pass  # no step is under way
    assert (out.dtype, model.encode.__doc__) == (torch.bfloat16, "Tokens to hidden states.")


@on_ranks(DP)
def test_an_attribute_that_is_a_function(comm):
    whole, net = make(), make()
    net.encode = lambda x: net.embed(x)
    net.layers[1].extra = lambda x: net.layers[1].up(x)
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[Block], methods=["encode", "extra"])
    with torch.no_grad():
        assert_same(model.encode(torch.arange(3)), whole.embed(torch.arange(3)))
        close(model.layers[1].extra(torch.ones(1, 6)), whole.layers[1].up(torch.ones(1, 6)))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(DP)
def test_methods_that_are_not_named(comm, strategy):
    model, _ = sharded(comm, strategy, methods=[])
    with pytest.raises(LayoutError, match=r"'embed\.weight' is .*shard_module\(methods=\[\.\.\.\]\)"):
        model.encode(torch.arange(3))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["encodes"], r"Coder and units have no method 'encodes'"),
        ("norm", r"'norm' of layers\.0, a Halves, is a LayerNorm, expected a method of its own"),
        (["in_features"], r"have no method 'in_features'\. 'head' has it: choose that module as one of the units"),
        (["encode", "state_dict"], r"'state_dict' is a method of every nn\.Module"),
        (["twice"], r"'twice' of the root, a Coder, is a bool"),
        (["still"], r"'still' of the root, a Coder, is a staticmethod"),
        (["steps"], r"'steps' of the root, a Coder, is a generator or coroutine"),
    ],
)
def test_refused(names, match):
    net = make()
    with pytest.raises(PatternError, match=match):
        fs.shard_module(net, mesh=fs.SingleComm(), units=[Block], methods=names)
    assert type(net) is Coder


def test_names_of_forward_are_nothing_new():
    model, _ = wrap(fs.SingleComm(fs.Mesh({"dp": 1})), "zero3", methods=["forward"])
    assert type(model).__mro__[1:3] == (fs.ShardedModule, Net)


class Passes(Net):
    """Returns what its last unit returns, and computes with it in a second call."""

    def forward(self, x, y=None):
        return self.hidden(self.embed(x)) if y is None else F.cross_entropy(self.head(x), y)


@every(3, strategy=STRATEGIES)
def test_a_root_that_returns_what_a_unit_returns(strategy):
    """A backward comes to the unit before it comes to the root around it."""

    def steps(model, optimizer, data):
        for x, y in data:
            descend(model(model(x), y), optimizer)

    modules.assert_trains_as_alone(strategy, steps, Passes, settings=STEP, count=3, units=[Block])


@on_ranks(DP)
def test_a_result_of_transformers_whose_tensor_is_replaced(comm):
    """It refuses ``update()``, and keeps each value as an item and as an attribute."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Returns(nn.Linear):
        def forward(self, x):
            return outputs.CausalLMOutput(loss=super().forward(x).sum(), logits=self.weight)

    out = fs.shard_module(Returns(2, 2), mesh=comm, strategy=fs.zero3("dp"), sync_from=0)(torch.ones(1, 2))
    assert out["logits"] is out.logits
    out.loss.backward()
