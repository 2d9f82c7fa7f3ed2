"""Rules for the forward pass: an argument outside what the operation can take."""

import math
import re

from anynan._diagnosis.rules.evidence import (
    above,
    at,
    below,
    finite_operands,
    group,
    holds,
    infinite,
    is_zero,
    literal,
    lost_epsilon,
    lost_in_one,
    plural,
    real,
    same,
    times,
)
from anynan._diagnosis.rules.gradient import at_edge
from anynan._diagnosis.rules.situation import BOTH, OTHER, SELF, Rule, Situation, Wording, when
from anynan._diagnosis.vocabulary import bounds, domain, is_edge

_LOGS = frozenset({"log", "log2", "log10", "log1p", "xlogy", "xlog1py"})
_QUOTIENTS = frozenset({"divide", "floor_divide", "addcdiv", "reciprocal", "rsqrt"})
_DIVISOR = (*OTHER, "tensor2")
_NORMS = frozenset({"layer_norm", "batch_norm", "group_norm", "rms_norm"})
_SPREAD = ("running_var",)


def _called(s: Situation, names: tuple[str, ...] = SELF) -> str:
    """Quote a call of one argument: ``log(-0.3) at [3, 7]``."""
    name = {"xlogy": "log", "xlog1py": "log1p"}.get(s.operation, s.operation)
    return f"{name}({literal(s.value(*names))}){at(s)}"


# Logarithms.


def _argument(s: Situation) -> tuple[tuple[str, ...], float]:
    """Return what the logarithm is taken of, and where it is -Inf."""
    names = OTHER if s.operation.startswith("xlog") else SELF
    return names, bounds(s.operation)[0]


def _below(s: Situation, names: tuple[str, ...], edge: float) -> str | None:
    """Quote an argument that is too small for its function."""
    low = below(s, names, edge)
    if low is None or not s.made("nan"):
        return None
    value = real(s.value(*names))
    known = value is not None and value < edge
    seen = _called(s, names) if known else f"the input goes down to {low:.4g}"
    return seen + times(0 if s.output is None else s.output.nan, "NaN")


def _log_of_zero(s: Situation) -> str | None:
    names, edge = _argument(s)
    summary = s.summary_of(*names)
    if not holds(s, names, lambda v: v == edge, lambda x: x.zero > 0 if edge == 0 else x.min == -1):
        value = s.value(*names)
        if not (isinstance(value, complex) and value == edge):
            return None
    zeros = 0 if summary is None or edge else summary.zero
    return _called(s, names) + times(zeros, "zeros")


def _log_wording(s: Situation) -> Wording | None:
    if "log1p" in s.operation:
        return Wording("log1p(-1) is -Inf", "keep the argument above -1: {floored}")
    if _log_of("softmax", s.line):
        return Wording(
            "the logarithm of 0 is -Inf: a softmax probability rounded to 0",
            "use log_softmax(x) instead of log(softmax(x)): it never makes the 0",
        )
    if _log_of("sigmoid", s.line):
        return Wording(
            "the logarithm of 0 is -Inf: a sigmoid rounded to 0",
            "use logsigmoid(x) instead of log(sigmoid(x)), and logsigmoid(-x) for log(1 - p)",
        )
    if re.search(
        r"\blog\(.*\bsum\b.*\bexp\(|exp\(.*\bsum\b.*\blog\(|log\(.*exp\(.*\bsum\b", s.line
    ):
        return Wording(
            "the logarithm of 0 is -Inf: every exp under it rounded to 0",
            "use logsumexp(x) instead of log(sum(exp(x))): it subtracts the largest term first",
        )
    return None


def _log_of(inner: str, line: str) -> bool:
    """Tell whether a line takes the logarithm of a function's result at once."""
    pattern = rf"\blog\(\s*[\w.]*(?<!log_){inner}\(|(?<!log_){inner}\([^()]*\)\s*\.log\("
    return re.search(pattern, line) is not None


def _logit(s: Situation) -> str | None:
    if above(s, SELF, 1.0) is not None or below(s, SELF, 0.0) is not None:
        return f"{_called(s)}, which is outside [0, 1]" if s.made("nan") else None
    found = holds(s, SELF, lambda v: v in (0.0, 1.0), lambda x: x.zero > 0 or x.max == 1)
    return _called(s) if found else None


def _entropy_loss(s: Situation) -> str | None:
    found = holds(s, SELF, lambda v: v <= 0 or v >= 1, lambda x: x.zero > 0 or x.max == 1)
    return f"a prediction is {literal(s.value(*SELF))}{at(s)}" if found else None


