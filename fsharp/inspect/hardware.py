"""Hardware: a description of a machine; and predict: how long a schedule takes on this machine."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fsharp.errors import ScheduleError, problem
from fsharp.functional.comm.protocol import Call
from fsharp.functional.layout.layout import Layout
from fsharp.functional.tree.paths import value_by_path
from fsharp.inspect.fitting import (
    compute_times_including_gaps,
    find_link_factor,
    fit_contended_host_speed,
    fit_speeds,
    host_cast_nbytes,
    host_issue_nbytes,
    memory_traffic_nbytes,
    noop_accumulates,
    uses_made_by_recomputation,
)
from fsharp.inspect.hardware_json import fields_from_json, fields_to_json
from fsharp.inspect.links import Link, PerLink, scaled_by_link, value_of_link
from fsharp.inspect.presets import (
    EFFICIENCY_FROM_SHAPES,
    GPUS,
    LINK_EFFICIENCY,
    RANKS_OF_A_HOST,
    links_by_axis,
    model_time_options,
)
from fsharp.inspect.simulation import OpsCost, Simulation
from fsharp.stateful.schedule.program import UnitFacts
from fsharp.stateful.schedule.schedule import Op, Schedule, op_positions_by_bucket, sent_nbytes_by_op_and_axis
from fsharp.stateful.timing.timeline import Timeline
from fsharp.stateful.timing.trace import Trace
from fsharp.tracebacks import api_boundary
from fsharp.type_checks import options_checked, predicate_of_annotation

UnitSeconds = tuple[float, float] | tuple[float, float, float]
"""Seconds of a unit's forward and of its backward, and by how many seconds its recomputation lengthens the backward."""
ComputeTimes = UnitSeconds | Mapping[str, UnitSeconds] | Callable[[str], UnitSeconds]
"""Seconds of units: for all units, by key-path pattern, or as a function of the name."""


