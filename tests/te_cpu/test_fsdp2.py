"""torch's ``fully_shard`` over TransformerEngine's quantized weights: its hooks gather bytes, and run here on gloo."""

import pytest
import torch

import fsharp as fs
from tests import te_cpu
from tests.te_cpu.ranks import processes
from tests.te_cpu.recipes import CAPABILITY, RECIPES, distance, make_recipe, random, run


def train(comm, recipe_name, reshard_after_forward):
    """Return how far outputs and gradients of two steps are from those of the unsharded model."""
    te = te_cpu.load()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with te_cpu.architecture(*CAPABILITY[recipe_name]):
        recipe = make_recipe(recipe_name)

        def build():
            torch.manual_seed(0)
            with te.quantized_model_init(enabled=True, recipe=recipe):
                return torch.nn.Sequential(
                    te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16),
                    te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16),
                )

        sharded, whole = build(), build()
        mesh = init_device_mesh("cpu", (comm.mesh.size,))
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        x, errors = random(128, 256), []
        for _ in range(2):
            y, dx, dw = run(te, sharded, x, recipe)
            errors.append([distance(*pair) for pair in zip((y, dx, dw.full_tensor()), run(te, whole, x, recipe))])
        return errors


@pytest.mark.deep
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fully_shard_is_the_unsharded_model(recipe, reshard_after_forward):
    first, second = processes(fs.Mesh({"dp": 2}), lambda comm: train(comm, recipe, reshard_after_forward))
    assert first == second == [[0, 0, 0], [0, 0, 0]]
