"""plan_step gives the schedule that a scheduler follows; tune chooses the fastest candidate that fits into memory."""

import gc
import json
import math
from dataclasses import asdict, fields, replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fsharp as fs
from benchmarks.memory import StorageTracker
from fsharp.errors import LayoutError, OptionError, PatternError, ScheduleError
from fsharp.functional.layout.sharded import tree_nbytes
from fsharp.planning.choice import Candidate, StepArguments, sort_candidates
from fsharp.planning.plan_step import uses_in_order
from fsharp.planning.search import least_seconds
from fsharp.planning.tune import POLICIES as TRIED, TOLERANCE
from fsharp.schedules import plan_step
from fsharp.testing import DebugPolicy, processes
from tests.gpt_like import block, cross_entropy, embed, head, loss_fn, make_batches, make_params
from tests.ranks import on_ranks
from tests.scheduling import DP, HYBRID, POLICIES, PRECISIONS, STRATEGIES

ORDER = ("embed", "layers.*", "head")
LAYERS = ("layers.0", "layers.1")
FROZEN = {
    "nothing": (),
    "embed": ("embed",),
    "a layer": ("layers.1",),
    "a leaf": ("layers.*.b",),
    "all but a layer": ORDER[::2],
}
CASES = [
    *((strategy, DebugPolicy(**options), "float32", 1, "nothing") for strategy in STRATEGIES for options in POLICIES.values()),
    *((strategy, fs.SchedulePolicy(), precision, 2, "nothing") for strategy in STRATEGIES for precision in PRECISIONS),
    *(
        (strategy, fs.SchedulePolicy(), "bfloat16", 1, frozen)
        for strategy in ("ddp", "zero1", "zero3", "hfsdp")
        for frozen in FROZEN
    ),
]


def followed_and_planned(comm, strategy, policy, precision, microbatches, frozen):
    """The schedule that a run follows, the one that is planned, on rank 0 alone, and the bytes of the run's state."""
    params = make_params(layers=3)
    options = {"units": "layers.*", "precision": PRECISIONS[precision], "frozen": FROZEN[frozen]}
    layout = fs.plan(params, comm.mesh, STRATEGIES[strategy][1], **options)
    tx = fs.optim.adamw(1e-2)
    state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
    step = fs.Scheduler(comm, policy=policy)(fs.train_step(loss_fn, tx, microbatches=microbatches))
    for batch in make_batches(2, 16 * microbatches):
        state, _ = step(state, batch)
    options = {"order": ORDER, "microbatches": microbatches, "backend": "gloo"}
    planned = plan_step(layout, policy, **options) if comm.rank == 0 else None
    return step.schedule, planned, {name: tree_nbytes(getattr(state, name)) for name in ("params", "main", "opt")}, layout


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.deep), 7], ids=["all", "every 7th"])
@pytest.mark.parametrize("mesh", [DP, HYBRID], ids=str)
def test_the_planned_schedule_is_the_one_that_a_scheduler_follows(mesh, every):
    cases = [case for case in CASES if STRATEGIES[case[0]][0] == mesh][::every]

    def rank_fn(comm):
        found = []
        for case in cases:
            followed, planned, held, layout = followed_and_planned(comm, *case)
            found.append(followed.to_json())
            if comm.rank == 0:
                assert planned == followed, f"{case}:\n{fs.inspect.table(planned)}\n\n{fs.inspect.table(followed)}"
            expected = (layout.nbytes("params"), layout.nbytes("main"), 2 * layout.nbytes("optim"))
            assert (held["params"], held["main"], held["opt"]) == expected, case
        return found

    first, *others = processes(mesh, rank_fn)
    assert len(first) == len(cases)
    assert others == [first] * (mesh.size - 1)


