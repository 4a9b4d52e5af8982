"""A default dtype or device that torch is told changes no number of the library."""

import optree
import pytest
import torch

import fsharp as fs
from fsharp.functional.formats.stochastic import make_noise_fn

ONE = fs.SingleComm()
TREE = {"w": torch.arange(1.0, 5.0)}
LAYOUT = fs.plan(TREE, ONE.mesh, fs.zero3("dp"))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def sharded():
    return fs.shard(TREE, LAYOUT, ONE)


def test_a_capturable_count_is_float32(default_dtype):
    params, tx = sharded(), fs.optim.adamw(0.1, capturable=True)
    assert fs.init_state(tx, params, comm=ONE).opt.count.dtype == torch.float32


def test_adamw_counts_beyond_256(default_dtype):
    params, tx = sharded(), fs.optim.adamw(0.1)
    state = fs.init_state(tx, params, comm=ONE)
    state = state._replace(opt=state.opt._replace(count=256))
    found = fs.update(tx, optree.tree_map(torch.ones_like, params), state, comm=ONE).params.buffers[0]
    p, m, v = (torch.arange(1.0, 5.0, dtype=torch.float32), *torch.zeros(2, 4, dtype=torch.float32))
    torch._fused_adamw_(
        [p], [torch.ones_like(p)], [m], [v], [], [torch.full((), 257.0, dtype=torch.float32)],
        lr=0.1, beta1=0.9, beta2=0.999, weight_decay=1e-4, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert torch.equal(found, p)


def test_random_numbers_are_float32(default_dtype):
    noise = make_noise_fn("gradient", 0, 0, [(0, 1000, "w", 0)])(0, 1000, torch.device("cpu"))
    assert (noise.dtype, len(noise.unique()) > 900) == (torch.float32, True)


@pytest.mark.parametrize("weight", [257.0, 16_777_217.0])
def test_a_weight_keeps_its_digits(default_dtype, weight):
    def loss(p, _, comm):
        return fs.forward(lambda t: t["w"].sum(), p, comm=comm), weight

    found, _ = fs.value_and_grad(loss)(sharded(), None, comm=ONE)
    assert float(found.weight) == weight


def test_under_a_default_device_values_are_still_drawn_on_the_cpu():
    drawn = fs.init_params(fs.init.normal(), LAYOUT, ONE, key=0, device="cpu")
    with torch.device("meta"):
        again = fs.init_params(fs.init.normal(), LAYOUT, ONE, key=0, device="cpu")
    assert all(map(torch.equal, optree.tree_leaves(again), optree.tree_leaves(drawn)))


def test_under_a_default_device_a_pair_is_tried():
    params = sharded()
    pair = (lambda p: (), lambda g, s, p: (optree.tree_map(lambda g: -0.1 * g, g), s))
    with torch.device("meta"):
        state = fs.init_state(pair, params, comm=ONE)
    assert state.params.buffers[0].device.type == "cpu"
