"""How well a step's time is predicted for models that the hardware was not calibrated on.

For each shape two steps are timed in turns: one without communication (each rank for itself, on a mesh of one), and one under
``zero3``. :meth:`fsharp.inspect.Hardware.fit` finds latency, bandwidth and what beginning a collective costs from the trace of
ONE shape, the one bound by communication. What is predicted of the others is what communication adds: their compute comes from
the traces of their steps without communication, as a rate of so many parameters and tokens a second would be off by a third
between narrow and wide layers, scaled so that the step without communication comes out right; and the time of their optimizer
step from there too, divided by the ranks that share it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

import fsharp as fs
from benchmarks import contenders as c, gpt
from benchmarks.options import Options
from benchmarks.stats import ratio, times
from benchmarks.steps import gathered, in_turns, over_ranks, shape_of

FITTED = "bound by communication"
ALONE, TOGETHER = "without communication", "zero3"


def shapes(options: Options) -> dict[str, gpt.Shape]:
    """What is predicted, and what is calibrated on."""
    base = shape_of(options)
    return {
        FITTED: replace(base, time=max(options.time // 8, 1), batch=1),
        "the benchmark's": base,
        "3 wide layers": replace(base, dim=2 * options.dim, layers=3, batch=max(options.batch // 2, 1)),
        "narrow layers": replace(base, dim=160, heads=5, layers=options.small_layers),
    }


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``prediction``: seconds of each shape, and the largest error of those that were not calibrated on."""
    rows: dict[str, dict[str, Any]] = {}
    hardware: fs.inspect.Hardware | None = None
    for name, shape in shapes(options).items():
        apart = fs.SchedulePolicy(bucket_nbytes=0)  # collectives of different sizes tell the most
        policy = apart if name == FITTED else fs.SchedulePolicy()
        found = {
            ALONE: c.sharded(ALONE, shape, fs.SingleComm(), fs.zero3("dp")),
            TOGETHER: c.sharded(TOGETHER, shape, comm, fs.zero3("dp"), policy),
        }
        traces = {key: each.scheduled.start_trace() for key, each in found.items()}
        rounds, _ = in_turns(found, shape, options, lambda text, n=name: say(f"{n}, {text}"))
        schedule = found[TOGETHER].scheduled.schedule
        if hardware is None:
            hardware = fs.inspect.Hardware.fit(
                traces[TOGETHER], schedule, computes_on_host=True, contention=contention(options.nproc), alone=traces[ALONE]
            )
        own = replace(hardware, compute_times=traces[ALONE].compute_times(), update_s=traces[ALONE].update_time())
        alone = scaled(own, found[ALONE].scheduled.schedule, times(rounds, ALONE).median)
        shared = replace(alone, update_s=alone.update_s / options.nproc)
        rows[name] = _row(over_ranks(rounds)[1], fs.inspect.predict(schedule, shared).step_s)
    assert hardware is not None
    return {
        "shapes": rows,
        "fitted": FITTED,
        "error": max(abs(row["error"]) for name, row in rows.items() if name != FITTED),
        "hardware": json.loads(hardware.to_json()),
    }


def scaled(hardware: fs.inspect.Hardware, schedule: fs.schedules.Schedule, step_s: float) -> fs.inspect.Hardware:
    """The hardware with compute and optimizer step such that a step without communication takes as long as was measured.

    Medians of parts do not add up to the median of their sum, and between the parts the host does something too.
    """
    factor = step_s / fs.inspect.predict(schedule, hardware).step_s
    assert isinstance(hardware.compute_times, Mapping)
    compute = {unit: (factor * forward, factor * backward) for unit, (forward, backward) in hardware.compute_times.items()}
    memory = hardware.memory_bandwidth / factor
    return replace(hardware, compute_times=compute, update_s=factor * hardware.update_s, memory_bandwidth=memory)


def contention(nproc: int) -> float:
    """1 unless ranks leave cores for the threads that send."""
    return 1.0 if len(os.sched_getaffinity(0)) < 2 * nproc else 0.0


def _row(rounds: list[dict[str, float]], predicted_s: float) -> dict[str, Any]:
    """What slows a round down slows both of its steps: so the measured time is that of the one by the ratio within rounds."""
    alone_s = times(rounds, ALONE).median
    measured_s = alone_s * ratio(rounds, TOGETHER, ALONE).median
    predicted_s = mean(gathered(predicted_s))
    seconds = {"alone_s": alone_s, "measured_s": measured_s, "predicted_s": predicted_s}
    return {"rounds": rounds, **seconds, "error": predicted_s / measured_s - 1}
