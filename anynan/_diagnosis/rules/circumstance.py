"""Rules that look beyond one operation: the batch, the weights, the optimizer, the last steps."""

import math
import re

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import Operand
from anynan._diagnosis.rules.evidence import (
    called,
    finite_operands,
    limits,
    literal,
    magnitude,
    plural,
    rising,
    seen,
    told,
)
from anynan._diagnosis.rules.overflow import OVERFLOWING, too_large
from anynan._diagnosis.rules.situation import ANY, BACKWARD, Rule, Situation, Wording, when
from anynan.events import NON_FINITE, STATE

_RUNNING = ("running_mean", "running_var", "moving_mean", "moving_variance")
_LABELS = ("label", "target", "truth", "y_true")


def _from_outside(s: Situation, source: str) -> Operand | None:
    """Return the operand whose bad values came from there, masks left out."""
    for item in s.operands:
        summary = item.summary
        # -Inf alone is how an additive mask comes in.
        if item.source == source and summary is not None and summary.nan + summary.posinf:
            return item
    return None


# The batch.


def _rows(s: Situation, summary: Summary | None) -> str:
    if not s.rows:
        return seen(summary)
    shown = ", ".join(str(row) for row in s.rows[:5]) + (", ..." if len(s.rows) > 5 else "")
    if summary is None or not summary.shape:
        return f"bad rows: {shown}"
    verb = "is" if len(s.rows) == 1 else "are"
    return f"{len(s.rows)} of {plural(summary.shape[0], 'row')} {verb} bad: {shown}"


def _bad_label(s: Situation) -> str | None:
    if s.kind not in NON_FINITE:
        return None
    if s.phase == "input":
        state = s.sole and s.tensor == "y"  # of a differential equation, as a rule
        return _rows(s, s.summary) if is_label(s.tensor) and not state else None
    item = _from_outside(s, "input")
    if item is None:
        return None
    named = is_label(item.label or "") or any(word in item.name.lower() for word in _LABELS)
    return f"{called(s, item) or 'labels'}: {seen(item.summary)}" if named else None


def is_label(name: str) -> bool:
    """Guess from its name whether an input is what a model should predict."""
    parts = re.split(r"\W+", name.lower())
    return "y" in parts or any(word in part for part in parts for word in _LABELS)


def _bad_input(s: Situation) -> str | None:
    if s.kind not in NON_FINITE:
        return None
    if s.phase == "input":
        return _rows(s, s.summary)
    places = (_from_outside(s, source) for source in ("input", "data", "unknown"))
    item = next(filter(None, places), None)
    return None if item is None else f"{called(s, item) or 'input'}: {seen(item.summary)}"


def _input_wording(s: Situation) -> Wording | None:
    if s.phase == "input" and s.summary is not None and s.summary.shape == ():
        return Wording(
            "this number was already bad when it came in",
            "look at where it is computed: it is one number, and no sample of the data",
        )
    if s.phase == "input" or _from_outside(s, "input") is not None:
        return None
    if _from_outside(s, "data") is not None:
        return Wording(
            "an array that held these values already is taken in here: data that the step "
            "reads itself, a table of the code, or arithmetic in another library",
            "check that array where it is made, anynan.check(x): repair or drop the samples, "
            "or do the arithmetic where it can be watched",
        )
    return Wording(
        "an operand was bad already, and no operation of this step made it: it came from "
        "outside, or from code that cannot be watched",
        "pass the data as arguments, so that their origin can be named, and check where this "
        "operand is made: anynan.check(x)",
    )


def _uninitialised(s: Situation) -> str | None:
    item = next((item for item in s.operands if item.source == "uninitialised"), None)
    return None if item is None else f"{called(s, item) or 'input'}: {seen(item.summary)}"


def _overwritten(s: Situation) -> str | None:
    item = next((item for item in s.operands if item.source == "overwritten"), None)
    if item is None and s.overwritten:
        return f"{s.tensor}: {seen(s.summary)}"
    return None if item is None else f"{item.label or item.name}: {seen(item.summary)}"


# The weights.


