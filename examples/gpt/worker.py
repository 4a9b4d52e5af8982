"""One process of the training run; the launcher starts as many as there are ranks."""

import math
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import fsharp as fs
from examples.gpt import data, model
from examples.gpt.evaluate import bigram_bits_per_byte, bits_per_byte
from examples.gpt.options import Options, parse
from examples.gpt.plot import plot
from examples.gpt.recipe import batch_of, build_step, layout_of, learning_rate, optimizer, predicted_bytes
from examples.gpt.report import LOG, SUMMARY, Report
from examples.gpt.sample import generate
from examples.launch_example import leave

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPLAN_EVERY = 10
"""Steps after which a run of given time looks at how many there is time for."""


def run(options: Options, comm: fs.Comm) -> None:
    """Train, evaluate, report."""
    layout = layout_of(options, comm.mesh, getattr(fs, options.strategy)(*comm.mesh.names))
    loss_fn = partial(model.loss, heads=options.heads, release=options.release)
    params = fs.init_params(model.initializers(options.dim, options.layers), layout, comm, key=options.seed)
    state = fs.init_state(optimizer(options, 1), params, comm=comm)
    corpus = data.load()
    starts = data.even_starts(corpus.held_out, options.eval_bytes, options.context)
    alone = layout_of(options, fs.Mesh({"dp": 1}), fs.ddp("dp"))
    nbytes = {
        "bytes_at_rest": sum(node.nbytes for node in fs.layouts.units_of((state.params, state.main, state.opt))),
        "bytes_at_rest_predicted": predicted_bytes(layout),
        "bytes_unsharded": predicted_bytes(alone),
    }
    with Report(options.folder, rank=comm.rank) as report:
        report.say(str(layout))
        here, predicted, unsharded = (f"{count / (1 << 20):.2f} MiB" for count in nbytes.values())
        report.say(f"parameters and optimizer state: {here} on each rank ({predicted} predicted), {unsharded} unsharded")
        report.say(f"training data: {len(corpus.train):,} bytes; held out: {len(corpus.held_out):,} bytes; {comm.device}")

        def evaluate(params: Any, step: int, every: int = 1) -> float:
            chosen, size = starts[::every], 4 * options.batch
            bits = bits_per_byte(loss_fn, params, corpus.held_out, chosen, context=options.context, batch=size, comm=comm)
            report.eval(step, bits, len(chosen) * options.context)
            return bits

        state, seconds = train(options, state, loss_fn, corpus, evaluate, report, comm)
        bits = evaluate(state.params, state.step)
        whole = fs.gather(state.params, comm=comm)
        if comm.rank:
            return
        bigram = bigram_bits_per_byte(corpus.train, corpus.held_out, starts, context=options.context)
        plot(options.folder, title=f"{layout.num_params:,} parameters, {options.strategy} on {comm.mesh}", bigram=bigram)
        if options.sample_bytes:
            report.say(f"--- generated text at temperature {options.temperature}\n{sample(whole, options, comm)}\n---")
        report.say(f"bigram model: {bigram:.3f} bits/byte; this model: {bits:.3f}; see {options.folder}/loss.png")
    tokens = state.step * options.batch * options.context
    report.summary(
        {
            "val_bits_per_byte": bits,
            "bigram_bits_per_byte": bigram,
            "val_bytes": len(starts) * options.context,
            "strategy": options.strategy,
            "world_size": comm.mesh.size,
            **nbytes,
            "num_params": layout.num_params,
            "dtype": options.dtype,
            "seed": options.seed,
            "steps": state.step,
            "train_tokens": tokens,
            "train_seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "folder": str(options.folder),
        }
    )


