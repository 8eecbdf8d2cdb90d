"""Row-sparse gradients: narrow and unsigned indices, numpy tables, tables of no rows, sharded ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from boostax import RowSparse
from boostax.updates.named import adagrad

TX = adagrad(0.5)


@pytest.mark.parametrize("kind", ["rows", "bcoo"])
@pytest.mark.parametrize(
    ("dtype", "count"),
    [("uint8", 256), ("uint16", 65536), ("int8", 300), ("int16", 40000), ("uint32", 5)],
)
def test_indices_of_any_integer_dtype(kind, dtype, count):
    indices, shape = np.array([3, 1, 3], dtype), (count, 1)
    # Outside of the table; of what fits into the dtype, it has none in some.
    outside = np.iinfo(dtype).max
    if outside >= count:
        indices = np.append(indices, np.array([outside], dtype))
    values = jnp.ones((len(indices), 1))
    rows = RowSparse(jnp.asarray(indices), values, shape)
    grad = rows if kind == "rows" else BCOO((values, rows.indices[:, None]), shape=shape)
    table = jnp.ones(shape)
    updates, state = TX.update(grad, TX.init(table), table)
    new = np.asarray(optax.apply_updates(table, updates))[:, 0]
    expected = {1: 1.0, 3: 4.0}
    assert np.flatnonzero(new != 1.0).tolist() == list(expected)
    sums = np.asarray(state.sum_of_squares)[:, 0]
    assert {i: sums[i] for i in np.flatnonzero(sums)} == expected
    assert np.flatnonzero(rows.todense()).tolist() == list(expected)


def test_numpy_tables():
    table = np.ones((4, 2), np.float32)
    rows = RowSparse(np.array([1, 1]), np.ones((2, 2), np.float32), table.shape)
    for new in (optax.apply_updates(table, rows), table + rows, rows + table):
        assert new.shape == (4, 2)
        np.testing.assert_array_equal(new[:, 0], [1.0, 3.0, 1.0, 1.0])


@pytest.mark.parametrize("named", [0, 2])
def test_a_table_of_no_rows(named):
    table = jnp.zeros((0, 2))
    rows = RowSparse(jnp.zeros(named, jnp.int32), jnp.ones((named, 2)), (0, 2))
    updates, state = TX.update(rows, TX.init(table), table)
    assert optax.apply_updates(table, updates).shape == state.sum_of_squares.shape == (0, 2)
    assert rows.todense().shape == (0, 2)


def test_tables_on_a_mesh():
    rows = RowSparse(jnp.array([1, 1]), jnp.ones((2, 2)), (4, 2))
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
        with jax.set_mesh(mesh):
            table = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("d")))
            state = TX.init(table)
            if kind == AxisType.Explicit:
                with pytest.raises(ValueError, match="don't go with a table that is sharded over"):
                    TX.update(rows, state, table)
            else:
                updates, _ = TX.update(rows, state, table)
                new = optax.apply_updates(table, updates)
                np.testing.assert_allclose(new[:, 0], [1.0, 0.5, 1.0, 1.0])


def test_indices_that_were_treated_as_numbers():
    rows = RowSparse(jnp.array([1, 1]), jnp.ones((2, 2)), (4, 2))
    clipped = jax.tree.map(lambda x: 0.5 * x, rows)
    with pytest.raises(TypeError, match="does not know row-sparse gradients"):
        TX.update(clipped, TX.init(jnp.ones((4, 2))))
