"""Replicas: hosts may lose their memory, jobs may change their size, and what is restored is what was kept, to the bit."""

import errno
import itertools
import logging
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial

import optree
import pytest
import torch

import fsharp as fs
from fsharp.checkpoint import catalog, replicas as replicas_module
from fsharp.checkpoint.manifest import MANIFEST_NAME
from fsharp.checkpoint.peers import FirstErrorKeeper, ReadRequest, exchange_requested_bytes
from fsharp.errors import AgreementError, CheckpointError, CommError
from fsharp.testing import processes, simulate
from tests.checkpoint.refusing import refusing
from tests.gpt_like import loss_fn, make_batches, make_params

FOUR, THREE = fs.Mesh({"dp": 4}), fs.Mesh({"dp": 3})
MIXED = fs.Precision(compute=torch.bfloat16, main=torch.float32)
TX = fs.optim.adamw(1e-2)


def state_of(comm, strategy, params=None):
    layout = fs.plan(params or make_params(), comm.mesh, strategy, units="layers.*", precision=MIXED)
    return fs.init_state(TX, fs.shard(params or make_params(), layout, comm, place="optim"), comm=comm)


def trained(state, comm, steps):
    for seed in steps:
        batch = {k: x.chunk(comm.mesh.size)[comm.rank] for k, x in make_batches(6, 12)[seed].items()}
        state, _ = fs.train_step(loss_fn, TX)(state, batch, comm)
    return state


def whole(state, comm):
    return [x for x in optree.tree_leaves(fs.full_tree(state._replace(made_by=None), comm=comm)) if isinstance(x, torch.Tensor)]


def same(a, b):
    return len(a) == len(b) > 0 and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def zeros(tree):
    return optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, tree)


def host(root, number):
    return f"{root}/host-{number}"


def keep(comm, *, root, copies=1, steps=1):
    """Ranks that are hosts of their own keep a state after some steps of training."""
    state = state_of(comm, fs.zero3(*comm.mesh.names))
    with fs.checkpoint.Replicas(host(root, comm.rank), comm, copies=copies) as replicas:
        for step in range(1, steps + 1):
            state = trained(state, comm, [step]) if comm.mesh.names == ("dp",) else state
            replicas.refresh(state, step=step)
    return whole(state, comm)


def without(root, case, lost):
    """A copy of what hosts hold, some of which have lost their memory."""
    if not os.path.exists(f"{root}/{case}"):
        for number in range(4):
            if number not in lost:
                shutil.copytree(host(root, number), host(f"{root}/{case}", number))
    return f"{root}/{case}"


def restored(comm, folder, strategy, **options):
    with fs.checkpoint.Replicas(folder, comm, copies=1, **options) as replicas:
        state = replicas.restore(zeros(state_of(comm, strategy)))
        assert replicas.latest() == state.step
    return state


@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_any_hosts_as_many_as_copies_may_be_lost(tmp_path, copies):
    root, cases = str(tmp_path), list(itertools.combinations(range(4), copies))
    kept = processes(FOUR, partial(keep, root=root, copies=copies))[0]
    for n, lost in itertools.product((4, 3), cases):
        without(root, f"{n}-{lost}", lost)

    def restart(comm):
        """Ranks on the hosts that are left come first, and on hosts without memory of the run afterwards."""
        for i, lost in enumerate(cases):  # on 4 ranks under one strategy, on 3 under the other
            strategy = (fs.zero3, fs.zero1)[(i + comm.mesh.size) % 2]
            hosts = [*(number for number in range(4) if number not in lost), *lost]
            folder = host(f"{root}/{comm.mesh.size}-{lost}", hosts[comm.rank])
            assert same(whole(restored(comm, folder, strategy("dp")), comm), kept)

    processes(FOUR, restart)
    processes(THREE, restart)


def test_training_goes_on_as_if_nothing_had_been(tmp_path):
    root = str(tmp_path)

    def run(comm):
        state = trained(state_of(comm, fs.zero3("dp")), comm, range(3))
        with fs.checkpoint.Replicas(host(root, comm.rank), comm) as replicas:
            replicas.refresh(state, step=3)
        return whole(trained(state, comm, range(3, 6)), comm)

    alone = processes(FOUR, run)
    shutil.rmtree(host(root, 2))
    for strategy in (fs.zero3, fs.zero1):

        def go_on(comm, strategy=strategy):
            state = restored(comm, host(root, comm.rank), strategy("dp"))
            return whole(trained(state, comm, range(3, 6)), comm)

        assert all(same(a, b) for a, b in zip(alone, processes(FOUR, go_on), strict=True))


