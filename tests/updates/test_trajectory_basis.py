"""The basis of a training trajectory: values, sources, files, devices, and errors."""

import json
import tracemalloc
import zipfile

import flax.serialization
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from boostax import TrajectoryBasis, trajectory_basis


def trees(count, seed=0, dtype=np.float32, rank=None):
    """Random parameter trees, in a subspace of a given rank around a point."""
    rng = np.random.default_rng(seed)
    n = 10
    rows = rng.normal(size=(count, n))
    if rank is not None:
        rows = rng.normal(size=(count, rank)) @ rng.normal(size=(rank, n))
    rows = (rows + 5.0).astype(dtype)
    return [
        {
            "Dense_0": {"bias": row[:3], "kernel": row[3:9].reshape(2, 3)},
            "scale": row[9].reshape(()),
        }
        for row in rows
    ]


def flat(tree):
    return np.concatenate(
        [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)]
    )


def matrix(snapshots):
    return np.stack([flat(tree) for tree in snapshots])


# By hand, and against the reference.


def test_by_hand():
    points = [{"w": np.array(p, np.float32)} for p in ([0, 0, 1], [0, 4, 1], [2, 2, 1], [-2, 2, 1])]
    basis = trajectory_basis(points, 2)
    # The middle is (0, 2, 1); both directions have a sum of squares of 8.
    assert basis.mean[0].tolist() == [0, 2, 1]
    assert basis.first[0].tolist() == [0, 0, 1]
    assert basis.singular_values == pytest.approx([8**0.5, 8**0.5])
    assert basis.explained == pytest.approx([0.5, 0.5])
    assert (basis.k, basis.size, basis.snapshots, basis.paths) == (2, 3, 4, ("w",))
    rows = np.asarray(basis.components[0])
    np.testing.assert_allclose(rows @ rows.T, np.eye(2), atol=1e-6)
    np.testing.assert_allclose(rows[:, 2], 0, atol=1e-6)


def test_one_step_of_the_subspace_by_hand():
    basis = TrajectoryBasis.from_array([[1.0, 0.0]], {"w": jnp.zeros(2)})
    gradient = {"w": jnp.array([3.0, 4.0])}
    inside = basis.project(gradient)
    assert inside.tolist() == [3.0]
    momentum = gradient["w"] - basis.combine(inside)["w"]
    assert momentum.tolist() == [0.0, 4.0]
    delta = 0.001 * momentum - basis.combine(-inside)["w"]
    np.testing.assert_allclose(delta, [3.0, 0.004], rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("full0", 3),
        ("full1", 5),
        ("full2", 5),  # its sixth row is rounding: six samples span five directions
        ("rand0", 4),
        ("rand1", 5),
        ("lowrank", 4),
    ],
)
def test_reference(reference, case, rows):
    values = reference("f_pca")
    right = values[f"{case}_components" if case.startswith("full") else f"{case}_full"][:rows]
    snapshots = [{"w": row} for row in values[f"{case}_data"]]
    basis = trajectory_basis(snapshots, rows, dtype=np.float64)
    assert basis.dtype == np.float64
    np.testing.assert_allclose(basis.to_array(), right, rtol=1e-9, atol=1e-13)
    narrow = trajectory_basis(snapshots, rows)
    np.testing.assert_allclose(narrow.to_array(), right, atol=2e-6)


def test_reference_refuses_more_than_the_rank(reference):
    values = reference("f_pca")
    with pytest.raises(ValueError, match="k is 6, but the 6 snapshots have only 5 directions"):
        trajectory_basis([{"w": row} for row in values["full2_data"]], 6)


def test_gram_schmidt_in_order():
    snapshots = trees(6, dtype=np.float64)
    snapshots.insert(2, jax.tree.map(lambda x: 2 * x, snapshots[1]))  # adds no direction
    basis = trajectory_basis(snapshots, 4, center=False, dtype=np.float64)
    rows = matrix([s for i, s in enumerate(snapshots) if i != 2][:4])
    right = np.linalg.qr(rows.T)[0].T
    signs = np.sign(right[np.arange(4), np.abs(right).argmax(axis=1)])
    np.testing.assert_allclose(basis.to_array(), right * signs[:, None], atol=1e-12)
    assert (basis.centered, basis.singular_values) == (False, ())


