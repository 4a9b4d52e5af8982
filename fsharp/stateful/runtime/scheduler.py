"""Scheduler: runs pure functions by a schedule. A Comm like any other to them, which gives the same bits, sooner."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch

from fsharp.functional import moves
from fsharp.functional.comm import Comm, CountingComm, Engine, ReduceOp
from fsharp.functional.errors import LossError, ScheduleError
from fsharp.functional.forward import is_transformed
from fsharp.functional.mesh import Mesh
from fsharp.functional.process_group import ProcessGroupComm
from fsharp.functional.sharded import PlaceName, Sharded, is_sharded, map_units, units_of
from fsharp.functional.train import Loss, as_loss, check_loss, sums_of, totals, with_sinks
from fsharp.stateful.runtime.boundary import before_backward
from fsharp.stateful.runtime.copies import LiveUnit, stamp
from fsharp.stateful.runtime.full import leaf_index
from fsharp.stateful.runtime.handed import Handed, reduced
from fsharp.stateful.runtime.order import Order
from fsharp.stateful.runtime.pending import is_pending, pending
from fsharp.stateful.runtime.plan import Plan
from fsharp.stateful.runtime.recorder import Recorder
from fsharp.stateful.runtime.roster import Roster
from fsharp.stateful.runtime.run import Run, Use
from fsharp.stateful.runtime.scheduled import Scheduled
from fsharp.stateful.runtime.spread import Spread
from fsharp.stateful.runtime.streams import CudaLanes, Lanes
from fsharp.stateful.runtime.totals import Totals
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.transport.choose import transport_over
from fsharp.stateful.transport.gloo import Exchange
from fsharp.stateful.transport.patient import Patient


class Scheduler(Engine):
    """Decides when data move and where they are; what is computed is the pure functions' business.

    The first call of a function it wraps runs on demand and records the order in which units are used. From that a
    schedule is compiled, verified and followed from the second call on.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), prefetch=1)
    >>> scheduler(lambda x, comm: x + comm.mesh.size)(1)
    2

    Args:
        comm: the ranks. On CPUs, collectives run in threads, through memory that ranks of one machine share and over gloo;
            over NCCL on streams; over any other Comm they block.
        policy: how far ahead and in how much memory; see :class:`Policy`.
        options: fields of a :class:`Policy`, instead of one.

    Raises:
        ScheduleError: both a policy and options, or values out of range.
    """

    def __init__(self, comm: Comm, *, policy: Policy | None = None, **options: Any) -> None:
        if policy is not None and options:
            raise ScheduleError(f"Scheduler(): got a policy and {sorted(options)}: pass one or the other.")
        self.comm, self.policy = comm, policy or Policy(**options)
        if self.policy.sum_late is None:
            self.policy = replace(self.policy, sum_late=comm.device.type != "cuda")
        self.transport = transport_over(comm, self.policy)
        on_cuda = comm.device.type == "cuda"
        self.lanes = CudaLanes(comm.device, one_stream=self.policy.one_stream) if on_cuda else Lanes()
        inner: Comm = comm
        while isinstance(inner, CountingComm):
            inner = inner.inner
        self.order = Order(inner, has_store=isinstance(inner, ProcessGroupComm))
        self.own: Comm = comm  # for calls that are not scheduled
        if isinstance(self.transport.innermost, Exchange):
            self.own = Patient(comm, self.order.patience)
            self.transport.innermost.patience = self.order.patience
        self.totals = Totals()
        self.roster = Roster(trivial=self.policy.trivial_axes)
        self.arena = torch.empty(0, dtype=torch.uint8, device=comm.device)
        self.tenant: Any = None
        self._scheduled: weakref.WeakSet[Scheduled] = weakref.WeakSet()
        self._run: Run | None = None
        self._loose: Callable[[], Run | None] = lambda: None
        self._handed = Handed()

    # ------------------------------------------------------------ Comm

    @property
    def mesh(self) -> Mesh:
        """The mesh of the Comm it schedules."""
        return self.comm.mesh

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.rank

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return self.comm.device

    def all_gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """A collective of the caller's own: passed on, and not scheduled."""
        self._meet()
        return self.own.all_gather(x, axis)

    def reduce_scatter(self, x: Any, axis: Any, *, dtype: torch.dtype | None = None) -> Any:
        """A collective of the caller's own: passed on, and not scheduled."""
        self._meet()
        return self.own.reduce_scatter(x, axis, dtype=dtype)

    def all_reduce(self, x: torch.Tensor, axis: str, *, op: ReduceOp = "sum") -> torch.Tensor:
        """A collective of the caller's own: passed on, and not scheduled."""
        self._meet()
        return self.own.all_reduce(x, axis, op=op)

    # ------------------------------------------------------------ running

    def __call__(self, fn: Callable[..., Any]) -> Scheduled:
        """``fn``, a function with an argument ``comm``, as one that is called without it and follows a schedule."""
        scheduled = Scheduled(self, fn)
        self._scheduled.add(scheduled)
        return scheduled

    def run(self, scheduled: Scheduled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a scheduled function; inside of another one it is a part of that."""
        if self._run is not None and self._run.scheduled is not None:
            return scheduled.fn(*args, comm=self, **kwargs)
        run = self.open(scheduled, args, kwargs)
        with self.guard(run):
            result = scheduled.fn(*args, comm=self, **kwargs)
            self.close(run)
        return result

    def open(self, scheduled: Scheduled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """A run of a scheduled function begins: all that is called from here on is a part of it, until :meth:`close`.

        Args:
            scheduled: has the plan.
            args: trees in which the plan finds its units.
            kwargs: more of them.
        """
        with self.guard():
            self.order.recall()
            self._meet()
            run = self._begin(scheduled, args, kwargs)
            self._watch(run.recorder)
        return run

    def _meet(self) -> None:
        self.order.meet(self._make)

    def _make(self) -> None:
        comm = self.comm
        if isinstance(self.own, Patient):
            self.own.make()
            comm = self.own.inner
        while isinstance(comm, CountingComm):
            comm = comm.inner
        self.transport.make(comm)

    def close(self, run: Run) -> None:
        """The run is over."""
        self._end(run)
        if run.recorder is not None and run.is_planned:
            run.recorder.end()
        self._leave()

    @contextmanager
    def guard(self, run: Run | None = None) -> Iterator[None]:
        """Give a run up, or one that is about to begin, if an error leaves this context; other ranks are told."""
        try:
            yield
        except BaseException as error:
            if run is None or self._run is run:
                self._abort(error)
                self._leave()
            raise

    def _leave(self) -> None:
        self._run, self._handed = None, Handed()
        self.roster.forget()
        self.order.end()
        for scheduled in self._scheduled:
            scheduled.forget()

    def _watch(self, recorder: Recorder | None) -> None:
        """Have collectives noted by a recorder, or by none."""
        self.lanes.recorder = recorder
        if isinstance(self.transport.innermost, Exchange):
            self.transport.innermost.watch = None if recorder is None else lambda flight: recorder.flights.append(flight)
        if recorder is not None:
            recorder.begin()

    def _begin(self, scheduled: Scheduled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        self.roster.begin()
        for key, node in scheduled.sources((args, kwargs)).items():
            self.roster.expect(key, node)
        plan = self._plan(scheduled)
        run = self._run = Run(self, scheduled, plan)
        self.order.begin(run)
        if plan is not None:
            for rest in plan.places.values():
                rest.is_open = False
            for key in plan.carried:
                self._carry(run, plan.copies[key])
        return run

    @torch.inference_mode(False)  # the arena outlives an evaluation
    def _plan(self, scheduled: Scheduled) -> Plan | None:
        """The function's plan, with the arena to itself."""
        schedule = scheduled.schedule
        if schedule is None or any(facts.name not in self.units for facts in schedule.program.units):
            return None
        is_held = self.tenant is not None and any(rest.is_held for rest in self.tenant.places.values())
        if len(self.arena) < schedule.arena or is_held:
            before = self.tenant
            if before is not scheduled.plan or before is None or not before.fits(self.units):
                self._evict()
            self._take_arena(max(schedule.arena, len(self.arena)))
            if self.tenant is not None and before is not None:
                self.lanes.join_all()
                self.tenant = scheduled.plan = before.moved(self.arena)
        if scheduled.plan is None or scheduled.plan.arena is not self.arena or not scheduled.plan.fits(self.units):
            self._evict()
            scheduled.plan = Plan(schedule, self.units, self.arena, rank=self.rank)
        if self.tenant is not scheduled.plan:
            self._evict()
            self.tenant = scheduled.plan
        return scheduled.plan

    def _take_arena(self, nbytes: int) -> None:
        """Another arena; nothing that is not the caller's may keep the old one."""
        self.arena = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for scheduled in self._scheduled:
            scheduled.plan = None
        for unit in self.units.values():
            if unit.gradient is not None and not unit.gradient.rest.is_held:
                unit.gradient.go_home()

    def _evict(self) -> None:
        """Nothing in the arena is anybody's any more."""
        if self.tenant is not None:
            for copy in self.tenant.copies.values():
                copy.release(poison=self.policy.poison)
        self.tenant = None

    def _carry(self, run: Run, copy: Any) -> None:
        """What the step before has gathered for this one is there, or is gathered now."""
        if copy.unit.node is None:
            return
        if not copy.holds(stamp(copy.unit.node)):
            copy.release(poison=False)
            with self.lanes.on("gather"):
                copy.gather(self.transport)
            self.lanes.join_all()
        run.fill(copy.where)

    def _end(self, run: Run) -> None:
        run.end()
        if not run.is_planned and run.scheduled is not None:
            self.order.confirm(run, ended=True)
            run.scheduled.record(run)
            self._sweep()
        if run.is_planned and run.plan is not None:
            for key in run.plan.carried:
                run.plan.copies[key].remember()
        self.roster.release()

    def _sweep(self) -> None:
        """Units of trees that no function uses any more are gone."""
        schedules = [each.schedule for each in self._scheduled if each.schedule is not None]
        self.roster.sweep({facts.name for schedule in schedules for facts in schedule.program.units})

    def _abort(self, error: BaseException) -> None:
        """Whatever was under way is given up."""
        if self._run is not None:
            self._run.is_over = True
        for unit in self.units.values():
            unit.forget()
            if unit.gradient is not None:
                unit.gradient.drop()
        if self.tenant is not None:
            for copy in self.tenant.copies.values():
                copy.tickets.clear()
                copy.seen = None
        if self.transport.innermost.is_async:  # what is under way may still write where it was told to
            self._take_arena(0)
            self.tenant = None
            for unit in self.units.values():
                if unit.gradient is not None:
                    unit.gradient.abandon()
        self.order.fail(error)  # first: others find closed transports at once, and ask why
        self.transport.close()
        if isinstance(self.own, Patient):
            self.own.close()

    # ------------------------------------------------------------ units

    def live(self, node: Sharded) -> LiveUnit:
        """The unit that a node is."""
        unit = self.roster.find(node)
        if unit is None:
            unit = self.roster.add(node)
            if self._run is not None and self._run.scheduled is not None:
                self._run.scheduled.locate(unit.key, node)
        if is_pending(node) or unit.node is None:
            unit.node = node
        return unit

    @property
    def units(self) -> dict[str, LiveUnit]:
        """All units, by key."""
        return self.roster.units

    def _current(self) -> Run:
        """The run of the function that is being called; outside of one, a run that follows nothing and records nothing."""
        run = self._run or self._loose()
        if run is None:
            self.roster.forget()
            self.roster.release()
            self._meet()
            run = Run(self, None, None)
            self._loose = weakref.ref(run)  # whoever has a backward to come keeps it
        return run

    # ------------------------------------------------------------ Engine

    def takes(self, units: Any) -> bool:
        """Not under ``torch.func``, and not where the buffers themselves are differentiated: those paths are blocking."""
        if is_transformed():
            return False
        sharded, ties = units
        nodes = [sharded] if isinstance(sharded, Sharded) else units_of(sharded)
        return not any(b.requires_grad for node in (*nodes, *ties) if not node.sinks for b in node.raw_buffers)

    def run_forward(self, fn: Callable[..., Any], units: Any, args: Any, kwargs: Any) -> Any:
        """Enter the units, call the function, leave them."""
        sharded, ties = units
        nodes = [sharded] if isinstance(sharded, Sharded) else units_of(sharded)
        run = self._current()
        uses: list[Use] = []
        try:
            for node in (*ties, *nodes):
                uses.append(run.enter(node))
            leaves = {use.unit.layout.name: (leaf_index(use.unit.layout), use.leaves or []) for use in uses}
            if isinstance(sharded, Sharded):
                tree = leaf_index(sharded.unit).tree(leaves)
            else:
                trees = iter([leaf_index(node.unit).tree(leaves) for node in nodes])
                tree = map_units(lambda x: next(trees) if is_sharded(x) else x, sharded)
            del leaves
            for use in uses:
                use.leaves = None
            out = fn(tree, *args, **kwargs)
        finally:
            for use in reversed(uses):
                run.leave(use)
        if torch.is_grad_enabled():
            outputs = [out] if isinstance(out, torch.Tensor) else optree.tree_leaves(out)
            before_backward(outputs, _leaves((args, kwargs)), partial(run.come_back, uses))
        return out

    def run_value_and_grad(
        self, loss_fn: Callable[..., Any], params: Any, parts: list[Any], *, averaged: bool = False
    ) -> tuple[Loss, Any]:
        """Forward and backward of each part; gradients are collected and reduced on the way."""
        units = self.start_gradients(params, promised=averaged)
        total: Loss | None = None
        for i, part in enumerate(parts):
            with torch.enable_grad():
                probed = with_sinks(params, self)
                self.expect(is_last=i == len(parts) - 1)
                loss = as_loss(loss_fn(probed, part, self))
                check_loss(loss, has_sinks=any(node.sinks for node in units_of(probed)))
                new = Loss(loss.sum.detach().double(), loss.weight.detach().double())
                total = new if total is None else Loss(total.sum + new.sum, total.weight + new.weight)
                if averaged and i == len(parts) - 1 and isinstance(self.own, Patient):
                    self.totals.send(total, self.own)
                if any(node.ledger.is_used for node in units_of(probed)):
                    for unit in units:
                        if unit.gradient is not None:
                            unit.gradient.keep_apart()  # more of it may come another way than through units that were entered
                torch.autograd.backward(loss.sum)
            self.end_microbatch(units, probed)
        assert total is not None
        return total, self.hand_out(units, params)

    def run_totals(self, loss: Loss) -> torch.Tensor:
        """Those that were summed under the backward, or of any other loss by collectives of their own."""
        found = self.totals.take(loss)
        return totals(sums_of(loss, self), self) if found is None else found

    def start_gradients(self, params: Any, *, promised: bool = False) -> list[LiveUnit]:
        """Gradients of these parameters, whose units it returns, are new from here on; those of others are not touched.

        Args:
            params: a tree of Sharded.
            promised: nobody looks at them before they are reduced.
        """
        run, self._handed = self._current(), Handed()
        units = [self.live(node) for node in units_of(params)]
        run.restart(units)
        plan = run.plan if run.is_planned else None
        for unit in units:
            place, in_place = (None, False) if plan is None else (plan.places.get(unit.key), unit.key in plan.in_place)
            unit.train(self.transport, place, in_place=in_place and promised)
        trained = [unit.key for unit in units if unit.gradient is not None]
        again = run.trained.keys() & trained
        run.trained |= dict.fromkeys(trained)
        run.promised = (run.promised | set(trained) if promised else run.promised) - again
        return units

    def expect(self, *, is_last: bool) -> None:
        """A backward is about to come; whether it is the last one before somebody looks at the gradients."""
        self._current().may_defer = is_last and self.transport.innermost.is_async

    def end_microbatch(self, units: Sequence[LiveUnit], probed: Any) -> None:
        """The backward pass is over. ``probed``: the parameters of these units that it was of, with their sinks."""
        found = zip(units, units_of(probed), strict=True)
        self._current().end_microbatch([(unit, [sink.grad for sink in node.sinks]) for unit, node in found])

    def hand_out(self, units: Sequence[LiveUnit], params: Any) -> Any:
        """The gradients of these parameters, whose units are given, where they rest.

        Raises:
            LossError: there are none.
        """
        self.lanes.join_all()
        if not any(unit.gradient is not None and unit.gradient.is_fed for unit in units):
            raise LossError(
                "value_and_grad(): the loss has no gradient, no parameter reaches it: were they detached on the way?"
            )
        self._handed = handed = Handed()
        position = iter(units)
        return map_units(lambda node: handed.out(node, next(position)), params)

    def run_reduce_scatter(self, tree: Any, to: PlaceName) -> Any:
        """Gradients as :meth:`run_value_and_grad` returned them are at the optimizer's place soon; others are moved now."""
        nodes = units_of(tree)
        run = self._current()
        if not self._handed.are(nodes, to):
            run.move()
            return moves.reduce_scatter(tree, comm=self.own, to=to)
        units = self._handed.units
        run.reduce(units, wait=not self.transport.innermost.is_async)
        position = iter(units)
        return map_units(lambda node: reduced(node, next(position).gradient if node.unit.trainable else None, to), tree)

    def run_spread(self, new: Any, params: Any, *, donate: bool) -> Any:
        """Updated parameters begin their way to where they rest; who looks at them waits for them."""
        run = self._current()
        old_nodes, new_nodes = units_of(params), units_of(new)
        spreads = []
        for old, fresh in zip(old_nodes, new_nodes, strict=True):
            unit = self.live(old)
            spread = Spread(unit, old, fresh, rank=self.rank, donate=donate, trivial=self.policy.trivial_axes)
            if spread.axes:
                spread.node = pending(spread.node, partial(self._arrive, spread))
            self.roster.leave(old)
            if not donate:
                unit.forget()
            self.roster.enter(unit, spread.node)
            spreads.append(spread)
        run.update(spreads)
        nodes = iter(spreads)
        return map_units(lambda _: next(nodes).node, params)

    def _arrive(self, spread: Spread) -> None:
        spread.wait()
        self.lanes.join_all()


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree)
