"""Outlines: trees as bytes, with structure, units and unsharded leaves, but without buffers, for ranks that join.

Nothing is pickled: a rank that reads an outline makes known containers, and namedtuples of modules that it has imported itself.
"""

import collections
import dataclasses
import json
from typing import Any

import optree
import torch

from fsharp.errors import LayoutError, TreeError
from fsharp.functional.formats.format import as_bytes, dtype_name
from fsharp.functional.formats.host_memory import bytes_of
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.placement import MeshPlacement, Placement
from fsharp.functional.layout.serial import class_in_loaded_module, dtype_named, name_of_class, unit_from_json, unit_to_json
from fsharp.functional.layout.sharded import STATIC_CLASSES, Sharded, is_sharded
from fsharp.functional.layout.unit_layout import UnitLayout

_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": collections.OrderedDict}
_LISTS: dict[str, type] = {"list": list, "tuple": tuple}


def outline_to_bytes(tree: Any) -> bytes:
    """Return the outline of a tree as bytes, to send to ranks that have no tree.

    An outline has the structure of the tree, its Sharded nodes without the elements of their buffers, and all other leaves. The
    bytes are the length of a JSON text, the text, and the elements of tensors outside of Sharded. Raises TreeError, with path
    and type, for a container or leaf that :func:`outline_from_bytes` cannot make again.
    """
    units: dict[UnitLayout, int] = {}
    tensors: list[torch.Tensor] = []

    def encoded(node: Any, path: tuple[str, ...]) -> Any:
        kind = type(node)
        if node is None or kind in (bool, int, float, str):
            return {"value": node}
        if is_sharded(node):
            return {"unit": units.setdefault(node.unit, len(units)), **_node_without_unit_to_json(node)}
        if isinstance(node, torch.Tensor):
            tensors.append(node)
            return {"tensor": [dtype_name(node.dtype), list(node.shape)]}
        if kind in STATIC_CLASSES:
            values = [getattr(node, field.name) for field in dataclasses.fields(node)]
            return {"static": name_of_class(kind), "fields": [encoded(value, (*path, "fields")) for value in values]}
        if kind in _DICTS.values():
            if strange := [key for key in node if type(key) not in (str, int)]:
                raise TreeError(f"reshard(): {_path_text(path)} has the key {strange[0]!r:.80}, expected strings and integers.")
            parts = [[key, encoded(value, (*path, str(key)))] for key, value in node.items()]
            return {"kind": kind.__name__, "items": parts}
        if kind in _LISTS.values() or optree.is_namedtuple_class(kind):
            name = {"kind": kind.__name__} if kind in _LISTS.values() else {"namedtuple": name_of_class(kind)}
            return {**name, "parts": [encoded(value, (*path, str(i))) for i, value in enumerate(node)]}
        raise TreeError(
            f"reshard(): {_path_text(path)} cannot be sent to ranks that join: {kind.__module__}.{kind.__qualname__}, expected "
            "Sharded, tensors, numbers and strings in dict, OrderedDict, list, tuple or namedtuple."
        )

    body = encoded(tree, ())
    text = json.dumps({"tree": body, "units": [[unit.mesh.axes, unit_to_json(unit)] for unit in units]}).encode()
    elements = [as_bytes(x.detach().cpu()) for x in tensors]
    return b"".join([len(text).to_bytes(8, "little"), text, *map(bytes_of, elements)])


def outline_from_bytes(data: bytes, device: torch.device) -> Any:
    """Return the tree that :func:`outline_to_bytes` wrote. Its sharded buffers are on the meta device, without data.

    Its other tensors are on ``device``, with their values.

    Raises TreeError if the bytes are damaged, or name a class whose module this process has not imported.
    """
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        text = json.loads(data[8:end])
        units = [unit_from_json(unit, Mesh([(name, size) for name, size in axes])) for axes, unit in text["units"]]
        elements = memoryview(data)[end:]

        def decode_node(node: dict[str, Any]) -> Any:
            nonlocal elements
            if "value" in node:
                return node["value"]
            if "unit" in node:
                return _node_from_json(node, units[node["unit"]])
            if "tensor" in node:
                name, shape = node["tensor"]
                like = torch.empty(shape, dtype=dtype_named(name), device="meta")
                size = like.numel() * like.element_size()
                part, elements = elements[:size], elements[size:]
                whole = torch.frombuffer(bytearray(part), dtype=like.dtype) if size else torch.empty(0, dtype=like.dtype)
                return whole.view(shape).to(device)
            if "static" in node:
                found = class_in_loaded_module(node["static"])
                if found not in STATIC_CLASSES:
                    raise TypeError(f"{node['static']} is not registered as a pytree node without leaves")
                return found(*map(decode_node, node["fields"]))
            if "namedtuple" in node:
                return class_in_loaded_module(node["namedtuple"], optree.is_namedtuple_class)(*map(decode_node, node["parts"]))
            if "items" in node:
                return _DICTS[node["kind"]]((key, decode_node(value)) for key, value in node["items"])
            return _LISTS[node["kind"]](map(decode_node, node["parts"]))

        return decode_node(text["tree"])
    except (LayoutError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise TreeError(f"reshard(): the tree for ranks that join cannot be read: {error}") from error


def on_meta(node: Sharded) -> Sharded:
    """Return a node like ``node`` whose buffers are on the meta device."""
    meta = [torch.empty_like(b, device="meta") if isinstance(b, torch.Tensor) else b for b in node.buffers]
    return Sharded(meta, node.unit, node.place, node.groups, reduction=node.reduction)


def _node_without_unit_to_json(node: Sharded) -> dict[str, Any]:
    shapes = [[dtype_name(b.dtype), list(b.shape)] if isinstance(b, torch.Tensor) else None for b in node.raw_buffers]
    place = [node.place.axis_order, [placement.value for placement in node.place.placements]]
    return {"place": place, "groups": node.groups, "reduction": node.reduction, "buffers": shapes}


def _node_from_json(data: dict[str, Any], unit: UnitLayout) -> Sharded:
    order, placements = data["place"]
    place = MeshPlacement(tuple(order), tuple(map(Placement, placements)))
    buffers = [each and torch.empty(each[1], dtype=dtype_named(each[0]), device="meta") for each in data["buffers"]]
    return Sharded(buffers, unit, place, tuple(data["groups"]), reduction=data["reduction"])


def _path_text(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "the tree"
