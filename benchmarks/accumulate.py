"""Gradient accumulation against optax.MultiSteps: CPU time per window, FLOPs, memory.

    python benchmarks/accumulate.py [--repeats 9] [--micro 16] [--quick] [--output results.json]

A window is K micro-batches: gradients included, everything from the first micro-batch to the
updated parameters. All contenders donate their state, and train the same MLP (2.1M parameters) with
AdamW. Rounds are interleaved; ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from _measure import compiled_cost, interleaved, ratio_line, ratios, write_results

import boostax

SIZES = (256, 1024, 1024, 768)


def init_params(sizes: tuple[int, ...] = SIZES) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    return [
        {"kernel": jax.random.normal(k, (m, n)) / m**0.5, "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    return jnp.mean((x @ params[-1]["kernel"] + params[-1]["bias"][None] - y) ** 2)


def make_batch(size: int, sizes: tuple[int, ...] = SIZES) -> tuple[jax.Array, jax.Array]:
    kx, ky = jax.random.split(jax.random.key(1))
    return jax.random.normal(kx, (size, sizes[0])), jax.random.normal(ky, (size, sizes[-1]))


def make_step(tx: Any, gradient: Any) -> Any:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        _, grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


class Window:
    """A contender: calls its step as often as a window needs, and keeps its own state."""

    def __init__(self, tx: Any, gradient: Any, calls: int, batch_size: int):
        self.step = make_step(tx, gradient)
        self.params = init_params()
        self.opt_state = jax.jit(tx.init)(self.params)
        self.batch = make_batch(batch_size)
        self.calls = calls

    def __call__(self) -> Any:
        for _ in range(self.calls):
            self.params, self.opt_state = self.step(self.params, self.opt_state, self.batch)
        return self.params

    def cost(self) -> dict[str, float]:
        return compiled_cost(self.step, self.params, self.opt_state, self.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--number", type=int, default=3, help="windows per round (default 3)")
    parser.add_argument(
        "--micro", type=int, default=16, help="examples per micro-batch (default 16)"
    )
    parser.add_argument("--every", type=int, default=4, help="micro-batches per window (default 4)")
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    parser.add_argument("--output", help="write the results to this JSON file")
    args = parser.parse_args()
    repeats, number = (1, 1) if args.quick else (args.repeats, args.number)
    k, micro = args.every, args.micro

    adamw = lambda: optax.adamw(1e-3, weight_decay=1e-2)
    plain = jax.value_and_grad(loss_fn)
    # Gradients alone: the part of a window that no way of accumulating can save.
    only_gradients = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (updates, state)
    )
    contenders = {
        "optax.MultiSteps": Window(optax.MultiSteps(adamw(), k), plain, k, micro),
        "accumulate": Window(boostax.accumulate(adamw(), k), plain, k, micro),
        "accumulate, nonfinite='off'": Window(
            boostax.accumulate(adamw(), k, nonfinite="off"), plain, k, micro
        ),
        "microbatch in one step": Window(adamw(), boostax.microbatch(loss_fn, k), 1, k * micro),
        "whole batch in one step": Window(adamw(), plain, 1, k * micro),
        "gradients alone (sgd without state)": Window(only_gradients, plain, k, micro),
    }
    count = sum(leaf.size for leaf in jax.tree.leaves(init_params()))
    print(f"{count / 1e6:.2f}M parameters, AdamW, K={k}, micro-batches of {micro}; per window:")
    results = interleaved(contenders, repeats=repeats, warmup=2, number=number)
    for name in contenders:
        print(" ", ratio_line(results, name, "optax.MultiSteps"))

    print("compiled step (XLA counts a scan's body once, and both branches of a cond):")
    costs = {name: contender.cost() for name, contender in contenders.items()}
    for name, cost in costs.items():
        print(
            f"  {name:<36} {cost['flops'] / 1e6:9.1f} MFLOP {cost['bytes'] / 1e6:9.1f} MB accessed "
            f"{cost['temp_bytes'] / 1e6:7.2f} MB temp"
        )

    print(f"microbatch, temp memory of the compiled step by K (micro-batches of {micro}):")
    temp = {}
    for n in (2, 4, 8, 16):
        step = make_step(adamw(), boostax.microbatch(loss_fn, n))
        params = jax.eval_shape(init_params)
        state = jax.eval_shape(adamw().init, params)
        batch = jax.eval_shape(functools.partial(make_batch, n * micro))
        temp[n] = compiled_cost(step, params, state, batch)["temp_bytes"]
        print(f"  K={n:<3} {temp[n] / 1e6:7.2f} MB")

    print("every=1, nonfinite='off' against the inner transformation alone:")
    alone, wrapped = (
        Window(tx, plain, 1, micro)
        for tx in (adamw(), boostax.accumulate(adamw(), 1, nonfinite="off"))
    )
    for name, window in (("inner alone", alone), ("wrapped", wrapped)):
        large = sum(leaf.size > 1 for leaf in jax.tree.leaves(window.opt_state))
        print(f"  {name:<12} {window.cost()['flops']:.0f} FLOP, {large} arrays in the state")

    if args.output:
        write_results(
            args.output,
            {
                "command": "python benchmarks/accumulate.py " + " ".join(sys.argv[1:]),
                "seconds_per_window": results,
                "ratio_to_multisteps": {
                    n: ratios(results, n, "optax.MultiSteps") for n in contenders
                },
                "compiled": costs,
                "microbatch_temp_bytes": temp,
                "every_1_flops": {
                    "inner": alone.cost()["flops"],
                    "wrapped": wrapped.cost()["flops"],
                },
            },
        )


if __name__ == "__main__":
    main()
