"""What another version of JAX may bring: an unknown primitive, a parameter that has changed.

Either costs what is inside that one equation, with a note. The equations are made as JAX makes its
own: a primitive of that name, with its parameters.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import anynan

pytestmark = pytest.mark.tier(2)

SPREAD = "is a black box: anynan watches what comes out of it, not what happens inside"


class Root(nn.Module):
    def __call__(self, x):
        return jnp.sqrt(x)


def rooted(x):
    return [Root().apply({}, x)]


def turns(x):
    return [lax.scan(lambda c, v: (c + rooted(v)[0], c), jnp.float32(0), x)[0]]


def bound(name, run, params):
    """Make what binds a primitive of this name; what it computes is ``run``."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def shapes(x, **_):
        (found,) = jax.eval_shape(run, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [jax.core.ShapedArray(found.shape, found.dtype)]

    primitive.def_impl(lambda x, **_: run(x))
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, **_: run(x), True))
    return lambda x: primitive.bind(x, **params)[0]


ROW = jnp.ones(3)
HALF = jax.make_jaxpr(lambda c, v: (c + rooted(v)[0], c))(ROW[0], ROW[0])
SCAN = {"jaxpr": HALF, "length": 3, "reverse": False, "unroll": 1, "num_consts": 0, "num_carry": 0}
# What it computes, and its parameters, of which that of the scan is new.
PLANTED = {
    "roll": (rooted, {"jaxpr": jax.make_jaxpr(rooted)(ROW)}),
    "scan": (turns, {**SCAN, "stop": 2}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_costs_what_is_inside_and_is_noted(name):
    inner = bound(name, *PLANTED[name])
    noted = pytest.warns(anynan.AnynanWarning, match=f"^anynan: {name} {SPREAD}")

    def fn(x):
        return jnp.log(inner(x) + 1.0).sum()

    step = anynan.jax.track(fn, action="record")
    with noted:
        assert step(ROW) == jax.jit(fn)(ROW)
    assert not step.events
    step(-ROW * 4)
    (event,) = step.events
    assert event.operation.name == name
    assert "primitive.bind(x" in event.operation.source.text
    before = anynan.jax.track(lambda x: inner(jnp.log(x)).sum(), action="record")
    with noted:
        before(-ROW)
    assert [event.operation.name for event in before.events] == ["log"]
