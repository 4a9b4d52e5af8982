"""The commands of docs/launch.md for two hosts, SLURM and Kubernetes run as they stand, for all that one machine can show.

Both hosts are this machine, with one rank each; ``srun`` and ``scontrol`` are stand-ins, as ``kubectl`` would be: a pod is the
command of its container. A job gets a SIGTERM in the middle, and the same commands continue it.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import fsharp as fs

PAGE = (Path(fs.__file__).parents[1] / "docs/launch.md").read_text()
TOTAL = 100
TRAIN = f"""
import time

import torch

import fsharp as fs

comm = fs.connect(fs.Mesh({{"dp": 2}}), device_type="cpu")
with fs.resilience.Run("runs", comm=comm, total={TOTAL}, save_every={TOTAL}) as run:
    [count] = run.resume([torch.zeros(())])
    for step in run.steps():
        if comm.rank == 0:
            with open("steps", "a") as file:
                print(step, int(count), file=file)
        time.sleep(0.05)
        [count] = run.end_step([count + 1])
"""
SRUN = """
import os, signal, subprocess, sys

command = [each for i, each in enumerate(sys.argv[1:]) if not (each.startswith("--kill-on-bad-exit") and i == 0)]
tasks = [subprocess.Popen(command) for _ in range(int(os.environ["SLURM_NNODES"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """
import sys

if sys.argv[1:] == ["show", "hostnames", "node[1-2]"]:
    print("localhost\\nlocalhost")
elif sys.argv[1] == "requeue":
    print(*sys.argv[2:], file=open("requeued", "a"))
else:
    sys.exit(f"scontrol: {sys.argv[1:]}")
"""

pytestmark = pytest.mark.deep


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the training script, with stand-ins for SLURM's commands first in the search path."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    for name, code in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable}{textwrap.dedent(code)}")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(Path(fs.__file__).parents[1]))
    return tmp_path


def on_this_machine(text):
    """The recipe with this machine for its hosts, a free port, and one rank a host."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        text = text.replace("29500", str(each.getsockname()[1]))
    return re.sub(r"(nproc-per-node[ =])8", r"\g<1>1", re.sub(r"(?:host-a|train-0\.train):", "localhost:", text))


def steps(folder):
    """The numbers of the steps that have begun, and the number of updates before each."""
    path = folder / "steps"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until_it_trains(folder, jobs):
    end = time.monotonic() + 200
    while len(steps(folder)) < 5:
        assert time.monotonic() < end
        assert all(job.poll() is None for job in jobs), [job.communicate() for job in jobs]
        time.sleep(0.05)


def ended(jobs):
    """The exit statuses of these processes, which have to end."""
    outputs = [job.communicate(timeout=200)[0] for job in jobs]
    print(*outputs, sep="\n")
    return [job.returncode for job in jobs]


def start(folder, commands):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return [subprocess.Popen(command, cwd=folder, **options) for command in commands]


@contextmanager
def killed_at_the_end():
    """Kill all processes of these jobs in the end, which a test that fails would leave."""
    jobs = []
    try:
        yield jobs
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def check_interrupted_and_continued(folder, commands, signalled):
    """Start ``commands``, send a SIGTERM to job ``signalled``, start them again: every step is made once, in order."""
    with killed_at_the_end() as started:
        started += (jobs := start(folder, commands))
        wait_until_it_trains(folder, jobs)
        jobs[signalled].send_signal(signal.SIGTERM)
        assert all(ended(jobs)), "an interrupted job has not succeeded"
        before = steps(folder)
        assert len(before) < TOTAL
        started += (jobs := start(folder, commands))
        assert ended(jobs) == [0] * len(commands)
        assert steps(folder) == [(step, step) for step in range(TOTAL)], "no step is lost, and none is made twice"


def test_two_hosts(folder):
    found = re.findall(r"^(torchrun --nnodes 2 --node-rank .*?) +# on host-[ab]$", PAGE, re.MULTILINE)
    assert len(found) == 2
    check_interrupted_and_continued(folder, [shlex.split(line) for line in on_this_machine("\n".join(found)).splitlines()], 1)


def test_slurm(folder, monkeypatch):
    """SLURM sends the signal to the batch script alone."""
    [script] = re.findall(r"^```\n(#!/bin/bash\n#SBATCH.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "job.sh").write_text(on_this_machine(script))
    for name, value in {"JOB_NODELIST": "node[1-2]", "NNODES": "2", "JOB_ID": "77"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    check_interrupted_and_continued(folder, [["bash", "job.sh"]], 0)
    assert (folder / "requeued").read_text() == "77\n", "once: a job that has ended is not put back"


def test_kubernetes(folder):
    """A pod that is evicted gets a SIGTERM; the Job starts pods again, as long as it may."""
    [text] = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    service, job = yaml.safe_load_all(text)
    spec = job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    head = f"{job['metadata']['name']}-0.{service['metadata']['name']}:"
    assert any(head in each for each in container["command"]), "the name of the first pod"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    names = [volume["name"] for volume in spec["template"]["spec"]["volumes"]]
    assert names == [mount["name"] for mount in container["volumeMounts"]]
    assert spec["completions"] == spec["parallelism"] == 2 <= spec["backoffLimit"]
    pod = shlex.split(on_this_machine(shlex.join(container["command"])))
    check_interrupted_and_continued(folder, [pod] * spec["parallelism"], 1)
