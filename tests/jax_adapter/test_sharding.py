"""Several devices: arrays spread over them, and programs that know of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import anynan
from anynan._reports.report import render
from anynan.jax.read import probes
from tests.failing import failure
from tests.jax_adapter.models import made, same

pytestmark = [
    pytest.mark.tier(2),
    pytest.mark.skipif(
        jax.device_count() < 8,
        reason="needs 8 devices: JAX was started before the tests asked for them",
    ),
]
MESH = Mesh(np.array(jax.devices()[:8]), ("i",)) if jax.device_count() >= 8 else None
P = PartitionSpec
SPLIT = P("i")


def spread(x, spec=SPLIT):
    return jax.device_put(x, NamedSharding(MESH, spec))


@pytest.mark.parametrize(
    ("value", "word"),
    [(np.nan, probes.NAN), (np.inf, probes.POSINF), (-np.inf, probes.NEGINF), (1, 0)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64])
def test_a_probe_sees_what_one_shard_alone_holds(value, word, dtype):
    x = spread(jnp.zeros(16, dtype).at[13].set(value))
    assert jax.jit(probes.code)(x) == word
    row = jax.jit(probes.ends)(x)
    assert row[0] == word
    assert np.isfinite(row).all()


def sharded(fn, out=SPLIT):
    return jax.shard_map(fn, mesh=MESH, in_specs=P("i"), out_specs=out)


def caught(fn, *args):
    return failure(anynan.jax.track(fn), *args)


X = np.arange(1.0, 17.0, dtype=np.float32)
BAD = X.copy()
BAD[5] = -1


def test_shard_map_names_the_shard():
    def fn(x):
        return sharded(lambda x: jnp.sqrt(x) * 2)(x).sum()

    event = caught(fn, jnp.array(BAD))
    assert (event.operation.name, event.shard, event.kind) == ("sqrt", 2, "nan")
    assert event.cause.evidence == "sqrt(-1.0) at [1]"
    assert "shard 2" in render(event)


def test_a_collective_spreads_what_one_shard_made():
    def fn(x):
        return sharded(lambda x: jax.lax.psum(jnp.sqrt(x), "i"), P())(x).sum()

    event = caught(fn, jnp.array(BAD))
    assert (event.operation.name, event.shard) == ("sqrt", 2)


def test_a_loop_inside_shard_map():
    def local(x):
        def step(carry, item):
            return carry + jnp.sqrt(item), None

        return jax.lax.scan(step, x[0] * 0, x)[0][None]

    event = caught(lambda x: sharded(local)(x).sum(), jnp.array(BAD))
    assert (event.operation.name, event.shard, event.iteration) == ("sqrt", 2, 1)


def test_a_gradient_through_shard_map():
    def fn(x):
        return jax.grad(lambda x: sharded(jnp.sqrt)(x).sum())(x)

    x = np.abs(BAD)
    x[5] = 0
    event = caught(fn, jnp.array(x))
    assert (event.operation.name, event.phase, event.shard) == ("sqrt", "backward", 2)


@pytest.mark.parametrize("name", ["shard_map", "collective", "jit"])
def test_results_are_those_of_jit(name):
    fns = {
        "shard_map": lambda x: sharded(lambda x: jnp.sqrt(x) * 2)(x),
        "collective": lambda x: sharded(lambda x: jax.lax.psum(x, "i"), P())(x),
        "jit": lambda x: jnp.sort(x) * 2,
    }
    x = spread(jnp.array(X))
    tracked = anynan.jax.track(fns[name])
    assert same(tracked(x), jax.jit(fns[name])(x))
    assert tracked.events == ()


def test_a_sharded_training_step():
    step, params, state, x = made("log")
    x = spread(jnp.tile(jnp.abs(x) * 0, (8, 1)), P("i"))
    event = caught(step, spread(params, P()), spread(state, P()), x)
    assert (event.layer, event.operation.name, event.kind) == ("head", "log", "neginf")
    assert event.cause.tag == "log_of_zero"


def test_shardings_that_the_users_jit_asks_for():
    out = NamedSharding(MESH, P("i"))

    @functools.partial(jax.jit, out_shardings=out)
    def fn(x):
        return jnp.log(x)

    tracked = anynan.jax.track(fn, action="record")
    assert tracked(jnp.array(X)).sharding.is_equivalent_to(out, 1)
    tracked(jnp.array(BAD))
    assert tracked.events[0].operation.name == "log"


def test_pmap():
    fn = jax.pmap(lambda x: jnp.log(x))
    event = caught(lambda x: fn(x).sum(), jnp.array(BAD).reshape(8, 2))
    assert event.operation.name == "log"


def update(w, x):
    """Update by hand, on each device with its own part of the batch."""
    loss, slope = jax.value_and_grad(lambda w: jnp.log(w * x).sum())(w)
    return w - 0.1 * jax.lax.pmean(slope, "i"), jax.lax.pmean(loss, "i")


WAYS = {
    "shard_map": lambda: (
        jax.shard_map(update, mesh=MESH, in_specs=(P(), P("i")), out_specs=(P(), P())), (), (16,)
    ),
    "pmap": lambda: (jax.pmap(update, axis_name="i"), (8,), (8, 2)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["step", "layer"])
def test_an_update_by_hand_that_one_replica_spoilt_is_dropped_on_all(way, level):
    fn, weights, batch = WAYS[way]()
    tracked = anynan.jax.track(fn, action="skip", level=level)
    with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
        w, loss = tracked(jnp.ones(weights), jnp.array(BAD).reshape(batch))
    assert (w == 1).all()
    assert jnp.isnan(loss).all()
    (event,) = tracked.events
    assert (event.operation.name, event.shard) == ("log", 2)
    good = jnp.array(X).reshape(batch)
    assert same(tracked(jnp.ones(weights), good), fn(jnp.ones(weights), good))


def test_replicas_that_each_have_their_weights_keep_the_old_ones_together():
    def alone(w, x):
        loss, slope = jax.value_and_grad(lambda w: jnp.log(w * x).sum())(w)
        return w - 0.1 * slope, loss

    step = anynan.jax.track(jax.pmap(alone), action="warn", advanced=anynan.Advanced(patience=1))
    with pytest.warns(anynan.AnynanWarning, match="skipped 1 of 1 bad steps"):
        w, loss = step(jnp.ones(8), jnp.array(BAD).reshape(8, 2))
    assert w.tolist() == [1] * 8
    assert jnp.isnan(loss).tolist() == [i == 2 for i in range(8)]


@pytest.mark.parametrize("around", [jax.jit, functools.partial(jax.pmap, axis_name="i")])
def test_dropping_updates_inside_the_callers_own_program_is_refused(around):
    step = anynan.jax.track(lambda w, x: (w - jnp.log(w * x).sum(), x.sum()), action="skip")
    with pytest.raises(ValueError, match="cannot drop an update inside your own jit"):
        around(step)(jnp.ones(8), jnp.array(BAD[:8]))
