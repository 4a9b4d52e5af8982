"""fs.formats.hadamard: rotated blocks arrive within the bound that is stated, outliers do less harm, and nothing overflows."""

import math

import pytest
import torch
from hypothesis import example, given, strategies as st

import fsharp as fs
from fsharp.errors import FsharpError, LayoutError
from fsharp.formats import hadamard, mxfp4, mxfp8, mxfp8_e5m2, mxint4, mxint8
from fsharp.functional.formats import microscaling
from tests.functional.layout.test_formats import LEAST, OF_LARGEST, RELATIVE, finite, numbers as any_numbers
from tests.ranks import on_ranks
from tests.scheduling import few_examples

BASES = [mxint4, mxint8, mxfp4, mxfp8, mxfp8_e5m2]
ROTATED = [hadamard(base, size) for base in BASES for size in (2, 16, 32, 64)]
# Two sizes of each format, and two formats of each size; make test-all has the others.
each_format = pytest.mark.parametrize(
    "form", [pytest.param(x, id=x.name, marks=[pytest.mark.deep] * ((i + i // 4) % 2)) for i, x in enumerate(ROTATED)]
)


def matrix(size):
    """By Sylvester's construction, in float64."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


def size_and_base(form):
    size, base = form.name.removeprefix("hadamard").split("_", 1)
    return int(size), next(each for each in BASES if each.name == base)


@each_format
@few_examples
@given(data=st.data())
def test_values_arrive_within_the_bound_that_is_stated(form, data):
    size, base = size_and_base(form)
    numbers = data.draw(
        st.sampled_from(
            [any_numbers, finite, st.floats(-1, 1, width=32), st.sampled_from([0.0, 1e-45, -1e-40, 3.4028234e38, 1.0])]
        )
    )
    x = torch.tensor(data.draw(st.lists(numbers, min_size=form.block, max_size=form.block)))
    found = form.load(form.store(x, len(x)), len(x), torch.float32)
    special, lost = (
        (~x.isfinite()).view(-1, n).any(1, keepdim=True).expand(-1, n).reshape(-1) for n in (size, max(size, base.block))
    )
    assert torch.equal(~found.isfinite(), special)
    x, found = x.masked_fill(lost, 0.0), found.masked_fill(lost, 0.0)
    rotated = (x.double().view(-1, size) @ matrix(size) / size).view(-1, base.block)
    most = rotated.abs().amax(1, keepdim=True)
    of_number = torch.maximum(rotated.abs() * RELATIVE.get(base.name, 0.0), most * OF_LARGEST[base.name]) + LEAST
    bound = of_number.view(-1, size).sum(1, keepdim=True)
    slack = 1e-5 * x.view(-1, size).abs().double().amax(1, keepdim=True) + 2.0**-140
    assert ((found.double() - x.double()).abs().view(-1, size) <= bound * (1 + 1e-5) + slack).all()


@each_format
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_not_finite(form, special):
    size, _ = size_and_base(form)
    x = torch.linspace(-1, 1, 4 * form.block)
    x[form.block + 1] = special
    found = form.load(form.store(x, 2 * form.block), 2 * form.block, torch.float32)
    is_near = torch.arange(len(x)) // size == (form.block + 1) // size
    assert torch.equal(~found.isfinite(), is_near)


@pytest.mark.parametrize("base", [mxint4, mxint8], ids=lambda form: form.name)
@given(x=st.lists(st.floats(-1e6, 1e6, width=32), min_size=64, max_size=64), size=st.sampled_from([2, 8, 16, 32]))
@example(x=[3.4028234663852886e38] * 64, size=32)
@example(x=[1e-45] * 64, size=32)
def test_encoding_decoded_integers_gives_the_same_bytes(base, x, size):
    form = hadamard(base, size)
    stored = form.store(torch.tensor(x), 64)
    assert torch.equal(form.store(form.load(stored, 64, torch.float32), 64), stored)


@pytest.mark.parametrize("form", ROTATED, ids=lambda form: form.name)
def test_formats_that_give_other_bytes_again_are_refused_for_parameters(form):
    """Zeros of floats lose their sign. Blocks of 32 with scales that are far apart lose low bits in a sum of 64."""
    size, base = size_and_base(form)
    noise = torch.Generator().manual_seed(0)
    sparse = torch.randn(512, 64, generator=noise) * (torch.rand(512, 64, generator=noise) < 0.1)
    alike = torch.randn(512, 32, generator=noise)
    x = torch.cat([sparse.view(-1), torch.cat([alike, alike * (1 + 1e-6)], 1).view(-1)])
    stored = form.store(x, len(x))
    is_same = torch.equal(form.store(form.load(stored, len(x), torch.float32), len(x)), stored)
    assert is_same == (base in (mxint4, mxint8) and size <= 32)
    if is_same:
        assert fs.Precision(stored=form).stored is form
    else:
        with pytest.raises(LayoutError, match=rf"stored is '{form.name}', which gives other bytes"):
            fs.Precision(stored=form)


@pytest.mark.parametrize("base", [mxint4, mxfp4], ids=lambda form: form.name)
def test_an_outlier_does_less_harm(base):
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 10
    x, errors = x.view(-1), []
    for form in (base, hadamard(base)):
        errors.append((form.load(form.store(x, len(x)), len(x), torch.float32) - x).square().mean())
    assert errors[1] < errors[0] / 2


@each_format
def test_long_buffers_have_the_bytes_of_their_parts(form, monkeypatch):
    """And the bytes of a format as many: also with strides that a piece of the buffer alone has."""
    monkeypatch.setattr(microscaling, "_BLOCKS_IN_CPU_CACHE", 1 << 9)
    part = 8 * form.block
    x = torch.randn(part * (25_000 // part), generator=torch.Generator().manual_seed(0))
    stored = form.store(x, part)
    assert torch.equal(stored, torch.cat([form.store(each, part) for each in x.split(part)]))
    found = torch.cat([form.load(each, part, torch.float32) for each in stored.split(form.size(part))])
    assert torch.equal(form.load(stored, part, torch.float32), found)
    _, base = size_and_base(form)
    assert form.size(1 << 14) == base.size(1 << 14)


@pytest.mark.parametrize("wire", [hadamard(mxint4), hadamard(mxint8, 64)], ids=lambda form: form.name)
@on_ranks(fs.Mesh({"dp": 2}))
def test_an_overflow_of_one_rank_arrives(comm, wire):
    layout = fs.plan({"a": torch.zeros(200)}, comm.mesh, fs.zero3("dp"), precision=fs.Precision(wire=wire))
    grads = {"a": torch.ones(200)}
    if comm.rank:
        grads["a"][3] = math.inf
    own = fs.shard_for(grads, layout, 0, place=layout.units[0].strategy.full.cotangent_place)
    assert fs.resilience.find_nonfinite(None, fs.reduce_scatter(own, comm=comm), comm=comm).leaf == "a"


def test_it_is_one_format_by_its_arguments():
    assert hadamard(mxint4) is hadamard(mxint4, 32)
    layout = fs.plan({"a": torch.zeros(9)}, fs.Mesh({"dp": 2}), fs.zero1("dp"), precision=fs.Precision(wire=hadamard(mxint4)))
    assert fs.Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("main", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_given", [True, False])
def test_main_copies_in_16_bits_do_not_hold_rotated_mxint8(main, is_given):
    """So such parameters are refused; those in a format whose values 16 bits hold, and frozen ones, are not."""
    params = {"a": torch.zeros(64, dtype=torch.float32 if is_given else main)}

    def plan(form, main=main if is_given else None, **options):
        precision = fs.Precision(main=main, stored=form)
        return fs.plan(params, fs.Mesh({"dp": 2}), fs.zero3("dp"), precision=precision, **options)

    with pytest.raises(LayoutError, match=r"'a' would be stored in 'hadamard32_mxint8' with a main copy in torch\..*float16"):
        plan(hadamard(mxint8))
    for layout in (plan(hadamard(mxint8), torch.float32), plan(hadamard(mxint4)), plan(mxint8)):
        assert layout.units[0].groups[0].dtypes.format is not None
    assert plan(hadamard(mxint8), frozen="a").units[0].groups[0].dtypes.format is None


def test_bfloat16_holds_what_is_decoded_from_rotated_mxint4():
    x = torch.randn(32 * 4096, generator=torch.Generator().manual_seed(0))
    for form, is_equal in ((hadamard(mxint4), True), (hadamard(mxint8), False)):
        stored = form.store(x, len(x))
        again = form.store(form.load(stored, len(x), torch.bfloat16), len(x))
        assert torch.equal(again, stored) == is_equal


REFUSED = {
    "a dtype": lambda: hadamard(torch.bfloat16),
    "a plain format": lambda: hadamard(fs.Precision().resolve(torch.float32).wire),
    "whole leaves": lambda: hadamard(fs.formats.nvfp4),
    "no power of two": lambda: hadamard(mxint4, 24),
    "one": lambda: hadamard(mxint4, 1),
    "no integer": lambda: hadamard(mxint4, 32.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated_is_refused(name):
    with pytest.raises(FsharpError, match=r"^hadamard\(\): (format|size) is .*expected"):
        REFUSED[name]()


@pytest.mark.parametrize("name", ["wire", "an axis' wire"])
def test_gradients_do_not_travel_in_formats_of_whole_leaves(name):
    with pytest.raises(LayoutError, match="wire is 'nvfp4', which encodes whole leaves"):
        fs.Precision(wire=fs.formats.nvfp4 if name == "wire" else {"outer": fs.formats.nvfp4})
