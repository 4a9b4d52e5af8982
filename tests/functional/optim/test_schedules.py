"""Schedules against those of optax with their names, for counts that are numbers and for tensors."""

import optax
import pytest
import torch

import fsharp as fs

CASES = [
    ("constant_schedule", (0.3,), {}),
    ("linear_schedule", (0.1, 1.0, 7), {}),
    ("linear_schedule", (1.0, 0.1, 7, 3), {}),
    ("linear_schedule", (1.0, 0.1, 0), {}),
    ("linear_schedule", (1.0, 0.1, -2, 1), {}),
    ("cosine_decay_schedule", (0.5, 10), {}),
    ("cosine_decay_schedule", (0.5, 10, 0.1, 2.0), {}),
    ("warmup_cosine_decay_schedule", (0.0, 1.0, 4, 12), {}),
    ("warmup_cosine_decay_schedule", (0.2, 1.0, 4, 12), {"end_value": 0.1, "exponent": 0.5}),
    ("warmup_cosine_decay_schedule", (0.2, 1.0, 0, 1), {}),
    ("warmup_cosine_decay_schedule", (0.2, 0.0, 2, 4), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), CASES)
def test_values_are_those_of_optax(name, args, options):
    ours, theirs = getattr(fs.optim, name)(*args, **options), getattr(optax, name)(*args, **options)
    for count in range(15):
        expected = float(theirs(count))
        assert ours(count) == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert float(ours(torch.tensor(float(count)))) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_joined_schedules_are_those_of_optax():
    def join(of):
        parts = [of.constant_schedule(0.1), of.linear_schedule(0.0, 1.0, 4), of.cosine_decay_schedule(1.0, 5)]
        return of.join_schedules(parts, [3, 8])

    ours, theirs = join(fs.optim), join(optax)
    for count in range(15):
        assert ours(count) == pytest.approx(float(theirs(count)), rel=1e-5, abs=1e-7)
        assert float(ours(torch.tensor(float(count)))) == pytest.approx(float(theirs(count)), rel=1e-5, abs=1e-7)


def test_a_repr_has_all_numbers_and_no_address():
    schedules = [getattr(fs.optim, name)(*args, **options) for name, args, options in CASES]
    texts = [repr(fs.optim.join_schedules([schedule, lambda count: 0.0], [5])) for schedule in schedules]
    assert len(set(texts)) == len(texts)
    rules = [fs.optim.sgd(fs.optim.join_schedules([schedule, lambda count: 0.0], [5])) for schedule in schedules for _ in "ab"]
    configs = {repr(tx.config) for tx in rules}
    assert len(configs) == len(texts)
    assert not any(" at 0x" in text for text in configs)
