"""Scales of TransformerEngine's delayed scaling, which modules keep for their weights.

A module keeps a scale and a history of maxima for each weight. An update casts new values with the present scale, and writes
their maximum into the history. The next forward makes the next scale from the history.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fsharp.errors import AgreementError, OptionError, problem
from fsharp.functional.formats.format import AgreeMax, Format, first_few

NUMBERS_PER_WEIGHT = 3
"""Number of a weight's values on which ranks agree in an update: its maximum, its scale, and the negative scale."""


def copy_of_quantizer(quantizer: Any, *, columnwise: bool) -> Any:
    """Return a copy of a quantizer that makes rowwise data, and with ``columnwise`` also columnwise data."""
    found = quantizer.copy()
    found.set_usage(rowwise=True, columnwise=columnwise)
    found.internal = False
    return found


class ModuleScales:
    """The scales and histories of maxima that modules keep for their weights.

    Each use looks these tensors up in the module, as TransformerEngine may put other tensors in their place.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[weakref.ref[torch.nn.Module], int]] = {}

    def add(self, path: str, module: torch.nn.Module, name: str) -> None:
        """Add the weight ``module.<name>``, at ``path``. OptionError if ``module.param_init_meta`` does not know its scale."""
        about: Any = getattr(module, "param_init_meta", {}).get(name)
        if about is None or about.fp8_meta_index is None:
            raise OptionError(
                f"a {type(module).__name__} does not say where it keeps the scale of {name!r}, as modules with weights in "
                "delayed scaling do. Keep the weight in bfloat16."
            )
        self._places[path] = weakref.ref(module), about.fp8_meta_index

    def quantizer(self, path: str) -> Any:
        """Return a quantizer for the weight at ``path``. Its scale and newest maximum are views of the module's tensors.

        Raises OptionError if the module has been freed.
        """
        ref, index = self._places[path]
        module: Any = ref()
        if module is None:
            raise OptionError(f"the module that keeps the scale of {path!r} is gone. Keep it as long as its parameters.")
        return copy_of_quantizer(module.quantizers["scaling_fwd"][index], columnwise=False)

    @contextmanager
    def comparing_scales_across_ranks(self, paths: Sequence[str], agree: AgreeMax) -> Iterator[AgreeMax]:
        """Yield a function that does as ``agree`` does, and also compares the scales of the weights at ``paths`` between ranks.

        If the scales of a weight differ, all ranks raise an AgreementError at the end of the context, which names the weight.
        (In the function itself torch's ``all_reduce`` would hide the error.)
        """
        scales = torch.cat([self.quantizer(path).scale.view(1) for path in paths])
        largest = [torch.cat([scales, -scales])]

        def agree_on(maxima: torch.Tensor) -> None:
            numbers = torch.cat([maxima, scales, -scales])
            agree(numbers)
            maxima.copy_(numbers[: len(maxima)])
            largest[0] = numbers[len(maxima) :]

        yield agree_on
        high, low = largest[0].chunk(2)
        if different := [path for path, is_same in zip(paths, (high == -low).tolist(), strict=True) if not is_same]:
            i = paths.index(different[0])
            facts = [("weights", first_few(different)), ("scales", f"{-float(low[i])} to {float(high[i])}")]
            remedy = "Load the same extra state on all ranks, and run the same forwards."
            raise AgreementError(problem("delayed scaling", "ranks have different scales of a weight.", facts, remedy))

    @contextmanager
    def restoring_maxima(self) -> Iterator[None]:
        """Return a context for casts that must not count: at its end the newest maximum of each weight is as before."""
        newest = [self.quantizer(path).amax for path in self._places]
        before = [x.clone() for x in newest]
        try:
            yield
        finally:
            for x, value in zip(newest, before, strict=True):
                x.copy_(value)


@dataclass(frozen=True, slots=True)
class ModuleFormat(Format):
    """A format with ``scales`` that one module keeps. Formats of two modules are not equal, even with one name."""

    scales: ModuleScales = field(repr=False, default_factory=ModuleScales)
