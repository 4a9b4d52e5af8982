"""Test by a trial whether a pair of another library makes equal updates of flat shards and of the user's tree.

Flat buffers join leaves, and are cut between ranks. A rule that treats each element by itself is right. A rule that uses
other elements, such as a norm, would silently compute something else. So a pair is run on a small tree of the user's structure,
and on the same elements in flat buffers, cut as on ranks. If the updates are equal, the pair is accepted.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import TreeError, problem
from fsharp.functional.layout.sharded import Sharded, map_units, units_of

_LARGEST_DIM = 3
_GRADIENT_SCALES = (1.0, 1e-3, 1e3, 1e6, math.nan)
"""Sizes of gradients in each step, as some rules clip large gradients. In the last step one element is NaN."""

Init = Callable[[Any], Any]
Update = Callable[[Any, Any, Any], tuple[Any, Any]]
Vectors = list[torch.Tensor]
"""One tensor for each group of each unit, with the elements of its leaves."""


def trial_fingerprint(where: str, init: Init, update: Update, params: Any) -> str:
    """Try an ``(init, update)`` pair on small tensors, and return a fingerprint of its updates, for ranks to compare.

    The fingerprint is the sum of magnitudes, in four digits. Of ``params`` only structure, layout, dtypes and device are read.
    Raises TreeError if updates depend on how buffers join and cut leaves, change from run to run, or cannot be computed.

    Cost: at most 17 updates of tensors whose dims have sizes of at most 3. Torch's global random generators do not change.
    """
    trial = _OptimizerTrial(params)
    with torch.random.fork_rng(trial.cuda_devices), torch.no_grad():
        try:
            expected = trial.run(init, update)
        except Exception as error:
            raise _trial_error(where, "small tensors in a tree like yours", error) from error
        torch.manual_seed(torch.initial_seed() + 1)
        if path := trial.first_differing_path(expected[:2], trial.run(init, update, num_steps=2)):
            remedy = (
                "Keep what changes in the state that init() and update() return. Random numbers would repeat between ranks, or "
                "differ where they must not: fs.optim.from_optax() draws those of whole leaves."
            )
            raise TreeError(problem(where, "run again, it made other updates of the same gradients.", [("leaf", path)], remedy))
        for piece in trial.pieces:
            try:
                found = trial.run(init, update, piece, len(expected))
            except Exception as error:
                raise _trial_error(where, "flat buffers, though not on a tree like yours", error) from error
            if path := trial.first_differing_path(expected, found, piece):
                why = "ranks have parts of leaves" if len(trial.pieces) > 1 else "leaves of a unit share a flat buffer"
                what = f"it looks at more than each element alone, and {why}: updates would be others than on the whole tree."
                remedy = (
                    "For the norm of all gradients put fs.optim.clip_by_global_norm() first in fs.optim.chain(). For norms of "
                    "leaves, and masks by shape or name, there is fs.optim.from_optax(optax.lamb(1e-3)) and so on. For "
                    "matrices there is fs.optim.muon()."
                )
                raise TreeError(problem(where, what, [("leaf", path)], remedy))
    return f"{sum(float(x.double().nan_to_num(0.0).abs().sum()) for step in expected for x in step):.3e}"


def _trial_error(where: str, on: str, error: Exception) -> TreeError:
    remedy = (
        "It has to be called as init(params) and update(grads, state, params), and update returns (updates, new state). "
        "Trees of masks or labels do not fit flat buffers: fs.optim.masked() and fs.optim.partition() take patterns. A pair "
        "that looks at each element alone, but cannot be tried, is taken as fs.optim.Transform(init, update, {})."
    )
    what = f"it was run on {on}, to find out whether it looks at each element alone, and raised."
    return TreeError(problem(where, what, [(type(error).__name__, error)], remedy))


class _TrialGroup(NamedTuple):
    """The leaves of one flat buffer in a :class:`_OptimizerTrial`: their keys, paths, shapes and sizes."""

    keys: list[tuple[str, str]]
    paths: list[str]
    shapes: list[list[int]]
    sizes: list[int]


class _OptimizerTrial:
    """A trial of an ``(init, update)`` pair: some updates of small tensors, in the structure of a user's tree of shards.

    Attributes:
        pieces: range over the pieces of a flat buffer, each updated by itself: two if ranks hold different parts, else one.
        cuda_devices: CUDA devices of the buffers.
    """

    def __init__(self, params: Any) -> None:
        self._like, self._groups, self._order = params, list[_TrialGroup](), list[tuple[str, str]]()
        self._start, self._grads = Vectors(), [Vectors() for _ in _GRADIENT_SCALES]
        nodes = units_of(params)
        axes = [(node.unit.mesh, axis) for node in nodes for axis in node.place.sharded_axes + node.place.varying_axes]
        self.pieces = range(2 if any(mesh.axis_size(axis) > 1 for mesh, axis in axes) else 1)
        self.cuda_devices = sorted({b.device.index for node in nodes for b in node.buffers if b.device.type == "cuda"})
        generator = torch.Generator().manual_seed(0)
        for node in nodes:
            for index, buffer in zip(node.groups, node.buffers, strict=True):
                leaves = node.unit.leaves_of_group(index)
                shapes = [[min(size, _LARGEST_DIM) for size in leaf.shape] for leaf in leaves]
                keys, paths = [(node.name, leaf.path) for leaf in leaves], [node.unit.path_in_tree(leaf) for leaf in leaves]
                self._groups.append(_TrialGroup(keys, paths, shapes, [math.prod(shape) for shape in shapes]))
                shape = 1 + len(_GRADIENT_SCALES), sum(self._groups[-1].sizes)
                drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                self._start.append(drawn[0].to(buffer.device, buffer.dtype))
                for vectors, scale, x in zip(self._grads, _GRADIENT_SCALES, drawn[1:], strict=True):
                    grad = x if math.isnan(scale) else x * scale
                    vectors.append(grad.to(buffer.device, node.unit.groups[index].dtypes.accumulate))
            here = {key for group in self._groups for key in group.keys}
            self._order += [(node.name, leaf.path) for leaf in node.unit.leaves if (node.name, leaf.path) in here]
        for vector in self._grads[-1]:
            if len(vector):
                vector[0] = math.nan
                break

    def run(self, init: Init, update: Update, piece: int | None = None, num_steps: int | None = None) -> list[Vectors]:
        """Return the updates of each step: of whole leaves if ``piece`` is None, else of this piece of the flat buffers.

        ``num_steps``: number of steps. None makes all steps, the last one with a NaN in its gradients. If ``update`` refuses
        the NaN by an error, the last step is left out.
        """
        params = self._tree_of_vectors(self._start, piece)
        state, result = init(params), list[Vectors]()
        for grads in self._grads[:num_steps]:
            try:
                updates, state = update(self._tree_of_vectors(grads, piece), state, params)
            except Exception:
                if num_steps is None and len(result) == len(_GRADIENT_SCALES) - 1:
                    break
                raise
            updates = optree.tree_map(lambda p, u: torch.zeros_like(p) + u, params, updates)  # updates may be broadcast
            params = optree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)
            result.append(self._group_vectors_of_tree(updates, piece))
        return result

    def first_differing_path(
        self, expected: Sequence[Vectors], found: Sequence[Vectors], piece: int | None = None
    ) -> str | None:
        """Return the path of the first leaf whose updates in ``expected`` and ``found`` are not close; None if all are.

        Both have the updates of each step. Close: see :func:`isclose`. ``piece``: the piece of the flat buffers whose updates
        are ``found``; None if ``found`` are updates of whole leaves.
        """
        for step, same in zip(expected, found, strict=True):
            for group, x, y in zip(self._groups, step, same, strict=True):
                wrong = torch.zeros(len(x), dtype=torch.bool, device=x.device)
                self._part_of_vector(wrong, piece).copy_(~isclose(self._part_of_vector(x, piece), y.to(x.dtype)))
                for path, elements in zip(group.paths, wrong.split(group.sizes), strict=True):
                    if elements.any():
                        return path
        return None

    def _part_of_vector(self, vector: torch.Tensor, piece: int | None) -> torch.Tensor:
        size = math.ceil(len(vector) / len(self.pieces))
        return vector if piece is None else vector[size * piece : size * (piece + 1)]

    def _tree_of_vectors(self, vectors: Vectors, piece: int | None) -> Any:
        """Return ``vectors``, one for each group, as a tree like the user's: of whole leaves if ``piece`` is None.

        Otherwise the tree has, for each group, the shard with the index ``piece``, with zeros as padding at its end.
        """
        if piece is not None:
            flat = (
                torch.cat([part := self._part_of_vector(x, piece), x.new_zeros(1 + len(x) // len(self.pieces) - len(part))])
                for x in vectors
            )
            return map_units(lambda node: node.replace([next(flat) for _ in node.groups]), self._like)
        leaves = {}
        for group, vector in zip(self._groups, vectors, strict=True):
            for key, shape, x in zip(group.keys, group.shapes, vector.split(group.sizes), strict=True):
                leaves[key] = x.clone().view(shape)

        def subtree(node: Sharded) -> Any:  # without frozen leaves and leaves that are tied to another leaf
            return optree.tree_unflatten(
                node.unit.structure, [leaves.get((node.name, leaf.path), ()) for leaf in node.unit.leaves]
            )

        return map_units(subtree, self._like)

    def _group_vectors_of_tree(self, tree: Any, piece: int | None) -> Vectors:
        if piece is not None:
            lengths = [len(self._part_of_vector(x, piece)) for x in self._start]
            return [x[:length] for x, length in zip(optree.tree_leaves(tree), lengths, strict=True)]
        leaves = dict(zip(self._order, optree.tree_leaves(tree), strict=True))
        return [torch.cat([leaves[key].reshape(-1) for key in group.keys]) for group in self._groups]


def isclose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return, for each element, whether ``x`` and ``y`` differ by at most ``sqrt(eps)`` times the largest finite ``abs(x)``.

    ``eps`` is that of the dtype of ``x``. Two NaN are close, and so are two equal infinities.
    """
    largest = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
    return torch.isclose(x, y, rtol=0.0, atol=math.sqrt(torch.finfo(x.dtype).eps) * largest, equal_nan=True)
