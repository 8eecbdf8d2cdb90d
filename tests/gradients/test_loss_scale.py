"""The dynamic loss scale: its rule, its bounds, and the ``value_and_grad`` for a loop of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax import DynamicLossScale, LossScaleState, set_loss_scale
from boostax.gradients.loss_scale import FixedLossScale


def run(scaling, flags, state=None):
    """Return the state after each call, stacked; ``flags`` say which calls were finite."""

    def call(state, finite):
        state = scaling.update(state, finite)
        return state, state

    return jax.lax.scan(call, scaling.init_state() if state is None else state, jnp.asarray(flags))


def times(p, x):
    return p * x


def square(p, x):
    return p**2 * x


class TestRule:
    @pytest.mark.quick
    @pytest.mark.parametrize("case", range(4))
    def test_recorded_sequences(self, case, reference):
        d = {k[5:]: v for k, v in reference("i_dynamic_loss_scale").items() if k[3] == str(case)}
        init, factor, window = d["hyper"]
        scaling = DynamicLossScale(init, factor, int(window), max_scale=2.0**60)
        state, seen = run(scaling, ~d["overflow"])
        np.testing.assert_array_equal(seen.scale, d["scale"])
        # Its counters start at 1, and say in which call the scale changed last.
        np.testing.assert_array_equal(seen.good_steps, d["cur_iter"] - 1 - d["last_iter"])
        np.testing.assert_array_equal(seen.overflows, np.cumsum(d["overflow"]))
        assert [leaf.dtype for leaf in state] == [jnp.float32, *[jnp.int32] * 3]

    def test_grows_after_exactly_window_finite_calls(self):
        flags = [True] * 3 + [False] + [True] * 6
        _, seen = run(DynamicLossScale(8, 4, 3, max_scale=64), flags)
        assert seen.scale.tolist() == [8, 8, 32, 8, 8, 8, 32, 32, 32, 64]
        assert seen.good_steps.tolist() == [1, 2, 0, 0, 1, 2, 0, 1, 2, 0]

    def test_micro_batches_count_each(self):
        scaling = DynamicLossScale(8, 2, 5)
        seen, state = [], scaling.init_state()
        for finite in (True, True, True, False, True):
            state = scaling.update(state, finite, micro_batches=2)
            seen.append((float(state.scale), int(state.good_steps), int(state.overflows)))
        assert seen == [(8, 2, 0), (8, 4, 0), (16, 1, 0), (8, 0, 1), (8, 2, 1)]
        # One call grows the scale once, however many windows it holds.
        state = DynamicLossScale(8, 2, 2).update(scaling.init_state(), True, micro_batches=9)
        assert (float(state.scale), int(state.good_steps)) == (16, 1)

    def test_a_fixed_one_counts_only(self):
        scaling = FixedLossScale(8.0)
        state, seen = scaling.init_state(), []
        for finite in (True, False, jnp.bool_(True), jnp.bool_(False)):
            state = scaling.update(state, finite)
            seen.append((float(state.scale), int(state.overflows)))
        assert seen == [(8, 0), (8, 1), (8, 1), (8, 2)]

    @given(
        flags=st.lists(st.booleans(), min_size=1, max_size=30),
        factor=st.sampled_from([2.0, 8.0, 10.0]),
        window=st.integers(1, 4),
        exponents=st.tuples(*[st.integers(-8, 8)] * 3).map(sorted),
    )
    def test_equals_plain_python(self, flags, factor, window, exponents):
        low, init, high = (2.0**e for e in exponents)
        scaling = DynamicLossScale(init, factor, window, low, high)
        state, scale, good, bad, stuck = scaling.init_state(), np.float32(init), 0, 0, 0
        for finite in flags:
            state = scaling.update(state, finite)
            if finite:
                good, stuck = good + 1, 0
                if good == window:
                    good, scale = 0, min(scale * np.float32(factor), np.float32(high))
            else:
                stuck = stuck + 1 if scale == low else 0
                good, bad, scale = 0, bad + 1, max(scale * np.float32(1 / factor), np.float32(low))
            assert tuple(leaf.item() for leaf in state) == (scale, good, bad, stuck)
            assert low <= scale <= high


class TestBounds:
    def test_a_ceiling_that_can_be_left(self):
        scaling = DynamicLossScale(1, 10, 1)
        state, seen = run(scaling, [True] * 100)
        assert np.isfinite(seen.scale).all()
        assert float(state.scale) == np.max(seen.scale) == 2.0**24
        state = scaling.update(state, False)
        assert float(state.scale) == np.float32(2.0**24) * np.float32(0.1)

    @pytest.mark.parametrize("low", [1.0, 2.0**-10])
    def test_a_floor_that_does_no_harm(self, low):
        scaling = DynamicLossScale(65536, min_scale=low)
        grad_fn = jax.jit(scaling.value_and_grad(square))
        state = scaling.init_state()
        for _ in range(200):
            value, grad, finite, state = grad_fn(state, jnp.float32(1), jnp.float32(np.nan))
            assert not finite
        assert float(state.scale) == low > 0
        # The first 16 (26) of them lowered the scale.
        assert int(state.stuck) == 200 - int(np.log2(65536 / low))
        assert int(state.overflows) == 200
        value, grad, finite, state = grad_fn(state, jnp.float32(1), jnp.float32(1))
        assert (float(value), float(grad), bool(finite)) == (1.0, 2.0, True)
        assert int(state.stuck) == 0
        assert grad_fn._cache_size() == 1

    def test_one_that_was_set_outside_of_the_bounds_moves_towards_them_only(self):
        scaling = DynamicLossScale(8, 2, 1, min_scale=4, max_scale=16)
        state = set_loss_scale(scaling.init_state(), 64)
        assert float(scaling.update(state, True).scale) == 64
        assert float(scaling.update(state, False).scale) == 32
        state = set_loss_scale(scaling.init_state(), 1)
        assert float(scaling.update(state, False).scale) == 1
        assert int(scaling.update(state, False).stuck) == 1
        assert float(scaling.update(state, True).scale) == 2


class TestOwnLoop:
    def test_takes_what_jax_value_and_grad_takes(self):
        def loss(a, x, b, *, c):
            return jnp.sum(a * x * b["w"]) * c, {"seen": x}

        scaling = DynamicLossScale(1024)
        a, x, b = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0]), {"w": jnp.array([7.0, 11.0])}
        for argnums in ((0, 2), (np.int64(0), -1), 2, np.int32(2)):
            ours = scaling.value_and_grad(loss, argnums, has_aux=True)
            theirs = jax.value_and_grad(loss, argnums, has_aux=True)
            (value, aux), grads, finite, state = ours(scaling.init_state(), a, x, b, c=2.0)
            expected = theirs(a, x, b, c=2.0)
            jax.tree.map(np.testing.assert_array_equal, ((value, aux), grads), expected)
            assert bool(finite)
            assert int(state.good_steps) == 1

    def test_a_float16_loss_is_finite_at_once_and_compiles_once(self):
        scaling = DynamicLossScale()
        grad_fn = jax.jit(scaling.value_and_grad(lambda p, x: jnp.sum(p["w"] * x)))
        params, state = {"w": jnp.full(3, 2**-20, jnp.float16)}, scaling.init_state()
        for _ in range(3):
            value, grads, finite, state = grad_fn(state, params, jnp.full(3, 2**-14, jnp.float16))
            assert bool(finite)
        assert value.dtype == jnp.float16
        assert grads["w"].dtype == jnp.float32
        assert grads["w"].tolist() == [2.0**-14] * 3
        assert int(state.good_steps) == 3
        assert grad_fn._cache_size() == 1

    def test_keeps_what_float16_alone_would_lose(self):
        """The gradient 2^-26 is below float16's smallest number, 2^-24."""

        def loss(p):
            return jnp.float32(2**-13) * (p * jnp.float16(2**-13)).astype(jnp.float32)

        p = jnp.float16(1)
        assert float(jax.grad(loss)(p)) == 0
        scaling = DynamicLossScale(1024)
        assert float(scaling.value_and_grad(loss)(scaling.init_state(), p)[1]) == 2.0**-26

    def test_divides_by_what_a_float16_loss_made_of_the_scale(self):
        scaling = DynamicLossScale(1000.3)  # 1000.5 in float16
        p, x = jnp.float16(1), jnp.float16(2)
        _, grad, _, _ = scaling.value_and_grad(times)(scaling.init_state(), p, x)
        assert float(grad) == 2
        # Where it can't hold the scale at all, that is an overflow.
        state = set_loss_scale(scaling.init_state(), 2.0**17)
        assert not scaling.value_and_grad(times)(state, p, x)[2]

    def test_other_dtypes(self):
        scaling = DynamicLossScale(1024)
        _, grad, finite, _ = scaling.value_and_grad(square)(
            scaling.init_state(), jnp.bfloat16(3), jnp.bfloat16(1)
        )
        assert (grad.dtype, float(grad), bool(finite)) == (jnp.float32, 6.0, True)
        with jax.enable_x64(True):
            _, grad, _, _ = scaling.value_and_grad(square)(
                scaling.init_state(), jnp.float64(3), jnp.float64(1)
            )
            assert (grad.dtype, float(grad)) == (jnp.float64, 6.0)
        # A complex parameter's gradient, in JAX's convention.
        z = jnp.complex64(1 + 2j)
        _, grad, _, _ = scaling.value_and_grad(lambda z: jnp.abs(z) ** 2)(scaling.init_state(), z)
        np.testing.assert_allclose(grad, jax.grad(lambda z: jnp.abs(z) ** 2)(z), rtol=1e-6)

    def test_under_vmap_each_lane_has_its_own_scale(self):
        scaling = DynamicLossScale(1024, window=1)
        states = jax.vmap(lambda _: scaling.init_state())(jnp.arange(2))
        x = jnp.array([np.inf, 3.0], jnp.float32)
        _, grads, finite, states = jax.vmap(scaling.value_and_grad(times), (0, None, 0))(
            states, jnp.float32(1), x
        )
        assert finite.tolist() == [False, True]
        assert states.scale.tolist() == [512, 2048]
        assert float(grads[1]) == 3

    def test_scans(self):
        scaling = DynamicLossScale(1024, window=2)
        grad_fn = scaling.value_and_grad(times)

        def call(state, x):
            _, grad, finite, state = grad_fn(state, jnp.float16(1), x)
            return state, (grad, finite, state.scale)

        x = jnp.array([1, 2, np.inf, 4, 5], jnp.float16)
        _, (grads, finite, scales) = jax.lax.scan(call, scaling.init_state(), x)
        assert finite.tolist() == [True, True, False, True, True]
        assert scales.tolist() == [1024, 2048, 1024, 1024, 2048]
        np.testing.assert_array_equal(grads[finite], x[finite].astype(np.float32))

    @given(
        values=st.lists(st.floats(-8, 8, width=16), min_size=4, max_size=4),
        exponent=st.integers(-20, 20),
    )
    def test_powers_of_two_lose_nothing(self, values, exponent):
        """One program, at the scale 1 and at another: every bit of the gradients is the same."""
        state = DynamicLossScale().init_state()
        p = jnp.asarray(values, jnp.float32)
        _, expected, _, _ = _compiled()(set_loss_scale(state, 1), p)
        _, grads, finite, _ = _compiled()(set_loss_scale(state, 2.0**exponent), p)
        assert bool(finite)
        np.testing.assert_array_equal(grads, expected)
        np.testing.assert_allclose(grads, jax.grad(_smooth)(p), rtol=1e-5, atol=1e-6)

    def test_refuses(self):
        scaling = DynamicLossScale()
        state = scaling.init_state()
        one = jnp.float32(1)
        with pytest.raises(TypeError, match=r"value_and_grad: fun must be a function, got int"):
            scaling.value_and_grad(3)
        with pytest.raises(TypeError, match=r"value_and_grad: has_aux must be a bool, got 1"):
            scaling.value_and_grad(times, has_aux=1)
        for argnums in ("0", True, 0.5, (0, "x"), ()):
            with pytest.raises((TypeError, ValueError), match=r"value_and_grad: argnums must be"):
                scaling.value_and_grad(times, argnums)
        with pytest.raises(ValueError, match=r"value_and_grad: argnums=2, but there are 2 pos"):
            scaling.value_and_grad(times, 2)(state, one, one)
        with pytest.raises(TypeError, match=r"value_and_grad: state must be .* got \w*Array\w*"):
            scaling.value_and_grad(times)(one, one)
        with pytest.raises(
            TypeError, match=r"value_and_grad: argument 1 has a leaf of dtype int32"
        ):
            scaling.value_and_grad(times, (0, 1))(state, one, {"n": jnp.int32(3)})
        with pytest.raises(TypeError, match=r"real floating scalar, got shape \(2,\) and dtype"):
            scaling.value_and_grad(times)(state, jnp.ones(2), one)
        with pytest.raises(TypeError, match=r"real floating scalar, got shape \(\) and dtype int"):
            scaling.value_and_grad(lambda p: jnp.int32(p))(state, one)
        groups = boostax.GroupLossScale(["a", "b"])
        with pytest.raises(ValueError, match=r"value_and_grad: the state has the scales of 2 gro"):
            scaling.value_and_grad(times)(groups.init_state(), one, one)
        with pytest.raises(ValueError, match=r"the state has one scale, .* the scales of 2 groups"):
            groups.value_and_grad(lambda p: p["a"] * p["b"])(state, {"a": one, "b": one})


