"""CUDA graphs, as far as they need no GPU: the batches that a captured step takes."""

import numpy as np
import pytest
import torch

from fsharp.errors import ScheduleError
from fsharp.stateful.runtime.graphs import pairs_to_copy

KEPT = np.zeros(3)
CAPTURED = {"x": torch.zeros(2, 3), "scale": 0.5, "more": (torch.zeros(4, dtype=torch.int64), None, "text", KEPT)}


def test_a_captured_step_takes_new_values_of_all_tensors():
    given = {"x": torch.ones(2, 3), "scale": 0.5, "more": (torch.ones(4, dtype=torch.int64), None, "text", KEPT)}
    pairs = pairs_to_copy(CAPTURED, given)
    assert [(id(a), id(b)) for a, b in pairs] == [
        (id(CAPTURED["more"][0]), id(given["more"][0])),
        (id(CAPTURED["x"]), id(given["x"])),
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scale": 0.7}, r"leaf 'scale' of the batch is 0.7, captured as 0.5.(\n|.)*pass what changes as a tensor"),
        ({"scale": torch.tensor(0.5)}, r"is float32\[\], captured as 0.5"),
        ({"x": 1.0}, r"leaf 'x' of the batch is 1.0, captured as float32\[2, 3\]"),
        ({"x": torch.zeros(3, 3)}, r"is float32\[3, 3\], captured as float32\[2, 3\]"),
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, r"is float64\[2, 3\], captured as float32"),
        ({"more": (CAPTURED["more"][0], None, "text", np.zeros(3))}, r"leaf 'more.3' of the batch is array"),
        ({"more": (CAPTURED["more"][0], 1, "text", KEPT)}, "has the structure"),
        ({"new": 1}, "has the structure"),
    ],
)
def test_a_captured_step_refuses_what_its_graph_would_not_see(change, match):
    with pytest.raises(ScheduleError, match=match):
        pairs_to_copy(CAPTURED, CAPTURED | change)
