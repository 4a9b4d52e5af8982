"""The subcommand ``report``."""

import os

from fsharp.cli.machine import check_output
from fsharp.report.page import report as write_report


def report(run_dir: str, /, *, out: str = "") -> str:
    """Write one HTML file about a run: loss, throughput, a step's timeline and memory, layout, slow ranks, faults and versions.

    The file needs no network and no other file.

    Args:
        run_dir: folder with the run's checkpoints and log.jsonl.
        out: path of the file, which ends in .html; report.html in the folder by default.
    """
    if out or os.path.isdir(run_dir):
        check_output("report: out", out or os.path.join(run_dir, "report.html"))
    return f"wrote {write_report(run_dir, out or None)}"
