"""The mask of an optimizer by name: its kinds, wrong ones, and decay_bias_and_norm beside it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax import optimizer
from boostax.updates.named import OPTIMIZERS, lars, sgd

PARAMS = {
    "body": {"kernel": jnp.full(2, 2.0), "bias": jnp.full(2, 2.0)},
    "head": {"kernel": jnp.full(2, 2.0), "bias": jnp.full(2, 2.0)},
}
ZERO = jax.tree.map(jnp.zeros_like, PARAMS)
LEAVES = ("body/kernel", "body/bias", "head/kernel", "head/bias")


def decayed(tx):
    """Return which leaves move where all gradients are zero."""
    updates = tx.update(ZERO, tx.init(PARAMS), PARAMS)[0]
    return {p for p in LEAVES if jnp.any(updates[p.split("/")[0]][p.split("/")[1]] != 0)}


def tree(**kernels):
    return {layer: {"kernel": flag, "bias": True} for layer, flag in kernels.items()}


MASKS = {
    "tree": tree(body=True, head=False),
    "prefix": {"body": True, "head": {"kernel": np.bool_(False), "bias": True}},
    "function": lambda params: tree(body=True, head=False),
    "patterns": ["body/*", re.compile("bias$")],
    "one function of the path": (lambda path: path != "head/kernel",),
}


@pytest.mark.parametrize("name", ["sgd", "adamw", "adam_weight_decay"])
@pytest.mark.parametrize("kind", MASKS)
def test_biases_are_left_out_beside_any_mask(name, kind):
    settings = {"learning_rate": 0.5, "weight_decay": 0.5, "mask": MASKS[kind]}
    assert decayed(optimizer(name, **settings)) == {"body/kernel", "body/bias", "head/bias"}
    assert decayed(optimizer(name, decay_bias_and_norm=False, **settings)) == {"body/kernel"}


def test_biases_are_left_out_in_lars_in_configs_and_in_groups():
    settings = {"learning_rate": 0.5, "weight_decay": 0.5, "decay_bias_and_norm": False}
    # LARS scales a leaf of its mask by the norms of both; a zero gradient has the ratio 1.
    for mask, kept in (
        ({"mask": ["body/*"]}, {"body/kernel"}),
        ({}, {"body/kernel", "head/kernel"}),
    ):
        assert decayed(optimizer("lars", **settings, **mask)) == kept
    assert decayed(lars(0.5, weight_decay=0.5, mask=["*"])) == set(LEAVES)
    config = boostax.load_config({"optimizer": {"name": "sgd", "mask": ["body/*"], **settings}})
    assert decayed(boostax.AutoBoost("O0", config).optimizer()) == {"body/kernel"}
    # A pattern may be meant for the leaves of a group alone.
    groups = [{"params": "head/*", "learning_rate": 0.1}]
    tx = optimizer("sgd", **settings, mask=["head/*"], groups=groups)
    assert decayed(tx) == {"head/kernel"}
    groups = [{"params": "head/*", "optimizer": {"name": "adamw", "mask": ["*/bias", "head/k*"]}}]
    assert decayed(optimizer("sgd", **settings, groups=groups)) == {"body/kernel", "head/kernel"}


@pytest.mark.parametrize(
    "ready",
    [
        optax.adamw(0.1),
        optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1)),
        optimizer("sgd", learning_rate=0.1, weight_decay=0.1),
    ],
)
def test_biases_can_not_be_left_out_of_a_ready_transformation(ready):
    groups = [{"params": "head/*", "optimizer": ready}]
    with pytest.raises(
        ValueError, match=r"groups\[0\]\['optimizer'\] is a transformation that dec"
    ):
        optimizer("sgd", learning_rate=0.1, decay_bias_and_norm=False, groups=groups)
    optimizer("sgd", learning_rate=0.1, groups=groups)


def test_biases_can_not_be_left_out_of_an_optimizer_without_a_mask():
    group = {"params": "head/*", "optimizer": {"name": "novograd", "weight_decay": 0.1}}
    with pytest.raises(ValueError, match="novograd has a weight decay but no mask"):
        optimizer("sgd", learning_rate=0.1, decay_bias_and_norm=False, groups=[group])
    group["optimizer"] = "novograd"
    optimizer("sgd", learning_rate=0.1, decay_bias_and_norm=False, groups=[group])


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        ("kernel", "got 'kernel'; write ['kernel']"),
        (1, "got 1"),
        (1.0, "got 1.0"),
        ({"kernel": "False"}, "got 'False' at 'kernel'"),
        ([True, 0], "got 0 at '1'"),
    ],
)
def test_what_is_no_mask(mask, part):
    for build in (
        lambda: sgd(0.1, mask=mask),
        lambda: lars(0.1, mask=mask),
        lambda: optimizer("adamw", learning_rate=0.1, mask=mask),
        lambda: sgd(0.1, weight_decay=0.1, mask=lambda params: mask).init(PARAMS),
    ):
        with pytest.raises(TypeError, match=re.escape(part)):
            build()


def test_a_pattern_that_fits_nothing():
    tx = optimizer("sgd", learning_rate=0.1, weight_decay=0.1, mask=["krenel"])
    with pytest.raises(ValueError, match="mask: the pattern 'krenel' matches no leaf"):
        tx.init(PARAMS)


def test_mindspores_convention_goes_through_all_and_pytorchs_where_it_has_them():
    for name in OPTIMIZERS:
        optimizer(name, learning_rate=0.1, convention="mindspore")
    for name in ("lars", "adam_weight_decay"):
        with pytest.raises(ValueError, match="PyTorch has no such optimizer"):
            optimizer(name, learning_rate=0.1, convention="torch")
