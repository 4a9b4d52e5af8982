"""RunCheckpoints: the checkpoints of a run, on disk and in memory of hosts."""

import os
from typing import Any

import optree

from fsharp.checkpoint import Checkpoint, ModuleWithPerRankBuffers, Replicas, Saver
from fsharp.checkpoint.catalog import has_checkpoints
from fsharp.checkpoint.entries import PerRank, is_node_saved_as_leaf, leaf_type_texts
from fsharp.checkpoint.loading import load_checkpoint_and_tree
from fsharp.checkpoint.saver import BackgroundSaver
from fsharp.errors import RunError, problem
from fsharp.functional.comm.agree import all_gather_texts, check_on_all_ranks, is_own_failure, ranks_text
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.sharded import units_of
from fsharp.functional.layout.stages import has_stochastic_wire
from fsharp.stateful.modules.module import ShardedModule

_LEARNS_WITHIN_S = 0.3
"""Seconds to wait for this rank's background save to fail, after another rank has raised the save's error."""


class RunCheckpoints:
    """The checkpoints of a run, on disk and in memory of hosts. ``options``: arguments for :class:`Saver`, such as ``keep``.

    Attributes:
        saved: step of the newest checkpoint on disk that this run has loaded, or has begun to write; -1 if there is none.
        newest: step of the newest checkpoint on disk or in memory of hosts, even if only begun; -1 if there is none.
        is_elastic: whether the run may return to an earlier step at any time, so that the tree of step 0 is kept as well.
        has_values: whether a return to an earlier step takes all values from a checkpoint. True once the tree of step 0 was
            saved, or a load has begun to overwrite the tree that the caller passed. Before, the values are in that tree.
    """

    def __init__(
        self,
        root: str,
        comm: Comm,
        *,
        save_every: int,
        replicas: Replicas | None,
        refresh_every: int,
        config: Any,
        elastic: bool,
        **options: Any,
    ) -> None:
        if replicas is not None and replicas.root != root:
            raise RunError(f"Run(): replicas have root={replicas.root!r}, expected that of the run: root={root!r}.")
        self.root, self.replicas = root, replicas
        self.save_every, self.refresh_every = save_every, refresh_every
        self.saved = self.newest = self._loaded = -1
        self._comm, self._config, self._options = comm, config, options
        self._kinds = dict[str, str]()
        self.is_elastic, self.has_values = elastic, False

    def open_saver(self) -> Saver:
        """Return the Saver of this run's checkpoints, which the caller closes after the run."""
        self._saver = Saver(self.root, self._comm, **self._options, config=self._config)
        return self._saver

    def record_leaves(self, tree: Any) -> None:
        """Record names and kinds of this tree's leaves, for :meth:`check_same_leaves`."""
        self._kinds = dict(leaf_type_texts(tree))

    def check_same_leaves(self, tree: Any) -> None:
        """Raise a RunError, on all ranks, if the tree of a rank has other leaves than recorded: no restart could load it."""
        check_on_all_ranks("Run", self._comm, lambda: self._check_leaves_unchanged(tree))

    def _check_leaves_unchanged(self, tree: Any) -> None:
        before, now = self._kinds, dict(leaf_type_texts(tree))
        if changed := sorted(before.items() ^ now.items()):
            names = list(dict.fromkeys(name for name, _ in changed))[:8]
            change = {name: f"was {before[name]}, is {now[name]}" for name in before.keys() & now.keys()}
            facts = [(name, change.get(name, "gone" if name in before else "new")) for name in names]
            remedy = (
                "Begin with a tree that has all later leaves: a number in place of None, lists of their final lengths, a step "
                "of a plain torch optimizer before resume(). Numbers stay numbers: write loss.item()."
            )
            what = "the tree has other leaves than the tree given to resume(), so a restart could not load it."
            raise RunError(problem("Run", what, facts, remedy))

    def unsaved_state_warning(self, tree: Any) -> str:
        """Return a warning if modules need residuals or a step, which ``tree`` lacks; else ``""``. State dicts have neither."""
        leaves = optree.tree_leaves(tree, is_leaf=is_node_saved_as_leaf)
        modules = [leaf.module if isinstance(leaf, ModuleWithPerRankBuffers) else leaf for leaf in leaves]
        states = [each.train_state for each in modules if isinstance(each, ShardedModule)]
        has_residuals = any(state.residuals is not None for state in states)
        is_stochastic = any(has_stochastic_wire(node.unit) for state in states for node in units_of(state.params))
        lacks = {
            "residuals": has_residuals and not any(isinstance(leaf, PerRank) for leaf in leaves),
            "step": is_stochastic and not any(type(leaf) is int for leaf in leaves),
        }
        if not any(lacks.values()):
            return ""
        names = " and ".join(f"model.train_state.{name}" for name, is_lacking in lacks.items() if is_lacking)
        return (
            f"the formats of a module's gradients need {names}, which the tree does not hold: after a restart the bits of this "
            f"run will differ. Save {names} in the tree, and assign what was loaded: see residuals in docs/formats.md."
        )

    def has_any(self) -> bool:
        """Return whether there is a checkpoint of this run, in memory of hosts or on disk."""
        return (self.replicas is not None and self.replicas.latest() is not None) or self.agree_whether_any_in(self.root)

    def agree_whether_any_in(self, root: str) -> bool:
        """Return, on all ranks, whether rank 0 sees a checkpoint in ``root``.

        Raises RunError if rank 0 sees none and another rank sees one: ranks see different folders, or rank 0 an old listing.
        """
        found = check_on_all_ranks("Run", self._comm, lambda: has_checkpoints(root))
        texts = all_gather_texts("yes" if found else "", self._comm)
        if not texts[0] and (others := [rank for rank, text in enumerate(texts) if text]):
            raise RunError(
                f"Run: rank 0 sees no checkpoint in {root}, and {ranks_text(others)} does: mount the folder on all hosts, or "
                "remove its checkpoints to begin anew."
            )
        return bool(texts[0])

    def load_newest_from(self, root: str, like: Any) -> tuple[Checkpoint, Any]:
        """Load the newest undamaged checkpoint of the folder ``root``. Return the checkpoint, and a tree like ``like``.

        The tensors of ``like`` are overwritten. For the run's own folder, saves in memory of hosts count as well.
        """
        self.has_values = True
        if self.replicas is not None and root == self.root:
            found, loaded = self.replicas.restore_checkpoint_and_tree(like, donate=True)
        else:
            found, loaded = load_checkpoint_and_tree(root, like, comm=self._comm, donate=True)
        self.newest = found.step
        self.saved = self._loaded = found.step if os.path.dirname(found.path) == self.root else -1
        return found, loaded

    def reset_after_rank_restart(self) -> None:
        """Reset ``saved`` and ``newest`` to -1, as in a new process. The caller then loads the newest checkpoint."""
        self.saved = self.newest = self._loaded = -1

    def save_step_0_and_wait(self, tree: Any) -> None:
        """Save the tree of step 0, in memory of hosts if the run has replicas, else on disk, and wait until it is saved."""
        if self.replicas is None:
            self.begin_save(tree, step=0)
            self._saver.wait()
        else:
            self.begin_memory_save(tree, step=0)
            self.replicas.wait()
        self.has_values = True

    def begin_save(self, tree: Any, *, step: int) -> None:
        """Wait for the previous save on disk, and begin to save the tree after ``step`` steps on disk, in the background.

        All ranks call this method. The caller may change ``tree`` as soon as this call returns. Raises CheckpointError if the
        previous save has failed.
        """
        self._saver.save(tree, step=step)
        self.saved = self.newest = step

    def begin_memory_save(self, tree: Any, *, step: int) -> None:
        """Begin to copy the tree after ``step`` steps to memory of hosts, in the background."""
        assert self.replicas is not None
        self.replicas.refresh(tree, step=step, config=self._config)
        self.newest = step

    @property
    def newest_complete_step(self) -> int:
        """Step of the newest complete checkpoint on disk that this run has written or loaded; -1 if there is none."""
        return self._saver.saved if self._saver.saved >= 0 else self._loaded

    def raise_if_failed(self) -> None:
        """Raise the error of a save, or of a copy to memory of hosts, that has failed in the background."""
        self._saver.raise_if_failed()
        if self.replicas is not None:
            self.replicas.raise_if_failed()

    def has_own_failure(self) -> bool:
        """Return whether a save in the background has failed because of an error that began on this rank.

        Another rank may find this failure first, and report it. This rank then catches an error about another rank, although
        its own save is the cause. This method finds that out.
        """
        savers: list[BackgroundSaver] = [self._saver, *([] if self.replicas is None else [self.replicas])]
        return any(is_own_failure(error) for each in savers if (error := each.failure(_LEARNS_WITHIN_S)) is not None)

    def wait_for_save(self) -> None:
        """Wait until the save on disk that is under way has ended. Raise its error if it has failed."""
        self._saver.wait()

    def describe_newest(self) -> str:
        """Return text that names the newest checkpoint."""
        return f"the newest checkpoint is of step {self.newest}" if self.newest >= 0 else "there is no checkpoint"
