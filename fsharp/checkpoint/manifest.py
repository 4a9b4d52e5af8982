"""Manifest: the contents of a checkpoint, with the file and bytes of each tensor. JSON, written last."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash

from fsharp.checkpoint.entries import Value
from fsharp.checkpoint.formats.planes import EncodedLeaf, encoded_leaf_from_json
from fsharp.checkpoint.shard_file import SAVABLE_DTYPES, parse_untrusted_json, refuse_repeated_names
from fsharp.errors import CheckpointError
from fsharp.functional.formats.format import dtype_name

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "fsharp checkpoint"
MANIFEST_FIRST_BYTES = json.dumps({"format": MANIFEST_FORMAT}, separators=(",", ":"))[:-1].encode()
"""The bytes that every manifest begins with."""
MANIFEST_VERSION = 1
_MAX_DIMS = 64
_DTYPE_BY_NAME = {dtype_name(dtype): dtype for dtype in SAVABLE_DTYPES}
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class Chunk(NamedTuple):
    """The elements ``[first, last)`` of a flattened tensor, which are in file number ``file`` of the checkpoint."""

    file: int
    first: int
    last: int


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor, and its chunks in order: each chunk ends where the next one begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


class FileRecord(NamedTuple):
    """A file of the checkpoint. ``digest``: XXH3-128, in hex, of header and digest table; None for another library's file."""

    name: str
    nbytes: int
    digest: str | None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        save_id: id of the save; equal in all files of the checkpoint.
        step: number of the step that was saved.
        created: time of the save in seconds since 1970, later than the times of all earlier saves under the root.
        mesh: axes of the mesh that saved the checkpoint, with their sizes.
        versions: versions of the packages that wrote the checkpoint.
        config: the config that the caller gave, as JSON reads it back; None without one.
        metric: score of the checkpoint, lower is better; None if none was given.
        files: the files, in order of the ranks that wrote them.
        aliases: by name of a tied leaf, the name of the leaf that stores its value.
        values: numbers, strings and booleans by name.
        objects: by name, the result of :func:`structure_of` for each list, tuple, dict or None in the saved tree that
            :func:`~fsharp.checkpoint.to_dcp` writes as one object.
        encoded: by name, the encoded leaves, of which ``tensors`` has planes and scales.
        is_by_saver: whether a :class:`~fsharp.checkpoint.Saver` wrote the checkpoint. A Saver removes only such checkpoints.
    """

    save_id: str
    step: int
    created: float
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    config: Any
    metric: float | None
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]
    values: Mapping[str, Value]
    objects: Mapping[str, Any] = field(default_factory=dict)
    encoded: Mapping[str, EncodedLeaf] = field(default_factory=dict)
    is_by_saver: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest itself."""
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> bytes:
        """Return the bytes of the manifest's file."""
        body = {
            "format": MANIFEST_FORMAT,
            "version": MANIFEST_VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "created": self.created,
            "mesh": dict(self.mesh),
            "versions": dict(self.versions),
            "config": self.config,
            "metric": None if self.metric is None else _value_to_json(self.metric),
            "files": [{"name": f.name, "nbytes": f.nbytes, "xxh3_128": f.digest} for f in self.files],
            "tensors": {
                name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "chunks": [list(chunk) for chunk in t.chunks]}
                for name, t in self.tensors.items()
            },
            "aliases": dict(self.aliases),
            "values": {name: _value_to_json(value) for name, value in self.values.items()},
        }
        body |= {"objects": dict(self.objects)} if self.objects else {}
        body |= {"encoded": dict(self.encoded)} if self.encoded else {}
        body |= {"is_by_saver": True} if self.is_by_saver else {}
        return json.dumps({**body, "xxh3_128": _body_digest(body)}, separators=(",", ":")).encode()

    @staticmethod
    def from_json(where: str, data: bytes) -> "Manifest":
        """Return the manifest in ``data``, the bytes of a file. Raises CheckpointError for damage or another version.

        ``where``: path of the file, for the error.
        """
        try:
            body = parse_untrusted_json(data)
            if not isinstance(body, dict) or body.get("format") != MANIFEST_FORMAT:
                raise CheckpointError(f"{where}: this is not the manifest of a checkpoint of fsharp.")
            if body.get("version") != MANIFEST_VERSION:
                raise CheckpointError(
                    f"{where}: version {body.get('version')!r:.40}, expected {MANIFEST_VERSION}. Update fsharp."
                )
            if body.pop("xxh3_128", None) != _body_digest(body):
                raise CheckpointError(f"{where}: the manifest is damaged: its digest is not that of its text.")
            made = _manifest_from_body(body)
            for name, structure in made.objects.items():
                rebuild_from_structure(name, structure, made.values.__getitem__)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: the manifest is damaged: {type(error).__name__} {error!s:.200}.") from error
        for name, tensor in made.tensors.items():
            _check_chunks_tile_tensor(where, name, tensor, made.files)
        for name, owner in made.aliases.items():
            if owner not in made.tensors or name in made.tensors:
                raise CheckpointError(f"{where}: {name!r:.200} is tied to {owner!r:.200}, which is not there.")
        return made


