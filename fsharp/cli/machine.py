"""The subcommand ``calibrate``, and the file of measured speeds that this subcommand writes."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import fsharp
from fsharp.cli.models import parse_dtype
from fsharp.cli.numbers import check_number
from fsharp.distributed.job import connect
from fsharp.errors import MeshError, OptionError, ScheduleError
from fsharp.functional.comm.agree import all_gather_texts
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.text import align_columns, seconds_text
from fsharp.inspect.files import write_file
from fsharp.inspect.hardware import Hardware
from fsharp.inspect.measuring import measure
from fsharp.inspect.presets import model_time_options

_NUM_ROUNDS, _MOST_RANKS = 5, 1024
_COPIED_NBYTES = 1 << 26
"""Bytes of the tensor whose copies are timed."""


class MeasuredMachine(NamedTuple):
    """The measured speeds of a machine.

    Attributes:
        flops: operations per second of one rank in a product of large matrices.
        dtype: name of the dtype of these matrices.
        hardware: speeds of links and of memory. Seconds of compute are 0, as they depend on the model.
    """

    flops: float
    dtype: str
    hardware: Hardware

    @property
    def measured_axes(self) -> list[str]:
        """The mesh axes along which collectives were measured."""
        return sorted({axis for _, axis in self.hardware.bandwidth}) if isinstance(self.hardware.bandwidth, dict) else []

    def hardware_for_layout(self, layout: Layout, *, tokens: float, efficiency: float) -> Hardware:
        """Return ``self.hardware`` with seconds of compute for each unit of a layout, and with seconds of the optimizer.

        Compute runs at ``efficiency * flops``, and the optimizer at the measured memory bandwidth. ``tokens``: number of tokens
        of one rank in a microbatch.
        """
        memory = self.hardware.memory_bandwidth
        times = model_time_options(layout, tokens=tokens, flops=efficiency * self.flops, memory_bandwidth=memory)
        return replace(self.hardware, **times)


def calibrate(file: str, /, *, mesh: str = "dp=2", steps: int = 20, dtype: str = "") -> str:
    """Measure this machine, and write its speeds to a file for fsharp schedule --hardware and fsharp tune --hardware.

    One process for each rank of the mesh trains a small model for some seconds; let nothing else run. Under torchrun the ranks
    are torchrun's processes, on one host or several. Rank 0 writes the file and prints.

    Args:
        file: path of the JSON file to write, such as hardware.json.
        mesh: sizes of the axes, the outermost first: dp=2, or outer=2,inner=8. The file has speeds by name of an axis, so name
            the axes as in the meshes of your models.
        steps: number of steps to measure.
        dtype: dtype of the matrices whose products are timed; by default bfloat16 on GPUs, and float32 on CPUs.
    """
    axes = parse_mesh("calibrate", mesh)
    check_number("calibrate: steps", steps, 1)
    if axes.size < 2:
        raise OptionError(f"calibrate: mesh is {mesh!r}, expected at least 2 ranks: one rank sends nothing.")
    if "RANK" not in os.environ:
        check_number("calibrate: the number of ranks", axes.size, 2, _MOST_RANKS, why="each is a process of this machine")
    if dtype:
        parse_dtype("calibrate: dtype", dtype)
    is_writer = os.environ.get("RANK", "0") == "0"
    if is_writer:
        check_output("calibrate: file", file)
    found = fsharp.launch(_measure_machine, axes.size, axes.axes, steps, dtype)[0]
    if not is_writer:
        return ""
    hardware = json.loads(found.hardware.to_json())
    text = json.dumps({"flops": found.flops, "dtype": found.dtype, "hardware": hardware}, indent=1)
    write_file(file, f"{text}\n".encode())
    return _speeds_text(found, axes, file, steps)


def check_output(option: str, file: str) -> None:
    """Raise an OptionError, which names the option, if ``file`` cannot be written."""
    path = Path(file).resolve()
    what = f"{option} is {file!r}, expected a path in a folder that exists"
    if not path.parent.is_dir():
        raise OptionError(f"{what}: {path.parent} does not.")
    if path.is_dir():
        raise OptionError(f"{what}, with the name of the file: {path} is a folder.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"{what}, and that you may write to.")


def _measure_machine(axes: tuple[tuple[str, int], ...], steps: int, dtype: str) -> MeasuredMachine:
    """Measure and return the machine's speeds, which are the same on all ranks. All ranks call this function.

    This function times products of large matrices in ``dtype``, and copies of memory. ``steps`` steps of a small model give
    the speeds of collectives. An empty ``dtype`` means float32 on a CPU, else bfloat16.
    """
    comm = connect(Mesh(list(axes)))
    chosen = dtype or ("float32" if comm.device.type == "cpu" else "bfloat16")
    size = 1024 if comm.device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=parse_dtype("calibrate: dtype", chosen), device=comm.device)
    flops = 2 * size**3 / _median_seconds(lambda: a @ a, comm)
    source = torch.ones(_COPIED_NBYTES // 4, device=comm.device)
    target = torch.empty_like(source)
    copied = 2 * _COPIED_NBYTES / _median_seconds(lambda: target.copy_(source), comm)  # each byte is read and written
    hardware = measure(comm, compute_times=(0.0, 0.0), steps=steps)
    return MeasuredMachine(flops, chosen, replace(hardware, memory_bandwidth=min(hardware.memory_bandwidth, copied)))


def _median_seconds(work: Callable[[], torch.Tensor], comm: Comm) -> float:
    """Return the seconds of ``work``, which all ranks do at once: the median over ranks of the median over rounds."""
    found = []
    for _ in range(_NUM_ROUNDS + 1):
        began = time.perf_counter()
        work().view(-1)[0].item()  # waits for the device
        found.append(time.perf_counter() - began)
    return median(float(text) for text in all_gather_texts(repr(median(found[1:])), comm))


def _speeds_text(found: MeasuredMachine, mesh: Mesh, file: str, steps: int) -> str:
    hardware = found.hardware
    rows = [
        ("matrix products", f"{found.flops / 1e9:,.1f} GFLOP/s in {found.dtype}"),
        ("memory", f"{hardware.memory_bandwidth / 1e9:,.2f} GB/s"),
        ("codec of 8 bits", f"{hardware.codec_bandwidth / 1e9:,.2f} GB/s of encoded bytes"),
    ]
    assert isinstance(hardware.bandwidth, dict)
    assert isinstance(hardware.latency, dict)
    for op, axis in hardware.bandwidth:
        rate, latency = hardware.bandwidth[op, axis], hardware.latency[op, axis]
        text = "no bytes can be told from the latency" if math.isinf(rate) else f"{rate / 1e9:,.2f} GB/s"
        rows.append((f"{op} along {axis}", f"{text}, latency {seconds_text(latency)}"))
    if hardware.contention:
        rows.append(("cores", "shared by compute and collectives"))
    lines = [*align_columns(rows), "", f"measured on {mesh}; wrote {file}"]
    if unknown := [f"{op} along {axis}" for (op, axis), rate in hardware.bandwidth.items() if math.isinf(rate)]:
        what = f"the bandwidth of {' and of '.join(unknown)} could not be told from the latency, and counts as infinite"
        lines.append(f"warning: {what}: repeat with more steps, such as --steps {5 * steps}")
    return "\n".join(lines)


def read_machine(where: str, file: str) -> MeasuredMachine:
    """Return the machine in a file that :func:`calibrate` has written. Raises OptionError for any other file."""
    expected = "expected a file that fsharp calibrate has written"
    try:
        found = json.loads(Path(file).read_text())
        flops, dtype, hardware = found["flops"], found["dtype"], Hardware.from_json(json.dumps(found["hardware"]))
        if not 0 < flops < math.inf:
            raise ValueError(f"flops is {flops!r}")
    except ScheduleError as error:
        raise OptionError(f"{where}: hardware is {file!r}, {expected}: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise OptionError(f"{where}: hardware is {file!r}, {expected}: {type(error).__name__}: {error}.") from error
    return MeasuredMachine(flops, dtype, hardware)


def parse_mesh(where: str, text: str) -> Mesh:
    """Return the mesh of a text such as ``outer=2,inner=8``. Raises OptionError, which begins with ``where``, for others."""
    try:
        return Mesh([(name.strip(), int(size)) for name, _, size in (axis.partition("=") for axis in text.split(","))])
    except ValueError as error:
        what = f"mesh is {text!r}, expected sizes of axes, such as dp=8 or outer=2,inner=8"
        reason = f": {error}" if isinstance(error, MeshError) else "."
        raise OptionError(f"{where}: {what}{reason}") from error
