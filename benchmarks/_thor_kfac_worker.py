"""One side of the comparison with kfac-jax: times steps and trains runs, as asked on its input.

Started by ``thor_kfac_jax.py`` in either environment, so it imports neither flax nor the other
benchmarks: ``python _thor_kfac_worker.py boostax|kfac-jax DATA.npz``. Each line on its input is a JSON
object, and so is each line of its answers.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

MOMENTUM, CLIP = 0.9, 1e-3
FREQUENCY = 10  # of both: statistics and inverses


def init(widths: list[int], seed: int) -> Any:
    """Return the same parameters in both environments: NumPy draws them."""
    draw = np.random.default_rng(seed)
    pairs = itertools.pairwise(widths)
    return [
        {"w": jnp.asarray(draw.normal(size=(m, n)) / m**0.5, jnp.float32), "b": jnp.zeros(n)}
        for m, n in pairs
    ]


def logits_of(params: Any, x: jax.Array) -> jax.Array:
    for i, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        x = x if i == len(params) - 1 else jax.nn.relu(x)
    return x


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1).mean()


def schedule_to(budget: Any, rate: Any) -> Any:
    """Return the schedule of a run: 5 % linear warm-up, then a cosine to zero."""
    warm = 0.05 * budget

    def schedule(count: Any) -> Any:
        falling = 0.5 * (1 + jnp.cos(jnp.pi * (count - warm) / (budget - warm)))
        return rate * jnp.where(count < warm, (count + 1) / jnp.maximum(warm, 1), falling)

    return schedule


class Ours:
    """THOR with the true Fisher, in a scan for runs and in boostax's train step for times."""

    def __init__(self, example: Any):
        import boostax

        def loss(params: Any, batch: Any) -> Any:
            logits = logits_of(params, batch[0])
            predictive = boostax.Categorical(logits)
            return cross_entropy(logits, batch[1]), boostax.LossAux(predictive=predictive)

        self.boostax, self.loss, self.compiled = boostax, loss, None
        self.example = example

    def thor(self, params: Any, schedule: Any, damping: Any) -> tuple[Any, Any]:
        # Whole factors, as kfac-jax has them.
        layers = self.boostax.capture_layers(
            self.loss, params, self.example, fisher="true", block_size=1024
        )
        tx = self.boostax.thor(
            schedule,
            damping,
            momentum=MOMENTUM,
            layers=layers,
            frequency=FREQUENCY,
            kl_clip=CLIP,
        )
        return tx, layers

    def plain(self, params: Any, batch: Any) -> Callable[[], Any]:
        """Return a step of SGD with momentum, for the scale of the times."""
        import optax

        def loss(params: Any, batch: Any) -> jax.Array:
            return cross_entropy(logits_of(params, batch[0]), batch[1])

        return self._stepper(loss, optax.sgd(0.01, MOMENTUM), params, batch, has_aux=False)

    def stepper(self, params: Any, batch: Any) -> Callable[[], Any]:
        """Return a step, called from Python, that keeps its state."""
        tx, _ = self.thor(params, 0.01, 0.1)
        return self._stepper(self.loss, tx, params, batch, has_aux=True)

    def _stepper(
        self, loss: Any, tx: Any, params: Any, batch: Any, has_aux: bool
    ) -> Callable[[], Any]:
        step = self.boostax.train_step(loss, tx, metrics=("loss",), has_aux=has_aux)
        state = step.init(params, rng=jax.random.key(0) if has_aux else None)

        def call() -> Any:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics

        return call

    def train(self, params: Any, x: Any, y: Any, budget: int, hyper: Any, seed: int) -> Any:
        """Return the parameters at the end of a run over ``x, y``: ``(steps, size, ...)``."""
        if self.compiled is None:
            import optax

            _, layers = self.thor(params, 0.01, 0.1)

            @jax.jit
            def run(params: Any, x: Any, y: Any, budget: Any, rate: Any, damping: Any, key: Any):
                tx, _ = self.thor(params, schedule_to(budget, rate), lambda count: damping)

                def step(i: jax.Array, carry: Any) -> Any:
                    params, state = carry
                    due = optax.tree.get(state, "due")
                    _, grads, stats = layers.value_and_grad(
                        params, (x[i], y[i]), due=due, rng=jax.random.fold_in(key, i)
                    )
                    updates, state = tx.update(grads, state, params, stats=stats)
                    return optax.apply_updates(params, updates), state

                return jax.lax.fori_loop(0, budget, step, (params, tx.init(params)))[0]

            self.compiled = run
        values = (jnp.float32(hyper["rate"]), jnp.float32(hyper["damping"]))
        return self.compiled(params, x, y, jnp.int32(budget), *values, jax.random.key(seed))


