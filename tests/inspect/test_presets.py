"""Hardware.preset: numbers of data sheets, and what a step is predicted to take with them."""

import json

import numpy as np
import pytest
import torch

import fsharp as fs
from fsharp.errors import OptionError, ScheduleError
from fsharp.inspect.presets import GPUS

WIDTH = 4096


def layout_on(axes, strategy):
    shapes = {"layers": [torch.empty(WIDTH, WIDTH, device="meta", dtype=torch.bfloat16) for _ in range(4)]}
    return fs.plan(shapes, fs.Mesh(axes), strategy, units="layers.*")


@pytest.mark.parametrize("name", GPUS)
def test_a_step_takes_what_peak_and_links_allow(name):
    gpu, layout = GPUS[name], layout_on({"dp": 8}, fs.zero3("dp"))
    compute_s = 6 * 4 * WIDTH**2 * 1e6 / (0.5 * gpu.flops)
    hardware = fs.inspect.Hardware.preset(name, layout, tokens=1e6, efficiency=0.5)
    forward, backward = hardware.compute_times["layers.2"]
    assert forward == pytest.approx(compute_s / 12)
    assert backward == pytest.approx(2 * forward)
    again = fs.inspect.Hardware.preset(name, layout, tokens=1e6, efficiency=0.5, recompute=True)
    assert again.compute_times["layers.2"] == pytest.approx((forward, 3 * forward))
    assert (hardware.bandwidth["dp"], hardware.memory_bandwidth) == (0.8 * gpu.nvlink, gpu.memory_bandwidth)
    step_s = fs.inspect.predict(fs.schedules.plan_step(layout), hardware).step_s
    assert compute_s + hardware.update_s < step_s < 1.05 * compute_s + hardware.update_s  # what is sent is sent beneath it


@pytest.mark.parametrize(
    ("axes", "links"),
    [
        ({"a": 4}, {"a": 450}),
        ({"a": 16}, {"a": 8 * 50}),
        ({"a": 8, "b": 2}, {"a": 4 * 50, "b": 450}),
        ({"a": 4, "b": 4}, {"a": 2 * 50, "b": 450}),
        ({"a": 2, "b": 8}, {"a": 50, "b": 450}),
        ({"a": 2, "b": 16}, {"a": 50, "b": 8 * 50}),
        ({"a": 3, "b": 4, "c": 4}, {"a": 50, "b": 2 * 50, "c": 450}),
    ],
)
def test_a_group_has_as_many_links_between_hosts_as_ranks_on_a_host(axes, links):
    hardware = fs.inspect.Hardware.preset("H100", layout_on(axes, fs.ddp(*axes)), tokens=1, link_efficiency=1.0)
    assert hardware.bandwidth == {axis: 1e9 * rate for axis, rate in links.items()}
    assert hardware.latency == {axis: 2e-5 if rate == 450 else 4e-5 for axis, rate in links.items()}


@pytest.mark.parametrize(("number", "links"), [(1, 50), (4, 4 * 50), (16, 450), (32, 450)])
def test_hosts_may_have_more_or_fewer_ranks(number, links):
    layout = layout_on({"dp": 32}, fs.zero3("dp"))
    hardware = fs.inspect.Hardware.preset("H100", layout, tokens=1, link_efficiency=1.0, ranks_of_a_host=number)
    assert hardware.bandwidth == {"dp": 1e9 * links}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "H101"}, "name is 'H101', expected one of 'A100', 'H100', 'H200', 'B200'"),
        ({"efficiency": 0.0}, "efficiency is 0.0, expected more than 0 and at most 1"),
        ({"link_efficiency": 1.5}, "link_efficiency is 1.5, expected more than 0"),
        ({"tokens": 0}, "tokens is 0, expected more than 0"),
        ({"tokens": "x"}, "tokens is 'x', expected a number"),
        ({"ranks_of_a_host": 0}, "ranks_of_a_host is 0, expected at least 1"),
    ],
)
def test_what_there_is_not_is_refused(options, message):
    given = {"name": "H100", "layout": layout_on({"dp": 8}, fs.zero3("dp")), "tokens": 1} | options
    with pytest.raises((ScheduleError, OptionError), match=message):
        fs.inspect.Hardware.preset(**given)


def test_text_that_is_no_hardware_is_refused():
    hardware = fs.inspect.Hardware(compute_times={"layers.*": (1.0, 2.0, 0.5)}, bandwidth={("all_gather", "dp"): 1e9})
    text = hardware.to_json()
    assert fs.inspect.Hardware.from_json(text) == hardware
    for wrong, what in (
        (text[:-1], "the text is no JSON"),
        ("[1]", r"the text is \[1\], expected an object"),
        (json.dumps(json.loads(text) | {"speed": 1}), "field 'speed' is unknown"),
        (json.dumps({name: x for name, x in json.loads(text).items() if name != "latency"}), "field 'latency' is missing"),
        (json.dumps(json.loads(text) | {"latency": "fast"}), "latency is 'fast', expected numbers"),
        (json.dumps(json.loads(text) | {"compute_times": {"forward": 1.0}}), "compute_times is .*, expected seconds"),
    ):
        with pytest.raises(ScheduleError, match=what):
            fs.inspect.Hardware.from_json(wrong)
    measured = fs.inspect.Hardware(compute_times=(1.0, 2.0), bandwidth=np.float32(0.5))
    assert fs.inspect.Hardware.from_json(measured.to_json()).bandwidth == 0.5
    with pytest.raises(ScheduleError, match="compute_times is a function, and JSON holds none"):
        fs.inspect.Hardware(compute_times=lambda name: (1.0, 2.0), bandwidth=1e9).to_json()
