"""Casts of a shard: from a part of the main copy of a weight to the bytes of that part, and what each rank adds to amax.

A shard is the elements ``start_offset`` to ``start_offset + numel`` of a flattened matrix of ``h x w``. Other ranks have the
rest. TransformerEngine's ``quantize_master_weights`` calls these functions, and reduces amax over ranks between them.
"""

import torch

from .enums import DType
from .registry import check, modelled
from .rounding import (
    block_amax,
    copy_padded,
    fp4_block_scale,
    fp4_global_scale,
    from_fp8,
    inverse_power_of_two,
    scaled_to_fp4,
    spread,
    to_fp8,
    unpack_fp4,
)


def placed(shard, h, w, start_offset):
    """Return a matrix of ``h x w`` that has the shard's elements in their places and zero elsewhere."""
    end = start_offset + shard.numel()
    check(start_offset >= 0 and end <= h * w, f"Invalid start_offset: elements {start_offset}:{end} of {h * w}")
    flat = torch.zeros(h * w)
    flat[start_offset:end] = shard.detach().float().reshape(-1)
    return flat.reshape(h, w)


@modelled
def fp8_block_scaling_compute_partial_amax(tensor, amax, h, w, start_offset, block_len):
    """Write the amax of a shard's elements for each block of 128 x 128."""
    check(block_len == 128 and amax.dim() == 2 and amax.dtype == torch.float32, "amax must be a 2D float tensor, blocks of 128")
    check(tensor.dtype in (torch.float32, torch.bfloat16), "tensor must be a float or bfloat16 tensor")
    part = block_amax(placed(tensor, h, w, start_offset), 128, 128)
    amax[: part.shape[0], : part.shape[1]] = part


@modelled
def fp8_block_scaling_partial_cast(inp, out, scale, h, w, start_offset, block_len, out_dtype):
    """Write the bytes of a shard, and garbage around these where the kernel stores whole strips of 16 x 128 elements.

    The kernel takes for granted that the shard lies in a buffer of the whole tensor, which is gathered afterwards.
    """
    check(block_len == 128 and scale.dim() == 2 and out.dtype == torch.uint8, "scale must be 2D, and the output uint8")
    data = to_fp8(placed(inp, h, w, start_offset) * spread(scale, 128, 128, (h, w)), out_dtype).reshape(-1)
    end = start_offset + inp.numel()
    covered = torch.zeros(h * w, dtype=torch.bool)
    covered[start_offset:end] = True
    strips = spread(block_amax(covered.reshape(h, w).float(), 16, 128), 16, 128, (h, w)).reshape(-1) > 0
    around = (strips & ~covered).nonzero().flatten() + out.storage_offset() - start_offset
    memory = torch.as_strided(out, (out.untyped_storage().nbytes(),), (1,), 0)
    if around.numel():
        check(
            around[0] >= 0 and around[-1] < memory.numel(),
            f"the kernel would write {around.numel()} bytes around this shard, outside of its buffer: "
            "let the shard be a view of a buffer of the whole tensor",
        )
        memory[around] = 0x7F  # NaN, until the all-gather
    out.view(-1).copy_(data[start_offset:end])


@modelled
def mxfp8_scaling_compute_partial_amax(input, amax_rowwise, amax_colwise, rows, cols, start_offset):
    """Write the amax of a shard's elements for each block of 32, along rows and along columns."""
    check(rows % 32 == 0 and cols % 32 == 0, f"rows and cols must be divisible by 32, not {rows} x {cols}")
    check(input.dim() == 1, "input must be a 1D tensor")
    check(amax_rowwise.dtype == input.dtype == amax_colwise.dtype, f"Wrong dtype of amax: expected {input.dtype}")
    whole = placed(input, rows, cols, start_offset)
    copy_padded(block_amax(whole, 1, 32).to(input.dtype), amax_rowwise)
    copy_padded(block_amax(whole, 32, 1).to(input.dtype), amax_colwise)


