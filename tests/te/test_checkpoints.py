"""Checkpoints of modules with weights of TransformerEngine: runs go on with the same bits, under another recipe as well."""

import re
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import fsharp as fs
from fsharp.functional.tree.paths import named_leaves
from tests import te_cpu
from tests.te.training import (
    DELAYED,
    PRECISION,
    RATE,
    RECIPES,
    STEPS,
    WIDTH,
    Case,
    compare,
    linear,
    loss_of,
    norm_mlp,
    on_ranks,
    recipes,
    shard,
    te,
    train_sharded,
    train_whole,
)

CASE = Case(lambda: [linear(), norm_mlp(), linear()], (te.Linear, te.LayerNormMLP))
ADAM = {"optimizer": lambda: (torch.optim.AdamW, {"lr": 0.01})}
FUSED_ADAM = {"optimizer": lambda: (te.optimizers.FusedAdam, {"lr": 0.01, "weight_decay": 0.01})}  # AdamW's decay


def made(case, recipe, comm, strategy):
    model = shard(case, recipe, comm, strategy)
    cls, settings = case.optimizer()
    return model, fs.ShardedOptimizer(model.parameters(), cls, **settings)


def resume(comm, names, folder, adam=ADAM):
    """Train, save after the first step, and go on in a new module under another strategy. Return what differs."""
    case, found = Case(CASE.make, CASE.units, **adam), []
    for name in names:
        architecture, recipe = (RECIPES | DELAYED)[name]
        with te_cpu.architecture(*architecture):
            model, optimizer = made(case, recipe, comm, fs.zero3("dp"))
            train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=[0])
            fs.checkpoint.save(f"{folder}/{name}", {"model": model, "optimizer": optimizer}, step=1, comm=comm)
            rest, _ = train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=range(1, STEPS))
            for strategy in (fs.zero3("dp"), fs.zero2("dp")):
                model, optimizer = made(case, recipe, comm, strategy)
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                fs.checkpoint.load(f"{folder}/{name}", {"model": model, "optimizer": optimizer}, comm=comm)
                again, _ = train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=range(1, STEPS))
                for step, ((outputs, grads), (expected, means)) in enumerate(zip(again, rest, strict=True), 1):
                    pairs = [(outputs[key], expected[key]) for key in outputs]
                    pairs += [((own,), (means[name][1],)) for name, (_, own) in grads.items()]
                    if not all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)):
                        found.append(f"{name}, {strategy}, step {step}")
    return found


@pytest.mark.parametrize("names", [("current", "delayed"), pytest.param(tuple(RECIPES), marks=pytest.mark.deep)], ids=str)
def test_a_run_goes_on_with_the_same_bits(names, tmp_path):
    assert on_ranks({"dp": 2}, resume, names=names, folder=str(tmp_path)) == [[], []]


def fused(comm, folder):
    """Train with TransformerEngine's FusedAdam and with torch's AdamW, and resume the former. Return what differs."""
    found, (architecture, recipe) = resume(comm, ["current"], folder, FUSED_ADAM), RECIPES["current"]
    with te_cpu.architecture(*architecture):
        runs = [
            train_sharded(Case(CASE.make, CASE.units, **adam), recipe, comm, fs.zero3("dp"))[0] for adam in (ADAM, FUSED_ADAM)
        ]
        found += [
            f"step {step}: {key}"
            for step, each in enumerate(zip(*runs, strict=True))
            for key in each[0][0]
            if not all(map(torch.equal, *(outputs[key] for outputs, _ in each)))
        ]
        short = Case(lambda: [linear()], optimizer=lambda: (te.optimizers.FusedAdam, {"exp_avg_dtype": torch.bfloat16}))
        with pytest.raises(fs.errors.TreeError, match=r"a new FusedAdam with the state .* keeps values elsewhere"):
            made(short, recipe, comm, fs.zero3("dp"))
    return found


