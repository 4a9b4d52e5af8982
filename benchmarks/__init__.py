"""How fast and how large training is with fsharp and with its peers: ``python -m benchmarks --help``."""
