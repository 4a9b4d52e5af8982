"""Ranks that were given different things find out before the first collective that moves data, all with one text."""

import re

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, FsharpError, MeshError, TreeError
from fsharp.functional.comm.agree import all_gather_fixed_size, check_on_all_ranks
from fsharp.testing import simulate
from tests.ranks import on_ranks

DP3, GRID = fs.Mesh({"dp": 3}), fs.Mesh({"o": 2, "i": 2})


def tree(**changes):
    return {"w": torch.ones(4, 3), "b": torch.zeros(3), **changes}


def caught(mesh, run):
    """What every rank raised, and how many collectives it had called by then."""

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        try:
            run(counting)
        except FsharpError as error:
            return error, counting.num_calls
        return None, counting.num_calls

    return simulate(mesh, rank_fn)


def planned(params, mesh, **options):
    strategy = options.pop("strategy", None) or fs.zero3(*mesh.names)
    return fs.plan(params, mesh, strategy, **options)


def sharding(make=tree, *, check_values=True, **options):
    """shard() with a tree and options that may depend on the rank."""

    def run(comm):
        params = make(comm.rank) if make is not tree else tree()
        chosen = {name: value(comm.rank) for name, value in options.items()}
        fs.shard(params, planned(params, comm.mesh, **chosen), comm, check_values=check_values)

    return run


def starting(tx, place=lambda rank: "optim"):
    def run(comm):
        layout = planned(tree(), comm.mesh, strategy=fs.zero1(*comm.mesh.names))
        fs.init_state(tx(comm.rank), fs.shard_for(tree(), layout, comm.rank, place=place(comm.rank)), comm=comm)

    return run


def initialising(key):
    return lambda comm: fs.init_params(fs.init.zeros, planned(tree(), comm.mesh), comm, key=key(comm.rank))


def on_one(odd, even):
    return lambda rank: odd if rank == 1 else even


