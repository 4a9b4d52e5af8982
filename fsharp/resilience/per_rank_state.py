"""PerRankState: an object whose state each rank saves for itself, such as a data loader."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsharp.checkpoint.entries import PerRank, has_state_dict
from fsharp.errors import TreeError, problem
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, short_repr

_LENGTH_NBYTES = 8
"""Bytes that hold the length of a state."""


@options_checked
class PerRankState:
    """A wrapper that saves an object whose state differs between ranks, or has other keys in other steps.

    ::

        loader = StatefulDataLoader(stream, batch_size=8, num_workers=2)  # of torchdata
        with fs.resilience.Run("runs/a", comm=comm, total=1000, save_every=100) as run:
            state, _ = run.resume((state, own := fs.resilience.PerRankState(loader)))
            for step, batch in zip(run.steps(), loader):
                state, _ = train_step(state, batch, comm)
                state, _ = run.end_step((state, own))

    The ``state_dict()`` of the object is one leaf of a checkpoint: bytes of ``torch.save``, which are loaded with
    ``weights_only=True``. So the state dict may hold tensors, numbers, strings, bytes, None, and lists and dicts of these. A
    checkpoint loads only on the same number of ranks. Make iterators after ``resume``, and make new iterators after the run has
    rolled back: an existing iterator does not use the loaded state.

    Args:
        owner: an object with ``state_dict()`` and ``load_state_dict()``.
        nbytes: bytes of each rank in a checkpoint, equal on all ranks. The state has to fit.

    Raises:
        TreeError: ``owner`` lacks these methods. On all ranks: a state is larger than ``nbytes``, or holds an object that
            ``weights_only=True`` does not load.

    Cost: ``nbytes`` of each rank in a checkpoint.
    """

    def __init__(self, owner: Any, *, nbytes: int = 1 << 16) -> None:
        if not has_state_dict(owner):
            what = f"owner is {short_repr(owner)}, expected an object with state_dict() and load_state_dict()."
            raise TreeError(problem("PerRankState()", what, remedy="For a DataLoader use torchdata's StatefulDataLoader."))
        self.owner, self.nbytes = owner, nbytes

    @api_boundary
    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": x}``; ``x`` is a :class:`~fsharp.checkpoint.PerRank` with the bytes of the object's state."""
        state, file, where = self.owner.state_dict(), io.BytesIO(), f"PerRankState({type(self.owner).__name__})"
        torch.save(state, file)
        data = file.getvalue()
        if (needed := len(data) + _LENGTH_NBYTES) > self.nbytes:
            what = f"the state has {len(data):,} bytes, and nbytes is {self.nbytes:,}."
            raise TreeError(problem(where, what, remedy=f"Pass nbytes={2 * needed} or more, on all ranks."))
        _load_state(where, data)
        whole = len(data).to_bytes(_LENGTH_NBYTES, "little") + data
        return {"state": PerRank(torch.frombuffer(bytearray(whole.ljust(self.nbytes, b"\0")), dtype=torch.uint8))}

    def state_template(self, is_saved: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
        """Return a dict like that of :meth:`state_dict`, with zeros, to load a checkpoint into. Ignores ``is_saved``."""
        return {"state": PerRank(torch.zeros(self.nbytes, dtype=torch.uint8, device="cpu"))}

    @api_boundary
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this rank into the object."""
        whole = bytes(state["state"].value.tolist())
        length = int.from_bytes(whole[:_LENGTH_NBYTES], "little")
        self.owner.load_state_dict(
            _load_state(f"PerRankState({type(self.owner).__name__})", whole[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
        )


def _load_state(where: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # torch raises several classes
        what = f"the state holds an object that torch.load(weights_only=True) does not load: {str(error).splitlines()[0]}"
        remedy = "Let state_dict() return tensors, numbers, strings, bytes, None, and lists and dicts of these."
        raise TreeError(problem(where, what, remedy=remedy)) from error
