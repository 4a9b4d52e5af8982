import os
import re
import signal
import threading

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, CommError, MeshError
from fsharp.testing import processes, simulate, simulated_ranks

DP2, DP3, GRID = fs.Mesh({"dp": 2}), fs.Mesh({"dp": 3}), fs.Mesh({"o": 2, "i": 3})
FOR_EVER_S = 3600.0  # longer than a test may take: what waits for it fails


def test_results_are_in_order_of_rank():
    assert simulate(GRID, lambda comm: (comm.rank, comm.mesh, comm.device)) == [
        (r, GRID, torch.device("cpu")) for r in range(6)
    ]


def test_collectives_are_what_they_say():
    def rank_fn(comm):
        x = torch.tensor([float(comm.rank), 10.0])
        pairs = torch.arange(6.0).view(3, 2) + 100 * comm.rank
        return {
            "gather": comm.all_gather(x, "o"),
            "sum": comm.all_reduce(x, "i"),
            "max": comm.all_reduce(x, "i", op="max"),
            "min": comm.all_reduce(x, "o", op="min"),
            "scatter": comm.reduce_scatter(pairs, "i", dtype=torch.float64),
            "x": x,
        }

    for rank, got in enumerate(simulate(GRID, rank_fn)):
        o, i = GRID.coords(rank)
        outer, inner = GRID.group("o", rank), GRID.group("i", rank)
        assert got["gather"].tolist() == [[float(r), 10.0] for r in outer]
        assert got["sum"].tolist() == [float(sum(inner)), 30.0]
        assert got["max"].tolist() == [float(max(inner)), 10.0]
        assert got["min"].tolist() == [float(min(outer)), 10.0]
        assert got["scatter"].dtype == torch.float64
        assert got["scatter"].tolist() == [6.0 * i + 100 * sum(inner), 6.0 * i + 3 + 100 * sum(inner)]
        assert got["x"].tolist() == [float(rank), 10.0], "arguments are not changed"
        assert o * 3 + i == rank


def test_sums_are_in_order_of_rank():
    values = [1e8, 1.0, -1e8]  # in float32 (1e8 + 1) - 1e8 is 0, any other order gives 1

    def rank_fn(comm):
        x = torch.tensor([values[comm.rank]])
        return comm.all_reduce(x, "dp").item(), comm.reduce_scatter(x.expand(3, 1), "dp").item()

    assert simulate(DP3, rank_fn) == [(0.0, 0.0)] * 3


def test_a_rank_may_overwrite_its_tensor_as_soon_as_its_call_returns():
    def rank_fn(comm):
        seen = []
        x = torch.zeros(20_000)
        for turn in range(100):
            x.fill_(turn)
            seen.append(comm.all_gather(x, "dp")[:, -1].tolist())
            x.fill_(-1)
        return seen

    for seen in simulate(fs.Mesh({"dp": 4}), rank_fn):
        assert seen == [[float(turn)] * 4 for turn in range(100)]


@pytest.mark.parametrize("enabled", [True, False])
def test_ranks_have_the_grad_mode_of_the_caller(enabled):
    with torch.set_grad_enabled(enabled):
        assert simulate(DP2, lambda comm: torch.is_grad_enabled()) == [enabled] * 2


def by_rank(*calls):
    return lambda comm: calls[comm.rank](comm)