# Properties.


@hypothesis.given(
    count=st.integers(2, 8),
    seed=st.integers(0, 99),
    center=st.booleans(),
    offset=st.floats(-50, 50),
)
def test_orthonormal_and_whole(count, seed, center, offset):
    snapshots = [
        jax.tree.map(lambda x: x + np.float32(offset), tree) for tree in trees(count, seed)
    ]
    k = count - center
    basis = trajectory_basis(snapshots, k, center=center)
    rows = basis.to_array().astype(np.float64)
    assert rows.shape == (k, 10)
    np.testing.assert_allclose(rows @ rows.T, np.eye(k), atol=1e-5)
    assert (rows[np.arange(k), np.abs(rows).argmax(axis=1)] > 0).all()
    # With k the rank, nothing of a snapshot is lost.
    full = matrix(snapshots) - center * matrix(snapshots).mean(axis=0)
    np.testing.assert_allclose(full @ rows.T @ rows, full, atol=1e-4)


def test_small_directions_are_orthonormal_too():
    rng = np.random.default_rng(0)
    scales = 10.0 ** -np.arange(6)
    rows = (rng.normal(size=(7, 6)) * scales) @ np.linalg.qr(rng.normal(size=(40, 6)))[0].T
    rows = trajectory_basis([{"w": row} for row in rows], 6).to_array().astype(np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.eye(6), atol=1e-5)


def test_ties_take_the_first_in_tree_order():
    points = [{"a": np.array([s * 1.0]), "b": np.array([s * -1.0])} for s in (-1, 1)]
    np.testing.assert_allclose(
        trajectory_basis(points, 1, dtype=np.float64).to_array(), [[0.5**0.5, -(0.5**0.5)]]
    )


def test_bfloat16():
    snapshots = trees(6)
    wide, narrow = (trajectory_basis(snapshots, 4, dtype=d) for d in ("float32", "bfloat16"))
    assert narrow.dtype == jnp.bfloat16
    assert [leaf.nbytes * 2 for leaf in narrow.components] == [x.nbytes for x in wide.components]
    rows = np.asarray(narrow.to_array(), np.float64)
    np.testing.assert_allclose(rows, wide.to_array(), atol=2**-8)
    # Sums are in float32: exact for the rows as they are kept, in both directions.
    coefficients = jnp.array([1 / 3, -2.7182817, 1e-3, 12345.678])
    got = jax.jit(lambda b, c: b.combine(c))(narrow, coefficients)
    np.testing.assert_allclose(flat(got), np.asarray(coefficients, np.float64) @ rows, rtol=1e-5)
    got = jax.jit(lambda b, t: b.project(t))(narrow, snapshots[0])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, rows @ flat(snapshots[0]), rtol=1e-5, atol=1e-5)


def test_half_precision_snapshots():
    snapshots = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), t) for t in trees(5)]
    basis = trajectory_basis(snapshots, 3)
    right = trajectory_basis(
        [jax.tree.map(lambda x: np.asarray(x, np.float32), t) for t in snapshots], 3
    )
    np.testing.assert_array_equal(basis.to_array(), right.to_array())
    assert basis.start(snapshots[1])["Dense_0"]["kernel"].dtype == jnp.bfloat16


# Leaves.