def _manifest_from_body(body: dict[str, Any]) -> Manifest:
    files = tuple(
        FileRecord(checked_file_name(f["name"]), _checked_count(f["nbytes"]), _checked_hex(f["xxh3_128"]))
        for f in body["files"]
    )
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    created = body["created"]
    return Manifest(
        save_id=_checked_hex(body["save_id"]),
        step=_checked_count(body["step"]),
        created=float(_checked(created, "a time", is_right=type(created) in (int, float) and math.isfinite(created))),
        mesh={str(name): _checked_count(size) for name, size in body["mesh"].items()},
        versions={str(name): str(version) for name, version in body["versions"].items()},
        config=body["config"],
        metric=None if body["metric"] is None else float.fromhex(body["metric"]["float"]),
        files=files,
        tensors={
            name: TensorRecord(
                _DTYPE_BY_NAME[t["dtype"]],
                checked_shape(t["shape"]),
                tuple(Chunk(*map(_checked_count, c)) for c in t["chunks"]),
            )
            for name, t in body["tensors"].items()
        },
        aliases={name: str(owner) for name, owner in body["aliases"].items()},
        values={name: _value_from_json(value) for name, value in body["values"].items()},
        objects=dict(body.get("objects", {})),
        encoded={name: encoded_leaf_from_json(each) for name, each in body.get("encoded", {}).items()},
        is_by_saver=body.get("is_by_saver") is True,
    )


def structure_of(value: Any) -> Any:
    """Return the structure of a nested value, as JSON can hold it.

    A list becomes a list of structures, a tuple ``{"tuple": [...]}``, and a dict ``{"dict": {...}}``. None stays None, and any
    other leaf becomes 0.
    """
    if isinstance(value, tuple):
        return {"tuple": [structure_of(each) for each in value]}
    if isinstance(value, list):
        return [structure_of(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {str(key): structure_of(each) for key, each in value.items()}}
    return None if value is None else 0


def rebuild_from_structure(name: str, structure: Any, value: Callable[[str], Any]) -> Any:
    """Return the nested value that is stored under ``name``. ``structure``: what :func:`structure_of` returned for the value.

    ``value`` is a function from the name of a stored leaf, such as ``"a.0.b"``, to its number, text or boolean.
    """
    if structure is None:
        return None
    if structure == 0:
        return value(name)
    tagged: dict[str, Any] = {"list": structure} if isinstance(structure, list) else structure
    [(kind, parts)] = tagged.items()
    prefix = f"{name}." if name else ""  # the whole tree has no name
    if kind == "dict":
        return {key: rebuild_from_structure(f"{prefix}{key}", each, value) for key, each in parts.items()}
    made = [rebuild_from_structure(f"{prefix}{i}", each, value) for i, each in enumerate(parts)]
    return tuple(made) if kind == "tuple" else made


def _check_chunks_tile_tensor(where: str, name: str, tensor: TensorRecord, files: tuple[FileRecord, ...]) -> None:
    end = 0
    for chunk in tensor.chunks:
        if chunk.first != end or chunk.last <= chunk.first or chunk.file >= len(files):
            raise CheckpointError(
                f"{where}: chunks of {name!r:.200} do not tile it: {tuple(chunk)} (file, first, last) follows element {end} of "
                f"{tensor.numel}, and there are {len(files)} files."
            )
        if (chunk.last - chunk.first) * tensor.dtype.itemsize > files[chunk.file].nbytes:
            raise CheckpointError(f"{where}: {name!r:.200} would have more bytes in {files[chunk.file].name} than that has.")
        end = chunk.last
    if end != tensor.numel:
        raise CheckpointError(f"{where}: chunks of {name!r:.200} cover {end} of its {tensor.numel} elements.")
    if len({chunk.file for chunk in tensor.chunks}) != len(tensor.chunks):
        raise CheckpointError(f"{where}: {name!r:.200} has two chunks in one file.")


def json_round_trip(value: Any) -> Any:
    """Return ``value`` as JSON reads it back. TypeError or ValueError if JSON cannot hold the value, or keys become equal."""
    return json.loads(json.dumps(value), object_pairs_hook=refuse_repeated_names)


def _body_digest(body: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _checked(value: Any, what: str, *, is_right: bool) -> Any:
    if not is_right:
        raise ValueError(f"{value!r:.80} is not {what}")
    return value


def _checked_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def checked_shape(sizes: Any) -> tuple[int, ...]:
    """Return ``sizes``, from a file, as the shape of a tensor. Raises ValueError or TypeError if they cannot be one."""
    shape = tuple(map(_checked_count, sizes))
    _checked(sizes, "a shape", is_right=len(shape) <= _MAX_DIMS and math.prod(size or 1 for size in shape) < 1 << 62)
    return shape


def checked_file_name(value: Any) -> str:
    """Return ``value`` if it is the name of a file. Raises ValueError otherwise, such as for a path into another folder."""
    return str(_checked(value, "a plain file name", is_right=type(value) is str and bool(_FILE_NAME_PATTERN.fullmatch(value))))


def _checked_hex(value: Any) -> str:
    return str(_checked(value, "a digest", is_right=type(value) is str and bool(re.fullmatch("[0-9a-f]{8,64}", value))))


def _value_to_json(value: Value) -> Any:
    return {"float": value.hex()} if isinstance(value, float) else value


def _value_from_json(value: Any) -> Value:
    if isinstance(value, dict):
        return float.fromhex(value["float"])
    found: Value = _checked(value, "a value", is_right=isinstance(value, bool | int | str))
    return found
