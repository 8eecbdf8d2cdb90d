"""What fewer batch norms save: a training step of ResNet-20, and evaluation with folded norms.

    python benchmarks/less_bn.py

ResNet-20 of width 16 in linen, batch 64, 32x32 images, SGD with momentum; the base has all 21 batch
norms. "less_bn" keeps 10, "none" takes out all. Evaluation compares the same network with its norms
and with the norms folded into the convolutions. Prints ratios of CPU time (median over interleaved
rounds, with the spread), FLOPs and bytes of the compiled function, and how exact the folding is.
Takes about five minutes of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax
from tests.models import zoo_linen

ARMS: dict[str, dict[str, Any] | None] = {
    "all": None,
    "less_bn": {},
    "less_bn, shortcut": {"shortcut": True},
    "less_bn, no bias": {"bias": False},
    "none": {"keep": "none"},
    "skip_init, no norm": {"keep": "none", "compensation": "skip_init"},
    "scaled_ws": {"compensation": "scaled_ws"},
}


def step_of(settings: dict[str, Any] | None, x: jax.Array, y: jax.Array) -> tuple[Any, list[Any]]:
    """Return a jitted training step of ``(params, stats, state, x, y)``, and its arguments."""
    net: Any = zoo_linen.resnet20()
    if settings is not None:
        net, _ = boostax.less_bn(net, x, train=True, **settings)
    variables = jax.jit(functools.partial(net.init, train=True))(jax.random.key(0), x)
    tx = optax.sgd(0.1, momentum=0.9)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, stats: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            values = {"params": params, "batch_stats": stats}
            logits, new = net.apply(values, x, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), new.get("batch_stats", {})

        grads, new = jax.grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), new, state

    params = variables["params"]
    return step, [params, variables.get("batch_stats", {}), tx.init(params), x, y]


def runner(step: Any, arguments: list[Any]) -> Any:
    """Return a function that takes one step from where the last one ended."""
    held = list(arguments)

    def run() -> Any:
        held[:3] = step(*held)
        return held[0]

    return run


def shown(costs: dict[str, dict[str, float]], base: str) -> None:
    """Print FLOPs and bytes as ratios to the base's."""
    for name, cost in costs.items():
        flops, size = (cost[key] / costs[base][key] for key in ("flops", "bytes"))
        print(f"{name:<22} FLOPs {flops:.3f}x, bytes {size:.3f}x of {base}")


def evaluation(x: jax.Array, rounds: int) -> dict[str, Any]:
    """Time evaluation with and without folding, and print how far the outputs lie apart."""
    net = zoo_linen.resnet20()
    variables = jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), x)
    # Statistics of a few batches, so that no norm is the identity.
    update = jax.jit(functools.partial(net.apply, train=True, mutable=["batch_stats"]))
    for i in range(20):
        batch = jax.random.normal(jax.random.key(i), x.shape) + 0.5
        variables = {**variables, **update(variables, batch)[1]}
    folded, values, report = boostax.fold_batch_norm(net, x, variables=variables, train=False)
    plain = jax.jit(functools.partial(net.apply, train=False))
    fast = jax.jit(functools.partial(folded.apply, train=False))
    apart = float(jnp.max(jnp.abs(plain(variables, x) - fast(values, x))))
    print(f"{len(report.changes)} norms folded; outputs differ by at most {apart:.1e}")
    results = _measure.interleaved(
        {"with norms": lambda: plain(variables, x), "folded": lambda: fast(values, x)},
        repeats=rounds,
        number=15,
        alternate=True,
    )
    print(_measure.ratio_line(results, "folded", "with norms"))
    costs = {
        "with norms": _measure.compiled_cost(plain, variables, x),
        "folded": _measure.compiled_cost(fast, values, x),
    }
    shown(costs, "with norms")
    return {"apart": apart, "times": results, "costs": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=None, help="write the results to this JSON file")
    asked = parser.parse_args()
    kx, ky = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (asked.batch, 32, 32, 3))
    y = jax.random.randint(ky, (asked.batch,), 0, 10)
    candidates, costs = {}, {}
    for name, settings in ARMS.items():
        step, arguments = step_of(settings, x, y)
        costs[name] = _measure.compiled_cost(step, *arguments)
        candidates[name] = runner(step, arguments)
    results = _measure.interleaved(candidates, repeats=asked.rounds, number=3, alternate=True)
    for name in ARMS:
        print(_measure.ratio_line(results, name, "all"))
    shown(costs, "all")
    evaluated = evaluation(x, asked.rounds)
    if asked.out:
        content = {"step": results, "costs": costs, "evaluation": evaluated}
        _measure.write_results(asked.out, content)


if __name__ == "__main__":
    main()
