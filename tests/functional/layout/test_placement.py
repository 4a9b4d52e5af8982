import re
from itertools import product

import pytest
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp import Strategy
from fsharp.errors import StrategyError
from fsharp.layouts import AxisRule, MeshPlacement, Partial, Replicate, Shard
from fsharp.testing.generate import legal_strategies, meshes, strategies

R, S, P = Replicate, Shard, Partial
NAMED = {
    "ddp": (fs.ddp, (R, P, R)),
    "zero1": (fs.zero1, (R, P, S)),
    "zero2": (fs.zero2, (R, S, S)),
    "zero3": (fs.zero3, (S, S, S)),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_strategies_are_their_table(name):
    make, rule = NAMED[name]
    assert make("dp") == Strategy({"dp": AxisRule(*rule)})
    assert make("a", "b") == Strategy({"a": AxisRule(*rule), "b": AxisRule(*rule)})
    strategy = make("dp")
    assert (strategy.params["dp"], strategy.grads["dp"], strategy.optim["dp"]) == rule


def test_hybrids_shard_inside_first():
    assert fs.hsdp("o", "i").axis_order == fs.hfsdp("o", "i").axis_order == ("i", "o")
    assert fs.hsdp("o", "i").optim == MeshPlacement(("i", "o"), (S, R))
    assert fs.hfsdp("o", "i").optim == MeshPlacement(("i", "o"), (S, S))
    assert fs.hsdp("o", "i").params == fs.hfsdp("o", "i").params == MeshPlacement(("i", "o"), (S, R))
    assert fs.hsdp("o", "i").grads == fs.hfsdp("o", "i").grads == MeshPlacement(("i", "o"), (S, P))
    assert str(fs.hfsdp("o", "i")) == "o: RPS, i: SSS"


REASONS = {
    "only gradients can be partial sums": lambda p, g, o: P in (p, o),
    "replicated gradients cost an all_reduce": lambda p, g, o: g is R,
    "a part of the parameters can update no more": lambda p, g, o: (p, o) == (S, R),
    "a part of the gradients can update no more": lambda p, g, o: (g, o) == (S, R),
}


@pytest.mark.parametrize("rule", list(product((R, S, P), repeat=3)), ids=str)
def test_each_combination_is_legal_or_refused_with_its_reason(rule):
    reasons = [text for text, is_bad in REASONS.items() if is_bad(*rule)]
    if not reasons:
        assert Strategy({"dp": AxisRule(*rule)}).rules == (("dp", AxisRule(*rule)),)
        return
    with pytest.raises(StrategyError, match=reasons[0]) as caught:
        Strategy({"dp": AxisRule(*rule)})
    for part in ("axis 'dp'", *(f"{kind} +{p!r}" for kind, p in zip(("params", "grads", "optim"), rule, strict=True))):
        assert re.search(part, str(caught.value))


def test_generator_knows_every_legal_strategy():
    one, two = fs.Mesh({"dp": 2}), fs.Mesh({"outer": 2, "inner": 2})
    assert {make("dp") for make, _ in NAMED.values()} < set(legal_strategies(one))
    assert len(legal_strategies(one)) == 5
    named = {make("outer", "inner") for make, _ in NAMED.values()}
    named |= {make(*axes) for make in (fs.hsdp, fs.hfsdp) for axes in (("outer", "inner"), ("inner", "outer"))}
    assert {frozenset(s.rules) for s in named} < {frozenset(s.rules) for s in legal_strategies(two)}
    assert len(legal_strategies(two)) == 25 - 2, "one axis (R, S, S) beside one (S, P, S) does not nest"


@given(meshes().flatmap(strategies))
def test_places_of_a_strategy_nest(strategy):
    places = [strategy.params, strategy.grads, strategy.optim, strategy.full]
    for place in places:
        assert place.axis_order == strategy.axis_order
        assert place.sharded_axes == strategy.axis_order[: len(place.sharded_axes)], "sharded axes are the leading ones"
        assert sorted(place.sharded_axes + place.partial_axes + place.replicated_axes) == sorted(strategy.axis_order)
        assert place.cotangent_place.cotangent_place == place
        assert (place.cotangent_place.sharded_axes, place.cotangent_place.partial_axes) == (
            place.sharded_axes,
            place.replicated_axes,
        )
    assert set(strategy.params.sharded_axes) | set(strategy.grads.sharded_axes) <= set(strategy.optim.sharded_axes)
    assert not strategy.params.partial_axes
    assert not strategy.optim.partial_axes


@given(st.data())
def test_strategies_are_values(data):
    mesh = data.draw(meshes())
    strategy = data.draw(strategies(mesh))
    again = Strategy(dict(strategy.rules))
    assert (again, hash(again)) == (strategy, hash(strategy))
    strategy.check_mesh(mesh)
    assert [str(strategy).count(f"{axis}: ") for axis in mesh.names] == [1] * len(mesh.names)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Strategy({}), "no axis"),
        (lambda: fs.zero3(), "zero3(): expected one or more different axis names, got []"),
        (lambda: fs.ddp("a", "a"), "ddp(): expected one or more different axis names, got ['a', 'a']"),
        (lambda: fs.zero1(3), "zero1(): expected one or more different axis names, got [3]"),
        (lambda: fs.hsdp("a", "a"), "hsdp(): outer and inner are the same axis 'a'"),
        (lambda: fs.hfsdp("a", "a"), "hfsdp(): outer and inner are the same axis 'a'"),
        (
            lambda: Strategy({"a": AxisRule(R, S, S), "b": AxisRule(S, P, S)}),
            "sharded axes of parameters and gradients do not nest",
        ),
        (lambda: fs.zero3("tp").check_mesh(fs.Mesh({"dp": 2})), "unknown axis 'tp': Mesh(dp=2) has ['dp']"),
        (lambda: fs.zero3("a").check_mesh(fs.Mesh({"a": 2, "b": 2})), "has no rule for axis 'b' of Mesh(a=2, b=2)"),
    ],
)
def test_bad_strategies_are_refused(make, text):
    with pytest.raises(StrategyError, match=re.escape(text)):
        make()


def test_specs_are_written_as_in_jax():
    spec = fs.P("a", None, ("b", "c"), ("d",), ())
    assert repr(spec) == "P('a', None, ('b', 'c'), 'd', None)"
    assert eval(repr(spec), {"P": fs.P}) == fs.P(*spec) == spec
    assert len({fs.P(), fs.P(None), fs.P("a"), fs.P("a", None), fs.P(("a",))}) == 4
    assert (fs.P().axes, fs.P(None).axes, fs.P("a").axes, fs.P(("b", "a")).axes) == ((), (), ("a",), ("b", "a"))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (("dp", "dp"), "axis 'dp' is named twice in P('dp', 'dp')"),
        ((("dp", "dp"),), "axis 'dp' is named twice in P(('dp', 'dp'))"),
        ((None, ("a", "b"), "b"), "axis 'b' is named twice"),
        ((3,), "P(): dim 0 is 3, expected the name of an axis"),
        (("a", ""), "P(): dim 1 is '', expected"),
        ((["a"],), "P(): dim 0 is ['a'], expected"),
        ((("a", None),), "P(): dim 0 is ('a', None), expected"),
    ],
)
def test_specs_refused(entries, text):
    with pytest.raises(StrategyError, match=re.escape(text)):
        fs.P(*entries)
