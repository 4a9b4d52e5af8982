"""The steps of a library that shards quantized weights after an update, on the ranks of tests; each can be left out."""

from itertools import pairwise

import torch
import torch.distributed as dist

from tests import te_cpu
from tests.te_cpu.recipes import CAPABILITY, distance, make_recipe, random, run

SHAPE = (384, 256)
CUTS = {  # where the flattened main copy is cut: within a row and a block; one rank may have nothing
    "two": (0, 200 * 256 + 64, 384 * 256),
    "two, one of them empty": (0, 0, 384 * 256),
    "three": (0, 100 * 256 + 32, 301 * 256 - 2, 384 * 256),
    "three, one of them empty": (0, 200 * 256 + 64, 200 * 256 + 64, 384 * 256),
}
SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
DERIVED = ("_transpose", "_columnwise_data")


def travelling(weight):
    """Return the buffers of a weight that ranks gather; TransformerEngine derives the others from these."""
    if hasattr(weight, "_data"):
        return ["_data"]
    return ["_rowwise_data", "_columnwise_data"] if type(weight).__name__ == "MXFP8Tensor" else ["_rowwise_data"]


def gather(buffer, cuts, values_per_byte):
    """Fill a buffer of the whole weight, of which this rank has written its own part."""
    flat = buffer.view(-1)
    for rank, (start, end) in enumerate(pairwise(cuts)):
        if start < end:
            dist.broadcast(flat[start // values_per_byte : end // values_per_byte], rank)


def step(comm, recipe_name, cuts, *, in_shards, omitted=""):
    """Update a linear layer once, from main copies in shards.

    Args:
        comm: this rank's.
        recipe_name: of the recipe.
        cuts: the first elements of ranks' shards, and the end of the last.
        in_shards: whether bytes are written to a buffer of the shard alone, instead of to the weight.
        omitted: the part of the work that is left out.

    Returns:
        The names of the buffers that differ from those of quantizing the whole main copy, and the relative errors of output and
        gradient of the input.
    """
    te = te_cpu.load()
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

    with te_cpu.architecture(*CAPABILITY[recipe_name]):
        recipe = make_recipe(recipe_name)

        def build():
            torch.manual_seed(0)
            with te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
                return te.Linear(SHAPE[1], SHAPE[0], bias=False, params_dtype=torch.bfloat16)

        linear, whole = build(), build()
        weight, expected = linear.weight, whole.weight
        main = weight.get_high_precision_init_val().float().reshape(-1)
        for module in (linear, whole):
            run(te, module, random(128, 256), recipe)  # from here on delayed scaling has scales
        main = main + 0.2 * main.std() * random(main.numel(), seed=1, dtype=torch.float32)
        main[main.numel() * 3 // 4 :] *= 1.6  # the last rank's part has another amax than the others

        start, end = cuts[comm.rank], cuts[comm.rank + 1]
        shard = main[start:end].clone() if start < end else None
        packed = 2 if recipe_name == "nvfp4" else 1
        names = travelling(weight)
        fragments = None
        if in_shards:
            buffers = [torch.full((main.numel() // packed,), 0x55, dtype=torch.uint8) for _ in names]
            parts = tuple(buffer[start // packed : end // packed] for buffer in buffers)
            fragments = [None if shard is None else parts if len(parts) > 1 else parts[0]]
        group = dist.group.WORLD
        if omitted == "the reduction of amax":
            group = [dist.new_group([rank]) for rank in range(comm.mesh.size)][comm.rank]
        quantize_master_weights(
            [weight], [shard], [None if shard is None else start], group, fragments, manual_post_all_gather_processing=True
        )
        assert weight.get_high_precision_init_val() is None
        for index, name in enumerate(names):
            if in_shards:
                setattr(weight, name, buffers[index].view(getattr(weight, name).shape))
            if omitted != "the gather" and not (omitted == "the gather of columns" and index):
                gather(getattr(weight, name), cuts, packed)
        if omitted != "post-processing":
            if hasattr(weight, "_reset_caches"):
                weight._reset_caches()
            post_all_gather_processing(weight)

        if recipe_name == "delayed":  # the scale is the last step's, and amax is what the cast saw
            amax = weight._quantizer.amax.clone()
            weight._quantizer.amax.zero_()
        quantizer = expected._get_quantizer().copy()
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.update_quantized(main.to(torch.bfloat16).reshape(SHAPE), expected)
        different = [name for name in (*names, *SCALES, *DERIVED) if not same(weight, expected, name)]
        if recipe_name == "delayed" and not torch.equal(amax.reshape(-1), quantizer.amax.reshape(-1)):
            different.append("amax")
        x = random(128, 256, seed=9)
        (y, dx, _), (wanted_y, wanted_dx, _) = run(te, linear, x, recipe), run(te, whole, x, recipe)
        return different, distance(y, wanted_y), distance(dx, wanted_dx)


def same(weight, expected, name):
    """Return whether two weights have equal buffers of a name, but for the padding of scales."""
    one, other = getattr(weight, name, None), getattr(expected, name, None)
    if one is None or other is None:
        return one is other
    if type(weight).__name__ == "Float8BlockwiseQTensor" and "scale" in name:
        rows, columns = (-(-size // 128) for size in (SHAPE if "row" in name else SHAPE[::-1]))
        one, other = one[:rows, :columns], other[:rows, :columns]
    return torch.equal(one, other)
