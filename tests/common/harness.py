"""What the common suite is made of: rows, programs, runs, and comparisons.

A row of ``settings.py`` describes one technique. From it the harness builds a program, a pair of
functions ``init() -> carry`` and ``step(carry, batch) -> (carry, out)``, whatever the seam. Runs
and compiled functions are kept for the session, so that the checks of a row share them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models import data, plain

CHECKS: Mapping[str, str] = {
    "plain": "without jit: finite, structure kept, the parameters move",
    "jit": "compiled equals plain",
    "vmap": "two runs under vmap equal two runs",
    "scan": "a scan over steps equals the loop",
    "donated": "donated buffers, and a fresh state that shares none with the parameters",
    "chain": "inside optax.chain, before and after other transformations",
    "masked": "inside optax.masked",
    "multi_transform": "beside another optimizer in optax.multi_transform",
    "inject_hyperparams": "with an injected learning rate, also after it was changed",
    "abstract_init": "init on ShapeDtypeStructs, with and without shardings",
    "sharding": "the state's shardings are those of the parameters, and stay so",
    "extra_args": "unknown extra arguments change nothing",
    "dtypes": "float32, bfloat16, float16: dtypes and structure stay, values are near float32's",
    "devices": "1, 2, 3, 4 and 8 devices agree (3 and 8 where it does not talk to devices), "
    "8 on an Explicit mesh",
    "shard_map": "the update inside shard_map, on replicated parameters",
    "no_recompile": "the second cycle compiles nothing",
    "resume_orbax": "orbax: saved and restored at every step, bitwise the unbroken run",
    "resume_flax": "flax serialization: saved and restored at every step, bitwise the unbroken run",
    "export": "lowers for cpu, cuda and tpu, every variant of the step",
    "flush": "a flushed window, against a computation by hand",
    "hold": "the statistics of frozen norms, bit for bit",
}
DEVICE_COUNTS = (1, 2, 3, 4, 8)
FEW_DEVICES = (3, 8)  # for techniques that don't talk to devices: an odd number, and all
DTYPES = ("float32", "bfloat16", "float16")
LEARNING_RATE = 0.1


class Program(NamedTuple):
    """A technique at work on a tiny problem.

    Attributes:
      init: ``init() -> carry``, a fresh pytree of arrays.
      step: ``step(carry, batch) -> (carry, out)``.
      params: ``params(carry)``, the trained parameters within the carry.
      compiled: whether ``step`` compiles itself (a train step); others are wrapped in ``jax.jit``.
    """

    init: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    params: Callable[[Any], Any]
    compiled: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One row of the settings table.

    Attributes:
      name: unique; shown in the test's name.
      covers: public names of the techniques that the row tests.
      seam: where the technique acts; ``"all"`` for train steps.
      cycle: steps after which its behaviour repeats; runs last two cycles, or ``steps``.
      transform: update seam: ``transform(learning_rate) -> GradientTransformation``.
      extra: update seam: extra arguments of ``update`` (a static mapping). Default none.
      leafwise: update seam: a leaf's update depends on that leaf's gradients alone.
      program: other seams: ``program(dtype, donate) -> Program``.
      talks_to_devices: it exchanges between devices itself: then the check on devices runs on 1, 2,
        3, 4 and 8.
      does_not_apply: check -> the written reason why it says nothing about this technique.
      steps: length of a run. Default two cycles.
      variants: how many programs the step compiles over a cycle. Default 1.
      rtol: how closely two compiled programs agree. Default 1e-5.
    """

    name: str
    covers: tuple[str, ...]
    seam: Literal["model", "gradient", "update", "all"]
    cycle: int
    transform: Callable[[Any], optax.GradientTransformation] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leafwise: bool = True
    program: Callable[[str, bool], Program] | None = None
    talks_to_devices: bool = False
    does_not_apply: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0
    variants: int = 1
    rtol: float = 1e-5

    @property
    def length(self) -> int:
        """Steps of a run."""
        return self.steps or 2 * self.cycle

    def make(self, learning_rate: Any = LEARNING_RATE) -> optax.GradientTransformationExtraArgs:
        """Return the row's transformation."""
        return optax.with_extra_args_support(self.build(learning_rate))

    def build(self, learning_rate: Any) -> optax.GradientTransformation:
        """Return the row's transformation; one that talks to devices runs on simulated ones."""
        assert self.transform is not None, f"{self.name} has no transformation"
        tx = self.transform(learning_rate)
        return on_lanes(tx) if self.talks_to_devices else tx


