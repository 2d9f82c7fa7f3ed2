"""``track`` and ``untrack``: the public doors."""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Unpack, overload

import tensorflow as tf

from anynan._steps.tracker import Tracker, refuse_target, tracker_of
from anynan.options import Options, Training
from anynan.tensorflow import patches
from anynan.tensorflow.session import Session


@overload
def track(target: None = None, **options: Unpack[Training]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Any, **options: Unpack[Training]) -> Tracker: ...
def track(target: Any = None, **options: Unpack[Training]) -> Any:
    """Watch a Keras model, a ``tf.Module`` or a function, forward and backward.

    A model goes on being used as before, through ``fit``, ``evaluate``, ``predict`` or a loop of
    your own, eager, in a ``tf.function`` and with ``jit_compile=True``; call ``track`` before a
    ``tf.function`` that uses it runs for the first time. A function is replaced by the returned
    tracker: one call is one step, and its result is watched too.

    The layers' ``__call__`` and ``tf.GradientTape.gradient`` are changed while anything is
    tracked; what they read goes to one variable, which is read once after each step. The
    documentation's TensorFlow page says what is watched when.

    Args:
        target: A Keras model, a ``tf.Module`` or a function; None to decorate.
        **options: ``policy``, ``action`` (``"raise"``, ``"warn"``, ``"record"``, ``"skip"`` or a
            function of the Event), ``layers`` and ``exclude`` (globs or predicates),
            ``backward`` (True), ``replay`` (True), ``history`` (1000 steps), ``patience`` (0),
            ``parameters`` (False; True reads every weight after each step that took gradients),
            ``level`` (``"layer"``, or ``"operation"``, which runs every step a second time) and
            ``stats`` (``"absmax"``, ``"min"``, ``"max"``).

    Returns:
        A Tracker, or a decorator that makes one.

    Raises:
        TypeError: If the target is none of these, or an option is of the wrong type or unknown.
        ValueError: If the target is tracked already, is not built, a pattern matches no layer,
            or an option has an impossible value.
        NonFiniteError: If a weight is bad already.

    Example:
        >>> import keras, anynan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with anynan.tensorflow.track(model) as tracker:
        ...     _ = model(keras.ops.ones((1, 4)))
        >>> len(tracker.events)
        0
    """
    chosen = checked(options)
    if target is None:
        return functools.partial(_track, options=chosen)
    return _track(target, chosen)


def untrack(target: Any) -> None:
    """Stop watching a model, a module or a function; the same as its tracker's ``remove``.

    Args:
        target: What was given to ``track``, or the tracker.

    Raises:
        ValueError: If it is not tracked.

    Example:
        >>> import keras, anynan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> tracker = anynan.tensorflow.track(model)
        >>> anynan.tensorflow.untrack(model)
    """
    session = session_of(target)
    (tracker_of(target) if session is None else session.tracker).remove()


def session_of(model: Any) -> Session | None:
    """Return the session of a tracked model, None if it is not tracked."""
    return next((found for found in patches.sessions if found.model() is model), None)


FREE = ("absmax", "min", "max")  # they are read anyway


def checked(options: Mapping[str, Any]) -> Options:
    """Check the options.

    Raises:
        TypeError: If one is unknown or of the wrong type.
        ValueError: If one has an impossible value, or is not there for TensorFlow yet.
    """
    found = Options.checked(options, Training, "TensorFlow")
    if found.extra:
        msg = f"stats={found.stats!r}: for TensorFlow there are only {', '.join(FREE)} so far"
        raise ValueError(msg)
    return found


def is_keras(target: Any) -> bool:
    """Tell whether something is a layer or a model of Keras, without importing Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(target, keras.layers.Layer)


def _track(target: Any, options: Options) -> Tracker:
    refuse_target(target, "model or function")
    if is_keras(target):
        keras: Any = sys.modules["keras"]
        if keras.backend.backend() != "tensorflow":
            from anynan.keras.tracking import start

            return start(target, options)
        return track_model(target, options)
    from anynan.tensorflow import functions

    if isinstance(target, tf.Module):
        return functions.track_module(target, options)
    if not callable(target):
        msg = f"track() takes a Keras model, a tf.Module or a function, not {type(target).__name__}"
        raise TypeError(msg)
    return functions.track_function(target, options)


def track_model(model: Any, options: Options) -> Tracker:
    """Watch a Keras model on the TensorFlow backend."""
    from anynan.keras.layers import refuse_unbuilt
    from anynan.tensorflow.models import ModelSession

    name = type(model).__name__
    refuse_twice(model)
    refuse_unbuilt(model)
    session = ModelSession(model, options)
    return begin(session, weakref.ref(model), name)


def refuse_twice(model: Any) -> None:
    """Refuse what is tracked already.

    Raises:
        ValueError: If it is.
    """
    first = session_of(model)
    if first is not None:
        msg = (
            f"this {type(model).__name__} is tracked already, by {first.tracker!r}; call its "
            "remove(), or anynan.tensorflow.untrack(model), before tracking it again"
        )
        raise ValueError(msg)


def begin(session: Session, target: Any, name: str) -> Tracker:
    """Start a session."""
    model = session.model()
    if model is not None:
        weakref.finalize(model, _gone, weakref.ref(session)).atexit = False
    return session.track(target, name)


def _gone(ref: "weakref.ref[Session]") -> None:
    """Put the classes back when the model is gone."""
    session = ref()
    if session is not None and session.tracker.judge.adapter is session:
        session.tracker.remove()