def test_fused_adam_trains_and_goes_on_with_the_bits_of_adamw(tmp_path):
    """Its kernel is modelled by tests/te_cpu in the order of torch's AdamW; a GPU may round in another."""
    assert on_ranks({"dp": 2}, fused, folder=str(tmp_path)) == [[], []]


def load_under_another_recipe(comm, folder):
    """Save what has been trained under current scaling, load it under other recipes, and compare with main copies quantized."""
    found, (strategy, groups) = [], (fs.zero3("dp"), [[*range(comm.mesh.size)]])
    with te_cpu.architecture(10, 0):
        recipe = RECIPES["current on 10.0"][1]
        model, _ = made(CASE, recipe, comm, strategy)
        train_sharded(CASE, recipe, comm, None, model=model, steps=[0])
        fs.checkpoint.save(folder, {"model": model}, step=1, comm=comm)
        [(_, means), *_] = train_whole(CASE, recipe, groups, reduces_first=True)
        for name in ("mxfp8", "nvfp4"):
            other = RECIPES[name][1]
            loaded, _ = made(CASE, other, comm, strategy)
            fs.checkpoint.load(folder, {"model": loaded}, comm=comm)
            whole = CASE.model(other)
            for path, p in whole.named_parameters():
                start = p.get_high_precision_init_val() if hasattr(p, "get_high_precision_init_val") else p.detach()
                with torch.no_grad():
                    new = start.float() - RATE * means[path]
                    p.quantize_(new.to(torch.bfloat16)) if hasattr(p, "quantize_") else p.copy_(new)
            found += [f"{name}: {what}" for what in compare(*[run(each, other, comm) for each in (loaded, whole)])]
    return found


def run(model, recipe, comm):
    """One forward and backward, as :func:`compare` takes them, without gradients of parameters."""
    x = CASE.batch(1, 0, comm.rank)
    with te.autocast(enabled=True, recipe=recipe):
        y = model(x)
    loss_of(y).backward()
    return {(comm.rank, 0): (y.detach(), x.grad)}, {}


def test_a_checkpoint_loads_under_another_recipe(tmp_path):
    assert on_ranks({"dp": 2}, load_under_another_recipe, folder=str(tmp_path)) == [[], []]


def test_functions_make_parameters_from_main_copies_under_another_recipe(tmp_path):
    """As docs/te.md says: the parameters of a TrainState are rounded a second time if they are read themselves."""
    comm, tree = fs.SingleComm(), {"w": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))}

    def state(name):
        precision = replace(PRECISION, stored=fs.te.weight_format(RECIPES[name][1]))
        layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), precision=precision)
        return fs.init_state(fs.optim.sgd(RATE), fs.shard(tree, layout, comm, place="optim"), comm=comm)

    with te_cpu.architecture(10, 0):
        fs.checkpoint.save(tmp_path, state("current on 10.0"), step=1, comm=comm)
        expected = fs.full_tree(state("mxfp8").params, comm=comm)["w"]
        options = {"rename": lambda name: re.sub("^params", "main", name), "ignore": "params.**", "cast": True}
        for how, is_equal in ((options, True), ({}, False)):
            loaded = fs.checkpoint.load(tmp_path, state("mxfp8"), comm=comm, **how)
            assert torch.equal(fs.full_tree(loaded.params, comm=comm)["w"], expected) == is_equal


