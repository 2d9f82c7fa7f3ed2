"""Rules for the backward pass: a slope that is infinite, or has no value."""

import math
from dataclasses import replace

from anynan._diagnosis.rules.evidence import (
    at,
    below,
    called,
    group,
    is_zero,
    limits,
    literal,
    magnitude,
    plural,
    real,
)
from anynan._diagnosis.rules.situation import ANY, BACKWARD, SELF, Rule, Situation, Wording, when
from anynan._diagnosis.vocabulary import is_edge

_LOGS = frozenset({"log", "log2", "log10", "log1p"})
_INVERSES = frozenset({"acos", "asin", "acosh", "atanh"})
STEEP = _LOGS | {
    "sqrt", "rsqrt", "reciprocal", "divide", "pow", "acos", "asin", "acosh", "atanh", "atan2",
    "logit", "vector_norm", "std", "erfinv", "lgamma", "xlogy", "cdist",
}  # fmt: skip
_HIDING = frozenset(
    {
        "where", "masked_fill", "masked_scatter", "masked_select", "clip", "maximum",
        "minimum", "max", "min", "relu", "nan_to_num", "getitem", "index_put", "take",
    }
)  # fmt: skip
_DOUBLE_WHERE = (
    "use the double-where trick: give the masked branch a safe input before the function, "
    "{trapless}"
)


def _hidden_forward(s: Situation) -> str | None:
    """Catch a bad forward value that was masked, and whose gradient is bad."""
    if s.record is None or s.record.direct or s.where == "backward":
        return None
    if "backward" not in (s.phase, s.surfaced):
        return None
    if s.then is not None and s.then.phase != "backward":
        return None  # it was NaN in the forward pass already, whatever is masked of that
    hidden = s.record.hidden
    masks = () if hidden is None else sorted(_HIDING.intersection(hidden))
    if hidden is not None and not masks:  # nobody took it, or it went under in arithmetic
        return None
    by = f" by {' and '.join(masks)}" if masks else ""
    value = "" if s.record.value is None else f" gave {literal(s.record.value)}"
    argument = literal(s.value(*SELF)) if s.value(*SELF) is not None else "..."
    if s.operation == "divide":
        argument = f"{argument}, {literal(s.value('other'))}"
    return f"{s.operation}({argument}){value}{at(s)} and was hidden again{by} in the forward pass"


def _where_trap(s: Situation) -> str | None:
    hidden = _hidden_forward(s)
    if hidden is not None:
        return hidden
    if s.record is None or s.where != "backward" or not s.made("nan"):
        return None
    grad = s.operand("grad")
    if grad is None or grad.summary is None or grad.summary.bad:
        return None
    zero = grad.value == 0 if grad.value is not None else grad.summary.zero == grad.summary.size
    if not zero:
        return None
    masks = sorted(_HIDING.intersection(s.record.feeds))
    if not masks and s.record.forward is None:
        return None
    through = f" (from {', '.join(masks)})" if masks else ""
    saved = _saved(s)
    return f"the incoming gradient is exactly 0{through}{at(s)}" + (f", {saved}" if saved else "")


def _trap_wording(s: Situation) -> Wording | None:
    if s.where == "backward":
        return None
    sure = s.record is not None and s.record.hidden is not None
    return Wording(
        f"the result of {{op}} was {'' if sure else 'probably '}masked afterwards, but its "
        "gradient still runs through {op}: the slope there is infinite, and 0 times Inf is NaN",
        _DOUBLE_WHERE,
    )


def _saved(s: Situation) -> str:
    """Quote what the forward pass saved, at the first bad index."""
    shown = [
        f"{name} {literal(item.value)}"
        for item in s.operands
        if item.value is not None
        and not item.name.startswith(("grad", "inner"))
        and (name := called(s, item))
    ]
    return ", ".join(shown)


def _sqrt_at_zero(s: Situation) -> str | None:
    if s.operation == "pow":
        if not (_exponent(s) == 0.5 and is_zero(s, SELF)):
            return None
    elif s.operation == "std":
        # Reduced, so no element of the result belongs to the gradient's bad index.
        result = s.summary_of("result")
        if result is None or not result.zero:
            return None
    elif not is_zero(s, ("result",) if s.operand("result") is not None else SELF):
        return None
    return f"{'std is 0' if s.operation == 'std' else 'sqrt(0.0)'}{at(s)}"


def _norm_at_zero(s: Situation) -> str | None:
    if s.operation in ("sqrt", "pow"):
        made = {} if s.record is None else s.record.params
        squares = made.get("of") == "sum" and made.get("terms") in ("pow", "square")
        found = _sqrt_at_zero(s) if squares else None
        return None if found is None else f"{found}, the square root of a sum of squares"
    lengths = s.summary_of("result")
    if lengths is None or not lengths.zero:
        return None
    return f"{plural(lengths.zero, 'vector')} of length 0"


def _exponent(s: Situation) -> float | None:
    """Return the forward exponent: at 0 a negative one is the slope's own, p - 1."""
    power = real(s.value("exponent"))
    if power is not None and -1 < power <= 0 and is_zero(s, SELF):
        return power + 1
    return power


