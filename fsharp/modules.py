"""What the parameters of a sharded module are, outside of its forward."""

from fsharp.stateful.modules.parameter import Part as Part
from fsharp.stateful.modules.parameter import ShardedParameter as ShardedParameter
