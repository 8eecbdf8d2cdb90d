"""What a step of each optimizer by name costs, over optax's equivalent.

    python benchmarks/optimizers.py [--quick] [--repeats 7] [--number 20] [--out results.json]

FLOPs and bytes of the compiled update and ``apply_updates``, as XLA counts them, and CPU time,
interleaved, as a ratio within each round. The parameters are those of an MLP 784-512-256-10.
Then a step of Adagrad with a row-sparse gradient over one with the dense gradient made of the same
rows, on a table of 100 000 x 64. Prints Markdown.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from _measure import compiled_cost, environment, interleaved, ratios, write_results
from _tables import table

import boostax

WIDTHS = (784, 512, 256, 10)
DECAY = 1e-4
HEAD = ["optimizer", "FLOPs over optax's", "bytes over optax's", "CPU time over optax's"]


def decayed(tx: Any) -> Any:
    """Return ``tx`` behind L2 decay, as one writes it with optax."""
    return optax.chain(optax.add_decayed_weights(DECAY), tx)


def named(name: str, **settings: Any) -> Any:
    return boostax.optimizer(name, learning_rate=0.1, **settings)


def everywhere(params: Any) -> Any:
    return jax.tree.map(lambda _: True, params)


def pairs() -> dict[str, tuple[Any, Any]]:
    """Return what is compared: ours and optax's."""
    theirs = {"convention": "mindspore"}
    return {
        "sgd": (named("sgd"), optax.sgd(0.1)),
        "sgd, momentum": (named("sgd", momentum=0.9), optax.sgd(0.1, 0.9)),
        "sgd, Nesterov, decay": (
            named("sgd", momentum=0.9, nesterov=True, weight_decay=DECAY),
            decayed(optax.sgd(0.1, 0.9, nesterov=True)),
        ),
        "adagrad": (named("adagrad"), optax.adagrad(0.1)),
        "adagrad, decay": (named("adagrad", weight_decay=DECAY), decayed(optax.adagrad(0.1))),
        "adagrad, MindSpore": (named("adagrad", **theirs), optax.adagrad(0.1)),
        "adadelta": (named("adadelta"), optax.adadelta(0.1)),
        "rmsprop": (named("rmsprop"), optax.rmsprop(0.1, eps_in_sqrt=False)),
        "rmsprop, MindSpore": (named("rmsprop", **theirs), optax.rmsprop(0.1, initial_scale=1.0)),
        "rmsprop, centred, momentum": (
            named("rmsprop", centered=True, momentum=0.9),
            optax.rmsprop(0.1, eps_in_sqrt=False, centered=True, momentum=0.9),
        ),
        "rmsprop, MindSpore, centred": (
            named("rmsprop", centered=True, **theirs),
            optax.rmsprop(0.1, initial_scale=1.0, centered=True),
        ),
        "adam": (named("adam"), optax.adam(0.1)),
        "adam, decay": (named("adam", weight_decay=DECAY), decayed(optax.adam(0.1))),
        "adam, amsgrad": (named("adam", amsgrad=True), optax.amsgrad(0.1)),
        "adam, MindSpore": (named("adam", **theirs), optax.adam(0.1)),
        "adam_weight_decay": (
            named("adam_weight_decay", weight_decay=DECAY),
            optax.adamw(0.1, weight_decay=DECAY),
        ),
        "lars, decay": (
            named("lars", weight_decay=DECAY, mask=everywhere),
            optax.lars(0.1, weight_decay=DECAY),
        ),
        "sgd in two groups": (
            named("sgd", momentum=0.9, groups=[{"params": "2/*", "learning_rate": 0.01}]),
            optax.partition(
                {"body": optax.sgd(0.1, 0.9), "head": optax.sgd(0.01, 0.9)},
                ["body", "body", "head"],
            ),
        ),
    }


def parameters() -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    sizes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=False)
    return [
        {"kernel": jax.random.normal(k, (m, n)) / m**0.5, "bias": jnp.zeros(n)} for k, m, n in sizes
    ]


def step(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


class Stepper:
    """An optimizer at work that keeps its own parameters and state."""

    def __init__(self, tx: Any):
        self.params = parameters()
        self.grads = jax.tree.map(lambda p: 1e-3 * jnp.ones_like(p), self.params)
        self.state = tx.init(self.params)
        self.jitted = jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))

    def __call__(self) -> Any:
        self.params, self.state = self.jitted(self.params, self.state, self.grads)
        return self.params

    def cost(self) -> dict[str, float]:
        return compiled_cost(self.jitted, self.params, self.state, self.grads)


class OnTable:
    """Adagrad on an embedding table of which a batch uses some rows."""

    def __init__(self, tx: Any, rows: int, sparse: bool, size: tuple[int, int] = (100_000, 64)):
        self.params = jnp.zeros(size)
        self.state = tx.init(self.params)
        indices = jax.random.randint(jax.random.key(0), (rows,), 0, size[0])
        values = jnp.ones((rows, size[1]))

        def update(params: Any, state: Any, indices: Any, values: Any) -> tuple[Any, Any]:
            grad = boostax.RowSparse(indices, values, size)
            return step(tx, params, state, grad if sparse else grad.todense())

        self.jitted = jax.jit(update, donate_argnums=(0, 1))
        self.given = indices, values

    def __call__(self) -> Any:
        self.params, self.state = self.jitted(self.params, self.state, *self.given)
        return self.params


def sparse_rows(repeats: int, number: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the table of row-sparse steps over dense ones, and what it was made of."""
    out, results = [], {}
    for rows in (256, 4096, 65_536):
        both = {
            "rows": OnTable(named("adagrad"), rows, True),
            "dense": OnTable(named("adagrad"), rows, False),
        }
        timed = interleaved(both, repeats, number=number)
        cpu = ratios(timed, "rows", "dense")
        results[str(rows)] = timed
        out.append([str(rows), f"{statistics.median(cpu):.3f} [{min(cpu):.3f}, {max(cpu):.3f}]"])
    return out, results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--number", type=int, default=20, help="steps a round")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else arguments.repeats
    rows, results = [], {}
    for case, (ours, theirs) in pairs().items():
        both = {"ours": Stepper(ours), "optax": Stepper(theirs)}
        cost = {name: stepper.cost() for name, stepper in both.items()}
        timed = interleaved(both, repeats, number=arguments.number)
        ratio = {key: cost["ours"][key] / cost["optax"][key] for key in ("flops", "bytes")}
        cpu = ratios(timed, "ours", "optax")
        results[case] = {"cost": cost, "ratio": ratio, "times": timed}
        rows.append(
            [
                case,
                f"{ratio['flops']:.3f}",
                f"{ratio['bytes']:.3f}",
                f"{statistics.median(cpu):.2f} [{min(cpu):.2f}, {max(cpu):.2f}]",
            ]
        )
    print(table(HEAD, rows))
    lines, results["rows"] = sparse_rows(repeats, min(arguments.number, 5))
    print("\n" + table(["rows of 100 000", "CPU time over a dense gradient's"], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in environment().items()))
    if arguments.out:
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
