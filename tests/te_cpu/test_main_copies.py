"""Ranks write quantized weights back from shards of main copies, with the bits of quantizing the whole, or omit a part.

The work is TransformerEngine's ``quantize_master_weights`` and ``post_all_gather_processing``, and a gather between the two.
"""

import math

import pytest
import torch
import torch.distributed as dist

import fsharp as fs
from tests import te_cpu
from tests.te_cpu import write_back
from tests.te_cpu.ranks import processes
from tests.te_cpu.recipes import RECIPES
from tests.te_cpu.write_back import CUTS

OMISSIONS = {  # recipe and what is left out: errors of the output and of the gradient of the input, about
    ("current", "the reduction of amax"): (0.37, 0.58),
    ("current", "the gather"): (0.13, 0.20),
    ("current", "post-processing"): (0, 0.24),
    ("delayed", "post-processing"): (0, 1.0),
    ("block", "the gather"): (math.nan, math.nan),
    ("block", "post-processing"): (0, 0.55),
    ("mxfp8", "the reduction of amax"): (0.7, 0.6),
    ("mxfp8", "the gather of columns"): (0, 0.27),
    ("nvfp4", "the reduction of amax"): (0.7, 0.6),
    ("nvfp4", "the gather"): (0.2, 0.2),
    ("nvfp4", "post-processing"): (0, 0.3),
}


@pytest.mark.parametrize("cuts", [pytest.param(cuts, marks=pytest.mark.deep) if i % 2 else cuts for i, cuts in enumerate(CUTS)])
def test_write_back_has_the_bits_of_the_whole(cuts):
    def every_recipe(comm):
        return {
            (recipe, in_shards): write_back.step(comm, recipe, CUTS[cuts], in_shards=in_shards)
            for recipe in RECIPES
            for in_shards in (False, True)
        }

    for results in processes(fs.Mesh({"dp": len(CUTS[cuts]) - 1}), every_recipe):
        for case, result in results.items():
            assert result == ([], 0, 0), case


@pytest.fixture(scope="module")
def after_omissions():
    def every_omission(comm):
        return {
            case: write_back.step(comm, case[0], CUTS["two"], in_shards=False, omitted=case[1])
            for case in (*OMISSIONS, ("delayed", "the reduction of amax"))
        }

    return processes(fs.Mesh({"dp": 2}), every_omission)


@pytest.mark.parametrize("case", OMISSIONS, ids=" without ".join)
def test_an_omission_shows(after_omissions, case):
    for _, *errors in (results[case] for results in after_omissions):
        for error, about in zip(errors, OMISSIONS[case]):
            if about == 0:
                assert error == 0
            elif math.isnan(about):
                assert math.isnan(error)
            else:
                assert about / 3 < error < about * 3


def test_delayed_scaling_without_the_reduction_shows_in_amax_alone(after_omissions):
    case = ("delayed", "the reduction of amax")
    assert [results[case] for results in after_omissions] == [(["amax"], 0, 0), ([], 0, 0)]


def test_quantizers_take_the_largest_amax_of_a_group():
    def run(comm):
        te = te_cpu.load()
        options = {"with_amax_reduction": True, "amax_reduction_group": dist.group.WORLD}
        own = torch.full((32, 32), 1.0 + comm.rank)
        with te_cpu.architecture(9, 0):
            quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cpu"), **options)
            quantizer.force_pow_2_scales = True
            largest = [float(quantizer(own)._scale_inv)]
        with te_cpu.architecture(10, 0):
            quantized = te.NVFP4Quantizer(**options)(own)
            return [*largest, float(quantized._amax_rowwise), float(quantized._amax_columnwise)]

    assert processes(fs.Mesh({"dp": 2}), run) == [[2.0**-7, 2.0, 2.0]] * 2


def test_block_scaling_in_a_buffer_of_the_shard_alone_is_refused(hopper):
    import transformer_engine_torch as tex

    shard, scale = torch.ones(1000, dtype=torch.bfloat16), torch.ones(3, 2)
    with pytest.raises(RuntimeError, match="outside of its buffer: let the shard be a view of a buffer of the whole tensor"):
        tex.fp8_block_scaling_partial_cast(
            shard, torch.zeros(1000, dtype=torch.uint8), scale, 384, 256, 500, 128, tex.DType.kFloat8E4M3
        )
    whole = torch.zeros(384 * 256, dtype=torch.uint8)
    tex.fp8_block_scaling_partial_cast(shard, whole[500:1500], scale, 384, 256, 500, 128, tex.DType.kFloat8E4M3)
    assert whole[500:1500].unique().tolist() == [0x38]  # one, in E4M3
    assert whole[: 16 * 256].unique().tolist() == [0x38, 0x7F]  # the strips of 16 x 128 that the shard touches: NaN around it
    assert not whole[16 * 256 :].any()
