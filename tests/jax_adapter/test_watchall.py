"""Functions that a program compiles are found by that, and watched as if they had been tracked."""

import functools
import gc
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import anynan
from anynan.jax.program import watch
from anynan.jax.session.session import Session
from tests.jax_adapter.watching import watching


def loss(w, x):
    return jnp.log(x @ w).sum()


def update(w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - 0.01 * grad, value


BAD = -np.ones((2, 3), np.float32)


@pytest.mark.parametrize("how", ["plain", "options", "method"])
def test_every_way_to_compile_is_seen(how, found):
    if how == "plain":
        step = jax.jit(update)
    elif how == "options":
        step = jax.jit(donate_argnums=0)(update)
    else:

        class Holder:
            @functools.partial(jax.jit, static_argnums=0)
            def step(self, w, x):
                return update(w, x)

        step = Holder().step
    w, value = step(jnp.ones(3), -BAD)
    want, wanted = update(jnp.ones(3), -BAD)
    np.testing.assert_allclose(w, want, rtol=1e-6)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    step(w, BAD)
    assert [event.operation.name for event in found.bad()] == ["log"]


@pytest.mark.parametrize("kept", ["little", "more than there is"])
def test_what_a_step_donates_is_kept_if_it_is_little(kept, found, monkeypatch):
    monkeypatch.setattr(watch, "SHARE", 16)
    calls = []

    def fails(x):
        calls.append(len(calls))
        if kept == "more than there is" and len(calls) == 1:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        return x

    def step(w, x):
        w, value = update(w, x)
        return jax.pure_callback(fails, w, w), value

    step, w = jax.jit(step, donate_argnums=0), jnp.ones(3)
    w, _ = step(w, -BAD)
    assert len(calls) == 1 + (kept == "more than there is")
    step(w, BAD)
    (event,) = found.bad()
    assert w.is_deleted()
    assert (event.operation is None) == (kept != "little")
    assert kept == "little" or "leave out donate_argnums for one run" in event.notes[0]


def test_the_program_of_a_function_is_the_users_own_and_can_be_exported(found):
    inner = jax.jit(loss)
    outer = jax.jit(jax.grad(lambda w, x: inner(w, x)))
    exported = export.export(outer)(jnp.ones(3), BAD)
    assert exported.serialize()
    assert "callback" not in outer.lower(jnp.ones(3), BAD).as_text()
    (line,) = [line for line in found.lines() if "compiled-ahead" in line]
    assert "what you compile by <lambda>.lower(...).compile()" in line


def test_the_users_own_tracker_owns_what_it_calls(found):
    step = anynan.jax.track(jax.jit(update), action="record")
    step(jnp.ones(3), BAD)
    assert len(step.events) == 1
    assert found.events == []


def test_what_is_wrong_with_the_program_is_its_own_error(found):
    step = jax.jit(update)
    with pytest.raises(TypeError, match="dot_general|matmul|incompatible") as caught:
        step(jnp.ones(5), BAD)
    assert caught.value.__context__ is None
    assert found.lines() == []


def test_a_function_without_a_state_to_give_back_is_only_warned_of():
    with watching("skip"), pytest.warns(anynan.AnynanWarning, match="the logarithm of a") as told:
        jax.jit(jnp.log)(BAD)
        w, _ = jax.jit(update)(jnp.ones(3), BAD)
    assert len(told) == 2
    assert np.array_equal(w, np.ones(3))


def test_what_cannot_be_watched_is_a_line(found, monkeypatch):
    def start(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(sys.modules["anynan.jax.everywhere.compiled"], "start", start)
    assert jax.jit(jnp.negative)(1.0) == -1.0
    assert found.lines() == [
        "  note      negative is not watched: RuntimeError: no [layer-unwatched]"
    ]


def test_functions_that_are_gone_are_not_kept(found):
    for i in range(12):
        jax.jit(lambda x, i=i: x + i)(1.0)
    gc.collect()
    jax.jit(jnp.negative)(1.0)
    assert len(found._trackers) <= 2
    found.close()
    lines = found.lines(10)
    assert len(lines) == 11
    assert lines[0].startswith("anynan: negative: nothing went bad")
    assert lines[-1] == "anynan: nothing went bad in 3 more"


# Outside of any jit.


def root(w, x):
    return jnp.mean(jnp.sqrt(jnp.sum((x @ w) ** 2, axis=1)))


@pytest.mark.parametrize("door", ["grad", "jacrev"])
def test_a_gradient_outside_of_jit_is_named_by_operation_and_line(door, found):
    plain = getattr(jax, door)(root)
    w, zeros = jnp.ones((3, 2)), jnp.zeros((4, 3))
    for x in (zeros + 1, zeros + 2):
        plain(w, x)
    assert found.bad() == []
    plain(w, zeros)
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (2, "sqrt")
    assert (event.operation.source.function, event.cause.tag) == ("root", "norm_gradient_at_zero")


def test_what_runs_eagerly_gives_what_it_gives_by_itself(found):
    seen = []

    def loss(w, x):
        seen.append(type(w))
        return jnp.sum(jnp.tanh(x @ w) ** 3) / 7

    w, x = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.linspace(0, 2, 20).reshape(5, 4)
    mine = jax.value_and_grad(loss)(w, x)
    assert len(seen) == 1  # and it is traced once, as by itself
    theirs = jax.value_and_grad.__wrapped__(loss)(w, x)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    assert found.bad() == []


# What a library compiles, and loops outside of any jit.


@pytest.mark.parametrize("way", ["compiled", "solved", "sloped"])
def test_what_a_library_compiles_is_named_by_operation_and_line(way, library, found):
    step = library[way](root_of_sum)
    for x in (4.0, 9.0, -1.0, jnp.nan):
        step(jnp.full(2, x))
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (2, "sqrt")
    assert event.operation.source.text == "return jnp.sqrt(x.sum())"
    (line, *rest) = found.lines()
    assert line.startswith("anynan: root_of_sum (solvers): 1 bad in 3 steps")
    assert not rest  # the NaN that came after it was given


class Scaled:
    by = 1.0

    def step(self, x):
        return x * self.by


@pytest.mark.parametrize("track", [None, anynan.jax.track])
def test_a_method_that_is_compiled_again_is_traced_again(track, found):
    model, given = Scaled(), []
    for by in (1.0, 2.0, 3.0):
        model.by = by
        step = jax.jit(model.step)
        step = jax.jit(lambda x, step=step: step(x)) if track is None else track(step)
        given.append(float(step(1.0)))
    assert given == [1.0, 2.0, 3.0]


def test_only_the_first_bad_calls_of_a_function_are_looked_into(library, found, monkeypatch):
    def loss(x):
        return jnp.log(x).sum()

    looks, again = [], Session.again
    monkeypatch.setattr(Session, "again", lambda *given: (looks.append(given), again(*given)))
    for step in (library["compiled"](loss), jax.grad(lambda x: jnp.sqrt(x).sum())):
        looks.clear()
        for _ in range(9):
            step(-jnp.ones(2))
        assert len(looks) == 3
    assert found.harms == []


def test_a_step_that_a_library_rejects_is_no_fault_unless_all_are(library, found):
    def step(state, x):
        new = jnp.log(state["x"] - x)
        bad = jnp.isnan(new)
        return {"x": jnp.where(bad, state["x"], new), "n": state["n"] + bad}, {"energy": new}

    walk, state = library["compiled"](step), {"x": jnp.float32(3), "n": 0}
    for x in (1.0, 4.0, 4.0, -2.0):
        state, _ = walk(state, x)
    state, rows = jax.lax.scan(step, state, jnp.array([9.0, 0.5]))
    assert (int(state["n"]), bool(jnp.isnan(rows["energy"]).any())) == (3, True)
    assert found.events == []
    for _ in range(4):
        state, _ = walk(state, 9.0)
    assert found.bad()[0].operation.name == "log"


def test_what_a_program_maps_outside_of_any_jit_is_named_by_operation_and_line(library, found):
    def predict(x, y):
        return jnp.sqrt(x - 4) + y

    mapped = jax.vmap(predict, in_axes=(0, None))
    for x in (9.0, 4.0, 1.0):
        given = jnp.full(3, x), jnp.ones(2)
        np.testing.assert_array_equal(mapped(*given), predict(given[0][:, None], given[1]))
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (2, "sqrt")
    assert event.operation.source.text == "return jnp.sqrt(x - 4) + y"
    assert float(jax.jit(jax.grad(lambda x: jax.vmap(jnp.sin)(x).sum()))(jnp.zeros(1))[0]) == 1
    assert jax.jit(mapped).__name__ == "predict"
    library["mapped"](jnp.log)(-jnp.ones(2))  # what a library does with it is its affair
    assert len(found.bad()) == 1


def turn(x):
    return jnp.log(x)


LOOPS = {
    "scan": lambda x, n: jax.lax.scan(lambda x, _: (turn(x), None), x, None, length=n)[0],
    "while": lambda x, n: jax.lax.while_loop(
        lambda s: s[1] < n, lambda s: (turn(s[0]), s[1] + 1), (x, 0)
    )[0],
    "fori": lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: turn(x), x),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_outside_of_any_jit_is_named_by_operation_and_line(loop, found):
    x = jnp.full(2, 3.0)
    assert not bool(jnp.isnan(LOOPS[loop](x, 2)).any())
    assert found.events == []
    assert bool(jnp.isnan(LOOPS[loop](x, 5)).all())
    (event,) = found.bad()
    assert event.operation.source.text == "return jnp.log(x)"


def root_of_sum(x):
    return jnp.sqrt(x.sum())


def test_what_a_reported_function_made_is_no_fault_of_the_next(found):
    @jax.jit
    def update(state, x):
        w, m = state
        g = jax.grad(lambda w: jnp.sqrt(jnp.sum((x @ w) ** 2) * 0))(w)
        return w - 0.1 * g, m + g

    @jax.jit
    def evaluate(state, x):
        return jnp.mean(jnp.tanh(x @ state[0]))

    state, x = (jnp.ones((3, 2)), jnp.zeros((3, 2))), jnp.ones((4, 3))
    for _ in range(2):
        state = jax.tree.map(lambda a: a * 1, update(state, x))
        evaluate(state, x)
    assert [event.operation.name for event in found.bad()] == ["sqrt"]
    lines = found.lines()
    assert not any("evaluate: nothing went bad" in line for line in lines)
    assert any("not reported again" in line for line in lines)


def test_what_comes_back_through_another_function_is_no_fault_of_the_first(found):
    attack = jax.jit(lambda w, x: x / jnp.sum(jnp.abs(x)) + 0 * jnp.sum(w))
    train = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))
    w = jnp.ones((3, 2))
    for i in range(4):
        w = train(w, attack(w, jnp.full((4, 3), float(i != 1))))
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (1, "divide")


