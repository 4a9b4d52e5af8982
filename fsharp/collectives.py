"""Differentiable collectives, a check that ranks agree, and a Comm that counts calls.

- Along an axis: all_reduce, all_gather_last, reduce_scatter_last, all_to_all_last; and local_slice_last, which sends nothing.
- agree raises an error on all ranks if texts of ranks differ.
- CountingComm wraps a Comm, and has a Call for each call.
"""

from fsharp.functional.comm import collectives
from fsharp.functional.comm.agree import agree as agree
from fsharp.functional.comm.protocol import Call as Call, CountingComm as CountingComm
from fsharp.type_checks import options_checked_on_failure as _explained

# Within the library these are called without a frame that explains arguments.
all_gather_last = _explained(collectives.all_gather_last)
all_reduce = _explained(collectives.all_reduce)
all_to_all_last = _explained(collectives.all_to_all_last)
local_slice_last = _explained(collectives.local_slice_last)
reduce_scatter_last = _explained(collectives.reduce_scatter_last)
