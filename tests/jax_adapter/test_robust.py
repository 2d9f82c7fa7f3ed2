"""The user's program goes on, whatever becomes of the watching."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import anynan
from anynan.jax.graphs import graph
from anynan.jax.program import program, signature
from anynan.jax.read import probes
from anynan.jax.replay import replay
from anynan.jax.session import taps
from tests.failing import failure
from tests.flat import split


class Hostile:
    """Raise at everything but being a static part of a tree."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError


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
    handle, x = Hostile(), jnp.array([value])
    arguments = [
        (Held(x, handle), lambda a: a.x),
        ({Key(): x}, lambda a: next(iter(a.values()))),
        ((x, handle), lambda a: a[0]),
    ]
    for argument, get in arguments:

        def fn(a, get=get):
            assert handle is not None
            return {"out": jnp.log(get(a)).sum()}

        tracked = anynan.jax.track(fn, action="record")
        out = tracked(argument)["out"]
        assert (jnp.isfinite(out)) == (value > 0)
        assert [event.operation.name for event in tracked.events] == ["log"] * (value < 0)


def fail(*_args, **_kwargs):
    raise RuntimeError("broken inside")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (graph.Graph, "_follow"),
        (probes, "total"),
        (signature, "static_arguments"),
        (program, "named"),
    ],
)
def test_a_program_that_cannot_be_taken_apart_runs_as_it_is(place, name, monkeypatch):
    monkeypatch.setattr(place, name, fail)
    tracked = anynan.jax.track(jax.jit(lambda x: {"y": jnp.log(x)}))
    with pytest.warns(anynan.AnynanWarning, match="runs unwatched.*broken inside"):
        out = tracked(jnp.ones(2))
    assert float(out["y"].sum()) == 0
    assert float(tracked(jnp.ones(2))["y"].sum()) == 0


@pytest.mark.parametrize("options", [{}, {"level": "operation"}])
@pytest.mark.filterwarnings("ignore:anynan. level='operation' does not see")
def test_a_replay_that_fails_leaves_a_report(options, monkeypatch):
    monkeypatch.setattr(replay, "record", fail)

    def fn(x):
        with jax.named_scope("layer"):
            return jnp.log(x)

    tracked = anynan.jax.track(fn, **split(options))
    event = failure(tracked, -jnp.ones(2))
    assert (event.layer, event.operation) == ("layer", None)
    assert any("broken inside" in note for note in (*event.notes, *tracked.notes))


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


def test_the_gradients_come_out_where_they_cannot_be_read(monkeypatch):
    monkeypatch.setattr(taps, "Layers", fail)
    tracked = anynan.jax.track(lambda x: jnp.sum(x**2))
    with pytest.warns(anynan.AnynanWarning, match="gradients.*were not read.*broken inside"):
        assert jax.grad(tracked)(jnp.ones(2)).tolist() == [2, 2]


def test_a_cached_partial_of_nnx_trains_on():
    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)

    def trained(wrap):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
        cached = nnx.cached_partial(wrap(step), model, optimizer)
        for _ in range(3):
            cached(jnp.ones((4, 2)))
        return model.kernel[...].tolist()

    assert trained(anynan.jax.track) == trained(lambda step: step)
