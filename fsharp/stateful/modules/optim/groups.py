"""Parameter groups of an optimizer: their options, and the parameters in them."""

from collections.abc import Iterable, Mapping
from typing import Any

from fsharp.errors import TreeError
from fsharp.functional.comm.equal_values import exact_text


class GroupWithoutOptions(dict[str, Any]):
    """The parameter group of an optimizer that is an ``(init, update)`` pair. Reading an option of the group is an error."""

    def __missing__(self, key: str) -> Any:
        raise option_error(key)


def option_error(key: str) -> TreeError:
    """Return the error for reading or setting an option, such as ``lr``, in the group of an ``(init, update)`` pair."""
    return TreeError(
        f"ShardedOptimizer: param_groups[0][{key!r}]: an (init, update) pair has no options there. Pass a schedule, such as "
        f"fs.optim.adamw(fs.optim.cosine_decay_schedule(3e-4, 1000)), or set numbers of fs.optim.inject_hyperparams."
    )


def ids_by_group(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return the ``id`` of each parameter, a list for each group."""
    return [list(map(id, group["params"])) for group in groups]


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as text for comparison between ranks."""
    return "\n".join(f"{name}={exact_text(value)}" for name, value in options.items())


def group_texts(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the options of each group as text for comparison between ranks."""
    return {f"group {i}": options_text(group) for i, group in enumerate(groups)}
