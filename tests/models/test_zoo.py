"""The networks to test on: parameter counts of the papers, and the same in nnx and linen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models import zoo_linen, zoo_nnx

# Name, keyword arguments, side of the image, parameters, norms with running statistics.
NETS = [
    ("resnet8", {}, 8, 78_042, 9),
    ("resnet20", {"shortcut": "pad"}, 8, 269_722, 19),
    ("resnet18", {"width": 64, "classes": 1000}, 32, 11_689_512, 20),
    ("resnet50", {"width": 64, "classes": 1000}, 32, 25_557_032, 53),
    ("MobileNetV2", {}, 8, None, 17),
    ("DenseNet", {}, 8, None, 11),
    ("ViT", {}, 8, None, 0),
]


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "kinds", "side", "parameters", "norms"), NETS)
def test_parameters_and_norms(name, kinds, side, parameters, norms):
    x = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    net = getattr(zoo_linen, name)(**kinds)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    out = jax.eval_shape(lambda v, x: net.apply(v, x, train=False), variables, x)
    assert out.shape == (2, kinds.get("classes", 10))
    count = size(variables["params"])
    assert parameters in (None, count)
    assert len(jax.tree.leaves(variables.get("batch_stats", {}))) == 2 * norms

    make = lambda: getattr(zoo_nnx, name)(rngs=nnx.Rngs(0), **kinds)
    model = nnx.eval_shape(make)
    assert size(nnx.state(model, nnx.Param)) == count
    assert len(jax.tree.leaves(nnx.state(model, nnx.BatchStat))) == 2 * norms
    assert nnx.eval_shape(lambda m, x: m(x), model, x).shape == out.shape
