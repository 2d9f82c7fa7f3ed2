"""Find the models that ``fit``, ``evaluate``, ``predict`` and the like are called on."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from anynan._base.patches import Patches
from anynan._everywhere import Found, spoiled
from anynan._steps.tracked import Tracked, inside, is_tracked
from anynan.errors import AnomalyError
from anynan.keras import lines
from anynan.keras.tracking import start
from anynan.options import Options

BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch every Keras model from the first ``fit``, ``evaluate`` or ``predict`` on.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    trackers: list[Tracked] = []

    def look(model: Any) -> None:
        try:
            if model in known:
                return
            known.add(model)
            if not is_tracked(model):
                trackers.append(inside(start(model, options)))
                found.add(trackers[-1])
        except AnomalyError as error:  # a weight is bad already
            if error.tracker is not None:
                found.add(error.tracker)
            raise
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            found.fail(f"a {type(model).__name__}", error)

    def told(set_model: Callable[..., Any]) -> Callable[..., Any]:
        def call(callbacks: Any, model: Any) -> Any:
            if model is not None:
                look(model)
            return set_model(callbacks, model)

        return call

    def before(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            look(model)
            return method(model, *args, **kwargs)

        return call

    patches = Patches()
    lines.remember(patches)
    # Whatever goes over batches makes a list of callbacks.
    patches.change(keras.callbacks.CallbackList, "set_model", told)
    for name in BATCHES:
        patches.change(keras.Model, name, before)

    def undo() -> None:
        patches.undo()
        for tracker in trackers:
            spoiled(tracker, found)

    return undo
