"""Configuration of the site for Sphinx: ``make docs``."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fsharp  # noqa: E402
from fsharp.cli import CHECKPOINTS, COMMANDS  # noqa: E402

project, copyright, version = "fsharp", "the authors of fsharp", fsharp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"fsharp {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # of which some pages document subclasses
suppress_warnings = ["myst.header"]  # tables of benchmarks are written by a program, under headings of the third level

MODULES = {
    "fsharp": "plan, shard, train, wrap",
    "fsharp.checkpoint": "checkpoints",
    "fsharp.collectives": "collectives",
    "fsharp.errors": "errors",
    "fsharp.formats": "formats",
    "fsharp.init": "initial values",
    "fsharp.inspect": "inspect, predict and report",
    "fsharp.layouts": "layouts",
    "fsharp.modules": "tensors of modules",
    "fsharp.optim": "optimizers",
    "fsharp.resilience": "runs, loggers and faults",
    "fsharp.schedules": "schedules",
    "fsharp.te": "TransformerEngine",
    "fsharp.testing": "tests",
    "fsharp.interop.jax": "arrays and functions of JAX",
    "fsharp.interop.optax": "optax",
    "fsharp.interop.orbax": "Orbax",
    "fsharp.huggingface.accelerator": "accelerate",
    "fsharp.huggingface.trainer": "the Trainer of transformers",
    "fsharp.lightning.trainer": "Lightning's Trainer",
    "fsharp.lightning.fabric": "Lightning's Fabric",
}
"""Public modules, each a page of the reference, and their titles."""


def write_reference(app):
    """Write a page for each public module, and one for the command."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    for name, title in MODULES.items():
        own = name.startswith(
            ("fsharp.huggingface.", "fsharp.interop.", "fsharp.lightning.")
        )  # the other modules are lists of imports
        directive = f".. automodule:: {name}\n   :members:\n" + "   :imported-members:\n" * (not own)
        short = name if "." in name.removeprefix("fsharp.") else name.replace("fsharp", "fs")
        write(folder / f"{name}.md", f"# {short}: {title}\n\n```{{eval-rst}}\n{directive}```\n")
    about = "Each subcommand is a Python function, which returns the text to print. `fsharp COMMAND --help` lists the options."
    parts = [f"# The command fsharp\n\n{about}\n"]
    for prefix, functions in (("fsharp", COMMANDS), ("fsharp ckpt", CHECKPOINTS)):
        for name, function in functions.items():
            path = f"{function.__module__}.{function.__name__}"
            parts.append(f"## {prefix} {name}\n\n```{{eval-rst}}\n.. autofunction:: {path}\n```\n")
    write(folder / "command.md", "\n".join(parts))


def write(path, text):
    """Write a file if its text is new, so that Sphinx reads again what has changed alone."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def draw_pictures(app):
    """Run the program of a page in the folder of the site: it writes the interactive pictures that the page shows."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "overlap.md").read_text(), re.DOTALL | re.MULTILINE)
    with contextlib.chdir(app.outdir), contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), "overlap.md", "exec"), {})


def write_notebooks(app):
    """Run each notebook in a process of its own, and write it as a page, with what its cells show."""
    folder = Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        ran = subprocess.run([sys.executable, ROOT / "docs" / "notebook.py", path], cwd=ROOT, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"{path.name}: a cell raised an error.\n{ran.stderr}")
        write(folder / f"{path.stem}.md", ran.stdout)


def link_to_sources(app, docname, source):
    """Let links lead to what the site has of other files: copies, of a folder its program, and of a notebook its page."""

    def link(found):
        path = ROOT / found[1]
        return f"](path:../{path.relative_to(ROOT) / '__main__.py' if path.is_dir() else found[1]})"

    source[0] = re.sub(r"\]\(\.\./([^)#]+)\)", link, source[0])
    source[0] = re.sub(r"\]\((\w+)\.ipynb\)", r"](notebooks/\1.md)", source[0])


def setup(app):
    """Connect the functions above to the steps of the build."""
    app.connect("builder-inited", write_reference)
    app.connect("builder-inited", draw_pictures)
    app.connect("builder-inited", write_notebooks)
    app.connect("source-read", link_to_sources)