def test_the_bytes_that_sums_cast_are_those_of_summands_in_another_plain_dtype():
    def cast(strategy, mesh=DP, **options):
        layout = fs.plan({"w": torch.empty(64, 64)}, mesh, STRATEGIES[strategy][1], precision=fs.Precision(**options))
        [facts] = plan_step(layout, backend="gloo").program.units
        return facts.reduce_cast, facts.finish_cast

    whole = 64 * 64 * 2
    for wire in ({"wire": torch.bfloat16}, {"compute": torch.bfloat16, "main": torch.float32}):
        assert [cast(each, **wire) for each in ("ddp", "zero1", "zero2", "zero3")] == 2 * [(0, whole)] + 2 * [(whole, 0)]
        assert cast("hsdp", HYBRID, **wire) == (whole, whole // HYBRID.axis_size("inner"))
    for wire in ({}, {"wire": fs.formats.mxint8}, {"compute": torch.bfloat16, "wire": torch.float32, "main": torch.float32}):
        assert cast("ddp", **wire) == cast("zero3", **wire) == (0, 0)
    assert cast("zero3", compute=torch.bfloat16, main=torch.bfloat16) == (0, 0)


def test_an_order_that_does_not_name_each_unit_once_is_refused():
    layout = fs.plan(make_params(), DP, fs.zero3("dp"), units="layers.*")
    with pytest.raises(LayoutError, match=r"order lacks unit 'embed'"):
        plan_step(layout, order=("layers.*", "head"))
    with pytest.raises(LayoutError, match=r"order selects unit 'layers.0' twice"):
        plan_step(layout, order=("embed", "layers.0", "layers.*", "head"))
    with pytest.raises(PatternError, match=r"'blocks.\*' matches nothing"):
        plan_step(layout, order=("embed", "blocks.*", "head"))


def tied_params():
    params = make_params(layers=3)
    return {"embed": params["embed"], "layers": params["layers"], "head": params["embed"]}


def tied_loss(params, batch, comm, *, remat=False):
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm, remat=remat)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm, remat=remat)
    head = params["head"]
    return cross_entropy(fs.forward(lambda w, x: x @ w.T, head, x, comm=comm, ties=[params["embed"]], remat=remat), batch)


def with_remat(params, batch, comm):
    x = fs.forward(embed, params["embed"], batch["x"], comm=comm)
    for layer in params["layers"]:
        x = fs.forward(block, layer, x, comm=comm, remat=True)
    return cross_entropy(fs.forward(head, params["head"], x, comm=comm), batch)


OTHER_STEPS = {
    "tied": (tied_params, tied_loss, ("embed", "layers.*", "head"), ()),
    "tied, recomputed": (tied_params, partial(tied_loss, remat=True), ("embed", "layers.*", "head"), "**"),
    "layers recomputed": (partial(make_params, layers=3), with_remat, ORDER, "layers.*"),
}


WAYS = (("ddp", {}), ("zero1", {}), ("zero3", {}), ("zero3", {"release": "backward"}))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.deep), 2], ids=["all", "every 2nd"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_steps_with_ties_and_recomputation_are_planned(microbatches, every):
    pairs = product(enumerate(OTHER_STEPS), enumerate(WAYS))
    cases = [(name, *way) for (i, name), (j, way) in pairs if (i + j + microbatches) % every == 0]

    def rank_fn(comm):
        for name, strategy, options in cases:
            make, loss, order, remat = OTHER_STEPS[name]
            params, policy = make(), fs.SchedulePolicy(**options)
            layout = fs.plan(params, comm.mesh, STRATEGIES[strategy][1], units=["embed", "layers.*", "head"])
            tx = fs.optim.adamw(1e-2)
            state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
            step = fs.Scheduler(comm, policy=policy)(fs.train_step(loss, tx, microbatches=microbatches))
            for batch in make_batches(2, 16 * microbatches):
                state, _ = step(state, batch)
            planned = plan_step(layout, policy, order=order, remat=remat, microbatches=microbatches, backend="gloo")
            assert planned == step.schedule, (name, strategy, options, difference(planned, step.schedule))
        return len(cases)

    assert processes(DP, rank_fn) == [len(cases)] * DP.size


@on_ranks(DP)
def test_units_without_optimizer_state_are_not_fetched(comm):
    params = {"a": torch.ones(4, 4), "empty": torch.ones(0, 4), "b": torch.ones(4, 4)}

    def loss(params, x, comm):
        for node in params.values():
            x = fs.forward(lambda w, x: x * w.sum(), node, x, comm=comm)
        return x.sum()

    policy = fs.SchedulePolicy(offload=True)
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="*")
    for tx, number, fetched in ((fs.optim.sgd(0.1), 0, []), (fs.optim.adamw(0.1), 2, ["a", "b"])):
        state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
        step = fs.Scheduler(comm, policy=policy)(fs.train_step(loss, tx))
        for _ in range(2):
            state, _ = step(state, torch.ones(4))
        planned = plan_step(layout, policy, order=tuple(params), optimizer_buffers=number, backend="gloo")
        assert [event.unit for event in planned.program.events if event.kind == "fetch"] == fetched
        assert planned.program.events == step.schedule.program.events


