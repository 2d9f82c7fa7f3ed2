"""Every cause that the body of a layer can produce, produced for real on every backend that can.

The programs are those of ``recipes_operations``, over a few more names of ``ops``; ``NOT_IN`` has
the reason where a backend cannot run one. What takes more than a layer's body, such as an
optimizer, or a function that one framework alone has, is in that adapter's ``test_causes.py``.
"""

import importlib
from typing import Any

from tests.conformance.recipes_operations import FAULTS, INF, StepRecipe


def entropy_without_forward_nan(ops: Any, x: Any) -> Any:
    y = x + 0
    return -ops.xlogy(x, y)  # bad


def inf_over_inf(ops: Any, x: Any) -> Any:
    both = ops.where(x > 0, INF, x)
    return both / both  # bad


def normalize(ops: Any, x: Any) -> Any:
    lengths = ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True))
    cosine_similarity = x / lengths  # bad
    return cosine_similarity  # noqa: RET504


def exp_with_a_large_gradient(ops: Any, x: Any) -> Any:
    grown = ops.exp(x)  # bad
    return (grown - ops.stop_gradient(grown)) * 1e10


def masked_log_softmax(ops: Any, x: Any) -> Any:
    masked = ops.where(x > 2, -INF, x)
    return ops.log_softmax(masked)  # bad


def forced_choice(ops: Any, x: Any) -> Any:
    scores = ops.where(x > 1, INF, x)
    return ops.softmax(scores)  # bad


def masked_target(ops: Any, x: Any) -> Any:
    scores = ops.where(x > 2, -INF, x)
    return ops.losses_of_class_1(scores)  # bad


