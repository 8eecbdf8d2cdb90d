"""What loss scales bring in float16: gradients that are zero and should not be; and what they cost.

    python benchmarks/loss_scale.py [--part towers one formats cost] [--quick] [--repeats 7]
        [--out results.json]

All parts if none is named.

- ``towers``: two float16 MLPs on scikit-learn's digits with the task weights 2^16 and 2^-20, trained in
  float32, with one scale a tower, with one dynamic scale, and with fixed scales from 2^-24 to 2^24.
- ``one``: ordinary float16 networks without a scale, with one dynamic scale, and with one a layer.
- ``formats``: shares of cotangents, weights and activations that float16, bfloat16 and float8 set to
  zero, without a scale, with one, and with one a tensor.
- ``cost``: a train step with each kind of scale against the step without: CPU time, interleaved, and
  FLOPs, bytes and temp memory of the compiled steps.

A zero share is taken before several of the steps, at the parameters and the scale of that moment, from
the unscaled gradient of the loss: elements that are exactly zero, of those that are not in float32.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import _half  # ahead of jax: it sets a flag of XLA
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from _half_runs import FORMATS, Arm, Found, Problem, log2, mean, rounding, trained
from _measure import compiled_cost, environment, interleaved, ratios, write_results
from _tables import table

import boostax

PARTS = ("towers", "one", "formats", "cost")
SIZE = 128  # of a batch
WINDOW = 20  # good steps before a scale grows, for runs of a few hundred steps
LEAST = 2.0**-24  # for all scales: none is held up by its bounds
HALF = jnp.float16


def accuracy(apply: Any, x: np.ndarray, y: np.ndarray) -> float:
    return float(jnp.mean(jnp.argmax(apply(x), -1) == y))


def towers_problem(data: _half.Data) -> Problem:
    def measured(params: Any) -> dict[str, float]:
        net = lambda name: lambda x: _half.mlp(params[name], x, jnp.float32)
        return {name: accuracy(net(name), data.test_x, data.test_y) for name in params}

    return Problem(
        lambda key: _half.towers_init(key, 64, 128, 64, 10),
        _half.towers_loss,
        lambda steps, seed: _half.pairs(data, steps, SIZE, seed),
        measured,
    )


def row(label: str, found: Found, names: list[str]) -> list[str]:
    if found.zeros:
        zeros = [mean(found.zeros[name]) if name in found.zeros else "overflow" for name in names]
    else:
        zeros = [""] * len(names)
    scores = [mean(values) for values in found.accuracy.values()]
    return [label, log2(found.scale), mean(found.skipped), *zeros, *scores]


def towers(seeds: int, steps: int, exponents: list[int]) -> tuple[str, dict[str, Any]]:
    """Return the table of the two towers."""
    problem = towers_problem(_half.digits())
    looks = [n for n in (0, 25, 50, 100, 200, 300, 399) if n < steps]
    one = boostax.DynamicLossScale(window=WINDOW, min_scale=LEAST)
    groups = boostax.GroupLossScale(["a/*", "b/*"], window=WINDOW)
    kept: dict[str, Any] = {}
    for label, arm in (
        ("float32", Arm(problem, jnp.float32)),
        ("`GroupLossScale`, one a tower", Arm(problem, HALF, groups)),
        ("`DynamicLossScale`", Arm(problem, HALF, one)),
    ):
        kept[label] = arm.run(seeds, steps, looks)
        print(label, file=sys.stderr, flush=True)
    fixed = Arm(problem, HALF, 1.0)
    for exponent in exponents:
        kept[f"fixed at 2^{exponent}"] = fixed.run(seeds, steps, looks, 2.0**exponent)
        print(exponent, file=sys.stderr, flush=True)
    head = ["", "last scale", "skipped, %", "zero in a, %", "in b, %", "accuracy a, %", "b, %"]
    rows = [row(label, found, ["a", "b"]) for label, found in kept.items()]
    text = f"{steps} steps of Adam, batches of {SIZE}, {seeds} seeds, looks before steps {looks}."
    return f"{text}\n\n{table(head, rows)}", {k: v._asdict() for k, v in kept.items()}


def one_problems(data: _half.Data) -> dict[str, Problem]:
    """Return ordinary networks, whose layers are the parts that are reported."""
    strides, channels = (1, 2, 1), (1, 8, 16, 16)
    nets = {
        "MLP 64-128-128-64-10": (
            lambda key: _half.mlp_init(key, 64, 128, 128, 64, 10),
            _half.mlp,
        ),
        "CNN of 3 convolutions": (
            lambda key: _half.cnn_init(key, channels, 16),
            functools.partial(_half.cnn, strides=strides),
        ),
    }

    stream = lambda steps, seed: _half.batches(data, steps, SIZE, seed)

    def classifier(init: Any, net: Any) -> Problem:
        def loss_in(dtype: Any) -> Any:
            return lambda params, batch: _half.cross_entropy(
                net(params, batch["x"], dtype), batch["y"]
            )

        def measured(params: Any) -> dict[str, float]:
            logits = lambda x: net(params, x, jnp.float32)
            return {"all": accuracy(logits, data.test_x, data.test_y)}

        return Problem(init, loss_in, stream, measured)

    def squares(params: Any, x: Any, dtype: Any) -> jax.Array:
        difference = _half.mlp(params, x, dtype).astype(jnp.float32) - x
        return jnp.mean(difference**2)

    def explained(params: Any) -> dict[str, float]:
        error = float(squares(params, data.test_x, jnp.float32))
        return {"all": 1 - error / float(np.mean((data.test_x - data.test_x.mean(0)) ** 2))}

    autoencoder = Problem(
        lambda key: _half.mlp_init(key, 64, 128, 32, 128, 64),
        # Derivatives as small as those of a mean over 2^23 values, such as the pixels of large images.
        lambda dtype: lambda params, batch: 2.0**-10 * squares(params, batch["x"], dtype),
        stream,
        explained,
    )
    return {
        **{name: classifier(*made) for name, made in nets.items()},
        "Autoencoder 64-128-32-128-64, loss times 2^-10 (score: explained variance)": autoencoder,
    }


def one(seeds: int, steps: int) -> tuple[str, dict[str, Any]]:
    """Return the tables of networks for which one scale is enough."""
    looks = [n for n in (0, 25, 50, 100, 200, 300, 399) if n < steps]
    texts, kept = [], {}
    for name, problem in one_problems(_half.digits()).items():
        layers = list(problem.init(jax.random.key(0)))
        arms = {
            "float32": Arm(problem, jnp.float32),
            "float16, no scale": Arm(problem, HALF, 1.0),
            "`DynamicLossScale`": Arm(problem, HALF, boostax.DynamicLossScale(window=WINDOW)),
            "`GroupLossScale`, one a layer": Arm(
                problem,
                HALF,
                boostax.GroupLossScale([f"{layer}/*" for layer in layers], window=WINDOW),
            ),
        }
        found = {label: arm.run(seeds, steps, looks) for label, arm in arms.items()}
        print(name, file=sys.stderr, flush=True)
        kept[name] = {label: f._asdict() for label, f in found.items()}
        columns = [f"zero in layer {i}, %" for i in range(1, len(layers) + 1)]
        head = ["", "last scale", "skipped, %", *columns, "score, %"]
        rows = [row(label, f, layers) for label, f in found.items()]
        texts.append(f"{name}, {steps} steps, {seeds} seeds.\n\n{table(head, rows)}")
    return "\n\n".join(texts), kept


def format_rows(measure: Any, kinds: Any, parts: dict[str, float]) -> list[tuple[str, list[Any]]]:
    """Return for each choice of scales what each part of the loss loses, by its weight."""
    at = lambda scale: [measure(kinds, scale * weight) for weight in parts.values()]
    if kinds[0] is ml_dtypes.bfloat16:
        return [("no scale", at(1.0))]
    overflows = lambda e: any(part.overflows for part in at(2.0**e))
    exponents = range(-24, 41)
    best = 2.0 ** exponents[bisect.bisect_left(exponents, True, key=overflows) - 1]
    single = [measure(kinds, weight, per_tensor=True) for weight in parts.values()]
    return [
        ("no scale", at(1.0)),
        (f"one, {log2([best])}", at(best)),
        ("one a tensor", single),
    ]


def formats(steps: int) -> tuple[str, dict[str, Any]]:
    """Return what each format sets to zero."""
    data = _half.digits()
    start = _half.mlp_init(jax.random.key(0), 64, *(128,) * 6, 10)
    x, y = data.x[:SIZE], data.y[:SIZE]
    cases = {
        "at the start": (start, {"": 1.0}),
        f"after {steps} steps": (trained(data, start, steps, SIZE), {"": 1.0}),
        "at the start, as two towers with the weights 2^16 (a) and 2^-20 (b)": (
            start,
            {" a": _half.WEIGHTS["a"], " b": _half.WEIGHTS["b"]},
        ),
    }
    texts, kept = [], {}
    for when, (params, parts) in cases.items():
        measure = functools.partial(rounding, list(params.values()), x, y)
        rows = []
        for name, kinds in FORMATS.items():
            for words, found in format_rows(measure, kinds, parts):
                shares = [s for part in found for s in (part.backward, part.worst)]
                cells = [f"{100 * s:.1f}" for s in (found[0].forward, *shares)]
                rows.append([f"{name}, {words}", *cells])
                kept[f"{when}, {name}, {words}"] = [part._asdict() for part in found]
        each = [f"{w}{part}, %" for part in parts for w in ("cotangents", "in the worst layer")]
        head = ["", "weights and inputs, %", *each]
        texts.append(f"MLP 64-6 x 128-10 on digits, {when}.\n\n{table(head, rows)}")
    return "\n\n".join(texts), kept


class Stepper:
    """A train step that keeps its own state."""

    def __init__(self, loss: Any, params: Any, batch: Any, **given: Any):
        self.step = boostax.train_step(loss, optax.adam(1e-3), **given)
        self.state, self.batch = self.step.init(params), batch

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    def cost(self) -> dict[str, float]:
        compiled = self.step._jitted(None, self.state, due=None)
        return compiled_cost(compiled, self.state, self.batch, {})


def cost_cases() -> dict[str, tuple[Any, Any, Any]]:
    """Return networks of eight layers: parameters, ``net(params, x, dtype)``, inputs of a batch."""
    key, draw = jax.random.split(jax.random.key(0))
    strides = (2, 1, 1, 2, 1, 1, 2)
    channels = (1, 16, 16, 16, 32, 32, 32, 32)
    images = jax.random.normal(draw, (SIZE, 784))
    return {
        "MLP 784-7 x 512-10": (_half.mlp_init(key, 784, *(512,) * 7, 10), _half.mlp, images),
        "CNN 28x28, 7 convolutions": (
            _half.cnn_init(key, channels, 16),
            functools.partial(_half.cnn, strides=strides),
            images,
        ),
    }


def groups_of(params: Any, count: int) -> boostax.GroupLossScale:
    """Return neighbouring layers in ``count`` groups."""
    parts = np.array_split(np.asarray(list(params)), count)
    return boostax.GroupLossScale([[f"{name}/*" for name in part] for part in parts])


def cost(repeats: int, number: int) -> tuple[str, dict[str, Any]]:
    """Return the tables of what a step costs."""
    texts, kept = [], {}
    for name, (params, net, x) in cost_cases().items():
        batch = {"x": x, "y": jnp.arange(len(x)) % 10}
        for dtype in (jnp.float32, HALF):

            def loss(params: Any, batch: Any, net: Any = net, dtype: Any = dtype) -> jax.Array:
                return _half.cross_entropy(net(params, batch["x"], dtype), batch["y"])

            base = "no scale"
            arms = {
                base: {},
                "`skip_nonfinite=True`": {"skip_nonfinite": True},
                "fixed scale": {"loss_scale": 1024.0},
                "`DynamicLossScale`": {"loss_scale": boostax.DynamicLossScale(init=1024.0)},
                **{
                    f"`GroupLossScale`, {n} groups": {"loss_scale": groups_of(params, n)}
                    for n in (2, 4, 8)
                },
            }
            steppers = {k: Stepper(loss, params, batch, **given) for k, given in arms.items()}
            compiled = {k: stepper.cost() for k, stepper in steppers.items()}
            results = interleaved(steppers, repeats=repeats, number=number, alternate=True)
            rows = []
            for label, own in compiled.items():
                cpu, wall = (ratios(results, label, base, clock) for clock in ("cpu", "wall"))
                rows.append(
                    [
                        label,
                        f"{1e3 * statistics.median(results[label]['cpu']):.2f}",
                        f"{statistics.median(cpu):.3f} [{min(cpu):.3f}, {max(cpu):.3f}]",
                        f"{statistics.median(wall):.3f}",
                        *(
                            f"{own[k] / compiled[base][k]:.3f}"
                            for k in ("flops", "bytes", "temp_bytes")
                        ),
                    ]
                )
            head = ["", "CPU, ms", "ratio [min, max]", "wall", "FLOPs", "bytes", "temp memory"]
            words = f"{name}, batch {SIZE}, {jnp.dtype(dtype).name}, Adam"
            text = f"{words}: {repeats} rounds of {number} steps in turn; ratios to the first row."
            texts.append(f"{text}\n\n{table(head, rows)}")
            kept[words] = {"times": results, "compiled": compiled}
            print(texts[-1], file=sys.stderr, flush=True)
    return "\n\n".join(texts), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="these alone")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of `cost` that count")
    parser.add_argument("--number", type=int, default=40, help="steps of such a round")
    parser.add_argument("--seeds", type=int, default=5, help="of `towers` and `one`")
    parser.add_argument("--steps", type=int, default=400, help="of a run in `towers` and `one`")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    quick = arguments.quick
    seeds, steps = (1, 30) if quick else (arguments.seeds, arguments.steps)
    exponents = [-8, 0, 16] if quick else [*range(-24, 0, 4), 0, 1, 2, 3, *range(4, 25, 4)]
    _half.check_underflow()
    kept: dict[str, Any] = {}
    parts = {
        "towers": lambda: towers(seeds, steps, exponents),
        "one": lambda: one(seeds, steps),
        "formats": lambda: formats(min(steps, 200)),
        "cost": lambda: cost(1 if quick else arguments.repeats, 2 if quick else arguments.number),
    }
    for name in arguments.part:
        text, kept[name] = parts[name]()
        print(f"## {name}\n\n{text}\n", flush=True)
    where = environment()
    print(f"{where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, kept)


if __name__ == "__main__":
    main()
