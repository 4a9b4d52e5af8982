"""A run that goes on where it was, on simulated ranks."""

import logging
import math
import threading
from pathlib import Path

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, CheckpointError, CommError, NonFiniteError, RunError, TreeError
from fsharp.resilience import EXIT_PREEMPTED, IndexSampler, NonFinite, Run, find_nonfinite, run_checkpoints
from fsharp.testing import simulate
from tests.ranks import on_ranks

DP2 = fs.Mesh({"dp": 2})
SHAPES = {"a": {"w": torch.zeros(5, 3), "b": torch.zeros(5)}, "out": torch.zeros(5)}
TX = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(fs.optim.linear_schedule(0.0, 1e-2, 10)))
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


def loss_fn(params, x, comm):
    h = fs.forward(lambda p, x: torch.tanh(x @ p["w"].T + p["b"]), params["a"], x, comm=comm)
    return fs.forward(lambda w, h: ((h @ w - 1) ** 2).mean(), params["out"], h, comm=comm)


def make_state(comm, strategy=fs.zero3):
    layout = fs.plan(SHAPES, comm.mesh, strategy("dp"), units=["a"])
    return fs.init_state(TX, fs.init_params(fs.init.normal(0.5), layout, comm, key=0, place="optim"), comm=comm)


def train_step(state, x, comm, *, always=False):
    loss, grads = fs.value_and_grad(loss_fn, microbatches=2)(state.params, x, comm=comm)
    grads = fs.reduce_scatter(grads, comm=comm)
    bad = find_nonfinite(loss, grads, comm=comm)
    _, grads = fs.average(loss, grads, comm=comm)
    return (fs.update(TX, grads, state, comm=comm) if bad is None or always else state), bad


def train(
    comm, root, *, total=9, until=None, strategy=fs.zero3, act=lambda run, state: None, nan_on=(), always=False, **options
):
    """A run, and what came of it: the run, its state, the steps that it made."""
    sampler, done = IndexSampler(len(X), 8, seed=3), []
    with Run(root, comm=comm, total=total, **{"save_every": 4, "signals": (), **options}) as run:
        state, sampler = run.resume((make_state(comm, strategy), sampler))
        for step in run.steps():
            if step == until:
                break
            x = X[sampler.indices(step, rank=comm.rank, num_ranks=comm.mesh.size)]
            x = x * math.nan if (step, comm.rank) in nan_on else x
            state, bad = train_step(state, x, comm, always=always)
            act(run, state)
            state, sampler = run.end_step((state, sampler), nonfinite=bad if not always else None)
            done.append(step)
    return run, state, done


def values(state):
    """What a rank holds, and what it is all together."""
    return [x.clone() for node in fs.layouts.units_of((state.params, state.opt)) for x in node.buffers]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("strategy", [fs.zero3, fs.zero1], ids=["zero3", "zero1"])
@on_ranks(DP2)
def test_a_run_that_was_ended_goes_on_with_the_same_bits(comm, tmp_path, strategy):
    whole = values(train(comm, tmp_path / "whole", strategy=strategy)[1])
    steps = []
    for until in (2, 6, 7, None):
        run, state, done = train(comm, tmp_path / "ended", until=until, strategy=strategy)
        steps.append((done[0], done[-1]))
    again = train(comm, tmp_path / "ended", strategy=strategy)
    assert (steps, run.step, again[2]) == ([(0, 1), (0, 5), (4, 6), (4, 8)], 9, [])
    assert same(values(state), whole)
    assert same(values(again[1]), whole)


