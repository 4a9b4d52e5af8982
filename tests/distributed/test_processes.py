"""Real processes over gloo: the same errors on every rank, no hang, and every dtype travels."""

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.errors import CommError, FsharpError, MeshError, OptionError
from fsharp.functional.layout.sharded import units_of
from fsharp.testing import processes
from fsharp.testing.process_ranks import _Launcher, _run_ranks
from tests.forked_python import forked, run_forked
from tests.gpt_like import loss_fn, make_params
from tests.scheduling import make_state, make_tx, my_batches

DP, PAIR = fs.Mesh({"dp": 3}), fs.Mesh({"dp": 2})


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def dtypes(comm):
    out = []
    for dtype in DTYPES:
        x = (torch.arange(4) + comm.rank).to(dtype)
        got = comm.all_gather(x, "dp")
        expected = torch.stack([(torch.arange(4) + r).to(dtype) for r in range(3)])
        out.append(torch.equal(got.view(torch.uint8), expected.view(torch.uint8)))
        if dtype.is_floating_point and dtype.itemsize > 1:
            summed = comm.reduce_scatter(torch.stack([x, x, x]), "dp", dtype=torch.float64)
            out.append(torch.equal(summed, 3.0 * torch.arange(4) + 3))
    for op, expected in (("sum", 3.0), ("max", 2.0), ("min", 0.0)):
        out.append(comm.all_reduce(torch.full((2, 2), float(comm.rank)), "dp", op=op).eq(expected).all().item())
    return out


def shapes(comm):
    params = make_params(layers=2)
    if comm.rank == 1:
        params["layers"][1]["w"] = torch.zeros(6, 9)
        params["layers"][1]["v"] = torch.zeros(9, 6)
    fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*"), comm)


def a_mesh_of_four(comm):
    fs.connect(fs.Mesh({"outer": 2, "inner": 2}), device_type="cpu")


def different_meshes(comm):
    fs.connect(fs.Mesh({"dp": 3} if comm.rank else {"data": 3}), device_type="cpu")


def two_models(comm):
    """Ranks take two trees of equal shapes in another order."""
    params = make_params(layers=2)
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*")
    states = [fs.init_state(make_tx(), fs.shard(params, layout, comm, place="optim"), comm=comm) for _ in range(2)]
    step = fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
    for state in reversed(states) if comm.rank == 1 else states:
        step(state, my_batches(comm, 1)[0])


def attempt(comm, program):
    """The type and text of what a program raises, and how many calls it makes; or what it returns."""
    counting = fs.collectives.CountingComm(comm)
    try:
        return program(counting)
    except FsharpError as error:
        return type(error).__name__, str(error), counting.calls.total()


@pytest.fixture(scope="module")
def found():
    """By program what each of three processes finds, in one start of them; the last one ends the Comm."""
    programs = (dtypes, shapes, a_mesh_of_four, different_meshes, two_models)
    results = processes(DP, lambda comm: {program.__name__: attempt(comm, program) for program in programs})
    return {program.__name__: [each[program.__name__] for each in results] for program in programs}


def test_every_dtype_travels(found):
    for flags in found["dtypes"]:
        assert all(flags)
        assert len(flags) == len(DTYPES) + 4 + 3


def test_ranks_that_differ_all_raise_the_same_text(found):
    results = found["shapes"]
    assert {kind for kind, *_ in results} == {"AgreementError"}
    assert len({text for _, text, _ in results}) == 1
    assert all(
        part in results[0][1] for part in ("shapes", "ranks 0, 2: ", "rank 1: ", "layers.1.w: [6, 7]", "layers.1.w: [6, 9]")
    )
    assert "layers.0.w" not in results[0][1]
    assert all(calls <= 3 for *_, calls in results)  # the comparison itself, and nothing after it


def test_errors_of_an_all_reduce_name_it():
    def rank_fn(comm):
        return attempt(comm, lambda comm: comm.all_reduce(torch.ones(2 + comm.rank), "dp"))

    for kind, text, _ in processes(PAIR, rank_fn):
        assert kind == "AgreementError"
        assert "all_reduce along 'dp' of float32[3]" in text
        assert "all_gather" not in text


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("a_mesh_of_four", "MeshError", "3 processes cannot form Mesh(outer=2, inner=2)"),
        ("different_meshes", "AgreementError", 'rank 0  [["data", 3]]'),
        # Without names of trees in labels each rank would add gradients of one model to those of the other.
        ("two_models", "AgreementError", "tree 2 at update 0"),
    ],
)
def test_what_ranks_cannot_do_is_an_error_on_all(found, program, kind, text):
    for result in found[program]:
        assert result[0] == kind, result
        assert text in result[1], result


