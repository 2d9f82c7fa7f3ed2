"""``track`` and ``untrack``: they hand a model to the part that knows Keras's backend."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import keras

from anynan._steps.tracker import Tracker
from anynan.options import Options, Training, Watching, Weights


class Backends(TypedDict, total=False):
    """Name the options that some of the backends have; the others refuse them.

    Attributes:
        read: On PyTorch, when readings are judged: ``"auto"``, ``"immediate"``, ``"step"`` or
            every n steps.
        keep: On PyTorch, bytes of output gradient kept for a replay of the backward pass.
        across_ranks: On PyTorch, whether all processes of a distributed run stop at the same
            step.
        keep_inputs: On JAX, whether donated arguments are kept, so that a bad step can always
            be run again.
    """

    read: Literal["auto", "immediate", "step"] | int
    keep: int | Literal["step"]
    across_ranks: bool
    keep_inputs: bool


class KerasOptions(Training, Backends, total=False):
    """Name the options of ``anynan.keras.track``."""


class MonitorOptions(Watching, Weights, Backends, total=False):
    """Name the options of ``anynan.keras.Monitor``."""


@overload
def track(**options: Unpack[KerasOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Any, **options: Unpack[KerasOptions]) -> Tracker: ...
@Options.shown(KerasOptions)
def track(target: Any = ..., **options: Unpack[KerasOptions]) -> Any:
    """Watch a Keras model, forward and backward, on the backend that Keras runs on.

    The model goes on being used as before: ``fit``, ``train_on_batch``, ``evaluate``,
    ``predict`` or a loop of your own. The documentation's Keras page says what is watched on
    which backend, and those of TensorFlow, PyTorch and JAX how.

    Args:
        target: A model. Layers that it builds or makes later are watched from then on.
        **options: As for the backend's own ``track``.

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
    if isinstance(target, Tracker) or not isinstance(target, keras.layers.Layer):
        msg = f"track() takes a Keras model, not {type(target).__name__}"
        raise TypeError(msg)
    return adapter().track(target, **options)


def untrack(target: Any) -> None:
    """Stop watching a tracked model; the same as its tracker's ``remove``.

    Args:
        target: What was given to ``track``.

    Raises:
        ValueError: If it is not tracked.

    Example:
        >>> import keras, anynan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> tracker = anynan.keras.track(model)
        >>> anynan.keras.untrack(model)
    """
    adapter().untrack(target)


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
    from dataclasses import fields

    # A backend refuses what it has not, if only by name.
    held = {f.name: (getattr(options, f.name), f.default) for f in fields(options)}
    made: Tracker = track(target, **{k: x for k, (x, default) in held.items() if x != default})
    return made
