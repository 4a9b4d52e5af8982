"""Policy: how far ahead, how much memory, and how soon. It never changes a value."""

from dataclasses import dataclass
from typing import Literal

from fsharp.annotated import check_fields
from fsharp.errors import ScheduleError
from fsharp.tracebacks import api_boundary


@api_boundary
@dataclass(frozen=True, slots=True)
class Policy:
    """What the compiler of a schedule may do.

    Args:
        prefetch: units whose gather is issued before they are used, while another one computes.
        buffers: units that are resident at most, the one in use among them, and those around it not; None means
            ``prefetch + 1``.
        release: ``"forward"`` lets go of a unit after each use and gathers it again for the backward; ``"backward"``
            keeps it until the backward is done: one gather less, the memory of all units. ``"room"`` keeps as many of those
            that the backward comes to first as there is room for in the memory that ``"forward"`` takes: where gradients
            will rest, nothing is before. With several microbatches it is ``"forward"``.
        reduce: ``"ready"`` starts a unit's reduction as soon as its gradient is there; ``"delayed"`` after the next
            backward has begun, so that the gather it waits for goes first.
        reduce_buffers: reductions of a microbatch under way at most; each holds a block as large as the unit's gradient.
        finish_buffers: the same for those to the optimizer's place, once a step; they leave from where gradients rest.
        bucket_nbytes: neighbours in the order for which a rank sends no more than this together move as one, in one
            collective: their parameters, their gradients, their updated parameters. 0 means each on its own; None joins
            units for which collectives are mostly latency: up to 2 MB, and a quarter of what all units send. Units whose dtypes
            differ are not joined. What is joined is packed, in memory beside the arena while it is under way: of a gather
            what it fills and what this rank has of it, of a reduction what it is given, the sum, and scratch for it. Over
            gloo buffers of 128 KiB and more travel unpacked, as messages of their own.
        together: tuples of names of units. Units of a tuple that follow each other in order share one collective, whatever
            their bytes, and share it with no other unit. ``shard_module`` adds the groups of its ``units=``.
        keep_gradients: gradients at rest have memory of their own. False plans it with all other memory of a step: it serves
            other units until the gradient is there, and the next step's after the end (of callers who hold gradients for
            longer, the next step finds out, and takes other memory).
        offload: between updates the optimizer's state and the main copies of parameters are in host memory, pinned where
            the device is none: fetched for the update and given back after it. Of a module the optimizer's state alone, as
            main copies are the parameters that it shows. Twice these bytes are copied in a step.
        memory_budget: bytes that the arena may take; buckets, prefetch and the numbers of buffers are lowered until it fits.
            What buckets pack is not part of it: pass ``bucket_nbytes=0`` where every byte counts.
        gather_at_start: issue the first gathers of the next step, and those that the update needs, at the end of a step.
            False joins everything at the end of the step, which can then be captured in a CUDA graph.
        sum_late: add the result of a reduction where it rests when its memory is wanted, or at the end of the pass, as a
            host without streams has to, which waits for it then. False adds it right behind the reduction on its stream.
            None leaves it to the scheduler, which knows the device.
        one_stream: gathers and reductions share a stream.
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
    buffers: int | None = None
    release: Literal["forward", "backward", "room"] = "room"
    reduce: Literal["ready", "delayed"] = "ready"
    reduce_buffers: int = 1
    finish_buffers: int = 3
    bucket_nbytes: int | None = None
    together: tuple[tuple[str, ...], ...] = ()
    keep_gradients: bool = False
    offload: bool = False
    memory_budget: int | None = None
    gather_at_start: bool = True
    sum_late: bool | None = None
    one_stream: bool = False
    separate_groups: bool | None = None

    # Those of a DebugPolicy: without annotations they are no fields.
    poison = False
    trivial_axes = False

    def __post_init__(self) -> None:
        check_fields(self)
        least = {"prefetch": 0, "reduce_buffers": 1, "finish_buffers": 1, "bucket_nbytes": 0}
        for name, low in least.items():
            if (getattr(self, name) or 0) < low:
                raise ScheduleError(f"Policy(): {name} is {getattr(self, name)}, expected at least {low}.")
        if self.buffers is not None and self.buffers < self.prefetch + 1:
            raise ScheduleError(
                f"Policy(): {self.buffers} buffers do not hold the unit in use and {self.prefetch} more: pass buffers of at "
                f"least {self.prefetch + 1}, or a smaller prefetch."
            )

    @property
    def num_buffers(self) -> int:
        """Units that are resident at most."""
        return self.prefetch + 1 if self.buffers is None else self.buffers


@api_boundary
@dataclass(frozen=True, slots=True)
class DebugPolicy(Policy):
    """A :class:`Policy` for tests and benchmarks, that costs time, and changes no value either.

    >>> import fsharp as fs
    >>> scheduler = fs.Scheduler(fs.SingleComm(), policy=fs.testing.DebugPolicy(poison=True, prefetch=2))

    Args:
        poison: fill memory with NaN when it is released, so that a use after release shows.
        trivial_axes: run collectives along axes of size 1 too, which otherwise cost nothing: to measure on one device.
    """

    poison: bool = False
    trivial_axes: bool = False
