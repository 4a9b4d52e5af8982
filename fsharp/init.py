"""Initializers for :func:`fsharp.init_params`. They give the same values on any mesh."""

from fsharp.functional.materialize import normal as normal
from fsharp.functional.materialize import ones as ones
from fsharp.functional.materialize import uniform as uniform
from fsharp.functional.materialize import zeros as zeros