def test_what_cannot_be_traced_is_told_to_be_bad_all_the_same(found):
    def loss(x):
        return jnp.log(x) if x > 1 else jnp.sqrt(x)

    value, slope = jax.value_and_grad(loss)(0.0)
    assert (float(value), float(slope)) == (0, float("inf"))
    assert found.harms == ["loss gave NaN or Inf in its step 0"]
    assert any("cannot be traced" in note for note in found.notes)


def test_an_nnx_variable_that_two_results_share_stays_one(found):
    class Sgd(nnx.Pytree):
        def __init__(self, params):
            self.params = nnx.data(params)

    @nnx.jit
    def created():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        return model, Sgd(nnx.variables(model, nnx.Param))

    model, sgd = created()
    assert sgd.params["kernel"] is model.kernel
    assert any("one nnx variable in two places" in note for note in found.lines())


def test_an_nnx_module_that_holds_itself_runs_unwatched(found):
    class Ring(nnx.Module):
        def __init__(self):
            self.a, self.ref = nnx.Param(jnp.ones(())), nnx.data(self)

    def doubled(model):
        model.a[...] = model.a[...] * 2
        return model.a[...]

    def fails(model):
        raise KeyError("mine")

    how, model = {"graph": True, "graph_updates": True}, Ring()
    step = nnx.jit(doubled, **how)
    assert [step(model), step(model)] == [2.0, 4.0]
    assert any("a Ring that it takes or gives holds itself" in note for note in found.lines())
    with pytest.raises(KeyError, match="mine"):
        nnx.jit(fails, **how)(model)
    assert nnx.grad(lambda model: model.a[...] ** 2, **how)(model).a[...] == 8.0


def test_what_compiles_beside_jax_is_found_by_name(found):
    one = nnx.jit(lambda model, x: jnp.sqrt(model(x)).sum())
    one(nnx.Linear(3, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)), BAD)
    two = equinox.filter_jit(lambda model, x: (jax.vmap(model)(x) / 0.0).sum())
    two(equinox.nn.Linear(3, 1, key=jax.random.key(0)), BAD)
    jax.pmap(lambda x: jnp.log(x))(BAD[:1])
    assert [event.operation.name for event in found.events] == ["sqrt", "divide", "log"]


def test_a_nan_that_a_librarys_function_is_given_is_no_fault_of_its(library, found):
    assert library["compiled"](root_of_sum)(jnp.array([1.0, jnp.nan])) != 0
    assert found.bad() == []
    (line,) = found.lines()
    assert line.endswith("[nan-given]")
