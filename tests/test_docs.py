"""The documents: their programs run as pasted, their links lead somewhere, and docstrings refer to what there is."""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.stateful.modules import shard
from fsharp.testing import processes
from tests.forked_python import run_forked
from tests.huggingface.test_accelerator import as_torchrun
from tests.virtual_device import accelerator as accelerator, comm as comm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "fsharp").rglob("*.py"))


def programs(page):
    """The Python blocks of a page, or of a part of its text, that are to run. One that cannot has the info word ``no-run``."""
    text = page if isinstance(page, str) else page.read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def check_printed(path, printed):
    """Compare what programs printed with the blocks right after them, line by line. ``...`` is any text."""
    shown = re.findall(r"^```python\n(?:(?!```).*\n)*```\n\n```\n((?:(?!```).*\n)*)```", path.read_text(), re.MULTILINE)
    lines = iter(printed.splitlines())
    for line in filter(None, "".join(shown).splitlines()):
        pattern = ".*".join(map(re.escape, line.rstrip().split("...")))
        assert any(re.fullmatch(pattern, each.rstrip()) for each in lines), f"{path.name} shows, and does not print: {line}"
    return len(shown)


@pytest.mark.timeout(300)
def test_the_front_page_is_short_and_runs_as_a_program(tmp_path):
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 200
    assert "```python no-run" not in readme.read_text()
    program = tmp_path / "readme.py"
    program.write_text("\n".join(programs(readme)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))}
    environment["PYTHONPATH"] = str(ROOT)
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    ran = run_forked(lambda: subprocess.run([sys.executable, program], timeout=240, **options))
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    [(loss, nbytes)], ranks = ast.literal_eval(ran.stdout.splitlines()[0].replace("] [", "], ["))
    assert ranks == [(pytest.approx(loss, rel=1e-3), nbytes // 2)] * 2
    assert check_printed(readme, ran.stdout) == 2


RUN_HERE = [path for path in PAGES if programs(path) and path.name not in ("README.md", "jax.md", "migration.md", "te.md")]
"""The others have tests of their own."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("path", RUN_HERE, ids=lambda each: each.name)
def test_programs_of_pages_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if path.name == "launch.md":
        launch = fs.launch
        monkeypatch.setattr(fs, "launch", lambda *args, **options: run_forked(partial(launch, *args, **options)))
    else:  # other pages need what launch starts
        monkeypatch.setattr(fs, "launch", lambda fn, nproc, *args: processes(fs.Mesh({"rank": nproc}), lambda comm: fn(*args)))
    names = {"__name__": path.stem}
    for number, block in enumerate(programs(path), 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    check_printed(path, printed)
    if path.name == "tune.md":
        [table] = re.findall(r"^```\n(layout .*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        shown = [line for line in table.splitlines() if line != "..."]
        assert len(shown) > 6
        assert [line for line in names["choice"].table().splitlines() if line in shown] == shown, "the table of candidates"


@pytest.mark.parametrize("page", ["formats", "functions", "howto", "modules", "scheduler", "ways"])
def test_programs_of_pages_run_on_a_gpu(comm, page, tmp_path, monkeypatch):
    """Their tensors are on the device of the Comm, which is a virtual GPU if there is no other."""
    monkeypatch.chdir(tmp_path)
    for where in (fs, shard):
        monkeypatch.setattr(where, "connect", lambda mesh, **_: comm)
    names = {"__name__": page}
    for number, block in enumerate(programs(ROOT / "docs" / f"{page}.md"), 1):
        if "simulate(" not in block and "register_format(" not in block:  # on CPUs; a name is registered once
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)


def test_the_recipe_of_dp_sgd_trains_alike_on_any_number_of_ranks():
    first, *blocks = programs(ROOT / "docs" / "howto.md")
    [recipe] = [block for block in blocks if "per_sample_norms" in block]

    def run(comm):
        names = {}
        exec(first, names)
        names |= {"mesh": comm.mesh, "comm": comm, "x": names["x"][comm.rank :: comm.mesh.size]}
        exec(recipe, names)
        return fs.full_tree(names["state"].params, comm=comm)

    one, two = (fs.testing.simulate(fs.Mesh({"dp": n}), run)[0] for n in (1, 2))
    torch.testing.assert_close(one, two)


def test_the_recipe_of_rl_trains_the_policy_alone():
    first, *blocks = programs(ROOT / "docs" / "howto.md")
    [recipe] = [block for block in blocks if "advantages" in block]

    def run(comm):
        names = {}
        exec(first, names)
        names |= {"mesh": comm.mesh, "comm": comm}
        exec(recipe, names)
        start, model, frozen = names["start"], names["policy"], names["reference"]
        assert frozen is start
        return names["means"], names["tokens"], model.full_state_dict(rank=None), frozen.full_state_dict(rank=None)

    (means, tokens, policy, reference), (_, others, policy_elsewhere, _) = fs.testing.simulate(fs.Mesh({"dp": 2}), run)
    assert means[-1] > means[0] + 0.1
    assert not torch.equal(tokens, others), "each rank has rows of its own"
    torch.testing.assert_close(policy, policy_elsewhere, rtol=0, atol=0)
    assert not any(torch.equal(policy[name], x) for name, x in reference.items())


def test_the_programs_of_the_page_about_jax_run_on_two_ranks(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    blocks = programs(ROOT / "docs" / "jax.md")
    assert len(blocks) > 5

    def run(comm):
        names = {}
        for block in blocks:
            exec(compile(block, "jax.md", "exec"), names)
        return float(names["metrics"].loss)

    first, second = run_forked(lambda: processes(fs.Mesh({"dp": 2}), run), imports="import jax, optax")
    assert first == second


MIGRATION, *SECTIONS = re.split(r"^(?=## )", (ROOT / "docs" / "migration.md").read_text(), flags=re.MULTILINE)


IMPORTS_FOR_SECONDS = {"Lightning", "Accelerate and transformers' Trainer"}
SECTION_PARAMS = [
    pytest.param(each, id=title, marks=pytest.mark.deep if title in IMPORTS_FOR_SECONDS else [])
    for each in SECTIONS
    if programs(each) and (title := each.splitlines()[0].strip("# "))
]


@pytest.mark.parametrize("section", SECTION_PARAMS)
def test_the_programs_of_a_section_about_another_library_run_on_two_ranks(section, tmp_path, monkeypatch):
    """A section needs the first program of its page, and nothing of other sections."""
    monkeypatch.chdir(tmp_path)

    def run(comm):
        as_torchrun(comm)
        names = {}
        for number, block in enumerate(programs(MIGRATION + section), 1):
            exec(compile(block, f"migration.md, block {number}", "exec"), names)
        ranks = [getattr(names.get(name), size, 2) for name, size in (("accelerator", "num_processes"), ("args", "world_size"))]
        assert ranks == [2, 2], "the other library has found the ranks"
        return names.get("before"), names.get("after")

    (before, after), _ = processes(fs.Mesh({"dp": 2}), run, timeout=280)
    assert after == (before if before is None else pytest.approx(before, rel=1e-4))


@pytest.mark.timeout(120)
def test_the_notebook_runs_and_shows_what_its_cells_show(tmp_path):
    path = ROOT / "docs" / "fsharp_for_jax_users.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]], (
        "outputs are made by the build of the site"
    )
    assert sum("assert" in "".join(cell["source"]) for cell in cells) > 7, "its cells compare numbers"
    command = [sys.executable, ROOT / "docs" / "notebook.py", path]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    ran = run_forked(lambda: subprocess.run(command, timeout=110, **options))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("```python") == len(cells)
    assert "<iframe" in ran.stdout, "the picture of a schedule"
    losses = re.findall(r"^fsharp ([\d.]+)   JAX ([\d.]+)$", ran.stdout, re.MULTILINE)
    assert len(losses) == 5
    assert all(float(a) == pytest.approx(float(b), abs=1e-5) for a, b in losses)


def test_a_cell_shows_its_last_expression():
    run_cell = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["run_cell"]
    names = {}
    assert run_cell("x = 3\nprint(x)", 0, names) == ("3\n", None)
    assert run_cell("print(x)\nx + 1", 1, names) == ("3\n", 4)
    assert run_cell("", 2, names) == ("", None)
    with pytest.raises(ZeroDivisionError) as info:
        run_cell("1 / 0", 3, names)
    assert "cell 3" in str(info.traceback[-1].path)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_are_githubs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One idea\n## `torch.compile`, [a link](x.md)\n```\n# no heading\n```\n### What is refused, and what is not seen\n"
    )
    assert anchors(page) == {"one-idea", "torchcompile-a-link", "what-is-refused-and-what-is-not-seen"}


@pytest.mark.parametrize("path", PAGES, ids=lambda each: each.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("name", [path.name for path in PAGES if path.parent != ROOT])
def test_every_page_is_linked_from_the_front_page(name):
    assert f"docs/{name})" in (ROOT / "README.md").read_text()


ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc|obj):`~?([\w.]+)`")


def resolves(name, module, classes):
    """Whether a cross-reference has an object: by its whole name, a name of its module, or a member of a class around it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut])) if name.startswith("fsharp") else module
        except ImportError:
            continue
        rest = parts[cut:] if name.startswith("fsharp") else parts
        return any(has(owner, rest) for owner in ([thing] if name.startswith("fsharp") else [thing, *classes]))
    return False


def has(thing, parts):
    for part in parts:
        fields = getattr(thing, "__dataclass_fields__", {}) if inspect.isclass(thing) else {}
        annotated = getattr(thing, "__annotations__", {}) if inspect.isclass(thing) else {}
        if part in fields or part in annotated:
            return part == parts[-1]
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


def test_cross_references_of_docstrings_resolve():
    wrong, found = [], 0
    for path in SOURCES:
        text = path.read_text()
        if not ROLE.search(text):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == name]
        for role in ROLE.finditer(text):
            found += 1
            if not resolves(role[1], module, classes):
                wrong.append(f"{path.relative_to(ROOT)}:{text[: role.start()].count(chr(10)) + 1}: {role[0]}")
    assert found > 400
    assert not wrong, "\n".join(wrong)
    assert not resolves("fsharp.Nothing", fs, [])
    assert not resolves("ShardedModule.nothing", fs, [])
    assert resolves("fsharp.layouts.MeshPlacement", fs, [])
