"""Why a number went bad and what to change: a search through the table of rules."""

from anynan._base.summary import Summary
from anynan._diagnosis.rules import RULES, Rule, Situation
from anynan._diagnosis.rules.evidence import called, facts, infinite, literal, seen
from anynan._diagnosis.rules.repair import split
from anynan._diagnosis.rules.situation import BACKWARD, BOTH, FORWARD
from anynan._diagnosis.vocabulary import EVERYWHERE, cell, domain
from anynan.errors import reason
from anynan.events import Cause

__all__ = ["RULES", "STEP", "Rule", "Situation", "explain", "table"]

UNKNOWN = "unknown"
# What is said where no operation was seen to make it: a tag, a sentence, a fix.
STEP = (
    "track the training step instead of the model (put the body of the loop into a function): the "
    "report then names the operation"
)
_OUTSIDE = "the model's outputs were finite, and the loss or its gradient is not"
_BETWEEN = "a layer received a bad input: code between the watched layers made it"
_ANOTHER = "the bad input came from another watched model"
_WITHOUT_RULE = (
    ("outside_the_model", _OUTSIDE, STEP),
    ("made_between_layers", _BETWEEN, STEP),
    ("made_by_another", _ANOTHER, "fix that model first"),
    (
        UNKNOWN,
        "no rule fits, so no cause is named",
        "compare the operands with what the operation accepts",
    ),
)


def explain(situation: Situation) -> Cause:
    """Name the cause: the first rule of the table that fits, else ``unknown``.

    Args:
        situation: Everything that is known of the failure.
    """
    return advise(situation)[0]


def advise(situation: Situation) -> tuple[Cause, str]:
    """Name the cause, and give the code in its fix: empty where the fix is no code."""
    names = facts(situation)
    for rule in RULES:
        if not _concerns(rule, situation):
            continue
        try:
            evidence = rule.condition(situation)
            if evidence is None:
                continue
            text, fix = rule.sharper(situation) or (rule.text, rule.fix)
            fix, code = split(fix.format(**names), situation.operation)
            return Cause(rule.tag, text.format(**names), fix, evidence), code
        except Exception as error:  # noqa: BLE001  the rest of the report is worth more
            return _failed(rule, error), ""
    return _unknown(situation), ""


def _failed(rule: Rule, error: Exception) -> Cause:
    """Say that a rule broke: the rules after it might name what it was there to rule out."""
    return Cause(
        UNKNOWN,
        f"anynan's own rule {rule.tag} failed here ({reason(error)}), so no cause is named",
        "compare the operands with what the operation accepts, and please report this",
    )


def _concerns(rule: Rule, s: Situation) -> bool:
    if rule.operations and (s.record is None or s.record.name not in rule.operations):
        return False
    return not rule.phases or (s.where if rule.operations else s.phase) in rule.phases


def _unknown(s: Situation) -> Cause:
    """Say what was seen, without a guess."""
    names = facts(s)
    if s.record is None:
        fix = "wrap the suspected part in anynan.check(...) calls"
        return Cause(
            UNKNOWN,
            "no single operation could be named",
            fix if s.watched else f"{fix}, or track with level='operation'",
            seen(s.summary),
        )
    if s.record.said in _SAID:
        return _reported(s.operation, s.record.said, names["kind"])
    values = "; ".join(
        f"{name} = {literal(item.value)}"
        if item.value is not None
        else f"{name}: {seen(item.summary)}"
        for item in s.operands
        if (name := called(s, item))
    )
    origin = "the gradient of {op}" if s.where == "backward" else "{op}"
    if not s.operands:
        return Cause(
            UNKNOWN,
            f"{origin} left {{kind}}, and what it was given is gone".format(**names),
            "wrap what this line computes in anynan.check(...) calls",
        )
    if s.where != "backward" and any(infinite(item.summary) for item in s.operands):
        return Cause(
            UNKNOWN,
            "{op} received Inf and turned it into {kind}; no rule of anynan fits".format(**names),
            "find where this Inf is put in; a mask's -Inf is for a softmax or a maximum: leave it "
            "out of what is summed, as a loss is (label smoothing sums over every class)",
            values,
        )
    finite = all(item.summary is not None and not item.summary.bad for item in s.operands)
    given = " from finite operands" if finite else ""
    accepted = domain(s.operation)
    names["accepted"] = "" if accepted in ("", EVERYWHERE) else f" ({accepted})"
    return Cause(
        UNKNOWN,
        f"{origin} made {{kind}}{given}; no rule of anynan fits".format(**names),
        "compare these operands with what {op} accepts{accepted}; if the reason is a common one, "
        "please report it so that anynan can name it".format(**names),
        values,
    )


# What to do, by what a library says itself where no operands are known.
_SAID = {
    "overflow": (
        "make the operands smaller, or compute this in a wider dtype; if they are large already, "
        "find where they begin to grow"
    ),
    "divide by zero": (
        "keep what is divided by away from 0, and the argument of a logarithm or a power: add "
        "eps, or leave the case out with where(...)"
    ),
    "invalid value": (
        "keep the operands where {op} is defined: 0/0, inf/inf and inf - inf are not, nor are "
        "roots and logarithms of negative numbers"
    ),
}


def _reported(operation: str, said: str, kind: str) -> Cause:
    """Say what the library itself said: its operands are not known."""
    fix = _SAID[said].format(op=operation)
    quotient = (operation, said) == ("divide", "divide by zero")
    tag = "divide_by_zero" if quotient else UNKNOWN
    tag = "overflow_in_dtype" if said == "overflow" else tag
    text = f"{operation} made {kind}, and the library itself reported: {said}"
    return Cause(tag, text, fix, "")


def table() -> str:
    """Return the rules as a Markdown table, in the order in which they are searched.

    Where a text depends on the dtype, float16 stands as the example. A tag is its row's anchor.
    """
    example = Situation("forward", "nan", summary=Summary((), "float16", "cpu", 1))
    lines = ["| tag | operations | phase | cause | fix |", "| --- | --- | --- | --- | --- |"]
    for rule in RULES:
        operations = ", ".join(f"`{name}`" for name in sorted(rule.operations)) or "any"
        names = facts(example, _example(rule))
        text, (fix, _) = rule.text.format(**names), split(rule.fix.format(**names), "")
        lines.append(
            f"| {_anchor(rule.tag)} | {operations} | {_phases(rule)} | {cell(text)} | {cell(fix)} |"
        )
    lines += [
        f"| {_anchor(tag)} | any | any | {text} | {fix} |" for tag, text, fix in _WITHOUT_RULE
    ]
    return "\n".join(lines) + "\n"


def _anchor(tag: str) -> str:
    return f'<a id="{tag}"></a>`{tag}`'


def _example(rule: Rule) -> str:
    """Choose the operation that stands for a rule: ``log`` for the logarithms."""
    if not 0 < len(rule.operations) < 7:
        return "the operation"
    return min(rule.operations, key=lambda name: (len(name), name))


def _phases(rule: Rule) -> str:
    if not rule.phases or rule.phases == BOTH:
        return "any"
    named = {FORWARD: "forward", BACKWARD: "backward"}
    return named.get(rule.phases, ", ".join(rule.phases))