@modelled
def mxfp8_scaling_partial_cast(
    input, output_rowwise, output_colwise, scale_inv_rowwise, scale_inv_colwise, rows, cols, start_offset
):
    """Write the bytes of a shard, once for products along rows and once for products along columns."""
    check(input.dim() == output_rowwise.dim() == output_colwise.dim() == 1, "input and outputs must be 1D tensors")
    whole, end = placed(input, rows, cols, start_offset), start_offset + input.numel()
    for output, exponents, block in (
        (output_rowwise, scale_inv_rowwise, (1, 32)),
        (output_colwise, scale_inv_colwise, (32, 1)),
    ):
        data = to_fp8(whole * spread(inverse_power_of_two(exponents), *block, (rows, cols)), DType.kFloat8E4M3)
        output.copy_(data.reshape(-1)[start_offset:end])


@modelled
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list, block_len=16
):
    """Write the amax of shards' elements, for each block of 16 x 16 and for each tensor."""
    for shard, amax, global_amax, h, w, offset in zip(
        master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list
    ):
        check(h % 16 == 0 and w % 16 == 0 and offset % 2 == 0, f"{h} x {w} from {offset}: expected multiples of 16, 16 and 2")
        amax.copy_(block_amax(placed(shard, h, w, offset), 16, 16))
        global_amax.copy_(amax.max().reshape(global_amax.shape))


@modelled
def nvfp4_compute_global_scale(global_amax, global_scale):
    global_scale.copy_(fp4_global_scale(global_amax))


@modelled
def nvfp4_multi_tensor_fused_scale(
    block_amax_list,
    global_amax_list,
    per_block_scale_list,
    target_scale_list,
    target_amax_list,
    tile_rows_list,
    tile_cols_list,
    rows_padded_list,
    block_len,
):
    """Write the scales of tensors, from the amax of blocks and tensors: in float32, and in the buffers of the tensors."""
    for amax, global_amax, block_scale, target_scale, target_amax in zip(
        block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list
    ):
        target_amax.copy_(global_amax.reshape(target_amax.shape))
        block_scale.copy_(fp4_block_scale(amax, fp4_global_scale(global_amax)))
        check(target_scale.shape[1] == block_scale.shape[1], "the kernel writes as many scales a row as there are blocks")
        copy_padded(to_fp8(block_scale, DType.kFloat8E4M3).repeat_interleave(16, 0), target_scale)


@modelled
def nvfp4_multi_tensor_2d_partial_cast(
    inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list, block_len=16
):
    """Write the bytes of shards, two elements to a byte."""
    for shard, out, scale, global_scale, h, w, offset in zip(
        inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list
    ):
        rounded = from_fp8(to_fp8(scale, DType.kFloat8E4M3), DType.kFloat8E4M3)
        packed = scaled_to_fp4(placed(shard, h, w, offset), spread(rounded, 16, 16, (h, w)), global_scale).reshape(-1)
        out.view(-1).copy_(packed[offset // 2 : (offset + shard.numel() + 1) // 2])


@modelled
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list, columnwise_data_list, rowwise_scale_list, columnwise_scale_list, M_list, K_list
):
    """Write the columns of tensors, from their rows: the same values and the same scales, transposed."""
    for data, columns, scale, column_scale, m, k in zip(
        rowwise_data_list, columnwise_data_list, rowwise_scale_list, columnwise_scale_list, M_list, K_list
    ):
        nvfp4_data_transpose(data.reshape(m, -1), out=columns)
        nvfp4_2d_scale_transpose(scale, column_scale, -(-m // 16), -(-k // 16))


@modelled
def nvfp4_data_transpose(data, *, out=None):
    """Return the bytes of the transposed values, [k, m / 2] of [m, k / 2]; two values a byte."""
    codes = unpack_fp4(data).t().contiguous()
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed if out is None else out.copy_(packed.reshape(out.shape))


@modelled
def nvfp4_2d_scale_transpose(scale, column_scale, m_tiles, k_tiles):
    """Write the scales of the transposed values: each tile's scale once for each of its 16 columns."""
    copy_padded(scale[: 16 * m_tiles : 16, :k_tiles].t().repeat_interleave(16, 0), column_scale)
