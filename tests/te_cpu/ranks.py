"""Ranks of tests, forked from a process that has loaded TransformerEngine once: for tests of this project alone."""

from fsharp.testing.process_ranks import _Launcher, _run_ranks

_launcher = _Launcher(first="import hypothesis, pytest\nfrom tests import te_cpu\nte_cpu.load()")


def processes(mesh, fn, *, timeout=90.0):
    """Return ``[fn(comm) for every rank of mesh]``, as :func:`fsharp.testing.processes`; each rank has TransformerEngine."""
    return _run_ranks(_launcher, mesh, fn, timeout)