LANES = 2


def on_lanes(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run an update on ``LANES`` simulated devices of the axis "data" that all get the same."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        run = lambda grads: tx.update(grads, state, params, **extra)
        copies = jax.tree.map(lambda g: jnp.stack([g] * LANES), grads)
        return jax.tree.map(lambda x: x[0], jax.vmap(run, axis_name="data")(copies))

    return optax.GradientTransformationExtraArgs(tx.init, update)


def for_rows(check: str, rows: Sequence[Row]) -> pytest.MarkDecorator:
    """Parametrize a check over the table; where it does not apply, skip with the written reason."""
    assert check in CHECKS, f"{check} is not in CHECKS"
    return pytest.mark.parametrize(
        "row", [pytest.param(row, id=row.name, marks=_left_out(check, row)) for row in rows]
    )


def for_rows_on_devices(check: str, rows: Sequence[Row]) -> pytest.MarkDecorator:
    """Parametrize a check over the table and each row's numbers of devices."""
    assert check in CHECKS, f"{check} is not in CHECKS"
    return pytest.mark.parametrize(
        ("row", "count"),
        [
            pytest.param(
                row,
                count,
                id=f"{row.name}-{count}",
                marks=_left_out(check, row) + _slow(row, count),
            )
            for row in rows
            for count in _counts(check, row)
        ],
    )


def _slow(row: Row, count: int) -> list[pytest.MarkDecorator]:
    """Compiling for each number of devices takes long; 1, 2 and 8 are run each time."""
    return [pytest.mark.slow] if count in (3, 4) else []


def _counts(check: str, row: Row) -> tuple[int, ...]:
    return DEVICE_COUNTS if row.talks_to_devices and check == "devices" else FEW_DEVICES


def _left_out(check: str, row: Row) -> list[pytest.MarkDecorator]:
    reason = row.does_not_apply.get(check)
    if check not in row.does_not_apply:
        return []
    return [pytest.mark.skip(reason=f"{check}, {row.name}: {reason}")]


_compilations = 0


def _count_compilation(event: str, seconds: float, **_: Any) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def compilations() -> int:
    """Return how many programs XLA has compiled, or fetched from its cache, so far."""
    return _compilations


def build(row: Row, dtype: str = "float32", donate: bool = False) -> Program:
    """Return the row's program, not yet compiled."""
    if row.program is not None:
        return row.program(dtype, donate)
    tx = row.make()

    def init() -> Any:
        params = plain.init(dtype)
        return params, tx.init(params)

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, state = carry
        loss, grads = jax.value_and_grad(plain.loss)(params, batch)
        updates, state = tx.update(grads, state, params, **row.extra)
        return (optax.apply_updates(params, updates), state), loss

    return Program(init, step, lambda carry: carry[0])


def compiled(program: Program, **options: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return the program's compiled step."""
    return program.step if program.compiled else jax.jit(program.step, **options)


class Recorded(NamedTuple):
    """An unbroken run.

    Attributes:
      program: what ran.
      step: its compiled step.
      batches: one a step.
      carries: the state before the first step and after each, on the host.
      outs: what each step returned beside the state, on the host.
      compilations: how many programs each step compiled.
      cache_size: how many programs jit held for the step after the run; None if it compiles itself.
    """

    program: Program
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[Any]
    carries: list[Any]
    outs: list[Any]
    compilations: list[int]
    cache_size: int | None


@functools.cache
def recorded(row: Row, dtype: str = "float32") -> Recorded:
    """Run a row once, unbroken, and keep what came out; later calls return the same run."""
    program = build(row, dtype)
    step = compiled(program)
    batches = [batch_at(row, t, dtype) for t in range(row.length)]
    carry = program.init()
    carries, outs, counts = [host(carry)], [], []
    for batch in batches:
        before = compilations()
        carry, out = step(carry, batch)
        counts.append(compilations() - before)
        carries.append(host(carry))
        outs.append(host(out))
    size = None if program.compiled else step._cache_size()
    return Recorded(program, step, batches, carries, outs, counts, size)


def stacked_batches(row: Row, dtype: str = "float32") -> Any:
    """Return the batches of a run, stacked on the leading axis."""
    return data.batches(row.length, jnp.dtype(dtype))


def batch_at(row: Row, t: int, dtype: str = "float32") -> Any:
    """Return the batch of step ``t``."""
    return jax.tree.map(lambda leaf: leaf[t], stacked_batches(row, dtype))


def drive(
    tx: optax.GradientTransformation,
    params: Any,
    grads: Any,
    between: Callable[[Any, int], Any] | None = None,
    **extra: Any,
) -> Any:
    """Feed a stream of gradients to a transformation at fixed parameters; return all updates.

    ``between(state, t)`` may change the state before step ``t``.
    """
    update = jax.jit(optax.with_extra_args_support(tx).update)
    state, updates = tx.init(params), []
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        state = state if between is None else between(state, t)
        update_t, state = update(jax.tree.map(lambda g, t=t: g[t], grads), state, params, **extra)
        updates.append(update_t)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *updates)


@functools.cache
def driven(row: Row) -> tuple[Any, Any, Any]:
    """Return ``(params, gradient stream, the row's own updates)``; the oracle of the wrappers."""
    params = plain.init()
    grads = data.random_like(params, row.length)
    return params, grads, drive(row.make(), params, grads, **row.extra)


def host(tree: Any) -> Any:
    """Copy a tree to numpy, so that donation can't take it away."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def fresh(tree: Any) -> Any:
    """Copy a host tree into new device buffers."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def avals(tree: Any) -> Any:
    """Return the structure, shapes and dtypes of a tree as ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)


def assert_same_avals(got: Any, expected: Any, what: str) -> None:
    """Assert equal structure, shapes and dtypes, naming the leaf that differs."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), f"{what}: the structure changed"
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(avals(got)),
        jax.tree.leaves(avals(expected)),
        strict=True,
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (
            f"{what}: {jax.tree_util.keystr(path)} was {b.dtype}{b.shape}, is {a.dtype}{a.shape}"
        )


def assert_bitwise(got: Any, expected: Any, what: str) -> None:
    """Assert that two trees hold the same bytes."""
    assert_same_avals(got, expected, what)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(host(got)), jax.tree.leaves(host(expected)), strict=True
    ):
        assert a.tobytes() == b.tobytes(), f"{what}: {jax.tree_util.keystr(path)} differs"