SHARED = torch.ones(2)
DIFFERENT = {
    "shapes": (sharding(on_one(tree(w=torch.ones(5, 3)), tree())), ["w: [4, 3]", "w: [5, 3]"]),
    "paths": (sharding(on_one(tree(x=torch.ones(1)), tree())), ["shapes", "rank 1: x: [1]"]),
    "dtypes": (sharding(on_one(tree(b=torch.zeros(3).half()), tree())), ["b: float32", "rank 1: b: float16"]),
    "containers": (
        sharding(on_one([torch.ones(2)], (torch.ones(2),))),
        ["PyTreeSpec((*,))", "rank 1: (root): PyTreeSpec([*])"],
    ),
    "ties": (
        sharding(on_one({"a": SHARED, "b": SHARED.clone()}, {"a": SHARED, "b": SHARED})),
        ["b: ('', 'a')", "rank 1: b: None"],
    ),
    "strategy": (sharding(strategy=on_one(fs.zero1("dp"), fs.zero3("dp"))), ["dp: SSS", "rank 1: (root): dp: RPS"]),
    "units": (sharding(units=on_one("*", None)), ["rank 1: b; w"]),
    "frozen": (sharding(frozen=on_one("b", ())), ["b: False", "rank 1: b: True"]),
    "labels": (sharding(labels=on_one({"w": "matrix"}, "default")), ["w: default", "rank 1: w: matrix"]),
    "atoms": (
        sharding(atoms=on_one(fs.layouts.RowsAtom(2), fs.layouts.ElementAtom())),
        ["w: element", "rank 1: b: 2 rows; w: 2 rows"],
    ),
    "precision": (
        sharding(precision=on_one(fs.Precision(torch.bfloat16), fs.Precision())),
        ["rank 1: b: bfloat16/float32/bfloat16/float32; w: bfloat16/float32/bfloat16/float32"],
    ),
    "key": (initialising(on_one(7, 3)), ["ranks 0, 2: 3", "rank 1: 7"]),
    "tx": (
        starting(on_one(fs.optim.adamw(1e-3), fs.optim.adamw(2e-3))),
        ["'learning_rate': '0.002'", "rank 1: {'adamw': {'learning_rate': '0.001'"],
    ),
    "place": (
        starting(lambda rank: fs.optim.sgd(1.0), on_one("params", "optim")),
        ["dp:Shard", "rank 1: (root): dp:Replicate"],
    ),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_ranks_that_differ_raise_one_text_that_names_field_and_ranks(field):
    run, texts = DIFFERENT[field]
    results = caught(DP3, run)
    name = "shapes" if field == "paths" else field
    assert {type(error) for error, _ in results} == {AgreementError}
    assert len({str(error) for error, _ in results}) == 1
    with pytest.raises(AgreementError, match=rf"(?m)^  {name} +ranks? [\d, ]+: "):
        raise results[0][0]
    for text in ["ranks were given different values", "ranks 0, 2: ", "rank 1: ", *texts]:
        assert text in str(results[0][0])
    assert [calls for _, calls in results] == [2, 2, 2], "one exchange of digests, one of texts, nothing else"


@pytest.mark.parametrize(
    "run",
    [
        sharding(check_values=False),
        initialising(lambda rank: 3),
        starting(lambda rank: fs.optim.lion(0.1), lambda rank: "params"),
    ],
)
@pytest.mark.parametrize("mesh", [DP3, GRID], ids=str)
@on_ranks(lambda mesh: mesh)
def test_ranks_that_agree_exchange_one_digest_for_each_axis(comm, mesh, run):
    counting = fs.collectives.CountingComm(comm)
    run(counting)
    head = 40
    expected = []
    for axis, size in reversed(mesh.axes):
        expected.append(fs.collectives.Call("all_gather", axis, (size - 1) * head))
        head *= size
    assert list(counting.calls) == expected


def test_functions_made_on_each_rank_are_told_apart_by_name_alone():
    def tx(rank):
        schedule, keep = (lambda count: 0.1), (lambda path: path == "w")
        return fs.optim.chain(
            fs.optim.masked(fs.optim.sgd(schedule), keep), fs.optim.sgd(fs.optim.cosine_decay_schedule(1.0, 2))
        )

    assert [error for error, _ in caught(DP3, starting(tx))] == [None] * 3


@pytest.mark.parametrize("mesh", [DP3, GRID], ids=str)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_rank_that_fails_fails_all(mesh, bad):
    def run(comm):
        layout = planned(tree(), comm.mesh)
        fs.shard(tree(b=torch.zeros(4)) if comm.rank == bad else tree(), layout, comm)

    results = caught(mesh, run)
    texts = {str(error) for error, _ in results}
    with pytest.raises(AgreementError, match=f"failed on rank {bad}; rank {bad} says") as shown:
        raise results[bad][0]
    assert len(texts) == 1
    assert "'b'  got float32[4], expected float32[3]" in str(shown.value)
    assert isinstance(shown.value.__cause__, TreeError)


def test_a_failure_of_every_rank_is_raised_as_it_is():
    results = caught(DP3, lambda comm: fs.shard(tree(b=torch.zeros(4 + comm.rank)), planned(tree(), comm.mesh), comm))
    for rank, (error, calls) in enumerate(results):
        with pytest.raises(TreeError, match=re.escape(f"got float32[{4 + rank}]")):
            raise error
        assert calls == 2


def test_a_comm_of_another_mesh_fails_without_waiting():
    results = caught(DP3, lambda comm: fs.gather(fs.shard_for(tree(), planned(tree(), GRID), 0), comm=comm))
    for error, calls in results:
        with pytest.raises(MeshError, match=re.escape("(root) on Mesh(o=2, i=2)\n  comm  Mesh(dp=3)")):
            raise error
        assert calls == 0


def test_agree_shows_only_the_lines_that_differ_and_shortens_them():
    def run(comm):
        lines = [f"line {i}" for i in range(50)]
        lines[comm.rank % 2] = f"{'long ' * 100}{comm.rank % 2}"
        fs.collectives.agree(
            "here()", {"text": "\n".join(lines), "same": "x", **({"extra": "y"} if comm.rank == 3 else {})}, comm
        )

    texts = {str(error) for error, _ in caught(GRID, run)}
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("here(): ranks were given different values.")
    assert "line 7" not in text
    assert "  same" not in text
    assert "extra  ranks 0, 1, 2: (absent)" in text
    assert "extra  rank 3: y" in text
    assert max(map(len, text.splitlines())) < 200


def test_ranks_whose_values_differ_late_are_all_named():
    def run(comm):
        fs.collectives.agree("here()", {"key": ["x", "y" * 300 + "1", "y" * 300 + "2"][comm.rank]}, comm)

    text = str(caught(DP3, run)[0][0])
    assert "key  rank 0: x" in text
    assert "key  ranks 1, 2: yyy" in text


def test_many_ranks_are_counted_and_not_listed():
    def run(comm):
        fs.collectives.agree("here()", {"key": str(comm.rank == 15)}, comm)

    with pytest.raises(AgreementError, match="ranks 0, 1, 2, 3, 4, 5, 6, 7 and 7 more: False"):
        raise caught(fs.Mesh({"dp": 16}), run)[0][0]


@pytest.mark.parametrize("mesh", [DP3, GRID, fs.Mesh({"a": 2, "b": 1, "c": 3})], ids=str)
def test_bytes_are_gathered_in_order_of_rank(mesh):
    expected = [bytes([rank, 255 - rank]) for rank in range(mesh.size)]
    assert simulate(mesh, lambda comm: all_gather_fixed_size(expected[comm.rank], comm)) == [expected] * mesh.size


def test_one_rank_alone_asks_nobody():
    counting = fs.collectives.CountingComm(fs.SingleComm())
    fs.collectives.agree("here()", {"a": "b"}, counting)
    assert counting.num_calls == 0


@on_ranks(fs.Mesh({"dp": 2}))
def test_an_error_while_a_rank_describes_its_result_is_an_error_on_all(comm):
    def describe(result):
        if comm.rank == 1:
            raise MemoryError("no room for the text")
        return {"result": str(result)}

    with pytest.raises((AgreementError, MemoryError), match="no room for the text"):
        check_on_all_ranks("here()", comm, lambda: 7, describe)
    assert comm.all_reduce(torch.ones(()), "dp") == 2  # ranks are together again