def resume_delayed(comm, folder):
    """Save a whole model under delayed scaling, and go on in a new one, under another strategy."""
    case = Case(CASE.make, CASE.units, quantized=False, **ADAM)
    recipe = recipes.DelayedScaling(amax_history_len=4, fp8_format=recipes.Format.E4M3)  # the default is another
    te.quantization.FP8GlobalStateManager.reset()
    model, optimizer = made(case, recipe, comm, fs.zero3("dp"))
    train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=[0])
    fs.checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=1, comm=comm)
    texts = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    rest, _ = train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=range(1, STEPS))
    found = [bytes(value[:1].tolist()) == b"{" for value in texts.values()]
    te.quantization.FP8GlobalStateManager.reset()
    model, optimizer = made(case, recipe, comm, fs.ddp("dp"))
    fs.checkpoint.load(folder, {"model": model, "optimizer": optimizer}, comm=comm)
    found += [torch.equal(model.state_dict()[name], value) for name, value in texts.items()]
    again, _ = train_sharded(case, recipe, comm, None, model=model, optimizer=optimizer, steps=range(1, STEPS))
    found += [all(map(torch.equal, a[comm.rank, 0], b[comm.rank, 0])) for (a, _), (b, _) in zip(again, rest, strict=True)]
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        model(case.batch(9, 0, comm.rank))
    with pytest.raises(fs.errors.AgreementError, match=r"model\.layers\.0\._extra_state"):  # maxima of each rank's own
        fs.checkpoint.save(folder, {"model": model}, step=2, comm=comm)
    return found


def test_a_run_under_delayed_scaling_goes_on_with_the_same_bits(tmp_path):
    for found in on_ranks({"dp": 2}, resume_delayed, folder=str(tmp_path)):
        assert found == [True] * (2 * 3 + 2)


def planes(comm, names, folder):
    """Train, save the planes of parameters, and read them back. Return what differs."""
    found, case = [], Case(lambda: [linear(), norm_mlp()], (te.Linear, te.LayerNormMLP))
    for name in names:
        architecture, recipe = (RECIPES | DELAYED)[name]
        with te_cpu.architecture(*architecture):
            model = shard(case, recipe, comm, fs.zero3("dp"))
            train_sharded(case, recipe, comm, None, model=model, steps=[0])
            params = model.train_state.params
            saved = fs.checkpoint.save(f"{folder}/{name}", params, step=1, comm=comm, planes=True)
            whole = {n: x.clone() for n, x in named_leaves(fs.full_tree(params, comm=comm))}
            found += [f"{name}: names"] * (whole.keys() != dict(model.named_parameters()).keys())
            if comm.rank == 0:
                fs.checkpoint.export_safetensors(saved, f"{folder}/{name}/out")
            fs.checkpoint.save(f"{folder}/next", {}, step=0, comm=comm)  # waits for rank 0
            for where in (saved, f"{folder}/{name}/out"):
                got = fs.checkpoint.load(where, {n: torch.zeros_like(x) for n, x in whole.items()}, comm=comm)
                found += [f"{name}: {n}" for n, x in whole.items() if not torch.equal(got[n], x)]
            exported = safetensors.torch.load_file(f"{folder}/{name}/out/model.safetensors")
            encoded = [n.removesuffix("_scale") for n in exported if n.endswith("_scale")]
            nbytes = sum(
                node.unit.stored_nbytes(g, node.unit.strategy.full) for node in fs.layouts.units_of(params) for g in node.groups
            )
            found += [f"{name}: {sum(x.nbytes for x in exported.values())} bytes, {nbytes} rest"] * (
                sum(x.nbytes for x in exported.values()) > nbytes or len(encoded) != 3
            )
            for n in encoded:
                value = dequantized(exported, n)
                found += [f"{name}: {n} by the convention"] * (not torch.equal(value.to(whole[n].dtype), whole[n]))
    return found


def dequantized(tensors, name):
    """Return what a reader who knows the convention makes of a weight: a code times its scales."""
    codes, scale = tensors[name], tensors[f"{name}_scale"]
    numbers = codes.float()
    if codes.dtype == torch.uint8:
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        numbers = e2m1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    factor = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    for dim in range(scale.dim() if scale.numel() > 1 else 0):
        factor = factor.repeat_interleave(-(-numbers.shape[dim] // scale.shape[dim]), dim)
    return numbers * factor * tensors.get(f"{name}_scale_2", torch.ones(()))


@pytest.mark.parametrize("names", [("current", "mxfp8"), ("block", "nvfp4", "delayed")], ids=str)
def test_planes_for_inference_have_the_values_of_parameters(names, tmp_path):
    assert on_ranks({"dp": 2}, planes, names=names, folder=str(tmp_path)) == [[], []]
