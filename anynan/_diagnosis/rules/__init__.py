"""The table of causes, in the order in which it is searched."""

from anynan._diagnosis.rules import circumstance, domain, gradient, overflow
from anynan._diagnosis.rules.situation import Rule, Situation

RULES: tuple[Rule, ...] = (
    *circumstance.OUTSIDE,
    gradient.TRAP,
    *domain.RULES,
    *overflow.RULES,
    *gradient.RULES,
    *circumstance.OPTIMIZER,
    *circumstance.GROWTH,
    overflow.OVERFLOW,
    *circumstance.MAGNITUDE,
    overflow.WRITTEN,
)

__all__ = ["RULES", "Rule", "Situation"]
