"""Stand in for ``torch.cuda`` in the TransformerEngine modules: one device, which is the CPU, without streams."""

import contextlib
import sys
from types import SimpleNamespace

import torch

_architecture = (9, 0)


def do_nothing(*args, **kwargs):
    pass


set_device = synchronize = empty_cache = _lazy_init = do_nothing


@contextlib.contextmanager
def architecture(major, minor=0):
    """Let TransformerEngine see a GPU of another compute capability inside a ``with`` block.

    Modules, tensors and quantizers have to be made inside the block: those of 9.0 hold transposes, those of 10.0 do not.
    """
    before = _architecture
    set_architecture((major, minor))
    try:
        yield
    finally:
        set_architecture(before)


def set_architecture(capability):
    """Set the compute capability, and clear what TransformerEngine remembers of the last one."""
    global _architecture
    _architecture = tuple(capability)
    if utils := sys.modules.get("transformer_engine.pytorch.utils"):
        for cached in (utils._get_device_compute_capability, utils.is_non_tn_fp8_gemm_supported):
            cached.cache_clear()
    if quantization := sys.modules.get("transformer_engine.pytorch.quantization"):
        for answer in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
            assert hasattr(quantization, answer), f"TransformerEngine has no {answer}: its answers are remembered elsewhere"
            setattr(quantization, answer, None)


def get_device_capability(device=None):
    return _architecture


def get_device_properties(device=None):
    major, minor = _architecture
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name="CPU", total_memory=1 << 36)


def current_device():
    return torch.device("cpu")  # TransformerEngine takes it for a device, an index and a key of caches


def is_available():
    return True


def device_count():
    return 1


def is_current_stream_capturing():
    return False


class Stream:
    """A stream whose work is done before the call that submits the work returns."""

    cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = do_nothing

    def record_event(self, event=None):
        return event or Event()


class Event:
    """An event that has already happened."""

    __init__ = record = wait = synchronize = do_nothing

    def query(self):
        return True


def current_stream(device=None):
    return Stream()


def stream(stream):
    return contextlib.nullcontext()


def get_rng_state(device=None):
    return torch.get_rng_state()


def set_rng_state(state, device=None):
    torch.set_rng_state(state)


def manual_seed(seed):
    torch.manual_seed(seed)


def _lazy_call(function, **kwargs):
    function()


class _Generators:
    def __getitem__(self, device):
        return torch.default_generator


default_generators = _Generators()
nvtx = SimpleNamespace(range=lambda message: contextlib.nullcontext(), range_push=lambda message: 0, range_pop=lambda: 0)


def __getattr__(name):
    """Return the attribute of torch itself: types that TransformerEngine names, and functions that raise without a GPU."""
    return getattr(torch.cuda, name)