def _running(s: Situation) -> str | None:
    name = (s.parameter or "").rpartition(".")[2]
    if s.phase in ("parameter", "optimizer") and name in _RUNNING:
        return seen(s.summary)
    item = _from_outside(s, "buffer")
    label = "" if item is None else (item.label or item.name)
    if item is not None and label.rpartition(".")[2] in _RUNNING:
        return f"{label}: {seen(item.summary)}"
    return None


def _bad_parameter(s: Situation) -> str | None:
    if s.phase == "parameter" and (s.record is None or _from_outside(s, "parameter") is not None):
        return seen(s.summary)
    item = _from_outside(s, "parameter") or _from_outside(s, "buffer")
    return None if item is None else f"{called(s, item) or 'input'}: {seen(item.summary)}"


# The optimizer.


def _state_text(s: Situation, name: str) -> str:
    return f"{name}: {seen(s.state[name])}"


def _updating(s: Situation) -> bool:
    return s.phase == "optimizer" and (s.record is None or s.record.name in ("adam", "sgd"))


def _gradient_text(s: Situation) -> str:
    if s.gradient is None or s.gradient.absmax is None:
        return ""
    return f"the gradient reached {magnitude(s.gradient.absmax)}"


def _second_moment(s: Situation) -> tuple[str, Summary] | None:
    names = (
        "exp_avg_sq", "nu", "v", "velocity", "max_exp_avg_sq", "square_avg", "sum", "accumulator",
    )  # fmt: skip
    return next(((name, s.state[name]) for name in names if name in s.state), None)


def _optimizer_overflow(s: Situation) -> str | None:
    moment = _second_moment(s)
    if not _updating(s) or moment is None or not moment[1].posinf:
        return None
    parts = [_state_text(s, moment[0]), _gradient_text(s)]
    return ", ".join(part for part in parts if part)


# What the numbers of optimizers are called.
_SETTINGS = (
    "lr", "learning_rate", "weight_decay", "beta", "eps", "momentum", "rho", "alpha", "dampening",
)  # fmt: skip


def _setting(s: Situation) -> str | None:
    if not _updating(s):
        return None
    found = ((name, x) for name, x in s.settings.items() if name.startswith(_SETTINGS))
    return next((f"{name} is {literal(x)}" for name, x in found if not math.isfinite(x)), None)


def _rate(s: Situation) -> str:
    """Say that the learning rate alone takes the gradient beyond the weight's dtype."""
    rate = s.settings.get("lr", s.settings.get("learning_rate"))
    size = None if s.gradient is None else s.gradient.absmax
    if rate is None or not size or s.summary is None:
        return ""
    top = limits(s.summary.dtype)[0]
    beyond = abs(rate) * size > top
    return f", and {magnitude(rate)} times that is beyond {magnitude(top)}" if beyond else ""


def _optimizer_epsilon(s: Situation) -> str | None:
    moment = _second_moment(s)
    if not _updating(s):
        return None
    divisor = None if s.record is None else s.summary_of("other")
    if moment is None and divisor is not None and divisor.zero and not divisor.bad:
        return f"{divisor.zero} of {plural(divisor.size, 'element')} of the divisor are 0"
    if moment is None or moment[1].bad or not moment[1].zero:
        return None
    name, state = moment
    eps = s.param("eps") if s.record is not None else s.settings.get("eps")
    lost = eps is not None and eps <= limits(state.dtype)[1] / 2
    # The usual 1e-8 is 0 in this dtype; a given eps decides for itself.
    if not (lost or (eps is None and limits(state.dtype)[1] / 2 >= 1e-8)):
        return None
    return f"{state.zero} of {plural(state.size, 'element')} of {name} are 0 in {state.dtype}"


def _optimizer_state(s: Situation) -> str | None:
    if not _updating(s):
        return None
    name = next((name for name, held in s.state.items() if held.bad), None)
    return None if name is None else _state_text(s, name)


def _optimizer_step(s: Situation) -> str | None:
    if not _updating(s) or (s.gradient is not None and s.gradient.bad):
        return None
    if s.gradient is None:
        if s.since is None or s.since[0] < 0:
            return None
        return f"{seen(s.summary)}, all finite at step {s.since[0]}"
    growth = f"; it grew: {told(s.growth)}" if rising(s.growth) else ""
    return (_gradient_text(s) or f"gradient: {seen(s.gradient)}") + _rate(s) + growth


