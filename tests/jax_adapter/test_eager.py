"""A bad number of code that runs outside of any jit leads to the call that made it."""

import math
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anynan.jax import eager
from tests.jax_adapter.watching import watching


@pytest.mark.parametrize("read", [float, lambda x: x.item(), str, lambda x: f"{x:.3f}"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_number_that_is_bad_as_it_is_read_is_told_once_though_steps_come_after_it(read, goes_on):
    plain = jax.Array.__subclasses__()[0].__float__
    with watching() as found:
        for _ in range(1 + 5 * goes_on):
            read(jnp.log(-jnp.ones(())))
            if goes_on:  # it was a measure
                jax.grad(lambda w: w**2)(1.0)
                assert found.bad()
    (event,) = found.bad()
    assert event.operation.source.text == "read(jnp.log(-jnp.ones(())))"
    assert (found.notes, found.harms) == ([], [])
    assert jax.Array.__subclasses__()[0].__float__ is plain


def test_of_a_bad_number_that_the_program_asked_about_and_went_on_there_is_a_note(found):
    for _ in range(2):
        assert bool(jnp.isnan(jnp.log(-jnp.ones(()))))
        jax.grad(lambda w: w**2)(1.0)
    assert not found.bad()
    assert sum("went on with other steps: test_eager.py:" in x for x in found.notes) == 1


@pytest.mark.parametrize("way", ["brought", "taken"])
def test_nan_of_numpys_is_told_in_the_line_where_it_came_in(way):
    data = np.array([[3.0, 4.0], [0.0, np.nan]], np.float32)
    with watching() as found:
        x = jnp.asarray(data) if way == "brought" else data
        f"{jnp.mean(jnp.square(x))}"
    if way == "brought":
        assert [x.startswith("NaN came in from NumPy, at test_eager") for x in found.harms] == [1]
    else:
        (event,) = found.bad()
        assert event.cause.tag == "bad_input"
        assert event.operation.source.text == 'f"{jnp.mean(jnp.square(x))}"'


@pytest.mark.parametrize(
    "decide",
    [lambda x: bool(jnp.isnan(x).any()), lambda x: bool(jnp.any(a=~jnp.isfinite(x)))],
)
@pytest.mark.parametrize("many", [False, True])
def test_a_decision_by_a_bad_number_is_told_at_its_line(decide, many):
    plain = jnp.isnan, jax.Array.__subclasses__()[0].__bool__
    fine = jnp.ones(3 if many else ())
    with watching() as found:
        assert not decide(fine)
        assert decide(jnp.log(-fine))
    told = [line for line in found.lines() if "itself found NaN or Inf, at test_eager.py:" in line]
    names = [event.operation.name for event in found.bad()]
    assert (len(told), names) in ([(0, ["log"])] if not many else [(1, []), (0, ["log"])])
    assert (jnp.isnan, jax.Array.__subclasses__()[0].__bool__) == plain


NUMPY = np.isnan, np.isfinite, np.asarray, np.array


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: not x > 0,
        lambda x: np.isnan(x),
        lambda x: not np.float32(1) >= x,
        lambda x: min([x, jnp.float32(-1)]) is x,
        lambda x: math.isnan(np.array(x, np.float64)),
        lambda x: math.isnan(x.tolist()),
        lambda x: math.isnan(jax.device_get({"loss": x})["loss"]),
    ],
)
def test_a_comparison_or_numpys_look_at_a_bad_number_is_told_at_its_line(decide):
    with watching() as found:
        decide(jnp.float32(1))
        decide(jnp.float32(np.inf))
        assert decide(jnp.log(-jnp.ones(())))
    (event,) = found.bad()
    assert event.operation.source.text == "assert decide(jnp.log(-jnp.ones(())))"
    assert (np.isnan, np.isfinite, np.asarray, np.array) == NUMPY


