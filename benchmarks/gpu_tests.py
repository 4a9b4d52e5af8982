"""The tests of TransformerEngine's kernels on a GPU, in a process of their own: what only a GPU can show.

This file is also the plugin of pytest that notes the outcome of each test, so that what was over before a time limit counts.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SELECTED = ("-m", "gpu", "tests/te/test_gpu.py")
NOTES = "FSHARP_BENCH_NOTES"
"""The environment variable that names the file of notes."""


class Outcome(NamedTuple):
    """What became of a test: ``passed``, ``failed`` or ``not run``, and why."""

    test: str
    result: str
    why: str


def measure(seconds: float) -> list[Outcome]:
    """Run the tests, for this long at most. A test that did not begin or end in time is one that has not run."""
    with tempfile.TemporaryDirectory(prefix="fsharp-bench-") as folder:
        notes, output = Path(folder, "notes"), Path(folder, "output")
        notes.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", *SELECTED]
        env = {**os.environ, NOTES: str(notes)}
        # A file, not a pipe: a process that outlives pytest would hold a pipe open, and reading would wait for it.
        with output.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            ended = f"pytest ended with status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"{seconds:g} s were over"
        printed = output.read_text()
        found = {each.test: each for each in (Outcome(*json.loads(line)) for line in notes.read_text().splitlines())}
    if not found:
        last = printed.strip().rpartition("\n")[2].strip("= ")
        return [Outcome(SELECTED[-1], "not run", f"{ended}: {last}" if last else ended)]
    return [each if each.result else Outcome(each.test, "not run", ended) for each in found.values()]


def pytest_collection_finish(session: Any) -> None:
    """Note which tests there are."""
    for item in session.items:
        _note(item.nodeid, "", "")


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test."""
    if report.skipped:
        _note(report.nodeid, "not run", report.longrepr[2].removeprefix("Skipped: "))
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _note(report.nodeid, "failed", (crash.message if crash else report.longreprtext).partition("\n")[0])
    elif report.when == "call":
        _note(report.nodeid, "passed", "")


def _note(nodeid: str, result: str, why: str) -> None:
    with open(os.environ[NOTES], "a") as notes:
        print(json.dumps([nodeid.rpartition("::")[2], result, why]), file=notes)
