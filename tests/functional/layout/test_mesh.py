import math
import re

import pytest
from hypothesis import given, strategies as st

import fsharp as fs
from fsharp.errors import MeshError
from fsharp.testing.generate import meshes

three_d = st.lists(st.integers(1, 4), max_size=3).map(lambda sizes: fs.Mesh(zip("xyz", sizes, strict=False)))
any_mesh = st.one_of(meshes(), three_d)


@given(any_mesh)
def test_rank_and_coords_are_inverse(mesh):
    seen = [mesh.coords(rank) for rank in range(mesh.size)]
    assert seen == sorted(set(seen)), "ranks are in lexicographic order of coordinates, each once"
    assert [mesh.rank(coords) for coords in seen] == list(range(mesh.size))
    assert mesh.size == math.prod(mesh.shape)
    for rank, coords in enumerate(seen):
        assert tuple(mesh.coord(axis, rank) for axis in mesh.names) == coords


@given(any_mesh)
def test_groups_partition_the_ranks(mesh):
    for i, axis in enumerate(mesh.names):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert [mesh.coord(axis, rank) for rank in group] == list(range(mesh.axis_size(axis)))
            others = {mesh.coords(rank)[:i] + mesh.coords(rank)[i + 1 :] for rank in group}
            assert len(others) == 1
            assert all(mesh.group(axis, rank) == group for rank in group)


def test_last_axis_varies_fastest():
    mesh = fs.Mesh({"outer": 2, "inner": 3})
    assert [mesh.coords(r) for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.groups("outer") == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups("inner") == ((0, 1, 2), (3, 4, 5))


def test_mesh_is_a_value():
    a, b = fs.Mesh({"x": 2, "y": 1}), fs.Mesh([("x", 2), ("y", 1)])
    assert (a, hash(a), repr(a)) == (b, hash(b), "Mesh(x=2, y=1)")
    assert a != fs.Mesh({"y": 1, "x": 2}), "the order of axes counts"
    assert (fs.Mesh({}).size, fs.Mesh({}).coords(0)) == (1, ())
    with pytest.raises(AttributeError, match="axes"):
        a.axes = ()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fs.Mesh({"": 2}), "non-empty strings, got ''"),
        (lambda: fs.Mesh([(3, 2)]), "non-empty strings, got 3"),
        (lambda: fs.Mesh({"dp": 0}), "axis 'dp' has size 0"),
        (lambda: fs.Mesh({"dp": -1}), "axis 'dp' has size -1"),
        (lambda: fs.Mesh({"dp": True}), "axis 'dp' has size True"),
        (lambda: fs.Mesh({"dp": 2.0}), "axis 'dp' has size 2.0"),
        (lambda: fs.Mesh([("dp", 2), ("dp", 3)]), "axis names repeat: ['dp', 'dp']"),
        (lambda: fs.Mesh({"dp": 2}).axis_size("tp"), "unknown mesh axis 'tp': Mesh(dp=2) has ['dp']"),
        (lambda: fs.Mesh({"dp": 2}).group("tp", 0), "unknown mesh axis 'tp'"),
        (lambda: fs.Mesh({"dp": 2}).coord("tp", 0), "unknown mesh axis 'tp'"),
        (lambda: fs.Mesh({"dp": 2}).coords(2), "rank 2 is outside Mesh(dp=2), whose ranks are 0 to 1"),
        (lambda: fs.Mesh({"dp": 2}).coords(-1), "rank -1 is outside"),
        (lambda: fs.Mesh({"dp": 2}).rank([2]), "coordinates (2,) are outside Mesh(dp=2)"),
        (lambda: fs.Mesh({"dp": 2}).rank([0, 0]), "coordinates (0, 0) are outside Mesh(dp=2)"),
        (lambda: fs.Mesh({"a": 2, "b": 3}).check_world_size(8), "8 processes cannot form Mesh(a=2, b=3), which has 6 ranks"),
        (lambda: fs.SingleComm(fs.Mesh({"dp": 4})), "Mesh(dp=4) has 4 ranks"),
        (lambda: fs.SingleComm().all_gather(None, "tp"), "unknown mesh axis 'tp'"),
    ],
)
def test_bad_meshes_are_refused(make, text):
    with pytest.raises(MeshError, match=re.escape(text)):
        make()


def test_fitting_world_size_is_accepted():
    fs.Mesh({"a": 2, "b": 3}).check_world_size(6)
