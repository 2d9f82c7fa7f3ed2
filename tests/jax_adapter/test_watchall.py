"""Functions that a program compiles are found by that, and watched as if they had been tracked."""

import functools
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import anynan
from anynan._everywhere import Found, watch_everything
from anynan.jax import eager
from anynan.jax.program import watch
from anynan.jax.session.session import Session
from anynan.options import Options
from tests.jax_adapter.watching import watched


@pytest.fixture
def found():
    yield from watched(action="record", level="step")


@pytest.fixture
def raising():
    yield from watched(action="raise", level="step")


@pytest.fixture
def skipping():
    yield from watched(action="skip", level="step")


def loss(w, x):
    return jnp.log(x @ w).sum()


def update(w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - 0.01 * grad, value


BAD = -np.ones((2, 3), np.float32)


def facts(event):
    return event.layer, event.phase, event.kind, event.step, event.operation, event.cause


def test_the_event_is_that_of_track(raising):
    step = jax.jit(update)
    with pytest.raises(anynan.NonFiniteError) as caught:
        step(jnp.ones(3), BAD)
    with pytest.raises(anynan.NonFiniteError) as named:
        anynan.jax.track(jax.jit(update), level="step")(jnp.ones(3), BAD)
    assert facts(caught.value.event) == facts(named.value.event)
    assert caught.value.event.operation.name == "log"
    assert [facts(event) for event in raising.bad()] == [facts(caught.value.event)]


@pytest.mark.parametrize("how", ["plain", "partial", "options", "method"])
def test_every_way_to_compile_is_seen(how, found):
    if how == "plain":
        step = jax.jit(update)
    elif how == "partial":
        step = functools.partial(jax.jit, donate_argnums=0)(update)
    elif how == "options":
        step = jax.jit(donate_argnums=0)(update)
    else:

        class Holder:
            @jax.jit
            def double(self, x):
                return x * 2

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


@pytest.mark.parametrize("kept", ["much", "little", "more than there is"])
def test_what_a_step_donates_is_kept_if_it_is_little(kept, found, monkeypatch):
    monkeypatch.setattr(watch, "SHARE", 16 if kept != "much" else 1 << 60)
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


def test_what_compiles_beside_jax_is_found_by_name(found):
    nnx = pytest.importorskip("flax.nnx")
    equinox = pytest.importorskip("equinox")

    @nnx.jit
    def one(model, x):
        return jnp.sqrt(model(x)).sum()

    @equinox.filter_jit
    def two(model, x):
        return (jax.vmap(model)(x) / 0.0).sum()

    @jax.pmap
    def three(x):
        return jnp.log(x)

    one(nnx.Linear(3, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)), BAD)
    two(equinox.nn.Linear(3, 1, key=jax.random.key(0)), BAD)
    three(BAD[:1])
    assert [event.operation.name for event in found.events] == ["sqrt", "divide", "log"]


def test_the_outermost_function_sees_it_all(found):
    inner = jax.jit(loss)

    @jax.jit
    def outer(w, x):
        return inner(w, x) + 1

    outer(jnp.ones(3), BAD)
    assert [event.operation.name for event in found.events] == ["log"]
    (line,) = found.lines()
    assert line.startswith("anynan: outer: 1 bad in 1 step")


def test_the_program_of_a_function_is_the_users_own_and_can_be_exported(found):
    inner = jax.jit(loss)
    outer = jax.jit(jax.grad(lambda w, x: inner(w, x)))
    exported = export.export(outer)(jnp.ones(3), BAD)
    assert exported.serialize()
    assert "callback" not in outer.lower(jnp.ones(3), BAD).as_text()
    (line,) = [line for line in found.lines() if "compiled-ahead" in line]
    assert "what you compile by <lambda>.lower(...).compile()" in line


def test_it_works_under_the_programs_own_transformations(found):
    inner = jax.jit(loss)
    jax.grad(inner)(jnp.ones(3), -BAD)
    jax.vmap(inner, in_axes=(None, 0))(jnp.ones(3), jnp.stack([-BAD, -BAD]))
    assert inner.lower(jnp.ones(3), BAD).compile() is not None
    assert inner.__name__ == "loss"
    assert found.bad() == []
    jax.grad(inner)(jnp.ones(3), BAD)
    assert found.bad()