def _power_gradient(s: Situation) -> str | None:
    base, power = real(s.value(*SELF)), _exponent(s)
    if base is None or power is None:
        low = below(s, SELF, 0.0)
        bad = low is not None and s.operand("exponent") is not None and s.made("nan")
        return f"the base goes down to {literal(low)}" if bad else None
    text = f"{literal(base)} ** {literal(power)}{at(s)}"
    if base == 0 and power < 1:
        return text
    # Only an exponent that is itself an operand has a gradient, and it needs log(base).
    return text if base < 0 and s.operand("exponent") is not None and s.made("nan") else None


def at_edge(s: Situation) -> str | None:
    """Quote an argument at which its function or its slope is infinite: a pole, an end."""
    # xlogy(p, p) has one operand.
    second = s.operation == "xlogy" and s.operand("other") is not None
    value = real(s.value(*(("other",) if second else SELF)))
    if value is not None:
        name = "log" if s.operation == "xlogy" else s.operation
        return f"{name}({literal(value)}){at(s)}" if is_edge(s.operation, value) else None
    x = s.summary_of(*SELF) if s.operation in _INVERSES else None
    return "the input reaches 1 or -1" if x is not None and x.absmax == 1 else None


def _atan2_origin(s: Situation) -> str | None:
    found = is_zero(s, SELF) and is_zero(s, ("other",))
    return f"atan2(0.0, 0.0){at(s)}" if found else None


def _cdist_at_zero(s: Situation) -> str | None:
    x = s.summary_of("result", "cdist")
    return f"{group(x.zero)} of {group(x.size)} distances are 0" if x and x.zero else None


def _eigen(s: Situation) -> str | None:
    grads = [i.summary for i in s.operands if i.name.startswith("grad") and i.summary is not None]
    if any(grad.bad for grad in grads):
        return None
    gap = s.param("gap")
    if gap is not None:
        return f"the smallest distance between two values is {gap:.3g}"
    values = s.summary_of("eigenvalues", "L", "S", "result0")
    if values is None or values.min is None or values.max is None:
        return "finite gradients came in"
    return f"values from {literal(values.min)} to {literal(values.max)}"


def _determinant(s: Situation) -> str | None:
    x = s.summary_of("A", *SELF)
    if x is None:  # only its factors were kept
        kept = (item.summary for item in s.operands if not item.name.startswith(("grad", "inner")))
        x = next((summary for summary in kept if summary is not None), None)
    return f"a matrix of shape {x.shape}" if x is not None and not x.bad else None


def _product_at_zero(s: Situation) -> str | None:
    x = s.summary_of(*SELF)
    return f"{plural(x.zero, 'zero')} in the input" if x is not None and x.zero else None


def _too_steep(s: Situation) -> str | None:
    names = {"divide": ("other",), "sqrt": ("result",)}.get(s.operation, SELF)
    value = s.value(*names)
    grad = s.value("grad")
    if value is None or grad is None or value == 0 or value != value or grad != grad:
        return None
    size, arriving = abs(value), abs(grad)
    if size >= 1 or math.isinf(arriving) or not s.made("posinf", "neginf", "nan"):
        return None
    # 1/x and its relatives: the slope is at most arriving / size**2 (x / y needs the square).
    reach = max(arriving, 1.0) / size / (size if s.operation in ("divide", "reciprocal") else 1.0)
    if s.operation in ("rsqrt", "pow"):
        reach = max(arriving, 1.0) / size**2
    if reach < limits(s.dtype)[0] / 1e3:
        return None
    what = {"other": "divisor", "result": "result"}.get(names[0], "input")
    return f"the {what} is {literal(value)}{at(s)}, the incoming gradient {literal(grad)}"


def _exp_gradient(s: Situation) -> str | None:
    grad = s.operand("grad")
    top = None if grad is None or grad.summary is None else grad.summary.absmax
    if top is None or s.operation not in ("exp", "expm1", "exp2") or s.where != "backward":
        return None
    result = s.summary_of("result")
    if result is None or result.bad or result.absmax is None:
        return None
    if top * result.absmax < limits(s.dtype)[0]:
        return None
    return f"a gradient up to {magnitude(top)} times exp up to {magnitude(result.absmax)}"


# Before the rules of the forward pass: a value that was hidden there did no harm there.
TRAP = Rule(
    "where_gradient_trap",
    _where_trap,
    "this value was masked, but the gradient still runs through {op}: its slope there is "
    "infinite, and 0 times Inf is NaN",
    _DOUBLE_WHERE,
    phases=ANY,
    operations=STEEP | {"exp", "expm1", "exp2"},
    wording=_trap_wording,
)

