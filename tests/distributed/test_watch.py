"""Ranks in processes that die, stop or take part in something else: others hear of it in time, with rank, step and op."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsharp as fs
from fsharp.distributed import job_store
from fsharp.distributed.watch import CommWatch, RankStatus, StatusExchange
from fsharp.distributed.worker_threads import Outcome
from fsharp.errors import AgreementError, CommError, ScheduleError
from fsharp.functional.comm.protocol import LabelPrefixComm
from fsharp.testing import processes
from tests import forked_python
from tests.forked_python import forked
from tests.gpt_like import loss_fn
from tests.scheduling import DP, make_state, make_tx, my_batches


def attempt(call):
    """What a call raises, as a kind and a text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def copied(state):
    return state._replace(params=optree.tree_map(torch.clone, state.params))


def fail(state, *, comm):
    raise ZeroDivisionError("no reason")


def differs(comm, way, scheduler=None):
    """Four steps, in which rank 0 does something of its own before the third."""
    policy = {"prefetch": 1 + comm.rank} if way == "another policy" else {}
    scheduler = fs.Scheduler(comm, **policy)
    state, call = make_state(scheduler.comm, "zero3"), scheduler(fs.train_step(loss_fn, make_tx()))
    batches = my_batches(comm, 4)

    def run():
        nonlocal state
        for i, batch in enumerate(batches):
            if i == 2 and way == "copies of all":
                state = copied(state)
            if i == 2 and comm.rank == 0:
                if way == "one call more":
                    call(state, batch)
                elif way == "an equal copy":
                    state = copied(state)
                elif way == "fails":
                    scheduler(fail)(state)
            state, _ = call(state, batch)
        comm.all_reduce(torch.zeros(1), "dp")

    found = attempt(run)
    again = attempt(lambda: call(state, batches[0]))
    return found, again


WAYS = ["nothing", "copies of all", "an equal copy", "another policy"]


@pytest.fixture(scope="module")
def found():
    return processes(DP, lambda comm: {way: differs(comm, way) for way in WAYS})


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ_all_get_the_same_text(found, way):
    first, second = (result[way][0] for result in found)
    if way in ("nothing", "copies of all"):
        assert (first[0], second[0]) == ("nothing", "nothing"), first
        return
    assert first[0] == second[0] == "AgreementError", (first, second)
    assert first[1] == second[1]
    assert "prefetch" in first[1] if way == "another policy" else "ranks take part in different collectives" in first[1]
    assert ": :" not in first[1]
    assert "<locals>" not in first[1]


@pytest.mark.parametrize("way", ["an equal copy", "another policy"])
def test_a_scheduler_is_closed_by_an_error_and_says_so(found, way):
    for result in found:
        kind, text = result[way][1]
        assert kind == "ScheduleError"
        assert "this scheduler was closed" in text


@pytest.mark.parametrize("way", ["one call more", "fails"])
def test_who_waits_for_a_rank_that_went_elsewhere_hears_of_it(way):
    for rank, ((kind, text), _) in enumerate(processes(DP, lambda comm: differs(comm, way))):
        assert kind == ("ZeroDivisionError" if way == "fails" and rank == 0 else "AgreementError"), text
        if kind == "AgreementError":
            assert ("no reason" if way == "fails" else "ranks take part in different collectives") in text


def test_at_its_time_limit_an_abandoned_collective_ends_no_other_one():
    """gloo would close the connections of the process group, which other Comms share."""

    def rank_fn(comm):
        group = dist.new_group(timeout=timedelta(seconds=5))
        comm = fs.ProcessGroupComm(DeviceMesh.from_group(group, "cpu", mesh=[0, 1], mesh_dim_names=("dp",)))
        other = comm.with_own_numbering()
        if comm.rank == 0:
            other.watch.report_failure(ValueError("a bad batch"), "a step")
        else:
            with pytest.raises(AgreementError, match="a bad batch"):
                other.all_gather(torch.ones(1), "dp")
        time.sleep(6)
        return comm.all_gather(torch.tensor(comm.rank), "dp").tolist()

    assert processes(DP, rank_fn) == [[0, 1]] * 2


class Table:
    """A board that ranks in one process share."""

    why_no_answer = ""

    def __init__(self):
        self.texts = {}

    def write(self, key, text):
        self.texts[key] = text

    def read(self, key):
        return self.texts.get(key)

    def write_if_absent(self, key, text):
        return self.texts.setdefault(key, text)


def two_ranks():
    table = Table()
    return [CommWatch("one", StatusExchange(rank, 2, table), table, limit_s=60) for rank in range(2)]


