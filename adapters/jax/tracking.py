"""``track``: what it takes, and what it starts."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

from anynan._steps.tracked import Tracked, refuse_target
from anynan.jax.session.session import Session
from anynan.options import FOR_TRAINING, Options, TrackOptions, flat
from anynan.tracker import Tracker, begin

KNOWN = (*FOR_TRAINING, "read", "keep_inputs", "lag")


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Callable[..., Any], **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a function of arrays: a model, a loss, or best a whole training step.

    The function is traced to a jaxpr, once for each kind of arguments, and run again with a
    few more results: one number for each layer's output and each result. So it runs compiled,
    whether it was jitted or not; a jitted function keeps its static and donated arguments.
    Only a step that goes bad is run a second time, operation by operation.

    Built on ``jax.make_jaxpr`` and ``jax.extend``; the documentation's JAX page says what is
    watched, and how.

    Args:
        target: A function of pytrees, jitted or not; leave it out to decorate.
        **options: See ``anynan.options.TrackOptions``. The steps of a compiled function are
            judged when they have ended: ``read="immediate"`` is refused.

    Returns:
        A Tracker, to be called in the function's place, or a decorator that makes one.

    Raises:
        TypeError: If the target is no function, or an option is of the wrong type or unknown.
        ValueError: If an option has an impossible value.

    Example:
        >>> import jax, anynan
        >>> step = anynan.jax.track(lambda x: jax.numpy.log(x).sum())
        >>> float(step(jax.numpy.ones(3)))
        0.0
    """
    chosen = checked(options, KNOWN)
    of = inspect.unwrap(target, stop=_is_method) if callable(target) else None
    if _is_method(of) and hasattr(target, "clear_cache"):
        # One that a tracker still holds is equal to it, and JAX would not trace what has changed.
        target.clear_cache()
    return functools.partial(start, options=chosen) if target is ... else start(target, chosen)


def _is_method(x: Any) -> bool:
    return isinstance(x, types.MethodType)


def checked(options: Mapping[str, Any], known: Iterable[str]) -> Options:
    """Check the options, also those that a compiled program cannot serve.

    Raises:
        TypeError: If one is unknown or of the wrong type.
        ValueError: If one has an impossible value.
    """
    if flat(options).get("read") == "immediate":
        msg = (
            "Advanced(read='immediate') is not there for JAX: a compiled step is read when it has "
            "ended; choose auto or end, or a number n to read every n steps"
        )
        raise ValueError(msg)
    return Options.checked(options, known, "JAX")


def start(target: Any, options: Options) -> Tracker:
    """Watch a function with options that were checked."""
    refuse_target(target, "function of arrays", "jax")
    if not callable(target):
        msg = f"track() takes a function of arrays, not {type(target).__name__}"
        raise TypeError(msg)
    tracker = Tracked(target, options, getattr(target, "__name__", type(target).__name__))
    return begin(tracker, Session(target, tracker))
