"""Pairs of other libraries are tried before they are taken: what looks at more than each element alone is refused."""

import optree
import pytest
import torch

import fsharp as fs
from fsharp.errors import AgreementError, OptionError, TreeError
from fsharp.testing import simulate
from tests.ranks import on_ranks
from tests.scheduling import every

DP3 = fs.Mesh({"dp": 3})


def leaves():
    """With a scalar, an empty leaf, a frozen and a tied one, and two dtypes."""
    tied = torch.ones(4, 2)
    return {
        "embed": {"w": tied, "scale": torch.ones(())},
        "layers": [{"w": torch.ones(5, 3), "b": torch.ones(5), "none": torch.ones(0, 3), "half": torch.ones(7).bfloat16()}],
        "frozen": {"w": torch.ones(3)},
        "head": {"w": tied},
    }


def begin(comm, tx, strategy=fs.zero3, tree=None, **options):
    tree = leaves() if tree is None else tree
    options = {"frozen": ["frozen.w"], "units": "*", **options} if "head" in tree else {"units": "*", **options}
    layout = fs.plan(tree, comm.mesh, strategy("dp"), **options)
    return layout, fs.init_state(tx, fs.shard(tree, layout, comm), comm=comm)


def pair(fn, state=()):
    """Without a state that changes: ``fn`` of gradients and parameters."""
    return lambda params: state, lambda grads, s, params: (fn(grads, params), s)


def each(fn):
    return pair(lambda grads, params: optree.tree_map(fn, grads))


def norm(tree):
    return torch.stack([x.float().norm() for x in optree.tree_leaves(tree)]).norm()


def momentum(params):
    return optree.tree_map(torch.zeros_like, params)


def in_place(grads, state, params):
    optree.tree_map(lambda m, g: m.mul_(0.9).add_(g), state, grads)
    return optree.tree_map(lambda g: g.mul_(-0.1), grads), state


def made_late(grads, state, params):
    state = grads if state is None else optree.tree_map(torch.add, state, grads)
    return optree.tree_map(lambda m: -0.1 * m, state), state


def counted(grads, count, params):
    return optree.tree_map(lambda g: -0.1 * count * g, grads), count + 1


CLIP = pair(lambda grads, params: optree.tree_map(lambda g: g * (1 / norm(grads)).clamp(max=1.0), grads))
RIGHT = {
    "elementwise": each(lambda g: -0.1 * g.sign()),
    "by parameters": pair(lambda grads, params: optree.tree_map(lambda g, p: -0.1 * g - 0.1 * p, grads, params)),
    "in place": (momentum, in_place),
    "made late": (lambda params: None, made_late),
    "zero at first": (lambda params: 0, counted),
    "NaN to zero": each(lambda g: -0.1 * g.nan_to_num() if g.isnan().any() else -0.1 * g),
    "broadcast": pair(lambda grads, params: optree.tree_map(lambda g: torch.tensor(-0.1), grads)),
}


@every(2, name=RIGHT, strategy=[fs.ddp, fs.zero3])
def test_what_looks_at_each_element_alone_is_taken(name, strategy):
    before = torch.get_rng_state()
    simulate(DP3, lambda comm: begin(comm, RIGHT[name], strategy))
    assert torch.equal(before, torch.get_rng_state())


def wrong(comm, tx, text, strategy=fs.zero3, **options):
    with pytest.raises(TreeError, match=text) as caught:
        begin(comm, tx, strategy, **options)
    return str(caught.value)


def masks(make):
    return pair(
        lambda grads, params: optree.tree_map(lambda g, p, m: -0.1 * g - (0.1 * p if m else 0.0), grads, params, make(params))
    )


def skips_a_nan(grads, params):
    is_finite = all(g.isfinite().all() for g in optree.tree_leaves(grads))
    return grads if is_finite else optree.tree_map(torch.zeros_like, grads)


