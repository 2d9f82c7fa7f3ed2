"""Rules for the forward pass: numbers too large, and arithmetic with Inf."""

import math
import re

from anynan._diagnosis.lineage import Operand
from anynan._diagnosis.rules.evidence import (
    HALF,
    at,
    called,
    finite_operands,
    group,
    infinite,
    largest,
    limits,
    literal,
    magnitude,
    plural,
    real,
)
from anynan._diagnosis.rules.situation import ANY, BOTH, OTHER, SELF, Rule, Situation, Wording

_PRODUCTS = frozenset({"matmul", "linear", "convolution", "attention", "rnn", "einsum"})
_SUMS = frozenset({"sum", "mean", "cumsum", "logsumexp", "mse_loss"})
# A mean of what each element gives: NaN for none.
_MEANS = frozenset(
    {
        "mean", "nanmean", "var", "std", "mse_loss", "smooth_l1_loss", "huber_loss",
        "soft_margin_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip
_NORMS = frozenset({"layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm"})
_SPREADS = frozenset({"var", "std"})
OVERFLOWING = (
    _PRODUCTS
    | _SUMS
    | _NORMS
    | _SPREADS
    | {
        "add", "subtract", "multiply", "square", "pow", "cumprod", "prod", "astype", "copy",
        "addcmul", "addcdiv", "lerp", "vector_norm", "matrix_norm", "cdist", "det", "sinh", "cosh",
        "divide", "reciprocal", "expm1", "exp2", "gelu", "silu", "softplus", "scatter_add",
    }
)  # fmt: skip
_COMPOSED = _PRODUCTS | _SUMS | _NORMS | _SPREADS | {"gelu", "silu", "softplus", "cdist"}
_CASTS = frozenset({"astype", "copy"})


# Softmax and attention.


def _softmax_of_inf(s: Situation) -> str | None:
    for item in s.operands:
        held = item.summary
        if held is not None and held.posinf and not held.nan and not item.name.startswith("grad"):
            return f"{group(held.posinf)} x inf in the operand" if s.made("nan") else None
    return None


def _fully_masked(s: Situation) -> str | None:
    if s.record is None or not (s.made("nan") or s.operation in ("logsumexp", "log_softmax")):
        return None
    rows = s.record.params.get("masked_rows")
    if isinstance(rows, int) and rows > 0:
        return f"{plural(rows, 'row')} {'is' if rows == 1 else 'are'} -inf throughout"
    if s.operation == "logsumexp":
        made = s.record.phase == "backward" and s.summary_of("result")
        return f"{group(made.neginf)} x -inf in the result" if made and made.neginf else None
    return _masked_scores(s, backward=s.record.phase == "backward")


def _masked_scores(s: Situation, *, backward: bool) -> str | None:
    """Quote a mask, or the scores with one in it, as far as they hold no other bad value."""
    clean = [
        item for item in s.operands
        if item.summary is not None and not item.summary.nan and not item.summary.posinf
    ]  # fmt: skip
    if s.operation == "attention":
        mask = next((item for item in clean if "mask" in item.name and _masks(item)), None)
        return None if mask is None else f"the mask holds {_masks(mask)}"
    counts = [item.summary.neginf for item in clean if item.summary and item.summary.neginf]
    return f"the scores hold {group(counts[0])} x -inf" if counts and not backward else None


def _masks(mask: Operand) -> str:
    summary = mask.summary
    if summary is None:
        return ""
    if summary.neginf:
        return f"{group(summary.neginf)} x -inf"
    return f"{group(summary.zero)} x False" if summary.dtype == "bool" and summary.zero else ""


def _masked_wording(s: Situation) -> Wording | None:
    if s.record is None or s.operation != "attention":
        return None
    sure = "" if s.record.params.get("masked_rows") else "probably a "
    return Wording(
        f"{sure}fully masked row: softmax over a row of -inf is 0/0",
        "let every query see at least one key, or zero the output of fully masked rows",
    )


def _masked_target(s: Situation) -> str | None:
    scores = s.summary_of(*SELF)
    if scores is None or scores.nan or scores.posinf or not scores.neginf:
        return None
    return f"the scores hold {group(scores.neginf)} x -inf" if s.made("posinf") else None


# Inf in, NaN out.


def _signs(s: Situation) -> tuple[bool, bool]:
    """Tell which signs of Inf the operands hold."""
    known = [item.summary for item in s.operands if item.summary is not None]
    return any(x.posinf for x in known), any(x.neginf for x in known)


def _inf_minus_inf(s: Situation) -> str | None:
    if not s.made("nan"):
        return None
    if s.operation in ("add", "subtract"):
        return _inf_pair(s)
    inner = s.summary_of(*SELF) if s.operation in _SUMS else None
    if s.operation in _SUMS:
        both = inner is not None and inner.posinf > 0 and inner.neginf > 0
    else:
        both = all(_signs(s))
    return f"inf and -inf are added up{at(s)}" if both else None


def _inf_pair(s: Situation) -> str | None:
    upper, lower = real(s.value(*SELF)), real(s.value(*OTHER))
    # alpha is the factor that some libraries put before the second operand.
    flip = (s.operation == "subtract") != ((s.param("alpha") or 1.0) < 0)
    if upper is not None and lower is not None:
        if not (math.isinf(upper) and math.isinf(lower)) or (upper == lower) != flip:
            return None
        sign = "-" if s.operation == "subtract" else "+"
        right = f"({literal(lower)})" if lower < 0 else literal(lower)
        return f"{literal(upper)} {sign} {right}{at(s)}"
    first, second = s.summary_of(*SELF), s.summary_of(*OTHER)
    if first is None or second is None:
        return None
    same = (first.posinf and second.posinf) or (first.neginf and second.neginf)
    opposite = (first.posinf and second.neginf) or (first.neginf and second.posinf)
    return f"both operands hold Inf{at(s)}" if (same if flip else opposite) else None


def _zero_times_inf(s: Situation) -> str | None:
    factors = _factors(s) if s.made("nan") else []
    if s.operation in ("multiply", "addcmul", "prod", "cumprod"):
        values = [real(item.value) for item in factors]
        shown = [literal(v) for v in values if v in (0.0, math.inf, -math.inf)]
        if 0.0 in values and any(map(math.isinf, filter(None, values))):
            return f"{shown[0]} * {shown[1]}{at(s)}"
        if None not in values and s.operation == "multiply":
            return None
    inf = next((item for item in factors if infinite(item.summary)), None)
    if s.operation not in ("prod", "cumprod"):
        factors = [item for item in factors if item is not inf]
    if inf is None or inf.summary is None or not any(x.summary and x.summary.zero for x in factors):
        return None
    count = inf.summary.posinf + inf.summary.neginf
    return f"{group(count)} x Inf in one operand meets zeros in the other{at(s)}"


def _factors(s: Situation) -> list[Operand]:
    """Give the operands that are multiplied with each other."""
    factors = [item for item in s.operands if item.name not in ("bias", "result")]
    if s.operation in ("linear", "matmul") and len(factors) > 2:
        return factors[-2:]
    if s.operation == "linear":
        return [item for item in factors if item.name != "self"] or factors
    return factors


def _norm_of_inf(s: Situation) -> str | None:
    x = s.summary_of(*SELF)
    if x is None or x.nan or not infinite(x):
        return None
    return f"the input holds {group(x.posinf + x.neginf)} x Inf"


# Too few numbers.


def _variance_of_one(s: Situation) -> str | None:
    x, made = s.summary_of(*SELF), s.output
    if x is None or made is None or x.bad or not x.size or not s.made("nan", "posinf"):
        return None
    if s.operation == "batch_norm":
        count = x.size // x.shape[1] if len(x.shape) > 1 and x.shape[1] else 0
        return f"{plural(count, 'value')} per channel" if count == 1 else None
    # A backward record's result is as large as its operand, so the forward result is asked for.
    if s.where == "backward":
        made = s.summary_of("result") or made
    count = x.size // made.size if made.size else 0
    correction = s.param("correction")
    correction = s.param("unbiased") if correction is None else correction
    correction = 1.0 if correction is None else correction
    if count > correction:
        return None
    return f"{plural(count, 'element')}, and n - {correction:g} is {count - correction:g}"


def _empty_mean(s: Situation) -> str | None:
    x = s.summary_of(*SELF)
    if s.operation in _MEANS:
        return f"the input has shape {x.shape}" if x is not None and not x.size else None
    if x is None or not s.made("nan") or not finite_operands(s):
        return None
    if not x.size:
        return f"the input has shape {x.shape}"
    if s.record is not None and s.record.params.get("ignored") is not None:
        count, index = s.record.params["ignored"], s.param("ignore_index") or 0
        return f"{plural(count, 'target')}, and all are {index:g}, which is ignored"
    target = s.summary_of("target")
    ignored = s.param("ignore_index")
    if target is not None and target.min is not None and target.min == target.max:
        if ignored is not None and target.min != ignored:
            return None
        return f"all {group(target.size)} targets are {target.min:g}"
    # From finite scores this loss has no other way to NaN than 0 targets, or weights of sum 0.
    return "finite scores, and still 0/0 in the mean"


def _empty_wording(s: Situation) -> Wording | None:
    x = s.summary_of(*SELF)
    empty = x is not None and not x.size
    if empty or ("loss" not in s.operation and "entropy" not in s.operation):
        return None
    return Wording(
        "the mean over no targets is 0/0: every target of this batch is ignored (or every "
        "class weight used is 0)",
        "skip a batch without targets, or sum the losses and divide by maximum(count, 1)",
    )


# Overflow.


def _exp_overflow(s: Situation) -> str | None:
    x = s.summary_of(*SELF)
    value = real(s.value(*SELF))
    value = abs(value) if value is not None and s.operation in ("sinh", "cosh") else value
    top = math.log(limits(s.dtype)[0])
    top = top / math.log(2) if s.operation == "exp2" else top
    if value is None or value <= top:
        value = None if x is None else x.max if s.operation.startswith("exp") else x.absmax
    if value is None or value <= top - 1e-3 or not s.made("posinf", "neginf", "nan"):
        return None
    most = f"the largest argument {s.dtype} takes is {top:.4g}"
    return f"{s.operation}({literal(value)}){at(s)}: {most}"


def _exp_wording(s: Situation) -> Wording | None:
    if s.then is not None and s.then.name == "divide":
        return Wording(
            "exp of a number this large is beyond {limit}, the largest {dtype}, and Inf / Inf "
            "is NaN",
            "use softmax(x) instead of exp(x) / sum(exp(x)), or subtract the largest of each "
            "row, `{op}(x - max(x, axis=-1, keepdims=True))`",
        )
    if s.operation in ("sinh", "cosh"):
        return Wording(
            "{op} grows as exp does: of a number this large it is beyond {limit}, the largest "
            "{dtype}",
            "clamp the argument on both sides: `{op}(clip(x, -{cap}, {cap}))`; far from 0, "
            "log(cosh(x)) is abs(x) - log(2)",
        )
    return None


def _overflow(s: Situation) -> str | None:
    if s.record is None or not finite_operands(s) or too_large(s):
        return None
    limit = limits(s.dtype)[0]
    top = largest(s)
    wide = s.record.wide
    if wide is not None and wide > limit * (1 - 2**-12):
        larger = "float32" if s.dtype in HALF and wide <= limits("float32")[0] else "float64"
        return f"in {larger} the result reaches {magnitude(wide)}; {s.dtype} ends at " + magnitude(
            limit
        )
    if not s.made("posinf", "neginf") and s.operation not in _COMPOSED:
        return None  # a NaN out of finite numbers takes more than one operation
    # Small operands cannot overflow: then something else is wrong, and no guess is made.
    if top is None or not _can_overflow(s, top, limit):
        return None
    reach = " and ".join(
        magnitude(item.summary.absmax)
        for item in s.operands
        if item.summary is not None and item.summary.absmax is not None
    )
    return f"operands up to {reach}; {s.dtype} ends at {magnitude(limit)}"


def _can_overflow(s: Situation, top: float, limit: float) -> bool:
    if s.operation in ("divide", "reciprocal", "addcdiv"):
        # Only a divisor near 0 makes these large; 0 itself has its own rule.
        value = real(s.value(*(SELF if s.operation == "reciprocal" else OTHER)))
        return value is not None and 0 < abs(value) < 1
    if s.operation in _CASTS or s.operation in ("add", "subtract", "lerp", "mean"):
        return top > limit / 8
    sizes = [item.summary.size for item in s.operands if item.summary is not None]
    terms = max(sizes, default=1)
    if s.operation in ("pow", "prod", "cumprod", "det", "sinh", "cosh", "exp2", "rnn"):
        return top > 1
    if s.operation in ("sum", "cumsum", "logsumexp", "scatter_add"):
        return top * terms > limit
    return top > 1 and 2 * math.log(top) + math.log(max(terms, 1)) > math.log(limit)


_UNTRAINED = Wording(
    "the result of {op} is beyond {limit}, the largest {dtype}",
    "the numbers themselves are too large: find where they begin to grow and normalise there",
)


def _overflow_wording(s: Situation) -> Wording | None:
    op = s.operation
    if op in _CASTS:
        return Wording(
            "a number was cast to {dtype} that is beyond its largest, {limit}",
            "keep this tensor in float32 (or bfloat16, whose range is float32's), or scale it "
            "down before the cast",
        )
    if op in ("divide", "reciprocal"):
        return Wording(
            "the divisor is so small that the quotient is beyond {limit}, the largest {dtype}",
            "give the divisor a floor: {floored}",
        )
    if op == "det":
        return Wording(
            "the determinant is beyond {limit}, the largest {dtype}",
            "use slogdet, which returns the logarithm of the determinant",
        )
    if s.dtype not in HALF or s.dtype == "bfloat16":
        return None if s.trained else _UNTRAINED
    if op in ("matmul", "attention", "einsum"):
        return Wording(
            "the product is beyond {limit}, the largest {dtype}",
            "scale an operand before the product instead of after it, (q / sqrt(d)) @ k, or do "
            "this product in bfloat16 or float32",
        )
    if op in ("square", "pow", "sum", "mean", "mse_loss", "var", "std", "vector_norm"):
        return Wording(
            "the result of {op} is beyond {limit}, the largest {dtype}",
            "compute {op} in float32 and cast the result back",
        )
    return Wording(
        "the result of {op} is beyond {limit}, the largest {dtype}",
        "run this layer in bfloat16 or float32, or normalise its input",
    )


def _written(s: Situation) -> str | None:
    constants = (item for item in s.operands if item.source == "constant")
    item = next((item for item in constants if item.summary and item.summary.bad), None)
    if item is None or (s.made("nan") and item.summary and not item.summary.nan):
        item = too_large(s)  # else arithmetic with it explains more
    if item is None:
        return None
    return f"{called(s, item) or 'an operand'} is the constant {literal(item.value)}"


_LITERAL = re.compile(r"nan|inf", re.IGNORECASE)


def too_large(s: Situation) -> Operand | None:
    """Give a number of the code's that becomes Inf in the dtype, though no Inf is spelt.

    Some frameworks make an array of it, which is Inf in float16 from 65,520 on. Others compute with
    the number itself, in float32 at least.
    """
    top = max(limits(s.dtype)[0], limits("float32")[0])
    made = s.dtype == "float16" and s.line and not _LITERAL.search(s.line.partition("#")[0])
    for item in s.operands:
        x = item.summary
        plain = x is not None and x.dtype in ("float", "int") and (x.absmax or 0) > top
        if plain or (made and item.source == "constant" and infinite(x)):
            return item
    return None


def _elsewhere(s: Situation) -> Wording | None:
    """Tell of a number that the line uses and does not spell."""
    if (item := too_large(s)) is not None:
        below = isinstance(item.value, float | int) and item.value < 0
        mask = ", {mask} for a mask" if below else ""
        return Wording(
            "a constant of the code is beyond {limit}, the largest {dtype}, and becomes Inf",
            f"write a smaller number{mask}, or compute this in a wider dtype",
        )
    if not s.line or _LITERAL.search(s.line.partition("#")[0]):
        return None
    return Wording(
        "this {kind} came as a plain number or a constant: the code writes it elsewhere, or "
        "computed it where nothing is watched (.item(), NumPy, Python's own numbers)",
        "look at where this number is made, and check it there: anynan.check(x); if it is "
        "meant, say so with anynan.expect(..., reason=...)",
    )


SOFTMAX = frozenset({"softmax", "log_softmax", "logsumexp", "attention", "cross_entropy"})

RULES = (
    Rule(
        "softmax_of_inf",
        _softmax_of_inf,
        "a logit of +Inf: {op} subtracts the largest logit, and Inf - Inf is NaN",
        "keep the logits finite: scale or clamp them, `{op}(clip(x, -1e4, 1e4))`, or compute them "
        "in float32",
        operations=SOFTMAX,
        phases=BOTH,
    ),
    Rule(
        "softmax_fully_masked",
        _fully_masked,
        "fully masked row: {op} over a row of -inf is 0/0",
        "let every query see at least one key, or zero the output of fully masked rows: "
        "`where(seen, {op}(where(seen, x, 0)), 0)`, seen = any(x > -inf, axis=-1, keepdims=True)",
        operations=frozenset({"softmax", "log_softmax", "logsumexp", "attention"}),
        phases=BOTH,
        wording=_masked_wording,
    ),
    Rule(
        "target_class_masked",
        _masked_target,
        "the target is a class whose score is -Inf, so its loss is Inf",
        "do not mask the target's own class; or mask with a large finite number such as {mask}",
        operations=frozenset({"nll_loss", "cross_entropy"}),
    ),
    Rule(
        "inf_minus_inf",
        _inf_minus_inf,
        "Inf minus Inf is NaN",
        "mask with where(mask, x, 0) after the arithmetic instead of putting Inf in before it, or "
        "use a large finite number such as {mask}",
        operations=_PRODUCTS | _SUMS | {"add", "subtract", "lerp", "addcmul", "scatter_add"},
    ),
    Rule(
        "zero_times_inf",
        lambda s: None if too_large(s) else _zero_times_inf(s),
        "0 times Inf is NaN",
        "keep the Inf out of this product: where(isfinite(x), x, 0) before it, or use a large "
        "finite number such as {mask}",
        operations=_PRODUCTS | {"multiply", "addcmul", "prod", "cumprod"},
        phases=BOTH,
        wording=dict.fromkeys(
            ("multiply", "addcmul"),
            Wording(
                "0 times Inf is NaN: multiplying by a mask does not remove an Inf",
                "choose instead of multiplying: where(mask, x, 0); to build an attention mask "
                "write where(mask, 0, -inf)",
            ),
        ),
    ),
    Rule(
        "normalisation_of_inf",
        _norm_of_inf,
        "{op} subtracts the mean, which is Inf when one element is: Inf - Inf is NaN",
        "keep Inf out of the input of {op}: mask after it, or use a large finite number",
        operations=_NORMS | _SPREADS,
    ),
    Rule(
        "variance_of_one",
        _variance_of_one,
        "the unbiased variance divides by n - 1: of one element it is 0/0",
        "ask for the biased one, var(x, correction=0), or give it more than one element (a last "
        "batch of one can be dropped)",
        operations=_SPREADS | {"batch_norm"},
        phases=BOTH,
    ),
    Rule(
        "empty_mean",
        _empty_mean,
        "the mean of no elements is 0/0",
        "skip the empty case, or divide the sum by maximum(count, 1)",
        operations=_MEANS | {"nll_loss", "cross_entropy"},
        wording=_empty_wording,
    ),
    Rule(
        "exp_overflow",
        _exp_overflow,
        "{op} of a number this large is beyond {limit}, the largest {dtype}",
        "subtract the largest value before exp (softmax, log_softmax and logsumexp do), or clamp "
        "the argument: `{op}(minimum(x, {cap}))`",
        operations=frozenset({"exp", "expm1", "exp2", "sinh", "cosh"}),
        wording=_exp_wording,
    ),
)

# Last: a constant explains a failure only where no arithmetic with it does.
WRITTEN = Rule(
    "written_constant",
    _written,
    "the code itself writes this {kind}",
    "if it is intended, say so with anynan.expect(..., reason=...); else give the place a finite "
    "value",
    phases=ANY,
    wording=_elsewhere,
)

# After the rules of growth: an overflow at the end of a climb has the climb as its cause.
OVERFLOW = Rule(
    "overflow_in_dtype",
    _overflow,
    "the result of {op} is beyond {limit}, the largest {dtype}",
    "the numbers themselves are too large: find the layer where they begin to grow and normalise "
    "there, clip, or lower the learning rate",
    operations=OVERFLOWING,
    phases=BOTH,
    wording=_overflow_wording,
)
