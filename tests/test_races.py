"""The race checker: small programs with and without a race, whole steps, and every wait of a step left out."""

import itertools

import pytest
import torch

import fsharp as fs
from fsharp.testing import RaceError, RaceReport, check_races, simulate
from fsharp.testing.accesses import spans
from fsharp.testing.ordering import Access, replay
from fsharp.testing.races import VirtualLanes
from tests.gpt_like import loss_fn
from tests.modules import Net
from tests.scheduling import make_state, my_batches

STRATEGIES = {
    "ddp": fs.ddp("dp"),
    "zero1": fs.zero1("dp"),
    "zero2": fs.zero2("dp"),
    "zero3": fs.zero3("dp"),
    "hsdp": fs.hsdp("outer", "inner"),
    "hfsdp": fs.hfsdp("outer", "inner"),
}
PRECISIONS = {"fp32": fs.Precision(), "bf16": fs.Precision(compute=torch.bfloat16, main=torch.float32)}


# ------------------------------------------------------------ small programs


def look(program):
    """What is found in ``program(lanes)``."""
    lanes = VirtualLanes()
    with lanes.watch():
        program(lanes)
    return replay(lanes.log).races


def races_of(program):
    """Pairs of accesses."""
    return [race for race in look(program) if race.second is not None]


def freed_in(program):
    """Accesses of memory that was freed too early."""
    return [race for race in look(program) if race.second is None]


def test_a_write_beside_a_read_is_a_race_that_names_both():
    def program(lanes):
        x = torch.zeros(16)
        with lanes.on("gather"):
            x.add_(1)
        x.sum()

    (race,) = races_of(program)
    assert (race.first.op, race.first.lane) == ("aten.add_.Tensor", "gather")
    assert (race.second.op, race.second.lane) == ("aten.sum", "compute")
    assert race.span.stop - race.span.start == 64


def test_a_read_beside_a_write_and_two_writes_are_races_and_two_reads_are_none():
    def program(first, second):
        def run(lanes):
            x, y = torch.zeros(16), torch.zeros(16)
            with lanes.on("gather"):
                first(x, y)
            second(x, y)

        return run

    def read(x, _):
        x.sum()

    def write(x, _):
        x.zero_()

    def other(_, y):
        y.zero_()

    assert races_of(program(read, write))
    assert races_of(program(write, write))
    assert not races_of(program(read, read))
    assert not races_of(program(write, other))


def test_disjoint_slices_of_a_storage_are_apart_and_overlapping_ones_are_not():
    def slices(a, b):
        def run(lanes):
            arena = torch.zeros(100, dtype=torch.uint8)
            with lanes.on("gather"):
                arena[a].fill_(1)
            arena[b].fill_(2)

        return run

    assert not races_of(slices(slice(0, 40), slice(40, 100)))
    (race,) = races_of(slices(slice(0, 41), slice(40, 100)))
    assert (race.span.start - race.span.base, race.span.stop - race.span.base) == (40, 41)
    (race,) = races_of(slices(slice(20, 30), slice(0, 100)))
    assert (race.span.start - race.span.base, race.span.stop - race.span.base) == (20, 30)


def test_bytes_count_and_not_dtypes():
    def run(lanes):
        arena = torch.zeros(64, dtype=torch.uint8)
        with lanes.on("gather"):
            arena[:32].view(torch.float32).fill_(1)
        arena[30:32].view(torch.int16).fill_(1)

    assert len(races_of(run)) == 1


