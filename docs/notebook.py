"""Run the cells of a notebook in this process, and print the notebook as a page in Markdown, with what its cells show.

python docs/notebook.py docs/fsharp_for_jax_users.ipynb
"""

import ast
import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run_cell(source: str, number: int, names: dict[str, Any]) -> tuple[str, Any]:
    """Run a cell, and return what it prints, and the value of its last line if that is an expression."""
    code = ast.parse(source)
    last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(code, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    return printed.getvalue(), value


def parts_of_page(path: Path) -> Iterator[str]:
    """Run a notebook, and yield its texts, its code, and what the code shows, as Markdown."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        printed, value = run_cell(source, number, names)
        yield f"```python\n{source}\n```"
        if printed:
            yield f"```text\n{printed.rstrip()}\n```"
        if value is not None:
            as_html = getattr(value, "_repr_html_", None)
            yield f"```{{raw}} html\n{as_html()}\n```" if as_html else f"```text\n{value!r}\n```"


if __name__ == "__main__":
    print("\n\n".join(parts_of_page(Path(sys.argv[1]))))