@options_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Speeds of a machine, from which :func:`predict` computes the time of a step.

    Args:
        compute_times: seconds ``(forward, backward)`` of each unit, without its nested units: one pair for all units; pairs by
            key-path pattern, such as ``{"**": (1e-3, 2e-3), "head": (4e-3, 8e-3)}``, of which the last match counts; or a
            function of the unit's name. :meth:`Trace.compute_times` and :meth:`fit` return measured seconds. An estimate for
            ``n`` parameters, ``t`` tokens and a device of ``f`` FLOP/s is ``(2 * n * t / f, 4 * n * t / f)``. A third number is
            the time by which recomputation of the unit lengthens its backward; by default the time of its forward.
        bandwidth: bytes per second that a rank sends: one number, numbers by axis, or numbers by ``(collective, axis)``.
        latency: seconds of a collective that do not depend on its bytes: one number, or numbers as for ``bandwidth``.
        memory_bandwidth: bytes per second of ops that work in memory: casts and additions of gradients, and copies in place of
            collectives along axes of one rank.
        codec_bandwidth: bytes per second of encoded data, while data are encoded or decoded.
        cast_bandwidth: bytes per second of gradients that gloo casts while it adds them: gradients that are sent in a plain
            dtype, such as bfloat16, and summed in another dtype. :meth:`fit` needs a trace with units of both kinds: gradients
            are cast, or not cast.
        host_bandwidth: bytes per second of offloaded state between host memory and device, one way. The default is about 80 %
            of PCIe 5.0 with 16 lanes.
        update_s: seconds of the optimizer step.
        computes_on_host: whether the host itself computes, as on a CPU. False means that the host queues work on streams.
        contention: how much collectives and a synchronous host slow each other down, from 0 (separate cores) to 1 (one core).
        host_share: the host's share, from 0 to 1, of a core that it shares with collectives. While host and collectives work at
            once, the host's speed is the fraction ``1 - contention * (1 - host_share)`` of its full speed. The speed of
            collectives is the fraction ``1 - contention * host_share``.
        issue_s: seconds of a synchronous host to issue one collective of few bytes.
        issue_bandwidth: bytes sent per second of the host's time to issue a collective, beside ``issue_s``: a synchronous host
            copies its own part, or posts messages.

    Raises:
        ScheduleError: a number is out of range; or ``contention``, ``issue_s`` or ``issue_bandwidth`` is given without
            ``computes_on_host``.
        OptionError: an argument has a wrong type.
    """

    compute_times: ComputeTimes
    bandwidth: PerLink
    latency: PerLink = 0.0
    memory_bandwidth: float = math.inf
    codec_bandwidth: float = math.inf
    cast_bandwidth: float = math.inf
    host_bandwidth: float = 50e9
    update_s: float = 0.0
    computes_on_host: bool = False
    contention: float = 0.0
    host_share: float = 0.5
    issue_s: float = 0.0
    issue_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        rates = ("bandwidth", "memory_bandwidth", "codec_bandwidth", "cast_bandwidth", "host_bandwidth", "issue_bandwidth")
        for name in (*rates, "latency", "update_s", "issue_s"):
            value = getattr(self, name)
            is_rate = name in rates
            for number in value.values() if isinstance(value, Mapping) else (value,):
                if not (predicate_of_annotation(float)(number) and (number > 0 if is_rate else 0 <= number < math.inf)):
                    expected = "more than 0" if is_rate else "at least 0 and finite"
                    raise ScheduleError(f"Hardware(): {name} is {value!r}, expected {expected}.")
        for name in ("contention", "host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ScheduleError(f"Hardware(): {name} is {getattr(self, name)!r}, expected 0 to 1.")
        for name, none in (("contention", 0.0), ("issue_s", 0.0), ("issue_bandwidth", math.inf)):
            if getattr(self, name) != none and not self.computes_on_host:
                raise ScheduleError(f"Hardware(): {name} is {getattr(self, name)!r}, which needs computes_on_host=True.")

    @classmethod
    @options_checked
    def preset(
        cls,
        name: str,
        layout: Layout,
        *,
        tokens: float,
        efficiency: float = EFFICIENCY_FROM_SHAPES,
        link_efficiency: float = LINK_EFFICIENCY,
        recompute: bool = False,
        ranks_of_a_host: int = RANKS_OF_A_HOST,
    ) -> "Hardware":
        """Return the Hardware of a model on GPUs, estimated from the GPUs' data sheets.

        >>> import torch, fsharp as fs
        >>> shapes = {"layers": [torch.empty(4096, 4096, device="meta") for _ in range(4)]}
        >>> layout = fs.plan(shapes, fs.Mesh({"dp": 8}), fs.zero3("dp"), units="layers.*")
        >>> hardware = fs.inspect.Hardware.preset("H100", layout, tokens=8192)
        >>> f"{hardware.compute_times['layers.0'][0] * 1e3:.2f} ms, {hardware.bandwidth['dp'] / 1e9:.0f} GB/s"
        '0.84 ms, 360 GB/s'

        A unit with ``n`` parameters takes ``2 * n * tokens`` operations forward, and twice as many backward. So only matrix
        products with parameters count: replace ``compute_times`` for attention over long sequences, embeddings and experts.
        The optimizer is Adam on float32, bound by memory.

        Data sheets have FLOP/s, bandwidths and memory. They have no latencies: 20 microseconds for a collective within a host,
        and 40 between hosts, are assumptions. So is ``link_efficiency``. With the default
        ``efficiency`` torchtitan's 8B model is predicted as fast as it was on H100s. Source: ``fsharp/inspect/presets.py``
        names the data sheet of each number.

        Args:
            name: ``"A100"``, ``"H100"``, ``"H200"`` or ``"B200"``, each the SXM version in hosts of 8 with NVLink. Each GPU has
                one InfiniBand link (A100: 200 Gb/s, the others: 400 Gb/s).
            layout: layout of the model.
            tokens: number of tokens of one rank in a microbatch.
            efficiency: fraction of the peak FLOP/s that the model reaches while it computes, if only the operations above
                count: 0.3 to 0.5 for dense transformers.
            link_efficiency: fraction of the bandwidths of NVLink, the network and PCIe that transfers are assumed to reach.
            recompute: whether the backward computes the forward again.
            ranks_of_a_host: number of consecutive ranks that share a host, joined by NVLink. Along an axis over several hosts,
                the ranks of one group on a host use their network links together.

        Returns:
            The hardware. ``update_s`` is the time to update all parameters on one rank, as :func:`~fsharp.tune` expects.
            :func:`predict` takes ``update_s`` as it is. So if a rank updates an eighth of the parameters, pass :func:`predict`
            ``replace(hardware, update_s=hardware.update_s / 8)``.

        Raises:
            ScheduleError: ``name`` is not one of these GPUs, or a number is out of range.
            OptionError: an argument has a wrong type.
        """
        gpu = GPUS.get(name)
        if gpu is None:
            raise ScheduleError(f"Hardware.preset(): name is {name!r}, expected one of {', '.join(map(repr, GPUS))}.")
        for what, value in (("efficiency", efficiency), ("link_efficiency", link_efficiency)):
            if not 0 < value <= 1:
                raise ScheduleError(f"Hardware.preset(): {what} is {value!r}, expected more than 0 and at most 1.")
        if not 0 < tokens < math.inf:
            raise ScheduleError(f"Hardware.preset(): tokens is {tokens!r}, expected more than 0 and finite.")
        if ranks_of_a_host < 1:
            raise ScheduleError(f"Hardware.preset(): ranks_of_a_host is {ranks_of_a_host!r}, expected at least 1.")
        backward, flops = 3 if recompute else 2, efficiency * gpu.flops
        links = links_by_axis(layout.mesh, gpu, ranks_of_a_host)
        return cls(
            **model_time_options(layout, tokens=tokens, flops=flops, memory_bandwidth=gpu.memory_bandwidth, backward=backward),
            bandwidth={axis: link_efficiency * rate for axis, (rate, _) in links.items()},
            latency={axis: latency_s for axis, (_, latency_s) in links.items()},
            memory_bandwidth=gpu.memory_bandwidth,
            host_bandwidth=link_efficiency * gpu.pcie,
        )

    @classmethod
    @api_boundary
    def fit(
        cls,
        trace: Trace,
        schedule: Schedule,
        *,
        computes_on_host: bool = False,
        contention: float = 0.0,
        alone: Trace | None = None,
    ) -> "Hardware":
        """Return the speeds of a machine from measured steps.

        Latency and bandwidth of each ``(collective, axis)`` come from a least-squares fit of seconds against bytes:

        - The time of a collective is its median over all steps. In a step it begins when the previous collective on the stream
          ends. For collectives that send equally many bytes, the median of these medians is used.
        - The error of each collective is divided by its seconds, or by the mean seconds of all collectives if the mean is
          larger.
        - If the trace cannot tell the axes apart, all axes get the same numbers. One reason is that the bytes along two axes
          are proportional.
        - If only some gradients are sent in the dtype of their sums, the fit finds ``cast_bandwidth`` as well.

        While host and collectives work at once, they slow each other down, as far as ``contention`` says. In the fit this time
        is replaced by the time that the same work takes at full speed. On shared cores a collective also waits while other
        ranks compute. With ``alone`` and ``contention``, all collectives are therefore scaled by one factor. The factor is
        chosen so that the predicted step is as long as the traced step.

        Times of compute and of the update are those of the measured model. For another model replace them, by estimates or by
        :meth:`Trace.compute_times` of a run in one process: ``dataclasses.replace(hardware, compute_times=..., update_s=...)``.

        Args:
            trace: trace of one whole step or more, on one rank.
            schedule: the schedule that ran.
            computes_on_host: as in :class:`Hardware`: True for traces of CPUs.
            contention: as in :class:`Hardware`: 1 if there is exactly one core for each rank.
            alone: trace of steps of the same model on one rank, without communication. Times of compute and of the update come
                from this trace. With ``contention`` also ``host_share`` does, from how much longer units take while
                collectives are under way; else ``host_share`` is 1/2. Without ``alone`` all times come from ``trace``.

        Raises:
            ScheduleError: the trace is of another schedule, or lacks a kind of op.
            ScheduleError: all collectives of a kind send equally many bytes: no latency can be told.

        Cost: a few passes over the trace. With ``alone`` and ``contention`` also 24 predictions of a step.
        """
        own: dict[str, Any] = {} if alone is None else {"compute_times": alone.compute_times(), "update_s": alone.update_time()}
        host = cls(compute_times=(0.0, 0.0), bandwidth=math.inf, computes_on_host=computes_on_host, contention=contention)
        if alone is not None and contention:
            host = replace(host, host_share=fit_contended_host_speed(trace, schedule, alone.compute_times()))
        host_speed, sending_speed = host.contended_host_comm_speeds
        found = fit_speeds(
            trace, schedule, host_speed=host_speed, sending_speed=sending_speed, overlaps_latency=computes_on_host
        )
        if not computes_on_host:
            found |= {"issue_s": 0.0, "issue_bandwidth": math.inf}
        fitted = replace(host, **found)
        if alone is not None and contention:
            fitted = replace(fitted, compute_times=compute_times_including_gaps(alone))
            factor = find_link_factor(lambda factor: predict(schedule, fitted._with_slower_links(factor)).step_s, trace)
            fitted = fitted._with_slower_links(factor)
        return replace(fitted, **own)

    def _with_slower_links(self, factor: float) -> "Hardware":
        """Return this hardware with slower links: collectives, and gloo's casts in them, take ``factor`` times as long."""
        latency, bandwidth = scaled_by_link(self.latency, factor), scaled_by_link(self.bandwidth, 1 / factor)
        return replace(self, latency=latency, bandwidth=bandwidth, cast_bandwidth=self.cast_bandwidth / factor)

    @api_boundary
    def to_json(self) -> str:
        """Return the hardware as JSON, for :meth:`from_json`. Raises ScheduleError if ``compute_times`` is a function."""
        return fields_to_json({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    @api_boundary
    def from_json(cls, text: str) -> "Hardware":
        """Return the hardware that :meth:`to_json` wrote as text. Raises ScheduleError if the text is not such JSON.

        >>> hardware = Hardware(compute_times=(1.0, 2.0), bandwidth={("all_gather", "dp"): 1e9, "pp": 2e9})
        >>> Hardware.from_json(hardware.to_json()) == hardware
        True
        """
        return cls(**fields_from_json(text, {each.name: each for each in fields(cls)}))

    @property
    def contended_host_comm_speeds(self) -> tuple[float, float]:
        """The fractions of full speed of the host and of collectives, while host and collectives work at once."""
        return 1 - self.contention * (1 - self.host_share), 1 - self.contention * self.host_share

    def collective_s(self, calls: Iterable[Call]) -> float:
        """Return the seconds of collectives in sequence; collectives of one kind along one axis count as one.

        >>> calls = [Call("all_gather", "dp", 50), Call("all_gather", "dp", 50), Call("reduce_scatter", "dp", 50)]
        >>> Hardware(compute_times=(1.0, 2.0), bandwidth=100.0, latency=0.25).collective_s(calls)
        2.0
        """
        sent = sent_nbytes_by_op_and_axis(calls)
        return self.latency_s(sent) + sum(nbytes * self._seconds_per_byte(link) for link, nbytes in sent.items())

    def latency_s(self, links: Iterable[Link]) -> float:
        """Return the sum of the latencies, in seconds, of ``links``: pairs of a collective and an axis."""
        halves = [half for link in links for half in self._measured_links_for(link)]
        return sum(value_of_link(self.latency, half, "latency") for half in halves)

    def _seconds_per_byte(self, link: Link) -> float:
        """Return the seconds for each byte that a rank sends in the collective of ``link``, along its axis.

        If the collective counts as two collectives (:meth:`_measured_links_for`), the result is the mean over the two, of
        which each sends half of the bytes.
        """
        halves = self._measured_links_for(link)
        return sum(1 / value_of_link(self.bandwidth, half, "bandwidth") for half in halves) / len(halves)

    def _measured_links_for(self, link: Link) -> tuple[Link, ...]:
        """Return the collectives whose times make up the time of ``link``.

        For most links this is ``link`` alone. An ``all_reduce`` without bandwidth and latency of its own counts as a
        reduce_scatter and an all_gather. An ``all_to_all`` of encoded gradients without these counts as a reduce_scatter.
        """
        op, axis = link
        parts = {"all_reduce": ("reduce_scatter", "all_gather"), "all_to_all": ("reduce_scatter",)}.get(op, ())
        known = [value for value in (self.bandwidth, self.latency) if isinstance(value, Mapping)]
        has_own = any(link in value or axis in value for value in known)
        if parts and known and not has_own and all((part, axis) in value for part in parts for value in known):
            return tuple((part, axis) for part in parts)
        return (link,)


@options_checked
def predict(schedule: Schedule, hardware: Hardware) -> Timeline:
    """Simulate steps of a schedule on a machine until two are alike, at most 16. Return the timeline of the last step.

    The assumptions are in [Note: what the simulation knows] of ``fsharp.inspect.simulation``.

    Raises:
        ScheduleError: an axis has no bandwidth.
        PatternError: a pattern of ``hardware.compute_times`` matches no unit, or a unit has no times.

    Cost: a few passes over the ops; nothing is sent.
    """
    speeds = hardware.contended_host_comm_speeds
    costs = _costs_by_bucket(schedule, hardware)
    return Simulation(schedule, costs, computes_on_host=hardware.computes_on_host, speeds=speeds).steady_step()


def compute_times(hardware: Hardware, units: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """Return seconds ``(forward, backward, recomputation)`` of each unit. Raise a ScheduleError for impossible numbers."""
    times = value_by_path("Hardware.compute_times", hardware.compute_times, units) if units else {}
    for unit, given in times.items():
        if not (predicate_of_annotation(UnitSeconds)(given) and all(0 <= each < math.inf for each in given)):
            what = (
                f"Hardware.compute_times of unit {unit!r} is {given!r}, expected seconds (forward, backward), or (forward, "
                "backward, recomputation), of at least 0."
            )
            raise ScheduleError(problem("predict()", what))
    return {unit: (given[0], given[1], given[-1] if len(given) == 3 else given[0]) for unit, given in times.items()}


def _costs_by_bucket(schedule: Schedule, hardware: Hardware) -> list[OpsCost]:
    """Return the costs of a schedule's ops, in order of the ops: one :class:`OpsCost` for each bucket, and each other op."""
    facts = schedule.program.facts
    times = compute_times(hardware, list(dict.fromkeys(op.unit for op in schedule.ops if op.spec.cost == "compute")))
    noops, recomputed = noop_accumulates(schedule.ops), uses_made_by_recomputation(schedule.program)
    result = []
    for run in op_positions_by_bucket(schedule.ops):
        ops = [schedule.ops[i] for i in run]
        latency_s = 0.0
        if hardware.computes_on_host and ops[0].spec.cost == "send":
            calls = [call for op in ops for call in op.spec.collectives(facts[op.unit])]
            latency_s = hardware.latency_s(sent_nbytes_by_op_and_axis(calls))
        issue_s = sum(host_issue_nbytes(op, facts[op.unit]) for op in ops) / hardware.issue_bandwidth
        issue_s += sum(host_cast_nbytes(op, facts[op.unit]) for op in ops) / hardware.memory_bandwidth
        if ops[0].spec.cost == "compute":
            seconds = times[ops[0].unit][1 if ops[0].phase == "backward" else 2 * (ops[0].use_index in recomputed)]
        else:
            seconds = 0.0 if run[0] in noops else _ops_seconds(ops, facts, hardware)
        result.append(OpsCost(run, seconds, latency_s, hardware.issue_s + issue_s))
    return result


def _ops_seconds(ops: Sequence[Op], facts: Mapping[str, UnitFacts], hardware: Hardware) -> float:
    coded_s = sum(op.spec.nbytes_through_codec(facts[op.unit]) for op in ops) / hardware.codec_bandwidth
    coded_s += sum(op.spec.nbytes_cast_in_sums(facts[op.unit]) for op in ops) / hardware.cast_bandwidth
    match ops[0].spec.cost:
        case "":
            return 0.0
        case "update":
            return hardware.update_s
        case "copy":
            return facts[ops[0].unit].host / hardware.host_bandwidth
        case "code":
            return coded_s
        case _:  # "send" or "memory": without collectives the op only copies in memory
            of = [(op, facts[op.unit]) for op in ops]
            calls = [call for op, mine in of for call in op.spec.collectives(mine)]
            own_s = 0.0 if calls else memory_traffic_nbytes(ops, facts) / hardware.memory_bandwidth
            return coded_s + (hardware.collective_s(calls) if calls else own_s)