@on_ranks(DP)
def test_a_use_without_gradient_of_a_unit_does_not_count_as_one_of_several(comm):
    params = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}

    def loss(params, x, comm):
        with torch.no_grad():
            target = fs.forward(torch.matmul, params["a"], x, comm=comm)
        x = fs.forward(lambda w, x: x @ w, params["a"], x, comm=comm)
        return (fs.forward(lambda w, x: x @ w, params["b"], x, comm=comm) - target).square().mean()

    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), units="*", precision=fs.Precision(wire=torch.bfloat16))
    tx = fs.optim.sgd(0.1)
    state = fs.init_state(tx, fs.shard(params, layout, comm), comm=comm)
    step = fs.Scheduler(comm)(fs.train_step(loss, tx))
    for _ in range(2):
        state, _ = step(state, torch.ones(4, 4))
    planned = plan_step(layout, order=[fs.schedules.Use(("a",), has_backward=False), "a", "b"], backend="gloo").program
    assert planned.events == step.schedule.program.events
    blocks = [{unit.name: unit.outgoing for unit in each.units} for each in (planned, step.schedule.program)]
    assert [each["a"] == each["b"] for each in blocks] == [True, True]


def difference(planned, followed):
    """The programs, if they differ, or else the tables."""
    if planned.program != followed.program:
        return [str(each.program.events) + "\n" + str(each.program.units) for each in (planned, followed)]
    return [fs.inspect.table(each) for each in (planned, followed)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("remat", "number"), [((), 0), (LAYERS, 2), (("embed", *LAYERS, "head"), 4)])
def test_recomputation_takes_the_third_number_of_seconds_or_as_long_as_the_forward(remat, number, microbatches):
    layout = fs.plan(make_params(), fs.Mesh({"dp": 1}), fs.zero3("dp"), units=["embed", "layers.*", "head"])
    for compute, again_s in (((1.0, 2.0), 1.0), ((1.0, 2.0, 5.0), 5.0), ((1.0, 2.0, 0.0), 0.0)):
        hardware = fs.inspect.Hardware(compute_times=compute, bandwidth=math.inf)
        arguments = StepArguments(uses_in_order(layout, ORDER), remat, hardware, microbatches, 2, "gloo", 0)
        expected = microbatches * (4 * (1.0 + 2.0) + number * again_s)
        assert arguments.predict(arguments.schedule(layout, fs.SchedulePolicy()), layout).step_s == pytest.approx(expected)
        assert least_seconds(layout, arguments, is_one_group=False) == pytest.approx(expected, rel=1e-5)
        assert fs.inspect.Hardware.from_json(hardware.to_json()) == hardware


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("release", ["room", "backward", "forward"])
def test_the_lower_bound_is_below_a_step_that_keeps_parameters_from_one_microbatch_to_the_next(release, microbatches, backend):
    shapes = {"layers": [torch.empty(4096, 4096, device="meta") for _ in range(2)]}
    layout = fs.plan(shapes, fs.Mesh({"dp": 4}), fs.zero3("dp"), units="layers.*")
    hardware = fs.inspect.Hardware(compute_times=(1e-6, 1e-6), bandwidth=1e8)
    arguments = StepArguments(uses_in_order(layout, ()), (), hardware, microbatches, 2, backend, 0)
    step_s = arguments.predict(arguments.schedule(layout, fs.SchedulePolicy(release=release)), layout).step_s
    assert least_seconds(layout, arguments, is_one_group=backend == "nccl") <= step_s


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "hsdp", "hfsdp"])
def test_the_lower_bound_counts_no_collective_of_the_loss(name):
    mesh, strategy = STRATEGIES[name]
    layout = fs.plan({"layers": [torch.empty(2, 2, device="meta") for _ in range(3)]}, mesh, strategy, units="layers.*")
    hardware = fs.inspect.Hardware(compute_times=(1e-9, 1e-9), bandwidth=1e6)
    for backend, policy in product(("nccl", "gloo"), TRIED.values()):
        arguments = StepArguments(uses_in_order(layout, ()), (), hardware, 1, 2, backend, 0)
        step_s = arguments.predict(arguments.schedule(layout, policy), layout).step_s
        assert least_seconds(layout, arguments, is_one_group=backend == "nccl") <= step_s