def test_settings_too_long_for_the_store_are_left_out_of_a_status():
    class Store(Table):
        def write(self, key, text):
            super().write(key, text[: 1 << 20])

    table = Store()
    ranks = [StatusExchange(rank, 2, table) for rank in range(2)]
    for each in ranks:
        each.write_status_and_read_others(RankStatus(0, "one", 3, ["a"], {}, settings={"d1": "x" * (1 << 21)}), None)
    assert ranks[1].seen[0].labels == ["a"]
    assert ranks[1].seen[0].settings is None


def test_labels_make_tags():
    a, b = two_ranks()
    assert a.begin_call("gather a").tag == b.begin_call("gather a").tag
    assert a.begin_call("gather b").tag != b.begin_call("gather c").tag
    first = a.begin_call("again").tag
    assert a.begin_call("again").tag != first


def test_the_first_difference_is_shown_with_both_orders():
    a, b = two_ranks()
    calls = [(a.begin_call(x), b.begin_call(y)) for x, y in (("p", "p"), ("q", "r"), ("s", "s"))]
    calls[1][0].check_failure_or_timeout()
    with pytest.raises(AgreementError, match=r"the first difference is number 1(.|\n)*rank 0 .*q(.|\n)*rank 1 .*r"):
        calls[1][1].check_failure_or_timeout()
    with pytest.raises(AgreementError, match="number 1"):
        calls[1][0].check_failure_or_timeout()
    with pytest.raises(AgreementError, match="number 1"):
        a.begin_call("anything")


def test_where_ranks_are_and_what_to_do_come_before_labels_around():
    a, b = two_ranks()
    for i in range(9):
        call, other = a.begin_call(f"both {i}" if i != 4 else "mine"), b.begin_call(f"both {i}" if i != 4 else "theirs")
    call.check_failure_or_timeout()
    with pytest.raises(AgreementError) as raised:
        other.check_failure_or_timeout()
    head, *rows, remedy, around = str(raised.value).partition("\n  rank 0, ")[0].splitlines()
    assert head == "fsharp: ranks take part in different collectives; the first difference is number 4."
    assert rows == ["  rank 0  mine", "  rank 1  theirs"]
    assert remedy.startswith("Every rank has to make the same calls")
    assert around == "labels: the collectives around these, in the order of each rank."
    shown = [(rank, i, f"both {i}") for rank in range(2) for i in range(2, 7)]
    shown[2], shown[7] = (0, 4, "mine"), (1, 4, "theirs")
    assert re.findall(r"  rank (\d), number (\d)  (.*)", str(raised.value)) == [tuple(map(str, each)) for each in shown]


def test_ranks_that_wait_for_each_other_in_two_comms_are_told_apart():
    table, boards = Table(), {"one": Table(), "two": Table()}
    ranks = [StatusExchange(rank, 2, table) for rank in range(2)]
    watches = [[CommWatch(name, each, boards[name], limit_s=60) for name in boards] for each in ranks]
    first, second = watches[0][0].begin_call("in one"), watches[1][1].begin_call("in two")
    for call in (first, second, first):
        call.check_failure_or_timeout()
    written, match = table.read("rank 1"), r"in another Comm\.\n  rank 0  in one\n  rank 1  in two\nEvery rank has to"
    with pytest.raises(AgreementError, match=match):
        second.check_failure_or_timeout()
    table.write("rank 1", written)  # rank 0 hears of the error even if it has not read the last status of rank 1
    with pytest.raises(AgreementError, match=match):
        first.check_failure_or_timeout()


def test_a_rank_is_waited_for_while_its_saver_waits_for_a_slower_one():
    table = Table()
    ranks = [StatusExchange(rank, 2, table) for rank in range(2)]
    steps, saves = ([CommWatch(name, each, table, limit_s=60) for each in ranks] for name in ("steps", "saves"))
    save, step = saves[0].begin_call("save"), steps[1].begin_call("step")  # rank 0 makes its step later, and rank 1 its save
    with saves[0].flag_background_job():
        with saves[1].flag_background_job():
            for _ in range(4):
                save.check_failure_or_timeout()
                step.check_failure_or_timeout()
        step.check_failure_or_timeout()  # rank 1 waits in its step, and does not save
        save.check_failure_or_timeout()
        with pytest.raises(AgreementError, match=r"in another Comm\.\n  rank 0  save\n  rank 1  step"):
            step.check_failure_or_timeout()


