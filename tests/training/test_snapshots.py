"""SnapshotWriter: what is kept, when, under which numbers, and what goes wrong."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from boostax import SnapshotWriter, trajectory_basis
from boostax.training import snapshots as module


def params(value):
    return {
        "layer": {"w": jnp.full((2, 3), value, jnp.float32), "b": jnp.full(2, value, jnp.bfloat16)},
        "count": jnp.asarray(value, jnp.int32),
    }


def read(path):
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_every_second_step_in_memory():
    with SnapshotWriter(every_steps=2) as writer:
        kept = [writer.step(params(step)) for step in range(1, 6)]
    assert kept == [False, True, False, True, False]
    assert [int(tree["count"]) for tree in writer.snapshots] == [2, 4]
    first = writer.snapshots[0]
    assert jax.tree.structure(first) == jax.tree.structure(params(0))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(first))
    assert first["layer"]["b"].dtype == jnp.bfloat16
    assert writer.number == 2


def test_epochs_and_by_hand():
    with SnapshotWriter(every_epochs=3, keep=2) as writer:
        writer.write(params(100))
        assert [writer.epoch(params(epoch)) for epoch in range(1, 10)] == [False, False, True] * 3
        assert not writer.step(params(0))
    assert [int(tree["count"]) for tree in writer.snapshots] == [6, 9]


def test_on_disk_and_started_again(tmp_path):
    folder = tmp_path / "run" / "snapshots"
    with SnapshotWriter(folder, every_epochs=1) as writer:
        for epoch in range(2):
            writer.epoch(params(epoch))
    with SnapshotWriter(folder, every_epochs=1, keep=3) as writer:
        assert writer.number == 2
        for epoch in range(2, 4):
            writer.epoch(params(epoch))
        paths = writer.snapshots
    assert [path.name for path in paths] == [f"snapshot_{i:08d}.npz" for i in (1, 2, 3)]
    assert sorted(folder.iterdir()) == paths
    content = read(paths[1])
    assert content["count"] == 2
    np.testing.assert_array_equal(content["layer/w"], np.full((2, 3), 2, np.float32))
    basis = trajectory_basis(folder, 1, params=params(0))
    assert basis.paths == ("layer/b", "layer/w")
    assert basis.first[0].dtype == jnp.bfloat16
    assert basis.mean[1].tolist() == [[2.0] * 3] * 2
    np.testing.assert_allclose(basis.to_array(), np.full((1, 8), 8**-0.5), rtol=1e-6)


def test_whole_variables_keep_their_names(tmp_path):
    tree = {"params": {"w": np.zeros(2)}}
    with SnapshotWriter(tmp_path) as writer:
        writer.write(tree)
        writer.write({"params": {"w": np.ones(2)}})
    for like in (None, tree):
        assert trajectory_basis(tmp_path, 1, params=like).paths == ("params/w",)
    assert trajectory_basis(tmp_path, 1, params=tree["params"]).paths == ("w",)


def test_donated_buffers(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for where in (None, tmp_path):
        now = params(0)
        with SnapshotWriter(where, every_steps=1) as writer:
            for _ in range(4):
                now = step(now)
                writer.step(now)
        if where is None:
            assert [int(tree["count"]) for tree in writer.snapshots] == [1, 2, 3, 4]
            assert [float(t["layer"]["w"][1, 2]) for t in writer.snapshots] == [1, 2, 3, 4]
        else:
            assert [int(read(path)["count"]) for path in writer.snapshots] == [1, 2, 3, 4]


def test_arrays_of_the_host_are_copied():
    tree = {"w": np.zeros(2), "lr": 0.5}
    with SnapshotWriter() as writer:
        writer.write(tree)
        tree["w"] += 1
    assert writer.snapshots[0]["w"].tolist() == [0, 0]
    assert writer.snapshots[0]["lr"] == 0.5


def test_linen_and_nnx(tmp_path):
    linen = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    for name, tree in (("linen", linen), ("nnx", state)):
        moved = [jax.tree.map(lambda x, i=i: x + i * x**2 + i, tree) for i in range(3)]
        with SnapshotWriter(tmp_path / name) as writer, SnapshotWriter() as memory:
            for one in moved:
                writer.write(one)
                memory.write(one)
        basis = trajectory_basis(tmp_path / name, 1, params=tree)
        assert basis.paths == ("bias", "kernel")
        other = trajectory_basis(memory.snapshots, 1)
        np.testing.assert_array_equal(basis.to_array(), other.to_array())
        back = basis.combine(basis.project(tree))
        assert jax.tree.structure(back) == jax.tree.structure(tree)


def test_split_parameters():
    mesh = jax.make_mesh((8,), ("data",))
    values = np.arange(16, dtype=np.float32)
    tree = {
        "split": jax.device_put(values, NamedSharding(mesh, P("data"))),
        "whole": jax.device_put(values, NamedSharding(mesh, P())),
        "single": jnp.asarray(values),
    }
    with SnapshotWriter() as writer:
        writer.write(tree)
    for leaf in jax.tree.leaves(writer.snapshots[0]):
        np.testing.assert_array_equal(leaf, values)


def test_what_fails_in_the_thread_is_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_snapshot", full)
    writer = SnapshotWriter(tmp_path, every_steps=1)
    writer.step(params(0))
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.step(params(0))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        writer.write(params(0))

    # An error of the training itself stays the one that is seen.
    def train():
        with SnapshotWriter(tmp_path) as writer:
            writer.write(params(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "SnapshotWriter failed too" in caught.value.__notes__[0]


def test_at_most_two_are_on_their_way(tmp_path, monkeypatch):
    release, started = threading.Event(), []

    def slow(path, content):
        started.append(path)
        assert release.wait(60)

    monkeypatch.setattr(module, "write_snapshot", slow)
    with SnapshotWriter(tmp_path) as writer:
        writer.write(params(0))
        writer.write(params(1))
        third = threading.Thread(target=writer.write, args=(params(2),))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        release.set()
        third.join(60)
    assert len(started) == 3


def test_a_second_run_in_the_folder_is_noticed(tmp_path):
    with SnapshotWriter(tmp_path) as one, SnapshotWriter(tmp_path) as other:
        other.write(params(1))
        other.wait()
        one.write(params(0))
        with pytest.raises(FileExistsError, match="does another run write here"):
            one.wait()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_steps": 0}, "every_steps is 0, expected an integer >= 1 or None"),
        ({"every_steps": True}, "every_steps is True"),
        ({"every_epochs": 1.5}, "every_epochs is 1.5"),
        ({"keep": "3"}, "keep is '3'"),
        ({"every_steps": 1, "every_epochs": 1}, "not both"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        SnapshotWriter(**arguments)


def test_wrong_folders(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't use the folder"):
        SnapshotWriter(tmp_path / "file")
    (tmp_path / "foreign").mkdir()
    np.savez(tmp_path / "foreign" / "basis.npz", w=np.zeros(2))
    with pytest.raises(ValueError, match=r"basis\.npz is not of a SnapshotWriter"):
        SnapshotWriter(tmp_path / "foreign")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "snapshot_00000003.npz").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"snapshot_00000003\.npz is not a snapshot, or not whole"):
        SnapshotWriter(tmp_path / "broken")
    np.savez(tmp_path / "broken" / "snapshot_00000003.npz", w=np.zeros(2))
    with pytest.raises(ValueError, match=r"snapshot_00000003\.npz is not a snapshot; move"):
        SnapshotWriter(tmp_path / "broken")


def test_wrong_leaves():
    with SnapshotWriter() as writer:
        for tree, text in (
            ({"w": "text"}, "the leaf w is a str, no array"),
            ({"w": jax.random.key(0)}, "the leaf w has dtype key<fry>, no numbers"),
        ):
            with pytest.raises(ValueError, match=text):
                writer.write(tree)
    assert writer.snapshots == []