def test_a_process_that_fails_is_reported_and_the_others_are_stopped():
    def rank_fn(comm):
        if comm.rank == 1:
            raise RuntimeError("a broken rank")
        comm.all_gather(torch.ones(1), "dp")

    with pytest.raises(CommError, match=r"(?s)ranks .*1.* failed.*a broken rank"):
        processes(DP, rank_fn)


def test_a_process_that_ends_without_a_result_is_reported():
    with pytest.raises(CommError, match=r"ranks \[1\] ended with exit code 0 before fn returned"):
        processes(PAIR, lambda comm: os._exit(0) if comm.rank == 1 else None)


def test_a_process_that_hangs_is_stopped():
    def rank_fn(comm):
        if comm.rank == 1:
            import time

            time.sleep(600)

    with pytest.raises(CommError, match=r"ranks .*1.* did not end within 1 s"):
        processes(DP, rank_fn, timeout=1)


@forked
def test_a_call_that_is_interrupted_leaves_no_process_behind(tmp_path):
    def rank_fn(comm):
        (tmp_path / f"{comm.rank}").write_text(str(os.getpid()))
        time.sleep(600)

    class InterruptedCall(Exception):
        pass

    def interrupt(*_):
        raise InterruptedCall

    def interrupt_later():
        while sum(path.stat().st_size > 0 for path in tmp_path.glob("?")) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=interrupt_later).start()
        with pytest.raises(InterruptedCall):
            processes(PAIR, rank_fn)
    finally:
        signal.signal(signal.SIGUSR1, before)
    pids = [int(path.read_text()) for path in tmp_path.glob("?")]
    for _ in range(600):
        alive = [pid for pid in pids if "State:\tZ" not in _status_of(pid)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive
    assert processes(PAIR, lambda comm: comm.rank) == [0, 1]


def _status_of(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/status").read_text()
    return "State:\tZ, and gone"


@pytest.mark.parametrize(("variable", "chosen"), [({}, []), ({"LOCAL_RANK": "3"}, [3])])
def test_connect_chooses_the_gpu_only_if_a_launcher_says_which(monkeypatch, variable, chosen):
    indices = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: indices[-1] if indices else 2)
    assert fs.connect(fs.Mesh({"dp": 1})).device == torch.device("cuda", chosen[0] if chosen else 2)
    assert indices == chosen


def test_a_process_has_the_environment_and_directory_of_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("FSHARP_TEST_WORD", "first")
    processes(DP, lambda comm: None)
    monkeypatch.setenv("FSHARP_TEST_WORD", "second")
    monkeypatch.chdir(tmp_path)
    found = processes(DP, lambda comm: (os.environ["FSHARP_TEST_WORD"], os.getcwd(), os.environ["RANK"]))
    assert found == [("second", str(tmp_path), str(rank)) for rank in range(3)]


def test_the_process_that_starts_them_imports_from_the_search_path_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "found_by_the_caller_alone.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    launcher = _Launcher("import found_by_the_caller_alone")
    try:
        assert _run_ranks(launcher, PAIR, lambda comm: comm.rank, 60.0) == [0, 1]
    finally:
        launcher.close()


@forked
def test_the_process_that_starts_them_may_end_and_a_forked_caller_has_its_own(tmp_path):
    def server():
        return sys.modules[_Launcher.__module__]._launcher._server

    processes(PAIR, lambda comm: None)
    os.killpg(server().pid, signal.SIGKILL)
    server().wait()
    with pytest.raises(CommError, match="the process that starts the ranks has ended"):
        processes(PAIR, lambda comm: None)
    assert processes(PAIR, lambda comm: comm.rank) == [0, 1]

    def child():
        found = processes(PAIR, lambda comm: comm.rank)
        (tmp_path / "found").write_text(f"{found} {server() is not ours}")

    ours, process = server(), multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "found").read_text()) == (0, "[0, 1] True")
    assert processes(PAIR, lambda comm: comm.rank) == [0, 1]


