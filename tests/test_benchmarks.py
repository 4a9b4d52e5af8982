"""The benchmark's own machinery, on tiny sizes. Speed is measured in benchmarks/, never here."""

import gc
import gzip
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import optree
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import fsharp as fs
from benchmarks import (
    alternating,
    calls,
    checkpoint,
    codecs,
    compile,
    contenders as c,
    gpt,
    gpu,
    gpu_contenders,
    gpu_page,
    gpu_tests,
    host,
    interop,
    llama,
    memory,
    prediction,
    published,
    report,
    small,
    stats,
    steps,
    tuning,
    wire,
    wire_page,
)
from benchmarks.options import Options, parse
from benchmarks.overlap import GATHER, REDUCE, overlap
from benchmarks.record import Record
from benchmarks.training import Training
from fsharp.inspect.presets import EFFICIENCY_FROM_TRIAL
from fsharp.testing import DebugPolicy, processes, simulate
from tests import gpt_like
from tests.te_cpu import ranks
from tests.virtual_device import accelerator as accelerator, comm as comm, install

ROOT = Path(__file__).parents[1]
TINY = gpt.Shape(vocab=16, dim=16, layers=2, heads=2, time=8, batch=2)
MB = 1_000_000
THREE_UNITS = compile.program_of(compile.sizes_of(3, "equal"), 1)
LLAMA = llama.Shape(vocab=32, dim=32, hidden=64, layers=2, heads=2, time=16, batch=2)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Let collections not look at the libraries that are imported by now, here and in later tests.

    Each took a tenth of a second, as benchmarks end with gc.unfreeze().
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


SIZES = {"dim": 16, "layers": 2, "heads": 2, "time": 8, "batch": 1, "host_layers": 2, "calls_layers": 2, "small_layers": 2}
TURNS = {"rounds": 2, "steps": 1, "warmup": 2, "host_rounds": 2, "calibration_steps": 2, "checkpoint_rounds": 1}
SMALL_OPTIONS = Options(**SIZES, **TURNS, compile_units=20, checkpoint_mb=1, docs=None)


@pytest.fixture(scope="module")
def two_ranks():
    """What needs two processes: the parts ``steps``, ``memory`` and ``calls``, and a DTensor under the tracker."""

    def run(comm):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        x = distribute_tensor(torch.zeros(64, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
        with memory.StorageTracker() as tracker:
            y = x + 1
            counted = tracker.nbytes(), y.to_local().nbytes
        return counted, {
            name: each.measure(SMALL_OPTIONS, comm, silent)
            for name, each in (("steps", steps), ("memory", memory), ("calls", calls))
        }

    return processes(fs.Mesh({"dp": 2}), run)


@pytest.fixture(scope="module")
def fsharp_alone():
    """The parts of two processes in which FSDP2 has none."""

    def run(comm):
        modules = {"small": small, "alternating": alternating, "optax": interop, "prediction": prediction}
        modules |= {"tune": tuning, "checkpoint": checkpoint}
        return {name: each.measure(SMALL_OPTIONS, comm, silent) for name, each in modules.items()}

    return processes(fs.Mesh({"dp": 2}), run)


def silent(text):
    """Says nothing."""


def in_a_group_of_one(program):
    """What a function returns in a process that is a process group by itself."""

    def run(comm):
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return program()

    return ranks.processes(fs.Mesh({"dp": 1}), run, timeout=110)[0]


MEGATRON_FSDP = SimpleNamespace(
    MixedPrecisionPolicy=lambda *, main_params_dtype, main_grads_dtype: None,
    fully_shard_model=lambda *, module, fsdp_unit_modules, mixed_precision_policy: module,
    fully_shard_optimizer=lambda optimizer: None,
)
"""The calls of megatron-fsdp 0.6.1 that the benchmark makes. They shard nothing."""


def write_tests(folder, *sources):
    """What selects the tests that these lines make."""
    (folder / "test_kernels.py").write_text("\n".join(["import os, pytest", *sources]))
    return ("-p", "no:cacheprovider", str(folder / "test_kernels.py"))


@pytest.fixture(scope="module")
def of_the_gpu(tmp_path_factory):
    """What the benchmark of a GPU returns, prints and writes on a virtual one; and its folder."""
    folder = tmp_path_factory.mktemp("gpu")

    def run(comm):
        gpu.MODELS = {"small": gpu.Model(LLAMA, False, 1)}
        sys.modules["megatron_fsdp"], printed = MEGATRON_FSDP, io.StringIO()
        gpu_tests.SELECTED = write_tests(folder, "def test_passes(): pass")
        options = ["--models", "small", "--rounds=1", "--steps=1", "--warmup=1", "--seconds=1e3", "--trace", f"--out={folder}"]
        gc.freeze()
        with pytest.MonkeyPatch.context() as patch, install(patch)(), redirect_stdout(printed), warnings.catch_warnings():
            patch.setattr(gc, "unfreeze", lambda: None)
            warnings.simplefilter("ignore")
            return gpu.main(options), printed.getvalue()

    return *ranks.processes(fs.Mesh({"dp": 1}), run, timeout=250)[0], folder


@pytest.fixture(scope="module")
def parts(two_ranks, fsharp_alone):
    compiled = compile.measure(SMALL_OPTIONS, fs.SingleComm(), silent)
    hosts = in_a_group_of_one(lambda: host.measure(SMALL_OPTIONS, fs.SingleComm(), silent))
    made = {**two_ranks[0][1], **fsharp_alone[0], "compile": compiled, "host": hosts}
    made["checkpoint"]["rss"] = {name: {checkpoint.FIRST: MB} for name in (checkpoint.OURS, checkpoint.DCP)}
    return made


def gradients(module, tree_of):
    """The gradients of a module, as the tree that its parameters are in."""
    for x in module.parameters():
        x.data = x.grad
    return tree_of(module)


def test_module_and_functions_give_the_same_loss_and_gradients():
    module, batch = gpt.build(TINY), gpt.batches(TINY, 0)[0]
    params = optree.tree_map(lambda x: x.clone().requires_grad_(), gpt.tree_of(module))
    ours = gpt.plain_loss(params, batch, heads=TINY.heads)
    theirs = module(batch["inputs"], batch["targets"])
    ours.backward()
    theirs.backward()
    assert torch.equal(ours, theirs)
    assert len(optree.tree_leaves(params)) == len(list(module.parameters()))
    expected = gradients(module, gpt.tree_of)
    assert optree.tree_all(optree.tree_map(lambda x, g: torch.equal(x.grad, g), params, expected))


@pytest.mark.parametrize(("model", "shape"), [(gpt, TINY), (llama, LLAMA)], ids=["gpt", "llama"])
def test_a_module_and_its_shards_give_the_same_loss_and_gradients(model, shape):
    comm, cpu = fs.SingleComm(), {} if model is gpt else {"device": "cpu"}
    module = model.build(shape, **cpu)
    batch = (gpt.batches(shape, 0) if model is gpt else llama.batches(shape, **cpu))[0]
    params = model.tree_of(module)
    sharded = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp"), units="layers.*"), comm)
    loss, grads = fs.value_and_grad(partial(model.loss, heads=shape.heads))(sharded, batch, comm=comm)
    theirs = module(batch["inputs"], batch["targets"])
    theirs.backward()
    assert float(loss.sum) == float(theirs.detach())
    optree.tree_map(torch.testing.assert_close, fs.full_tree(grads, comm=comm), gradients(module, model.tree_of))


def test_models_have_the_sizes_that_the_docs_say():
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in made.parameters()) for made in (gpt.GPT(gpt.Shape()), llama.Llama(llama.LARGE))]
    assert sizes == [10_867_584, 1_364_297_728]
    assert all(size in (ROOT / "docs/benchmarks.md").read_text() for size in ("10.9M", "1.36 billion"))


