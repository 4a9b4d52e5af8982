"""Searches of many steps: a progress bar, and a model of 405 billion parameters on 16,384 ranks."""

import io
import re
import sys

import pytest
import torch

import fsharp as fs
from fsharp.cli.models import find_model
from fsharp.inspect.presets import EFFICIENCY_FROM_SHAPES, GPUS
from tests.gpt_like import make_params
from tests.scheduling import DP

SEARCH = {"budget": 1e9, "batch": 64, "mesh": DP, "strategies": {"zero3": fs.zero3}}
SMALL = {"units": "layers.*", "policies": {"": fs.SchedulePolicy()}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, file, *, delay_s, **options):
    """What a search prints on stderr, which is ``file``, and the number of its candidates."""
    monkeypatch.setattr("fsharp.planning.search._BAR_DELAY_S", delay_s)
    monkeypatch.setattr(sys, "stderr", file)
    choice = fs.tune(make_params(), "H100", **SEARCH, **options)
    return file.getvalue(), len(choice.candidates)


def test_a_terminal_shows_a_bar_if_the_search_takes_longer_than_a_second(monkeypatch):
    text, num_candidates = shown(monkeypatch, Terminal(), delay_s=-1.0)
    frames = re.findall(
        r"\rtune: \[(#*)(\.*)\] (\d+) of (\d+), \d+ s, (nothing fits yet|fastest so far [\d.]+ ms)\x1b\[K", text
    )
    assert frames
    assert {len(done) + len(left) for done, left, *_ in frames} == {24}
    assert {int(total) for *_, total, _ in frames} == {num_candidates}
    assert [int(done) for *_, done, _, _ in frames] == sorted({int(done) for *_, done, _, _ in frames})
    assert text.endswith("\r\x1b[K"), "the bar is removed"


@pytest.mark.parametrize(
    ("file", "delay_s", "options", "is_shown"),
    [
        (Terminal, -1.0, {}, True),
        (Terminal, 1000.0, {}, False),
        (Terminal, -1.0, {"progress": False}, False),
        (io.StringIO, -1.0, {}, False),
        (io.StringIO, -1.0, {"progress": True}, True),
    ],
)
def test_a_bar_is_shown_in_a_terminal_or_if_asked_for(monkeypatch, file, delay_s, options, is_shown):
    text, _ = shown(monkeypatch, file(), delay_s=delay_s, **SMALL, **options)
    assert text.startswith("\rtune: [") if is_shown else text == ""


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_model_of_405_billion_parameters_on_16384_ranks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", bar := Terminal())
    tree, tokens = find_model("tune", "llama-3-405b").tree, 8192
    precision = fs.Precision(torch.bfloat16, main=torch.float32)
    choice = fs.tune(tree, "H100", budget=80e9, batch=tokens, mesh=16_384, formats={"": precision})
    first, n = choice.candidates[0], 405_853_388_800
    assert (choice.layout.num_params, choice.layout.mesh.size) == (n, 16_384)
    assert len({x.layout.split(", ")[1] for x in choice.candidates}) == 14  # meshes
    assert first.peak_nbytes <= 80e9
    state = sum(first.memory[kind] for kind in ("params", "main", "optimizer"))
    assert state >= (2 + 4 + 8) * n / 16_384
    assert first.step_s >= (8 if choice.remat else 6) * n * tokens / (EFFICIENCY_FROM_SHAPES * GPUS["H100"].flops)
    assert first.step_s == choice.timeline.step_s
    assert all(x.why_lost for x in choice.candidates[1:])
    assert "\rtune: [" in bar.getvalue()
    again = fs.inspect.Choice.from_json(choice.to_json())
    assert (again.candidates, again.layout) == (choice.candidates, choice.layout)
