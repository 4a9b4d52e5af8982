"""Rows of the table of faults: what each injects and checks. A row holds if its function returns and nothing is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class NotTried(Exception):
    """A row that this machine cannot run; says why."""


class Outcome(NamedTuple):
    """What came of the faults of a row.

    Attributes:
        text: in a few words.
        kills: processes or groups of them that were killed.
        lost: of these, kills after which a checkpoint was not there that had been saved before.
        restarts: jobs that were started again.
        resumed_bitwise: of these, those that went on with the bits of a run that nothing had happened to.
    """

    text: str
    kills: int = 0
    lost: int = 0
    restarts: int = 0
    resumed_bitwise: int = 0


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        number: in the table.
        fault: in a few words.
        run: injects it and asserts what has to hold, given an empty folder and whether to be quick about it.
    """

    number: int
    fault: str
    run: Callable[[Path, bool], Outcome]


ROWS: dict[int, Row] = {}


def row(number: int, fault: str) -> Callable[[Callable[[Path, bool], Outcome]], Callable[[Path, bool], Outcome]]:
    """Enter a function as a row. ``python -m tests.faults`` imports every module of this package."""

    def enter(run: Callable[[Path, bool], Outcome]) -> Callable[[Path, bool], Outcome]:
        assert number not in ROWS, f"two rows {number}"
        ROWS[number] = Row(number, fault, run)
        return run

    return enter