def _written(s: Situation) -> str | None:
    """Catch NaN in a weight whose gradient and optimizer state are finite."""
    if not _updating(s) or s.summary is None or s.unread:
        return None
    found = s.summary
    if found.posinf or found.neginf or not found.nan:
        return None
    if s.gradient is not None and s.gradient.bad:
        return None
    if any(state.bad for state in s.state.values()):
        return None
    gradient = _gradient_text(s)
    return seen(found) + (f"; {gradient}" if gradient else "")


def _step_wording(s: Situation) -> Wording | None:
    if s.gradient is not None:
        return None
    if s.unread:
        return Wording(
            "the weight was finite before these updates and not after, and "
            f"{s.unread}: probably an update used a bad gradient",
            "read every step and every gradient (the defaults), and the gradient is named "
            "before the update",
        )
    return Wording(
        "the weight was finite before these updates and not after, though no gradient was "
        "bad: a step was probably too large for its dtype, or other code wrote it",
        "lower the learning rate or clip the gradient norm; "
        "track(..., advanced=anynan.Advanced(parameters=True)) finds the exact step and its "
        "gradient",
    )


# The last steps.


def _overflowed(s: Situation) -> bool:
    """Tell whether the failure is one that growth alone explains."""
    if s.kind in ("large", "spike"):
        return True
    if s.record is None:
        return s.kind in ("nan", "posinf", "neginf")
    return s.record.name in OVERFLOWING | {"exp", "expm1"} and finite_operands(s)


def _scale_at_floor(s: Situation) -> str | None:
    if s.scale is None or s.scale > 1 or not _overflowed(s):
        return None
    return f"the loss scale is down to {magnitude(s.scale)}{_reached(s)}"


def _reached(s: Situation) -> str:
    """Say what the overflowing result is in float32, and without the loss scale."""
    wide = None if s.record is None else s.record.wide
    if wide is None or s.scale is None:
        return ""
    text = f"; in float32 the result reaches {magnitude(wide)}"
    if s.scale > 1:
        text += f" ({magnitude(wide / s.scale)} without the loss scale)"
    return f"{text}, {s.dtype} ends at {magnitude(limits(s.dtype)[0])}"


def _scale_too_high(s: Situation) -> str | None:
    if s.scale is None or s.scale <= 1 or not _overflowed(s) or s.record is None:
        return None
    if s.dtype != "float16":
        return None
    return f"loss scale {magnitude(s.scale)}, gradients in float16{_reached(s)}"


def _exploding(s: Situation) -> str | None:
    if s.kind == "spike":
        return _jump(s) or told(s.growth, "norm") or seen(s.summary)
    return _climb(s)


def _jump(s: Situation) -> str:
    """Say how far a gradient norm is above its median, and which layer has the most of it."""
    found = s.finding
    if found is None or found.median is None:
        return ""
    past = len(found.growth) - 1
    ratio = f"{magnitude(found.norm / found.median)} times" if found.median else "far above"
    text = f"{magnitude(found.norm)} is {ratio} the median of the {past} updates before"
    if found.largest is not None:
        layer, norm, usual = found.largest
        before = "" if usual is None else f", where {magnitude(usual)} is usual"
        text += f"; largest in {layer or 'the model itself'}: {magnitude(norm)}{before}"
    return f"{text}; {told(found.growth, 'norm')}"


def _climb(s: Situation) -> str | None:
    if s.record is not None and s.record.wide is not None and s.dtype == "float16":
        return None  # that the value fits float32 is the better story
    if not _overflowed(s) or too_large(s):
        return None
    if s.jump:
        return f"{s.jump}; then {s.operation} overflowed {s.dtype}"
    beyond = math.inf if s.kind in ("large", "spike") else limits(s.dtype)[0]
    if not rising(s.growth, beyond):
        return None
    end = "" if s.record is None else f"; then {s.operation} overflowed {s.dtype}"
    return told(s.growth) + end


def _large(s: Situation) -> str | None:
    if s.kind != "large":
        return None
    room = None if s.summary is None else s.summary.headroom
    if s.summary is None or s.summary.absmax is None or room is None:
        return seen(s.summary)
    size = magnitude(s.summary.absmax)
    return f"largest magnitude {size}, {room:.1f} bits below the largest {s.dtype}"


