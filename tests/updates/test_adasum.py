"""adasum: values by hand, the reference, any number of devices, the ways to run, composition."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from boostax import Freezing, accumulate, adasum, adasum_pair, freeze, parameter_groups

pytestmark = pytest.mark.slow

ALGORITHMS = ("halving", "gather")
SPEC = PartitionSpec


def pair64(a, b):
    dot, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    from_a, from_b = (dot / (2 * square) if square else 0.0 for square in (aa, bb))
    return (1 - from_a) * a + (1 - from_b) * b


def tree64(vectors):
    """AdaSum in float64: the first 2(n - p) in pairs, then a binary tree in rank order."""
    rest = [np.asarray(v, np.float64) for v in vectors]
    extras = len(rest) - (1 << (len(rest).bit_length() - 1))
    folded = [pair64(rest[2 * i], rest[2 * i + 1]) for i in range(extras)]
    rest = folded + rest[2 * extras :]
    while len(rest) > 1:
        rest = [pair64(rest[i], rest[i + 1]) for i in range(0, len(rest), 2)]
    return rest[0]


def lanes(grads, axis="d", **settings):
    """Combine trees stacked on the first axis under vmap; return what every lane got."""
    tx = adasum(axis, **settings)
    combined = jax.vmap(lambda g: tx.update(g, optax.EmptyState())[0], axis_name=axis)
    return jax.jit(combined)(grads)


def same_everywhere(tree):
    for leaf in jax.tree.leaves(tree):
        rows = [np.asarray(row).tobytes() for row in leaf]
        assert len(set(rows)) == 1
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), tree)


def mesh_of(n, names=("d",), shape=None):
    return Mesh(np.array(jax.devices()[:n]).reshape(shape or (n,)), names)


def mapped(function, n, check_vma=True):
    """Return ``function`` of one device's share over ``n`` devices, compiled."""
    inside = lambda tree: function(jax.tree.map(lambda x: x[0], tree))
    return jax.jit(
        jax.shard_map(
            inside,
            mesh=mesh_of(n),
            in_specs=SPEC("d"),
            out_specs=SPEC(),
            check_vma=check_vma,
        )
    )


def random_tree(n, seed=0):
    draw = np.random.default_rng(seed)
    shapes = {"kernel": (5, 7), "bias": (5,), "scale": (5,), "one": (), "large": (3, 6001)}
    return {k: draw.standard_normal((n, *s)).astype(np.float32) for k, s in shapes.items()}


def right(grads):
    return {k: tree64(v.reshape(len(v), -1)).reshape(v.shape[1:]) for k, v in grads.items()}


def assert_near_float64(got, grads):
    for name, expected in right(grads).items():
        error = np.linalg.norm(np.asarray(got[name], np.float64) - expected)
        # Where one number cancels another, what is lost is a share of these, not of the result.
        most = max(np.linalg.norm(x) for x in (expected, *grads[name]))
        assert error <= 1e-6 * most, (name, error / most)


# By hand

VALUES = [
    ([[2, 0], [2, 0]], [2, 0]),
    ([[2, 0], [4, 0]], [3, 0]),
    ([[1, 0], [0, 1]], [1, 1]),
    ([[1, 0], [1, 1]], [1.25, 0.75]),
    ([[1, 0], [-1, 0]], [0, 0]),
    ([[2, 0], [-1, 0]], [0.5, 0]),
    ([[0, 0], [3, 4]], [3, 4]),
    ([[0, 0], [0, 0]], [0, 0]),
    ([[3, 4]] * 8, [3, 4]),
    ([[1, 0], [1, 0], [0, 1], [0, 1]], [1, 1]),
    ([[3, 4]], [3, 4]),
    ([[3, 4]] * 3, [3, 4]),
    ([[3, 4]] * 12, [3, 4]),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("vectors", "expected"), VALUES)
