"""Which transport a Comm allows for."""

from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, CountingComm
from fsharp.stateful.transport.base import ProcessGroups, Transport
from fsharp.stateful.transport.blocking import BlockingTransport
from fsharp.stateful.transport.gloo import GlooTransport
from fsharp.stateful.transport.nccl import NcclTransport


def transport_over(comm: Comm, *, separate_groups: bool) -> Transport:
    """Return the transport that a Comm allows for. Gathers and reductions may have process groups each."""
    inner, counters = comm, list[CountingComm]()
    while isinstance(inner, CountingComm):
        counters.append(inner)
        inner = inner.inner
    if not isinstance(inner, ProcessGroupComm):
        return BlockingTransport(comm)
    kind = NcclTransport if inner.is_native else GlooTransport
    return kind(inner, ProcessGroups(inner, separate=separate_groups), counters)