def test_the_users_own_tracker_owns_what_it_calls(found):
    step = anynan.jax.track(jax.jit(update), action="record")
    step(jnp.ones(3), BAD)
    assert len(step.events) == 1
    assert found.events == []


def test_a_bad_python_number_is_followed_to_what_uses_it(found):
    jax.jit(lambda x: x * 0.0)(np.nan)
    assert found.events[0].operation.name == "multiply"


def test_a_compiled_function_shows_as_itself(found):
    assert repr(jax.jit(update)).startswith("<PjitFunction of ")


def test_what_is_wrong_with_the_program_is_its_own_error(found):
    step = jax.jit(update)
    with pytest.raises(TypeError, match="dot_general|matmul|incompatible") as caught:
        step(jnp.ones(5), BAD)
    assert caught.value.__context__ is None
    assert found.lines() == []


def test_a_function_without_a_state_to_give_back_is_only_warned_of(skipping):
    with pytest.warns(anynan.AnynanWarning, match="the logarithm of a negative number"):
        jax.jit(jnp.log)(BAD)
    with pytest.warns(anynan.AnynanWarning, match="the logarithm of a negative number"):
        w, _ = jax.jit(update)(jnp.ones(3), BAD)
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


@pytest.mark.parametrize("door", ["grad", "value_and_grad", "jacrev"])
def test_a_gradient_outside_of_jit_is_named_by_operation_and_line(door, found):
    plain = getattr(jax, door)(root)
    w, zeros = jnp.ones((3, 2)), jnp.zeros((4, 3))
    for x in (zeros + 1, zeros + 2):
        plain(w, x)
    assert found.bad() == []
    plain(w, zeros)
    (event,) = found.bad()
    assert (event.step, event.operation.name) == (2, "sqrt")
    assert event.operation.source.function == "root"
    assert event.cause.tag == "norm_gradient_at_zero"


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


def test_one_function_made_anew_in_every_step_is_one_function(found):
    w = jnp.ones((3, 2))
    for i in range(6):
        x = jnp.ones((4, 3)) * (i != 3)
        gradient = jax.grad(lambda w, x=x: root(w, x))(w)
        w = jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)
    (event,) = found.bad()
    assert event.step == 3
    (line, *_) = found.lines()
    assert line.startswith("anynan: <lambda>: 1 bad in 6 steps")
    assert any("given-by-another" in line for line in found.lines())


def test_a_jitted_loss_inside_of_a_gradient_is_seen_from_outside(found):
    loss = jax.jit(root)
    jax.grad(loss)(jnp.ones((3, 2)), jnp.zeros((4, 3)))
    (event,) = found.bad()
    assert event.operation.name == "sqrt"


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