CAUSES = (
    StepRecipe(
        "log1p_of_minus_one", (((0.5, 1),),), lambda ops, x: ops.log1p(-x),  # bad
        kind="neginf", operation="log1p", cause="log_of_zero", evidence="log1p(-1.0) at [0, 1]",
    ),
    StepRecipe(
        "logit_of_one", (((0.5, 1),),), lambda ops, x: ops.logit(x),  # bad
        kind="posinf", operation="logit", cause="logit_of_zero_or_one",
        evidence="logit(1.0) at [0, 1]",
    ),
    StepRecipe(
        "entropy_without_forward_nan", (((0.5, 0),),), entropy_without_forward_nan,
        phase="backward", kind="nan", operation="xlogy", cause="log_gradient_at_zero",
        evidence="log(0.0) at [0, 1]",
    ),
    StepRecipe(
        "one_by_the_root_of_zero", (((1, 0),),), lambda ops, x: ops.rsqrt(x),  # bad
        kind="posinf", operation="rsqrt", cause="divide_by_zero", evidence="rsqrt(0.0) at [0, 1]",
    ),
    StepRecipe(
        "steep_quotient", (((1, 1e-30),),), lambda ops, x: (x * 0 + 1) / x,  # bad
        phase="backward", kind="neginf", operation="divide", cause="slope_overflow",
        evidence="1e-30 at [0, 1]", but={"torch": {"kind": "posinf"}},
    ),
    StepRecipe(
        "inf_over_inf", (((1, 2),),), inf_over_inf,
        kind="nan", operation="divide", cause="inf_over_inf", evidence="inf / inf at [0, 0]",
    ),
    StepRecipe(
        "remainder_by_zero", (((1, 0),),), lambda ops, x: ops.remainder(x + 1, x),  # bad
        kind="nan", operation="remainder", cause="remainder_by_zero",
        evidence="1.0 % 0.0 at [0, 1]",
    ),
    StepRecipe(
        "lost_epsilon", (((1, 0),),), lambda ops, x: x / (x + 1e-8),  # bad
        dtype="float16", kind="nan", operation="divide", cause="epsilon_underflow",
        # The slope of a quotient is a multiple of 1 / y**2 in JAX and MLX, beyond float16.
        evidence="1e-08 rounds to 0 in float16",
        but={"jax": {"enough": False}, "mlx": {"enough": False}},
    ),
    StepRecipe(
        "lost_epsilon_under_a_root", (((1, 0),),), lambda ops, x: ops.sqrt(x + 1e-8),  # bad
        dtype="float16",
        phase="backward", kind="posinf", operation="sqrt", cause="epsilon_underflow",
        evidence="1e-08 rounds to 0 in float16",
    ),
    StepRecipe(
        "zero_vector", (((3, 4), (0, 0)),), normalize,
        kind="nan", operation="divide", cause="cosine_of_zero_vector", left="sqrt",
        # Its own kernel takes the slope of the root for 0 where no gradient comes in.
        but={"tensorflow": {"left": None}},
    ),
    StepRecipe(
        "norm_by_hand", (((0, 0),),), lambda ops, x: ops.sqrt(ops.sum(x * x, axis=-1)),  # bad
        phase="backward", kind="posinf", operation="sqrt", cause="norm_gradient_at_zero",
        evidence="the square root of a sum of squares",
    ),
    StepRecipe(
        "small_power", (((2, 0),),), lambda ops, x: x**0.3,  # bad
        phase="backward", kind="posinf", operation="pow", cause="power_gradient_domain",
        evidence="0.0 ** 0.3 at [0, 1]",
    ),
    StepRecipe(
        "learned_exponent", (((2, 2),),), lambda ops, x: ops.array([[2.0, -2.0]]) ** x,  # bad
        phase="backward", kind="nan", operation="pow", cause="power_gradient_domain",
        evidence="-2.0 ** 2.0 at [0, 1]",
    ),
    StepRecipe(
        "atanh_of_one", (((0.5, 1),),), lambda ops, x: ops.atanh(x),  # bad
        kind="posinf", operation="atanh", cause="inverse_trig_domain",
        evidence="atanh(1.0) at [0, 1]",
    ),
    StepRecipe(
        "angle_of_equal_vectors", (((0.5, 1),),), lambda ops, x: -ops.acos(x),  # bad
        phase="backward", kind="posinf", operation="acos", cause="inverse_trig_gradient_at_one",
        evidence="acos(1.0) at [0, 1]",
    ),
    StepRecipe(
        "direction_at_the_origin", (((0, 0),),), lambda ops, x: ops.atan2(x[:, 0], x[:, 1]),  # bad
        phase="backward", kind="nan", operation="atan2", cause="atan2_origin_gradient",
        evidence="atan2(0.0, 0.0) at [0]",
    ),
    StepRecipe(
        "sine_of_inf", (((1, 2),),), lambda ops, x: ops.sin(ops.where(x > 1, INF, x)),  # bad
        kind="nan", operation="sin", cause="trig_of_inf", evidence="sin(inf) at [0, 1]",
    ),
    StepRecipe(
        "lgamma_of_zero", (((1, 0),),), lambda ops, x: ops.lgamma(x),  # bad
        kind="posinf", operation="lgamma", cause="lgamma_pole", evidence="lgamma(0.0) at [0, 1]",
    ),
    StepRecipe(
        "incomplete_gamma_below_zero", (((1, -3),),),
        lambda ops, x: ops.igamma(ops.stop_gradient(x) * 0 + 2, x),  # bad
        kind="nan", operation="igamma", cause="special_function_domain",
        evidence="igamma(2.0, -3.0) at [0, 1]",
    ),
    StepRecipe(
        "exp_with_a_large_gradient", (((1, 80),),), exp_with_a_large_gradient,
        phase="backward", kind="posinf", operation="exp", cause="exp_gradient_overflow",
        evidence="a gradient up to 1e+10 times exp up to 5.54",
    ),
    StepRecipe(
        "cast_to_single", (((1e39, 1),),), lambda ops, x: ops.astype(x, ops.float32),  # bad
        dtype="float64", kind="posinf", operation="astype", cause="overflow_in_dtype",
        evidence="1e+39",
    ),
    StepRecipe(
        "masked_log_softmax", (((1, 2), (3, 4)),), masked_log_softmax,
        kind="nan", operation="log_softmax", cause="softmax_fully_masked",
        evidence="1 row is -inf throughout",
    ),
    StepRecipe(
        "forced_choice", (((1, 2),),), forced_choice,
        kind="nan", operation="softmax", cause="softmax_of_inf", evidence="1 x inf in the operand",
    ),
    StepRecipe(
        "masked_target", (((1, 3),),), masked_target,
        kind="posinf", operation="nll_loss", cause="target_class_masked",
        but={"tensorflow": {"operation": "cross_entropy"}},
    ),
    StepRecipe(
        "spread_of_inf", (((1, 2),),), lambda ops, x: ops.var(ops.where(x > 1, INF, x)),  # bad
        kind="nan", operation="var", cause="normalisation_of_inf",
        evidence="the input holds 1 x Inf",
    ),
    StepRecipe(
        "spread_of_one", (((1,),),), lambda ops, x: ops.sample_var(x),  # bad
        kind="nan", operation="var", cause="variance_of_one", evidence="1 element, and n - 1 is 0",
    ),
    StepRecipe(
        "mean_of_nothing", (((1, 2),),), lambda ops, x: ops.mean(x[:, 2:]),  # bad
        kind="nan", operation="mean", cause="empty_mean", evidence="the input has shape (1, 0)",
    ),
    StepRecipe(
        "equal_eigenvalues", (((1, 0), (0, 1)),), lambda ops, x: ops.linalg.eigh(x)[1],  # bad
        phase="backward", kind="nan", operation="eigh", cause="eigen_gradient_degenerate",
    ),
    StepRecipe(
        "factors_of_singular", (((0, 0), (0, 0)),), lambda ops, x: ops.linalg.qr(x)[1],  # bad
        phase="backward", kind="nan", operation="qr", cause="singular_matrix_gradient",
        evidence="a matrix of shape (2, 2)",
    ),
    StepRecipe(
        "root_of_an_indefinite_matrix", (((1, 2), (2, 1)),),
        lambda ops, x: ops.linalg.cholesky(x),  # bad
        kind="nan", operation="cholesky", cause="singular_matrix", enough=False,
    ),
    StepRecipe(
        "placed", (((1, 2),),), lambda ops, x: ops.where(x > 0, INF, x),  # bad
        kind="posinf", operation="where", cause="written_constant",
        evidence="value is the constant inf",
    ),
)  # fmt: skip

