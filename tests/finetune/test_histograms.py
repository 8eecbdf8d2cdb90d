"""feature_histograms and histogram_edges: by hand, against numpy.histogram, shares, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boostax import feature_histograms, histogram_edges


def test_by_hand():
    x = np.array([[[0.0, 5.0], [1.0, 6.0], [1.0, 7.0], [3.0, 8.0]]])
    edges = np.array([[1.0, 2.0], [5.5, 7.0]])
    got = feature_histograms(x, edges, smoothing=0.0)
    # Filter 0 has 1, 2, 1 of 4 positions, filter 1 has 1, 1, 2; each filter gets half of the row.
    np.testing.assert_allclose(got, [[0.125, 0.25, 0.125, 0.125, 0.125, 0.25]])
    assert got.dtype == jnp.float32
    smoothed = feature_histograms(x, edges, smoothing=1.0)
    np.testing.assert_allclose(smoothed[0, :3], np.array([2, 3, 2]) / (2 * 7), rtol=1e-6)


@given(st.integers(0, 10_000), st.sampled_from([np.float32, np.float16, np.int32]))
def test_against_numpy(seed, dtype):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 2, 5, 2), scale=4).astype(dtype)
    edges = np.sort(rng.integers(-3, 4, size=(2, 3)), axis=1) + 0.25
    got = np.asarray(feature_histograms(x, edges, smoothing=0.0)).reshape(3, 2, 4)
    for n in range(3):
        for c in range(2):
            row = x[n, ..., c].astype(np.float64)
            expected = np.histogram(row, [-np.inf, *edges[c], np.inf])[0]
            np.testing.assert_allclose(got[n, c] * 20, expected, atol=1e-4)
    np.testing.assert_allclose(got.sum((1, 2)), 1.0, rtol=1e-6)


def test_bins_hold_equal_shares():
    x = np.random.default_rng(0).exponential(size=(50, 40, 3)).astype(np.float32)
    edges = histogram_edges(x, 4)
    assert edges.shape == (3, 3)
    assert edges.dtype == np.float32
    mean = np.asarray(feature_histograms(x, edges, smoothing=0.0)).mean(0)
    np.testing.assert_allclose(mean, 1 / 12, atol=1e-3)
    np.testing.assert_array_equal(feature_histograms(x, 4), feature_histograms(x, edges))


def test_two_axes_and_constant_responses():
    got = feature_histograms(np.ones((2, 3), np.float32), 2, smoothing=0.0)
    np.testing.assert_allclose(got, [[0, 1 / 3] * 3] * 2)


def test_inside_jit_nan_stays_in_its_row():
    x = jnp.array([[1.0, 2.0], [jnp.nan, 1.0]])
    got = jax.jit(lambda x: feature_histograms(x, jnp.array([[1.5], [1.5]])))(x)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


def test_errors():
    x = np.ones((2, 4, 3), np.float32)
    with pytest.raises(ValueError, match="features hold NaN or infinity"):
        feature_histograms(np.full((2, 3), np.nan), np.zeros((3, 1)))
    with pytest.raises(ValueError, match="features hold NaN or infinity"):
        histogram_edges(np.full((2, 3), np.inf), 2)
    with pytest.raises(ValueError, match=r"edges of shape \(3, bins - 1\).* got shape \(2, 1\)"):
        feature_histograms(x, np.zeros((2, 1)))
    with pytest.raises(ValueError, match="must be finite and not decrease"):
        feature_histograms(x, np.array([[2.0, 1.0]] * 3))
    with pytest.raises(ValueError, match="bins must be >= 2, got 1"):
        feature_histograms(x, 1)
    with pytest.raises(TypeError, match="histogram_edges: bins must be an int"):
        histogram_edges(x, 2.0)
    with pytest.raises(TypeError, match="feature_histograms: bins must be an int"):
        feature_histograms(x, True)
    with pytest.raises(TypeError, match="inside jit bins must be edges"):
        jax.eval_shape(lambda x: feature_histograms(x, 3), x)
    with pytest.raises(ValueError, match="smoothing must be >= 0"):
        feature_histograms(x, 2, smoothing=-1)
    with pytest.raises(TypeError, match="smoothing must be a number"):
        feature_histograms(x, 2, smoothing="1")
    with pytest.raises(ValueError, match=r"none of them empty, got shape \(0, 3\)"):
        feature_histograms(np.ones((0, 3)), 2)
    with pytest.raises(TypeError, match="real numbers, got dtype complex64"):
        histogram_edges(np.ones((2, 3), np.complex64), 2)
