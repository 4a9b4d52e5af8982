"""The subcommand ``fsharp plan``: what each strategy keeps on a rank and sends in a step, before anything is allocated."""

from collections.abc import Callable
from functools import partial

from fsharp.cli.models import dtype_of, find_model, repeated_units
from fsharp.errors import OptionError
from fsharp.functional.layout.layout import Layout
from fsharp.functional.layout.mesh import Mesh
from fsharp.functional.layout.paths import flatten
from fsharp.functional.layout.placement import Strategy, ddp, hfsdp, hsdp, zero1, zero2, zero3
from fsharp.functional.layout.plan import plan as make_plan
from fsharp.functional.layout.precision import Precision
from fsharp.functional.layout.text import columns, nbytes_text
from fsharp.functional.traffic import step_traffic

FLAT: tuple[Callable[..., Strategy], ...] = (ddp, zero1, zero2, zero3)
"""Strategies that treat all axes of a mesh alike."""
HYBRID: tuple[Callable[..., Strategy], ...] = (hsdp, hfsdp)
"""Strategies of an outer and an inner axis."""


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

    Activations, and the full parameters of the units in use, come on top of the bytes at rest.

    Args:
        model: a named architecture (gpt-2, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, deepseek-v3); the path of a
            Hugging Face config.json or of its folder; or module:path of an nn.Module, of a tree of tensors, or of a function
            that returns one of these.
        mesh: sizes of the axes, the outermost first: dp=8, or outer=2,inner=8.
        strategy: one of ddp, zero1, zero2, zero3, hsdp and hfsdp: show its units and collectives. All are compared by default.
        units: pattern of the subtrees to gather one by one, such as layers.*; by default each repeated layer is a unit.
        compute: dtype of the parameters in use.
        main: dtype of the parameters that the optimizer updates.
        optimizer_buffers: values of optimizer state for each parameter: 2 for Adam, 1 for momentum.
        microbatches: number of microbatches of a step.
    """
    named = _strategies(axes := _mesh(mesh))
    if strategy and strategy not in named:
        raise OptionError(f"plan: strategy is {strategy!r}; {axes} has {', '.join(named)}.")
    tree = find_model(model)
    patterns = [units] if units else repeated_units(list(flatten(tree)[0])) or None
    precision = Precision(compute=dtype_of("plan: compute", compute), main=dtype_of("plan: main", main))
    layout_of = partial(make_plan, tree, axes, units=patterns, precision=precision)
    if strategy:
        return _one(layout_of(named[strategy]), optimizer_buffers, microbatches)
    head = ("strategy", "params", "main", "grads", "optimizer", "at rest", "sent a step", "collectives", "padding")
    rows: list[tuple[str, ...]] = [head]
    for name, chosen in named.items():
        layout = layout_of(chosen)
        kinds = _at_rest(layout, optimizer_buffers)
        calls = step_traffic(layout, microbatches=microbatches)
        sent = sum(call.nbytes * count for call, count in calls.items())
        sizes = [nbytes_text(nbytes) for nbytes in (*kinds.values(), sum(kinds.values()), sent)]
        padding = layout.num_padding / (layout.num_params + layout.num_padding)
        rows.append((name, *sizes, str(calls.total()), f"{padding:.3%}"))
    largest = max(sum(group.used * group.dtypes.compute.itemsize for group in unit.groups) for unit in layout.units)
    about = f"{layout.num_params:,} parameters on {axes}, in {len(layout.units)} units of at most {nbytes_text(largest)}"
    return "\n".join([about, "", *columns(rows, right=set(range(1, len(head))))])


def _one(layout: Layout, optimizer_buffers: int, microbatches: int) -> str:
    kinds = _at_rest(layout, optimizer_buffers)
    rows = [("collective of a step", "axis", "bytes sent", "times", "bytes in all")]
    calls = step_traffic(layout, microbatches=microbatches)
    for call, count in sorted(calls.items(), key=lambda row: -row[0].nbytes * row[1]):
        rows.append((call.op, call.axis, nbytes_text(call.nbytes), str(count), nbytes_text(call.nbytes * count)))
    memory = [*((name, nbytes_text(nbytes)) for name, nbytes in kinds.items()), ("sum", nbytes_text(sum(kinds.values())))]
    return "\n".join(
        [str(layout), "", *columns([("at rest on a rank", ""), *memory], right={1}), "", *columns(rows, right={2, 3, 4})]
    )


def _at_rest(layout: Layout, optimizer_buffers: int) -> dict[str, int]:
    """Return the bytes that a rank stores between steps, by kind of tensor: params, main, grads and optimizer."""
    kinds = {"params": layout.nbytes("params"), "main": layout.nbytes("main"), "grads": layout.nbytes("grads")}
    return kinds | {"optimizer": optimizer_buffers * layout.nbytes("optim")}


def _mesh(text: str) -> Mesh:
    try:
        return Mesh([(name, int(size)) for name, _, size in (axis.partition("=") for axis in text.split(","))])
    except ValueError as error:
        raise OptionError(f"plan: mesh is {text!r}, expected sizes of axes, such as dp=8 or outer=2,inner=8.") from error


def _strategies(mesh: Mesh) -> dict[str, Strategy]:
    hybrid = HYBRID if len(mesh.names) == 2 else ()
    return {make.__name__: make(*mesh.names) for make in (*FLAT, *hybrid)}
