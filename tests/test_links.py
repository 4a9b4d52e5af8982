"""Memory that ranks of one machine share: what goes through it, who has it, and what is left when a rank is gone."""

import gc
import os
import socket
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import fsharp as fs
from fsharp.stateful import linking
from fsharp.stateful.exchange import add
from fsharp.stateful.linking import near_axes
from fsharp.stateful.links import SLOTS, Link, Links, slot_nbytes
from fsharp.stateful.workers import Flight
from fsharp.testing import processes
from tests.gpt_like import loss_fn
from tests.scheduling import DP, HYBRID, full_params, make_state, make_tx, my_batches

# Which axes


@pytest.mark.parametrize(
    ("sizes", "machines", "expected"),
    [
        ({"dp": 4}, "aaaa", ["dp"]),
        ({"dp": 4}, "aaab", []),
        ({"dp": 1}, "a", []),
        ({"outer": 2, "inner": 2}, "aaaa", ["outer", "inner"]),
        ({"outer": 2, "inner": 2}, "aabb", ["inner"]),
        ({"outer": 2, "inner": 2}, "abab", ["outer"]),
        ({"outer": 2, "inner": 2}, "aabc", []),  # of some ranks is not enough: all plan alike
        ({"outer": 2, "inner": 2}, "  bb", []),  # a space stands for a machine that nobody knows
    ],
)
def test_axes_that_stay_within_a_machine(sizes, machines, expected):
    assert near_axes(fs.Mesh(sizes), [machine.strip().encode() for machine in machines]) == expected


@given(st.integers(2, 5), st.integers(1, 4), st.lists(st.sampled_from("ab"), min_size=20, max_size=20))
def test_an_axis_is_near_if_every_pair_along_it_is(outer, inner, names):
    mesh = fs.Mesh({"outer": outer, "inner": inner})
    machines = [name.encode() for name in names[: mesh.size]]
    for axis, n in mesh.axes:
        pairs = [(a, b) for a in range(mesh.size) for b in mesh.group(axis, a)]
        assert (axis in near_axes(mesh, machines)) == (n > 1 and all(machines[a] == machines[b] for a, b in pairs))


# Two ends in one process


def two_ends(n=2, ranks=(0, 1)):
    """Both ends of one link, in a group of ``n``."""
    file, socks = os.memfd_create("test"), socket.socketpair()
    os.ftruncate(file, 2 * SLOTS * slot_nbytes(n))
    ends = [Link(sock, file, slot_nbytes(n), is_lower=not i, peer=ranks[1 - i]) for i, sock in enumerate(socks)]
    os.close(file)
    return ends


def all_links(n):
    """For each of ``n`` ranks its links."""
    ends = {(a, b): end for a in range(n) for b in range(a) for (a, b), end in zip([(b, a), (a, b)], two_ends(n, (b, a)))}
    return [Links([ends[r, p] for p in range(n) if p != r], r) for r in range(n)]


