"""Doors: tensors that leave a unit in another way than as its output, or in odd containers. Loss and gradients are torch's."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import make_dataclass

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import TreeError
from fsharp.testing import DebugPolicy, simulate
from tests import modules
from tests.modules import close, descend, values
from tests.ranks import on_ranks
from tests.scheduling import DP, STRATEGIES, every

each_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero3"])


Plain, Slotted = make_dataclass("Plain", ["h"]), make_dataclass("Slotted", ["h"], slots=True)
Frozen = make_dataclass("Frozen", ["h"], frozen=True)
Named = namedtuple("Named", ["h", "n"])


class Slots:
    __slots__ = ("__hidden", "h")

    def __init__(self, h):
        self.h, self.__hidden = h, [h]


class Listed(list):
    pass


class Object:
    def __init__(self, h):
        self.inner = Plain({"deep": [h]})
        self.me = self


CONTAINERS = {
    "dataclass": (Plain, lambda box: box.h),
    "dataclass with slots": (Slotted, lambda box: box.h),
    "frozen dataclass": (Frozen, lambda box: box.h),
    "namedtuple": (lambda h: Named(h, 3), lambda box: box.h),
    "ordered dict": (lambda h: OrderedDict(h=h), lambda box: box["h"]),
    "deque": (lambda h: deque([h]), lambda box: box[0]),
    "what torch.max returns": (lambda h: torch.return_types.max((h, h)), lambda box: box.values),
    "nested": (lambda h: ({"a": [Slotted([h])]},), lambda box: box[0]["a"][0].h[0]),
}
FOREIGN = {
    "Slots": (Slots, lambda box: box.h),
    "set": (lambda h: {h}, lambda box: next(iter(box))),
    "Listed": (lambda h: Listed([h]), lambda box: box[0]),
    "Object": (Object, lambda box: box.inner.h["deep"][0]),
}
VIEWS = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "a row": lambda w: w[1],
    "a slice": lambda w: w[1:, ::2],
    "flat": lambda w: w.view(-1),
    "detached": lambda w: w.detach(),
    "of the data": lambda w: w.data[0],
    "expanded": lambda w: w[0].expand(3, 4),
}


class Inner(nn.Module):
    """A unit. ``door(self, x, given)`` returns what it returns, and may leave tensors elsewhere."""

    def __init__(self, door):
        super().__init__()
        self.up, self.down, self.door = nn.Linear(4, 5), nn.Linear(5, 4), door
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, x, given):
        return self.door(self, x, given)

    def hidden(self, x):
        return self.up(x).tanh()


class Outer(nn.Module):
    """A root: a unit with a door, and others before and behind it."""

    def __init__(self, door, use):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(door), nn.Linear(4, 4)
        self.use = use

    def forward(self, x):
        given = []
        out = self.inner(self.first(x), given)
        return self.use(self, out, given)


def same_as_torch(door, use, loss=lambda model, out: out, strategy="zero3", *, change=lambda model: None, nesting=False):
    """Loss, parameters after some steps, and an evaluation between them are those of the module alone."""

    def make():
        model = modules.seeded(lambda: Outer(door, use))
        change(model)
        return model

    def steps(model, optimizer):
        losses = []
        for i in range(3):
            x = torch.linspace(-1, 1, 12).view(3, 4) + i
            with torch.no_grad():
                losses.append(loss(model, model(x)).detach().clone())
            value = loss(model, model(x))
            descend(value, optimizer)
            losses.append(value.detach())
        return losses

    def rank_fn(comm):
        units = [Inner, nn.Linear] if nesting else [Inner, "first", "last"]
        policy = DebugPolicy(poison=True)
        model = fs.shard_module(make(), mesh=comm, strategy=STRATEGIES[strategy][1], units=units, policy=policy)
        return steps(model, fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)), values(model)

    whole = make()
    expected = steps(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    for losses, mine in simulate(DP, rank_fn):
        close(losses, expected)
        close(mine, modules.detached(whole))


@every(2, name=[*CONTAINERS, *FOREIGN], strategy=["ddp", "zero3"])
def test_containers(name, strategy):
    """What is returned: activations, and a weight beside them. In objects of other classes there may be activations alone."""
    box, unbox = (CONTAINERS | FOREIGN)[name]
    box_weight, unbox_weight = (list, lambda box: torch.stack(box)) if name in FOREIGN else (box, unbox)

    def door(self, x, given):
        h = self.hidden(x)
        return box(self.down(h)), box_weight(self.weight.T), h

    def use(self, out, given):
        return box(self.last(unbox(out[0]) @ unbox_weight(out[1])).square().mean())

    same_as_torch(door, use, lambda model, out: unbox(out), strategy)


@pytest.mark.parametrize("name", FOREIGN)
@on_ranks(fs.Mesh({"dp": 1}))
def test_a_weight_in_an_object_of_another_class_is_refused(comm, name):
    box, _ = FOREIGN[name]
    model = Outer(lambda self, x, given: (x, [box(self.weight[0])]), lambda self, out, given: out)
    model = fs.shard_module(model, mesh=comm, strategy=fs.ddp("dp"), units=[Inner])
    with pytest.raises(TreeError, match=rf"module 'inner' returns or keeps a parameter, .* in a {name}\..* register"):
        model(torch.ones(2, 4))


@every(6, view=VIEWS, way=["returned", "attribute", "list of its own", "list it was given", "dict", "buffer"])
def test_views_of_a_weight(way, view):
    """Returned, or left elsewhere and used by another unit and in the loss."""

    def door(self, x, given):
        w, out = VIEWS[view](self.weight), self.down(self.hidden(x))
        if way == "returned":
            return out, w
        if way == "attribute":
            self.seen = w
        if way == "list of its own":
            self.list.append(w)
        if way == "dict":
            self.dict["w"] = (w, 3)
        if way == "list it was given":
            given.append(w)
        if way == "buffer":
            self.buffer = w
        return out, None

    def change(model):
        model.inner.list, model.inner.dict = [], {}
        model.inner.register_buffer("buffer", None)

    def seen(model, out, given):
        return {
            "returned": lambda: out[1],
            "attribute": lambda: model.inner.seen,
            "list of its own": lambda: model.inner.list[-1],
            "dict": lambda: model.inner.dict["w"][0],
            "list it was given": lambda: given[0],
            "buffer": lambda: model.inner.buffer,
        }[way]()

    def use(self, out, given):
        w = seen(self, out, given)
        return self.last(out[0]).mean() + (w * w.sum()).sum(), w, given

    same_as_torch(door, use, lambda model, out: out[0] + seen(model, (None, out[1]), out[2]).square().mean(), change=change)


class Keeping(nn.Module):
    """A unit that stores a view of its weight where the caller says so."""

    def __init__(self):
        super().__init__()
        self.weight, self.keeps = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4)), False

    def forward(self, x, given):
        if self.keeps:
            self.seen = self.weight[1]
            given.append(self.weight[2])
        return torch.tanh(x @ self.weight)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(Keeping() for _ in range(5))

    def forward(self, x, given):
        for each in self.each:
            x = each(x, given)
        return x


def test_views_that_are_first_stored_while_a_schedule_is_followed():
    """After the backward the weights' memory is that of other units: stored views have to be copies."""

    def steps(model, optimizer):
        found = []
        for i in range(6):
            given = []
            for each in model.each:
                each.keeps = i in (3, 5)
            loss = model(torch.linspace(-1, 1, 12).view(3, 4) + i, given).sum()
            given += [each.seen for each in model.each if each.keeps]
            loss = loss + sum(view.sum() for view in given)
            loss.backward()
            found += [loss.detach(), *(view.detach().clone() for view in given)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    def rank_fn(comm):
        model = fs.shard_module(Chain(), mesh=comm, strategy=STRATEGIES["zero3"][1], units=[Keeping])
        return steps(model, fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))

    whole = Chain()
    expected = steps(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    for found in simulate(DP, rank_fn):
        close(found, expected)


@every(
    4,
    way=["attribute", "list", "dict", "set", "buffer", "given list", "given dict in a list", "root"],
    also=[False, True],
    strategy=["ddp", "zero3"],
)
def test_activations_left_elsewhere(way, also, strategy):
    """From the middle of a unit: a backward may come to nothing else of it."""

    def door(self, x, given):
        h = self.hidden(self.up.weight.mean() * x)
        h = self.up(self.down(h)).tanh()
        if way in ("attribute", "buffer", "root"):
            self.aux = h
        if way == "list":
            self.aux = [h]
        if way == "dict":
            self.aux = {"h": (h,)}
        if way == "set":
            self.aux = {h}
        if way == "given list":
            given.append(h)
        if way == "given dict in a list":
            given.append({"h": [h]})
        return self.down(h)

    def change(model):
        if way == "buffer":
            model.inner.register_buffer("aux", None)

    def of(model, given):
        if way.startswith("given"):
            return given[0] if way == "given list" else given[0]["h"][0]
        aux = model.inner.aux
        return aux if isinstance(aux, torch.Tensor) else aux["h"][0] if way == "dict" else next(iter(aux))

    def use(self, out, given):
        out = self.last(out)
        if way == "root":
            self.kept = [out, self.inner.aux.square()]
            return None
        return out.mean(), given

    def loss(model, out):
        if way == "root":
            return model.kept[1].mean() + also * model.kept[0].mean()
        return of(model, out[1]).square().mean() + also * out[0]

    same_as_torch(door, use, loss, strategy, change=change)


@pytest.mark.parametrize("nesting", [False, True])
@each_strategy
def test_forward_hooks_see_what_others_see(strategy, nesting):
    """Of units: outputs, and inputs; what they keep may be used in the loss, and what they return takes the output's place."""
    seen = {}

    def door(self, x, given):
        return self.down(self.hidden(x)), self.weight.T

    def use(self, out, given):
        return self.last(out[0] @ out[1]).mean()

    def change(model):
        mine = seen[id(model)] = {}
        model.inner.register_forward_hook(lambda module, args, out: mine.update(out=out, x=args[0]))
        model.last.register_forward_hook(lambda module, args, out: out * 2)
        model.first.register_forward_pre_hook(lambda module, args: (args[0] * 3,))

    def loss(model, out):
        mine = seen[id(model)]
        return out + mine["out"][0].square().mean() + (mine["out"][1] * mine["x"].sum()).sum()

    same_as_torch(door, use, loss, strategy, change=change, nesting=nesting)


@pytest.mark.parametrize(
    ("late", "name"),
    [
        (lambda h: (x * 2 for x in [h]), "generator"),
        (lambda h: map(torch.neg, [h]), "map"),
        (lambda h: {"a": [zip([h], [h])]}, "zip"),
        (lambda h: Plain(filter(None, [h])), "filter"),
    ],
)
@on_ranks(fs.Mesh({"dp": 1}))
def test_what_computes_later_is_refused(comm, late, name):
    model = Outer(lambda self, x, given: late(self.hidden(x)), lambda self, out, given: 0)
    model = fs.shard_module(model, mesh=comm, strategy=fs.ddp("dp"), units=[Inner])
    with pytest.raises(TreeError, match=rf"returns a {name}, which would compute after its parameters are released"):
        model(torch.ones(2, 4))


def test_what_is_returned_is_changed_where_others_have_it():
    """A list, a dict or an object that is returned is the same one, with another tensor in it."""
    held = {}

    def door(self, x, given):
        held[self] = [Plain(self.weight[0])]
        return held[self], self.down(self.hidden(x))

    def use(self, out, given):
        assert out[0] is held[self.inner]
        return self.last(out[1]).mean() + held[self.inner][0].h.sum()

    same_as_torch(door, use)


def test_the_module_is_looked_at_and_nothing_is_copied():
    """Attributes of other kinds stay as they are: no tensor that is no view of a weight is replaced."""
    marks = [torch.ones(2), {"a": torch.zeros(1)}, (torch.ones(1),), nn.Parameter(torch.ones(1)).detach()]

    def change(model):
        model.inner.marks, model.inner.mark = marks, marks[0]

    def door(self, x, given):
        self.fresh = fresh = torch.ones(3)
        given.append(fresh)
        return self.down(self.hidden(x)), fresh

    def use(self, out, given):
        assert self.inner.fresh is given[0] is out[1]
        assert self.inner.marks is marks
        assert self.inner.mark is marks[0]
        return self.last(out[0]).mean()

    same_as_torch(door, use, change=change)
