"""from_torch_state: PyTorch's runs taken over at step 3, layouts, files, and what is refused."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.updates.torch_state import from_torch_state

AT = 3
DEFAULTS = {
    "SGD": {"momentum": 0, "dampening": 0, "nesterov": False, "weight_decay": 0},
    "Adagrad": {"lr_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10, "weight_decay": 0},
    "Adadelta": {"rho": 0.9, "eps": 1e-6, "weight_decay": 0},
    "RMSprop": {"alpha": 0.99, "eps": 1e-8, "centered": False, "momentum": 0, "weight_decay": 0},
    "Adam": {"betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False, "weight_decay": 0},
}


def state_there(cls, group, params, gradients):
    """Return the entry that PyTorch's optimizer keeps of a parameter after some steps.

    ``params`` are the recorded ones ahead of each step.
    """
    entry = {} if cls == "SGD" else {"step": np.array(float(len(gradients)))}

    def average(key, value, rate):
        entry[key] = rate * entry.get(key, 0.0) + (1 - rate) * value

    for t, (w, g) in enumerate(zip(params, gradients, strict=True)):
        g = g + group["weight_decay"] * w
        if cls == "SGD":
            if group["momentum"]:
                kept = group["momentum"] * entry["momentum_buffer"] if t else 0.0
                entry["momentum_buffer"] = kept + (g if t == 0 else (1 - group["dampening"]) * g)
            else:
                entry["momentum_buffer"] = None
        elif cls == "Adagrad":
            entry["sum"] = entry.get("sum", group["initial_accumulator_value"]) + g * g
        elif cls == "Adadelta":
            before = entry.get("acc_delta", np.zeros_like(g))
            average("square_avg", g * g, group["rho"])
            delta = np.sqrt(before + group["eps"]) / np.sqrt(entry["square_avg"] + group["eps"]) * g
            average("acc_delta", delta * delta, group["rho"])
        elif cls == "RMSprop":
            average("square_avg", g * g, group["alpha"])
            spread = entry["square_avg"]
            if group["centered"]:
                average("grad_avg", g, group["alpha"])
                spread = spread - entry["grad_avg"] ** 2
            if group["momentum"]:
                step = g / (np.sqrt(spread) + group["eps"])
                entry["momentum_buffer"] = (
                    group["momentum"] * entry.get("momentum_buffer", 0.0) + step
                )
        else:
            average("exp_avg", g, group["betas"][0])
            average("exp_avg_sq", g * g, group["betas"][1])
            if group["amsgrad"]:
                largest = entry.get("max_exp_avg_sq", np.zeros_like(g))
                entry["max_exp_avg_sq"] = np.maximum(largest, entry["exp_avg_sq"])
    return entry


def test_the_next_steps_are_pytorchs(reference):
    values = reference("m_torch_optimizers")
    cases = json.loads(str(values["meta_json"]))

    def at(case, t, leaf):
        return values[f"init_{leaf}"] if t == 0 else values[f"{case}_step{t - 1}_{leaf}"]

    with jax.enable_x64(True):
        starts, transforms = [], []
        for case, meta in cases.items():
            cls = meta["cls"]
            group = {**DEFAULTS[cls], **{k: v for k, v in meta.items() if k != "cls"}}
            if cls == "Adam":
                group |= {"decoupled_weight_decay": False, "maximize": False, "foreach": None}
            state = {
                i: state_there(
                    cls,
                    group,
                    [at(case, t, leaf) for t in range(AT)],
                    [values[f"grad{t}_{leaf}"] for t in range(AT)],
                )
                for i, leaf in enumerate("wb")
            }
            params = {leaf: jnp.asarray(at(case, AT, leaf)) for leaf in "wb"}
            there = {"state": state, "param_groups": [{**group, "params": [0, 1]}]}
            tx, opt_state = from_torch_state(there, params, order=["w", "b"], layout="same")
            starts.append((params, opt_state))
            transforms.append(tx)

        def one(carry, grads):
            out = []
            for (params, opt_state), tx in zip(carry, transforms, strict=True):
                updates, opt_state = tx.update(grads, opt_state, params)
                out.append((optax.apply_updates(params, updates), opt_state))
            return out, [params for params, _ in out]

        gradients = {
            leaf: jnp.asarray(np.stack([values[f"grad{t}_{leaf}"] for t in range(AT, 6)]))
            for leaf in "wb"
        }
        runs = jax.jit(lambda c, g: jax.lax.scan(one, c, g)[1])(starts, gradients)
        for case, steps in zip(cases, runs, strict=True):
            for leaf in "wb":
                expected = np.stack([values[f"{case}_step{t}_{leaf}"] for t in range(AT, 6)])
                np.testing.assert_allclose(steps[leaf], expected, 1e-10, 1e-10, err_msg=case)


def adam_there(order, arrays, **group):
    """Return a state of Adam after two steps, with one array for both averages of each parameter."""
    entry = lambda a: {"step": np.float32(2), "exp_avg": a, "exp_avg_sq": a * a}
    group = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-3, "amsgrad": False} | group
    return {
        "state": {i: entry(array) for i, array in enumerate(arrays)},
        "param_groups": [{**group, "params": list(range(len(order)))}],
    }


def test_kernels_are_turned():
    linear = np.arange(6.0, dtype=np.float32).reshape(2, 3)  # out, in
    conv = np.arange(24.0, dtype=np.float32).reshape(3, 2, 2, 2)  # out, in, height, width
    bias = np.arange(2.0, dtype=np.float32)
    order = ["conv/kernel", "dense/kernel", "dense/bias"]
    params = {
        "conv": {"kernel": jax.ShapeDtypeStruct((2, 2, 2, 3), jnp.float32)},
        "dense": {
            "kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32),
            "bias": jax.ShapeDtypeStruct((2,), jnp.float32),
        },
    }
    there = adam_there(order, [conv, linear, bias])
    by_hand = {"conv/*": (2, 3, 1, 0), "*/kernel": (1, 0)}
    for layout in ("torch", by_hand):
        _, state = from_torch_state(there, params, order=order, layout=layout)
        mu = optax.tree.get(state, "mu")
        np.testing.assert_array_equal(mu["conv"]["kernel"], np.transpose(conv, (2, 3, 1, 0)))
        np.testing.assert_array_equal(mu["dense"]["kernel"], linear.T)
        np.testing.assert_array_equal(mu["dense"]["bias"], bias)
        assert int(optax.tree.get(state, "count")) == 2
    with pytest.raises(
        ValueError, match=r"'conv/kernel' has the shape \(2, 2, 2, 3\), but PyTorch"
    ):
        from_torch_state(there, params, order=order, layout="same")
    with pytest.raises(ValueError, match="2 axes for 'conv/kernel'"):
        from_torch_state(there, params, order=order, layout={"*": (1, 0)})
    with pytest.raises(ValueError, match=r"each of PyTorch's axes once"):
        from_torch_state(there, params, order=order, layout={"*": (1, 1)})


PARAMS = {"a": jnp.ones(2), "b": jnp.ones(3)}
ARRAYS = [np.full(2, 0.5, np.float32), np.full(3, 0.25, np.float32)]


def test_groups_go_on_as_groups(tmp_path):
    there = adam_there(["a", "b"], ARRAYS)
    (group,) = there["param_groups"]
    there["param_groups"] = [
        {**group, "params": [0]},
        {**group, "params": [1], "lr": 0.01, "weight_decay": 0.5, "decoupled_weight_decay": False},
    ]
    flat = {f"state/{i}/{k}": v for i, entry in there["state"].items() for k, v in entry.items()}
    path = tmp_path / "optimizer.npz"
    np.savez(path, param_groups=json.dumps(there["param_groups"]), **flat)
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    for source in (there, path):
        tx, state = from_torch_state(source, PARAMS, order=["a", "b"], name="adam")
        updates, _ = tx.update(grads, state, PARAMS)
        for leaf, rate, decay, old in (("a", 0.1, 0.0, 0.5), ("b", 0.01, 0.5, 0.25)):
            g = 1.0 + decay
            m, v = 0.9 * old + 0.1 * g, 0.99 * old**2 + 0.01 * g**2
            step = -rate * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.99**3)) + 1e-3)
            np.testing.assert_allclose(updates[leaf], np.full(PARAMS[leaf].shape, step), 2e-5)


def test_adamw_and_a_schedule():
    there = adam_there("ab", ARRAYS, weight_decay=0.1, decoupled_weight_decay=True)
    rate = lambda count: jnp.where(count == 2, 0.5, 0.0)
    tx, state = from_torch_state(there, PARAMS, order=["a", "b"], learning_rate=rate)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
    m, v = 0.9 * 0.5 / (1 - 0.9**3), 0.99 * 0.25 / (1 - 0.99**3)
    expected = -0.5 * (m / (np.sqrt(v) + 1e-3) + 0.1)
    np.testing.assert_allclose(updates["a"], np.full(2, expected), 1e-4)


SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "params": [0, 1]}


@pytest.mark.parametrize(
    ("state", "settings", "error", "part"),
    [
        ({"state": {}}, {}, TypeError, "with the keys state"),
        (
            {"state": {}, "param_groups": [{**SGD, "maximize": True}]},
            {},
            ValueError,
            "maximize=True",
        ),
        (
            {"state": {}, "param_groups": [{**SGD, "params": [0]}]},
            {},
            ValueError,
            "order has 2 paths",
        ),
        (
            {"state": {}, "param_groups": [SGD]},
            {"order": "ab"},
            TypeError,
            "order must be a sequence",
        ),
        (
            {"state": {}, "param_groups": [SGD]},
            {"order": ["a", "c"]},
            ValueError,
            "'c', which is no",
        ),
        ({"state": {}, "param_groups": [SGD]}, {"order": ["a", "a"]}, ValueError, "names a twice"),
        ({"state": {}, "param_groups": [SGD]}, {"name": "asgd"}, ValueError, "Did you mean 'sgd'"),
        (
            {"state": {}, "param_groups": [SGD]},
            {"learning_rate": optax.constant_schedule(0.1)},
            ValueError,
            "SGD's state does not count",
        ),
        (
            {"state": {0: {"momentum_buffer": ARRAYS[0]}}, "param_groups": [SGD]},
            {"learning_rate": optax.constant_schedule(0.1), "updates": 3},
            ValueError,
            "b made 0 updates, the run 3; dampening",
        ),
        (
            {"state": {0: {"exp_avg": ARRAYS[0]}}, "param_groups": [SGD]},
            {},
            ValueError,
            r"state\[0\] has 'exp_avg', which sgd does not keep",
        ),
        (
            {"state": {0: {"momentum_buffer": object()}}, "param_groups": [SGD]},
            {},
            TypeError,
            "turn tensors into numpy arrays",
        ),
        (
            {"state": {0: {"momentum_buffer": ARRAYS[0].astype(complex)}}, "param_groups": [SGD]},
            {},
            TypeError,
            "must be real numbers, got ndarray of dtype complex128",
        ),
        ({"state": {}, "param_groups": [3]}, {}, TypeError, r"param_groups\[0\] must be a mapping"),
        ({"state": {}, "param_groups": 3}, {}, TypeError, "param_groups must be a list"),
        (
            {"state": {}, "param_groups": [{**SGD, "params": ["a"]}]},
            {},
            TypeError,
            "must be a list of parameters' numbers",
        ),
        ({"state": {}, "param_groups": [{**SGD, "params": []}]}, {}, ValueError, "no parameters"),
        ({"state": {}, "param_groups": [SGD]}, {"order": None}, TypeError, "got None"),
        ({"state": {}, "param_groups": [SGD]}, {"order": 3}, TypeError, "got 3"),
        ({"state": {}, "param_groups": [SGD]}, {"order": {"a", "b"}}, TypeError, "must be a seq"),
        (
            {"state": {2: {"momentum_buffer": ARRAYS[0]}}, "param_groups": [SGD]},
            {},
            ValueError,
            "an entry for parameter 2, which is in no group",
        ),
        (
            {
                "state": {0: {"momentum_buffer": ARRAYS[0]}},
                "param_groups": [{**SGD, "momentum": 0, "dampening": 0}],
            },
            {},
            ValueError,
            "no use for",
        ),
        (adam_there("ab", ARRAYS, weight_decay=0.1), {}, ValueError, "say so with name="),
        (adam_there("ab", ARRAYS), {"updates": 3}, ValueError, "updates is for sgd"),
        (adam_there("ab", ARRAYS), {"layout": "troch"}, ValueError, "Did you mean 'torch'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_taken_over(state, settings, error, part):
    with pytest.raises(error, match=part):
        from_torch_state(state, PARAMS, **{"order": ["a", "b"], **settings})


def test_files_that_are_none(tmp_path):
    path = tmp_path / "state.npz"
    for content in (b"no zip", b"PK\x03\x04 half"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"state.npz is no .npz file of plain arrays"):
            boostax.from_torch_state(path, PARAMS, order=["a", "b"])
    np.savez(path, a=np.ones(1))
    with pytest.raises(ValueError, match="no entry 'param_groups'"):
        boostax.from_torch_state(path, PARAMS, order=["a", "b"])
    np.savez(path, param_groups="[]", exp_avg=np.ones(1))
    with pytest.raises(ValueError, match="the entry 'exp_avg'; expected 'state/INDEX/KEY'"):
        boostax.from_torch_state(path, PARAMS, order=["a", "b"])
    np.savez(path, param_groups=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match=r"is no .npz file of plain arrays"):
        boostax.from_torch_state(path, PARAMS, order=["a", "b"])
    with pytest.raises(ValueError, match=r"can't read .*nothing.npz"):
        boostax.from_torch_state(tmp_path / "nothing.npz", PARAMS, order=["a", "b"])


# What is odd in a state, and what is only unusual


@pytest.mark.parametrize("step", [-2, 2.5, np.nan, np.inf, np.ones(2), None, "2"])
def test_steps_that_are_none(step):
    there = adam_there("ab", ARRAYS)
    there["state"][1]["step"] = step
    error = TypeError if isinstance(step, str) else ValueError
    with pytest.raises(error, match=r"state\[1\]\['step'\] must be"):
        from_torch_state(there, PARAMS, order=["a", "b"])


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_entries_that_lack_something(key):
    there = adam_there("ab", ARRAYS)
    del there["state"][1][key]
    with pytest.raises(ValueError, match=rf"state\[1\] has no {key}, which adam keeps"):
        from_torch_state(there, PARAMS, order=["a", "b"])


def test_adam_and_adamw_by_the_groups_own_flags():
    there = adam_there("ab", ARRAYS, weight_decay=0.5)
    (group,) = there["param_groups"]
    there["param_groups"] = [
        {**group, "params": [i], "decoupled_weight_decay": i == 1} for i in range(2)
    ]
    tx, state = from_torch_state(there, PARAMS, order=["a", "b"])
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
    # In the gradient, and beside the step.
    m, v = 0.9 * 0.5 + 0.1 * 0.5, 0.99 * 0.25 + 0.01 * 0.25
    first = -0.1 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.99**3)) + 1e-3)
    np.testing.assert_allclose(updates["a"], np.full(2, first), 2e-5)
    m, v = 0.9 * 0.25, 0.99 * 0.25**2
    second = -0.1 * ((m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.99**3)) + 1e-3) + 0.5)
    np.testing.assert_allclose(updates["b"], np.full(3, second), 2e-5)
    for name, number in (("adam", 1), ("adamw", 0)):
        with pytest.raises(ValueError, match=rf"name is '{name}', but param_groups\[{number}\]"):
            from_torch_state(there, PARAMS, order=["a", "b"], name=name)


def test_the_arrays_stay_the_callers():
    arrays = [array.copy() for array in ARRAYS]
    _, state = from_torch_state(adam_there("ab", arrays), PARAMS, order=["a", "b"])
    arrays[0][:] = 7.0
    np.testing.assert_array_equal(optax.tree.get(state, "mu")["a"], ARRAYS[0])


def test_orders_and_dtypes_of_any_kind():
    arrays = [array.astype(jnp.bfloat16) for array in ARRAYS]
    for order in (PARAMS, PARAMS.keys(), iter("ab"), ("a", "b"), np.array(["a", "b"])):
        _, state = from_torch_state(adam_there("ab", arrays), PARAMS, order=order)
        mu = optax.tree.get(state, "mu")
        np.testing.assert_array_equal(mu["b"], ARRAYS[1])
        assert mu["b"].dtype == jnp.float32


@pytest.mark.parametrize("schedule", [False, True])
def test_a_parameter_that_was_frozen_starts_anew(schedule):
    there = adam_there("ab", ARRAYS[:1], name="backbone", my_note={"any": "thing"})
    group = there["param_groups"][0]
    there["param_groups"] = [{**group, "params": []}, group]
    rate = (lambda count: jnp.where(count == 2, 0.1, jnp.nan)) if schedule else None
    tx, state = from_torch_state(there, PARAMS, order=["a", "b"], learning_rate=rate)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
    m, v = 0.9 * 0.5 + 0.1, 0.99 * 0.25 + 0.01
    step = -0.1 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.99**3)) + 1e-3)
    np.testing.assert_allclose(updates["a"], np.full(2, step), 2e-5)
    np.testing.assert_allclose(updates["b"], np.full(3, -0.1 / 1.001), 2e-5)


def test_a_first_step_that_is_not_dampened_beside_later_ones():
    there = {"state": {0: {"momentum_buffer": ARRAYS[0]}}, "param_groups": [SGD]}
    tx, state = from_torch_state(there, PARAMS, order=["a", "b"])
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
    np.testing.assert_allclose(updates["a"], np.full(2, -0.1 * (0.9 * 0.5 + 0.5)), 1e-6)
    np.testing.assert_allclose(updates["b"], np.full(3, -0.1), 1e-6)


def test_leaves_that_pytorch_did_not_optimize_stay():
    there = adam_there("b", ARRAYS[1:])
    tx, state = from_torch_state(there, PARAMS, order=["b"])
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
    np.testing.assert_array_equal(updates["a"], np.zeros(2))
    assert (np.asarray(updates["b"]) < 0).all()
    with pytest.raises(ValueError, match="order has 2 paths, but PyTorch's groups have 1 param"):
        from_torch_state(there, PARAMS, order=["a", "b"])
