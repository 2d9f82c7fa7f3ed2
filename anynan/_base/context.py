"""Where the program is: the scope of direct checks, what is expected, whether it replays."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from anynan.events import Kind

T = TypeVar("T")

_scope: ContextVar[str | None] = ContextVar("anynan_scope", default=None)
_expected: ContextVar[dict[str, str] | None] = ContextVar("anynan_expected", default=None)
_replaying: ContextVar[bool] = ContextVar("anynan_replaying", default=False)
# How a program that is being traced, to run later, is told of a scope or an expectation.
Marker = Callable[[str | dict[str, str]], AbstractContextManager[Any]]
marker: ContextVar[Marker | None] = ContextVar("anynan_marker", default=None)


# The tracked function that is running: it is handed what a direct check inside of it finds.
running: ContextVar[Any] = ContextVar("anynan_running", default=None)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside.

    Args:
        variable: Which.
        value: What it is inside.
    """
    outer = variable.get()
    try:
        variable.set(value)  # inside: Ctrl-C may come as it returns
        yield
    finally:
        variable.set(outer)


@contextmanager
def but(obj: Any, **given: Any) -> Iterator[None]:
    """Have attributes of an object be something else meanwhile; one that is not there is None."""
    before = {name: getattr(obj, name, None) for name in given}
    try:
        for name, value in given.items():
            setattr(obj, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(obj, name, value)


@contextmanager
def scope(path: str) -> Iterator[str]:
    """Name the layer for the direct checks made inside; scopes nest, joined by dots.

    Args:
        path: Layer path, such as ``decoder.block``.

    Yields:
        The whole path.

    Raises:
        TypeError: If ``path`` is not a string.
        ValueError: If ``path`` is empty.

    Example:
        >>> import anynan
        >>> with anynan.scope("decoder"), anynan.scope("block") as path:
        ...     print(path)
        decoder.block
    """
    if not isinstance(path, str):
        msg = f"scope() takes a layer path as a string, not {type(path).__name__}: {path!r}"
        raise TypeError(msg)
    if not path:
        msg = "scope() needs a name: the empty path is the model itself"
        raise ValueError(msg)
    outer = _scope.get()
    whole = f"{outer}.{path}" if outer else path
    with setting(_scope, whole), _marked(path):
        yield whole


@contextmanager
def expect(
    *, nan: bool = False, posinf: bool = False, neginf: bool = False, reason: str = ""
) -> Iterator[None]:
    """Declare that these values are legitimate in here, and in the gradients made here.

    Args:
        nan: NaN is expected.
        posinf: +Inf is expected.
        neginf: -Inf is expected.
        reason: Why; it is shown in the report's list of what was allowed.

    Raises:
        TypeError: If the reason is no string.
        ValueError: If no kind is named.

    Example:
        >>> import anynan, numpy
        >>> with anynan.expect(nan=True, reason="missing sensors are NaN"):
        ...     _ = anynan.check(numpy.array([numpy.nan]), "sensors")
    """
    if not isinstance(reason, str):
        msg = f"expect(reason=...) takes a sentence, not {type(reason).__name__}: {reason!r}"
        raise TypeError(msg)
    named = {"nan": nan, "posinf": posinf, "neginf": neginf}
    kinds: list[str] = [kind for kind, on in named.items() if on]
    if not kinds:
        msg = "expect() names nothing: say what is legitimate, for example expect(nan=True)"
        raise ValueError(msg)
    allowed = {**(_expected.get() or {}), **dict.fromkeys(kinds, reason or "expected here")}
    with setting(_expected, allowed), _marked(allowed):
        yield


def _marked(what: str | dict[str, str]) -> AbstractContextManager[Any]:
    mark = marker.get()
    return nullcontext() if mark is None else mark(what)


def scope_path() -> str | None:
    """Give the path of the enclosing scopes, None outside of any."""
    return _scope.get()


def expectations() -> dict[str, str] | None:
    """Give the kinds expected here with their reasons, None when there are none."""
    return _expected.get()


def expected(kind: Kind) -> str | None:
    """Give the reason why this kind is legitimate here, None if it is not."""
    kinds = _expected.get()
    return None if kinds is None else kinds.get(kind)


def replaying() -> bool:
    """Tell whether code runs only to find a fault: a failing step again, or a search for a batch.

    User code can guard prints, logs and counters with it.

    Example:
        >>> import anynan
        >>> anynan.replaying()
        False
    """
    return _replaying.get()


def replay_context() -> AbstractContextManager[None]:
    """Mark the code inside as a replay."""
    return setting(_replaying, True)