def test_columns_of_a_matrix_are_apart():
    def columns(first, second):
        def run(lanes):
            x = torch.zeros(8, 6)
            with lanes.on("gather"):
                x[:, first].fill_(1)
            x[:, second].fill_(2)

        return run

    assert not races_of(columns(slice(0, 3), slice(3, 6)))
    assert races_of(columns(slice(0, 4), slice(3, 6)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:4],
        lambda x: x[1:5:3, ::2].t(),
        lambda x: x[2],
        lambda x: x[2:3].expand(5, 6),
        lambda x: x.flatten().unfold(0, 4, 2),
        lambda x: x[:0],
    ],
)
def test_the_spans_of_a_view_are_its_bytes(make):
    x = torch.zeros(8, 6)
    y = make(x)
    y.untyped_storage().fill_(0)
    touched = torch.zeros(8 * 6 * 4, dtype=torch.uint8)
    for start, stop, base in spans(y):
        assert base == x.data_ptr()
        touched[start - base : stop - base] += 1
    expected = torch.zeros(8, 6).flatten()
    expected[torch.arange(48).view(8, 6)[...].as_strided(y.size(), y.stride(), y.storage_offset()).flatten()] = 1
    assert touched.view(-1, 4).tolist() == [[int(each)] * 4 for each in expected]


def test_a_tensor_of_too_many_runs_counts_as_the_bytes_between():
    x = torch.zeros(5000, 2)
    (span,) = spans(x[:, 0])
    assert (span.start, span.stop) == (x.data_ptr(), x.data_ptr() + 5000 * 8 - 4)


def test_order_is_brought_by_waits_of_all_kinds():
    def with_begins(lanes):
        x = torch.zeros(4)
        with lanes.on("gather"):
            x.add_(1)

    def without_begins(lanes):
        x = torch.zeros(4)
        with lanes.on("gather", begins=False):
            x.add_(1)

    def joined(lanes):
        x = torch.zeros(4)
        with lanes.on("gather", (0, 1)):
            x.add_(1)
        lanes.join([(0, 1)])
        x.sum()

    def joined_with_another(lanes):
        x = torch.zeros(4)
        with lanes.on("gather", (0, 0)):
            torch.zeros(4)
        with lanes.on("gather", (0, 1)):
            x.add_(1)
        lanes.join([(0, 0), (0, 7)])
        x.sum()

    def joined_all(lanes):
        x = torch.zeros(4)
        with lanes.on("gather"):
            x.add_(1)
        with lanes.on("reduce"):
            torch.zeros(4)
        lanes.join_all()
        x.sum()

    assert not races_of(with_begins)
    assert races_of(without_begins)
    assert not races_of(joined)
    assert races_of(joined_with_another)
    assert not races_of(joined_all)


def test_order_goes_through_a_third_stream():
    def through(after):
        def run(lanes):
            x = torch.zeros(4)
            with lanes.on("gather", (0, 0)):
                x.add_(1)
            with lanes.on("reduce", (0, 1), after, begins=False):
                torch.zeros(1)
            lanes.join([(0, 1)])
            x.sum()

        return run

    assert not races_of(through([(0, 0)]))
    assert races_of(through([]))


def test_what_an_event_stands_for_ends_with_it():
    def run(lanes):
        x, y = torch.zeros(4), torch.zeros(4)
        with lanes.on("gather", (0, 0)):
            x.add_(1)
        with lanes.on("gather", (0, 1)):
            y.add_(1)
        lanes.join([(0, 0)])
        x.sum()
        y.sum()

    (race,) = races_of(run)
    assert race.second.op == "aten.sum"


