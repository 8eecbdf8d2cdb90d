"""nearest_source_subset and enlarge_neighbours: by hand, against brute force, streams, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from boostax import enlarge_neighbours, feature_histograms, histogram_edges, nearest_source_subset
from boostax.finetune import nearest
from tests.common.harness import mesh_of

SHAPE = (40, 7, 5)  # source, targets, features: the same for most tests, so that little compiles


def brute_force(source, target, metric):
    s, t = source.astype(np.float64)[None], target.astype(np.float64)[:, None]
    if metric == "euclidean":
        return np.sqrt(((s - t) ** 2).sum(-1))
    if metric == "symmetric_kl":
        return ((s - t) * (np.log(s) - np.log(t))).sum(-1)
    norms = np.linalg.norm(s, axis=-1) * np.linalg.norm(t, axis=-1)
    return 1 - (s * t).sum(-1) / np.where(norms > 0, norms, 1)


def check(subset, far, k):
    """Distances as brute force has them, and the indices wherever they are clearly apart."""
    order = np.argsort(far, axis=1, kind="stable")
    expected = np.take_along_axis(far, order, 1)
    np.testing.assert_allclose(subset.distances, expected[:, :k], rtol=1e-4, atol=2e-6)
    at_indices = np.take_along_axis(far, subset.neighbours, 1)
    np.testing.assert_allclose(at_indices, expected[:, :k], rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(subset.indices, np.unique(subset.neighbours))
    assert all(len(set(row)) == k for row in subset.neighbours.tolist())


def draw(seed, metric, dtype=np.float32):
    rng = np.random.default_rng(seed)
    source = rng.normal(size=(SHAPE[0], SHAPE[2])).astype(dtype)
    target = rng.normal(size=(SHAPE[1], SHAPE[2])).astype(dtype)
    if metric == "symmetric_kl":
        source, target = np.abs(source) + dtype(0.1), np.abs(target) + dtype(0.1)
    return source, target


def test_by_hand():
    source = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    subset = nearest_source_subset(source, np.array([[0.0, 0.0], [6.0, 7.0]]), 2)
    assert subset.neighbours.tolist() == [[0, 2], [3, 1]]
    assert subset.indices.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(subset.distances, [[0, 1], [1, 18**0.5]], rtol=1e-6)
    assert subset.k.tolist() == [2, 2]


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "symmetric_kl"])
@given(seed=st.integers(0, 10_000))
def test_against_brute_force(metric, seed):
    source, target = draw(seed, metric)
    subset = nearest_source_subset(source, target, 3, metric=metric, block=16)
    check(subset, brute_force(source, target, metric), 3)


@given(seed=st.integers(0, 10_000))
def test_ties_go_to_the_lowest_index(seed):
    # Small whole numbers: every score is exact, and most of them are tied.
    rng = np.random.default_rng(seed)
    source = rng.integers(-1, 2, size=(SHAPE[0], SHAPE[2])).astype(np.float32)
    target = rng.integers(-1, 2, size=(SHAPE[1], SHAPE[2])).astype(np.float32)
    squares = ((source[None] - target[:, None]) ** 2).sum(-1)
    expected = np.argsort(squares, axis=1, kind="stable")[:, :3]
    subset = nearest_source_subset(source, target, 3, block=16)
    np.testing.assert_array_equal(subset.neighbours, expected)


def test_copies_of_a_row_in_several_blocks_are_tied():
    # Anywhere in a block: the same row has the same score in every column of the product.
    source, target = draw(1, "cosine")
    places = np.random.default_rng(1).permutation(39)
    copies, row = np.concatenate([source[:13]] * 3)[places], np.tile(np.arange(13), 3)[places]
    for metric in ("euclidean", "cosine"):
        found = nearest_source_subset(copies, target, 6, metric=metric, block=16).neighbours
        found = found.reshape(len(target), 2, 3)
        np.testing.assert_array_equal(row[found], np.repeat(row[found[..., :1]], 3, axis=-1))
        assert (np.diff(found, axis=-1) > 0).all()


def test_zeros_have_no_direction():
    source = np.array([[0.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    target = np.array([[2.0, 0.0], [0.0, 0.0]])
    subset = nearest_source_subset(source, target, 3, metric="cosine")
    np.testing.assert_allclose(subset.distances, [[0, 1, 2], [1, 1, 1]], atol=1e-6)
    assert subset.neighbours.tolist() == [[2, 0, 1], [0, 1, 2]]


def test_negative_zero_ties_with_zero():
    # About the targets' mean (0, 0): the score of row 0 is a sum of -0s, that of row 1 is 4 - 4.
    source = np.array([[0.0, 0.0], [-2.0, -2.0]])
    target = np.array([[-1.0, -1.0], [1.0, 1.0]])
    assert nearest_source_subset(source, target, 1).neighbours.tolist() == [[0], [0]]


def test_far_from_the_origin():
    source, target = draw(2, "euclidean")
    subset = nearest_source_subset(source + 1000, target + 1000, 3, block=16)
    check(subset, brute_force(source + 1000, target + 1000, "euclidean"), 3)


@pytest.mark.parametrize("kind", ["memory map", "name", "jax", "blocks", "list", "lists"])
def test_where_the_source_comes_from(kind, tmp_path):
    source, target = draw(3, "euclidean")
    path = tmp_path / "source.npy"
    np.save(path, source)
    given = {
        "memory map": lambda: np.load(path, mmap_mode="r"),
        "name": lambda: str(path),
        "jax": lambda: jnp.asarray(source),
        "blocks": lambda: (source[i : i + 9] for i in range(0, 40, 9)),
        "list": lambda: [source[:1], jnp.asarray(source[1:39]), source[39:]],
        "lists": lambda: iter([source[:20].tolist(), source[20:].tolist()]),
    }[kind]()
    expected = nearest_source_subset(source, target, 3)
    got = nearest_source_subset(given, target, 3, block=16)
    np.testing.assert_array_equal(got.neighbours, expected.neighbours)
    np.testing.assert_allclose(got.distances, expected.distances, rtol=1e-5)


def test_an_iterator_that_fills_the_same_memory_anew():
    source, target = draw(3, "euclidean")

    def blocks():
        buffer = np.empty((10, 5), np.float32)
        for start in range(0, 40, 10):
            buffer[:] = source[start : start + 10]
            yield buffer

    expected = nearest_source_subset(source, target, 3, block=16)
    got = nearest_source_subset(blocks(), target, 3, block=16)
    np.testing.assert_array_equal(got.neighbours, expected.neighbours)


@pytest.mark.parametrize("dtype", [">f4", ">i2"])
def test_the_other_byte_order(dtype, tmp_path):
    rng = np.random.default_rng(6)
    source = rng.integers(0, 100, size=(40, 5)).astype(dtype)
    target = rng.integers(0, 100, size=(7, 5)).astype(dtype)
    np.save(tmp_path / "source.npy", source)
    far = brute_force(source, target, "euclidean")
    for where in (source, tmp_path / "source.npy", [source[:11], source[11:]]):
        check(nearest_source_subset(where, target, 3, block=16), far, 3)
    edges = histogram_edges(source, 2)
    np.testing.assert_array_equal(edges, histogram_edges(source.astype(np.float32), 2))
    np.testing.assert_array_equal(
        feature_histograms(source, edges.astype(">f4")),
        feature_histograms(source.astype(np.float32), edges),
    )


def test_very_small_and_very_far():
    source, target = draw(2, "euclidean")
    for scale in (1e-25, 1e-33):
        small = nearest_source_subset(source * scale, target * scale, 3, block=16)
        check(
            small._replace(distances=small.distances.astype(np.float64) / scale),
            brute_force(source, target, "euclidean"),
            3,
        )
    # Whole numbers, which float32 holds that far out: only a centre that is exact leaves their digits.
    source, target = np.round(source * 9), np.round(target * 9)
    subset = nearest_source_subset(source + 2**22 + 10_000, target + 2**22 + 10_000, 3, block=16)
    check(subset, brute_force(source, target, "euclidean"), 3)


def test_tiles_of_targets(monkeypatch):
    source, target = draw(4, "euclidean")
    expected = nearest_source_subset(source, target, 3, block=16)
    monkeypatch.setattr(nearest, "_TILE", 3)
    got = nearest_source_subset(source, target, 3, block=16)
    np.testing.assert_array_equal(got.neighbours, expected.neighbours)


def test_more_neighbours_than_a_block_has_rows():
    source, target = draw(5, "euclidean")
    subset = nearest_source_subset(source, target, 40, block=16)
    check(subset, brute_force(source, target, "euclidean"), 40)
    streamed = nearest_source_subset(iter([source[:25], source[25:]]), target, 40, block=16)
    np.testing.assert_array_equal(streamed.neighbours, subset.neighbours)
    assert subset.indices.tolist() == list(range(40))


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64, np.int32, np.uint8])
def test_dtypes(dtype):
    rng = np.random.default_rng(6)
    source = rng.integers(0, 100, size=(40, 5)).astype(dtype)
    target = rng.integers(0, 100, size=(7, 5)).astype(dtype)
    subset = nearest_source_subset(source, target, 3, block=16)
    # Sums of squares up to 50 000: float16 alone would round them.
    far = brute_force(np.asarray(source, np.float64), np.asarray(target, np.float64), "euclidean")
    check(subset, far, 3)
    assert subset.distances.dtype == np.float32


def test_own_numbers_of_neighbours():
    source, target = draw(7, "euclidean")
    whole = nearest_source_subset(source, target, 3, block=16)
    subset = nearest_source_subset(source, target, [3, 0, 1, 2, 3, 1, 1], block=16)
    for row, count in enumerate([3, 0, 1, 2, 3, 1, 1]):
        assert subset.neighbours[row, :count].tolist() == whole.neighbours[row, :count].tolist()
        assert (subset.neighbours[row, count:] == -1).all()
        assert np.isinf(subset.distances[row, count:]).all()
    assert -1 not in subset.indices


def test_targets_split_over_devices():
    source, target = draw(8, "euclidean")
    target = np.concatenate([target, target])[:8]
    expected = nearest_source_subset(source, target, 3, block=16)
    split = jax.device_put(target, NamedSharding(mesh_of(4), P("data")))
    got = nearest_source_subset(source, split, 3, block=16)
    np.testing.assert_array_equal(got.neighbours, expected.neighbours)


def test_histograms_find_the_same_texture():
    rng = np.random.default_rng(9)
    noise = rng.normal(size=(6, 8, 8, 2))
    textures = np.where(np.arange(6)[:, None, None, None] % 2, noise, np.round(noise * 3))
    histograms = feature_histograms(textures, 4)
    subset = nearest_source_subset(histograms[2:], histograms[:2], 2, metric="symmetric_kl")
    assert [sorted(row) for row in subset.neighbours.tolist()] == [[0, 2], [1, 3]]


def test_enlarging_by_hand():
    logits = np.array([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.1]])
    labels = np.array([0, 0, 0, 1])
    more = enlarge_neighbours(2, logits, labels, wrong=8, uncertain=4, entropy=1.0)
    assert more.tolist() == [2, 10, 6, 10]
    again = enlarge_neighbours(more, logits, labels, wrong=8, uncertain=4, entropy=1.0)
    assert again.tolist() == [2, 18, 10, 18]
    # ln 3 is the largest entropy of three classes.
    assert (
        enlarge_neighbours(2, logits, labels, wrong=0, uncertain=1, entropy=1.1).tolist() == [2] * 4
    )
    shifted = enlarge_neighbours(2, logits + 1e4, labels, wrong=8, uncertain=4, entropy=1.0)
    assert shifted.tolist() == more.tolist()


def test_errors():
    source, target = draw(0, "euclidean")
    bad = source.copy()
    bad[33, 2] = np.nan
    with pytest.raises(ValueError, match="source_features: row 33 holds NaN"):
        nearest_source_subset(bad, target, 3, block=16)
    with pytest.raises(ValueError, match="target_features: row 1 holds NaN, infinity"):
        nearest_source_subset(source, np.where(np.arange(7)[:, None] == 1, np.inf, target), 3)
    with pytest.raises(ValueError, match=r"row 0 holds .* squares overflow"):
        nearest_source_subset(np.full((2, 5), 1e30), target, 1)
    with pytest.raises(ValueError, match=r"source_features: row 0 has an entry .* above 0"):
        nearest_source_subset(source, np.abs(target), 3, metric="symmetric_kl")
    with pytest.raises(ValueError, match="has 4 features, target_features 5"):
        nearest_source_subset(source[:, :4], target, 3)
    with pytest.raises(ValueError, match="block 1 has 4 features, the blocks before it 5"):
        nearest_source_subset([source, source[:, :4]], target, 3)
    with pytest.raises(ValueError, match="k is up to 41, but there are only 40 source examples"):
        nearest_source_subset(source, target, 41)
    for where in (source, [source], iter([source[:9], source[9:]])):
        # Told before anything of that size is made.
        with pytest.raises(ValueError, match=f"k is up to {2**31 - 1}, but there are only 40"):
            nearest_source_subset(where, target, 2**31 - 1)
    with pytest.raises(ValueError, match=r"k must be below 2\*\*31, got 4294967297"):
        nearest_source_subset(source, target, [2**32 + 1] * 7)
    with pytest.raises(ValueError, match=r"must be a matrix .* got shape \(0, 5\)"):
        nearest_source_subset(source[:0], target, 3)
    with pytest.raises(ValueError, match=r"target_features must be a matrix .*\(7,\)"):
        nearest_source_subset(source, target[:, 0], 3)
    with pytest.raises(ValueError, match="the iterable gave no block"):
        nearest_source_subset(iter(()), target, 3)
    with pytest.raises(TypeError, match=r"an iterable of blocks of rows, got int"):
        nearest_source_subset(5, target, 3)
    with pytest.raises(TypeError, match="real numbers, got dtype complex64"):
        nearest_source_subset(source.astype(np.complex64), target, 3)
    with pytest.raises(ValueError, match=r"'source\.npz' is no \.npy file"):
        nearest_source_subset("source.npz", target, 3)
    with pytest.raises(ValueError, match=r"got 'cosin'\. Did you mean 'cosine'\?"):
        nearest_source_subset(source, target, 3, metric="cosin")
    with pytest.raises(ValueError, match=r"metric must be one of .* got \['cosine'\]"):
        nearest_source_subset(source, target, 3, metric=["cosine"])
    with pytest.raises(TypeError, match="source_features is traced: call this outside jit"):
        jax.eval_shape(lambda x: nearest_source_subset(x, target, 3), source)
    with pytest.raises(TypeError, match="target_features is traced: call this outside jit"):
        jax.eval_shape(lambda x: nearest_source_subset(source, x, 3), target)
    with pytest.raises(ValueError, match="k must be >= 1, got 0"):
        nearest_source_subset(source, target, 0)
    with pytest.raises(ValueError, match="k is 0 for every target"):
        nearest_source_subset(source, target, np.zeros(7, int))
    with pytest.raises(ValueError, match=r"one int or 7 of them, .* got shape \(2,\)"):
        nearest_source_subset(source, target, [1, 2])
    with pytest.raises(ValueError, match="k must not be negative, got -1"):
        nearest_source_subset(source, target, [-1, 1, 1, 1, 1, 1, 1])
    for k in (2.0, True):
        with pytest.raises(TypeError, match="k must be an int"):
            nearest_source_subset(source, target, k)
    with pytest.raises(ValueError, match="block must be >= 1"):
        nearest_source_subset(source, target, 3, block=0)
    with pytest.raises(TypeError, match="block must be an int"):
        nearest_source_subset(source, target, 3, block=1.5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": np.zeros((2, 3))}, ValueError, r"got \(2, 3\) and \(4,\)"),
        ({"logits": np.full((4, 3), np.nan)}, ValueError, "logits hold NaN"),
        ({"labels": np.zeros(4)}, TypeError, "labels must be integers"),
        ({"labels": np.array([0, 1, 2, 3])}, ValueError, r"in \[0, 2\], got 0 to 3"),
        ({"logits": {"target": 1}}, TypeError, "logits must be an array of real numbers, got {"),
        ({"logits": [[1.0], [1.0, 2.0]]}, ValueError, "logits must be an array of numbers"),
        ({"wrong": -1}, ValueError, "wrong must be >= 0"),
        ({"wrong": 2**40}, ValueError, r"wrong must be below 2\*\*31"),
        ({"k": 2**31 - 1, "labels": [1] * 4}, ValueError, "k grows to 2147483648"),
        ({"uncertain": 1.5}, TypeError, "uncertain must be an int"),
        ({"entropy": -0.1}, ValueError, "entropy must be a number >= 0"),
        ({"k": [1, 2]}, ValueError, "one int or 4 of them"),
    ],
)
def test_errors_of_enlarging(change, error, words):
    given = {"k": 2, "logits": np.zeros((4, 3)), "labels": np.zeros(4, int), "wrong": 1} | change
    with pytest.raises(error, match=words):
        enlarge_neighbours(**given)
