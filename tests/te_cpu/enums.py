"""The enumerations and empty classes of ``transformer_engine_torch``, with the values of TransformerEngine 2.20."""

from enum import IntEnum

from .registry import modelled


def enumeration(name, **values):
    return modelled(IntEnum(name, values, module="transformer_engine_torch"))


def count(*names):
    return {name: index for index, name in enumerate(names)}


DType = enumeration(
    "DType", kByte=0, kInt32=2, kFloat32=4, kFloat16=5, kBFloat16=6, kFloat8E4M3=7, kFloat8E5M2=8, kFloat4E2M1=10
)
enumeration(
    "FP8FwdTensors", **count(*(f"GEMM{gemm}_{tensor}" for gemm in (1, 2, 3) for tensor in ("INPUT", "WEIGHT", "OUTPUT")))
)
enumeration("FP8BwdTensors", **count(*(f"GRAD_{tensor}{gemm}" for gemm in (1, 2, 3) for tensor in ("OUTPUT", "INPUT"))))
enumeration(
    "NVTEScalingMode",
    NVTE_DELAYED_TENSOR_SCALING=0,
    NVTE_MXFP8_1D_SCALING=1,
    NVTE_BLOCK_SCALING_1D=2,
    NVTE_BLOCK_SCALING_2D=3,
    NVTE_NVFP4_1D_SCALING=4,
    NVTE_INVALID_SCALING=100,
)
enumeration("Float8BlockScaleTensorFormat", **count("GEMM_READY", "COMPACT", "INVALID"))
enumeration("CommOverlapType", **count("RS", "AG"))
OVERLAPS = (
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
    "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG"
)
enumeration("CommOverlapAlgo", **count(*OVERLAPS.split()))
enumeration("NVTE_Bias_Type", **count("NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"))
MASKS = (
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
)
enumeration("NVTE_Mask_Type", **count(*MASKS.split()))
enumeration("NVTE_Softmax_Type", **count("NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"))
QKV_FORMATS = (
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET"
)
enumeration("NVTE_QKV_Format", **count(*QKV_FORMATS.split()))
QKV_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D THD_T2HD "
    "THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD "
    "Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD "
    "BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
enumeration("NVTE_QKV_Layout", **count(*(f"NVTE_{layout}" for layout in QKV_LAYOUTS.split())))
AttentionBackend = enumeration("NVTE_Fused_Attn_Backend", NVTE_No_Backend=-1, NVTE_F16_arbitrary_seqlen=1, NVTE_FP8=2)
enumeration("NVTERoutingMapFormat", **count("BYTEMAP", "BITMAP_U8"))
enumeration("NVTEQBHistogramMode", **count("TWO_KERNEL", "FUSED_ATOMIC"))


@modelled
class FP8TensorMeta:
    scale = scale_inv = amax_history = None


@modelled
class CommOverlapCore:
    pass


@modelled
class CommOverlapBase(CommOverlapCore):
    pass


@modelled
class CommOverlapP2PBase(CommOverlapCore):
    pass


@modelled
class CommOverlap(CommOverlapBase):
    pass


@modelled
class CommOverlapP2P(CommOverlapP2PBase):
    pass


@modelled
class CommOverlapHelper:
    pass
