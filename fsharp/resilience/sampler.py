"""IndexSampler: which samples a step takes, as a pure function of the step."""

from collections.abc import Iterator
from typing import Any

import torch

from fsharp.errors import RunError
from fsharp.resilience.randomness import fold_in
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_explained


@options_explained
class IndexSampler:
    """The samples of each step: all of them in each epoch, in another order each time.

    Which samples are in step ``s`` depends on the arguments here and on ``s`` alone: a run that begins again at a step, on
    any number of ranks, takes those that it would have taken. Steps go on over the end of an epoch, so none is smaller.

    >>> sampler = IndexSampler(10, 4, seed=0)
    >>> whole = sampler.indices(7)
    >>> halves = [sampler.indices(7, rank=rank, num_ranks=2) for rank in range(2)]
    >>> bool((torch.cat(halves) == whole).all())
    True

    Args:
        num_samples: in the data set.
        batch_size: samples that all ranks take together in a step.
        seed: of the order; any integer.
        shuffle: False keeps them in order, and each epoch the same.
        uneven: allow a number of ranks that does not divide ``batch_size``; the first ranks then have one sample more. The loss
            has to be a ``(sum, weight)`` pair: a mean would give the samples of a smaller part more weight.

    Raises:
        RunError: numbers that are not positive integers, or a seed that is not an integer.

    Cost: 8 bytes a sample for each of the last two epochs asked for, and a ``randperm`` when an epoch is first asked for.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int, shuffle: bool = True, uneven: bool = False) -> None:
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if type(value) is not int or value < 1:
                raise RunError(f"IndexSampler(): {name} is {value!r}, expected an integer of at least 1.")
        if type(seed) is not int:
            raise RunError(f"IndexSampler(): seed is {seed!r}, expected an integer.")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.shuffle, self.uneven = shuffle, uneven
        self._orders: dict[int, torch.Tensor] = {}

    @api_boundary
    def indices(self, step: int, *, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """Return the indices that a rank takes in a step: int64, consecutive parts of the step's batch in order of rank.

        Args:
            step: from 0.
            rank: of those that take different samples: ``comm.rank``, or the coordinate along the axes of data parallelism.
            num_ranks: how many there are.

        Raises:
            RunError: a negative step, a rank that there is not, or ranks that do not divide the batch (see ``uneven``).
        """
        if step < 0 or not 0 <= rank < num_ranks:
            raise RunError(
                f"indices(): step is {step}, rank {rank} of {num_ranks}; expected a step from 0 and a rank below num_ranks."
            )
        if self.batch_size % num_ranks and not self.uneven:
            raise RunError(
                f"indices(): batch_size is {self.batch_size}, which {num_ranks} ranks do not divide. Take another batch_size, "
                "or pass uneven=True with a loss that is a (sum, weight) pair."
            )
        size, more = divmod(self.batch_size, num_ranks)
        first = step * self.batch_size + rank * size + min(rank, more)
        return self._between(first, first + size + (rank < more))

    @api_boundary
    def batches(self, start: int = 0, *, rank: int = 0, num_ranks: int = 1) -> Iterator[list[int]]:
        """Yield a rank's indices of step ``start`` and all after it, without end: a ``batch_sampler`` for a ``DataLoader``.

        It knows nothing of steps that a Run goes back to or leaves out: make another one after ``"roll back"``.
        """
        step = start
        while True:
            yield self.indices(step, rank=rank, num_ranks=num_ranks).tolist()
            step += 1

    def epoch(self, step: int) -> int:
        """Return in which epoch, from 0, a step begins."""
        return step * self.batch_size // self.num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the settings that decide the order of samples, as integers. The step is left out: the run counts steps."""
        return {name: int(getattr(self, name)) for name in ("num_samples", "batch_size", "seed", "shuffle")}

    @api_boundary
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse, with a RunError, a sampler with another order, whose steps have other samples. Nothing is loaded."""
        mine = self.state_dict()
        other = [name for name in mine if state.get(name) != mine[name]]
        rows = [f"{name} was {state.get(name)!r}, here it is {mine[name]!r}" for name in other]
        if rows:
            raise RunError(
                f"IndexSampler.load_state_dict(): the saved order of samples is another one ({'; '.join(rows)}). Make the "
                "sampler with the saved values, or leave it out of what is resumed to begin a new order."
            )

    def _between(self, first: int, last: int) -> torch.Tensor:
        """Return consecutive samples of all epochs one after the other."""
        found = []
        while first < last:
            epoch, start = divmod(first, self.num_samples)
            stop = min(start + last - first, self.num_samples)
            found.append(self._order(epoch)[start:stop])
            first += stop - start
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            epoch = 0
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            generator = torch.Generator().manual_seed(fold_in(self.seed, epoch))
            shuffled = torch.randperm(self.num_samples, generator=generator) if self.shuffle else torch.arange(self.num_samples)
            self._orders[epoch] = shuffled
        return self._orders[epoch]
