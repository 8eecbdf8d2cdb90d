"""AdaSum over the devices of an axis: who sends what to whom.

The order of combination for ``n`` devices, with ``p`` the largest power of two up to ``n``:

1. The first ``2 (n - p)`` ranks combine in pairs: (0, 1), (2, 3), ... Of each pair the lower rank
   goes on. This leaves ``p`` members, in rank order.
2. A binary tree over the members: neighbours first, then pairs of pairs.

So 3 devices make (01)2, 5 make ((01)2)(34), 6 make ((01)(23))(45), 7 make ((01)(23))((45)6).

Everything is written with complete permutations (each device sends once and receives once), which
``jax.vmap`` asks for; a device without a partner in some round sends to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax import _compat
from boostax.parallel._pairs import (
    Sums,
    combine,
    compute_dtype,
    merge,
    merge_all,
    sums_of,
    sums_of_all,
)

# A vector of this size, or a larger one, travels alone: it is not worth a copy.
_ALONE = 1 << 16
Remake = Callable[[], list[jax.Array]]

__all__ = ["ALGORITHMS", "adasum_gather", "adasum_halving", "members"]


def members(n: int) -> tuple[int, int]:
    """Return ``(p, n - p)``: how many devices the tree has, and how many fold in before."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def adasum_halving(
    vectors: Sequence[jax.Array], axis_name: str, n: int, *, joint: bool
) -> list[jax.Array]:
    """AdaSum by recursive vector halving with distance doubling.

    In round ``t`` a device and the one ``2^t`` members away each keep a half of what they hold and
    send the other; the group of ``2^(t+1)`` devices that now holds both vectors adds up its dot
    products, five numbers a vector. At the end each device holds ``1/p`` of the result, and one
    all-gather brings it to all. A device sends ``2 (p - 1) / p`` of its data, the bound of a ring.

    Args:
      vectors: arrays ``(c, size)``, ``c`` vectors of ``size`` elements each, of any floating dtypes.
      axis_name: the axis to exchange over.
      n: its size, at least 2.
      joint: one coefficient for all vectors together, instead of one for each.

    Returns:
      Arrays of the same shapes and dtypes, equal bit for bit on all devices.
    """
    p, extras = members(n)
    index = lax.axis_index(axis_name)
    dtypes = [v.dtype for v in vectors]
    messages = _messages(vectors)
    # Rows are what is dealt out: row v ends at member v. Zeros at the end change no dot product.
    dealt = [_in_rows(v, p) for v in vectors]
    current: Remake = lambda: dealt

    if extras:
        partner = [(i, i ^ 1 if i < 2 * extras else i) for i in range(n)]
        theirs = _widened(_permute(dealt, messages, axis_name, partner))
        sums = _local_sums(lambda: (_widened(dealt), theirs), joint, messages)
        current = _folded(dealt, theirs, sums, joint, index < 2 * extras)

    member = jnp.where(index < 2 * extras, index // 2, index - extras)
    for t in range(p.bit_length() - 1):
        bit = (member >> t) & 1
        # The inputs are sent in their own dtype, which loses nothing; later rounds in float32.
        send = _half(current(), 1 - bit)
        theirs = _widened(_permute(send, messages, axis_name, _towards(n, 1 << t)))
        kept = _kept(current, bit)
        # "a" is the vector of the lower member, on both sides.
        sums = _ordered(_local_sums(_both(kept, theirs), joint, messages), bit)
        for s in range(t + 1):
            other = lax.ppermute(jnp.stack(sums), axis_name, _towards(n, 1 << s))
            sums = merge(sums, Sums(*other))
        current = _after(kept, theirs, _ordered(sums, bit), joint)

    held = [x.astype(dtype) for x, dtype in zip(current(), dtypes, strict=True)]
    everyone = _all_gather(held, messages, axis_name)
    leaders = [_leader(v, n) for v in range(p)]
    result = []
    for x, vector in zip(everyone, vectors, strict=True):
        # (n, c, 1, w), one row from each device -> (c, p * w).
        rows = x if extras == 0 else x[jnp.array(leaders)]
        c, size = vector.shape
        result.append(jnp.moveaxis(rows[:, :, 0], 0, 1).reshape(c, -1)[:, :size])
    return result


def adasum_gather(
    vectors: Sequence[jax.Array], axis_name: str, n: int, *, joint: bool
) -> list[jax.Array]:
    """AdaSum by one all-gather, after which each device goes through the tree alone.

    One message, but ``n - 1`` times the data: for small trees. Arguments and result as for
    :func:`adasum_halving`.
    """
    p, extras = members(n)
    held = _widened(_all_gather(vectors, _messages(vectors), axis_name))

    def neighbours(stacks: list[jax.Array]) -> list[jax.Array]:
        a, b = ([x[side::2] for x in stacks] for side in (0, 1))
        return _paired(a, b, joint)

    if extras:
        folded = neighbours([x[: 2 * extras] for x in held])
        held = [
            jnp.concatenate([pair, x[2 * extras :]]) for pair, x in zip(folded, held, strict=True)
        ]
    while p > 1:
        held, p = neighbours(held), p // 2
    return [x[0].astype(v.dtype) for x, v in zip(held, vectors, strict=True)]


ALGORITHMS = {"halving": adasum_halving, "gather": adasum_gather}


def _in_rows(vector: jax.Array, rows: int) -> jax.Array:
    c, size = vector.shape
    missing = -size % rows
    if missing:
        vector = jnp.pad(vector, ((0, 0), (0, missing)))
    return vector.reshape(c, rows, -1)


def _leader(member: int, n: int) -> int:
    extras = members(n)[1]
    return 2 * member if member < extras else member + extras


def _towards(n: int, distance: int) -> list[tuple[int, int]]:
    p, _ = members(n)
    sends = {_leader(v, n): _leader(v ^ distance, n) for v in range(p)}
    return [(i, sends.get(i, i)) for i in range(n)]


def _half(held: list[jax.Array], bit: jax.Array) -> list[jax.Array]:
    halves = []
    for x in held:
        c, rows, w = x.shape
        x = x.reshape(c, rows // 2, 2, w)
        halves.append(lax.dynamic_index_in_dim(x, bit, axis=2, keepdims=False))
    return halves


def _widened(vectors: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.astype(compute_dtype(x.dtype)) for x in vectors]


def _ordered(sums: Sums, bit: jax.Array) -> Sums:
    return Sums(*(jnp.where(bit == 0, x, y) for x, y in zip(sums, sums.swapped(), strict=True)))


# What a device holds after each round is remade from what it got so far wherever it is needed, so that
# the branch for squares that overflow or vanish takes no memory as long as it does not run.


def _kept(current: Remake, bit: jax.Array) -> Remake:
    return lambda: _widened(_half(current(), bit))


def _both(kept: Remake, theirs: list[jax.Array]) -> Callable[[], tuple[list[Any], list[Any]]]:
    return lambda: (kept(), theirs)


def _after(kept: Remake, theirs: list[jax.Array], sums: Sums, joint: bool) -> Remake:
    return lambda: _combined(kept(), theirs, sums, joint)


def _folded(
    rows: list[jax.Array], theirs: list[jax.Array], sums: Sums, joint: bool, folds: jax.Array
) -> Remake:
    def remake() -> list[jax.Array]:
        mine = _widened(rows)
        paired = _combined(mine, theirs, sums, joint)
        return [jnp.where(folds, new, own) for own, new in zip(mine, paired, strict=True)]

    return remake


def _local_sums(
    both: Callable[[], tuple[list[Any], list[Any]]], joint: bool, messages: list[list[int]]
) -> Sums:
    """Return this device's sums of all vectors, ``(number of vectors,)``; ``(1,)`` when joint."""

    def pairs_of(message: list[int]) -> list[tuple[jax.Array, jax.Array]]:
        mine, theirs = both()
        flat = lambda x: x.reshape(x.shape[0], -1)
        return [(flat(mine[i]), flat(theirs[i])) for i in message]

    each: dict[int, Sums] = {}
    for message in messages:
        sums = sums_of_all(functools.partial(pairs_of, message))
        each |= dict(zip(message, sums, strict=True))
    parts = zip(*(each[i] for i in range(len(each))), strict=True)
    sums = Sums(*(jnp.concatenate(part) for part in parts))
    return Sums(*(x[None] for x in merge_all(sums))) if joint else sums


def _combined(
    mine: list[jax.Array], theirs: list[jax.Array], sums: Sums, joint: bool
) -> list[jax.Array]:
    out, first = [], 0
    for x, y in zip(mine, theirs, strict=True):
        c = x.shape[0]
        own = [s if joint else s[first : first + c] for s in sums]
        own = Sums(*(s[:, None, None].astype(x.dtype) for s in own))
        out.append(combine(x, y, own))
        first += c
    return out


def _paired(a: list[jax.Array], b: list[jax.Array], joint: bool) -> list[jax.Array]:
    """Combine stacks ``(pairs, c, size)`` pair by pair."""
    each = [sums_of(x, y) for x, y in zip(a, b, strict=True)]
    if joint:
        # (vectors, pairs)
        parts = Sums(*(jnp.concatenate([s.T for s in part]) for part in zip(*each, strict=True)))
        each = [Sums(*(s[:, None] for s in merge_all(parts)))] * len(a)
    return [
        combine(x, y, Sums(*(s[..., None].astype(x.dtype) for s in own)))
        for x, y, own in zip(a, b, each, strict=True)
    ]


def _messages(vectors: Sequence[jax.Array]) -> list[list[int]]:
    """Return which vectors travel together: large ones alone, the others by dtype."""
    messages: dict[Any, list[int]] = {}
    for i, x in enumerate(vectors):
        messages.setdefault((x.dtype.name, i if x.size >= _ALONE else -1), []).append(i)
    return list(messages.values())


def _permute(
    vectors: list[jax.Array],
    messages: list[list[int]],
    axis_name: str,
    towards: list[tuple[int, int]],
) -> list[jax.Array]:
    return _sent(vectors, messages, lambda flat: lax.ppermute(flat, axis_name, towards))


def _all_gather(
    vectors: Sequence[jax.Array], messages: list[list[int]], axis_name: str
) -> list[jax.Array]:
    """Gather all vectors; results have the devices on a new first axis."""
    return _sent(vectors, messages, lambda flat: _compat.all_gather(flat, axis_name))


def _sent(vectors: Sequence[jax.Array], messages: list[list[int]], send: Any) -> list[jax.Array]:
    out: list[Any] = [None] * len(vectors)
    for message in messages:
        flat = [vectors[i].reshape(-1) for i in message]
        # Without the barrier XLA fuses what made the parts into the concatenation: three times slower.
        got = send(flat[0] if len(flat) == 1 else jnp.concatenate(lax.optimization_barrier(flat)))
        first = 0
        for i in message:
            part = lax.slice_in_dim(got, first, first + vectors[i].size, axis=-1)
            out[i] = part.reshape(*got.shape[:-1], *vectors[i].shape)
            first += vectors[i].size
    return out