def test_another_number_of_ranks_and_strategy_goes_on_with_the_same_batches(tmp_path):
    def full(comm, state):
        return fs.full_tree(state.params, comm=comm)

    def begin(comm):
        train(comm, tmp_path / "a", until=5)

    def end(comm):
        _, state, done = train(comm, tmp_path / "a", strategy=fs.ddp)
        return done, full(comm, state)

    simulate(fs.Mesh({"dp": 4}), begin)
    ended = simulate(DP2, end)
    [whole] = simulate(fs.Mesh({"dp": 1}), lambda comm: full(comm, train(comm, tmp_path / "b")[1]))
    for done, found in ended:
        assert done == [4, 5, 6, 7, 8]
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@on_ranks(DP2)
def test_a_signal_to_one_rank_saves_on_all_and_exits(comm, tmp_path):
    def act(run, state):
        if run.step == 5 and comm.rank == 1:
            run.preemption.record_signal()

    with pytest.raises(SystemExit, match=str(EXIT_PREEMPTED)):
        train(comm, tmp_path / "a", act=act)
    assert fs.checkpoint.latest(tmp_path / "a").step == 6
    whole = values(train(comm, tmp_path / "whole")[1])
    _, state, done = train(comm, tmp_path / "a")
    assert done == [6, 7, 8]
    assert same(values(state), whole)


@pytest.mark.parametrize("after", [0, 3])
@on_ranks(DP2)
def test_a_signal_in_warm_up_or_evaluation_saves_what_was_done(comm, tmp_path, after):
    def evaluate_after(comm, asked):
        with Run(tmp_path, comm=comm, total=9, save_every=4, signals=()) as run:
            state = run.resume(make_state(comm))
            for _ in zip(range(after), run.steps()):
                state, _ = train_step(state, X[8 * comm.rank :][:8], comm)
                state = run.end_step(state)
            for batch in range(5):
                if batch == 3 and comm.rank == 0:
                    run.preemption.record_signal()
                asked.append(batch)
                run.exit_if_preempted(state)

    asked = []
    with pytest.raises(SystemExit, match=str(EXIT_PREEMPTED)):
        evaluate_after(comm, asked)
    assert (asked, fs.checkpoint.latest(tmp_path).step) == ([0, 1, 2, 3], after)


