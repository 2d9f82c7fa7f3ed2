"""A tracked Keras model: its layers' paths, and the functions that ``fit`` and the like run."""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from anynan._steps.tracked import Tracked
from anynan.tensorflow.session.session import Session
from anynan.tensorflow.session.targets import parts_while_alive

FUNCTIONS = ("train_function", "test_function", "predict_function")


class ModelSession(Session):
    """Watch a Keras model."""

    def __init__(self, model: Any, tracker: Tracked) -> None:
        super().__init__(functools.partial(parts_while_alive, weakref.ref(model)), model, tracker)
        self._built = self.layers.whole()

    def renew(self) -> None:
        """Drop the functions that Keras traced: it makes them anew when it needs them."""
        model = self.layers.model()
        for name in FUNCTIONS:
            if getattr(model, name, None) is not None:
                setattr(model, name, None)

    def batches(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Make a step's function take its batches outside of the graph: a replay needs them."""
        step = "train_step" if function is model.train_function else "test_step"

        def one_by_one(iterator: Any) -> Any:
            if self.tracker.judge.adapter is not self or self.paused:
                return function(iterator)
            out = None
            taken = 0
            for data in itertools.islice(iterator, int(model.steps_per_execution)):
                taken += 1
                fn = getattr(model, step) if model.run_eagerly else None
                out = self.held(fn, (data,), functools.partial(function, iter((data,))))
            if not taken:
                raise StopIteration
            return out

        return one_by_one

    def predictions(self, model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Remember the batch that is predicted."""

        def predict(batches: Any) -> Any:
            if self.tracker.judge.adapter is not self or self.paused:
                return function(batches)
            fn = model.predict_step
            return self.held(fn, (batches[-1],), functools.partial(function, batches))

        return predict

    def held(self, fn: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run one batch as one step; without a function, what is compiled says how."""
        state, steps = self.state, self.steps
        if not self._built:  # Keras built it after it was tracked
            self.grow()
            self._built = self.layers.whole()
        if fn is None or state.depth:
            return run()
        if state.open:
            steps.end()
        steps.open(steps.of(fn, args, {}))
        state.held = True
        try:
            return run()
        except BaseException as error:
            self.calls.broken(error)
            raise
        finally:
            if state.open:
                steps.end()
