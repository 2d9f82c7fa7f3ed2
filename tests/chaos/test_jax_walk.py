"""Random walks through what a JAX program may do, beside a twin that nobody tracks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

jax: Any = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import anynan  # noqa: E402
from tests.chaos import twins  # noqa: E402
from tests.flat import split  # noqa: E402

pytestmark = pytest.mark.tier(2)

OPTIONS = st.fixed_dictionaries(
    {"action": st.sampled_from(["record", "warn", "raise"])},
    optional={"replay": st.just(False), "read": st.sampled_from(["end", 3])},
)


def loss(weights: Any, x: Any, bad: Any) -> Any:
    """Hold a scan, a condition and a guard; bad is 0 or 1, so that one program does both."""

    def body(carry: Any, row: Any) -> Any:
        return jnp.tanh(carry @ weights["w"] + row), carry.sum()

    carry, sums = jax.lax.scan(body, jnp.zeros(3), x)
    carry = jax.lax.cond(carry.sum() > 0, jnp.sin, jnp.cos, carry)
    guarded = jnp.where(sums > 0, jnp.log(jnp.where(sums > 0, sums, 1.0)), 0.0)
    return (carry * weights["b"]).sum() + guarded.sum() + jnp.log(1 - 2 * bad) * weights["b"].sum()


def step(weights: Any, x: Any, bad: Any) -> Any:
    value, slopes = jax.value_and_grad(loss)(weights, x, bad)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes)


WAYS: dict[str, Callable[..., Any]] = {
    "plainly": lambda fn, weights, x, bad: fn(weights, x, bad),
    "jitted": lambda fn, *args: jax.jit(lambda *args: fn(*args))(*args),
    "for each": lambda fn, weights, x, bad: jax.vmap(lambda row: fn(weights, row, bad))(
        jnp.stack([x, x + 1])
    ),
    "in a thread": lambda fn, *args: twins.threaded(lambda: fn(*args)),
    "wrongly": lambda fn, weights, x, bad: fn(weights, x[:, :2], bad),
}


def process() -> dict[str, Any]:
    values = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_debug_nans")}
    return {**twins.process(), **values}


class Walk(twins.Doors, RuleBasedStateMachine):
    """Run the same step twice, under a tracker and without one."""

    process = staticmethod(process)

    @initialize(compiled=st.booleans())
    def begin(self, compiled: bool) -> None:
        step(weights := {"w": jnp.eye(3) * 0.5, "b": jnp.ones(3)}, jnp.ones((4, 3)), 0.0)
        self.before = self.process()
        self.plain = jax.jit(step) if compiled else step
        self.run: Any = self.plain
        self.weights = weights

    @rule(
        k=twins.SEEDS,
        rows=st.sampled_from([4, 5]),
        bad=st.booleans(),
        way=st.sampled_from(["plainly", *WAYS]),
    )
    def call(self, k: int, rows: int, bad: bool, way: str) -> None:
        x = jnp.asarray(np.random.default_rng(k).normal(size=(rows, 3)), dtype=jnp.float32)
        args = self.weights, x, jnp.float32(bad)
        twins.seed(k)
        with twins.quiet():
            one = twins.outcome(lambda: WAYS[way](self.plain, *args))
            drawn = twins.generators()
            self.was_bad = self.was_bad or bad
            try:
                two = twins.outcome(lambda: WAYS[way](self.run, *args))
            except anynan.AnomalyError:
                assert self.was_bad
                return
        assert drawn == twins.generators()
        if way == "wrongly":  # how much of a shape error is told may differ
            assert one[0] == two[0]
            return
        assert jax.tree.structure(one) == jax.tree.structure(two)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        if way == "plainly" and not bad:
            self.weights = one[1]

    @precondition(lambda self: self.tracker is None)
    @rule(options=OPTIONS)
    def track(self, options: dict[str, Any]) -> None:
        self.tracker = self.run = anynan.jax.track(self.plain, **split(options))
        self.was_bad = False

    def end(self) -> None:
        super().end()
        self.run = self.plain


def test_a_tracked_function_and_its_twin(amount: Any) -> None:
    amount(Walk, examples=2, steps=10)