ONE, TWO = torch.ones(1), torch.ones(2)
MISMATCHES = {
    "shape": (
        by_rank(lambda c: c.all_gather(ONE, "dp"), lambda c: c.all_gather(TWO, "dp")),
        ["different collectives", "rank 0  all_gather along 'dp' of float32[1]", "rank 1  all_gather along 'dp' of float32[2]"],
    ),
    "dtype": (
        by_rank(lambda c: c.all_reduce(ONE, "dp"), lambda c: c.all_reduce(ONE.half(), "dp")),
        ["rank 0  all_reduce sum along 'dp' of float32[1]", "rank 1  all_reduce sum along 'dp' of float16[1]"],
    ),
    "kind": (
        by_rank(lambda c: c.all_gather(TWO, "dp"), lambda c: c.reduce_scatter(TWO, "dp")),
        ["rank 0  all_gather along 'dp'", "rank 1  reduce_scatter along 'dp'"],
    ),
    "operation": (
        by_rank(lambda c: c.all_reduce(ONE, "dp", op="max"), lambda c: c.all_reduce(ONE, "dp", op="min")),
        ["all_reduce max", "all_reduce min"],
    ),
    "label": (
        by_rank(lambda c: c.all_gather(ONE, "dp", label="gather a"), lambda c: c.all_gather(ONE, "dp", label="gather b")),
        ["rank 0  all_gather along 'dp' of float32[1] for 'gather a'", "float32[1] for 'gather b'"],
    ),
    "one returns": (
        by_rank(lambda c: c.all_gather(ONE, "dp"), lambda c: None),
        ["rank 1 is gone; all_gather along 'dp' of float32[1], number 0 of rank 0", "rank 1  nothing, it has returned"],
    ),
    "one calls more": (
        by_rank(lambda c: [c.all_gather(ONE, "dp") for _ in range(2)], lambda c: c.all_gather(ONE, "dp")),
        ["rank 1 is gone", "number 1 of rank 0", "rank 1  nothing, it has returned, after all_gather"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_differ_are_told_apart(name):
    rank_fn, texts = MISMATCHES[name]
    with pytest.raises(CommError, match=re.escape(texts[0])) as caught:
        simulate(DP2, rank_fn, timeout=FOR_EVER_S)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_ranks_that_wait_for_each_other_are_found_without_waiting(seed):
    def rank_fn(comm):
        # 0 waits for 1, which waits along the other axis, and so on in a circle.
        comm.all_gather(ONE, "oi"[comm.rank in (0, 3)])

    found = simulate(fs.Mesh({"o": 2, "i": 2}), rank_fn, seed=seed, timeout=FOR_EVER_S, outcomes=True)
    for error in found:
        assert isinstance(error, CommError)
        assert str(error) == (
            "simulate(): every rank waits, and no call can end.\n"
            "  rank 0  all_gather along 'i' of float32[1]\n  rank 1  all_gather along 'o' of float32[1]\n"
            "  rank 2  all_gather along 'o' of float32[1]\n  rank 3  all_gather along 'i' of float32[1]"
        )


def test_a_rank_that_is_late_times_out():
    def rank_fn(comm):
        if comm.rank == 1:
            is_over.wait()
        comm.all_gather(ONE, "dp")

    is_over = threading.Event()
    with pytest.raises(CommError, match=r"waited [\d.]+ s, number 0 of rank 0"):
        simulate(DP2, rank_fn, timeout=0.5)
    is_over.set()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_stops_the_others_and_is_raised_as_it_is(failing):
    went_on = []

    def rank_fn(comm):
        comm.all_gather(ONE, "dp")
        if comm.rank == failing:
            raise ZeroDivisionError(f"of {comm.rank}")
        comm.all_gather(ONE, "dp")
        went_on.append(comm.rank)

    with pytest.raises(ZeroDivisionError, match=f"of {failing}") as caught:
        simulate(DP3, rank_fn)
    assert went_on == []
    assert caught.value.__notes__ == [f"raised by rank {failing} of Mesh(dp=3) in simulate()"]


def test_a_collective_of_many_ranks_looks_at_each_call_a_few_times(monkeypatch):
    looked, settle = [], simulated_ranks._World._settle_group
    monkeypatch.setattr(simulated_ranks._World, "_settle_group", lambda *args: looked.append(args) or settle(*args))
    simulate(fs.Mesh({"dp": 32}), lambda comm: comm.all_reduce(torch.ones(()), "dp"))
    assert len(looked) <= 2 * 32


@pytest.mark.parametrize("run", [simulate, processes])
def test_a_sum_in_another_dtype_on_one_rank_alone_is_an_error_on_all(run):
    def rank_fn(comm):
        dtype = torch.bfloat16 if comm.rank else torch.float32
        try:
            fs.collectives.reduce_scatter_last(torch.ones(4), comm, "dp", dtype=dtype)
        except (CommError, AgreementError) as error:
            return str(error)
        return "nothing"

    for found in run(DP2, rank_fn):
        assert re.search(r"in torch\.bfloat16", found), found


def test_an_unknown_axis_is_refused():
    with pytest.raises(MeshError, match="unknown mesh axis 'tp'"):
        simulate(DP2, lambda comm: comm.all_gather(ONE, "tp"))


def test_counting_comm_counts_what_a_rank_sends():
    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        counting.all_gather(torch.ones(5, dtype=torch.float16), "dp")
        counting.reduce_scatter(torch.ones(3, 7), "dp")
        counting.all_reduce(torch.ones(4, dtype=torch.float64), "dp", op="max")
        counting.all_gather(torch.ones(5, dtype=torch.float16), "dp")
        assert (counting.mesh, counting.rank, counting.device) == (comm.mesh, comm.rank, comm.device)
        return counting

    for counting in simulate(DP3, rank_fn):
        assert dict(counting.calls) == {
            fs.collectives.Call("all_gather", "dp", 2 * 10): 2,
            fs.collectives.Call("reduce_scatter", "dp", 2 * 28): 1,
            fs.collectives.Call("all_reduce", "dp", 2 * 2 * 16): 1,
        }
        assert (counting.num_calls, counting.nbytes) == (4, 2 * 20 + 56 + 64)


def exchanged(comm):
    """Rank ``r`` sends ``r + s`` elements to each rank ``s``, and two more ranks nothing to each other."""
    n = comm.mesh.size
    sizes = [[0 if r + s == 1 else r + s for s in range(n)] for r in range(n)]
    send, receive = sizes[comm.rank], [row[comm.rank] for row in sizes]
    counting = fs.collectives.CountingComm(comm)
    x = torch.cat([torch.full((k,), 10.0 * comm.rank + s, dtype=torch.bfloat16) for s, k in enumerate(send)])
    got = counting.all_to_all(x, send, receive, label="a test")
    expected = torch.cat([torch.full((k,), 10.0 * r + comm.rank, dtype=torch.bfloat16) for r, k in enumerate(receive)])
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    assert dict(counting.calls) == {fs.collectives.Call("all_to_all", "", 2 * (sum(send) - send[comm.rank])): 1}


@pytest.mark.parametrize("mesh", [DP3, fs.Mesh({"outer": 2, "inner": 2})])
def test_all_to_all_is_over_all_axes(mesh):
    simulate(mesh, exchanged)


def test_all_to_all_in_processes():
    """With a group of an axis, and with one of all ranks that is made for it; through a scheduler as well."""

    def rank_fn(comm):
        exchanged(comm)
        exchanged(fs.Scheduler(comm))

    processes(DP3, rank_fn)
    processes(fs.Mesh({"outer": 2, "inner": 2}), rank_fn)


@pytest.mark.parametrize("run", [simulate, processes])
def test_an_all_to_all_in_which_a_rank_expects_another_size_is_refused_on_all_ranks(run):

    def rank_fn(comm):
        found = []
        for axis, expected in (("dp", 3), (None, 1), (None, 0)):
            send, receive = ([0, 2], [0, 0]) if comm.rank == 0 else ([0, 0], [expected, 0])
            with pytest.raises(AgreementError, match=rf"rank 0 of 2 sends 2 elements to rank 1, which expects {expected}\."):
                comm.all_to_all(torch.ones(sum(send)), send, receive, axis=axis)
            send, receive = ([1, 2], [1, 0]) if comm.rank == 0 else ([0, 1], [2, 1])  # right, of the same Comm
            found.append(comm.all_to_all(torch.full((sum(send),), comm.rank), send, receive, axis=axis).tolist())
        return found

    assert run(DP2, rank_fn) == [[[0]] * 3, [[0, 0, 1]] * 3]


@pytest.mark.parametrize("run", [simulate, processes])
def test_sizes_that_are_equal_on_one_rank_alone_are_compared_as_well(run):
    def rank_fn(comm):
        for sizes in ([4, 4], [4, 3]):
            mine = [3, 3] if comm.rank == 0 else sizes
            with pytest.raises(AgreementError, match=r"rank 0 of 2 sends 3 elements to rank 1, which expects 4\."):
                comm.all_to_all(torch.ones(sum(mine)), mine, mine, axis="dp")
        mine = [2, 2] if comm.rank == 0 else [2, 5]
        return comm.all_to_all(torch.full((sum(mine),), comm.rank), mine, mine, axis="dp").tolist()

    assert run(DP2, rank_fn) == [[0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("run", [simulate, processes])
def test_a_rank_that_only_looks_on_hears_of_sizes_that_differ(run):
    """Also of the gradient's exchange: it takes the same sizes the other way around."""

    def rank_fn(comm):
        send, receive = [([1, 3, 0], [1, 0, 0]), ([0, 1, 0], [4, 1, 0]), ([0, 0, 1], [0, 0, 1])][comm.rank]
        with pytest.raises(AgreementError, match=r"rank 0 of 3 sends 3 elements to rank 1, which expects 4\."):
            fs.collectives.all_to_all_last(torch.ones(sum(send)), send, receive, comm, "dp", label="tokens")

    run(DP3, rank_fn)


def test_all_to_all_of_other_sizes_is_refused():
    with pytest.raises(AgreementError, match=r"rank 1 of 2 sends 1 elements to rank 0, which expects 2"):
        simulate(DP2, lambda comm: comm.all_to_all(TWO, [1, 1], [1, 2]))


def test_single_comm_is_a_mesh_of_one():
    comm = fs.SingleComm()
    assert isinstance(comm, fs.Comm)
    assert comm.all_gather(TWO, "dp").shape == (1, 2)
    assert comm.reduce_scatter(TWO.view(1, 2), "dp", dtype=torch.float64).dtype == torch.float64
    assert comm.all_reduce(TWO, "dp") is TWO
    assert comm.all_to_all(TWO, [2], [2]) is TWO


@pytest.mark.parametrize("seed", [None, 0])
def test_ranks_have_the_autocast_of_the_caller(seed):
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.float16):
        assert simulate(DP2, lambda comm: (x @ x).dtype, seed=seed) == [torch.float16] * 2
    assert simulate(DP2, lambda comm: (x @ x).dtype, seed=seed) == [torch.float32] * 2


@pytest.mark.parametrize("seed", [None, 0])
def test_an_interrupt_ends_the_threads_of_all_ranks(seed):
    threads = {}

    def act(comm):
        threads[comm.rank] = threading.current_thread()
        comm.all_gather(torch.ones(1), "dp")
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            comm.all_gather(torch.ones(1), "dp")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of the tests ignore this signal
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(DP3, act, seed=seed)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threads.values():
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in threads.values())
