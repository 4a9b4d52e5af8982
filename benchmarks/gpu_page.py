"""Tables of what ``python -m benchmarks.gpu`` has measured.

``python -m benchmarks.gpu_page RESULT.json`` writes them into docs/benchmarks.md: a machine with a GPU gives the file, and the
page is written wherever the repository is. No torch.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Table, lines_of, ranged, renew
from benchmarks.stats import Rounds, times

MARKS = "<!-- begin: written by benchmarks.gpu_page -->", "<!-- end: written by benchmarks.gpu_page -->"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIRST, LOOSE = 6, 2e-2
"""Over how many steps losses are compared, and their largest relative difference: contenders round in different places."""
BASE, COMPILED_BASE, FP8_BASE = "FSDP2", "FSDP2, compiled", "FP8, FSDP2"
OURS, MODULE, GRAPH = "fsharp zero3", "fsharp zero3, module", "fsharp zero3, graph"
COMPILED, FP8 = "fsharp zero3, compiled", "FP8, fsharp zero3"
PAIRS = {
    "": (OURS, BASE),
    "module_": (MODULE, BASE),
    "graph_": (GRAPH, BASE),
    "compiled_": (COMPILED, COMPILED_BASE),
    "fp8_": (FP8, FP8_BASE),
}
"""What the last line has ratios of."""


def compare(losses: Mapping[str, Sequence[float | None]], peers: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return how far first losses are from those of the peer, and the differences that rounding does not explain."""
    found = {}
    for name, mine in losses.items():
        pairs = zip(mine[:FIRST], losses.get(peers[name], ()), strict=False)
        both = [abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None]
        if both:
            found[name] = max(both, key=lambda x: (x != x, x))  # a NaN is the largest
    return {"difference_of_losses": found, "mismatch": {name: x for name, x in found.items() if not x <= LOOSE}}


def rounds_of(part: Mapping[str, Any], kind: str, name: str) -> Rounds:
    """Return the numbers of one kind, of the rounds in which a contender is."""
    return [{name: row[name][kind]} for row in part["rounds"] if name in row]


