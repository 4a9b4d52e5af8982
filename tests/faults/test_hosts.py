"""Two hosts whose link is cut in the middle of a step: ranks on both end in time, and once it is back a new job works."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.faults.hosts import Job, two_hosts
from tests.faults.programs import make_groups, train
from tests.forked_python import forked

LIMIT_S = 5.0
MANY = 100_000  # steps: until the link is cut
OTHERS = [(4, "module"), (2, "scheduled"), (2, "blocking"), (4, "scheduled"), (4, "blocking")]
each_job = pytest.mark.parametrize(
    ("size", "way"), [(2, "module"), *(pytest.param(*job, marks=pytest.mark.deep) for job in OTHERS)]
)


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as found:
        yield found


def peers(text):
    """Ranks that an error names as those it waited for, or that did not come."""
    listed = re.findall(r"ranks? ([\d, ]+) did not come to it", text)
    awaited = re.findall(r"(?:with|for) rank (\d+) in ", text)
    return {int(rank) for rank in awaited + [r for row in listed for r in row.split(", ")]}


@each_job
@forked
def test_a_cut_link_ends_ranks_on_both_hosts_and_a_new_job_has_the_same_bits(hosts, size, way, tmp_path):
    with Job(tmp_path / "undisturbed", size, train, hosts=hosts, limit_s=30, way=way, steps=6) as job:
        expected = {end.result for end in job.ends(within_s=60)}
    with Job(tmp_path / "cut", size, train, hosts=hosts, limit_s=LIMIT_S, way=way, steps=MANY) as job:
        job.wait_for_step(3)
        job.fault()
        hosts.cut()
        try:
            ends = job.ends(within_s=40)
        finally:
            hosts.restore()
    for rank, end in enumerate(ends):
        assert end.exitcode == 0
        assert end.error in ("CommError", "AgreementError")
        assert re.search("gather|reduce|share|the loss of update", end.text), end.text
        if way != "blocking":
            assert re.search(r"step #\d+ after \d+ updates", end.text), end.text
        if rank < size // 2:  # beside the store
            assert peers(end.text) & set(range(size // 2, size)), end.text
        else:
            assert "the job's store, which rank 0 of the job hosts unless torchrun does, does not answer" in end.text
            assert peers(end.text), end.text
        assert end.ended_s < LIMIT_S + 25, end  # not the 30 s that ranks have to leave without an error
    for name in hosts.names:
        assert not subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
    assert not hosts.sockets()
    assert not [path for path in (tmp_path / "cut" / "temporary").rglob("*") if not path.is_dir()]
    with Job(tmp_path / "restored", size, train, hosts=hosts, limit_s=30, way=way, steps=6) as job:
        assert {end.result for end in job.ends(within_s=60)} == expected
    assert len(expected) == 1
    assert None not in expected


@pytest.mark.deep
@pytest.mark.parametrize("size", [2, 4])
@forked
def test_a_cut_link_ends_ranks_that_make_process_groups(hosts, size, tmp_path):
    with Job(tmp_path / "job", size, make_groups, hosts=hosts, limit_s=LIMIT_S) as job:
        job.wait_for_step(3)
        job.fault()
        hosts.cut()
        try:
            ends = job.ends(within_s=60)
        finally:
            hosts.restore()
    for end in ends:
        assert end.error in ("CommError", "RuntimeError")  # the latter is gloo's, of a host that it cannot connect to


PROGRAM = """
import datetime, os, pathlib, sys, time
import torch.distributed as dist
import fsharp as fs
from tests.faults.programs import train

folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"ready-{{rank}}").touch()
while not (folder / f"ready-{{1 - rank}}").exists():  # the limit is for what comes then
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={limit_s}))
comm = fs.connect(fs.Mesh({{"dp": 2}}), device_type="cpu")
steps = (folder / f"steps-{{rank}}").open("ab", buffering=0)
train(comm, lambda: steps.write(b"."), way="scheduled", steps={steps})
"""


@pytest.mark.deep  # each interpreter imports torch
def test_an_interpreter_ends_after_a_cut_and_says_what_it_knows(hosts, tmp_path):
    """Programs as a user writes them: the error is not caught, nothing is destroyed, the interpreter ends by itself."""
    code = PROGRAM.format(limit_s=LIMIT_S, steps=MANY)
    shared = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29401", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "veth0"}
    running = []
    try:
        for rank, name in enumerate(hosts.names):
            environment = {**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", name, sys.executable, "-c", code, str(tmp_path)]
            running.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        made = [tmp_path / f"steps-{rank}" for rank in range(2)]
        while not all(path.exists() and path.stat().st_size > 2 for path in made):
            assert [process.poll() for process in running] == [None, None]
            time.sleep(0.01)
        hosts.cut()
        try:
            ends = [process.communicate(timeout=40) for process in running]
        finally:
            hosts.restore()
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [1, 1]
    for rank, (_, err) in enumerate(ends):
        text = rf"CommError: rank {rank} of 2 waited \S+ s for rank {1 - rank} in .train_step.*step #\d+ after"
        assert re.search(text, err), err
