"""The normalised head: MindSpore's numbers, rows of zeros, half precision, errors.

``h_common_head_last_fn`` was recorded with MindSpore 2.7.0 on a CPU from
``mindspore.boost.less_batch_normalization.CommonHeadLastFN``, whose weights are (classes, inputs).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import boostax
from boostax.models.normalized import default_multiplier, normalized_linear


@pytest.fixture(scope="module")
def pulled_back():
    """Value and derivatives, compiled once a shape."""

    def run(x, kernel, multiplier, bias, dy):
        y, pull = jax.vjp(normalized_linear, x, kernel, multiplier, bias)
        return y, pull(dy)

    return jax.jit(run)


@pytest.mark.parametrize("case", "012")
def test_agrees_with_mindspore(reference, pulled_back, case):
    ref = {k[2:]: v for k, v in reference("h_common_head_last_fn").items() if k[0] == case}
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    bias = ref.get("b")
    y, (dx, dw, ds, db) = pulled_back(ref["x"], ref["w"].T, ref["mult"], bias, ref["dy"])
    close(y, ref["y"])
    close(ds, ref["d_multiplier"])
    if bias is not None:
        close(db, ref["d_bias"])
    for got, wanted, vectors in ((dx, ref["dx"], ref["x"]), (dw.T, ref["d_weight"], ref["w"])):
        lengths = np.linalg.norm(vectors, axis=1)
        short = lengths < 1e-2
        close(got[~short], wanted[~short])
        # Of shorter vectors MindSpore gives not the derivative of what it computes: it divides by
        # max(length, 1e-4) where the value was divided by 1e-2, up to 100 times too much.
        divided = np.maximum(lengths, 1e-4)[short, None]
        np.testing.assert_allclose(got[short] * 1e-2 / divided, wanted[short], rtol=2e-3)


def test_by_hand():
    x, kernel = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([[2.0, 0.0], [0.0, 5.0]])
    y = normalized_linear(x, kernel, 10.0, jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(y, [[16.0, 8.0], [10.0, 10.0]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_of_zeros_give_zeros_and_bounded_derivatives(pulled_back, dtype):
    x = jnp.asarray([[0.0, 0.0], [1.0, -2.0]], dtype)
    kernel = jnp.asarray([[0.0, 1.0, 2.0], [0.0, 1.0, -1.0]], dtype)
    y, pulled = pulled_back(x, kernel, jnp.asarray(5.0, dtype), None, jnp.ones((2, 3), dtype))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y[0], 0)
    np.testing.assert_array_equal(y[:, 0], 0)
    for gradient in jax.tree.leaves(pulled):
        assert jnp.isfinite(gradient).all()
        # multiplier / sqrt(epsilon), times the number of outputs
        assert jnp.abs(gradient).max() <= 3 * 5 / 0.01
    loss = lambda x: normalized_linear(x, kernel, 5.0).astype(jnp.float32).var()
    assert jnp.isfinite(jax.grad(loss)(jnp.zeros((2, 2), dtype))).all()


@given(st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6), st.floats(1, 1000))
def test_the_length_of_features_does_not_matter(values, factor):
    x = np.reshape(np.float32(values), (2, 3)) + np.float32([[4, 0, 0], [0, -4, 0]])
    kernel = np.float32([[1.0, 0.5], [-2, 0.1], [0.3, 3]])
    y = normalized_linear(x, kernel, 2.0)
    np.testing.assert_allclose(normalized_linear(factor * x, kernel, 2.0), y, atol=1e-5)
    np.testing.assert_allclose(normalized_linear(x, factor * kernel, 2.0), y, atol=1e-5)
    assert np.abs(y).max() <= 2 * (1 + 1e-6)


def test_epsilon_is_the_least_squared_norm():
    x, kernel = jnp.array([[1e-3, 0.0]]), jnp.eye(2)
    assert float(normalized_linear(x, kernel, 1.0)[0, 0]) == pytest.approx(0.1)
    assert float(normalized_linear(x, kernel, 1.0, epsilon=1e-8)[0, 0]) == pytest.approx(1.0)


def test_large_half_precision_features_do_not_overflow():
    x = jnp.full((1, 512), 1e4, jnp.float16)  # the sum of squares is far above 65504
    y = normalized_linear(x, jnp.ones((512, 1), jnp.float16), 3.0)
    assert y.dtype == jnp.float16
    assert float(y[0, 0]) == pytest.approx(3.0, rel=2e-3)


def test_the_default_multiplier():
    assert default_multiplier(10) == pytest.approx(3.107345)
    assert default_multiplier(1000) == pytest.approx(2**0.5 * np.log(999))
    # The formula gives 0, minus infinity and 0.98: nothing would be learned at first.
    assert [default_multiplier(classes) for classes in (2, 1, 3)] == [1, 1, 1]


@pytest.mark.parametrize("use_bias", [False, True])
def test_nnx_and_linen_are_the_same(use_bias):
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    dense = boostax.NormalizedDense(3, use_bias=use_bias, multiplier_init=2.0)
    params = dense.init(jax.random.key(0), x)["params"]
    head = boostax.NormalizedLinear(4, 3, use_bias=use_bias, multiplier_init=2.0, rngs=nnx.Rngs(1))
    names = {"kernel", "multiplier"} | ({"bias"} if use_bias else set())
    assert set(params) == names
    own = nnx.to_pure_dict(nnx.state(head, nnx.Param))
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, params)
    for name in names:
        setattr(head, name, nnx.Param(params[name]))
    np.testing.assert_array_equal(head(x), dense.apply({"params": params}, x))
    assert params["multiplier"] == 2.0


def test_the_multiplier_learns_from_two_classes():
    x, y = jnp.array([[1.0, 0.2], [-1.0, 0.1]]), jnp.array([0, 1])
    dense = boostax.NormalizedDense(2)
    params = dense.init(jax.random.key(0), x)["params"]

    def loss(params):
        logits = dense.apply({"params": params}, x)
        return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(2), y]).mean()

    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p)))
    first = loss(params)
    for _ in range(20):
        params = step(params)
    assert loss(params) < 0.3 * first
    assert params["multiplier"] > 1.2


def test_dtype_of_the_product_and_of_the_parameters():
    x = jnp.ones((2, 4))
    dense = boostax.NormalizedDense(3, dtype=jnp.bfloat16, use_bias=True)
    y, variables = dense.init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


ERRORS = [
    ({"multiplier_init": 0}, ValueError, "multiplier_init must be above 0 and finite, got 0"),
    ({"multiplier_init": "3"}, TypeError, "multiplier_init must be a number"),
    ({"multiplier_init": True}, TypeError, "multiplier_init must be a number"),
    ({"epsilon": 0.0}, ValueError, "epsilon must be above 0"),
    ({"use_bias": 1}, TypeError, "use_bias must be True or False"),
]


@pytest.mark.parametrize(("settings", "kind", "words"), ERRORS)
def test_errors(settings, kind, words):
    with pytest.raises(kind, match=words):
        boostax.NormalizedDense(3, **settings)
    with pytest.raises(kind, match=words):
        boostax.NormalizedLinear(4, 3, rngs=nnx.Rngs(0), **settings)


def test_errors_of_sizes():
    with pytest.raises(ValueError, match="features must be at least 1, got 0"):
        boostax.NormalizedDense(0)
    with pytest.raises(TypeError, match="out_features must be an int"):
        boostax.NormalizedLinear(4, 2.5, rngs=nnx.Rngs(0))
    head = boostax.NormalizedLinear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"shape \(..., 4\), got \(2, 5\)"):
        head(jnp.ones((2, 5)))
    with pytest.raises(ValueError, match=r"got \(2, 5\) and \(4, 3\)"):
        normalized_linear(jnp.ones((2, 5)), jnp.ones((4, 3)), 1.0)