def test_integers_and_excluded_leaves_are_left_out():
    snapshots = [
        tree | {"count": np.int32(i), "frozen": {"w": np.full(2, np.nan, np.float32)}}
        for i, tree in enumerate(trees(5))
    ]
    basis = trajectory_basis(snapshots, 2, exclude=["frozen/*"])
    np.testing.assert_array_equal(basis.to_array(), trajectory_basis(trees(5), 2).to_array())
    assert basis.tree["count"] is None
    assert basis.tree["frozen"]["w"] is None
    assert basis.tree["scale"].shape == (2,)
    back = basis.combine(basis.project(snapshots[0]))
    assert back["count"].dtype == np.int32
    assert back["frozen"]["w"].tolist() == [0, 0]
    started = basis.start(snapshots[3])
    assert started["count"] == 3
    np.testing.assert_array_equal(started["scale"], snapshots[0]["scale"])
    assert "not covered: count (int32), frozen/w (float32)" in basis.describe()
    assert trajectory_basis(snapshots, 1, exclude="frozen/*").size == 10


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("scale"), "snapshot 2 lacks the leaves scale"),
        (
            lambda t: t.update(scales=t.pop("scale")),
            "lacks the leaves scale .* Did you mean 'scales'",
        ),
        (lambda t: t.update(more=np.zeros(2)), "snapshot 2 has leaves that the others lack: more"),
        (lambda t: t.update(scale=np.zeros(2)), r"snapshot 2: the leaf scale has shape \(2,\)"),
        (lambda t: t.update(scale=np.int32(3)), "snapshot 2: the leaf scale has dtype int32"),
        (
            lambda t: t.update(scale=np.float32("inf")),
            "snapshot 2 has a NaN or an infinity in the leaf scale",
        ),
        (lambda t: t["Dense_0"]["bias"].put(1, np.nan), "in the leaf Dense_0/bias"),
    ],
)
def test_snapshots_that_do_not_fit(change, text):
    snapshots = trees(5)
    change(snapshots[2])
    with pytest.raises(ValueError, match=text):
        trajectory_basis(snapshots, 2)
    with pytest.raises(ValueError, match=text):
        trajectory_basis(iter(snapshots), 2)


@pytest.mark.parametrize(
    ("snapshots", "k", "text"),
    [
        (trees(5), 32, "k is 32, but the 5 snapshots have only 4 directions around their mean"),
        (trees(1) * 5, 1, "the 5 snapshots have 0 directions"),
        ([*trees(3), *trees(3)], 3, "the 6 snapshots have only 2 directions"),
        (trees(9, rank=3, dtype=np.float64), 4, "k is 4, but the 9 snapshots have only 3"),
        (trees(9, rank=3), 6, "k is 6, but the 9"),
        ([], 1, "there are no snapshots"),
        (iter([]), 1, "there are no snapshots"),
        (trees(1)[0], 1, "a single dict"),
        (3, 1, "snapshots is a int"),
        ([{"w": np.zeros(2, np.int32)}] * 3, 1, "no floating-point leaf"),
        ([{"w": np.zeros(2, complex)}] * 3, 1, "is complex"),
        ([{"w": 1.0}] * 3, 1, "is a float, no array"),
    ],
)
def test_too_few_directions_and_wrong_snapshots(snapshots, k, text):
    with pytest.raises(ValueError, match=text):
        trajectory_basis(snapshots, k)


