"""What a sharded module refuses, in the words of modules."""

import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.errors import AgreementError, FsharpError, LayoutError, PatternError, ScheduleError, TreeError
from fsharp.testing import simulate
from tests import modules
from tests.modules import Net, refused, wrap
from tests.ranks import on_ranks
from tests.scheduling import DP


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda m, x: m.head.weight + 1, r"'head\.weight' is used by add\(\) outside of the forward"),
        (
            lambda m, x: setattr(m.head.weight, "data", torch.zeros(11, 6)),
            r"'head\.weight' rests in memory of its ShardedModule",
        ),
        (
            lambda m, x: m.head.weight.set_(torch.zeros(11, 6)),
            r"'head\.weight' .*: set_\(\) and swap_tensors\(\) cannot replace its data",
        ),
        (lambda m, x: m.head.weight.t_(), r"'head\.weight' .*: t_\(\) cannot "),
        (
            lambda m, x: torch.utils.swap_tensors(m.head.weight, m.embed.weight),
            r"'head\.weight' .*: set_\(\) and swap_tensors\(\) cannot replace its data",
        ),
        (lambda m, x: setattr(m.head.weight, "grad", torch.zeros(3)), r"'head\.weight': the module stores the gradient"),
        (lambda m, x: m.half(), r"cannot be moved or cast: unit .* is torch\.float32 on cpu, asked for torch\.float16"),
        (lambda m, x: m.to("meta"), r"asked for torch\.float32 on meta"),
        (lambda m, x: m.layers[0].half(), r"'layers\.0\.norm\.weight' is torch\.float32 on cpu, asked for torch\.float16"),
        (
            lambda m, x: fs.ShardedOptimizer(modules.make().parameters(), torch.optim.SGD),
            r"parameter 0 is a Parameter of shape \[11, 6\]",
        ),
        (lambda m, x: fs.ShardedOptimizer([], torch.optim.SGD), "no parameters"),
    ],
)
@on_ranks(DP)
def test_refused(comm, act, match):
    model, _, x, y = refused(comm)
    model(x, y)["loss"].backward()
    with pytest.raises((LayoutError, TreeError), match=match):
        act(model, x)


def test_units_that_match_nothing():
    comm = fs.SingleComm()
    with pytest.raises(PatternError, match=r"Conv2d matches no module of Net\. Classes of modules in it: Block, Embedding"):
        fs.shard_module(modules.make(), mesh=comm, units=[nn.Conv2d])
    with pytest.raises(PatternError, match=r"'blocks\.\*' matches no module"):
        fs.shard_module(modules.make(), mesh=comm, units="blocks.*")
    net = modules.make()
    net.layers.append(nn.Identity())
    with pytest.raises(PatternError, match=r"module 'layers\.3', a Identity, has no parameters to gather"):
        fs.shard_module(net, mesh=comm, units="layers.*")
    assert type(net) is Net
    assert not isinstance(net.head.weight, fs.modules.ShardedParameter)


def test_lists_that_are_never_called_are_no_units():
    def make():
        return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "scales": nn.ParameterList([torch.ones(2)])})

    for units, own in {"layers": r"layers\.0\.weight", nn.ParameterList: r"scales\.0"}.items():
        with pytest.raises(PatternError, match=f"List, is never called, which would gather '{own}'. Choose"):
            fs.shard_module(make(), mesh=fs.SingleComm(), units=units)
    fs.shard_module(make(), mesh=fs.SingleComm(), units=["layers", "layers.*"])  # the list holds no parameter of its own


def test_names_that_it_would_hide():
    net = modules.make()
    net.layout = 3
    with pytest.raises(TreeError, match="would hide layout of Net"):
        fs.shard_module(net, mesh=fs.SingleComm())
    assert net.layout == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_parameters_say_what_the_whole_ones_are(strategy):
    """Whoever sorts parameters by their dims, or counts them, gets the same as without sharding."""
    expected = [
        (n, p.shape, p.ndim, p.dim(), p.numel(), p.size(-1) if p.ndim else 0, p.stride())
        for n, p in modules.make().named_parameters()
    ]

    def rank_fn(comm):
        model, _ = wrap(comm, strategy)
        every = model.named_parameters()
        found = [(n, p.shape, p.ndim, p.dim(), p.numel(), p.size(-1) if p.ndim else 0, p.stride()) for n, p in every]
        assert found == expected
        assert len(model.embed.weight) == modules.VOCAB
        [(x, y)] = modules.batches(comm, 1)
        model(x, y)["loss"].backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        return sum(p.local.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())

    held = simulate(DP, rank_fn)
    assert sum(mine for mine, _ in held) == held[0][1] * (2 if strategy == "ddp" else 1)


