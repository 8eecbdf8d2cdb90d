"""The optimizers by name against PyTorch's, MindSpore's and LARS's recorded runs, and by hand."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from boostax.updates.named import OPTIMIZERS, lars, sgd

TORCH = {
    "lr": "learning_rate",
    "alpha": "decay",
    **{
        key: key
        for key in (
            *("momentum", "dampening", "nesterov", "weight_decay", "lr_decay", "rho"),
            *("initial_accumulator_value", "eps", "centered", "amsgrad"),
        )
    },
}
CLASSES = ("SGD", "Adagrad", "Adadelta", "RMSprop", "Adam")


def from_torch(meta):
    """Return name and settings from what a PyTorch optimizer was called with."""
    meta = dict(meta)
    name = {cls: cls.lower() for cls in CLASSES}[meta.pop("cls")]
    if "betas" in meta:
        meta |= dict(zip(("b1", "b2"), meta.pop("betas"), strict=True))
    return name, {TORCH.get(key, key): value for key, value in meta.items()}


def run(transforms, start, gradients):
    """Run several transformations over the same gradients, all in one program; return all steps."""

    def one(carry, grads):
        out = []
        for (params, state), tx in zip(carry, transforms, strict=True):
            updates, state = tx.update(grads, state, params)
            out.append((optax.apply_updates(params, updates), state))
        return out, [params for params, _ in out]

    first = [(start, tx.init(start)) for tx in transforms]
    return jax.jit(lambda c, g: jax.lax.scan(one, c, g)[1])(first, gradients)


@pytest.mark.parametrize(("x64", "rtol"), [(True, 1e-10), (False, 1e-5)])
def test_every_step_is_pytorchs(reference, x64, rtol):
    values = reference("m_torch_optimizers")
    cases = json.loads(str(values["meta_json"]))
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        start = {leaf: jnp.asarray(values[f"init_{leaf}"], dtype) for leaf in "wb"}
        gradients = {
            leaf: jnp.asarray(np.stack([values[f"grad{t}_{leaf}"] for t in range(6)]), dtype)
            for leaf in "wb"
        }
        transforms = []
        for meta in cases.values():
            name, settings = from_torch(meta)
            transforms.append(OPTIMIZERS[name](**settings))
        runs = run(transforms, start, gradients)
        for case, steps in zip(cases, runs, strict=True):
            for leaf in "wb":
                assert steps[leaf].dtype == dtype
                expected = np.stack([values[f"{case}_step{t}_{leaf}"] for t in range(6)])
                np.testing.assert_allclose(steps[leaf], expected, rtol, rtol, err_msg=case)


MINDSPORE = {
    "sgd": ("sgd", {}),
    "sgd_mom": ("sgd", {"momentum": 0.9}),
    "sgd_damp": ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    "sgd_nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "sgd_wd": ("sgd", {"momentum": 0.8, "weight_decay": 0.01}),
    "momentum": ("momentum", {"momentum": 0.9}),
    "momentum_wd": ("momentum", {"momentum": 0.85, "weight_decay": 0.02}),
    "adagrad": ("adagrad", {}),
    "adadelta": ("adadelta", {"learning_rate": 1.0}),
    "rmsprop": ("rmsprop", {}),
    "rmsprop_mom": ("rmsprop", {"momentum": 0.9, "decay": 0.95, "eps": 1e-8}),
    "rmsprop_centered": ("rmsprop", {"momentum": 0.5, "centered": True}),
    "adam": ("adam", {}),
    "adam_amsgrad": ("adam", {"amsgrad": True}),
    "adam_nesterov": ("adam", {"nesterov": True}),
    "adam_wd": ("adam", {"weight_decay": 0.01}),
    "adamw": ("adam_weight_decay", {"weight_decay": 0.01}),
}


def test_every_step_is_mindspores(reference):
    values = reference("l_optimizers")
    start = [jnp.asarray(values[f"w0_{i}"]) for i in (0, 1)]
    gradients = [jnp.asarray(values[f"grads_{i}"]) for i in (0, 1)]
    transforms = []
    for name, settings in MINDSPORE.values():
        convention = {} if name == "adam_weight_decay" else {"convention": "mindspore"}
        given = {"learning_rate": float(values["lr"])} | convention | settings
        transforms.append(OPTIMIZERS[name](**given))
    # loss_scale=8 there is a division of the gradients.
    transforms.append(optax.chain(optax.scale(1 / 8), sgd(0.1, 0.9)))
    runs = run(transforms, start, gradients)
    for case, steps in zip([*MINDSPORE, "sgd_lossscale"], runs, strict=True):
        for i in (0, 1):
            np.testing.assert_allclose(
                steps[i],
                values[f"{case}_{i}"],
                1e-5,
                1e-6,
                err_msg=case,
            )


def test_every_step_is_that_of_lars(reference):
    values = reference("l_lars")
    with jax.enable_x64(True):
        start = {"w": jnp.asarray(values["w0_0"]), "b": jnp.asarray(values["w0_1"])}
        gradients = {"w": jnp.asarray(values["grads_0"]), "b": jnp.asarray(values["grads_1"])}
        rate, momentum, eps, coefficient = map(float, values["hyper"])
        given = {"momentum": momentum, "eps": eps, "trust_coefficient": coefficient}
        cases = {
            "plain": lars(rate, **given, mask={"w": True, "b": True}),
            "wd": lars(rate, **given, weight_decay=0.01, mask={"w": True, "b": True}),
            # The second parameter was left out there.
            "clip": lars(
                optax.constant_schedule(rate),
                **given,
                weight_decay=0.01,
                clip=True,
                mask={"w": True, "b": False},
            ),
        }
        for case, steps in zip(cases, run(list(cases.values()), start, gradients), strict=True):
            np.testing.assert_allclose(steps["w"], values[f"{case}_0"], 1e-10, 1e-10)
            np.testing.assert_allclose(steps["b"], values[f"{case}_1"], 1e-10, 1e-10)
