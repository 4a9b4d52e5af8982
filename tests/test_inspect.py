"""fs.inspect as a namespace: what is in it, that each of it is documented, and what it may import."""

import ast
import inspect
from pathlib import Path

import pytest

import fsharp as fs

FOLDER = Path(fs.__file__).parent / "stateful" / "inspect"
NAMES = [name for name in vars(fs.inspect) if not name.startswith("_")]


def test_the_names():
    assert set(NAMES) == {"table", "draw", "Hardware", "simulate", "Span", "Timeline", "Trace", "compare", "perfetto"}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_documented(name):
    thing = getattr(fs.inspect, name)
    assert inspect.getdoc(thing)
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(value) and not member.startswith("_"):
            assert value.__doc__, f"{name}.{member}"


def test_it_reads_schedules_and_nothing_that_runs_them():
    allowed = ("fsharp.stateful.schedule.", "fsharp.stateful.inspect.", "fsharp.functional.")
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in modules if name.startswith("fsharp") and not name.startswith(allowed)], path.name
        assert "TYPE_CHECKING" not in path.read_text(), path.name


def test_no_file_of_it_imports_in_a_circle():
    def imports(path):
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        names = (node.module.rsplit(".", 1)[-1] for node in nodes if (node.module or "").startswith("fsharp.stateful.inspect."))
        return {FOLDER / f"{name}.py" for name in names}

    edges = {path: imports(path) for path in FOLDER.glob("*.py")}
    while edges:
        leaves = [path for path, targets in edges.items() if not targets & edges.keys()]
        assert leaves, f"a circle among {sorted(path.name for path in edges)}"
        for path in leaves:
            del edges[path]