@on_ranks(DP)
def test_what_is_derived_from_a_part_is_one(comm):
    model, *_ = refused(comm, "zero3")
    for derive in (lambda p: p, lambda p: p.detach(), lambda p: p.data, lambda p: p.data.detach()):
        for use in (
            torch.std,
            lambda p: p.cumsum(0),
            lambda p: p.T,
            lambda p: p.norm(dim=1),
            lambda p: p @ p,
            lambda p: p.view(-1),
            lambda p: torch.stack([p, p]),
            lambda p: p.normal_(),
            lambda p: p.norm(dtype=torch.int64),
            torch.where,
            torch.Tensor.tolist,
        ):
            with torch.no_grad(), pytest.raises(LayoutError, match=r"'head.weight' is sharded: this rank holds \d+ of the"):
                use(derive(model.head.weight))
    whole = fs.shard_module(modules.make(), mesh=comm, strategy=fs.ddp("dp")).head.weight
    with torch.no_grad():
        assert torch.equal(whole.detach().T.sum(), modules.make().head.weight.sum())


@on_ranks(DP)
def test_errors_of_torch_name_the_part(comm):
    weight = refused(comm, "zero3")[0].head.weight
    held = r" of 'head.weight', of which this rank holds \d+ of the 66 elements of \[11, 6\] as one dimension: "
    for use, words in (
        (lambda: torch.ones(11, 6).masked_fill(torch.ones(11, 6).bool(), value=weight), "masked_fill_ only supports a 0-dim"),
        (lambda: weight.to(memory_format=torch.channels_last), "required rank 4"),
        (lambda: weight.detach().clone(memory_format=torch.channels_last), "required rank 4"),
    ):
        with torch.no_grad(), pytest.raises(LayoutError, match=held + words):
            use()
    with torch.no_grad(), pytest.raises(TypeError, match="unsupported operand"):
        weight **= "x"


@on_ranks(DP)
def test_functions_take_a_part_by_keyword_and_return_the_list_that_they_change(comm):
    model, *_ = refused(comm, "zero3")
    part = model.head.weight.detach()
    assert torch.sum(input=part) == part.sum()
    chosen = torch.where(condition=part == part, input=part, other=0.0)
    for found in (torch.clone(input=part), torch.detach(input=part), chosen):
        assert type(found) is fs.modules.ShardedTensor
        assert torch.equal(found.local, part.local)
    changed = [part]
    assert torch._foreach_mul_(changed, 0.5) in (None, changed)


@on_ranks(DP)
def test_changes_behind_its_back(comm):
    """Of what follows a copy in another dtype."""
    model = fs.shard_module(
        modules.make(), mesh=comm, strategy=fs.zero1("dp"), precision=fs.Precision(compute=torch.bfloat16, main=torch.float32)
    )
    [(x, y)] = modules.batches(comm, 1)
    with torch.no_grad():
        fs.layouts.units_of(model.train_state.params)[0].buffers[0].mul_(2)
    with pytest.raises(
        ScheduleError, match=r"parameters with which unit '\w*' computes were changed in place since the last step"
    ):
        model(x, y)


REFUSED_WHERE_WHOLE = {
    "an L2 term": (lambda m, o: sum(p.pow(2).sum() for p in m.parameters()), "is used by pow.. outside of the forward"),
    "a part of the model": (
        lambda m, o: m.head(torch.ones(2, 6)),
        "'head.weight' is used by linear.. of a module in the model that is called by itself outside",
    ),
    "a hook": (
        lambda m, o: m.head.weight.register_hook(print),
        r"register_hook\(\): parameter 'head\.weight'.*register_post_accumulate_grad_hook\(lambda",
    ),
    "a second optimizer": (lambda m, o: second_step(m, o), "another optimizer of this module has made the step"),
    "more parameters": (lambda m, o: o.add_param_group({"params": []}), "groups cannot be added later"),
    "loading": (lambda m, o: m.load_state_dict({}), r"load_state_dict\(\): a step is under way"),
    "calling it when unsharded": (lambda m, o: called_when_unsharded(m), "was called inside of unsharded"),
    "whole parameters when unsharded": (lambda m, o: whole_when_unsharded(m), "inside of unsharded.* yields whole parameters"),
    "clipping too early": (lambda m, o: clipped_too_early(m), "after gradients had been changed"),
}