def damage_newest(root, rank):
    """Change a bit among the elements in a rank's file of the newest checkpoint; its path."""
    path = fs.checkpoint.latest(root).path
    file = Path(path, f"rank-{rank:05d}.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    return path


def test_a_damaged_checkpoint_costs_steps_and_no_bits(tmp_path, caplog):
    whole = simulate(DP2, lambda comm: values(train(comm, tmp_path / "whole")[1]))
    simulate(DP2, lambda comm: train(comm, tmp_path / "a", until=7, save_every=2))
    path = damage_newest(tmp_path / "a", rank=1)

    def rank_fn(comm):
        _, state, done = train(comm, tmp_path / "a")
        return done, same(values(state), whole[comm.rank])

    assert simulate(DP2, rank_fn) == [([4, 5, 6, 7, 8], True)] * 2
    assert f"{path} is damaged, set aside as {path}.damaged" in caplog.text


@on_ranks(DP2)
def test_a_roll_back_goes_past_a_damaged_checkpoint(comm, tmp_path):
    def act(run, state):
        if run.step == 7 and comm.rank == 1:  # at the end of step 6 rank 0 has said that all is written
            damage_newest(tmp_path, rank=1)

    options = {"nan_on": {(7, 0)}, "on_nonfinite": "roll back", "save_every": 2, "background": False}
    run, _, done = train(comm, tmp_path, act=act, **options)
    assert (done, run.skipped_on_replay) == ([0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 8], [7])


def test_a_run_does_not_begin_anew_because_its_checkpoints_are_damaged(tmp_path):
    simulate(DP2, lambda comm: train(comm, tmp_path, until=5))
    damage_newest(tmp_path, rank=0)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be read.*rank-00000\.safetensors"):
        simulate(DP2, lambda comm: train(comm, tmp_path))
    Path(fs.checkpoint.latest(tmp_path).path, "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be read.*not the manifest of a checkpoint"):
        simulate(DP2, lambda comm: train(comm, tmp_path))


def test_a_run_does_not_begin_anew_because_the_host_of_rank_0_lacks_the_mount(tmp_path, monkeypatch):
    simulate(DP2, lambda comm: train(comm, tmp_path, until=5))
    here, look = threading.local(), run_checkpoints.has_checkpoints
    monkeypatch.setattr(run_checkpoints, "has_checkpoints", lambda root: here.rank != 0 and look(root))

    def rank_fn(comm):
        here.rank = comm.rank
        with pytest.raises(RunError, match=f"rank 0 sees no checkpoint in {tmp_path}, and rank 1 does: mount the folder"):
            train(comm, tmp_path)

    simulate(DP2, rank_fn)
    assert len(fs.checkpoint.list_checkpoints(tmp_path)) == 1


def test_raise_names_the_step_the_rank_and_the_leaf(tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 5: the loss of rank 1 is not finite, and 'a\.b' is the first leaf"):
        simulate(DP2, lambda comm: train(comm, tmp_path, nan_on={(5, 1)}))
    assert fs.checkpoint.latest(tmp_path).step == 4


def test_skip_leaves_out_the_update_and_goes_on(tmp_path, caplog):
    def rank_fn(comm):
        _, state, done = train(comm, tmp_path, nan_on={(2, 1), (5, 0)}, on_nonfinite="skip", max_nonfinite=1)
        expected = make_state(comm)
        sampler = IndexSampler(len(X), 8, seed=3)
        for step in (0, 1, 3, 4, 6, 7, 8):
            expected, _ = train_step(expected, X[sampler.indices(step, rank=comm.rank, num_ranks=2)], comm)
        return done, same(values(state), values(expected))

    with caplog.at_level(logging.WARNING, "fsharp"):
        assert simulate(DP2, rank_fn) == [(list(range(9)), True)] * 2
    found = [record.getMessage() for record in caplog.records if "on_nonfinite" in record.getMessage()]
    assert len(found) == 2
    assert found[0].startswith("step 2: the loss of rank 1 is not finite")


@pytest.mark.parametrize(
    ("policy", "nan_on", "which"),
    [("skip", {(1, 0), (3, 0), (4, 1), (5, 0)}, "in a row"), ("roll back", {(1, 0), (3, 0), (5, 0)}, "of this run")],
)
def test_a_run_gives_up_after_so_many(tmp_path, policy, nan_on, which):
    with pytest.raises(NonFiniteError, match=rf"step 5: .* This is non-finite step 3 {which}, and max_nonfinite is 2"):
        simulate(DP2, lambda comm: train(comm, tmp_path, nan_on=nan_on, on_nonfinite=policy, max_nonfinite=2))


def test_roll_back_goes_on_from_the_checkpoint_without_the_step(tmp_path):
    def rank_fn(comm):
        run, _, done = train(comm, tmp_path / "a", until=7, nan_on={(2, 1), (6, 0)}, on_nonfinite="roll back")
        steps = [done, run.skipped_on_replay]
        _, state, done = train(comm, tmp_path / "a", on_nonfinite="roll back")
        expected = make_state(comm)
        sampler = IndexSampler(len(X), 8, seed=3)
        for step in (0, 1, 3, 4, 5, 6, 7, 8):
            expected, _ = train_step(expected, X[sampler.indices(step, rank=comm.rank, num_ranks=2)], comm)
        return [*steps, done], same(values(state), values(expected))

    # Step 2 rolls back to the start, 6 to the checkpoint after 4 steps; the restart is from there, before 6 was known.
    [(steps, is_same), other] = simulate(DP2, rank_fn)
    assert steps == [[0, 1, 2, 0, 1, 3, 4, 5, 6, 4, 5], [2, 6], [4, 5, 6, 7, 8]]
    assert is_same
    assert other == (steps, True)


@pytest.mark.parametrize("bad", [3, 4, 7, 8])
def test_a_step_that_is_left_out_takes_no_checkpoint_with_it(tmp_path, bad):
    def rank_fn(comm):
        run, state, _ = train(comm, tmp_path, nan_on={(bad, 1)}, on_nonfinite="roll back", keep=9)
        again, loaded, done = train(comm, tmp_path, on_nonfinite="roll back")
        return run.step, again.step, done, same(values(state), values(loaded))

    assert simulate(DP2, rank_fn) == [(9, 9, [], True)] * 2
    assert [c.step for c in fs.checkpoint.list_checkpoints(tmp_path)] == [9, 8, 4, 0]


def test_roll_back_to_where_another_run_was(tmp_path):
    def rank_fn(comm):
        train(comm, tmp_path / "a", total=5)
        with Run(tmp_path / "b", comm=comm, total=9, save_every=9, signals=(), on_nonfinite="roll back") as run:
            tree = run.resume((make_state(comm), IndexSampler(len(X), 8, seed=3)), other=tmp_path / "a")
            before = values(tree[0])
            assert next(run.steps()) == 5
            tree = run.end_step(tree, nonfinite=NonFinite((0,), None, ()))
            return run.step, run.skipped_on_replay, same(values(tree[0]), before)

    assert simulate(DP2, rank_fn) == [(6, [5], True)] * 2
    assert fs.checkpoint.latest(tmp_path / "b").step == 5  # its own


def test_a_tree_that_is_not_finite_is_not_saved_unless_that_is_wanted(tmp_path):
    with pytest.raises(NonFiniteError, match=r"after 8 steps is not saved: '0\.params\.a\.b'.*the newest .* of step 4"):
        simulate(DP2, lambda comm: train(comm, tmp_path / "a", nan_on={(5, 0)}, always=True))
    assert fs.checkpoint.latest(tmp_path / "a").step == 4
    simulate(DP2, lambda comm: train(comm, tmp_path / "b", nan_on={(5, 0)}, always=True, save_nonfinite=True))
    assert fs.checkpoint.latest(tmp_path / "b").step == 9


def test_a_best_loss_that_begins_as_an_infinity_is_saved(tmp_path):
    comm = fs.SingleComm()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with Run(tmp_path, comm=comm, total=2, save_every=1, signals=()) as run:
        tree = run.resume({"best": math.inf, "plateau": plateau})
        for _ in run.steps():
            tree = run.end_step(tree)
    assert fs.checkpoint.latest(tmp_path).manifest.values["tree.best"] == math.inf


@pytest.mark.parametrize("grown", [{"x": 0.5}, {"x": None, "y": 1}, {"x": [1.0]}])
def test_a_tree_that_a_restart_could_not_load_is_refused(tmp_path, grown):
    with Run(tmp_path, comm=fs.SingleComm(), total=2, save_every=1, signals=()) as run:
        run.resume({"x": None})
        next(run.steps())
        with pytest.raises(RunError, match=r"(?s)has other leaves than the tree given to resume.*'?[xy]\S* +new"):
            run.end_step(grown)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ({"loss": torch.tensor(0.5)}, r"loss +was a number, is float32\[\]"),
        ({"best": True}, r"best +was a number, is True or False"),
        ({"history": torch.zeros(3)}, r"history +was float32\[2\], is float32\[3\]"),
        ({"history": torch.zeros(2, dtype=torch.float64)}, r"history +was float32\[2\], is float64\[2\]"),
    ],
)
def test_a_leaf_that_changes_its_kind_is_refused_before_it_is_saved(tmp_path, leaf, text):
    tree = {"loss": 0.0, "best": 1, "history": torch.zeros(2)}
    with Run(tmp_path, comm=fs.SingleComm(), total=3, save_every=1, signals=()) as run:
        tree = run.resume(tree)
        steps = run.steps()
        next(steps)
        tree = run.end_step(tree | {"best": 0.5, "history": torch.ones(2)})
        next(steps)
        with pytest.raises(RunError, match=f"(?s)has other leaves than the tree given to resume.*{text}"):
            run.end_step(tree | leaf)
    assert fs.checkpoint.latest(tmp_path).step == 1