@pytest.mark.parametrize("kind", ["partial", "module"])
def test_a_function_that_is_made_anew_in_every_step_is_one_function(kind, found, monkeypatch):
    import equinox as eqx

    class Root(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return jnp.sqrt(x * self.scale)

    looks, again, before = [], Session.again, found.added
    monkeypatch.setattr(Session, "again", lambda *given: (looks.append(given), again(*given)))
    for step in range(6):
        scale = jnp.float32(3 - step)
        root = Root(scale) if kind == "module" else functools.partial(Root.__call__, Root(scale))
        jax.vmap(root)(jnp.ones(2))
    (event,) = found.bad()
    assert (event.step, event.operation.name, len(looks)) == (4, "sqrt", 2)
    assert found.added - before == 1


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


def test_a_nan_that_a_librarys_function_is_given_is_no_fault_of_its(library, found):
    assert library["compiled"](root_of_sum)(jnp.array([1.0, jnp.nan])) != 0
    assert found.bad() == []
    (line,) = found.lines()
    assert line.endswith("[nan-given]")


def test_what_a_library_donates_is_told_without_its_operation(library, found):
    library["compiled"](lambda x: jnp.log(x), donate_argnums=0)(-jnp.ones(2))
    assert found.bad() == []
    assert found.harms == ["<lambda> (solvers) gave NaN, and what it was given was donated"]


def test_an_exception_of_what_a_library_compiles_is_its_own_and_told(library, found):
    import equinox as eqx

    def solve(x):
        new = jnp.sqrt(x - 2)
        better = jnp.where(jnp.isfinite(new), new, x)
        return eqx.error_if(better, better == x, "no progress")

    with pytest.raises(eqx.EquinoxRuntimeError) as caught:
        library["solved"](solve)(jnp.float32(1))
    assert "no progress" in str(caught.value)
    assert "/everywhere/" not in str(caught.value)
    (event,) = found.events
    assert (event.severity, event.operation.name) == ("suspect", "sqrt")
    assert event.notes[0].endswith("[may-have-raised]")


def test_a_method_that_a_library_compiles_stays_one(library, found):
    class Solver:
        def __init__(self):
            self.factor = 2

        def solve(self, x):
            return x * self.factor

    Solver.solve = library["compiled"](Solver.solve, static_argnums=0)
    assert float(Solver().solve(2.0)) == 4


def test_what_a_librarys_own_map_and_method_gave_is_followed_back(library, found, monkeypatch):
    class Solver:
        def best(self, x):
            return x[jnp.argmin(jax.vmap(jnp.sum)(x))]

    monkeypatch.setattr(eager, "CALLS", 9)

    Solver.best = library["compiled"](Solver.best, static_argnums=0)
    x = library["mapped"](lambda x: jnp.log(x) + 1)(jnp.arange(-1.0, 1.0))
    Solver().best(x[:, None])
    for _ in range(20):  # more calls than are held
        x = x * 1
    (event,) = found.bad()
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_negative")


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


def test_a_plain_number_stays_one_when_a_mapped_call_is_made_once_more(found):
    @functools.partial(jax.jit, static_argnames="times")
    def unroll(x, times):
        return x - sum(jnp.log(x - i) for i in range(times))

    unroll(jnp.float32(9), 2)  # it is a step by itself, too
    jax.vmap(unroll, in_axes=(0, None))(jnp.ones(2), 3)
    assert [event.operation.name for event in found.bad()] == ["log"]
    assert not any("[no-second-run]" in line for line in found.lines())


@pytest.mark.parametrize("loop", ["scan", "while_loop", "fori_loop", "map"])
def test_a_loop_outside_of_any_jit_is_named_by_operation_and_line(loop, found):
    def turn(x, *_):
        return jnp.log(x)

    def run(times):
        go = getattr(jax.lax, loop)
        if loop == "scan":
            return go(lambda x, _: (turn(x), None), x, None, length=times)[0]
        if loop == "while_loop":
            return go(lambda s: s[1] < times, lambda s: (turn(s[0]), s[1] + 1), (x, 0))[0]
        if loop == "fori_loop":
            return go(0, times, lambda _, x: turn(x), x)
        return go(turn, x - 2 * (times > 2) * x)

    x = jnp.full(2, 3.0)
    assert not bool(jnp.isnan(run(2)).any())
    assert found.events == []
    assert bool(jnp.isnan(run(5)).all())
    (event,) = found.bad()
    assert event.operation.name == "log"
    assert event.operation.source.text == "return jnp.log(x)"


def test_a_loop_inside_of_a_jit_is_what_it_was(found):
    def plain(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x * 2, x)

    mine = str(jax.make_jaxpr(plain)(1.0))
    with_none = str(jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c, c), 0.0, None, 3))(1.0))
    assert "neg" not in mine + with_none
    assert found.events == []


def root_of_sum(x):
    return jnp.sqrt(x.sum())


@pytest.mark.parametrize("eager", [False, True])
def test_what_a_reported_function_made_is_no_fault_of_the_next(eager, found):
    @jax.jit
    def update(state, x):
        w, m = state
        g = jax.grad(lambda w: jnp.sqrt(jnp.sum((x @ w) ** 2) * 0))(w)
        return w - 0.1 * g, m + g

    @jax.jit
    def evaluate(state, x):
        return jnp.mean(jnp.tanh(x @ state[0]))

    state = jnp.ones((3, 2)), jnp.zeros((3, 2))
    for _ in range(2):
        state = update(state, jnp.ones((4, 3)))
        if eager:
            state = jax.tree.map(lambda a: a * 1, state)
        evaluate(state, jnp.ones((4, 3)))
    assert [event.operation.name for event in found.bad()] == ["sqrt"]
    lines = found.lines()
    assert not any("evaluate: nothing went bad" in line for line in lines)
    assert any("not reported again" in line for line in lines)


def test_what_a_function_closes_over_is_no_fault_of_its_own(found):
    spoilt = jax.jit(lambda v: v - jnp.log(v) / jnp.sum(v * 0))(jnp.ones(4))
    jax.jit(lambda x: jnp.sum(x * spoilt))(jnp.ones(4))
    assert [event.operation.name for event in found.bad()] == ["divide"]
    assert any("not reported again" in line for line in found.lines())


