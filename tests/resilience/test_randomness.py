"""Random numbers that a step draws whenever it is computed."""

import pytest
import torch
import torch.nn.functional as F

from fsharp.errors import RunError
from fsharp.resilience import fold_in, seeded


def test_keys_differ_and_fit_a_generator():
    keys = {fold_in(key, step, rank) for key in (-1, 0, 2**70) for step in range(20) for rank in range(20)}
    assert len(keys) == 3 * 20 * 20
    assert all(0 <= key < 2**63 for key in keys)
    assert fold_in(1, 23) != fold_in(12, 3)


@pytest.mark.parametrize("bad", [(0, 1.0), ("a",), (0, True)])
def test_keys_are_made_of_integers(bad):
    with pytest.raises(RunError, match="expected integers"):
        fold_in(*bad)


def test_a_step_drops_the_same_elements_and_leaves_generators_as_they_were():
    x = torch.ones(1000)
    torch.manual_seed(0)
    torch.rand(3)
    before = torch.get_rng_state()
    with seeded(5, 7, 1):
        first = F.dropout(x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(99)
    with seeded(5, 7, 1):
        assert torch.equal(F.dropout(x), first)
    for other in ((5, 7, 0), (5, 8, 1), (6, 7, 1)):
        with seeded(*other):
            assert not torch.equal(F.dropout(x), first)


def test_nested_and_after_an_error_generators_are_given_back():
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def fail():
        with seeded(0):
            torch.rand(1)
            inside = torch.get_rng_state()
            with seeded(1):
                torch.rand(1)
            assert torch.equal(torch.get_rng_state(), inside)
            raise KeyError("left by an error")

    with pytest.raises(KeyError, match="left by an error"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
