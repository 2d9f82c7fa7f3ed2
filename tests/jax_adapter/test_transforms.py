"""A tracked function inside the caller's own transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)

GOOD, BAD, FLAT = jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0]), jnp.array([1.0, 0.0])


def root(x):
    with jax.named_scope("layer"):
        x = jnp.sqrt(x)
    return x.sum()


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, v: (c + f(v[None]), None), 0.0, x)[0]


def shard(f):
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("i",)), PartitionSpec("i")
    parts = jax.shard_map(lambda x: f(x)[None], mesh=mesh, in_specs=spec, out_specs=spec)
    return lambda x: parts(x).sum()


TRANSFORMS = {
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[:, None]),
    "vmap_grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x[:, None]),
    "scan": scanned,
    "grad_of_scan": lambda f: jax.grad(scanned(f)),
    "grad_of_shard_map": lambda f: jax.grad(shard(f)),
}


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_are_right_and_nothing_is_called_back(name):
    wrap = TRANSFORMS[name]
    tracked = anynan.jax.track(root, action="record")
    mine, theirs = wrap(tracked)(GOOD), wrap(root)(GOOD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, theirs)
    jax.effects_barrier()
    assert (tracked.events, len(tracked.history)) == ((), 0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_bad_run_is_reported_once(name):
    tracked = anynan.jax.track(root, action="record")
    jax.block_until_ready(TRANSFORMS[name](tracked)(BAD))
    jax.effects_barrier()
    forward = [event for event in tracked.events if event.phase != "backward"]
    assert len(forward) == 1
    assert (forward[0].layer, forward[0].phase, forward[0].kind) == ("layer", "forward", "nan")
    assert "track the outermost function" in forward[0].notes[0]


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if "grad" in name])
def test_a_bad_gradient_is_reported_at_its_layer(name):
    tracked = anynan.jax.track(root, action="record")
    jax.block_until_ready(TRANSFORMS[name](tracked)(FLAT))
    jax.effects_barrier()
    (event,) = tracked.events
    assert (event.phase, event.kind) == ("backward", "posinf")


def test_forward_mode_needs_backward_false():
    with pytest.raises(TypeError, match="backward=False"):
        jax.jvp(anynan.jax.track(root), (GOOD,), (GOOD,))
    tracked = anynan.jax.track(root, advanced=anynan.Advanced(backward=False), action="record")
    _, tangent = jax.jvp(tracked, (GOOD,), (GOOD,))
    np.testing.assert_allclose(tangent, jax.jvp(root, (GOOD,), (GOOD,))[1], rtol=1e-6)
    jax.jit(tracked)(BAD)
    jax.effects_barrier()
    assert len(tracked.events) == 1


def test_a_custom_rule_is_kept():
    @jax.custom_vjp
    def doubled(x):
        return x * 2

    doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 7,))
    tracked = anynan.jax.track(lambda x: doubled(x).sum())
    assert jax.grad(tracked)(GOOD).tolist() == [7, 7]


def test_a_slope_that_a_residual_takes_is_told_before_what_its_own_gradient_makes_of_it():
    def field(w, x):
        h = jnp.tanh(x * w)
        return (h * jnp.sqrt(x)).sum()

    def loss(w, points):
        slope = jax.grad(field, argnums=1)
        residuals = jax.vmap(lambda x: slope(w, x) + jax.grad(slope, argnums=1)(w, x))(points)
        return (residuals**2).mean()

    step = anynan.jax.track(jax.jit(jax.value_and_grad(loss)))
    event = failure(step, jnp.ones(4), jnp.array([1.0, 0.5, 0.0]))
    assert (event.kind, event.phase, event.operation.name) == ("posinf", "backward", "sqrt")
    assert event.cause.tag == "sqrt_gradient_at_zero"
    assert not event.others