def on_threads(calls):
    """All of them at once; errors in order, None for none."""
    errors = [None] * len(calls)

    def run(i):
        try:
            calls[i]()
        except Exception as error:
            errors[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    assert not any(thread.is_alive() for thread in threads), "a hang"
    return errors


def test_slots_are_given_back_before_they_are_filled_again():
    left, right = two_ends()
    chunks = [torch.full((5,), i, dtype=torch.uint8) for i in range(SLOTS + 1)]
    put = [left.put((chunk.data_ptr(), 5), 0) for chunk in chunks]
    assert put == [True] * SLOTS + [False]
    right.listen()
    assert torch.equal(right.head(0, 5)[:5], chunks[0])
    right.free()
    assert torch.equal(right.head(0, 5)[:5], chunks[1])
    assert not left.put((chunks[-1].data_ptr(), 5), 0)  # nobody has told it yet
    right.flush()
    left.listen()
    assert left.put((chunks[-1].data_ptr(), 5), 0)
    assert torch.equal(right.head(0, 5)[:5], chunks[1])
    right.free()
    assert right.head(0, 5) is None
    right.listen()
    assert torch.equal(right.head(0, 5)[:5], chunks[-1])


@given(
    n=st.integers(2, 4),
    sizes=st.lists(st.tuples(st.sampled_from(["reduce", "share"]), st.integers(0, 700_000)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slow=st.integers(0, 3),
)
def test_any_collectives_one_after_another(n, sizes, dtype, slow):
    """With one rank behind, so that the others find slots full and arrivals late."""
    made = all_links(n)
    inputs = [
        [torch.randn(n, size, generator=torch.Generator().manual_seed(r)).to(dtype) for _, size in sizes] for r in range(n)
    ]
    outs = [[torch.empty(size, dtype=dtype) for _, size in sizes] for _ in range(n)]
    shared = [[x.clone() for x in inputs[r]] for r in range(n)]

    def rank(r):
        for i, (kind, _) in enumerate(sizes):
            if r == slow:
                time.sleep(0.002)
            if kind == "reduce":
                made[r].reduce(list(inputs[r][i]), outs[r][i], add)
            else:
                made[r].share(list(shared[r][i]))

    assert on_threads([lambda r=r: rank(r) for r in range(n)]) == [None] * n
    for i, (kind, _) in enumerate(sizes):
        for r in range(n):
            if kind == "share":
                assert torch.equal(shared[r][i], torch.stack([inputs[p][i][p] for p in range(n)]))
            else:
                total = inputs[0][i][r].clone()
                for p in range(1, n):
                    total += inputs[p][i][r]
                assert torch.equal(outs[r][i], total)


def test_a_slot_is_not_filled_while_it_is_added():
    """One rank has all its chunks ready before the other one, which takes its time, has added the first."""
    left, right = all_links(2)
    numel = 4 * SLOTS * slot_nbytes(2) // 4
    x, outs = torch.arange(2.0 * numel).view(2, numel), [torch.empty(numel), torch.empty(numel)]

    def slow(summands, out):
        time.sleep(0.02)
        add(summands, out)

    assert on_threads([lambda: left.reduce(list(x), outs[0], add), lambda: right.reduce(list(x), outs[1], slow)]) == [None] * 2
    assert torch.equal(torch.stack(outs), 2 * x)


DIFFERENT = {  # numbers of elements of each collective of rank 0 and of rank 1, and what rank 1 hears
    "longer": ([1000, 1000], [1001, 1000], "rank 0 sent 4000 bytes of its collective 0, expected 4004 of 0"),
    "other later": ([1000, 1000], [1000, 500], "rank 0 sent 4000 bytes of its collective 1, expected 2000 of 1"),
    "one too few": ([0, 1000], [1000], "rank 0 sent 4000 bytes of its collective 1, expected 4000 of 0"),
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_calls_that_differ_are_refused_and_so_are_those_after_them(which):
    made, (*sizes, told) = all_links(2), DIFFERENT[which]
    later = [None, None]

    def rank(r):
        try:
            for size in sizes[r]:
                made[r].share(list(torch.zeros(2, size)))
        finally:
            try:
                made[r].share(list(torch.zeros(2, 1000)))
            except fs.CommError as error:
                later[r] = str(error)

    errors = on_threads([lambda r=r: rank(r) for r in range(2)])
    assert f"ranks called different collectives: {told}" in str(errors[1])
    assert all(later)
    assert "a collective before this one has failed" in later[1]


def test_what_is_not_contiguous_is_refused():
    left, _ = all_links(2)
    with pytest.raises(fs.CommError, match=r"strides \(2,\), expected a contiguous one"):
        left.share([torch.zeros(8)[::2], torch.zeros(4)])


def test_who_waits_for_a_rank_that_is_gone_finds_out():
    for leave in ("close", "del"):
        made = all_links(3)
        x = torch.zeros(3, 1000)

        def gone(leave=leave, made=made):
            time.sleep(0.05)
            if leave == "close":
                made[2].close()
            made[2] = None
            gc.collect()

        calls = [lambda links=made[r]: links.share(list(x.clone())) for r in range(2)]
        errors = on_threads([*calls, gone])
        assert [type(error) for error in errors] == [fs.CommError, fs.CommError, type(None)]
        assert "rank 2 has closed the memory" in str(errors[0])


def test_what_a_rank_has_sent_before_it_left_arrives():
    left, right = all_links(2)
    x, y = torch.arange(2000.0).view(2, 1000), torch.zeros(2, 1000)

    def brief(links=left):
        links.share(list(x.clone()))
        links.close()

    x0, left = x, None
    errors = on_threads([brief, lambda: (time.sleep(0.05), right.share(list(y)))])
    assert errors[1] is None
    assert torch.equal(y[0], x0[0])


# Processes


def train(comm, strategy, steps=5, **policy):
    """Losses and parameters, and along which axes memory was shared."""
    state, scheduler, losses = make_state(comm, strategy), fs.Scheduler(comm, **policy), []
    call = scheduler(fs.train_step(loss_fn, make_tx()))
    for batch in my_batches(comm, steps):
        state, metrics = call(state, batch)
        losses.append(metrics.loss.clone())
    return losses, full_params(state, comm), sorted(getattr(scheduler.transport, "_links", ()))


def blocking(comm, strategy, steps=5):
    state, step, losses = make_state(comm, strategy), fs.train_step(loss_fn, make_tx()), []
    for batch in my_batches(comm, steps):
        state, metrics = step(state, batch, comm)
        losses.append(metrics.loss.clone())
    return losses, full_params(state, comm)


def are_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and all(
        torch.equal(x, y)
        for x, y in zip(torch.utils._pytree.tree_leaves(a[1]), torch.utils._pytree.tree_leaves(b[1]), strict=True)
    )


def test_machines_decide_and_the_bits_are_the_same():
    near = {"aaaa": ["inner", "outer"], "aabb": ["inner"], "abab": ["outer"], "abcd": []}

    def rank_fn(comm):
        found = []
        for name in ("hsdp", "hfsdp", "zero3x2"):
            expected = blocking(comm, name)
            for machines, axes in near.items():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(linking, "machine", lambda machines=machines: machines[comm.rank].encode())
                    got = train(comm, name)
                found.append((are_equal(expected, got[:2]), got[2] == axes))
        return found

    assert processes(HYBRID, rank_fn) == [[(True, True)] * 12] * 4


def test_it_can_be_left_to_gloo():
    """By one rank too."""

    def rank_fn(comm):
        found = []
        for name in ("ddp", "zero3"):
            expected = blocking(comm, name)
            for is_wanted in (True, False, comm.rank == 0):
                got = train(comm, name, shared_memory=is_wanted)
                found.append((are_equal(expected, got[:2]), got[2]))
        return found

    assert processes(DP, rank_fn) == [[(True, ["dp"]), (True, []), (True, [])] * 2] * 2


@pytest.mark.parametrize("what", ["memfd_create", "connect", "listen", "machine", "open files"])
def test_where_memory_cannot_be_shared_on_one_rank_all_use_gloo(what):
    def rank_fn(comm):
        def refuse(*args):
            raise OSError(f"no {what} here")

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if comm.rank == 1 and what == "memfd_create":
                patch.setattr(os, "memfd_create", refuse)
            if comm.rank == 1 and what == "machine":
                patch.setattr(linking, "machine", refuse)
            if comm.rank == 1 and what in ("connect", "listen"):
                patch.setattr(linking, "socket", _Refusing(what, refuse))
            if comm.rank == 0 and what == "open files":  # the kernel leaves out a file for which there is no room
                patch.setattr(socket, "recv_fds", lambda sock, size, count: (sock.recv(size), [], 0, None))
            patch.setattr(linking, "_PATIENCE", 2.0)
            equal = are_equal(blocking(comm, "zero3"), (got := train(comm, "zero3"))[:2])
            return (
                equal,
                got[2],
                sum("could not share memory" in str(each.message) and what in str(each.message) for each in seen),
            )

    warned = 0 if what in ("listen", "machine") else 1  # a rank that never could is no surprise
    assert processes(DP, rank_fn) == [(True, [], warned)] * 2


def test_strangers_who_call_are_not_taken_for_ranks():
    """The names of sockets are for all to see; one stranger says nothing, one too little, two the wrong things, with a file."""

    def rank_fn(comm):
        connect, called = linking._connect, []

        def late(*args):
            for said in (b"", b"hello", linking._HELLO.pack(0, 1, bytes(16)), linking._HELLO.pack(7, 9, bytes(16))):
                if comm.rank == 1:
                    name, _ = args[-1][0]
                    with socket.socket(socket.AF_UNIX) as sock, tempfile.TemporaryFile() as file:
                        sock.connect(linking._address(name))
                        called.append(said and socket.send_fds(sock, [said], [file.fileno()]))
            time.sleep(0.2 * comm.rank)
            return connect(*args)

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            patch.setattr(linking, "_connect", late)
            expected, got = blocking(comm, "zero3"), train(comm, "zero3")
        return len(called), are_equal(expected, got[:2]), got[2]

    assert processes(DP, rank_fn) == [(0, True, ["dp"]), (4, True, ["dp"])]


class _Refusing:
    """The module ``socket`` with sockets that refuse one call."""

    def __init__(self, what, refuse):
        self._kind = type("Socket", (socket.socket,), {what: lambda sock, *args: refuse()})

    def __getattr__(self, name):
        return self._kind if name == "socket" else getattr(socket, name)


def test_a_rank_that_dies_is_missed_at_once():
    def rank_fn(comm):
        state, (batch, *_) = make_state(comm, "zero3"), my_batches(comm, 1)
        call = fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
        for _ in range(3):
            state, _ = call(state, batch)
        [node.buffers for node in fs.units_of(state.params)]
        comm.all_reduce(torch.zeros(1), "dp")
        start = time.monotonic()
        if comm.rank == 1:
            threading.Timer(0.3, os._exit, [3]).start()
            time.sleep(5)
        try:
            for _ in range(3):
                state, _ = call(state, batch)
        except fs.CommError as error:
            Path(os.environ["TOLD"]).write_text(f"{time.monotonic() - start:.3f} {error}")

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        told = Path(folder, "told")
        patch.setenv("TOLD", str(told))
        with pytest.raises(fs.CommError, match="failed"):
            processes(DP, rank_fn, timeout=30)
        seconds, text = told.read_text().split(" ", 1)
    assert 0.3 <= float(seconds) < 2
    assert "rank 1 has closed the memory that it shared with this rank, or is gone" in text


def test_a_rank_that_is_gone_may_have_left_a_note_or_taken_the_store_with_it():
    def agreement():
        raise fs.AgreementError("rank 1 says")

    def store_is_gone():
        raise torch.distributed.DistNetworkError("broken pipe")

    for patience, expected in ((agreement, "rank 1 says"), (store_is_gone, "rank 1 is gone"), (lambda: None, "rank 1 is gone")):
        flight = Flight(patience)
        flight.land(error=RuntimeError("rank 1 is gone"))
        with pytest.raises(RuntimeError, match=expected):
            flight.wait()


def test_an_error_is_raised_and_links_are_closed_though_the_store_is_gone():
    def rank_fn(comm):
        state, (batch, *_) = make_state(comm, "zero3"), my_batches(comm, 1)

        def fn(params, fails, comm):
            if fails:
                raise ValueError("on every rank")
            return loss_fn(params, batch, comm)[0]

        scheduler = fs.Scheduler(comm)
        call = scheduler(fn)
        call(state.params, False)
        with pytest.MonkeyPatch.context() as patch:
            gone = SimpleNamespace(set=_raise_gone, check=_raise_gone)
            patch.setattr(scheduler.order, "_store", gone)
            try:
                call(state.params, True)
            except ValueError:
                return not scheduler.transport._links, "store is gone" in scheduler.order._last
        return None

    assert processes(DP, rank_fn) == [(True, True)] * 2


def _raise_gone(*args):
    raise torch.distributed.DistNetworkError("broken pipe")


def test_nothing_is_left_when_a_scheduler_is_gone():
    def rank_fn(comm):
        def open_now():
            gc.collect()
            files = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")
            ]
            return Path("/proc/self/maps").read_text().count("memfd:fsharp"), sum(name.startswith("socket:") for name in files)

        state, batches = make_state(comm, "zero1"), my_batches(comm, 3)
        before = open_now()[0]
        for _ in range(2):
            scheduler = fs.Scheduler(comm)
            call = scheduler(fs.train_step(loss_fn, make_tx()))
            for batch in batches:
                state, _ = call(state, batch)
            [node.buffers for node in fs.units_of(state.params)]
            during = open_now()
            del scheduler, call
            for _ in range(50):  # its worker may be about to end
                after = open_now()
                if after[0] == before and after[1] < during[1]:
                    break
                time.sleep(0.02)
        return before, during[0], after[0], during[1] - after[1]

    for before, during, after, sockets in processes(DP, rank_fn):
        assert before == after == 0 < during
        assert sockets >= 1