def test_a_leaf_that_changes_its_kind_on_one_rank_is_heard_by_all(tmp_path):
    def rank_fn(comm):
        with Run(tmp_path, comm=comm, total=1, save_every=1, signals=()) as run:
            run.resume({"loss": 0.0})
            next(run.steps())
            with pytest.raises((RunError, AgreementError), match=r"loss +was a number, is float32\[\]"):
                run.end_step({"loss": 0.5 if comm.rank else torch.tensor(0.5)})
            raise KeyError("heard")

    with pytest.raises(KeyError, match="heard"):
        simulate(DP2, rank_fn)


def test_ranks_that_leave_after_different_steps_hear_of_it(tmp_path):
    with pytest.raises(CommError, match="the end of the run, after 3 of 9 steps"):
        simulate(DP2, lambda comm: train(comm, tmp_path, until=3 if comm.rank == 0 else None))


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        ({"config": {"lr": 2}}, r"config\.lr"),
        ({"total": 8}, r"config\.Run\(\)\.total"),
        ({"save_every": 3}, r"config\.Run\(\)\.save_every"),
        ({"on_nonfinite": "skip"}, r"config\.Run\(\)\.on_nonfinite"),
        ({"root": "elsewhere"}, r"config\.Run\(\)\.root"),
    ],
)
def test_ranks_that_were_started_differently(tmp_path, monkeypatch, odd, field):
    monkeypatch.chdir(tmp_path)

    def rank_fn(comm):
        train(comm, **({"root": "here", "config": {"lr": 1}} | (odd if comm.rank else {})))

    with pytest.raises(AgreementError, match=field):
        simulate(DP2, rank_fn)


