"""Tensor classes: the parameters that a sharded module shows outside of its forward."""

from fsharp.stateful.modules.parameter import Part as Part
from fsharp.stateful.modules.parameter import ShardedParameter as ShardedParameter