def test_a_policy_whose_memory_budget_a_layout_exceeds_loses_that_candidate():
    policies = {"small": fs.SchedulePolicy(memory_budget=1_500), "any": fs.SchedulePolicy()}
    choice = fs.tune(LAYOUTS, HARDWARE, budget=1e6, order=ORDER, policies=policies, effort=math.inf)
    refused = [x for x in choice.candidates if x.refused]
    assert {x.policy for x in refused} == {"small"}
    assert 0 < len(refused) < len(LAYOUTS)
    assert choice.candidates[-len(refused) :] == tuple(refused)
    assert refused[0].why_lost.startswith("the memory budget is too small, even without prefetch")
    assert refused[0].why_lost in choice.table()
    arenas = {name: plan_step(layout, order=ORDER).arena for name, layout in LAYOUTS.items()}
    assert all(arenas[x.layout] > 1_500 for x in refused)
    assert fs.inspect.Choice.from_json(choice.to_json()).candidates == choice.candidates
    assert choice.edit(prefetch=0).candidates[-1].why_lost == refused[-1].why_lost
    with pytest.raises(
        ScheduleError, match=r"(?s)no schedule fits into the memory_budget of a policy.*ddp, tiny +the memory budget is"
    ):
        fs.tune(LAYOUTS, HARDWARE, budget=1e6, order=ORDER, policies={"tiny": fs.SchedulePolicy(memory_budget=1)})


def test_strategies_that_a_format_does_not_fit_lose_with_the_reason():
    forms = {"": fs.Precision(), "updates": fs.Precision(update=fs.formats.mxint8)}
    fits = {name: getattr(fs, name) for name in NAMES}
    choice = fs.tune(make_params(), HARDWARE, budget=1e6, mesh=DP, strategies=fits, units="layers.*", formats=forms)
    refused = {x.layout: x.why_lost for x in choice.candidates if x.refused}
    assert set(refused) == {"ddp, updates", "zero3, updates"}
    assert all("has update=mxint8, and no updated parameters of this unit travel" in text for text in refused.values())
    assert {x.layout for x in choice.candidates if not x.refused} >= {"zero1, updates", "zero2, updates", "ddp, ", "zero3, "}
    assert "zero3, updates" in choice.table()
    with pytest.raises(ScheduleError, match="no candidate fits into the budget"):  # nor is a refused layout the one that fits
        fs.tune(make_params(), HARDWARE, budget=100, mesh=DP, strategies=fits, units="layers.*", formats=forms)
    with pytest.raises(LayoutError, match="has update=mxint8, and no updated parameters of this unit travel"):
        fs.tune(make_params(), HARDWARE, budget=1e6, mesh=DP, strategies={"zero3": fs.zero3}, formats=forms)


def test_steps_that_no_layout_has_are_refused():
    with pytest.raises(OptionError, match="microbatches is 0, expected at least 1"):
        plan_step(fs.plan(make_params(), DP, fs.zero3("dp")), microbatches=0)
    layout = fs.plan(make_params(), DP, fs.zero3("dp"), units="layers.*")
    with pytest.raises(LayoutError, match="order has unit 'tail', and the layout has no such unit"):
        plan_step(layout, order=["embed", "layers.*", fs.schedules.Use(("tail",)), "head"])
    with pytest.raises(PatternError, match="'tail' matches nothing"):
        plan_step(layout, remat="tail")


