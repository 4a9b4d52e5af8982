"""GradScaler: loss scaling for sharded modules."""

import math
from typing import Any

import torch

from fsharp.errors import AgreementError, ScheduleError
from fsharp.stateful.modules.optim.optimizer import ShardedOptimizer, session_of_optimizer
from fsharp.stateful.modules.torch_tools.dtensors import max_flag_over_ranks
from fsharp.type_checks import options_checked


@options_checked
class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that also takes a :class:`~fsharp.ShardedOptimizer`: loss scaling for float16.

    ::

        scaler = fs.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    If gradients of one rank hold an infinity or NaN, all ranks skip the step and lower the scale. A skipped step releases the
    gradients. With ``accumulate()`` call these methods once, after the last backward. Other optimizers work as in torch.
    For parameters on a CPU pass ``"cpu"``: with ``"cuda"``, the default, torch disables the scaler there, and issues a warning.

    Raises:
        ScheduleError: there are no gradients to unscale, or the module has ``Precision(feedback=True)``.
        ValueError: gradients are summed in float16.
        LossError: all backward passes were inside of ``accumulate()``, or an error discarded the gradients.
        AgreementError: ranks have unscaled by different scales. All ranks raise, in ``step``.

    Cost of ``unscale_``: one pass over this rank's gradients, and one ``all_reduce`` of 12 bytes for each axis. The host waits
    for its device once, in ``step``. Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        session = session_of_optimizer(optimizer)
        if session.step.checked_gradients_or_none("unscale_()") is None:
            raise ScheduleError("unscale_(): there are no gradients: call it after a backward that does not accumulate.")
        session.step.check_can_unscale()
        buffers = session.step.means.buffers
        if not allow_fp16 and any(buffer.dtype == torch.float16 for buffer in buffers):
            raise ValueError(
                "unscale_(): gradients are summed in float16, and may have overflowed. Pass shard_module() a precision with "
                "accumulate=torch.float32."
            )
        flag = torch.zeros(1, dtype=torch.float32, device=session.scheduler.device)
        inverse = inv_scale.to(flag.device)
        for buffer in buffers:
            torch._amp_foreach_non_finite_check_and_unscale_([buffer], flag, inverse)
            torch.autograd.graph.increment_version(buffer)  # the kernel does not count its write
        session.step.means.edits.append("unscale")
        # Different scales turn the flag into NaN, so that the host, which reads only the flag, notices without another wait.
        seen = torch.cat([flag, inverse.view(1), -inverse.view(1)])
        found, most, least = self._seen = max_flag_over_ranks(seen, session.calls.dtensor_specs, session.scheduler)
        return {flag.device: torch.where(most == -least, found, math.nan)}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        (found,) = (flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        if math.isnan(found):
            _, most, least = self._seen.tolist()
            raise AgreementError(
                f"GradScaler: ranks have unscaled by scales from {1 / most:g} to {-1 / least:g}. Give all of them the same "
                "init_scale, growth_factor, backoff_factor and growth_interval, and load the same state_dict."
            )
        if found:
            session_of_optimizer(optimizer).step.release_gradients_and_mark_used()
            return None
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
