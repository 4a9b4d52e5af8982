"""Structure: of which modules a sharded module is made. Parameters that are put into them afterwards would not be trained."""

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fsharp.errors import TreeError
from fsharp.stateful.modules.parameter import ShardedParameter


class _Member(NamedTuple):
    """A module, the ids of its children and the names of its parameters as they were when it was looked at last.

    A child that is gone takes all ids along, as another module may get its id.
    """

    path: str
    module: "weakref.ref[nn.Module]"
    children: list[int]
    names: list[str]
    watches: list["weakref.ref[nn.Module]"]


class Structure:
    """The modules that are gathered together.

    Args:
        members: by path.
    """

    def __init__(self, members: Mapping[str, nn.Module]) -> None:
        self._members = [_member(path, each) for path, each in members.items()]
        self._frozen: list[tuple[str, weakref.ref[nn.Parameter]]] = []  # that were added

    def check(self) -> None:
        """Refuse parameters to be trained that were added since the module was sharded.

        A wrapper may take the place of the submodule that it holds, and frozen parameters may come.

        Raises:
            TreeError: names the parameter.
        """
        for i, member in enumerate(self._members):
            module = member.module()
            if module is None:
                continue
            if list(map(id, module._modules.values())) == member.children and list(module._parameters) == member.names:
                continue
            before = {id(child) for reference in member.watches if (child := reference()) is not None}
            for name, parameter in module._parameters.items():
                if name not in member.names and parameter is not None:
                    self._add(member.path, name, parameter)
            for name, child in module._modules.items():
                if child is not None and id(child) not in before:
                    for path, parameter in child.named_parameters(name):
                        self._add(member.path, path, parameter)
                    inside = child.named_modules(prefix=_joined(member.path, name))
                    self._members += [_member(path, each) for path, each in inside]
            self._members[i] = _member(member.path, module)
        for path, reference in self._frozen:
            if (frozen := reference()) is not None and frozen.requires_grad:
                raise _untrained(path)

    def _add(self, owner: str, name: str, parameter: nn.Parameter) -> None:
        if isinstance(parameter, ShardedParameter) or not isinstance(parameter, nn.Parameter):  # the latter is a full one
            return
        path = _joined(owner, name)
        if parameter.requires_grad:
            raise _untrained(path)
        self._frozen.append((path, weakref.ref(parameter)))


def members_of(module: nn.Module, owners: Sequence[str]) -> dict[str, dict[str, nn.Module]]:
    """For each of these paths the modules, by path, that are inside of no other one of them, deeper down.

    Args:
        module: the root.
        owners: paths of modules that are gathered by themselves, and ``""``.
    """
    members: dict[str, dict[str, nn.Module]] = {path: {} for path in owners}
    for path, each in module.named_modules():
        around = [owner for owner in members if not owner or path == owner or path.startswith(f"{owner}.")]
        if around:
            members[max(around, key=len)][path] = each
    return members


def _member(path: str, module: nn.Module) -> _Member:
    children = list(map(id, module._modules.values()))
    watches = [weakref.ref(each, lambda _: children.clear()) for each in module._modules.values() if each is not None]
    return _Member(path, weakref.ref(module), children, list(module._parameters), watches)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _untrained(path: str) -> TreeError:
    return TreeError(
        f"parameter {path!r} came into the module after shard_module(), which has no gradient and no optimizer state for the "
        "parameter: it would not be trained. Put it there before shard_module(); or freeze it by requires_grad_(False), and "
        "each rank uses the values that it has."
    )
