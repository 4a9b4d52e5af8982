"""The site of the documents: each page and each public name is on it, and it is built without a warning."""

import inspect
import io
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


def public_docstrings():
    """Return the docstring of each public module, its functions and classes, and their methods."""
    found = {}
    for module in map(sys.modules.__getitem__, public_modules()):
        things = [(module.__name__, module)] + [(name, x) for name, x in vars(module).items() if not inspect.ismodule(x)]
        classes = [(name, x) for name, x in things if inspect.isclass(x)]
        things += [(f"{name}.{member}", x) for name, cls in classes for member, x in vars(cls).items()]
        public = [(name, x) for name, x in things if not re.search(r"\b_", name)]
        found |= {
            name: inspect.getdoc(x)
            for name, x in public
            if inspect.isroutine(x) or isinstance(x, type | property) or x is module
        }
    return {name: text for name, text in found.items() if text}


def test_docstrings_are_valid_markup():
    """Sphinx says the same in a minute, in a deep test."""
    from docutils import nodes
    from docutils.core import publish_doctree
    from docutils.parsers.rst import roles
    from sphinx.ext.napoleon import Config, GoogleDocstring

    for role in ("attr", "class", "data", "func", "meth", "mod"):
        roles.register_generic_role(role, nodes.literal)
    docstrings = public_docstrings()
    assert len(docstrings) > 400
    for name, text in docstrings.items():
        warnings = io.StringIO()
        settings = {"warning_stream": warnings, "report_level": 2, "halt_level": 5}
        publish_doctree(str(GoogleDocstring(text, Config(napoleon_use_ivar=True))), settings_overrides=settings)
        assert not warnings.getvalue(), name


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
