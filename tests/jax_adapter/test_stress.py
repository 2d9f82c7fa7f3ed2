"""A hunt over functions of JAX's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan
import anynan.jax.stress

nnx = pytest.importorskip("flax.nnx")

X = jax.random.normal(jax.random.key(0), (6, 3))


def _place(finding: Any) -> tuple[str, str]:
    operation = finding.event.operation
    return operation.name, operation.source.text


def test_the_gradient_of_what_a_mask_hides_is_told_apart() -> None:
    def logs(x: Any, many: Any) -> Any:
        return jnp.where(x > 0, jnp.log(x), 0.0).sum(), many + 1

    report = anynan.stress(logs, jnp.linspace(-1, 1, 8).reshape(4, 2), jnp.arange(3))
    (finding,) = report.findings
    assert (finding.group, _place(finding)[0], finding.inputs.keys()) == (
        "sloped",
        "log",
        {"x", "many"},
    )
    assert "0 times Inf is NaN" in finding.event.cause.text
    gradient = jax.grad(lambda x: logs(x, 0)[0])  # it takes the gradient itself
    assert anynan.stress(gradient, X).findings[0].group == "inside"


def test_the_slopes_of_all_edges_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    once = anynan.jax.stress.jit_once
    monkeypatch.setattr(anynan.jax.stress, "jit_once", lambda fn: made.append(fn) or once(fn))

    def loss(x: Any) -> Any:
        return (jnp.log(x + 3.5) / jnp.sqrt(x + 3.6) + jnp.exp(x)).sum()

    report = anynan.stress(loss, jnp.linspace(-3, 2, 6), domain=(-3, 2))
    assert {"log", "sqrt", "divide", "exp"} <= {x.site.operation for x in report.margins}
    assert report.runs > 20
    assert len(made) == 2  # and one with the gradient


def test_a_module_that_changes_in_each_call_is_run_as_a_copy() -> None:
    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return jnp.log(abs(self.inner(x)))

    model = Counting()
    for target, given in ((model, ()), (lambda m, x: m(x), (model,))):
        report = anynan.stress(target, *given, X, budget=5)
        assert [m.site.operation for m in report.margins] == ["log"]
    assert model.calls[...] == 0


def test_a_function_that_takes_arrays_of_numpy_to_jax_is_jax_s() -> None:
    x = np.linspace(0.1, 1, 8, dtype="float32")
    report = anynan.stress(lambda x: jnp.log(x).sum(), x)
    assert _place(report.findings[0])[0] == "log"
