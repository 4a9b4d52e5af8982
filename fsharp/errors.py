"""Every error a caller can cause. Checks of trees, layouts, places and meshes come before the first collective of a call."""

from collections.abc import Iterable


class FsharpError(Exception):
    """Base class of every error this library raises on purpose."""


class MeshError(FsharpError, ValueError):
    """A mesh, an axis name, a rank or a world size that does not fit."""


class StrategyError(FsharpError, ValueError):
    """Placements that are illegal together, or that do not cover the mesh."""


class OptionError(FsharpError, TypeError):
    """An option has a value of the wrong type."""


class PatternError(FsharpError, ValueError):
    """A key-path pattern that matches nothing, or two that claim the same place."""


class LayoutError(FsharpError, ValueError):
    """A tree that cannot be laid out as asked, or a layout that does not fit the tree it is used with."""


class FormatError(LayoutError):
    """A format whose ``encode`` or ``decode`` has raised an error, or has returned what the format does not say."""


class TreeError(FsharpError, TypeError):
    """A tree whose structure, leaves, dtypes or resting place are not those expected."""


class LossError(FsharpError, TypeError):
    """A loss that is neither a scalar mean nor a ``(sum, weight)`` pair, or that no parameter reaches."""


class AgreementError(FsharpError, RuntimeError):
    """Ranks that were given different trees, layouts or configurations. The same text is raised on every rank."""


class CommError(FsharpError, RuntimeError):
    """A collective that ranks did not enter alike, or that one of them never entered."""


class CheckpointError(FsharpError, RuntimeError):
    """A checkpoint that is missing, incomplete or damaged, that could not be written, or that is not of what is loaded into."""


class ScheduleError(FsharpError, ValueError):
    """A program, policy or schedule that would use memory or gradients wrongly, or that does not fit what it is run with."""


class RunError(FsharpError, ValueError):
    """An argument, or an order of calls, that a run, a sampler or a monitor cannot take."""


class NonFiniteError(FsharpError, ArithmeticError):
    """A loss, gradients or parameters with an infinity or NaN. Raised on every rank."""


def problem(where: str, what: str, details: Iterable[tuple[str, object]] = (), remedy: str = "") -> str:
    """One error text: ``where: what``, an aligned table of facts, and what to do about it."""
    rows = [(name, str(value)) for name, value in details]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{where}: {what}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join([*lines, remedy] if remedy else lines)
