"""The subcommands ``plan``, ``schedule`` and ``tune``: predictions for a model, before anything is allocated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsharp.cli.machine import check_output, parse_mesh, read_machine
from fsharp.cli.models import FoundModel, find_model, parse_dtype
from fsharp.cli.numbers import check_number
from fsharp.errors import OptionError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.plan import plan as make_plan
from fsharp.functional.layout.precision import Precision
from fsharp.functional.layout.text import align_columns, nbytes_text
from fsharp.functional.traffic import step_traffic
from fsharp.functional.tree.paths import flatten_with_paths
from fsharp.inspect.drawing import check_picture, draw as draw_step
from fsharp.inspect.files import picture_path, write_file
from fsharp.inspect.hardware import Hardware, predict
from fsharp.inspect.presets import EFFICIENCY_FROM_SHAPES, GPUS, assumptions_text
from fsharp.inspect.tables import table
from fsharp.planning.costs import called_use_fractions
from fsharp.planning.plan_step import plan_step, uses_in_order
from fsharp.planning.space import (
    FLAT_STRATEGIES,
    HYBRID_STRATEGIES,
    meshes_to_try,
    repeated_unit_patterns,
    units_in_dict_order,
    updated_share,
)
from fsharp.planning.tune import POLICIES, TOLERANCE, tune as choose

DEFAULT_GPU = "H100"


def plan(
    model: str,
    /,
    *,
    mesh: str = "dp=8",
    strategy: str = "",
    units: str = "",
    compute: str = "bfloat16",
    main: str = "float32",
    optimizer_buffers: int = 2,
    microbatches: int = 1,
) -> str:
    """Show the bytes that each strategy keeps on one rank, and what the rank sends in a training step.

    The bytes include neither activations nor full parameters of units in use.

    Args:
        model: a named architecture (gpt-2, gpt-2-xl, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, deepseek-v3); the
            path of a Hugging Face config.json or of its folder; or module:path of an nn.Module, of a tree of tensors, or of a
            function that returns one of these.
        mesh: sizes of the axes, the outermost first: dp=8, or outer=2,inner=8.
        strategy: one of ddp, zero1, zero2, zero3, hsdp and hfsdp, to show its units and collectives; by default a table of all.
        units: pattern of the subtrees to gather one by one, such as layers.*; by default each repeated layer is a unit.
        compute: dtype of the parameters in use.
        main: dtype of the parameters that the optimizer updates.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        microbatches: number of microbatches of a step.
    """
    check_number("plan: microbatches", microbatches, 1)
    check_number("plan: optimizer_buffers", optimizer_buffers, 0)
    _, axes, layouts = _plan_layouts("plan", model, mesh, strategy, units, compute, main)
    if strategy:
        return _layout_text(layouts[strategy], optimizer_buffers, microbatches)
    head = ("strategy", "params", "main", "grads", "optimizer", "at rest", "sent a step", "collectives", "padding")
    rows: list[tuple[str, ...]] = [head]
    for name, layout in layouts.items():
        kinds = _nbytes_at_rest(layout, optimizer_buffers)
        calls = step_traffic(layout, microbatches=microbatches)
        sent = sum(call.nbytes * count for call, count in calls.items())
        sizes = [nbytes_text(nbytes) for nbytes in (*kinds.values(), sum(kinds.values()), sent)]
        padding = layout.num_padding / (layout.num_params + layout.num_padding)
        rows.append((name, *sizes, str(calls.total()), f"{padding:.3%}"))
    largest = max(sum(group.used * group.dtypes.compute.itemsize for group in unit.groups) for unit in layout.units)
    count = "1 unit" if len(layout.units) == 1 else f"{len(layout.units)} units"
    about = f"{layout.num_params:,} parameters on {axes}, in {count} of at most {nbytes_text(largest)}"
    sent_by = "sent a step: without fs.Scheduler, which may gather less often; see fsharp schedule"
    return "\n".join([about, "", *align_columns(rows, right=set(range(1, len(head)))), "", sent_by])


def _layout_text(layout: Layout, optimizer_buffers: int, microbatches: int) -> str:
    kinds = _nbytes_at_rest(layout, optimizer_buffers)
    rows = [("collective of a step", "axis", "bytes sent", "times", "bytes in all")]
    calls = step_traffic(layout, microbatches=microbatches)
    for call, count in sorted(calls.items(), key=lambda row: -row[0].nbytes * row[1]):
        rows.append((call.op, call.axis, nbytes_text(call.nbytes), str(count), nbytes_text(call.nbytes * count)))
    memory = [*((name, nbytes_text(nbytes)) for name, nbytes in kinds.items()), ("sum", nbytes_text(sum(kinds.values())))]
    return "\n".join(
        [
            *str(layout).splitlines()[:-1],  # without the bytes at rest, which are below
            "strategy P/G/O: parameters, gradients and optimizer state are S sharded, R replicated or P partial sums",
            "",
            *align_columns([("at rest on a rank", ""), *memory], right={1}),
            "",
            *align_columns(rows, right={2, 3, 4}),
        ]
    )


def _nbytes_at_rest(layout: Layout, optimizer_buffers: int) -> dict[str, int]:
    """Return the bytes that a rank stores between steps: parameters, main copies, gradients and optimizer state."""
    kinds = {"params": layout.nbytes("params"), "main": layout.nbytes("main"), "grads": layout.nbytes("grads")}
    return kinds | {"optimizer": optimizer_buffers * layout.nbytes("optim")}


def schedule(
    model: str,
    /,
    *,
    mesh: str = "dp=8",
    strategy: str = "zero3",
    units: str = "",
    compute: str = "bfloat16",
    main: str = "float32",
    policy: str = "prefetch 1",
    microbatches: int = 1,
    gpu: str = "",
    hardware: str = "",
    tokens: int = 8192,
    efficiency: float | None = None,
    ops: bool = False,
    draw: str = "",
) -> str:
    """Predict the time of a training step, on GPUs or on a measured machine, and show the schedule of its ops.

    The GPUs are those of fs.inspect.Hardware.preset: hosts of 8 GPUs, joined by InfiniBand. The predicted time of a forward or
    backward is that of its matrix products with parameters. Attention between tokens and elementwise functions count as free.
    If the model says how many experts a token uses, all other experts count as free too.

    Args:
        model: a named architecture (gpt-2, gpt-2-xl, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, deepseek-v3); the
            path of a Hugging Face config.json or of its folder; or module:path of an nn.Module, of a tree of tensors, or of a
            function that returns one of these.
        mesh: sizes of the axes, the outermost first: dp=8, or outer=2,inner=8. Every 8 consecutive ranks share a host.
        strategy: one of ddp, zero1, zero2, zero3, hsdp and hfsdp.
        units: pattern of the subtrees to gather one by one; by default each repeated layer is a unit.
        compute: dtype of the parameters in use.
        main: dtype of the parameters that the optimizer updates.
        policy: one of these names. "prefetch 1", "prefetch 2" and "no prefetch" say how many units are gathered ahead.
            "gathered once" and "gathered twice" say how often a step gathers a unit. "no buckets" and "buckets of 25 MB" say
            whether units share a collective. "least memory" is no prefetch, gathered twice and no buckets. With "separate
            gradients" each gradient has memory of its own. With "state on the host" optimizer state rests in host memory.
        microbatches: number of microbatches of a step.
        gpu: A100, H100, H200 or B200; H100 by default.
        hardware: file that fsharp calibrate has written, in place of a GPU.
        tokens: number of tokens of one rank in a microbatch.
        efficiency: fraction of the peak FLOP/s that the model reaches, by default 0.33; with --hardware fraction of the
            measured FLOP/s, by default 1.
        ops: print a table with a row for each op of the schedule.
        draw: path of a picture of the step to write, such as step.png; needs matplotlib.
    """
    if policy not in POLICIES:
        raise OptionError(f"schedule: policy is {policy!r}, expected one of {', '.join(map(repr, POLICIES))}.")
    gpu = gpu.upper()
    draw = _checked_picture_path("schedule: draw", draw)
    if not strategy:
        raise OptionError(f"schedule: strategy is '', expected one of {', '.join([*FLAT_STRATEGIES, *HYBRID_STRATEGIES])}.")
    found, axes, layouts = _plan_layouts("schedule", model, mesh, strategy, units, compute, main)
    _check_microbatches("schedule", found.tree, microbatches, 500_000)
    layout = layouts[strategy]
    planned = plan_step(layout, POLICIES[policy], order=units_in_dict_order(found.tree, layout), microbatches=microbatches)
    machine = _find_hardware("schedule", layout, gpu, hardware, tokens, efficiency)
    machine = _with_compute_of_model(machine, layout, found)
    timeline = predict(planned, replace(machine, update_s=updated_share(layout) * machine.update_s))
    if draw:
        draw_step(timeline, draw)
    calls = planned.collective_counts()
    rows = [
        ("time of a step", f"{1e3 * timeline.step_s:.1f} ms"),
        ("compute waits", f"{1e3 * timeline.exposed_s:.1f} ms"),
        ("collectives beside compute", f"{timeline.overlap:.0%}"),
        ("tokens per second and rank", f"{microbatches * tokens / timeline.step_s:,.0f}"),
        ("arena of a rank", nbytes_text(planned.arena)),
        ("sent by a rank", nbytes_text(sum(call.nbytes * count for call, count in calls.items()))),
        ("collectives", str(calls.total())),
    ]
    about = f"{layout.num_params:,} parameters on {axes} of {hardware or gpu or DEFAULT_GPU}, {strategy}, {policy}."
    about += _assumptions(hardware, efficiency)
    shown = [about, *_active_experts_lines(found), "", *align_columns(rows, right={1}), *(["", table(planned)] if ops else [])]
    return "\n".join([*shown, *([f"wrote {draw}"] if draw else [])])


def tune(
    model: str,
    /,
    *,
    mesh: str = "dp=8",
    units: str = "",
    compute: str = "bfloat16",
    main: str = "float32",
    budget: float = 80.0,
    activations: float = 0.0,
    microbatches: int = 1,
    optimizer_buffers: int = 2,
    gpu: str = "",
    hardware: str = "",
    tokens: int = 8192,
    efficiency: float | None = None,
    rows: int = 20,
    json: str = "",
    draw: str = "",
) -> str:
    """Predict steps under many strategies, meshes, units and policies, and show the best that fits into memory first.

    The best is the simplest of the steps that are at most 2 % slower than the fastest. Time and activations are estimated from
    shapes. The estimate assumes that each matrix is multiplied with one vector for each token, and that these vectors are kept
    for the backward. If the model says how many experts a token uses, the time is that of these experts. Activations count for
    all experts.

    Args:
        model: a named architecture (gpt-2, gpt-2-xl, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, deepseek-v3); the
            path of a Hugging Face config.json or of its folder; or module:path of an nn.Module, of a tree of tensors, or of a
            function that returns one of these.
        mesh: sizes of the axes, the outermost first; or a number of ranks, to try meshes of one axis, and of two: hosts times
            ranks of a host. Every 8 consecutive ranks share a host.
        units: pattern of the subtrees to gather one by one; by default each repeated layer, each part of such a layer, and the
            whole model are tried.
        compute: dtype of the parameters in use.
        main: dtype of the parameters that the optimizer updates.
        budget: most GB that one rank may use.
        activations: GB that each unit keeps from its forward to its backward, in place of the estimate. Then each repeated
            layer is a unit, unless units is given. Recomputation is not tried, as this number does not say what a recomputed
            unit would keep.
        microbatches: number of microbatches of a step.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        gpu: A100, H100, H200 or B200; H100 by default.
        hardware: file that fsharp calibrate has written, in place of a GPU.
        tokens: number of tokens of one rank in a microbatch.
        efficiency: fraction of the peak FLOP/s that the model reaches, by default 0.33; with --hardware fraction of the
            measured FLOP/s, by default 1.
        rows: most rows of the table to show; 0 shows all.
        json: path of a file to write, such as choice.json: the choice and all rows, for fs.inspect.Choice.from_json.
        draw: path of a picture of the predicted step, such as step.png; needs matplotlib.
    """
    check_number("tune: rows", rows, 0)
    if not budget > 0:
        raise OptionError(f"tune: budget is {budget:g}, expected more than 0: the GB that one rank may use.")
    check_number("tune: activations", activations, 0, 1_000_000_000)
    check_number("tune: optimizer_buffers", optimizer_buffers, 0)
    _check_speed("tune", tokens, efficiency)
    meshes: int | Mesh | list[Mesh] = int(mesh) if mesh.isdecimal() else parse_mesh("tune", mesh)
    if isinstance(meshes, int):
        check_number("tune: mesh", meshes, 1, 1_000_000)
        if hardware:
            known = set(read_machine("tune", hardware).measured_axes)
            meshes = [each for each in meshes_to_try(meshes) if known.issuperset(each.names)] or meshes
    gpu = gpu.upper()
    if json:
        check_output("tune: json", json)
    draw = _checked_picture_path("tune: draw", draw)
    found = find_model("tune", model)
    _check_microbatches("tune", found.tree, microbatches, 50_000)

    def machine(layout: Layout) -> Hardware:
        return _with_compute_of_model(_find_hardware("tune", layout, gpu, hardware, tokens, efficiency), layout, found)

    choice = choose(
        found.tree,
        machine,
        budget=1e9 * budget,
        batch=tokens,
        mesh=meshes,
        units=units or None,
        formats={"": Precision(compute=parse_dtype("tune: compute", compute), main=parse_dtype("tune: main", main))},
        frozen=found.frozen,
        activations=1e9 * activations if activations else None,
        microbatches=microbatches,
        optimizer_buffers=optimizer_buffers,
    )
    if json:
        write_file(json, choice.to_json().encode())
    if draw:
        choice.draw(draw)
    layout = choice.layout
    about = f"{layout.num_params:,} parameters, {layout.mesh.size} ranks of {hardware or gpu or DEFAULT_GPU}"
    limits = f"{tokens:,} tokens of a rank in a microbatch, at most {budget:g} GB ({nbytes_text(1e9 * budget)}) on a rank"
    ties = (
        f"Steps within {TOLERANCE:.0%} of the fastest count as equal: the simplest is chosen, then the one with least memory."
    )
    ties += _assumptions(hardware, efficiency)
    experts = [f"{line} Activations are those of all experts." for line in _active_experts_lines(found)]
    heading = [f"{about}, {limits}", *experts, ""]
    return "\n".join([*heading, choice.table(rows or None), ties, *(f"wrote {path}" for path in (json, draw) if path)])


def _assumptions(hardware: str, efficiency: float | None) -> str:
    """Return what is assumed about a GPU, to append to a sentence; an empty text if ``hardware`` names a measured machine."""
    return "" if hardware else f" {assumptions_text(EFFICIENCY_FROM_SHAPES if efficiency is None else efficiency)}"


def _active_experts_lines(model: FoundModel) -> list[str]:
    """Return a list with one line about the experts that take time; an empty list if the model has no experts."""
    if not any(_is_expert(path) for path in flatten_with_paths(model.tree)[0]):
        return []
    if model.used_and_total_experts is None:
        return ["All experts count as if each token used them: the time is too long."]
    return ["Time is that of the {} of {} experts that a token uses.".format(*model.used_and_total_experts)]


def _is_expert(path: str) -> bool:
    return "experts" in path.split(".")


def _plan_layouts(
    where: str, model: str, mesh: str, strategy: str, units: str, compute: str, main: str
) -> tuple[FoundModel, Mesh, dict[str, Layout]]:
    """Return the model, the mesh, and layouts by strategy: ``strategy`` alone, or if it is empty, all that fit the mesh."""
    axes = parse_mesh(where, mesh)
    makers = {**FLAT_STRATEGIES, **(HYBRID_STRATEGIES if len(axes.names) == 2 else {})}
    named = {name: make(*axes.names) for name, make in makers.items()}
    if strategy and strategy not in named:
        needed = f" {strategy} needs two axes, such as outer=2,inner=4." if strategy in HYBRID_STRATEGIES else ""
        raise OptionError(f"{where}: strategy is {strategy!r}; {axes} has {', '.join(named)}.{needed}")
    found = find_model(where, model)
    patterns = [units] if units else repeated_unit_patterns(list(flatten_with_paths(found.tree)[0])) or None
    dtypes = Precision(compute=parse_dtype(f"{where}: compute", compute), main=parse_dtype(f"{where}: main", main))
    chosen = [strategy] if strategy else list(named)
    options: dict[str, Any] = {"units": patterns, "frozen": found.frozen, "precision": dtypes}
    return found, axes, {name: make_plan(found.tree, axes, named[name], **options) for name in chosen}


def _check_microbatches(where: str, tree: Any, microbatches: int, most_tensors: int) -> None:
    """Raise an OptionError if microbatches times tensors exceed ``most_tensors``: a prediction would take minutes.

    One microbatch is always allowed.
    """
    count = len(flatten_with_paths(tree)[0])
    why = f"a prediction takes longer with each, and the model has {count:,} tensors"
    check_number(f"{where}: microbatches", microbatches, 1, max(1, most_tensors // count), why=why)


def _check_speed(where: str, tokens: int, efficiency: float | None) -> None:
    check_number(f"{where}: tokens", tokens, 1)
    if efficiency is not None and not 0 < efficiency <= 1:
        raise OptionError(f"{where}: efficiency is {efficiency}, expected more than 0 and at most 1.")


def _checked_picture_path(option: str, path: str) -> str:
    """Return ``path`` with a suffix; an empty text as it is. Raises OptionError if no picture can be written to ``path``."""
    if not path:
        return ""
    path = picture_path(path)
    check_output(option, path)
    check_picture("--draw", path)
    return path


def _find_hardware(where: str, layout: Layout, gpu: str, hardware: str, tokens: int, efficiency: float | None) -> Hardware:
    """Return the hardware in the file ``hardware``; if ``hardware`` is empty, the preset of ``gpu`` with 8 ranks on a host.

    ``where``: name of the command, for errors. ``tokens``: number of tokens of one rank in a microbatch. ``efficiency``:
    fraction of the peak or measured FLOP/s that the model reaches; None means the default.
    """
    _check_speed(where, tokens, efficiency)
    if hardware:
        if gpu:
            raise OptionError(f"{where}: got gpu {gpu!r} and hardware {hardware!r}, expected one of them.")
        machine = read_machine(where, hardware)
        if missing := [axis for axis, size in layout.mesh.axes if size > 1 and axis not in machine.measured_axes]:
            known = " and ".join(f"axis {axis!r}" for axis in machine.measured_axes)
            what = f"{hardware!r} has the speeds of {known}, expected axis {missing[0]!r} of {layout.mesh} as well"
            raise OptionError(f"{where}: {what}. Calibrate with this axis, or rename the axis of the mesh.")
        return machine.hardware_for_layout(layout, tokens=tokens, efficiency=1.0 if efficiency is None else efficiency)
    if (gpu := gpu or DEFAULT_GPU) not in GPUS:
        raise OptionError(f"{where}: gpu is {gpu!r}, expected one of {', '.join(GPUS)}; or measure your own: fsharp calibrate.")
    return Hardware.preset(gpu, layout, tokens=tokens, efficiency=EFFICIENCY_FROM_SHAPES if efficiency is None else efficiency)


def _with_compute_of_model(hardware: Hardware, layout: Layout, model: FoundModel) -> Hardware:
    """Return ``hardware`` with the seconds of compute of each unit, scaled down to the parameters that ``model`` uses.

    Experts that a token does not use take no time. Tied embeddings count once.
    """
    assert isinstance(hardware.compute_times, Mapping)
    compute, (used, total) = dict(hardware.compute_times), model.used_and_total_experts or (1, 1)
    shares = called_use_fractions(uses_in_order(layout, units_in_dict_order(model.tree, layout)))
    for unit in layout.units:
        sizes = {unit.path_in_tree(leaf): leaf.numel for leaf in unit.leaves if leaf.tied_to is None}
        idle = (1 - used / total) * sum(numel for path, numel in sizes.items() if _is_expert(path))
        forward_s, backward_s = compute[unit.name or "(root)"][:2]
        share = (1 - idle / max(1, sum(sizes.values()))) * shares.get(unit.name, 1.0)
        compute[unit.name or "(root)"] = share * forward_s, share * backward_s
    return replace(hardware, compute_times=compute)
