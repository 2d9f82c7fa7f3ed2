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
    with pytest.raises(TypeError, match=f"is an? {word} function.*no step to trace") as caught:
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
@pytest.mark.filterwarnings("ignore:anynan. level='operation' could not look")
def test_a_replay_that_fails_leaves_a_report(options, monkeypatch):
    from anynan.jax.replay import replay

    monkeypatch.setattr(replay, "record", fail)

    def fn(x):
        with jax.named_scope("layer"):
            return jnp.log(x)

    tracked = anynan.jax.track(fn, **options)
    with pytest.raises(anynan.NonFiniteError) as caught:
        tracked(-jnp.ones(2))
    event = caught.value.event
    assert (event.layer, event.operation) == ("layer", None)
    assert any("broken inside" in note for note in (*event.notes, *tracked.notes))


def test_the_first_call_of_a_process_may_be_inside_a_jit():
    code = """
        import anynan, jax, jax.numpy as jnp
        step = anynan.jax.track(lambda x: jnp.log(x).sum())
        assert float(jax.jit(lambda x: step(x))(jnp.ones(3))) == 0
        assert float(step(jnp.ones(3))) == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
