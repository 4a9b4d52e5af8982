"""What a notebook shows of a value: tables in HTML, with the cells of the tables in text."""

from html.parser import HTMLParser

import torch

import fsharp as fs


class Table(HTMLParser):
    """The caption and the rows of a table."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.caption, self._tag = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self._tag == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


SHAPES = {"a<b>": torch.empty(8, 8), "layers": [torch.empty(4, 8) for _ in range(3)]}


def test_a_layout():
    layout = fs.plan(SHAPES, fs.Mesh({"dp": 2}), fs.zero3("dp"), units="layers.*")
    table = Table(layout._repr_html_())
    assert "160 parameters on Mesh(dp=2)" in table.caption
    assert [row[0] for row in table.rows] == ["unit", "a<b>", "layers.* x3"]
    assert all(cell in str(layout) for row in table.rows for cell in row)


def test_a_choice():
    hardware = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e9)
    mesh = fs.Mesh({"dp": 2})
    layouts = {each.__name__: fs.plan(SHAPES, mesh, each("dp"), units="layers.*") for each in (fs.ddp, fs.zero3)}
    choice = fs.tune(layouts, hardware, budget=1e9)
    table = Table(choice._repr_html_())
    assert table.caption == f"The fastest that fits is {choice.name}"
    assert [row[:2] for row in table.rows[1:]] == [[x.layout, x.policy] for x in choice.candidates]
    assert all(cell in str(choice) for row in table.rows for cell in row)


def test_a_checkpoint(tmp_path):
    fs.checkpoint.save(tmp_path, {"a<b>": torch.ones(2, 3), "n": 1}, step=7, comm=fs.SingleComm())
    table = Table(fs.checkpoint.latest(tmp_path)._repr_html_())
    assert "step 7, " in table.caption
    assert table.rows == [["tensor", "dtype", "shape"], ["a<b>", "float32", "[2, 3]"]]
