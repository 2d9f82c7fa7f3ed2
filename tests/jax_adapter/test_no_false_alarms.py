"""Correct programs: nothing may be said of them, and what cannot be watched is said clearly."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import anynan
from tests.failing import failure
from tests.jax_adapter.models import same

pytestmark = pytest.mark.usefixtures("fully_optimized")

X = jnp.array([[0.5, 1.0, -2.0], [3.0, 0.0, 1.0]])


def masked_softmax(x):
    with jax.named_scope("attention"):
        scores = jnp.where(x > 0, x, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def random_numbers(key, x):
    key, sub = jax.random.split(key)
    keep = jax.random.bernoulli(sub, 0.5, x.shape)
    return key, jnp.where(keep, x, 0) + jax.random.normal(key, x.shape) + jax.random.gumbel(sub)


def small_floats(x):
    y = x.astype(jnp.float8_e4m3fn)
    return y, x.astype(jnp.float8_e5m2), x.astype(jnp.int4), y.astype(jnp.float32)


CASES = {
    "masked_softmax": (masked_softmax, X.at[1].set(1.0)),
    "integers": (lambda x, y: (x // 2, y | True, x.sum()), jnp.arange(3), jnp.ones(2, bool)),
    "zero_sized": (lambda x: (x, x.sum(), x @ jnp.zeros((4, 2))), jnp.zeros((0, 4))),
    "small_floats": (small_floats, X),
    "old_style_key": (lambda k, x: jax.random.normal(k) + x, jax.random.PRNGKey(0), X),
    "typed_key": (random_numbers, jax.random.key(0), X),
    "complex": (lambda x: jnp.abs(jnp.fft.fft(x)), X),
}


def saved(x):
    """Fill rows of Inf one by one, as a solver does that saves what it is asked for."""
    with jax.named_scope("solver"):
        rows = jnp.copy(jnp.full((3, 2), jnp.inf))
        times = jnp.full(3, x[0, 0] * jnp.inf)

        def save(state):
            i, y, rows, times = state
            return i + 1, 0.5 * y, rows.at[i].set(y), times.at[i].set(i)

        start = 0, x[0, :2], rows, times
        _, _, rows, times = lax.while_loop(lambda state: state[0] < 3, save, start)
    return (rows**2).sum() + times.sum()


@pytest.mark.parametrize("level", ["layer", "operation"])
def test_rows_of_inf_that_a_layer_fills_are_no_failure(level):
    tracked = anynan.jax.track(saved, level=level)
    assert jnp.isfinite(tracked(X))
    assert {event.severity for event in tracked.events} <= {"suspect"}
    assert tracked.notes == ()


@pytest.mark.parametrize("level", ["layer", "operation"])
def test_a_gradient_that_the_step_itself_drops_is_no_failure(level):
    def step(w, x, scale):
        def loss(w):
            with jax.named_scope("head"):
                y = (x @ w).astype(jnp.float16) + 1
            return (y.astype(jnp.float32) ** 2).mean() * scale

        value, slope = jax.value_and_grad(loss)(w)
        return jnp.where(jnp.isfinite(slope).all(), w - slope / scale, w), value / scale

    tracked = anynan.jax.track(step, level=level)
    w = jnp.ones((3, 2))
    assert same(tracked(w, X, 2.0**24)[0], w)
    assert {event.severity for event in tracked.events} <= {"suspect"}
    found = [event.operation.name for event in tracked.events]
    assert found == ([] if level == "layer" else ["astype"])


@pytest.mark.parametrize("name", CASES)
def test_nothing_bad_is_said(name):
    fn, *args = CASES[name]
    tracked = anynan.jax.track(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = tracked(*args)
    assert {event.severity for event in tracked.events} <= {"suspect"}
    assert tracked.notes == ()
    expected = jax.jit(fn)(*args)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    assert same(jax.tree.map(raw, out), jax.tree.map(raw, expected))


def test_a_function_that_cannot_be_traced():
    def fn(x):
        return 1 if x[0] > 0 else 2

    with pytest.raises(TypeError, match="cannot be traced, so it cannot be tracked") as caught:
        anynan.jax.track(fn)(jnp.ones(2))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def test_check_inside_a_traced_function():
    def fn(x):
        return anynan.check(x, "x").sum()

    with pytest.raises(TypeError, match="inside a traced function"):
        jax.jit(fn)(jnp.ones(2))
    assert float(anynan.jax.track(fn)(jnp.ones(2))) == 2
    with pytest.raises(TypeError, match="inside a traced function"):
        jax.jit(anynan.summarize)(jnp.ones(2))

    def hidden(x):
        with anynan.scope("inner"):
            logs = anynan.check(jnp.log(x), "logs")
        return jnp.where(x > 0, logs, 0.0).sum()

    event = failure(anynan.jax.track(hidden), jnp.zeros(2))
    assert (event.layer, event.operation.name) == ("inner", "log")
