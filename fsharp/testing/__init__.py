"""Tools to test sharded programs: all ranks in one process, random trees and layouts, and comparisons of strategies.

- To run all ranks: simulate, as threads; processes, as processes with gloo or NCCL.
- To train with your loss under several strategies, and compare the parameters: assert_equivalent; Tolerance.
- To find faults of a step: checking_races, with DebugPolicy, RaceReport and RaceError; checking_remat.
- Hypothesis strategies for trees, meshes, strategies and layouts: the module ``fsharp.testing.generate``.

``help(fs.testing.simulate)`` describes one of them.
"""

from fsharp.functional.remat import checking_remat as checking_remat
from fsharp.stateful.schedule.policy import DebugPolicy as DebugPolicy
from fsharp.testing.equivalence import Tolerance as Tolerance, assert_equivalent as assert_equivalent
from fsharp.testing.process_ranks import processes as processes
from fsharp.testing.races import RaceError as RaceError, RaceReport as RaceReport, checking_races as checking_races
from fsharp.testing.simulated_ranks import simulate as simulate
