"""The page for people who come from JAX, run from top to bottom."""

import re
from pathlib import Path

import fsharp as fs
from fsharp.testing import processes

PAGE = Path(__file__).parents[1] / "docs" / "jax.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) > 5

    def run(comm):
        names = {}
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
        return float(names["metrics"].loss)

    first, second = processes(fs.Mesh({"dp": 2}), run)
    assert first == second