def assert_close(
    got: Any, expected: Any, what: str, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert that two programs agree as closely as XLA promises; integers must be equal."""
    assert_same_avals(got, expected, what)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(host(got)), jax.tree.leaves(host(expected)), strict=True
    ):
        name = f"{what}: {jax.tree_util.keystr(path)}"
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol, err_msg=name
            )
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def assert_finite(tree: Any, what: str) -> None:
    """Assert that every floating leaf is finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(host(tree)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite = np.isfinite(leaf.astype(np.float64)).all()
            assert finite, f"{what}: {jax.tree_util.keystr(path)} is not finite"


def mesh_of(count: int, axis: str = "data") -> jax.sharding.Mesh:
    """Return a mesh of the first ``count`` of the simulated devices."""
    devices = jax.devices()
    assert len(devices) >= count, f"the suite needs 8 simulated devices, got {len(devices)}"
    return jax.sharding.Mesh(np.array(devices[:count]), (axis,))


def assert_reason(reason: Any, where: str, words: int = 6) -> None:
    """Assert that a reason is a sentence of its own, not a placeholder."""
    assert isinstance(reason, str), f"{where}: a reason is text"
    assert reason == reason.strip(), f"{where}: blanks around the reason"
    assert len(reason.split()) >= words, f"{where}: {reason!r} does not say why"
    placeholder = re.search(
        r"\b(todo|tbd|fixme|n/a|later|not applicable|does not apply)\b", reason, re.I
    )
    assert placeholder is None, f"{where}: {reason!r} is a placeholder"
