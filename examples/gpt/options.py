"""Options of the command line. This file does not import torch, so that a wrong option is reported at once."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

HYBRID = ("hsdp", "hfsdp")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a byte-level GPT on the source of the standard library of the Python that runs it."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"] = "zero3"
    """Sharding strategy. hsdp and hfsdp use a mesh outer=2 x inner=nproc/2."""
    nproc: int = 2
    """Number of processes."""
    seconds: float = 90.0
    """Seconds of training, without evaluation."""
    steps: int | None = None
    """Number of steps, in place of seconds: then every run has the same result."""

    dim: int = 128
    """Width of the model."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads in a block."""
    context: int = 128
    """Bytes in a sequence."""

    batch: int = 4
    """Sequences in a step, over all processes and microbatches."""
    microbatches: int = 1
    """Number of parts into which each process splits its sequences of a step."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup: int = 50
    """Steps in which the learning rate rises to its peak. Then it falls along half a cosine to a tenth of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors are not decayed."""
    clip: float = 1.0
    """Largest global norm of gradients; larger gradients are clipped."""
    exact_clip: bool = False
    """Compute the norm exactly: slower, and all strategies give the same bits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters in computation and on the wire; the optimizer keeps float32."""
    schedule: bool = True
    """Overlap communication with compute by a schedule. Without it each collective blocks."""
    release: bool = False
    """Without a schedule: release parameters after each use, and gather and recompute in the backward."""
    seed: int = 0
    """Seed of initial parameters, batches and the generated text."""

    eval_every: int = 250
    """Steps between evaluations on some held-out bytes; 0 evaluates at the end only."""
    eval_bytes: int = 1 << 18
    """Number of held-out bytes for the last evaluation and for the bigram model."""
    sample_bytes: int = 400
    """Number of bytes to generate at the end."""
    prompt: str = "\ndef "
    """Text that the model continues."""
    temperature: float = 0.7
    """Temperature of sampling; 0 takes the most probable byte."""

    save_every: int = 100
    """Steps between checkpoints. The newest three are kept. After an interruption a run continues from the newest one."""
    resume: Path | None = None
    """Folder of another run to continue, with any strategy and number of processes."""

    name: str | None = None
    """Name of the run; by default strategy and number of processes, such as zero3-2."""
    out: Path = Path("runs")
    """Folder that holds the folders of runs."""

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.out / (self.name or f"{self.strategy}-{self.nproc}")

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Mesh axis sizes."""
        return {"outer": 2, "inner": self.nproc // 2} if self.strategy in HYBRID else {"dp": self.nproc}


def check(options: Options) -> None:
    """Raise a ValueError for an option that cannot run, or two that do not go together."""
    may_be_zero = {"eval_every", "sample_bytes", "temperature", "weight_decay", "warmup", "seed"}
    for field in fields(options):
        value, flag = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if value < 0 or (value == 0 and field.name not in may_be_zero):
            raise ValueError(f"{flag} is {value}, expected {'at least' if field.name in may_be_zero else 'more than'} 0.")
    if options.strategy in HYBRID and options.nproc % 2:
        raise ValueError(f"--strategy {options.strategy} needs an even --nproc (outer=2 x inner=nproc/2), got {options.nproc}.")
    if options.dim % options.heads or options.dim // options.heads % 2:
        raise ValueError(f"--dim {options.dim} does not divide into --heads {options.heads} of even width.")
    if options.batch % (options.nproc * options.microbatches):
        parts = f"--nproc {options.nproc} x --microbatches {options.microbatches}"
        raise ValueError(f"--batch {options.batch} does not divide by {parts}.")
    if not options.prompt:
        raise ValueError("--prompt is empty, expected at least one byte to continue.")
    if options.resume is not None and not list((options.resume / "checkpoints").glob("step-*")):
        raise ValueError(f"--resume {options.resume}: its folder 'checkpoints' has no checkpoint to continue from.")


def make_folder(options: Options) -> None:
    """Make the folder of the run. Raises ValueError if it cannot be made, or written to."""
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {options.out}: the folder {options.folder} cannot be made: {error.strerror}.") from error
    if not os.access(options.folder, os.W_OK):
        raise ValueError(f"--out {options.out}: you may not write to the folder {options.folder}.")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return the options of a command line. Exit with status 2 if one is wrong."""
    options = tyro.cli(Options, args=argv, prog="python -m examples.gpt")
    try:
        check(options)
        make_folder(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options