def test_a_thread_waits_for_slower_ranks_while_other_threads_have_comms_of_their_own():
    table = Table()
    ranks = [StatusExchange(rank, 2, table) for rank in range(2)]
    one, two = ([CommWatch(name, each, table, limit_s=60) for each in ranks] for name in ("one", "two"))
    for watch in (*one, *two):
        watch.begin_call("before")
    first = one[0].begin_call("in one")  # the other thread of rank 0 calls "in two" later, and this thread of rank 1 "in one"
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(two[1].begin_call, "in two").result()
        for _ in range(4):
            first.check_failure_or_timeout()
            thread.submit(second.check_failure_or_timeout).result()
    second.check_failure_or_timeout()  # now one thread is left
    with pytest.raises(AgreementError, match=r"in another Comm\.\n  rank 0  in one\n  rank 1  in two"):
        _ = [call.check_failure_or_timeout() for call in (first, second, first)]


@pytest.mark.parametrize(("label", "found"), [("", "the end of step 3"), ("of 2", "the end of step 3: of 2")])
def test_a_label_of_a_wrapper_has_a_separator_only_if_something_follows(label, found):
    seen = []

    class Seen(fs.SingleComm):
        def all_gather(self, x, axis, *, label=""):
            seen.append(label)
            return super().all_gather(x, axis, label=label)

    LabelPrefixComm(Seen(fs.Mesh({"dp": 1})), "the end of step 3: ").all_gather(torch.ones(1), "dp", label=label)
    assert seen == [found]


def test_a_rank_that_is_behind_is_waited_for():
    a, b = two_ranks()
    one, two = a.begin_call("p"), a.begin_call("q")
    b.begin_call("p").check_failure_or_timeout()
    one.check_failure_or_timeout()
    two.check_failure_or_timeout()


def test_an_error_that_all_have_heard_of_is_said_once():
    a, b = two_ranks()
    a.report_failure(ValueError("bad batch"), "step #3")
    call = b.begin_call("gather")
    with pytest.raises(AgreementError, match=r"rank 0 of 2 failed in step #3(.|\n)*ValueError: bad batch"):
        call.check_failure_or_timeout()
    error = b.error
    b.report_failure(error, "step #3")
    assert "bad batch" in a.board.read("failed")


def test_a_further_call_of_a_failed_comm_says_once_how_to_go_on():
    a, _ = two_ranks()
    a.refuse_calls_on_all_ranks(CommError, "rank 1 has left the job.")
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1 has left the job") as caught:
            a.begin_call("gather")
    assert ["fs.destroy()" in note for note in caught.value.__notes__] == [True]


@forked
def test_after_an_error_ranks_go_on_as_its_note_says():
    def rank_fn():
        comm = fs.connect(DP, device_type="cpu")
        if comm.rank == 0:
            comm.watch.report_failure(ValueError("a bad batch"), "a step")
        for _ in range(2):
            with pytest.raises(AgreementError, match="a bad batch") as caught:
                comm.all_gather(torch.ones(1), "dp")
        assert "call fs.destroy() on all ranks and connect again" in caught.value.__notes__[-1]
        fs.destroy()
        comm = fs.connect(DP, device_type="cpu")
        return comm.all_gather(torch.tensor(comm.rank), "dp").tolist()

    assert fs.launch(rank_fn, 2) == [[0, 1]] * 2


def test_a_rank_that_waits_itself_is_told_from_one_that_is_silent():
    table = Table()
    a, b, c = (CommWatch("one", StatusExchange(rank, 3, table), table, limit_s=60) for rank in range(3))
    c.begin_call("p")
    waits = b.begin_call("p")
    waits.check_failure_or_timeout()
    ahead = a.begin_call("p"), a.begin_call("q")
    assert a.raise_or_describe_late_ranks(ahead[1]) == "rank 2 did not come to it, while rank 1 waits in 'p'"
    waits.check_failure_or_timeout()
    assert a.raise_or_describe_late_ranks(ahead[0]) == "rank 2 did not come to it"


def test_a_rank_that_has_left_is_not_waited_for():
    a, b = two_ranks()
    first = b.begin_call("step #3")
    a.begin_call("step #3")
    a.statuses.write_last_status(None)
    first.check_failure_or_timeout()  # it took part in this one
    text = r"rank 0 has left the job(.|\n)*rank 0 .*its last collective was 'step #3'(.|\n)*waits for it in 'step #4'"
    with pytest.raises(CommError, match=text):
        b.begin_call("step #4").check_failure_or_timeout()


