"""The site of the documents: each page and each public name is on it, and it is built without a warning."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fsharp as fs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def public_modules():
    return {"fsharp"} | {f"fsharp.{name}" for name in dir(fs) if inspect.ismodule(getattr(fs, name)) and name != "interop"}


def test_each_page_is_in_the_menu():
    menu = re.findall(r"^(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


def test_each_public_module_is_in_the_reference():
    modules = runpy.run_path(str(DOCS / "conf.py"))["MODULES"]
    assert public_modules() <= set(modules)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees", DOCS, tmp_path / "site"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert built.returncode == 0, built.stderr
    for page in DOCS.glob("*.md"):
        assert (tmp_path / "site" / f"{page.stem}.html").exists(), page
    for module in public_modules():
        page = (tmp_path / "site" / "reference" / f"{module}.html").read_text()
        thing = sys.modules[module]
        own = [name for name, value in vars(thing).items() if not name.startswith("_") and inspect.isroutine(value)]
        missing = [name for name in own if f'id="{module}.{name}"' not in page]
        assert not missing, module
    assert all((tmp_path / "site" / name).exists() for name in ("step.html", "prefetch.html")), "the pictures of overlap.md"
    copies = list((tmp_path / "site" / "_downloads").rglob("dp_sgd.py"))
    assert len(copies) == 1, "links to sources lead to copies"
