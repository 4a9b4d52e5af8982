"""Models by name: the shapes of their parameters, as tensors on the meta device. No value is loaded or allocated."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import optree
import torch

from fsharp.errors import FsharpError, OptionError, problem
from fsharp.functional.make_functional import make_functional

_MAX_REASON = 400
"""Characters of an error of a model's code that are shown. An error of transformers may list hundreds of architectures."""
Shapes = dict[str, Any]
"""A tree of shapes: dicts and lists of tuples of integers."""


def _attention_shapes(dim: int, heads: int, kv_heads: int) -> Shapes:
    head = dim // heads
    return {"q": (heads * head, dim), "k": (kv_heads * head, dim), "v": (kv_heads * head, dim), "out": (dim, heads * head)}


def _swiglu_shapes(dim: int, hidden: int, *experts: int) -> Shapes:
    return {"gate": (*experts, hidden, dim), "up": (*experts, hidden, dim), "down": (*experts, dim, hidden)}


def _decoder_shapes(dim: int, vocab: int, layers: list[Shapes]) -> Shapes:
    blocks = [{"norm1": (dim,), **layer, "norm2": (dim,)} for layer in layers]
    return {"embed": (vocab, dim), "layers": blocks, "norm": (dim,), "head": (vocab, dim)}


def _gpt2_shapes(dim: int, layers: int) -> Shapes:
    def affine(*shape: int) -> Shapes:
        return {"w": shape, "b": shape[:1]}

    mlp = {"up": affine(4 * dim, dim), "down": affine(dim, 4 * dim)}
    block = {"norm1": affine(dim), "qkv": affine(3 * dim, dim), "out": affine(dim, dim), "norm2": affine(dim), "mlp": mlp}
    return {"embed": {"tokens": (50257, dim), "positions": (1024, dim)}, "layers": [block] * layers, "norm": affine(dim)}


def _llama3_shapes(dim: int, layers: int, heads: int, hidden: int) -> Shapes:
    return _decoder_shapes(dim, 128256, [_attention_shapes(dim, heads, 8) | {"mlp": _swiglu_shapes(dim, hidden)}] * layers)


def _mixtral_shapes() -> Shapes:
    block = _attention_shapes(4096, 32, 8) | {"router": (8, 4096), "experts": _swiglu_shapes(4096, 14336, 8)}
    return _decoder_shapes(4096, 32000, [block] * 32)


def _deepseek_v3_shapes() -> Shapes:
    dim, heads = 7168, 128
    queries = {"q_down": (1536, dim), "q_norm": (1536,), "q_up": (heads * 192, 1536)}
    keys = {"kv_down": (512 + 64, dim), "kv_norm": (512,), "kv_up": (heads * 256, 512)}
    attention = queries | keys | {"out": (dim, heads * 128)}
    dense = attention | {"mlp": _swiglu_shapes(dim, 18432)}
    experts = {"router": (256, dim), "shared": _swiglu_shapes(dim, 2048), "experts": _swiglu_shapes(dim, 2048, 256)}
    return _decoder_shapes(dim, 129280, [dense] * 3 + [attention | experts] * 58)


ARCHITECTURES: Mapping[str, Callable[[], Shapes]] = {
    "gpt-2": partial(_gpt2_shapes, 768, 12),
    "gpt-2-xl": partial(_gpt2_shapes, 1600, 48),
    "llama-3-8b": partial(_llama3_shapes, 4096, 32, 32, 14336),
    "llama-3-70b": partial(_llama3_shapes, 8192, 80, 64, 28672),
    "llama-3-405b": partial(_llama3_shapes, 16384, 126, 128, 53248),
    "mixtral-8x7b": _mixtral_shapes,
    "deepseek-v3": _deepseek_v3_shapes,
}
"""Shapes of published models, by name. Sources: the configurations published with the weights; arXiv 2412.19437 for
DeepSeek-V3, without its multi-token prediction and its routing biases."""
_EXPERTS = {"mixtral-8x7b": (2, 8), "deepseek-v3": (8, 256)}
"""By architecture, the number of experts of a layer that one token uses, and the number of all experts of a layer."""


