"""``track`` and ``namespace`` for array code: NumPy, Dask and any array-API library."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Unpack, overload

from anynan._arrays.access import type_name
from anynan._arrays.containers import shown
from anynan._arrays.measures import measure
from anynan._arrays.probe import Span, probe
from anynan._arrays.registry import register
from anynan._base.about import ADAPTERS
from anynan._base.summary import Summary
from anynan._steps.tracked import Tracked, refuse_target
from anynan.arrays.namespaces import Namespace, recording
from anynan.arrays.session import ArraySession
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray
from anynan.options import FOR_ARRAYS, Options, TrackOptions, flat
from anynan.tracker import Tracker, begin

NO_UPDATE = (
    "{} drops the update of a bad step, and array code does not say what its update is; use "
    "action='warn', 'record' or a function of the Event"
)
NO_WEIGHTS = (
    "Advanced(parameters=True) has nothing to read: array code does not say which arrays are "
    "weights; pass them as arguments, and they are read in every call"
)


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Callable[..., Any], **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a function of array code, until ``remove``.

    The function runs on its own arrays; anynan judges what it is given, returns and writes. A bad
    call is run again on copies that record each operation. From ``level="layer"`` on every call is
    recorded, and a value is judged where it leaves the ``anynan.scope`` it was made in. Arrays on a
    device, and Dask's, are always recorded.

    Args:
        target: A function; leave it out to decorate.
        **options: See ``anynan.options.TrackOptions``. ``layers`` and ``exclude`` match scope
            paths; where one is given, ``level`` is ``"layer"`` by default.

    Returns:
        A Tracker that is called in the function's place, or a decorator that makes one.

    Raises:
        TypeError: If the target is no function, or an option is of the wrong type or unknown.
        ValueError: If an option has an impossible value, or one that array code cannot serve.

    Example:
        >>> import anynan, numpy
        >>> @anynan.track
        ... def logits(p):
        ...     return numpy.log(p) - numpy.log(1 - p)
        >>> try:
        ...     with numpy.errstate(invalid="ignore"):
        ...         logits(numpy.array([0.5, 1.5]))
        ... except anynan.NonFiniteError as error:
        ...     error.event.operation.name, error.event.cause.tag
        ('log', 'log_of_negative')
    """
    return start(target, options, ArraySession)


def namespace(xp: Any) -> Namespace:
    """Return an array library's functions in a form that a tracked function records.

    Give it to code that is written over ``xp``. Inside a tracked function the arrays that it
    makes are watched too; outside of one it is the library itself.

    Args:
        xp: The library's module, such as ``numpy`` or what ``array_namespace(x)`` returns.

    Raises:
        TypeError: If it is no module of functions, but for example an array.

    Example:
        >>> import anynan, numpy
        >>> xp = anynan.arrays.namespace(numpy)
        >>> xp.sqrt(4.0)
        np.float64(2.0)
    """
    if isinstance(xp, ModuleType | Namespace) or hasattr(xp, "__array_api_version__"):
        return recording(xp)
    if is_array(xp) or isinstance(xp, TrackedArray):
        msg = (
            f"namespace() takes an array library's module, not a {type_name(xp)}: pass its "
            "module, or what array_api_compat.array_namespace(x) returns"
        )
        raise TypeError(msg)
    name = type_name(xp)
    article = "an" if name[0] in "aeiou" else "a"
    msg = f"namespace() takes an array library's module, not {article} {name}: {shown(xp)}"
    raise TypeError(msg)


class Reader:
    """Let ``anynan.check`` and ``anynan.summarize`` see through a tracked array."""

    def owns(self, x: Any, /) -> bool:
        """Tell whether this is a tracked array."""
        return isinstance(x, TrackedArray)

    def probe(self, x: Any, /) -> Span | None:
        """Read the array that it holds."""
        return probe(x._raw)

    def summarize(self, x: Any, /) -> Summary:
        """Describe the array that it holds."""
        return measure(x._raw)


register(Reader())


# Their functions are array code, too.
ARRAYS = {"jax", "cupy"}


def array_options(options: Mapping[str, Any]) -> Options:
    """Check the options of ``track``, also those that array code cannot serve.

    Raises:
        TypeError: If an option is unknown or of the wrong type.
        ValueError: If its value is impossible, or cannot be served.
    """
    if isinstance(options.get("action"), str) and options["action"] == "skip":
        raise ValueError(NO_UPDATE.format("action='skip'"))
    each = flat(options)
    if each.get("patience"):
        raise ValueError(NO_UPDATE.format(f"Advanced(patience={each['patience']})"))
    if each.get("parameters"):
        raise ValueError(NO_WEIGHTS)
    by_scope = [name for name in ("layers", "exclude") if options.get(name) is not None]
    if by_scope and options.get("level") == "step":
        msg = f"{by_scope[0]}= chooses scopes, and level='step' reads none: use level='layer'"
        raise ValueError(msg)
    default = {"level": "layer" if by_scope else "step"}
    chosen = Options.checked({**default, **options}, FOR_ARRAYS, "array code")
    if chosen.extra:
        msg = (
            f"Advanced(stats={chosen.extra[0]!r}) is not read from array code; absmax, min and max "
            "are, and anynan.summarize gives the rest"
        )
        raise ValueError(msg)
    return chosen


def start(target: Any, options: Mapping[str, Any], session: type[ArraySession]) -> Any:
    """Put a tracker in a function's place; without one, give the decorator that does.

    Raises:
        TypeError: If the target is no function, or an option is of the wrong type or unknown.
        ValueError: If an option has an impossible value, or one that array code cannot serve.
    """
    chosen = array_options(options)
    if target is ...:
        return functools.partial(start, options=options, session=session)
    refuse_target(target, "function")
    packages = {kind.__module__.partition(".")[0] for kind in type(target).__mro__}
    own = next((name for name in ("keras", *ADAPTERS) if name in packages - ARRAYS), None)
    if own is None and any(hasattr(kind, "named_modules") for kind in type(target).__mro__):
        own = "torch"
    if own is not None:
        what = "function" if own == "tensorflow" else "model"
        msg = (
            f"track() takes a function of array code, not a {type_name(target)}: a {what} is "
            f"tracked by its own adapter, anynan.{own}.track({what})"
        )
        raise TypeError(msg)
    if not callable(target):
        msg = f"track() takes a function, not {type_name(target)}"
        raise TypeError(msg)
    tracker = Tracked(target, chosen, getattr(target, "__name__", type(target).__name__))
    return begin(tracker, session(tracker))
