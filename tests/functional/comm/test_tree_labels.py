"""Two trees of equal shapes that one rank takes in another order: ranks never get a mixture of them."""

import functools
import tempfile

import optree
import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import load, save
from fsharp.errors import CommError
from fsharp.functional.comm.agree import all_gather_texts
from fsharp.functional.comm.tree_labels import TreeLabelCounters
from fsharp.testing import simulate

SHAPES = {"a": torch.empty(6, 2), "b": torch.empty(5)}
DIFFERENT = "ranks called different collectives"


def loss(params, batch, comm):
    a, b = (fs.gather(params[name], comm=comm).tree() for name in "ab")
    return (batch @ a).square().mean() + b.square().sum()


def started(comm, strategy=None, seed=0):
    layout = fs.plan(SHAPES, comm.mesh, strategy or fs.zero3("dp"), units=["a", "b"])
    params = fs.init_params(fs.init.normal(1.0), layout, comm, key=seed)
    return fs.init_state(fs.optim.sgd(0.1), params, comm=comm)


STEP = fs.train_step(loss, fs.optim.sgd(0.1))


def batch_of(comm):
    return torch.full((2, 6), 1.0 + comm.rank)


def ema_on_one_rank(comm, run):
    state = started(comm)
    ema = fs.layouts.map_units(lambda node: node.replace([x * 0.5 for x in node.buffers]), state.params)
    run(lambda p, comm: fs.value_and_grad(loss)(p, batch_of(comm), comm=comm))(state.params if comm.rank else ema)


def older_state_on_one_rank(comm, run):
    state = started(comm)
    new, _ = run(lambda s, comm: STEP(s, batch_of(comm), comm))(state)
    run(lambda p, comm: loss(p, batch_of(comm), comm))((new if comm.rank else state).params)


def two_models_in_opposite_order(comm, run):
    states = [started(comm, seed=seed) for seed in (0, 1)]
    step = run(lambda s, comm: STEP(s, batch_of(comm), comm))
    for state in states if comm.rank else reversed(states):
        step(state)


def two_successors_of_one_state(comm, run):
    state = started(comm)
    step = run(lambda s, comm: STEP(s, batch_of(comm), comm))
    ends = [step(state)[0], step(state)[0]]
    run(lambda p, comm: fs.full_tree(p, comm=comm))(ends[comm.rank].params)


def two_copies_in_opposite_order(comm, run):
    state = started(comm)
    copies = [fs.layouts.map_units(lambda n, k=k: n.replace([x * k for x in n.buffers]), state.params) for k in (2, 3)]
    read = run(lambda p, comm: fs.full_tree(p, comm=comm))
    for copy in copies:
        read(copy)
    for copy in copies if comm.rank else reversed(copies):
        read(copy)


def copies_by_replace_and_by_a_mapping_in_opposite_order(comm, run):
    params = started(comm).params
    replaced = fs.layouts.map_units(lambda node: node.replace([x * 2 for x in node.buffers]), params)
    mapped = optree.tree_map(lambda x: x * 3, params)
    read = run(lambda p, comm: fs.full_tree(p, comm=comm))
    for copy in (replaced, mapped) if comm.rank else (mapped, replaced):
        read(copy)


def gradients_of_two_models_in_opposite_order(comm, run):
    states = [started(comm, fs.ddp("dp"), seed=seed) for seed in (0, 1)]
    step = run(lambda s, comm: STEP(s, batch_of(comm), comm))
    for state in states if comm.rank else reversed(states):
        step(state)


def two_functions_of_one_name_in_opposite_order(comm, run):
    state = started(comm)
    functions = [run(lambda p, comm, k=k: loss(p, batch_of(comm), comm) * k) for k in (1, 2)]
    for fn in functions if comm.rank else reversed(functions):
        fn(state.params)


def two_loads_in_opposite_order(comm, run):
    folder = shared_folder(comm)
    save(folder, started(comm), step=0, comm=comm)
    states = [load(folder, started(comm), comm=comm) for _ in range(2)]
    step = run(lambda s, comm: STEP(s, batch_of(comm), comm))
    for state in states if comm.rank else reversed(states):
        step(state)


def shared_folder(comm):
    return all_gather_texts(tempfile.mkdtemp() if comm.rank == 0 else "", comm)[0]


def at_once(comm):
    return lambda fn: functools.partial(fn, comm=comm)