_RULES = (
    Rule(
        "norm_gradient_at_zero",
        _norm_at_zero,
        "a vector of zeros has no direction, so its length has no slope there",
        "add eps inside: {guarded}, or give padding vectors a safe value first",
        operations=frozenset({"vector_norm", "matrix_norm", "hypot", "sqrt", "pow"}),
    ),
    Rule(
        "sqrt_gradient_at_zero",
        _sqrt_at_zero,
        "the slope of a square root at 0 is infinite",
        "add eps inside: {guarded}; clamping the result afterwards does not help",
        operations=frozenset({"sqrt", "pow", "std"}),
        wording={
            "std": Wording(
                "the standard deviation of equal numbers is 0, and there its slope is infinite",
                "add eps inside: `sqrt(var(x) + {eps})`",
            )
        },
    ),
    Rule(
        "power_gradient_domain",
        _power_gradient,
        "the gradient of x**y with respect to y is x**y * log(x), and log needs a positive base",
        "keep the base positive: `maximum(x, {eps}) ** y`; if y is a constant, pass a plain number",
        operations=frozenset({"pow"}),
        wording=when(
            lambda s: s.value(*SELF) == 0,
            "below a power of 1 the slope of x**p at 0 is infinite",
            "keep the base away from 0: `(x + {eps}) ** p`",
        ),
    ),
    Rule(
        "log_gradient_at_zero",
        at_edge,
        "the slope of {op} is infinite where its result is -Inf",
        "add eps inside: `{op}(x + {eps})`",
        operations=_LOGS | {"xlogy"},
        wording={
            "xlogy": Wording(
                "the slope of x * log(y) in y is x / y: at y = 0 this is infinite, or 0/0",
                "keep the second argument away from 0: `xlogy(x, maximum(y, {eps}))`",
            )
        },
    ),
    Rule(
        "inverse_trig_gradient_at_one",
        at_edge,
        "the slope of {op} at 1 and -1 is infinite; the dot product of two equal unit vectors is "
        "such a 1",
        "clamp inside the domain: `{op}(clip(x, -1 + {margin}, 1 - {margin}))`; for an angle use "
        "atan2(norm(cross(a, b)), dot(a, b))",
        operations=_INVERSES,
        wording={
            "acosh": Wording(
                "the slope of acosh at 1 is infinite",
                "keep the argument above 1: `acosh(maximum(x, 1 + {margin}))`",
            )
        },
    ),
    Rule(
        "atan2_origin_gradient",
        _atan2_origin,
        "the origin has no angle: the gradient of atan2(0, 0) is 0/0",
        "move the origin first: `atan2(x, where((x == 0) & (y == 0), 1, y))`",
        operations=frozenset({"atan2"}),
    ),
    Rule(
        "cdist_gradient_at_zero",
        _cdist_at_zero,
        "two points fall together: the slope of their distance is 0/0",
        "leave the diagonal out, use squared distances, or add eps inside: "
        "sqrt(sum((a - b)**2) + {eps})",
        operations=frozenset({"cdist"}),
    ),
    Rule(
        "eigen_gradient_degenerate",
        _eigen,
        "the gradient of {op} divides by the differences of eigenvalues or singular values: two "
        "of them are probably equal",
        "use only the values and not the vectors, or break the tie: add a little distinct noise "
        "to the diagonal",
        operations=frozenset({"eigh", "eig", "svd"}),
        sure=False,
    ),
    Rule(
        "singular_matrix_gradient",
        _determinant,
        "the gradient of {op} needs the inverse of the matrix, which is probably singular",
        "add a little to the diagonal: `{op}(A + 1e-6 * eye(n))`",
        operations=frozenset({"det", "slogdet", "inv", "solve", "cholesky", "qr", "pinv", "lu"}),
        sure=False,
    ),
    Rule(
        "product_gradient_at_zero",
        _product_at_zero,
        "the gradient of a product divides the product by each factor: a factor of 0 is 0/0",
        "keep the factors away from 0, or work with logarithms: exp(cumsum(log(x + {eps})))",
        operations=frozenset({"prod", "cumprod"}),
    ),
    Rule(
        "lgamma_gradient_at_pole",
        at_edge,
        "the slope of {op} is infinite at 0 and at the negative whole numbers",
        "keep the argument positive: `{op}(maximum(x, {eps}))`",
        operations=frozenset({"lgamma", "digamma"}),
    ),
    Rule(
        "logit_gradient_at_bound",
        at_edge,
        "the slope of logit is infinite at 0 and 1",
        "clamp the probability: `logit(clip(p, {margin}, 1 - {margin}))`",
        operations=frozenset({"logit"}),
    ),
    Rule(
        "slope_overflow",
        _too_steep,
        "so close to 0 the slope of {op} is probably beyond {limit}, the largest {dtype}",
        "keep the argument further from 0: a larger eps, or a floor, {floored}",
        operations=STEEP - {"vector_norm", "cdist", "std", "lgamma"},
        sure=False,
    ),
    Rule(
        "exp_gradient_overflow",
        _exp_gradient,
        "the slope of {op} is as large as its result, and the gradient times it is beyond {limit}",
        "clamp the argument before {op}: exp(minimum(x, a bound far below {cap}))",
        operations=frozenset({"exp", "expm1", "exp2"}),
    ),
)

RULES = tuple(replace(rule, phases=BACKWARD) for rule in _RULES)
