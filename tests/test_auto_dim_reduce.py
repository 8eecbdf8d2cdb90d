"""AutoBoost with dim_reduce: where its basis comes from, and what it takes the place of."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax import AutoBoost, _info
from boostax.errors import ConfigError

MANUAL = {"mode": "manual", "dim_reduce": True}


@pytest.fixture
def params():
    return {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([2.0, -1.0])}


@pytest.fixture
def snapshots(params):
    draw = np.random.RandomState(0)
    return [
        jax.tree.map(lambda leaf: leaf + draw.normal(size=leaf.shape).astype(np.float32), params)
        for _ in range(6)
    ]


@pytest.fixture
def basis(snapshots, params):
    return boostax.trajectory_basis(snapshots, 3, params=params)


X = jnp.array([[1.0, 2.0], [0.5, -1.0], [-1.0, 1.0], [2.0, 0.0]])


def loss_fn(params, x):
    return jnp.mean((x @ params["kernel"] + params["bias"][None]) ** 2)


def boosted(section, **others):
    return AutoBoost(
        "O0", {"boost": MANUAL, "dim_reduce": {"n_components": 3, **section}, **others}
    )


def run(step, state, count=3):
    for _ in range(count):
        state, metrics = step(state, X)
    return state, metrics


def same_as(basis, boost, params, tx=None, **settings):
    """Check that a few steps are those of dim_reduce on this basis."""
    step, state = boost.start(loss_fn, tx, params, X)
    own = boostax.train_step(loss_fn, boostax.dim_reduce(basis, **settings))
    ours, metrics = run(step, state)
    theirs, _ = run(own, own.init(params))
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert float(metrics["loss"]) < float(loss_fn(params, X))
    return step, ours


@pytest.mark.quick
def test_a_basis_that_was_saved(basis, params, tmp_path):
    basis.save(tmp_path / "basis.npz")
    section = {"pca_mat_path": str(tmp_path / "basis.npz"), "alpha": 0.01, "rho": 0.5}
    boost = boosted(section, clip={"global_norm": 1.0})
    step, state = same_as(basis, boost, params, optax.sgd(0.1, 0.9), alpha=0.01, rho=0.5)
    told = str(boost.describe(step=step, state=state, batch=X))
    assert "takes the place of the base optimizer" in told
    assert "clip.global_norm is accepted and has no effect" in told
    assert "dim_reduce(k=3, rho=0.5, gamma=0.9, alpha=0.01" in told
    assert [info.name for info in _info.walk(step.tx)] == ["dim_reduce"]
    # Without files a description tells the order alone.
    assert "with tx=" in str(boost.describe(params))
    assert boost.describe().order[0].startswith("dim_reduce: in place of clip, thor and optimizer")


def test_centralized_gradients_are_the_direction_and_the_raw_one_is_the_slope(
    basis, params, tmp_path
):
    basis.save(tmp_path / "basis.npz")
    boost = AutoBoost(
        "O0",
        {
            "boost": {**MANUAL, "centralize": True},
            "dim_reduce": {"n_components": 3, "pca_mat_path": str(tmp_path / "basis.npz")},
        },
    )
    tx = boost.optimizer(None, params)
    assert [info.name for info in _info.walk(tx)] == ["centralize", "dim_reduce"]
    step = boost.train_step(loss_fn, tx)
    ours, _ = run(step, step.init(params))
    own = optax.chain(boostax.centralize(), boostax.dim_reduce(basis))
    theirs = boostax.train_step(loss_fn, own)
    wanted, _ = run(theirs, theirs.init(params))
    jax.tree.map(np.testing.assert_array_equal, ours.params, wanted.params)


def test_an_array_of_the_reference_with_its_order(basis, params, tmp_path):
    np.save(tmp_path / "pca.npy", basis.to_array(["kernel", "bias"]))
    section = {"pca_mat_path": str(tmp_path / "pca.npy"), "leaf_order": ["kernel", "bias"]}
    same_as(basis, boosted(section), params)


@pytest.mark.parametrize("stored", [False, True])
def test_a_folder_of_snapshots(snapshots, basis, params, tmp_path, stored):
    with boostax.SnapshotWriter(tmp_path / "weights") as writer:
        for tree in snapshots:
            writer.write(tree)
    section = {"weight_load_dir": str(tmp_path / "weights")}
    if stored:
        section["pca_mat_path"] = str(tmp_path / "basis.npz")
    same_as(basis, boosted(section), params)
    if stored:  # it was written, and is what counts from now on
        kept = boostax.TrajectoryBasis.load(tmp_path / "basis.npz", params)
        np.testing.assert_array_equal(kept.to_array(), basis.to_array())
        section["weight_load_dir"] = str(tmp_path / "gone")
        same_as(basis, boosted(section), params)


def test_it_waits_for_the_file(basis, params, tmp_path):
    path = tmp_path / "late.npz"
    writes = threading.Timer(0.3, basis.save, [path])
    writes.start()
    same_as(basis, boosted({"pca_mat_path": str(path), "timeout": 60}), params)
    writes.join()
    missing = tmp_path / "never.npz"
    with pytest.raises(TimeoutError, match=r"never.npz is not there after 1 seconds .*load_dir"):
        boosted({"pca_mat_path": str(missing), "timeout": 1}).optimizer(None, params)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_it_waits_for_a_writer_that_pauses_in_the_middle(basis, params, tmp_path, suffix):
    whole, path = tmp_path / f"whole.{suffix}", tmp_path / f"basis.{suffix}"
    np.save(whole, basis.to_array()) if suffix == "npy" else basis.save(whole)
    data = whole.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    boost = boosted({"pca_mat_path": str(path), "timeout": 1})
    with pytest.raises(TimeoutError, match=f"basis.{suffix} is not whole after 1 seconds"):
        boost.optimizer(None, params)
    writes = threading.Timer(0.4, path.write_bytes, [data])
    writes.start()
    same_as(basis, boosted({"pca_mat_path": str(path), "timeout": 60}), params)
    writes.join()


def test_excluded_leaves_and_dtypes(snapshots, params, tmp_path):
    part = boostax.trajectory_basis(snapshots, 3, params=params, exclude=["bias"])
    part.save(tmp_path / "basis.npz")
    section = {"pca_mat_path": str(tmp_path / "basis.npz"), "exclude": ["bias"]}
    _, state = same_as(part, boosted(section), params)
    np.testing.assert_array_equal(state.params["bias"], params["bias"])
    tx = boosted({**section, "dtype": "bfloat16"}).optimizer(None, params)
    assert all(rows.dtype == jnp.bfloat16 for rows in tx.init(params).components)


def test_an_nnx_model(tmp_path):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    array = np.linalg.qr(np.random.RandomState(1).normal(size=(6, 3)))[0].T
    np.save(tmp_path / "pca.npy", array)
    boost = boosted({"pca_mat_path": str(tmp_path / "pca.npy")})
    loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    step, state = boost.start(loss, None, model, X)
    first = float(loss(model, X))
    state, _ = run(step, state)
    assert float(loss(state.merge(model), X)) < first


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"n_components": 2}, r"n_components is 2, but the basis in .* has 3 .* to 3"),
        ({"exclude": ["bias"]}, "exclude names bias, which the basis"),
        ({"pca_mat_path": "pca.npy", "n_components": 2}, "3 rows, expected k = 2"),
        ({"pca_mat_path": "broken.npz"}, "broken.npz"),
        ({"pca_mat_path": "folder.npz"}, "folder.npz"),
        ({"pca_mat_path": None, "weight_load_dir": "nowhere"}, "there is no folder"),
        ({"pca_mat_path": "new.npy", "weight_load_dir": "weights"}, "ends with .npz"),
    ],
)
def test_files_that_do_not_fit(section, message, snapshots, basis, params, tmp_path):
    basis.save(tmp_path / "basis.npz")
    np.save(tmp_path / "pca.npy", basis.to_array())
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    os.utime(tmp_path / "broken.npz", (0, 0))  # nobody is still writing it
    with boostax.SnapshotWriter(tmp_path / "weights") as writer:
        for tree in snapshots:
            writer.write(tree)
    section = {"pca_mat_path": "basis.npz", **section}
    for key in ("pca_mat_path", "weight_load_dir"):
        if section.get(key) is not None:
            section[key] = str(tmp_path / section[key])
    with pytest.raises(ConfigError, match=message):
        boosted(section).optimizer(None, params)


def test_params_are_needed(basis, tmp_path):
    basis.save(tmp_path / "basis.npz")
    boost = boosted({"pca_mat_path": str(tmp_path / "basis.npz")})
    with pytest.raises(ValueError, match="params is needed, because dim_reduce is on"):
        boost.optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="tx holds no dim_reduce"):
        boost.train_step(loss_fn, optax.sgd(0.1))
