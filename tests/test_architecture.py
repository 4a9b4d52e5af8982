"""What holds of the source itself: direction of imports, two doors to torch.distributed, documentation of every name."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import fsharp as fs
import fsharp.testing
from fsharp.stateful.schedule import ops
from fsharp.stateful.schedule.ops import STREAMS, Cost, OpSpec, Phase, kinds_where
from fsharp.stateful.schedule.program import EventKind

ROOT = Path(fs.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


@cache
def imports(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_checkpoints_import_the_functional_half_and_parts_of_modules():
    stateful = {name for path in (ROOT / "checkpoint").glob("*.py") for name in imports(path) if "stateful" in name}
    assert stateful == {"fsharp.stateful.modules.parameter"}


def test_nothing_imports_resilience():
    outside = [path for path in SOURCES if path.parent != ROOT / "resilience" and path != ROOT / "__init__.py"]
    assert not [path for path in outside if any(name.startswith("fsharp.resilience") for name in imports(path))]


def test_the_report_is_for_runs_and_commands():
    users = {path.parent.name for path in SOURCES if any(name.startswith("fsharp.report") for name in imports(path))}
    assert users == {"report", "resilience", "cli", "inspect"}, "and fs.inspect, which names it"
    own = {name for path in (ROOT / "report").glob("*.py") for name in imports(path) if name.startswith("fsharp.")}
    assert not [name for name in own if name.startswith(("fsharp.resilience", "fsharp.checkpoint", "fsharp.stateful.runtime"))]


def test_unit_layouts_compute_with_integers():
    code = re.sub(r'""".*?"""', "", (ROOT / "functional" / "layout" / "unit_layout.py").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"torch\.\w+", code)) == {"torch.dtype"}, "functions of tensors are in stored.py"


def test_only_interop_imports_jax():
    foreign = {path for path in SOURCES if any(name.split(".")[0] in ("jax", "optax") for name in imports(path))}
    assert foreign == set((ROOT / "interop").glob("*.py")) - {ROOT / "interop" / "__init__.py"}


MAY_IMPORT = {
    "functional": {f"functional{name}" for name in ("", "/formats", "/tree", "/layout", "/comm", "/optim", "/reshard")},
    "functional/formats": {"functional/formats"},
    "functional/tree": {"functional/tree"},
    "functional/layout": {f"functional/{name}" for name in ("formats", "tree", "layout")},
    "functional/comm": {f"functional/{name}" for name in ("formats", "tree", "layout", "comm")},
    "functional/optim": {f"functional/{name}" for name in ("formats", "tree", "layout", "comm", "optim")},
    "functional/reshard": {f"functional{name}" for name in ("", "/formats", "/tree", "/layout", "/comm", "/reshard")},
    "distributed": {"distributed"},
    "stateful/schedule": {"stateful/schedule"},
    "stateful/verify": {"stateful/schedule", "stateful/verify"},
    "stateful/timing": {"stateful/schedule", "stateful/timing"},
    "stateful/transport": {"stateful/transport"},
    "stateful/units": {"stateful/schedule", "stateful/transport", "stateful/units"},
    "stateful/runtime": {f"stateful/{name}" for name in ("schedule", "verify", "timing", "transport", "units", "runtime")},
    "stateful/modules/values": {"stateful/modules/values"},
    "stateful/modules/torch_tools": {"stateful/runtime", "stateful/modules/torch_tools"},
    "stateful/modules/parts": {f"stateful/{name}" for name in ("runtime", "modules/torch_tools", "modules/parts")},
    "stateful/modules": {
        f"stateful/{name}"
        for name in (
            "schedule",
            "units",
            "runtime",
            "modules",
            "modules/values",
            "modules/torch_tools",
            "modules/parts",
        )
    },
    "stateful/modules/optim": {
        f"stateful/{name}" for name in ("units", "runtime", "modules", "modules/torch_tools", "modules/parts", "modules/optim")
    },
    "inspect": {"stateful/schedule", "stateful/timing", "stateful/runtime", "inspect"},
    "planning": {
        *(f"stateful/{name}" for name in ("schedule", "timing", "transport", "units", "modules")),
        "inspect",
        "planning",
    },
    "interop": {"checkpoint", "checkpoint/formats", "interop"},
    "checkpoint": {".", "stateful/modules", "checkpoint", "checkpoint/formats"},
    "checkpoint/formats": {"checkpoint", "checkpoint/formats"},
    "report": {"stateful/schedule", "stateful/timing", "inspect", "report"},
    "resilience": {".", "stateful/modules", "checkpoint", "report", "resilience"},
    "testing": {f"stateful/{name}" for name in ("transport", "runtime", "modules")} | {"testing"},
    "huggingface": {f"stateful/modules{name}" for name in ("", "/optim", "/torch_tools")} | {"checkpoint", "huggingface"},
    "lightning": {f"stateful/modules{name}" for name in ("", "/optim")} | {"lightning"},
    "cli": {".", "checkpoint", "inspect", "interop", "planning", "report", "cli"},
}
"""Folders, and those that they may import from: in functions and under ``TYPE_CHECKING`` as well. ``"."`` is fsharp itself.