def test_the_operations_of_a_step_are_those_of_its_products():
    """A matrix product of ``[m, k]`` and ``[k, n]`` is ``2 m k n``, and comes thrice; half of attention is never needed."""
    shape = LLAMA
    with torch.device("meta"):
        matrices = [p.numel() for name, p in llama.Llama(shape).named_parameters() if p.ndim == 2 and "embed" not in name]
    tokens = shape.batch * shape.time
    attention = 2 * shape.batch * 2 * shape.time * shape.time * shape.dim * shape.layers / 2
    assert llama.step_flops(shape) == 3 * (2 * tokens * sum(matrices) + attention)


def test_options_have_the_default_shape():
    names = ("dim", "layers", "heads", "time", "batch")
    assert gpt.Shape(**{name: getattr(Options(), name) for name in names}) == gpt.Shape()


def test_tracker_counts_what_is_alive_exactly():
    with memory.StorageTracker() as tracker:
        a = torch.empty(1000)
        assert tracker.nbytes() == 4000
        b = a.double()
        assert tracker.nbytes() == 12_000
        view = b[:10].view(2, 5)
        assert tracker.nbytes() == 12_000
        del b
        assert tracker.nbytes() == 12_000  # the view holds it
        del view
        assert tracker.nbytes() == 4000
        assert tracker.peak_nbytes == 12_000
        tracker.peak_nbytes = 0
        a.add_(1)
        assert tracker.peak_nbytes == 4000


def test_tracker_sees_what_the_backward_allocates_and_what_was_there_before():
    x = torch.randn(100, 100, requires_grad=True)
    with memory.StorageTracker() as tracker:
        y = x.exp()  # keeps its result
        assert tracker.nbytes() == 80_000
        y.sum().backward()
        assert tracker.nbytes() == 120_000
        del y
        assert tracker.nbytes() == 80_000
        x.grad = None
        assert tracker.nbytes() == 40_000


def test_tracker_follows_resized_storages():
    with memory.StorageTracker() as tracker:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        assert tracker.nbytes() == 0
        x.untyped_storage().resize_(4000)
        tracker.peak_nbytes = 0
        x.fill_(1)
        assert (tracker.nbytes(), tracker.peak_nbytes) == (4000, 4000)


@pytest.mark.deep
def test_tracker_counts_the_parts_of_a_dtensor_and_nothing_that_is_fake(two_ranks):
    for (counted, nbytes), _ in two_ranks:
        assert nbytes == 8192
        assert counted == 2 * 8192


def test_memory_of_a_step_is_what_the_sizes_say():
    """Parameters, AdamW's two moments, gradients; the functions on plain tensors hold nothing else."""
    shape = gpt.Shape(vocab=64, dim=64, layers=2, heads=2, time=1, batch=1)
    nbytes = 4 * sum(p.numel() for p in gpt.build(shape).parameters())
    found = memory.track(lambda: c.FunctionContender("functions", shape), gpt.batches(shape, 0))
    assert found["optimizer"] == pytest.approx(2 * nbytes, rel=0.001)
    assert found["rest"] == pytest.approx(3 * nbytes, rel=0.001)
    assert found["peak"] == pytest.approx(4 * nbytes, rel=0.02)
    assert found["peak"] >= found["first"] > found["rest"]


def test_ratios_are_medians_of_those_within_rounds():
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 10.0}, {"a": 6.0, "b": 3.0}]
    assert stats.ratio(rounds, "a", "b") == stats.Spread(0.9, 0.5, 2.0)  # and not 6 / 3, of the medians
    assert stats.times(rounds, "b") == stats.Spread(3.0, 2.0, 10.0)
    assert stats.paired(rounds, lambda row: row["b"] - row["a"]).median == 1.0


def test_everybody_comes_first_and_last():
    names = ["a", "b", "c"]
    orders = [stats.turn(names, i) for i in range(6)]
    assert orders == [list(x) for x in ("abc", "cba", "bca", "acb", "cab", "bac")]


def test_turns_time_every_contender_in_every_round_and_continue_with_their_batches():
    seen = {"a": [], "b": []}

    def step(name, batch):
        seen[name].append(batch)
        return torch.tensor(float(batch))

    settled = []
    both, turns = {name: partial(step, name) for name in seen}, {"rounds": 3, "block": 2, "warmup": 1}
    rounds, losses = steps.interleaved(both, range(4), **turns, settle={"b": lambda: settled.append(1)})
    assert [set(row) for row in rounds] == [{"a", "b"}] * 3
    assert seen["a"] == seen["b"] == [0, 1, 2, 3, 0, 1, 2]
    assert [float(x) for x in losses["a"]] == seen["a"]
    assert len(settled) == 4