def test_a_rank_that_has_left_had_come_to_what_it_has_forgotten_since():
    table = Table()
    ranks = [StatusExchange(rank, 2, table) for rank in range(2)]
    a, b = (CommWatch("of a model", each, table, limit_s=60) for each in ranks)
    call = b.begin_call("gather of a model")
    a.begin_call("gather of a model")
    del a  # with the model
    other = CommWatch("of another one", ranks[0], table, limit_s=60)
    waits = other.begin_call("gather of another one")
    for _ in range(3):  # rank 0 waits for this one, which waits for nobody who has not come
        waits.check_failure_or_timeout()
        call.check_failure_or_timeout()
    ranks[0].write_last_status(None)
    call.check_failure_or_timeout()


def test_a_rank_that_has_left_because_of_an_error_says_which():
    a, b = two_ranks()
    a.statuses.write_last_status(ValueError("bad batch"))
    call = b.begin_call("step #0")
    text = r"rank 0 +after no collective yet, .*below\.\n  another rank .*step #0'\nEvery rank .*\n(.|\n)*ValueError: bad batch"
    with pytest.raises(CommError, match=text):
        call.check_failure_or_timeout()


def test_a_rank_whose_messages_stop_in_a_collective_it_has_come_to_has_left():
    a, b = two_ranks()
    a.begin_call("gather")
    call = b.begin_call("gather")
    call.peer = 0
    a.statuses.write_last_status(None)
    call.check_failure_or_timeout()
    assert "rank 0 has left the job" in str(call.report_connection_error(RuntimeError("closed")))


def test_a_store_that_does_not_answer_is_said_so_and_waited_for_once(monkeypatch):
    store, answer = job_store._StoreThread(), threading.Event()
    assert store.query(lambda: 3, 0) == (3, "")
    monkeypatch.setattr(job_store, "_STORE_TIMEOUT_S", 0.1)
    assert store.query(answer.wait, False) == (False, "does not answer")
    monkeypatch.setattr(job_store, "_STORE_TIMEOUT_S", 3600.0)  # whoever waits again takes longer than a test may
    assert [store.query(lambda: 3, 0) for _ in range(50)] == [(0, "does not answer")] * 50
    answer.set()
    while store.query(lambda: 3, 0) != (3, ""):
        time.sleep(0.01)


def test_a_step_in_another_thread_is_refused():
    scheduler, errors = fs.Scheduler(fs.SingleComm()), []

    def nested(comm):
        def other():
            try:
                scheduler(lambda comm: None)()
            except ScheduleError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    scheduler(nested)()
    assert len(errors) == 1
    assert "a step is under way in another thread" in errors[0]


def test_ranks_that_connect_by_other_policies_hear_of_it_each_time():
    """Before one of them waits for process groups that the other does not make."""

    def rank_fn(comm):
        scheduler = fs.Scheduler(comm, separate_groups=comm.rank == 0)
        return [attempt(lambda: scheduler.all_reduce(torch.ones(1), "dp"))[:2] for _ in range(2)]

    first, second = processes(DP, rank_fn)
    assert first == second
    for kind, text in first:
        assert kind == "AgreementError"
        assert "separate_groups" in text


def wait_for_ranks_after_rank_1_has_left(folder, shares_groups):
    """Rank 0 waits for ranks 1 and 2, of which rank 1 has left. Return whether its thread can run a job after the error."""
    comm = fs.connect(fs.Mesh({"dp": 3}), timeout=timedelta(seconds=60))
    comm = comm.with_own_numbering() if shares_groups else comm
    comm.all_gather(torch.ones(2), "dp")
    if comm.rank == 0:
        with pytest.raises(CommError, match="rank 1 has left the job"):
            comm.all_gather(torch.ones(2), "dp")
        if shares_groups:  # other Comms may use the groups until this rank leaves
            fs.destroy()
        outcome = Outcome()
        comm._worker.submit(lambda: None, outcome)
        is_free = outcome.is_done(10)
        (folder / "seen").touch()
        forked_python.ENDS.append(forked_python.destroy_modules)
        return is_free
    while comm.rank == 2 and not (folder / "seen").exists():
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("shares_groups", [False, True])
@forked
def test_no_thread_waits_in_gloo_for_a_rank_after_another_has_left(tmp_path, shares_groups):
    """A thread that waits in gloo when the interpreter ends aborts the process: launch() then raised an error of SIGABRT."""
    assert fs.launch(wait_for_ranks_after_rank_1_has_left, 3, tmp_path, shares_groups) == [True, None, None]
