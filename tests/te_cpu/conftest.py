import pytest

from tests import te_cpu


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    """Skip tests of the stand-in on a machine where TransformerEngine runs without it: a process has one of the two."""
    if not te_cpu.is_needed():
        pytest.skip("TransformerEngine runs on the GPU of this machine; the stand-in is tested on machines without one")


@pytest.fixture
def hopper():
    """TransformerEngine on architecture 9.0: delayed, current and block scaling; transposes are kept."""
    te = te_cpu.load()
    with te_cpu.architecture(9, 0):
        yield te


@pytest.fixture
def blackwell():
    """TransformerEngine on architecture 10.0: MXFP8 and NVFP4 beside the others; no transposes."""
    te = te_cpu.load()
    with te_cpu.architecture(10, 0):
        yield te
