"""An exception over a bad value takes the report along, in a step and in code outside of any."""

import os
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan
from tests.jax_adapter.watching import watching


def raised(run):
    with pytest.raises(Exception) as caught:
        run()
    return caught.value


def ended(found, said, run):
    """End the watched program with an exception."""
    with pytest.raises(Exception, match=said) as caught:
        run()
    found.ended_by = caught.value


def look(x):
    if not np.isfinite(x).all():
        raise ValueError("not finite")
    return x


def result(x):
    return jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def effect(x):
    jax.debug.callback(lambda value: look(value) and None, x.sum())
    return x * 2


def condition(x):
    def fail():
        raise ValueError("not finite")

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.lax.cond(jnp.isfinite(x).all(), lambda: x, lambda: jax.pure_callback(fail, shape))


def loop(x):
    return jax.lax.scan(lambda carry, row: (carry, result(row)), 0.0, x)[1]


@pytest.mark.parametrize("action", ["raise", "record"])
@pytest.mark.parametrize("way", [result, effect, condition, loop], ids=lambda way: way.__name__)
@pytest.mark.parametrize("lag", [0, 1])
def test_an_exception_over_a_bad_value_takes_the_report_along(way, action, lag):
    @jax.jit
    def step(x):
        return way(jnp.log(x)).sum()

    tracker = anynan.jax.track(step, action=action, advanced=anynan.Advanced(lag=lag))
    tracker(jnp.ones(2))
    error = raised(lambda: (tracker(jnp.array([1.0, -1.0])), tracker(jnp.ones(2)), tracker.flush()))
    (event,) = tracker.events
    assert (event.step, event.layer, event.operation.name) == (1, None, "log")
    assert event.cause.tag == "log_of_negative"
    assert event.spread.surfaced.endswith("that the program raised")  # JAX has several
    if action == "raise":
        assert type(error) is anynan.NonFiniteError
        assert "not finite" in str(error.__cause__)
    else:
        assert not isinstance(error, anynan.AnomalyError)
        assert any("log(-1.0)" in note for note in error.__notes__)
    assert float(tracker(jnp.ones(2))) == 0  # it goes on


def test_an_exception_over_something_else_stays_what_it_is():
    def other(x):
        raise KeyError("mine")

    @jax.jit
    def step(x):
        y = jnp.where(x > 0, x, -jnp.inf).max() + x
        return jax.pure_callback(other, jax.ShapeDtypeStruct(y.shape, y.dtype), y).sum()

    tracker = anynan.jax.track(step)
    error = raised(lambda: tracker(jnp.array([1.0, -1.0])))
    assert "mine" in str(error)
    assert not tracker.events


def solver(x):
    """Reject every step that gives NaN, and give up after some: as solvers of equations do."""

    def stages(x):
        def stage(k, _):
            return jnp.log(x + 0 * k), None

        return jax.lax.scan(stage, x, length=2)[0]

    def step(state):
        x, count = state
        new = x - 0.1 * stages(x)
        return jnp.where(jnp.isfinite(new).all(), new, x), count + 1

    return jax.lax.while_loop(lambda state: (state[0] > -2).any() & (state[1] < 5), step, (x, 0))


def test_a_nan_that_a_solver_hides_before_it_gives_up_is_noted():
    def fail(count):
        msg = f"too many steps: {count}"
        raise ValueError(msg)

    @jax.jit
    def step(x):
        x, count = solver(x)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.cond(count < 5, lambda: x, lambda: jax.pure_callback(fail, shape, count))

    tracker = anynan.jax.track(step, action="record")
    error = raised(lambda: jax.block_until_ready(tracker(jnp.array([0.5, -0.5]))))
    assert "too many steps: 5" in str(error)
    (event,) = tracker.events
    assert (event.severity, event.operation.name, event.kind) == ("suspect", "log", "nan")
    assert event.operation.source.text == "return jnp.log(x + 0 * k), None"
    assert event.notes[0].endswith("[may-have-raised]")


def test_equinox_raises_its_own_exception_and_says_where():
    @eqx.filter_jit
    def step(x):
        x, count = solver(x)
        return eqx.error_if(x, count == 5, "too many steps")

    tracker = anynan.jax.track(step, action="record")
    error = raised(lambda: tracker(jnp.array([0.5, -0.5])))
    assert type(error) is eqx.EquinoxRuntimeError
    frames = str(error).split("  File ")[1:]
    assert [__file__ in frame for frame in frames] == [True]  # of the trace, and not of ours
    assert "too many steps" in frames[0]
    assert tracker.events[0].operation.name == "log"


