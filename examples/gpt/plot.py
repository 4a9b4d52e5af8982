"""loss.png: the run as a picture."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import withStroke


def plot(folder: Path, *, title: str, bigram: float) -> None:
    """Draw ``metrics.jsonl`` of ``folder``: every step, their running mean, evaluations and the bigram model."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [(row["step"], row["bits_per_byte"]) for row in rows if row["kind"] == "train"]
    evals = [(row["step"], row["bits_per_byte"]) for row in rows if row["kind"] == "eval"]
    steps, bits = zip(*(train or evals[-1:]), strict=True)  # a run that has gone on with a complete one has made no step
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, running_mean(bits, decay=0.9), color="tab:blue", label="training (running mean)")
    axes.plot(*zip(*evals, strict=True), "o-", color="tab:orange", markersize=5, label="held-out files")
    axes.axhline(bigram, color="0.35", linestyle="--", linewidth=1, label=f"bigram model, held-out files ({bigram:.2f})")
    final = axes.annotate(f"{evals[-1][1]:.2f}", evals[-1], (0, 12), textcoords="offset points", ha="center", weight="bold")
    final.set_path_effects([withStroke(linewidth=3, foreground="white")])
    axes.set(xlabel="step", ylabel="bits per byte", title=title, xlim=(0, steps[-1] * 1.03))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=150)
    plt.close(figure)


def running_mean(values: tuple[float, ...], *, decay: float) -> list[float]:
    """Exponential mean, without the pull of a start at zero."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        result.append(total / weight)
    return result