def test_one_rank_alone_predicts_the_bytes_of_an_optimizer(tmp_path):
    """The prediction of rank 0 waited for the other ranks."""
    root = str(tmp_path)

    def run(comm):
        model = fs.shard_module(
            torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)), mesh=comm, strategy=fs.zero3("dp")
        )
        tree = {"model": model, "optimizer": fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), "seen": 3}
        found = []
        with fs.checkpoint.Replicas(host(root, comm.rank), comm, copies=1, domain_size=1) as replicas:
            for step in range(2):
                predicted = replicas.refresh_nbytes(tree) if comm.rank == step else None
                replicas.refresh(tree, step=step)
                replicas.wait()
                (folder,) = (each for each in os.scandir(host(root, comm.rank)) if each.name.startswith("step-"))
                held = sum(each.stat().st_size for each in os.scandir(folder) if each.name != MANIFEST_NAME)
                found.append(predicted is None or predicted.held == held)
                model(torch.ones(2, 5)).sum().backward()
                tree["optimizer"].step()
                tree["optimizer"].zero_grad()
        return found

    assert processes(fs.Mesh({"dp": 2}), run) == [[True, True]] * 2


def test_bytes_are_those_that_were_predicted_and_no_more_are_restored(tmp_path):
    root = str(tmp_path)

    def run(comm, lost):
        state, sent = state_of(comm, fs.zero3("dp")), {}
        with fs.checkpoint.Replicas(host(root, comm.rank), comm, copies=2) as replicas:
            all_to_all = replicas._own.all_to_all

            def counted(x, to, source, *, label):
                sent[label.split()[0]] = sent.get(label.split()[0], 0) + len(x)
                return all_to_all(x, to, source, label=label)

            replicas._own.all_to_all = counted
            if lost:
                replicas.restore(zeros(state))
                return sent.get("restore()", 0), None, None
            for step in range(3):
                replicas.refresh(state, step=step)
                replicas.wait()
        (folder,) = (path for path in os.listdir(host(root, comm.rank)) if path.startswith("step-"))
        names = os.listdir(f"{host(root, comm.rank)}/{folder}")
        sizes = {name: os.path.getsize(f"{host(root, comm.rank)}/{folder}/{name}") for name in names if name != MANIFEST_NAME}
        copied = sum(x.numel() * x.element_size() for x in replicas._staged)
        assert sorted(sizes) == sorted(f"rank-{(comm.rank - j) % 4:05d}.safetensors" for j in range(3))
        assert replicas.refresh_nbytes(state) == fs.checkpoint.RefreshNbytes(
            sent["refresh()"] // 3, sum(sizes.values()), copied
        )
        assert replicas.refresh_nbytes(state).sent == 2 * sizes[f"rank-{comm.rank:05d}.safetensors"]
        return sizes

    sizes = {name: size for each in processes(FOUR, partial(run, lost=False)) for name, size in each.items()}
    shutil.rmtree(host(root, 1))
    sent = sum(nbytes for nbytes, _, _ in processes(FOUR, partial(run, lost=True)))
    assert 0 < sent - sizes["rank-00001.safetensors"] < 20_000, "its file, a manifest and requests, and nothing for the others"


def test_a_step_goes_on_while_a_refresh_is_under_way(tmp_path):
    root = str(tmp_path)

    def run(comm):
        import threading

        begin, write = threading.Event(), replicas_module.write_shard_files

        def waiting(*args):
            assert begin.wait(60)
            return write(*args)

        replicas_module.write_shard_files = waiting
        state = state_of(comm, fs.zero3("dp"))
        expected = whole(state, comm)
        with fs.checkpoint.Replicas(host(root, comm.rank), comm, root=f"{root}/disk") as replicas:
            replicas.refresh(state, step=0)
            state = trained(state, comm, range(2))  # collectives, and other values
            for x in optree.tree_leaves(state):
                x.fill_(-1) if isinstance(x, torch.Tensor) else None
            assert replicas.is_busy
            fs.checkpoint.Saver(f"{root}/disk", comm, background=False).save(state, step=1)  # the same root is no conflict
            begin.set()
            replicas.wait()
            assert same(whole(replicas.restore(zeros(state)), comm), whole(state, comm)), "which was saved later"
        with fs.checkpoint.Replicas(host(root, comm.rank), comm) as replicas:
            assert same(whole(replicas.restore(zeros(state)), comm), expected)

    processes(FOUR, run)


