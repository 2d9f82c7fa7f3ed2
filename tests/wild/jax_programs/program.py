"""What a program is: a step that is called again and again, and the faults it can have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PROGRAMS: dict[str, "Program"] = {}


@dataclass(frozen=True)
class Loop:
    """A step, its first arguments, and those of the next step from the last and its results.

    Attributes:
        weights: The position of the weights in the arguments; None where there are none.
        jitted: False if the step comes as it has to be called: jitted with options of its own.
        pick: Words of the weight that is spoilt after the first step; the middle one, if none.
    """

    step: Callable[..., Any]
    start: Callable[[], tuple[Any, ...]]
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda args, _: args
    weights: int | None = None
    jitted: bool = False
    pick: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """What a report has to say of a fault; None and an empty tuple leave open what is not known.

    The line is the one that ends in ``# fault: <name>``.
    """

    operation: tuple[str, ...] = ()
    cause: str | None = None
    layer: str | None = None
    phase: str | None = None
    line: bool = True


@dataclass(frozen=True)
class Program:
    build: Callable[[str], Loop]
    faults: dict[str, Expected] = field(default_factory=dict)


def program(
    name: str, **faults: Expected
) -> Callable[[Callable[[str], Loop]], Callable[[str], Loop]]:
    """Register a function that builds a program, clean for ``""``, or with the named fault."""

    def register(build: Callable[[str], Loop]) -> Callable[[str], Loop]:
        PROGRAMS[name] = Program(build, faults)
        return build

    return register


def descend(weights: Any, slopes: Any, rate: float = 0.1) -> Any:
    import jax

    return jax.tree.map(lambda weight, slope: weight - rate * slope, weights, slopes)
