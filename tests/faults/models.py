"""Loads into something else than what was saved: other models, dtypes, strategies, numbers of ranks; and ranks that differ."""

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import optree
import torch

import fsharp as fs
from fsharp.errors import FsharpError, TreeError
from fsharp.testing import simulate
from tests.checkpoint.test_save_load import WORLDS, assert_moves
from tests.faults.registry import Outcome, row
from tests.faults.trees import new_root, refusal


def model(*, layers: int = 3, width: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    """Parameters of uneven sizes, all of the same key on any mesh."""
    keys = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=keys).to(dtype)

    blocks = [{"w": draw(width, width + 1), "b": draw(width)} for _ in range(layers)]
    return {"embed": draw(11, width), "layers": blocks, "scale": draw()}


def state_of(comm: Any, params: Any, strategy: Any, units: Any, *, tx: Any = None) -> Any:
    layout = fs.plan(params, comm.mesh, strategy, units=units)
    return fs.init_state(tx or fs.optim.adamw(1e-2), fs.shard(params, layout, comm), comm=comm)


@row(22, "4 -> 2 -> 3 ranks, HSDP 2 x 2")
def other_numbers_of_ranks(folder: Path, short: bool) -> Outcome:
    worlds: list[Any] = [(fs.Mesh({"dp": n}), fs.zero3("dp"), "*") for n in (4, 2, 3)] + ["hsdp on 2 x 2"]
    for old, new in list(pairwise([*worlds, *worlds[2:]]))[:: 2 if short else 1]:
        assert_moves(new_root(folder), old, new)
    return Outcome("parameters and AdamW's state have the same bits, also 2 updates later")


@row(23, "between strategies")
def between_strategies(folder: Path, short: bool) -> Outcome:
    pairs = list(product(WORLDS, WORLDS))
    chosen = pairs[1::9] if short else pairs
    for old, new in chosen:
        assert_moves(new_root(folder), old, new)
    return Outcome(f"{len(chosen)} pairs of {len(pairs)}, the same bits, also 2 updates later")


def refused_with_a_diff(folder: Path, other: Callable[[Any], Any], *words: str) -> None:
    """A tree that is not the one that was saved is refused by a text that fits on a screen."""
    root = new_root(folder)

    def run(comm: Any) -> None:
        fs.checkpoint.save(root, state_of(comm, model(), fs.zero3("dp"), "layers.*"), step=1, comm=comm)
        text = refusal(lambda: fs.checkpoint.load(root, other(comm), comm=comm), *words, error=TreeError)
        assert len(text.splitlines()) <= 20, text
        assert max(map(len, text.splitlines())) <= 200, text

    simulate(fs.Mesh({"dp": 2}), run)


@row(13, "wrong model")
def wrong_model(folder: Path, short: bool) -> Outcome:
    def like(**options: Any) -> Callable[[Any], Any]:
        return lambda comm: state_of(comm, model(**options), fs.zero3("dp"), "layers.*")

    def without_state(comm: Any) -> Any:
        return state_of(comm, model(), fs.zero3("dp"), "layers.*", tx=fs.optim.sgd(1e-2))

    refused_with_a_diff(folder, like(layers=2), "layers.2", "in the checkpoint alone")
    refused_with_a_diff(folder, like(layers=60), "params.layers.", "not in the checkpoint")
    refused_with_a_diff(folder, like(width=8), "float32[6, 7]", "float32[8, 9]")
    refused_with_a_diff(folder, without_state, "mu", "in the checkpoint alone")
    refused_with_a_diff(folder, lambda comm: {"params": like()(comm).params}, "in the checkpoint alone")
    return Outcome("5 models, each refused with a diff of at most 20 lines")


