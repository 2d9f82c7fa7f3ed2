"""Faults of a training step, and steps that must stay silent, written once for every backend.

A program has three layers, ``scale`` (which multiplies by a weight of ones), ``body`` and
``after``, then a loss; a step computes the loss and the weight's gradient. A recipe says what
``body``, ``after`` and the loss do, over ``ops``: the array API's names, ``softmax`` (over the
last axis), ``stop_gradient``, and ``array(values)``, which makes a constant. The line at fault
ends in ``# bad``. How a program is built and tracked is each backend's own: ``builders_torch``.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anynan.events import Kind, Phase, Severity

NAN, INF = float("nan"), float("inf")
Values = tuple[tuple[float, ...], ...]


def same(ops: Any, x: Any) -> Any:
    return x


def total(ops: Any, x: Any) -> Any:
    return ops.sum(x)


@dataclass(frozen=True)
class StepRecipe:
    """Say what a step does, and what the event of it says.

    Attributes:
        batches: The input of each step.
        kind: What is wrong, None where nothing bad may be reported.
        evidence: What the cause quotes, at least.
        then: Operation that made the first NaN of the origin's Inf.
        spoiled: The weight turns NaN before this step.
        contained: Operation that a watch of every operation shows as contained.
        left: Operation that a step still fails in with this fault repaired.
        enough: Whether its repair is enough.
        but: What is expected otherwise with some builders.
    """

    name: str
    batches: tuple[Values, ...]
    body: Callable[[Any, Any], Any] = same
    after: Callable[[Any, Any], Any] = same
    loss: Callable[[Any, Any], Any] = total
    kind: Kind | None = None
    phase: Phase = "forward"
    layer: str | None = "body"
    operation: str | None = None
    cause: str | None = None
    evidence: str = ""
    then: str | None = None
    severity: Severity = "bad"
    step: int = 0
    dtype: str = "float32"
    spoiled: int | None = None
    contained: str | None = None
    left: str | None = None
    enough: bool = True
    but: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def culprit(self) -> Callable[[Any, Any], Any]:
        """Give the function that holds the line at fault."""
        return self.loss if self.phase == "loss" else self.body


def layered(base: Any, recipe: StepRecipe, ops: Any, weight: Any) -> Any:
    """Make a program's model of a framework's own class of layers, which are called."""

    class Layer(base):
        def __init__(self, call: Any, weight: Any = None) -> None:
            super().__init__()
            self.call, self.weight = call, weight

        def __call__(self, x: Any) -> Any:
            return self.call(x if self.weight is None else x * self.weight)

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Layer(lambda x: x, weight)
            self.body = Layer(functools.partial(recipe.body, ops))
            self.after = Layer(functools.partial(recipe.after, ops))

        def __call__(self, x: Any) -> Any:
            return self.after(self.body(self.scale(x)))

    return Net()


# What goes wrong.


def entropy(ops: Any, p: Any) -> Any:
    logs = ops.log(p)  # bad
    return -(p * logs)


def logarithm(ops: Any, x: Any) -> Any:
    return ops.log(x)  # bad


def root(ops: Any, x: Any) -> Any:
    return ops.sqrt(x)  # bad


def softmax_by_hand(ops: Any, x: Any) -> Any:
    grown = ops.exp(x)  # bad
    return grown / ops.sum(grown, axis=-1, keepdims=True)


def masked_softmax(ops: Any, x: Any) -> Any:
    masked = ops.where(ops.array([[True, True], [False, True]]), -INF, x)
    return ops.softmax(masked)  # bad


def mask_by_multiplying(ops: Any, x: Any) -> Any:
    mask = ops.array([0.0, 1.0])
    return x + mask * -INF  # bad


def shift_of_a_masked_row(ops: Any, x: Any) -> Any:
    masked = ops.where(x > 0, -INF, x)
    return masked - ops.max(masked, axis=-1, keepdims=True)  # bad


def hidden_root(ops: Any, x: Any) -> Any:
    roots = ops.sqrt(x)  # bad
    return ops.where(x > 0, roots, 0.0)


def hidden_logarithm(ops: Any, x: Any) -> Any:
    logs = ops.log(x)  # bad
    return ops.where(x > 0, logs, 0.0)


def log_loss(ops: Any, x: Any) -> Any:
    return ops.sum(ops.log(x - 2.0))  # bad


def limited(ops: Any, x: Any) -> Any:
    return ops.where(x > 9, ops.array([1.0]), x)


FAULTS = (
    StepRecipe(
        "log_of_zero", (((1, 0),),), entropy,
        kind="neginf", operation="log", cause="log_of_zero",
        evidence="log(0.0) at [0, 1]", then="multiply",
    ),
    StepRecipe(
        "log_of_negative", (((1, -0.25),),), logarithm,
        kind="nan", operation="log", cause="log_of_negative", evidence="log(-0.25) at [0, 1]",
    ),
    StepRecipe(
        "divide_by_zero", (((1, 2), (0, 0)),),
        lambda ops, x: x / ops.sum(x, axis=-1, keepdims=True),  # bad
        kind="nan", operation="divide", cause="divide_by_zero", evidence="0.0 / 0.0 at [1, 0]",
    ),
    StepRecipe(
        "sqrt_of_negative", (((1, -4),),), root,
        kind="nan", operation="sqrt", cause="sqrt_of_negative", evidence="sqrt(-4.0) at [0, 1]",
    ),
    StepRecipe(
        "sqrt_gradient_at_zero", (((1, 0),),), root,
        phase="backward", kind="posinf", operation="sqrt", cause="sqrt_gradient_at_zero",
        evidence="sqrt(0.0) at [0, 1]",
    ),
    StepRecipe(
        "power_domain", (((1, 0),),), lambda ops, x: x**-0.5,  # bad
        kind="posinf", operation="pow", cause="power_domain", evidence="0.0 ** -0.5 at [0, 1]",
    ),
    StepRecipe(
        "exp_overflow", (((1, 100),),), softmax_by_hand,
        kind="posinf", operation="exp", cause="exp_overflow", evidence="exp(100.0) at [0, 1]",
        then="divide",
    ),
    StepRecipe(
        "overflow_in_half", (((300, 300), (300, 300)),), lambda ops, x: ops.matmul(x, x),  # bad
        dtype="float16", kind="posinf", operation="matmul", cause="overflow_in_dtype",
        evidence="in float32 the result reaches 180,000; float16 ends at 65,504", left="multiply",
    ),
    StepRecipe(
        "softmax_fully_masked", (((1, 2), (3, 4)),), masked_softmax,
        kind="nan", operation="softmax", cause="softmax_fully_masked",
        evidence="1 row is -inf throughout",
    ),
    StepRecipe(
        "zero_times_inf", (((1, 2),),), mask_by_multiplying,
        kind="nan", operation="multiply", cause="zero_times_inf", evidence="0.0 * -inf at [0]",
    ),
    StepRecipe(
        "inf_minus_inf", (((1, 2),),), shift_of_a_masked_row,
        kind="nan", operation="subtract", cause="inf_minus_inf",
        evidence="-inf - (-inf) at [0, 0]",
    ),
    StepRecipe(
        "where_gradient_trap", (((1, 0),),), hidden_root,
        phase="backward", kind="nan", operation="sqrt", cause="where_gradient_trap",
        evidence="the incoming gradient is exactly 0",
    ),
    StepRecipe(
        "where_gradient_trap_of_inf", (((1, 0),),), hidden_logarithm,
        kind="neginf", operation="log", cause="where_gradient_trap",
        evidence="log(0.0) gave -inf at [0, 1]", then="log",
    ),
    StepRecipe(
        "inverse_trig_domain", (((1, 1.5),),), lambda ops, x: ops.acos(x),  # bad
        kind="nan", operation="acos", cause="inverse_trig_domain", evidence="acos(1.5) at [0, 1]",
    ),
    StepRecipe(
        "in_the_loss", (((1, 3),),), loss=log_loss,
        phase="loss", layer=None, kind="nan", operation="log", cause="log_of_negative",
        evidence="log(-1.0) at [0, 0]",
    ),
    StepRecipe(
        "after_an_inf_that_was_meant", (((1, 3),),), lambda ops, x: ops.where(x > 0, INF, x),
        limited, log_loss,
        phase="loss", layer=None, kind="nan", operation="log", cause="log_of_negative",
        evidence="log(-1.0) at [0, 0]",
    ),
    StepRecipe(
        "in_a_later_step", (((1, 2),), ((1, 2),), ((1, -2),)), logarithm,
        kind="nan", operation="log", cause="log_of_negative", evidence="log(-2.0) at [0, 1]",
        step=2,
    ),
    StepRecipe(
        "bad_input", (((1, 2), (3, 4)), ((1, 2), (NAN, 4))),
        phase="input", layer=None, kind="nan", operation="multiply", cause="bad_input", step=1,
    ),
    StepRecipe(
        "bad_parameter", (((1, 2),), ((1, 2),)), spoiled=1,
        phase="parameter", layer="scale", kind="nan", cause="bad_parameter",
        evidence="1 x NaN of 1 element", step=1,
    ),
)  # fmt: skip


# What goes right, or is only to be noted.


def causal_softmax(ops: Any, x: Any) -> Any:
    return ops.softmax(ops.where(ops.array([[False, True], [False, False]]), -INF, x))


def mask_of_logs(ops: Any, x: Any) -> Any:
    return ops.softmax(x + ops.log(ops.array([[1.0, 0.0], [1.0, 1.0]])))


def masked(ops: Any, x: Any) -> Any:
    return ops.where(ops.array([[False, True], [False, False]]), -INF, x)


def guarded(ops: Any, x: Any) -> Any:
    known = ops.stop_gradient(x)
    return x + ops.where(known > 0, ops.log(known), 0.0)


def double_where(ops: Any, x: Any) -> Any:
    return ops.where(x > 0, ops.sqrt(ops.where(x > 0, x, 1.0)), 0.0)


def capped(ops: Any, x: Any) -> Any:
    return x + ops.minimum(ops.exp(ops.stop_gradient(x)), ops.array([9.0]))


def largest_beside_padding(ops: Any, x: Any) -> Any:
    return ops.max(ops.concat([x, ops.array([[-INF, -INF], [-INF, -INF]])], axis=-1), axis=-1)


def squares(ops: Any, x: Any) -> Any:
    return ops.sum(ops.softmax(x) * ops.softmax(x))


PAIR = (((1, 0), (0.5, 0.25)),)

SILENT = (
    StepRecipe("nothing_special", PAIR * 3),
    StepRecipe("causal_softmax", PAIR * 3, causal_softmax),
    StepRecipe("mask_of_logs", PAIR * 3, mask_of_logs, contained="log"),
    StepRecipe("guarded_logarithm", PAIR * 3, guarded, contained="log"),
    StepRecipe("double_where", PAIR * 3, double_where),
    StepRecipe("capped_exp", (((1, 200), (1, 2)),), capped, contained="exp"),
    StepRecipe("padded_with_inf", PAIR * 3, largest_beside_padding),
    StepRecipe("near_the_end_of_the_dtype", PAIR, lambda ops, x: x * 3e38, loss=squares),
    StepRecipe(
        "masked_scores_leave_a_layer", PAIR * 3, masked, lambda ops, x: ops.softmax(x),
        kind="neginf", severity="suspect",
    ),
)  # fmt: skip