class FoundModel(NamedTuple):
    """A model of the command line.

    Attributes:
        tree: the parameters, as a tree of tensors: on the meta device, unless an imported module holds them elsewhere.
        frozen: paths of frozen parameters.
        used_and_total_experts: how many experts of a layer one token uses, and how many the layer has; None if unknown.
    """

    tree: Any
    frozen: tuple[str, ...] = ()
    used_and_total_experts: tuple[int, int] | None = None


def find_model(where: str, model: str) -> FoundModel:
    """Find a model, and return its parameters without loading their values.

    Args:
        where: name of the command, for the message of an error.
        model: a name in :data:`ARCHITECTURES`; a configuration of Hugging Face, as a folder with a ``config.json`` or as the
            file; or ``module:path`` of a tree of tensors, of an ``nn.Module``, or of a function without arguments that returns
            one of these. The module is imported, also from the working directory, and the function is called.

    Raises:
        OptionError: the model is unknown, has no parameters, or cannot be made; the message has the reason.
    """
    if model in ARCHITECTURES:
        shapes: Any = ARCHITECTURES[model]()
        tree = optree.tree_map(partial(torch.empty, device="meta"), shapes, is_leaf=lambda x: isinstance(x, tuple))
        return FoundModel(tree, used_and_total_experts=_EXPERTS.get(model))
    try:
        found = _load_config_or_import_model(where, model)
        leaves = list(found.parameters()) if isinstance(found, torch.nn.Module) else optree.tree_leaves(found)
        has_parameters = any(isinstance(leaf, torch.Tensor) and leaf.numel() for leaf in leaves)
    except FsharpError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code, or of transformers
        reason = shorten(f"{type(error).__name__}: {error}", _MAX_REASON, placeholder=" ...")
        raise OptionError(f"{where}: {model!r} cannot be made: {reason}") from error
    if not has_parameters:
        raise OptionError(f"{where}: {model!r} has no parameters.")
    if not isinstance(found, torch.nn.Module):
        return FoundModel(found)
    frozen = tuple([name for name, parameter in found.named_parameters() if not parameter.requires_grad])
    return FoundModel(make_functional(found)[1], frozen, _used_and_total_experts(getattr(found, "config", None)))


def _used_and_total_experts(config: Any) -> tuple[int, int] | None:
    """Return how many experts of a layer a token uses, and how many the layer has, by Hugging Face's ``config``; else None."""
    used = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((number for name in names if (number := getattr(config, name, None))), None)
    return (used, total) if used and total else None


def _load_config_or_import_model(where: str, model: str) -> Any:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise OptionError(f"{where}: the folder {model!r} has no config.json.")
    if path.is_file():
        return _model_of_config(where, path, json.loads(path.read_text()))
    module, colon, name = model.partition(":")
    if not colon:
        known = ", ".join(ARCHITECTURES)
        what = f"there is no model {model!r}."
        raise OptionError(problem(where, what, remedy=f"Pass one of {known}; the path of a config.json; or module:path."))
    if module.endswith(".py"):
        name_of_module = ".".join(Path(module).with_suffix("").parts)
        raise OptionError(f"{where}: {model!r} has the file of a module, expected its name: {name_of_module}:{name}.")
    sys.path.insert(0, "")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{where}: module {module!r} has no {name!r}.")
        found = getattr(found, part)
    with torch.device("meta"):
        return found if isinstance(found, torch.nn.Module) or not callable(found) else found()


def _model_of_config(where: str, path: Path, config: Any) -> Any:
    import transformers

    if not isinstance(config, dict) or "model_type" not in config:
        what = 'has no model_type, which names the architecture, such as "llama"'
        raise OptionError(f"{where}: {path} {what}. Pass a config.json that transformers has written.")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(name := architectures[0], str):
        raise OptionError(f"{where}: {path} has architectures {architectures!r}, expected a list of names of classes.")
    kind = getattr(transformers, name, None)
    if name and kind is None:
        raise OptionError(f"{where}: transformers has no architecture {name!r}.")
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return kind(made) if kind else transformers.AutoModelForCausalLM.from_config(made)


def parse_dtype(option: str, name: str) -> torch.dtype:
    """Return the floating-point dtype called ``name``. Raises OptionError, which names ``option``, for other names."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(f"{option} is {name!r}, expected the name of a floating-point dtype, such as bfloat16.")
    return found