def train(
    options: Options,
    state: fs.TrainState,
    loss_fn: Callable[..., Any],
    corpus: data.Corpus,
    evaluate: Callable[..., float],
    report: Report,
    comm: fs.Comm,
) -> tuple[fs.TrainState, float]:
    """Make the steps that are left; the state after them, and the seconds that all steps took.

    A run that was cut off goes on with its newest checkpoint. Ctrl-C and SIGTERM save first.
    """
    total = options.steps or max(options.warmup, _REPLAN_EVERY)  # replanned before a run of given time gets there
    root, tokens = options.folder / "checkpoints", options.batch * options.context
    other = options.resume and options.resume / "checkpoints"
    if comm.rank == 0 and (other is None or other.resolve() != root.resolve()):
        forget_if_complete(options.folder)
    with fs.resilience.Run(
        root,
        comm=comm,
        total=total,
        save_every=options.save_every,
        config=config_of(options),
        signals=_SIGNALS,
        loggers=[fs.resilience.JsonlLogger(options.folder / LOG)],
    ) as run:
        state, known, planned = run.resume((state, 0.0, total), other=other)
        if other and run.step == planned:
            planned += _REPLAN_EVERY  # of a run that was complete
        run.total, elapsed = options.steps or planned, known
        if run.step:
            report.say(f"continues after {run.step} steps")
        report.begin(run.step)
        report.plan(run.total)
        make = build_step(options, loss_fn, run.total)

        def current_step(state: fs.TrainState, batch: Any, comm: fs.Comm) -> tuple[fs.TrainState, fs.Metrics, Any]:
            return make(state, batch, comm)

        step_fn = fs.Scheduler(comm)(current_step) if options.schedule else partial(current_step, comm=comm)
        for step in run.steps():
            began = time.perf_counter()
            state, metrics, bad = step_fn(state, batch_of(corpus, options, step, comm))
            loss = float(metrics.loss)  # waits for the device
            elapsed += time.perf_counter() - began
            if (step + 1) % _REPLAN_EVERY == 0:
                known = elapsed = agreed(elapsed, comm)
            row = {"step": step + 1, "loss": loss, "bits_per_byte": loss / math.log(2)}
            row |= {"tokens_per_s": tokens * (step + 1) / elapsed, "lr": learning_rate(options, run.total)(step)}
            row["grad_norm"] = float(state.opt[0].norm)
            report.train(row | {"elapsed": elapsed})
            run.log({name: value for name, value in row.items() if name != "step"})
            if options.steps is None and (step + 1) % _REPLAN_EVERY == 0:
                run.total = max(step + 1, round((step + 1) * options.seconds / elapsed))
                make = build_step(options, loss_fn, run.total)  # the state does not know who will change it
                report.plan(run.total)
            state, _, _ = run.end_step((state, known, run.total), nonfinite=bad)
            if options.eval_every and state.step % options.eval_every == 0 and state.step < run.total:
                evaluate(state.params, state.step, every=8)
    return state, elapsed


def forget_if_complete(folder: Path) -> None:
    """Remove the checkpoints and the log of a run that has come to its report: the next one of its name starts anew."""
    if (folder / SUMMARY).exists():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / LOG).unlink(missing_ok=True)
        (folder / SUMMARY).unlink()


def config_of(options: Options) -> dict[str, Any]:
    """The options that a run may not change on its way without a word; where state rests may."""
    free = {"strategy", "nproc", "resume", "name", "out", "schedule", "release", "save_every"}
    return {name: str(value) for name, value in vars(options).items() if name not in free}


def agreed(value: float, comm: fs.Comm) -> float:
    """The largest value of any rank, so that all decide alike."""
    x = torch.tensor([value], dtype=torch.float64, device=comm.device)
    for axis, size in comm.mesh.axes:
        x = comm.all_reduce(x, axis, op="max") if size > 1 else x
    return float(x)


def sample(params: Any, options: Options, comm: fs.Comm) -> str:
    """Generated text. ``params`` are gathered already, so that one rank can do this alone."""
    return generate(
        lambda tokens: model.logits(params, tokens.to(comm.device), comm, heads=options.heads),
        options.prompt,
        options.sample_bytes,
        context=options.context,
        temperature=options.temperature,
        seed=options.seed,
    )


@record  # tells the launcher what went wrong
def main() -> None:
    """Join the other processes and run."""
    options = parse()
    run(options, fs.connect(fs.Mesh(options.mesh_axes)))
    fs.destroy()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        leave(error)