def test_blocks_have_the_sizes_that_the_figures_say():
    made = {name: gpt.Block(gpt.Shape(dim=dim, heads=heads)) for name, (dim, heads) in small.WIDTHS.items()}
    assert {name: sum(p.numel() for p in each.parameters()) for name, each in made.items()} == {
        "narrow": 307_520,
        "tiny": 32_552,
    }


@pytest.mark.deep  # every part of make bench runs, for a quarter of a minute
def test_parts_of_two_ranks(fsharp_alone):
    """What each has; that contenders train alike is checked where they are measured."""
    found = fsharp_alone[0]
    assert {name: list(part["rounds"][0]) for name, part in found["small"].items()} == {
        "narrow": ["DDP", "fsharp zero3"],
        "tiny": ["DDP", "fsharp zero3"],
    }
    assert set(found["alternating"]) == {"two models", "two losses"}
    assert list(found["optax"]["rounds"][0]) == [interop.OWN, interop.OPTAX]
    saves = found["checkpoint"]["places"]["disk"]["rounds"][0]
    kinds = [checkpoint.SAVE, checkpoint.LOAD, checkpoint.FIRST, checkpoint.STEADY]
    contenders = [checkpoint.OURS, checkpoint.DCP, checkpoint.DCP_THREADS]
    assert set(saves) == {f"{name}, {kind}" for name in contenders for kind in kinds} | {checkpoint.COPY, checkpoint.HASHING}
    predicted = found["prediction"]
    assert set(predicted["shapes"]) == set(prediction.shapes(SMALL_OPTIONS))
    errors = {name: row["error"] for name, row in predicted["shapes"].items()}
    assert predicted["error"] == max(abs(x) for name, x in errors.items() if name != predicted["fitted"])
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in predicted["shapes"].values())
    assert predicted["shapes"] == fsharp_alone[1]["prediction"]["shapes"]
    tuned = found["tune"]
    assert tuned == fsharp_alone[1]["tune"] == tuning.merged([tuned])
    assert set(tuned["shapes"]) == {f"{name}, 2 processes" for name in tuning.cases(SMALL_OPTIONS)}
    for each in tuned["shapes"].values():
        keys = {(row["layout"], row["policy"], row["remat"]) for row in each["rows"]}
        usual = {key[:2] for key in keys if not key[2] and key[0] in tuning.STRATEGIES}
        assert usual < set(product(tuning.STRATEGIES, tuning.POLICIES))
        assert {strategy for strategy, _ in usual} == set(tuning.STRATEGIES)
        assert {key[0] for key in keys if key[2]} == set(tuning.STRATEGIES)
        assert {key[0] for key in keys} - set(tuning.STRATEGIES) == {f"{each}, 8-bit gradients" for each in tuning.STRATEGIES}
        predicted_s = [row["predicted_s"] for row in each["rows"][1:]]
        assert predicted_s == sorted(predicted_s)
        assert each["regret"] == each["rows"][0]["measured_s"] / min(row["measured_s"] for row in each["rows"]) - 1 >= 0
        assert -1 <= each["rank_correlation"] <= 1
        assert each["rows"][0]["predicted_s"] <= 1.02 * min(row["predicted_s"] for row in each["rows"])
        assert 0 <= each["order"] <= 1
        assert -1 <= each["order_correlation"] <= 1
        assert 0 <= each["ceiling"] <= 1
        assert each["noise"] >= 0
    assert report.FIGURES["tune_rank_correlation"].is_met(0.95)
    assert not report.FIGURES["tune_regret"].is_met(0.06)


def test_predictions_are_judged_by_candidates_that_differ_by_more_than_noise():
    """A and B are equally fast within the noise; C is much slower."""
    keys = [("a", "x", ""), ("b", "x", ""), ("c", "x", "")]
    seconds = [(1.00, 1.02, 2.0), (1.02, 1.00, 2.1), (1.00, 1.02, 2.0), (1.02, 1.00, 2.1)]
    rounds = [{tuning.ALONE: 1.0} | {f"{key[0]}, x": x for key, x in zip(keys, row, strict=True)} for row in seconds]
    found = tuning.judged(dict(zip(keys, (1.1, 0.9, 2.0), strict=True)), rounds, choice=keys[1])
    assert [(row["layout"], row["predicted_s"]) for row in found["rows"]] == [("b", 0.9), ("a", 1.1), ("c", 2.0)]
    assert found["noise"] == pytest.approx(0.02, rel=0.02)
    assert (found["pairs"], found["order"], found["order_correlation"], found["regret"]) == (2, 1.0, 1.0, pytest.approx(0.0))
    wrong = tuning.judged(dict(zip(keys, (1.1, 2.0, 0.9), strict=True)), rounds, choice=keys[2])
    assert (wrong["pairs"], wrong["order"], wrong["order_correlation"]) == (2, 0.0, -1.0)
    assert wrong["regret"] == pytest.approx(2.05 / 1.01 - 1)
    equal = tuning.judged(dict(zip(keys, (1.0, 1.1, 1.0), strict=True)), rounds, choice=keys[0])
    assert (equal["order"], equal["order_correlation"]) == (0.0, -0.5)
    cases = {"a": wrong, "b": {**found, "pairs": 0}}
    assert tuning.summed_up(cases)["order_correlation"] == -1.0
    assert tuning.summed_up({"b": cases["b"]})["order_correlation"] == 1.0
    assert wrong["ceiling"] == found["ceiling"] == pytest.approx((2 * 0.5 / 1.5) ** 0.5)


def test_equal_schedules_are_one_candidate():
    schedule = fs.schedules.compile_schedule(THREE_UNITS, fs.SchedulePolicy())
    other = schedule.replace_ops([replace(op, after=()) for op in schedule.ops[:-1]])
    keys = [("zero3", policy, "") for policy in ("prefetch 1", "gathered once", "no buckets")]
    assert tuning.distinct(dict(zip(keys, (schedule, other, schedule), strict=True))) == keys[:2]