OPS = {
    "in place": (lambda x, y: x.mul_(2), {"x"}, {"x"}),
    "copy": (lambda x, y: x.copy_(y), {"y"}, {"x"}),
    "out": (lambda x, y: torch.exp(y, out=x), {"y"}, {"x"}),
    "foreach": (lambda x, y: torch._foreach_add_([x[:4], x[4:]], [y[:4], y[4:]]), {"y"}, {"x"}),
    "foreach copy": (lambda x, y: torch._foreach_copy_([x], [y]), {"y"}, {"x"}),
    "index": (lambda x, y: x.index_add_(0, torch.tensor([1]), y[:1]), {"y"}, {"x"}),
    "setitem": (lambda x, y: x.__setitem__(slice(0, 3), y[3:6]), {"y"}, {"x"}),
    "scalar": (lambda x, y: y[0].item(), {"y"}, set()),
    "a view": (lambda x, y: (x.view(2, 4), x[1:], x.t(), x.detach(), y.split(2), x.data, x.expand(2, 8)), set(), set()),
    "empty": (lambda x, y: (torch.empty_like(x), y.new_empty(3)), set(), set()),
    "matmul": (lambda x, y: x @ y, {"x", "y"}, set()),
    "fused": (
        lambda x, y: torch._fused_sgd_([x], [y.clone()], [], weight_decay=0, momentum=0, lr=0.1, dampening=0,
            nesterov=False, maximize=False, is_first_step=True),
        {"y"},
        {"x"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_what_ops_read_and_write(name):
    """What an op reads races with a write beside it; what it writes, with a read too."""
    op, reads, writes = OPS[name]

    def beside(touch):
        pair = {"x": torch.zeros(8), "y": torch.zeros(8)}
        names = {x.data_ptr(): name for name, x in pair.items()}

        def run(lanes):
            with lanes.on("gather"):
                op(**pair)
            for x in pair.values():
                touch(x)

        return {names[race.span.base] for race in races_of(run)}

    assert beside(torch.sum) == writes
    assert beside(torch.zero_) == reads | writes


def test_aliases_made_by_set_and_by_data_are_the_same_bytes():
    def run(lanes):
        arena = torch.zeros(64, dtype=torch.uint8)
        alias = torch.empty(0).set_(arena.untyped_storage(), 4, (4,), (1,))
        with lanes.on("gather"):
            arena[16:32].fill_(1)
        alias.data.sum()

    (race,) = races_of(run)
    assert race.second.op == "aten.sum"


def test_memory_that_was_imported_twice_is_the_same_bytes_and_is_freed_once():
    def run(lanes):
        arena = torch.zeros(64, dtype=torch.uint8)
        window = torch.frombuffer(arena.numpy(), dtype=torch.uint8)
        window[:8].sum()
        with lanes.on("gather"):
            arena.fill_(1)
        del window
        arena[10:20].sum()

    assert len(races_of(run)) == 1


def test_memory_freed_under_a_running_stream():
    def freed(*, join_before, join_after, allocate):
        def run(lanes):
            x = torch.zeros(16)
            with lanes.on("gather", (0, 0)):
                total = x.sum()
            if join_before:
                lanes.join([(0, 0)])
            del x
            if join_after:
                lanes.join([(0, 0)])
            if allocate:
                torch.zeros(4)
            return total

        return run

    (race,) = freed_in(freed(join_before=False, join_after=False, allocate=True))
    assert (race.first.op, race.first.lane, race.second, race.owner) == ("aten.sum", "gather", None, "compute")
    assert not freed_in(freed(join_before=True, join_after=False, allocate=True))
    assert not freed_in(freed(join_before=False, join_after=True, allocate=True))
    assert not freed_in(freed(join_before=False, join_after=False, allocate=False)), "nobody has been given it again"


def test_memory_belongs_to_the_stream_that_allocated_it():
    def run(waits):
        def program(lanes):
            with lanes.on("gather", (0, 0)):
                x = torch.zeros(16)
            lanes.join([(0, 0)])
            x.sum()
            del x
            with lanes.on("gather", begins=waits):
                torch.zeros(16)

        return program

    (race,) = freed_in(run(waits=False))
    assert (race.first.lane, race.second, race.owner) == ("compute", None, "gather")
    assert not freed_in(run(waits=True))


def test_what_autograd_saved_is_freed_when_its_graph_is():
    def run(lanes):
        y = (torch.ones(16, requires_grad=True) * 2).exp()
        with lanes.on("gather"), torch.no_grad():
            y.sum()
        graph = y.grad_fn
        del y
        assert not replay(lanes.log).races
        del graph
        torch.zeros(4)

    (race,) = freed_in(run)
    assert race.second is None


def test_new_memory_at_an_old_address_is_not_what_was_there():
    def run(lanes):
        with lanes.on("gather"):
            torch.zeros(1 << 20)
            address = torch.zeros(1 << 20).data_ptr()
        again = [torch.zeros(1 << 20) for _ in range(3)]
        return address in [x.data_ptr() for x in again]

    assert not races_of(run)


def test_subclasses_of_tensor_are_seen_by_what_they_are_made_of():
    class Twice(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*[each.inner if isinstance(each, Twice) else each for each in args], **(kwargs or {}))

    def run(lanes):
        x = torch.zeros(8)
        with lanes.on("gather"):
            x.add_(1)
        Twice(x).sum()

    assert len(races_of(run)) == 1


# ------------------------------------------------------------ the check of a scheduler


def train(name, *, precision="fp32", microbatches=1, steps=3, donate=True, loss=loss_fn, comm=None, **policy):
    strategy = STRATEGIES[name]
    comm = comm or fs.SingleComm(fs.Mesh({axis: 1 for axis, _ in strategy.rules}))
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-2))
    scheduler = fs.Scheduler(comm, sum_late=False, trivial_axes=True, **policy)
    state = make_state(comm, strategy, tx=tx, precision=PRECISIONS[precision])
    step = scheduler(fs.train_step(loss, tx, microbatches=microbatches, donate=donate))
    with check_races(scheduler) as report:
        for batch in my_batches(comm, steps):
            state, _ = step(state, batch)
    assert step.num_recordings == 1
    assert scheduler.lanes.__class__ is not VirtualLanes
    return report


def train_module(name, *, precision="fp32", microbatches=1, steps=3, **policy):
    strategy = STRATEGIES[name]
    comm = fs.SingleComm(fs.Mesh({axis: 1 for axis, _ in strategy.rules}))
    policy = fs.Policy(sum_late=False, trivial_axes=True, **policy)
    torch.manual_seed(0)
    model = fs.ShardedModule(
        Net(3), mesh=comm, strategy=strategy, units="layers.*", precision=PRECISIONS[precision], policy=policy
    )
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with check_races(model) as report:
        for batch in my_batches(comm, steps):
            parts = list(zip(batch["x"].chunk(microbatches), batch["y"].chunk(microbatches), strict=True))
            with model.accumulate():
                for x, y in parts[:-1]:
                    model(x, y)["loss"].backward()
            model(*parts[-1])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


GRID = list(itertools.product(STRATEGIES, PRECISIONS, (1, 2), (0, 1, 2), (False, True)))
SAMPLE = [
    ("ddp", "fp32", 2, 1, False),
    ("zero1", "bf16", 1, 2, False),
    ("zero2", "fp32", 1, 1, True),
    ("zero3", "fp32", 2, 2, False),
    ("zero3", "bf16", 1, 0, True),
    ("hsdp", "bf16", 2, 1, False),
    ("hfsdp", "bf16", 1, 0, False),
]
CASES = [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.deep) for case in GRID]


