"""dim_reduce in reference mode: weights, metric, momentum and decisions of recorded runs.

The files were made with MindSpore 2.7 on a CPU. ``robust_steps`` says how many leading steps do not
hang on rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from boostax import TrajectoryBasis, dim_reduce

CASES = (
    "alpha_big",
    "backtrack",
    "basic",
    "ce_minibatch",
    "loss_scale",
    "mild0",
    "mild1",
    "mild2",
    "search_fails",
)
MORE = ("backtrack", "mild0", "mild1", "mild2")  # as others, with other networks and seeds
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def loss_fn(weights, x, y):
    hidden = jnp.tanh(x @ weights[0].T + weights[1][None])
    out = hidden @ weights[2].T + weights[3][None]
    if jnp.issubdtype(y.dtype, jnp.integer):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], axis=1))
    return jnp.mean((out - y) ** 2)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow) if c in MORE else c for c in CASES],
)
def test_recorded_run(reference, case):
    file = reference(f"e_dim_reduce_{case}")
    _, rho, gamma, alpha, sigma, scale = file["hyper"]
    steps = int(file["robust_steps"])
    first = [np.asarray(file[f"w0_{i}"]) for i in range(4)]
    tx = dim_reduce(
        TrajectoryBasis.from_array(file["pca"], first),
        rho=rho,
        gamma=gamma,
        alpha=alpha,
        sigma=sigma,
        mode="reference",
        loss_scale=scale,
    )

    def step(carry, batch):
        weights, state = carry
        value, grads = jax.value_and_grad(loss_fn)(weights, *batch)
        updates, state = tx.update(
            jax.tree.map(lambda g: scale * g, grads),
            state,
            weights,
            value=value,
            value_fn=lambda w: loss_fn(w, *batch),
        )
        weights = optax.apply_updates(weights, updates)
        return (weights, state), (weights, state._replace(components=()))

    batches = (file["x"][:steps], file["y"][:steps])
    run = jax.jit(
        lambda first: jax.lax.scan(step, (first, tx.init(first)), batches)[1],
        compiler_options={
            "xla_backend_optimization_level": 0
        },  # nine programs for a few steps each
    )
    weights, states = run(first)

    np.testing.assert_array_equal(states.status == 1, file["found"][:steps])
    np.testing.assert_allclose(states.factor, file["rho_used"][:steps], rtol=1e-6)
    np.testing.assert_allclose(states.value, file["loss"][:steps], **CLOSE)
    np.testing.assert_allclose(states.metric, file["bk"][:steps], **CLOSE)
    np.testing.assert_allclose(states.gradient[..., None], file["gk_last"][:steps], **CLOSE)
    np.testing.assert_allclose(states.step[..., None], file["sk"][:steps], **CLOSE)
    for i in range(4):
        np.testing.assert_allclose(weights[i], file[f"w_{i}"][:steps], **CLOSE)
        np.testing.assert_allclose(states.momentum[i], file[f"mom_{i}"][:steps], **CLOSE)


def test_the_files_hold_searches_that_fail_and_that_backtrack(reference):
    used = [reference(f"e_dim_reduce_{case}")["rho_used"] for case in CASES]
    steps = [int(reference(f"e_dim_reduce_{case}")["robust_steps"]) for case in CASES]
    kinds = np.concatenate([u[:n] for u, n in zip(used, steps, strict=True)])
    assert (kinds == 0).sum() > 20
    assert (kinds == 1).sum() > 40
    assert ((kinds > 0) & (kinds < 1)).sum() >= 5
