"""Loads into something else than what was saved: other models, dtypes, strategies, numbers of ranks; and ranks that differ."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import optree
import torch

import fsharp as fs
from fsharp.errors import FsharpError, TreeError
from fsharp.testing import simulate
from tests.faults.registry import Outcome, row
from tests.faults.trees import new_root, refusal

MESHES = {
    "ddp": (fs.Mesh({"dp": 2}), fs.ddp("dp"), "layers.*"),
    "zero1": (fs.Mesh({"dp": 3}), fs.zero1("dp"), None),
    "zero2": (fs.Mesh({"dp": 2}), fs.zero2("dp"), "layers.*"),
    "zero3": (fs.Mesh({"dp": 3}), fs.zero3("dp"), "*"),
    "hsdp": (fs.Mesh({"outer": 2, "inner": 2}), fs.hsdp("outer", "inner"), "layers.*"),
    "hfsdp": (fs.Mesh({"outer": 2, "inner": 2}), fs.hfsdp("outer", "inner"), None),
}
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)


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


def trained(comm: Any, strategy: Any, units: Any, steps: range) -> Any:
    """A state after updates by gradients that depend on the step alone."""
    tx, params = fs.optim.adamw(1e-2), model()
    layout = fs.plan(params, comm.mesh, strategy, units=units, precision=MIXED)
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    return updated(comm, state, layout, steps)


def updated(comm: Any, state: Any, layout: Any, steps: range) -> Any:
    tx = fs.optim.adamw(1e-2)
    for step in steps:
        grads = optree.tree_map(lambda x, step=step: (x * step).sin(), model())
        state = fs.update(tx, fs.shard(grads, layout, comm, place="optim"), state, comm=comm)
    return state


def whole(state: Any, comm: Any) -> list[torch.Tensor]:
    """All of a state's tensors, unsharded."""
    leaves = optree.tree_leaves(fs.full(state._replace(made_by=None), comm=comm))
    return [torch.as_tensor(leaf) for leaf in leaves]


def moved(root: Path, old: str, new: str, *, meshes: tuple[fs.Mesh, fs.Mesh] | None = None) -> bool:
    """Whether a state of one world, loaded into another, has its bits, and still has them some updates later."""
    old_mesh, old_strategy, old_units = MESHES[old]
    new_mesh, new_strategy, new_units = MESHES[new]
    old_mesh, new_mesh = meshes or (old_mesh, new_mesh)

    def save(comm: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        state = trained(comm, old_strategy, old_units, range(1, 4))
        fs.checkpoint.save(root, state, step=3, comm=comm)
        return whole(state, comm), whole(trained(comm, old_strategy, old_units, range(1, 6)), comm)

    def load(comm: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        state = fs.checkpoint.load(root, trained(comm, new_strategy, new_units, range(7, 8)), comm=comm)
        layout = fs.plan(model(), comm.mesh, new_strategy, units=new_units, precision=MIXED)
        return whole(state, comm), whole(updated(comm, state, layout, range(4, 6)), comm)

    expected, found = simulate(old_mesh, save), simulate(new_mesh, load)
    return all(
        len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b))
        for got in found
        for a, b in zip(expected[0], got, strict=True)
    )


@row(22, "4 -> 2 -> 3 ranks, HSDP 2 x 2")
def other_numbers_of_ranks(folder: Path, short: bool) -> Outcome:
    sizes = {n: fs.Mesh({"dp": n}) for n in (2, 3, 4)}
    for a, b in ((4, 2), (2, 3), (3, 4))[: 1 if short else 3]:
        assert moved(new_root(folder), "zero3", "zero3", meshes=(sizes[a], sizes[b])), (a, b)
    for a, b in (("hsdp", "zero3"), ("zero3", "hsdp"))[: 1 if short else 2]:
        assert moved(new_root(folder), a, b), (a, b)
    return Outcome("parameters and AdamW's state have the same bits, also 2 updates later")


@row(23, "between strategies")
def between_strategies(folder: Path, short: bool) -> Outcome:
    pairs = list(product(MESHES, MESHES))
    chosen = pairs[1::9] if short else pairs
    for old, new in chosen:
        assert moved(new_root(folder), old, new), (old, new)
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
        got.append(fs.full(fs.checkpoint.load(root, half(comm).params, comm=comm, cast=True), comm=comm))

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
        ("subtree", lambda comm: load(comm, same, subtree=("", "params")[comm.rank])),
    ]
    simulate(fs.Mesh({"dp": 2}), lambda comm: save(comm, step=1))
    for field, act in differing:
        simulate(fs.Mesh({"dp": 2}), lambda comm, field=field, act=act: refusal(lambda: act(comm), field, error=FsharpError))
    assert [found.step for found in fs.checkpoint.checkpoints(root)] == [1]
    return Outcome(f"{len(differing)} ways to differ, refused on every rank by name; nothing is written")