def test_too_few_without_centring():
    with pytest.raises(ValueError, match="the 6 snapshots have only 3 independent directions"):
        trajectory_basis([*trees(3), *trees(3)], 4, center=False)
    with pytest.raises(ValueError, match="the 3 snapshots have only 3 independent"):
        trajectory_basis(iter(trees(3)), 4, center=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"k": 0}, "k is 0, expected an integer >= 1"),
        ({"k": True}, "k is True"),
        ({"k": 2.0}, "k is 2.0"),
        ({"max_held": 1}, "max_held is 1"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"dtype": "flaot32"}, "dtype is 'flaot32'"),
        ({"exclude": ["Dense_1/*"]}, "matches no leaf"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        trajectory_basis(trees(4), **{"k": np.int64(2), **arguments})


# What comes once, or is more than memory takes.


def test_an_iterator_may_reuse_its_buffers():
    def overwritten():
        tree = jax.tree.map(np.array, trees(1)[0])
        for one in trees(6):
            jax.tree.map(lambda buffer, x: np.copyto(buffer, x), tree, one)
            yield tree

    np.testing.assert_array_equal(
        trajectory_basis(overwritten(), 3).to_array(), trajectory_basis(trees(6), 3).to_array()
    )


def test_a_long_stream_is_exact_while_its_rank_is_small():
    snapshots = trees(60, rank=4, dtype=np.float64)
    right = trajectory_basis(snapshots, 3, dtype=np.float64)
    got = trajectory_basis(iter(snapshots), 3, max_held=10, dtype=np.float64)
    np.testing.assert_allclose(got.to_array(), right.to_array(), atol=1e-9)
    np.testing.assert_allclose(got.singular_values, right.singular_values, rtol=1e-9)
    np.testing.assert_allclose(got.explained, right.explained, rtol=1e-9)
    np.testing.assert_allclose(flat(got.mean), flat(right.mean), rtol=1e-12)
    assert got.snapshots == 60


def test_a_long_stream_is_near_where_its_rank_is_not():
    rng = np.random.default_rng(1)
    walk = np.cumsum(rng.normal(size=(80, 50)), axis=0)
    snapshots = [{"w": row} for row in walk]
    right = trajectory_basis(snapshots, 4, dtype=np.float64)
    got = trajectory_basis(iter(snapshots), 4, max_held=20, dtype=np.float64)
    overlap = np.linalg.svd(got.to_array() @ right.to_array().T, compute_uv=False)
    assert overlap.min() > 0.99
    np.testing.assert_allclose(sum(got.explained), sum(right.explained), rtol=0.01)


def test_more_files_than_are_held_give_the_same(tmp_path):
    for i, tree in enumerate(trees(11)):
        np.savez(tmp_path / f"s{i}.npz", **{"a": tree["Dense_0"]["kernel"], "b": tree["scale"]})
    told = []
    some = trajectory_basis(
        tmp_path, 5, dtype=np.float64, max_held=5, progress=lambda *a: told.append(a)
    )
    whole = trajectory_basis(tmp_path, 5, dtype=np.float64)
    np.testing.assert_allclose(some.to_array(), whole.to_array(), atol=1e-12)
    np.testing.assert_allclose(some.mean[0], whole.mean[0], rtol=1e-14)
    assert told[-1][0] == told[-1][1] == len(told)
    # Once for the first, blocks of two against those before, and once for the sums.
    assert len(told) == 1 + 2 * 11 + (2 * 1 + 2 * 2 + 2 * 3 + 2 * 4 + 1 * 5)


# Files.


def save_npz(folder, name, tree):
    np.savez(
        folder / f"{name}.npz",
        **{
            "/".join(str(e.key) for e in path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        },
    )


def save_msgpack(folder, name, tree):
    (folder / name).write_bytes(flax.serialization.to_bytes(tree))


def save_orbax(folder, name, tree):
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / name, tree)


SAVES = {"npz": save_npz, "msgpack": save_msgpack, "orbax": save_orbax}


@pytest.mark.parametrize("kind", SAVES)
def test_folders_are_read_by_number(tmp_path, kind):
    snapshots = trees(3)
    for number, tree in zip((2, 10, 1), snapshots, strict=True):
        state = {"params": tree, "opt_state": {"mu": np.full(2, np.nan)}, "step": np.int32(number)}
        SAVES[kind](tmp_path, f"checkpoint_{number}", state)
    (tmp_path / "notes.txt").write_text("not a snapshot")
    (tmp_path / ".checkpoint_3.npz.1.tmp").write_bytes(b"half")
    basis = trajectory_basis(tmp_path, 2, params=jax.tree.map(jnp.asarray, snapshots[0]))
    ordered = [snapshots[2], snapshots[0], snapshots[1]]
    np.testing.assert_allclose(basis.to_array(), trajectory_basis(ordered, 2).to_array(), atol=1e-6)
    np.testing.assert_array_equal(flat(basis.first), flat(snapshots[2]))
    plain = trajectory_basis(tmp_path, 3, center=False)
    np.testing.assert_allclose(
        plain.to_array(), trajectory_basis(ordered, 3, center=False).to_array(), atol=1e-6
    )
    assert plain.paths == ("Dense_0/bias", "Dense_0/kernel", "scale")
    assert jax.tree.structure(plain.tree) == jax.tree.structure(snapshots[0])


def test_a_checkpoint_managers_folder(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, tree in zip((9, 10), trees(2), strict=True):
            manager.save(step, args=ocp.args.StandardSave({"model": tree, "other": np.zeros(1)}))
    basis = trajectory_basis(tmp_path, 1, part="model")
    np.testing.assert_allclose(
        basis.to_array(), trajectory_basis(trees(2), 1).to_array(), atol=1e-6
    )
    with pytest.raises(ValueError, match="has no part 'modle'; it has model, other"):
        trajectory_basis(tmp_path, 1, part="modle")
    # One array alone: of several, orbax leaves those behind that it still reads when one fails.
    for step in (20, 21):
        save_orbax(tmp_path / "broken", str(step), {"w": np.arange(3.0) + step})
    for file in (tmp_path / "broken" / "21").rglob("d/*"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"21 is not an orbax checkpoint, or not whole"):
        trajectory_basis(tmp_path / "broken", 1, center=False)
    (tmp_path / "11" / "default").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"11 is not an orbax checkpoint .*, or not whole"):
        trajectory_basis([tmp_path / "11"], 1, center=False)


def test_an_nnx_state_saved_by_orbax(tmp_path):
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    states = [jax.tree.map(lambda x, i=i: x + i, state) for i in range(3)]
    for i, one in enumerate(states):
        save_orbax(tmp_path, str(i), {"params": one, "opt": np.zeros(2)})
    for like in (None, state):
        basis = trajectory_basis(tmp_path, 1, params=like)
        assert basis.paths == ("bias", "kernel")
        np.testing.assert_allclose(basis.to_array(), np.full((1, 8), 8**-0.5), rtol=1e-5)


def test_lists_of_files_are_ordered_too(tmp_path):
    for number, tree in zip((10, 9), trees(2), strict=True):
        save_npz(tmp_path, f"s-{number}", tree)
    basis = trajectory_basis(sorted(map(str, tmp_path.iterdir())), 1)
    np.testing.assert_array_equal(flat(basis.first), flat(trees(2)[1]))


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ((), "has no snapshots"),
        (("s_1.npz", "best.npz"), "best.npz has no number"),
        (("s_1.npz", "t_2.npz"), "names of two sorts, s_1.npz and t_2.npz"),
        (("s_1.npz", "s_01.npz"), "have the same number"),
        (("s_1.npz", "s_2.msgpack"), "has several kinds: flax msgpack files"),
    ],
)
def test_folders_without_an_order(tmp_path, files, text):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=text):
        trajectory_basis(tmp_path, 1)


