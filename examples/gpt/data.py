"""The data: source code of the running interpreter's standard library. Every machine has it; nothing is downloaded."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# Tests, what pip installed, and tables in the form of code.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__"}
_START = b"\0"
"""Begins every file."""


class Corpus(NamedTuple):
    """Bytes to train on and bytes of other files, both uint8."""

    train: torch.Tensor
    held_out: torch.Tensor


def load() -> Corpus:
    """Read the library; one file in sixteen, chosen by a hash of its name, is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for path in _sources(root):
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        parts[digest[0] < 16].extend(_START + path.read_bytes())
    return Corpus(*(torch.frombuffer(part, dtype=torch.uint8) for part in parts))


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in _SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def windows(stream: torch.Tensor, starts: torch.Tensor, context: int) -> dict[str, torch.Tensor]:
    """``context`` bytes from each start, and the byte that follows each of them."""
    rows = stream[starts[:, None] + torch.arange(context + 1)].long()
    return {"inputs": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()}  # contiguous() copies no single row


def random_starts(stream: torch.Tensor, count: int, context: int, *, seed: int, step: int) -> torch.Tensor:
    """Where the samples of a step begin: of all ranks, so that a batch does not depend on how many share it."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return torch.randint(len(stream) - context, (count,), generator=generator)


def even_starts(stream: torch.Tensor, num_bytes: int, context: int) -> torch.Tensor:
    """Starts of windows that cover ``num_bytes`` (or all there are), spread evenly over the stream."""
    available = (len(stream) - 1) // context
    count = min(max(1, num_bytes // context), available)
    return torch.arange(count) * available // count * context
