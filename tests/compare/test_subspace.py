"""An arm that goes on with dim_reduce in the subspace of its own snapshots."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax.compare.arms import Arm, build_arm, load_arms
from boostax.compare.measure import run_arm, start_of
from boostax.compare.task import Task, UsageError

X = np.random.RandomState(0).normal(size=(12, 5)).astype(np.float32)
Y = X @ np.arange(1.0, 6.0, dtype=np.float32)
SECTION = {"dim_reduce": {"n_components": 2, "alpha": 0.0}}


def task_of(model=None):
    if model is None:
        init = lambda key: {"w": jnp.zeros(5)}
        loss = lambda p, batch: jnp.mean((batch["x"] @ p["w"] - batch["y"]) ** 2)
        evaluate = lambda p, _: {"mse": loss(p, {"x": X, "y": Y})}
    else:
        init = lambda key: model
        loss = lambda m, batch: jnp.mean((m(batch["x"])[:, 0] - batch["y"]) ** 2)
        evaluate = lambda m: {"mse": loss(m, {"x": X, "y": Y})}

    def batches(seed):
        for i in itertools.count():
            rows = slice(4 * (i % 3), 4 * (i % 3) + 4)
            yield {"x": X[rows], "y": Y[rows]}

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        optimizer=lambda rate, steps: optax.sgd(rate),
        learning_rate=0.05,
        steps=17,
        target="mse=1e-3",
    )


def built(arm, task, steps=17, mesh=None):
    model, state = start_of(task, jax.random.key(0))
    batch = next(iter(task.batches(0)))
    return build_arm(
        arm, task, steps=steps, rate=0.05, model=model, model_state=state, batch=batch, mesh=mesh
    )


@pytest.mark.parametrize("model", [None, "nnx"])
def test_it_is_the_first_optimizer_and_then_dim_reduce_on_merged_batches(model):
    model = None if model is None else nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    task = task_of(model)
    arm = built(Arm("a", SECTION, dim_reduce_after=0.6, dim_reduce_batches=3), task)
    assert arm.enabled == ("dim_reduce",)
    assert arm.updates == 12
    assert any("the last 1 batches are too few" in note for note in arm.notes)
    assert not any("no effect" in note for note in arm.notes)
    run = run_arm(task, arm.step, seed=0, steps=17, eval_every=17)
    assert run["updates"] == 12
    assert run["flops_per_step"] > 0

    # The same by hand: ten steps of SGD, each of which leaves a snapshot, then two of dim_reduce.
    step = boostax.train_step(task.loss, optax.sgd(0.05))
    state = step.init(task.init(None))
    snapshots = []
    for batch in itertools.islice(task.batches(0), 10):
        state, _ = step(state, batch)
        snapshots.append(jax.tree.map(np.array, state.params))
    basis = boostax.trajectory_basis(snapshots, 2, params=state.params)
    second = boostax.train_step(task.loss, boostax.dim_reduce(basis, alpha=0.0))
    state = second.init(state.params if model is None else state.merge(model))
    rest = list(itertools.islice(task.batches(0), 10, 16))
    for i in (0, 3):
        merged = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rest[i : i + 3])
        state, metrics = second(state, merged)
    losses = run["loss"]
    np.testing.assert_allclose(losses[15], float(metrics["loss"]), rtol=1e-5)
    assert losses[10] == losses[11] == losses[9]  # nothing happens while batches are gathered
    final = (
        task.evaluate(state.params, None) if model is None else task.evaluate(state.merge(model))
    )
    np.testing.assert_allclose(run["evaluations"][-1]["metrics"]["mse"], final["mse"], rtol=1e-4)
    again = run_arm(task, arm.step, seed=0, steps=17, eval_every=17)
    assert again["loss"] == losses


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"dim_reduce_after": 0.1}, SECTION, "leaves 2 of 17 steps for snapshots"),
        ({"dim_reduce_after": 0.9}, SECTION, "leaves 2 of 17 batches"),
        (
            {"dim_reduce_after": 0.5},
            {
                **SECTION,
                "boost": {"mode": "manual", "grad_accumulation": True},
                "grad_accumulation": {"every": 2},
            },
            "no window over several steps",
        ),
        (
            {"dim_reduce_after": 0.5},
            {"dim_reduce": {"pca_mat_path": "v.npz"}},
            "leave dim_reduce.pca_mat_path",
        ),
    ],
)
def test_what_it_can_not_be(settings, config, message):
    with pytest.raises(UsageError, match=message):
        built(Arm("a", config, dim_reduce_batches=3, **settings), task_of())


def test_one_that_nobody_wrote_is_left_out_where_it_does_not_fit():
    arm = built(Arm("a", SECTION, dim_reduce_after=0.1, adapts=True), task_of())
    assert arm.enabled == ()
    assert any(
        note.startswith("dim_reduce is left out: compare.dim_reduce_after") for note in arm.notes
    )


def test_it_is_read_from_a_file(tmp_path):
    path = tmp_path / "arm.json"
    path.write_text('{"compare": {"dim_reduce_after": 0.25, "dim_reduce_batches": 2}}')
    (arm,) = load_arms([str(path)])
    assert (arm.dim_reduce_after, arm.dim_reduce_batches) == (0.25, 2)