def test_the_tables_of_published_runs_in_the_docs_are_what_is_predicted():
    page = (Path(__file__).parent.parent / "docs" / "tune.md").read_text()
    speeds, memory = "\n".join(published.table()).split("\n\n")
    assert speeds in page
    assert memory in page
    num_groups = len({run.group for run in published.RUNS})
    assert speeds.count("%") == len(published.RUNS) - num_groups, "the first run of a group is fitted, and the others are not"


def test_the_efficiencies_by_default_are_those_of_the_run_that_they_are_from():
    """Each for its own count of operations: with attention and without the embedding, and 2 for each parameter."""
    run = published.RUNS[2]
    layout = published.layout_of(run)
    schedule = published.schedule_of(layout)
    assert published.predicted(run, layout, schedule, EFFICIENCY_FROM_TRIAL) == pytest.approx(run.tokens_per_s, rel=0.02)
    hardware = fs.inspect.Hardware.preset(run.gpu, layout, tokens=run.tokens)
    step_s = fs.inspect.predict(schedule, replace(hardware, update_s=hardware.update_s / run.fsdp)).step_s
    assert run.tokens / step_s == pytest.approx(run.tokens_per_s, rel=0.02)


def test_a_published_number_of_operations_is_that_of_its_tokens():
    """Megatron-Bridge publishes both for each of its runs."""
    for model, tflops, tokens in (("8B", 744, 14451), ("70B", 719, 1602), ("405B", 737, 292)):
        assert published.tokens_per_s(tflops, model) == pytest.approx(tokens, rel=5e-3)


def test_compute_is_scaled_to_the_step_without_communication():
    schedule = fs.schedules.compile_schedule(THREE_UNITS, fs.SchedulePolicy(gather_at_start=False))
    alone = schedule.replace_ops([replace(op, after=()) for op in schedule.ops if op.kind in ("compute", "cast", "update")])
    memory_bandwidth = 2.0 * THREE_UNITS.units[0].outgoing
    speeds = {"bandwidth": 1.0, "memory_bandwidth": memory_bandwidth}
    hardware = fs.inspect.Hardware(compute_times={"**": (1.0, 2.0)}, **speeds, update_s=0.5)
    assert fs.inspect.predict(alone, hardware).step_s == 11.0
    found = prediction.scaled(hardware, alone, 22.0)
    assert fs.inspect.predict(alone, found).step_s == 22.0
    assert (found.compute_times["**"], found.update_s, found.bandwidth) == ((2.0, 4.0), 1.0, 1.0)


def test_the_thousand_units_are_those_of_zero3():
    program = THREE_UNITS
    recorded = simulate(fs.Mesh({"dp": 2}), partial(_recorded, layers=3))[0]
    ours, theirs = program.units[1], recorded.program.facts["layers.1"]
    assert [(call.op, call.axis) for call in ours.gather + ours.reduce] == [
        (call.op, call.axis) for call in theirs.gather + theirs.reduce
    ]
    for name in ("gathered", "outgoing", "rest", "finishing"):
        assert bool(getattr(ours, name)) == bool(getattr(theirs, name)), name
    kinds = [event.kind for event in recorded.program.events if event.unit == "layers.1" or not event.unit]
    assert kinds == [event.kind for event in program.events if event.unit == "layers.1" or not event.unit]


def _recorded(comm, layers):
    contender = c.sharded("", replace(TINY, layers=layers), comm, fs.zero3("dp"), fs.SchedulePolicy())
    for batch in gpt.batches(TINY, comm.rank)[:2]:
        contender.step(batch)
    return contender.scheduled.schedule


def test_host_time_is_counted_per_unit_over_its_own_base():
    row = dict.fromkeys(host.BASE, 0.0) | {"module": 1.0, "functions": 2.0, "FSDP2": 25.0, "fsharp zero3": 14.0}
    found = host.added([row], 12)
    assert found[0]["FSDP2"] == 2.0
    assert found[0]["fsharp zero3"] == 1.0


def test_losses_that_differ_are_refused():
    same = {"a": [2.0, 1.0], "b": [2.0, 1.0], "alone": [2.0, 7.0]}
    assert steps.compare_losses(same, alone=["alone"]) == {"first_steps": 0.0, "all_steps": 0.0}
    with pytest.raises(steps.LossMismatch, match=r"b: 1\.0e-04 over the first 4 steps"):
        steps.compare_losses({"a": [2.0], "b": [2.0002]})
    with pytest.raises(steps.LossMismatch, match=r"b: 1\.0e-01 over all steps"):
        steps.compare_losses({"a": [1.0] * 5, "b": [1.0] * 4 + [1.1]})
    with pytest.raises(steps.LossMismatch, match=r"alone: 5\.0e-01"):
        steps.compare_losses({"a": [2.0], "b": [2.0], "alone": [3.0]}, alone=["alone"])
    with pytest.raises(steps.LossMismatch, match="b: nan"):
        steps.compare_losses({"a": [2.0], "b": [float("nan")]})


