"""Elastic runs: a rank that is killed, fails or hangs is restarted, the other processes stay, and no bit differs."""

import os
import random
import re
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import loading, saving
from fsharp.distributed import generations
from fsharp.distributed.generations import GENERATION_VARIABLE
from fsharp.errors import CommError, OptionError, RunError
from fsharp.functional.comm.restart_replay import SetupCallRecord, restart_replay
from fsharp.resilience import PerRankState, Run, rejoining
from fsharp.resilience.rejoining import meta_copy
from fsharp.resilience.restarting import Restarter
from fsharp.stateful.modules.session import session_of_module
from fsharp.testing import simulate
from tests.elastic_programs import AFTERWARDS, IN_FIRST_SETUP, IN_SETUP, SIZE, WAYS, Fault, digest, recovery_s, run_steps, train
from tests.forked_python import forked

TOTAL = 6


def undisturbed(root, way, total):
    """The digest of a run that is not elastic, and that nothing happens to; of simulated ranks, unless it takes processes."""

    def rank_fn(comm):
        return digest(run_steps(comm, root / "disk", way, total), comm, way)

    root.mkdir(exist_ok=True)
    return simulate(fs.Mesh(WAYS[way]), rank_fn)[0]


def disturbed(root, way, total, faults, *, restarts=None, may_meet=False, **options):
    """The ends of the ranks of a run that has faults; a process that is not a victim has to live to the end.

    ``may_meet``: a fault may come while another one is recovered. It also restarts processes that are still in their setup.
    """
    root.mkdir(exist_ok=True)
    call = partial(train, str(root), way, total, faults, **options)
    ends = fs.launch(call, SIZE, restarts=len(faults) if restarts is None else restarts)
    victims = {(root / f"fault-{fault.step}-{fault.rank}").read_text().split()[1] for fault in faults}
    can_stay = set((root / "can-stay").read_text().split())
    for rank, end in enumerate(ends):
        *restarted, last = (root / f"pids-{rank}").read_text().split()
        assert len(victims & set(restarted)) == len([fault for fault in faults if fault.rank == rank]), (rank, restarted)
        needless = [pid for pid in restarted if pid not in victims and (pid in can_stay or not may_meet)]
        assert needless == [], (rank, restarted)
        assert int(last) == end.pid
    return ends


@pytest.mark.timeout(240)
@forked
def test_killed_ranks_come_back_the_others_stay_and_no_bit_differs(tmp_path):
    """In the first step, at any moment of the next ones, and in the last step; rank 0 as well."""
    faults = [Fault(0, 2), Fault(2, 0, 0.02), Fault(TOTAL - 1, 1)]
    ends = disturbed(tmp_path, "functions", TOTAL, faults)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}
    assert set(ends[3].steps) == set(range(TOTAL)), "which this process has made, some more than once"


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_fifty_kills(tmp_path, way, capsys):
    draw = random.Random(7)
    total = 4 * 50 + 6
    faults = [Fault(4 * i, draw.randrange(SIZE), draw.random() * 0.1) for i in range(50)]
    ends = disturbed(tmp_path, way, total, faults, may_meet=True, save_every=9)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", way, total)}
    found = recovery_s(tmp_path, faults)
    with capsys.disabled():
        print(f"\n{way}: recovery {statistics.median(found):.2f} s (median), {statistics.mean(found):.2f} s (mean)")


@pytest.mark.deep
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["two axes", "scheduled", "module"])
def test_meshes_of_two_axes_schedules_and_modules_go_on(tmp_path, way):
    ends = disturbed(tmp_path, way, TOTAL, [Fault(2, 1, 0.01), Fault(4, 0)])
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", way, TOTAL)}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_second_death_while_the_first_one_is_recovered(tmp_path):
    faults = [Fault(1, 1), Fault(IN_SETUP, 1), Fault(3, 0), Fault(3, 2, 0.3)]
    ends = disturbed(tmp_path, "functions", TOTAL, faults, may_meet=True)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_before_and_after_the_steps_all_ranks_are_restarted(tmp_path):
    call = partial(train, str(tmp_path), "functions", TOTAL, [Fault(IN_FIRST_SETUP, 0), Fault(AFTERWARDS, 1)])
    ends = fs.launch(call, SIZE, restarts=2)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}
    assert [end.steps for end in ends] == [[]] * SIZE, "all have been made before"
    assert {len(set((tmp_path / f"pids-{rank}").read_text().split())) for rank in range(1, SIZE)} <= {2, 3}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_rank_with_an_error_of_its_own_is_restarted(tmp_path):
    ends = disturbed(tmp_path / "a", "functions", TOTAL, [Fault(2, 1, sign=None)])
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}
    faults = [Fault(2, rank, sign=None) for rank in range(SIZE)]
    with pytest.raises(CommError, match=r"(?s)all ranks have stopped, and none was lost. Rank \d says:\nof this rank alone"):
        disturbed(tmp_path / "b", "functions", TOTAL, faults)


