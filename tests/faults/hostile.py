"""Checkpoints that somebody has made to do harm: whatever is in them, they are refused by name, or hold what they say."""

import itertools
import json
import math
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

import fsharp as fs
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.checkpoint.shard_file import BLOCK_NBYTES, DIGEST_TABLE_NAME
from fsharp.errors import CheckpointError, TreeError
from fsharp.testing import processes
from tests.faults.damage import signed
from tests.faults.registry import Outcome, row
from tests.faults.trees import ONE, new_root, save, tree_of

FILE = "rank-00000.safetensors"
SHORT, FULL = 300, 10_000
ROOM_NBYTES = 512 << 20
"""Memory that a process may take besides what it has."""
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 1 << 31, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**300, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "x" * 5000, "nan", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", ".hidden", FILE,
    MANIFEST_NAME, "\ud800", "float64", "quint8", "int4", "bits8", "F64", "U8", "XX", "dtype", "0x1p99999", [], {}, [[]],
    [0], [-1], [1 << 40, 1 << 40], [0, 1 << 61, 1 << 61], [1 << 61], [1] * 2000, [1 << 63], [0, 0], [0, 0, 1 << 61],
    [[0, 0, 1 << 61]], [[0, 0, 5], [0, 5, 9]],
    {"float": "nan"}, {"float": 3}, {"name": "../x"}, {"data_offsets": [0, 4]}, {"__metadata__": {}},
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a JSON value but itself."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in inner for found in ((*path, key), *places(value, (*path, key)))]


def mutated(draw: random.Random, tree: Any) -> Any:
    """A JSON value in which one thing is replaced, removed, renamed or added."""
    tree = json.loads(json.dumps(tree))
    *above, key = draw.choice(places(tree))
    node = tree
    for each in above:
        node = node[each]
    act = draw.choice(["replace", "replace", "replace", "remove", "rename", "add", "swap"])
    if act == "remove":
        del node[key]
    elif act == "rename" and isinstance(node, dict):
        node[str(draw.choice(VALUES))[:300]] = node.pop(key)
    elif act == "add" and isinstance(node, list):
        node.append(draw.choice([*VALUES, *node]))
    elif act == "swap":
        other = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node[key], node[other] = node[other], node[key]
    elif type(node[key]) is int and draw.random() < 0.5:
        node[key] += draw.choice([-4, -1, 1, 4])
    else:
        node[key] = draw.choice(VALUES)
    return tree


SIZES = (0, 1, 2, 3, 70, 1 << 13, 1 << 31, 1 << 32, 1 << 40, 1 << 61, (1 << 62) - 1)
DTYPES = ("float32", "float64", "bfloat16", "uint8", "int4", "quint8", "bits8", "complex128", "bool", "bit")


