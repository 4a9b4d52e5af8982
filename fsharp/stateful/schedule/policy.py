"""Policy: how far ahead, how much memory, and how soon. It never changes a value."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fsharp.errors import ScheduleError
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import check_fields

REDUCTIONS, FINISHES = 1, 3
"""Reductions under way at most: of a microbatch, each with a block as large as the unit's gradient; and once a step."""


@api_boundary
@dataclass(frozen=True, slots=True)
class Policy:
    """Choose what the compiler of a schedule may do.

    Args:
        prefetch: units whose gather is issued before they are used, while another one computes.
        release: ``"forward"`` releases a unit after each use and gathers it again for the backward; ``"backward"``
            keeps it until the backward is done: one gather less, the memory of all units. ``"room"`` keeps as many of those
            that the backward comes to first as there is room for in the memory that ``"forward"`` takes: where gradients
            will rest, nothing is before. With several microbatches it is ``"forward"``.
        bucket_nbytes: neighbours in the order for which a rank sends no more than this together move as one, in one
            collective: their parameters, their gradients, their updated parameters. 0 means each on its own; None joins
            units for which collectives are mostly latency: up to 2 MB, and a quarter of what all units send. Units whose dtypes
            differ are not joined. What is joined is packed, in memory beside the arena while it is under way: of a gather
            what it fills and what this rank has of it, of a reduction what it is given, the sum, and scratch for it. Over
            gloo buffers of 128 KiB and more travel unpacked, as messages of their own, unless they are all-reduced.
        together: tuples of names of units. Units of a tuple that follow each other in order share one collective, whatever
            their bytes, and share it with no other unit. ``shard_module`` adds the groups of its ``units=``.
        keep_gradients: gradients at rest have memory of their own. False plans it with all other memory of a step: it serves
            other units until the gradient is there, and the next step's after the end (of callers who hold gradients for
            longer, the next step finds out, and takes other memory).
        offload: between updates the optimizer's state and the main copies of parameters are in host memory, pinned where
            the device is none: fetched for the update and given back after it. Of a module the optimizer's state alone, as
            main copies are the parameters that it shows. Twice these bytes are copied in a step.
        memory_budget: bytes that the arena may take; buckets, prefetch and reductions under way are lowered until it fits.
            What buckets pack is not part of it: pass ``bucket_nbytes=0`` where every byte counts.
        gather_at_start: issue the first gathers of the next step, and those that the update needs, at the end of a step.
            False joins everything at the end of the step, which can then be captured in a CUDA graph.
        separate_groups: gathers and reductions have process groups of their own, and do not wait for each other. None means
            so over gloo, and not over NCCL. There a kernel waits on the device for the same kernel of other ranks. If a device
            has room for one kernel alone, two ranks may run one of different communicators each, and wait for ever. One
            communicator runs its kernels in the order of the host, which all ranks have in common. It suffices where gathers
            overlap compute: True helps steps that are bound by the network, on devices that have room for two kernels.

    Raises:
        OptionError: a value of the wrong type, or a word that is not one of those named.
        ScheduleError: a value out of range.
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

    # Those of a DebugPolicy: without annotations they are no fields.
    poison = False
    trivial_axes = False
    sum_late: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("prefetch", "bucket_nbytes"):
            if (getattr(self, name) or 0) < 0:
                raise ScheduleError(f"Policy(): {name} is {getattr(self, name)}, expected at least 0.")


@api_boundary
@dataclass(frozen=True, slots=True)
class DebugPolicy(Policy):
    """A :class:`Policy` for tests and benchmarks, that costs time, and changes no value either.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), policy=fs.testing.DebugPolicy(poison=True, prefetch=2))

    Args:
        poison: fill memory with NaN when it is released, so that a use after release shows.
        trivial_axes: run collectives along axes of size 1 too, which otherwise cost nothing: to measure on one device.
        sum_late: add the result of a reduction when its memory is wanted, as a host without streams has to. False adds the
            result right behind the reduction, as streams do. None asks the device.
    """

    poison: bool = False
    trivial_axes: bool = False
    sum_late: bool | None = None  # type: ignore[misc]