def test_values(vectors, expected, algorithm):
    got = same_everywhere(lanes(jnp.array(vectors, jnp.float32), algorithm=algorithm))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    if len(vectors) == 2:
        a, b = jnp.array(vectors, jnp.float32)
        np.testing.assert_allclose(adasum_pair(a, b), expected, rtol=1e-6)
        np.testing.assert_array_equal(adasum_pair(a, b), adasum_pair(b, a))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_orthogonal_vectors_are_added_on_any_number_of_devices(algorithm):
    for n in (3, 5, 6, 12):
        got = same_everywhere(lanes(jnp.eye(n), algorithm=algorithm))
        np.testing.assert_allclose(got, np.ones(n), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_coefficients_are_those_of_a_leaf_or_of_the_tree(algorithm):
    grads = {"a": jnp.array([[1.0, 0], [1, 0]]), "b": jnp.array([[1.0, 0], [0, 1]])}
    leaf = same_everywhere(lanes(grads, algorithm=algorithm))
    np.testing.assert_allclose(leaf["a"], [1, 0])
    np.testing.assert_allclose(leaf["b"], [1, 1])
    tree = same_everywhere(lanes(grads, algorithm=algorithm, granularity="tree", buckets=1))
    np.testing.assert_allclose(tree["a"], [1.5, 0])
    np.testing.assert_allclose(tree["b"], [0.75, 0.75])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 1e-25),
        ("float32", 1e20),
        ("float32", 3e38),
        ("float16", 1e-6),
        ("float16", 4e4),
        ("bfloat16", 1e-25),
        ("bfloat16", 1e30),
    ],
)
def test_tiny_and_huge_values_in_each_dtype(algorithm, dtype, size):
    unit = np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]])
    grads = {"w": jnp.asarray(unit * size, dtype)}
    got = same_everywhere(lanes(grads, algorithm=algorithm))["w"]
    assert got.dtype == jnp.dtype(dtype)
    expected = tree64(np.asarray(grads["w"], np.float64) / size)
    kind = jnp.finfo(dtype)
    # Half the distance to the next number, plus the arithmetic's own error.
    rtol, atol = float(kind.eps) * 0.51 + 1e-6, float(kind.smallest_subnormal) * 0.51 / size
    np.testing.assert_allclose(np.asarray(got, np.float64) / size, expected, rtol=rtol, atol=atol)