def test_hosts_of_several_ranks_and_other_meshes(tmp_path):
    """Ranks 0 and 1 share a host, 2 and 3 another one: either may be lost."""
    mesh = fs.Mesh({"outer": 2, "inner": 2})
    params = {"w": torch.arange(5000.0), "b": torch.arange(3.0)}

    def tree(comm, strategy):
        return {"params": fs.shard(params, fs.plan(params, comm.mesh, strategy), comm), "rng": torch.ones(2), "n": 3}

    def save(comm):
        with fs.checkpoint.Replicas(host(tmp_path, comm.rank // 2), comm, domain_size=2) as replicas:
            replicas.refresh(tree(comm, fs.hsdp("outer", "inner")), step=7)
        with pytest.raises(CheckpointError, match=r"copies is 2, expected at least 0 and less than the 2 hosts"):
            fs.checkpoint.Replicas(host(tmp_path, comm.rank // 2), comm, domain_size=2, copies=2)
        with pytest.raises(
            (AgreementError, CheckpointError), match=r"rank 1 does not see .*host-1 of rank 0.*domain_size is 2"
        ):
            fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm, domain_size=2)
        with pytest.raises((AgreementError, CheckpointError), match=r"rank 1 does not see .*absent-1 of rank 0.*was removed"):
            fs.checkpoint.Replicas(host(tmp_path, f"absent-{comm.rank}"), comm, domain_size=2)
        with pytest.raises((AgreementError, CheckpointError), match=r"host-0: in use. Each run, and each host of it"):
            fs.checkpoint.Replicas(host(tmp_path, comm.rank // 2), comm, domain_size=1)

    processes(mesh, save)
    manifest = fs.checkpoint.latest(host(tmp_path, 0)).manifest
    assert manifest.mesh == dict(mesh.axes)
    for lost in (0, 1):
        without(tmp_path, f"lost-{lost}", [lost, 2, 3])

    def restart(comm):
        for lost in (0, 1):
            folder = host(f"{tmp_path}/lost-{lost}", 1 - lost if comm.rank == 0 else f"new-{comm.rank}")
            with fs.checkpoint.Replicas(folder, comm) as replicas:
                found = replicas.restore(zeros(tree(comm, fs.zero1("dp"))))
            assert torch.equal(fs.full_tree(found["params"], comm=comm)["w"], params["w"])
            assert found["rng"].tolist() == [1, 1]
            assert found["n"] == 3

    processes(THREE, restart)


@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        pytest.param("write_shard_files", [1], marks=pytest.mark.deep),
        ("_exchange_copies", [1]),
        pytest.param("verify_written_file", [1], marks=pytest.mark.deep),
        ("write_manifest_and_publish", [1, 2]),  # 2 if all other hosts, which have all files of it, come as far
        pytest.param("names_last_saved_first", [2], marks=pytest.mark.deep),
    ],
)
def test_a_process_killed_in_a_refresh_leaves_a_whole_save_even_without_its_host(tmp_path, moment, steps):
    root = str(tmp_path)
    params = {"w": torch.arange(40_000.0)}

    def values(step):
        return {"w": params["w"] + step}

    def tree(comm, step):
        return fs.shard(values(step), fs.plan(params, comm.mesh, fs.zero3("dp")), comm)

    def run(comm):
        with fs.checkpoint.Replicas(host(root, comm.rank), comm) as replicas:
            replicas.refresh(tree(comm, 1), step=1)
            replicas.wait()
            of = replicas if moment == "_exchange_copies" else replicas_module

            def kill(*args):
                os.kill(os.getpid(), signal.SIGKILL)

            if comm.rank == 2:
                setattr(of, moment, kill)
            replicas.refresh(tree(comm, 2), step=2)
            replicas.wait()

    with pytest.raises(CommError, match=r"ranks \[.*2.*\] failed"):
        processes(FOUR, run)
    without(root, "lost", [2])

    def restart(comm):
        found = []
        for folder in (host(root, comm.rank), host(f"{root}/lost", comm.rank)):
            with fs.checkpoint.Replicas(folder, comm) as replicas:
                step = replicas.latest()
                got = fs.full_tree(replicas.restore(tree(comm, 0)), comm=comm)
                assert torch.equal(got["w"], values(step)["w"])
                replicas.refresh(tree(comm, 3), step=3)
                replicas.wait()
                assert len(os.listdir(folder)) == 2, "the save and the claim, and no debris"
                found.append(step)
        return found

    assert all(step in steps for found in processes(FOUR, restart) for step in found)


def test_a_host_whose_folder_is_full_is_heard_of_and_what_was_kept_stays(tmp_path):
    root = str(tmp_path)

    def run(comm):
        from fsharp.checkpoint import storage

        params = {"x": torch.ones(50_000)}
        state, write = fs.shard(params, fs.plan(params, comm.mesh, fs.zero3("dp")), comm), storage.os.write
        said = []
        with fs.checkpoint.Replicas(host(root, comm.rank), comm) as replicas:

            def refresh(step, full_after=99):
                writes = itertools.count()

                def failing(file, data):
                    if next(writes) >= full_after:
                        raise OSError(28, "No space left on device")
                    return write(file, data)

                storage.os.write = failing if comm.rank == 1 else write
                replicas.refresh(state, step=step)
                try:
                    replicas.wait()
                except CheckpointError as error:
                    said.append(str(error))
                storage.os.write = write
                return replicas.latest()

            assert refresh(step=1) == 1
            assert refresh(step=2, full_after=1) == 1  # in its own file, after the header
            assert refresh(step=3, full_after=3) == 1  # in that of another one
            assert len(os.listdir(host(root, comm.rank))) == 2, "no debris"
            assert refresh(step=4, full_after=4) == 4  # in the manifest: other hosts have all files and manifests of their own
            if comm.rank == 3:
                storage.LocalStorage.free_nbytes = lambda self, folder: 1000
            assert refresh(step=5) == 4
            storage.LocalStorage.free_nbytes = lambda self, folder: None
            assert refresh(step=6) == 6  # another one may go well
            assert len(os.listdir(host(root, comm.rank))) == 2
        return said

    for said in processes(FOUR, run):
        full = "cannot be written: No space left on device"
        for text, expected in zip(
            said, (f"rank-00001.safetensors: {full}", full, full, "host-3: 1,000 bytes are free"), strict=True
        ):
            assert expected in text


def test_what_is_lost_is_named_and_what_is_on_disk_is_used_where_it_is_newer(tmp_path):
    root, disk = str(tmp_path), f"{tmp_path}/disk"

    def save(comm):
        with fs.checkpoint.Replicas(host(root, comm.rank), comm) as replicas:
            assert replicas.latest() is None
            with pytest.raises(CheckpointError, match=r"restore\(\): no host holds anything in .*; root is None"):
                replicas.restore({"n": 0})
            for step in (1, 2):
                replicas.refresh({"n": step, "own": fs.checkpoint.PerRank(torch.ones(3000))}, step=step)

    processes(FOUR, save)
    without(root, "lost", [1, 2])

    def restart(comm):
        like = {"n": 0, "own": fs.checkpoint.PerRank(torch.zeros(3000))}
        with fs.checkpoint.Replicas(host(f"{root}/lost", comm.rank), comm) as replicas:
            for call in (replicas.latest, partial(replicas.restore, like)):
                with pytest.raises(CheckpointError, match=r"(?s)step 2 +files of ranks \[1\] of 4 are on no host.*Give root="):
                    call()
        with (
            fs.checkpoint.Replicas(host(f"{root}/lost", comm.rank), comm, root=disk) as replicas,
            pytest.raises(CheckpointError, match=r"There is no checkpoint under .*disk"),
        ):
            replicas.latest()
        fs.checkpoint.save(disk, like | {"n": 10}, step=10, comm=comm)
        for folder in (f"{root}/lost", root):
            with fs.checkpoint.Replicas(host(folder, comm.rank), comm, root=disk) as replicas:
                assert replicas.latest() == 10
                assert replicas.restore(like)["n"] == 10
                replicas.refresh(like | {"n": 11}, step=11)
                assert replicas.latest() == 11
                assert replicas.restore(like)["n"] == 11

    processes(FOUR, restart)


def test_of_a_save_that_some_hosts_have_published_the_one_before_is_used(tmp_path):
    root = str(tmp_path)
    kept = processes(FOUR, partial(keep, root=root))[0]
    for number in range(4):
        shutil.copytree(host(root, number), host(f"{root}/before", number))
    processes(FOUR, partial(keep, root=root, steps=2))
    for number in (0, 1):
        (name,) = (name for name in os.listdir(host(root, number)) if name.startswith("step"))
        shutil.copytree(f"{host(root, number)}/{name}", f"{host(f'{root}/before', number)}/{name}")

    def restart(comm):
        assert same(whole(restored(comm, host(f"{root}/before", comm.rank), fs.zero3("dp")), comm), kept)

    processes(FOUR, restart)


def test_damage_is_named_with_its_host(tmp_path):
    root = str(tmp_path)
    processes(FOUR, partial(keep, root=root))
    shutil.rmtree(host(root, 1))
    (folder,) = (name for name in os.listdir(host(root, 2)) if name.startswith("step-"))

    def restart(comm):
        path = f"{host(root, 2)}/{folder}/rank-00001.safetensors"
        with open(path, "rb") as file:
            header, said = 8 + int.from_bytes(file.read(8), "little"), []
        for at in (0, 3, 20, header + 10, os.path.getsize(path) - 3):  # length of the header, twice; header, elements, table
            if comm.rank == 2:
                flip(path, at)
            with pytest.raises((CheckpointError, AgreementError)) as caught:
                restored(comm, host(root, comm.rank), fs.zero3("dp"))
            said.append(str(caught.value))
            if comm.rank == 2:
                flip(path, at)
        restored(comm, host(root, comm.rank), fs.zero3("dp"))
        return said

    for said in processes(FOUR, restart):
        for text in said[:1] + said[2:]:
            assert "on the host of rank 2" in text
            assert f"{folder}/rank-00001.safetensors" in text
            assert "damaged" in text
        assert "blocks of 4,096 bytes are damaged" in said[3]
        assert "files of ranks [1] of 4 are on no host" in said[1]


def test_a_copy_that_its_host_cannot_read_is_an_error_of_all_ranks_and_no_damage(tmp_path):
    root = str(tmp_path)
    (_, kept) = processes(fs.Mesh({"dp": 2}), partial(keep, root=root))

    def restart(comm):
        said = []
        for part in ("rank-00000", MANIFEST_NAME):
            broken = refusing(errno.EIO, part) if comm.rank == 1 else nullcontext()
            with broken, pytest.raises((CheckpointError, AgreementError)) as caught:
                restored(comm, host(root, comm.rank), fs.zero3("dp"))
            said.append(str(caught.value))
        assert same(whole(restored(comm, host(root, comm.rank), fs.zero3("dp")), comm), kept)
        return said

    for said in processes(fs.Mesh({"dp": 2}), restart):
        for text, part in zip(said, ("rank-00000.safetensors", MANIFEST_NAME), strict=True):
            assert "rank 1 says:" in text
            assert f"{part}: cannot be read: Input/output error" in text


def test_a_good_copy_of_another_host_is_used_and_then_what_is_on_disk(tmp_path):
    root, disk = str(tmp_path), f"{tmp_path}/disk"

    def tree(n):
        return {"n": n, "own": fs.checkpoint.PerRank(torch.full((3000,), float(n)))}

    def run(comm):
        own, said = host(root, comm.rank), []
        warned = logging.Handler()
        warned.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("fsharp").addHandler(warned)
        fs.checkpoint.save(disk, tree(6), step=6, comm=comm)
        on_disk = fs.checkpoint.save(disk, tree(7), step=7, comm=comm)
        with fs.checkpoint.Replicas(own, comm, copies=1, root=disk) as replicas:
            replicas.refresh(tree(8), step=8)
            replicas.wait()
            (folder,) = (name for name in os.listdir(own) if name.startswith("step-"))

            def damaged_by(rank, path):
                if comm.rank == rank:
                    flip(path, 6000)
                said.clear()
                got = replicas.restore(tree(0))
                assert got["own"].value.tolist() == [float(got["n"])] * 3000
                return got["n"], list(said)

            mine, other = f"{own}/{folder}/rank-00000.safetensors", f"{own}/{folder}/rank-00001.safetensors"
            first = damaged_by(0, mine)
            assert os.path.exists(f"{mine}.damaged") == (comm.rank == 0)
            assert damaged_by(0, other)[0] == 8  # of rank 1, which its host has as well
            second = damaged_by(1, mine)  # now no host has that of rank 0
            if comm.rank == 1:
                flip(f"{on_disk.path}/rank-00001.safetensors", 6000)
            third = damaged_by(None, mine)
            assert replicas.latest() == 6
            replicas.refresh(tree(9), step=9)
            return first, second, third, replicas.restore(tree(0))["n"]

    (first, second, third, last), (_, second_of_1, third_of_1, _) = processes(fs.Mesh({"dp": 2}), run)
    assert (first[0], second[0], third[0], last) == (8, 7, 6, 9)
    [text] = first[1]
    assert "rank-00000.safetensors on the host of rank 0 is damaged, set aside as" in text
    assert "1 blocks of 4,096 bytes are damaged" in text
    assert text.endswith("Used instead: what was saved of step 8 on hosts.")
    assert any("rank-00000.safetensors on the host of rank 1 is damaged" in text for text in second_of_1[1])
    assert third_of_1 == (6, [])  # that of the checkpoint is rank 0's to say
    assert any("is damaged, set aside as" in text and "step-0000000007" in text for text in third[1])


def test_a_rank_that_has_met_a_damaged_copy_still_answers_other_ranks(tmp_path):
    """Rank 1 meets damage of rank 0, and lacks a file. Rank 0 then asks rank 1 for this file, and for intact ones."""
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 64)

    def exchange(comm):
        keeper, got = FirstErrorKeeper(), {}

        def damaged(_):
            raise CheckpointError("the copy on the host of rank 0 is damaged")

        def receive(name):
            return lambda data: got.update({name: bytes(data.tolist())})

        wanted = {0: [ReadRequest(1, name, 0, 64, receive(name)) for name in ("a", "absent", "b")]}
        wanted[1] = [ReadRequest(0, "a", 0, 64, damaged)]
        with torch.device("meta"):  # the user's default
            exchange_requested_bytes(str(tmp_path), wanted.get(comm.rank, []), comm, keeper)
        if comm.rank == 1:
            with pytest.raises(CheckpointError, match=r"the copy on the host of rank 0 is damaged"):
                keeper.raise_if_failed()
        else:
            keeper.raise_if_failed()
        return got

    got = simulate(fs.Mesh({"ranks": 3}), exchange)[0]
    assert (got["a"], got["b"]) == (b"a" * 64, b"b" * 64)


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_refresh_that_is_sent_after_a_later_save_on_disk_is_older(tmp_path, monkeypatch):
    comm, saved, send = fs.SingleComm(), threading.Event(), fs.checkpoint.Replicas._exchange_copies
    monkeypatch.setattr(fs.checkpoint.Replicas, "_exchange_copies", lambda *args: (saved.wait(60), send(*args)))
    with fs.checkpoint.Replicas(tmp_path / "memory", comm, copies=0, root=tmp_path / "disk") as replicas:
        replicas.refresh({"n": 50}, step=50)
        fs.checkpoint.save(tmp_path / "disk", {"n": 52}, step=52, comm=comm)
        saved.set()
        assert replicas.latest() == 52
        assert replicas.restore({"n": 0}) == {"n": 52}
        replicas.refresh({"n": 53}, step=53)
        assert replicas.restore({"n": 0}) == {"n": 53}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("first", ["memory", "disk"])
def test_saves_in_memory_and_on_disk_have_one_order_whatever_clocks_do(tmp_path, monkeypatch, first, is_restarted):
    """Each save begins an hour earlier, by the clock, than the save before. They go to memory and to the disk in turn."""
    comm, clock = fs.SingleComm(), [5e9]
    monkeypatch.setattr(catalog.time, "time", lambda: clock[0])
    steps = [9, 2, 7, 3]
    for i, step in enumerate(steps):
        if is_restarted:
            monkeypatch.setattr(catalog, "_latest_times", {}, raising=False)
        with fs.checkpoint.Replicas(tmp_path / "memory", comm, copies=0, root=tmp_path / "disk") as replicas:
            assert replicas.latest() == (steps[i - 1] if i else None)
            if (i % 2 == 0) == (first == "memory"):
                replicas.refresh({"n": step}, step=step)
            else:
                fs.checkpoint.save(tmp_path / "disk", {"n": step}, step=step, comm=comm)
            assert replicas.latest() == step
            assert replicas.restore({"n": 0}) == {"n": step}
        clock[0] -= 3600


def test_only_the_clock_of_rank_0_counts_and_a_lost_host_takes_no_time_with_it(tmp_path, monkeypatch):
    """Rank 1's clock is ahead by a minute. Then host 0 is lost, and rank 0 is on a host whose clock is behind by an hour."""
    disk = tmp_path / "disk"

    def run(comm, ahead_s):
        real = time.time
        monkeypatch.setattr(catalog.time, "time", lambda: real() + ahead_s[comm.rank])
        with fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm, root=disk) as replicas:
            found = [replicas.latest()]
            for step in (1, 3):
                replicas.refresh({"n": step}, step=step)
                found.append(replicas.latest())
                fs.checkpoint.save(disk, {"n": step + 1}, step=step + 1, comm=comm)
                found.append(replicas.latest())
            replicas.refresh({"n": 5}, step=5)
            return [*found, replicas.restore({"n": 0})["n"]]

    def save(comm):
        with fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm, root=disk) as replicas:
            fs.checkpoint.save(disk, {"n": 6}, step=6, comm=comm)
            return replicas.latest(), replicas.restore({"n": 0})["n"]

    two = fs.Mesh({"dp": 2})
    assert processes(two, partial(run, ahead_s=(3600, 3660))) == [[None, 1, 2, 3, 4, 5]] * 2
    shutil.rmtree(host(tmp_path, 0))
    assert processes(two, save) == [(6, 6)] * 2


