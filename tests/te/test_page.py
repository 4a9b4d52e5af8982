"""The programs of the page about TransformerEngine run as pasted."""

import pytest

import fsharp as fs
from tests.te_cpu.ranks import processes
from tests.test_docs import ROOT, programs


def run_page(comm):
    names = {}
    for number, block in enumerate(programs(ROOT / "docs" / "te.md"), 1):
        exec(compile(block, f"te.md, block {number}", "exec"), names)
    return float(names["loss"]), float(names["metrics"].loss)


def test_the_programs_of_the_page_run_on_two_ranks():
    """The module and the functions train alike: their optimizers round differently."""
    (loss, loss_of_functions), elsewhere = processes(fs.Mesh({"dp": 2}), run_page)
    assert loss_of_functions == pytest.approx(loss, rel=0.01)
    assert elsewhere == (loss, loss_of_functions)
