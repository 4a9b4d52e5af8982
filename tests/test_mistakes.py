"""Mistakes of new users: each error names the cause and the remedy."""

import functools
import re

import pytest
import torch

import fsharp as fs
from fsharp.errors import LayoutError, LossError, MeshError, OptionError, PatternError, TreeError
from fsharp.testing import generate
from tests.test_errors import ONE, ONLY, SHARED, make, part, planned, state, total


def meta():
    return part().replace([b.to("meta") for b in part().buffers])


MODULE = torch.nn.Linear(2, 2)
SHARDED_MODULE = fs.shard_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh=ONLY, strategy=fs.zero3("dp"))


async def later_step(state, batch, comm):
    return state


def equivalent(batches, runs):
    return fs.testing.assert_equivalent(total3, fs.optim.sgd(0.1), make(), batches, runs=runs)


SGD = "got the torch optimizer SGD. For a module pass its class and options: fs.ShardedOptimizer(model.parameters(), torch.op"
PAIR = fs.Mesh({"dp": 2})
MISTAKES = {
    "mean over ranks": (lambda: ONLY.all_reduce(torch.ones(1), "dp", op="mean"), OptionError, "For a mean, divide the sum by"),
    "mean over simulated ranks": (
        lambda: fs.testing.simulate(PAIR, lambda comm: comm.all_reduce(torch.ones(1), "dp", op="mean")),
        OptionError,
        "all_reduce(): op is 'mean', expected 'sum', 'max' or 'min'",
    ),
    "rows": (
        lambda: fs.testing.simulate(PAIR, lambda comm: comm.reduce_scatter(torch.ones(4, 3), "dp")),
        MeshError,
        "reduce_scatter(): x has shape (4, 3), expected a first dim of size 2",
    ),
    "parts": (
        lambda: fs.testing.simulate(PAIR, lambda comm: comm.all_to_all(torch.ones(6), [6], [6])),
        MeshError,
        "all_to_all(): x has shape (6,), send is [6] and receive is [6]; expected",
    ),
    "state for parameters": (lambda: fs.value_and_grad(total3)(state(), 0, comm=ONLY), TreeError, "pass state.params"),
    "full_tree of a state": (
        lambda: fs.full_tree(state(), comm=ONLY),
        TreeError,
        "expected one of its trees. Pass state.params",
    ),
    "full_tree, not sharded": (
        lambda: fs.full_tree(make(), comm=ONLY),
        TreeError,
        "full_tree(): expected a tree of Sharded, got "
        "dict, which is not sharded. Pass fs.shard(tree, layout, comm), with layout = fs.plan(tree, comm.mesh, strategy).",
    ),
    "meta": (
        lambda: fs.value_and_grad(total3)(meta(), 0, comm=ONLY),
        TreeError,
        "unit (root) is on the meta device, and",
    ),
    "loss without comm": (lambda: fs.train_step(lambda p, x: 0, fs.optim.sgd(1)), LossError, "and takes (p, x)."),
    "comm by position": (lambda: fs.value_and_grad(total3)(part(), 0, ONLY), OptionError, "grad_fn(params, batch, comm=comm, "),
    "comm of a scheduler": (
        lambda: fs.Scheduler(ONLY)(total3)(part(), 0, comm=ONLY),
        OptionError,
        "the scheduler passes comm by itself",
    ),
    "comm of a scheduler by position": (
        lambda: fs.Scheduler(ONLY)(total3)(part(), 0, ONLY),
        OptionError,
        "the scheduler passes comm by itself",
    ),
    "a scheduler by position": (
        lambda: (scheduler := fs.Scheduler(ONLY))(total3)(part(), 0, scheduler),
        OptionError,
        "the scheduler passes comm by itself",
    ),
    "a step without comm": (
        lambda: fs.Scheduler(ONLY)(lambda state, batch: state),
        OptionError,
        "has no argument comm, expected def step(state, batch, comm).",
    ),
    "a step that is a coroutine": (
        lambda: fs.Scheduler(ONLY)(later_step),
        OptionError,
        "is a generator or coroutine, which computes after it has returned: return a value instead.",
    ),
    "units by a function of the module": (
        lambda: fs.shard_module(torch.nn.Linear(2, 2), mesh=ONLY, units=lambda m: True),
        OptionError,
        "a predicate (path, module) -> bool, or",
    ),
    "a slice of a sharded module": (lambda: SHARDED_MODULE[:1], TreeError, "Sequential(): only fs.shard_module() makes a"),
    "a plan of a module": (lambda: fs.plan(MODULE, ONE, fs.zero3("dp")), TreeError, "plan(): params is not a tensor."),
    "a torch optimizer": (lambda: state(torch.optim.SGD(MODULE.parameters())), TreeError, SGD),
    "a class of torch": (lambda: state(torch.optim.SGD), TreeError, SGD),
    "the name of an optimizer": (
        lambda: fs.ShardedOptimizer(SHARDED_MODULE.parameters(), "adamw"),
        TreeError,
        "got 'adamw'. A ShardedOptimizer also takes a class, such as torch.optim.AdamW.",
    ),
    "a state for a pair": (
        lambda: fs.update(state(), part(), fs.optim.sgd(1), comm=ONLY),
        TreeError,
        "The pair is the first a",
    ),
    "an update of two arguments": (
        lambda: state((lambda params: (), lambda grads, state: (grads, state))),
        TreeError,
        "It has to be called as init(params) and update(grads, state, params), and update returns",
    ),
    "an optimizer of an optimizer": (
        lambda: fs.ShardedOptimizer(SHARDED_MODULE.parameters(), torch.optim.SGD(MODULE.parameters())),
        TreeError,
        SGD,
    ),
    "an optimizer of a module": (
        lambda: fs.ShardedOptimizer(SHARDED_MODULE, torch.optim.SGD),
        TreeError,
        "Pass model.parameters()",
    ),
    "an optimizer of a module that is no container": (
        lambda: fs.ShardedOptimizer(SHARDED_MODULE[0], torch.optim.SGD),
        TreeError,
        "got a module, a tensor or no parameters. Pass model.parameters()",
    ),
    "an optimizer of a parameter": (
        lambda: fs.ShardedOptimizer(SHARDED_MODULE[0].weight, torch.optim.SGD),
        TreeError,
        "got a module, a tensor or no parameters. Pass model.parameters()",
    ),
    "a function of a module with its parameters by name": (
        lambda: SHARDED_MODULE.functional()[0](dict(SHARDED_MODULE.named_parameters()), SHARED, comm=ONLY),
        TreeError,
        "functional(): params lack unit '(root)'. Pass model.train_state.params or the like.",
    ),
    "parameters for the state of a module": (
        lambda: setattr(SHARDED_MODULE, "train_state", SHARDED_MODULE.train_state.params),
        OptionError,
        ", expected a TrainState",
    ),
    "a list": (
        lambda: fs.optim.chain([fs.optim.sgd(1)]),
        TreeError,
        "got a list. For several pass one after another: fs",
    ),
    "swapped": (lambda: fs.init_state(part(), fs.optim.sgd(1), comm=ONLY), TreeError, "The pair is the first argument"),
    "a module": (
        lambda: fs.shard(MODULE, planned(), ONLY),
        TreeError,
        "got a module, Linear, expected a tree of tensors.",
    ),
    "a product": (lambda: SHARED @ part(), TreeError, "unit (root): used in a sum or a product, but outside of fs.forward()"),
    "a factor": (lambda: 2 * part(), TreeError, "unit (root): used in a sum or a product, but outside of fs.forward()"),
    "gathered": (lambda: fs.gather(part(), comm=ONLY)["w"], TreeError, "all of its elements in flat buffers."),
    "a weight": (lambda: torch.nn.functional.linear(SHARED, part()), TreeError, "unit (root): used in linear, but outside"),
    "a shape": (lambda: part().shape, AttributeError, "no attribute 'shape'. Compute with it in a function: fs.forward(fn,"),
    "in a list": (lambda: torch.stack([part()]), TreeError, "unit (root): used in stack, but outside of fs.forward()"),
    "an initializer": (
        lambda: fs.init_params(torch.nn.init.normal_, planned(), ONLY, key=0),
        TypeError,
        "init_params(): the initializer failed on 'b'. It is called as fn(tensor, generator).",
    ),
    "a state for parameters": (
        lambda: fs.init_state(fs.optim.sgd(0.1), state(), comm=ONLY),
        TreeError,
        "init_state(): got a TrainState, expected parameters. For fresh optimizer state pass state.params.",
    ),
    "an optimizer that was not called": (
        lambda: fs.init_state(fs.optim.adamw, part(), comm=ONLY),
        TreeError,
        "such as fs.optim.adamw(1e-3), got the function adamw.",
    ),
    "a complex leaf": (
        lambda: fs.plan({"w": torch.ones(2, dtype=torch.complex64, requires_grad=True)}, ONE, fs.zero3("dp")),
        LayoutError,
        "'w' is torch.complex64 and requires a gradient, and complex leaves are not trained. Pass torch.view_as_real(leaf)",
    ),
    "no strategy": (lambda: fs.plan(make(), ONE, None), LayoutError, "strategy has None, expected a Strategy such as zero3("),
    "a plan of a generator": (
        lambda: fs.plan(MODULE.parameters(), ONE, fs.zero3("dp")),
        TreeError,
        "Pass a tree of tensors, such as {'w': torch.ones(2)}, or the parameters of fs.make_functional().",
    ),
    "no runs to compare": (lambda: equivalent([make()], {}), OptionError, "assert_equivalent(): runs is empty"),
    "no steps to compare": (
        lambda: equivalent([], {"a": (ONE, fs.ddp("dp"))}),
        OptionError,
        "assert_equivalent(): batches is empty",
    ),
    "a batch that ranks cannot share": (
        lambda: equivalent([torch.ones(6, 3)], {"a": (fs.Mesh({"dp": 4}), fs.ddp("dp"))}),
        OptionError,
        "assert_equivalent(): batches[0] has a tensor of shape [6, 3], and runs['a'] needs 4 equal parts.",
    ),
    "a run without a mesh": (
        lambda: equivalent([make()], {"a": fs.ddp("dp")}),
        OptionError,
        "optim=Replicate..., expected a pair (mesh, strategy).",
    ),
    "sizes in place of a mesh": (
        lambda: generate.strategies({"dp": 2}),
        OptionError,
        "strategies(): mesh is {'dp': 2}, expected",
    ),
    "a number to gather": (
        lambda: fs.collectives.all_gather_last(torch.tensor(1.0), ONLY, "dp"),
        TreeError,
        "all_gather_last(): x has no dims, expected at least one. Pass x.view(1).",
    ),
    "sizes for a mesh": (lambda: fs.connect({"dp": 1}), OptionError, "expected a Mesh, such as fs.Mesh({'dp': 8})"),
    "a step in a text": (
        lambda: fs.resilience.IndexSampler(10, 4, seed=0).indices("0"),
        OptionError,
        "IndexSampler.indices(): step is '0', expected an int",
    ),
    "a device": (lambda: fs.connect(ONE, device_type="gpu"), OptionError, "device_type is 'gpu', expected 'cuda' or 'cpu' or"),
    "no checkpoint": (
        lambda: fs.checkpoint.load("/nowhere", make(), comm=ONLY),
        fs.errors.CheckpointError,
        "empty or does not exist. fs.ch",
    ),
    "a wildcard": (lambda: planned(tree={"as": [SHARED]}, units="a.*"), PatternError, "closest  as.*"),
    "a decay": (lambda: fs.optim.adamw(0.1, b1=1.5), OptionError, "adamw(): b1 is 1.5, expected a number in [0, 1)."),
    "a decay of muon": (lambda: fs.optim.muon(0.1, beta=1.0), OptionError, "muon(): beta is 1.0, expected a number in [0, 1)."),
    "a path of a decay": (
        lambda: state(fs.optim.adamw(0.1, weight_decay={"**": 0.1, "v": 0.0})),
        PatternError,
        "pattern 'v' matches nothing",
    ),
}


def total3(params, batch, comm):
    return total(params)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_remedy(name):
    run, error, text = MISTAKES[name]
    with pytest.raises(error, match=re.escape(text)):
        run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_there_is_not():
    with pytest.raises(OptionError, match=r"connect\(\): device_type is 'cuda', and this machine has no GPU"):
        fs.connect(ONE, device_type="cuda")


def test_a_run_that_is_not_open(tmp_path):
    run = fs.resilience.Run(tmp_path, comm=ONLY, total=1, save_every=1)
    for begin in run.resume, lambda tree: run.train(lambda tree, number: tree, tree):
        with pytest.raises(fs.errors.RunError, match=r"the run is not open\. Use it as a context: with fs\.resilience\.Run\("):
            begin(part())


def test_callables_without_a_plain_signature_are_losses():
    for loss in functools.partial(total3), functools.wraps(len)(lambda params, batch, comm: 0), lambda *args: 0, torch.add:
        fs.value_and_grad(loss)
