"""The table of faults, as ``make faults`` runs it."""

import json

import pytest

from tests.faults.__main__ import main
from tests.faults.registry import ROWS, NotTried, Outcome

_RUN_TESTS = {1, 16, 17, 18, 19, 20, 21}
"""Rows that run what are tests of the normal suite."""


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.deep) if n in _RUN_TESTS else n for n in sorted(ROWS)])
def test_a_few_faults_of_each_kind(number, tmp_path):
    try:
        assert not ROWS[number].run(tmp_path, True).lost
    except NotTried as reason:
        pytest.skip(str(reason))


def test_the_last_line_is_json(capsys):
    assert main(["--short", "9", "2"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["9", "2"]
    sums = json.loads(last)
    assert sums.pop("kills") >= 5
    assert sums == {"rows": 2, "held": 2, "lost": 0, "restarts": 0, "resumed_bitwise": 0}


@pytest.mark.parametrize("what", ["raises", "loses"])
def test_a_row_that_does_not_hold_is_said(what, monkeypatch, capsys):
    def run(folder, short):
        assert what == "loses"
        return Outcome("a save is gone", kills=1, lost=1)

    monkeypatch.setitem(ROWS, 9, ROWS[9]._replace(run=run))
    assert main(["--short", "9"]) == 1
    assert "NOT HELD" in capsys.readouterr().out


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_all_faults(capsys):
    assert main([]) == 0
    sums = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sums["kills"] >= 200
    assert sums["lost"] == 0
