"""RunLogger: pass values, throughput, slow ranks, restarts and faults of a run to its loggers."""

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch

import fsharp
from fsharp.distributed.process_group import ProcessGroupComm
from fsharp.errors import RunError, log as _log
from fsharp.functional.comm.protocol import Comm, innermost_comm
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.sharded import units_of
from fsharp.report.logs import LOG_FILE, JsonlLogger, Logger
from fsharp.resilience.stragglers import StragglerDetector
from fsharp.type_checks import short_repr

_RATE_INTERVAL_S = 1.0
"""Smallest number of seconds between two records of the throughput."""


class RunLogger:
    """The record of a run, which rank 0 passes to loggers. The other ranks only take part in the search for slow ranks.

    With ``loggers=None`` rank 0 writes values to the file ``log.jsonl`` in the folder ``root``; if ``root`` is a URL, values
    are not recorded. Ranks exchange their times every ``every`` steps. Raises RunError for a logger without a method ``log``.

    Attributes:
        stragglers: the detector of slow ranks; None over NCCL.
    """

    def __init__(self, root: str, comm: Comm, loggers: Sequence[Logger] | None, *, every: int) -> None:
        for each in loggers or ():
            if not callable(getattr(each, "log", None)):
                raise RunError(f"Run(): a logger is {short_repr(each)}, expected an object with a method log(step, values).")
        if loggers is None:
            loggers = () if "://" in root else (JsonlLogger(os.path.join(root, LOG_FILE)),)
        self._loggers = tuple(loggers) if comm.rank == 0 else ()
        self._comm, self._rate, self._saved = comm, (0, 0.0), -1
        found = innermost_comm(comm)
        is_nccl = isinstance(found, ProcessGroupComm) and found.is_nccl
        self.stragglers = None if is_nccl else StragglerDetector(comm, every=every)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass the values of a step to the loggers. Ranks other than 0 have no loggers."""
        for logger in self._loggers:
            logger.log(step, values)

    def warn(self, step: int, text: str) -> None:
        """Write ``text`` as a warning to the log of rank 0, and as an event of step ``step`` to its loggers."""
        if self._comm.rank == 0:
            _log.warning("%s", text)
        self.log(step, {"event": text})

    def log_newest_complete_save(self, step: int, complete: int) -> None:
        """Record step ``complete`` of the newest complete checkpoint, -1 for none, if it is new. ``step``: finished steps."""
        if complete != self._saved:
            self._saved = complete
            self.log(max(step - 1, 0), {"saved": complete})  # wandb refuses a step before the newest one

    @contextmanager
    def failures_as_warnings(self) -> Iterator[None]:
        """Turn errors of loggers in this context into warnings: the run ends with an error, which a logger must not replace."""
        try:
            yield
        except Exception as failure:
            _log.warning("a logger could not record the end of the run: %s: %s", type(failure).__name__, failure)

    def start(self, step: int, tree: Any, **about: Any) -> None:
        """Record that the run begins or continues at ``step``: ``about``, versions, this machine, and the tree's layout."""
        if not self._loggers:
            return
        device = self._comm.device
        about |= {
            "mesh": str(self._comm.mesh),
            "device": "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
            "host": platform.node(),
            "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
            "threads": torch.get_num_threads(),
            "versions": {"fsharp": fsharp.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        layout = _layout_of_units_in(tree)
        self.log(step, {"start": about} if layout is None else {"start": about, "layout": layout})

    def start_measuring(self, step: int) -> None:
        """Begin to measure throughput and the times of ranks, from this step on."""
        self._rate = step, time.perf_counter()
        if self.stragglers is not None:
            self.stragglers.start()

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Record the throughput. If ranks exchange times after this step, record the times, and ranks that have become slow.

        Throughput is recorded at most once a second, and after the last step. ``step``: number of finished steps.
        """
        if self.stragglers is not None:
            known, times = self.stragglers.stragglers, self.stragglers.times
            before = times[-1] if times else None
            self.stragglers.end_step(step)
            if times and times[-1] is not before:
                self.log(max(step - 1, 0), {"own_s": list(times[-1].own_s)})
                for rank in sorted(self.stragglers.stragglers.keys() - known.keys()):
                    ratio = self.stragglers.stragglers[rank]
                    self.log(
                        max(step - 1, 0), {"event": f"rank {rank} is a straggler: {ratio:.2f} times the lower median of ranks"}
                    )
        (since, began), now = self._rate, time.perf_counter()
        if step < since:  # rolled back
            self._rate = step, now
        elif step > since and (is_last or now - began >= _RATE_INTERVAL_S):
            self.log(step - 1, {"steps_per_s": (step - since) / (now - began)})
            self._rate = step, now


def _layout_of_units_in(tree: Any) -> Layout | None:
    """Return the layout of a tree's units; None without units, or if two units have the same name, as in two models."""
    units = tuple(dict.fromkeys(node.unit for node in units_of(tree)))
    if not units or len({unit.name for unit in units}) < len(units):
        return None
    return Layout(units[0].mesh, units, optree.treespec_leaf())  # the record does not show the tree above the units