@pytest.mark.parametrize("around", [jax.jit, lambda fn: lambda x: jax.jit(fn)(x) * 2])
def test_what_jax_itself_raises_over_a_nan_takes_the_report_along(around):
    tracker = anynan.jax.track(around(lambda x: jnp.log(x).sum()))
    with jax.debug_nans(True):
        error = raised(lambda: tracker(jnp.array([1.0, -1.0])))
    assert type(error) is anynan.NonFiniteError
    assert type(error.__cause__) is FloatingPointError
    assert error.event.operation.name == "log"


def test_what_is_donated_is_kept_until_the_fault_comes_back():
    @partial(jax.jit, donate_argnums=0)
    def step(x, factor):
        return jnp.log(x * factor).sum()

    tracker = anynan.jax.track(step, action="record")
    for factor in (1.0, 0.0, 1.0, 0.0):
        tracker(jnp.ones(3), factor)
    first, second = tracker.events
    assert first.operation is None
    assert "what the next 100 steps donate is kept" in first.notes[-1]
    assert second.operation.name == "log"
    assert second.notes == (
        "found because what the steps donate was kept from step 2 on [watched-found]",
    )
    x = jnp.ones(3)
    tracker(x, 1.0)
    assert x.is_deleted()


def test_what_ends_a_step_that_gave_its_state_away_says_what_is_known():
    @partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - result(jnp.log(w * x))

    tracker = anynan.jax.track(step)
    error = raised(lambda: jax.block_until_ready(tracker(jnp.ones(2), jnp.array([1.0, jnp.nan]))))
    assert tracker.events == ()
    (note,) = [note for note in error.__notes__ if "anynan" in note]
    assert "w was donated to the step" in note
    assert note.endswith("bad values are in x [crash-unread]")


def kernel(x):
    return jnp.exp(x)


class Data:
    """Ask for a shape, as a class of a library's does."""

    def __init__(self, x):
        assert x.shape
        self.x = x


jax.tree_util.register_pytree_node(Data, lambda d: ((d.x,), None), lambda _, x: Data(*x))


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("scale = x / (x - x)", "divide", "scale = x / (x - x)"),
        ("scale = jnp.log(-Data(x).x)", "log", "scale = jnp.log(-Data(x).x)"),
        ("scale = kernel(x * 100)", "exp", "return jnp.exp(x)"),
        ("checked(jnp.sqrt(-x)); scale = x", "sqrt", "checked(jnp.sqrt(-x)); scale = x"),
    ],
)
@pytest.mark.parametrize("action", ["record", "raise"])
def test_an_exception_of_a_function_that_a_library_called_names_what_it_computed(
    line, name, text, action, library, tmp_path
):
    path = tmp_path / "sampling.py"
    path.write_text(f"def model(x):\n    y = x * 2\n    {line}\n    return checked(scale * y)\n")
    os.utime(path, (1, 1))  # a file that was written since may say something else
    scope = {"jnp": jnp, "kernel": kernel, "Data": Data, "checked": library["checked"]}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with watching(action) as found:
        ended(found, "invalid scale", lambda: library["sampled"](scope["model"], jnp.full(2, 2.0)))
    (event,) = found.bad()
    assert (event.operation.name, event.operation.source.text) == (name, text)
    assert event.cause.tag != "unknown"


@pytest.mark.parametrize("way", ["compiled", "sampled"])
def test_an_exception_that_comes_of_no_number_is_left_alone(way, library):
    def model(x):
        y = calls.append(x) or jnp.log(x)
        return (y @ jnp.ones((5, 2))).sum()

    calls = []
    with watching() as found:
        before = found.added  # TensorFlow's watcher, where it is imported
        run = library[way](model) if way != "sampled" else model
        ended(found, "dot_general", lambda: library["sampled"](run, jnp.ones(3)))
    assert (len(calls), found.events, found.harms, found.added) == (1, [], [], before)


def test_what_a_function_computed_that_has_returned_is_told_and_not_called_again(library):
    def alone(x):
        calls.append(x)
        return jnp.log(-x)

    calls = []
    with watching() as found:
        ended(found, "invalid scale", lambda: library["checked"](alone(jnp.ones(2))))
    assert len(calls) == 1
    (event,) = found.bad()
    assert event.operation.source.text == "return jnp.log(-x)"