def _smooth(p):
    w = jnp.arange(16, dtype=jnp.float32).reshape(4, 4) / 8 - 1
    return jnp.sum(jnp.tanh(w @ p) ** 2) / 3


@functools.cache
def _compiled():
    return jax.jit(DynamicLossScale().value_and_grad(_smooth))


class TestDevices:
    """Four devices, scale 1024, loss p * x with x = 1, inf, 1, 1: all decide alike."""

    X = np.array([1, np.inf, 1, 1], np.float32)

    def by_device(self, axis_name):
        scaling = DynamicLossScale(1024)
        grad_fn = scaling.value_and_grad(times, axis_name=axis_name)

        def call(state, p, x):
            _, grad, finite, state = grad_fn(state, p, x)
            return grad, finite, state

        return scaling.init_state(), call

    def test_vmap(self):
        state, call = self.by_device("data")
        grads, finite, states = jax.vmap(call, (None, None, 0), axis_name="data")(
            state, jnp.float32(1), self.X
        )
        assert finite.tolist() == [False] * 4
        assert states.scale.tolist() == [512] * 4
        np.testing.assert_array_equal(grads, self.X)

    @pytest.mark.quick
    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
    def test_shard_map(self, check, kind):
        state, call = self.by_device("data")
        mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])

        def local(state, p, x):
            p = jax.lax.pcast(p, "data", to="varying") if check else p
            return jax.tree.map(lambda leaf: leaf[None], call(state, p, x[0]))

        mapped = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P(), P(), P("data")),
                out_specs=P("data"),
                check_vma=check,
            )
        )
        split = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
        grads, finite, states = mapped(state, jnp.float32(1), split(self.X))
        assert finite.tolist() == [False] * 4
        assert states.scale.tolist() == [512] * 4
        assert states.overflows.tolist() == [1] * 4
        np.testing.assert_array_equal(grads, self.X)
        grads, finite, states = mapped(
            state, jnp.float32(1), split(np.arange(4.0, dtype=np.float32))
        )
        assert finite.tolist() == [True] * 4
        np.testing.assert_array_equal(grads, np.arange(4))

    def test_the_state_stays_common_where_types_tell(self):
        """With the checks on, ``out_specs=P()`` needs a state that does not vary."""
        state, call = self.by_device("data")
        mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
        local = lambda state, p, x: call(state, p, x[0])[1:]
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
        finite, new = jax.jit(mapped)(state, jnp.float32(1), self.X)
        assert (bool(finite), float(new.scale)) == (False, 512)

    def test_alone_they_would_not(self):
        state, call = self.by_device(None)
        _, _, states = jax.vmap(call, (None, None, 0))(state, jnp.float32(1), self.X)
        assert states.scale.tolist() == [1024, 512, 1024, 1024]


