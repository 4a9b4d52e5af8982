"""Answers of ``transformer_engine_torch`` about its libraries and the machine: recent versions, and nothing optional."""

from .enums import AttentionBackend
from .registry import modelled


@modelled
def get_cublasLt_version():
    return 130100


@modelled
def get_cudnn_version():
    return 91700


@modelled
def get_num_cublas_streams():
    return 4


@modelled
def get_fused_attn_backend(parameters):
    return AttentionBackend.NVTE_No_Backend, "te_cpu has no fused attention"


@modelled
def ubuf_built_with_mpi():
    return False


@modelled
def nvte_built_with_cublasmp():
    return False


@modelled
def device_supports_multicast(device_id=-1):
    return False


@modelled
def get_stream_priority_range(device_id=-1):
    return 0, 0