def ratio(part: Mapping[str, Any], kind: str, ours: str, theirs: str) -> float | None:
    """Return the ratio of two contenders' medians, as not all contenders take turns; None if one was not measured."""
    both = [(name, rounds_of(part, kind, name)) for name in (ours, theirs)]
    mine, peer = (times(rounds, name).median if rounds else None for name, rounds in both)
    return mine / peer if mine and peer else None


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return one table for each model, one of overlap, one of tests if they ran, and one of what is absent."""
    models: Mapping[str, Any] = results["models"]
    return [
        *(_times(name, part, results["peak_flops"]) for name, part in models.items()),
        _overlap(models),
        *([_tests(results["tests"])] if "tests" in results else []),
        Table(
            "Not measured",
            ("", "why"),
            [(f"{name}, {who}", why) for name, part in models.items() for who, why in part["absent"].items()],
        ),
    ]


def _times(name: str, part: Mapping[str, Any], peak_flops: float | None) -> Table:
    rows = []
    for who, nbytes in part["memory"].items():
        peer = part["peers"][who]
        cells = [who, str(len(rounds_of(part, "step", who)))]
        if steps := rounds_of(part, "step", who):
            step = times(steps, who)
            cells += [ranged(step, 1e3, "{:.2f}"), _ratio(part, "step", who, peer), f"{part['tokens'] / step.median:,.0f}"]
            cells.append("" if peak_flops is None else f"{part['flops'] / step.median / peak_flops:.1%}")
            cells += [ranged(times(rounds_of(part, "host", who), who), 1e3, "{:.2f}"), _ratio(part, "host", who, peer)]
        else:
            cells += [""] * 6
        theirs = part["memory"].get(peer)
        cells += [f"{nbytes['peak'] / 1e6:,.0f}", f"{nbytes['peak'] / theirs['peak']:.3f}" if theirs else ""]
        rows.append((*cells, f"{nbytes['rest'] / 1e6:,.0f}"))
    of_peer = "of the peer's"
    header = ("", "rounds", "ms a step", of_peer, "tokens/s", "of peak FLOP/s", "ms until issued", of_peer)
    header += ("peak, MB", of_peer, "at rest, MB")
    return Table(f"{name}: {part['num_params']:,} parameters, {part['tokens']:,} tokens a step", header, rows)


def _ratio(part: Mapping[str, Any], kind: str, who: str, peer: str) -> str:
    found = ratio(part, kind, who, peer)
    return "" if found is None else f"{found:.3f}"


def _overlap(models: Mapping[str, Any]) -> Table:
    rows = []
    for name, part in models.items():
        for who, found in part["overlap"].items():
            gathers = [found[phase] for phase in ("forward", "backward", "after")]
            rows.append((f"{name}, {who}", *_hidden(gathers), *_hidden([found["reductions"]])))
    header = ("", "gathers", "overlapping", "ms", "of these beside", "reductions", "overlapping", "ms", "of these beside")
    return Table("Gathers and reductions beside compute, in one step", header, rows)


def _tests(outcomes: Sequence[tuple[str, str, str]]) -> Table:
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for test, result, why in outcomes:
        name, _, case = test.partition("[")
        rows.setdefault(name, []).append((result, case.removesuffix("]"), why))
    header = ("", "passed", "failed", "not run", "why")
    return Table("What only a GPU can show of TransformerEngine", header, [_test(name, each) for name, each in rows.items()])


def _test(name: str, cases: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """A row of a test, whose first case that failed or has not run says why."""
    nums = [sum(result == wanted for result, _, _ in cases) for wanted in ("passed", "failed", "not run")]
    case, why = next((x[1:] for result in ("failed", "not run") for x in cases if x[0] == result), ("", ""))
    why = f"{case}: {why}" if case else why
    return (name.replace("_", " "), *(str(num or "") for num in nums), why.replace("|", "\\|"))


def _hidden(found: Sequence[Mapping[str, float]]) -> tuple[str, str, str, str]:
    num, overlapping, us, hidden = (sum(x[key] for x in found) for key in ("num", "num_overlapping", "us", "hidden_us"))
    return str(num), str(overlapping), f"{us / 1e3:.2f}", f"{hidden / us:.0%}" if us else ""


def summary(results: Mapping[str, Any]) -> dict[str, float]:
    """Return ratios of fsharp's to FSDP2's of the same kind, for the last line."""
    found = {}
    for name, part in results["models"].items():
        for prefix, (ours, theirs) in PAIRS.items():
            for kind in ("step", "host"):
                if (value := ratio(part, kind, ours, theirs)) is not None:
                    found[f"{name}_{prefix}{kind}_ratio_vs_fsdp2"] = round(value, 4)
            if {ours, theirs} <= set(memory := part["memory"]):
                found[f"{name}_{prefix}peak_ratio_vs_fsdp2"] = round(memory[ours]["peak"] / memory[theirs]["peak"], 4)
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Return the part of the page."""
    options, peak = results["options"], results["peak_flops"]
    versions = f"Python {results['python']}, torch {results['torch']}, CUDA {results['cuda']}, NCCL {results['nccl']}"
    lines = [
        f"{results['date']}, commit {results['commit']}, {results['gpu']}; {versions}. At most {options['rounds']} rounds of "
        f"{options['steps']} steps; medians, and in brackets least and most. "
        + ("Peak FLOP/s of this device are not known here." if peak is None else f"Peak: {peak / 1e12:,.0f} TFLOP/s.")
    ]
    for table in tables(results):
        lines += ["", *(lines_of(table) if table.rows else [f"### {table.title}", "", "Nothing."])]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Write the tables of a result into the page; the exit status."""
    if len(argv) != 1:
        print("usage: python -m benchmarks.gpu_page benchmarks/results/gpu-<date>.json", file=sys.stderr)
        return 2
    renew(PAGE, markdown(json.loads(Path(argv[0]).read_text())), MARKS)
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
