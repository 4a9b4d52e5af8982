"""Pictures of layouts: each leaf is where its rank holds it."""

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.errors import LayoutError, OptionError

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)  # of the first leaf and of the second


def picture(tmp_path, layout, **options):
    from matplotlib.image import imread

    fs.inspect.draw_sharding(layout, tmp_path / "sharding.png", **options)
    return np.rint(imread(tmp_path / "sharding.png")[..., :3] * 255).astype(int)


def share(pixels, colour):
    """Of the pixels above the legend, how many have a colour."""
    rows = pixels[:-90]  # 0.6 inches
    return (rows == colour).all(-1).mean()


def planned(strategy, mesh, **options):
    return fs.plan({"a": torch.empty(60, device="meta"), "b": torch.empty(20, device="meta")}, mesh, strategy, **options)


def test_colours_are_in_proportion_to_what_ranks_hold(tmp_path):
    mesh = fs.Mesh({"dp": 4})
    whole = picture(tmp_path, planned(fs.ddp("dp"), mesh))
    cut = picture(tmp_path, planned(fs.zero3("dp"), mesh))
    assert share(whole, BLUE) == pytest.approx(3 * share(whole, ORANGE), rel=0.05)
    # ddp has parameters and optimizer state whole on each of four ranks, and gradients, which are partial, in pale.
    assert share(whole, BLUE) == pytest.approx(share(cut, BLUE) * 8 / 3, rel=0.05)


def test_frozen_leaves_have_no_gradients(tmp_path):
    layout = planned(fs.zero3("dp"), fs.Mesh({"dp": 2}), frozen="b")
    pixels = picture(tmp_path, layout)
    parameters_end = int(pixels.shape[1] * 0.36)
    assert share(pixels[:, :parameters_end], ORANGE) > 0
    assert share(pixels[:, parameters_end:], ORANGE) == 0


def test_the_legend_says_what_grey_and_pale_mean(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda figure, handles, names, **options: named.append(names))
    picture(tmp_path, planned(fs.zero1("dp"), fs.Mesh({"dp": 3})))
    picture(tmp_path, planned(fs.zero3("dp"), fs.Mesh({"dp": 2})))
    assert named == [["a", "b", "padding", "pale: a summand on each rank"], ["a", "b"]]


@pytest.mark.parametrize(
    ("layout", "unit", "text"),
    [
        (planned(fs.zero3("dp"), fs.Mesh({"dp": 65})), None, "65 ranks, expected at most 64"),
        (planned(fs.zero3("dp"), fs.Mesh({"dp": 2})), "c", "no unit 'c'"),
        (fs.plan({"e": torch.empty(0)}, fs.Mesh({"dp": 2}), fs.ddp("dp")), None, "has no parameters"),
        (fs.plan({}, fs.Mesh({"dp": 2}), fs.ddp("dp")), None, "the layout has no units"),
    ],
)
def test_refused(tmp_path, layout, unit, text):
    with pytest.raises((LayoutError, OptionError), match=text):
        fs.inspect.draw_sharding(layout, tmp_path / "x.png", unit=unit)


def test_a_format_that_matplotlib_does_not_know_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"draw_sharding\(\): path is .*Format 'drawing' is not supported"):
        fs.inspect.draw_sharding(planned(fs.zero3("dp"), fs.Mesh({"dp": 2})), tmp_path / "a.drawing")