@pytest.mark.parametrize("train", [train, train_module], ids=["functions", "module"])
@pytest.mark.parametrize(("name", "precision", "microbatches", "prefetch", "one_stream"), CASES)
def test_steps_are_free_of_races(train, name, precision, microbatches, prefetch, one_stream):
    report = train(name, precision=precision, microbatches=microbatches, prefetch=prefetch, one_stream=one_stream)
    assert report.races == []
    assert report.num_ops > 300
    lanes = {entry.lane for entry in report.log if isinstance(entry, Access)}
    expected = {"gather"} if one_stream else {"reduce"} if name == "ddp" else {"gather", "reduce"}
    assert lanes == {"compute", *expected}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("zero3", {"release": "forward", "bucket_nbytes": 2000}),
        ("zero3", {"reduce": "delayed", "reduce_buffers": 2, "poison": True}),
        ("zero2", {"gather_at_start": False, "finish_buffers": 1}),
        ("hfsdp", {"keep_gradients": True, "buffers": 3}),
    ],
)
def test_other_policies_are_free_of_races(name, policy):
    assert train(name, microbatches=2, **policy).races == []


def test_steps_that_make_new_states_are_free_of_races():
    """The old state is freed while gathers of the new one run."""
    assert train("hfsdp", precision="bf16", donate=False).races == []
    assert train("zero3", donate=False).races == []


