"""What a run says: a file with everything measured, tables on the terminal and in the docs, and one last line of JSON."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import checkpoint
from benchmarks.alternating import FIRST, SECOND, TOGETHER
from benchmarks.interop import OPTAX, OWN
from benchmarks.memory import SEPARATE
from benchmarks.options import Options
from benchmarks.stats import FSDP2, Rounds, Spread, best_fsdp2, paired, ratio, times


class Figure(NamedTuple):
    """A number of the last line.

    Attributes:
        meaning: in the table.
        target: the largest value that is wanted; a figure of a peer alone has none.
        is_least: whether the target is the smallest value.
    """

    meaning: str
    target: float | None = None
    is_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a value has reached the target, if there is one."""
        if self.target is None:
            return True
        return value >= self.target if self.is_least else value <= self.target


FIGURES = {
    "step_ratio_vs_fsdp2": Figure("time of a step, zero3 to FSDP2", 0.78),
    "step_ratio_vs_ddp": Figure("time of a step, zero3 to DDP", 1.06),
    "ddp_ratio_vs_ddp": Figure("time of a step, ddp to DDP or zero1 to DDP, the larger", 1.04),
    "module_ratio_vs_fsdp2": Figure("time of a step, zero3 of a module to FSDP2", 0.8),
    "module_ratio_vs_functional": Figure("time of a step, zero3 of a module to zero3 of functions", 1.05),
    "narrow_ratio_vs_ddp": Figure("time of a step with blocks of 0.3M parameters, zero3 to DDP", 1.08),
    "tiny_ratio_vs_ddp": Figure("time of a step with blocks of 33k parameters, zero3 to DDP", 1.5),
    "alternating_ratio": Figure(
        "time of two programs in turns to that of the two run each for itself, the larger of two cases", 1.1
    ),
    "optax_ratio": Figure("time of a step, zero3 updated by optax's adamw to zero3 updated by fsharp's", 1.3),
    "prediction_error": Figure(
        "predicted to measured time of a step, the largest error of three shapes after a fit on a fourth", 0.12
    ),
    "tune_regret": Figure(
        "by how much the choice of tune is slower than the fastest candidate, measured; the largest of eight cases", 0.05
    ),
    "tune_rank_correlation": Figure(
        "of predicted and measured times of candidates, the smallest of eight cases; more is better", 0.9, is_least=True
    ),
    "tune_order_correlation": Figure(
        "the same, over pairs of candidates whose measured times differ by more than twice the noise", 0.9, is_least=True
    ),
    "compile_s_1000": Figure("seconds to compile and verify a step of 1,000 units", 5.0),
    "host_ratio_vs_fsdp2": Figure("host time added per unit, zero3 to FSDP2", 0.22),
    "calls_per_unit": Figure("calls of Python functions a unit and step, zero3 of functions, the model's own included", 200),
    "module_calls_per_unit": Figure("the same, zero3 of a module", 300),
    "fsdp2_calls_per_unit": Figure("the same, FSDP2"),
    "peak_ratio_vs_fsdp2": Figure("peak memory with hardly any activations, zero3 to FSDP2", 1.0),
    "activation_peak_ratio_vs_fsdp2": Figure("peak memory with the activations of the steps above, zero3 to FSDP2"),
    "separate_peak_ratio_vs_fsdp2": Figure("the same, zero3 with `keep_gradients=True`"),
    "save_ratio_vs_dcp": Figure("time of a save, fsharp to DCP", 1.0),
    "load_ratio_vs_dcp": Figure("time of a load, fsharp to DCP", 1.0),
    "stall_ratio_vs_dcp_async": Figure(
        "time until a save in the background returns, fsharp to DCP, from the second save on", 0.8
    ),
    "first_stall_ratio_vs_dcp_async": Figure("the same, of the first save", 0.8),
    "copy_ratio": Figure("that time of fsharp, from the second save on, to a plain copy of the same bytes", 1.1),
    "hash_share": Figure("time of digests of what a rank writes to that of a save", 0.15),
    "save_memory_ratio_vs_dcp": Figure("memory that a save in the background takes, fsharp to DCP", 1.0),
}
"""The figures of the last line, in order."""
FSDP2_PEAKS = (FSDP2, "FSDP2, embedding and head apart")
"""Two ways to cut the model for FSDP2; the one that needs less memory is the measure."""
MARKS = BEGIN, END = "<!-- begin: written by make bench -->", "<!-- end: written by make bench -->"


