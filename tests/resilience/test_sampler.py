"""Which samples are in a step depends on the step alone."""

import pytest
import torch
from hypothesis import given, strategies as st

from fsharp.errors import RunError
from fsharp.resilience import IndexSampler


@given(st.integers(1, 40), st.integers(1, 12), st.integers(-5, 2**63), st.integers(0, 30), st.integers(1, 5))
def test_ranks_share_one_batch_whatever_their_number(num_samples, batch_size, seed, step, num_ranks):
    whole = IndexSampler(num_samples, batch_size, seed=seed).indices(step)
    sampler = IndexSampler(num_samples, batch_size, seed=seed, uneven=True)
    parts = [sampler.indices(step, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert torch.cat(parts).tolist() == whole.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part.dtype == torch.int64 for part in parts)


@given(st.integers(1, 30), st.integers(1, 7), st.booleans())
def test_each_epoch_has_every_sample_once(num_samples, batch_size, shuffle):
    sampler = IndexSampler(num_samples, batch_size, seed=3, shuffle=shuffle)
    drawn = torch.cat([sampler.indices(step) for step in range(3 * num_samples)])
    for epoch in range(3):
        samples = drawn[epoch * num_samples : (epoch + 1) * num_samples].tolist()
        if len(samples) == num_samples:
            assert sorted(samples) == list(range(num_samples))
        assert shuffle or samples == sorted(samples)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [IndexSampler(100, 100, seed=seed).indices(step).tolist() for seed in range(2) for step in range(2)]
    assert len({tuple(order) for order in orders}) == 4


def test_steps_may_be_asked_for_in_any_order():
    again = IndexSampler(17, 5, seed=0)
    asked = {step: again.indices(step).tolist() for step in (40, 3, 0, 41, 17, 3)}
    assert all(IndexSampler(17, 5, seed=0).indices(step).tolist() == found for step, found in asked.items())
    assert len(again._orders) <= 2


def test_torchs_generator_is_neither_used_nor_changed():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = IndexSampler(50, 50, seed=1).indices(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(IndexSampler(50, 50, seed=1).indices(0), found)


def test_batches_are_a_batch_sampler_of_a_data_loader():
    sampler = IndexSampler(20, 4, seed=0)
    loader = torch.utils.data.DataLoader(range(20), batch_sampler=sampler.batches(3, rank=1, num_ranks=2))
    for step, batch in zip(range(3, 9), loader):
        assert batch.tolist() == sampler.indices(step, rank=1, num_ranks=2).tolist()
    assert [sampler.epoch(step) for step in (0, 4, 5, 10)] == [0, 0, 1, 2]


def test_state_is_integers_and_another_order_is_refused():
    state = IndexSampler(20, 4, seed=7).state_dict()
    assert all(type(value) is int for value in state.values())
    IndexSampler(20, 4, seed=7).load_state_dict(state)
    with pytest.raises(RunError, match="seed was 7, here it is 8"):
        IndexSampler(20, 4, seed=8).load_state_dict(state)
    with pytest.raises(RunError, match="batch_size was 4, here it is 5"):
        IndexSampler(20, 5, seed=7).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: IndexSampler(0, 1, seed=0), "num_samples is 0"),
        (lambda: IndexSampler(4, 2.0, seed=0), r"batch_size is 2\.0"),
        (lambda: IndexSampler(4, 2, seed=None), "seed is None"),
        (lambda: IndexSampler(4, 2, seed=0).indices(-1), "step is -1"),
        (lambda: IndexSampler(4, 2, seed=0).indices(0, rank=2, num_ranks=2), "rank is 2, expected 0 to 1, as num_ranks is 2"),
        (lambda: IndexSampler(4, 2, seed=0).indices(0, num_ranks=0), "num_ranks is 0, expected at least 1"),
        (lambda: IndexSampler(4, 2, seed=0).indices(0, rank=0, num_ranks=3), "batch_size is 2, which 3 ranks"),
    ],
)
def test_arguments_that_are_refused(make, match):
    with pytest.raises(RunError, match=match):
        make()