def _vanishing(s: Situation) -> str | None:
    if s.kind != "vanishing":
        return None
    found = s.finding
    if found is None:
        return told(s.growth, "norm") or seen(s.summary)
    text = f"the norm is {magnitude(found.norm)}"
    if found.layer:
        text += f", of {magnitude(found.total)} over all weights"
    return f"{text}; {told(found.growth, 'norm')}" if len(found.growth) > 1 else text


# Before every rule of an operation: what came in bad is nobody's arithmetic.
OUTSIDE = (
    Rule(
        "uninitialised_memory",
        _uninitialised,
        "memory was read before anything was written to it",
        "make the array with zeros(...) or full(...) instead of empty(...), or fill it before use",
        phases=ANY,
    ),
    Rule(
        "overwritten_input",
        _overwritten,
        "this argument was finite when the call began, and was overwritten since by code that "
        "works on its plain array",
        "check what that code writes, or let it write into the argument itself, where it is "
        "watched",
        phases=ANY,
    ),
    Rule(
        "bad_label",
        _bad_label,
        "the labels were already bad when they came in",
        "find where they go bad: in the data set, where missing values often arrive as NaN, or in "
        "code that prepares them; repair or drop such samples",
        phases=ANY,
    ),
    Rule(
        "bad_input",
        _bad_input,
        "the batch was already bad when it came in",
        "find where it goes bad: in the data set, by missing values for one, or in code that "
        "prepares it, by a standard deviation of 0; repair or drop such samples",
        phases=ANY,
        wording=_input_wording,
    ),
    Rule(
        "running_statistics_bad",
        _running,
        "the running statistics of a normalisation layer are bad: one bad batch is enough, and it "
        "never heals",
        "reset this layer's running statistics, and track the training steps to catch the batch "
        "that spoils them",
        phases=ANY,
    ),
    Rule(
        "bad_parameter",
        _bad_parameter,
        "a weight or buffer was bad before the computation that used it",
        "if it was initialised or loaded like this, mend that (`anynan scan FILE` reads a "
        "checkpoint); else go back to a checkpoint from before, and track the whole training step "
        "(or set advanced=anynan.Advanced(parameters=True)) to catch the write itself",
        phases=ANY,
        wording=when(
            lambda s: s.since is not None and s.since[0] >= 0,
            "{parameter} was bad before the computation that used it",
            "go back to the weights of step {good} or earlier, and track the whole training step "
            "(or set advanced=anynan.Advanced(parameters=True)) to catch the write itself",
        ),
    ),
)

OPTIMIZER = (
    Rule(
        "optimizer_setting_bad",
        _setting,
        "a number that the optimizer works with is not finite, so no update is",
        "look at the schedule or the configuration that sets it: it divides by 0, reads a missing "
        "value, or takes a loss that is not finite",
        phases=("optimizer",),
    ),
    Rule(
        "optimizer_state_overflow",
        _optimizer_overflow,
        "the square of the gradient is beyond the largest number of the optimizer state's dtype",
        "clip the gradient norm before the step, or keep the optimizer state in float32",
        phases=("optimizer",),
        wording=when(
            lambda s: s.tensor == STATE,
            "the square of the gradient is beyond the largest number of the optimizer state's "
            "dtype: updates that are divided by it are 0, so nothing moves here any more",
            "clip the gradient norm before the step, or keep the optimizer state in float32; then "
            "reset this state",
        ),
    ),
    Rule(
        "optimizer_epsilon_underflow",
        _optimizer_epsilon,
        "the optimizer's eps rounds to 0 in the dtype of its state, so the update is divided by 0",
        "keep the weights in float32 and only the computation in half precision, or set eps=1e-4",
        phases=("optimizer",),
        wording=when(
            lambda s: s.settings.get("eps") == 0,
            "the optimizer's eps is 0, so the update is divided by 0 where no gradient has come "
            "yet",
            "give it an eps again: 1e-8 is the usual one in float32, 1e-4 in half precision",
        ),
    ),
    Rule(
        "optimizer_state_bad",
        _optimizer_state,
        "the optimizer's own state is bad, though no gradient that was read is: it came so from a "
        "checkpoint or an earlier step, or code changed the gradient before the update",
        "look at what changes gradients before the update (clipping, scaling), and at the "
        "checkpoint; reset the state of this parameter, or load an earlier checkpoint",
        phases=("optimizer",),
    ),
    Rule(
        "weight_written",
        _written,
        "the weight was finite before this update, and neither its gradient nor the optimizer's "
        "state is bad; a step that is too large gives Inf, so this NaN was probably written by "
        "other code, or by an optimizer that divides by 0",
        "look for code that writes into {parameter} beside the optimizer (loading, clipping, "
        "weights set by hand), and at the optimizer's eps",
        phases=("optimizer",),
        sure=False,
        wording=when(
            lambda s: s.gradient is None,
            "the weight was finite before this update and NaN after it, and its gradient was not "
            "seen: it was probably bad already, or the optimizer divides by 0",
            "look at what the step computes, and at the optimizer's eps",
        ),
    ),
    Rule(
        "optimizer_step_too_large",
        _optimizer_step,
        "the gradient was finite and the weight was not after the update: the step was probably "
        "too large for the weight's dtype",
        "lower the learning rate, clip the gradient norm, or keep the weights in float32",
        phases=("optimizer",),
        sure=False,
        wording=_step_wording,
    ),
)

