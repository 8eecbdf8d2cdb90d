"""thor: momentum, decay, groups, what it refuses, and what it says of itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from boostax import ThorState, _info, accumulate, scale_by_thor, thor
from boostax.gradients._blocks import Block, Factors, Side
from boostax.gradients._views import View
from boostax.updates._skip import find_state
from boostax.updates._thor_groups import read_groups
from tests.models.captured import Captured, dense, factors

ONE = Captured((dense("w", 1, 1),))
PLAIN = {"layers": ONE, "pi_split": False, "clip": False}


def conv(kernel, bias=None):
    """Describe a kernel of shape (2, 3, outputs=2): two places, three channels."""
    view = View((2, 3, 2)).reshape(1, 6, 2)
    bias_view = None if bias is None else View((2,)).reshape(1, 1, 2)
    rows = 6 + (bias is not None)
    return Block(kernel, "conv", view, bias, bias_view, Side.of(rows, 99), Side.of(2, 99))


NET = Captured(
    (conv("conv/kernel", "conv/bias"), dense("fc/kernel", 3, 2, "fc/bias"), dense("out", 2, 2)),
    (("norm/scale", "scales data, as a norm's scale does"), ("table", "used by sin")),
)
SHAPES = {"conv/kernel": (2, 3, 2), "conv/bias": (2,), "fc/kernel": (3, 2), "fc/bias": (2,)}
SHAPES |= {"out": (2, 2), "norm/scale": (2,), "table": (4, 4)}


def net_params(value=1.0):
    flat = {path: jnp.full(shape, value) for path, shape in SHAPES.items()}
    tree = {}
    for path, leaf in flat.items():
        *module, name = path.split("/")
        (tree.setdefault(module[0], {}) if module else tree)[name] = leaf
    return tree


def net_stats(layers=NET):
    return {b.kernel: Factors(*(jnp.ones(s.shape) for s in b.shapes())) for b in layers.blocks}


def by_path(tree):
    from boostax._tree import leaf_paths

    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def run(tx, grads, params, stats):
    state, out = tx.init(params), []
    for gradient in grads:
        updates, state = tx.update(gradient, state, params, stats=stats)
        out.append(updates)
    return out


@pytest.mark.parametrize(
    ("nesterov", "expected"),
    # U = 4 / (2 * 2) each time; m = 1, 1.5, 1.75; Nesterov: U + .5 m.
    [(False, [-0.1, -0.15, -0.175]), (True, [-0.15, -0.175, -0.1875])],
)
def test_momentum_by_hand(nesterov, expected):
    tx = thor(0.1, 1.0, 0.5, use_nesterov=nesterov, **PLAIN)
    params, grads = {"w": jnp.ones((1, 1))}, {"w": jnp.full((1, 1), 4.0)}
    stats = {"w": factors(ONE.blocks[0], [[1.0]], [[1.0]])}
    steps = run(tx, [grads] * 3, params, stats)
    np.testing.assert_allclose([s["w"].squeeze() for s in steps], expected, rtol=1e-6)


def test_decay_is_added_behind_the_preconditioner():
    rate = lambda n: 0.5 / (n + 1)
    tx = thor(rate, 1.0, 0.0, 0.1, **PLAIN)
    params, grads = {"w": jnp.full((1, 1), 3.0)}, {"w": jnp.full((1, 1), 4.0)}
    stats = {"w": factors(ONE.blocks[0], [[1.0]], [[1.0]])}
    steps = run(tx, [grads] * 2, params, stats)
    np.testing.assert_allclose([s["w"].squeeze() for s in steps], [-0.65, -0.325], rtol=1e-6)


def test_tensor_clip_comes_behind_the_decay():
    tx = thor(1.0, 1.0, 0.0, 10.0, layers=ONE, clip="tensor")
    params = {"w": jnp.full((1, 1), 3.0)}
    stats = {"w": factors(ONE.blocks[0], [[1.0]], [[1.0]])}
    (step,) = run(tx, [params], params, stats)
    np.testing.assert_allclose(step["w"], [[-1.0]], rtol=1e-6)


def test_kl_clip_knows_the_learning_rate():
    params = {"w": jnp.full((1, 1), 4.0)}
    stats = {"w": factors(ONE.blocks[0], [[1.0]], [[1.0]])}
    for rate in (0.5, lambda n: 0.5):
        tx = thor(rate, 1.0, 0.0, layers=ONE, pi_split=False, kl_clip=1e-2)
        (step,) = run(tx, [params], params, stats)
        # u = 1; .25 * 1 * 4 = 1, so nu = .1.
        np.testing.assert_allclose(step["w"], [[-0.05]], rtol=1e-5)


KERNELS = {"conv/kernel", "fc/kernel", "out"}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, KERNELS | {"table"}),
        ("*/kernel", {"conv/kernel", "fc/kernel"}),
        (["out", re.compile("bias$")], {"out", "conv/bias", "fc/bias"}),
        (
            lambda params: jax.tree.map(lambda leaf: leaf.ndim == 1, params),
            set(SHAPES) - KERNELS - {"table"},
        ),
        ({"conv": {"kernel": True, "bias": False}, "out": False}, {"conv/kernel"}),
    ],
)
def test_decay_mask(mask, expected):
    tx = thor(1.0, 1.0, 0.0, 0.25, layers=NET, decay_mask=mask, clip=False)
    params = net_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    (step,) = run(tx, [zeros], params, net_stats())
    moved = {path: set(np.unique(leaf).tolist()) for path, leaf in by_path(step).items()}
    assert moved == {path: {-0.25 if path in expected else 0.0} for path in SHAPES}
    fates = _info.find(tx, "thor").fates(params)
    assert {path for path, text in fates.items() if text == "weight decay 0.25"} == expected


def test_groups():
    tx = thor(
        lambda n: 1.0,
        1.0,
        0.0,
        0.5,
        layers=NET,
        clip=False,
        groups=[
            {"params": "conv/*", "lr": lambda n: 10.0 * (n + 1), "grad_centralization": True},
            {"params": ["norm/*", "table"], "weight_decay": 0.125, "learning_rate": 2.0},
            {"order_params": ["out", "fc/*"]},
        ],
    )
    params, stats = net_params(), net_stats()
    gradient = jax.tree.map(jnp.zeros_like, params)
    gradient["conv"]["kernel"] = jnp.broadcast_to(jnp.arange(2.0), (2, 3, 2))
    first, second = (by_path(step) for step in run(tx, [gradient] * 2, params, stats))
    # Each output's mean over its inputs is all of the gradient: the decay alone is left.
    np.testing.assert_allclose(first["conv/kernel"], np.full((2, 3, 2), -5.0), rtol=1e-6)
    np.testing.assert_allclose(second["conv/kernel"], np.full((2, 3, 2), -10.0), rtol=1e-6)
    assert set(np.unique(first["table"])) == {-0.25}
    assert set(np.unique(first["norm/scale"])) == {-0.25}
    assert set(np.unique(first["fc/kernel"])) == {-0.5}
    assert not np.any(first["fc/bias"])


def test_rates_of_groups_count_in_the_kl_clip():
    layers = Captured((), (("s", ""), ("t", "")))
    tx = thor(1.0, 1.0, 0.0, layers=layers, kl_clip=0.1, groups=[{"params": "t", "lr": 3.0}])
    grads = {"s": jnp.ones(1), "t": jnp.ones(1)}
    (step,) = run(tx, [grads], grads, None)
    nu = 0.1  # sqrt(.1 / (1 + 9))
    np.testing.assert_allclose([step["s"][0], step["t"][0]], [-nu, -3 * nu], rtol=1e-5)


def test_buckets_follow_the_order():
    groups = read_groups("thor", [{"order": ["out", "fc/*"]}], NET)
    assert groups.buckets(()) == ((2, 1, 0),)
    assert groups.buckets((0,)) == ((2,), (1, 0))
    assert groups.buckets((0, 2)) == ((2,), (1, 0))
    assert read_groups("thor", None, NET).buckets((0, 1)) == ((0,), (1,), (2,))


REFUSED = [
    ({"loss_scale": 0}, ValueError, "loss_scale must be a number > 0, got 0"),
    ({"loss_scale": float("nan")}, ValueError, "loss_scale must be"),
    ({"momentum": -0.1}, ValueError, "momentum must be a number >= 0, got -0.1"),
    ({"momentum": True}, TypeError, "momentum must be"),
    ({"weight_decay": -1}, ValueError, "weight_decay must be a number >= 0, got -1"),
    ({"damping": 0.0}, ValueError, "damping must be a number > 0, got 0"),
    ({"damping": -1.0}, ValueError, "damping must be"),
    ({"damping": "x"}, TypeError, "damping must be"),
    ({"learning_rate": None}, TypeError, "learning_rate must be"),
    ({"use_nesterov": 1}, TypeError, "use_nesterov must be True or False, got 1"),
    ({"clip": 1.0}, TypeError, "clip must be True, False, 'kl' or 'tensor', got 1.0"),
    ({"clip": "tensors"}, ValueError, "Did you mean 'tensor'"),
    ({"frequency": 0}, ValueError, "frequency must be an int >= 1, and int32, got 0"),
    ({"frequency": 2**31}, ValueError, "frequency must be an int >= 1, and int32, got 2147483648"),
    ({"early": (0, 2**31)}, ValueError, "early must be increasing ints >= 0"),
    ({"frequency": 2.0}, TypeError, "frequency must be an int >= 1, got 2.0"),
    ({"frequency": True}, TypeError, "frequency must be"),
    ({"factor_decay": 1.0}, ValueError, "factor_decay must be a number >= 0 and < 1, got 1"),
    ({"kl_clip": 0.0}, ValueError, "kl_clip must be a number > 0"),
    ({"pi_split": None}, TypeError, "pi_split must be"),
    ({"early": (0, 0)}, ValueError, "early must be increasing ints >= 0"),
    ({"early": (-1, 2)}, ValueError, "early must be"),
    ({"early": 3}, TypeError, "early must be"),
    ({"early": (0.5,)}, TypeError, "early must be"),
    ({"trace_rule": 0}, ValueError, "trace_rule must be a number > 0"),
    ({"split_indices": (1, 1)}, ValueError, "split_indices must be None or increasing ints"),
    ({"split_indices": [3]}, ValueError, "in 0 to 2"),
    ({"split_indices": [0.5]}, TypeError, "split_indices must be"),
    ({"layers": None}, TypeError, "boostax.capture_layers"),
    ({"mode": "refrence"}, ValueError, "Did you mean 'reference'"),
    ({"mode": "reference"}, ValueError, "captured with mode='default'"),
    ({"layer_norms": "norm/*"}, ValueError, "layer_norms is for mode"),
    ({"axis_name": ("d", "d")}, ValueError, "axis_name must name each axis once"),
    ({"axis_name": 3}, TypeError, "axis_name must be"),
    ({"decay_mask": "nothing"}, ValueError, "decay_mask: the pattern 'nothing' matches no leaf"),
    ({"decay_mask": {"out": 1.0}}, TypeError, "decay_mask must be a tree of bools"),
    ({"decay_mask": {"outer": True}}, ValueError, "Did you mean 'out'"),
    ({"groups": {"params": "out"}}, TypeError, "groups must be a sequence of mappings"),
    ({"groups": ["out"]}, TypeError, r"groups\[0\] must be a mapping"),
    ({"groups": [{"params": "nothing"}]}, ValueError, r"groups\[0\]\['params'\]: the pattern"),
    ({"groups": [{"order": "nothing"}]}, ValueError, r"groups\[0\]\['order'\]: the pattern"),
    ({"groups": [{"order": "out"}, {"order": "out"}]}, ValueError, "a second order"),
    ({"groups": [{"lr": 1.0}]}, ValueError, "must have 'params'"),
    ({"groups": [{"params": "out", "order": "out"}]}, ValueError, "or 'order'"),
    ({"groups": [{"params": 3}]}, TypeError, "must be a path pattern"),
    ({"groups": [{"params": "out", "rate": 1}]}, ValueError, "unknown key 'rate'"),
    ({"groups": [{"params": "out", "lr": 1, "learning_rate": 1}]}, ValueError, "twice"),
    ({"groups": [{"params": "out", "weight_decay": -1}]}, ValueError, "must be a number >= 0"),
    ({"groups": [{"params": "out", "lr": "x"}]}, TypeError, "must be a number or a schedule"),
    (
        {"groups": [{"params": "fc/*"}, {"params": ["out", "fc/bias"]}]},
        ValueError,
        "'fc/bias' is in groups\\[0\\] and in groups\\[1\\]",
    ),
    (
        {"groups": [{"params": "fc/*", "centralize": True}]},
        ValueError,
        "no convolution's kernel: fc/kernel, fc/bias. Convolutions: conv/kernel",
    ),
    ({"groups": [{"params": "out", "centralize": 1}]}, TypeError, "must be True or False"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED)
def test_refused(wrong, error, message):
    arguments = {"learning_rate": 0.1, "damping": 0.1, "layers": NET} | wrong
    with pytest.raises(error, match=f"^thor: .*{message}|^thor: {message}"):
        thor(**arguments)


def test_refused_in_reference_mode():
    layers = Captured((dense("w", 1, 1),), mode="reference")
    make = lambda **more: thor(0.1, 0.1, layers=layers, mode="reference", **more)
    with pytest.raises(ValueError, match=r'frequency must be an int >= 2 in mode="reference"'):
        make(frequency=1)
    with pytest.raises(ValueError, match="clip is 'kl'"):
        make(clip="kl")
    with pytest.raises(ValueError, match="has no trace_rule"):
        make(trace_rule=0.1)
    with pytest.raises(ValueError, match="layer_norms: the pattern 'x' matches no leaf"):
        make(layer_norms="x")
    tx = make()
    params = {"w": jnp.ones((1, 1))}
    stats = {"w": factors(layers.blocks[0], [[1.0]], [[1.0]])}
    with pytest.raises(ValueError, match="needs the batch size"):
        tx.update(params, tx.init(params), params, stats=stats)


def test_scale_by_thor_asks_for_the_rate_of_its_kl_clip():
    with pytest.raises(ValueError, match=r"^scale_by_thor: the KL clip needs learning_rate"):
        scale_by_thor(layers=ONE, damping=0.1)


def test_decay_needs_parameters():
    tx = thor(0.1, 1.0, 0.9, 0.1, layers=Captured((), (("t", ""),)), decay_mask="t")
    grads = {"t": jnp.ones(2)}
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, tx.init(grads))


def test_what_it_says_of_itself():
    tx = thor(0.1, 0.2, layers=NET, groups=[{"params": "conv/*", "lr": 1.0}], clip="tensor")
    names = [info.name for info in _info.walk(tx)]
    expected = ["thor", "scale_by_thor", "weight decay", "clip by tensor", "trace"]
    assert names == [*expected, "learning rates"]
    inner = _info.find(tx, "scale_by_thor")
    assert inner.static is NET
    assert inner.averaged == {"stats": NET.shapes()}
    assert inner.settings["damping"] == 0.2
    assert set(inner.fates(net_params())) == set(SHAPES)
    assert _info.exchanged_axes(thor(0.1, 0.2, layers=NET, axis_name="d")) == ("d",)


def test_injected_hyperparameters():
    make = optax.inject_hyperparams(thor, static_args=("kl_clip",))
    tx = make(learning_rate=lambda n: 0.1 * (n + 1), damping=0.5, layers=NET, weight_decay=0.1)
    plain = thor(lambda n: 0.1 * (n + 1), 0.5, layers=NET, weight_decay=0.1)
    params, stats = net_params(), net_stats()
    update = lambda tx: jax.jit(lambda g, s: tx.update(g, s, params, stats=stats))
    injected, own = update(tx), update(plain)
    state, plain_state = tx.init(params), plain.init(params)
    for _ in range(2):
        got, state = injected(params, state)
        want, plain_state = own(params, plain_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_a_window_around_it():
    """Statistics averaged over the window; refreshes count windows."""
    tx = accumulate(
        thor(1.0, 1.0, 0.0, **PLAIN, early=(), frequency=2),
        2,
        average_extra={"stats": ONE.shapes()},
    )
    params = {"w": jnp.ones((1, 1))}
    state = tx.init(params)
    for value in (1.0, 5.0):
        stats = {"w": factors(ONE.blocks[0], [[value]], [[1.0]])}
        updates, state = tx.update(params, state, params, stats=stats)
    np.testing.assert_allclose(updates["w"], [[-1 / (4.0 * 2.0)]], rtol=1e-6)
    inner = find_state(state, ThorState)
    assert (int(inner.count), bool(inner.due)) == (1, False)
