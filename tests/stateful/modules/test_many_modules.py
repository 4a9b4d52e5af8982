"""shard_module of deep and of wide modules: calls of Python functions do not grow much faster than the number of modules."""

import sys

import torch
from torch import nn

import fsharp as fs
from tests.scheduling import every


class Chain(nn.Module):
    """Linear maps, one inside of the other."""

    def __init__(self, depth):
        super().__init__()
        self.own = nn.Linear(2, 2)
        if depth > 1:
            self.inner = Chain(depth - 1)


class Wide(nn.Sequential):
    """Linear maps beside each other."""

    def __init__(self, width):
        super().__init__(*[nn.Linear(2, 2) for _ in range(width)])


def num_calls(kind, size, device, units):
    with torch.device(device):
        module = kind(size)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        fs.shard_module(module, mesh=fs.SingleComm(fs.Mesh({"dp": 1})), units=units)
    finally:
        sys.setprofile(before)
    return calls


CASES = [(Chain, 40, None, 3.1), (Wide, 100, None, 2.02), (Wide, 100, [nn.Linear], 2.02), (Chain, 40, [Chain], 3.4)]


@every(2, case=CASES, device=["cpu", "meta"])
def test_twice_as_many_modules_take_about_twice_as_many_calls(case, device):
    """A walk of torch over a chain takes three times as many: its generators are as deep as the chain."""
    kind, size, units, most = case
    num_calls(kind, 10, device, units)  # fills caches
    once, twice = (num_calls(kind, n, device, units) for n in (size // 2, size))
    assert twice < most * once
