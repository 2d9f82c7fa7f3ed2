"""What a program over JAX does by itself it does while everything is watched."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_a_function_compiled_anew_in_every_step_is_one_unless_it_holds_much(size, found):
    data = jnp.ones(size)

    def step(w):
        return jnp.log(w) + data.sum()

    for i in range(5):
        jax.jit(step)(jnp.float32(1 - (i == 4)))
    assert sum("in 4 steps" in line for line in found.lines()) == (size == 3)
    steps = [tracker for tracker in found._trackers if tracker.name == "step"]
    assert len(steps) <= (2 if size == 3 else 1)
    (event,) = found.bad()
    assert event.operation.name == "log"


def test_without_jit_a_function_runs_as_it_is_and_is_watched_again_afterwards(found):
    kinds = []

    @jax.jit
    def doubled(x):
        kinds.append(type(x))
        return 2 * x

    with jax.disable_jit():
        assert doubled(jnp.float32(1)) == 2
    assert kinds == [type(jnp.float32(1))]
    assert doubled(jnp.float32(1)) == 2
    assert [line[:33] for line in found.lines()] == ["anynan: doubled: nothing went bad"]


@pytest.mark.parametrize("clear", [lambda step: step.clear_cache(), lambda _: jax.clear_caches()])
def test_a_program_that_has_caches_cleared_has_its_functions_traced_anew(clear, found):
    scale = [2.0]
    step = jax.jit(lambda x: x * scale[0])
    assert step(1.0) == 2
    scale[0] = 3.0
    assert step(1.0) == 2
    clear(step)
    assert step(1.0) == 3


@pytest.mark.parametrize("make", [jax.jit, jax.grad, jax.value_and_grad, jax.vmap])
def test_what_stands_for_a_function_is_copied_as_the_function_and_looks_like_it(make, found):
    made = getattr(jax, make.__name__)(jnp.sin)
    assert "anynan" not in f"{made!r} {made}"
    given = jnp.ones(1) if make.__name__ == "vmap" else jnp.float32(1)
    copied = copy.deepcopy(made)
    assert not type(copied).__module__.startswith("anynan.")
    jax.tree.map(np.testing.assert_array_equal, copied(given), make(jnp.sin)(given))


@pytest.mark.parametrize("jax_or_nnx", [jax, nnx], ids=["jax", "nnx"])
def test_a_step_with_a_module_is_traced_once(jax_or_nnx, found):
    traces = []

    class Model(nnx.Linear):
        def step(self, x):
            traces.append(x)
            return self(x)

    step = jax_or_nnx.jit(Model.step)
    step(Model(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3)))
    assert len(traces) == 1


def test_what_a_loop_prints_it_prints_once_where_its_step_is_looked_into(found, capsys):
    def round_(i, x):
        jax.debug.print("round {}", i)
        jax.debug.callback(lambda i: print("called", i), i)
        return x * 2

    @jax.jit
    def step(x):
        x = jax.lax.fori_loop(0, 2, round_, x)
        x = jax.lax.while_loop(lambda x: x > -20, lambda x: round_(2, x), x)
        x = jax.lax.cond(x < 0, lambda x: round_(3, x), lambda x: x, x)
        return round_(4, jnp.log(x))

    step(-3.0)
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split()) == sorted(
        [word for i in range(5) for word in ("called", "round", f"{i}", f"{i}")]
    )
    (event,) = found.bad()
    assert event.operation.name == "log"
    assert not any("callback" in note for note in event.notes)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: str(jax.make_jaxpr(f)(x)),
        lambda f, x: jax.jit(lambda x: jax.linearize(f, x)[1](x))(x),
    ],
)
def test_a_compiled_function_is_transformed_as_it_is_and_watched_afterwards(transform, found):
    def double(x):
        return 2 * x

    x, step, plain = jnp.ones(3), jax.jit(double), jax.jit.__wrapped__(double)
    jax.tree.map(np.testing.assert_array_equal, transform(step, x), transform(plain, x))
    step(x)
    assert any(line.startswith("anynan: double: nothing went bad") for line in found.lines())


@pytest.mark.parametrize("sloped", [False, True])
def test_what_equinox_compiles_anew_of_a_module_is_traced_once(sloped, found):
    traces = []

    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            traces.append(x)
            return jnp.sqrt(self.w) * x

        def loss(self, x):
            return self(x).sum()

    for w in (3.0, 2.0, 1.0, -1.0):
        assert len(traces) == (w < 3)
        model, x = Model(jnp.full(2, w)), jnp.ones(2)
        if sloped:
            eqx.filter_jit(eqx.filter_grad(Model.loss))(model, x)
        else:
            eqx.filter_jit(model)(x)
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (3, "sqrt")
    assert sum("in 4 steps" in line for line in found.lines()) == 1


def test_an_nnx_object_that_a_step_gives_back_is_the_one_it_took(found):
    class Pair(nnx.Module):
        def __init__(self, a, b):
            self.a, self.b = a, b

    @nnx.jit
    def step(pair, x):
        pair.a[...] += x
        return pair, [pair.b], {"new": Pair(pair.a, nnx.Param(x))}, pair.a[...]

    pair = Pair(nnx.Param(1.0), nnx.Param(2.0))
    for a in (2, 3):
        same, (b,), other, value = step(pair, 1.0)
        assert same is pair
        assert b is pair.b
        assert other["new"].a is pair.a
        assert pair.a[...] == value == a
    assert any("step: nothing went bad in 2 steps" in line for line in found.lines())


def test_a_search_for_leaked_tracers_finds_none_of_ours(found):
    with jax.checking_leaks():
        assert jax.jit(lambda x: jnp.log(x).sum())(jnp.ones(3)) == 0
    assert not any("unwatched" in line for line in found.lines()), found.lines()