class Table(NamedTuple):
    """Rows of text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


# ---------------------------------------------------------------- figures


def summary(parts: Mapping[str, Any]) -> dict[str, float]:
    """The last line: what the parts that ran give."""
    result = {}
    if "steps" in parts:
        rounds = parts["steps"]["rounds"]
        peer = best_fsdp2(rounds)
        result["step_ratio_vs_fsdp2"] = ratio(rounds, "fsharp zero3", peer).median
        result["step_ratio_vs_ddp"] = ratio(rounds, "fsharp zero3", "DDP").median
        result["ddp_ratio_vs_ddp"] = max(ratio(rounds, name, "DDP").median for name in ("fsharp ddp", "fsharp zero1"))
        result["module_ratio_vs_fsdp2"] = ratio(rounds, "fsharp zero3, module", peer).median
        result["module_ratio_vs_functional"] = ratio(rounds, "fsharp zero3, module", "fsharp zero3").median
    if "small" in parts:
        for name, part in parts["small"].items():
            result[f"{name}_ratio_vs_ddp"] = ratio(part["rounds"], "fsharp zero3", "DDP").median
    if "alternating" in parts:
        result["alternating_ratio"] = max(in_turns(case["rounds"]).median for case in parts["alternating"].values())
    if "optax" in parts:
        result["optax_ratio"] = ratio(parts["optax"]["rounds"], OPTAX, OWN).median
    if "prediction" in parts:
        result["prediction_error"] = parts["prediction"]["error"]
    if "tune" in parts:
        result["tune_regret"] = parts["tune"]["regret"]
        result["tune_rank_correlation"] = parts["tune"]["rank_correlation"]
        result["tune_order_correlation"] = parts["tune"]["order_correlation"]
    if "compile" in parts:
        result["compile_s_1000"] = parts["compile"]["compile_s"] + parts["compile"]["verify_s"]
    if "host" in parts:
        result["host_ratio_vs_fsdp2"] = ratio(parts["host"]["step"]["added"], "fsharp zero3", FSDP2).median
    if "calls" in parts:
        found = parts["calls"]["calls"]
        result["calls_per_unit"] = found["fsharp zero3"]
        result["module_calls_per_unit"] = found["fsharp zero3, module"]
        result["fsdp2_calls_per_unit"] = found[FSDP2]
    if "memory" in parts:
        part = parts["memory"]
        result["peak_ratio_vs_fsdp2"] = peak_ratio(part["largest"], "fsharp zero3")
        result["activation_peak_ratio_vs_fsdp2"] = peak_ratio(part["with_activations"], "fsharp zero3")
        result["separate_peak_ratio_vs_fsdp2"] = peak_ratio(part["with_activations"], SEPARATE)
    if "checkpoint" in parts:
        result |= checkpoint.figures(parts["checkpoint"])
    return {name: round(x, 4) for name, x in result.items()}


def peak_ratio(rows: Mapping[str, Any], name: str) -> float:
    """The peak of a contender to that of FSDP2."""
    least: float = min(rows[each]["peak"] for each in FSDP2_PEAKS)
    return rows[name]["peak"] / least


def in_turns(rounds: Rounds) -> Spread:
    """Two programs in turns, against the two run each for itself."""
    return paired(rounds, lambda each: each[TOGETHER] / (each[FIRST] + each[SECOND]))


def machine(options: Any, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Date, commit, processor, and the versions of fsharp, torch and of other packages, beside the options of a dataclass."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    found = {"python": platform.python_version()}
    for name in ("fsharp", "torch", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "versions": found,
        "options": {name: str(x) if isinstance(x, Path) else x for name, x in asdict(options).items()},
    }


def commit() -> str:
    """The commit that was measured, and whether files differed from it."""
    root = Path(__file__).parents[1]
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---------------------------------------------------------------- tables


def tables(parts: Mapping[str, Any]) -> list[Table]:
    """Everything that was measured, as text."""
    of_part = {
        "steps": _steps,
        "small": _small,
        "alternating": _alternating,
        "optax": _optax,
        "prediction": _prediction,
        "tune": _tune,
        "host": _host,
        "calls": _calls,
    }
    result = [_targets(parts), *(make(parts[name]) for name, make in of_part.items() if name in parts)]
    if "memory" in parts:
        part, title = parts["memory"], f"Memory of a rank, {parts['memory']['num_params']:,} parameters"
        result.append(_memory(f"{title}, hardly any activations", part["largest"], parts.get("rss") or {}))
        result.append(_memory(f"{title}, the activations of the steps above", part["with_activations"], {}))
    if "checkpoint" in parts:
        result.append(_checkpoint(parts["checkpoint"]))
    return result


def _targets(parts: Mapping[str, Any]) -> Table:
    rows = []
    for name, value in summary(parts).items():
        figure = FIGURES[name]
        bound = "at least" if figure.is_least else "at most"
        goal = ("", "") if figure.target is None else (f"{bound} {figure.target:.2f}", "yes" if figure.is_met(value) else "no")
        rows.append((f"`{name}`", figure.meaning, f"{value:.3f}", *goal))
    return Table("In short", ("figure", "what it is", "measured", "target", "met"), rows)


def _steps(part: Mapping[str, Any]) -> Table:
    rounds = part["rounds"]
    peer = best_fsdp2(rounds)
    rows = []
    for name in rounds[0]:
        of_fsdp2, of_ddp = ratio(rounds, name, peer), ratio(rounds, name, "DDP")
        rows.append((name, _milliseconds(rounds, name), ranged(of_fsdp2), ranged(of_ddp)))
    return Table(f"A training step; FSDP2's is that of {peer!r}", ("", "ms a step", "of FSDP2's", "of DDP's"), rows)


def _small(part: Mapping[str, Any]) -> Table:
    rows = []
    for kind, each in part.items():
        for name in each["rounds"][0]:
            of_ddp = ranged(ratio(each["rounds"], name, "DDP"))
            rows.append((kind, f"{each['block_params']:,}", name, _milliseconds(each["rounds"], name), of_ddp))
    return Table("Small units", ("", "parameters of a block", "", "ms a step", "of DDP's"), rows)


def _alternating(part: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, each in part.items():
        took = [_milliseconds(each["rounds"], key) for key in (TOGETHER, FIRST, SECOND)]
        rows.append((name, *took, ranged(in_turns(each["rounds"]))))
    return Table("Two programs on one scheduler, ms", ("", TOGETHER, FIRST, SECOND, "in turns, of the sum"), rows)


def _optax(part: Mapping[str, Any]) -> Table:
    rounds = part["rounds"]
    rows = [(name, _milliseconds(rounds, name), ranged(ratio(rounds, name, OWN))) for name in (OWN, OPTAX)]
    return Table("Steps updated by optax", ("", "ms a step", "of fsharp's"), rows)


def _prediction(part: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, each in part["shapes"].items():
        took = [f"{1e3 * each[key]:.0f}" for key in ("alone_s", "measured_s", "predicted_s")]
        rows.append((name + " (calibrated on)" * (name == part["fitted"]), *took, f"{each['error']:+.1%}"))
    header = ("", "without communication, ms", "zero3 measured, ms", "predicted, ms", "error")
    return Table("Predicted steps", header, rows)


def _tune(part: Mapping[str, Any]) -> Table:
    rows = []
    for name, each in part["shapes"].items():
        seconds = [row["measured_s"] for row in each["rows"]]
        chosen, fastest = each["rows"][0], min(each["rows"], key=lambda row: row["measured_s"])
        both = [", ".join(filter(None, (row["layout"], row["policy"], row["remat"]))) for row in (chosen, fastest)]
        errors = f"{each['noise']:.1%}", f"{each['error']:.0%}", f"{each['regret']:.1%}"
        order = f"{each['rank_correlation']:.2f}", f"{each['ceiling']:.2f}", f"{each['order']:.0%} of {each['pairs']}"
        rows.append((name, *both, f"{len(seconds)}, {max(seconds) / min(seconds):.2f}", *errors, *order))
    header = ("", "the choice", "the fastest", "candidates, slowest to fastest", "noise", "error of a time")
    header += ("regret", "rank correlation", "the most that noise allows", "pairs in order")
    return Table("Choices of `fs.tune`", header, rows)


def _host(part: Mapping[str, Any]) -> Table:
    rows = []
    for name in part["base"]:
        row = [name, part["base"][name]]
        for kind in ("step", "without_optimizer"):
            added = part[kind]["added"]
            row += [ranged(times(added, name), 1e6, "{:.0f}"), ranged(ratio(added, name, FSDP2))]
        rows.append(tuple(row))
    header = ("", "over plain", "us a unit, step", "of FSDP2's", "us a unit, without optimizer", "of FSDP2's")
    return Table(f"Host time added per unit, {part['units']} units", header, rows)


def _calls(part: Mapping[str, Any]) -> Table:
    few, many = part["units"]
    rows = [(name, f"{number:.0f}") for name, number in part["calls"].items()]
    return Table(f"Calls of Python functions a unit and step, from models of {few} and of {many} units", ("", "calls"), rows)


def _memory(title: str, largest: Mapping[str, Any], rss: Mapping[str, Any]) -> Table:
    rows = []
    for name, row in largest.items():
        sizes = (row["peak"], row["first"], row["later"], row["rest"], row["peak"] - row["optimizer"])
        risen = f"{rss[name]['rise'] / 1e6:.0f}" if name in rss else ""
        rows.append((name, *(f"{nbytes / 1e6:.1f}" for nbytes in sizes), f"{peak_ratio(largest, name):.3f}", risen))
    header = ("", "peak, MB", "first step", "later steps", "at rest", "less optimizer state", "peak, of FSDP2's", "RSS, MB")
    return Table(title, header, rows)


def _checkpoint(part: Mapping[str, Any]) -> Table:
    rows = [(where, what, ranged(x, form="{:.0f}"), y and ranged(y)) for where, what, x, y in checkpoint.rows(part)]
    return Table(f"Checkpoints, {part['nbytes_of_a_rank'] / 1e6:.0f} MB a rank", ("", "", "ms or MB", "of DCP's"), rows)


def _milliseconds(rounds: Rounds, name: str) -> str:
    return ranged(times(rounds, name), 1e3, "{:.0f}")


def ranged(x: Spread, scale: float = 1.0, form: str = "{:.3f}") -> str:
    least, most = (form.format(value * scale) for value in (x.least, x.most))
    return f"{form.format(x.median * scale)} ({least} to {most})"


# ---------------------------------------------------------------- where it goes


def report(options: Options, parts: dict[str, Any], *, seconds: float) -> None:
    """Write the file, the docs and the terminal; the last line is JSON."""
    where = machine(options, ("deepspeed",) if options.peers == "all" else ())
    found = summary(parts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    targets = {name: figure.target for name, figure in FIGURES.items()}
    results = {"summary": found, "targets": targets, **where, "seconds": round(seconds), **parts}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    shown, written = tables(parts), [options.out]
    for table in shown:
        console.print(on_terminal(table))
    if options.docs and options.runs_all:
        renew(options.docs, markdown(shown, found, where))
        written.append(options.docs)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)
    print(json.dumps(found), flush=True)  # not through the console, which would wrap it


def on_terminal(table: Table) -> RichTable:
    """For rich."""
    made = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(table.header):
        made.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in table.rows:
        made.add_row(*(cell.replace("`", "") for cell in row))
    return made


def markdown(shown: Sequence[Table], found: Mapping[str, float], where: Mapping[str, Any]) -> str:
    """For the docs."""
    versions = ", ".join(f"{name} {x}" for name, x in where["versions"].items())
    options = where["options"]
    lines = [
        f"{where['date']}, commit {where['commit']}, {where['cpu']} ({where['cores']} cores), {options['nproc']} processes of "
        f"{where['threads_per_process']} thread; {versions}. {options['launches']} launches of "
        f"{options['rounds']} rounds of {options['steps']} steps each; "
        "medians, and in brackets least and most."
    ]
    for table in shown:
        lines += ["", *lines_of(table)]
    short = [
        f"{name} ({value:.3f}; {FIGURES[name].target:.2f})" for name, value in found.items() if not FIGURES[name].is_met(value)
    ]
    lines += ["", f"Short of its target: {'; '.join(short) or 'none'}."]
    return "\n".join(lines)


def lines_of(table: Table) -> list[str]:
    """A table, with its title, in Markdown."""
    head = [f"### {table.title}", "", _row(table.header), "|" + "---|" * len(table.header)]
    return head + [_row(row) for row in table.rows]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def renew(path: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Put ``text`` between the marks of a page. ValueError for a page without them."""
    (head, tail), (begin, end) = around(path, marks), marks
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")


def around(path: Path, marks: tuple[str, str] = MARKS) -> tuple[str, str]:
    """What stands before and after the marks of a page. ValueError for a page without them."""
    page, (begin, end) = path.read_text(), marks
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path}: expected {begin!r} and {end!r}, once each.")
    head, rest = page.split(begin)
    return head, rest.split(end)[1]
