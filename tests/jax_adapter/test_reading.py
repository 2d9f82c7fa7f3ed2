"""What a step's readings cost and say, and when they cross to the host."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from anynan.jax.read import probes
from tests.counting import python_calls
from tests.failing import failure
from tests.flat import split
from tests.jax_adapter.models import made
from tests.tiers import first

INF, NAN = np.inf, np.nan
DTYPES = ("float32", "float16", "bfloat16", "complex64", "float8_e5m2")
VALUES = [
    ((), probes.FINE), ((NAN,), probes.NAN), ((INF,), probes.POSINF), ((-INF,), probes.NEGINF),
    ((-INF, -INF), probes.NEGINF), ((INF, INF), probes.POSINF), ((INF, -INF, NAN), probes.NAN),
]  # fmt: skip


@pytest.mark.parametrize("dtype", first(2, DTYPES))
@pytest.mark.parametrize("size", first(1, [100, 2, 70_000]))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_total_tells_what_is_bad_and_never_overflows(dtype, size, sign):
    top = jnp.full(size, sign * float(probes._finfo(dtype).max), dtype)
    total = functools.partial(jax.jit(lambda f, x, y: probes.total([x, y], f, 7)), probes.scales(9))
    for values, word in VALUES:
        if len(values) > size:
            continue
        at = np.arange(len(values))
        x = top.at[at].set(jnp.array(values, dtype))
        assert probes.words(np.asarray(total(x, top)), np) == word
        assert probes.words(np.asarray(total(top, x)), np) == word


CHOICES = {
    "argmax": lambda x: jnp.argmax(jnp.log(x), -1),
    "loop": lambda x: jax.lax.scan(lambda i, row: (i + jnp.argmin(jnp.log(row)), i), 0, x),
    "mask": lambda x: jnp.argmax(jnp.where(jnp.arange(3) == 0, -jnp.inf, jnp.log(x))),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_nan_that_only_a_choice_takes_or_nobody_is_told(name):
    tracked = anynan.jax.track(CHOICES[name])
    tracked(jnp.arange(6.0).reshape(2, 3))
    event = failure(tracked, jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]]))
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_negative")


# What the compiler could join with a factor of the reading's own.
FACTORS = {
    "power_of_two": lambda x: x * 2.0**127,
    "twice": lambda x: (x * 1e20) * 1e20,
    "matmul": lambda x: x @ (x.T * 1e37),
    "loop": lambda x: jax.lax.scan(lambda c, row: (c, row * 1e38), 0.0, x)[1],
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("shape", first(1, [(2, 2), (64, 128)]))
def test_an_overflow_through_a_constant_is_not_lost(name, shape):
    def fn(x):
        with jax.named_scope("layer"):
            y = FACTORS[name](x)
        return jnp.tanh(y).sum()

    event = failure(anynan.jax.track(fn), jnp.full(shape, 10.0))
    assert (event.layer, event.kind) == ("layer", "posinf")
    assert event.operation is not None


# What it costs, counted.


def test_no_array_is_made_for_the_readings():
    params = {f"layer{i}": jnp.eye(256) / 2 for i in range(4)}
    x = jnp.ones((256, 256))

    def loss(params, x):
        for name, weight in params.items():
            with jax.named_scope(name):
                x = jnp.tanh(x @ weight)
        return (x**2).mean()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plain = jax.jit(step).lower(params, x).compile().memory_analysis()
    tracked = anynan.jax.track(step)
    tracked(params, x)
    adapter = inside(tracked).judge.adapter
    (watches,) = adapter._programs.values()
    watch = watches.get(set())
    run = watch.run.lower(adapter.verdicts.table(watch), watch.factors, *params.values(), x)
    mine = run.compile().memory_analysis()
    rows = 4 * len(watch.values)
    assert mine.output_size_in_bytes - plain.output_size_in_bytes <= rows + 64
    assert mine.temp_size_in_bytes - plain.temp_size_in_bytes < x.nbytes / 4


def test_a_clean_step_takes_few_calls_of_python():
    tracked = anynan.jax.track(lambda w, x: (w - 0.1 * x, (w * x).sum()))
    x = jnp.ones(4)
    for _ in range(3):
        tracked(x, x)
    assert python_calls(tracked, x, x) <= 130  # more where flax is loaded, too


# When it is read.


@pytest.fixture
def reads(monkeypatch):
    seen = []
    on_host = probes.on_host
    monkeypatch.setattr(probes, "on_host", lambda x: seen.append(x) or on_host(x))
    return seen


@pytest.mark.parametrize("options", [{}, {"replay": False, "read": "end"}])
def test_a_step_is_read_once_before_it_returns(options, reads):
    step, *state = made()
    tracked = anynan.jax.track(step, **split(options))
    for i in range(3):
        tracked(*state)
        assert (len(reads), len(tracked.history)) == (i + 1, i + 1)


@pytest.mark.parametrize("options", [{"action": "record", "replay": False}, {"lag": 1}])
def test_a_step_is_read_after_the_next_where_nobody_has_to_wait(options, reads):
    step, *state = made()
    tracked = anynan.jax.track(step, **split(options))
    for i in range(3):
        tracked(*state)
        assert (len(reads), len(tracked.history)) == (i, i)
    tracked.flush()
    assert tracked.history.steps() == [0, 1, 2]


def test_what_is_unread_at_the_end_is_warned_about():
    def step(x):
        return jnp.log(x).sum()

    tracked = anynan.jax.track(step, action="warn", advanced=anynan.Advanced(replay=False))
    tracked(jnp.array([-1.0]))
    assert tracked.events == ()
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared in the loss of step 0"):
        tracked.remove()
    late = anynan.Advanced(lag=1)
    with pytest.raises(anynan.NonFiniteError), anynan.jax.track(step, advanced=late) as tracked:
        tracked(jnp.array([-1.0]))


def test_a_late_step_keeps_nothing_alive_that_it_does_not_need():
    alone = anynan.Advanced(replay=False)
    tracked = anynan.jax.track(lambda x: jnp.log(x), action="record", advanced=alone)
    tracked(jnp.ones(1000))
    tracked.flush()
    gc.collect()  # what other tests left; the program's own numbers are there from now on
    count = len(jax.live_arrays())
    tracked(jnp.ones(1000))
    assert len(jax.live_arrays()) == count + 1  # the readings
    tracked.remove()