def _kl_div(s: Situation) -> str | None:
    if s.operation == "subtract":  # the last step of it, where it runs as three
        held = s.summary_of(*OTHER) if "kl_div" in s.line else None
        return (
            f"target * log probability holds {group(held.neginf)} x -inf"
            if (held is not None and held.neginf)
            else None
        )
    predicted, target = s.summary_of(*SELF), s.summary_of("target")
    if target is not None and target.low is not None and target.low < 0:
        return f"the target goes down to {target.low:.4g}"
    if predicted is not None and predicted.neginf:
        return f"the predicted log probabilities hold {group(predicted.neginf)} x -inf"
    return None


# Division.


_NORMALISING = re.compile(r"cosine_similarity|CosineSim|normalize\(")


def _zero_vector(s: Situation) -> str | None:
    if s.operation == "weight_norm":
        weight = s.summary_of("v", *SELF)
        zeros = weight is not None and not weight.bad and weight.zero
        return f"the weight holds {plural(zeros, 'zero')}" if zeros and s.made("nan") else None
    normalising = _NORMALISING.search(s.line.partition("#")[0]) is not None
    if not normalising or not is_zero(s, _DIVISOR if s.operation == "divide" else SELF):
        return None
    index = None if s.output is None else s.output.first_bad
    return "a vector of length 0" + (f" (first at {list(index)})" if index else "")


def _lost_epsilon(s: Situation) -> str | None:
    names: tuple[str, ...] = (
        _DIVISOR if s.operation in ("divide", "addcdiv", "floor_divide") else SELF
    )
    if s.where == "backward":
        # Of these only a square root is finite at 0 where its slope is not.
        names = ("result",) if s.operation == "sqrt" else ()
    bad_zero = is_zero(s, names) or (s.operation.endswith("_norm") and s.made("nan", "posinf"))
    if not bad_zero or infinite(s.summary_of(*SELF)):
        return None
    lost = lost_epsilon(s)
    if lost is not None:
        return f"{lost:g} rounds to 0 in {s.dtype}"
    lost = lost_in_one(s)
    return None if lost is None else f"1 - {lost:g} is 1 in {s.dtype}"


def _no_spread(s: Situation) -> str | None:
    if s.param("eps") != 0 or not s.made("nan", "posinf", "neginf") or not finite_operands(s):
        return None
    kept = s.summary_of(*_SPREAD)
    if kept is None:
        return "finite values without a spread, and eps is 0"
    where = f"{kept.zero} of {plural(kept.size, 'element')} of running_var are 0, and eps is 0"
    return where if kept.zero else None


def _divide_by_zero(s: Situation) -> str | None:
    if s.operation in _NORMS:
        return _no_spread(s)
    if s.operation in ("reciprocal", "rsqrt"):
        return _called(s) if is_zero(s, SELF) else None
    if not is_zero(s, _DIVISOR):
        return None
    above_line = s.value("tensor1") if s.operation == "addcdiv" else s.value(*SELF)
    below_line = s.value(*_DIVISOR)
    divisor = s.summary_of(*_DIVISOR)
    zeros = 0 if divisor is None else divisor.zero
    if above_line is None or below_line is None:
        return f"the divisor holds {plural(zeros, 'zero')}"
    return f"{literal(above_line)} / {literal(below_line)}{at(s)}" + times(zeros, "zero divisors")


def _divide_wording(s: Situation) -> Wording | None:
    if s.operation in _NORMS:
        return Wording(
            "{op} divides by the spread of the values, which is 0 here, and its eps is 0",
            "give {op} an eps again, such as {eps}, and find out why these values are all the "
            "same (padding, a dead channel)",
        )
    if s.operation == "rsqrt":
        return Wording("1 / sqrt(0) is Inf", "add eps inside: `rsqrt(x + {eps})`")
    if s.operation == "reciprocal":
        return Wording(
            "1/0 is Inf", "add eps to a divisor that cannot be negative: `1 / (x + {eps})`"
        )
    nan, inf = s.made("nan"), s.made("posinf", "neginf")
    if nan and inf:
        return None
    masked = "where(y == 0, 0, x / where(y == 0, 1, y))"
    if nan:
        upper = s.value(*SELF)
        return Wording(
            "a complex number divided by 0 is NaN"
            if isinstance(upper, complex) and upper
            else "0/0 is NaN",
            f"give the empty case a value of its own: `{masked}`; or add eps to the divisor: "
            "x / (y + {eps})",
        )
    return Wording(
        "a number divided by 0 is Inf",
        f"add eps to a divisor that cannot be negative: `x / (y + {{eps}})`; else {masked}",
    )


