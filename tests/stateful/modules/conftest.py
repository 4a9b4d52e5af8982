"""Trials of optimizers, which tests of modules make by the hundred."""

import pytest

from fsharp.stateful.modules.optim import class_updates

_PLAIN = (int, float, str, tuple, type(None))
_FOUND = {}


@pytest.fixture(scope="module", autouse=True)
def trials():
    """Make each trial once: a torch class with the same plain options comes to the same in each test."""
    probe = class_updates.probe_update_scope

    def probe_once(cls, options, defaults, *args):
        chosen = {name: value for name, value in {**defaults, **options}.items() if name != "params"}
        if not cls.__module__.startswith("torch.") or not all(isinstance(value, _PLAIN) for value in chosen.values()):
            return probe(cls, options, defaults, *args)
        key = cls, repr((chosen, args))
        if key not in _FOUND:
            _FOUND[key] = probe(cls, options, defaults, *args)
        return _FOUND[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_updates, "probe_update_scope", probe_once)
        yield
