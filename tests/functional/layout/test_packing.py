import sys
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.functional.layout.packing import pack


def is_legal(offset, size, atom, capacity):
    """Every boundary strictly inside the leaf is a whole number of atoms from its start."""
    first = (offset // capacity + 1) * capacity
    return all((cut - offset) % atom == 0 for cut in range(first, offset + size, capacity))


def place_by_trying(leaves, capacity, num_parts):
    """The placement order of pack(), element by element: larger atoms first, each at the first legal free offset."""
    total, taken, offsets = capacity * num_parts, set(), {}
    for i in sorted(range(len(leaves)), key=lambda i: (-leaves[i][1], i)):
        size, atom = leaves[i]
        for offset in range(total - size + 1):
            if taken.isdisjoint(range(offset, offset + size)) and is_legal(offset, size, atom, capacity):
                offsets[i] = offset
                taken.update(range(offset, offset + size))
                break
        else:
            return None
    return offsets


ATOMS = [fs.layouts.ElementAtom(), *(fs.layouts.RowsAtom(n) for n in (1, 2, 4)), fs.layouts.LeafAtom()]


@st.composite
def leaf_lists(draw, max_rows=9, max_width=6, max_leaves=5):
    leaves = []
    for _ in range(draw(st.integers(0, max_leaves))):
        shape = (draw(st.integers(0, max_rows)), draw(st.integers(1, max_width)))
        atom = draw(st.sampled_from(ATOMS))
        leaves.append((shape[0] * shape[1], atom.size(shape)))
    return leaves


def check(leaves, num_parts):
    packing = pack(tuple(s for s, _ in leaves), tuple(a for _, a in leaves), num_parts)
    runs = sorted((offset, offset + size) for offset, (size, _) in zip(packing.offsets, leaves, strict=True) if size)
    assert all(end <= start for (_, end), (start, _) in pairwise(runs)), "leaves do not overlap"
    assert all(start >= 0 and end <= packing.capacity * num_parts for start, end in runs)
    for offset, (size, atom) in zip(packing.offsets, leaves, strict=True):
        assert not size or is_legal(offset, size, atom, packing.capacity)
    return packing


@given(leaf_lists(max_rows=40, max_width=12, max_leaves=10), st.integers(1, 64))
def test_no_atom_is_cut(leaves, num_parts):
    check(leaves, num_parts)


@given(leaf_lists(), st.integers(1, 7))
def test_capacity_is_the_least_that_admits_the_placement_order(leaves, num_parts):
    packing = check(leaves, num_parts)
    stored = [(size, atom) for size, atom in leaves if size]
    if not stored:
        assert packing.capacity == 0
        return
    lowest = -(-sum(size for size, _ in stored) // num_parts)
    least = next(c for c in count(lowest) if place_by_trying(stored, c, num_parts) is not None)
    assert packing.capacity == least
    offsets = [offset for offset, (size, _) in zip(packing.offsets, leaves, strict=True) if size]
    assert dict(enumerate(offsets)) == place_by_trying(stored, least, num_parts)


@given(st.lists(st.integers(0, 10**12), max_size=20), st.integers(1, 10**6))
def test_elements_waste_less_than_one_per_part(sizes, num_parts):
    packing = pack(tuple(sizes), (1,) * len(sizes), num_parts)
    assert packing.capacity == -(-sum(sizes) // num_parts)
    ends = [offset + size for offset, size in zip(packing.offsets, sizes, strict=True) if size]
    assert [o for o, s in zip(packing.offsets, sizes, strict=True) if s] == [0, *ends[:-1]][: len(ends)], "no gaps"


def test_small_leaves_fill_the_gaps_of_whole_ones():
    packing = pack((9, 1, 6, 5), (1, 1, 6, 5), 3)
    assert (packing.offsets, packing.capacity) == ((12, 6, 0, 7), 7), "no padding at all"


@pytest.mark.parametrize(
    ("sizes", "atoms"), [((40 * 64, 17 * 64, 64), (64, 64, 1)), ((7 * 48, 96 * 48, 5), (48, 96 * 48, 1)), ((10**9 + 7,), (1,))]
)
def test_cost_does_not_grow_with_the_number_of_parts(sizes, atoms):
    def calls(num_parts):
        total = 0

        def tracer(frame, event, arg):
            nonlocal total
            total += event == "line"
            return tracer

        pack.cache_clear()
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            pack(sizes, atoms, num_parts)
        finally:
            sys.settrace(before)
        return total

    assert calls(1 << 30) <= 2 * calls(256)


def test_many_candidates_end_in_a_search_that_is_still_legal_and_close():
    # Two atoms without a common divisor: capacities have to be a multiple of both for the long leaves.
    leaves = [(4099 * 40, 4099), (4093 * 40, 4093), (13, 1)]
    packing = check(leaves, 16)
    assert packing.capacity * 16 >= sum(size for size, _ in leaves)
    assert packing.capacity <= 2 * sum(size for size, _ in leaves)


@pytest.mark.parametrize(
    ("atom", "shape", "size", "text"),
    [
        (fs.layouts.ElementAtom(), (3, 4), 1, "element"),
        (fs.layouts.RowsAtom(1), (3, 4), 4, "row"),
        (fs.layouts.RowsAtom(2), (3, 4), 8, "2 rows"),
        (fs.layouts.RowsAtom(9), (3, 4), 12, "9 rows"),
        (fs.layouts.RowsAtom(2), (), 1, "2 rows"),
        (fs.layouts.RowsAtom(2), (0, 4), 4, "2 rows"),
        (fs.layouts.RowsAtom(1), (5,), 1, "row"),
        (fs.layouts.LeafAtom(), (3, 4), 12, "whole tensor"),
        (fs.layouts.LeafAtom(), (), 1, "whole tensor"),
    ],
)
def test_sizes_of_atoms(atom, shape, size, text):
    assert (atom.size(shape), str(atom)) == (size, text)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_rows_takes_a_positive_integer(n):
    with pytest.raises(ValueError, match=f"n is {n!r}, expected an integer of at least 1"):
        fs.layouts.RowsAtom(n)


@pytest.mark.parametrize("atom", [fs.layouts.RowsAtom(1), fs.layouts.RowsAtom(3), fs.layouts.LeafAtom()])
def test_rows_stay_on_one_rank_in_every_place(atom):
    tree = {"w": torch.empty(11, 5), "v": torch.empty(4, 7), "b": torch.empty(3)}
    layout = fs.plan(tree, fs.Mesh({"o": 2, "i": 3}), fs.hfsdp("o", "i"), atoms=atom)
    unit = layout[""]
    for place in (unit.strategy.params, unit.strategy.optim, unit.strategy.full):
        for rank in range(6):
            for span in unit.leaf_spans(0, place, rank):
                block = atom.size(span.leaf.shape)
                assert span.first % block == 0
                assert span.last % block == 0 or span.last == span.leaf.numel
