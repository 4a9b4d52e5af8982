"""tune of a model: what a trial finds is what runs; meshes, units, formats and recomputation; odd models and mistakes."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from optree import tree_leaves, tree_map
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsharp as fs
from fsharp.errors import AgreementError, OptionError, PatternError, ScheduleError, TreeError
from fsharp.inspect import Choice
from fsharp.inspect.hardware import compute_times
from fsharp.planning.space import meshes_to_try
from fsharp.planning.tune import POLICIES
from fsharp.stateful.modules.selection import chosen_modules
from fsharp.testing import processes
from tests.gpt_like import block, cross_entropy, embed, head, make_batches, make_params, plain_logits
from tests.modules import descend
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID

SLOW = fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e6, latency=1e-4, update_s=1e-3)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Tied embeddings, buffers, and units within the root."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


TOKENS = torch.arange(12).view(2, 6)


def module_step(comm, units, *, recomputes=False, batch=TOKENS):
    """The schedule that a module's step follows, and the planned one. ``batch``: what is passed to tune."""
    model = fs.shard_module(Tied(recomputes=recomputes), mesh=comm, strategy=fs.zero3("dp"), units=units or None)
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        descend(F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()), optimizer)
    found = fs.tune(
        Tied(),
        SLOW,
        budget=1e9,
        batch=batch,
        mesh=comm.mesh,
        strategies={"zero3": fs.zero3},
        units={"": units},
        remat={"": "layers.*" if recomputes else ()},
        backend="gloo",
    )
    return model.scheduled_step.schedule, found.pick("zero3", "prefetch 1").schedule


def test_the_schedule_of_a_module_is_the_one_that_it_follows():
    def rank_fn(comm):
        for units in (["layers.*"], ["layers.*", "head"], []):
            followed, planned = module_step(comm, units)
            assert planned.program.events == followed.program.events, units
            assert planned == followed, units
        followed, planned = module_step(comm, ["layers.*"], batch=12)  # a number of tokens
        assert planned == followed
        followed, planned = module_step(comm, ["layers.*"], recomputes=True)
        assert planned.program.events == followed.program.events
        assert planned == followed
        return True

    assert processes(DP, rank_fn) == [True] * DP.size


class FrozenEmbedding(Tied):
    """A frozen embedding, and a head in the root: no backward reaches the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.embed.requires_grad_(False)


def test_a_module_with_a_frozen_embedding_and_state_on_the_host_follows_the_planned_schedule():
    names = ["prefetch 1", "gathered twice", "state on the host"]

    def rank_fn(comm):
        found = fs.tune(
            FrozenEmbedding(),
            SLOW,
            budget=1e9,
            batch=TOKENS,
            comm=comm,
            strategies={"zero3": fs.zero3},
            units=["embed", "layers.*"],
            policies={name: POLICIES[name] for name in names},
            formats={"bfloat16": fs.Precision(torch.bfloat16, main=torch.float32)},
            remat={"": ()},
            backend="gloo",
        )
        for name in names:
            choice = found.pick("zero3", name)
            model = fs.shard_module(FrozenEmbedding(), **{**choice.module_options, "mesh": comm})
            optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.adamw(1e-2))
            for _ in range(2):
                descend(F.cross_entropy(model(TOKENS).float().flatten(0, 1), TOKENS.flatten()), optimizer)
            assert model.scheduled_step.schedule == choice.schedule, name
            assert Choice.from_json(choice.to_json()).schedule == choice.schedule
        usual, on_host = (found.pick("zero3", name).candidates[0] for name in ("prefetch 1", "state on the host"))
        # A module keeps its main copies on the device.
        saved = min(usual.memory["optimizer"], usual.memory["activations"])
        assert usual.peak_nbytes - usual.memory["arena"] - (on_host.peak_nbytes - on_host.memory["arena"]) == saved
        return True

    assert processes(DP, rank_fn) == [True] * DP.size


def test_strategies_are_tried_on_the_meshes_whose_axes_they_take():
    tree, options = {"w": torch.empty(4, 4)}, {"budget": 1e9, "batch": 1, "policies": {"": fs.SchedulePolicy()}}
    strategies = {"zero3": fs.zero3, "hsdp": fs.hsdp}
    tried = {x.layout for x in fs.tune(tree, "H100", mesh=4, strategies=strategies, **options).candidates}
    assert tried == {"zero3, dp=4", "zero3, outer=2,inner=2", "hsdp, outer=2,inner=2"}
    assert fs.tune(tree, "H100", mesh=DP, strategies={"spec": fs.P("dp")}, **options).name == "spec"
    with pytest.raises(OptionError, match=r"missing a required argument: 'inner'"):
        fs.tune(tree, "H100", mesh=DP, strategies=strategies, **options)


class FrozenTie(nn.Module):
    """A head that shares a frozen weight with a layer whose bias is trained."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.head.weight = self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.first(x))))