def _inf_over_inf(s: Situation) -> str | None:
    upper, lower = real(s.value(*SELF)), real(s.value(*OTHER))
    if upper is not None and lower is not None:
        found = math.isinf(upper) and math.isinf(lower)
    else:
        found = infinite(s.summary_of(*SELF)) and infinite(s.summary_of(*OTHER))
    if not found or not s.made("nan"):
        return None
    return f"{literal(upper)} / {literal(lower)}{at(s)}"


def _remainder(s: Situation) -> str | None:
    if not is_zero(s, OTHER):
        return None
    return f"{literal(s.value(*SELF))} % {literal(s.value(*OTHER))}{at(s)}"


# Roots, powers and the inverse functions.


def _sqrt_of_negative(s: Situation) -> str | None:
    if s.operation == "batch_norm":
        low = below(s, _SPREAD, 0.0)
        return None if low is None or not s.made("nan") else f"running_var goes down to {low:.4g}"
    return _below(s, SELF, 0.0)


def _sqrt_wording(s: Situation) -> Wording | None:
    if s.operation == "batch_norm":
        return Wording(
            "a running variance is negative, and its square root is NaN",
            "find what wrote it (an average of weights, a conversion, a checkpoint), and "
            "reset the layer's running statistics",
        )
    summary, low = s.summary_of(*SELF), below(s, SELF, 0.0)
    if summary is None or summary.max is None or low is None:
        return None
    if summary.max > 0 and -low < 1e-3 * summary.max:
        return Wording(
            "the square root of a negative number is NaN; the number is so small beside the "
            "others that it is probably a rounding error below 0",
            "clamp it: {floored}; a variance taken as mean(x**2) - mean(x)**2 goes "
            "below 0 this way: use var(x)",
        )
    return None


def _power_domain(s: Situation) -> str | None:
    base, power = real(s.value(*SELF)), real(s.value("exponent"))
    if base is None or power is None:
        return None
    text = f"{literal(base)} ** {literal(power)}{at(s)}"
    if base == 0 and power < 0:
        return text
    return text if base < 0 and math.isfinite(power) and power != int(power) else None


def _power_wording(s: Situation) -> Wording | None:
    if same(s.value(*SELF), 0.0):
        return Wording(
            "0 to a negative power is Inf: it is 1/0",
            "keep the base away from 0: `maximum(x, {eps}) ** p`",
        )
    return Wording(
        "a negative number to a fractional power is NaN",
        "take the power of the magnitude, `sign(x) * abs(x) ** p`, or keep the base positive",
    )


_INSIDE_ONE = Wording(
    "{op} is infinite at 1 and -1, and NaN beyond",
    "clamp the argument inside (-1, 1): `{op}(clip(x, -1 + {margin}, 1 - {margin}))`",
)
_INVERSES = frozenset({"acos", "asin", "atanh", "erfinv", "acosh"})


def _beyond(s: Situation) -> str | None:
    """Quote an argument outside of what its function has a value for."""
    low, high = bounds(s.operation)
    outside = below(s, SELF, low)
    outside = above(s, SELF, high) if outside is None else outside
    if outside is None:
        return None
    known = same(s.value(*SELF), outside)
    return _called(s) if known else f"the input reaches {literal(outside)}"


def _outside(s: Situation) -> str | None:
    """Quote an argument beyond its function's interval, or at an end where it is infinite."""
    if (found := _beyond(s)) is not None:
        return found
    on = s.made("posinf", "neginf") and holds(
        s,
        SELF,
        lambda v: is_edge(s.operation, v),
        lambda x: any(end is not None and is_edge(s.operation, end) for end in (x.min, x.max)),
    )
    return _called(s) if on else None


