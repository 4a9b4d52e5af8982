"""inject_hyperparams: keep hyper-parameters as numbers in the state, to read and set them between steps."""

import inspect
import numbers
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

from fsharp.errors import OptionError, TreeError, problem
from fsharp.functional.comm.agree import check_on_all_ranks
from fsharp.functional.comm.protocol import Comm
from fsharp.functional.optim.base import (
    InnerUpdate,
    Transform,
    as_transform,
    exact_texts,
    wrapper_name,
    wrapper_update_and_apply,
)
from fsharp.functional.optim.elementwise import as_float
from fsharp.type_checks import options_checked


class InjectHyperparamsState(NamedTuple):
    """State of :func:`inject_hyperparams`.

    Attributes:
        count: number of updates.
        hyperparams: dict from names of hyper-parameters to numbers. You can set a number that has no schedule, to an equal
            value on all ranks: ``state.opt.hyperparams["learning_rate"] = 1e-4``. For a schedule the dict has the value of the
            last update.
        inner_state: state of the transformation that the factory returns.
    """

    count: int  # type: ignore[assignment]  # tuple.count, which nobody calls on a state
    hyperparams: dict[str, Any]
    inner_state: Any


@options_checked
def inject_hyperparams(inner_factory: Callable[..., Any], static_args: str | Iterable[str] = ()) -> Callable[..., Transform]:
    """Return a factory of optimizers with hyper-parameters in the state, as numbers to read and set between steps.

    >>> import fsharp as fs
    >>> tx = fs.optim.inject_hyperparams(fs.optim.adamw)(learning_rate=3e-4, weight_decay=0.1)

    Between steps you can set each hyper-parameter that is a number. A hyper-parameter that is a function is a schedule. Each
    update calls the schedule with the count of updates so far, and writes the result to the state, as in optax. Arguments of
    other types are passed to the factory unchanged.

    Args:
        inner_factory: function with named arguments that returns an ``(init, update)`` pair, such as ``fs.optim.adamw``.
        static_args: names of numbers or functions to pass to the factory as they are, such as a ``weight_decay`` that is a
            function of the path.

    Returns:
        A function with the arguments of ``inner_factory``. This function returns a transformation with
        :class:`InjectHyperparamsState`.

    Raises:
        OptionError: the factory lacks a static argument, or has ``*args``, ``**kwargs`` or positional-only arguments.
        TreeError: in ``update``: a hyper-parameter is missing, unknown or not a number.
        AgreementError: in ``update``, on all ranks: a hyper-parameter differs between ranks.

    Cost: in each update ranks compare the numbers, by a collective of 40 bytes for each axis, and the factory is called once.
    """
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    if unknown := sorted(static - set(signature.parameters)):
        raise OptionError(
            f"inject_hyperparams(): static_args names {unknown[0]!r}, expected some of {list(signature.parameters)}, the "
            "arguments of the factory."
        )
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise OptionError(
                f"inject_hyperparams(): the factory takes {str(parameter)!r}, expected arguments with names, under "
                "which the state holds numbers. Pass a function with named arguments."
            )

    @wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> Transform:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        free = {name: value for name, value in bound.arguments.items() if name not in static}
        schedules = {name: value for name, value in free.items() if callable(value)}
        start = {name: value for name, value in free.items() if _is_real_number(value)}
        others = {name: value for name, value in bound.arguments.items() if name not in schedules and name not in start}

        def scheduled(count: int) -> dict[str, float]:
            return {name: as_float(name, count, schedule(count)) for name, schedule in schedules.items()}

        def build_inner(values: dict[str, Any]) -> Transform:
            return as_transform(inner_factory(**others, **values))

        def init(params: Any, /, *, comm: Comm | None = None) -> InjectHyperparamsState:
            values = start | scheduled(0)
            return InjectHyperparamsState(0, values, build_inner(values).init(params, comm=comm))

        def step(run: InnerUpdate, grads: Any, state: Any, params: Any, comm: Comm, donate: bool | None) -> Any:
            def check() -> dict[str, Any]:
                if set(state.hyperparams) != {*start, *schedules}:
                    facts = [("in the state", sorted(state.hyperparams)), ("expected", sorted({*start, *schedules}))]
                    raise TreeError(problem("inject_hyperparams()", "hyper-parameters are missing or unknown.", facts))
                return {name: _as_python_number(name, state.hyperparams[name]) for name in start} | scheduled(state.count)

            def texts(values: dict[str, Any]) -> dict[str, str]:
                return {name: repr(float(value)) for name, value in values.items()}

            values = check_on_all_ranks("inject_hyperparams()", comm, check, texts)
            out, new = run(build_inner(values), grads, state.inner_state, params)
            return out, InjectHyperparamsState(state.count + 1, values, new)

        update, apply = wrapper_update_and_apply(step)
        first = build_inner(start | scheduled(0))
        config = {"inject_hyperparams": dict(first.config), "schedules": exact_texts(**schedules)}
        return Transform(init, update, config, apply, wrapper_name("inject_hyperparams", first.name), first.extra_arg_names)

    return make


def _is_real_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _as_python_number(name: str, value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    if not _is_real_number(plain):
        raise TreeError(f"inject_hyperparams(): hyperparams[{name!r}] is {value!r}, expected a number.")
    return plain
