"""The exceptions and the warning that carry a report."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anynan.events import Event


def reason(error: BaseException) -> str:
    """Name an exception and what it says in one line, also one that cannot say it.

    Of a long text, what it ends with counts, too: TensorFlow puts there what code that a graph
    calls raised.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  a program's own exception may do anything
        text = ""
    short = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    return f"{type(error).__name__}: {short}".removesuffix(": ")


class AnomalyError(FloatingPointError):
    """Raise when a reading breaks the policy; the message is the report.

    Attributes:
        event: What happened, as data.
        tracker: The tracker that saw it, or None for a direct check.

    Example:
        >>> import anynan, numpy
        >>> try:
        ...     anynan.check(numpy.array([1.0, numpy.nan]), "x")
        ... except anynan.AnomalyError as error:
        ...     error.event.kind
        'nan'
    """

    def __init__(self, message: str, event: "Event", tracker: Any = None) -> None:
        super().__init__(message)
        self.event = event
        self.tracker = tracker

    def __reduce__(self) -> tuple[Any, ...]:
        # A tracker holds hooks and locks: the copy that crosses a process keeps the event.
        notes = getattr(self, "__notes__", None)
        state = None if notes is None else {"__notes__": notes}
        return type(self), (self.args[0], self.event), state


class NonFiniteError(AnomalyError):
    """Raise when a value is NaN, +Inf or -Inf where the policy forbids it."""


class LostRankError(RuntimeError):
    """Raise when a process of a distributed run is gone, where the others wait for it to agree.

    It is no anomaly: nothing bad was seen on the rank that raises it.
    """


class AnynanWarning(UserWarning):
    """Warn of an anomaly under ``action="warn"``, or of something that is not watched."""
