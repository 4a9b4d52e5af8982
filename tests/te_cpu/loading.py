"""Import TransformerEngine's Python with the device word "cuda" read as "cpu", and with a stand-in for its compiled module."""

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from . import (  # noqa: F401  (most of these files register what is modelled)
    activations,
    cuda,
    enums,
    gemm,
    machine,
    main_copies,
    norms,
    optimizers,
    quantization,
    registry,
    softmax,
    storage,
    triton,
)

IMPORT_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # does not open cuDNN, NVRTC, cuRAND and libtransformer_engine.so
    "NVTE_RELEASE_BUILD": "0",
    "NVTE_TORCH_COMPILE": "0",  # elementwise functions run as they are, without Inductor
}

REWRITTEN = str(Path(__file__).parents[2] / "build" / f"te_cpu-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}")


def is_needed():
    """Return whether there is no GPU, or no compiled module for one beside TransformerEngine's Python."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None or not torch.cuda.is_available():
        return True
    package = Path(spec.origin).parent
    folders = package.parent, package, package / "wheel_lib"  # where TransformerEngine itself looks
    return not any(file for folder in folders for file in folder.glob("transformer_engine_torch*.so"))


def load(capability=None):
    """Import TransformerEngine on a machine without a GPU.

    Nothing outside of ``transformer_engine`` changes: ``torch.cuda.is_available()`` stays False, and environment variables,
    warning filters and torch's settings are afterwards what they were before.

    Args:
        capability: the compute capability that TransformerEngine sees from now on, (9, 0) or (10, 0); None keeps the last one,
            which is (9, 0) at first. :func:`architecture` changes it for a ``with`` block.

    Returns:
        The module ``transformer_engine.pytorch``.

    Raises:
        RuntimeError: TransformerEngine is not installed, or has been imported in another way.
    """
    if capability is not None:
        cuda.set_architecture(capability)
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        if sys.modules.get("transformer_engine", sys) is None:  # hidden from PEFT
            del sys.modules["transformer_engine"]
        if imported := sorted(name for name in sys.modules if name.split(".")[0].startswith("transformer_engine")):
            raise RuntimeError(f"te_cpu.load() comes after {imported[0]} was imported. Call load() first, in a new process.")
        if importlib.util.find_spec("transformer_engine") is None:
            raise RuntimeError("te_cpu needs TransformerEngine's Python: pip install -c constraints.txt transformer_engine")
        _import()
    return sys.modules["transformer_engine.pytorch"]


def _import():
    finder = Finder()
    sys.meta_path.insert(0, finder)
    registry.install()
    if importlib.util.find_spec("onnxscript") is None:  # of TransformerEngine's modules, the ONNX export alone needs it
        sys.modules[Absent.name] = Absent()
    try:
        with _environment(), warnings.catch_warnings(), _dynamo_settings():
            importlib.import_module("transformer_engine.pytorch")
    except BaseException:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0].startswith("transformer_engine")]:
            del sys.modules[name]
        raise


@contextlib.contextmanager
def _environment():
    before = {name: os.environ.get(name) for name in IMPORT_ENVIRONMENT}
    os.environ.update(IMPORT_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _dynamo_settings():
    """Return a context that puts back the one setting of torch.compile that TransformerEngine changes."""
    from torch._dynamo import config

    return config.patch(error_on_nested_jit_trace=config.error_on_nested_jit_trace)


class Absent(ModuleType):
    """The module of the ONNX export, whose names may be imported and not called."""

    name = "transformer_engine.pytorch.onnx_extensions"

    def __init__(self):
        super().__init__(self.name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return registry.NotModelled(f"{self.name}.{name}, as onnxscript is not installed")


class Finder(importlib.abc.MetaPathFinder):
    """Finds TransformerEngine's modules, and has their source rewritten; is asked for any other module and says no."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] != "transformer_engine":
            return None
        if fullname == "transformer_engine.jax":  # would import JAX into each process
            raise ModuleNotFoundError("te_cpu loads TransformerEngine for torch alone", name=fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one TransformerEngine module, rewritten. The bytecode is in a folder for this version of the rules."""

    def get_code(self, fullname):
        before, sys.pycache_prefix = sys.pycache_prefix, REWRITTEN
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix = before

    def source_to_code(self, data, path):
        return compile(DeviceWords().visit(ast.parse(data, path)), path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__["__torch_cuda__"] = cuda
        super().exec_module(module)
        if module.__name__ == "transformer_engine.common":
            module.load_framework_extension = lambda framework: None


class DeviceWords(ast.NodeTransformer):
    """Seven rules, which touch words for the device and imports of Triton, and no arithmetic.

    =============================================  ==========================================
    ``torch.cuda.x``, ``from torch.cuda import x``  the stand-in's ``x``
    ``torch.version.cuda``                          ``"13.0"``
    ``"cuda"``                                      ``"cpu"``
    ``tensor.is_cuda``                              ``tensor.is_cpu``
    ``tensor.cuda()``                               ``tensor.cpu()``
    ``torch.device("cuda", index)``                 ``torch.device("cpu")``
    ``import triton``, ``from triton import x``     the stand-in for Triton
    =============================================  ==========================================
    """

    def visit_FunctionDef(self, node):
        return node if node.name == "is_cuda" else self.generic_visit(node)  # quantized tensors answer it themselves

    def visit_Attribute(self, node):
        self.generic_visit(node)
        owner = node.value
        if node.attr == "cuda" and isinstance(owner, ast.Name) and owner.id == "torch":
            return ast.copy_location(ast.Name("__torch_cuda__", ast.Load()), node)
        if node.attr == "cuda" and isinstance(owner, ast.Attribute) and owner.attr == "version":
            return ast.copy_location(ast.Constant("13.0"), node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda" and not node.args:
                node.func.attr = "cpu"
            if node.func.attr == "device" and len(node.args) == 2:
                node.args = node.args[:1]
        return node

    def visit_Constant(self, node):
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] == "triton":
                alias.asname, alias.name = alias.asname or "triton", triton.__name__
        return node

    def visit_ImportFrom(self, node):
        if node.level == 0 and (node.module or "").split(".")[0] == "triton":
            node.module = triton.__name__
        if node.level == 0 and node.module == "torch.cuda":
            node.module = cuda.__name__
        return node
