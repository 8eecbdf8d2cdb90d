"""Which scale each cotangent is carried at: labels and boundaries in a loss's program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import boostax
from boostax._tree import leaf_paths
from boostax.gradients._grouped import labels_of
from boostax.gradients._plan import trace_loss


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) * 0.5


def labelled(loss, params, x, groups, frozen=()):
    scaling = boostax.GroupLossScale(groups)
    whole = lambda p, state, batch, rng: (loss(p, batch), boostax.LossAux())
    jaxpr, _ = trace_loss(whole, params, None, x, None)
    flags = [path not in frozen for path in leaf_paths(params)]
    return labels_of(scaling, jaxpr, params, flags, len(jax.tree.leaves(x)))


def cuts(labels):
    """Return ``(from, to, what)`` of all boundaries, in the order of the program."""
    every = [cut for cuts in labels.cuts.values() for cut in cuts]
    return [(cut.source, cut.target, cut.what) for cut in every]


def chain(dtype):
    def loss(params, x):
        h = x.astype(dtype)
        for name in "abc":
            h = jnp.tanh(h @ params[name].astype(dtype))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return loss


PARAMS = {name: normal(4, 4, seed=i) for i, name in enumerate("abc")}
X = normal(8, 4, seed=9)


@pytest.mark.quick
def test_a_chain_has_a_boundary_ahead_of_each_further_group():
    labels = labelled(chain(jnp.float16), PARAMS, X, ["a", "b", "c"])
    assert cuts(labels) == [
        (1, 2, "float16[8,4] into dot_general"),
        (2, 3, "float16[8,4] into dot_general"),
    ]
    assert labels.outs == (3,)
    assert len(labelled(chain(jnp.float16), PARAMS, X, ["*"]).cuts) == 0
    assert cuts(labelled(chain(jnp.float16), PARAMS, X, [["a", "b"], "c"])) == [
        (1, 2, "float16[8,4] into dot_general")
    ]


def test_a_boundary_stands_ahead_of_a_cast_to_fewer_bits():
    def loss(params, x):
        h = jnp.tanh(x @ params["a"])
        h = h.astype(jnp.float16) @ params["b"].astype(jnp.float16)
        return jnp.mean(h.astype(jnp.float32) @ params["c"])

    labels = labelled(loss, PARAMS, X, ["a", "b", "c"])
    assert cuts(labels) == [
        (1, 2, "float32[8,4] into convert_element_type"),
        (2, 3, "float32[8,4] into dot_general"),
    ]


def test_groups_in_turn_and_a_residual():
    def loss(params, x):
        h = x
        for name in "abab":
            h = h + jnp.tanh(h @ params[name])
        return jnp.mean(h)

    params = {name: PARAMS[name] for name in "ab"}
    found = cuts(labelled(loss, params, X, ["a", "b"]))
    dots = [(s, t) for s, t, what in found if "dot" in what]
    assert dots == [(1, 2), (2, 1), (1, 2)]
    # The sum belongs to the layer that came last, and takes the stream from before it.
    assert [(s, t) for s, t, what in found if "add" in what] == [(1, 2), (2, 1), (1, 2)]


def test_two_towers_meet_once():
    def loss(params, x):
        one = jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        return 8.0 * one + 0.5 * jnp.mean(x @ params["c"])

    found = cuts(labelled(loss, PARAMS, X, [["a", "b"], "c"]))
    assert found == [(1, 2, "float32[] into add")]


def test_tied_weights_and_penalties():
    def loss(params, x):
        y = x @ params["a"] @ params["b"] @ params["a"].T
        return jnp.mean(y) + 0.01 * jnp.sum(params["b"] ** 2)

    params = {name: PARAMS[name] for name in "ab"}
    labels = labelled(loss, params, X, ["a", "b"])
    assert [(s, t) for s, t, _ in cuts(labels)] == [(1, 2), (2, 1), (2, 1)]
    # The penalty is added at the scale of the loss that the data made.
    assert cuts(labels)[-1] == (2, 1, "float32[] into add")
    assert labels.outs == (1,)


def test_frozen_leaves_need_no_boundary():
    labels = labelled(chain(jnp.float16), PARAMS, X, ["a", "b", "c"], frozen=("a",))
    assert [(s, t) for s, t, _ in cuts(labels)] == [(2, 3)]
    labels = labelled(chain(jnp.float16), PARAMS, X, ["a", "b", "c"], frozen=("b",))
    assert [(s, t) for s, t, _ in cuts(labels)] == [(1, 3)]
    labels = labelled(chain(jnp.float16), PARAMS, X, ["a", "b", "c"], frozen=("a", "b", "c"))
    assert (cuts(labels), labels.outs) == ([], (None,))


def test_inside_jit_remat_and_scan():
    def layer(h, w):
        return jnp.tanh(h @ w)

    def loss(params, x):
        h = jax.jit(layer)(x, params["a"])
        h = jax.checkpoint(lambda h: layer(layer(h, params["b"]), params["c"]))(h)
        return jnp.mean(h)

    labels = labelled(loss, PARAMS, X, ["a", "b", "c"])
    assert [(s, t) for s, t, _ in cuts(labels)] == [(1, 2), (2, 3)]
    assert {len(at) for at in labels.cuts} == {2}

    def scanned(params, x):
        def block(h, w):
            return layer(layer(h, w["b"]), w["c"]), None

        h, _ = jax.lax.scan(block, layer(x, params["a"]), {k: params[k] for k in "bc"})
        return jnp.mean(h)

    stack = {"a": PARAMS["a"], "b": normal(5, 4, 4), "c": normal(5, 4, 4, seed=1)}
    labels = labelled(scanned, stack, X, ["a", "b", "c"])
    found = [cut for cuts in labels.cuts.values() for cut in cuts]
    # What is carried has the label of the body's last layer; it comes into the loop from group 1.
    assert [(c.source, c.target, c.lengths) for c in found] == [
        (1, 3, ()),
        (3, 2, (5,)),
        (2, 3, (5,)),
    ]
    # In the order of the program: into the loop, then both boundaries of turn 0, of turn 1, ...
    assert labels.order().tolist() == [0, *range(1, 11, 2), *range(2, 11, 2)]
    backwards = labelled(
        lambda p, x: jnp.mean(
            jax.lax.scan(
                lambda h, w: (layer(layer(h, w["b"]), w["c"]), None),
                layer(x, p["a"]),
                {k: p[k] for k in "bc"},
                reverse=True,
            )[0]
        ),
        stack,
        X,
        ["a", "b", "c"],
    )
    assert backwards.order().tolist() == [0, *range(9, 0, -2), *range(10, 0, -2)]


def test_a_loop_that_swaps_what_it_carries():
    def loss(params, x):
        a, b = x @ params["a"], x @ params["b"]
        (a, b), _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), length=3)
        return jnp.mean(a * b)

    params = {name: PARAMS[name] for name in "ab"}
    labels = labelled(loss, params, X, ["a", "b"])
    # One label for the whole loop.
    assert [(s, t, "scan" in what) for s, t, what in cuts(labels)] == [(1, 2, True)]


def test_what_can_not_be_taken_apart_has_one_label():
    @jax.custom_vjp
    def two(x, a, b):
        return x @ a @ b

    two.defvjp(lambda x, a, b: (x @ a @ b, (x, a, b)), lambda r, g: (g, r[1] * 0, r[2] * 0))

    def loss(params, x):
        h = two(x @ params["a"], params["b"], params["c"])
        pick = lambda h: h @ params["a"]
        return jnp.mean(jax.lax.cond(h[0, 0] > 0, pick, jnp.tanh, h))

    labels = labelled(loss, PARAMS, X, ["a", "b", "c"])
    what = [(s, t, text.split()[-1]) for s, t, text in cuts(labels)]
    assert what == [
        (1, 3, "custom_vjp_call"),
        (2, 3, "custom_vjp_call"),
        (3, 1, "cond"),
    ]


@pytest.mark.quick
def test_boundaries_placed_by_hand():
    scaling = boostax.GroupLossScale(["conv*", "fc*"])

    def net(params, x):
        x = scaling(x, 0, 1)
        x = jnp.tanh(x @ params["conv1"])
        x = jnp.tanh(x @ params["conv2"])
        x = scaling(x.reshape(4, -1), 1, 2)
        x = x @ params["fc1"]
        return scaling(x, 2, 3)

    def loss(params, x):
        return jnp.mean(net(params, x) ** 2)

    params = {"conv1": normal(4, 4), "conv2": normal(4, 2), "fc1": normal(4, 3)}
    labels = labelled(loss, params, X, ["conv*", "fc*"])
    assert cuts(labels) == [(1, 2, "float32[4,4] into name"), (2, 3, "float32[4,3] into name")]
    assert labels.outs == (3,)
    # Elsewhere they do nothing.
    np.testing.assert_array_equal(
        net(params, X),
        jnp.tanh(jnp.tanh(X @ params["conv1"]) @ params["conv2"]).reshape(4, -1) @ params["fc1"],
    )
    tree = scaling({"x": X}, 1, 2)
    np.testing.assert_array_equal(tree["x"], X)


def test_boundaries_that_do_not_fit():
    scaling = boostax.GroupLossScale(["a", "b", "c"])
    wrong = lambda p, x: jnp.mean(scaling(x @ p["a"], 2, 3) @ p["b"] @ p["c"])
    with pytest.raises(ValueError, match=r"stands behind group 2, but .* from group 1; .*\(1, 3\)"):
        labelled(wrong, PARAMS, X, ["a", "b", "c"])

    def inside(p, x):
        deep = lambda x: scaling(x, 1, 2)
        return jnp.mean(jax.lax.cond(x[0, 0] > 0, deep, deep, x @ p["a"]) @ p["b"] @ p["c"])

    with pytest.raises(ValueError, match="inside cond, whose derivative can't be taken apart"):
        labelled(inside, PARAMS, X, ["a", "b", "c"])
    four = boostax.GroupLossScale(["a", "b", "c", "d"])
    far = lambda p, x: jnp.mean(four(x @ p["a"], 1, 5) @ p["b"] @ p["c"])
    with pytest.raises(ValueError, match="between 1 and 5, but there are 3 groups"):
        labelled(far, PARAMS, X, ["a", "b", "c"])
