"""Schedules as data: what a step does, what compiles that, and what finds out whether it is right."""

from fsharp.stateful.schedule.compile import compile_schedule as compile_schedule
from fsharp.stateful.schedule.program import Event as Event
from fsharp.stateful.schedule.program import Program as Program
from fsharp.stateful.schedule.program import UnitFacts as UnitFacts
from fsharp.stateful.schedule.schedule import Schedule as Schedule
from fsharp.stateful.verify.verify import verify as verify
from fsharp.stateful.verify.verify import verify_ranks as verify_ranks
