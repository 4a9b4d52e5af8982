"""TransformerEngine's own kernels on a GPU: the bits of the whole model, in memory that is gathered and released.

Without a GPU the same tests run on the stand-in of tests/te_cpu: what has nothing to do with a GPU fails there.
"""

import gc
import os
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsharp as fs
from fsharp.functional.formats import te as formats
from fsharp.functional.formats.format import LeafPart
from fsharp.functional.release import inner_tensors
from fsharp.stateful.transport import nccl
from fsharp.stateful.transport.streams import DeviceLanes
from fsharp.testing import DebugPolicy
from tests.te.test_fused_gradients import SOME as fused_cases, fused
from tests.te.test_steps import MODULES, THREE, TWO, UNEVEN
from tests.te.training import (
    ABOUT,
    DELAYED,
    DEVICE,
    IS_ON_GPU,
    OUTSIDE,
    PRECISION,
    RATE,
    RECIPES,
    TOKENS,
    WIDTH,
    Case,
    Door,
    compare,
    differences,
    linear,
    loss_of,
    on,
    shard,
    te,
    train_sharded,
)

HOPPER, MESH = (9, 0), fs.Mesh({"dp": 1})
PLACE = torch.device(DEVICE, 0) if IS_ON_GPU else torch.device(DEVICE)
OF_HOPPER = ("current", "block")
KINDS = [*((name, True) for name in OF_HOPPER), *product(DELAYED, (False, True))]
CASES = {"Linear": Case(TWO)} | MODULES
POLICY = DebugPolicy(trivial_axes=True, poison=True)
BLOCK = 512  # the least that the allocator of a GPU counts, here for a scalar
CYCLES = 3_000_000  # of a GPU's clock: about 2 ms
pytestmark = [
    *([pytest.mark.gpu] if IS_ON_GPU else []),
    pytest.mark.filterwarnings("default"),  # those of TransformerEngine are none of ours
    pytest.mark.skipif(IS_ON_GPU and torch.cuda.get_device_capability() != HOPPER, reason="needs a GPU of architecture 9.0"),
]
deep = pytest.mark.gpu if IS_ON_GPU else pytest.mark.deep
needs_gpu = pytest.mark.skipif(not IS_ON_GPU, reason="needs a GPU")


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    """These tests run on either side."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Have TransformerEngine choose attention whose gradients are the same each time."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A Comm of one rank over NCCL, or gloo where there is no GPU."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    backend = "nccl" if IS_ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield fs.ProcessGroupComm(init_device_mesh(DEVICE, (1,), mesh_dim_names=("dp",)))
    finally:
        fs.destroy()


@pytest.fixture(params=["alone", "group"])
def comm(request):
    """One rank, without and with a process group."""
    return alone() if request.param == "alone" else request.getfixturevalue("group")


def alone():
    return fs.SingleComm(MESH, device=PLACE)


@deep
@pytest.mark.parametrize(("name", "quantized"), KINDS)
def test_training_has_the_bits_of_the_whole_model(comm, name, quantized):
    cases = {about: replace(case, quantized=quantized) for about, case in CASES.items()}
    assert differences(comm, cases, [name], policy=POLICY) == []


@deep
def test_bfloat16_parameters_have_the_bits_of_the_whole_model(group):
    cases = {about: replace(case, quantized=False) for about, case in CASES.items()}
    assert differences(group, cases, OF_HOPPER, [fs.zero3("dp"), fs.ddp("dp")], policy=POLICY) == []


@deep
@pytest.mark.parametrize("name", [*OF_HOPPER, "delayed"])
def test_gradients_that_modules_write_have_the_bits_of_the_whole_model(group, name):
    cases = {about: case for about, case in fused_cases.items() if name != "delayed" or about != "layers used twice"}
    cases |= {f"{about}, plain": replace(case, quantized=False) for about, case in cases.items()}
    assert differences(group, cases, [name], [fs.zero3("dp"), fs.zero2("dp")], fused, policy=POLICY) == []


class ThroughHost:
    """A Comm of tensors on a GPU by one of host memory, so that ranks may share the GPU: NCCL has one for each of them."""

    def __init__(self, host):
        self.host, self.mesh, self.rank, self.device = host, host.mesh, host.rank, PLACE

    def all_gather(self, x, axis, *, label=""):
        return self.host.all_gather(x.cpu(), axis, label=label).to(x.device)

    def reduce_scatter(self, x, axis, *, dtype=None, label=""):
        return self.host.reduce_scatter(x.cpu(), axis, dtype=dtype, label=label).to(x.device)

    def all_reduce(self, x, axis, *, op="sum", label=""):
        return self.host.all_reduce(x.cpu(), axis, op=op, label=label).to(x.device)

    def all_to_all(self, x, send, receive, *, axis=None, label=""):
        return self.host.all_to_all(x.cpu(), send, receive, axis=axis, label=label).to(x.device)


def differences_on_a_shared_gpu():
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    comm = ThroughHost(fs.connect(fs.Mesh({"dp": 2}), device_type="cpu"))
    return differences(comm, CASES | UNEVEN, OF_HOPPER, [fs.zero3("dp")], policy=DebugPolicy(poison=True))


@deep
def test_two_ranks_that_share_a_gpu_have_the_bits_of_the_whole_model():
    assert fs.launch(differences_on_a_shared_gpu, 2) == [[], []]


GUARD = 1024


@pytest.mark.parametrize("shape", [(128, 256), (208, 160), (48, 64)], ids=str)
@pytest.mark.parametrize("name", OF_HOPPER)
def test_parts_have_the_bytes_of_the_whole_and_nothing_is_written_around_their_memory(name, shape, monkeypatch):
    make_room, guards = formats._QuantizerCodec._memory_to_encode_into, []

    def guarded(self, part):
        rooms = []
        for room in make_room(self, part):
            nbytes, offset = room.untyped_storage().nbytes(), room.storage_offset()
            memory = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=DEVICE)
            guards.extend([memory[:GUARD], memory[-GUARD:]])
            rooms.append(memory[GUARD + offset :][: room.numel()])
        return rooms

    monkeypatch.setattr(formats._QuantizerCodec, "_memory_to_encode_into", guarded)
    main = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cuts = [0, 13 * 32, 13 * 32, main.numel() // 96 * 64, main.numel()]  # inside of rows and of blocks; one rank has none
    with on(HOPPER):
        recipe = RECIPES[name][1]
        codec = fs.te.weight_format(recipe).leaf_codec

        def encoded(agree):
            parts = []
            for first, last in pairwise(cuts):
                plane, scales = (
                    torch.zeros(n, dtype=torch.uint8, device=DEVICE) for n in (last - first, codec.scales_nbytes(shape))
                )
                values = main.flatten()[first:last]
                parts.append(LeafPart("w", torch.Size(shape), torch.bfloat16, first, last, (plane,), scales, values))
                codec.encode(parts[-1:], agree)
            return parts

        amaxes = []
        encoded(lambda amax: amaxes.append(amax.clone()))
        largest = torch.stack(amaxes).amax(0)
        parts = encoded(lambda amax: amax.copy_(largest))
        whole = formats._quantizer_of_recipe(recipe)(main.to(torch.bfloat16))
        data = whole._data if name == "current" else whole._rowwise_data
        assert torch.equal(torch.cat([part.planes[0] for part in parts]), data.flatten())
        values = torch.cat([codec.decode(part) for part in parts if part.first < part.last])
        assert torch.equal(values, whole.dequantize(dtype=torch.float32).flatten())
    assert guards
    assert all(bool((guard == 0xA5).all()) for guard in guards)


def delay_gathers(patch):
    gather = nccl._all_gather

    def late(*args, **kwargs):
        torch.cuda._sleep(CYCLES)
        return gather(*args, **kwargs)

    patch.setattr(nccl, "_all_gather", late)
    return lambda model: None


def delay_compute(patch):
    def late(model):
        for each in model.layers:
            each.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))

    return late


def wait_for_nothing(patch):
    """What has to fail: ops wait for no op of another stream."""
    patch.setattr(DeviceLanes, "stream_wait_ops", lambda self, after: None)
    return delay_gathers(patch)


@needs_gpu
@pytest.mark.parametrize("name", OF_HOPPER)
@pytest.mark.parametrize("plant", [delay_gathers, delay_compute, wait_for_nothing])
def test_compute_and_gathers_wait_for_each_other(group, monkeypatch, name, plant):
    """Whichever stream is late; gathered memory is filled with what no weight has when it is released."""
    case = Case(THREE, change=plant(monkeypatch))
    policy = DebugPolicy(trivial_axes=True, poison=True, prefetch=2)
    found = differences(group, {"Linear": case}, [name], [fs.zero3("dp")], policy=policy)
    assert bool(found) == (plant is wait_for_nothing)


@deep
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", OF_HOPPER)
def test_a_released_weight_that_somebody_holds_has_no_memory(name, is_kept, monkeypatch):
    if is_kept:  # what was derived: so that this test can fail
        [kind] = [kind for kind in formats.KIND_BY_QUANTIZER_CLASS.values() if kind.name.endswith(name)]
        monkeypatch.setattr(kind, "derived", ())
    case = Case(lambda: [linear(), Door("unseen"), linear()], units=("layers.*",))
    with on(HOPPER):
        _, model = train_sharded(case, RECIPES[name][1], alone(), fs.zero3("dp"), steps=range(2), policy=POLICY)
    weight = OUTSIDE.pop()
    graph = weight.grad_fn  # which holds this rank's part of the parameters
    gc.collect()
    held = allocated([weight])
    del weight
    gc.collect()
    assert (held - allocated([]) >= WIDTH * WIDTH) == is_kept
    assert held - allocated([]) <= BLOCK or is_kept
    assert model.scheduled_step.num_unscheduled_calls == 1
    assert graph is not None


def allocated(tensors):
    """Bytes of the GPU in use; without one, bytes of these tensors."""
    if IS_ON_GPU:
        return torch.cuda.memory_allocated()
    with torch._C.DisableTorchFunctionSubclass():  # a released tensor refuses to be asked
        return sum(inner.untyped_storage().nbytes() for tensor in tensors for inner in inner_tensors(tensor))


@needs_gpu
@pytest.mark.parametrize(("name", "quantized"), KINDS)
def test_memory_in_use_is_the_same_after_each_step(group, name, quantized):
    case, recipe = replace(CASES["LayerNormMLP"], quantized=quantized), (RECIPES | DELAYED)[name][1]
    model = shard(case, recipe, group, fs.zero3("dp"), policy=DebugPolicy(trivial_axes=True))
    optimizer, nbytes = fs.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=RATE), []
    for step in range(7):
        train_sharded(case, recipe, group, None, model=model, optimizer=optimizer, steps=[step])
        gc.collect()
        nbytes.append(torch.cuda.memory_allocated())
    assert len(set(nbytes[4:])) == 1, nbytes


def program(comm, recipe, *, is_quantized, **policy):
    """A scheduled step of three layers, and its state."""
    functions = [fs.make_functional(each) for each in Case(THREE, quantized=is_quantized).model(recipe).layers]
    tree, precision = {"layers": [params for _, params in functions]}, {"**": PRECISION}
    if is_quantized:
        precision["**.weight"] = replace(PRECISION, stored=fs.te.weight_format(recipe))
    layout = fs.plan(tree, comm.mesh, fs.zero3("dp"), units="layers.*", precision=precision)

    def loss_fn(params, x, comm):
        with te.autocast(enabled=True, recipe=recipe):
            for (fn, _), unit in zip(functions, params["layers"], strict=True):
                x = fs.forward(fn, unit, x, comm=comm)
        return loss_of(x)

    tx = fs.optim.adamw(1e-2, capturable=True)
    state = fs.init_state(tx, fs.shard(tree, layout, comm, place="optim"), comm=comm)
    return fs.Scheduler(comm, policy=DebugPolicy(trivial_axes=True, **policy))(fs.train_step(loss_fn, tx, donate=True)), state


@needs_gpu
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", OF_HOPPER)
def test_a_captured_step_replays_with_the_losses_of_an_eager_one(group, name, is_quantized):
    recipe = RECIPES[name][1]
    data = [Case(THREE).batch(step, 0, 0).detach() for step in range(6)]
    captured = fs.schedules.CapturedStep(
        *program(group, recipe, is_quantized=is_quantized, gather_at_start=False), data[0], warmup=3
    )
    step, state = program(group, recipe, is_quantized=is_quantized)
    for _ in range(3):
        state, _ = step(state, data[0])
    for batch in data[1:]:
        state, expected = step(state, batch)
        assert torch.equal(captured(batch).loss, expected.loss)


def test_as_strided_of_a_float8_tensor_gives_the_transpose_wrong_strides_and_the_same_memory():
    """A fault of TransformerEngine 2.20. When this fails, it has been repaired; docs/te.md tells of it."""
    with on(HOPPER), te.quantized_model_init(enabled=True, recipe=RECIPES["current"][1]):
        weight = linear(2 * WIDTH, bias=False).weight.detach()
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        same = weight.as_strided(weight.shape, weight.stride(), 0)
    assert torch.equal(same._data, weight._data)
    assert torch.equal(weight._transpose, weight._data.t())
    assert not torch.equal(same._transpose, weight._transpose)  # for torch; kernels look at addresses and shapes alone
    assert same._transpose.data_ptr() == weight._transpose.data_ptr()
    assert same._transpose.shape == weight._transpose.shape


@deep
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("name", OF_HOPPER)
def test_fsdp2_has_the_bits_of_the_whole_model(group, name, reshard_after_forward):
    """It calls ``as_strided``, and keeps transposes from the forward to the backward unless it reshards."""
    recipe = RECIPES[name][1]

    def build():
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=True, recipe=recipe):
            return torch.nn.Sequential(linear(2 * WIDTH, bias=False), te.Linear(2 * WIDTH, WIDTH, bias=False, **ABOUT))

    def run(model):
        x = Case(None, shape=(TOKENS, WIDTH)).batch(0, 0, 0)
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        loss_of(y).backward()
        grads = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in model.named_parameters()}
        return {(0, 0): (y.detach(), x.grad)}, grads

    with on(HOPPER):
        sharded, whole = build(), build()
        mesh = init_device_mesh(DEVICE, (1,))
        for each in (*sharded, sharded):
            fully_shard(each, mesh=mesh, reshard_after_forward=reshard_after_forward)
        outputs, grads = run(sharded)
        found = outputs, {name: ((0, grad.numel()), grad.flatten()) for name, grad in grads.items()}
        assert compare(found, run(whole)) == []