_LACKING = "the standard has no such function"
_NOT_IN_MLX = "MLX has no such function"
_NO_GRADIENT = "MLX has no gradient of it"

# Recipe -> builder -> why it cannot be run there.
NOT_IN: dict[str, dict[str, str]] = {
    "logit_of_one": {
        "mlx": _NOT_IN_MLX, "array": _LACKING,
        "tensorflow": "there is no logit: its division or logarithm is named",
    },
    "entropy_without_forward_nan": {
        "mlx": _NOT_IN_MLX, "tensorflow": "the gradient of xlogy takes 0/0 for 0",
    },
    "one_by_the_root_of_zero": {"array": _LACKING},
    "learned_exponent": {
        "tensorflow": "the gradient takes the logarithm of a negative base for 0",
    },
    "direction_at_the_origin": {
        "torch": "the first derivative is written as 0 there, the second one is in its own tests",
    },
    "lgamma_of_zero": {"array": _LACKING, "mlx": _NOT_IN_MLX},
    "incomplete_gamma_below_zero": {"array": _LACKING, "mlx": _NOT_IN_MLX},
    "masked_log_softmax": {"array": _LACKING, "mlx": "it is x - logsumexp(x)"},
    "forced_choice": {"array": _LACKING},
    "masked_target": {
        "mlx": "a loss is made of primitives: the subtraction is named", "array": _LACKING,
        "jax": "a loss is made of primitives: the gather or the sum is named",
    },
    "spread_of_inf": {"tensorflow": "a variance is made of primitives"},
    "spread_of_one": {"tensorflow": "every variance divides by n"},
    "equal_eigenvalues": {
        "mlx": _NO_GRADIENT,
        "tensorflow": "the gradient takes 1/0 for 0 between equal eigenvalues",
    },
    "root_of_an_indefinite_matrix": {
        "mlx": "it gives finite numbers", "array": "it raises, or gives finite numbers",
        "torch": "it raises",
    },
    "factors_of_singular": {"mlx": _NO_GRADIENT},
}  # fmt: skip
for _recipe in CAUSES:
    if _recipe.phase == "backward":
        _reason = "array code has no gradients of its own"
        NOT_IN.setdefault(_recipe.name, {})["array"] = _reason


def produced(builder: str) -> set[str | None]:
    """List the causes that the recipes produce with a backend's builder."""
    made = importlib.import_module(f"tests.conformance.builders_{builder}")
    left = {name for name, reasons in NOT_IN.items() if builder in reasons}
    left |= set(getattr(made, "DIFFERENCES", {}))
    return {recipe.cause for recipe in (*FAULTS, *CAUSES) if recipe.name not in left}