@row(14, "dtype differs")
def other_dtype(folder: Path, short: bool) -> Outcome:
    def half(comm: Any) -> Any:
        return state_of(comm, model(dtype=torch.bfloat16), fs.zero3("dp"), "layers.*")

    refused_with_a_diff(folder, half, "float32[6, 7] in the checkpoint; expected bfloat16[6, 7]", "cast=True")
    root, got = new_root(folder), []

    def run(comm: Any) -> None:
        state = state_of(comm, model(), fs.zero3("dp"), None)
        fs.checkpoint.save(root, state.params, step=1, comm=comm)
        got.append(fs.full_tree(fs.checkpoint.load(root, half(comm).params, comm=comm, cast=True), comm=comm))

    simulate(fs.Mesh({"dp": 2}), run)
    expected = optree.tree_map(lambda x: x.bfloat16(), model())
    assert all(optree.tree_all(optree.tree_map(torch.equal, each, expected)) for each in got)
    return Outcome("refused, unless cast=True asks for it")


def on_each_rank(*, strategy: Any = fs.zero3, **options: Any) -> list[Any]:
    """A tree as each of two ranks has it."""
    params = model(**options)

    def shard(comm: Any) -> Any:
        return {"params": fs.shard(params, fs.plan(params, comm.mesh, strategy("dp")), comm)}

    return simulate(fs.Mesh({"dp": 2}), shard)


@row(15, "ranks disagree at save and load")
def ranks_that_differ(folder: Path, short: bool) -> Outcome:
    root, same = new_root(folder), on_each_rank()
    pairs = {
        "width": (same[0], on_each_rank(width=7)[1]),
        "dtype": (same[0], on_each_rank(dtype=torch.bfloat16)[1]),
        "depth": (same[0], on_each_rank(layers=2)[1]),
        "layouts": (same[0], on_each_rank(strategy=fs.ddp)[1]),
        "seed": ({**same[0], "seed": 0}, {**same[1], "seed": 1}),
    }

    def save(comm: Any, trees: Any = same, *, step: int = 2, root: Path = root, **options: Any) -> Any:
        return fs.checkpoint.save(root, trees[comm.rank], step=step, comm=comm, **options)

    def load(comm: Any, trees: Any = same, *, where: Path = root, **options: Any) -> Any:
        return fs.checkpoint.load(where, trees[comm.rank], comm=comm, **options)

    differing: list[tuple[str, Callable[[Any], Any]]] = [
        ("tensors", lambda comm: save(comm, pairs["width"])),
        ("tensors", lambda comm: save(comm, pairs["dtype"])),
        ("tensors", lambda comm: save(comm, pairs["depth"])),
        ("layouts", lambda comm: save(comm, pairs["layouts"])),
        ("values", lambda comm: save(comm, pairs["seed"])),
        ("config", lambda comm: save(comm, config={"lr": 0.1 * comm.rank})),
        ("step", lambda comm: save(comm, step=2 + comm.rank)),
        ("root", lambda comm: save(comm, root=root / str(comm.rank))),
        ("metric", lambda comm: save(comm, metric=0.5 * comm.rank)),
        ("where", lambda comm: load(comm, where=(root, Path(fs.checkpoint.latest(root).path))[comm.rank])),
        ("params.layers.2.w", lambda comm: load(comm, pairs["depth"])),
        ("tensors", lambda comm: load(comm, pairs["dtype"], cast=True)),
        ("layouts", lambda comm: load(comm, pairs["layouts"])),
        ("cast", lambda comm: load(comm, cast=comm.rank == 1)),
        ("subtree", lambda comm: load(comm, same, subtree=("", "params")[comm.rank])),
    ]
    simulate(fs.Mesh({"dp": 2}), lambda comm: save(comm, step=1))
    for field, act in differing:
        simulate(fs.Mesh({"dp": 2}), lambda comm, field=field, act=act: refusal(lambda: act(comm), field, error=FsharpError))
    assert [found.step for found in fs.checkpoint.list_checkpoints(root)] == [1]
    return Outcome(f"{len(differing)} ways to differ, refused on every rank by name; nothing is written")
