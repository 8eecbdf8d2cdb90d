"""What a model predicts, as a distribution: where the true Fisher draws its labels from.

A loss returns one of these as ``LossAux.predictive``. The loss of labels drawn from it,
``sum_i w_i * -log p(y_i) / N`` with ``N`` the loss's weight, has the Fisher information of the model as
the second moment of its gradients; the loss of the data's labels has only the empirical Fisher.
"""

from __future__ import annotations

import chex
import flax.struct
import jax
import jax.numpy as jnp

__all__ = ["Categorical", "Gaussian", "Predictive"]


class Categorical(flax.struct.PyTreeNode):
    r"""A distribution over classes for each example (or token).

    .. math::
        p(y = k) = \mathrm{softmax}(z)_k

    Attributes:
      logits: float array ``(..., classes)``, from the loss's own forward pass.
      weights: weights of the examples, of shape ``(...)``, 0 for padding. Default None: 1 each.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sure = Categorical(jnp.array([[50.0, 0.0], [0.0, 50.0]]))
      >>> float(sure.sampled_loss(jax.random.key(0), 2.0))
      0.0

    When not to use:
      For losses that are no negative log-likelihood of a softmax, such as a hinge.
    """

    logits: chex.Array
    weights: chex.Array | None = None

    def sampled_loss(self, key: chex.PRNGKey, total: chex.Numeric) -> jax.Array:
        """Return the loss of labels drawn with ``key``, divided by ``total``; a float32 scalar."""
        logits = jnp.asarray(self.logits).astype(jnp.float32)
        labels = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return _mean(-chosen[..., 0], self.weights, total)


class Gaussian(flax.struct.PyTreeNode):
    r"""A normal distribution for each output.

    .. math::
        y \sim \mathcal N(\mu, s^2), \qquad -\log p(y) = \tfrac12 \sum_k (\mu_k - y_k)^2 / s^2 + c

    A mean squared error ``mean(sum((mu - y)**2))`` without the half has the scale ``sqrt(1/2)``.

    Attributes:
      mean: float array ``(..., outputs)``, from the loss's own forward pass.
      scale: standard deviation > 0, a number or an array that broadcasts against ``mean``. Default 1.
      weights: weights of the examples, of shape ``(...)``. Default None: 1 each.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> drawn = lambda mean: Gaussian(mean).sampled_loss(jax.random.key(0), 1.0)
      >>> jax.grad(drawn)(jnp.zeros((1, 3))).shape
      (1, 3)

    When not to use:
      For losses that are no squared error.
    """

    mean: chex.Array
    scale: chex.Numeric = 1.0
    weights: chex.Array | None = None

    def sampled_loss(self, key: chex.PRNGKey, total: chex.Numeric) -> jax.Array:
        """Return the loss of targets drawn with ``key``, divided by ``total``; a float32 scalar."""
        mean = jnp.asarray(self.mean).astype(jnp.float32)
        scale = jnp.asarray(self.scale, jnp.float32)
        noise = jax.random.normal(key, mean.shape)
        # The difference to the drawn target is -scale * noise, without the rounding of a sum.
        drift = (mean - jax.lax.stop_gradient(mean)) / scale - noise
        return _mean(0.5 * jnp.sum(jnp.square(drift), axis=-1), self.weights, total)


Predictive = Categorical | Gaussian


def _mean(losses: jax.Array, weights: chex.Array | None, total: chex.Numeric) -> jax.Array:
    if weights is not None:
        weights = jnp.asarray(weights, jnp.float32)
        losses = jnp.where(weights == 0, 0.0, losses * weights)
    total = jnp.asarray(total, jnp.float32)
    return jnp.sum(losses) / jnp.where(total == 0, 1.0, total)
