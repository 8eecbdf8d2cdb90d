"""What norm layers cost: a training step of a ResNet with each kind, against Flax's batch norm.

    python benchmarks/norms.py

ResNet-8 of width 16 in linen, batch 64, 32x32 images, SGD with momentum. Flax's batch norm with its
one-pass variance is the base; "batch" is boostax.linen.BatchNorm, whose variance takes two passes.
Prints ratios of CPU time (median over interleaved rounds, with the spread), FLOPs and bytes of the
compiled step. Takes about 80 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any
from unittest import mock

import _measure
import flax.linen as nn
import jax
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax
import boostax.linen
from tests.models import zoo_linen

KINDS: dict[str, dict[str, Any] | None] = {
    "flax batch": None,
    "batch": None,
    "ghost_batch": {"ghost_batch_size": 16},
    "layer": {},
    "group": {"num_groups": 4},
    "instance": {},
}


def two_passes(train: bool, **kinds: Any) -> nn.Module:
    """Return the zoo's batch norm as boostax has it."""
    return boostax.linen.BatchNorm(not train, momentum=0.9, epsilon=1e-5, **kinds)


def step_of(kind: str, settings: dict[str, Any] | None, batch: int) -> tuple[Any, list[Any]]:
    """Return a jitted training step of ``(params, stats, state, x, y)``, and its arguments."""
    kx, ky, kp = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(kx, (batch, 32, 32, 3))
    y = jax.random.randint(ky, (batch,), 0, 10)
    net: Any = zoo_linen.resnet8(shortcut="pad")
    if settings is not None:
        net, _ = boostax.replace_norm(net, kind, x, **settings)  # pyright: ignore
    variables = jax.jit(net.init)(kp, x)
    tx = optax.sgd(0.1, momentum=0.9)
    norm = two_passes if kind == "batch" else zoo_linen.norm

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, stats: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            with mock.patch.object(zoo_linen, "norm", norm):
                logits, new = net.apply({"params": params, "batch_stats": stats}, x, mutable=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), new.get("batch_stats", {})

        grads, stats_new = jax.grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), stats_new, state

    params = variables["params"]
    return step, [params, variables.get("batch_stats", {}), tx.init(params), x, y]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    candidates, costs = {}, {}
    for kind, settings in KINDS.items():
        step, arguments = step_of(kind, settings, asked.batch)
        costs[kind] = _measure.compiled_cost(step, *arguments)

        def run(step: Any = step, held: list[Any] = arguments) -> Any:
            held[:3] = step(*held)
            return held[0]

        candidates[kind] = run
    results = _measure.interleaved(candidates, asked.rounds, number=3, alternate=True)
    base = costs["flax batch"]
    for kind in KINDS:
        more = f"FLOPs {costs[kind]['flops'] / base['flops']:.3f}x"
        more += f", bytes {costs[kind]['bytes'] / base['bytes']:.3f}x"
        print(_measure.ratio_line(results, kind, "flax batch"), "|", more)


if __name__ == "__main__":
    main()
