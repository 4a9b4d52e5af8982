"""Every input that the library refuses, and the words that name the value at fault."""

import re
from collections import OrderedDict, UserDict
from dataclasses import make_dataclass

import numpy
import pytest
import torch

import fsharp as fs
from fsharp.errors import FsharpError, LayoutError, LossError, MeshError, OptionError, PatternError, StrategyError, TreeError
from fsharp.functional.layout.sharded import resolve_place

MESH = fs.Mesh({"dp": 2})
ONE = fs.Mesh({"dp": 1})
SHARED = torch.ones(3, 4)
BF16 = fs.Precision(compute=torch.bfloat16, main=torch.float32)


def make():
    return {"w": torch.ones(4, 3), "b": torch.zeros(3), "n": torch.arange(3)}


def planned(mesh=ONE, strategy=None, tree=None, **options):
    return fs.plan(make() if tree is None else tree, mesh, strategy or fs.zero3("dp"), **options)


def part(strategy=None, place="params", tree=None, mesh=ONE, dtype="main", **options):
    tree = make() if tree is None else tree
    return fs.shard_for(tree, planned(mesh, strategy, tree, **options), 0, place=place, dtype=dtype)


def partial_sums():
    return fs.trainable(part(fs.ddp("dp"), "grads"))


class Loop:
    """The comm of rank 0 of a mesh on which nothing may be called."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, mesh=MESH):
        self.mesh = mesh


ONLY = fs.SingleComm(ONE)


def state(tx=fs.optim.sgd(0.1), **options):
    return fs.init_state(tx, part(place="optim", **options), comm=ONLY)


def grads_of(state):
    return fs.trainable(state.params)


def loss_of(value, batch=torch.ones(4), microbatches=1, tree=None, **options):
    run = fs.value_and_grad(lambda params, batch, comm: value(params), microbatches=microbatches)
    return run(part(tree=tree, **options), batch, comm=ONLY)


def total(params):
    return fs.forward(lambda p: p["w"].sum() + p["b"].sum(), params, comm=ONLY)


PLAN = {
    "unknown axis": (lambda: planned(strategy=fs.zero3("tp")), StrategyError, "'tp': Mesh(dp=1) has ['dp']. Name these axes"),
    "uncovered axis": (lambda: planned(fs.Mesh({"dp": 2, "x": 1})), StrategyError, "has no rule for axis 'x'"),
    "no strategy": (lambda: planned(strategy="zero3"), LayoutError, "strategy has 'zero3', expected a Strategy"),
    "no strategy in a rule": (lambda: planned(strategy={"**": 3}), LayoutError, "strategy has 3, expected a Strategy"),
    "strategy for no unit": (lambda: planned(strategy={"v": fs.zero3("dp")}), PatternError, "'v' matches nothing"),
    "units": (lambda: planned(units="layers.*"), PatternError, "the pattern 'layers.*' matches nothing"),
    "units overlap": (lambda: planned(units=["w", "?"]), PatternError, "two patterns overlap"),
    "frozen": (lambda: planned(frozen="bias"), PatternError, "plan(frozen=...): the pattern 'bias' matches nothing"),
    "atoms": (
        lambda: planned(atoms={"x": fs.layouts.LeafAtom()}),
        PatternError,
        "plan(atoms=...): the pattern 'x' matches nothing",
    ),
    "no atom": (
        lambda: planned(atoms="row"),
        OptionError,
        "atoms is 'row', expected an ElementAtom or a RowsAtom or a LeafAtom",
    ),
    "malformed": (lambda: planned(frozen="[z-a]"), PatternError, "the pattern '[z-a]' is malformed"),
    "labels": (lambda: planned(labels={"x": "m"}), PatternError, "plan(labels=...): the pattern 'x' matches nothing"),
    "a number": (lambda: planned(tree={"a": {"eps": 1e-5}}), TreeError, "params['a.eps'] is not a tensor.\n  got  float 1e-05"),
    "a container": (
        lambda: planned(tree={"a": UserDict(w=SHARED)}),
        TreeError,
        "This class is no pytree. Pass a dict, list, tuple or namedtuple, or register the class by optree",
    ),
    "a module": (lambda: planned(tree=torch.nn.Linear(2, 2)), TreeError, "that fs.make_functional(module) returns"),
    "a sparse leaf": (
        lambda: planned(tree={"s": torch.eye(2).to_sparse()}),
        TreeError,
        "params['s'] has layout torch.sparse_coo",
    ),
    "label of a number": (lambda: planned(labels=lambda path: 3), LayoutError, "plan(): the label of 'b' is 3, expected a str"),
    "label of a list": (lambda: planned(labels={"**": ["x"]}), LayoutError, "the label of 'b' is ['x'], expected a str"),
    "equal paths": (lambda: planned(tree={"0": SHARED, 0: torch.ones(1)}), TreeError, "two leaves have the path '0'"),
    "an empty key": (lambda: planned(tree={"": SHARED}), TreeError, "the key '' in the path ('',) is empty or contains a dot"),
    "a dot below": (lambda: planned(tree={"a": {"x.y": SHARED}}), TreeError, "the key 'x.y' in the path ('a', 'x.y') is empty"),
    "a dot in a key": (lambda: planned(tree={"a.b": SHARED}), TreeError, "the key 'a.b' in the path ('a.b',) is empty or"),
    "a view": (lambda: planned(tree={"v": SHARED, "w": SHARED.view(4, 3)}), LayoutError, "'w'  float32[4, 3], strides (3, 1)"),
    "a transpose": (
        lambda: planned(tree={"v": SHARED, "w": SHARED.T}),
        LayoutError,
        "params['v'] and params['w'] share storage",
    ),
    "a conjugate": (
        lambda: planned(
            tree={"v": torch.ones(2, dtype=torch.complex64)} | (lambda t: {"w": t, "x": t.conj()})(SHARED.cfloat())
        ),
        LayoutError,
        "params['w'] and params['x'] share storage",
    ),
    "ties: frozen": (
        lambda: planned(tree={"a": SHARED, "b": SHARED}, frozen="b"),
        LayoutError,
        "disagree on frozen.\n  'a'  False",
    ),
    "ties: label": (lambda: planned(tree={"a": SHARED, "b": SHARED}, labels={"b": "m"}), LayoutError, "disagree on label"),
    "ties: atom": (
        lambda: planned(tree={"a": SHARED, "b": SHARED}, atoms={"b": fs.layouts.LeafAtom()}),
        LayoutError,
        "disagree on atom",
    ),
    "precision": (lambda: fs.Precision(main=torch.int32), LayoutError, "main is torch.int32, expected a floating-point"),
    "precision by name": (lambda: fs.Precision(wire="bfloat16"), LayoutError, "wire is 'bfloat16'"),
    "unit name": (lambda: planned()["layers.0"], LayoutError, "layout[unit]: no unit 'layers.0'.\n  closest  ''"),
    "kind of bytes": (lambda: planned().nbytes("weights"), LayoutError, "unknown kind 'weights'"),
    "kind and dtype": (lambda: planned().nbytes("weights", torch.int8), LayoutError, "unknown kind 'weights'"),
}

OTHER_TREES = {
    "shape": ({**make(), "w": torch.ones(3, 4)}, "'w'  got float32[3, 4], expected float32[4, 3]"),
    "dtype": ({**make(), "b": torch.zeros(3).half()}, "'b'  got float16[3], expected float32[3]"),
    "missing": ({"w": torch.ones(4, 3), "n": torch.arange(3)}, "'b'  missing from the tree"),
    "more": ({**make(), "x": torch.ones(1)}, "'x'  not in the layout"),
    "a number": ({**make(), "b": 3}, "'b'  got int, expected a tensor"),
    "containers": (
        OrderedDict(sorted(make().items())),
        "the tree has other containers than the planned tree: got PyTreeSpec(OrderedDict",
    ),
}

SHARDED = {
    **{
        f"tree: {name}": (lambda t=tree: fs.shard_for(t, planned(), 0), TreeError, text)
        for name, (tree, text) in OTHER_TREES.items()
    },
    "tree: many": (
        lambda: fs.shard_for({}, planned(tree=[torch.ones(1) for _ in range(11)]), 0),
        TreeError,
        "and 3 more. Call plan()",
    ),
    "tree: tied": (
        lambda: fs.shard_for({"a": SHARED, "b": SHARED}, planned(tree={"a": SHARED, "b": SHARED.clone()}), 0),
        TreeError,
        "'b'  tied to 'a', but laid out on its own",
    ),
    "tree: untied": (
        lambda: fs.shard_for({"a": SHARED, "b": SHARED + 1}, planned(tree={"a": SHARED, "b": SHARED}), 0),
        TreeError,
        "'b'  laid out as tied to 'a', but has values of its own",
    ),
    "place name": (lambda: part(place="weights"), LayoutError, "unknown place 'weights'"),
    "place order": (
        lambda: part(place=fs.layouts.MeshPlacement(("tp",), (fs.layouts.Shard,))),
        LayoutError,
        "MeshPlacement(tp:Shard) does not belong to the strategy of unit (root)",
    ),
    "place too fine": (
        lambda: part(fs.ddp("dp"), fs.layouts.MeshPlacement(("dp",), (fs.layouts.Shard,))),
        LayoutError,
        "shards unit (root) along ['dp'], and its layout along [] alone",
    ),
    "place that does not nest": (
        lambda: resolve_place(
            planned(fs.Mesh({"a": 2, "b": 2}), fs.zero3("a", "b")).units[0],
            fs.layouts.MeshPlacement(("a", "b"), (fs.layouts.Replicate, fs.layouts.Shard)),
        ),
        LayoutError,
        "MeshPlacement(a:Replicate, b:Shard) does not belong to the strategy of unit (root)",
    ),
    "rank": (lambda: part(mesh=MESH) and fs.shard_for(make(), planned(MESH), 2), MeshError, "rank 2 is outside Mesh(dp=2)"),
    "unshard: none": (lambda: fs.unshard([]), TreeError, "no trees"),
    "unshard: too few": (lambda: fs.unshard([part(mesh=MESH)]), TreeError, "1 trees, expected one for each of the 2 ranks"),
    "unshard: partial": (lambda: fs.unshard([partial_sums()]), TreeError, "unit (root) rests partial (dp:Partial)"),
    "unshard: mixed": (
        lambda: fs.unshard([part(mesh=MESH), part(mesh=MESH, atoms=fs.layouts.LeafAtom())]),
        TreeError,
        "the tree of rank 1 has another layout or place than the tree of rank 0",
    ),
    "tree of a shard": (lambda: part().tree(), TreeError, "this rank does not hold all of unit (root).\n  place   dp:Shard"),
    "tree of a part": (lambda: fs.trainable(part(place="full")).tree(), TreeError, "groups  (0,) of (0, 1)"),
    "missing tie": (
        lambda: part(place="full", tree={"a": SHARED, "b": SHARED}, units="*")["b"].tree(),
        TreeError,
        "'b' is tied to a leaf of a unit that this call was not given.\n  tied to  '' of unit 'a'",
    ),
    "gather: partial": (lambda: fs.gather(partial_sums(), comm=ONLY), TreeError, "from  dp:Partial"),
    "gather: to partial": (lambda: fs.gather(part(fs.ddp("dp")), comm=ONLY, to="grads"), TreeError, "to    dp:Partial"),
    "gather: nothing": (lambda: fs.gather(make(), comm=ONLY), TreeError, "gather(): expected a tree of Sharded, got dict"),
    "gather: mesh": (lambda: fs.gather(part(), comm=Loop()), MeshError, "unit  (root) on Mesh(dp=1)\n  comm  Mesh(dp=2)"),
    "reduce: shards": (lambda: fs.reduce_scatter(part(), comm=ONLY, to="full"), TreeError, "Use gather() for values"),
    "reduce: to partial": (
        lambda: fs.reduce_scatter(part(fs.ddp("dp")), comm=ONLY, to="grads"),
        TreeError,
        "from  dp:Replicate\n  to    dp:Partial",
    ),
    "reduce: nothing": (lambda: fs.reduce_scatter([], comm=ONLY), TreeError, "the tree is empty, []"),
    "reduce: mesh": (
        lambda: fs.reduce_scatter(part(), comm=Loop()),
        MeshError,
        "reduce_scatter(): the Comm is on another mesh",
    ),
    "shard: mesh": (lambda: fs.shard(make(), planned(MESH), ONLY), MeshError, "layout  Mesh(dp=2)\n  comm    Mesh(dp=1)"),
    "init: mesh": (
        lambda: fs.init_params(fs.init.zeros, planned(MESH), ONLY, key=0),
        MeshError,
        "init_params(): the Comm is on another mesh",
    ),
    "init: pattern": (
        lambda: fs.init_params({"**": fs.init.zeros, "x": fs.init.ones}, planned(), ONLY, key=0),
        PatternError,
        "'x' matches nothing",
    ),
    "init: uncovered": (
        lambda: fs.init_params({"w": fs.init.ones}, planned(), ONLY, key=0),
        PatternError,
        "no pattern selects 'b'",
    ),
    "forward: nothing": (
        lambda: fs.forward(len, make(), comm=ONLY),
        TreeError,
        "forward(): expected a tree of Sharded, got dict",
    ),
    "no module": (lambda: fs.make_functional(torch.nn.ReLU()), TreeError, "ReLU has no parameters"),
}

TRAIN = {
    "no main copy": (
        lambda: fs.init_state(fs.optim.sgd(0.1), part(precision=BF16, dtype="compute"), comm=ONLY),
        TreeError,
        "torch.float32 main copy, which cannot be made from torch.bfloat16",
    ),
    "partial": (
        lambda: fs.init_state(fs.optim.sgd(0.1), partial_sums(), comm=ONLY),
        TreeError,
        "rests partial (dp:Partial), expected parameters",
    ),
    "not sharded": (
        lambda: fs.init_state(fs.optim.sgd(0.1), make(), comm=ONLY),
        TreeError,
        "init_state(): expected a tree of Sharded, got dict",
    ),
    "no pair": (
        lambda: fs.init_state(0.1, part(), comm=ONLY),
        TreeError,
        "expected an (init, update) pair such as fs.optim.adamw(1e-3), got 0.1",
    ),
    "a vector": (lambda: loss_of(lambda p: torch.ones(3)), LossError, "the loss is torch.float32[3]"),
    "a number": (lambda: loss_of(lambda p: 1.0), LossError, "the loss is float, expected a floating-point scalar tensor"),
    "an integer": (lambda: loss_of(lambda p: torch.tensor(1)), LossError, "the loss is torch.int64[]"),
    "three": (lambda: loss_of(lambda p: (total(p), 1, 2)), LossError, "the loss is tuple"),
    "weights": (
        lambda: loss_of(lambda p: (total(p), torch.ones(2))),
        LossError,
        "the weight of the loss is torch.float32[2], expected a number or a scalar tensor without gradient",
    ),
    "a pair of losses": (
        lambda: loss_of(lambda p: (total(p), total(p))),
        LossError,
        "the weight of the loss is torch.float32[] with a gradient",
    ),
    "a negative weight": (
        lambda: loss_of(lambda p: (total(p), -1)),
        LossError,
        "the weight of the loss is -1, expected a finite number of at least 0",
    ),
    "a weight of NaN": (lambda: loss_of(lambda p: (total(p), float("nan"))), LossError, "the weight of the loss is nan"),
    "a negative tensor": (
        lambda: loss_of(lambda p: fs.Loss(total(p), torch.tensor(-0.5))),
        LossError,
        "the weight of the loss is -0.5, expected a finite number of at least 0",
    ),
    "an infinite weight": (lambda: loss_of(lambda p: (total(p), float("inf"))), LossError, "the weight of the loss is inf"),
    "aux": (lambda: loss_of(lambda p: (total(p), {"logits": 1})), LossError, "is dict, expected a number or a scalar"),
    "aux, a flag": (lambda: loss_of(lambda p: (total(p), True)), LossError, "pass has_aux=True"),
    "no aux": (
        lambda: fs.value_and_grad(lambda p, batch, comm: total(p), has_aux=True)(part(), 0, comm=ONLY),
        LossError,
        "has_aux=True): the loss function returned torch.float32[] with a gradient, expected (loss, aux)",
    ),
    "no parameter": (lambda: loss_of(lambda p: torch.ones(())), LossError, "no parameter reaches it"),
    "detached": (lambda: loss_of(lambda p: total(p).detach()), LossError, "no parameter reaches it"),
    "all frozen": (lambda: loss_of(total, frozen="**"), LossError, "every parameter is frozen"),
    "microbatches": (lambda: loss_of(total, microbatches=0), LossError, "microbatches is 0"),
    "fractions": (lambda: fs.value_and_grad(total, microbatches=1.5), OptionError, "microbatches is 1.5, expected an int"),
    "batch": (lambda: loss_of(total, torch.ones(5, 2), 3), LossError, "batch has shape [5, 2], which 3 microbatches cannot"),
    "scalar batch": (
        lambda: loss_of(total, {"x": torch.ones(())}, 2),
        LossError,
        "batch['x'] has shape [], which 2 microbatches cannot split into equal parts along dim 0",
    ),
    "array in a batch": (
        lambda: loss_of(total, {"x": torch.ones(4), "y": numpy.ones(4)}, 2),
        LossError,
        "the batch has a ndarray, which 2 microbatches cannot split",
    ),
    "tensor in a dataclass": (
        lambda: loss_of(total, [make_dataclass("Batch", ["x"])({"x": torch.ones(4)})], 2),
        LossError,
        "the batch has a Batch, which 2 microbatches cannot split",
    ),
    "comm": (
        lambda: fs.value_and_grad(lambda params, batch, comm: 0)(part(), 0, comm=Loop()),
        MeshError,
        "value_and_grad(): the Comm is on another mesh",
    ),
    "average: partial": (
        lambda: fs.average(fs.Loss(torch.ones(()), torch.ones(())), partial_sums(), comm=ONLY),
        TreeError,
        "rest partial (dp:Partial)",
    ),
    "norm: partial": (lambda: fs.optim.global_norm(partial_sums(), comm=ONLY), TreeError, "rests partial (dp:Partial)"),
    "clip": (lambda: fs.optim.clip_by_global_norm(0.0), OptionError, "max_norm is 0.0, expected a positive number"),
    "ema": (lambda: fs.optim.with_ema(fs.optim.sgd(0.1), decay=1.0), OptionError, "decay is 1.0, expected a number in [0, 1)"),
    "ema of updates": (lambda: fs.optim.ema(-0.1), OptionError, "ema(): decay is -0.1, expected a number in [0, 1)"),
    "apply_if_finite": (
        lambda: fs.optim.apply_if_finite(fs.optim.sgd(1), -1),
        OptionError,
        "max_consecutive_errors is -1, expected a whole number from 0",
    ),
    "MultiSteps": (
        lambda: fs.optim.MultiSteps(fs.optim.sgd(1), 0),
        OptionError,
        "every_k_schedule is 0, expected a positive whole number",
    ),
    "inject_hyperparams: unknown": (
        lambda: fs.optim.inject_hyperparams(fs.optim.scale, static_args="lr"),
        OptionError,
        "static_args names 'lr', expected some of ['step_size']",
    ),
    "inject_hyperparams: unnamed": (
        lambda: fs.optim.inject_hyperparams(fs.optim.chain),
        OptionError,
        "the factory takes '*transforms: Any', expected arguments with names",
    ),
    "cosine": (lambda: fs.optim.cosine_decay_schedule(1.0, 0), OptionError, "decay_steps is 0, expected a positive number"),
    "warmup, cosine": (
        lambda: fs.optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5),
        OptionError,
        "decay_steps is 5, expected more than warmup_steps, 5",
    ),
    "linear": (lambda: fs.optim.linear_schedule(0.0, 1.0, 5, -1), OptionError, "transition_begin is -1, expected 0 or more"),
    "join": (
        lambda: fs.optim.join_schedules([fs.optim.constant_schedule(1.0)], [3]),
        OptionError,
        "got 1 boundaries for 1 schedules, expected one boundary less",
    ),
    "chain": (lambda: fs.optim.chain(), OptionError, "chain(): got no transformation"),
    "masked": (lambda: state(fs.optim.masked(fs.optim.sgd(1), "x")), PatternError, "masked(): the pattern 'x' matches nothing"),
    "decay per path": (
        lambda: fs.update(fs.optim.sgd(1, weight_decay={"b": 0.0}), grads_of(state()), state(), comm=ONLY),
        PatternError,
        "weight_decay=: no pattern selects 'w'",
    ),
    "muon: a vector": (
        lambda: state(fs.optim.muon(0.1), atoms=fs.layouts.LeafAtom()),
        LayoutError,
        "muon(): 'b' is not a matrix.\n  leaf   b: [3]\n  atom   whole tensor\n  place  dp:Shard\n"
        "Give matrices a label of their own, by plan(labels={pattern: 'muon', ...}), and use partition(",
    ),
    "muon: cut": (
        lambda: state(fs.optim.muon(0.1), tree={"w": torch.ones(4, 3)}, atoms=fs.layouts.RowsAtom(2)),
        LayoutError,
        "'w' may be cut between ranks.\n  leaf   w: [4, 3]\n  atom   2 rows",
    ),
    "partition by patterns": (
        lambda: state(fs.optim.partition({"default": fs.optim.sgd(1)}, {"**": "default", "w": "matrix"})),
        OptionError,
        "no transformation for the label 'matrix'",
    ),
    "partition: a tree": (
        lambda: state(fs.optim.partition({"matrix": fs.optim.sgd(1)}, {"**": {"w": "matrix"}})),
        PatternError,
        "gives 'b' the label {'w': 'matrix'}, expected a string",
    ),
    "partition: a leaf without": (
        lambda: state(fs.optim.partition({"matrix": fs.optim.sgd(1)}, {"w": "matrix"})),
        PatternError,
        "partition(param_labels): no pattern selects 'b'",
    ),
    "partition": (
        lambda: state(fs.optim.partition({"default": fs.optim.sgd(1)}), labels={"w": "matrix"}),
        OptionError,
        "no transformation for the label 'matrix'.\n  labels           ['default', 'matrix']\n  transformations  ['default']",
    ),
}


def other_gradients(change):
    now = state()
    return lambda: fs.update(fs.optim.sgd(0.1), change(grads_of(now)), now, comm=ONLY)


GRADIENTS = {
    "structure": (other_gradients(lambda g: [g]), "trees of different structure"),
    "layout": (other_gradients(lambda g: fs.trainable(part(atoms=fs.layouts.LeafAtom()))), "differs   layout of unit"),
    "place": (other_gradients(lambda g: fs.trainable(part(place="full"))), "got       dp:Replicate\n  expected  dp:Shard"),
    "groups": (other_gradients(lambda g: part()), "differs   groups\n  got       (0, 1)\n  expected  (0,)"),
    "dtype": (
        other_gradients(lambda g: g.replace([b.half() for b in g.buffers])),
        "got       torch.float16[15]\n  expected  torch.float32[15]",
    ),
    "shape": (other_gradients(lambda g: g.replace([b[:4] for b in g.buffers])), "got       torch.float32[4]"),
    "no tensor": (other_gradients(lambda g: g.replace([None])), "got       NoneType\n  expected  a tensor"),
}


CASES = {
    **{f"plan: {name}": case for name, case in PLAN.items()},
    **{f"sharded: {name}": case for name, case in SHARDED.items()},
    **{f"train: {name}": case for name, case in TRAIN.items()},
    **{f"gradients: {name}": (run, TreeError, text) for name, (run, text) in GRADIENTS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_value_at_fault(name):
    run, error, text = CASES[name]
    with pytest.raises(error, match=re.escape(text)):
        run()


def test_errors_are_also_python_errors():
    assert issubclass(LayoutError, ValueError)
    assert issubclass(OptionError, TypeError)
    assert issubclass(OptionError, ValueError)
    assert issubclass(TreeError, TypeError)
    assert all(issubclass(getattr(fs.errors, name), FsharpError) for name in dir(fs.errors) if name.endswith("Error"))