class TestSet:
    def test_nothing_compiles_anew(self):
        scaling = DynamicLossScale(1024, window=4)
        grad_fn = jax.jit(scaling.value_and_grad(times))
        state = scaling.init_state()
        for value in (None, 128, 0.5, np.float32(64), np.full(1, 32.0), jnp.array(16), 8):
            state = state if value is None else set_loss_scale(state, value)
            before = state
            _, grad, _, state = grad_fn(state, jnp.float32(2), jnp.float32(3))
            assert float(grad) == 3
            assert before.scale.aval == jax.core.ShapedArray((), jnp.float32)
        assert grad_fn._cache_size() == 1
        assert (float(state.scale), int(state.good_steps)) == (8, 1)

    def test_keeps_the_placement(self):
        mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        everywhere = NamedSharding(mesh, P())
        state = jax.device_put(DynamicLossScale().init_state(), everywhere)
        state = set_loss_scale(state._replace(stuck=state.stuck + 3), 4.0)
        assert all(leaf.sharding == everywhere for leaf in state)
        assert [leaf.item() for leaf in state] == [4.0, 0, 0, 0]

    def test_takes_what_a_checkpoint_gave(self):
        state = jax.tree.map(np.asarray, DynamicLossScale().init_state())
        assert set_loss_scale(state, 4.0).scale.aval == jax.core.ShapedArray((), jnp.float32)
        inside = jax.jit(lambda state: set_loss_scale(state, 4.0))(state)
        assert float(inside.scale) == 4

    @pytest.mark.parametrize("value", [True, "8", None, [8.0], np.array([True]), 1j, object()])
    def test_refuses_other_types(self, value):
        with pytest.raises(TypeError, match=r"set_loss_scale: value must be a number, or an arr"):
            set_loss_scale(DynamicLossScale().init_state(), value)

    @pytest.mark.parametrize(
        "value",
        [0, -1.0, np.nan, np.inf, 1e39, 1e-46, np.ones(2), np.ones((1, 1)), np.array([np.nan])],
    )
    def test_refuses_other_values(self, value):
        with pytest.raises(ValueError, match=r"set_loss_scale: value must be"):
            set_loss_scale(DynamicLossScale().init_state(), value)

    def test_refuses_other_states(self):
        with pytest.raises(TypeError, match=r"set_loss_scale: state must be .* got dict"):
            set_loss_scale({}, 1.0)


