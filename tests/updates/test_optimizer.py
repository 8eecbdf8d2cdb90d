"""boostax.optimizer: names, arguments, groups, the switch for biases and norms, sparse gradients."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO

import boostax
from boostax import RowSparse, optimizer
from boostax._info import find, info_of, walk
from boostax._tree import leaf_paths
from boostax.updates.named import OPTIMIZERS
from boostax.updates.named._leaf_names import is_bias_or_norm, no_bias_or_norm

SETTINGS = {
    "sgd": ({}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}),
    "momentum": ({"nesterov": True},),
    "adagrad": ({}, {"lr_decay": 0.1}),
    "adadelta": ({},),
    "rmsprop": ({}, {"centered": True}, {"momentum": 0.9, "convention": "mindspore"}),
    "adam": ({}, {"amsgrad": True}, {"nesterov": True, "convention": "mindspore"}),
    "adam_weight_decay": ({},),
    "lars": ({}, {"clip": True}),
}
RATES = (0.1, optax.constant_schedule(0.1))
CASES = [
    (name, {"learning_rate": rate, "weight_decay": 0.1, **own})
    for name, settings in SETTINGS.items()
    for own in settings
    for rate in RATES
]
TINY = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


def structs(tree, dtype=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), tree)


@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 float32", "float32 bfloat16"])
def test_structure_and_dtypes_of_every_setting_stay(dtypes):
    assert set(SETTINGS) == set(OPTIMIZERS)
    of_params, of_grads = dtypes.split()
    params, grads = structs(TINY, of_params), structs(TINY, of_grads)
    for name, settings in CASES:
        tx = optimizer(name, **settings)
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(
            lambda g, s, p, tx=tx: tx.update(g, s, p, unknown=1), grads, state, params
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), after
        ), name
        assert updates == grads, name
        # Straight from structs, as a checkpoint's restore wants it.
        jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), tx.init(params), state)
        kept = {x.dtype for x in jax.tree.leaves(state)} - {jnp.dtype("int32")}
        assert kept <= {jnp.dtype("float32")}, name


def test_injected_hyperparameters():
    grads = {"layer": {"kernel": jnp.full((2, 3), 0.5), "bias": jnp.full(3, 0.5)}}

    def first(name, inject):
        make = lambda learning_rate: optimizer(name, learning_rate=learning_rate)
        tx = optax.inject_hyperparams(make)(learning_rate=0.25) if inject else make(0.25)
        return tx.update(grads, tx.init(TINY), TINY)[0]

    with jax.disable_jit():
        for name in OPTIMIZERS:
            jax.tree.map(np.testing.assert_array_equal, first(name, True), first(name, False))
    # All numbers are injected, those that are 0 as well.
    for function in OPTIMIZERS.values():
        tx = optax.inject_hyperparams(function)(learning_rate=0.5)
        state = jax.eval_shape(tx.init, TINY)
        updates, after = jax.eval_shape(tx.update, TINY, state, TINY)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert updates == structs(TINY)
    tx = optax.inject_hyperparams(OPTIMIZERS["sgd"])(learning_rate=0.5, momentum=0.0)
    updates, _ = tx.update(grads, tx.init(TINY), TINY)
    np.testing.assert_array_equal(updates["layer"]["bias"], np.full(3, -0.25))
    with pytest.raises(TypeError, match="inject_hyperparams takes a function of the numbers"):
        optax.inject_hyperparams(optimizer)("sgd", learning_rate=0.5).init(TINY)


def test_a_learning_rate_is_seen_and_compiled_once():
    tx = optimizer("adam", learning_rate=optax.linear_schedule(0.0, 1.0, 4), amsgrad=True)
    step = boostax.train_step(lambda params, batch: jnp.sum(params * batch), tx)
    state, rates = step.init(jnp.ones(2)), []
    for _ in range(3):
        state, metrics = step(state, jnp.ones(2))
        rates.append(float(metrics["learning_rate"]))
    assert rates == [0.0, 0.25, 0.5]
    assert step._jitted(None, state)._cache_size() == 1


def test_every_optimizer_of_optax_by_its_own_name():
    tx, theirs = optimizer("lion", learning_rate=0.1, b1=0.5), optax.lion(0.1, b1=0.5)
    grads = {"layer": {"kernel": jnp.ones((2, 3)), "bias": -jnp.ones(3)}}
    jax.tree.map(
        np.testing.assert_array_equal,
        tx.update(grads, tx.init(TINY), TINY)[0],
        theirs.update(grads, theirs.init(TINY), TINY)[0],
    )
    assert info_of(tx).settings["learning_rate"] == 0.1
    assert find(tx, "scale_by_lion") is not None
    optimizer("muon", learning_rate=0.1)
    adam = optimizer("optax.adam", learning_rate=0.1, eps_root=1e-8)
    assert find(adam, "scale_by_adam") is not None


@pytest.mark.parametrize(
    ("name", "settings", "error", "part"),
    [
        ("rmsporp", {}, ValueError, "got 'rmsporp'. Did you mean 'rmsprop'?"),
        (3, {}, ValueError, "name must be the name of an optimizer, got 3"),
        ("optax.lion", {}, ValueError, "got 'optax.lion'. Did you mean 'lion'?"),
        (
            "adam",
            {"lr": 0.1},
            TypeError,
            "adam has no argument 'lr'. PyTorch's lr is learning_rate",
        ),
        ("adam", {"betas": (0.9, 0.9)}, TypeError, "PyTorch's betas are b1 and b2"),
        ("rmsprop", {"alpha": 0.9}, TypeError, "PyTorch's alpha is decay"),
        ("adam", {"eps_root": 0.1}, TypeError, "optax's own has it: 'optax.adam'"),
        ("sgd", {"momentm": 0.1}, TypeError, "Did you mean 'momentum'?"),
        ("sgd", {}, TypeError, "sgd needs learning_rate"),
        ("sgd", {"learning_rate": "0.1"}, TypeError, "sgd: learning_rate must be a number"),
        ("sgd", {"learning_rate": -1}, ValueError, "learning_rate must be at least 0, got -1"),
        (
            "sgd",
            {"learning_rate": 1, "momentum": 1.0},
            ValueError,
            "momentum must be a number >= 0",
        ),
        ("sgd", {"learning_rate": 1, "nesterov": True}, ValueError, "needs a momentum above 0"),
        ("momentum", {"learning_rate": 1, "momentum": 0.0}, ValueError, "a number > 0 and < 1"),
        ("rmsprop", {"learning_rate": 1, "eps": 0.0}, ValueError, "eps must be a number > 0"),
        (
            "adam",
            {"learning_rate": 1, "nesterov": True},
            ValueError,
            "needs convention='mindspore'",
        ),
        ("adam", {"learning_rate": 1, "amsgrad": 1}, TypeError, "amsgrad must be True or False"),
        ("sgd", {"learning_rate": 1, "convention": "tf"}, ValueError, "'torch' or 'mindspore'"),
        ("lars", {"learning_rate": 0.0, "clip": True}, ValueError, "must be above 0"),
        ("sgd", {"learning_rate": 1, "groups": {}}, TypeError, "groups must be a sequence"),
        (
            "sgd",
            {"learning_rate": 1, "groups": [{}]},
            TypeError,
            "groups[0] must be a mapping with",
        ),
        (
            "optax.adam",
            {"learning_rate": 1, "decay_bias_and_norm": False},
            ValueError,
            "has no weight decay",
        ),
        (
            "sgd",
            {"learning_rate": 1, "groups": [{"params": "*", "lr": 1}]},
            TypeError,
            "groups[0]: sgd has no argument 'lr'",
        ),
        (
            "sgd",
            {"learning_rate": 1, "groups": [{"params": "*", "optimizer": "adm"}]},
            ValueError,
            "groups[0]['optimizer']: name must be",
        ),
        (
            "sgd",
            {"learning_rate": 1, "groups": [{"params": "*", "optimizer": "adam", "eps": 1}]},
            ValueError,
            "put eps into its settings",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_faults_when_it_is_built(name, settings, error, part):
    with pytest.raises(error, match=re.escape(part)):
        optimizer(name, **settings)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_complex_parameters_are_refused(name):
    with pytest.raises(TypeError, match="got complex parameters"):
        optimizer(name, learning_rate=0.1).init(jnp.ones(2, jnp.complex64))


# Groups

PARAMS = {
    "body": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, 2.0)},
    "head": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, 2.0)},
    "LayerNorm_0": {"scale": jnp.full(2, 2.0)},
}
GRADS = jax.tree.map(lambda p: jnp.arange(1.0, p.size + 1).reshape(p.shape), PARAMS)


def one_step(tx, grads=GRADS):
    return tx.update(grads, tx.init(PARAMS), PARAMS)[0]


def test_groups_by_hand():
    tx = optimizer(
        "sgd",
        learning_rate=1.0,
        weight_decay=0.5,
        decay_bias_and_norm=False,
        groups=[
            {"params": "head/*", "learning_rate": 0.1, "centralize": True},
            {"params": re.compile("^body/b"), "optimizer": {"name": "adagrad"}},
            {"params": lambda path: path.startswith("Layer"), "optimizer": optax.sgd(2.0)},
        ],
    )
    got = one_step(tx)
    expected = {
        "body": {"kernel": [[-2, -3], [-4, -5]], "bias": [-1, -1]},
        "head": {"kernel": [[0.0, 0.0], [-0.2, -0.2]], "bias": [-0.1, -0.2]},
        "LayerNorm_0": {"scale": [-2, -4]},
    }
    for layer, leaves in expected.items():
        for leaf, values in leaves.items():
            np.testing.assert_allclose(got[layer][leaf], values, 1e-6, 1e-6)
    fates = info_of(tx).fates(PARAMS)
    assert fates == {
        "head/kernel": "group 0: learning_rate=0.1, centralized",
        "head/bias": "group 0: learning_rate=0.1, centralized",
        "body/bias": "group 1: adagrad",
        "LayerNorm_0/scale": "group 2: an optimizer of its own",
    }
    names = [info.name for info in walk(tx)]
    assert names[0] == "sgd"
    assert [n for n in names if n.startswith(("rest", "group"))] == [
        "rest",
        "group 0",
        "group 1",
        "group 2",
    ]


def test_groups_inside_and_outside_of_the_other_techniques():
    groups = [{"params": "head/*", "learning_rate": 0.25}]
    tx = optimizer("sgd", learning_rate=0.5, groups=groups)
    layers = ["body/*", "LayerNorm_0/*", "head/*"]
    frozen = boostax.Freezing([layers, ["head/*"]], (1,), params=PARAMS)
    around = {
        "accumulate": boostax.accumulate(tx, 1, nonfinite="skip_window"),
        "freeze": boostax.freeze(tx, boostax.Freezing([layers], (0,), params=PARAMS)),
        "centralize": optax.chain(boostax.centralize(axes={"*": ()}), tx),
    }
    for name, outer in around.items():
        got = one_step(outer)
        np.testing.assert_array_equal(got["head"]["bias"], [-0.25, -0.5], err_msg=name)
        np.testing.assert_array_equal(got["body"]["bias"], [-0.5, -1.0], err_msg=name)
    got = one_step(boostax.freeze(tx, frozen))
    np.testing.assert_array_equal(got["head"]["bias"], [-0.25, -0.5])
    np.testing.assert_array_equal(got["body"]["bias"], [0.0, 0.0])
    # LARS with groups: the second leaf's ratio is 0.5 * |w| / |g|.
    tx = optimizer(
        "lars",
        learning_rate=1.0,
        momentum=0.0,
        eps=0.0,
        trust_coefficient=0.5,
        groups=[{"params": "head/kernel", "trust_coefficient": 0.25}],
    )
    got = one_step(tx)
    ratio = 4 / np.sqrt(30)
    np.testing.assert_allclose(got["body"]["kernel"], -0.5 * ratio * GRADS["body"]["kernel"], 1e-6)
    np.testing.assert_allclose(got["head"]["kernel"], -0.25 * ratio * GRADS["head"]["kernel"], 1e-6)
    np.testing.assert_array_equal(got["head"]["bias"], [-1.0, -2.0])


def test_every_named_optimizer_inside_accumulate_and_freeze():
    transforms = [optimizer(name, learning_rate=0.1, weight_decay=0.1) for name in OPTIMIZERS]
    freezing = boostax.Freezing([["layer/*"]], (0,), params=TINY)
    gradients = [
        {"layer": {"kernel": jnp.full((2, 3), g), "bias": jnp.full(3, -g)}} for g in (0.5, 2.0)
    ]

    @jax.jit
    def runs():
        out = []
        for tx in transforms:
            window = boostax.accumulate(tx, 2)
            for around, times in ((tx, 1), (window, 2), (boostax.freeze(tx, freezing), 1)):
                state = around.init(TINY)
                for grads in gradients:
                    for _ in range(times):
                        updates, state = around.update(grads, state, TINY)
                out.append(updates)
        return out

    got = iter(runs())
    for name in OPTIMIZERS:
        alone, *others = next(got), next(got), next(got)
        for other in others:
            same = lambda a, b, name=name: np.testing.assert_allclose(b, a, 1e-5, err_msg=name)
            jax.tree.map(same, alone, other)


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ([{"params": ["head/*", "neck/*"]}], "group 0: the pattern 'neck/*' matches no leaf"),
        ([{"params": "head/*"}, {"params": "*/bias"}], "'head/bias' is in group 0 and in group 1"),
    ],
)
def test_faults_of_groups_at_init(groups, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        optimizer("sgd", learning_rate=1.0, groups=groups).init(PARAMS)


def test_biases_and_norms_by_the_names_of_flax():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Conv(2, (1, 1))(x))
            x = nn.GroupNorm(1)(nn.RMSNorm()(nn.LayerNorm()(x)))
            return nn.Dense(1, name="norm_head")(nn.Embed(3, 2)(x.astype(int))[..., 0, :])

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 2, 2, 1)))["params"]
    mask = no_bias_or_norm(params)
    flags = dict(zip(leaf_paths(mask), jax.tree.leaves(mask), strict=True))
    assert {path for path, decays in flags.items() if decays} == {
        "Conv_0/kernel",
        "Embed_0/embedding",
        "norm_head/kernel",
    }

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(2, 2, rngs=rngs)
            self.bn1 = nnx.BatchNorm(2, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    paths = leaf_paths(state)
    assert [path for path in paths if not is_bias_or_norm(path)] == ["fc/kernel"]
    assert is_bias_or_norm("blocks/3/ln_f/weight")
    assert not is_bias_or_norm("normalizer/kernel")


def test_decay_without_biases_and_norms_in_any_optimizer():
    zero = jax.tree.map(jnp.zeros_like, GRADS)
    for name in ("sgd", "adamw", "optax.lars", "adam_weight_decay"):
        tx = optimizer(name, learning_rate=0.5, weight_decay=0.25, decay_bias_and_norm=False)
        moved = jax.tree.map(lambda u: bool(jnp.any(u != 0)), one_step(tx, zero))
        assert moved["body"] == {"kernel": True, "bias": False}, name
        assert moved["LayerNorm_0"] == {"scale": False}, name


# Row-sparse gradients


@pytest.mark.parametrize("kind", ["rows", "bcoo"])
def test_sparse_adagrad_is_pytorchs(reference, kind):
    values = reference("o_torch_sparse_adagrad")
    with jax.enable_x64(True):
        tx = optimizer(
            "adagrad", learning_rate=0.1, lr_decay=0.05, initial_accumulator_value=0.1, eps=1e-8
        )

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        table = jnp.asarray(values["init"])
        params = {"bias": jnp.ones(3), "table": table}
        state = tx.init(params)
        for t in range(5):
            rows, entries = jnp.asarray(values[f"indices{t}"]), jnp.asarray(values[f"values{t}"])
            if t % 2 == 0:  # an index that names no row, so that all have the same number
                rows = jnp.append(rows, 10)
                entries = jnp.append(entries, jnp.full((1, 3), jnp.nan), axis=0)
            grad = (
                RowSparse(rows, entries, table.shape)
                if kind == "rows"
                else BCOO((entries, rows[:, None]), shape=table.shape)
            )
            before = params, state
            params, state = step(params, state, {"bias": jnp.ones(3), "table": grad})
            untouched = np.setdiff1d(np.arange(10), rows)
            for old, new in (
                (before[0]["table"], params["table"]),
                (before[1].sum_of_squares["table"], state.sum_of_squares["table"]),
            ):
                np.testing.assert_array_equal(np.array(new)[untouched], np.array(old)[untouched])
            np.testing.assert_allclose(params["table"], values[f"step{t}"], 1e-10, 1e-10)
            got = state.sum_of_squares["table"]
            np.testing.assert_allclose(got, values[f"accumulator{t}"], 1e-10, 1e-10)
        assert step._cache_size() == 1


SPARSE = optimizer("adagrad", learning_rate=0.5)


@jax.jit
def both_ways(rows, entries, dense):
    """Return parameters and sums after one step with a sparse and one with a dense gradient."""
    table = jnp.arange(8.0).reshape(4, 2)
    state = SPARSE.init(table)
    grad = RowSparse(rows, entries, table.shape)
    pairs = [SPARSE.update(g, state, table) for g in (grad, dense)]
    out = [(optax.apply_updates(table, u), s.sum_of_squares) for u, s in pairs]
    return out, grad.todense()


@given(st.lists(st.integers(-1, 4), min_size=5, max_size=5))
def test_sparse_is_dense_where_rows_are_named(rows):
    entries = np.arange(1.0, 11.0, dtype=np.float32).reshape(5, 2)
    dense = np.zeros((4, 2), np.float32)
    for row, entry in zip(rows, entries, strict=True):
        if 0 <= row < 4:
            dense[row] += entry
    (sparse_step, dense_step), whole = both_ways(np.array(rows, np.int32), entries, dense)
    np.testing.assert_array_equal(whole, dense)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), sparse_step, dense_step)


def test_no_row_at_all():
    rows = RowSparse(jnp.zeros(0, jnp.int32), jnp.zeros((0, 2)), (4, 2))
    table = jnp.ones((4, 2))
    updates, state = SPARSE.update(rows, SPARSE.init(table), table)
    np.testing.assert_array_equal(optax.apply_updates(table, updates), table)
    np.testing.assert_array_equal(state.sum_of_squares, np.zeros((4, 2)))


def test_sparse_gradients_in_groups_and_where_they_do_not_go():
    params = {"embed": {"embedding": jnp.ones((3, 2))}, "fc": {"kernel": jnp.ones((2, 2))}}
    rows = RowSparse(jnp.array([1, 1]), jnp.ones((2, 2)), (3, 2))
    grads = {"embed": {"embedding": rows}, "fc": {"kernel": jnp.eye(2)}}
    group = {"params": "embed/*", "optimizer": {"name": "adagrad", "learning_rate": 0.5}}
    tx = optimizer("sgd", learning_rate=1.0, weight_decay=0.5, centralize=True, groups=[group])
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["embed"]["embedding"], [[1, 1], [0.5, 0.5], [1, 1]])
    np.testing.assert_allclose(new["fc"]["kernel"], [[0.0, 1.0], [1.0, 0.0]])
    for name, settings, error, part in (
        ("sgd", {}, TypeError, "only adagrad takes them"),
        ("adagrad", {"weight_decay": 0.1}, ValueError, "does not go with row-sparse gradients"),
    ):
        tx = optimizer(name, learning_rate=1.0, **settings)
        with pytest.raises(error, match=part):
            tx.update(grads, tx.init(params), params)
    tx = optimizer("adagrad", learning_rate=1.0)
    state = tx.init(jnp.ones((3, 2)))
    for bad, part in (
        (RowSparse(jnp.array([0]), jnp.ones((1, 2)), (4, 2)), r"a gradient of shape \(4, 2\)"),
        (RowSparse(jnp.array([0]), jnp.ones((2, 2)), (3, 2)), r"indices must be \(n,\)"),
        (BCOO.fromdense(jnp.ones((3, 2))), "n_sparse = 2 at shape"),
    ):
        with pytest.raises(ValueError, match=part):
            tx.update(bad, state, jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="indices must be integers"):
        RowSparse(jnp.ones(1), jnp.ones((1, 2)), (3, 2)).todense()
    with pytest.raises(ValueError, match=r"can't add shape \(3, 2\) to shape \(2, 2\)"):
        jnp.ones((2, 2)) + rows


def test_by_hand():
    def first(name, gradient, param=1.0, **settings):
        tx = optimizer(name, learning_rate=1.0, **settings)
        w = jnp.array([param])
        return float(tx.update(jnp.array([gradient]), tx.init(w), w)[0][0])

    assert first("sgd", 2.0, weight_decay=0.5) == -2.5
    assert first("adagrad", 2.0, weight_decay=0.5) == pytest.approx(-1.0)
    # An entry that never had a gradient stays where it is.
    for name in ("adagrad", "adadelta", "rmsprop", "adam", "adam_weight_decay", "lars"):
        assert first(name, 0.0) == 0.0, name
    adagrad = optimizer(
        "adagrad", learning_rate=1.0, convention="mindspore", initial_accumulator_value=0.0
    )
    assert float(adagrad.update(jnp.zeros(1), adagrad.init(jnp.ones(1)))[0][0]) == 0.0
    lars = optimizer("lars", learning_rate=1.0)
    with pytest.raises(ValueError, match="lars: the norms of the parameters are needed"):
        lars.update(jnp.ones(1), lars.init(jnp.ones(1)))


def test_a_constant_gradient_keeps_the_centred_variance_real():
    tx = optimizer("rmsprop", learning_rate=1e-3, centered=True, decay=0.5)
    grads = jnp.array([0.1, 1e3, 1.7])
    body = lambda state, _: tx.update(grads, state)[::-1]
    _, updates = jax.lax.scan(body, tx.init(grads), None, 64)
    assert bool(jnp.isfinite(updates).all())
