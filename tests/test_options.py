"""Options of the wrong type: each public function names the option, its value, and what was expected, before any collective."""

import inspect

import pytest
import torch

import fsharp as fs
from fsharp.annotated import fits, in_words
from fsharp.errors import OptionError, ScheduleError
from tests.test_architecture import PUBLIC


class Wrong:
    """Of a type that no option has."""

    def __repr__(self):
        return "<wrong>"


CHECKED = [
    (name, fn) for name, fn in {n: getattr(m, n) for m, n in PUBLIC}.items() if getattr(fn, "has_checked_options", False)
]
CHECKED.append(("Saver", fs.checkpoint.Saver.__init__))
OPTIONS = [
    pytest.param(fn, parameter.name, id=f"{name}, {parameter.name}")
    for name, fn in CHECKED
    for parameter in inspect.signature(fn, eval_str=True).parameters.values()
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if parameter.annotation is not parameter.empty and not fits(parameter.annotation)(Wrong())
]


@pytest.mark.parametrize(("fn", "name"), OPTIONS)
def test_an_option_of_the_wrong_type_is_refused_by_name(fn, name):
    with pytest.raises(OptionError, match=rf"\(\): {name} is <wrong>, expected .") as raised:
        fn(**{name: Wrong()})
    assert isinstance(raised.value, TypeError)


def test_there_are_options():
    assert len(CHECKED) > 20
    assert len(OPTIONS) > 100


@pytest.mark.parametrize("kind", [fs.Policy, fs.testing.DebugPolicy])
def test_every_field_of_a_policy(kind):
    for name in inspect.signature(kind).parameters:
        with pytest.raises(OptionError, match=rf"Policy\(\): {name} is <wrong>, expected "):
            kind(**{name: Wrong()})
    with pytest.raises(OptionError, match=r"release is 'never', expected 'forward' or 'backward' or 'room'"):
        kind(release="never")
    with pytest.raises(ScheduleError, match=r"prefetch is -1"):
        kind(prefetch=-1)


FITS = [
    (int, 3, True),
    (int, True, False),
    (int, 3.0, False),
    (float, 3, True),
    (float, False, False),
    (int | None, None, True),
    (tuple[int, ...], (1, 2), True),
    (tuple[int, ...], (1, "2"), False),
    (list[str], "ab", False),
    (torch.dtype | None, "bfloat16", False),
    (fs.Comm, 3, True),
]


@pytest.mark.parametrize(("hint", "value", "expected"), FITS)
def test_what_fits_an_annotation(hint, value, expected):
    assert fits(hint)(value) is expected


def test_annotations_in_words():
    assert in_words(int | None) == "an int or None"
    assert in_words(None | str | torch.dtype) == "a str or a dtype or None"


def test_a_precision_is_no_dictionary_of_dtypes():
    with pytest.raises(OptionError, match=r"plan\(\): precision\['compute'\] is torch.bfloat16, expected a Precision"):
        fs.plan({"w": torch.ones(2)}, fs.Mesh({"dp": 1}), fs.zero3("dp"), precision={"compute": torch.bfloat16})