# What an update's own operation says better, where it was watched.
PROBABLE = frozenset(rule.tag for rule in OPTIMIZER if not rule.sure)

# After the rules of the operations, which know more; before the plain overflow.
GROWTH = (
    Rule(
        "loss_scale_floor",
        _scale_at_floor,
        "the gradients overflow although the loss scale is at its floor: scaling is not the reason",
        "find the layer where values begin to grow, or train in bfloat16, which "
        "needs no loss scale",
        phases=BACKWARD,
    ),
    Rule(
        "loss_scale_too_high",
        _scale_too_high,
        "the loss scale probably pushes the gradients beyond {limit}, the largest {dtype}; while "
        "the scale is being found this is normal",
        "let the scaler lower it: unscale before you read gradients, and start from a smaller "
        "initial scale",
        phases=BACKWARD,
        sure=False,
    ),
    Rule(
        "exploding_gradient",
        _exploding,
        "the gradient probably exploded: it grew over the last steps until it overflowed",
        "clip the gradient norm before each step, lower the learning rate or lengthen its warm-up",
        phases=BACKWARD,
        sure=False,
        wording=when(
            lambda s: s.kind == "spike",
            "the gradient norm jumped far above its running median; probably an unusual batch or "
            "too large a learning rate",
            "clip the gradient norm before each step, and look at the batch of this step",
        ),
    ),
    Rule(
        "growth_without_training",
        lambda s: None if s.trained else _climb(s),
        "nothing was trained, and this reading grew over the last steps until it overflowed: "
        "what one step hands to the next is probably larger each time",
        "normalise or bound what is carried from step to step (a hidden state, a running value), "
        "or begin it anew more often",
        sure=False,
    ),
    Rule(
        "learning_rate_divergence",
        _climb,
        "the training probably diverged: this reading grew over the last steps until it overflowed",
        "lower the learning rate or lengthen its warm-up, and clip the gradient norm",
        sure=False,
        wording=when(
            lambda s: s.jump,
            "the training probably diverged: updates made the weights, and so these values, far "
            "too large",
            "lower the learning rate or lengthen its warm-up, and clip the gradient norm",
        ),
    ),
)

MAGNITUDE = (
    Rule(
        "beyond_limit",
        _large,
        "the values are larger than the policy allows",
        "find where they begin to grow and normalise there; if they are meant, raise the limit in "
        "the policy",
        phases=ANY,
    ),
    Rule(
        "vanishing_gradient",
        _vanishing,
        "the values are too small to teach the layers before this one anything",
        "look for a saturated activation, add a residual connection or a normalisation, or raise "
        "the loss scale in float16",
        phases=ANY,
        wording=lambda s: (
            Wording(
                "the gradient that reaches this layer's weights is next to nothing: they "
                "learn nothing"
                if s.layer
                else "the gradients of all weights are next to nothing: none of them learns",
                "look for saturated activations between this layer and the loss, add residual "
                "connections or normalisation, or raise the loss scale in float16",
            )
            if s.finding is not None
            else None
        ),
    ),
)