def test_groups_that_not_all_ranks_are_in():
    """Groups of the caller's own, and modules on some of the ranks, leave no rank waiting for another."""

    def rank_fn(comm):
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import DeviceMesh

        dist.new_group([0])
        every = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
        some = dist.new_group([0, 1])
        losses = []

        def train(mesh):
            model = fs.shard_module(nn.Linear(3, 3), mesh=mesh, sync_from=0)
            optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            for _ in range(3):
                loss = model(torch.ones(2, 3)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

        if comm.rank < 2:
            train(DeviceMesh.from_group(some, "cpu", mesh_dim_names=("dp",)))
        train(every)
        return losses

    first, second, third = processes(DP, rank_fn)
    assert first == second
    assert first[3:] == third
    assert third[-1] < third[0]


def test_connections_end_with_their_scheduler():
    """Also of one that an error has closed, and of modules."""

    def rank_fn(comm):
        def descriptors(at_most=0):
            """After some time, which connections take to close."""
            for _ in range(1000 if at_most else 20):
                gc.collect()
                number = len(os.listdir("/proc/self/fd"))
                if number <= at_most:
                    break
                time.sleep(0.02)
            return number

        def fail(state, *, comm):
            raise ZeroDivisionError

        def use(*, fails):
            scheduler = fs.Scheduler(comm)
            state, step = make_state(comm, "zero3"), scheduler(fs.train_step(loss_fn, make_tx()))
            for batch in my_batches(comm, 3):
                state, _ = step(state, batch)
            if fails:
                with suppress(ZeroDivisionError, FsharpError):
                    scheduler(fail)(state)

        def module():
            model = fs.shard_module(torch.nn.Linear(4, 4), mesh=comm, sync_from=0)
            model(torch.ones(2, 4)).sum().backward()

        gc.freeze()  # what is alive now stays: no need to look at it each time
        found = []
        for make in (partial(use, fails=False), partial(use, fails=True), module):
            make()
            before = descriptors()
            for _ in range(2):
                make()
            found.append(descriptors(before) - before)
        return found

    for found in processes(PAIR, rank_fn):
        assert max(found) <= 0, found


def train_while_rank_0_updates_slowly(num_steps):
    """Return rank 0's parameters after the last step, whose update takes longer on rank 0; rank 1 leaves meanwhile."""
    comm, tx = fs.connect(PAIR, timeout=timedelta(seconds=60)), fs.optim.adamw(1e-2)
    steps_begun = 0

    def apply(*args, **options):
        if comm.rank == 0 and steps_begun == num_steps:
            time.sleep(3)  # longer than the end of an interpreter waits for threads
        return tx.apply(*args, **options)

    state, step = make_state(comm, "zero1", tx=tx), fs.Scheduler(comm)(fs.train_step(loss_fn, replace(tx, apply=apply)))
    for batch in my_batches(comm, num_steps):
        steps_begun += 1
        state, _ = step(state, batch)
    return [] if comm.rank else [x.sum().item() for node in units_of(state.params) for x in node.buffers]


@forked
def test_a_rank_that_leaves_first_sends_its_part_of_the_last_update():
    assert fs.launch(train_while_rank_0_updates_slowly, 2, 3)[0]


def call_collectives_in_child():
    """Return seconds and error of each of several calls in a forked child, and the loss of a later step of the ranks."""
    comm = fs.connect(PAIR, timeout=timedelta(seconds=30))
    state, step = make_state(comm, "zero3"), fs.Scheduler(comm)(fs.train_step(loss_fn, make_tx()))
    batches = list(my_batches(comm, 3))
    for batch in batches[:2]:
        state, _ = step(state, batch)
    calls = [
        lambda: comm.all_reduce(torch.ones(1), "dp"),
        lambda: step(state, batches[2]),
        lambda: make_state(comm.with_own_numbering(), "zero3"),
        lambda: fs.connect(PAIR),
    ]
    found = []
    for call in calls if comm.rank else ():
        ours, theirs = os.pipe()
        if not os.fork():
            since = time.monotonic()
            try:
                call()
                text = "no error"
            except CommError as error:
                text = str(error)
            os.write(theirs, f"{time.monotonic() - since:.0f} s: {text}".encode())
            os._exit(0)
        found.append(os.read(ours, 1000).decode())
        os.wait()
    state, metrics = step(state, batches[2])
    return found, metrics.loss.item()


def test_a_forked_process_cannot_call_collectives_of_its_parent():
    (_, loss), (found, _) = run_forked(lambda: fs.launch(call_collectives_in_child, 2))
    assert len(found) == 4
    for text in found:
        assert text.startswith("0 s: process "), text
        assert "rank 1 of 2, and is no rank: it cannot call collectives" in text
    assert math.isfinite(loss)


def call_with_wrong_arguments(comm):
    """Return the errors of collectives whose arguments do not fit the number of ranks, and the result of a call afterwards."""
    calls = [
        lambda: comm.all_reduce(torch.ones(1), "dp", op="mean"),
        lambda: comm.reduce_scatter(torch.ones(1, 3), "dp"),
        lambda: comm.all_to_all(torch.ones(6), [6], [6]),
    ]
    found = []
    for call in calls:
        with pytest.raises((MeshError, OptionError)) as error:
            call()
        found.append(str(error.value).partition(":")[0])
    return found, comm.all_reduce(torch.ones(1), "dp").item()


def test_arguments_that_do_not_fit_are_refused_on_each_rank_before_messages():
    assert processes(PAIR, call_with_wrong_arguments) == [(["all_reduce()", "reduce_scatter()", "all_to_all()"], 2.0)] * 2
