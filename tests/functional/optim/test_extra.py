"""Extra arguments of an update: they reach the transformation that uses them, and one that none uses is refused."""

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError

ONE = fs.SingleComm()
INNER = fs.optim.Transform(
    lambda params: (), lambda grads, state, params, *, factor=1.0: (optree.tree_map(lambda g: factor * g, grads), state), {}
)
PAIR = (lambda params: (), lambda grads, state, params, *, factor=1.0: (optree.tree_map(lambda g: factor * g, grads), state))
AROUND = {
    "itself": lambda tx: tx,
    "chain": lambda tx: fs.optim.chain(fs.optim.scale(1.0), tx, fs.optim.scale(1.0)),
    "partition": lambda tx: fs.optim.partition({"default": tx}),
    "partition by path": lambda tx: fs.optim.partition({"all": tx}, {"**": "all"}),
    "masked": lambda tx: fs.optim.masked(tx, "**"),
    "with_ema": lambda tx: fs.optim.with_ema(tx, decay=0.5),
    "apply_if_finite": lambda tx: fs.optim.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: fs.optim.MultiSteps(tx, 1),
    "inject_hyperparams": lambda tx: fs.optim.inject_hyperparams(lambda rate: fs.optim.chain(fs.optim.scale(rate), tx))(1.0),
    "with_elementwise_check": lambda tx: fs.optim.with_elementwise_check(PAIR),
}


def begin(tx):
    params = {"w": torch.arange(4.0)}
    layout = fs.plan(params, fs.Mesh({"dp": 1}), fs.zero3("dp"))
    return fs.init_state(tx, fs.shard(params, layout, ONE), comm=ONE), fs.shard(
        {"w": torch.ones(4)}, layout, ONE, place="optim"
    )


@pytest.mark.parametrize("around", AROUND)
def test_what_an_inner_transformation_uses_reaches_it_and_nothing_else_is_taken(around):
    tx = AROUND[around](INNER)
    state, grads = begin(tx)
    new = fs.update(tx, grads, state, comm=ONE, factor=3.0, value=1.0)
    assert fs.full_tree(new.params, comm=ONE)["w"].tolist() == [3.0, 4.0, 5.0, 6.0]
    with pytest.raises(OptionError, match=r"does not use fctor\.\n  got +fctor=3\.0\n  expected +factor or value\nCheck the"):
        fs.update(tx, grads, state, comm=ONE, factor=3.0, fctor=3.0)


@pytest.mark.parametrize(
    "tx", [fs.optim.adamw(0.1), fs.optim.lion(0.1), fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))]
)
def test_transformations_of_fsharp_take_the_value_alone(tx):
    state, grads = begin(tx)
    fs.update(tx, grads, state, comm=ONE, value=1.0)
    with pytest.raises(
        OptionError, match=rf"{tx.name.replace('(', '.')[:5]}.* does not use donated\.\n.*donated=True\n.* value\n"
    ):
        fs.update(tx, grads, state, comm=ONE, donated=True)


def test_a_pair_that_takes_any_argument_is_given_all():
    seen = []

    def update(grads, state, params, **extra):
        seen.append(extra)
        return grads, state

    state, grads = begin(tx := fs.optim.chain(((lambda params: ()), update)))
    seen.clear()
    fs.update(tx, grads, state, comm=ONE, foo=1)
    assert seen[-1]["foo"] == 1