HARDWARE = fs.inspect.Hardware(
    compute_times={"**": (1e-3, 2e-3), "head": (3e-3, 6e-3)},
    bandwidth={"dp": 2e5, "outer": 1e5, "inner": 1e6},
    latency=1e-4,
    update_s=1e-3,
)
NAMES = ("ddp", "zero1", "zero2", "zero3")
REDUCED_IN_MEMORY_OF_ITS_OWN = ("zero1", "hfsdp")
"""Strategies whose gradients at the optimizer's place have memory of their own."""
LAYOUTS = {name: fs.plan(make_params(), fs.Mesh({"dp": 4}), STRATEGIES[name][1], units="layers.*") for name in NAMES} | {
    name: fs.plan(make_params(), HYBRID, STRATEGIES[name][1], units="layers.*") for name in ("hsdp", "hfsdp")
}


@cache
def arena_and_seconds(name, how, microbatches):
    schedule = plan_step(LAYOUTS[name], TRIED[how], order=ORDER, microbatches=microbatches)
    return schedule.arena, seconds_of(schedule, LAYOUTS[name])


def seconds_of(schedule, layout):
    """Seconds of a step whose rank updates its part of the parameters."""
    everything = fs.plan(make_params(), fs.Mesh({"dp": 1}), fs.ddp("dp"), units="layers.*").num_params
    update_s = HARDWARE.update_s * layout.nbytes("optim") / 4 / everything
    return fs.inspect.predict(schedule, replace(HARDWARE, update_s=update_s)).step_s


def changes(policy):
    """Whether state is on the host, and the number of other fields that differ from the default policy."""
    changed = {each.name for each in fields(policy) if getattr(policy, each.name) != getattr(fs.SchedulePolicy(), each.name)}
    return policy.offload, len(changed - {"offload"})


