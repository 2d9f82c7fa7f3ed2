"""NaN that the code itself writes, or reads beyond the end of an array: nobody else is blamed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan
from anynan._reports.report import render
from tests.failing import failure

pytestmark = pytest.mark.tier(2)

X = jnp.array([1.0, -1.0, 2.0])
TABLE = jnp.array([1.0, np.nan, 2.0])


WRITTEN = {
    "python": (lambda x: x * float("nan"), "multiply"),
    "looked up": (lambda x: jnp.tanh(TABLE[jnp.argmax(x) - 1]) + x, "tanh"),
    "where": (lambda x: jnp.where(x > 0, x, jnp.nan), "where"),
    "full": (lambda x: jnp.full(3, jnp.nan), "full"),
    "set": (lambda x: x.at[0].set(jnp.nan), None),
    "loop": (lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c * jnp.nan, x), "multiply"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_nan_of_the_code_is_reported_as_its_own(name):
    fn, operation = WRITTEN[name]
    event = failure(anynan.jax.track(fn), X)
    text = render(event)
    assert event.cause.tag == "written_constant", text
    spelled = name != "looked up"
    said = "the code itself writes this NaN" if spelled else "this NaN came as a plain number or a"
    assert event.cause.text.startswith(said)
    assert event.operation.name == (operation or event.operation.name)
    assert event.phase in ("forward", "loss")
    assert "batch" not in text and "data set" not in text
    assert event.notes == ()


@pytest.mark.parametrize("table", [TABLE, np.asarray(TABLE)], ids=["JAX", "NumPy"])
def test_an_array_with_nan_among_its_numbers_may_be_data(table):
    event = failure(anynan.jax.track(lambda x: x * table), X)
    assert (event.cause.tag, event.operation.name) == ("bad_input", "multiply")
    assert "an array that held these values already is taken in here" in event.cause.text
    assert "batch" not in render(event)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
        lambda x: jnp.nansum(jnp.where(x > 0, x, jnp.nan)),
        lambda x: jnp.where(x < 9, x, jnp.full(3, jnp.nan)),
        lambda x: jnp.minimum(x, jnp.full(3, jnp.inf)),
        lambda x: jnp.where(x < 0, jnp.take(x, jnp.where(x < 0, 0, 5)), 0.0),
    ],
)
def test_a_mask_or_what_is_removed_again_is_no_failure(fn):
    tracked = anynan.jax.track(fn)
    tracked(X)
    assert not [event for event in tracked.events if event.severity == "bad"]


def solved(params, x):
    """Take steps that are kept where they are fit, as an adaptive solver does."""

    def advance(state):
        i, rows = state
        new = params["rate"] * x
        error = jnp.where(jnp.isnan(new), jnp.inf, jnp.abs(new)).max()
        return i + 1, jax.lax.cond(error < 10, lambda: rows.at[i].set(new), lambda: rows)

    start = 0, jnp.full((2, 3), jnp.inf)
    rows = jax.lax.while_loop(lambda state: state[0] < 2, advance, start)[1]
    return ((rows - 1) ** 2).mean()


def test_a_bad_weight_is_named_where_the_code_chose_to_leave_what_it_wrote():
    tracked = anynan.jax.track(jax.jit(solved))
    tracked({"rate": jnp.ones(3)}, X)
    event = failure(tracked, {"rate": jnp.array([1.0, jnp.nan, 1.0])}, X)
    assert (event.phase, event.parameter, event.kind) == ("parameter", "rate", "nan")
    assert event.cause.tag == "bad_parameter"
    assert "inferred" in event.notes[-1]


ENTRIES = {"table": jnp.arange(20.0).reshape(5, 4)}


def take(params, tokens):
    return jnp.tanh(jnp.take(params["table"], tokens, axis=0)).sum()  # bad


def filled(params, tokens):
    return params["table"].at[tokens].get(mode="fill").sum()  # bad


def looped(params, tokens):
    def step(total, token):
        return total + jnp.take(params["table"], token, axis=0), None  # bad

    return jax.lax.scan(step, jnp.zeros(4), tokens)[0].sum()


CASES = [
    (take, [1, -8], "index -8 is out of range for 5 entries"),
    (filled, [1, 5], "index 5 is out of range for 5 entries"),
    (take, [[7, 9]], "index 7 is out of range for 5 entries, 2 such indices in all"),
    (looped, [0, 6], "index 6 is out of range for 5 entries"),
]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize(("fn", "tokens", "evidence"), CASES)
def test_the_read_its_index_and_the_size_are_named(fn, tokens, evidence, grad):
    step = jax.value_and_grad(fn) if grad else fn
    event = failure(anynan.jax.track(step), ENTRIES, jnp.array(tokens))
    assert event.cause.tag == "index_out_of_range"
    assert (event.operation.name, event.cause.evidence) == ("take", evidence)
    assert event.operation.phase in ("forward", "loss")
    assert "# bad" in event.operation.source.text
    assert not any(summary.bad for summary in event.operation.inputs)
    assert event.notes == ()


def test_a_read_in_range_of_what_is_bad_is_not_the_origin():
    step = anynan.jax.track(lambda x, tokens: jnp.take(jnp.log(x), tokens).sum())
    event = failure(step, jnp.array([-1.0, 1.0]), jnp.array([0, 1]))
    assert event.operation.name == "log"