def test_an_infinite_array_that_a_function_closes_over_is_data_and_no_mask(library, found):
    def energy(y, w):
        return -(-0.5 * (y - w) ** 2).sum()

    y = jnp.array([jnp.inf, jnp.inf, -jnp.inf])
    library["sloped"](functools.partial(energy, y))(jnp.ones(()))
    (event,) = found.bad()
    assert (event.operation.name, event.cause.tag) == ("subtract", "bad_input")


@pytest.mark.parametrize("data", [False, True])
def test_what_eager_code_makes_of_a_reported_array_is_no_bad_batch(data, found):
    update = jax.jit(lambda v: v - jnp.log(v) / jnp.sum(v * 0))
    spoilt = update(jnp.ones(4))
    evaluate = jax.jit(lambda w: jnp.sum(w * 2))
    evaluate(np.float32([1, np.nan]) if data else spoilt * 2 + 1)
    tags = ["divide_by_zero", *(["bad_input"] if data else [])]
    assert [event.cause.tag for event in found.bad()] == tags


def test_a_fault_of_its_own_is_told_after_another_functions():
    for found in watched(action="record", level="step"):
        first, second = jax.jit(lambda x: jnp.log(x)), jax.jit(lambda x: jnp.sqrt(x - 3))
        first(-jnp.ones(2))
        second(jnp.ones(2))
        assert [event.operation.name for event in found.bad()] == ["log", "sqrt"]


def test_what_cannot_be_traced_is_told_to_be_bad_all_the_same(found):
    def loss(x):
        return jnp.log(x) if x > 1 else jnp.sqrt(x)

    value, slope = jax.value_and_grad(loss)(0.0)
    assert (float(value), float(slope)) == (0, float("inf"))
    assert found.harms == ["loss gave NaN or Inf in its step 0"]
    assert any("cannot be traced" in note for note in found.notes)


def test_auxiliary_results_of_a_gradient_come_out_as_they_are(found):
    gradient, more = jax.grad(lambda w: (w**2, {"kept": w}), has_aux=True)(3.0)
    assert (float(gradient), float(more["kept"])) == (6, 3)
    assert float(jax.grad(lambda a, b: a * b, 1)(2.0, 3.0)) == 2
    assert float(jax.jit(jax.grad(lambda w: w**2))(3.0)) == 6
    assert found.bad() == []


@pytest.mark.parametrize("squash", [jax.nn.softplus, jax.nn.sigmoid, jnp.exp])
def test_an_update_that_made_a_weight_infinite_is_told_and_not_the_log_of_what_came_of_it(
    squash, found
):
    def loss(params):
        return jnp.log(squash(params["amplitude"])) ** 2

    params = {"amplitude": jnp.ones(())}
    for rate in (0.1, jnp.float32(jnp.inf), 0.1):
        slope = jax.grad(loss)(params)
        params = jax.tree.map(lambda p, g, rate=rate: p - rate * jnp.abs(g), params, slope)
    (event,) = found.bad()
    assert event.phase == "parameter"
    assert event.parameter == "amplitude"
    assert any("inferred" in note for note in event.notes)


def test_layers_of_linen_are_told_in_the_order_of_the_call_as_track_tells_them():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.log(linen.Dense(3)(x) - 9)

    class Net(linen.Module):
        def setup(self):
            self.zeta, self.alpha, self.block = linen.Dense(3), linen.Dense(3), Block()

        def __call__(self, x):
            return self.block(self.alpha(self.zeta(x)))

    net, x = Net(), jnp.ones((2, 3))
    params = net.init(jax.random.key(0), x)

    def step(params, x):
        return jax.grad(lambda p: net.apply(p, x).sum())(params)

    tracked = anynan.jax.track(jax.jit(step), level="layer", action="record")
    tracked(params, x)
    end = watch_everything(Options(action="record", level="layer"), more := Found())
    jax.jit(step)(params, x)
    end()
    (mine,), (theirs,) = tracked.events, more.events
    names = ["zeta", "alpha", "block"]
    assert [name for name, _ in mine.trail] == [name for name, _ in theirs.trail] == names
    assert mine.layer == theirs.layer == "block"


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