def test_files_that_are_not_whole_or_foreign(tmp_path):
    whole = trees(3)
    for number, tree in enumerate(whole):
        save_npz(tmp_path, f"s_{number}", tree)
    path = tmp_path / "s_1.npz"
    right = path.read_bytes()
    pickled = tmp_path / "pickled"
    np.savez(pickled, w=np.array([{"a": 1}], dtype=object))
    single = tmp_path / "single.npy"
    np.save(single, np.zeros(3))
    narrow = tmp_path / "narrow"
    np.savez(narrow, w=np.zeros(3, jnp.bfloat16))
    flipped = bytearray(right)
    flipped[len(right) // 2] ^= 255
    for content, text in (
        (right[: len(right) // 2], "s_1.npz is not a .npz file of parameters, or not whole"),
        (bytes(flipped), "s_1.npz"),
        (b"", "s_1.npz is not"),
        (b"GIF89a", "s_1.npz is not"),
        (pickled.with_suffix(".npz").read_bytes(), "s_1.npz is not .*allow_pickle"),
        (single.read_bytes(), "s_1.npz is not .*one array"),
        (narrow.with_suffix(".npz").read_bytes(), "s_1.npz: the entry w has dtype .V2"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            trajectory_basis([tmp_path / f"s_{i}.npz" for i in range(3)], 1)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        trajectory_basis(tmp_path / "nowhere", 1)
    with pytest.raises(ValueError, match="is not there"):
        trajectory_basis([tmp_path / "s_7.npz"], 1)
    basis_file = tmp_path / "basis_1.npz"
    trajectory_basis(whole, 1).save(basis_file)
    with pytest.raises(ValueError, match="is a file of format 'boostax-basis/1', no snapshot"):
        trajectory_basis([basis_file], 1, center=False)


def test_msgpack_files_that_are_not(tmp_path):
    save_msgpack(tmp_path, "checkpoint_1", trees(1)[0])
    for content in (
        (tmp_path / "checkpoint_1").read_bytes()[:-5],
        b"",
        b"some text",
        flax.serialization.msgpack_serialize({"name": "text"}),
        flax.serialization.msgpack_serialize(3),
    ):
        (tmp_path / "checkpoint_2").write_bytes(content)
        with pytest.raises(ValueError, match="checkpoint_2 is not a flax msgpack file"):
            trajectory_basis(tmp_path, 1)


# Saving and arrays.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_save_and_load(tmp_path, dtype):
    snapshots = [tree | {"n": np.int32(1)} for tree in trees(5)]
    basis = trajectory_basis(snapshots, 3, dtype=dtype)
    path = tmp_path / "basis.npz"
    basis.save(path)
    assert list(tmp_path.iterdir()) == [path]
    for read in (TrajectoryBasis.load(path), TrajectoryBasis.load(path, snapshots[0])):
        assert jax.tree.structure(read) == jax.tree.structure(basis)
        for got, right in zip(jax.tree.leaves(read), jax.tree.leaves(basis), strict=True):
            assert got.dtype == right.dtype
            assert np.asarray(got).tobytes() == np.asarray(right).tobytes()
    bare = basis.without_points()
    bare.save(path)
    assert TrajectoryBasis.load(path).mean is None


def test_files_of_a_basis_that_are_not(tmp_path):
    path = tmp_path / "basis.npz"
    basis = trajectory_basis(trees(4), 2)
    basis.save(path)
    right = path.read_bytes()
    other = {"w": np.zeros(3)}
    with pytest.raises(ValueError, match="lacks the leaves Dense_0/bias"):
        TrajectoryBasis.load(path, other)
    path.write_bytes(right[:-100])
    with pytest.raises(ValueError, match=r"basis\.npz is not a file of a basis, or not whole"):
        TrajectoryBasis.load(path)
    np.savez(path, **other)
    with pytest.raises(ValueError, match=r"basis\.npz is not a file of a basis"):
        TrajectoryBasis.load(path)
    path.write_bytes(right)
    lacking = tmp_path / "lacking.npz"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(lacking, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name != "component/scale.npy":
                copy.writestr(name, content)
    with pytest.raises(ValueError, match=r"lacking\.npz is not a whole file of a basis"):
        TrajectoryBasis.load(lacking)
    header = json.dumps({"format": "boostax-basis/9"})
    np.savez(path, __boostax__=np.array(header))
    with pytest.raises(ValueError, match="format 'boostax-basis/9', this version reads"):
        TrajectoryBasis.load(path)


@pytest.mark.parametrize("points", [True, False])
def test_inside_a_state_that_flax_and_orbax_save(tmp_path, points):
    basis, target = (trajectory_basis(trees(5, seed), 3, dtype="bfloat16") for seed in (0, 1))
    if not points:
        basis, target = basis.without_points(), target.without_points()
    content = flax.serialization.to_bytes({"basis": basis})
    by_flax = flax.serialization.from_bytes({"basis": target}, content)["basis"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"basis": basis})
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(tmp_path / "state", {"basis": target})["basis"]
    for read in (by_flax, by_orbax):
        # The numbers of the snapshots are static, and so the target's.
        assert jax.tree.structure(read) == jax.tree.structure(target)
        for got, right in zip(jax.tree.leaves(read), jax.tree.leaves(basis), strict=True):
            assert np.asarray(got).tobytes() == np.asarray(right).tobytes()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "basis.npz"
    basis = trajectory_basis(trees(4), 2)
    basis.save(path)
    right = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="No space left"):
        basis.save(path)
    assert path.read_bytes() == right
    assert list(tmp_path.iterdir()) == [path]


def test_from_array_with_a_stated_order(tmp_path):
    params = trees(1)[0]
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(10, 3)))[0].T
    order = ["scale", "Dense_0/kernel", "Dense_0/bias"]
    np.save(tmp_path / "pca.npy", rows)
    for array in (rows, rows.tolist(), tmp_path / "pca.npy", str(tmp_path / "pca.npy")):
        basis = TrajectoryBasis.from_array(array, params, order=order, k=3)
        np.testing.assert_allclose(basis.tree["scale"], rows[:, 0], rtol=1e-6)
        np.testing.assert_allclose(
            basis.tree["Dense_0"]["kernel"], rows[:, 1:7].reshape(3, 2, 3), rtol=1e-6
        )
        np.testing.assert_allclose(basis.to_array(order), rows, rtol=1e-6)
    partial = TrajectoryBasis.from_array(np.eye(3, 9), params, exclude="scale", dtype=np.float64)
    np.testing.assert_array_equal(partial.to_array(), np.eye(3, 9))
    with pytest.raises(ValueError, match="made from an array"):
        basis.start(params)


@pytest.mark.parametrize(
    ("array", "arguments", "text"),
    [
        (np.eye(3, 9), {}, "n = 9, but the parameters have n = 10"),
        (np.eye(10, 3), {}, "It looks transposed"),
        (np.eye(3, 10), {"k": 4}, "has 3 rows, expected k = 4"),
        (np.eye(12, 10), {}, "has 12 rows, expected k from 1 to n = 10"),
        (np.zeros((0, 10)), {}, "has 0 rows"),
        (2 * np.eye(3, 10), {}, "not orthonormal: V V.T differs from the identity by 3"),
        (np.full((3, 10), np.nan), {}, "not orthonormal"),
        (np.ones(10), {}, "expected \\(k, n\\)"),
        (np.eye(3, 10, dtype=int), {}, "dtype int64, expected"),
        (np.eye(3, 10), {"order": ["scale"]}, "order lacks Dense_0/bias, Dense_0/kernel"),
        (np.eye(3, 10), {"order": ["scale"] * 3 + ["Dense_0/bias"]}, "order lacks Dense_0/kernel"),
        (
            np.eye(3, 10),
            {"order": ["scale", "Dense_0/bias", "Dense_0/kernl"]},
            "has the unknown Dense_0/kernl; .* Did you mean 'Dense_0/kernel'",
        ),
        ("missing.npy", {}, "missing.npy is not a .npy file"),
    ],
)
def test_wrong_arrays(array, arguments, text):
    with pytest.raises(ValueError, match=text):
        TrajectoryBasis.from_array(array, trees(1)[0], **arguments)


# Use: projection, points, devices.


def test_project_and_combine_are_each_others_transpose():
    basis = trajectory_basis(trees(7), 4)
    tree = trees(1, seed=5)[0]
    coefficients = jnp.array([0.5, -1.0, 2.0, 3.0])
    there = jax.jit(lambda b, t: b.project(t))(basis, tree)
    back = jax.jit(lambda b, c: b.combine(c))(basis, coefficients)
    np.testing.assert_allclose(there, basis.to_array() @ flat(tree), rtol=1e-5)
    np.testing.assert_allclose(there @ coefficients, flat(back) @ flat(tree), rtol=1e-5)
    np.testing.assert_allclose(basis.project(back), coefficients, atol=1e-5)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    other = trajectory_basis(trees(7, seed=1), 4).without_points()
    assert jax.tree.structure(other) == jax.tree.structure(basis.without_points())
    with pytest.raises(ValueError, match="the tree lacks the leaves scale"):
        basis.project({"Dense_0": tree["Dense_0"]})
    with pytest.raises(ValueError, match=r"coefficients has shape \(3,\), expected \(4,\)"):
        basis.combine(coefficients[:3])


def test_start_points():
    snapshots = trees(5)
    basis = trajectory_basis(snapshots, 4)
    now = jax.tree.map(jnp.asarray, trees(1, seed=9)[0])
    np.testing.assert_array_equal(flat(basis.start(now)), flat(snapshots[0]))
    mean = matrix(snapshots).mean(axis=0)
    np.testing.assert_allclose(flat(basis.start(now, "mean")), mean, rtol=1e-6)
    rows = basis.to_array()
    right = mean + (flat(now) - mean) @ rows.T @ rows
    np.testing.assert_allclose(flat(basis.start(now, "nearest")), right, atol=1e-5)
    # Every snapshot lies on mean + span, and is its own nearest point.
    for snapshot in snapshots:
        np.testing.assert_allclose(
            flat(basis.start(snapshot, "nearest")), flat(snapshot), atol=1e-5
        )
    raw = trajectory_basis(snapshots, 3, center=False)
    rows = raw.to_array()
    right = flat(now) @ rows.T @ rows
    np.testing.assert_allclose(flat(raw.start(now, "nearest")), right, atol=1e-5)
    with pytest.raises(ValueError, match="Did you mean 'nearest'"):
        basis.start(now, "nearst")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("count", [2, 8])
def test_split_like_the_parameters(count, kind):
    mesh = jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])
    rng = np.random.default_rng(0)
    host = [
        {
            "a": rng.normal(size=(8, 2)).astype(np.float32),
            "b": rng.normal(size=3).astype(np.float32),
        }
        for _ in range(4)
    ]
    where = {"a": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P())}
    there = [jax.device_put(tree, where) for tree in host]
    right = trajectory_basis(host, 3)
    for dtype in ("float32", "bfloat16"):
        basis = trajectory_basis(there, 3, dtype=dtype)
        assert basis.tree["a"].sharding == NamedSharding(mesh, P(None, "data"))
        assert basis.tree["b"].sharding.is_equivalent_to(NamedSharding(mesh, P()), 2)
        near = {"float32": 1e-5, "bfloat16": 0.02}[dtype]
        with jax.set_mesh(mesh):
            inside = jax.jit(lambda b, t: b.project(t))(basis, there[2])
            back = jax.jit(lambda b, c: b.combine(c))(basis, inside)
        np.testing.assert_allclose(inside, right.project(host[2]), atol=near)
        np.testing.assert_allclose(
            flat(back), flat(right.combine(right.project(host[2]))), atol=near
        )
        assert back["a"].sharding.is_equivalent_to(where["a"], 2)
    started = basis.start(there[3], "mean")
    assert started["a"].sharding == where["a"]
    np.testing.assert_allclose(flat(started), matrix(host).mean(axis=0), atol=1e-6)


def test_memory_stays_far_below_n_by_n():
    snapshots = [{"w": np.full(1_000_000, i, np.float32)} for i in range(10)]
    for i, tree in enumerate(snapshots):
        tree["w"][i] = 100.0
    tracemalloc.start()
    basis = trajectory_basis(snapshots, 9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300e6  # n by n would be 4e12
    rows = basis.to_array().astype(np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.eye(9), atol=1e-5)


def test_an_integer_leaf_that_is_none_in_another_snapshot():
    trees = [{"w": np.array([1.0, 2.0]), "n": np.array([1, 2])}]
    trees.append({"w": np.array([2.0, 1.0]), "n": np.array([1.5, 2.0])})
    with pytest.raises(
        ValueError, match="snapshot 1: the leaf n has dtype float64, but int64 in the"
    ):
        trajectory_basis(trees, 1)
    with pytest.raises(ValueError, match="there are no snapshots"):
        trajectory_basis(iter([]), 1)
