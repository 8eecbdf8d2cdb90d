"""A scale that can't be undone is an overflow, never a gradient that is silently zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from boostax import DynamicLossScale, GroupLossScale

MOST = float(np.finfo(np.float32).max)


def loss(params, x):
    return 2.0**-20 * jnp.sum(params["head"] * (params["body"] @ x))


@pytest.mark.parametrize("exponent", [126, 127])
@pytest.mark.parametrize("kind", ["one", "groups"])
def test_the_largest_scales_give_the_true_gradient_or_an_overflow(kind, exponent):
    # Each leaf has a shape of its own: XLA then divides it by way of the reciprocal.
    params, x = {"body": jnp.ones((2, 3)), "head": jnp.full(2, 0.5)}, jnp.ones(3)
    scale = 2.0**exponent
    if kind == "one":
        scaling = DynamicLossScale(scale, max_scale=MOST)
    else:
        scaling = GroupLossScale(["head", "body"], init=[4.0, scale], min_scale=4.0, max_scale=MOST)
    step = jax.jit(scaling.value_and_grad(loss))
    _, grads, finite, state = step(scaling.init_state(), params, x)
    assert bool(finite) == (exponent == 126)
    if exponent == 127:
        # The group with that scale is to blame, and comes down to one that works.
        expected = 2.0**126 if kind == "one" else [4.0, 2.0**126]
        np.testing.assert_array_equal(state.scale, expected)
        _, grads, finite, _ = step(state, params, x)
        assert bool(finite)
    np.testing.assert_array_equal(grads["body"], np.full((2, 3), 2.0**-21))
    np.testing.assert_array_equal(grads["head"], np.full(2, 3 * 2.0**-20))