def _lengthen_once(root):
    """Sum the numbers of steps. Step 0 sets the total once, and step 2 kills rank 1: the copy after step 0 is complete."""
    comm = fs.connect(fs.Mesh({"dp": 2}), device_type="cpu")
    with (
        fs.checkpoint.Replicas(root / "host", comm, copies=0, domain_size=2, root=root / "disk") as replicas,
        Run(root / "disk", comm=comm, total=4, save_every=9, replicas=replicas, refresh_every=1, elastic=True) as run,
    ):

        def step(tree, number):
            if number == 0:
                run.total = 6
            if number == 2 and comm.rank == 1 and not (root / "killed").exists():
                (root / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return run.end_step({"x": tree["x"] + number})

        return run.train(step, {"x": torch.zeros(())})["x"].item()


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_after_a_restart_all_ranks_have_the_total_that_the_run_was_given(tmp_path):
    assert fs.launch(_lengthen_once, 2, tmp_path, restarts=1) == [0 + 1 + 2 + 3] * 2


def _fail_once(root, where, background):
    """Sum the numbers of steps. Rank 1 alone fails once, to write its file of the save of step 2, or to read in a load."""
    comm = fs.connect(fs.Mesh({"dp": 2}), device_type="cpu")

    def fail(begin, times):
        def call(*args):
            times.append(1)
            if comm.rank == 1 and len(times) == 2 and not (root / "failed").exists():
                (root / "failed").touch()
                raise OSError("no room on this host")
            return begin(*args)

        return call

    owner, name = (saving, "encode_header") if where == "save" else (loading, "_fill_tree")
    setattr(owner, name, fail(getattr(owner, name), [] if where == "save" else [1]))
    with Run(root / "disk", comm=comm, total=5, save_every=2, background=background, elastic=True) as run:

        def step(tree, number):
            if where == "load" and number == 3 and comm.rank == 0 and not (root / "killed").exists():
                (root / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)  # for the save in the background
            return run.end_step({"x": comm.all_reduce(tree["x"], "dp", op="max") + number})

        tree = run.train(step, {"x": torch.zeros(())})
    return tree["x"].item(), len((root / f"lives-{comm.rank}").read_text())


def _fail_once_and_count(root, where, background):
    note = root / f"lives-{os.environ['RANK']}"
    note.write_text((note.read_text() if note.exists() else "") + "x")
    return _fail_once(root, where, background)


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("where", "background"), [("save", True), ("save", False), ("load", True)])
def test_a_rank_whose_save_or_load_fails_on_it_alone_is_restarted(tmp_path, where, background):
    """All ranks raise this error, and the rank that caused it is restarted, also if another one raises it first."""
    (first, lives), (second, lives_of_1) = fs.launch(_fail_once_and_count, 2, tmp_path, where, background, restarts=3)
    assert first == second == 0 + 1 + 2 + 3 + 4
    assert (tmp_path / "failed").exists()
    assert (lives, lives_of_1) == (2 if where == "load" else 1, 2)


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_rank_that_hangs_is_killed_after_the_time_limit(tmp_path):
    ends = disturbed(tmp_path, "functions", TOTAL, [Fault(2, 3, sign=signal.SIGSTOP)], limit_s=8.0)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_rank_that_hangs_while_another_one_dies_is_killed_and_both_come_back(tmp_path):
    """The rank that hangs takes no part in the recovery of the other one."""
    faults = [Fault(2, 3, sign=signal.SIGSTOP), Fault(2, 1, delay_s=1.0)]
    ends = disturbed(tmp_path, "functions", TOTAL, faults, limit_s=20.0, may_meet=True)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_rank_lost_with_the_holder_of_its_copy_goes_on_from_disk_or_is_an_error(tmp_path):
    faults, options = [Fault(3, 1), Fault(3, 2)], {"copies": 1, "lose_hosts": True, "restarts": 4, "may_meet": True}
    ends = disturbed(tmp_path / "a", "functions", TOTAL, faults, save_every=2, **options)
    assert {end.digest for end in ends} == {undisturbed(tmp_path / "whole", "functions", TOTAL)}
    with pytest.raises(CommError, match=r"(?s)no newer save in memory of hosts is complete.*files of ranks"):
        disturbed(tmp_path / "b", "functions", TOTAL, faults, **options)


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_another_program_is_refused_by_name_and_restarts_are_counted(tmp_path):
    with pytest.raises(CommError, match=r"(?s)different values.*config\.batch_size.*rank 1: 2"):
        disturbed(tmp_path / "a", "functions", TOTAL, [Fault(2, 1)], restarts=3, config=lambda life: {"batch_size": life})
    with pytest.raises(CommError, match=r"(?s)rank 1 was ended by SIGKILL\nNo restart is left: launch\(restarts=1\)"):
        disturbed(tmp_path / "b", "functions", TOTAL, [Fault(2, 0), Fault(3, 1)], restarts=1)


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_new_process_that_never_comes(tmp_path):
    """It stops before it joins."""

    def call():
        if os.environ[GENERATION_VARIABLE] != "0":
            signal.pause()
        return train(str(tmp_path), "functions", TOTAL, [Fault(2, 1)], limit_s=5.0)

    with pytest.raises(CommError, match=r"has waited 5 s for ranks \[1\] to join generation 1 of the job; they never came"):
        fs.launch(call, SIZE, restarts=3)


