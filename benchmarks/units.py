"""How long it takes to compile and verify the program of a step with very many units. Nothing is sent, nothing computed."""

import time
from collections.abc import Callable
from typing import Any

import fsharp as fs
from benchmarks.options import Options

NBYTES = 1 << 20


def program(num_units: int) -> fs.schedules.Program:
    """A step over equal units, one after the other, under ``zero3`` on two ranks."""
    sent = NBYTES // 2
    units = [
        fs.schedules.UnitFacts(
            f"layers.{i}",
            gathered=NBYTES,
            outgoing=NBYTES,
            gather=(fs.collectives.Call("all_gather", "dp", sent),),
            reduce=(fs.collectives.Call("reduce_scatter", "dp", sent),),
            rest=sent,
        )
        for i in range(num_units)
    ]
    events = []
    for direction, order in (("forward", range(num_units)), ("backward", reversed(range(num_units)))):
        for i in order:
            events += [
                fs.schedules.Event(direction, units[i].name, i),
                fs.schedules.Event(f"{direction}_end", units[i].name, i),
            ]
    return fs.schedules.Program(
        tuple(units),
        (*events, fs.schedules.Event("microbatch_end"), fs.schedules.Event("reduce"), fs.schedules.Event("update")),
    )


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``compile``: seconds to compile a program and to verify what comes of it."""
    recorded = program(options.compile_units)
    began = time.perf_counter()
    schedule = fs.schedules.compile_schedule(recorded, fs.SchedulePolicy())
    compiled = time.perf_counter()
    fs.schedules.verify(schedule)
    verified = time.perf_counter()
    say(f"{options.compile_units} units, {len(schedule.ops)} ops")
    return {
        "units": options.compile_units,
        "ops": len(schedule.ops),
        "compile_s": compiled - began,
        "verify_s": verified - compiled,
    }
