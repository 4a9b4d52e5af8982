"""The report of ``make bench-wire``: tables on the terminal and in the docs, and a picture of losses against bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.codecs import EXACT, FSDP2
from benchmarks.limited import ratios
from benchmarks.report import Table, lines_of, ranged, renew
from benchmarks.stats import best_fsdp2, ratio, times

MARKS = "<!-- begin: written by make bench-wire -->", "<!-- end: written by make bench-wire -->"
PICTURE = "wire.png"
MARKERS = {"zero3": "o", "zero2": "s"}
COLORS = ("black", *(f"C{i}" for i in range(10)), "gold", "navy", "lime", "tan", "crimson", "teal")
"""Of formats, in the order of the table."""


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return bytes and losses for each number of processes, and steps over the limited network."""
    found = []
    for nproc, part in results["trained"].items():
        rows = [(FSDP2, f"{part['fsdp2_bytes']:.2f}", "1.00", "", "", "", "")]
        for name, row in part["codecs"].items():
            both = f"{row['bytes']:.2f}", f"{row['bytes_ratio']:.2f}"
            loss = f"{row['loss']:.3f}", f"{row['loss_ratio']:.4f}", f"{max(row['loss_ratios']):.4f}"
            rows.append((name, *both, *loss, str(len(row["losses"]))))
        head = ("format, strategy", "bytes an element", "of FSDP2's", "loss", "of float32's", "the worst seed", "seeds")
        found.append(Table(f"{nproc} processes", head, rows))
    if "rounds" in (network := results["limited"]):
        rounds, options = network["rounds"], results["options"]["network"]
        rows = []
        for name, of_fsdp2 in ratios(rounds).items():
            took, of_exact = times(rounds, name), ratio(rounds, name, EXACT)
            both = f"{took.median * 1e3:.0f}", f"{network['busy_s'][name] * 1e3:.0f}"
            rows.append((name, f"{network['sent_mb'][name]:.1f}", *both, ranged(of_fsdp2), f"{of_exact.median:.3f}"))
        head = ("format, strategy", "MB sent by a rank", "ms a step", "ms busy", "of FSDP2's", "of float32's")
        title = f"Steps at {options['rate_mbit']:,} Mbit/s; FSDP2's is that of '{best_fsdp2(rounds)}'"
        found.append(Table(title, head, rows))
    return found


def write(docs: Path, results: Mapping[str, Any]) -> None:
    """Renew the tables of the page, and the picture beside it."""
    versions = ", ".join(f"{name} {x}" for name, x in results["versions"].items())
    lines = [f"{results['date']}, commit {results['commit']}, {results['cpu']} ({results['cores']} cores); {versions}."]
    network, options = results["limited"], results["options"]["network"]
    if "rounds" in network:
        link = ", ".join(f"{x:.0f} Mbit/s {name}" for name, x in network["link_mbit"].items())
        size = f"{network['num_params'] / 1e6:.1f}M parameters (width {options['dim']}, {options['layers']} blocks)"
        work = f"{options['batch']} x {options['time']} tokens a rank, {options['rounds']} rounds of {options['steps']} steps"
        lines[0] += (
            f" Limited network: {size}, {work}; medians, and in brackets least and most. "
            f"Plain transfers over the link had {link}."
        )
    else:
        lines[0] += f" No steps over a limited network: {network['left_out']}."
    lines += ["", f"![Held-out loss against bytes a step, for each format and both numbers of processes]({PICTURE})"]
    for table in tables(results):
        lines += ["", *lines_of(table)]
    renew(docs, "\n".join(lines), MARKS)
    draw(docs.with_name(PICTURE), results["trained"])


def draw(path: Path, trained: Mapping[str, Any]) -> None:
    """Draw each codec as a point: bytes to the right, loss of float32's upwards, a panel for each number of processes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 3.6 * len(trained)), dpi=120, layout="constrained")
    panels = figure.subplots(len(trained), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    formats = list(dict.fromkeys(_parts(name)[0] for part in trained.values() for name in part["codecs"]))
    colors = dict(zip(formats, COLORS, strict=False))
    for axes, (nproc, part) in zip(panels, trained.items(), strict=True):
        axes.set_title(f"{nproc} processes", fontsize=10)
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.axvline(part["fsdp2_bytes"], color="0.35", linestyle="--", linewidth=1)
        near = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 8, "color": "0.25"}
        axes.annotate("bytes of FSDP2\nin bfloat16", (part["fsdp2_bytes"], 0.85), (4, 0), **near)
        for name, row in part["codecs"].items():
            (what, strategy), ratios = _parts(name), row["loss_ratios"]
            axes.vlines(row["bytes"], min(ratios), max(ratios), color=colors[what], linewidth=1)
            axes.plot(row["bytes"], row["loss_ratio"], MARKERS[strategy], color=colors[what], markersize=7, alpha=0.8)
        axes.set_xscale("log")
        axes.set(ylabel="held-out loss, of float32's")
        axes.yaxis.set_major_formatter("{x:.4f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    ticks = [1, 1.5, 2, 3, 4, 6, 9]
    panels[-1].set_xticks(ticks, [f"{x:g}" for x in ticks])
    panels[-1].minorticks_off()
    panels[-1].set(xlabel="bytes that a step sends for an element of a parameter, over (n - 1) / n")
    key = [Line2D([], [], color="0.4", marker=MARKERS[s], linestyle="", label=f"ZeRO-{s[-1]}") for s in MARKERS]
    key += [Line2D([], [], color=color, marker="D", linestyle="", label=what) for what, color in colors.items()]
    figure.legend(handles=key, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)


def _parts(name: str) -> tuple[str, str]:
    """Return format and strategy."""
    what, _, strategy = name.rpartition(", ")
    return what, strategy
