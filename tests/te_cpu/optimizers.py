"""Functions over lists of tensors: Adam, norms and scales, and what delayed scaling does between two steps."""

import torch

from .enums import DType
from .registry import check, modelled
from .rounding import FLOAT32_LARGEST, FP8_LARGEST, e8m0_of_amax, quotient, scale_of_amax, to_fp8


@modelled
def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists):
        target.copy_(source.float() * scale)
        if not torch.isfinite(target).all():
            noop_flag.fill_(1)


@modelled
def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """Return the norm of all tensors together, and of each."""
    norms = torch.stack([tensor.detach().float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def adam(grad, parameter, first, second, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay):
    """Return the new parameter in float32, and update both moments; mode 0 is Adam with L2, 1 is AdamW."""
    grad, parameter = grad.float(), parameter.float()
    if mode == 0:
        grad = grad + weight_decay * parameter
    mean, square = beta1 * first.float() + (1 - beta1) * grad, beta2 * second.float() + (1 - beta2) * grad * grad
    first.copy_(mean)
    second.copy_(square)
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = (mean / correction1) / ((square / correction2).sqrt() + epsilon)
    return parameter - lr * (update + weight_decay * parameter if mode == 1 else update)


@modelled
def multi_tensor_adam(chunk_size, noop_flag, tensor_lists, *options):
    """Update parameters; with a fifth list, that one holds main copies, and the parameters are casts of it."""
    for grad, parameter, first, second, *main in zip(*tensor_lists):
        new = adam(grad, main[0] if main else parameter, first, second, *options)
        for target in (parameter, *main):
            target.copy_(new)


@modelled
def multi_tensor_adam_fp8(chunk_size, noop_flag, tensor_lists, *options):
    """Update main copies, and cast them to FP8 with the scales of delayed scaling."""
    *options, dtype = options
    for grad, data, first, second, main, scale, amax, scale_inv in zip(*tensor_lists):
        main.copy_(adam(grad, main, first, second, *options))
        data.copy_(to_fp8(main * scale.float(), dtype))
        amax.copy_(torch.maximum(amax, main.abs().max()).reshape(amax.shape))
        scale_inv.copy_(torch.reciprocal(scale).reshape(scale_inv.shape))


@modelled
def multi_tensor_compute_scale_and_scale_inv(chunk_size, noop_flag, tensor_lists, max_fp8, force_pow_2_scales, epsilon):
    """Write the scales of current and block scaling, from amax."""
    dtype = next(dtype for dtype, largest in FP8_LARGEST.items() if largest == max_fp8)
    for amax, scale, scale_inv in zip(*tensor_lists):
        check(amax.numel() == scale.numel() == scale_inv.numel(), "amax, scale and scale_inv differ in size")
        scale.copy_(scale_of_amax(amax, dtype, force_pow_2_scales, epsilon))
        scale_inv.copy_(torch.reciprocal(scale).reshape(scale_inv.shape))


@modelled
def multi_tensor_compute_scale_inv_e8m0(chunk_size, noop_flag, tensor_lists):
    """Write the scales of MXFP8, from amax."""
    for amax, scale_inv in zip(*tensor_lists):
        check(amax.dtype == torch.bfloat16, "amax should be bf16")
        scale_inv.copy_(e8m0_of_amax(amax, DType.kFloat8E4M3).reshape(scale_inv.shape))


@modelled
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer, amax_histories, scales, amax_compute_algo, fp8_dtype, margin
):
    """Move each history of amax on by a step, and set the scales of the next step from it."""
    largest = FP8_LARGEST[fp8_dtype] * 2.0**-margin
    reduced = amax_reduction_buffer.split([scale.numel() for scale in scales])
    for step_amax, history, scale in zip(reduced, amax_histories, scales):
        last = torch.where(step_amax != 0, step_amax, history[0])
        moved = torch.cat((history[1:], last[None]))
        amax = last if amax_compute_algo == "most_recent" else torch.where(last != 0, moved.amax(0), 0.0)
        moved[0] = 0
        history.copy_(torch.where(last != 0, moved, history))
        usable = torch.isfinite(amax) & (amax > 0)
        scale.copy_(torch.where(usable, quotient(largest, amax), scale).clamp(max=FLOAT32_LARGEST))