WHOLE = optree.tree_map(lambda x: x.ndim > 1, {"a": {"b": torch.ones(4), "w": torch.ones(4, 4)}, "c": {"w": torch.ones(6)}})
WRONG = {
    "global norm": CLIP,
    "norms of leaves": each(lambda g: g / (g.norm() + 1)),
    "mean": each(lambda g: g - g.mean() if g.numel() else g),
    "one step for all ranks": pair(skips_a_nan),
    "masks by ndim": masks(lambda params: optree.tree_map(lambda x: x.ndim > 1, params)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_at_more_is_refused_on_all_ranks(name):
    found = simulate(DP3, lambda comm: wrong(comm, WRONG[name], r"more than each element alone, and ranks have parts"))
    assert len(set(found)) == 1


def test_under_ddp_the_norm_of_all_is_right_and_that_of_leaves_is_not():
    tree = {"a": {"w": torch.ones(4, 2), "b": torch.ones(3)}, "c": torch.ones(5)}
    simulate(DP3, lambda comm: begin(comm, CLIP, fs.ddp, tree))
    text = r"leaves of a unit share a flat buffer(.|\n)*leaf  a\.b"
    simulate(DP3, lambda comm: wrong(comm, WRONG["norms of leaves"], text, fs.ddp, tree=tree))
    simulate(DP3, lambda comm: begin(comm, WRONG["norms of leaves"], fs.ddp, {"a": torch.ones(4, 2), "c": torch.ones(5)}))


@on_ranks(DP3)
def test_an_error_at_a_nan_is_not_silent(comm):
    def checked(grads, params):
        if not norm(grads).isfinite():
            raise ValueError("NaN")
        return grads

    begin(comm, pair(checked))


def test_what_is_no_function_of_its_arguments_is_refused():
    before = torch.get_rng_state()
    calls = []

    def kept(grads, params):
        calls.append(0)
        return optree.tree_map(lambda g: -0.1 / len(calls) * g, grads)

    for tx in (each(lambda g: g + torch.randn_like(g)), pair(kept)):
        simulate(DP3, lambda comm, tx=tx: wrong(comm, tx, r"test_probe\..*run again, it made other updates"))
    assert torch.equal(before, torch.get_rng_state())


@on_ranks(DP3)
def test_trees_of_the_users_structure_do_not_fit_flat_buffers(comm):
    tree = {"a": {"w": torch.ones(4, 4), "b": torch.ones(4)}, "c": {"w": torch.ones(6)}}
    wrong(comm, masks(lambda params: WHOLE), r"flat buffers(.|\n)*fs\.optim\.masked", tree=tree)


def test_a_pair_that_cannot_be_tried_says_why_and_may_be_vouched_for():
    def large(grads, state, params):
        assert sum(g.numel() for g in optree.tree_leaves(grads)) > 10_000, "too small"
        return optree.tree_map(lambda g: -0.1 * g, grads), state

    simulate(DP3, lambda comm: wrong(comm, (lambda params: (), large), r"AssertionError  too small(.|\n)*optim\.Transform"))
    simulate(DP3, lambda comm: begin(comm, fs.optim.Transform(lambda params: (), large, {})))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: fs.optim.chain(tx, fs.optim.sgd(0.1)),
        lambda tx: fs.optim.masked(tx, "**.w"),
        lambda tx: fs.optim.partition({"default": tx}),
        lambda tx: fs.optim.with_ema(tx, decay=0.9),
        lambda tx: fs.optim.apply_if_finite(tx, 3),
    ],
    ids=["chain", "masked", "partition", "with_ema", "apply_if_finite"],
)
@on_ranks(DP3)
def test_pairs_within_others_are_tried(comm, wrap):
    wrong(comm, wrap(CLIP), r"more than each element alone")


@on_ranks(DP3)
def test_ranks_with_other_pairs_are_told(comm):
    with pytest.raises(AgreementError, match=r"updates of small tensors  rank 1"):
        begin(comm, each(lambda g: -0.1 * g) if comm.rank != 1 else each(lambda g: -0.2 * g), fs.ddp)
    with pytest.raises((AgreementError, TreeError), match=r"more than each element alone"):
        begin(comm, CLIP if comm.rank == 1 else RIGHT["elementwise"])


def by_norm_if_large(g):
    return -0.1 * g / (g.norm() if g.numel() > 20 else 1.0)


@pytest.mark.parametrize("fn", [by_norm_if_large, lambda g: -0.1 * g], ids=["looks at norms", "elementwise"])
def test_first_updates_are_compared_with_those_of_whole_leaves(fn):
    """By a pair with a momentum: of leaves, of which one is larger than any that the trial has."""

    def update(grads, state, params):
        state = optree.tree_map(lambda m, g: 0.9 * m + g, state, grads)
        return optree.tree_map(fn, state), state

    tree = {"head": {"w": torch.ones(8, 6)}, "layers": [{"w": torch.ones(5, 3), "tied": torch.ones(3)}]}

    def rank_fn(comm):
        checked, plain = fs.optim.with_elementwise_check((momentum, update), steps=2), (momentum, update)
        found = []
        for tx in (checked, plain):
            layout, state = begin(comm, tx, tree=tree, frozen=["layers.*.tied"])
            grads = fs.shard(
                optree.tree_map(lambda x: torch.arange(x.numel()).reshape(x.shape) / 9, tree), layout, comm, place="optim"
            )
            grads = fs.trainable(grads)
            try:
                for _ in range(3):
                    state = fs.update(tx, grads, state, comm=comm)
            except TreeError as error:
                return str(error)
            found.append(optree.tree_leaves(fs.full_tree(state.params, comm=comm)))
        assert all(map(torch.equal, *found))
        return ""

    for found in simulate(DP3, rank_fn):
        if fn is by_norm_if_large:
            assert "with_elementwise_check(): the update of whole leaves is not that of shards" in found
            assert "head/w" in found
        else:
            assert found == ""


def test_what_knows_of_ranks_is_not_compared():
    with pytest.raises(OptionError, match=r"inner is a Transform"):
        fs.optim.with_elementwise_check(fs.optim.adamw(1e-3))
    with pytest.raises(OptionError, match=r"steps is '1', expected an int"):
        fs.optim.with_elementwise_check((momentum, made_late), steps="1")