def test_the_root_is_where_it_was_when_the_run_was_made(tmp_path, monkeypatch):
    comm = fs.SingleComm()
    monkeypatch.chdir(tmp_path)
    train(comm, "runs", until=5)
    with Run("runs", comm=comm, total=9, save_every=4, signals=()) as run:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        run.resume((make_state(comm), IndexSampler(len(X), 8, seed=3)))
        assert run.step == 4


def test_a_loop_that_ends_before_the_last_step_is_logged_even_after_a_save(tmp_path, caplog):
    comm = fs.SingleComm()
    for until in (4, 9):
        train(comm, tmp_path, until=until)
    assert [r.getMessage() for r in caplog.records] == ["the run ends after 4 of 9 steps; the newest checkpoint is of step 4"]


def test_another_config_than_before_is_logged_and_another_tree_refused(tmp_path, caplog):
    comm = fs.SingleComm()
    train(comm, tmp_path, until=5, config={"lr": 1, "same": [1, (2, 3)], 7: math.nan})
    with caplog.at_level(logging.WARNING, "fsharp"):
        train(comm, tmp_path, until=6, config={"lr": 2, "same": [1, (2, 3)], 7: math.nan})
    assert [r.getMessage() for r in caplog.records] == [
        "the run ends after 5 of 9 steps; the newest checkpoint is of step 4",
        "the run continues after step 4 with another config: lr was 1 and is 2",
        "the run ends after 6 of 9 steps; the newest checkpoint is of step 4",
    ]
    with (
        pytest.raises(TreeError, match="is not of this tree"),
        Run(tmp_path, comm=comm, total=9, save_every=4, signals=()) as run,
    ):
        run.resume({"state": make_state(comm)})


