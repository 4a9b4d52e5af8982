"""What can be chosen on the command line. Imports no torch, so that a bad option is refused at once."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import tyro

Part = Literal[
    "steps", "small", "alternating", "optax", "prediction", "tune", "compile", "host", "calls", "memory", "rss", "checkpoint"
]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure training steps of fsharp against those of its peers, on the processors of this machine."""

    peers: Literal["default", "all"] = "default"
    """``all`` measures DeepSpeed too, which has to be installed."""
    only: tuple[Part, ...] = PARTS
    """Parts to run. The table and the last line hold what was measured."""
    nproc: int = 2
    """Number of processes (but for the host's time, which one process measures)."""
    launches: int = 3
    """Times that the steps' processes are started: two of the same contender in one pair of them may differ by 4 %."""
    rounds: int = 7
    """Times that each contender has its turn, in each launch."""
    steps: int = 3
    """Steps in a turn."""
    warmup: int = 4
    """Steps that each contender makes before."""
    host_rounds: int = 30
    """Rounds of the host's time."""

    dim: int = 384
    """Width of the model."""
    layers: int = 6
    """Number of blocks."""
    heads: int = 6
    """Attention heads in a block."""
    time: int = 128
    """Tokens in a sequence."""
    batch: int = 4
    """Sequences in a step and rank."""
    host_layers: int = 48
    """Number of blocks of the tiny model on which the host's time is measured."""
    calls_layers: int = 24
    """Number of blocks of the smaller model on which calls of Python functions are counted; the other has twice as many."""
    small_layers: int = 24
    """Number of blocks of the models of small units."""
    calibration_steps: int = 60
    """Steps of ``fs.inspect.measure``, whose speeds predict the candidates of ``fs.tune``."""
    compile_units: int = 1000
    """Units of the program whose compilation is timed."""
    checkpoint_mb: float = 256
    """Megabytes that each rank saves and loads."""
    checkpoint_rounds: int = 9
    """Rounds of checkpoints."""

    out: Path = Path("benchmarks/results/cpu.json")
    """Where all that was measured is written."""
    docs: Path | None = Path("docs/benchmarks.md")
    """The page whose table is renewed; only by a run of all parts."""

    @property
    def runs_all(self) -> bool:
        """Whether every part is to be run."""
        return set(self.only) == set(PARTS)


def check(options: Options) -> None:
    """Raise a ValueError for an option that cannot run, or two that do not go together."""
    if options.nproc < 2:
        raise ValueError(f"--nproc is {options.nproc}, expected at least 2: one process has nobody to talk to.")
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1.")
    if options.peers == "all" and find_spec("deepspeed") is None:
        raise ValueError("--peers all needs deepspeed, which PEERS=all make bench installs.")
    if options.dim % options.heads:
        raise ValueError(f"--dim {options.dim} does not divide into --heads {options.heads}.")


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; exits with status 2 if they are wrong."""
    options = tyro.cli(Options, args=argv, prog="python -m benchmarks")
    try:
        check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options
