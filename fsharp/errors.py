"""The classes of all errors that a caller can cause.

A call checks trees, layouts, places and meshes before its first collective.
"""

import logging
from collections.abc import Iterable

log = logging.getLogger("fsharp")
"""The logger of the library."""


class FsharpError(Exception):
    """Base class of all errors of this library."""


class MeshError(FsharpError, ValueError):
    """A mesh, axis name, rank or world size is wrong, or two meshes differ that have to be equal."""


class StrategyError(FsharpError, ValueError):
    """A strategy or a partition spec is illegal, or its axes do not fit the mesh.

    Examples: ``P("dp", "dp")`` names an axis twice; ``zero3("tp")`` names an axis that ``Mesh({"dp": 8})`` lacks.
    """


class OptionError(FsharpError, TypeError, ValueError):
    """An argument has a value of the wrong type, or a value that is not possible here, such as an unknown word."""


class PatternError(FsharpError, ValueError):
    """Patterns of paths, units or methods are wrong: one matches nothing, no pattern matches a path, or two units overlap."""


class LayoutError(FsharpError, ValueError):
    """A tree cannot be laid out as the arguments say, or a layout does not fit its tree."""


class FormatError(LayoutError):
    """A format's ``encode`` or ``decode`` raised an error, or returned other arrays (*planes*) than the format declares."""


class TreeError(FsharpError, TypeError):
    """A tree has an unexpected structure, leaf or dtype, or is gathered where a function expects it at rest, or the reverse."""


class LossError(FsharpError, TypeError):
    """A loss is neither a scalar mean nor a ``(sum, weight)`` pair, or depends on no trainable parameter.

    Other causes: a loss function that cannot be called or differentiated as asked, a batch that cannot be split into equal
    microbatches or samples, or missing gradients, as after an earlier error.
    """


class AgreementError(FsharpError, RuntimeError):
    """Ranks got different trees, layouts or settings, or some ranks have failed. All ranks raise this error with the same text.

    Attributes:
        is_own: whether an error that began on this rank is the cause; ``__cause__`` is then this error. False if only other
            ranks have failed, or if no rank has failed.
    """

    is_own = False


class CommError(FsharpError, RuntimeError):
    """Ranks called different collectives, a rank did not come to a collective or to the job, or a process ended early."""


class CheckpointError(FsharpError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged, cannot be written, or does not match the tree that it is loaded into."""


class ScheduleError(FsharpError, ValueError):
    """A program, policy or schedule is wrong or does not fit the step, or a call comes at the wrong time of a step."""


class RunError(FsharpError, ValueError):
    """A ``Run``, or another object of ``fs.resilience``, got a wrong argument, or a method was called too early or too late."""


class NonFiniteError(FsharpError, ArithmeticError):
    """A loss, a gradient or a tensor to save holds an infinity or NaN. Every rank raises this error."""


def problem(where: str, what: str, details: Iterable[tuple[str, object]] = (), remedy: str = "") -> str:
    """Return the text of an error: ``where: what``, an aligned table of facts, and the remedy."""
    rows = [(name, str(value)) for name, value in details]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{where}: {what}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join([*lines, remedy] if remedy else lines)
