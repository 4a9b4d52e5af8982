"""Rejoining: join this rank to later generations of its job, in which other ranks were restarted."""

from typing import Any

import optree
import torch

from fsharp.checkpoint.entries import PerRank, is_node_saved_as_leaf
from fsharp.distributed import generations
from fsharp.distributed.job import tear_down_generation
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import RunError
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.functional.layout.sharded import is_sharded
from fsharp.resilience.per_rank_state import PerRankState
from fsharp.stateful.modules.parameter import ShardedTensor


def comm_and_membership(comm: Comm) -> tuple[ProcessGroupComm, generations.RankMembership]:
    """Return the ProcessGroupComm inside of ``comm``, and this rank's membership in a job whose launcher restarts single ranks.

    Raises a RunError if no launcher would restart a rank, or if the Comm is not over gloo.
    """
    inner, member = innermost_comm(comm), generations.membership
    if not isinstance(inner, ProcessGroupComm) or member is None:
        raise RunError(
            "Run(elastic=True): nobody would restart a rank. Start the ranks by fs.launch(fn, nproc, restarts=...), and join "
            "them by fs.connect(). torchrun ends all ranks when one fails: leave out elastic=True there, and torchrun "
            "--max-restarts starts all of them again."
        )
    if inner.is_nccl:
        raise RunError("Run(elastic=True): comm is over NCCL, where ranks do not hear of each other's end. It needs gloo.")
    return inner, member


class Rejoining:
    """Joins this rank to the next generation of its job after another rank was lost.

    All ranks have to make a Rejoining at the end of their setup.

    Raises a RunError, on all ranks, if the setup cannot be repeated with a restarted rank.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._member = comm_and_membership(comm)

        def check() -> None:
            if restart_replay.obstacle:
                raise RunError(
                    "Run.train(): with elastic=True all collectives before train() are repeated with a restarted rank, and "
                    f"{restart_replay.obstacle} cannot be repeated. Move it into a step, or behind train()."
                )
            if not restart_replay.is_recording:
                raise RunError(
                    "Run.train(): with elastic=True a process has one such run, after one connect(): a restarted rank runs the "
                    "program from the beginning, and would come to the earlier run first. Give each run its own fs.launch()."
                )

        check_on_all_ranks("Run.train()", comm, check)
        restart_replay.end_recording()
        self._counts = self._comm.tree_label_counters.copy()
        self._news: generations.Announcement | None = None
        self._member.announce_can_rejoin(can=True)

    def rejoin(self) -> str:
        """Join the generation that :meth:`wait_for_next_generation` has found, and return why that generation began.

        Return ``""``, and do nothing, if this rank has not waited for a generation since the last call.
        """
        news, self._news = self._news, None
        if news is None:
            return ""
        tear_down_generation(news.why)
        restart_replay.repeat_recorded_calls()
        self._comm.tree_label_counters.set_from(self._counts)
        return news.why

    def wait_for_next_generation(self, error: Exception, where: str, *, is_own: bool) -> None:
        """Tell other ranks of ``error``. Return once the next generation of the job is announced.

        ``where``: what this rank was doing, in words. ``is_own``: whether the error began on this rank.

        Raises:
            Exception: ``error``, if ``is_own``: a new process takes this rank's place.
            Exception: ``error``, if all ranks have stopped, and all with the same ``is_own``: a restart would not help.
            CommError: ranks are no longer restarted.
        """
        self._comm.watch.statuses.report_failure(error, where)
        self._news = self._member.wait_for_next_generation("own" if is_own else "heard", error, self._comm.limit_s)

    def tell_launcher_no_rejoin(self) -> None:
        """Tell the launcher that this rank joins no later generations: a restart of another rank restarts this rank too."""
        self._member.announce_can_rejoin(can=False)


def meta_copy(tree: Any) -> Any:
    """Return a copy of a tree with its tensors on the meta device, into which a checkpoint can be loaded.

    Modules, optimizers and other objects in the tree are not copied. Raises a RunError for a PerRankState. When the tree goes
    back to an earlier step, an iterator over the wrapped data loader would not go back.
    """

    def on_meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor) else x

    def leaf_on_meta(leaf: Any) -> Any:
        if isinstance(leaf, PerRankState):
            raise RunError(
                f"Run.train(): with elastic=True the tree holds a PerRankState({type(leaf.owner).__name__}), and an iterator "
                "over its object would not go back with the tree. Choose samples by the number of the step, as IndexSampler "
                "does."
            )
        if is_sharded(leaf):
            return leaf.replace(list(map(on_meta, leaf.buffers)))
        return PerRank(optree.tree_map(on_meta, leaf.value)) if isinstance(leaf, PerRank) else on_meta(leaf)

    return optree.tree_map(leaf_on_meta, tree, is_leaf=is_node_saved_as_leaf)
