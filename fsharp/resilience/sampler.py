"""IndexSampler: the samples of a step, as a pure function of the step's number."""

from collections.abc import Iterator
from typing import Any

import torch

from fsharp.errors import RunError
from fsharp.resilience.randomness import fold_in
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked_on_failure


@options_checked_on_failure
class IndexSampler:
    """A sampler that computes the samples of a step from the number of the step. Each epoch has all samples, in a new order.

    The samples of step ``s`` depend on the arguments and on ``s`` alone. So a run that starts again at any step, on any number
    of ranks, takes the samples that it would have taken without the restart. A step may reach into the next epoch, so all steps
    have the same size.

    >>> sampler = IndexSampler(10, 4, seed=0)
    >>> whole = sampler.indices(7)
    >>> halves = [sampler.indices(7, rank=rank, num_ranks=2) for rank in range(2)]
    >>> bool((torch.cat(halves) == whole).all())
    True

    Args:
        num_samples: number of samples in the data set.
        batch_size: number of samples in a step, over all ranks.
        seed: seed of the order; any integer.
        shuffle: False keeps the samples in the order of the data set, in every epoch.
        uneven: allow a number of ranks that does not divide ``batch_size``; the first ranks then have one sample more. The loss
            has to be a ``(sum, weight)`` pair, because a mean would give the samples of smaller parts more weight.

    Raises:
        RunError: ``num_samples`` or ``batch_size`` is not a positive integer, or ``seed`` is not an integer.

    Cost: 8 bytes for each sample, for each of the two epochs used last, and a ``randperm`` at the first use of an epoch.
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

    @options_checked_on_failure
    def indices(self, step: int, *, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """Return the indices of a rank's samples in a step, as an int64 tensor. Ranks take consecutive parts of the batch.

        Args:
            step: number of the step, from 0.
            rank: number of the rank among the ranks that take different samples: ``comm.rank``, or the coordinate along the
                axes of data parallelism.
            num_ranks: number of the ranks that take different samples.

        Raises:
            RunError: the step is negative, ``rank`` is out of range, or ``num_ranks`` does not divide ``batch_size`` and
                ``uneven`` is False.
        """
        if step < 0:
            raise RunError(f"indices(): step is {step}, expected at least 0.")
        if num_ranks < 1:
            raise RunError(f"indices(): num_ranks is {num_ranks}, expected at least 1.")
        if not 0 <= rank < num_ranks:
            raise RunError(f"indices(): rank is {rank}, expected 0 to {num_ranks - 1}, as num_ranks is {num_ranks}.")
        if self.batch_size % num_ranks and not self.uneven:
            raise RunError(
                f"indices(): batch_size is {self.batch_size}, which {num_ranks} ranks do not divide. Take another batch_size, "
                "or pass uneven=True with a loss that is a (sum, weight) pair."
            )
        size, more = divmod(self.batch_size, num_ranks)
        first = step * self.batch_size + rank * size + min(rank, more)
        return self._samples_between(first, first + size + (rank < more))

    @api_boundary
    def batches(self, start: int = 0, *, rank: int = 0, num_ranks: int = 1) -> Iterator[list[int]]:
        """Yield a rank's indices of step ``start`` and all later steps, without end: a ``batch_sampler`` for a ``DataLoader``.

        ``rank`` and ``num_ranks`` are as for :meth:`indices`. The iterator counts steps by itself. Whenever the step number of
        a Run changes by something else than 1, make a new iterator with ``start=run.step``. This happens after a roll back,
        and where the repeated steps leave a step out.
        """
        step = start
        while True:
            yield self.indices(step, rank=rank, num_ranks=num_ranks).tolist()
            step += 1

    def epoch(self, step: int) -> int:
        """Return the number of the epoch in which a step begins, from 0."""
        return step * self.batch_size // self.num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the settings that decide the order of samples, as integers by name. The step is not among them."""
        return {name: int(getattr(self, name)) for name in ("num_samples", "batch_size", "seed", "shuffle")}

    @api_boundary
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise a RunError if ``state`` is from a sampler with another order of samples. Nothing is loaded."""
        mine = self.state_dict()
        other = [name for name in mine if state.get(name) != mine[name]]
        rows = [f"{name} was {state.get(name)!r}, here it is {mine[name]!r}" for name in other]
        if rows:
            raise RunError(
                f"IndexSampler.load_state_dict(): the saved sampler has another order of samples ({'; '.join(rows)}). Make the "
                "sampler with the saved values; or, to begin a new order, leave it out of the tree that is resumed."
            )

    def _samples_between(self, first: int, last: int) -> torch.Tensor:
        """Return the indices at positions ``[first, last)`` of the endless sequence of epochs."""
        found = []
        while first < last:
            epoch, start = divmod(first, self.num_samples)
            stop = min(start + last - first, self.num_samples)
            found.append(self._order(epoch)[start:stop])
            first += stop - start
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            epoch = 0
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            generator = torch.Generator().manual_seed(fold_in(self.seed, epoch))
            n = self.num_samples
            shuffled = torch.randperm(n, generator=generator, device="cpu") if self.shuffle else torch.arange(n, device="cpu")
            self._orders[epoch] = shuffled
        return self._orders[epoch]
