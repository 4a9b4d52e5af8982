"""PerRankState: torchdata's StatefulDataLoader goes on in a Run, on each rank and with workers, at the sample where it was."""

from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import fsharp as fs
from fsharp.errors import AgreementError, TreeError
from fsharp.resilience import IndexSampler, PerRankState, Run
from fsharp.testing import processes, simulate
from tests.ranks import on_ranks


class Stream(IterableDataset):
    """Numbers without end, of which each worker of each rank has its own; what is left of a piece is state."""

    def __init__(self, rank):
        self.rank, self.begun, self.rest = rank, 0, []

    def __iter__(self):
        worker = get_worker_info()
        start = 1000 * self.rank + 100 * (worker.id if worker else 0)
        while True:
            if not self.rest:
                self.rest = [start + 3 * self.begun + i for i in range(3)]
                self.begun += 1
            yield self.rest.pop(0)

    def state_dict(self):
        return {"begun": self.begun, "rest": list(self.rest)}

    def load_state_dict(self, state):
        self.begun, self.rest = state["begun"], list(state["rest"])


def samples(root, total, workers, comm, *, stop_at=None):
    """Return the samples of each step of a run, as far as it comes."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Stream(comm.rank), batch_size=2, num_workers=workers)
    own, found = fs.resilience.PerRankState(loader), []
    with fs.resilience.Run(root, comm=comm, total=total, save_every=3) as run:
        run.resume({"loader": own, "seen": torch.zeros(())})
        for step, batch in zip(run.steps(), loader, strict=False):
            if step == stop_at:  # as if killed: the newest checkpoint is older
                break
            found.append(batch.tolist())
            run.end_step({"loader": own, "seen": torch.full((), step + 1.0)})
    return found


def on_two_ranks(root, workers, comm):
    whole = samples(f"{root}/whole", 8, workers, comm)
    samples(f"{root}/a", 8, workers, comm, stop_at=5)
    return whole, samples(f"{root}/a", 8, workers, comm)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_at_the_sample_where_each_rank_was(workers, tmp_path):
    results = processes(fs.Mesh({"dp": 2}), partial(on_two_ranks, str(tmp_path), workers))
    for rank, (whole, rest) in enumerate(results):
        first = [[1000 * rank, 1000 * rank + 1], [1000 * rank + 100, 1000 * rank + 101]]
        assert whole[:2] == (first if workers else [first[0], [1000 * rank + 2, 1000 * rank + 3]])
        assert rest == whole[3:]


class Owner:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_ranks_have_states_with_other_keys(tmp_path):
    def run(comm):
        mine = {"rank": comm.rank, **({"more": torch.arange(3)} if comm.rank else {})}
        fs.checkpoint.save(tmp_path, {"own": fs.resilience.PerRankState(Owner(mine))}, step=1, comm=comm)
        own = fs.resilience.PerRankState(Owner("nothing"))
        fs.checkpoint.load(tmp_path, {"own": own}, comm=comm)
        return own.owner.state

    first, second = simulate(fs.Mesh({"dp": 2}), run)
    assert first == {"rank": 0}
    assert second["more"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("state", "message"),
    [(torch.zeros(20_000), r"the state has 8\d,\d+ bytes, and nbytes is 65,536"), (object, "does not load")],
)
@on_ranks(fs.Mesh({"dp": 2}))
def test_a_state_that_cannot_be_saved_is_refused_on_all_ranks(comm, state, message, tmp_path):
    own = fs.resilience.PerRankState(Owner(state if comm.rank else {}))
    with pytest.raises((TreeError, AgreementError), match=message):
        fs.checkpoint.save(tmp_path, {"own": own}, step=1, comm=comm)


def test_the_default_device_of_torch_changes_nothing(tmp_path):
    """Samples, states and searches for NaNs stay on the CPU; for a GPU too the generator of samples is the CPU's."""

    def run(total):
        tree = {"w": torch.zeros(3), "own": PerRankState(Owner({"n": 0})), "sampler": IndexSampler(10, 4, seed=0)}
        with torch.device("meta"), Run(tmp_path, comm=fs.SingleComm(), total=total, save_every=2, signals=()) as run:
            tree = run.resume(tree)
            for step in run.steps():
                tree["own"].owner.state["n"] += 1
                tree = run.end_step(tree | {"w": tree["w"] + tree["sampler"].indices(step).sum()})
        return tree["w"].tolist(), tree["own"].owner.state

    run(3)
    want = sum(IndexSampler(10, 4, seed=0).indices(step).sum().item() for step in range(5))
    assert run(5) == ([want] * 3, {"n": 5})
    with torch.device("meta"):
        assert IndexSampler(10, 4, seed=0, shuffle=False).indices(1).tolist() == [4, 5, 6, 7]


def test_another_number_of_ranks_is_refused(tmp_path):
    save = lambda comm: fs.checkpoint.save(tmp_path, {"own": fs.resilience.PerRankState(Owner({}))}, step=1, comm=comm)  # noqa: E731
    simulate(fs.Mesh({"dp": 2}), save)
    with pytest.raises(
        TreeError, match=r"'own.state'  uint8\[2, 65536\] in the checkpoint.*so load on 2 ranks, or without this leaf"
    ):
        fs.checkpoint.load(tmp_path, {"own": fs.resilience.PerRankState(Owner({}))}, comm=fs.SingleComm())


def test_an_object_without_a_state_is_refused_at_once():
    with pytest.raises(
        TreeError, match=r"owner is .*DataLoader.*, expected an object with state_dict\(\)(.|\n)*StatefulDataLoader"
    ):
        fs.resilience.PerRankState(torch.utils.data.DataLoader([1, 2]))