def test_first_losses_are_compared_with_those_of_the_peer():
    losses = {"a": [1.0, 2.0], "b": [1.01, 2.0], "late": [None, 2.02], "off": [1.1, 2.0], "nan": [1.0, float("nan")]}
    losses |= {"x": [5.0], "later": [None] * gpu_page.FIRST + [9.0]}
    found = gpu_page.compare(losses, dict.fromkeys(losses, "a") | {"x": "left out"})
    expected = {"a": 0, "b": 0.01, "late": 0.01, "off": 0.1, "nan": float("nan")}
    assert found["difference_of_losses"] == pytest.approx(expected, nan_ok=True)
    assert set(found["mismatch"]) == {"off", "nan"}


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_gathers_that_overlap_compute_are_counted_by_phase():
    events = [
        {"ph": "M", "name": "process_name"},
        # Forward: a gather beside a kernel, half hidden; its device part is a copy, as at world size 1.
        event("user_annotation", GATHER, 0, 10),
        event("cuda_runtime", "cudaMemcpyAsync", 5, 1, correlation=1),
        event("gpu_memcpy", "Memcpy DtoD", 100, 20, correlation=1, stream=9),
        event("gpu_user_annotation", GATHER, 100, 20),
        event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=2),
        event("kernel", "gemm", 110, 40, correlation=2, stream=7),
        # A gather that compute waits for.
        event("user_annotation", GATHER, 30, 5),
        event("cuda_driver", "cuLaunchKernelEx", 31, 1, correlation=3),
        event("kernel", "ncclDevKernel_AllGather", 150, 10, correlation=3, stream=9),
        # Backward: a gather beside a reduction only, then one beside a kernel.
        event("cpu_op", "autograd::engine::evaluate_function: AddBackward0", 50, 40),
        event("user_annotation", GATHER, 51, 2),
        event("cuda_runtime", "cudaLaunchKernel", 52, 1, correlation=4),
        event("kernel", "ncclDevKernel_AllGather", 200, 10, correlation=4, stream=9),
        event("user_annotation", REDUCE, 55, 2),
        event("cuda_runtime", "cudaLaunchKernel", 56, 1, correlation=5),
        event("kernel", "ncclDevKernel_ReduceScatter", 195, 20, correlation=5, stream=10),
        event("user_annotation", GATHER, 60, 2),
        event("cuda_runtime", "cudaLaunchKernel", 61, 1, correlation=6),
        event("kernel", "ncclDevKernel_AllGather", 220, 10, correlation=6, stream=9),
        event("cuda_runtime", "cudaLaunchKernel", 70, 1, correlation=7),
        event("kernel", "gemm", 215, 30, correlation=7, stream=7),
        # A reduction beside a kernel.
        event("user_annotation", REDUCE, 75, 2),
        event("cuda_runtime", "cudaLaunchKernel", 76, 1, correlation=9),
        event("kernel", "ncclDevKernel_ReduceScatter", 235, 10, correlation=9, stream=10),
        # After it, one that runs no kernel at all, and one that does.
        event("user_annotation", GATHER, 95, 2),
        event("user_annotation", GATHER, 98, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 99, 1, correlation=8),
        event("gpu_memcpy", "Memcpy DtoD", 300, 5, correlation=8, stream=9),
    ]
    found = overlap(events)
    assert found["forward"] == {"num": 2, "num_overlapping": 1, "us": 30.0, "hidden_us": 10.0}
    assert found["backward"] == {"num": 2, "num_overlapping": 1, "us": 20.0, "hidden_us": 10.0}
    assert found["after"] == {"num": 1, "num_overlapping": 0, "us": 5.0, "hidden_us": 0.0}
    assert found["reductions"] == {"num": 2, "num_overlapping": 1, "us": 30.0, "hidden_us": 10.0}


def test_the_marks_of_fsdp2_count_once():
    """Those that lie within another one are a part of that; what they launch may come behind the inner one."""
    events = [
        event("user_annotation", "FSDP::pre_forward (layers.0)", 0, 10),
        event("user_annotation", "FSDP::all_gather (layers.0)", 1, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 2, 1, correlation=1),
        event("gpu_memcpy", "Memcpy DtoD", 100, 10, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 6, 1, correlation=2),
        event("kernel", "copy", 110, 10, correlation=2),
        event("user_annotation", "FSDP::post_backward_reduce", 20, 5),
        event("cuda_runtime", "cudaMemcpyAsync", 21, 1, correlation=3),
        event("gpu_memcpy", "Memcpy DtoD", 130, 10, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 30, 1, correlation=4),
        event("kernel", "gemm", 135, 10, correlation=4),
    ]
    found = overlap(events)
    assert found["forward"] == {"num": 1, "num_overlapping": 0, "us": 20.0, "hidden_us": 0.0}
    assert found["reductions"] == {"num": 1, "num_overlapping": 1, "us": 10.0, "hidden_us": 5.0}


def test_a_profile_on_the_cpu_has_the_marks():
    """The marks reach the trace; what the device does about them needs a device."""
    comm = fs.SingleComm()
    contender = c.sharded("", TINY, comm, fs.zero3("dp"), DebugPolicy(trivial_axes=True))
    gpu.mark(contender.scheduler.engine.steps.executor.transport)
    batches = gpt.batches(TINY, 0)
    for batch in batches[:3]:
        contender.step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        contender.step(batches[3])
    names = [e.name for e in found.events()]
    assert names.count(GATHER) >= TINY.layers + 2
    assert names.count(REDUCE) == TINY.layers + 2


WHERE = {"date": "2026-01-01 00:00 UTC", "commit": "abc", "gpu": "none", "peak_flops": 1e12}
WHERE |= {"python": "3", "torch": torch.__version__, "cuda": "13", "nccl": "2"}
PROFILED = [getattr(gpu_contenders, name) for name in ("BASE", "NEWER", "OURS", "MODULE", "FP8_BASE", "FP8")]


def test_the_gpu_benchmark_runs_end_to_end_without_a_gpu(of_the_gpu):
    """The device is virtual, blocks are traced but not compiled, and TransformerEngine's kernels are stand-ins."""
    status, printed, folder = of_the_gpu
    assert status == 0, printed
    [path] = folder.glob("gpu-*.json")
    found = json.loads(path.read_text())
    part = found["models"]["small"]
    lacking = set() if hasattr(FSDPModule, gpu_contenders.SETTERS[0]) else {gpu_contenders.NEWER}
    assert set(part["absent"]) == lacking, part["absent"]
    names = set(part["peers"]) - lacking
    assert set(part["memory"]) == set(part["losses"]) == names
    assert all(memory["peak"] > 0 for memory in part["memory"].values())
    assert [set(row) for row in part["rounds"]] == [names]
    assert part["mismatch"] == {}
    assert set(part["overlap"]) == {row for row in PROFILED if row not in lacking}
    trace = json.loads(gzip.decompress((folder / f"{path.stem}-small-fsharp-zero3.trace.json.gz").read_bytes()))
    assert GATHER in {e.get("name") for e in trace["traceEvents"]}
    assert set(json.loads(printed.splitlines()[-1])) == {
        f"small_{prefix}{kind}_ratio_vs_fsdp2" for prefix in gpu_page.PAIRS for kind in ("step", "host", "peak")
    }
    made = gpu_page.tables(found)
    assert [table.title.split(":")[0].split(",")[0] for table in made] == [
        "small",
        "Gathers and reductions beside compute",
        "What only a GPU can show of TransformerEngine",
        "Not measured",
    ]
    assert made[2].rows == [("test passes", "1", "", "", "")]
    assert all(len(row) == len(table.header) for table in made for row in table.rows)


