"""Run: a training loop that saves, resumes after kills, and ends on all ranks together."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, get_args

import optree

from fsharp.checkpoint import Checkpoint, Replicas
from fsharp.checkpoint.entries import is_node_saved_as_leaf, with_state_dicts
from fsharp.checkpoint.manifest import json_round_trip
from fsharp.checkpoint.storage import absolute_path
from fsharp.errors import NonFiniteError, RunError, log as _log
from fsharp.functional.comm.agree import agree, check_on_all_ranks, is_own_failure
from fsharp.functional.comm.protocol import Comm, LabelPrefixComm, engine_of
from fsharp.functional.comm.restart_replay import restart_replay
from fsharp.report.logs import RUN_NAMES, Logger, check_names
from fsharp.resilience.failures import reported_failures
from fsharp.resilience.finite import NonFinite, SkippedSteps, find_nonfinite
from fsharp.resilience.preemption import EXIT_PREEMPTED, Preemption
from fsharp.resilience.rejoining import Rejoining, comm_and_membership, meta_copy
from fsharp.resilience.run_checkpoints import RunCheckpoints
from fsharp.resilience.run_record import RunLogger
from fsharp.resilience.start import agree_at_start
from fsharp.resilience.stragglers import StragglerDetector
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked_on_failure, short_repr

OnNonFinite = Literal["raise", "skip", "roll back"]


@options_checked_on_failure
class Run:
    """A training run that continues from its newest checkpoint whenever it is started, with the same bits.

    ::

        sampler = fs.resilience.IndexSampler(len(data), 64, seed=0)
        with fs.resilience.Run("runs/a", comm=comm, total=1000, save_every=100, config=config) as run:
            state, sampler = run.resume((state, sampler))
            for step in run.steps():
                batch = data[sampler.indices(step, rank=comm.rank, num_ranks=comm.mesh.size)]
                with fs.resilience.seeded(seed, step, comm.rank):
                    state, metrics, bad = train_step(state, batch, comm)
                run.log({"loss": metrics.loss})
                state, sampler = run.end_step((state, sampler), nonfinite=bad)

    Here ``train_step`` is your function; ``bad`` is the result of :func:`find_nonfinite`. A step has to depend on the state and
    its own number alone. :class:`~fsharp.resilience.IndexSampler` chooses the samples of a step by its number, and
    :func:`~fsharp.resilience.seeded` the random numbers. A crash, a kill or a preemption may end the run. Started again with
    the same number of ranks, the run ends bitwise equal to an uninterrupted one. ``torchrun --max-restarts`` starts the run
    again. With another number of ranks the run continues with the same batches.

    At the start ranks compare config, tree and code (:func:`agree_at_start`). An error of one rank is raised on all ranks, and
    printed once (:func:`reported_failures`). After SIGTERM all ranks save at the end of the step, and exit with
    :data:`EXIT_PREEMPTED`; :class:`Preemption` describes what torchrun then does. A warning names slow ranks
    (:class:`StragglerDetector`). If ranks leave the loop after different steps, the error has the step of each rank.

    Args:
        root: folder of the run's checkpoints, which hold the tree of :meth:`resume` under the name ``tree``.
        comm: the ranks. If you have a scheduler, pass ``scheduler.comm``. Over NCCL slow ranks are not looked for.
        total: number of steps. The run ends with a save. You can set ``run.total`` before :meth:`end_step`, to the same value
            on all ranks. A restart of the run, or of one rank with ``elastic``, sets ``run.total`` to this argument again.
        save_every: number of steps between two checkpoints.
        keep: number of newest checkpoints to keep. Older ones that a run has saved are removed, and the log names them, at
            the level INFO. Checkpoints of :func:`fsharp.checkpoint.save`, and converted ones, are never removed.
        keep_steps: number of steps in an interval. The last checkpoint of each interval is kept as well. With 1000 these are
            the last one of steps 1 to 1000, the last one of steps 1001 to 2000, and so on; see :func:`fsharp.checkpoint.prune`.
        keep_hours: number of hours in an interval. The last checkpoint of each interval is kept as well.
        replicas: a :class:`~fsharp.checkpoint.Replicas` with the ``root`` of the run: a copy of the tree in memory of hosts. A
            started run loads this copy or the newest checkpoint, whichever is of a later step. Close the replicas after the
            run: ``with Replicas(...) as hosts, Run(..., replicas=hosts)``.
        refresh_every: number of steps between two copies to ``replicas``.
        config: settings that decide the results, a value that JSON can hold. Different configs on ranks are an error. If a run
            continues with another config, the log lists the changes.
        files: source files that have to be equal on all ranks.
        on_nonfinite: what to do after a step whose loss or gradients hold an infinity or NaN: see :meth:`end_step`.
        max_nonfinite: largest number of steps that may be left out. For ``"skip"`` this is a number of steps in a row, for
            ``"roll back"`` of all such steps of the run.
        save_nonfinite: save trees whose tensors hold an infinity or NaN. If False, saving such a tree raises NonFiniteError.
        signals: signals after which the run saves and exits.
        agree_every: number of steps between two exchanges of signals. Times of steps are exchanged a tenth as often.
        background: write checkpoints while training continues.
        loggers: where rank 0 records values of :meth:`log`, throughput, slow ranks, restarts and faults. None means the file
            ``log.jsonl`` in ``root``, from which ``fsharp report`` makes a page. If ``root`` is a URL, None records nothing.
        elastic: keep the other ranks running if a rank is killed, fails or hangs: see :meth:`train`.

    Attributes:
        step: number of the next step, the count of all finished and left-out steps.

    Raises:
        RunError: an argument is wrong, or methods are called in another order than in the example.
        AgreementError: ranks were started differently; at the beginning of the context, or in :meth:`resume`.

    Cost for each axis: every ``agree_every`` steps an ``all_reduce`` of 4 bytes; a tenth as often an ``all_gather`` of 16
    bytes.
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
        loggers: Sequence[Logger] | None = None,
        elastic: bool = False,
    ) -> None:
        counts = {"total": total, "save_every": save_every, "max_nonfinite": max_nonfinite, "refresh_every": refresh_every}
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                raise RunError(f"Run(): {name} is {value!r}, expected an integer of at least 1.")
        if engine_of(comm) is not None:
            raise RunError(f"Run(): comm is a {type(comm).__name__}; pass the Comm that it was made of: comm=scheduler.comm.")
        if on_nonfinite not in get_args(OnNonFinite):
            expected = ", ".join(map(repr, get_args(OnNonFinite)))
            raise RunError(f"Run(): on_nonfinite is {on_nonfinite!r}, expected one of {expected}.")
        elastic = elastic and comm.mesh.size > 1
        if elastic:
            comm_and_membership(comm)
        self.comm, self.total = comm, total
        self._skipped_steps, self._save_nonfinite = SkippedSteps(on_nonfinite, max_nonfinite), save_nonfinite
        try:
            self.config = json_round_trip(dict(config or {}))
        except (TypeError, ValueError, RecursionError) as error:
            raise RunError(f"Run(): JSON cannot hold the config, {short_repr(config)}: {error}.") from error
        saver: dict[str, Any] = {"keep": keep, "keep_steps": keep_steps, "keep_hours": keep_hours, "background": background}
        every: dict[str, Any] = {"save_every": save_every, "refresh_every": refresh_every, "elastic": elastic}
        self._checkpoints = RunCheckpoints(absolute_path(root), comm, replicas=replicas, config=self.config, **every, **saver)
        self._files = files
        self.preemption = Preemption(comm, signals=signals, every=agree_every)
        self._record = RunLogger(self._checkpoints.root, comm, loggers, every=10 * agree_every)
        self.step = 0
        self._phase: Literal["new", "between steps", "in a step"] = "new"
        self._stack: ExitStack | None = None

    @property
    def stragglers(self) -> StragglerDetector | None:
        """The detector of slow ranks; None over NCCL."""
        return self._record.stragglers

    @property
    def skipped_on_replay(self) -> list[int]:
        """Numbers of the steps that were not finite, and are left out after a return to a checkpoint (``"roll back"``)."""
        return self._skipped_steps.steps

    @api_boundary
    def __enter__(self) -> Self:
        """Compare arguments between ranks. Begin to record signals, and to report errors of a rank to all ranks."""
        with ExitStack() as stack:
            stack.enter_context(reported_failures(self.comm, lambda: f"step {self.step}"))
            kept = self._checkpoints
            arguments = {
                "root": kept.root,
                "total": self.total,
                "save_every": kept.save_every,
                "refresh_every": None if kept.replicas is None else kept.refresh_every,
                "on_nonfinite": f"{self._skipped_steps.policy}, at most {self._skipped_steps.most}",
                "save_nonfinite": self._save_nonfinite,
                "agree_every": self.preemption.every,
                "elastic": kept.is_elastic,
            }
            if not kept.is_elastic:
                restart_replay.abandon("a Run without elastic=True")
            agree_at_start({"Run()": arguments, **self.config}, comm=self.comm, files=self._files)
            stack.enter_context(self.preemption)
            stack.enter_context(self._checkpoints.open_saver())
            self._stack = stack.pop_all()
        return self

    @api_boundary
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the save under way. If there was no error, check that all ranks have ended the loop."""
        assert self._stack is not None
        if error is not None:
            if isinstance(error, Exception):
                with self._record.failures_as_warnings():
                    self._record.log(self.step, {"event": f"the run ends with {type(error).__name__}: {error}"})
            self._stack.__exit__(kind, error, trace)
            with self._record.failures_as_warnings():
                self._record.log_newest_complete_save(self.step, self._checkpoints.newest_complete_step)
            return
        with self._stack:
            self._agree_on_end_and_wait_for_save()
            check_on_all_ranks("Run", self.comm, self._record_end)

    def _agree_on_end_and_wait_for_save(self) -> None:
        agree("Run", {}, LabelPrefixComm(self.comm, f"the end of the run, after {self.step} of {self.total} steps: "))
        self._checkpoints.wait_for_save()

    @api_boundary
    def resume(self, tree: Any, *, other: str | os.PathLike[str] | None = None) -> Any:
        """Return the tree of the newest checkpoint, or ``tree`` if there is none. :meth:`steps` continues from its step.

        A damaged checkpoint is set aside, as by :func:`fsharp.checkpoint.load`, and the previous one is loaded.

        Args:
            tree: all values that a step needs and changes, as a pytree that a checkpoint can hold, such as a TrainState and the
                sampler. The tree's tensors are overwritten, so do not use the tree afterwards. The tree needs the same leaves
                in the whole run.
            other: folder of the checkpoints of another run, with any strategy and number of ranks. If this run has no
                checkpoint yet, it continues from the newest one there, and saves the loaded tree among its own checkpoints.

        Raises:
            RunError: ``other`` has no checkpoint, or rank 0 sees none where another rank does.
            RunError: the run is elastic (:meth:`train` resumes it), or the run's context is not open.
            AgreementError: ranks have different trees.
            TreeError: the checkpoint is of another tree.
            CheckpointError: all checkpoints are damaged.

        Cost: as :func:`fsharp.checkpoint.load`.
        """
        if self._checkpoints.is_elastic:
            raise RunError("Run.resume(): with elastic=True call train(step, tree), which resumes: restarts may come any time.")
        self._compare_ranks_at_start(tree)
        return self._restore_and_start(tree, other)

    def _compare_ranks_at_start(self, tree: Any) -> None:
        if self._stack is None:
            raise RunError("Run: the run is not open. Use it as a context: with fs.resilience.Run(...) as run.")
        agree_at_start(self.config, tree, comm=self.comm)
        self._phase = "between steps" if self._phase == "new" else self._phase
        self._checkpoints.record_leaves(tree)

    def _restore_and_start(self, tree: Any, other: str | os.PathLike[str] | None) -> Any:
        has_own = self._checkpoints.has_any()
        root = self._checkpoints.root if has_own or other is None else absolute_path(other)
        is_there = has_own or self._checkpoints.agree_whether_any_in(root)
        if not is_there and other is not None:
            raise RunError(f"Run.resume(): there is no checkpoint in {os.fspath(other)!r} to continue from.")
        if is_there:
            found, tree = self._restore_newest(root, tree)
            _log.info("the run continues after step %d with %s", found.step, found.path)
            for line in _config_changes(found.config, self.config):
                self._record.warn(self.step, f"the run continues after step {found.step} with another config: {line}")
        self._record.start(self.step, tree, root=self._checkpoints.root, total=self.total, config=self.config)
        if unsaved := self._checkpoints.unsaved_state_warning(tree):
            self._record.warn(self.step, unsaved)
        if self._checkpoints.is_elastic and not is_there:
            self._checkpoints.save_step_0_and_wait(self._checked_tree_to_save(tree))
        if not has_own and (is_there or self._skipped_steps.policy == "roll back"):
            self._save(tree)
        elif has_own and self.step >= self.total:
            self._save(tree)  # the last state may be in memory of hosts alone, and a run has to end on disk
        return tree

    @api_boundary
    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps; the first step of a run is 0. Call :meth:`end_step` at the end of each.

        Raises:
            RunError: before :meth:`resume`, after a step without :meth:`end_step`, or with ``Run(elastic=True)``: use
                :meth:`train`.
        """
        if self._checkpoints.is_elastic:
            raise RunError("Run.steps(): with elastic=True call train(step, tree): a loop of yours cannot repeat a step.")
        yield from self._step_numbers()

    @api_boundary
    def train(self, step: Callable[[Any, int], Any], tree: Any, *, other: str | os.PathLike[str] | None = None) -> Any:
        """Resume, run the remaining steps, and return the tree after the last step.

        In place of :meth:`resume` and :meth:`steps`::

            def step(state, number):
                state, metrics = train_step(state, batch(number), comm)
                run.log({"loss": metrics.loss})
                return run.end_step(state)

            state = run.train(step, state)

        With ``Run(elastic=True)`` a rank may be killed, fail or hang in this call. The launcher (:func:`fsharp.launch` with
        ``restarts``) restarts this rank. The other ranks abandon the step under way, and wait. The new process runs the program
        from its beginning up to this call. Meanwhile the other ranks repeat only the collectives that they made before this
        call; their programs do not run again. Then all ranks load the newest save, in memory of hosts or on disk, and continue
        from its step, with the same bits.

        Args:
            step: function ``step(tree, number)`` that makes a step, and returns the result of :meth:`end_step`. The step may
                depend only on the tree and the number.
            tree: as for :meth:`resume`. The tree cannot be used afterwards.
            other: as for :meth:`resume`.

        Raises:
            RunError: ``step`` is no function, or collectives of the setup cannot be repeated.
            CommError: a rank was lost, and not restarted. The message says which, and why.

        The errors of :meth:`resume` and :meth:`end_step` are raised as well.

        Cost: with ``elastic`` the first call of a run waits until the tree of step 0 is saved.
        """
        if not callable(step):
            raise RunError(f"Run.train(): step is {short_repr(step)}, expected a function step(tree, number).")
        if not self._checkpoints.is_elastic:
            return self._run_remaining_steps(step, self.resume(tree, other=other))
        self._compare_ranks_at_start(tree)
        like, rejoining, total = meta_copy(tree), Rejoining(self.comm), self.total
        while True:
            try:
                if why := rejoining.rejoin():
                    self._reset_for_reload(why, total)
                given = meta_copy(like) if self._checkpoints.has_values else tree  # a load donates its tree
                trained = self._run_remaining_steps(step, self._restore_and_start(given, other))
                self._agree_on_end_and_wait_for_save()
                rejoining.tell_launcher_no_rejoin()
                return trained
            except Exception as error:
                is_own = is_own_failure(error) or self._checkpoints.has_own_failure()
                rejoining.wait_for_next_generation(error, f"step {self.step}", is_own=is_own)

    def _run_remaining_steps(self, step: Callable[[Any, int], Any], tree: Any) -> Any:
        for number in self._step_numbers():
            tree = step(tree, number)
        return tree

    def _reset_for_reload(self, why: str, total: int) -> None:
        """Reset this Run to the state of a new Run of ``total`` steps, to load the newest save. Record the reason ``why``."""
        self._record.warn(self.step, f"after {self.step} steps: {why}")
        self.step, self.total, self._phase = 0, total, "between steps"
        self._skipped_steps.restore([])
        self._checkpoints.reset_after_rank_restart()

    def _step_numbers(self) -> Iterator[int]:
        if self._phase == "new":
            raise RunError("Run.steps(): call resume(tree) first: it finds the step from which the run continues.")
        self._record.start_measuring(self.step)
        while self.step < self.total:
            self._phase = "in a step"
            yield self.step
            if self._phase == "in a step":
                raise RunError(f"Run.steps(): step {self.step} was not ended: call tree = run.end_step(tree) in each step.")

    @api_boundary
    def end_step(self, tree: Any, *, nonfinite: NonFinite | None = None) -> Any:
        """End a step: save if it is time, exit after a signal, and return the next step's tree. All ranks call this method.

        Args:
            tree: the tree after the step, with the leaves of the tree that was passed to :meth:`resume`.
            nonfinite: the result of :func:`find_nonfinite`; None if all was finite. With a result other than None, pass the
                tree from before the step. ``on_nonfinite`` of the run decides: ``"raise"`` raises NonFiniteError; ``"skip"``
                continues with ``tree``; ``"roll back"`` continues from the last checkpoint, and then leaves this step out.

        Raises:
            RunError: no step is under way, or the tree is saved and its leaves differ from those at :meth:`resume`.
            NonFiniteError: the step was not finite, and ``on_nonfinite`` is ``"raise"``, or ``max_nonfinite`` is exceeded.
            NonFiniteError: the tree to be saved is not finite.
            CheckpointError: a save has failed, now or in the background since the last call; or no checkpoint is left to load.
            SystemExit: a signal came, and the tree is saved. The code is :data:`EXIT_PREEMPTED`.
        """
        if self._phase != "in a step":
            raise RunError("Run.end_step(): no step is under way: call it once in each step of `for step in run.steps()`.")
        self._phase = "between steps"
        if nonfinite is None:
            self._skipped_steps.record_finite_step()
        else:
            what = f"step {self.step}: {nonfinite}"
            self._skipped_steps.record_nonfinite_step(what)
            self._record.warn(self.step, f"{what}; on_nonfinite is {self._skipped_steps.policy!r}")
        is_rolled_back = nonfinite is not None and self._skipped_steps.policy == "roll back"
        if is_rolled_back:
            tree = self._roll_back(tree)
        before = self.step
        self.step += not is_rolled_back
        self.step = self._skipped_steps.next_kept_step(self.step)
        self._record.end_step(self.step, is_last=self.step >= self.total)
        kept = self._checkpoints
        kept.raise_if_failed()
        self._record.log_newest_complete_save(self.step, kept.newest_complete_step)
        is_preempted = self.preemption.should_stop(self.step)
        if is_preempted or self.step >= self.total or _is_due(kept.save_every, before, self.step):
            self._save(tree)
        if is_preempted:
            self._wait_for_save_and_exit()
        if kept.replicas is not None and _is_due(kept.refresh_every, before, self.step):
            kept.begin_memory_save(self._checked_tree_to_save(tree), step=self.step)
        return tree

    @options_checked_on_failure
    def log(self, values: Mapping[str, Any]) -> None:
        """Record values for the step under way, or, between two steps, for the step that has ended. Only rank 0 records.

        Args:
            values: by name, such as ``{"loss": metrics.loss}``: numbers, tensors with one element, texts; lists and dicts of
                these; a :class:`~fsharp.inspect.Timeline` or a :class:`~fsharp.Layout`. ``fsharp report`` draws numbers over
                steps, and the timelines ``predicted`` and ``measured``.

        Raises:
            RunError: before :meth:`resume`.
            OptionError: ``values`` is not a dict, or a name is one that the run records.
            OptionError: a logger cannot record a value. Rank 0 raises the error, and the run ends.

        Cost: reading a tensor waits for its device. Nothing is sent.
        """
        if self._phase == "new":
            raise RunError("Run.log(): call resume(tree) first: the step is not known before.")
        check_names("Run.log()", values, RUN_NAMES)
        self._record.log(self.step if self._phase == "in a step" else max(self.step - 1, 0), values)

    @api_boundary
    def exit_if_preempted(self, tree: Any) -> None:
        """Save ``tree`` and exit if a signal has come, as :meth:`end_step` does.

        Call this method in places without :meth:`end_step`, such as an evaluation. ``tree`` is the tree after the last step.
        All ranks have to call this method.

        Raises:
            SystemExit: some rank has received a signal, and the tree is saved.
            RunError: the call is before :meth:`resume`.
        """
        if self._phase == "new":
            raise RunError("Run.exit_if_preempted(): call resume(tree) first: the tree is not the newest of the run before.")
        if self.preemption.should_stop():
            self._save(tree)
            self._wait_for_save_and_exit()

    def _roll_back(self, tree: Any) -> Any:
        self._checkpoints.wait_for_save()
        skipped = [*self.skipped_on_replay, self.step]
        _, tree = self._restore_newest(self._checkpoints.root, tree)
        self._skipped_steps.steps[:] = skipped
        return tree

    def _restore_newest(self, root: str, tree: Any) -> tuple[Checkpoint, Any]:
        found, loaded = self._checkpoints.load_newest_from(root, {"run": {"skipped": ""}, "tree": tree})
        self.step = found.step
        self._skipped_steps.restore(json.loads(loaded["run"]["skipped"]))
        return found, loaded["tree"]

    def _save(self, tree: Any) -> None:
        if self._checkpoints.saved != self.step:
            self._checkpoints.begin_save(self._checked_tree_to_save(tree), step=self.step)
            self._record.log_newest_complete_save(self.step, self._checkpoints.newest_complete_step)

    def _checked_tree_to_save(self, tree: Any) -> Any:
        """Return what a checkpoint of a run holds: ``tree`` and the skipped steps. All ranks call this method.

        Raises RunError if a restart could not load ``tree``, and NonFiniteError for infinities and NaN if they are not allowed.
        """
        self._checkpoints.check_same_leaves(tree)
        bad = None
        if not self._save_nonfinite:  # numbers may be infinite: a best loss begins as an infinity
            plain = optree.tree_map(
                lambda leaf: 0 if isinstance(leaf, Number) else leaf, with_state_dicts(tree), is_leaf=is_node_saved_as_leaf
            )
            bad = find_nonfinite(None, plain, comm=self.comm)
        if bad is not None:
            raise NonFiniteError(
                f"Run: the tree after {self.step} steps is not saved: {bad}; {self._checkpoints.describe_newest()}. "
                "Skip an update if find_nonfinite() finds its gradients infinite or NaN. If the tree has to hold such values, "
                "such as a mask of -inf, pass Run(save_nonfinite=True)."
            )
        return {"run": {"skipped": json.dumps(self.skipped_on_replay)}, "tree": tree}

    def _record_end(self) -> None:
        self._record.log_newest_complete_save(self.step, self._checkpoints.newest_complete_step)
        if self.step < self.total or self._checkpoints.saved != self.step:
            newest = self._checkpoints.describe_newest()
            self._record.warn(self.step, f"the run ends after {self.step} of {self.total} steps; {newest}")

    def _wait_for_save_and_exit(self) -> NoReturn:
        self._checkpoints.wait_for_save()
        self._record.log_newest_complete_save(self.step, self._checkpoints.newest_complete_step)
        done = f"{self.step} of {self.total} steps"
        self._record.warn(self.step, f"a signal has come: saved after {done}, exit code {EXIT_PREEMPTED}")
        raise SystemExit(EXIT_PREEMPTED)


def _is_due(every: int, before: int, step: int) -> bool:
    return step // every > before // every


def _config_changes(before: Any, now: Mapping[str, Any]) -> list[str]:
    before = before or {}
    missing = "(absent)"
    texts = {name: [json.dumps(each.get(name, missing), sort_keys=True) for each in (before, now)] for name in before | now}
    return [f"{name} was {was} and is {is_now}" for name, (was, is_now) in sorted(texts.items()) if was != is_now]
