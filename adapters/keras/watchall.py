"""Find the models that ``fit`` and the like are called on, or that a loop calls on PyTorch."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import keras

from anynan._base.identity import SetByIdentity
from anynan._base.patches import Patches
from anynan._everywhere import Found, spoiled
from anynan._steps.tracked import Tracked, inside, is_tracked
from anynan.errors import AnomalyError
from anynan.keras import lines
from anynan.keras.layers import is_symbolic
from anynan.keras.seams import sessions
from anynan.keras.tracking import start
from anynan.options import Options

BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch every Keras model from the first ``fit``, ``evaluate`` or ``predict`` on.

    On PyTorch also from its first call of its own, once it is built.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    known: SetByIdentity[Any] = SetByIdentity()
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

    calling = threading.local()

    def called(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            within = getattr(calling, "now", False)
            # What a batch runs is the affair of the model that it is of.
            new = not within and model not in known and model.built
            free = new and not any(x.threads.state().in_step for x in sessions())
            if free and not is_symbolic(args, kwargs):
                look(model)
            calling.now = True
            try:
                return call(model, *args, **kwargs)
            finally:
                calling.now = within

        return run

    patches = Patches()
    lines.remember(patches)
    if keras.backend.backend() == "torch":  # the others find it by themselves
        patches.change(keras.Model, "__call__", called)
    # Whatever goes over batches makes a list of callbacks.
    patches.change(keras.callbacks.CallbackList, "set_model", told)
    for name in BATCHES:
        patches.change(keras.Model, name, before)

    def undo() -> None:
        patches.undo()
        for tracker in trackers:
            spoiled(tracker, found)

    return undo
