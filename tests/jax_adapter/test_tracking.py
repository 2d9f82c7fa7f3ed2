"""``track``: the same results, compiled once, with whatever arguments a function takes."""

import functools

import jax
import jax.numpy as jnp
import pytest

import anynan
from tests.jax_adapter.models import made, same


def test_a_training_step_returns_what_the_jitted_one_returns():
    step, *state = made()
    tracked = anynan.jax.track(step)
    jitted = jax.jit(step)
    mine, theirs = tuple(state), tuple(state)
    for _ in range(3):
        mine = (*tracked(*mine)[:2], state[2])
        theirs = (*jitted(*theirs)[:2], state[2])
    assert same(mine, theirs)
    assert tracked.events == ()


def test_it_is_traced_once_for_each_kind_of_arguments():
    traces = []
    tracked = anynan.jax.track(lambda x: traces.append(x) or (x * 2).sum())
    for size in (3, 3, 4, 3, 4):
        tracked(jnp.ones(size))
    assert len(traces) == 2
    tracked(jnp.ones(3, jnp.float16))
    assert len(traces) == 3


def test_static_donated_and_keyword_arguments_of_a_jitted_function():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="word", donate_argnums=0)
    def scaled(x, times, *, word, by=1.0):
        return x * (times if word == "many" else 1) * by

    tracked = anynan.jax.track(scaled)
    x = jnp.ones(3)
    assert tracked(x, 3, word="many", by=2.0).tolist() == [6, 6, 6]
    assert x.is_deleted()
    assert tracked(jnp.ones(3), 4, word="many").tolist() == [4, 4, 4]
    assert tracked(jnp.ones(3), 4, word="one").tolist() == [1, 1, 1]


def test_an_array_in_the_closure_and_a_decorator():
    weight = jnp.arange(3.0)

    @anynan.jax.track(action="record")
    def step(x):
        """Say what it does."""
        return x / weight

    step(jnp.ones(3))
    assert (step.__name__, step.__doc__) == ("step", "Say what it does.")
    assert [event.cause.tag for event in step.events] == ["divide_by_zero"]


def test_a_tracked_function_inside_another_is_watched_by_the_outer_one():
    inner = anynan.jax.track(lambda x: jnp.log(x))
    outer = anynan.jax.track(lambda x: inner(x).sum(), action="record")
    outer(jnp.array([-1.0]))
    assert (len(outer.events), len(inner.events)) == (1, 0)


def test_unfit_targets():
    for target, said in (
        (3, "takes a function of arrays, not int"),
        (type("Dense", (), {}), "not the class Dense"),
        (anynan.jax.track(jnp.sin), "a tracker already"),
    ):
        with pytest.raises(TypeError, match=said):
            anynan.jax.track(target)


def test_layers_are_chosen_by_patterns():
    step, *state = made("log")
    tracked = anynan.jax.track(step, layers="block*", action="record")
    tracked(*state)
    layers = {reading.layer for reading in tracked.history if reading.phase == "forward"}
    assert layers == {"block_0", "block_0.up", "block_1", "block_1.up"}
    with pytest.raises(ValueError, match="layers='haed' matches no layer; did you mean 'head'"):
        anynan.jax.track(step, layers="haed")(*state)


def test_a_class_that_checks_the_shapes_of_its_arrays_is_an_argument_and_a_result():
    class Data:
        def __init__(self, x):
            assert x.ndim == 2
            assert jnp.issubdtype(x.dtype, jnp.floating)
            self.x = x

    jax.tree_util.register_pytree_node(Data, lambda d: ((d.x,), None), lambda _, x: Data(*x))
    tracked = anynan.jax.track(jax.jit(lambda data: Data(jnp.log(data.x))))
    assert tracked(Data(jnp.ones((2, 3)))).x.shape == (2, 3)
    with pytest.raises(anynan.NonFiniteError, match=r"log .*test_tracking\.py"):
        tracked(Data(-jnp.ones((2, 3))))
