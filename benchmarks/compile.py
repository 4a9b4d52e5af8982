"""How long it takes to compile and verify the schedule of a step: ``python -m benchmarks.compile``.

A step like that of ZeRO-3: all units forward, all backward, one reduction each. Units of equal size, or of random ones;
one microbatch, or four. Seconds of this process. The last line is one JSON object.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import fsharp as fs
from benchmarks.options import Options
from fsharp.functional.comm.protocol import Call
from fsharp.stateful.schedule.compile import compile_schedule
from fsharp.stateful.schedule.policy import SchedulePolicy
from fsharp.stateful.schedule.program import Event, Program, UnitFacts
from fsharp.stateful.schedule.schedule import Schedule
from fsharp.stateful.verify.verify import verify

NUMBERS = (126, 250, 500, 1000)
ALIGN, RANKS = 128, 2


def sizes_of(num_units: int, kind: str) -> list[int]:
    """Bytes of each unit in full."""
    rng = random.Random(num_units)
    return [ALIGN * RANKS * (rng.randint(50, 10_000) if kind == "random" else 4_000) for _ in range(num_units)]


def program_of(sizes: list[int], microbatches: int) -> Program:
    """A step with parameters, gradients and optimizer state sharded over two ranks."""
    units = tuple(
        UnitFacts(
            f"layers.{i}",
            gathered=nbytes,
            outgoing=nbytes + nbytes // RANKS,
            rest=nbytes // RANKS,
            gather=(Call("all_gather", "dp", nbytes // RANKS),),
            reduce=(Call("reduce_scatter", "dp", nbytes // RANKS),),
            sent_dtypes="float32",
        )
        for i, nbytes in enumerate(sizes)
    )
    events: list[Event] = []
    for microbatch in range(microbatches):
        uses = [(unit.name, microbatch * len(units) + i) for i, unit in enumerate(units)]
        events += [Event(kind, *use) for use in uses for kind in ("forward", "forward_end")]
        events += [Event(kind, *use) for use in reversed(uses) for kind in ("backward", "backward_end")]
        events.append(Event("microbatch_end"))
    return Program(units, (*events, Event("reduce"), Event("update")))


def timed(program: Program) -> tuple[Schedule, float, float]:
    """The schedule of a program, and seconds to compile and to verify it."""
    began = time.process_time()
    schedule = compile_schedule(program, SchedulePolicy())
    compiled = time.process_time()
    verify(schedule)
    return schedule, compiled - began, time.process_time() - compiled


def measure(options: Options, comm: fs.Comm, say: Callable[[str], None]) -> dict[str, Any]:
    """The part ``compile`` of ``make bench``: units of equal size and one microbatch."""
    schedule, compile_s, verify_s = timed(program_of(sizes_of(options.compile_units, "equal"), 1))
    say(f"{options.compile_units} units, {len(schedule.ops)} ops")
    return {"units": options.compile_units, "ops": len(schedule.ops), "compile_s": compile_s, "verify_s": verify_s}


def main() -> None:
    """Print a table, and the worst sum at the largest number."""
    worst: dict[int, float] = {}
    print(f"{'units':>6} {'sizes':<7} {'microbatches':>12} {'compile s':>10} {'verify s':>9} {'arena / bound':>14}")
    for number in NUMBERS:
        for kind in ("equal", "random"):
            for microbatches in (1, 4):
                schedule, compile_s, verify_s = timed(program_of(sizes_of(number, kind), microbatches))
                worst[number] = max(worst.get(number, 0.0), compile_s + verify_s)
                over = schedule.arena / max(schedule.peak_nbytes, 1)
                print(f"{number:>6} {kind:<7} {microbatches:>12} {compile_s:>10.2f} {verify_s:>9.2f} {over:>14.3f}", flush=True)
    print(json.dumps({f"compile_s_{number}": round(seconds, 3) for number, seconds in worst.items()}))


if __name__ == "__main__":
    sys.exit(main())
