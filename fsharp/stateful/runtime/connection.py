"""Connection: the process groups that all ranks of a scheduler make together, right before its first collective."""

from fsharp.functional.comm.agree import agree
from fsharp.functional.comm.process_group import ProcessGroupComm
from fsharp.functional.comm.protocol import Comm, innermost
from fsharp.stateful.schedule.policy import Policy
from fsharp.stateful.transport.base import Transport


class Connection:
    """The process groups of a scheduler. A rank that computes alone needs none, and waits for nobody.

    Args:
        comm: the ranks, with collectives counted for the scheduler alone.
        transport: runs collectives.
        policy: says whether collectives have groups of their own.

    Attributes:
        is_made: whether the process groups are there.
    """

    def __init__(self, comm: Comm, transport: Transport, policy: Policy) -> None:
        self._comm, self._transport, self._policy = comm, transport, policy
        self.is_made = False

    def make(self) -> None:
        """Make the process groups, if they are not made yet. Each rank calls this before its first collective."""
        if self.is_made:
            return
        comm = innermost(self._comm)
        if isinstance(comm, ProcessGroupComm):
            # Groups are made over the job's store, where a rank that has ended is not noticed: notice it here.
            agree("Scheduler", {"separate_groups": str(self._policy.separate_groups)}, comm)
            if self._policy.separate_groups and not comm.is_native:
                comm.make_groups()
        self._transport.make()
        self.is_made = True