def test_tests_of_a_gpu_are_rows_whatever_becomes_of_them(monkeypatch, tmp_path, capsys):
    sources = (
        "@pytest.mark.parametrize('n', [1, 2, 3])",
        "def test_some(n): assert n < 2",
        "@pytest.mark.skipif(True, reason='needs a GPU of architecture 9.0')",
        "def test_skipped(): pass",
        "def test_dies(): os._exit(9)",
        "def test_after(): pass",
    )
    monkeypatch.setattr(gpu_tests, "SELECTED", write_tests(tmp_path, *sources))
    results = {"models": {}, "peak_flops": None, "tests": gpu_tests.measure(100.0)}
    assert gpu_page.tables(results)[1].rows == [
        ("test some", "1", "2", "", "2: assert 2 < 2"),
        ("test skipped", "", "", "1", "needs a GPU of architecture 9.0"),
        ("test dies", "", "", "1", "pytest ended with status 9"),
        ("test after", "", "", "1", "pytest ended with status 9"),
    ]
    assert gpu.report(results, tmp_path) == 1
    assert "error: 2 tests failed: test_some[2], test_some[3]" in capsys.readouterr().err
    assert gpu_tests.measure(0.01) == [(gpu_tests.SELECTED[-1], "not run", "0.01 s were over")]


@pytest.mark.deep
def test_tests_of_a_gpu_are_none_without_a_gpu():
    """The command as it is: pytest finds the tests, and leaves all out."""
    [(test, result, why)] = gpu_tests.measure(250.0)
    assert (test, result) == ("tests/te/test_gpu.py", "not run")
    assert "deselected" in why


class Plain:
    """Trains nothing: its losses are 1, 1/2, 1/3 ..., times a factor; it fails at a step."""

    def __init__(self, name, factor=1.0, fails_at=0):
        self.name, self.factor, self.fails_at, self.count = name, factor, fails_at, 0
        self.memory = torch.zeros(1, device="cuda")

    def step(self, batch):
        self.count += 1
        if self.count == self.fails_at:
            raise RuntimeError("out of memory")
        return torch.tensor(self.factor / self.count)


def refuse():
    raise OSError("undefined symbol")


def stand_ins(shape, mesh, batch):
    makers = {
        gpu_contenders.BASE: lambda: Plain(gpu_contenders.BASE),
        "not there": refuse,
        "fails at once": lambda: Plain("fails at once", fails_at=1),
        "fails in the second round": lambda: Plain("fails in the second round", fails_at=9),
        "off": lambda: Plain("off", factor=1.1),
        gpu_contenders.OURS: lambda: Plain(gpu_contenders.OURS),
    }
    return [gpu_contenders.Row(name, make) for name, make in makers.items()]


@pytest.mark.parametrize("together", [False, True])
def test_a_contender_that_fails_costs_nobody_elses_figures(accelerator, monkeypatch, tmp_path, capsys, together):
    monkeypatch.setattr(gpu, "rows", stand_ins)
    monkeypatch.setattr(gpu, "MODELS", {"small": gpu.Model(LLAMA, together, 1)})
    options = gpu.Options(models=("small",), rounds=3, steps=2, warmup=3 if together else 4)
    with accelerator():
        found = gpu.run(options, None, WHERE, tmp_path / "gpu-now.json", silent)
    part = found["models"]["small"]
    assert part["absent"] == {
        "not there": "OSError: undefined symbol",
        "fails at once": "RuntimeError: out of memory",
        "fails in the second round": "RuntimeError: out of memory",
    }
    whole = {gpu_contenders.BASE, "off", gpu_contenders.OURS}
    assert [set(row) for row in part["rounds"]] == [whole | {"fails in the second round"}, whole, whole]
    assert part["mismatch"] == {"off": pytest.approx(0.1)}
    assert json.loads((tmp_path / "gpu-now.json").read_text()) == found
    assert gpu.report(found, tmp_path / "gpu-now.json") == 1
    shown = capsys.readouterr()
    assert "'off': 0.1" in shown.err
    assert "small_step_ratio_vs_fsdp2" in shown.out.splitlines()[-1]


