"""SchedulePolicy: options for schedules, such as prefetch. A policy never changes a computed value."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fsharp.errors import ScheduleError
from fsharp.type_checks import options_checked

ArenaMemory = Literal["allocator", "registered", "symmetric"]

MAX_REDUCTIONS, MAX_FINAL_REDUCTIONS = 1, 3
"""Limits of reductions under way at once: of microbatches, each in memory as large as a gradient; and of final reductions."""


@options_checked
@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """Options for the schedule of a training step: prefetch, buckets, memory budget, offload. They change no value.

    Args:
        prefetch: number of units to gather ahead of their use, while another unit computes.
        release: when full parameters are released. ``"forward"`` releases a unit after each use, and gathers it again for the
            backward. ``"backward"`` keeps units until their backward is done: one gather less for each unit, at the memory of
            all units. ``"room"`` keeps the last units of the forward: as many as fit into memory that ``"forward"`` reserves
            for gradients, and at most 2 % more. With several microbatches ``"room"`` means ``"forward"``.
        bucket_nbytes: limit of the bytes that a rank sends in one collective for several units. Units that follow each other
            share one collective for their parameters, their gradients, or their updated parameters. 0 gives each unit its own
            collectives. None joins units of up to 2 MB in buckets of up to 5 MB, and up to a quarter of all bytes. Units with
            different dtypes share no collective. Buckets are packed in memory beside the arena. Over gloo buffers of 128 KiB
            and more travel unpacked, as separate messages.
        together: tuples of names of units. Units of one tuple that follow each other share one collective, whatever its size,
            and no other unit joins it. A name of no unit has no effect. ``shard_module`` adds the groups of its ``units``.
        keep_gradients: give each unit's gradient at rest its own memory, from the unit's first backward in a step to the
            beginning of the next step. This lowers the peak if activations take more memory than gradients: a backward frees
            activations while it allocates gradients. If False, gradients rest in the arena, in memory that other units
            use earlier in the step. At the end of a step gradients that a caller still holds are copied out.
        offload: keep optimizer state and main copies in host memory between updates, pinned if the device is a GPU. State and
            copies are copied to the device before an update and back after the update: twice their bytes in a step. In a module
            only optimizer state is offloaded, as main copies are the parameters that the module shows.
        memory_budget: limit of the bytes of the arena. To fit, the compiler makes no buckets, then lowers prefetch, then the
            number of reductions under way. Packed buckets do not count: pass ``bucket_nbytes=0`` if every byte counts.
        gather_at_start: issue the first gathers of the next step at the end of a step. False ends a step with no collective
            under way, which a CUDA graph of a step needs.
        separate_groups: use different process groups for gathers and for reductions, so that neither waits for the other. None
            means True over gloo and False over NCCL. Two NCCL communicators can deadlock on a device that runs one
            communication kernel at a time. Two ranks then run kernels of different communicators, and wait for ever. True helps
            steps that are bound by the network, on devices that run two such kernels at a time.
        arena_memory: the source of the arena over NCCL. ``"allocator"`` takes it from torch's allocator. ``"registered"``
            takes it from NCCL's allocator, and registers it with the communicators as a user buffer: NCCL may skip copies to
            its own buffers. ``"symmetric"`` registers symmetric windows, for NCCL's symmetric kernels and copy engines.

    Raises:
        OptionError: a value has the wrong type, or is a word that is not among the choices.
        ScheduleError: a value is out of range.
    """

    prefetch: int = 1
    release: Literal["forward", "backward", "room"] = "room"
    bucket_nbytes: int | None = None
    together: tuple[tuple[str, ...], ...] = ()
    keep_gradients: bool = False
    offload: bool = False
    memory_budget: int | None = None
    gather_at_start: bool = True
    separate_groups: bool | None = None
    arena_memory: ArenaMemory = "allocator"

    # Defaults of the fields of DebugPolicy. Without annotations they are not fields here.
    poison = False
    trivial_axes = False
    sum_late: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        for name in ("prefetch", "bucket_nbytes", "memory_budget"):
            if (getattr(self, name) or 0) < 0:
                raise ScheduleError(f"SchedulePolicy(): {name} is {getattr(self, name)}, expected at least 0.")


@options_checked
@dataclass(frozen=True, slots=True)
class DebugPolicy(SchedulePolicy):
    """A :class:`SchedulePolicy` with options for tests and benchmarks. The options cost time, and change no value.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), policy=fs.testing.DebugPolicy(poison=True, prefetch=2))

    Args:
        poison: fill memory with NaN at its release, so that a use after the release shows in the results.
        trivial_axes: run collectives along axes of size 1 as well, to measure their cost on one device.
        sum_late: add the result of a reduction to the gradient as late as possible, as on a host without streams. False adds
            the result right after the reduction, as on a device with streams. None chooses by the device.
    """

    poison: bool = False
    trivial_axes: bool = False
    sum_late: bool | None = None  # type: ignore[misc]


def policy_from_json(fields: dict[str, Any]) -> SchedulePolicy:
    """Return the policy with ``fields``, a parsed JSON object. With a field ``poison`` the policy is a :class:`DebugPolicy`."""
    kind = DebugPolicy if "poison" in fields else SchedulePolicy
    return kind(**{**fields, "together": tuple(map(tuple, fields.get("together", ())))})