All may import ``BELOW``, and all but ``functional`` all of ``functional`` and ``distributed``.
"""

BELOW = {"errors", "tracebacks", "torch_compile", "type_checks"}
"""Files of ``fsharp/`` itself that are no lists of public names."""


def test_every_folder_is_known():
    assert {str(path.parent.relative_to(ROOT)) for path in SOURCES} - {".", "stateful"} == set(MAY_IMPORT)


def test_the_verifier_shares_data_with_the_compiler_and_no_algorithm():
    read = {
        name for path in (ROOT / "stateful" / "verify").glob("*.py") for name in IMPORT_OF_SCHEDULE.findall(path.read_text())
    }
    assert read == {"ops", "policy", "program", "schedule"}


IMPORT_OF_SCHEDULE = re.compile(r"^from fsharp\.stateful\.schedule\.(\w+) import", re.MULTILINE)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_downwards(folder):
    for path in set((ROOT / folder).glob("*.py")) - {ROOT / folder / "__init__.py"}:  # which may name folders above, for users
        files = [Path(*name.split(".")[1:]) for name in imports(path) if name.startswith("fsharp")]
        found = {str(each if (ROOT / each).is_dir() or len(each.parts) < 2 else each.parent) for each in files} - BELOW
        if not folder.startswith("functional"):
            found = {each for each in found if not each.startswith(("functional", "distributed"))}
        assert found <= MAY_IMPORT[folder], path


def test_no_folder_or_file_is_crowded():
    for folder in {path.parent for path in SOURCES}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 14, folder
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 500, path


def test_no_circle_of_files():
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in SOURCES}
    graph = {name: {each for each in imports(path) if each in files} for name, path in files.items()}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, f"a circle: {[*open_[open_.index(name) :], name]}"
        if name not in done:
            open_.append(name)
            for each in sorted(graph[name]):
                visit(each)
            done.add(open_.pop())

    for name in graph:
        visit(name)


def stored(tree):
    """Pairs of the object whose attribute code stores, and the name: of the attribute, or of the method of its `__dict__`."""

    def owner_of_dict(node):
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return node.value
        return node.args[0] if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args else None

    changes = (".update", ".setdefault", ".pop", ".clear")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.value, node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and (owner := owner_of_dict(node.value)):
            yield owner, ast.unparse(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            yield node.args[0], ast.unparse(node.args[1])
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(changes)
            and (owner := owner_of_dict(node.func.value))
        ):
            yield owner, node.func.attr


def is_own(owner):
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def test_state_has_owners():
    """Few places store to attributes of other objects: mostly idioms of torch, such as ``ctx.x = y`` and ``p.grad = g``."""
    code = """
