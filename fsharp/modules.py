"""Tensor classes of a sharded module: of its parameters outside of a forward, and of the tensors in its state dict."""

from fsharp.stateful.modules.parameter import ShardedParameter as ShardedParameter, ShardedTensor as ShardedTensor
