"""Functions of JAX that are pickled, and processes that are forked after JAX was used."""

import os
import pickle
import select
import signal

import cloudpickle
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.interop.jax import as_torch, make_functional, to_jax, to_tensors


@as_torch
def doubled(x):
    return 2 * x


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    @as_torch
    def times(self, x):
        return x * self.factor

    def __hash__(self):
        return hash(self.factor)

    def __eq__(self, other):
        return self.factor == other.factor


def gradient(fn, *args):
    x = torch.linspace(-1, 1, 5).requires_grad_()
    fn(x, *args).sum().backward()
    return x.grad


def test_functions_travel_by_cloudpickle_before_and_after_their_first_call():
    factor = jnp.float32(3.0)
    fn = as_torch(lambda x, n: jnp.sin(x) * factor**n)
    again = cloudpickle.loads(cloudpickle.dumps(fn))
    expected = gradient(fn, 2)
    for each in (again, cloudpickle.loads(cloudpickle.dumps(fn))):
        assert torch.equal(gradient(each, 2), expected)
        assert torch.equal(each(torch.ones(2), n=1), fn(torch.ones(2), n=1))


def test_functions_of_a_module_travel_by_name():
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert cloudpickle.loads(cloudpickle.dumps(doubled)) is doubled
    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert doubled.__name__ == "doubled"


def test_methods_are_bound():
    assert Scaled(3.0).times(torch.ones(2)).tolist() == [3, 3]
    assert Scaled.times(Scaled(4.0), torch.ones(2)).tolist() == [4, 4]


def test_functions_of_modules_travel():
    equinox = pytest.importorskip("equinox")
    import jax

    fn, params = make_functional(equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)))
    expected = fn(params, torch.ones(3))
    assert torch.equal(cloudpickle.loads(cloudpickle.dumps(fn))(params, torch.ones(3)), expected)


def begin(tx):
    comm = fs.SingleComm(fs.Mesh({"dp": 1}))
    layout = fs.plan({"w": torch.ones(3)}, comm.mesh, fs.zero3("dp"))
    return fs.init_state(tx, fs.shard({"w": torch.ones(3)}, layout, comm, place="optim"), comm=comm), layout


CALLS = {
    "as_torch()": lambda: doubled(torch.ones(2)),
    "from_optax()": lambda: begin(fs.optim.from_optax(optax.adam(1e-2))),
    "to_jax()": lambda: to_jax(*begin(fs.optim.adamw(1e-2))),
    "to_tensors()": lambda: to_tensors({"w": np.ones(3, np.float32)}),
}


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused_instead_of_waiting():
    doubled(torch.ones(2))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in CALLS.values():
                with pytest.raises(TreeError, match="was forked from") as caught:
                    call()
                os.write(writing, f"{caught.value}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    text = b""
    while select.select([reading], [], [], 200)[0] and (piece := os.read(reading, 1 << 16)):
        text += piece
    os.close(reading)
    os.kill(child, signal.SIGKILL)  # if it waits
    os.waitpid(child, 0)
    lines = text.decode().splitlines()
    assert [line.split(":")[0] for line in lines] == list(CALLS)
    assert all(f"process {child} was forked from a process" in line and 'get_context("spawn")' in line for line in lines)
    assert doubled(torch.ones(2)).tolist() == [2, 2]