@pytest.mark.timeout(120)
@forked
def test_a_process_that_ends_with_status_0_and_no_result_is_lost():
    with pytest.raises(CommError, match=r"rank [01] ended with exit status 0, without a result(.|\n)*outside of the steps"):
        fs.launch(lambda: os._exit(0), 2, restarts=1)


def test_train_without_elastic_is_resume_and_steps(tmp_path):
    def go(total):
        with Run(tmp_path, comm=fs.SingleComm(), total=total, save_every=2, signals=(), elastic=True) as run:
            return run.train(lambda tree, number: run.end_step({"x": tree["x"] + number}), {"x": torch.zeros(())})

    assert go(3)["x"] == 3
    assert go(5)["x"] == 10, "from the newest checkpoint"


def test_what_is_refused(tmp_path, monkeypatch):
    def rank_fn(comm):
        with pytest.raises(RunError, match=re.escape("Start the ranks by fs.launch(fn, nproc, restarts=...)")):
            Run(tmp_path, comm=comm, total=1, save_every=1, elastic=True)

    simulate(fs.Mesh({"dp": 2}), rank_fn)
    with pytest.raises(OptionError, match="restarts is -1, expected 0 or more"):
        fs.launch(int, 2, restarts=-1)
    with pytest.raises(RunError, match=r"the tree holds a PerRankState\(Identity\)"):
        meta_copy({"loader": PerRankState(torch.nn.Identity())})
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OptionError, match="restarts is 1, but another launcher such as torchrun has started this process"):
        fs.launch(int, 2, restarts=1)


def test_what_an_elastic_run_refuses_before_its_steps(tmp_path, monkeypatch):
    comm, replay = fs.SingleComm(), SetupCallRecord()
    with Run(tmp_path, comm=comm, total=1, save_every=1, signals=()) as run:
        run._checkpoints.is_elastic = True
        with pytest.raises(RunError, match=r"Run\.resume\(\): with elastic=True call train\(step, tree\), which resumes"):
            run.resume({})
        with pytest.raises(RunError, match=r"Run\.steps\(\): with elastic=True call train\(step, tree\): a loop of yours"):
            next(run.steps())
    monkeypatch.setattr(rejoining, "restart_replay", replay)
    monkeypatch.setattr(rejoining, "comm_and_membership", lambda comm: (comm, None))
    replay.start_recording()
    replay.abandon("a step of a scheduler")
    with pytest.raises(RunError, match="a step of a scheduler cannot be repeated"):
        rejoining.Rejoining(comm)


