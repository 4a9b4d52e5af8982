"""Ranks whose labels have different digests hear of the settings that differ: the field, and each rank's value."""

import pytest
import torch

import fsharp as fs
from fsharp.errors import FsharpError
from fsharp.functional.comm.settings_digests import (
    SettingsHistory,
    differing_settings_rows,
    settings_digest,
    settings_texts_by_digest,
)
from fsharp.testing import processes, simulate
from tests import modules
from tests.gpt_like import loss_fn
from tests.scheduling import DP, make_state, my_batches


def test_what_digests_stand_for():
    labels = {rank: f"gather a of history {settings_digest(f'x=1{chr(10)}lr={rank}')}" for rank in (0, 3)}
    assert differing_settings_rows(labels, settings_texts_by_digest(labels.values())) == [
        ("rank 0 has", "lr=0"),
        ("rank 3 has", "lr=3"),
    ]
    same = dict.fromkeys((0, 3), labels[0])
    assert differing_settings_rows(same, settings_texts_by_digest(same.values())) == []
    assert differing_settings_rows(labels, {}) == []


def test_a_digest_does_not_depend_on_where_steps_begin():
    """One rank alone may run a step without collectives, at any place between settings."""
    texts, digests = [f"lr={i}" for i in range(6)], set()
    for begins in range(1 << 6):
        history = SettingsHistory()
        for i, text in enumerate(texts):
            if begins >> i & 1:
                history.begin_step()
            history.add_settings(text)
            if begins >> i & 1:
                history.undo_begin_step()
        digests.add(history.digest)
        assert settings_texts_by_digest([history.digest]) == {history.digest: "\n".join(texts)}
    assert len(digests) == 1
    history.begin_step()
    assert settings_texts_by_digest([history.digest]) == {history.digest: "\n".join(texts)}
    history.add_settings("b")
    assert settings_texts_by_digest([history.digest]) == {history.digest: "b"}


def test_a_teacher_that_is_only_evaluated_keeps_a_bounded_text():
    """Each write to one of its parameters adds a setting, and its evaluations have no collectives that compare these."""

    def rank_fn(comm):
        teacher = fs.shard_module(modules.make("plain"), mesh=comm, strategy=fs.ddp("dp"), units=[modules.Block])
        parameters, student = list(teacher.parameters()), [torch.ones(p.shape) for p in teacher.parameters()]
        [(x, y)], sizes = modules.batches(comm, 1), []
        for _ in range(150):
            with torch.no_grad():
                torch._foreach_lerp_(parameters, student, 0.01)
                teacher(x, y)
            sizes.append(len(next(iter(parameters)).owner().settings_text_to_compare()))
        return sizes

    for sizes in simulate(DP, rank_fn):
        assert sizes[-1] < 1.1 * sizes[60], sizes[::10]


def of_groups(comm, option="lr", make=float):
    """A module of whose optimizer an option is set between steps, on one rank to something else."""
    model = fs.shard_module(modules.make("plain"), mesh=comm, strategy=fs.zero3("dp"), units=[modules.Block])
    optimizer = fs.ShardedOptimizer(model.parameters(), modules.torch.optim.SGD, lr=0.1, momentum=0.5)
    for i, batch in enumerate(modules.batches(comm, 3)):
        optimizer.param_groups[0][option] = make(0.5 if i and comm.rank else 0.25)
        modules.train(model, optimizer, [batch])


def of_a_tensor(comm):
    of_groups(comm, "lr", torch.tensor)


def of_a_text(comm):
    of_groups(comm, "note", lambda x: {"text": f"is {x}"})


def transformation(comm):
    tx = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.5 if comm.rank else 0.25))
    step, state = fs.train_step(loss_fn, tx), make_state(comm, "zero3")
    for batch in my_batches(comm, 2):
        state, _ = step(state, batch, comm=comm)


FIELDS = {
    of_groups: "group 0: lr={}",
    of_a_tensor: "group 0: lr={} float32[]",
    of_a_text: "group 0: note={{'text': 'is {}'}}",
    transformation: "1.adamw.learning_rate={}",
}


@pytest.mark.parametrize(("run", "program"), [*((simulate, each) for each in FIELDS), (processes, transformation)])
def test_a_setting_of_one_rank_is_named_with_both_values(run, program):
    def rank_fn(comm):
        with pytest.raises(FsharpError, match="rank 0 has") as raised:
            program(comm)
        return str(raised.value)

    for text in run(DP, rank_fn):
        assert f"rank 0 has  {FIELDS[program].format(0.25)}" in text, text
        assert f"rank 1 has  {FIELDS[program].format(0.5)}" in text, text
