"""TransformerEngine: the format of weights under a recipe. Modules with quantized parameters are recognised by themselves."""

from fsharp.functional.formats.te import weights_of as weights_of
