"""Matrix products: float32, of the values that the GPU would read, in the orientation in which it would read them.

So a product of stale columns gives the wrong numbers of a GPU, and one of missing columns raises.
"""

import torch
import torch.nn.functional as F

from .quantization import quantize
from .registry import check, modelled, refuse
from .rounding import TORCH_DTYPE
from .storage import is_quantized, values


def gelu(x):
    return F.gelu(x, approximate="tanh")


def backward(function, x, grad):
    """Return the gradient of ``x``, in float32, from the gradient of ``function(x)``."""
    with torch.enable_grad():
        x = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(x), x, grad.detach().float())[0]


@modelled
def generic_gemm(
    A,
    transA,
    B,
    transB,
    D,
    quantizer,
    output_dtype,
    bias,
    bias_type,
    gelu_epilogue,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap=False,
    alpha=1.0,
    beta=None,
):
    """Return ``[op(B) @ op(A), gradient of the bias, input of GELU, extra_output]``; cuBLAS sees the transposes of both."""
    if comm_overlap is not None:
        refuse("a product that overlaps with communication")
    check(accumulate or not beta, "Trying to use non-zero beta while not accumulating into D tensor")
    a, b = values(A, columnwise=not transA), values(B, columnwise=bool(transB))
    result = alpha * ((b.t() if transB else b) @ (a.t() if transA else a))
    dtype = TORCH_DTYPE[output_dtype] if output_dtype is not None else A.dtype if D is None else D.dtype
    bias_grad = before_gelu = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(dtype)
    elif bias is not None:
        result = result + bias.float()
    if gelu_epilogue and grad:
        result = backward(gelu, gelu_in.reshape(result.shape), result)
    elif gelu_epilogue:
        before_gelu = result.to(dtype)
        result = gelu(result)
    if not transB and len(B.size()) > 2:
        result = result.reshape(*B.size()[:-1], -1)
    if D is None or is_quantized(D):
        D = result.to(dtype) if quantizer is None else quantize(result.to(dtype), quantizer, D)
    else:
        check(D.shape == result.shape, f"GEMM output has invalid dims (expected {tuple(result.shape)}, got {tuple(D.shape)})")
        check(output_dtype is None or D.dtype == dtype, f"GEMM output has invalid dtype (expected {dtype}, found {D.dtype})")
        with torch.no_grad():
            D.copy_(result + D.float() * (1.0 if beta is None else beta) if accumulate else result)
    return [D, bias_grad, before_gelu, extra_output]


@modelled
def te_general_grouped_gemm(
    A,
    transa,
    B,
    transb,
    D,
    D_type,
    m_splits,
    bias,
    bias_type,
    single_output,
    pre_gelu_out,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    math_sm_count,
):
    """Do one product for each expert, into parts of one output or into outputs of their own."""
    outputs = D[0].split(list(m_splits)) if single_output else D
    for index, output in enumerate(outputs):
        if B[index].size().numel() == 0:
            if not accumulate:
                output.zero_()
            if grad:
                bias[index].zero_()
            continue
        one_bias = bias[index] if bias and bias[index].numel() else None
        factors = A[index], transa, B[index], transb
        _, bias_grad, _, _ = generic_gemm(
            *factors, output, None, None, one_bias, bias_type, False, None, grad, None, 0, accumulate, use_split_accumulator
        )
        if bias_grad is not None:
            one_bias.copy_(bias_grad)
    return bias
