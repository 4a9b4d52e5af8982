"""The race checker on small programs: what ops touch, what orders them, and whose memory it is."""

import pytest
import torch

from fsharp.testing.accesses import byte_spans
from fsharp.testing.ordering import replay
from fsharp.testing.races import VirtualLanes


def look(program):
    """What is found in ``program(lanes)``."""
    lanes = VirtualLanes()
    with lanes.log_torch_ops():
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
        with lanes.on_lane("gather"):
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
            with lanes.on_lane("gather"):
                first(x, y)
            second(x, y)

        return run

    def read(x, _):
        x.sum()

    def write(x, _):
        x.zero_()

    assert races_of(program(read, write))
    assert races_of(program(write, write))
    assert not races_of(program(read, read))
    assert not races_of(program(write, lambda _, y: y.zero_()))


def test_disjoint_slices_of_a_storage_are_apart_and_overlapping_ones_are_not():
    def slices(a, b):
        def run(lanes):
            arena = torch.zeros(100, dtype=torch.uint8)
            with lanes.on_lane("gather"):
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
        with lanes.on_lane("gather"):
            arena[:32].view(torch.float32).fill_(1)
        arena[30:32].view(torch.int16).fill_(1)

    assert len(races_of(run)) == 1


def test_columns_of_a_matrix_are_apart():
    def columns(first, second):
        def run(lanes):
            x = torch.zeros(8, 6)
            with lanes.on_lane("gather"):
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
    for start, stop, base in byte_spans(y):
        assert base == x.data_ptr()
        touched[start - base : stop - base] += 1
    expected = torch.zeros(8, 6).flatten()
    expected[torch.arange(48).view(8, 6)[...].as_strided(y.size(), y.stride(), y.storage_offset()).flatten()] = 1
    assert touched.view(-1, 4).tolist() == [[int(each)] * 4 for each in expected]


def test_a_tensor_of_too_many_runs_counts_as_the_bytes_between():
    x = torch.zeros(5000, 2)
    (span,) = byte_spans(x[:, 0])
    assert (span.start, span.stop) == (x.data_ptr(), x.data_ptr() + 5000 * 8 - 4)


def test_order_is_brought_by_waits_of_all_kinds():
    def with_begins(lanes):
        x = torch.zeros(4)
        with lanes.on_lane("gather"):
            x.add_(1)

    def without_begins(lanes):
        x = torch.zeros(4)
        with lanes.on_lane("gather", after_compute=False):
            x.add_(1)

    def joined(lanes):
        x = torch.zeros(4)
        with lanes.on_lane("gather", (0, 1)):
            x.add_(1)
        lanes.stream_wait_ops([(0, 1)])
        x.sum()

    def joined_with_another(lanes):
        x = torch.zeros(4)
        with lanes.on_lane("gather", (0, 0)):
            torch.zeros(4)
        with lanes.on_lane("gather", (0, 1)):
            x.add_(1)
        lanes.stream_wait_ops([(0, 0), (0, 7)])
        x.sum()

    def joined_all(lanes):
        x = torch.zeros(4)
        with lanes.on_lane("gather"):
            x.add_(1)
        with lanes.on_lane("reduce"):
            torch.zeros(4)
        lanes.stream_wait_lanes("gather", "reduce")
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
            with lanes.on_lane("gather", (0, 0)):
                x.add_(1)
            with lanes.on_lane("reduce", (0, 1), after, after_compute=False):
                torch.zeros(1)
            lanes.stream_wait_ops([(0, 1)])
            x.sum()

        return run

    assert not races_of(through([(0, 0)]))
    assert races_of(through([]))


def test_what_an_event_stands_for_ends_with_it():
    def run(lanes):
        x, y = torch.zeros(4), torch.zeros(4)
        with lanes.on_lane("gather", (0, 0)):
            x.add_(1)
        with lanes.on_lane("gather", (0, 1)):
            y.add_(1)
        lanes.stream_wait_ops([(0, 0)])
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
            with lanes.on_lane("gather"):
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
        with lanes.on_lane("gather"):
            arena[16:32].fill_(1)
        alias.data.sum()

    (race,) = races_of(run)
    assert race.second.op == "aten.sum"


def test_memory_that_was_imported_twice_is_the_same_bytes_and_is_freed_once():
    def run(lanes):
        arena = torch.zeros(64, dtype=torch.uint8)
        window = torch.frombuffer(arena.numpy(), dtype=torch.uint8)
        window[:8].sum()
        with lanes.on_lane("gather"):
            arena.fill_(1)
        del window
        arena[10:20].sum()

    assert len(races_of(run)) == 1


def test_memory_freed_under_a_running_stream():
    def freed(*, join_before, join_after, allocate):
        def run(lanes):
            x = torch.zeros(16)
            with lanes.on_lane("gather", (0, 0)):
                total = x.sum()
            if join_before:
                lanes.stream_wait_ops([(0, 0)])
            del x
            if join_after:
                lanes.stream_wait_ops([(0, 0)])
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
            with lanes.on_lane("gather", (0, 0)):
                x = torch.zeros(16)
            lanes.stream_wait_ops([(0, 0)])
            x.sum()
            del x
            with lanes.on_lane("gather", after_compute=waits):
                torch.zeros(16)

        return program

    (race,) = freed_in(run(waits=False))
    assert (race.first.lane, race.second, race.owner) == ("compute", None, "gather")
    assert not freed_in(run(waits=True))


def test_what_autograd_saved_is_freed_when_its_graph_is():
    def run(lanes):
        y = (torch.ones(16, requires_grad=True) * 2).exp()
        with lanes.on_lane("gather"), torch.no_grad():
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
        with lanes.on_lane("gather"):
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
        with lanes.on_lane("gather"):
            x.add_(1)
        Twice(x).sum()

    assert len(races_of(run)) == 1
