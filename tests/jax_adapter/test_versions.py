"""What another version of JAX may bring: an unknown primitive, a parameter that has changed.

Either costs what is inside that one equation, with a note. The equations are made as JAX makes its
own: a primitive of that name, with its parameters.
"""

import warnings
from collections.abc import Callable
from typing import Any

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


def root(x):
    return Root().apply({}, x)


def bound(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Make what binds a primitive of this name; what it computes is ``run`` of its operands."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def shapes(*avals: Any, **_: Any) -> list[Any]:
        found = jax.eval_shape(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]

    primitive.def_impl(lambda *args, **_: run(*args))
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda *a, **_: run(*a), True))
    return primitive.bind


def code(fn: Callable[..., Any], *like: Any) -> Any:
    return jax.make_jaxpr(fn)(*like)


def turns(x):
    return [lax.scan(lambda c, v: (c + root(v), c), jnp.float32(0), x)[0]]


ONE, ROW = jnp.float32(1), jnp.ones(3)
HALF = code(lambda c, v: (c + root(v), c), ONE, ONE)
SCAN = {"jaxpr": HALF, "length": 3, "reverse": False, "unroll": 1}
WHILE = {
    "cond_jaxpr": code(lambda i, x: i < 2, 0, ROW), "cond_nconsts": 0,
    "body_jaxpr": code(lambda i, x: (i + 1, root(x)), 0, ROW), "body_nconsts": 0,
}  # fmt: skip


def rooted(x):
    return [root(x)]


def counted(i, x):
    return [i + 2, root(root(x))]


# What JAX would call it, what it computes, its operands, its parameters.
PLANTED: dict[str, tuple[str, Any, Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = {
    "an unknown primitive": ("roll", rooted, lambda x: (x,), {"jaxpr": code(rooted, ROW)}),
    "scan with a new parameter": (
        "scan", turns, lambda x: (x,), {**SCAN, "num_consts": 0, "num_carry": 0, "stop": 2},
    ),
    "while with a new parameter": (
        "while", counted, lambda x: (0, x), {**WHILE, "at_most": 2},
    ),
    "while that goes on elsewhere": (
        "while", counted, lambda x: (0, x),
        {**WHILE, "cond_jaxpr": code(lambda i: i < 2, 0)},
    ),

}  # fmt: skip


@pytest.fixture(params=PLANTED)
def planted(request):
    name, run, operands, params = PLANTED[request.param]
    bind = bound(name, run)
    return name, lambda x: bind(*operands(x), **params)[-1]


def test_it_costs_what_is_inside_and_is_noted(planted):
    name, inner = planted

    def fn(x):
        return jnp.log(inner(x) + 1.0).sum()

    step = anynan.jax.track(fn, action="record")
    with pytest.warns(anynan.AnynanWarning, match=f"^anynan: {name} {SPREAD}"):
        assert step(ROW) == jax.jit(fn)(ROW)
    assert not step.events

    step(-ROW * 4)
    (event,) = step.events
    assert event.operation.name == name
    assert "bind(*operands(x)" in event.operation.source.text


def test_what_is_around_it_is_told_as_ever(planted):
    """The function goes on being watched, before the equation and in a loop around it."""
    _, inner = planted

    def before(x):
        return inner(jnp.log(x)).sum()

    def around(x):
        return lax.scan(
            lambda c, s: (c, (inner(c) * 0 + jnp.log(s)).sum()), x, jnp.arange(3.0) - 1
        )[1]

    for fn, line in ((before, "inner(jnp.log"), (around, "jnp.log(s)")):
        step = anynan.jax.track(fn, action="record")
        with warnings.catch_warnings(action="ignore", category=anynan.AnynanWarning):
            step(ROW * (-1 if fn is before else 1))
        (event,) = step.events
        assert (event.operation.name, line in event.operation.source.text) == ("log", True)
