"""Streams beside compute: one file that knows CUDA, and the same waits on a device as on virtual streams."""

import pytest
import torch

import fsharp as fs
from fsharp.stateful.transport.streams import DeviceLanes, Lanes, new_lanes
from fsharp.testing import DebugPolicy
from fsharp.testing.ordering import RecordEvent, Wait
from fsharp.testing.races import VirtualLanes
from tests.gpt_like import loss_fn
from tests.scheduling import make_state, my_batches

CPU = torch.device("cpu")
MESH = fs.Mesh({"dp": 1})


def test_a_cpu_has_no_lanes_and_any_other_device_has():
    assert type(new_lanes(CPU)) is Lanes
    for kind in ("cuda", "xpu", "mps"):
        assert isinstance(new_lanes(torch.device(kind)), DeviceLanes)


class FakeStream:
    """A stream that notes in a list what it is told."""

    current = None

    def __init__(self, notes):
        self.notes = notes

    def wait_stream(self, other):
        if other is not self:
            self.notes.append(("wait", self, other))

    def wait_event(self, event):
        self.notes.append(("wait", self, event))

    def record_event(self):
        self.notes.append(("record", self))
        return len(self.notes)

    def __enter__(self):
        self.before, FakeStream.current = FakeStream.current, self

    def __exit__(self, *_):
        FakeStream.current = self.before


def train(lanes, strategy, **policy):
    comm = fs.SingleComm(MESH)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, trivial_axes=True, **policy))
    scheduler.engine.steps.set_lanes(lanes)
    tx = fs.optim.adamw(1e-2)
    state, step = make_state(comm, strategy("dp"), tx=tx), scheduler(fs.train_step(loss_fn, tx, microbatches=2, donate=True))
    for batch in my_batches(comm, 3):
        state, _ = step(state, batch)


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero2, fs.zero3])
@pytest.mark.parametrize("offload", [False, True])
def test_a_device_is_told_to_wait_for_what_virtual_streams_wait_for(monkeypatch, strategy, offload):
    notes = []
    monkeypatch.setattr(torch, "Stream", lambda device, priority: FakeStream(notes))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream.current)
    monkeypatch.setattr(FakeStream, "current", compute := FakeStream(notes))
    lanes = DeviceLanes(CPU)
    train(lanes, strategy, offload=offload)
    streams = {"compute": compute, **lanes.streams}

    virtual = VirtualLanes()
    train(virtual, strategy, offload=offload)
    expected, marks = [], {}
    for entry in virtual.log:
        if isinstance(entry, RecordEvent):
            expected.append(("record", streams[entry.lane]))
            marks[entry.key] = len(expected)
        elif isinstance(entry, Wait):
            of = streams[entry.of] if isinstance(entry.of, str) else marks[entry.of]
            expected.append(("wait", streams[entry.lane], of))
    assert len([note for note in notes if note[0] == "wait"]) > 20
    assert notes == expected


def on_fake_streams(monkeypatch, priorities):
    monkeypatch.setattr(torch, "Stream", lambda device, priority: priorities.append(priority) or FakeStream([]))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream.current)
    monkeypatch.setattr(FakeStream, "current", FakeStream([]))
    return DeviceLanes(CPU)


def test_events_go_with_the_step_that_made_them(monkeypatch):
    lanes = on_fake_streams(monkeypatch, [])
    comm = fs.SingleComm(MESH)
    scheduler = fs.Scheduler(comm, policy=DebugPolicy(sum_late=False, trivial_axes=True))
    scheduler.engine.steps.set_lanes(lanes)
    tx = fs.optim.adamw(1e-2)
    state, step, held = make_state(comm, fs.zero3("dp"), tx=tx), fs.train_step(loss_fn, tx), []
    for batch in my_batches(comm, 4):
        state, _ = step(state, batch, scheduler)  # of no scheduled function: each call makes up its ops
        held.append(sum(map(len, lanes._events.values())))
    assert held[0] == held[-1] < 60, held


def test_collectives_go_before_compute_and_copies_do_not(monkeypatch):
    priorities = []
    lanes = on_fake_streams(monkeypatch, priorities)
    for name in ("gather", "reduce", "host"):
        with lanes.on_lane(name):
            pass
    assert priorities == [-1, -1, 0]


def test_what_was_given_nothing_is_not_waited_for_nor_what_is_forgotten(monkeypatch):
    lanes = on_fake_streams(monkeypatch, [])
    compute = FakeStream.current
    lanes.stream_wait_lanes("gather", "reduce")
    with lanes.on_lane("reduce", (0, 1)):
        pass
    assert compute.notes == []
    lanes.release_all_events()
    lanes.stream_wait_lanes("gather", "reduce")
    lanes.stream_wait_ops([(0, 1)])
    assert compute.notes == []
    with lanes.on_lane("reduce"):
        pass
    lanes.stream_wait_lanes("gather", "reduce")
    assert compute.notes == [("wait", compute, lanes.streams["reduce"])]