def test_a_tiny_vector_still_has_a_direction():
    # [1e-25, 0] and [1e10, 0] agree: their average, not their sum.
    got = adasum_pair(jnp.array([1e-25, 0.0]), jnp.array([1e10, 0.0]))
    np.testing.assert_allclose(got, [5e9, 0], rtol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_device_is_so_on_all(algorithm, bad):
    grads = np.ones((4, 3), np.float32)
    grads[1, 0] = bad
    got = np.asarray(lanes(grads, algorithm=algorithm))
    assert not np.isfinite(got).all(axis=1).any()


def test_other_leaves_pass_and_structure_is_kept():
    grads = {
        "int": jnp.array([[1], [2]]),
        "empty": jnp.zeros((2, 0)),
        "masked": optax.MaskedNode(),
        "complex": jnp.array([[1 + 0j], [1j]]),
        "w": jnp.array([[1.0], [3.0]]),
    }
    got = lanes(grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    np.testing.assert_array_equal(got["int"], grads["int"])
    np.testing.assert_allclose(got["complex"][1], [1 + 1j])
    assert got["complex"].dtype == jnp.complex64
    np.testing.assert_allclose(got["w"][0], [2])


# Reference values


def test_reference_pairs(reference):
    values = reference("g_adasum")
    names = [k.removesuffix("_local") for k in values if k.endswith("_local")]
    assert len(names) == 9
    for name in names:
        a, b = values[f"{name}_local"], values[f"{name}_recv"]
        if name == "tiny":
            # The reference adds 1e-12 to the squares, which at 1e-8 is not nothing; ours is exact.
            expected = pair64(a.astype(np.float64), b.astype(np.float64))
        else:
            expected = values[f"{name}_res_left"]
        np.testing.assert_allclose(adasum_pair(a, b), expected, rtol=1e-5, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_reference_trees(reference, n, algorithm):
    values = reference("g_adasum")
    vectors, expected = values[f"tree{n}_in"], values[f"tree{n}_out"]
    np.testing.assert_allclose(tree64(vectors), expected, rtol=1e-10)
    got = same_everywhere(lanes(vectors.astype(np.float32), algorithm=algorithm))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# Any number of devices, and each way to run


@pytest.mark.parametrize(
    ("n", "algorithm"),
    [*((n, "halving") for n in (1, 2, 3, 5, 6, 7, 8)), *((n, "gather") for n in (2, 5, 8))],
)
def test_devices_equal_float64_and_each_other(n, algorithm):
    grads = random_tree(n)
    tx = adasum("d", algorithm=algorithm, buckets=(2, 3))
    combined = lambda tree: tx.update(tree, optax.EmptyState())[0]
    # One device's share comes out on all: out_specs would raise otherwise.
    step = mapped(combined, n)
    got = step(grads)
    assert_near_float64(got, grads)
    for name in grads:
        copies = [np.asarray(s.data).tobytes() for s in got[name].addressable_shards]
        assert len(set(copies)) == 1
    virtual = same_everywhere(jax.jit(jax.vmap(combined, axis_name="d"))(grads))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), virtual, got)


@pytest.mark.parametrize("n", [3, 4])
def test_without_checks_and_under_pmap(n):
    grads = random_tree(n)
    tx = adasum("d")
    combined = lambda tree: tx.update(tree, optax.EmptyState())[0]
    checked = mapped(combined, n)(grads)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    jax.tree.map(close, mapped(combined, n, check_vma=False)(grads), checked)
    pmapped = jax.pmap(combined, axis_name="d", devices=jax.devices()[:n])(grads)
    jax.tree.map(close, same_everywhere(pmapped), checked)


def test_twelve_lanes():
    grads = random_tree(12)
    got = same_everywhere(lanes(grads))
    assert_near_float64(got, grads)


def test_large_leaves_travel_alone_and_tiny_or_huge_ones_are_right_beside_others():
    # One of 2^16 numbers goes alone; 70001 is prime, 35003 and 9 make no even rows.
    draw = np.random.default_rng(0)
    sizes = {"plain": 1 << 16, "tiny": 70001, "huge": 35003, "zero": 1 << 16, "small": 9}
    grads = {
        name: (draw.standard_normal(size) + draw.standard_normal((3, size))).astype(np.float32)
        for name, size in sizes.items()
    }
    factors = {"tiny": 1e-25, "huge": 1e20, "zero": 0}
    scaled = {k: (v * np.float32(factors.get(k, 1))).astype(np.float32) for k, v in grads.items()}
    tx = adasum("d")
    got = mapped(lambda g: tx.update(g, optax.EmptyState())[0], 3)(scaled)
    np.testing.assert_array_equal(got.pop("zero"), 0)
    del grads["zero"]
    assert_near_float64(
        {k: np.asarray(v, np.float64) / factors.get(k, 1) for k, v in got.items()}, grads
    )


@pytest.mark.parametrize(("n", "algorithm"), [(2, "halving"), (6, "gather"), (7, "halving")])
def test_one_coefficient_for_the_tree_equals_float64(n, algorithm):
    grads = random_tree(n)
    got = same_everywhere(lanes(grads, algorithm=algorithm, granularity="tree"))
    flat = np.concatenate([grads[k].reshape(n, -1) for k in sorted(grads)], axis=1)
    expected = tree64(flat)
    found = np.concatenate([got[k].ravel() for k in sorted(got)]).astype(np.float64)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


def test_mean_inside_adasum_outside():
    # Two hosts of two devices: means [.5, .5] and [1, -1], then AdaSum.
    mesh = mesh_of(4, ("hosts", "local"), (2, 2))
    grads = jnp.array([[[1.0, 0], [0, 1]], [[1, -1], [1, -1]]])
    tx = adasum("hosts", inner_axis="local")
    step = jax.shard_map(
        lambda g: tx.update(g[0, 0], optax.EmptyState())[0],
        mesh=mesh,
        in_specs=SPEC("hosts", "local"),
        out_specs=SPEC(),
    )
    np.testing.assert_allclose(jax.jit(step)(grads), [1.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_shared_parameters(check_vma):
    x = jnp.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    tx = adasum("d")

    def step(share):
        params = jnp.zeros(2)
        if check_vma:
            params = jax.lax.pcast(params, "d", to="varying")
        grads = jax.grad(lambda p: p @ share)(params)
        return tx.update(grads, optax.EmptyState())[0], jax.lax.pmean(grads, "d")

    combined, mean = mapped(step, 4, check_vma)(x)
    np.testing.assert_allclose(combined, [1, 1])
    np.testing.assert_allclose(mean, [0.5, 0.5])


def test_gradients_that_are_summed_already_are_refused():
    step = mapped(lambda x: adasum("d").update({"w": jax.lax.psum(x, "d")}, ())[0], 2)
    with pytest.raises(ValueError, match=r"'w' is the same on all devices of the axis 'd'.*pcast"):
        step(jnp.ones((2, 3)))


# Properties


@hypothesis.given(
    seed=st.integers(0, 10**6), n=st.sampled_from([2, 3, 4]), exponent=st.integers(-60, 60)
)
def test_a_common_factor_comes_out_and_partners_may_swap(seed, n, exponent):
    grads = np.random.default_rng(seed).standard_normal((n, 6)).astype(np.float32)
    got = np.asarray(_four(grads))
    np.testing.assert_allclose(got[0], tree64(grads), rtol=1e-4, atol=1e-5)
    factor = np.float32(2.0**exponent)
    np.testing.assert_allclose(
        np.asarray(_four(grads * factor)) / factor, got, rtol=1e-5, atol=1e-6
    )
    swapped = np.concatenate([grads[1::-1], grads[2:]])
    np.testing.assert_allclose(_four(swapped)[0], got[0], rtol=1e-5, atol=1e-6)
    equal = np.broadcast_to(grads[:1], grads.shape)
    np.testing.assert_allclose(_four(equal), equal, rtol=1e-6)


@jax.jit
def _four(grads):
    return lanes(grads)


# What is sent


def sent(text):
    """Bytes of each large collective's result, in the HLO's text."""
    shapes = re.findall(
        r"= f32\[([\d,]*)\]\S* (?:collective-permute|all-gather)(?:-start)?\(", text
    )
    return [4 * int(np.prod([int(d) for d in s.split(",") if d] or [1])) for s in shapes]


@pytest.mark.parametrize(("n", "bound"), [(2, 1.05), (4, 1.575), (8, 1.8)])
def test_bytes_on_the_wire(n, bound):
    grads = {"w": np.ones((n, 64, 128), np.float32), "b": np.ones((n, 128), np.float32)}
    tx = adasum("d", buckets=())
    step = mapped(lambda g: tx.update(g, optax.EmptyState())[0], n)
    text = step.lower(grads).compile().as_text()
    total = 4 * (64 * 128 + 128)
    gathers = [4 * (64 * 128 + 128)]
    sizes = sent(text)
    assert gathers[0] in sizes
    sizes.remove(gathers[0])
    assert (sum(sizes) + total * (n - 1) / n) / total <= bound


def test_frozen_leaves_are_not_sent():
    params = {f"layer_{i}": jnp.zeros((64, 64)) for i in range(2)}
    freezing = Freezing(parameter_groups(params, 2), (0, 1))
    tx = freeze(optax.chain(adasum("d"), optax.sgd(1.0)), freezing)
    state = tx.init(params)
    grads = {name: np.ones((4, 64, 64), np.float32) for name in params}

    def bytes_at(index):
        update = lambda g: tx.update(g, state, params, freeze_index=index)[0]
        return sum(sent(mapped(update, 4).lower(grads).compile().as_text()))

    whole, half = bytes_at(0), bytes_at(1)
    assert 0.45 < half / whole < 0.55


def _window(nonfinite="skip_micro"):
    return accumulate(optax.chain(adasum("d"), optax.sgd(1.0)), 2, nonfinite=nonfinite)


def test_a_window_is_exchanged_once():
    tx, params = _window(), jnp.zeros((64, 64))
    text = mapped(lambda g: tx.update(g, tx.init(params), params)[0], 4)
    text = text.lower(np.ones((4, 64, 64), np.float32)).compile().as_text()
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{)", text)
    holding = [c.split("(")[0].strip() for c in computations if sum(sent(c)) >= 64 * 64]
    assert holding, "nothing is exchanged"
    branches = " ".join(
        re.findall(r"(?:branch_computations=\{.*?\}|(?:true|false)_computation=\S+)", text)
    )
    assert all(name in branches for name in holding), (holding, branches)


@pytest.mark.parametrize(
    ("policy", "check_vma"), [("skip_micro", True), ("skip_window", True), ("skip_window", False)]
)
def test_devices_decide_together(policy, check_vma):
    # The second micro-batch is bad on one device only: all leave it out, or all drop the window.
    tx, params = _window(policy), jnp.zeros(2)
    grads = np.ones((4, 4, 2), np.float32)
    grads[1, 1, 0] = np.inf

    def steps(share):
        state, out = tx.init(params), []
        if check_vma:
            state = jax.lax.pcast(state, "d", to="varying")
        for g in share:
            updates, state = tx.update(g, state, params)
            out.append(updates)
        facts = jnp.stack([state.skipped_micro, state.skipped_windows, state.position])
        return jax.lax.all_gather((jnp.stack(out), facts), "d")

    inside = lambda g: steps(g[0])
    step = jax.shard_map(
        inside, mesh=mesh_of(4), in_specs=SPEC("d"), out_specs=SPEC("d"), check_vma=check_vma
    )
    out, facts = jax.jit(step)(grads)
    windows = {"skip_micro": [0, 0, -1, 0], "skip_window": [0, 0, 0, -1]}[policy]
    expected = np.broadcast_to(np.array(windows, np.float32)[:, None], out.shape[1:])
    for row in out:
        np.testing.assert_allclose(row, expected)
    counts = {"skip_micro": [1, 0, 1], "skip_window": [1, 1, 0]}[policy]
    np.testing.assert_array_equal(facts, np.broadcast_to(counts, facts.shape))


def test_a_device_without_weight_in_a_window_adds_nothing():
    # Window 1 everywhere; in window 2 all of device 1's micro-batches have weight 0. Its sums still
    # hold window 1's then, which must not come back.
    tx, params = _window(), jnp.zeros(2)
    grads = np.array([[[1, 0]] * 4, [[0, 1]] * 4, [[0, 2]] * 4], np.float32)
    weights = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], np.float32)

    def steps(grads, weights):
        state, out = tx.init(params), []
        for g, w in zip(grads, weights, strict=True):
            updates, state = tx.update(g, state, params, weight=w)
            out.append(updates)
        return jnp.stack(out), state.updates

    out, updates = jax.jit(jax.vmap(steps, axis_name="d"))(grads, weights)
    np.testing.assert_array_equal(updates, [2, 2, 2])
    out = same_everywhere(out)
    np.testing.assert_allclose(out[1], -tree64([[1, 0], [0, 1], [0, 2]]), rtol=1e-6)
    np.testing.assert_allclose(out[3], [-1, -2], rtol=1e-6)


# Arguments


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"axis_name": 3}, TypeError, "axis_name must be the name of one axis"),
        ({"axis_name": ("a", "b")}, TypeError, "axis_name"),
        ({"axis_name": ""}, ValueError, "axis_name is empty"),
        ({"inner_axis": "d"}, ValueError, "inner_axis and axis_name are both 'd'"),
        ({"granularity": "leafs"}, ValueError, "granularity.*Did you mean 'leaf'"),
        ({"algorithm": "ring"}, ValueError, "algorithm must be one of 'halving', 'gather'"),
        ({"buckets": 0}, ValueError, "ascending leaf counts >= 1"),
        ({"buckets": (5, 5)}, ValueError, "ascending"),
        ({"buckets": True}, TypeError, "buckets"),
        ({"buckets": (1.5,)}, TypeError, "buckets must hold ints"),
        ({"order": "w"}, TypeError, "order must be a sequence of paths"),
    ],
)
def test_wrong_arguments_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        adasum(**{"axis_name": "d", **settings})