def second_step(model, optimizer):
    other = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.step()
    other.step()


def called_when_unsharded(model):
    model.zero_grad()
    with model.unsharded():
        model(torch.zeros(2, dtype=torch.int64))


def whole_when_unsharded(model):
    model.zero_grad()
    with model.unsharded():
        list(model.named_full_parameters())


def clipped_too_early(model):
    model.clip_grad_norm_(0.1)
    model(torch.zeros(2, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("name", REFUSED_WHERE_WHOLE)
@on_ranks(DP)
def test_refused_where_parameters_are_whole_too(comm, name):
    act, match = REFUSED_WHERE_WHOLE[name]
    model, optimizer, x, y = refused(comm, "ddp")
    model(x, y)["loss"].backward()
    with pytest.raises((LayoutError, TreeError, ScheduleError), match=match):
        act(model, optimizer)


@pytest.mark.parametrize(
    ("own", "match"),
    [
        ({"units": "nothing.*"}, r"'nothing\.\*' matches no module"),
        ({"precision": {"nothing.*": fs.Precision()}}, r"'nothing\.\*' matches nothing"),
        ({"strategy": fs.zero3("tp")}, r"'tp'"),
        ({"methods": ["nothing"]}, r"'nothing'"),
    ],
)
def test_an_option_that_one_rank_alone_cannot_use_is_heard_of_by_all(own, match):
    def rank_fn(comm):
        with pytest.raises(FsharpError, match=match) as raised:
            fs.shard_module(modules.make(), mesh=comm, **(own if comm.rank else {}))
        return raised.type

    assert simulate(DP, rank_fn)[0] is AgreementError


def filled(comm, value=0.0):
    linear = nn.Linear(2, 2, bias=False)
    nn.init.constant_(linear.weight, value)
    return fs.shard_module(nn.Sequential(linear), mesh=comm)


@pytest.mark.parametrize("is_made_later", [False, True])
@on_ranks(DP)
def test_one_optimizer_of_a_pair_uses_the_state_of_a_module(comm, is_made_later):
    """Two updated by one momentum. The first one to be used counts, or one that is made later."""
    model = filled(comm)
    used, other = (fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(1.0, momentum=0.9)) for _ in range(2))
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    if is_made_later:
        used, other = fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(1.0, momentum=0.9)), used
    used.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    for call in (other.step, other.averaged().__enter__, lambda: other.load_state_dict(used.state_dict())):
        with pytest.raises(ScheduleError, match=r"another optimizer of this module uses the state of an \(init, update\) pair"):
            call()
    used.step()
    used.load_state_dict(used.state_dict())


@on_ranks(DP)
def test_the_state_cannot_be_set_inside_of_unsharded(comm):
    """Afterwards the module computed with the new values, and showed the old ones."""
    model = filled(comm)
    state = filled(comm, 7.0).train_state
    with model.unsharded(), pytest.raises(ScheduleError, match=r"train_state: set in .*unsharded\(\).* Set it later"):
        model.train_state = state
    model.train_state = state
    assert model.full_state_dict(rank=None)["0.weight"].unique() == 7


@pytest.mark.parametrize("write", [False, True])
@on_ranks(DP)
def test_unsharded_inside_of_unsharded_is_refused(comm, write):
    """The inner one showed values from before writes in the outer one, and its own writes were lost."""
    model = filled(comm)
    with torch.no_grad(), model.unsharded(write=True):
        model[0].weight.fill_(1)
        with pytest.raises(ScheduleError, match=r"unsharded\(\): .* inside of another unsharded"), model.unsharded(write=write):
            pass
        assert model.state_dict()["0.weight"].unique() == 1, "the outer one is still open"
    assert model.full_state_dict(rank=None)["0.weight"].unique() == 1
