"""Classes of the parameters that a sharded module has outside of its forward."""

from fsharp.stateful.modules.parameter import Part as Part
from fsharp.stateful.modules.parameter import ShardedParameter as ShardedParameter
