"""Files that are not what was written: flipped, zeroed and swapped bytes, files that are cut, missing or another save's."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsharp as fs
from fsharp.checkpoint.manifest import MANIFEST_NAME, _body_digest
from fsharp.checkpoint.shard_file import BLOCK_NBYTES, DIGEST_TABLE_NAME
from fsharp.testing import simulate
from tests.faults.registry import Outcome, row
from tests.faults.trees import latest_step, new_root, refusal, save, tree_of

TWO = fs.Mesh({"dp": 2})


def saved(folder: Path, *steps: int) -> tuple[Path, Path]:
    """A root with checkpoints of two ranks, and the folder of the last one."""
    root = new_root(folder)
    for step in steps:
        simulate(TWO, lambda comm, step=step: save(root, step, comm))
    return root, Path(fs.checkpoint.latest(root).path)


def rank_files(path: Path) -> list[Path]:
    return sorted(path.glob("rank-*"))


def regions(file: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of each tensor of a file, of its header and of its length."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    found = {"length": (0, 8), "header": (8, 8 + length)}
    for name, each in header.items():
        if name != "__metadata__" and each["data_offsets"][0] < each["data_offsets"][1]:
            found[name] = tuple(8 + length + offset for offset in each["data_offsets"])
    return found


def changed(file: Path, data: bytes, act: Callable[[], None]) -> None:
    """Do something while a file has other bytes."""
    before = file.read_bytes()
    assert data != before
    file.write_bytes(data)
    act()
    file.write_bytes(before)


def refused(path: Path, *words: str) -> None:
    """Neither verify() nor load() takes a checkpoint, and both say why."""
    refusal(lambda: fs.checkpoint.verify(path), *words)

    def load(comm: Any) -> str:
        return refusal(lambda: fs.checkpoint.load(path, tree_of(0, comm), comm=comm), *words, error=fs.errors.FsharpError)

    simulate(TWO, load)


@row(7, "bit flip or zeroed block in tensor data")
def changed_bytes(folder: Path, short: bool) -> Outcome:
    root, path = saved(folder, 3, 5)
    draw, faults = random.Random(7), 0
    for file in rank_files(path):
        data = file.read_bytes()
        for name, (first, last) in regions(file).items():
            is_data = name not in ("length", "header", DIGEST_TABLE_NAME)
            blocks = range(first, last, BLOCK_NBYTES) if is_data else [first]
            for start in blocks[:1] if short else blocks:
                stop = min(start + BLOCK_NBYTES, last)
                at = draw.randrange(start, stop)
                flipped = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
                zeroed = data[:start] + bytes(stop - start) + data[stop:]
                by_whom = f"{file.name}, written by rank {int(file.name[5:10])}"
                for other in (flipped, zeroed):
                    changed(file, other, lambda f=file, n=name, d=is_data, w=by_whom: refused(path, f.name, *[n, w] * d))
                faults += 2
        for first, second in swaps(regions(file), draw, 2 if short else 10):
            swapped = bytearray(data)
            swapped[first : first + 64], swapped[second : second + 64] = data[second : second + 64], data[first : first + 64]
            if swapped != data:
                changed(file, bytes(swapped), lambda f=file: refused(path, f.name))
                faults += 1
    manifest = (path / MANIFEST_NAME).read_bytes()
    for at in draw.sample(range(len(manifest)), 4 if short else 100):
        changed(
            path / MANIFEST_NAME,
            manifest[:at] + bytes([manifest[at] ^ 1]) + manifest[at + 1 :],
            lambda: refused(path, MANIFEST_NAME),
        )
        faults += 1
    assert latest_step(root) == 5
    return Outcome(f"{faults} changes, each refused by name of file and tensor")


def swaps(found: dict[str, tuple[int, int]], draw: random.Random, num: int) -> Iterator[tuple[int, int]]:
    """Starts of pairs of pieces of 64 bytes of a file."""
    end = max(last for _, last in found.values())
    for _ in range(num):
        first = draw.randrange(0, end - 128)
        yield first, draw.randrange(first + 64, end - 63)


@row(8, "truncated, missing or foreign shard file")
def other_files(folder: Path, short: bool) -> Outcome:
    root, path = saved(folder, 3, 5)
    other = Path(fs.checkpoint.list_checkpoints(root)[1].path)
    draw, faults = random.Random(8), 0
    for file in rank_files(path):
        data = file.read_bytes()
        for size in [0, *draw.sample(range(1, len(data)), 2 if short else 30)]:
            actual, expected = f"{size:,} bytes", f"expected {len(data):,}"
            changed(file, data[:size], lambda f=file, a=actual, e=expected: refused(path, f.name, a, e, "step 3"))
            faults += 1
        changed(file, data + b"\0", lambda f=file: refused(path, f.name, "step 3"))
        foreign = (other / file.name).read_bytes()
        assert len(foreign) == len(data)
        changed(file, foreign, lambda f=file: refused(path, f.name, "step 3"))
        again = save_again(folder, file.name)
        assert len(again) == len(data)
        changed(file, again, lambda f=file: refused(path, f.name))
        faults += 3
        for put in (lambda f: None, os.mkfifo, os.mkdir, lambda f: os.symlink(other / f.name, f)):
            file.unlink()
            put(file)
            refused(path, file.name, "step 3")
            assert latest_step(root) == 3
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
            file.write_bytes(data)
            faults += 1
    assert latest_step(root) == 5
    return Outcome(f"{faults} files, each refused with its size and the step to use instead")


def save_again(folder: Path, name: str) -> bytes:
    """The same file of another save of the same values."""
    return (saved(folder, 5)[1] / name).read_bytes()


@row(9, "metadata that lacks a chunk")
def missing_chunks(folder: Path, short: bool) -> Outcome:
    _, path = saved(folder, 5)
    body, faults = json.loads((path / MANIFEST_NAME).read_bytes()), 0
    for name, tensor in body["tensors"].items():
        for i in range(len(tensor["chunks"])):
            changed_body = json.loads(json.dumps(body))
            del changed_body["tensors"][name]["chunks"][i]
            changed(path / MANIFEST_NAME, signed(changed_body), lambda n=name: refused(path, n))
            faults += 1
    return Outcome(f"{faults} chunks, each missed by name, under a digest that is right")


def signed(body: dict) -> bytes:
    """A manifest with the digest of what it says, as whoever wants to harm would write it."""
    rest = {name: value for name, value in body.items() if name != "xxh3_128"}
    return json.dumps({**rest, "xxh3_128": _body_digest(rest)}).encode()


@row(10, "one rank's file deleted")
def deleted(folder: Path, short: bool) -> Outcome:
    root, path = saved(folder, 3, 5)
    for file in rank_files(path):
        data = file.read_bytes()
        file.unlink()
        refused(path, file.name, "missing", "step 3")
        assert latest_step(root) == 3
        file.write_bytes(data)
    return Outcome("refused with the name of the file; the step before is the latest")


@row(25, "manifest missing or truncated")
def manifests(folder: Path, short: bool) -> Outcome:
    root, path = saved(folder, 3, 5)
    data, draw = (path / MANIFEST_NAME).read_bytes(), random.Random(25)
    for size in [0, *draw.sample(range(1, len(data)), 3 if short else 40)]:
        (path / MANIFEST_NAME).write_bytes(data[:size])
        refused(path, MANIFEST_NAME, "step 3")
        assert latest_step(root) == 3
    (path / MANIFEST_NAME).unlink()
    refused(path, "incomplete", "step 3")
    refusal(lambda: fs.checkpoint.verify(root / "nothing"), "no checkpoint here")
    assert latest_step(root) == 3
    return Outcome("refused, with the step to use instead, which is the latest")
