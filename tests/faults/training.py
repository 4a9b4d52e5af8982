"""What happens to ranks in the middle of training. The tests that these rows run say what has to hold."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults import test_ranks
from tests.faults.registry import Outcome, row
from tests.resilience import test_failures, test_run, test_stragglers

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive_a_kill.py"


@row(1, "kill -9 of a rank in a step")
def killed(folder: Path, short: bool) -> Outcome:
    seeds = range(1 if short else 10)
    slowest = 0.0
    for seed in seeds:
        victim, ends = test_ranks.hit(folder / f"{seed}", signal.SIGKILL, seed=seed, way="scheduled", limit_s=30)
        test_ranks.assert_named(victim, ends, "scheduled")
        slowest = max(slowest, *(end.ended_s for end in ends))
    assert slowest < 6, slowest
    return Outcome(f"named with step and collective, the last process gone after {slowest:.1f} s", kills=len(seeds))


@row(16, "ranks make different numbers of steps")
def fewer_steps(folder: Path, short: bool) -> Outcome:
    test_ranks.test_a_rank_that_leaves_before_the_others_is_named("scheduled", 0, False, folder)
    test_run.test_ranks_that_leave_after_different_steps_hear_of_it(folder / "run")
    return Outcome("the others name the rank that has left, and its last step")


@row(17, "NaN on one rank")
def not_finite(folder: Path, short: bool) -> Outcome:
    test_run.test_raise_names_the_step_the_rank_and_the_leaf(folder / "raise")
    test_run.test_roll_back_goes_on_from_the_checkpoint_without_the_step(folder / "back")
    test_run.test_a_tree_that_is_not_finite_is_not_saved_unless_that_is_wanted(folder / "save")
    return Outcome("found before the update, rank and leaf named; rolled back; never saved")


@row(18, "exception in one rank's step")
def failed(folder: Path, short: bool) -> Outcome:
    test_failures.test_the_first_traceback_comes_last_and_is_labelled(folder, scheduled=True)
    return Outcome("the first failing rank's traceback is printed last, with rank, step, collective")


@row(19, "a slow rank, and one that stops")
def slow(folder: Path, short: bool) -> Outcome:
    test_stragglers.test_a_rank_1_4_times_as_slow_is_named_within_20_steps(False)
    test_failures.test_a_rank_that_is_stopped_is_named_within_the_limit(folder)
    return Outcome("1.4 times as slow: named at step 20; stopped: named within the limit")


@row(20, "SIGTERM")
def terminated(folder: Path, short: bool) -> Outcome:
    test_failures.test_a_signal_to_one_process_saves_and_ends_all_of_them(folder)
    return Outcome("all ranks saved at the end of the step, exit code 75")


@row(21, "torchrun --max-restarts")
def restarted(folder: Path, short: bool) -> Outcome:
    kills = 1 if short else 20
    options = ["--kills", str(kills), "--steps", "12" if short else "60", "--root", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, EXAMPLE, *options], env=env, capture_output=True, text=True, timeout=900)
    found = re.search(r"(\d+) of (\d+) tensors have the same bits after \d+ steps and (\d+) kills", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0, found[0]
    assert found[1] == found[2]
    restarts = done.stdout.split("--- killed")[1].count("continues after") - 1
    assert restarts == kills, done.stdout
    return Outcome(f"{restarts} restarts, {found[0]}", kills=kills, restarts=restarts, resumed_bitwise=restarts)