PROGRAMS = [
    ema_on_one_rank, older_state_on_one_rank, two_models_in_opposite_order, two_successors_of_one_state,
    two_copies_in_opposite_order, copies_by_replace_and_by_a_mapping_in_opposite_order,
    gradients_of_two_models_in_opposite_order, two_loads_in_opposite_order,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("runner", [at_once, fs.Scheduler], ids=["at_once", "scheduled"])
def test_refused(program, runner):
    with pytest.raises(CommError, match=DIFFERENT):
        simulate(fs.Mesh({"dp": 2}), lambda comm: program(comm, runner(comm)))


def test_functions_of_one_name_are_told_apart():
    with pytest.raises(CommError, match=DIFFERENT):
        simulate(fs.Mesh({"dp": 2}), lambda comm: two_functions_of_one_name_in_opposite_order(comm, fs.Scheduler(comm)))


def test_labels_name_the_tree():
    """The error says of which tree and update each rank's values are."""
    with pytest.raises(CommError, match=r"(?s)rank 0.*tree 2 at update 0, gather a.*rank 1.*tree 2 at update 1"):
        simulate(fs.Mesh({"dp": 2}), lambda comm: older_state_on_one_rank(comm, at_once(comm)))


def test_labels_name_what_a_tree_was_made_of():
    program = copies_by_replace_and_by_a_mapping_in_opposite_order
    names = r"(?s)rank 0.*tree 2 at update 0, mapped 1x \(1\), gather a.*rank 1.*tree 2 at update 0, replaced 1x \(1\)"
    with pytest.raises(CommError, match=names):
        simulate(fs.Mesh({"dp": 2}), lambda comm: program(comm, at_once(comm)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rank_that_leaves_out_an_update_does_not_mix_its_gradients_with_later_ones(microbatches):
    """Under ddp nothing is gathered, so the sum of gradients alone can tell."""

    def program(comm):
        state, tx = started(comm, fs.ddp("dp")), fs.optim.sgd(0.1)
        for step in range(3):
            total, grads = fs.value_and_grad(loss, microbatches=microbatches)(state.params, batch_of(comm), comm=comm)
            _, grads = fs.average(total, fs.reduce_scatter(grads, comm=comm), comm=comm)
            if (step, comm.rank) != (1, 0):
                state = fs.update(tx, grads, state, comm=comm)

    with pytest.raises(CommError, match=r"(?s)rank 0.*tree 2 at update 1, reduce a.*rank 1.*tree 2 at update 2, reduce a"):
        simulate(fs.Mesh({"dp": 2}), program)


def test_counters_keep_a_bounded_number_of_names_for_each_group_of_ranks():
    """Ranks that differ along another axis may gather other trees in between."""
    counters = TreeLabelCounters()
    assert counters.count_gathered("old", ("outer",), "a") == 1
    for number in range(5000):
        assert counters.count_gathered(f"tree {number}", ("inner",), "a") == 1
    assert counters.count_gathered("tree 4999", ("inner",), "a") == 2
    assert counters.copy().count_gathered("old", ("outer",), "a") == 2
    assert sum(map(len, counters.gathered.values())) <= 4100


def test_one_rank_may_do_alone_what_takes_no_collective():
    """Under ddp rank 0 evaluates copies by itself; what all ranks do afterwards has the same names."""

    def program(comm):
        state = started(comm, fs.ddp("dp"))
        for k in range(3):
            if comm.rank == 0:
                copy = fs.layouts.map_units(lambda node, k=k: node.replace([x * k for x in node.buffers]), state.params)
                fs.full_tree(copy, comm=comm)
            state, _ = STEP(state, batch_of(comm), comm)
        return fs.full_tree(state.params, comm=comm)["b"]

    one, other = simulate(fs.Mesh({"dp": 2}), program)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_group_may_do_alone_what_takes_collectives_in_it_alone():
    """Copies that one shard group has gathered by itself do not shift the names of what all gather later."""

    def program(comm):
        mesh_rank = comm.mesh.coord("replica", comm.rank)
        params = started(comm, fs.hsdp("replica", "dp")).params
        copies = [fs.layouts.map_units(lambda n, k=k: n.replace([x * k for x in n.buffers]), params) for k in range(3)]
        for copy in copies if mesh_rank == 0 else copies[:1]:
            fs.full_tree(copy, comm=comm)
        return STEP(fs.init_state(fs.optim.sgd(0.1), copies[2], comm=comm), batch_of(comm), comm)[1].loss

    losses = simulate(fs.Mesh({"replica": 2, "dp": 2}), program)
    assert len({float(each) for each in losses}) == 1
