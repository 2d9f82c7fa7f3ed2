"""The user's program goes on, whatever becomes of the watching."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import anynan
from anynan.jax.graphs import graph
from anynan.jax.read import probes
from tests.failing import failure
from tests.flat import split


async def coroutine(x):
    return jnp.log(x)


def generator(x):
    yield jnp.log(x)


async def both(x):
    yield jnp.log(x)


class Callable:
    async def __call__(self, x):
        return jnp.log(x)

    def rounds(self, x):
        yield x


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (coroutine, "async"),
        (generator, "generator"),
        (both, "generator"),
        (functools.partial(coroutine), "async"),
        (functools.partial(generator), "generator"),
        (Callable(), "async"),
        (Callable().rounds, "generator"),
    ],
)
def test_a_function_that_returns_before_it_runs_is_refused(target, word):
    with pytest.raises(TypeError, match=f"the body of an? {word} function runs after") as caught:
        anynan.jax.track(target)
    assert "\n" not in str(caught.value)


class Hostile:
    """Raise at everything but being a static part of a tree."""

    def __getattr__(self, name):
        msg = f"remote attribute {name}"
        raise RuntimeError(msg)

    def __repr__(self):
        msg = "no repr"
        raise RuntimeError(msg)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["handle", "keys"]
)
class Held:
    """Hold an array beside a hostile object."""

    def __init__(self, x, handle, keys=()):
        self.x, self.handle, self.keys = x, handle, keys


class Key(Hostile):
    """Be a key of a dict."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return isinstance(other, Key)

    def __lt__(self, other):
        return False


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_arguments_that_raise_when_they_are_looked_at(value):
    handle = Hostile()
    arguments = [
        lambda x: (Held(x, handle), lambda a: a.x),
        lambda x: ({Key(): x}, lambda a: next(iter(a.values()))),
        lambda x: ((x, handle), lambda a: a[0]),
    ]
    for make in arguments:
        argument, get = make(jnp.array([value]))

        def fn(a, get=get):
            assert handle is not None
            return {"out": jnp.log(get(a)).sum()}

        tracked = anynan.jax.track(fn, action="record")
        out = tracked(argument)["out"]
        assert (jnp.isfinite(out)) == (value > 0)
        assert [event.operation.name for event in tracked.events] == ["log"] * (value < 0)


def fail(*_args, **_kwargs):
    msg = "broken inside"
    raise RuntimeError(msg)


@pytest.mark.parametrize(("place", "name"), [(graph.Graph, "_follow"), (probes, "total")])
def test_a_program_that_cannot_be_taken_apart_runs_as_it_is(place, name, monkeypatch):
    monkeypatch.setattr(place, name, fail)
    tracked = anynan.jax.track(lambda x: {"y": jnp.log(x)})
    with pytest.warns(anynan.AnynanWarning, match="runs unwatched.*broken inside"):
        out = tracked(jnp.ones(2))
    assert float(out["y"].sum()) == 0
    assert float(tracked(jnp.ones(2))["y"].sum()) == 0
    assert len(tracked.notes) == 1


def test_the_users_own_failure_at_run_time_is_his_own():
    def host(x):
        msg = "the disk is full"
        raise OSError(msg)

    def fn(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x).sum()

    tracked = anynan.jax.track(fn)
    with pytest.raises(Exception, match="the disk is full"):
        jax.block_until_ready(tracked(jnp.ones(())))
    assert tracked.notes == ()


@pytest.mark.parametrize("options", [{}, {"level": "operation"}])
@pytest.mark.filterwarnings("ignore:anynan. level='operation' does not see")
def test_a_replay_that_fails_leaves_a_report(options, monkeypatch):
    from anynan.jax.replay import replay

    monkeypatch.setattr(replay, "record", fail)

    def fn(x):
        with jax.named_scope("layer"):
            return jnp.log(x)

    tracked = anynan.jax.track(fn, **split(options))
    event = failure(tracked, -jnp.ones(2))
    assert (event.layer, event.operation) == ("layer", None)
    assert any("broken inside" in note for note in (*event.notes, *tracked.notes))


@pytest.mark.tier(2)
def test_the_first_call_of_a_process_may_be_inside_a_jit():
    code = """
        import anynan, jax, jax.numpy as jnp
        step = anynan.jax.track(lambda x: jnp.log(x).sum())
        assert float(jax.jit(lambda x: step(x))(jnp.ones(3))) == 0
        assert float(step(jnp.ones(3))) == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_what_the_callers_trace_made_is_no_number(recwarn):
    @jax.jit
    def objective(params, seed):
        drawn = jax.random.normal(jax.random.key(seed), (4, *params.shape))
        return jnp.mean(jax.vmap(lambda p, r: jnp.sum((p + r) ** 2), (None, 0))(params, drawn))

    def update(function):
        return jax.jit(lambda seed, params: jax.grad(function)(params, seed))

    plain = update(objective)(0, jnp.zeros(2)).tolist()
    tracked = anynan.jax.track(objective, action="record")
    assert update(tracked)(0, jnp.zeros(2)).tolist() == plain
    inner = anynan.jax.track(objective, action="record")
    whole = anynan.jax.track(update(inner), action="record")  # a trace tells what is static
    assert whole(0, jnp.zeros(2)).tolist() == plain
    assert tracked.notes == inner.notes == whole.notes == ()
    assert not recwarn.list


def test_numbers_inside_the_callers_jit_are_no_step_of_their_own():
    tracked = anynan.jax.track(lambda x: jnp.log(x).sum(), action="record")
    table = jnp.ones(3)
    assert float(jax.jit(lambda y: tracked(table) + y)(1.0)) == 1
    assert float(jax.grad(lambda y: tracked(table) + y)(1.0)) == 1
    jax.jit(lambda y: tracked(-table) + y)(1.0)
    jax.effects_barrier()
    assert [event.kind for event in tracked.events] == ["nan"]


def test_the_gradients_come_out_where_they_cannot_be_read(monkeypatch):
    from anynan.jax.session import taps

    monkeypatch.setattr(taps, "Layers", fail)
    tracked = anynan.jax.track(lambda x: jnp.sum(x**2))
    with pytest.warns(anynan.AnynanWarning, match="gradients.*were not read.*broken inside"):
        assert jax.grad(tracked)(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["static_arguments", "flatten"])
def test_arguments_that_cannot_be_taken_apart_are_handed_on(name, monkeypatch):
    from anynan.jax.program import signature

    monkeypatch.setattr(signature, name, fail)
    tracked = anynan.jax.track(jax.jit(jnp.sin))
    with pytest.warns(anynan.AnynanWarning, match="runs unwatched.*broken inside"):
        assert float(tracked(jnp.zeros(()))) == 0


def test_what_cannot_be_named_is_traced_by_the_function_itself(monkeypatch):
    from anynan.jax.program import program

    monkeypatch.setattr(program, "named", fail)
    tracked = anynan.jax.track(jax.jit(jnp.sin))
    with pytest.warns(anynan.AnynanWarning, match="runs unwatched.*broken inside"):
        assert float(tracked(jnp.zeros(()))) == 0
    assert float(tracked(jnp.zeros(()))) == 0


def test_a_cached_partial_of_nnx_trains_on():
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    def trained(wrap):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

        @wrap
        @nnx.jit
        def step(model, optimizer, x):
            gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
            optimizer.update(model, gradients)

        cached = nnx.cached_partial(step, model, optimizer)
        for _ in range(3):
            cached(jnp.ones((4, 2)))
        return model.kernel[...].tolist()

    assert trained(anynan.jax.track) == trained(lambda step: step)