@on_ranks(DP)
def test_a_frozen_leaf_that_is_shared_gives_no_gradient_to_the_unit_that_has_it(comm):
    model = fs.shard_module(FrozenTie(), mesh=comm, strategy=fs.zero3("dp"), units=[nn.Linear], sync_from=0)
    optimizer = fs.ShardedOptimizer(model.parameters(), fs.optim.sgd(0.1))
    for _ in range(2):
        descend(model(torch.ones(2, 4)).square().mean(), optimizer)
    for batch in (torch.ones(2, 4), 2):
        choice = fs.tune(
            FrozenTie(), SLOW, budget=1e9, batch=batch, mesh=DP, strategies={"": fs.zero3}, units=["*"], backend="gloo"
        )
        for each in (choice, Choice.from_json(choice.to_json())):
            assert each.schedule.program.events == model.scheduled_step.schedule.program.events


def _loss(params, batch, comm, *, remat=False):
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm, remat=remat)
    return cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch)


BATCH = make_batches(1, 16)[0]
CHOICES = {"mesh": DP, "strategies": {"zero3": fs.zero3}, "units": "layers.*", "backend": "gloo"}


def kept_in_a_run(params, batch):
    """The bytes that autograd keeps beside parameters and batch, in a run on ordinary tensors."""
    known = {x.untyped_storage().data_ptr() for x in (*tree_leaves(params), *batch.values())}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = cross_entropy(plain_logits(params, batch["x"]), batch)
    return sum(x.untyped_storage().nbytes() for x in kept.values()) + 0 * out.sum.numel()


def test_activations_of_a_trial_are_what_autograd_keeps():
    params = tree_map(lambda x: x.requires_grad_(), make_params())
    found = fs.tune(make_params(), SLOW, budget=1e9, batch=BATCH, loss_fn=_loss, **CHOICES)
    exact = kept_in_a_run(params, BATCH)
    inside = found.candidates[0].memory["activations"]
    # The run keeps what the loss computes behind the last unit as well.
    assert 0.8 * exact <= inside <= exact
    on_device = fs.tune(make_params(), SLOW, budget=1e9, batch=BATCH, loss_fn=_loss, device="cpu", **CHOICES)
    assert on_device.candidates[0].memory["activations"] == pytest.approx(inside, rel=0.1)
    assert on_device.activations == "measured on cpu, one call of each kind of unit"
    assert found.activations == "estimated by a trial on meta tensors"
    assert found.edit().timeline.step_s != on_device.edit().timeline.step_s


def test_an_input_that_the_call_before_keeps_as_its_output_counts_once():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    kept = [
        fs.tune(layers, SLOW, budget=1e9, batch=torch.ones(4, 8), mesh=DP, units="*", remat={"": ()}, device=device)
        .candidates[0]
        .memory["activations"]
        for device in (None, "cpu")
    ]
    assert kept == [4 * 4 * 8 * 4] * 2  # the results of four tanh, in float32


