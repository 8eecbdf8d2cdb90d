"""scale_by_thor where not all layers take part: the trace rule, frozen and masked leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from boostax import Freezing, ThorState, freeze, scale_by_thor
from boostax.gradients._blocks import Factors
from boostax.updates._skip import find_state
from tests.models.captured import Captured, dense, factors

LAYERS = Captured((dense("u", 1, 1, "c"), dense("v", 1, 1)))
PARAMS = {"u": jnp.ones((1, 1)), "c": jnp.ones(1), "v": jnp.ones((1, 1))}
SETTINGS = {"layers": LAYERS, "damping": 1.0, "clip": False, "early": (0, 1, 2), "factor_decay": 0}


def statistics(u, v):
    return {
        "u": factors(LAYERS.blocks[0], u * np.eye(2), [[1.0]]),
        "v": factors(LAYERS.blocks[1], [[v]], [[1.0]]),
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_trace_rule(compiled):
    tx = scale_by_thor(**SETTINGS, frequency=3, trace_rule=0.1)
    update = lambda g, s, stats: tx.update(g, s, stats=stats)
    update = jax.jit(update) if compiled else update
    state = tx.init(PARAMS)
    rests = []
    # Refreshes at 0, 1, 2, 3, 6, 9; u moves each time, v never.
    for step in range(10):
        u = 2.0 ** min(step, 6)
        v = 50.0 if state.rest[1] else 1.0
        _, state = update(PARAMS, state, statistics(u, v))
        rests.append(state.rest.tolist())
    # Not by the early ones; then v at the first comparison, u when it stands still.
    assert rests[2] == [False, False]
    assert rests[3] == rests[5] == rests[8] == [False, True]
    assert rests[9] == [True, True]
    assert state.refreshes.tolist() == [6, 4]
    assert state.trace.tolist() == [128.0, 1.0]
    # What v rests on is from before; what it is given afterwards counts for nothing.
    assert float(state.factors["v"].inputs.squeeze()) == 1.0


def test_rest_is_there_with_the_rule_only():
    state = scale_by_thor(**SETTINGS).init(PARAMS)
    assert state.rest is None
    assert state.trace is None


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_layer_with_a_frozen_leaf_rests():
    tx = scale_by_thor(**SETTINGS)
    _, state = tx.update(PARAMS, tx.init(PARAMS), stats=statistics(3.0, 3.0))
    held = PARAMS | {"c": optax.MaskedNode()}
    # Statistics of a layer that rests may be left out.
    updates, new = tx.update(held, state, stats={"v": statistics(9.0, 9.0)["v"]})
    same(updates["u"], PARAMS["u"])
    same(new.factors["u"], state.factors["u"])
    same(new.inverses["u"], state.inverses["u"])
    assert new.refreshes.tolist() == [1, 2]
    assert float(new.factors["v"].inputs.squeeze()) == 9.0
    none = jax.tree.map(lambda leaf: optax.MaskedNode(), PARAMS)
    _, new = tx.update(none, new)  # due, but for nobody
    assert new.refreshes.tolist() == [1, 2]
    assert int(new.count) == 3


def test_resting_layers_cost_no_inverse():
    tx = scale_by_thor(**SETTINGS)
    state = tx.init(PARAMS)
    count = lambda grads: str(
        jax.make_jaxpr(lambda g, s, t: tx.update(g, s, stats=t))(grads, state, statistics(1.0, 1.0))
    ).count("= cholesky ")
    assert count(PARAMS) == 4
    assert count(PARAMS | {"u": optax.MaskedNode()}) == 2


def test_inside_freeze():
    freezing = Freezing([["u", "c", "v"], ["v"]], [0, 1, 0])
    tx = freeze(scale_by_thor(**SETTINGS), freezing)
    state = tx.init(PARAMS)
    states = []
    for step in range(3):
        stats = statistics(1.0 + step, 1.0 + step)
        updates, state = tx.update(PARAMS, state, PARAMS, stats=stats)
        states.append(find_state(state, ThorState))
        if step == 1:
            same(updates["u"], jnp.zeros((1, 1)))
    assert [s.refreshes.tolist() for s in states] == [[1, 1], [1, 2], [2, 3]]
    same(states[1].inverses["u"], states[0].inverses["u"])
    assert float(states[2].factors["u"].inputs[0, 0, 0, 0]) == 3.0


def test_masked_leaves_at_init():
    tx = optax.masked(scale_by_thor(**SETTINGS), {"u": False, "c": False, "v": True})
    state = tx.init(PARAMS)
    updates, _ = tx.update(
        PARAMS, state, PARAMS, stats={"v": Factors(*(jnp.ones((1, 1, 1, 1)),) * 2)}
    )
    same(updates["u"], PARAMS["u"])
    np.testing.assert_allclose(updates["v"], [[0.25]], rtol=1e-6)