class Theirs:
    """kfac-jax with its default estimator, which draws labels from the model too."""

    def __init__(self, example: Any):
        import kfac_jax

        def loss(params: Any, batch: Any) -> jax.Array:
            logits = logits_of(params, batch[0])
            kfac_jax.register_softmax_cross_entropy_loss(logits, batch[1])
            return cross_entropy(logits, batch[1])

        self.example = example
        self.optimizer = kfac_jax.Optimizer(
            value_and_grad_func=jax.value_and_grad(loss),
            l2_reg=0.0,
            num_burnin_steps=0,
            curvature_update_period=FREQUENCY,
            inverse_update_period=FREQUENCY,
            norm_constraint=CLIP,
            multi_device=False,
        )
        self.schedule = jax.jit(lambda i, budget, rate: schedule_to(budget, rate)(i))
        self.keys = jax.jit(lambda key: jax.random.split(key, 1024))

    def stepper(self, params: Any, batch: Any) -> Callable[[], Any]:
        """Return a step, called from Python, that keeps its state."""
        state, key, count = self._start(params, 0)
        rate, damping, momentum = jnp.float32(0.01), jnp.float32(0.1), jnp.float32(MOMENTUM)

        def call() -> Any:
            nonlocal params, state, key, count
            params, state, stats = self.optimizer.step(
                params,
                state,
                key,
                batch=batch,
                learning_rate=rate,
                momentum=momentum,
                damping=damping,
                global_step_int=count,
            )
            count += 1
            return stats["loss"]

        return call

    def _start(self, params: Any, seed: int) -> tuple[Any, Any, int]:
        key = jax.random.PRNGKey(seed)
        return self.optimizer.init(params, key, self.example), key, 0

    def train(self, params: Any, x: Any, y: Any, budget: int, hyper: Any, seed: int) -> Any:
        """Return the parameters at the end of a run over ``x, y``: ``(steps, size, ...)``."""
        state, key, _ = self._start(params, seed)
        damping, momentum = jnp.float32(hyper["damping"]), jnp.float32(MOMENTUM)
        # NumPy's rows and keys cost less to take out one by one than arrays of JAX do.
        rates = np.asarray(self.schedule(jnp.arange(x.shape[0]), budget, hyper["rate"]))
        keys = np.asarray(self.keys(key))
        x, y = np.asarray(x), np.asarray(y)
        for i in range(budget):
            params, state, _ = self.optimizer.step(
                params,
                state,
                keys[i],
                batch=(x[i], y[i]),
                learning_rate=rates[i],
                momentum=momentum,
                damping=damping,
                global_step_int=i,
            )
        return params


def serve(side: str, data: Any) -> None:
    """Answer each line of the input until it ends."""
    widths = {"race": [40, 100, 100, 10], "cost": [784, 512, 256, 10]}
    contenders: dict[str, Any] = {}
    steppers: dict[str, Callable[[], Any]] = {}

    def contender(which: str) -> tuple[Any, Any]:
        draw = np.random.default_rng(0)
        size = 100 if which == "race" else 128
        x = jnp.asarray(draw.normal(size=(size, widths[which][0])), jnp.float32)
        example = (x, jnp.asarray(draw.integers(0, 10, size), jnp.int32))
        if which not in contenders:
            contenders[which] = (Ours if side == "boostax" else Theirs)(example)
        return contenders[which], example

    @jax.jit
    def accuracy(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(logits_of(params, x), -1) == y)

    def answer(ask: dict[str, Any]) -> Any:
        which = ask["net"]
        made, example = contender(which)
        if ask["do"] == "time":
            name = f"{which} {ask['what']}"
            if name not in steppers:
                build = made.plain if ask["what"] == "plain" else made.stepper
                steppers[name] = build(init(widths[which], 0), example)
                for _ in range(20):
                    jax.block_until_ready(steppers[name]())
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(ask["steps"]):
                jax.block_until_ready(steppers[name]())
            return [time.process_time() - cpu, time.perf_counter() - wall]
        draw = np.random.default_rng(ask["seed"])
        split = draw.permutation(len(data["x"]))
        train, held_out = split[:3200], split[3200:]
        epochs = [draw.permutation(train) for _ in range(32)]
        order = np.concatenate(epochs).reshape(-1, 100)
        x, y = jnp.asarray(data["x"][order]), jnp.asarray(data["y"][order])
        budget, params = ask["budget"], init(widths[which], ask["seed"])
        params = made.train(params, x, y, budget, ask["hyper"], ask["seed"])
        held = accuracy(params, data["x"][held_out], data["y"][held_out])
        return [float(held), float(accuracy(params, data["test_x"], data["test_y"]))]

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], dict(np.load(sys.argv[2])))