def test_a_trial_on_a_device_leaves_the_generator_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    before = torch.get_rng_state()
    fs.tune(model, SLOW, budget=1e9, batch=torch.ones(2, 4), mesh=DP, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_recomputation_keeps_what_a_unit_is_given_and_computes_its_forward_again():
    found = fs.tune(make_params(), SLOW, budget=1e9, batch=BATCH, loss_fn=_loss, effort=math.inf, **CHOICES)
    rows = {(x.policy, x.remat): x for x in found.candidates}
    usual, again = rows["prefetch 1", ""], rows["prefetch 1", "all"]
    assert again.memory["activations"] < usual.memory["activations"]
    assert again.step_s > usual.step_s
    assert found.pick("zero3", "prefetch 1", "all").remat == ("embed", "head", "layers.0", "layers.1")
    only = fs.tune(make_params(), SLOW, budget=1e9, batch=BATCH, loss_fn=_loss, remat={"layers": "layers.*"}, **CHOICES)
    assert only.remat == ("layers.0", "layers.1")
    # A budget between the two is met by recomputation alone.
    budget = min(x.peak_nbytes for x in rows.values() if not x.remat) - 1
    tight = fs.tune(make_params(), SLOW, budget=budget, batch=BATCH, loss_fn=_loss, **CHOICES)
    assert tight.candidates[0].remat == "all"


def test_a_trial_measures_by_how_much_recomputation_lengthens_a_step(monkeypatch):
    """On a clock that only the function turns: by 1 s in a forward, and by 5 s where a backward runs it again."""
    now = [0.0]
    monkeypatch.setattr("fsharp.planning.trial.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def layer(weight, x):
        if x.device.type != "meta":
            now[0] += 1.0 if torch._C._current_graph_task_id() == -1 else 5.0
        return torch.tanh(x @ weight)

    def loss_fn(params, batch, comm):
        for weight in params["layers"]:
            batch = fs.forward(layer, weight, batch, comm=comm)
        return batch.sum()

    params = {"layers": [torch.eye(4) for _ in range(3)]}
    choice = {"budget": 1e9, "batch": torch.ones(2, 4), "loss_fn": loss_fn, "mesh": fs.Mesh({"dp": 1}), "units": "layers.*"}
    seconds = {
        again: fs.tune(params, SLOW, **choice, remat={"": "layers.*" if again else ()}, device="cpu").timeline.step_s
        for again in (False, True)
    }
    assert seconds == {False: pytest.approx(3 + SLOW.update_s), True: pytest.approx(18 + SLOW.update_s)}


def test_all_dimensions_are_tried():
    formats = {"float32": fs.Precision(), "4 bits": fs.Precision(wire=fs.formats.mxint4)}
    found = fs.tune(make_params(), "H100", budget=1e9, batch=64, mesh=4, formats=formats, effort=300)
    names = {x.layout for x in found.candidates}
    assert {name.split(", ")[0] for name in names} == {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"}
    assert {name.rsplit(", ", 1)[1] for name in names} == set(formats)
    for part in ("dp=4", "outer=2,inner=2", "layers.*, ", "layers.*.*", "one unit"):
        assert any(part in name for name in names), part
    assert {x.policy for x in found.candidates} == set(POLICIES)
    assert {x.remat for x in found.candidates} == {"", "all"}
    options = {
        "strategies": {"zero1": fs.zero1},
        "units": "layers.*",
        "policies": {"": fs.SchedulePolicy()},
        "formats": formats,
    }
    all_simulated = fs.tune(make_params(), "H100", budget=1e9, batch=64, mesh=4, effort=math.inf, **options)
    sent = {x.layout: x.sent_nbytes for x in all_simulated.candidates if not x.remat}
    assert sent["zero1, dp=4, 4 bits"] < sent["zero1, dp=4, float32"]
    assert found.activations == "estimated from shapes"


def compute_seconds(tree, **options):
    found = fs.tune(tree, "H100", budget=1e9, batch=64, mesh=1, units="*", remat={"": ()}, **options)
    return sum(span.seconds for span in found.timeline.spans if span.kind == "compute")


def test_a_tied_embedding_multiplies_once_and_a_repeated_layer_each_time():
    table, layer = torch.empty(256, 64, device="meta"), torch.empty(64, 64, device="meta")
    others = [torch.empty(64, 64, device="meta") for _ in range(2)]
    untied = {"embed": table, "head": torch.empty(256, 64, device="meta")}
    alone = compute_seconds({"embed": table})
    assert compute_seconds({"embed": table, "head": table}) == pytest.approx(alone)
    assert compute_seconds(untied) == pytest.approx(2 * alone)
    same = compute_seconds({"layers0": layer, "layers1": layer})
    assert same == pytest.approx(compute_seconds({"layers0": others[0], "layers1": others[1]}))


@pytest.mark.parametrize("keys", [("a[0]", "b"), ("a[0]", "a0"), ("x*", "xy"), ("what?", "what")])
def test_names_of_units_are_no_patterns(keys):
    shapes = {"blocks": {key: torch.empty(64, 64, device="meta") for key in keys}}
    names = [f"blocks.{key}" for key in keys]
    for units in ("blocks.*", names):
        layout = fs.plan(shapes, DP, fs.zero3("dp"), units=units)
        assert sorted(unit.name for unit in layout.units) == sorted(names)
        fs.schedules.plan_step(layout, order=names, remat=names)
        found = fs.tune(shapes, "H100", budget=1e9, batch=64, mesh=DP, units=units, effort=math.inf)
        assert all(x.step_s < math.inf for x in found.candidates)
    times = {name: (float(i), 0.0) for i, name in enumerate(names, start=1)}
    assert compute_times(fs.inspect.Hardware(compute_times=times, bandwidth=1e9), names) == {
        k: (f, b, f) for k, (f, b) in times.items()
    }
    layers = {"a[0]": [{"w": torch.empty(8, 8, device="meta")} for _ in range(3)], "a0": torch.empty(8, device="meta")}
    found = fs.tune(layers, fs.inspect.Hardware(compute_times=(1e-3, 2e-3), bandwidth=1e9), budget=1e9, mesh=DP)
    assert [unit.name for unit in found.layout.units] == ["a0", *(f"a[0].{i}" for i in range(3))]
    model = nn.Module()
    model.layers = nn.ModuleDict({key.replace(".", ""): nn.Linear(4, 4) for key in keys})
    assert set(chosen_modules(model, [f"layers.{keys[0]}"])) == {f"layers.{keys[0]}"}


@pytest.mark.parametrize("names", [("down", "gate", "out", "up"), ("w4", "w1", "w2", "w3")])
def test_the_estimated_input_of_a_recomputed_layer_is_as_wide_as_the_model_whatever_its_leaves_are_called(names):
    down, *others = names
    layer = {down: torch.empty(16, 64, device="meta")} | {name: torch.empty(64, 16, device="meta") for name in others}
    found = fs.tune({"layers": [layer] * 3}, "H100", budget=1e9, batch=10, mesh=1, units="layers.*", remat={"all": "layers.*"})
    assert found.candidates[0].memory["activations"] == 10 * 4 * (3 * 16 + 64 + 3 * 16), "three inputs, and one layer's"


def test_the_effort_bounds_what_is_simulated_and_the_table_says_so():
    found, again = (fs.tune(make_params(), "H100", budget=1e9, batch=64, mesh=4, effort=1) for _ in range(2))
    assert again.candidates == found.candidates
    simulated = [x for x in found.candidates if not x.is_unsimulated]
    assert len({x.layout for x in simulated}) == 1
    texts = [x.why_lost for x in found.candidates if x.is_unsimulated]
    assert all("slower" in text or text.startswith("not simulated: at most ") for text in texts)
    assert any(text.startswith("not simulated") for text in texts)
    assert "> " in found.table()


def test_a_choice_is_saved_edited_and_picked(tmp_path):
    strategies = {"ddp": fs.ddp, "zero3": fs.zero3}
    found = fs.tune(
        make_params(), SLOW, budget=1e6, batch=BATCH, loss_fn=_loss, **{**CHOICES, "strategies": strategies}, effort=math.inf
    )
    again = Choice.from_json(found.to_json())
    assert (again.candidates, again.policy, again.remat, again.layout) == (
        found.candidates,
        found.policy,
        found.remat,
        found.layout,
    )
    assert again.schedule == found.schedule
    body = json.loads(found.to_json())
    body["policy"]["prefetch"] = 0
    edited = Choice.from_json(json.dumps(body))
    assert edited.policy == replace(found.policy, prefetch=0) == found.edit(prefetch=0).policy
    assert edited.candidates[0].step_s == found.edit(prefetch=0).candidates[0].step_s == edited.timeline.step_s
    body["remat"] = ["embed"]
    with pytest.raises(ScheduleError, match="remat was edited"):
        Choice.from_json(json.dumps(body))
    with pytest.raises(ScheduleError, match="the text is not a choice: KeyError: 'step'"):
        Choice.from_json("{}")
    with pytest.raises(ScheduleError, match="the text is not a choice: ValueError: not enough values"):
        Choice.from_json(json.dumps(json.loads(found.to_json()) | {"candidates": []}))
    other = found.pick("ddp", "prefetch 1")
    assert (other.name, other.layout.units[0].strategy) == ("ddp", fs.ddp("dp"))
    assert len(other.candidates) == len(found.candidates)
    assert any("faster" in x.why_lost for x in other.candidates[1:]) or other.candidates[0].step_s == found.candidates[0].step_s
    with pytest.raises(ScheduleError, match=r"there is no candidate \('ddp', 'nothing', ''\)"):
        found.pick("ddp", "nothing")
    with pytest.raises(OptionError, match="prefetch is 'a'"):
        found.edit(prefetch="a")
    with pytest.raises(OptionError, match=r"(?s)a policy has no such field.*unknown +prefetsh\n.*known .*prefetch"):
        found.edit(prefetsh=3)
    found.draw(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_the_options_of_a_module_are_those_of_shard_module():
    found = fs.tune(Tied(), SLOW, budget=1e9, batch=(TOKENS,), mesh=fs.Mesh({"dp": 1}), units="layers.*", backend="gloo")
    model = fs.shard_module(Tied(), **found.module_options)
    assert model(TOKENS).shape == (2, 6, 16)
    assert Choice.from_json(found.to_json()).module_options == found.module_options


def test_a_layout_made_by_the_arguments_of_a_choice_has_its_frozen_leaves():
    tree = {"layers": [{"w": torch.ones(4, 4)} for _ in range(3)]}
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    for given, frozen, params in ((tree, "layers.1", tree), (model, (), fs.make_functional(model)[1])):
        choice = fs.tune(given, SLOW, budget=1e9, batch=4, mesh=DP, frozen=frozen)
        assert fs.plan(params, **choice.made_by) == choice.layout
        assert [group.trainable for unit in choice.layout.units for group in unit.groups].count(False) == 1
    assert fs.shard_module(model, **{**choice.module_options, "mesh": fs.Mesh({"dp": 1}), "units": None})


class Odd(nn.Module):
    """A model of one kind, that gets ``[batch, dim]``."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


ODD = {
    "16 tiny units": ([nn.Linear(1, 1) for _ in range(16)], 1),
    "1,000 tiny units": ([nn.Linear(1, 1) for _ in range(1000)], 1),
    "one giant leaf": ([nn.Linear(3000, 3000, bias=False)], 3000),
    "parts without parameters": ([nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.BatchNorm1d(4)] * 2, 4),
    "frozen layers": ([nn.Linear(4, 4).requires_grad_(i > 1) for i in range(4)], 4),
    "no trained parameter": ([nn.Linear(4, 4).requires_grad_(False) for i in range(3)], 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] if name.startswith("1,000") else []) for name in ODD]
)
def test_odd_models(name):
    layers, dim = ODD[name]
    found = fs.tune(Odd(layers), "H100", budget=10e9, batch=torch.ones(8, dim), mesh=8, effort=300)
    assert found.timeline.step_s == found.candidates[0].step_s >= 0
    assert found.layout.num_params == sum(p.numel() for p in {id(p): p for p in Odd(layers).parameters()}.values())


@pytest.mark.parametrize(("batch", "efficiency"), [(32, 0.33), (torch.ones(32, 64), 0.4)], ids=["tokens", "trial"])
def test_operations_from_shapes_and_from_a_trial_have_efficiencies_of_their_own(batch, efficiency):
    found = fs.tune(nn.Linear(64, 64, bias=False), "H100", budget=1e9, batch=batch, mesh=1)
    forward_s = 2 * 64 * 64 * 32 / (efficiency * 989e12)
    assert found._arguments.hardware.compute_times == {"(root)": pytest.approx((forward_s, 2 * forward_s))}


class ListOfParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(3)])

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def test_parameters_of_a_list_are_no_units_of_a_module():
    found = fs.tune(ListOfParameters(), "H100", budget=1e9, batch=torch.ones(2, 4), mesh=8)
    assert found.made_by["units"] is None


def test_a_number_of_ranks_stands_for_the_axes_that_the_hardware_has():
    known = replace(SLOW, bandwidth={"dp": 1e6})
    assert fs.tune(make_params(), known, budget=1e9, batch=8, mesh=4).layout.mesh == fs.Mesh({"dp": 4})
    with pytest.raises(ScheduleError, match=r"no bandwidth for axis '(outer|inner)'"):
        fs.tune(make_params(), known, budget=1e9, batch=8, mesh=HYBRID)


class Holder:
    def __init__(self, x):
        self.x = x


class Holding(nn.Module):
    """Passes its parts an object that holds a tensor of the trial on meta."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Held() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, Holder(x))
        return x


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, holder):
        return holder.x @ self.weight + x


def test_a_unit_that_cannot_be_measured_is_named():
    found = fs.tune(Holding(), SLOW, budget=1e9, batch=torch.ones(2, 4), mesh=DP)
    assert found.activations == "estimated by a trial on meta tensors"
    with pytest.raises(ScheduleError, match=r"the trial of unit 'layers.0' on cpu failed: .*\nIf the arguments are objects"):
        fs.tune(Holding(), SLOW, budget=1e9, batch=torch.ones(2, 4), mesh=DP, device="cpu")


def recomputing(params, batch, comm):
    return _loss(params, batch, comm, remat=True)


def reading(params, batch, comm):
    return _loss(params, batch, comm).sum.item()


def making_a_mask(params, batch, comm):
    return (_loss(params, batch, comm).sum * (batch["w"] + torch.ones(len(batch["w"])))).sum()


def test_a_loss_that_needs_other_units_than_those_that_are_tried():
    def loss_fn(params, x, comm):
        for weight in params["layers"]:
            x = fs.forward(torch.matmul, weight, x, comm=comm)
        return x.sum()

    params = {"layers": [torch.eye(4) for _ in range(3)]}
    options = {"budget": 1e9, "batch": torch.ones(4, 4), "loss_fn": loss_fn, "mesh": DP}
    with pytest.raises(
        ScheduleError, match=r"loss_fn fails with the whole tree as one unit: .*\['layers'\].*\nPass units=, .*'layers\.\*'"
    ):
        fs.tune(params, SLOW, **options)
    assert fs.tune(params, SLOW, **options, units="layers.*").candidates


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh": None}, ScheduleError, r"pass mesh=, a mesh or a number of ranks; or comm="),
        ({"mesh": 0}, ScheduleError, "mesh is 0, expected a number of ranks of at least 1"),
        ({"mesh": []}, ScheduleError, "expected meshes with one number of ranks, got no mesh"),
        ({"mesh": [fs.Mesh({"dp": 2}), fs.Mesh({"dp": 3})]}, ScheduleError, r"got Mesh\(dp=2\), Mesh\(dp=3\)"),
        ({"loss_fn": None}, ScheduleError, "batch= of tensors needs loss_fn="),
        ({"batch": 64}, ScheduleError, "loss_fn= is for a tree of tensors, with batch= of tensors"),
        ({"batch": 0, "loss_fn": None}, ScheduleError, "batch is 0 tokens"),
        ({"batch": None, "loss_fn": None, "device": "cpu"}, ScheduleError, "device= measures what a trial runs"),
        ({"device": "banana"}, OptionError, "device is 'banana', expected a device that computes, such as 'cpu'"),
        ({"device": torch.device("meta")}, OptionError, r"device is device\(type='meta'\), expected a device that computes"),
        ({"batch": None, "loss_fn": None, "hardware": "H100"}, ScheduleError, "hardware 'H100' needs batch="),
        ({"hardware": "V100"}, ScheduleError, "hardware is 'V100', expected a Hardware, or one of A100"),
        ({"hardware": lambda layout: None}, ScheduleError, "a function that returned None"),
        ({"order": ("embed",)}, ScheduleError, "both tell the order of units"),
        ({"loss_fn": recomputing}, ScheduleError, r"'layers.0' is used in a checkpoint, or by forward\(remat=\)"),
        ({"loss_fn": reading}, ScheduleError, "the trial on meta tensors failed: .*\n.*batch=number of tokens"),
        ({"loss_fn": making_a_mask}, ScheduleError, r"is not on the expected device meta.*\n.*on the device of its inputs"),
        ({"remat": {"x": "tail"}}, PatternError, "'tail' matches nothing"),
        ({"units": "blocks.*"}, PatternError, "matches nothing"),
        ({"microbatches": 0}, ScheduleError, "microbatches is 0"),
        ({"activations": 10.0, "remat": {"all": "**"}}, ScheduleError, "the bytes that recomputed units keep are unknown"),
        ({"effort": 0}, ScheduleError, "effort is 0, expected more than 0"),
        ({"strategies": {}}, ScheduleError, "there is no strategy"),
        ({"budget": 100}, ScheduleError, r"no candidate fits into the budget.\n.*100 B \(1e-07 GB\)\n.*smallest"),
    ],
)
def test_mistakes_are_explained(options, error, match):
    given = {"hardware": SLOW, "budget": 1e9, "batch": BATCH, "loss_fn": _loss, **CHOICES, **options}
    with pytest.raises(error, match=match):
        fs.tune(make_params(), given.pop("hardware"), **given)


def test_layouts_have_their_own_mesh():
    layout = fs.plan(make_params(), DP, fs.zero3("dp"))
    with pytest.raises(ScheduleError, match="got mesh= beside layouts"):
        fs.tune({"a": layout}, SLOW, budget=1e9, mesh=DP)
    with pytest.raises(ScheduleError, match="got hardware 'H100' with layouts"):
        fs.tune({"a": layout}, "H100", budget=1e9)
    with pytest.raises(ScheduleError, match="got frozen= beside layouts"):
        fs.tune({"a": layout}, SLOW, budget=1e9, frozen="embed")
    with pytest.raises(ScheduleError, match=r"call requires_grad_\(False\)"):
        fs.tune(Tied(), SLOW, budget=1e9, batch=TOKENS, mesh=DP, frozen="embed")
    with pytest.raises(TreeError, match="Identity has no parameters"):
        fs.tune(nn.Identity(), SLOW, budget=1e9, batch=TOKENS, mesh=DP)
    with pytest.raises(ScheduleError, match="the model has no parameters"):
        fs.tune([], SLOW, budget=1e9, batch=8, mesh=DP, units={"": None})


def test_ranks_compare_arguments_and_share_measurements():
    def rank_fn(comm):
        options = {"budget": 1e9, "batch": BATCH, "loss_fn": _loss, **CHOICES, "mesh": None, "comm": comm}
        with pytest.raises(AgreementError, match=r"budget +rank 0: 1000000000.0"):
            fs.tune(make_params(), SLOW, **{**options, "budget": (1 + comm.rank) * 1e9})
        with pytest.raises(AgreementError, match="hardware"):
            fs.tune(make_params(), replace(SLOW, latency=0.1 * comm.rank), **options)
        with pytest.raises(AgreementError, match=r"batch +rank 0: float32\[4\].*\n +batch +rank 1: float32\[5\]"):
            fs.tune(make_params(), SLOW, **{**options, "batch": tree_map(lambda x: x[: 4 + comm.rank], BATCH)})
        with pytest.raises(AgreementError, match=r"model +rank 0: (.*\n)* *model +rank 1: .*new: float32\[3\]"):
            fs.tune(
                {**make_params(), **({"new": torch.ones(3)} if comm.rank else {})},
                SLOW,
                **{**options, "batch": 8, "loss_fn": None},
            )
        with pytest.raises(AgreementError, match="microbatches is 0"):
            fs.tune(make_params(), SLOW, **options, microbatches=1 - comm.rank)
        found = fs.tune(make_params(), SLOW, **options, device="cpu")
        return found.candidates, found.policy, found.layout.mesh

    first, second = processes(DP, rank_fn)
    assert first == second
    assert first[2] == DP


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_arguments_that_leave_nothing_to_predict_are_named(device):
    options = {"budget": 1e9, "batch": torch.ones(2, 4), "mesh": DP, "device": device}
    with pytest.raises(ScheduleError, match=r"the trial used no parameter of unit 'unused'.*number of tokens"):
        fs.tune(HalfUsed(), SLOW, **options, units="*")
    with pytest.raises(ScheduleError, match=r"remat is \{\}, expected a choice"):
        fs.tune(HalfUsed(), SLOW, **options, remat={})
    assert fs.tune(HalfUsed(), SLOW, **options).candidates  # one unit
    with pytest.raises(ScheduleError, match="expected layouts for one number of ranks, got no layout"):
        fs.tune({}, SLOW, **options)


def test_bytes_of_a_unit_are_for_one_choice_of_units():
    found = fs.tune(make_params(), "H100", budget=1e9, batch=8, mesh=DP, activations=1e6)
    assert {x.layout for x in found.candidates} == {"ddp", "zero1", "zero2", "zero3"}
    assert {x.memory["activations"] for x in found.candidates} == {4_000_000}


def test_meshes_of_a_number_of_ranks():
    assert [dict(mesh.axes) for mesh in meshes_to_try(6)] == [{"dp": 6}, {"outer": 3, "inner": 2}]
    assert [dict(mesh.axes) for mesh in meshes_to_try(1)] == [{"dp": 1}]
    assert len(meshes_to_try(16384)) == 14


class IgnoresObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, ignored):
        return self.layer(x)


@on_ranks(fs.Mesh({"dp": 2}))
def test_objects_in_a_batch_may_hold_values_that_differ_between_ranks(comm):
    options = {"budget": 1e9, "comm": comm}
    assert fs.tune(IgnoresObject(), SLOW, batch=(torch.ones(2, 4), SimpleNamespace(rank=comm.rank)), **options).candidates
    with pytest.raises(AgreementError, match=r"batch +rank 0: .*1\.0\n +batch +rank 1: .*2\.0"):
        fs.tune(IgnoresObject(), SLOW, batch=(torch.ones(2, 4), 1.0 + comm.rank), **options)
