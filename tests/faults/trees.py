"""A tree all of whose values are the step that it is of: a mixture of two saves shows in any of them."""

import tempfile
from pathlib import Path
from typing import Any

import torch

import fsharp as fs
from fsharp.errors import CheckpointError

ONE = fs.SingleComm()
SHAPES = {"w": (130, 70), "b": (7,), "empty": (0, 3), "scalar": ()}


def tree_of(step: int, comm: Any, *, strategy: str = "zero3", dtype: torch.dtype = torch.float32, rows: int = 130) -> Any:
    """Shards, an equal tensor, one of each rank, and a number."""
    whole = {name: torch.full(shape, step, dtype=dtype) for name, shape in SHAPES.items()}
    whole["w"] = torch.full((rows, 70), step, dtype=dtype)
    whole["half"] = torch.full((33,), step, dtype=torch.bfloat16)
    layout = fs.plan(whole, comm.mesh, getattr(fs, strategy)("dp"))
    return {
        "params": fs.shard(whole, layout, comm),
        "plain": torch.full((11,), step),
        "own": fs.checkpoint.PerRank(torch.full((3,), step)),
        "step": step,
    }


def save(root: Any, step: int, comm: Any = ONE, **options: Any) -> Any:
    """Save the tree of a step."""
    return fs.checkpoint.save(root, tree_of(step, comm), step=step, comm=comm, **options)


def step_in(found: Any) -> int:
    """The step of a checkpoint, all of whose bytes have to be right and all of whose values have to be of that step."""
    fs.checkpoint.verify(found.path)
    values = {value for name in found.tensor_names for value in found.tensor(name).double().flatten().tolist()}
    assert values == {float(found.step)}, f"{found.path} has values of steps {sorted(values)}"
    assert found.manifest.values == {"step": found.step}
    return int(found.step)


def latest_step(root: Any) -> int | None:
    """Of the checkpoint that a run would go on from."""
    found = fs.checkpoint.latest(root)
    return None if found is None else step_in(found)


def refusal(act: Any, *words: str, error: type[Exception] = CheckpointError) -> str:
    """The text of the error that ``act`` has to raise, in which all words have to be."""
    try:
        got = act()
    except error as raised:
        text = str(raised)
        assert all(word in text for word in words), f"{words} are not all in: {text}"
        return text
    raise AssertionError(f"no {error.__name__}, but {got!r:.200}")


def left_behind(root: Any) -> list[str]:
    """What is under a root that is no complete checkpoint."""
    complete = {each.path for each in fs.checkpoint.list_checkpoints(root)}
    return sorted(str(path) for path in Path(root).iterdir() if str(path) not in complete)


def new_root(folder: Path) -> Path:
    """A new folder."""
    return Path(tempfile.mkdtemp(dir=folder))
