"""checking_races: find data races between the streams of a schedule, on a host without streams."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fsharp.errors import FsharpError, ScheduleError, problem
from fsharp.stateful.modules.module import ShardedModule
from fsharp.stateful.modules.session import session_of_module
from fsharp.stateful.runtime.scheduler import Scheduler
from fsharp.stateful.runtime.step_lifecycle import StepLifecycle
from fsharp.stateful.transport.streams import Lanes, OpKey
from fsharp.testing.accesses import AccessLoggingMode
from fsharp.testing.ordering import Access, ByteSpan, LogEntry, Race, RecordEvent, RecordStreamCall, ReplayResult, Wait, replay
from fsharp.tracebacks import api_boundary, api_context
from fsharp.type_checks import options_checked

COMPUTE_LANE = "compute"
_MAX_SHOWN_RACES = 5  # races that an error describes


class RaceError(FsharpError, AssertionError):
    """Raised if two streams access the same memory without an order, and at least one writes. ``report`` has all races."""

    def __init__(self, message: str, report: "RaceReport") -> None:
        super().__init__(message)
        self.report = report


class UnneededWait(NamedTuple):
    """A wait that may be left out: without it, and with all other waits, the checked steps have no race.

    Attributes:
        why: the wait in words, a key of :attr:`RaceReport.waits`.
        is_implied: True if earlier waits of the lane had already waited for the same work. False if the wait does order
            something, but no two accesses need this order.
        times: how often the wait was issued.
    """

    why: str
    is_implied: bool
    times: int


class VirtualLanes(Lanes):
    """Simulated streams on a host without streams: an op that is issued on a lane runs at once, and is logged.

    ``describe`` returns an op in words, and ``here`` the work of the compute lane. ``log`` has all ops in order of issue.
    """

    def __init__(
        self,
        *,
        describe: Callable[[OpKey], str] = lambda key: f"op {key[1]}",
        here: Callable[[], str] = lambda: "outside of a step",
    ) -> None:
        super().__init__()
        self.describe, self.here = describe, here
        self.log: list[LogEntry] = []
        self.lane, self._during = COMPUTE_LANE, ""
        self._marks: set[OpKey] = set()

    has_streams = True

    def current_stream(self) -> str:
        """Return the current lane."""
        return self.lane

    @contextmanager
    def on_lane(
        self, name: str, op: OpKey | None = None, after: Sequence[OpKey] = (), *, after_compute: bool = True
    ) -> Iterator[None]:
        """Log the ops in this context on lane ``name``.

        The lane waits for the ops in ``after`` first; with ``after_compute`` it also waits for the current lane. At the end an
        event is recorded for ``op``, on which later ops can wait.
        """
        during = f"{name} on demand at {self.here()}" if op is None else self.describe(op)
        if after_compute:
            self.log.append(Wait(name, self.lane, f"{name} waits for {self.lane} before {during}"))
        for key in after:
            if key in self._marks:
                self.log.append(Wait(name, key, f"{name} waits for {self.describe(key)} before {during}"))
        before = self.lane, self._during
        self._given.add(name)
        self.lane, self._during = name, during
        try:
            yield
            if op is not None:
                self.log.append(RecordEvent(name, op))
                self._marks.add(op)
        finally:
            self.lane, self._during = before

    def stream_wait_ops(self, after: Sequence[OpKey]) -> None:
        """Make the current lane wait for the ops ``after``, which are on other lanes."""
        for key in after:
            if key in self._marks:
                self.log.append(Wait(self.lane, key, f"{self.lane} joins {self.describe(key)} at {self.here()}"))

    def stream_wait_lanes(self, *names: str) -> None:
        """Make the current lane wait for all ops issued so far on the lanes ``names``."""
        for lane in filter(self._given.__contains__, names):
            self.log.append(Wait(self.lane, lane, f"{self.lane} joins all of {lane} at {self.here()}"))

    def synchronize_op(self, op: OpKey) -> None:
        """Make the current lane wait for an op: all that the host issues later comes after the op."""
        self.stream_wait_ops([op])

    def record_stream(self, x: torch.Tensor) -> None:
        """Log that no allocation reuses the memory of ``x`` before all ops so far on the current lane are finished."""
        self.log.append(RecordStreamCall(self.lane, x.untyped_storage().data_ptr()))

    def log_torch_ops(self) -> AccessLoggingMode:
        """Return a context in which all torch ops of this thread are logged."""
        return AccessLoggingMode(self.log, lambda: (self.lane, self._during or self.here()))


class RaceReport:
    """The memory accesses of the checked steps, and the races among these accesses, once the check has ended."""

    def __init__(self, lanes: VirtualLanes, place: Callable[[ByteSpan], str] = str) -> None:
        self._lanes, self._place = lanes, place
        self._verdict = ReplayResult([], set())

    @api_boundary
    def raise_if_races(self) -> None:
        """Search the log, and raise a RaceError if it has races."""
        self._verdict = replay(self.log)
        if self.races:
            raise RaceError(str(self), self)

    @property
    def races(self) -> list[Race]:
        """The races that the check has found; empty before the end of the check."""
        return self._verdict.races

    @property
    def log(self) -> Sequence[LogEntry]:
        """All ops, waits and events, in the order of issue."""
        return self._lanes.log

    @property
    def num_ops(self) -> int:
        """Number of torch ops that accessed memory."""
        return sum(isinstance(entry, Access) for entry in self.log)

    @property
    def waits(self) -> dict[str, int]:
        """Number of times that each wait of a lane was issued, by the wait in words."""
        return Counter(entry.why for entry in self.log if isinstance(entry, Wait))

    def races_without(self, why: str) -> list[Race]:
        """Return the races without the waits with the text ``why``, one of :attr:`waits`. Cost: 20 microseconds for each op."""
        positions = {i for i, entry in enumerate(self.log) if isinstance(entry, Wait) and entry.why == why}
        return replay(self.log, without=positions).races

    def unneeded_waits(self) -> list[UnneededWait]:
        """Return the waits that are not needed: without any one of them, and with all others, there would be no race.

        If two of these waits order the same accesses, one of the two has to stay. Cost: one call of
        :meth:`races_without` for each wait outside of :meth:`implied_waits`: seconds for small models.
        """
        implied = self.implied_waits()
        unneeded = [(why, times) for why, times in self.waits.items() if why in implied or not self.races_without(why)]
        return [UnneededWait(why, why in implied, times) for why, times in unneeded]

    def implied_waits(self) -> set[str]:
        """Return the texts of waits that never added an order: earlier waits of the lane had waited for the same work."""
        useful = {str(self.log[i]) for i in self._verdict.useful_waits}
        return set(self.waits) - useful

    def race_rows(self, race: Race) -> list[tuple[str, object]]:
        """Return a race as rows for an error message: pairs of a name and a value."""
        if race.second is None:
            by = race.owner
            rows: list[tuple[str, object]] = [("used by", race.first), ("freed for", f"{by}, which allocates there again")]
        else:
            by = race.second.lane
            rows = [("earlier", race.first), ("later", race.second)]
        rows.append(("bytes", f"{self._place(race.span)} ({race.span.stop - race.span.start:,} B)"))
        what = "before the memory is freed" if race.second is None else f"before {race.second.during}"
        return [*rows, ("missing", f"a wait of {by} for {race.first.lane}, after {race.first.during} and {what}")]

    def __str__(self) -> str:
        if not self.races:
            return f"no race in {self.num_ops:,} ops and {sum(self.waits.values()):,} waits"
        kinds = Counter(tuple((name, str(value)) for name, value in self.race_rows(race)) for race in self.races)
        details: list[tuple[str, object]] = []
        for rows, times in list(kinds.items())[:_MAX_SHOWN_RACES]:
            details += [*rows, ("times", times), ("", "")]
        if len(kinds) > _MAX_SHOWN_RACES:
            details.append(("also", f"{len(kinds) - _MAX_SHOWN_RACES} others"))
        what = f"two streams use the same memory without an order, {len(self.races)} times in {self.num_ops:,} ops."
        lines = problem("checking_races()", what, details).splitlines()
        return "\n".join(line.rstrip() for line in lines).rstrip()


@options_checked
@api_context
def checking_races(engine: Scheduler | ShardedModule) -> Iterator[RaceReport]:
    """Check in this context that steps would have no data races on a device with streams. Runs on a CPU.

    Gathers and reductions are issued on virtual streams. In fact each op runs immediately, so values do not change. The check
    records each op of torch, its stream, and the bytes that it reads and writes. At the end it raises an error if two accesses
    to the same bytes are not ordered by waits and events. The check also raises an error if memory is freed and used again
    while another stream may still use the memory. A wait of the host (``loss.item()``) orders nothing. The check does not see
    other threads, and no accesses outside of torch's dispatcher, such as those of numpy to shared memory.

    >>> import torch, fsharp as fs
    >>> from fsharp.testing import DebugPolicy, checking_races
    >>> mesh = fs.Mesh({"dp": 1})
    >>> scheduler = fs.Scheduler(fs.SingleComm(mesh), policy=DebugPolicy(sum_late=False, trivial_axes=True))
    >>> loss = lambda params, x, comm: fs.forward(torch.mul, params, x, comm=comm).sum()
    >>> step = scheduler(fs.train_step(loss, fs.optim.sgd(0.1)))
    >>> layout = fs.plan(torch.ones(8), mesh, fs.zero3("dp"))
    >>> state = fs.init_state(fs.optim.sgd(0.1), fs.shard(torch.ones(8), layout, scheduler), comm=scheduler)
    >>> with checking_races(scheduler) as report:
    ...     for _ in range(3):  # the first step records the schedule that the other steps follow
    ...         state, metrics = step(state, torch.ones(8))
    >>> report.races
    []

    Args:
        engine: a scheduler on a CPU, or a module with such a scheduler. Its policy has to be a
            ``DebugPolicy(sum_late=False)``, whose schedules are those of a device with streams. On a mesh of one rank also pass
            ``trivial_axes=True``: collectives are then issued, and copy their input.
            On several ranks call ``checking_races`` in each rank of :func:`~fsharp.testing.simulate`.

    Returns:
        The report, which also lists the waits, and the waits that could be left out.

    Raises:
        RaceError: there are races. The message has both ops, and the missing wait.
        ScheduleError: the scheduler is not on a CPU, follows no schedule of a device with streams, or uses threads.
        ScheduleError: the mesh has one rank, and the policy has no ``trivial_axes=True``.

    Cost: about 50 microseconds, and some memory, for each torch op: check a few steps, not an epoch.
    """
    scheduler = session_of_module(engine).scheduler if isinstance(engine, ShardedModule) else engine
    _check_can_simulate(scheduler)
    steps = scheduler.engine.steps
    lanes = VirtualLanes(describe=lambda key: _op_text(steps, key), here=lambda: _point_of_step_text(steps))
    report = RaceReport(lanes, lambda span: _memory_text(steps, span))
    before = steps.executor.lanes
    steps.set_lanes(lanes)
    try:
        with lanes.log_torch_ops():
            yield report
    finally:
        steps.set_lanes(before)
    report.raise_if_races()


def _check_can_simulate(scheduler: Scheduler) -> None:
    if scheduler.device.type != "cpu":
        raise ScheduleError(
            f"checking_races(): the scheduler is on {scheduler.device}, expected a CPU, where streams are virtual."
        )
    if scheduler.engine.steps.executor.transport.waits_on_host:
        raise ScheduleError(
            "checking_races(): collectives run in threads of their own, whose accesses are not logged. Use a SingleComm with "
            "DebugPolicy(trivial_axes=True), or ranks made by fsharp.testing.simulate()."
        )
    if scheduler.policy.sum_late is not False:
        raise ScheduleError(
            "checking_races(): the policy gives the schedule of a host without streams. Pass sum_late=False for the schedule "
            "of a device with streams."
        )
    if scheduler.mesh.size == 1 and not scheduler.policy.trivial_axes:
        raise ScheduleError(
            "checking_races(): on one rank no collective runs, and nothing is checked: pass "
            "policy=DebugPolicy(trivial_axes=True)."
        )


def _point_of_step_text(steps: StepLifecycle) -> str:
    if steps.now is None:
        return "outside of a step"
    step = steps.now.step
    return str(step.events[-1]) if step.events else "start of the step"


def _op_text(steps: StepLifecycle, key: OpKey) -> str:
    number, i = key
    plan = steps.arena.schedule
    if plan is None or plan.number != number:
        return f"op {i} of an earlier plan"
    op = plan.schedule.ops[i]
    return f"{op.kind} of {op.unit!r} for {op.phase} (op {i})"


def _memory_text(steps: StepLifecycle, span: ByteSpan) -> str:
    """Return in words where bytes are; in the arena, also the units that have memory there."""
    first = steps.arena.memory.data_ptr()
    start, stop = span.start - first, span.stop - first
    if start < 0 or stop > len(steps.arena.memory):
        return f"{span.start - span.base} to {span.stop - span.base} of a tensor's storage"
    ops = steps.arena.schedule.schedule.ops if steps.arena.schedule is not None else ()
    memory = [(op.unit, m) for op in ops for m in (op.memory, op.opens) if m is not None]
    units = sorted({unit for unit, m in memory if m.start < stop and start < m.stop})
    return f"{start} to {stop} of the arena, memory of {', '.join(map(repr, units))}"