a.b, self.c = 1, 2; d.e += 3; f[g.h] = 4; setattr(i, "j", 5); object.__setattr__(k, "l", 6); m.__dict__["n"] = 7
vars(o)["p"] = 8; q.__dict__.update(r=9); vars(s).pop("t"); u = v.__dict__["w"]
with x as y.z: pass
"""
    found = {ast.unparse(owner): name for owner, name in stored(ast.parse(code))}
    shown = {"i": "'j'", "k": "'l'", "m": "'n'", "o": "'p'", "q": "update", "s": "pop"}
    assert found == {"a": "b", "self": "c", "d": "e", "y": "z"} | shown
    foreign = [
        f"{path.relative_to(ROOT)}:{owner.lineno}: {ast.unparse(owner)}, {name}"
        for path in SOURCES
        for owner, name in stored(ast.parse(path.read_text()))
        if not is_own(owner)
    ]
    assert len(foreign) <= 60, "\n".join([str(len(foreign)), *foreign])


def test_classes_that_run_steps_have_few_attributes():
    large = {"Step", "Scheduler", "Run"}
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (node.name in large or path.parent == ROOT / "stateful" / "schedule"):
                found[node.name] = {name for owner, name in stored(node) if is_own(owner)}
    assert {*large, "GradientOps", "ParameterOps"} <= set(found)
    assert not {name: sorted(names) for name, names in found.items() if len(names) > 12}


def test_torch_cuda_is_in_the_files_of_cuda_graphs_and_of_nccl_memory():
    assert {path.name for path in SOURCES if "torch.cuda" in path.read_text()} == {"captured_step.py", "nccl.py"}


def test_torch_distributed_is_in_the_files_of_groups_and_of_the_job():
    sources = [*(ROOT / "functional").rglob("*.py"), *(ROOT / "distributed").rglob("*.py")]
    importing = {path.name for path in sources if any("torch.distributed" in name for name in imports(path))}
    assert importing == {"process_group.py", "job.py", "job_store.py"}
    assert {path.name for path in sources if "torch.distributed." in path.read_text()} - importing == {"max_reduce_group.py"}


def test_nothing_asks_for_a_strategy_by_name():
    names = re.compile(r"""(==|in)\s*\(?["'](ddp|zero[123]|hsdp|hfsdp)["']""")
    assert not [str(path) for path in SOURCES if names.search(path.read_text())]


def test_nothing_asks_for_a_kind_of_op_by_name():
    """It asks the record. Names that streams and events have as well are told apart by what they are compared with."""
    names = set(kinds_where())
    own = names - {*STREAMS, *get_args(EventKind), *get_args(Phase), *get_args(Cost), "sum"}  # a reduction, too
    assert own, "there are some that are found wherever they stand"
    for path in [
        path for name in ("stateful", "inspect", "planning", "testing", "report") for path in (ROOT / name).rglob("*.py")
    ]:
        nodes = [] if path.name == "ops.py" else list(ast.walk(ast.parse(path.read_text())))
        assert not [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in own], path
        for comparison in [node for node in nodes if isinstance(node, ast.Compare)]:
            inside = list(ast.walk(comparison))
            if any(isinstance(node, ast.Constant) and node.value in names for node in inside):
                owners = [ast.unparse(node.value) for node in inside if isinstance(node, ast.Attribute) and node.attr == "kind"]
                assert all("event" in owner for owner in owners), f"{path}:{comparison.lineno}"


def named_records(path):
    """The records of ops.py that a file names: imported by name, or as attributes, as ``ops.GATHER``."""
    records = {name for name, value in vars(ops).items() if isinstance(value, OpSpec)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == ops.__name__:
            yield from records & {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "ops":
            yield from records & {node.attr}


def test_few_files_name_kinds_of_ops():
    """The table; where ops are emitted, with a schedule and without; and how they are executed. All other code asks fields."""
    found = {path.name: sorted(names) for path in SOURCES if (names := set(named_records(path)))}
    assert found.keys() == {"executor.py", "eager_ops.py", "emit_parameters.py", "emit_gradients.py"}, "and ops.py"


SUBJECTS = [getattr(fs, name) for name in dir(fs) if inspect.ismodule(getattr(fs, name)) and name not in ("errors", "interop")]
PUBLIC = [(module, name) for module in (fs, *SUBJECTS) for name in vars(module) if not name.startswith("_")]
PUBLIC = [(module, name) for module, name in PUBLIC if not inspect.ismodule(getattr(module, name))]


def test_the_top_level_is_small():
    """Submodules do not have the names of variables that programs of the documents use."""
    names = set(dir(fs)) - {"__version__", "interop"}
    assert len(names) <= 60
    assert not names & {"comm", "functional", "layout", "schedule", "stateful"}
    assert {name for name in vars(fs) if not name.startswith("_")} - names <= {*fs._WITHIN, "interop"}


EVERYDAY = """
buffer call check checkpoint collective error event function gradient group handle leaf logger memory name op packing range
record result run span state step storage tensor transformation transport
"""
"""Nouns of class names that need no entry in a glossary: words of programmers, of torch, of training."""


GLOSSARY = (ROOT.parent / "docs" / "glossary.md").read_text()
ROW = re.compile(r"^\| ([a-z' ]+) \| (.*) \|$", re.MULTILINE)


def test_help_and_the_page_explain_a_word_alike():
    words = re.findall(r"^    (\w[\w ]*?)  +(.*)$", fs.__doc__, re.MULTILINE)
    public = ROW.findall(GLOSSARY.partition("## Words of the code")[0])
    assert public[1:] == [(word, re.sub(r":\w+:`~?([^`]+)`", r"`\1`", meaning).replace("``", "`")) for word, meaning in words]


def test_no_file_has_the_name_of_a_function_that_its_folder_exports():
    """``import fsharp.testing.simulate`` would name a module, and ``fsharp.testing.simulate`` the function."""
    for folder in {path.parent for path in SOURCES}:
        package = importlib.import_module(".".join(folder.relative_to(ROOT.parent).parts))
        files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
        assert not [name for name in files & set(vars(package)) if not inspect.ismodule(vars(package)[name])], folder


def test_words_of_three_classes_are_in_the_glossary():
    """The last word of a class's name says what an object of it is: as "engine" in ``Engine`` and ``ScheduledEngine``."""
    words = dict(ROW.findall(GLOSSARY))
    assert {"engine", "lane", "trial", "bucket", "state tree", "facts", "sink"} <= words.keys()
    classes = {name for path in SOURCES for name in re.findall(r"^class _?(\w+)", path.read_text(), re.MULTILINE)}
    last_words = [re.findall(r"[A-Z][a-z]*", name)[-1].lower() for name in classes if name[0].isupper()]
    nouns = Counter(re.sub(r"(?<![su])s$", "", word) for word in last_words)
    known = {*EVERYDAY.split(), *words, "fact"}
    unknown = [noun for noun, number in nouns.items() if number > 2 and noun not in known]
    assert not unknown


DEFINED = [each for each in PUBLIC if inspect.isclass(getattr(*each)) or inspect.isfunction(getattr(*each))]
"""Without members of an enum, and aliases, which are documented where they are defined."""


@pytest.mark.parametrize(("module", "name"), DEFINED, ids=[name for _, name in DEFINED])
def test_every_public_name_is_documented(module, name):
    thing = getattr(module, name)
    assert inspect.getdoc(thing), name
    assert not (thing.__doc__ or "").startswith(f"{name}("), "a dataclass's generated text is no documentation"
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(value) and not member.startswith("_") and value.__module__.startswith("fsharp"):
                assert value.__doc__, f"{name}.{member}"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in PUBLIC if inspect.isfunction(getattr(m, n))])
def test_functions_with_several_arguments_say_what_they_are(module, name):
    fn = getattr(module, name)
    named = [p for p in inspect.signature(fn).parameters if p not in ("t", "g")]
    if len(named) > 3:
        for parameter in named:
            assert re.search(rf"^\s+\*{{0,2}}{parameter}:", fn.__doc__, re.M), f"{name}({parameter})"


@pytest.mark.parametrize("name", ["checkpoint", "collectives", "formats", "init", "inspect", "optim", "resilience", "testing"])
def test_the_docstring_of_a_module_lists_its_public_names(name):
    """``help(fs.testing)`` shows only the docstring, as the names are defined elsewhere."""
    public = {each for module, each in PUBLIC if module is getattr(fs, name)}
    assert public <= set(re.findall(r"\w+", getattr(fs, name).__doc__))


DOCUMENTS = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_documents_name_what_there_is(path):
    """Public names, methods of a module, options of the classes that have many."""
    text = path.read_text()
    for first, second in set(re.findall(r"\bfs\.([A-Za-z_]\w*)(?:\.(\w+))?", text)):
        assert hasattr(fs, first), first
        assert not second or hasattr(getattr(fs, first), second), f"{first}.{second}"
    for name in set(re.findall(r"\bmodel\.([a-z_]\w*)\(", text)) - {"parameters", "named_parameters"}:
        assert hasattr(fs.ShardedModule, name), name
    for kind in ("SchedulePolicy", "Precision"):
        for call in re.findall(rf"\bfs\.{kind}\(([^()]*)\)", text):
            for option in re.findall(r"(\w+)=", call):
                assert option in inspect.signature(getattr(fs, kind)).parameters, f"{kind}({option})"


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_documents_name_files_that_there_are(path):
    """Files by their path in the package or the repository."""
    not_ours = {"train.py", "__init__.py", "zero_to_fp32.py", "tensor/float8_tensor.py"}
    for name in set(re.findall(r"`([\w/]+\.py)`", path.read_text())) - not_ours:
        assert (ROOT / name).exists() or (ROOT.parent / name).exists(), name


def test_the_import_takes_little_more_than_that_of_torch():
    """Torch modules that take long are imported where they are used: DTensor's alone take half as long as torch."""
    slow = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "sympy"}
    code = """
import gc, sys, torch
before, collections = set(sys.modules), gc.get_stats()[2]["collections"]
import fsharp
assert gc.isenabled() and gc.get_stats()[2]["collections"] == collections, "no collection looks at what torch has imported"
print(*sorted(set(sys.modules) - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    imported = set(ran.stdout.split())
    assert "fsharp.stateful.modules.torch_tools.dtensors" in imported
    assert not imported & slow


def test_the_library_runs_without_numpy(tmp_path):
    """Torch does not require numpy, and neither does ``pip install .``."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is no numpy')")
    code = f"""
import torch
import fsharp as fs

def main(comm):
    params, alone, two = {{"w": torch.ones(8, 8)}}, fs.SingleComm(), fs.Mesh({{"dp": 2}})
    tx, layout = fs.optim.adamw(1e-2), fs.plan(params, two, fs.zero3("dp"))
    state = fs.init_state(tx, fs.shard(params, fs.plan(params, alone.mesh, fs.zero3("dp")), alone), comm=alone)
    state = fs.reshard(None if comm.rank else state, layout, comm=comm)
    again = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
    for here in (state, again):
        assert fs.full_tree(here.params, comm=comm)["w"].sum() == 64
    fs.checkpoint.save({str(tmp_path / "saved")!r}, state, step=0, comm=comm)
    fs.checkpoint.load({str(tmp_path / "saved")!r}, again, comm=comm)
    module = fs.shard_module(torch.nn.Linear(2, 2), mesh=comm, strategy=fs.zero3("dp"), sync_from=0)
    module.load_full_state_dict(module.full_state_dict())

fs.testing.simulate(fs.Mesh({{"dp": 2}}), main)
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT.parent}"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
