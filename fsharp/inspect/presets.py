"""Numbers of GPUs from their data sheets. See :meth:`~fsharp.inspect.Hardware.preset`.

[Note: data sheets]
All numbers are of the SXM version, for one GPU. FLOP/s are of dense products of bfloat16 matrices; some data sheets give twice
as much, with sparsity. NVLink is one direction; data sheets give the sum of both. Sources, by name of NVIDIA's data sheet;
https://glennklockwood.com/garden/processors has the numbers of GPUs side by side:

- A100: "NVIDIA A100 Tensor Core GPU" (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf), column A100 80GB SXM: 312 TFLOPS,
  2,039 GB/s, NVLink 600 GB/s, PCIe Gen4 64 GB/s. "NVIDIA DGX A100": 8 links of 200 Gb/s InfiniBand for 8 GPUs.
- H100: "NVIDIA H100 Tensor Core GPU", column H100 SXM: 989 TFLOPS (1,979 with sparsity), 3.35 TB/s, NVLink 900 GB/s, PCIe Gen5
  128 GB/s. "NVIDIA DGX H100": 8 links of 400 Gb/s InfiniBand for 8 GPUs.
- H200: "NVIDIA H200 Tensor Core GPU", column H200 SXM: as H100 SXM, with 4.8 TB/s. "NVIDIA DGX H200": as DGX H100.
- B200: "NVIDIA HGX B200" at 1,000 W: 2,250 TFLOPS (4,500 with sparsity), 8 TB/s, NVLink 1.8 TB/s. PCIe and InfiniBand as in
  "NVIDIA DGX B200": Gen5 128 GB/s, 8 links of 400 Gb/s for 8 GPUs.

No data sheet has the other numbers, which are not of one GPU. ``EFFICIENCY_FROM_SHAPES`` and ``EFFICIENCY_FROM_TRIAL`` are what
torchtitan reaches on 8 H100 with an 8B model in bfloat16, compiled: 6,667 tokens/s of a GPU (pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, table 1). They differ, as two counts of one model's operations do: for a token and
forward, 2 for each of 8.03 billion parameters are 16.1 GFLOP; without the embedding, which only looks vectors up, and with
attention over 8,192 tokens, they are 19.3 GFLOP. Published runs reach 0.34 to 0.85 of the peak of bfloat16, the latter in
float8. Latencies and ``LINK_EFFICIENCY`` are assumptions without a source: measure your own machine by ``fsharp calibrate``.
"""

from typing import Any, NamedTuple

from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh

NVLINK_LATENCY_S, NETWORK_LATENCY_S = 2e-5, 4e-5
"""Assumed seconds of a collective that do not depend on its bytes: between the GPUs of one host, and between hosts."""
EFFICIENCY_FROM_SHAPES = 0.33
"""Part, from 0 to 1, of the peak FLOP/s that a model reaches, if a token counts 2 operations for each parameter."""
EFFICIENCY_FROM_TRIAL = 0.4
"""This part, if a trial counts the operations: matrix products and attention. [Note: data sheets] has the source of both."""
LINK_EFFICIENCY = 0.8
"""Assumed part, from 0 to 1, of the bandwidths of NVLink, the network and PCIe that transfers reach."""
RANKS_OF_A_HOST = 8
"""Assumed number of GPUs of a host, each of them a rank."""
ADAM_NBYTES = 28
"""Bytes that a step of Adam reads and writes for each parameter: float32 parameter, two averages (both ways) and gradient."""


class GPU(NamedTuple):
    """A GPU of a data sheet.

    Attributes:
        flops: operations per second in dense bfloat16 matrix products.
        memory_bandwidth: bytes per second of its memory.
        nvlink: bytes per second to other GPUs of the host, one way.
        network: bytes per second of the GPU's own link to other hosts, one way.
        pcie: bytes per second between host memory and the GPU, one way.
    """

    flops: float
    memory_bandwidth: float
    nvlink: float
    network: float
    pcie: float


GPUS = {
    "A100": GPU(312e12, 2.039e12, 300e9, 25e9, 32e9),
    "H100": GPU(989e12, 3.35e12, 450e9, 50e9, 64e9),
    "H200": GPU(989e12, 4.8e12, 450e9, 50e9, 64e9),
    "B200": GPU(2250e12, 8e12, 900e9, 50e9, 64e9),
}
"""GPUs by name. [Note: data sheets] has the source of each number."""


def assumptions_text(efficiency: float) -> str:
    """Return a sentence for users with the assumptions of :meth:`~fsharp.inspect.Hardware.preset`: numbers in no data sheet.

    ``efficiency``: assumed fraction of the peak FLOP/s.
    """
    latencies = (
        f"{1e6 * NVLINK_LATENCY_S:.0f} us for a collective within a host and {1e6 * NETWORK_LATENCY_S:.0f} us between hosts"
    )
    return f"Assumed: {efficiency:.0%} of the GPU's FLOP/s, {LINK_EFFICIENCY:.0%} of the bandwidth of its links, {latencies}."


def model_time_options(
    layout: Layout, *, tokens: float, flops: float, memory_bandwidth: float, backward: int = 2
) -> dict[str, Any]:
    """Return the options ``compute_times`` and ``update_s`` of :class:`~fsharp.inspect.Hardware` for a model.

    The forward of a unit with ``n`` parameters takes ``2 * n * tokens / flops`` seconds: ``tokens`` of one rank's microbatch,
    ``flops`` a second. The backward takes ``backward`` times as long. ``update_s`` is for an update of all parameters on one
    rank, by Adam on float32, bound by ``memory_bandwidth`` in bytes a second.
    """
    used = {unit.name or "(root)": sum(group.used for group in unit.groups) for unit in layout.units}
    forward = {unit: 2 * n * tokens / flops for unit, n in used.items()}
    compute = {unit: (seconds, backward * seconds) for unit, seconds in forward.items()}
    return {"compute_times": compute, "update_s": ADAM_NBYTES * sum(used.values()) / memory_bandwidth}


def links_by_axis(mesh: Mesh, gpu: GPU, ranks_of_a_host: int) -> dict[str, tuple[float, float]]:
    """Return, by mesh axis, the bytes per second that a rank sends along the axis, and the latency of a collective in seconds.

    ``ranks_of_a_host``: number of consecutive ranks that share a host. A group over several hosts has as many links between
    hosts as it has ranks on a host.

    >>> mesh = Mesh({"a": 3, "b": 4, "c": 4})
    >>> {axis: f"{rate / 1e9:.0f} GB/s" for axis, (rate, _) in links_by_axis(mesh, GPUS["H100"], 8).items()}
    {'c': '450 GB/s', 'b': '100 GB/s', 'a': '50 GB/s'}
    """
    found: dict[str, tuple[float, float]] = {}
    stride = 1
    for axis, size in reversed(mesh.axes):
        if stride * size <= ranks_of_a_host:
            found[axis] = gpu.nvlink, NVLINK_LATENCY_S
        else:
            found[axis] = min(gpu.nvlink, max(1, ranks_of_a_host // stride) * gpu.network), NETWORK_LATENCY_S
        stride *= size
    return found
