"""Tensor classes of sharded modules: their parameters outside of a forward, and tensors in their state dicts."""

from fsharp.stateful.modules.parameter import ShardedParameter as ShardedParameter, ShardedTensor as ShardedTensor