def test_calls_in_another_order(tmp_path):
    with Run(tmp_path, comm=fs.SingleComm(), total=3, save_every=1, signals=()) as run:
        with pytest.raises(RunError, match=r"call resume\(tree\) first"):
            next(run.steps())
        run.preemption.record_signal()
        with pytest.raises(RunError, match=r"call resume\(tree\) first"):
            run.exit_if_preempted({"x": torch.zeros(2)})
        run.preemption.received = None
        with pytest.raises(RunError, match=r"Run\.log\(\): call resume\(tree\) first"):
            run.log({"loss": 1.0})
        with pytest.raises(RunError, match="there is no checkpoint in 'nowhere' to continue from"):
            run.resume({"x": torch.ones(2)}, other="nowhere")
        run.resume({"x": torch.ones(2)})
        with pytest.raises(RunError, match="no step is under way"):
            run.end_step({})
        with pytest.raises(RunError, match="step 0 was not ended"):
            list(run.steps())
        with pytest.raises(RunError, match=r"Run\.train\(\): step is \{\}, expected a function step\(tree, number\)"):
            run.train({}, lambda tree, number: tree)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"total": 0}, "total is 0"),
        ({"save_every": 1.5}, r"save_every is 1\.5"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore', expected one of 'raise', 'skip', 'roll back'"),
        ({"max_nonfinite": True}, "max_nonfinite is True"),
        ({"agree_every": -1}, "every is -1"),
        ({"config": {"x": torch.ones(2)}}, r"JSON cannot hold the config, \{"),
        ({"comm": fs.Scheduler(fs.SingleComm())}, "comm is a Scheduler; pass the Comm that it was made of"),
    ],
)
def test_arguments_that_are_refused(tmp_path, options, match):
    with pytest.raises(RunError, match=match):
        Run(tmp_path, **{"comm": fs.SingleComm(), "total": 3, "save_every": 1, **options})


def test_one_rank_alone_finds_a_step_bad(tmp_path):
    def rank_fn(comm):
        with Run(tmp_path, comm=comm, total=9, save_every=4, signals=(), on_nonfinite="roll back") as run:
            tree = run.resume({"x": torch.ones(2)})
            for _ in run.steps():
                tree = run.end_step(tree, nonfinite=NonFinite((1,), None, ()) if comm.rank else None)

    with pytest.raises(CommError, match="ranks called different collectives"):
        simulate(DP2, rank_fn)


def train_module(comm, root, *, until=None, kind="beside"):
    """Train a module whose gradients travel with feedback and stochastic rounding, and return what it holds and the step.

    ``kind``: how the tree holds the state of the formats: "beside" the module, "within" its train state, or not at all ("").
    """
    precision = fs.Precision(wire=fs.formats.stochastic(fs.formats.mxint4), feedback=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Linear(40, 1))
    model = fs.shard_module(net, mesh=comm, strategy=fs.zero3("dp"), units=[torch.nn.Linear], precision=precision)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    def tree():
        if kind == "within":
            return {"state": model.train_state, "optimizer": optimizer}
        kept = {"residuals": model.train_state.residuals, "step": model.train_state.step} if kind else {}
        return {"model": model, "optimizer": optimizer, **kept}

    with Run(root, comm=comm, total=6, save_every=3, signals=()) as run:
        loaded = run.resume(tree())
        if kind == "within":
            model.train_state = loaded["state"]
        elif kind:
            model.train_state = model.train_state._replace(residuals=loaded["residuals"], step=loaded["step"])
        for step in run.steps():
            if step == until:
                break
            optimizer.zero_grad()
            (model(X[step * 4 + comm.rank :][:2]) - 1).square().mean().backward()
            optimizer.step()
            run.end_step(tree())
    held = [x.clone() for tensors in model.train_state.residuals.value.values() for x in tensors]
    return [x for _, x in model.named_full_parameters()] + held, model.train_state.step


@pytest.mark.parametrize("kind", ["beside", "within"])
def test_a_module_whose_gradients_have_feedback_goes_on_with_the_same_bits(tmp_path, caplog, kind):
    wholes = simulate(DP2, lambda comm: train_module(comm, tmp_path / "whole", kind=kind))
    assert caplog.text == ""
    simulate(DP2, lambda comm: train_module(comm, tmp_path / "ended", until=3, kind=kind))
    ended = simulate(DP2, lambda comm: train_module(comm, tmp_path / "ended", kind=kind))
    for (found, step), (expected, last) in zip(ended, wholes, strict=True):
        assert step == last == 6
        assert same(found, expected)


def test_a_tree_that_lacks_what_no_state_dict_has_is_warned_of(tmp_path, caplog):
    simulate(DP2, lambda comm: train_module(comm, tmp_path, kind=""))
    assert "need model.train_state.residuals and model.train_state.step, which the tree does not hold" in caplog.text
