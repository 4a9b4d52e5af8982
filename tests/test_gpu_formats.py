"""Formats on a CUDA device: the codes of a CPU, and, on ranks that share the device, the bits of blocking steps."""

from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.functional.formats.stochastic import make_noise_fn
from fsharp.testing import DebugPolicy, processes, simulate
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import STRATEGIES, assert_same, make_state, make_tx, my_batches
from tests.virtual_device import SIDES, accelerator as accelerator, gpu as gpu

MXINT4, MXINT8 = fs.formats.mxint4, fs.formats.mxint8
BY_BLOCK = [MXINT8, MXINT4, fs.formats.mxfp8, fs.formats.mxfp8_e5m2, fs.formats.mxfp4, fs.formats.hadamard(MXINT4)]
NOISY = [fs.formats.stochastic(each) for each in (*BY_BLOCK, torch.bfloat16)]
MIXED = {"compute": torch.bfloat16, "main": torch.float32}
PRECISIONS = {
    "8 and 4 bits": fs.Precision(**MIXED, stored=MXINT8, wire=MXINT4),
    "feedback": fs.Precision(main=torch.float32, wire=fs.formats.hadamard(MXINT4), feedback=True),
    "stochastic": fs.Precision(**MIXED, stored=fs.formats.mxfp8, wire=fs.formats.stochastic(MXINT4)),
    "stochastic differences": fs.Precision(**MIXED, update=fs.formats.stochastic(torch.bfloat16)),
    "by tensor": fs.Precision(**MIXED, stored=fs.formats.float8_e4m3_by_tensor),
    "nvfp4": fs.Precision(**MIXED, stored=fs.formats.nvfp4),
    "differences": fs.Precision(**MIXED, update=MXINT4),
}
CASES = [
    (name, strategy)
    for name, each in PRECISIONS.items()
    for strategy in (["zero1"] if each.update else ["zero3", "zero1", "hsdp"])
]
POLICIES = {"default": {}, "buckets": {"prefetch": 2, "bucket_nbytes": 2000}, "offload": {"offload": True}}
ALL = [(policy, *case) for policy in POLICIES for case in CASES]
CHOSEN = [
    ("default", "8 and 4 bits", "hsdp"),
    ("default", "feedback", "zero3"),
    ("buckets", "stochastic", "zero1"),
    ("offload", "stochastic differences", "zero1"),
    ("offload", "by tensor", "zero3"),
    ("default", "nvfp4", "zero3"),
    ("default", "differences", "zero1"),
]
"""Each precision once, and each policy and strategy."""


class OnOneDevice:
    """A Comm of tensors on a GPU, by a Comm of tensors in host memory: its ranks share the GPU."""

    def __init__(self, host):
        self.host, self.mesh, self.rank, self.device = host, host.mesh, host.rank, torch.device("cuda", 0)
        self.tree_label_counters = host.tree_label_counters

    def all_gather(self, x, axis, **options):
        return self.host.all_gather(x.cpu(), axis, **options).cuda()

    def reduce_scatter(self, x, axis, **options):
        return self.host.reduce_scatter(x.cpu(), axis, **options).cuda()

    def all_reduce(self, x, axis, **options):
        return self.host.all_reduce(x.cpu(), axis, **options).cuda()

    def all_to_all(self, x, send, receive, **options):
        return self.host.all_to_all(x.cpu(), send, receive, **options).cuda()

    def __getattr__(self, name):
        return getattr(self.host, name)


def some_values():
    values = torch.randn(64 * 32, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-30, 34).repeat(32)
    values[:5] = torch.tensor([0.0, 1e-40, torch.inf, -torch.inf, torch.nan])
    values[64:96] = 0
    return values


@pytest.mark.parametrize("form", [*BY_BLOCK, *NOISY], ids=lambda form: form.name)
def test_codes_are_those_of_the_cpu(gpu, form):
    values = some_values()
    noise = make_noise_fn("gradient", 3, 0, [(0, len(values), "w", 0)]) if form in NOISY else None
    codes = form.store(values, len(values), noise_fn=noise)
    found = form.store(values.cuda(), len(values), noise_fn=noise)
    expected = form.load(codes, len(values), torch.float32)
    for decoded in (form.load(found, len(values), torch.float32).cpu(), form.load(found.cpu(), len(values), torch.float32)):
        torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)  # NaN has many codes


def trained(comm, strategy, policy, precision, microbatches):
    """Losses, parameters and residuals of three steps by a scheduler; by the blocking path where ``policy`` is None."""
    params = optree.tree_map(torch.Tensor.cuda, make_params(layers=1))
    state = make_state(comm, strategy, params=params, precision=precision)
    step = fs.train_step(loss_fn, make_tx(), microbatches=microbatches, donate=True)
    call = partial(step, comm=comm)
    if policy is not None:
        call = fs.Scheduler(comm, policy=DebugPolicy(poison=True, **policy))(step)
    losses = []
    for batch in my_batches(comm, 3):
        state, metrics = call(state, optree.tree_map(torch.Tensor.cuda, batch))
        losses.append(metrics.loss.cpu())
    if policy is not None:
        assert call.num_unscheduled_calls == 1
    return losses, optree.tree_map(torch.Tensor.cpu, (fs.full_tree(state.params, comm=comm), state.residuals))


def compare_paths(comm, policy, name, strategy):
    comm = OnOneDevice(comm)
    how = {"precision": PRECISIONS[name], "microbatches": 1 if policy == "default" else 2}
    assert_same(trained(comm, strategy, POLICIES[policy], **how), trained(comm, strategy, None, **how))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("policy", "name", "strategy"), [case if case in CHOSEN else pytest.param(*case, marks=pytest.mark.deep) for case in ALL]
)
def test_scheduled_steps_have_the_bits_of_blocking_ones(side, policy, name, strategy, accelerator):
    """Autograd has one thread for each GPU, in which ranks that are threads would wait for each other: these are processes."""

    def on_virtual_device(comm):
        with accelerator():
            compare_paths(comm, policy, name, strategy)

    if side == "virtual":
        simulate(STRATEGIES[strategy][0], on_virtual_device)
    else:
        processes(STRATEGIES[strategy][0], partial(compare_paths, policy=policy, name=name, strategy=strategy))