class TestArguments:
    @pytest.mark.parametrize("name", ["init", "factor", "min_scale", "max_scale"])
    @pytest.mark.parametrize("value", [True, np.True_, "8", None, [8.0], 1j])
    def test_numbers(self, name, value):
        with pytest.raises(TypeError, match=f"DynamicLossScale: {name} must be a number, got"):
            DynamicLossScale(**{name: value})

    @pytest.mark.parametrize("name", ["init", "factor", "min_scale", "max_scale"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0, -2.0])
    def test_ranges(self, name, value):
        with pytest.raises(ValueError, match=f"DynamicLossScale: {name} must"):
            DynamicLossScale(**{name: value})

    def test_more_ranges(self):
        for factor in (1, 1.00000001):  # the second is 1 in float32
            with pytest.raises(ValueError, match=r"factor must be a finite number > 1 in float32"):
                DynamicLossScale(factor=factor)
        assert DynamicLossScale(init=np.float32(8), factor=jnp.float32(4)).factor == 4.0
        largest = set_loss_scale(
            DynamicLossScale().init_state(), 3.4028235e38
        )  # as NumPy prints it
        assert float(largest.scale) == np.finfo(np.float32).max
        with pytest.raises(ValueError, match=r"max_scale must be finite and at least min_scale=8"):
            DynamicLossScale(init=8, min_scale=8, max_scale=4)
        with pytest.raises(ValueError, match=r"min_scale must be a float32 number of at least"):
            DynamicLossScale(min_scale=1e-40)
        with pytest.raises(ValueError, match=r"max_scale must be finite"):
            DynamicLossScale(max_scale=1e39)
        for init in (0.5, 64.5):
            with pytest.raises(ValueError, match=r"init must lie in .* = \[1, 64\], got"):
                DynamicLossScale(init, max_scale=64)

    @pytest.mark.parametrize("window", [2.5, 2.0, True, "2", None])
    def test_window_is_an_int(self, window):
        with pytest.raises(TypeError, match=r"DynamicLossScale: window must be an int >= 1, got"):
            DynamicLossScale(window=window)

    @pytest.mark.parametrize("window", [0, -1, 2**31])
    def test_window_is_in_range(self, window):
        with pytest.raises(ValueError, match=r"DynamicLossScale: window must be an int from 1 to"):
            DynamicLossScale(window=window)

    def test_numpy_numbers(self):
        scaling = DynamicLossScale(np.float32(8), np.int64(2), np.int32(3), np.float16(1))
        assert scaling == DynamicLossScale(8.0, 2.0, 3, 1.0)
        assert type(scaling.window) is int
        assert isinstance(scaling.init_state(), LossScaleState)
        assert hash(scaling) == hash(DynamicLossScale(8, window=3))
