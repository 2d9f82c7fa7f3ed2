"""The facts of one anomaly, as data that survives JSON."""

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from anynan._base import shown
from anynan._base.shown import Shown
from anynan._base.summary import Summary

Phase = Literal["input", "forward", "loss", "backward", "parameter", "optimizer", "value"]
Kind = Literal["nan", "posinf", "neginf", "large", "spike", "vanishing"]
Severity = Literal["bad", "suspect"]
Outcome = Literal["finite", "another", "insufficient"]
Extent = Literal["step", "call", "forward", "both", "loss", "gradients", "gradient"]

PHASES: tuple[Phase, ...] = get_args(Phase)
NON_FINITE: tuple[Kind, ...] = ("nan", "posinf", "neginf")
# What a reading's tensor is called that is no weight: a moment, a velocity.
STATE, CARRIED = "optimizer state", "carried state"
KINDS: tuple[Kind, ...] = (*NON_FINITE, "large", "spike", "vanishing")


@dataclass(frozen=True, slots=True)
class Source:
    """Point at the user's own line.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        function: Name of the function the line is in.
        text: The line itself, stripped; of an expression over several lines all of them, in one.
        via: The library frame it went through (``functional.py:2913 in layer_norm``), if any.
        column: Where in ``text`` the code that ran begins, in characters from 0, where known.
        end_column: Where it ends: ``text[column:end_column]`` is that code.
        via_text: The line of ``via``, where it says more than the framework's own would.
        changed: True if the file was changed since it was imported: ``text`` is empty then.
    """

    file: str
    line: int
    function: str
    text: str
    via: str | None = None
    column: int | None = None
    end_column: int | None = None
    via_text: str = ""
    changed: bool = False

    @property
    def place(self) -> str:
        """Give the file's name and the line."""
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Operation:
    """Name the operation that made a bad value.

    Attributes:
        name: The field's own word (``log``, ``divide``, ``softmax``, ``matmul``).
        raw: The framework's name for it.
        inputs: What went in.
        output: What came out.
        source: The user's line, when it could be found.
        layer: The layer path it ran in; None outside every watched layer.
        phase: ``backward`` means the gradient of this operation; else the phase it ran in.
        direct: True for what the user's own code computes in the backward pass: a custom
            function's rule, a gradient hook.
        operands: What each of ``inputs`` is to the operation (``x``, ``weight``, ``bias``), in the
            backward pass also ``gradient`` and ``result``; empty where their order says it.
    """

    name: str
    raw: str
    inputs: tuple[Summary, ...]
    output: Summary | None
    source: Source | None
    layer: str | None = None
    phase: Phase = "forward"
    direct: bool = False
    operands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cause:
    """Say why it happened and what to change.

    Attributes:
        tag: Short fixed name, such as ``log_of_zero``.
        text: One sentence that says why.
        fix: One sentence that says what to change.
        evidence: The values that show it.
    """

    tag: str
    text: str
    fix: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """Say what came of the step when it was run once more with the origin repaired.

    Attributes:
        repair: The code that took the operation's place (``log(x + 1e-8)``); empty where 0
            took the place of what it made bad.
        outcome: ``finite`` if nothing bad was left, ``another`` if another fault was, and
            ``insufficient`` if the repaired operation itself still made bad values.
        extent: What was run: the ``step``, a ``call`` of array code, the model's ``forward``
            pass, or ``both`` passes; of what was noted behind a model the ``loss``, it and its
            ``gradients``, or a ``gradient`` that the program changed.
        loss: The loss it ended with, where there was one and it was finite.
        gradient_norm: The L2 norm of all gradients of weights, likewise.
    """

    repair: str
    outcome: Outcome
    extent: Extent = "step"
    loss: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Count what is bad only because of the origin.

    Attributes:
        count: Later readings that are bad because of this one.
        surfaced: Where it first acted (``loss``, ``forward decoder.norm``), if not at the
            origin itself.
    """

    count: int = 0
    surfaced: str | None = None


@dataclass(frozen=True, slots=True)
class Event(Shown):
    """Hold everything known of one anomaly; ``str(event)`` is its report.

    Attributes:
        backend: Which adapter saw it (``torch``), or the array library of a direct check.
        layer: Layer path; ``""`` is the model itself, None is outside every watched layer.
        phase: Where in a step (``input``, ``forward``, ``loss``, ``backward``,
            ``parameter``, ``optimizer``) or ``value`` for a direct check.
        kind: ``nan``, ``posinf``, ``neginf``, ``large``, ``spike`` or ``vanishing``.
        severity: ``bad`` acts; ``suspect`` is recorded only.
        step: Step, from 0.
        call: Which call of this layer in the step, from 0.
        iteration: Loop iteration inside the program, where the backend knows it.
        training_step: The step without those before it that took no gradients, from 0: the
            iteration of the training. None where there were none.
        order: Position among the step's readings.
        tensor: Which tensor (``output``, ``output['logits']``, ``grad``, ``args[0]``).
        parameter: Name of the weight or buffer, in the phases that concern one.
        summary: What the tensor held.
        operation: The origin: the operation that made the first bad value.
        cause: Why, and what to change.
        trail: Layers up to the origin with their largest magnitude (None if not finite).
        spread: What is bad because of this.
        expected: The reason, if the anomaly was legitimate here.
        rank: Process rank in a distributed run.
        shard: Shard index, where the backend shards arrays.
        then: The first NaN that an origin of Inf turned into, if another operation made it.
        since: Range of steps ``(good, bad)`` in which a parameter went bad.
        notes: What could not be seen or reproduced, in sentences.
        target: What is tracked: ``model Generator``, ``function preprocess``; numbered where
            several models of one name are tracked.
        tried: What the step did with the fix in place; None if no fix was tried.
        others: Further faults of the step with the fix in place, each tried with those before it
            fixed. They are listed here and nowhere else.
        times: In how many steps the same happened: the same operation, line and cause, or the same
            layer and phase if none is known. This is the first of them.

    Example:
        >>> import json, anynan, numpy
        >>> try:
        ...     anynan.check(numpy.array([numpy.inf]), "x")
        ... except anynan.NonFiniteError as error:
        ...     event = error.event
        >>> anynan.Event.from_json(event.to_json()) == event
        True
    """

    backend: str
    layer: str | None
    phase: Phase
    kind: Kind
    severity: Severity
    step: int
    call: int = 0
    iteration: int | None = None
    training_step: int | None = None
    order: int = 0
    tensor: str = "output"
    parameter: str | None = None
    summary: Summary | None = None
    operation: Operation | None = None
    cause: Cause | None = None
    trail: tuple[tuple[str, float | None], ...] = ()
    spread: Spread = field(default_factory=Spread)
    expected: str | None = None
    rank: int | None = None
    shard: int | None = None
    then: Operation | None = None
    since: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    target: str = ""
    tried: Trial | None = None
    others: tuple["Event", ...] = ()
    times: int = 1

    def __str__(self) -> str:
        """Return the report, as a tracker prints it."""
        return shown.as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain JSON values; non-finite numbers become strings."""
        data: dict[str, Any] = plain(asdict(self))
        return data

    def to_json(self) -> str:
        """Return the event as one line of strict JSON."""
        import json

        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Event":
        """Rebuild an event from ``to_json``."""
        import json

        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Event":
        """Rebuild an event from ``to_dict``."""
        return cls(**{name: _decode(item, name) for name, item in data.items()})


# What an object of JSON is, by the field that holds it.
_HELD: dict[str, type] = {
    "summary": Summary, "output": Summary, "inputs": Summary, "operation": Operation,
    "then": Operation, "source": Source, "cause": Cause, "spread": Spread, "tried": Trial,
    "others": Event,
}  # fmt: skip
# JSON has no NaN or Inf: these three strings stand for them, only where a number stood.
_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_NUMERIC = {"min", "max", "absmax", "mean", "rms", "headroom"}


def plain(value: Any) -> Any:
    """Return plain JSON values; non-finite numbers become strings."""
    if isinstance(value, float):
        if value != value:
            return "NaN"
        return (
            value if abs(value) != _NUMBERS["Infinity"] else f"{'-' if value < 0 else ''}Infinity"
        )
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def numbers(values: list[Any]) -> list[float]:
    """Return numbers that ``plain`` wrote."""
    return [_NUMBERS[value] if isinstance(value, str) else float(value) for value in values]


def _decode(value: Any, key: str) -> Any:
    if isinstance(value, str) and key in _NUMERIC:
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return _HELD[key](**{name: _decode(item, name) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_decode(item, key) for item in value)
    return value