@settings(max_examples=settings.default.max_examples // 6)
@given(budget=st.integers(2_000, 7_000), activations=st.integers(0, 500), microbatches=st.integers(1, 2))
def test_the_choice_is_the_simplest_of_the_fastest_candidates_that_fit(budget, activations, microbatches):
    options = {"order": ORDER, "microbatches": microbatches}
    found = {}
    for name, layout in LAYOUTS.items():
        for how, policy in TRIED.items():
            arena, seconds = arena_and_seconds(name, how, microbatches)
            state, kept = layout.nbytes("main") + 2 * layout.nbytes("optim"), activations * len(layout.units)
            gradients = layout.nbytes("grads") if policy.keep_gradients else 0
            if microbatches == 1:  # gradients take memory as activations are freed
                kept = max(kept - gradients, 0)
            work = max(state, kept) if policy.offload else state + kept
            final = layout.nbytes("optim") if name in REDUCED_IN_MEMORY_OF_ITS_OWN else 0
            peak = layout.nbytes("params") + arena + gradients + final + work
            if peak <= budget:
                found[name, how] = seconds, (*changes(policy), peak)
    if not found:
        with pytest.raises(ScheduleError, match="no candidate fits into the budget"):
            fs.tune(LAYOUTS, HARDWARE, budget=budget, activations=activations, **options)
        return
    choice = fs.tune(LAYOUTS, HARDWARE, budget=budget, activations=activations, effort=math.inf, **options)
    quick = fs.tune(LAYOUTS, HARDWARE, budget=budget, activations=activations, **options)
    assert quick.candidates[0] == choice.candidates[0]
    exact = {(x.layout, x.policy): x for x in choice.candidates}
    for x in quick.candidates:
        mine = exact[x.layout, x.policy]
        assert x.step_s <= mine.step_s if x.is_unsimulated else replace(x, why_lost="") == replace(mine, why_lost="")
    best, *others = choice.candidates
    limit = (1 + TOLERANCE) * min(seconds for seconds, _ in found.values())
    simplest = min(simple for seconds, simple in found.values() if seconds <= limit)
    assert found[best.layout, best.policy] == (best.step_s, simplest)
    assert best.step_s <= limit
    assert [x.step_s for x in others if x.peak_nbytes <= budget] == sorted(x.step_s for x in others if x.peak_nbytes <= budget)
    fastest = fs.tune(LAYOUTS, HARDWARE, budget=budget, activations=activations, tolerance=0.0, **options)
    assert fastest.candidates[0].step_s == min(seconds for seconds, _ in found.values())
    assert choice.layout is LAYOUTS[best.layout]
    assert choice.policy == TRIED[best.policy]
    assert seconds_of(choice.schedule, choice.layout) == best.step_s
    assert {(x.layout, x.policy) for x in choice.candidates if x.peak_nbytes <= budget} == set(found)
    assert len(choice.candidates) == len(LAYOUTS) * len(TRIED)
    assert not best.why_lost
    assert all(x.why_lost for x in others)


def test_each_candidate_says_why_it_lost():
    choice = fs.tune(LAYOUTS, HARDWARE, budget=4_500, order=ORDER, effort=math.inf)
    lost = {(x.layout, x.policy): x.why_lost for x in choice.candidates}
    assert "and the budget is 4.39 KiB" in lost["ddp", "prefetch 1"]
    assert any(text.endswith("% slower") for text in lost.values())
    lines = choice.table().splitlines()
    assert len(lines) == len(choice.candidates) + 2
    assert str(choice).splitlines() == [*lines[:25], f"... and {len(choice.candidates) - 24} more", lines[-1]]
    assert lines[1].endswith("chosen")
    assert lines[-1] == "activations: given"
    rows = json.loads(choice.to_json())["candidates"]
    assert [row["step_s"] for row in rows] == [x.step_s if math.isfinite(x.step_s) else None for x in choice.candidates]
    assert rows[0] == json.loads(json.dumps(asdict(choice.candidates[0])))


@pytest.mark.parametrize("effort", [1, math.inf])
def test_steps_that_take_no_time_are_compared(effort):
    instant = fs.inspect.Hardware(compute_times=(0.0, 0.0), bandwidth=math.inf)
    choice = fs.tune(LAYOUTS, instant, budget=1e9, order=ORDER, effort=effort)
    assert choice.candidates[0].step_s == 0
    assert all(x.why_lost for x in choice.candidates[1:])


def test_of_equally_fast_candidates_the_simplest_wins_and_then_the_one_with_the_least_memory():
    def candidate(step_s, peak, *non_defaults):
        return Candidate("zero3", f"{step_s}, {peak}", "", step_s, {}, peak, 0, non_defaults=non_defaults)

    offloaded, prefetched = candidate(1.0, 10, "state on the host"), candidate(1.005, 20, "prefetch", "release")
    plain, large, slow = candidate(1.015, 30), candidate(1.01, 40), candidate(1.03, 5)
    tied = candidate(1.0149, 50), candidate(1.0151, 60, "prefetch")
    rows = [offloaded, prefetched, large, slow, plain, *tied]
    first, *others = sort_candidates(rows, 100, 0.02)
    assert first == plain
    assert {x.policy: x.why_lost for x in others} == {
        offloaded.policy: "1.5% faster, not as simple: state on the host",
        prefetched.policy: "1.0% faster, not as simple: prefetch, release",
        large.policy: "0.5% faster, with more memory",
        slow.policy: "1.5% slower",
        tied[0].policy: "as fast, with more memory",
        tied[1].policy: "as fast, not as simple: prefetch",
    }
    assert [x.policy for x in others] == [x.policy for x in (offloaded, prefetched, large, *tied, slow)]
    assert sort_candidates(rows, 25, 0.02)[0] == prefetched  # two fields of a policy, rather than memory of the host
    assert sort_candidates(rows, 15, 0.02)[0] == offloaded
    assert sort_candidates(rows, 100, 0.0)[0] == offloaded
    assert sort_candidates([replace(plain, is_unsimulated=True), offloaded], 100, 0.02)[0] == offloaded


def test_recomputation_formats_and_state_on_the_host_do_not_win_a_tie():
    free = fs.inspect.Hardware(compute_times=(1.0, 2.0), bandwidth=1e12, host_bandwidth=1e12)
    forms = {"8 bits": fs.Precision(wire=fs.formats.mxint8), "bfloat16": fs.Precision(wire=torch.bfloat16), "": fs.Precision()}
    model = {"budget": 1e6, "mesh": DP, "strategies": {"zero3": fs.zero3}, "units": "layers.*", "formats": forms}
    choice = fs.tune(make_params(), free, activations=(64.0, 64.0), remat={"all": "**", "": ()}, **model)
    best = choice.candidates[0]
    assert (best.layout, best.policy, best.non_defaults, choice.remat) == ("zero3, ", "prefetch 1", (), ())
    simulated = {(x.layout, x.policy, x.remat): x for x in choice.candidates if not x.is_unsimulated}
    offloaded = simulated["zero3, ", "state on the host", ""]
    assert offloaded.peak_nbytes < best.peak_nbytes
    assert offloaded.why_lost.endswith("slower") or offloaded.why_lost == "as fast, not as simple: state on the host"
    assert simulated["zero3, 8 bits", "no prefetch", ""].non_defaults == ("formats", "prefetch")
    assert simulated["zero3, bfloat16", "prefetch 1", ""].non_defaults == ("formats",)
    assert {x.non_defaults[0] for x in choice.candidates if x.remat} == {"remat"}
    assert fs.inspect.Choice.from_json(choice.to_json()).candidates == choice.candidates


def test_activations_are_by_unit_and_offloaded_state_makes_room_for_them():
    options = {"activations": {"layers.*": 5_000}, "order": ORDER, "budget": 1e6}
    choice = fs.tune({"zero1": LAYOUTS["zero1"]}, HARDWARE, effort=math.inf, **options)
    found = {x.policy: x for x in choice.candidates}
    assert {x.memory["activations"] for x in found.values()} == {10_000}
    state = found["state on the host"].memory["main"] + found["state on the host"].memory["optimizer"]
    assert found["prefetch 1"].peak_nbytes - found["state on the host"].peak_nbytes == state > 0


def square_layers(params, x, comm):
    for weight in params["layers"]:
        x = fs.forward(lambda w, x: torch.tanh(x @ w), weight, x, comm=comm)
    return x.square().mean()


def test_predicted_memory_is_what_is_alive_after_a_step():
    """Arena and gradients stay until the next step, activations do not."""
    cases = [*((name, keep, fs.Precision()) for name in NAMES for keep in (False, True))]
    cases += [("ddp", False, fs.Precision(wire=wire)) for wire in (torch.bfloat16, fs.formats.mxint8)]
    shapes, tx = {"layers": [torch.empty(256, 256, device="meta") for _ in range(4)]}, fs.optim.adamw(1e-2)

    def layout_and_policy(name, keep, precision):
        layout = fs.plan(shapes, DP, STRATEGIES[name][1], units="layers.*", precision=precision)
        return layout, fs.SchedulePolicy(keep_gradients=keep, bucket_nbytes=0)

    def alive(comm, *case):
        layout, policy = layout_and_policy(*case)
        with StorageTracker() as tracker:
            params, x = {"layers": [0.01 * torch.ones(256, 256) for _ in range(4)]}, torch.ones(8, 256)
            state = fs.init_state(tx, fs.shard(params, layout, comm, place="optim"), comm=comm)
            step = fs.Scheduler(comm, policy=policy)(fs.train_step(square_layers, tx, donate=True))
            for _ in range(3):
                state, _ = step(state, x)
            assert step.last_call_status().kind == "planned"
            state.params["layers"][0].buffers  # noqa: B018  # waits until nothing is under way
            del params, x
            gc.collect()
            return tracker.nbytes()

    found = processes(DP, lambda comm: [alive(comm, *case) for case in cases])
    options = {"budget": 1e9, "activations": 0.0, "backend": "gloo", "effort": math.inf}
    for case, *alive_nbytes in zip(cases, *found, strict=True):
        layout, policy = layout_and_policy(*case)
        predicted = fs.tune(
            {"": layout}, replace(HARDWARE, compute_times=(1.0, 1.0)), policies={"": policy}, **options
        ).candidates[0]
        assert [predicted.peak_nbytes] * DP.size == pytest.approx(alive_nbytes, rel=0.005), (case, predicted.memory)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_outside_of_the_arena_take_memory_as_activations_are_freed(microbatches):
    policies = {"in": fs.SchedulePolicy(), "out": fs.SchedulePolicy(keep_gradients=True)}
    options = {"activations": {"layers.*": 5_000}, "order": ORDER, "budget": 1e6, "microbatches": microbatches}
    for name in ("zero1", "zero3"):
        layout = LAYOUTS[name]
        choice = fs.tune({name: layout}, HARDWARE, policies=policies, effort=math.inf, **options)
        inside, outside = (choice.pick(name, each).candidates[0] for each in policies)
        final = layout.nbytes("optim") if name in REDUCED_IN_MEMORY_OF_ITS_OWN else 0
        assert inside.memory["gradients"] == final
        assert outside.memory["gradients"] == final + layout.nbytes("grads")
        assert inside.peak_nbytes == sum(inside.memory.values())
        shared = min(layout.nbytes("grads"), 10_000) if microbatches == 1 else 0
        assert outside.peak_nbytes == sum(outside.memory.values()) - shared


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ScheduleError, match="expected layouts for one number of ranks, got no layout"):
        fs.tune({}, HARDWARE, budget=1e9)
    two = {**LAYOUTS, "other": fs.plan(make_params(), DP, fs.zero3("dp"), units="layers.*")}
    with pytest.raises(ScheduleError, match=r"one number of ranks, got .*other: Mesh\(dp=2\)"):
        fs.tune(two, HARDWARE, budget=1e9)
    with pytest.raises(PatternError, match=r"tune\(activations=\)"):
        fs.tune(LAYOUTS, HARDWARE, budget=1e9, activations={"blocks.*": 1.0})
    with pytest.raises(ScheduleError, match=r"smallest +[\d.]+ KiB: zero3"):
        fs.tune(LAYOUTS, HARDWARE, budget=1e3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget": float("nan")}, "got a budget of nan"),
        ({"tolerance": -0.1}, "tolerance is -0.1, expected at least 0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"policies": {}}, "and 0 policies"),
        ({"optimizer_buffers": -1}, "-1 optimizer buffers"),
        ({"activations": {"layers.*": -1.0}}, "activations of unit 'layers.0' are -1.0 bytes"),
        (
            {"activations": {"layers.*": [1.0, 2.0]}},
            r"activations of unit 'layers.0' are \[1.0, 2.0\], expected a number .* tuple",
        ),
        (
            {"activations": {"layers.*": (1.0, 2.0, 3.0)}},
            r"'layers.0' are \(1.0, 2.0, 3.0\), expected a number .* tuple of two",
        ),
        ({"activations": float("nan")}, "are nan bytes"),
        ({"compute_times": {"**": (-1.0, 2.0)}}, r"compute_times of unit '.*' is \(-1.0, 2.0\)"),
        ({"compute_times": {"**": ("1", 2.0)}}, r"compute_times of unit '.*' is \('1', 2.0\)"),
        ({"compute_times": {"**": (1.0, 2.0, 3.0, 4.0)}}, "expected seconds"),
        ({"compute_times": {"**": (1.0, 2.0, -1.0)}}, r"is \(1.0, 2.0, -1.0\), expected seconds"),
        ({"compute_times": {"**": 1.0}}, "is 1.0, expected seconds"),
    ],
)
def test_numbers_without_a_meaning_are_refused(options, match):
    hardware = replace(HARDWARE, compute_times=options.pop("compute_times", HARDWARE.compute_times))
    with pytest.raises(ScheduleError, match=match):
        fs.tune(LAYOUTS, hardware, **{"budget": 1e9, **options})
