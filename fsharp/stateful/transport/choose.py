"""Which transport a Comm allows for."""

from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, CountingComm
from fsharp.stateful.transport.base import ProcessGroups, Transport
from fsharp.stateful.transport.blocking import BlockingTransport, LocalTransport
from fsharp.stateful.transport.counted import CountedTransport
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.transport.nccl import NcclTransport


def transport_over(comm: Comm, *, separate_groups: bool) -> Transport:
    """The transport that a Comm allows for. Gathers and reductions may have process groups each."""
    if isinstance(comm, CountingComm):
        return CountedTransport(transport_over(comm.inner, separate_groups=separate_groups), comm)
    if not isinstance(comm, ProcessGroupComm):
        return LocalTransport() if comm.mesh.size == 1 else BlockingTransport(comm)
    groups = ProcessGroups(comm, separate=separate_groups)
    if comm.is_native:
        return NcclTransport(comm, groups)
    return GlooTransport(comm, groups)
