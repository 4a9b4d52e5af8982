"""DTensor parameters, which tensor parallelism has sharded on other axes. fsharp shards their local tensors."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsharp.errors import MeshError, TreeError
from fsharp.functional.comm.agree import max_over_ranks
from fsharp.functional.comm.protocol import Comm, ReduceOp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_instance(x: object, module: str, name: str) -> bool:
    """Return whether ``x`` is an instance of the class ``name`` of a Python module, without importing the module."""
    return isinstance(x, getattr(sys.modules.get(module), name, ()))  # no class has instances before its module is imported


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Return whether ``x`` is a DTensor, without importing torch.distributed.tensor."""
    return is_instance(x, "torch.distributed.tensor", "DTensor")


@dataclass(frozen=True)
class DTensorSpec:
    """The mesh, placements, whole shape and stride with which a rank's local tensor becomes a DTensor."""

    mesh: DeviceMesh
    placements: "tuple[Placement, ...]"
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether the DTensor is cut along a mesh axis of several ranks, so that a rank holds only some of its elements."""
        return any(not p.is_replicate() and self.mesh.size(i) > 1 for i, p in enumerate(self.placements))

    def as_dtensor(self, local: torch.Tensor) -> Any:
        """Return the DTensor with ``local`` as this rank's part. Differentiable: ``local`` gets its part of the gradient."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def reduce_over_ranks(self, x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the elementwise sum, maximum or minimum of ``x`` over the DTensor's parts. Replicas count once; NaN stays."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        other = Partial() if op == "sum" else Shard(0)
        kinds = [Replicate() if p.is_replicate() else other for p in self.placements]
        rows: torch.Tensor = DTensor.from_local(x.unsqueeze(0), self.mesh, kinds, run_check=False).full_tensor()
        return rows[0] if op == "sum" else rows.amax(0) if op == "max" else rows.amin(0)


def dtensor_specs(module: nn.Module, comm: Comm) -> dict[str, DTensorSpec]:
    """Return the specs of DTensors by path. TreeError: partial or on meta. MeshError: on a mesh with two ranks of ``comm``."""
    ours = set(getattr(comm, "ranks", range(comm.mesh.size)))
    found: dict[str, DTensorSpec] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if not is_dtensor(parameter):
            continue
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        if any(p.is_partial() for p in placements) or parameter.is_meta:
            what = "on the meta device: give it values before" if parameter.is_meta else "a partial sum: redistribute it"
            raise TreeError(f"shard_module(): parameter {path!r} is a DTensor {what}.")
        shared = ours & set(mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise MeshError(
                f"shard_module(): parameter {path!r} is a DTensor on {mesh}, and its ranks {sorted(shared)} would shard it "
                f"as well, along {list(comm.mesh.names)}. Pass the other axes, for example mesh=device_mesh['dp']."
            )
        found[path] = DTensorSpec(mesh, placements, parameter.shape, parameter.stride())
    return found


def as_dtensors(paths: Iterable[str], leaves: Iterable[torch.Tensor], specs: Mapping[str, DTensorSpec]) -> list[Any]:
    """Return ``leaves`` with a DTensor in place of each leaf whose path is in ``specs``, as a module's code expects."""
    return [specs[path].as_dtensor(leaf) if path in specs else leaf for path, leaf in zip(paths, leaves, strict=True)]


def local_tensor(x: Any) -> Any:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return x.to_local() if is_dtensor(x) else x


def max_flag_over_ranks(flag: torch.Tensor, specs: Mapping[str, DTensorSpec], comm: Comm) -> torch.Tensor:
    """Return the elementwise maximum of ``flag`` over the ranks of ``comm``, and over the meshes of all DTensors."""
    flag = max_over_ranks(flag, comm)
    for mesh in dict.fromkeys(spec.mesh for spec in specs.values()):  # not a set: ranks need the same order
        from torch.distributed.tensor import DTensor, Partial

        flag = DTensor.from_local(flag, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return flag