def test_one_process_and_ranks_without_process_groups(tmp_path):
    comm = fs.SingleComm()
    with fs.checkpoint.Replicas(tmp_path, comm, copies=0) as replicas:
        assert replicas.refresh_nbytes({"w": torch.ones(9)}).sent == 0
        for step in range(3):
            replicas.refresh({"w": torch.ones(9) * step}, step=step)
        with pytest.raises(CheckpointError, match=r"in use. Each run, and each host of it"):
            fs.checkpoint.Replicas(tmp_path, comm, copies=0)
    with pytest.raises(CheckpointError, match=r"closed. Make new ones"):
        replicas.refresh({"w": torch.ones(9)}, step=9)
    with fs.checkpoint.Replicas(tmp_path, comm, copies=0) as replicas:
        assert replicas.restore({"w": torch.zeros(9)})["w"].tolist() == [2.0] * 9
    with pytest.raises(CheckpointError, match=r"copies is 1, expected at least 0 and less than the 1 hosts"):
        fs.checkpoint.Replicas(tmp_path, comm)
    with pytest.raises(CheckpointError, match=r"domain_size is 0"):
        fs.checkpoint.Replicas(tmp_path, comm, copies=0, domain_size=0)
    with pytest.raises(CheckpointError, match=r"'s3://x/y' is a URL"):
        fs.checkpoint.Replicas("s3://x/y", comm, copies=0)

    def run(comm):
        with pytest.raises(CheckpointError, match="comm is ThreadComm, expected a Comm from connect"):
            fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm)

    simulate(fs.Mesh({"dp": 2}), run)


def test_ranks_that_differ_are_refused(tmp_path):
    def run(comm):
        with pytest.raises(AgreementError, match=r"copies, domain_size.*rank 0: 0, 1"):
            fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm, copies=comm.rank)
        with fs.checkpoint.Replicas(host(tmp_path, comm.rank), comm) as replicas:  # what was refused has let go of the folder
            with pytest.raises(AgreementError, match=r"refresh\(\).*\n.*step.*rank 0: 0"):
                replicas.refresh({"x": 1}, step=comm.rank)
            replicas.refresh({"x": 1}, step=0)
            assert replicas.restore({"x": 0}) == {"x": 1}

    processes(fs.Mesh({"dp": 2}), run)
