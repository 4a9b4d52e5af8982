"""Programs and schedules as data, and the functions that compile, verify and follow schedules."""

from fsharp.planning.plan_step import Use as Use, plan_step as plan_step
from fsharp.stateful.runtime.captured_step import CapturedStep as CapturedStep
from fsharp.stateful.runtime.scheduler import ScheduledFunction as ScheduledFunction, ScheduleHandle as ScheduleHandle
from fsharp.stateful.schedule.compile import compile_schedule as compile_schedule
from fsharp.stateful.schedule.program import Event as Event, Program as Program, UnitFacts as UnitFacts
from fsharp.stateful.schedule.schedule import Schedule as Schedule
from fsharp.stateful.verify.verify import verify as verify