def retyped(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A manifest in which a tensor has another shape and dtype, and chunks that cover it, as far as 64 bits can tell."""
    body = json.loads(json.dumps(body))
    shape = [draw.choice(SIZES) for _ in range(draw.choice([0, 1, 1, 2, 2, 3]))]
    numel = math.prod(shape)
    numel = draw.choice([numel, numel % (1 << 64), numel % (1 << 62)])
    cuts = sorted({0, numel, *(draw.randrange(numel) for _ in range(draw.choice([0, 0, 1, 2])) if numel)})
    chunks = [[0, first, last] for first, last in itertools.pairwise(cuts)]
    body["tensors"][draw.choice(list(body["tensors"]))] = {"dtype": draw.choice(DTYPES), "shape": shape, "chunks": chunks}
    return body


def scrambled(draw: random.Random, data: bytes) -> bytes:
    """Bytes of which some are changed, cut out, doubled or nested."""
    at, size = draw.randrange(len(data)), draw.choice([1, 1, 2, 8, 100])
    return draw.choice(
        [
            data[:at] + draw.randbytes(size) + data[at + size :],
            data[:at] + data[at + size :],
            data[:at] + data[at : at + size] + data[at:],
            data[:at] + draw.choice([b"[", b'{"a":']) * 100_000 + data[at:],
            data[:at] + b"9" * 5000 + data[at:],
            data[:at],
        ]
    )


class Forged:
    """A checkpoint as bytes, to be changed and written elsewhere.

    Args:
        path: of a checkpoint with one file.
    """

    def __init__(self, path: Path) -> None:
        self.body, self.file = json.loads((path / MANIFEST_NAME).read_bytes()), (path / FILE).read_bytes()
        (self.length,) = struct.unpack("<Q", self.file[:8])
        self.header, self.data = json.loads(self.file[8 : 8 + self.length]), self.file[8 + self.length :]

    def write(self, folder: Path, draw: random.Random) -> bool:
        """Write it with a change, or its file alone; whether digests are those of an honest writer."""
        honest = draw.random() < 0.25
        body, file = self.body, self.file
        manifest = json.dumps(body).encode()
        what = draw.choice(
            ["body", "body", "tensor", "tensor", "header", "header", "length", "text", "header text", "data", "kind", "alone"]
        )
        if what == "body":
            changed = mutated(draw, body)
            manifest = json.dumps(changed).encode() if honest else signed(changed)
        elif what == "tensor":
            manifest, honest = signed(retyped(draw, body)), False
        elif what == "text":
            manifest, honest = scrambled(draw, manifest), True
        elif what == "kind":
            honest = True
        elif what == "alone":
            (folder / FILE).write_bytes(self.without_digests(draw))
            return False
        else:
            header, length, data = json.dumps(self.header).encode(), self.length, self.data
            if what == "header":
                header = json.dumps(mutated(draw, self.header)).encode()
            elif what == "header text":
                header = scrambled(draw, header)
            elif what == "data":
                data = scrambled(draw, data)
            header += b" " * (-(8 + len(header)) % 64) * draw.choice([0, 1])
            length = draw.choice([0, 1, 2, len(header) + 1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1])
            length = length % (1 << 64) if what == "length" else len(header)
            file = struct.pack("<Q", length) + header + data
            if not honest:
                manifest = signed(vouching_for(body, file, 8 + len(header)))
        (folder / MANIFEST_NAME).write_bytes(manifest)
        (folder / FILE).write_bytes(file)
        if what == "kind":
            put_another_kind(folder / draw.choice([MANIFEST_NAME, FILE]), draw)
        return honest

    def without_digests(self, draw: random.Random) -> bytes:
        """Its file as others write them, with a change: it is read without a manifest."""
        header = {name: each for name, each in self.header.items() if name != DIGEST_TABLE_NAME}
        text = json.dumps(mutated(draw, header) if draw.random() < 0.8 else header).encode()
        return struct.pack("<Q", len(text)) + text + self.data[: self.header[DIGEST_TABLE_NAME]["data_offsets"][0]]


def vouching_for(body: dict[str, Any], file: bytes, header_end: int) -> dict[str, Any]:
    """A manifest that says of a file what its bytes are."""
    size = len(file) - header_end
    table = 8 * -(-size // (BLOCK_NBYTES + 8))
    digest = xxhash.xxh3_128_hexdigest(file[:header_end] + file[len(file) - table :])
    return {**body, "files": [{"name": FILE, "nbytes": len(file), "xxh3_128": digest}]}


def put_another_kind(path: Path, draw: random.Random) -> None:
    """Something that is not a plain file, or not the one that it was."""
    data = path.read_bytes()
    path.unlink()

    def link_to_a_copy() -> None:
        copy = path.with_name("copy")
        copy.write_bytes(data)
        path.symlink_to(copy)

    def sparse() -> None:
        with path.open("wb") as file:
            file.truncate(1 << 40)

    kinds: list[Callable[[], Any]] = [
        lambda: os.mkfifo(path),
        path.mkdir,
        link_to_a_copy,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
        sparse,
        lambda: None,
    ]
    if os.geteuid() == 0:
        kinds.append(lambda: os.mknod(path, 0o20644, os.makedev(1, 5)))
    draw.choice(kinds)()


def looked_at(path: Path, like: Any) -> Any:
    """Do everything that reads a checkpoint; the tree, if it is taken."""

    def read(act: Callable[[Path], Any]) -> None:
        found = act(path)
        for name in found.tensor_names:
            found.tensor(name)
        assert f"{found!r} {found.manifest.nbytes} {found.step} {found.config}"

    taken(partial(read, fs.checkpoint.verify))
    taken(partial(read, fs.checkpoint.open_checkpoint))
    fs.checkpoint.list_checkpoints(path.parent)
    return taken(partial(fs.checkpoint.load, path, like, comm=ONE))


def taken(act: Callable[[], Any]) -> Any:
    """What ``act`` returns; None if it refuses, in words that fit on a screen."""
    text = ""
    try:
        return act()
    except (CheckpointError, TreeError) as error:
        text = str(error)
    assert len(text) < 10_000
    return None


def fuzz(root: Path, seeds: range, comm: Any = ONE) -> int:
    """How many of the changed checkpoints were refused. Runs in a process whose memory is limited."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_NBYTES,) * 2)
    base = Path(save(root / "base", 5).path)
    forged, like, refused = Forged(base), tree_of(0, ONE), 0
    right = fs.checkpoint.load(base, like, comm=ONE)
    for seed in seeds:
        folder = root / "cases" / base.name
        folder.mkdir(parents=True)
        try:
            honest = forged.write(folder, random.Random(seed))
            got = looked_at(folder, like)
            refused += got is None
            if honest and got is not None:
                assert torch.equal(got["plain"], right["plain"]), "wrong numbers"
                for a, b in zip(got["params"].buffers, right["params"].buffers):
                    assert torch.equal(a, b), "wrong numbers"
        except BaseException as error:
            error.add_note(f"seed {seed} of tests.faults.hostile.fuzz")
            raise
        finally:
            shutil.rmtree(root / "cases")
    return refused


@row(24, "malicious checkpoint")
def malicious(folder: Path, short: bool) -> Outcome:
    num = SHORT if short else FULL
    [refused] = processes(fs.Mesh({"dp": 1}), partial(fuzz, new_root(folder), range(num)), timeout=600)
    assert refused > num // 2
    return Outcome(f"{num} forgeries, {refused} refused, the others hold what they say")
