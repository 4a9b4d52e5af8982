"""What can be chosen on the command line. Imports no torch, so that a bad option is refused at once."""

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
    """Where state rests. The hybrids arrange the processes as outer=2 x inner=nproc/2."""
    nproc: int = 2
    """Number of processes."""
    seconds: float = 90.0
    """Time to train for, evaluation not counted."""
    steps: int | None = None
    """Number of steps, in place of a time: the result is then the same in every run."""

    dim: int = 128
    """Width of the model."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads in a block."""
    context: int = 128
    """Bytes that the model sees at a time."""

    batch: int = 4
    """Sequences in a step, over all processes and microbatches."""
    microbatches: int = 1
    """Parts into which each process splits its share of the batch."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup: int = 50
    """Steps in which the learning rate rises; it then falls as half a cosine to a tenth of its peak."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors have none."""
    clip: float = 1.0
    """Largest global norm of gradients."""
    exact_clip: bool = False
    """Sum the norm exactly: slower, and strategies agree to the last bit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters in use and on the wire; the optimizer keeps float32."""
    schedule: bool = True
    """Run steps by a schedule that overlaps communication with compute; else each collective blocks."""
    release: bool = False
    """Without a schedule: let gathered parameters go after each use, and gather and compute again in the backward."""
    seed: int = 0
    """Of the initial parameters, the batches and the sample."""

    eval_every: int = 250
    """Steps between evaluations on a part of the held-out bytes; 0 for none but the last."""
    eval_bytes: int = 1 << 18
    """Held-out bytes that the last evaluation, and the bigram model, are scored on."""
    sample_bytes: int = 400
    """Bytes to generate at the end."""
    prompt: str = "\ndef "
    """What the generated text continues."""
    temperature: float = 0.7
    """Of sampling; 0 takes the likeliest byte."""

    save_every: int = 100
    """Steps between two checkpoints; three are kept. A run that was cut off goes on with the newest."""
    resume: Path | None = None
    """Folder of another run to go on with, of any strategy and number of processes."""

    name: str | None = None
    """Name of the run; by default strategy and number of processes."""
    out: Path = Path("runs")
    """Folder in which the run's own is made."""

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.out / (self.name or f"{self.strategy}-{self.nproc}")

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Mesh axis sizes."""
        return {"outer": 2, "inner": self.nproc // 2} if self.strategy in HYBRID else {"dp": self.nproc}


def check(options: Options) -> None:
    """Refuse what cannot run.

    Raises:
        ValueError: an option, or two that do not go together.
    """
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
        raise ValueError(f"--resume {options.resume}: there is no checkpoint in its folder 'checkpoints' to go on with.")


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; exits with status 2 if they are wrong."""
    options = tyro.cli(Options, args=argv, prog="python -m examples.gpt")
    try:
        check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options
