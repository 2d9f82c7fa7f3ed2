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
from tests.jax_adapter.models import same

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


@pytest.mark.parametrize(
    ("value", "word"),
    [(np.nan, probes.NAN), (np.inf, probes.POSINF), (-np.inf, probes.NEGINF), (1, 0)],
)
def test_a_probe_sees_what_one_shard_alone_holds(value, word):
    x = jax.device_put(jnp.zeros(16).at[13].set(value), NamedSharding(MESH, SPLIT))
    assert jax.jit(probes.code)(x) == word
    row = jax.jit(probes.ends)(x)
    assert row[0] == word
    assert np.isfinite(row).all()


X = np.arange(1.0, 17.0, dtype=np.float32)
BAD = X.copy()
BAD[5] = -1


def test_shard_map_names_the_shard():
    roots = jax.shard_map(lambda x: jnp.sqrt(x) * 2, mesh=MESH, in_specs=SPLIT, out_specs=SPLIT)
    event = failure(anynan.jax.track(lambda x: roots(x).sum()), jnp.array(BAD))
    assert (event.operation.name, event.shard, event.kind) == ("sqrt", 2, "nan")
    assert event.cause.evidence == "sqrt(-1.0) at [1]"
    assert "shard 2" in render(event)


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
def test_an_update_by_hand_that_one_replica_spoilt_is_dropped_on_all(way):
    fn, weights, batch = WAYS[way]()
    tracked = anynan.jax.track(fn, action="skip")
    with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
        w, loss = tracked(jnp.ones(weights), jnp.array(BAD).reshape(batch))
    assert (w == 1).all()
    assert jnp.isnan(loss).all()
    (event,) = tracked.events
    assert (event.operation.name, event.shard) == ("log", 2)
    good = jnp.array(X).reshape(batch)
    assert same(tracked(jnp.ones(weights), good), fn(jnp.ones(weights), good))


@pytest.mark.parametrize("around", [jax.jit, functools.partial(jax.pmap, axis_name="i")])
def test_dropping_updates_inside_the_callers_own_program_is_refused(around):
    step = anynan.jax.track(lambda w, x: (w - jnp.log(w * x).sum(), x.sum()), action="skip")
    with pytest.raises(ValueError, match="cannot drop an update inside your own jit"):
        around(step)(jnp.ones(8), jnp.array(BAD[:8]))
