"""What reshard refuses: on all ranks, with names, before anything is sent."""

import re

import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, FsharpError, LayoutError, MeshError, TreeError
from fsharp.testing import simulate

TREE = {"a": torch.arange(5.0), "b": {"c": torch.arange(6.0)}}
OLD = fs.plan(TREE, fs.Mesh({"dp": 2}), fs.zero3("dp"), units="*")


def refused(tree_of, layout_of=lambda comm: OLD, *, is_handed_out=False, **options):
    """The errors of two ranks, which have sent nothing but what they agree by."""

    def rank_fn(comm):
        counting = fs.collectives.CountingComm(comm)
        with pytest.raises(FsharpError) as error:
            fs.reshard(tree_of(comm), layout_of(comm), comm=counting, **options)
        # The structure of a tree goes to ranks that passed none.
        assert is_handed_out or "all_to_all" not in {call.op for call in counting.calls}
        return [error.value]

    return [error for [error] in simulate(OLD.mesh, rank_fn)]


def shards(comm):
    return fs.shard_for(TREE, OLD, comm.rank)


def planned(tree=TREE, **options):
    return fs.plan(tree, OLD.mesh, fs.ddp("dp"), **options)


def changed(comm, change):
    tree = shards(comm)
    change(tree, fs.layouts.units_of(tree)[0])
    return tree


CASES = {
    "another name": (shards, planned({"a": TREE["a"], "b": {"d": TREE["b"]["c"]}}), LayoutError, r"'b\.c'\s+not in the new"),
    "another shape": (
        shards,
        planned(TREE | {"a": torch.zeros(4)}),
        LayoutError,
        r"'a'\s+shape \[5\], in the new layout \[4\]",
    ),
    "another dtype": (shards, planned(TREE | {"a": TREE["a"].double()}), LayoutError, r"'a'\s+dtype float32, .* float64"),
    "another tie": (
        shards,
        planned({"a": TREE["a"], "b": {"c": TREE["a"]}}),
        LayoutError,
        r"'b\.c'\s+tied to nothing, in the new layout 'a'",
    ),
    "no layout": (shards, None, LayoutError, r"layout is None"),
    "no tree": (lambda comm: None, OLD, TreeError, r"expected a tree of Sharded, got NoneType"),
    "a whole tree": (lambda comm: TREE, OLD, TreeError, r"expected a tree of Sharded, got dict"),
    "a part of a tree": (lambda comm: shards(comm)["b"], OLD, TreeError, r"found at\s+''\n\s+unit\s+'b'"),
    "something in a tree": (lambda comm: shards(comm) | {"n": 3}, OLD, TreeError, r"another leaf in it.*\n.*found at\s+'n'"),
    "a unit is missing": (lambda comm: {"b": shards(comm)["b"]}, OLD, LayoutError, r"'a'\s+not in the tree"),
    "gathered": (lambda comm: fs.gather(shards(comm), comm=comm), OLD, TreeError, r"does not rest(.*\n)*.*unit\s+'a'"),
    "donated": (lambda comm: changed(comm, lambda t, n: n.donate()), OLD, TreeError, r"was donated(.*\n)*.*unit\s+'a'"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_on_all_ranks(name):
    tree_of, layout, kind, text = CASES[name]
    for error in refused(tree_of, lambda comm: layout):
        assert isinstance(error, kind)
        assert re.search(text, str(error)), str(error)


def test_gradients_that_ranks_have_not_summed_are_refused():
    layout = fs.plan(TREE, OLD.mesh, fs.zero1("dp"), units="*")

    def tree_of(comm):
        def loss(params, batch, comm):
            return fs.forward(lambda tree: tree["a"].sum() + tree["b"]["c"].sum(), params, comm=comm)

        return fs.value_and_grad(loss)(fs.shard_for(TREE, layout, comm.rank), None, comm=comm)[1]

    for error in refused(tree_of, lambda comm: OLD, place="optim"):
        assert isinstance(error, TreeError)
        assert re.search(r"place\s+dp:Partial", str(error))


def test_state_that_is_not_elementwise_is_refused_by_name():
    def tree_of(comm):
        norms = fs.layouts.map_units(lambda node: node.replace([b.norm() for b in node.buffers]), shards(comm))
        return {"params": shards(comm), "norms": norms}

    for error in refused(tree_of):
        assert isinstance(error, TreeError)
        assert re.search(
            r"in\s+norms\n\s+unit\s+'a'\n(.*\n)*\s+leaves\s+a\n\s+got\s+float32\[\]\n\s+expected\s+\[3\]", str(error)
        )


def test_state_of_other_trained_leaves_is_refused():
    layout = planned(frozen="a")
    for error in refused(lambda comm: fs.init_state(fs.optim.adamw(1e-2), shards(comm), comm=comm), lambda comm: layout):
        assert re.search(r"main does not fit the new layout\.\n\s+'a'\s+trained True, in the new layout False\n", str(error))


def test_ranks_that_differ_are_refused_on_all_of_them():
    other = planned(units="*")
    for error in refused(shards, lambda comm: other if comm.rank else planned()):
        assert isinstance(error, AgreementError)
        assert "units" in str(error)
    for error in refused(lambda comm: shards(comm) if comm.rank else {"a": shards(comm)["a"]}):
        assert "'b.c'" in str(error)
    long = planned({"a": torch.zeros(9), "b": TREE["b"]})
    for error in refused(shards, lambda comm: OLD if comm.rank else long):
        assert re.search(r"'a'\s+shape \[5\], in the new layout \[9\]", str(error))
    for error in refused(lambda comm: shards(comm) if comm.rank else {"x": shards(comm)}):
        assert isinstance(error, AgreementError)
        assert "x a: dp:Shard" in str(error)


def test_ranks_that_do_not_fit_the_meshes_are_refused():
    for error in refused(lambda comm: shards(comm) if comm.rank else None, is_handed_out=True):
        assert isinstance(error, MeshError)
        assert re.search(r"passed a tree\s+\[1\]\n\s+its mesh\s+Mesh\(dp=2\)", str(error))
    for error in refused(shards, lambda comm: OLD, ranks=(1, 0)):
        assert isinstance(error, MeshError)
        assert re.search(r"ranks\s+\[1, 0\]", str(error))
    for error in refused(shards, lambda comm: fs.plan(TREE, fs.Mesh({"dp": 3}), fs.zero3("dp"))):
        assert re.search(r"new mesh\s+Mesh\(dp=3\)\n\s+comm\s+Mesh\(dp=2\)", str(error))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"place": "grads"}, "place is 'grads'"),
        ({"place": "optim", "cast": True}, "cast=True is for place='params'"),
        ({"buffer_nbytes": 40}, "buffer_nbytes is 40, expected at least 48 for 2 ranks"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    for error in refused(shards, lambda comm: OLD, **options):
        assert isinstance(error, LayoutError)
        assert text in str(error)
