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
from anynan.tensorflow.session.session import Session
from anynan.tensorflow.session.targets import is_keras, layers_in, parts_while_alive, variables_in
from anynan.tracker import Tracker


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Any, **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a Keras model, a ``tf.Module`` or a function, forward and backward.

    A model goes on being used as before, through ``fit``, ``evaluate``, ``predict`` or a loop of
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
        return _track_model(target, options)
    if isinstance(target, tf.Module):
        return _track_module(target, options)
    if not callable(target):
        msg = f"track() takes a Keras model, a tf.Module or a function, not {type(target).__name__}"
        raise TypeError(msg)
    return _track_function(target, options)


def _track_model(model: Any, options: Options) -> Tracker:
    """Watch a Keras model on the TensorFlow backend."""
    from anynan.tensorflow.session.models import ModelSession

    _refuse_twice(model)
    tracker = Tracked(weakref.ref(model), options, type(model).__name__)
    return ModelSession(model, tracker).start()


def _track_module(module: Any, options: Options) -> Tracker:
    """Watch a ``tf.Module``."""
    _refuse_twice(module)
    if not callable(module):
        msg = (
            f"this {type(module).__name__} has no __call__, so it never runs as a whole: track "
            "the function that uses it"
        )
        raise TypeError(msg)
    tracker = Tracked(weakref.ref(module), options, type(module).__name__)
    find = functools.partial(parts_while_alive, weakref.ref(module))
    return Session(find, module, tracker).start()


def _track_function(fn: Any, options: Options) -> Tracker:
    """Watch a function, and the models that it uses."""
    tracker = Tracked(fn, options, getattr(fn, "__name__", type(fn).__name__))
    session = Session(functools.partial(layers_in, fn), None, tracker)
    session.layers.weights.add_all("", variables_in(fn))
    return session.start()


def _refuse_twice(model: Any) -> None:
    """Refuse what is tracked already.

    Raises:
        ValueError: If it is.
    """
    first = session_of(model)
    if first is not None:
        make_way(first.tracker, type(model).__name__)
