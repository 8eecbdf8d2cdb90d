"""thor in reference mode: inverses and weights of recorded runs, step by step.

The statistics are the recorded ones; gradients are taken here. The files were made with MindSpore
2.7 (its GPU class on a CPU, kernels without CPU implementation substituted).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from boostax import ThorState, thor
from boostax.gradients._blocks import Block, Factors, Side
from boostax.gradients._views import View
from boostax.updates._skip import find_state
from tests.models.captured import Captured, cut

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def linear(x, w, b):
    return x @ w.T + b[None]


def perceptron(activation, w, x):
    return linear(activation(linear(x, w[0], w[1])), w[2], w[3])


def normalised(x, axes, eps):
    mean = jnp.mean(x, axes, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.var(x, axes, keepdims=True) + eps)


def conv_net(w, x):
    y = jax.lax.conv_general_dilated(x, w[0], (1, 1), "SAME")
    scale, offset = (v[None, :, None, None] for v in (w[1], w[2]))
    y = jax.nn.relu(normalised(y, (0, 2, 3), 1e-5) * scale + offset)
    return linear(y.reshape(len(y), -1), w[3], w[4])


def word_net(w, x):
    scale, offset = (v[None, None] for v in (w[1], w[2]))
    return linear(jnp.mean(normalised(w[0][x], (2,), 1e-7) * scale + offset, 1), w[3], w[4])


def side(size):
    return Side.of(size, 128, even=False)


def dense(name, shape):
    out, inner = shape
    view = View(shape).transpose((1, 0)).reshape(1, inner, out)
    return Block(name, "dense", view, None, None, side(inner), side(out))


def conv(name, shape, positions):
    out, inner = shape[0], int(np.prod(shape[1:]))
    view = View(shape).reshape(out, inner).transpose((1, 0)).reshape(1, inner, out)
    return Block(name, "conv", view, None, None, side(inner), side(out), 1, positions)


def embedding(name, shape):
    rows, width = shape
    diagonal = Side(rows, 1, rows, diagonal=True)
    return Block(
        name, "embedding", View(shape).reshape(1, rows, width), None, None, diagonal, side(width)
    )


def perceptron_statistics(activation, w, x, y):
    """The raw statistics of a perceptron, where a file has none."""
    hidden = activation(linear(x, w[0], w[1]))
    pushed = jax.grad(
        lambda added: cross_entropy(
            linear(activation(linear(x, w[0], w[1]) + added[0]), w[2], w[3]) + added[1], y
        )
    )((jnp.zeros_like(hidden), jnp.zeros((len(x), len(w[3])))))
    # The reference divides the one by the layer's width, the other by the batch.
    inputs = [a.T @ a / a.shape[1] for a in (x, hidden)]
    return list(zip(inputs, [g.T @ g / len(g) for g in pushed], strict=True))


TANH = functools.partial(perceptron, jnp.tanh)
RELU = functools.partial(perceptron, jax.nn.relu)
NETS = {
    "k_thor_dense_f2": (TANH, lambda w: (dense("0", w[0].shape), dense("2", w[2].shape))),
    "k_thor_dense_f4_wd_ls": (RELU, lambda w: (dense("0", w[0].shape), dense("2", w[2].shape))),
    "k_thor_dense_split128": (TANH, lambda w: (dense("0", w[0].shape), dense("2", w[2].shape))),
    "k_thor_conv_f2": (conv_net, lambda w: (conv("0", w[0].shape, 25), dense("3", w[3].shape))),
    "k_thor_embedding_ln_f4": (
        word_net,
        lambda w: (embedding("0", w[0].shape), dense("3", w[3].shape)),
    ),
}


def recorded(matrix, block_side):
    return jnp.asarray(matrix)[None] if block_side.diagonal else cut(matrix, block_side)


@pytest.mark.parametrize("name", NETS)
def test_recorded_run(name, reference):
    d = reference(name)
    net, blocks_of = NETS[name]
    count = len(d["param_names"])
    params = [jnp.asarray(d[f"w0_{i}"]) for i in range(count)]
    momentum, decay, scale, batch, frequency, nesterov, clip = d["hyper"]
    blocks = blocks_of(params)
    inside = {b.kernel for b in blocks}
    layers = Captured(
        blocks,
        tuple(
            (str(i), "layer norm" if kind == 4 else "bias")
            for i, kind in enumerate(d["layer_types"])
            if str(i) not in inside
        ),
        mode="reference",
    )
    rates, damping = jnp.asarray(d["lr"]), jnp.asarray(d["damping"])
    tx = thor(
        lambda n: rates[n],
        lambda n: damping[n],
        float(momentum),
        float(decay),
        layers=layers,
        use_nesterov=bool(nesterov),
        clip=bool(clip),
        frequency=int(frequency),
        loss_scale=float(scale),
        mode="reference",
    )
    state = tx.init(params)
    loss = lambda w, x, y: cross_entropy(net(w, x), y) * scale.astype(np.float32)
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    update = jax.jit(tx.update)
    made = 0
    for step in range(len(rates)):
        x, y = jnp.asarray(d["x"][step]), jnp.asarray(d["y"][step])
        value, grads = value_and_grad(params, x, y)
        np.testing.assert_allclose(value / scale, d["loss"][step], rtol=1e-4)
        due = bool(find_state(state, ThorState).due)
        assert due == (step % frequency == 0)
        if due and "A_0" in d:
            raw = [(d[f"A_{n}"][made], d[f"G_{n}"][made]) for n in range(len(blocks))]
        elif due:
            raw = perceptron_statistics(jnp.tanh, params, x, y)
        stats = {
            b.kernel: Factors(recorded(a, b.inputs), recorded(g, b.outputs))
            for b, (a, g) in zip(blocks, raw, strict=True)
        }
        updates, state = update(grads, state, params, stats=stats, weight=jnp.float32(batch))
        params = jax.tree.map(jnp.add, params, updates)
        if due and "A_0" in d:
            inverses = find_state(state, ThorState).inverses
            for n, block in enumerate(blocks):
                got = inverses[block.kernel]
                for letter, factor in (("A", got.inputs), ("G", got.outputs)):
                    want = d[f"{letter}inv_{n}"][made]
                    np.testing.assert_allclose(np.reshape(factor, want.shape), want, **CLOSE)
        made += due
        for i, leaf in enumerate(params):
            np.testing.assert_allclose(leaf, d[f"w_{i}"][step], err_msg=f"step {step}", **CLOSE)