# Functions that a mask seldom guards: their words say where they are defined.
_SPECIAL = frozenset(
    {
        "bessel_y0", "bessel_y1", "entropy", "modified_bessel_k0", "modified_bessel_k1", "ndtri",
        "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    }
)  # fmt: skip
_SPECIAL_OF_TWO = frozenset({"igamma", "igammac", "zeta"})


def _special_domain(s: Situation) -> str | None:
    if s.operation in _SPECIAL_OF_TWO:
        values = [real(item.value) for item in s.operands[:2]]
        if len(values) < 2 or None in values:
            return None
        first, second = (float(value) for value in values if value is not None)
        inside = first > 1 and second > 0
        if s.operation != "zeta":
            inside = first >= 0 and second >= 0 and (first > 0 or second > 0)
        return None if inside else f"{s.operation}({literal(first)}, {literal(second)}){at(s)}"
    return _outside(s)


def _special_wording(s: Situation) -> Wording:
    cause = f"{{op}} is finite for {domain(s.operation)} only"
    if s.operation in _SPECIAL_OF_TWO:
        return Wording(cause, "keep both arguments there: clamp them, or mask them before the call")
    if s.operation == "ndtri":
        return Wording(cause, "clamp the probability: `{op}(clip(p, {margin}, 1 - {margin}))`")
    return Wording(cause, "keep the argument there: `{op}(maximum(x, {eps}))`")


def _trig_of_inf(s: Situation) -> str | None:
    found = holds(s, SELF, math.isinf, infinite)
    return _called(s) if found and s.made("nan") else None


def _singular(s: Situation) -> str | None:
    known = [item.summary for item in s.operands if item.summary is not None]
    if not known or any(summary.bad for summary in known):
        return None
    matrix = known[0]
    return f"{s.operation} of a finite {matrix.dtype} matrix {matrix.shape} gave {_kind(s)}"


def _out_of_range(s: Situation) -> str | None:
    index, entries, outside = s.param("index"), s.param("entries"), s.param("outside")
    if index is None or entries is None or not s.made("nan"):
        return None
    found = f"index {index:.0f} is out of range for {plural(int(entries), 'entry', 'entries')}"
    return found + times(int(outside or 1), "such indices")


def _kind(s: Situation) -> str:
    return "NaN" if s.made("nan") else "+Inf" if s.made("posinf") else "-Inf"


def _target_too_long(s: Situation) -> str | None:
    sample, needed, frames = s.param("sample"), s.param("needed"), s.param("frames")
    if sample is None or needed is None or frames is None or needed <= frames:
        return None
    return (
        f"target {sample:g} needs {needed:g} time steps (one for each label, and a blank between "
        f"repeats), and its input has {frames:g}"
    )


RULES = (
    Rule(
        "cosine_of_zero_vector",
        _zero_vector,
        "a vector of zeros has no direction: dividing it by its length is 0/0",
        "find out why the vector is all 0 (padding, a dead layer); or give the length a floor: "
        "{floored}",
        operations=frozenset({"divide", "reciprocal", "rsqrt", "weight_norm"}),
    ),
    Rule(
        "epsilon_underflow",
        _lost_epsilon,
        "the small constant that should keep this away from 0 is probably lost to rounding in "
        "{dtype}",
        "use a constant that {dtype} can hold, {guarded}, or compute this in a wider dtype",
        operations=_QUOTIENTS | _LOGS | _NORMS | {"sqrt"},
        phases=BOTH,
        sure=False,
        wording=when(
            lambda s: lost_epsilon(s) is None,
            "a bound just below 1 probably rounds to 1 in {dtype}, and 1 minus it is 0",
            "keep further from 1, clip(p, {margin}, 1 - {margin}), or write log(1 - p) as "
            "log1p(-p)",
        ),
    ),
    Rule(
        "log_of_negative",
        lambda s: _below(s, *_argument(s)),
        "the logarithm of a negative number is NaN",
        "keep the argument positive: {floored}; if it must be positive, make it so "
        "with softplus(x) or exp(x)",
        operations=_LOGS,
        wording=dict.fromkeys(
            ("log1p", "xlog1py"),
            Wording("log1p of a number below -1 is NaN", "keep the argument above -1: {floored}"),
        ),
    ),
    Rule(
        "log_of_zero",
        _log_of_zero,
        "the logarithm of 0 is -Inf",
        "add eps inside: {guarded}; or clamp the argument away from 0, maximum(x, {eps})",
        operations=_LOGS,
        wording=_log_wording,
    ),
    Rule(
        "logit_of_zero_or_one",
        _logit,
        "logit is infinite at 0 and 1, and NaN outside",
        "clamp the probability: `logit(clip(p, {margin}, 1 - {margin}))`, or keep the logits you "
        "had before the sigmoid",
        operations=frozenset({"logit"}),
    ),
    Rule(
        "binary_cross_entropy_saturated",
        _entropy_loss,
        "binary cross entropy takes log(p) and log(1 - p): at a prediction of 0 or 1 this is -Inf",
        "pass the logits to the form of this loss that takes logits, without the sigmoid before "
        "it; or clamp: `{op}(clip(p, {margin}, 1 - {margin}))`",
        operations=frozenset({"binary_cross_entropy"}),
        phases=BOTH,
    ),
    Rule(
        "kl_div_domain",
        _kl_div,
        "this divergence takes the logarithm of the target and multiplies by the predicted log "
        "probability: a negative target or a log probability of -Inf breaks it",
        "pass log_softmax(x) as the prediction and a target that is never negative; clamp log "
        "probabilities: maximum(logp, -100)",
        operations=frozenset({"kl_div", "subtract"}),
    ),
    Rule(
        "divide_by_zero",
        _divide_by_zero,
        "0/0 is NaN, and any other number divided by 0 is Inf",
        "add eps to a divisor that cannot be negative: `x / (y + {eps})`; else "
        "where(y == 0, 0, x / where(y == 0, 1, y))",
        operations=_QUOTIENTS | _NORMS,
        wording=_divide_wording,
    ),
    Rule(
        "inf_over_inf",
        _inf_over_inf,
        "Inf divided by Inf is NaN",
        "keep both sides finite: clamp them, or divide their logarithms by subtracting; exp(x) / "
        "sum(exp(x)) is softmax(x), which cannot overflow",
        operations=frozenset({"divide"}),
    ),
    Rule(
        "remainder_by_zero",
        _remainder,
        "the remainder of a division by 0 is NaN",
        "make sure the divisor is never 0: `remainder(x, where(y == 0, 1, y))`",
        operations=frozenset({"remainder"}),
    ),
    Rule(
        "sqrt_of_negative",
        _sqrt_of_negative,
        "the square root of a negative number is NaN",
        "clamp the argument: {floored}; a variance taken as mean(x**2) - mean(x)**2 "
        "goes below 0 by rounding: use var(x)",
        operations=frozenset({"sqrt", "rsqrt", "batch_norm"}),
        wording=_sqrt_wording,
    ),
    Rule(
        "power_domain",
        _power_domain,
        "0 to a negative power is Inf, and a negative number to a fractional power is NaN",
        "keep the base positive: `maximum(x, {eps}) ** p`",
        operations=frozenset({"pow"}),
        wording=_power_wording,
    ),
    Rule(
        "inverse_trig_domain",
        _outside,
        "{op} of a number outside its domain is NaN; for a cosine or a dot product of unit vectors "
        "rounding alone goes past 1",
        "clamp the argument: `{op}(clip(x, -1 + {margin}, 1 - {margin}))`",
        operations=_INVERSES,
        wording={
            "acosh": Wording(
                "acosh of a number below 1 is NaN",
                "clamp the argument: `acosh(maximum(x, 1 + {margin}))`",
            ),
            "atanh": _INSIDE_ONE,
            "erfinv": _INSIDE_ONE,
        },
    ),
    Rule(
        "lgamma_pole",
        at_edge,
        "{op} is infinite at 0 and at the negative whole numbers",
        "keep the argument positive: `{op}(maximum(x, {eps}))`",
        operations=frozenset({"lgamma", "digamma", "polygamma"}),
    ),
    Rule(
        "special_function_domain",
        _special_domain,
        "{op} is finite on a part of the numbers only",
        "keep what it is given there: clamp it, or mask it before the call",
        operations=_SPECIAL | _SPECIAL_OF_TWO,
        wording=_special_wording,
    ),
    Rule(
        "trig_of_inf",
        _trig_of_inf,
        "{op} of Inf is NaN",
        "keep infinite angles out: `{op}(where(isfinite(x), x, 0))`",
        operations=frozenset({"sin", "cos", "tan"}),
    ),
    Rule(
        "singular_matrix",
        _singular,
        "the matrix is probably singular, or so close to it that {dtype} cannot tell",
        "add a little to the diagonal, `{op}(A + 1e-6 * eye(n))`, compute in float64, or use a "
        "least squares solution",
        operations=frozenset({"inv", "solve", "cholesky", "slogdet", "lu", "pinv"}),
        sure=False,
    ),
    Rule(
        "ctc_target_too_long",
        _target_too_long,
        "a target is longer than its input: no alignment gives it, so its loss is Inf",
        "check that input lengths are what the model gives after striding, drop or shorten such "
        "samples, or have infinite losses counted as 0",
        operations=frozenset({"ctc_loss"}),
        phases=BOTH,
    ),
    Rule(
        "index_out_of_range",
        _out_of_range,
        "an index is out of range: a compiled program does not stop there, and what it reads is "
        "filled with NaN",
        "check the indices before the call: labels below the number of classes, tokens below the "
        "size of the vocabulary, padding masked or given an entry of its own",
        operations=frozenset({"take"}),
    ),
)