def test_ranks_with_others_are_checked_each_by_itself():
    strategy = STRATEGIES["hfsdp"]
    mesh = fs.Mesh({axis: 2 for axis, _ in strategy.rules})
    for report in simulate(mesh, lambda comm: train("hfsdp", precision="bf16", comm=comm)):
        assert report.races == []
        assert {entry.lane for entry in report.log if isinstance(entry, Access)} == {"compute", "gather", "reduce"}


# ------------------------------------------------------------ what is left out is found


@pytest.mark.parametrize("name", ["zero2", "zero3", "hfsdp"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_join_of_compute_left_out_is_a_race(name, precision):
    """With poison, also of units whose backward does not look at their parameters."""
    report = train(name, precision=precision, microbatches=2, poison=True, steps=4)
    joins = {why for why in report.waits if why.startswith("compute joins ") and " all of " not in why}
    assert len(joins) >= 5
    needed = joins - report.implied()
    assert len(needed) >= 5
    for why in needed:
        races = report.without(why)
        assert races, why
        assert all("compute" in (race.first.lane, race.second.lane if race.second else race.owner) for race in races)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_reduction_that_does_not_wait_for_compute_is_a_race(name):
    report = train(name, precision="bf16", microbatches=2, steps=4)
    begins = [why for why in report.waits if why.startswith("reduce waits for compute before reduce of ")]
    assert begins
    implied = report.implied()
    for why in begins:
        assert bool(report.without(why)) != (why in implied), why


def test_gradients_that_are_looked_at_need_the_join_at_the_end_of_the_pass():
    """So do those of a step in which nobody looks: two joins behind each other, one of them is enough."""

    def joins(looks):
        comm = fs.SingleComm(fs.Mesh({"dp": 1}))
        scheduler = fs.Scheduler(comm, sum_late=False, trivial_axes=True)
        state = make_state(comm, STRATEGIES["zero3"])

        def step(state, batch, comm):
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch, comm=comm)
            if looks:
                [buffer.norm() for node in fs.units_of(grads) for buffer in node.buffers]
            fs.reduce_scatter(grads, comm=comm, to="optim")
            return loss

        step = scheduler(step)
        with check_races(scheduler) as report:
            for batch in my_batches(comm, 4):
                step(state, batch)
        at = "compute joins all of reduce at microbatch_end"
        assert at in report.waits
        return report.without(at)

    assert joins(looks=True)
    assert not joins(looks=False)


def test_a_step_without_any_join_is_full_of_races():
    report = train("zero3")
    joins = {i for i, entry in enumerate(report.log) if str(entry).startswith("compute joins all of")}
    assert len(joins) > 5
    assert replay(report.log, without=joins).races


# ------------------------------------------------------------ the report


def scheduler_on_streams(**policy):
    return fs.Scheduler(fs.SingleComm(fs.Mesh({"dp": 1})), **{"sum_late": False, "trivial_axes": True, **policy})


def train_with(scheduler, loss, steps=3):
    tx = fs.adamw(1e-2)
    state = make_state(scheduler.comm, STRATEGIES["zero3"], tx=tx)
    step = scheduler(fs.train_step(loss, tx, donate=True))
    for batch in my_batches(scheduler.comm, steps):
        state, _ = step(state, batch)


def test_an_error_names_ops_units_lanes_bytes_and_the_missing_wait():
    scheduler = scheduler_on_streams()
    gather = scheduler.transport.gather

    def late(x, out, axis):
        """Fills what compute uses on another stream, which nobody waits for."""
        ticket = gather(x, out, axis)
        with scheduler.lanes.on("reduce"):
            out.mul_(1)
        return ticket

    scheduler.transport.gather = late
    with (
        pytest.raises(RaceError, match="memory that two streams use") as caught,
        check_races(scheduler),
    ):
        train_with(scheduler, loss_fn)
    assert (
        "  earlier  aten.mul_.Tensor on reduce, reduce on demand at forward embed\n"
        "  later    aten.mul.Tensor on compute, forward layers.0\n"
        "  bytes    1820 to 1844 of the arena, memory of 'layers.0' (24 B)\n"
        "  missing  a wait of compute for reduce, after reduce on demand at forward embed and before forward layers.0\n"
    ) in str(caught.value)
    waits = caught.value.report.waits
    assert any("waits for compute before gather of 'layers.1' for forward (op " in why for why in waits)
    assert any("joins gather of 'layers.1' for forward (op " in why and why.endswith("at forward layers.1") for why in waits)


def test_memory_freed_in_a_step_under_a_running_stream_is_reported():
    scheduler = scheduler_on_streams()
    seen = torch.zeros(())

    def watched(params, batch, comm):
        total, weight = loss_fn(params, batch, comm)
        activation = torch.ones(100, 100)
        with scheduler.lanes.on("reduce"):
            seen.add_(activation.sum())
        del activation
        return total, weight

    with pytest.raises(RaceError, match=r"freed for +compute, which allocates") as caught, check_races(scheduler):
        train_with(scheduler, watched)
    assert {(race.first.op, race.first.lane) for race in caught.value.report.races if race.second is None} == {
        ("aten.sum", "reduce")
    }


def test_a_report_counts_and_lists_what_could_go():
    report = train("zero3", prefetch=2)
    assert str(report).startswith("no race in ")
    assert f"{sum(report.waits.values()):,} waits" in str(report)
    unneeded = report.unneeded()
    assert {each.why for each in unneeded} < set(report.waits)
    assert all(each.times == report.waits[each.why] for each in unneeded)
    assert any(each.is_implied for each in unneeded)
    assert any(not each.is_implied for each in unneeded)
    assert not any(report.without(each.why) for each in unneeded)


def test_races_that_repeat_are_told_once():
    def program(lanes):
        x = torch.zeros(4)
        for _ in range(7):
            with lanes.on("gather"):
                x.add_(1)
            x.sum()

    lanes = VirtualLanes()
    with lanes.watch():
        program(lanes)
    report = RaceReport(lanes)
    with pytest.raises(RaceError, match=r"times +7"):
        report.look()
    assert str(report).count("earlier") == 1


def test_a_scheduler_that_would_not_follow_the_schedule_of_a_device_is_refused():
    for options, what in [
        ({"sum_late": None}, "sum_late=False"),
        ({"sum_late": True}, "sum_late=False"),
        ({"trivial_axes": False}, "trivial_axes=True"),
    ]:
        with pytest.raises(fs.ScheduleError, match=what), check_races(scheduler_on_streams(**options)):
            pass
    with (
        pytest.raises(fs.ScheduleError, match="on meta, expected a CPU"),
        check_races(fs.Scheduler(fs.SingleComm(fs.Mesh({"dp": 1}), device="meta"), sum_late=False)),
    ):
        pass


def test_an_error_in_the_step_passes_and_the_lanes_are_those_from_before():
    scheduler = scheduler_on_streams()
    before = scheduler.lanes
    with pytest.raises(ZeroDivisionError, match="division"), check_races(scheduler):
        train_with(scheduler, lambda *_: 1 / 0)
    assert scheduler.lanes is before
