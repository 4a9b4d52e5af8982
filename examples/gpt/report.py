"""The output of a run: a live line on a terminal, plain lines elsewhere, metrics.jsonl and summary.json."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SUMMARY, LOG = "summary.json", "log.jsonl"
_PLAIN_EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class Report:
    """Rank 0 reports into ``folder``, the folder of the run. On other ranks every method does nothing."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._active, self._folder, self._total = rank == 0, folder, 0
        self._console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
        self._live = Progress(
            TextColumn("step {task.completed}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=rank != 0 or not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=None)
        self._file: TextIO | None = None
        self._next_line = 0.0

    def __enter__(self) -> "Report":
        if self._active:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        if self._file:
            self._file.close()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def begin(self, step: int) -> None:
        """Open the metrics file to continue after a step. Lines of later steps, from an interrupted run, are removed."""
        if self._active:
            path = self._folder / "metrics.jsonl"
            before = path.read_text().splitlines(keepends=True) if step and path.exists() else []
            self._file = path.open("w")
            self._file.writelines(line for line in before if json.loads(line)["step"] <= step)

    def plan(self, total: int) -> None:
        """Set the number of steps."""
        self._total = total
        self._live.update(self._task, total=total)

    def train(self, row: dict[str, Any]) -> None:
        """Report a training step."""
        self._write({"kind": "train", **row})
        text = f"loss {row['loss']:.3f}  {row['bits_per_byte']:.3f} bits/byte  {row['tokens_per_s']:,.0f} tokens/s"
        self._live.update(self._task, completed=row["step"], description=text)
        if not self._console.is_terminal and (time.monotonic() >= self._next_line or row["step"] == self._total):
            self.say(f"step {row['step']}/{self._total}  {text}  {row['elapsed']:.0f} s")
            self._next_line = time.monotonic() + _PLAIN_EVERY

    def eval(self, step: int, bits: float, num_bytes: int) -> None:
        """Report an evaluation on held-out bytes."""
        self._write({"kind": "eval", "step": step, "bits_per_byte": bits, "bytes": num_bytes})
        self.say(f"step {step}  held-out files: {bits:.3f} bits/byte over {num_bytes:,} bytes")

    def summary(self, row: dict[str, Any]) -> None:
        """Print the last line of the output, and write it to the run's summary file."""
        if self._active:
            (self._folder / SUMMARY).write_text(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
