import torch

from fsharp.testing.generate import DTYPES, integers_on_cpu


def test_leaves_are_small_integers_and_complex_ones_have_imaginary_parts():
    """All imaginary parts were zero: a property test did not see that they were lost."""
    for dtype in DTYPES:
        drawn = integers_on_cpu(torch.empty(20, 3, dtype=dtype), 0)
        assert (drawn.shape, drawn.dtype) == ((20, 3), dtype)
        for part in torch.view_as_real(drawn).unbind(-1) if drawn.is_complex() else [drawn.double()]:
            assert part.any()
            assert part.equal(part.round())
            assert part.abs().max() <= 4
    assert integers_on_cpu(torch.empty((), dtype=torch.complex64), 1).shape == ()
