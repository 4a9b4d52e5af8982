"""Convert modules of Equinox and Flax to functions of tensors, pytrees of arrays to trees of tensors, and stacks to layers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import torch
from jax.tree_util import GetAttrKey

from fsharp.errors import TreeError
from fsharp.functional.tree.paths import nested_dicts
from fsharp.interop.arrays import as_jax_array, as_torch_tensor, check_not_forked_after_jax
from fsharp.interop.call import as_torch
from fsharp.tracebacks import api_boundary

ParameterName = tuple[Any, ...]  # fields, keys and indices


@api_boundary
def make_functional(model: Any, variables: Any = None) -> tuple[Callable[..., Any], Any]:
    """Return a module of Equinox or Flax as a pure function of tensors, and its parameters as a tree of tensors.

    Args:
        model: a module that can be called.
        variables: for a module of Flax Linen, the result of ``model.init()``: its collections by name.

    Returns:
        ``(fn, params)``. ``fn(params, *args, **keywords)`` calls the module as :func:`~fsharp.interop.jax.as_torch` calls
        functions, with gradients for ``params`` and tensors in ``args``. ``params`` are the parameters with the names of
        :func:`to_tensors`: for NNX the variables of type ``Param``, for Linen all collections, ``{"params": ...,
        "batch_stats": ...}``. :func:`to_arrays` turns ``params`` into arrays again. Integers in collections of Linen keep their
        values in ``variables``, unless ``params`` has tensors for them, as a call with ``mutable=`` returns them.

        Keywords of a Linen module are those of ``model.apply``. ``mutable=["batch_stats"]`` makes ``fn`` return ``(out,
        {"batch_stats": ...})``. In ``rngs={"dropout": seed}`` a seed is an integer tensor of one element, from which
        ``jax.random.key`` makes the key. A new seed needs no compilation.

    Raises:
        TreeError: ``model`` is no such module, or a module of Linen without ``variables``.
        TreeError: when called: a module of NNX changes its variables, which would be lost.
    """
    if _is_from_package(model, "flax.linen"):
        return _make_linen_functional(model, variables)
    if variables is not None:
        raise TreeError(f"make_functional(): variables are for Flax Linen, and a {type(model).__name__} holds its own.")
    if not callable(model) or jax.tree_util.all_leaves([model]):
        raise TreeError(f"make_functional(): got {model!r:.80}, expected a module of Equinox or Flax that can be called.")
    if not _is_from_package(model, "flax.nnx"):
        return as_torch(lambda tree, *args, **keywords: to_arrays(tree, model)(*args, **keywords)), to_tensors(model)
    from flax import nnx

    graph, variables, others = nnx.split(nnx.clone(model), nnx.Param, ...)  # the caller may change the model later

    def call(tree: Any, *args: Any, **keywords: Any) -> Any:
        module = nnx.merge(graph, to_arrays(tree, variables), others, copy=True)
        before = _leaves_by_keypath(nnx.state(module))
        out = module(*args, **keywords)
        after = _leaves_by_keypath(nnx.state(module))  # collections that the call has added, such as intermediates, are dropped
        for name, leaf in before.items():
            if after.get(name) is not leaf:
                raise TreeError(
                    f"make_functional(): the module changes its variable {_name_text(name)!r}, whose new value would be lost. "
                    "Put it into evaluation: model.eval(), or use_running_average=True and deterministic=True."
                )
        return out

    return as_torch(call), to_tensors(variables)


def _is_from_package(model: Any, package: str) -> bool:
    return any(kind.__module__.startswith(package) for kind in type(model).__mro__)


def _make_linen_functional(model: Any, variables: Any) -> tuple[Callable[..., Any], Any]:
    if variables is None:
        raise TreeError(
            f"make_functional(): a module of Flax Linen such as {type(model).__name__} does not have its variables: pass the "
            "result of init(), make_functional(model, model.init(key, x))."
        )

    def call(tree: Any, *args: Any, rngs: Any = None, **keywords: Any) -> Any:
        keys = {name: jax.random.key(seed) for name, seed in rngs.items()} if rngs else None
        return model.apply(to_arrays(tree, variables), *args, rngs=keys, **keywords)

    return as_torch(call), to_tensors(variables)


@api_boundary
def to_tensors(tree: Any) -> Any:
    """Return the parameters of a JAX pytree as nested dicts of torch tensors, which can be planned and sharded.

    ``tree`` is any JAX pytree, such as an Equinox module, an NNX state, or a restored checkpoint with NumPy arrays. The keys of
    the dicts are names of fields, keys and indices. A box around one value (an NNX ``Variable``) becomes its value. A tree that
    is one array becomes one tensor. Parameters are the arrays of floating dtype; other leaves, such as integers and random
    keys, are left out.

    Raises:
        TreeError: no array is floating-point, or torch or JAX would change a dtype.

    Cost: a copy of each parameter.
    """
    check_not_forked_after_jax("to_tensors()")
    arrays = {name: leaf for name, leaf in _leaves_by_keypath(tree).items() if _is_parameter(leaf)}
    if not arrays:
        raise TreeError(f"to_tensors(): a {type(tree).__name__} without arrays of floating dtype.")
    tensors = {name: _copy_as_tensor(name, leaf) for name, leaf in arrays.items()}
    return tensors[()] if () in tensors else nested_dicts(tensors)


@api_boundary
def to_arrays(tree: Any, like: Any) -> Any:
    """Return a JAX pytree with the parameters of a tree: the inverse of :func:`to_tensors`.

    Args:
        tree: a tree of :func:`to_tensors`, for example the result of :func:`fsharp.full_tree` after training. The tree may also
            have tensors for other arrays in ``like``, such as counters. Without tensors these arrays keep the values in
            ``like``.
        like: a JAX pytree with the structure of the argument of ``to_tensors``; for NNX the state, for ``nnx.update(model,
            to_arrays(params, like=nnx.state(model, nnx.Param)))``.

    Returns:
        A pytree like ``like``, with copies of the tensors in the dtypes of ``like``.

    Raises:
        TreeError: a parameter is missing, has another shape, or is not in ``like``.
    """
    left, leaves = _leaves_by_keypath(tree), _leaves_by_keypath(like)
    for name, leaf in leaves.items():
        if not (_is_parameter(leaf) or (name in left and _is_array_of_numbers(leaf))):
            continue
        new = left.pop(name, None)
        if new is None or np.shape(new) != leaf.shape:
            found = "is missing" if new is None else f"has shape {tuple(np.shape(new))}"
            raise TreeError(
                f"to_arrays(): {_name_text(name)!r} {found}, expected {leaf.shape}. Pass whole leaves with the names of "
                "to_tensors(), as fs.full_tree() returns them."
            )
        array = new if isinstance(new, jax.Array) else jnp.array(as_jax_array(new) if isinstance(new, torch.Tensor) else new)
        leaves[name] = array.astype(leaf.dtype)
    if left:
        raise TreeError(f"to_arrays(): {_name_text(next(iter(left)))!r} is not in the {type(like).__name__}.")
    return jax.tree.unflatten(jax.tree.structure(like), leaves.values())


@api_boundary
def unstack(stacked: Any, *, dim: int = 0) -> list[Any]:
    """Return a list of layers, each a tree of one slice of every leaf of ``stacked``: the inverse of :func:`stack`.

    ::

        params = {"layers": unstack(to_tensors(stacked))}
        layout = fs.plan(params, mesh, fs.zero3("dp"), units="layers.*")  # each slice is gathered and released by itself

    Args:
        stacked: a pytree of tensors. Each leaf holds all layers.
        dim: the dim of each leaf that counts the layers, from 0.

    Raises:
        TreeError: the tree has no leaves, a leaf is no tensor with ``dim``, or leaves have different numbers of layers.

    Cost: none. The slices are views of the leaves.
    """
    leaves, structure = optree.tree_flatten(stacked)
    shapes = [list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves]
    counts = {tuple(shape[dim:][:1]) for shape in shapes if isinstance(shape, list)}
    if len(counts) != 1 or () in counts or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise TreeError(f"unstack(dim={dim}): expected tensors of equally many layers along this dim, got {shapes[:8]}.")
    return [optree.tree_unflatten(structure, layer) for layer in zip(*(leaf.unbind(dim) for leaf in leaves), strict=True)]


@api_boundary
def stack(layers: Sequence[Any], *, dim: int = 0) -> Any:
    """Return a tree whose leaves hold all layers along ``dim``, as ``lax.scan`` takes them: the inverse of :func:`unstack`.

    Args:
        layers: a sequence of pytrees of tensors, with one structure, and one shape and dtype for each leaf.
        dim: the new dim that counts the layers.

    Raises:
        TreeError: there are no layers, or the layers differ in structure, or in the shape or dtype of a leaf.

    Cost: a copy of the layers. The gradient of the result is unstacked.
    """
    kinds = [optree.tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype), layer) for layer in layers]
    if not kinds:
        raise TreeError("stack(): expected at least one layer, got none.")
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise TreeError(f"stack(): layer {i} is {kind}, expected the shapes and dtypes of layer 0, {kinds[0]}.")
    return optree.tree_map(lambda *slices: torch.stack(slices, dim), *layers)


def _leaves_by_keypath(tree: Any) -> dict[ParameterName, Any]:
    found, rows = {}, jax.tree_util.tree_flatten_with_path(tree)[0]
    num_leaves = Counter(path[:i] for path, _ in rows for i in range(len(path)))
    for path, leaf in rows:
        is_boxed = path[-1:] == (GetAttrKey("value"),) and num_leaves[path[:-1]] == 1
        keys = path[:-1] if is_boxed else path
        # A class that is registered with keys may have keys of any type.
        name = tuple(
            next((getattr(key, field) for field in ("name", "key", "idx") if hasattr(key, field)), key) for key in keys
        )
        found[name] = leaf
    return found


def _copy_as_tensor(name: ParameterName, leaf: Any) -> torch.Tensor:
    what = f"to_tensors(): {_name_text(name)!r} is {leaf.dtype}"
    if not isinstance(getattr(torch, leaf.dtype.name, None), torch.dtype):
        raise TreeError(f"{what}, which torch does not have. Pass another dtype.")
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise TreeError(f"{what}, which JAX would narrow. Pass float32, or call jax.config.update('jax_enable_x64', True).")
    return as_torch_tensor(jnp.array(leaf, copy=True))


def _is_parameter(leaf: Any) -> bool:
    return _is_array_of_numbers(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_array_of_numbers(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _name_text(name: ParameterName) -> str:
    return ".".join(map(str, name))