def test_what_stands_for_a_function_of_numpys_passes_for_it():
    with watching():
        stands, table = np.isnan, {NUMPY[0]: "kept"}
        assert table[stands] == "kept"
        assert isinstance(stands, np.ufunc)
        assert (stands.nin, stands.__name__, stands.reduce) == (1, "isnan", NUMPY[0].reduce)
        assert stands(np.array([1.0, np.nan]), out=np.zeros(2, bool)).tolist() == [False, True]
        kept = pickle.dumps([stands, np.asarray])
    assert np.isnan is NUMPY[0]
    assert pickle.loads(kept) == [NUMPY[0], NUMPY[2]]
    assert pickle.loads(kept)[0] is NUMPY[0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: jnp.exp(x * 100), "exp"),
        (lambda x: (x / (x - x)).sum(), "divide"),
        (lambda x: jnp.where(x > 9, x, -jnp.inf) - jnp.full((), -jnp.inf), "subtract"),
        (lambda x: x + jnp.nan, None),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_what_eager_code_prints_is_followed_to_the_call_that_made_it(make, name, again):
    with watching() as found:
        for _ in range(1 + again):  # the first call of a kind is compiled, and takes another way
            x = make(jnp.float32(2))
        f"{x}"
    assert [event.operation.name for event in found.bad()] == [name] * (name is not None)
    assert len(found.harms) == (name is None and bool(jnp.isnan(x)))


@pytest.mark.parametrize("taken", [False, True])
def test_a_nan_that_nothing_takes_is_told_at_the_end(taken):
    with watching() as found:
        x = jnp.log(jnp.arange(3.0) - 1)
        if taken:
            x = jnp.where(jnp.isnan(x), 0, x)
    assert [event.operation.name for event in found.bad()] == ["log"] * (not taken)


@pytest.mark.parametrize("way", ["compiled", "sloped", "looped"])
def test_what_eager_code_made_of_a_steps_data_is_told_in_its_line_and_once(way, found):
    x = jnp.arange(6.0).reshape(2, 3).at[:, 1].set(1)
    x = (x - x.mean(0)) / x.std(0)

    def close(w, x):
        return ((x @ w) ** 2).sum()

    w, slope = jnp.ones(3), jax.grad(close)
    for _ in range(3):
        if way == "compiled":
            w = w - jax.jit(slope)(w, x)
        elif way == "sloped":
            w = w - slope(w, x)
        else:
            w, _ = jax.lax.scan(lambda w, row: (w - row, None), w, x)
    (event,) = found.bad()
    assert event.operation.name == "divide"
    assert event.operation.source.text == "x = (x - x.mean(0)) / x.std(0)"


def test_of_a_large_array_nothing_is_kept_alive_and_calls_are_not_held_for_ever(found):
    big = jnp.ones(eager.LARGE // 4 + 1)
    gone = weakref.ref(big)
    large = jnp.log(big)
    del big
    assert gone() is None
    for i in range(eager.CALLS + 9):
        jnp.log(jnp.float32(i) + 1)
    assert len(np.isnan._watch.calls._held) <= eager.CALLS
    del large
    assert np.isnan._watch.calls._size < 9 * eager.CALLS


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's own, of 1e39
@pytest.mark.parametrize(
    ("written", "what"),
    [
        (lambda: jnp.ones(3).at[1].set(jnp.nan), "NaN"),
        (lambda: jnp.ones(3) * jnp.nan, "NaN"),
        (lambda: jnp.ones(3) * 1e39, "1e+39, which is beyond float32,"),
    ],
)
def test_a_number_that_is_bad_as_the_program_wrote_it_is_told_with_its_line(written, what, found):
    jax.jit(lambda x: (x - x).sum())(written())
    place = f"test_eager.py:{written.__code__.co_firstlineno}"
    assert found.harms == [f"{what} was put in as a number, at {place}"]
    assert not any("which was reported" in line for line in found.lines())


def test_a_best_value_that_begins_infinite_is_no_bad_number():
    with watching() as found:
        best = min(jnp.float32(np.inf), jnp.float32(3))
        assert np.asarray(jnp.float32(np.inf)) > best
        mask = jnp.array([0.0, jnp.nan])
        np.isnan(mask)
        np.asarray(mask)
        assert (mask != mask).any()
        assert bool(jnp.isfinite(jnp.where(jnp.isnan(mask), 0.0, mask)).all())
    assert found.harms == []


def test_a_function_of_jaxs_keeps_its_name_while_calls_are_watched(found):
    mask = jnp.tri(3, dtype=bool).at[1].set(False)
    step = jax.jit(lambda x: jax.nn.softmax(jnp.where(mask, x, -jnp.inf)) @ x)
    step(jnp.ones((3, 3)))
    (event,) = found.bad()
    assert (event.operation.name, event.cause.tag) == ("softmax", "softmax_fully_masked")
