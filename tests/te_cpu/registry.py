"""The names of the compiled module ``transformer_engine_torch`` that are modelled, and what answers for all others."""

import sys
from types import ModuleType

MODELLED = {}
PLUGIN_NAMES = ("flash_attention", "get_attention_backend")  # asked for with a default: plugins alone have them


def modelled(function):
    """Let the stand-in for ``transformer_engine_torch`` have this function or class, under its own name."""
    assert function.__name__ not in MODELLED, function.__name__
    MODELLED[function.__name__] = function
    return function


def check(condition, message):
    """Raise what the compiled module raises when one of its own checks fails."""
    if not condition:
        raise RuntimeError(f"te_cpu: {message}")


def refuse(name, remedy="choose options of the module or recipe that do without"):
    """Raise an error that names what is not modelled, and says what to do."""
    raise NotImplementedError(
        f"te_cpu does not model {name}: {remedy}, or write it in plain torch as tests/te_cpu/README.md says."
    )


class NotModelled:
    """A name that is not modelled: it may be imported and stored, and raises when it is called."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        refuse(self._name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return NotModelled(f"{self._name}.{name}")


class Extension(ModuleType):
    """The stand-in for the compiled module."""

    def __init__(self):
        super().__init__("transformer_engine_torch")
        self.__dict__.update(MODELLED)

    def __getattr__(self, name):
        if name.startswith("__") or name in PLUGIN_NAMES:
            raise AttributeError(name)
        return NotModelled(f"transformer_engine_torch.{name}")


def install():
    """Put the stand-in where ``import transformer_engine_torch`` finds it."""
    sys.modules["transformer_engine_torch"] = Extension()
