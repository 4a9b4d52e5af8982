"""TransformerEngine: the format of weights under a recipe. ``shard_module`` recognises modules with quantized parameters."""

from fsharp.functional.formats.te import weight_format as weight_format
