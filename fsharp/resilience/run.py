"""Run: a training loop that saves, resumes, and ends well."""

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import optree

from fsharp.annotated import options_explained
from fsharp.checkpoint import Checkpoint, Replicas, Saver
from fsharp.checkpoint.catalog import has_checkpoints
from fsharp.checkpoint.entries import expanded, is_node, leaf_names
from fsharp.checkpoint.loading import load_newest
from fsharp.checkpoint.manifest import as_json
from fsharp.checkpoint.storage import full_path
from fsharp.errors import NonFiniteError, RunError, problem
from fsharp.functional.comm.agree import agree, exchange, together
from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, Engine, Labelled, innermost
from fsharp.resilience.failures import reported_failures
from fsharp.resilience.finite import NonFinite, find_nonfinite
from fsharp.resilience.preemption import EXIT_PREEMPTED, Preemption
from fsharp.resilience.start import agree_at_start
from fsharp.resilience.stragglers import StragglerDetector
from fsharp.tracebacks import api_boundary

_log = logging.getLogger("fsharp")
OnNonFinite = Literal["raise", "skip", "roll back"]
_POLICIES = ("raise", "skip", "roll back")


@options_explained
class Run:
    """A training run that goes on where it was, whenever it is started: from the newest checkpoint, with the same bits.

    ::

        sampler = fs.resilience.IndexSampler(len(data), 64, seed=0)
        with fs.resilience.Run("runs/a", comm=comm, total=1000, save_every=100, config=config) as run:
            state, sampler = run.resume((state, sampler))
            for step in run.steps():
                batch = data[sampler.indices(step, rank=comm.rank, num_ranks=comm.mesh.size)]
                with fs.resilience.seeded(seed, step, comm.rank):
                    state, metrics, bad = train_step(state, batch, comm)
                state, sampler = run.end_step((state, sampler), nonfinite=bad)

    A step has to be a function of the state and of its number: :class:`IndexSampler` says which samples it takes, and
    :func:`seeded` which random numbers it draws. Then a run that a crash, a kill or a preemption has ended, and that is
    started again with the same number of ranks, ends with the bits of one that nothing has ended. ``torchrun
    --max-restarts`` starts it again by itself. With another number of ranks it goes on with the same batches.

    Ranks first make sure that they were started alike (:func:`agree_at_start`). An error on one of them is heard of by all
    and printed once (:func:`reported_failures`). After SIGTERM all ranks save at the end of the step, and exit with
    :data:`EXIT_PREEMPTED` (:class:`Preemption`, which says what torchrun makes of that). Slow ranks are named
    (:class:`StragglerDetector`). Ranks that leave the loop after different steps raise an error that has the steps of each.

    Args:
        root: folder of the run's checkpoints, which hold what :meth:`resume` takes under the name ``tree``.
        comm: the ranks: what a scheduler is made of, and not the scheduler. Over NCCL stragglers are not looked for.
        total: steps; ``run.total`` may be set before :meth:`end_step`, alike on all ranks: after the last one it saves.
        save_every: steps between two checkpoints. The last step is saved as well.
        keep: how many of the newest checkpoints are kept.
        keep_steps: of each so many steps the last checkpoint is kept besides; see :func:`fsharp.checkpoint.prune`.
        keep_hours: of each so many hours the last checkpoint is kept besides.
        replicas: keep the tree in memory of hosts as well, and restore it from there or from disk, whichever is newer. Their
            ``root`` is that of the run. They are closed after it: ``with Replicas(...) as hosts, Run(..., replicas=hosts)``.
        refresh_every: steps between two refreshes of ``replicas``.
        config: what decides the run, in what JSON has. Ranks that differ in it raise an error; a run that goes on with another
            one than before logs what has changed.
        files: source files that ranks have to have in common.
        on_nonfinite: what to do after a step with ``nonfinite``, see :meth:`end_step`.
        max_nonfinite: how many such steps are left out: in succession with ``"skip"``, and ever with ``"roll back"``.
        save_nonfinite: save trees with tensors that hold an infinity or NaN. Else that is an error, and the checkpoint before
            stays.
        signals: after which to save and exit.
        agree_every: steps between two exchanges of whether a signal has come. How long steps take is exchanged a tenth as
            often.
        background: write checkpoints while training goes on.

    Attributes:
        step: number of the next step: steps that are done, left-out ones included.
        skipped: steps that ``"roll back"`` leaves out.
        stragglers: what is known of slow ranks; None over NCCL.

    Raises:
        RunError: an argument that is none of these, or calls in another order than above.
        AgreementError: ranks that were started differently; when the context is entered, or in :meth:`resume`.

    Cost of a step: an ``all_reduce`` of 4 bytes for each axis and, every tenth time, an ``all_gather`` of 16.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        comm: Comm,
        total: int,
        save_every: int,
        keep: int = 3,
        keep_steps: int | None = None,
        keep_hours: float | None = None,
        replicas: Replicas | None = None,
        refresh_every: int = 10,
        config: Mapping[str, Any] | None = None,
        files: Sequence[str | Path] = (),
        on_nonfinite: OnNonFinite = "raise",
        max_nonfinite: int = 3,
        save_nonfinite: bool = False,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        agree_every: int = 1,
        background: bool = True,
    ) -> None:
        counts = {"total": total, "save_every": save_every, "max_nonfinite": max_nonfinite, "refresh_every": refresh_every}
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                raise RunError(f"Run(): {name} is {value!r}, expected an integer of at least 1.")
        if isinstance(comm, Engine):
            raise RunError(f"Run(): comm is a {type(comm).__name__}; pass what that was made of: comm=scheduler.comm.")
        if on_nonfinite not in _POLICIES:
            raise RunError(f"Run(): on_nonfinite is {on_nonfinite!r}, expected one of {', '.join(map(repr, _POLICIES))}.")
        self.root, self.comm, self.total, self.save_every = full_path(root), comm, total, save_every
        if replicas is not None and replicas.root != self.root:
            raise RunError(
                f"Run(): replicas have root={replicas.root!r}, expected that of the run: Replicas(..., root={self.root!r})."
            )
        self.replicas, self.refresh_every = replicas, refresh_every
        self.on_nonfinite, self.max_nonfinite, self.save_nonfinite = on_nonfinite, max_nonfinite, save_nonfinite
        try:
            self.config = as_json(dict(config or {}))
        except (TypeError, ValueError, RecursionError) as error:
            raise RunError(f"Run(): JSON cannot hold the config: {error}.") from error
        self.files, self._background = files, background
        self._stays: dict[str, Any] = {"keep": keep, "keep_steps": keep_steps, "keep_hours": keep_hours}
        self.preemption = Preemption(comm, signals=signals, every=agree_every)
        found = innermost(comm)
        is_native = isinstance(found, ProcessGroupComm) and found.is_native
        self.stragglers = None if is_native else StragglerDetector(comm, every=10 * agree_every)
        self.step, self.skipped = 0, list[int]()
        self._is_resumed, self._in_step, self._in_row, self._saved = False, False, 0, -1
        self._newest = -1
        self._names = set[str]()
        self._stack = ExitStack()

    @api_boundary
    def __enter__(self) -> Self:
        """Compare arguments between ranks; note signals, and report errors, from here on."""
        with ExitStack() as stack:
            stack.enter_context(reported_failures(self.comm, lambda: f"step {self.step}"))
            arguments = {
                "root": self.root,
                "total": self.total,
                "save_every": self.save_every,
                "refresh_every": None if self.replicas is None else self.refresh_every,
                "on_nonfinite": f"{self.on_nonfinite}, at most {self.max_nonfinite}",
                "save_nonfinite": self.save_nonfinite,
                "agree_every": self.preemption.every,
            }
            agree_at_start({"Run()": arguments, **self.config}, comm=self.comm, files=self.files)
            stack.enter_context(self.preemption)
            saver = Saver(self.root, self.comm, **self._stays, config=self.config, background=self._background)
            self._saver = stack.enter_context(saver)
            self._stack = stack.pop_all()
        return self

    @api_boundary
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the checkpoint that is being written; without an error, make sure that all ranks are done."""
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        if self._saved != self.step and self.comm.rank == 0:
            _log.warning("the run ends after %d of %d steps; %s", self.step, self.total, self._newest_is())
        with self._stack:
            agree("Run", {}, Labelled(self.comm, f"the end of the run, after {self.step} of {self.total} steps: "))

    @api_boundary
    def resume(self, tree: Any, *, other: str | os.PathLike[str] | None = None) -> Any:
        """Return the tree of the newest checkpoint, or ``tree`` itself if there is none. :meth:`steps` goes on from its step.

        A damaged checkpoint is set aside, as by :func:`fsharp.checkpoint.load`, and the checkpoint before is loaded.

        Args:
            tree: what a step needs and changes: any pytree of what a checkpoint holds, such as a TrainState and the sampler.
                Its tensors are overwritten: it is not to be used afterwards. It keeps its leaves as long as the run lasts.
            other: folder of the checkpoints of another run, which this one goes on with if it has none of its own yet: of any
                strategy and number of ranks. What it goes on with is saved among its own.

        Raises:
            RunError: there is no checkpoint in ``other``.
            AgreementError: ranks with different trees.
            TreeError: a checkpoint of another tree.
            CheckpointError: there are checkpoints, and all of them are damaged.

        Cost: that of :func:`fsharp.checkpoint.load`.
        """
        agree_at_start(self.config, tree, comm=self.comm)
        self._is_resumed, self._names = True, set(leaf_names(tree))
        has_own = self._has_own()
        root = self.root if has_own or other is None else full_path(other)
        is_there = has_own or self._has_checkpoint(root)
        if not is_there and other is not None:
            raise RunError(f"Run.resume(): there is no checkpoint in {os.fspath(other)!r} to go on with.")
        if is_there:
            found, tree = self._load(root, tree)
            _log.info("the run goes on after step %d with %s", found.step, found.path)
            for line in _changes(found.config, self.config) if self.comm.rank == 0 else ():
                _log.warning("the run goes on after step %d with another config: %s", found.step, line)
        if not has_own and (is_there or self.on_nonfinite == "roll back"):
            self._saved = -1
            self._save(tree)
        elif has_own and self.step >= self.total:
            self._save(tree)  # what is in memory alone is not the end of a run
        return tree

    @api_boundary
    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left to do, from 0; each has to be ended by :meth:`end_step`."""
        if not self._is_resumed:
            raise RunError("Run.steps(): call resume(tree) first: it looks for a checkpoint, and remembers where to go on.")
        if self.stragglers is not None:
            self.stragglers.start()
        while self.step < self.total:
            self._in_step = True
            yield self.step
            if self._in_step:
                raise RunError(f"Run.steps(): step {self.step} was not ended: call tree = run.end_step(tree) in each step.")

    @api_boundary
    def end_step(self, tree: Any, *, nonfinite: NonFinite | None = None) -> Any:
        """A step is done: save if it is time to, and exit if a signal has come. The tree to go on with.

        Args:
            tree: as :meth:`resume` takes it, after the step.
            nonfinite: what :func:`find_nonfinite` has found, if the step was left out for that. Then, after ``on_nonfinite``:
                ``"raise"`` raises NonFiniteError; ``"skip"`` goes on with the tree that is given, which the step has not
                updated; ``"roll back"`` goes on with that of the last checkpoint and leaves this step out from there on.

        Raises:
            RunError: a tree that is to be saved and has other leaves than the one in :meth:`resume`.
            NonFiniteError: a step that is not finite and is not left out, or a tree that is to be saved and is not finite.
            CheckpointError: a save that has failed.
            SystemExit: a signal has come, and the tree is saved; its code is :data:`EXIT_PREEMPTED`.
        """
        if not self._in_step:
            raise RunError("Run.end_step(): no step is under way: call it once in each step of `for step in run.steps()`.")
        self._in_step = False
        self._in_row = 0 if nonfinite is None else self._in_row + 1
        if nonfinite is not None:
            self._check_left_out(nonfinite)
        if nonfinite is not None and self.on_nonfinite == "roll back":
            tree = self._rolled_back(tree)
            before = self.step
        else:
            before = self.step
            self.step += 1
        while self.step in self.skipped:
            self.step += 1
        if self.stragglers is not None:
            self.stragglers.end_step(self.step)
        self._saver.check()
        if self.replicas is not None:
            self.replicas.check()
        is_preempted = self.preemption.agreed(self.step)
        if is_preempted or self.step >= self.total or self.step // self.save_every > before // self.save_every:
            self._save(tree)
        if is_preempted:
            self._leave()
        if self.replicas is not None and self.step // self.refresh_every > before // self.refresh_every:
            self.replicas.refresh(self._kept(tree), step=self.step, config=self.config)
            self._newest = self.step
        return tree

    @api_boundary
    def check(self, tree: Any) -> None:
        """Exit if a signal has come, as :meth:`end_step` does: in an evaluation, or between :meth:`resume` and the first step.

        Every rank has to call it alike.

        Args:
            tree: as it was after the last step; it is saved.

        Raises:
            SystemExit: a signal has come to some rank.
            RunError: before :meth:`resume`.
        """
        if not self._is_resumed:
            raise RunError("Run.check(): call resume(tree) first: what is there before is not what the run has come to.")
        if self.preemption.agreed():
            self._save(tree)
            self._leave()

    def _check_left_out(self, nonfinite: NonFinite) -> None:
        """Raise unless the policy leaves the step out."""
        what = f"step {self.step}: {nonfinite}"
        if self.on_nonfinite == "raise":
            raise NonFiniteError(f'{what}. The step was left out. Run(on_nonfinite="skip") or "roll back" would go on.')
        count = self._in_row if self.on_nonfinite == "skip" else len(self.skipped) + 1
        if count > self.max_nonfinite:
            kind = "in succession" if self.on_nonfinite == "skip" else "of this run"
            raise NonFiniteError(f"{what}. It is number {count} {kind}, and max_nonfinite is {self.max_nonfinite}.")
        if self.comm.rank == 0:
            _log.warning("%s; on_nonfinite is %r", what, self.on_nonfinite)

    def _rolled_back(self, tree: Any) -> Any:
        self._saver.wait()
        if not self._has_own():
            raise NonFiniteError(f"step {self.step} is not finite, and there is no checkpoint in {self.root} to roll back to.")
        skipped = [*self.skipped, self.step]
        _, tree = self._load(self.root, tree)
        self.skipped = skipped
        return tree

    def _has_own(self) -> bool:
        """Whether there is something of this run, in memory of hosts or on disk."""
        return (self.replicas is not None and self.replicas.latest() is not None) or self._has_checkpoint(self.root)

    def _has_checkpoint(self, root: str) -> bool:
        """Return whether rank 0 sees a checkpoint. Other ranks may see another state of a folder on a network."""
        found = together("Run", self.comm, lambda: self.comm.rank == 0 and has_checkpoints(root))
        return bool(exchange("yes" if found else "", self.comm)[0])

    def _load(self, root: str, tree: Any) -> tuple[Checkpoint, Any]:
        """Return the newest checkpoint that is not damaged, in memory or on disk, and its tree."""
        like = {"run": {"skipped": ""}, "tree": tree}
        if self.replicas is not None and root == self.root:
            found, loaded = self.replicas.restore_newest(like, donate=True)
        else:
            found, loaded = load_newest(root, like, comm=self.comm, donate=True)
        self.step = self._newest = found.step
        self._saved = found.step if os.path.dirname(found.path) == root else -1
        self.skipped = json.loads(loaded["run"]["skipped"])
        return found, loaded["tree"]

    def _save(self, tree: Any) -> None:
        if self._saved == self.step:
            return
        self._saver.save(self._kept(tree), step=self.step)
        self._saved = self._newest = self.step

    def _kept(self, tree: Any) -> Any:
        """Return what a checkpoint holds of a run; refuse a tree that a restart could not load or go on with."""
        if changed := sorted(self._names.symmetric_difference(leaf_names(tree))):
            raise RunError(
                problem(
                    "Run",
                    "the tree has other leaves than it had in resume(), so that a restart could not load it.",
                    [(name, "gone" if name in self._names else "new") for name in changed[:8]],
                    "Begin with all that it will have: a number in place of None, lists as long as they get, a step made by a "
                    "plain optimizer of torch before resume().",
                )
            )
        bad = None if self.save_nonfinite else find_nonfinite(None, _without_numbers(tree), comm=self.comm)
        if bad is not None:
            raise NonFiniteError(
                f"Run: the tree after {self.step} steps is not saved: {bad}; {self._newest_is()}. Leave out updates "
                "that find_nonfinite() refuses. If the tree is meant to be so, as with a mask of -inf, pass "
                "Run(save_nonfinite=True)."
            )
        return {"run": {"skipped": json.dumps(self.skipped)}, "tree": tree}

    def _newest_is(self) -> str:
        return f"the newest checkpoint is that of step {self._newest}" if self._newest >= 0 else "there is no checkpoint"

    def _leave(self) -> NoReturn:
        self._saver.wait()
        if self.comm.rank == 0:
            _log.warning("a signal has come: saved after %d of %d steps, exit code %d", self.step, self.total, EXIT_PREEMPTED)
        raise SystemExit(EXIT_PREEMPTED)


def _without_numbers(tree: Any) -> Any:
    """Tensors and what holds them: a best loss begins as an infinity."""
    return optree.tree_map(lambda leaf: 0 if isinstance(leaf, Number) else leaf, expanded(tree), is_leaf=is_node)


def _changes(before: Any, now: Mapping[str, Any]) -> list[str]:
    before = before or {}
    missing = "(absent)"
    texts = {name: [json.dumps(each.get(name, missing), sort_keys=True) for each in (before, now)] for name in before | now}
    return [f"{name} was {was} and is {is_now}" for name, (was, is_now) in sorted(texts.items()) if was != is_now]