class Keys(dict):
    """A store of this process alone."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        return self.setdefault(key, desired.encode())


def stop(kinds, *, then=lambda store: None):
    """What comes of ranks that stop by these kinds of errors; ``then`` is called once all have stopped."""
    store = Keys()
    generations.announce_generation(store, 0, "")
    ranks = [generations.RankMembership(store, rank, len(kinds), 0) for rank in range(len(kinds))]
    with ThreadPoolExecutor(len(kinds)) as pool:
        found = [
            pool.submit(each.wait_for_next_generation, kind, ValueError(f"of {rank}"), 5.0)
            for rank, (each, kind) in enumerate(zip(ranks, kinds, strict=True))
        ]
        while len(generations.stop_kinds_and_limits(store, 0, len(kinds))) < len(kinds):
            time.sleep(0.01)
        then(store)
    return [each.exception() or each.result() for each in found], generations.why_restarts_ended(store)


def test_a_rank_with_an_error_of_its_own_ends_and_the_others_wait_for_its_new_process():
    (own, news, _), end = stop(
        ["own", "heard", "heard"], then=lambda store: generations.announce_generation(store, 1, "rank 0 failed")
    )
    assert str(own) == "of 0"
    assert news == (1, "rank 0 failed", None)
    assert end is None


@pytest.mark.parametrize("kind", ["own", "heard"])
def test_an_error_of_all_ranks_is_raised_by_all(kind):
    found, end = stop([kind] * 2)
    assert [str(each) for each in found] == ["of 0", "of 1"]
    assert re.match(r"all ranks have stopped, and none was lost. Rank \d says:\nof \d", end)


def test_a_rank_that_waits_hears_that_nobody_is_restarted():
    (own, told), _ = stop(["own", "heard"], then=lambda store: generations.end_restarts(store, "no restart is left"))
    assert str(told) == "no restart is left"
    assert isinstance(told, CommError)
    assert str(own) in ("of 0", "no restart is left")


def test_ranks_that_do_not_come_to_a_generation_are_named():
    store = Keys()
    generations.announce_generation(store, 3, "")
    member = generations.RankMembership(store, 0, 3, 3)
    store.set("here/3/1", "")
    with pytest.raises(CommError, match=r"rank 0 of 3 has waited 0.1 s for ranks \[2\] to join generation 3"):
        member.join_and_wait_for_all_ranks(0.1)
    del store["end"]
    generations.announce_generation(store, 4, "rank 2 was ended by SIGKILL")
    with pytest.raises(CommError, match="rank 2 was ended by SIGKILL"):
        member.join_and_wait_for_all_ranks(5.0)


def test_calls_of_a_setup_are_made_again_without_those_that_are_part_of_others():
    made, calls = [], SetupCallRecord()
    calls.record_and_call(lambda: made.append("before"))
    calls.start_recording()
    assert calls.record_and_call(lambda: calls.record_and_call(lambda: made.append("inner")) or "outer") == "outer"
    calls.record_and_call(lambda: made.append("first"), replay=lambda: made.append("again"))
    calls.record_and_call(lambda: calls.abandon("a part"))
    assert calls.obstacle == ""
    calls.end_recording()
    calls.record_and_call(lambda: made.append("after"))
    calls.abandon("a step")
    calls.repeat_recorded_calls()
    assert made == ["before", "inner", "first", "after", "inner", "again"]
    assert calls.obstacle == "", "the setup was over"


def test_a_launcher_cuts_the_middle_of_a_long_error(tmp_path):
    """The store refuses a value of some MiB."""
    (tmp_path / "own-error-1").write_text(f"ValueError: {'x' * 10_000_000}\nthe end")
    told = Restarter(tmp_path, "", 2, 1)._how_ended(1, 1)
    assert re.fullmatch(r"(?s)rank 1 failed: ValueError: x+\n\[\.\.\.\]\nx+\nthe end", told)
    assert len(told) < 9000


@pytest.mark.parametrize("first", [0, 5])
def test_a_module_returns_to_the_number_of_the_step_with_which_a_new_process_begins(monkeypatch, first):
    """Stochastic rounding depends on the number: it has to be equal on ranks that stayed and on the restarted one."""
    model = fs.shard_module(torch.nn.Linear(3, 1), mesh=fs.SingleComm(), strategy=fs.zero3("dp"))
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if first:
        with monkeypatch.context() as patch:
            patch.setattr(restart_replay, "is_recording", True)
            model.train_state = model.train_state._replace(step=first)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model.train_state = model.train_state._replace(step=9)
    session_of_module(model).step._reset_after_rank_restart()
    assert model.train_state.step == first


def test_a_record_is_abandoned_for_what_cannot_be_made_again_and_for_its_size():
    for abandon, why in (
        (lambda calls: calls.abandon("a step"), "a step"),
        (lambda calls: calls.record_and_call(lambda: None, nbytes=1 << 28), ""),
        (lambda calls: calls.record_and_call(lambda: None, nbytes=(1 << 28) + 1), "more than 10,000 calls, or 256 MiB,"),
        (lambda calls: [calls.record_and_call(lambda: None) for _ in range(9_999)], ""),
        (lambda calls: [calls.record_and_call(lambda: None) for _ in range(10_000)], "more than 10,000 calls, or 256 MiB,"),
    ):
        made, calls = [], SetupCallRecord()
        calls.start_recording()
        calls.record_and_call(lambda made=made: made.append(1))
        abandon(calls)
        calls.repeat_recorded_calls()
        assert (calls.obstacle, calls.is_recording, len(made)) == (why, not why, 1 + (not why))


def test_a_thread_that_takes_part_in_the_setup_is_an_obstacle():
    calls = SetupCallRecord()
    calls.start_recording()
    thread = threading.Thread(target=calls.record_and_call, args=(lambda: None,))
    thread.start()
    thread.join()
    assert calls.obstacle == "a collective of a thread, such as that of a save in the background,"
