"""``track``: what it takes, and what it starts."""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Unpack, overload

import tensorflow as tf

from anynan._steps.tracked import Tracked, make_way, refuse_target
from anynan.options import FOR_TRAINING, Options, TrackOptions
from anynan.tensorflow.session.seams import SEAMS
from anynan.tensorflow.session.session import ModelSession, Session
from anynan.tensorflow.session.targets import is_keras, layers_in, parts_while_alive, variables_in
from anynan.tracker import Tracker


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Any, **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a Keras model, a ``tf.Module`` or a function, forward and backward.

    You go on using a model as before, through ``fit``, ``evaluate``, ``predict`` or a loop of
    your own, eager, in a ``tf.function`` and with ``jit_compile=True``; call ``track`` before a
    ``tf.function`` that uses it runs for the first time. A function is replaced by the returned
    tracker: one call is one step, and its result is watched too.

    The layers' ``__call__`` and ``tf.GradientTape.gradient`` are changed while anything is
    tracked; what they read goes to one variable, which is read once after each step. The
    documentation's TensorFlow page says what is watched when.

    Args:
        target: A Keras model, a ``tf.Module`` or a function; leave it out to decorate.
        **options: See ``anynan.options.TrackOptions``; of ``stats`` there are ``"absmax"``,
            ``"min"`` and ``"max"``, and ``level="operation"`` runs every step a second time.

    Returns:
        A Tracker, or a decorator that makes one.

    Raises:
        TypeError: If the target is none of these, or an option is of the wrong type or unknown.
        ValueError: If the target is tracked already, a pattern matches no layer,
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
    if target is ...:
        return functools.partial(_track, options=chosen)
    return _track(target, chosen)


def session_of(model: Any) -> Session | None:
    """Return the session of a tracked model, None if it is not tracked."""
    return next((found for found in SEAMS.sessions if found.layers.model() is model), None)


FREE = ("absmax", "min", "max")  # they are read anyway


def checked(options: Mapping[str, Any]) -> Options:
    """Check the options.

    Raises:
        TypeError: If one is unknown or of the wrong type.
        ValueError: If one has an impossible value, or is not there for TensorFlow yet.
    """
    found = Options.checked(options, FOR_TRAINING, "TensorFlow")
    if found.extra:
        only = ", ".join(FREE)
        msg = f"Advanced(stats={found.stats!r}): for TensorFlow there are only {only} so far"
        raise ValueError(msg)
    return found


def _track(target: Any, options: Options) -> Tracker:
    refuse_target(target, "model or function")
    if is_keras(target):
        keras: Any = sys.modules["keras"]
        if keras.backend.backend() != "tensorflow":
            from anynan.keras.tracking import start

            return start(target, options)
    if is_keras(target) or isinstance(target, tf.Module):
        return _track_model(target, options)
    if not callable(target):
        msg = f"track() takes a Keras model, a tf.Module or a function, not {type(target).__name__}"
        raise TypeError(msg)
    tracker = Tracked(target, options, getattr(target, "__name__", type(target).__name__))
    session = Session(functools.partial(layers_in, target), None, tracker)
    session.layers.weights.add_all("", variables_in(target))
    return session.start()


def _track_model(model: Any, options: Options) -> Tracker:
    """Watch a model of Keras, or a ``tf.Module``."""
    first, name = session_of(model), type(model).__name__
    if first is not None:
        make_way(first.tracker, name)
    if not callable(model):
        msg = (
            f"this {name} has no __call__, so it never runs as a whole: track the function that "
            "uses it"
        )
        raise TypeError(msg)
    held, kind = weakref.ref(model), ModelSession if is_keras(model) else Session
    tracker = Tracked(held, options, name)
    return kind(functools.partial(parts_while_alive, held), model, tracker).start()
