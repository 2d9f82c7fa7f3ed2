"""``track``: it hands a model to the part that knows Keras's backend."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Unpack, overload

import keras

from anynan._steps.tracked import Handle
from anynan.options import ADVANCED, Advanced, Options, TrackOptions
from anynan.tracker import Tracker


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Any, **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a Keras model, forward and backward, on the backend that Keras runs on.

    You go on using the model as before: ``fit``, ``train_on_batch``, ``evaluate``,
    ``predict`` or a loop of your own. The documentation's Keras page says what is watched on
    which backend, and those of TensorFlow, PyTorch and JAX how.

    Args:
        target: A model. Layers that it builds or makes later are watched from then on.
        **options: See ``anynan.options.TrackOptions``.

    Returns:
        A Tracker, or a decorator that makes one.

    Raises:
        TypeError: If the target is no Keras model, or an option is of the wrong type or unknown.
        ValueError: If the model is tracked already, a pattern matches no layer of a built one,
            or an option has an impossible value.
        NotImplementedError: If Keras runs on another backend.
        NonFiniteError: If a weight is bad already.

    Example:
        >>> import keras, anynan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with anynan.keras.track(model) as tracker:
        ...     _ = model(keras.ops.ones((1, 4)))
        >>> len(tracker.events)
        0
    """
    if target is ...:
        return functools.partial(track, **options)
    if isinstance(target, type):
        msg = f"track() takes a model object, not the class {target.__name__}: create it first"
        raise TypeError(msg)
    if isinstance(target, Handle) or not isinstance(target, keras.layers.Layer):
        msg = f"track() takes a Keras model, not {type(target).__name__}"
        raise TypeError(msg)
    return adapter().track(target, **options)


BACKENDS = {
    "tensorflow": "anynan.tensorflow",
    "torch": "anynan.torch",
    "jax": "anynan.keras.jax_backend",
}


def adapter() -> Any:
    """Import the adapter of the backend that Keras runs on.

    Raises:
        NotImplementedError: If there is none for it.
    """
    backend = keras.backend.backend()
    name = BACKENDS.get(backend)
    if name is None:
        msg = f"anynan.keras cannot watch Keras on the {backend} backend yet"
        raise NotImplementedError(msg)
    return importlib.import_module(name)


def start(target: Any, options: Options) -> Tracker:
    """Watch a model with options that were checked."""
    # A backend refuses what it has not, if only by name.
    given = options.given()
    further = {name: given.pop(name) for name in tuple(given) if name in ADVANCED}
    made: Tracker = track(target, **given, advanced=Advanced(**further))
    return made