def test_what_there_is_no_time_for_is_named(accelerator, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "rows", stand_ins)
    monkeypatch.setattr(gpu, "MODELS", {"small": gpu.Model(LLAMA, True, 1)})
    now = [0.0]
    monkeypatch.setattr(gpu, "_now", lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
    options = gpu.Options(models=("small",), rounds=50, steps=1, warmup=1, seconds=10)
    with accelerator():
        found = gpu.run(options, None, WHERE, tmp_path / "gpu-now.json", silent)
    part = found["models"]["small"]
    assert len(part["rounds"]) == gpu.LEAST
    late = {name for name, why in part["absent"].items() if why == "left out: the time of --seconds 10 was over"}
    assert gpu_contenders.OURS in late
    assert gpu_contenders.BASE in part["rounds"][0]


def test_a_captured_step_has_the_losses_of_the_step(comm):
    """On the virtual device, or on a GPU. All begin with the same batch, as a capture warms up on one."""
    batches = [{key: x.cuda() for key, x in batch.items()} for batch in gpt_like.make_batches(4, 32)]
    build = lambda: optree.tree_map(lambda x: x.cuda(), gpt_like.make_params())  # noqa: E731
    graph = gpu_contenders.GraphContender("graph", build(), gpt_like.loss_fn, comm, batches[0])
    policy, precision = gpu_contenders.FORCED, gpu_contenders.PRECISION
    ours = c.FsharpContender("", build(), gpt_like.loss_fn, comm, fs.zero3("dp"), policy=policy, precision=precision)
    for _ in range(graph.done):
        ours.step(batches[0])
    losses = [graph.step(batch) for batch in batches]  # kept while the graph is replayed
    for batch, loss in zip(batches, losses, strict=True):
        torch.testing.assert_close(loss, ours.step(batch), rtol=1e-5, atol=0)


def test_the_page_of_the_gpu_is_the_last_result():
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert (page.count(gpu_page.MARKS[0]), page.count(gpu_page.MARKS[1])) == (1, 1)
    for path in sorted((ROOT / "benchmarks/results").glob("gpu-*.json"))[-1:]:
        assert gpu_page.markdown(json.loads(path.read_text())) in page


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_the_gpu_benchmark_on_a_gpu(tmp_path):
    options = ["--models", "small", "--rounds=2", "--steps=2", "--seconds=60", "--tests-seconds=0", f"--out={tmp_path}"]
    assert gpu.main(options) == 0
    (path,) = tmp_path.glob("gpu-*.json")
    part = json.loads(path.read_text())["models"]["small"]
    assert part["memory"][gpu_contenders.OURS]["peak"] > 0
    found = part["overlap"][gpu_contenders.OURS]
    assert found["forward"]["num"] + found["backward"]["num"] >= llama.SMALL.layers


@pytest.mark.deep
def test_the_report_writes_everything_and_ends_in_a_line_of_figures(parts, tmp_path, capsys):
    docs, out = tmp_path / "benchmarks.md", tmp_path / "results" / "cpu.json"
    docs.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    rss = {"FSDP2": {"rise": MB}}
    report.report(replace(SMALL_OPTIONS, out=out, docs=docs), {**parts, "rss": rss}, seconds=1.0)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == list(report.FIGURES)
    assert all(isinstance(x, float) and x == x for x in last.values())
    results = json.loads(out.read_text())
    assert results["summary"] == last
    assert len(results["steps"]["rounds"]) == len(results["host"]["step"]["rounds"]) == 2
    assert set(results["steps"]["rounds"][0]) >= {"FSDP2", "DDP", "fsharp zero3", "fsharp zero1", "fsharp ddp"}
    assert {"date", "commit", "cpu", "threads_per_process", "versions"} <= set(results)
    titles = [table.title.split(",")[0].split(";")[0] for table in report.tables(results)]
    assert titles[:4] == ["In short", "A training step", "Small units", "Two programs on one scheduler"]
    assert titles[4:6] == ["Steps updated by optax", "Predicted steps"]
    assert all(len(row) == len(table.header) for table in report.tables(results) for row in table.rows)
    page = docs.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "Short of its target: " in page
    assert f"| `peak_ratio_vs_fsdp2` | {report.FIGURES['peak_ratio_vs_fsdp2'].meaning} |" in page


def test_the_figures_are_those_of_the_rounds():
    rounds = [
        {"fsharp zero3": 1.0, "fsharp ddp": 2.0, "fsharp zero1": 3.0, "FSDP2": 5.0, "DDP": 2.0, "fsharp zero3, module": 1.2}
        | {"FSDP2, asynchronous": 4.0}
    ]
    turns = [[{"in turns": x, "the first alone": 2.0, "the second alone": 3.0}] for x in (5.0, 6.0)]
    kinds = ("save", "load", "async, first", "async, steady")
    times = {"fsharp": (4.0, 1.0, 3.0, 0.5), "DCP": (6.0, 2.0, 5.0, 2.0), "DCP, 2 threads": (5.0, 3.0, 6.0, 3.0)}
    saves = {f"{name}, {kind}": x for name, each in times.items() for kind, x in zip(kinds, each, strict=True)}
    saves |= {"plain copy": 0.4, "hashing": 0.4}
    peaks = {"FSDP2": 100, "FSDP2, embedding and head apart": 80, "fsharp zero3": 60}
    later = {"FSDP2": 100, "FSDP2, embedding and head apart": 110, "fsharp zero3": 120, memory.SEPARATE: 105}
    parts = {
        "steps": {"rounds": rounds},
        "small": {name: {"rounds": [{"fsharp zero3": x, "DDP": 2.0}]} for name, x in (("narrow", 2.5), ("tiny", 3.0))},
        "alternating": {name: {"rounds": rounds} for name, rounds in zip(("two models", "two losses"), turns, strict=True)},
        "optax": {"rounds": [{interop.OWN: 2.0, interop.OPTAX: 2.5}]},
        "prediction": {"error": 0.07},
        "tune": {"regret": 0.02, "rank_correlation": 0.93, "order": 0.96, "order_correlation": 0.92},
        "compile": {"compile_s": 1.5, "verify_s": 0.25},
        "host": {"step": {"added": [{"FSDP2": 10.0, "fsharp zero3": 3.0}]}},
        "calls": {"calls": {"FSDP2": 900.0, "fsharp zero3": 150.0, "fsharp zero3, module": 310.0}},
        "memory": {
            "largest": {name: {"peak": x} for name, x in peaks.items()},
            "with_activations": {name: {"peak": x} for name, x in later.items()},
        },
        "checkpoint": {
            "places": {"memory": {"rounds": [saves]}, "disk": {"rounds": []}},
            "rss": {"fsharp": {"async, first": 30}, "DCP": {"async, first": 20}},
        },
    }
    expected = [0.25, 0.5, 1.5, 0.3, 1.2, 1.25, 1.5, 1.2, 1.25, 0.07, 0.02, 0.93, 0.92, 1.75, 0.3, 150.0, 310.0, 900.0, 0.75]
    expected += [1.2, 1.05, 0.8, 0.5, 0.25, 0.6, 1.25, 0.1, 1.5]
    assert report.summary(parts) == dict(zip(report.FIGURES, expected, strict=True))
    assert report.summary({"steps": parts["steps"]}).keys() < report.FIGURES.keys()


def test_calls_are_those_of_the_main_thread_and_of_python_alone():
    class Contender:
        def step(self, batch):
            thread = threading.Thread(target=batch)
            thread.start()
            thread.join()
            batch()
            len([])

        def settle(self):
            self.batches = 0

    def twice():
        silent("")
        silent("")

    both = [calls.counted(Contender(), [each] * 2) for each in (twice, lambda: silent(""))]
    assert both[0] - both[1] == 1


@pytest.mark.deep
def test_partial_runs_do_not_touch_the_page(parts, tmp_path):
    docs = tmp_path / "benchmarks.md"
    options = replace(SMALL_OPTIONS, out=tmp_path / "cpu.json", docs=docs, only=("steps",))
    report.report(options, {"steps": parts["steps"]}, seconds=1.0)
    assert not docs.exists()


@pytest.mark.deep  # test_wire_format.py holds the bytes of a step
def test_formats_send_the_bytes_that_are_said(tmp_path):
    """One block and the root: FSDP2 gathers a block twice and the root once, in two bytes an element, and reduces both."""
    names = ("float32, zero3", "mxint8, gradients mxint4, zero2", "mxint8, gradients mxint4, zero3")
    sizes = Training(steps=3, dim=32, layers=1, batch=4, context=32, eval_bytes=256)
    options = wire.Options(nproc=(2,), seeds=(1,), training=sizes, only=names, out=None, docs=None)
    found = wire.losses_of(2, 1, options, Record(tmp_path / "record", "a"), {}, silent)
    assert 4 <= found["fsdp2_bytes"] <= 6
    exact, packed, again = [found["codecs"][name] for name in names]
    assert 8 <= exact["bytes"] <= 12
    assert packed["bytes"] == pytest.approx((33 + 17) / 32, rel=0.02)  # and planes that begin at multiples of 16 bytes
    assert packed["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert again["losses"] == packed["losses"]
    best = min(each["bytes"] for each in (exact, packed)) / found["fsdp2_bytes"]
    summary = wire.figures({"2": found}, {"left_out": "no root"})
    assert summary["best_bytes_ratio"] == round(best, 4)
    assert summary["limited_step_ratio_vs_fsdp2_bf16"] is None


def test_each_format_of_the_picture_has_a_color_of_its_own():
    formats = {name.rpartition(", ")[0] for name in codecs.CODECS}
    assert len(formats) <= len(wire_page.COLORS) == len({*wire_page.COLORS})


def test_a_record_goes_on_where_a_killed_process_ended(tmp_path):
    path, made = tmp_path / "below" / "record.jsonl", []

    def measure():
        made.append(len(made))
        return made[-1]

    record = Record(path, "a")
    assert [record.once({"a": x}, measure) for x in (1, 2, 1)] == [0, 1, 0]
    path.write_text(path.read_text()[:-3])  # killed within the second line
    again = Record(path, "b")
    assert ({"a": 1} in again, {"a": 2} in again) == (True, False)
    assert again.once({"a": 2}, measure) == 2
    assert Record(path, "c").once({"a": 2}, measure) == 2
    assert made == [0, 1, 2]
    assert again.commits == {"b"}


def test_a_table_has_the_runs_of_the_record(tmp_path):
    names = ("float32, zero3", "mxint8, zero3", "mxint8, zero2", "mxint4, zero3")
    options = wire.Options(nproc=(2,), seeds=(2,), only=names, train=False, out=None, docs=None)
    of = {"nproc": 2, "training": asdict(options.training)}

    def known(codec, losses, **of_run):
        run = {"bytes": 2.0, "losses": losses, "held_out": losses[-1]}
        record.once({**of, "codec": codec, **of_run}, lambda: run)

    record = Record(tmp_path / "record", "a")
    record.once({**of, "bytes of": codecs.FSDP2}, lambda: 8.0)
    for seed in range(2):
        known(names[0], [5.0] * 8 + [2.0 + seed], seed=seed)
    known(names[1], [5.0] * 8 + [3.3], seed=1)
    rows = wire.losses_of(2, 2, options, record, {}, silent)["codecs"]
    assert list(rows) == list(names[:2])
    ratios = {"bytes_ratio": 0.25, "loss_ratio": pytest.approx(1.1), "loss_ratios": [pytest.approx(1.1)]}
    assert rows[names[1]] == {"bytes": 2.0, "loss": 3.3, "losses": {1: 3.3}, **ratios}
    known(names[1], [5.0] * 8 + [2.0], seed=0)
    known(names[2], [5.0] * 7 + [5.5], seed=0, until=8)
    with pytest.raises(wire.LossMismatch, match=r"mxint8, zero2, 2 processes: losses are .* 5\.5\]"):
        wire.losses_of(2, 2, options, record, {}, silent)


def test_launches_are_pooled():
    key = "largest_relative_difference_of_losses"
    one = {"num_params": 1, "rounds": [{"a": 2.0}], "rounds_by_rank": [[{"a": 1.0}], [{"a": 2.0}]], key: {"x": 0.5, "y": 0.1}}
    two = {"num_params": 1, "rounds": [{"a": 4.0}], "rounds_by_rank": [[{"a": 4.0}], [{"a": 3.0}]], key: {"x": 0.2, "y": 0.3}}
    assert steps.pooled([one]) == one
    assert steps.pooled([one, two]) == {
        "num_params": 1,
        "rounds": [{"a": 2.0}, {"a": 4.0}],
        "rounds_by_rank": [[{"a": 1.0}, {"a": 4.0}], [{"a": 2.0}, {"a": 3.0}]],
        key: {"x": 0.5, "y": 0.3},
    }


@pytest.mark.deep
def test_the_command_as_a_person_runs_it(tmp_path):
    sizes = ["--dim", "16", "--layers", "2", "--heads", "2", "--time", "8", "--batch", "1", "--host-layers", "2"]
    sizes += ["--small-layers", "2", "--compile-units", "20", "--checkpoint-mb", "1", "--checkpoint-rounds", "2"]
    sizes += ["--calibration-steps", "2"]
    turns = ["--launches", "2", "--rounds", "2", "--steps", "1", "--warmup", "3", "--host-rounds", "2"]
    command = [sys.executable, "-m", "benchmarks", *sizes, *turns, "--out", str(tmp_path / "cpu.json"), "--docs", "None"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout.splitlines()[-1])) == list(report.FIGURES)
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert len(written["steps"]["rounds"]) == len(written["small"]["tiny"]["rounds"]) == 4


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="begin: written by make bench"):
        report.renew(tmp_path / "page.md", "text")


def test_the_page_has_the_marks():
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert (page.count(report.BEGIN), page.count(report.END)) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nproc 1", "--nproc is 1, expected at least 2"),
        ("--dim 30 --heads 4", "--dim 30 does not divide into --heads 4"),
        ("--rounds 0", "--rounds is 0, expected at least 1."),
        ("--launches 0", "--launches is 0, expected at least 1."),
        ("--peers some", "Invalid choice"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        parse(options.split())
    assert message in capsys.readouterr().err
