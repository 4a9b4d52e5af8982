"""For code that calls collectives by itself: differentiable ones, and ranks that agree first."""

from fsharp.functional.comm.agree import agree as agree
from fsharp.functional.comm.collectives import all_gather_last as all_gather_last
from fsharp.functional.comm.collectives import all_reduce as all_reduce
from fsharp.functional.comm.collectives import local_slice as local_slice
from fsharp.functional.comm.collectives import reduce_scatter_last as reduce_scatter_last
from fsharp.functional.comm.protocol import Call as Call