def test_an_unbound_axis_is_named():
    with pytest.raises(NameError, match=r"the axis 'hosts' is not bound here.*shard_map"):
        adasum("hosts").update(jnp.ones(2), optax.EmptyState())


def test_split_points():
    params = {f"layer_{i}": jnp.zeros(2) for i in range(12)}
    exchanging = adasum("d", buckets=np.int64(3)).update.__boostax_info__.static
    first, rest = exchanging.describe(params).buffers
    assert first == ("layer_0", "layer_1", "layer_2")
    assert rest[-1] == "layer_11"
    with pytest.warns(UserWarning, match=r"buckets has 12, 40, but there are only 12 leaves"):
        adasum("d", buckets=[3, 12, 40]).init(params)
    order = tuple(reversed(params))
    info = adasum("d", buckets=[3], order=order).update.__boostax_info__
    assert info.static.describe(params).buffers[0] == order[:3]
    assert info.fates(params)["layer_0"] == "combined by AdaSum over 'd', buffer 2 of 2"
    with pytest.raises(ValueError, match=r"order has 'layer_20', which is no leaf"):
        adasum("d", order=("layer_20",)).init(params)
    grads = {name: jnp.stack([leaf + 1, leaf + i]) for i, (name, leaf) in enumerate(params.items())}
    cut, whole = lanes(grads, buckets=[3, 7]), lanes(grads, buckets=())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), cut, whole)


def test_pairs_must_be_alike():
    with pytest.raises(ValueError, match="same structure"):
        adasum_pair({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"leaf 'a': a and b must be alike"):
        adasum_pair({"a": jnp.ones(2)}, {"a": jnp.ones(3)})
    with pytest.raises(TypeError, match="floating or complex"):
        adasum_pair(jnp.ones(2, jnp.int32), jnp.ones(2, jnp.int32))
