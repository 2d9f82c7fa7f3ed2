"""Random walks through what a Keras program may do, beside a twin that nobody tracks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

pytest.importorskip("tensorflow")
keras: Any = pytest.importorskip("keras")

import anynan  # noqa: E402
from tests.chaos import twins  # noqa: E402
from tests.flat import split  # noqa: E402

pytestmark = pytest.mark.tier(2)

if keras.backend.backend() != "tensorflow":
    pytest.skip("these run on TensorFlow", allow_module_level=True)

OPTIONS = st.fixed_dictionaries(
    {"action": st.sampled_from(["record", "warn", "raise"])},
    optional={"replay": st.just(False), "parameters": st.just(True)},
)
PATCHED = (keras.Layer, keras.Model, keras.optimizers.Optimizer, keras.optimizers.SGD)


def made(weights: Any = None) -> Any:
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, name="head")]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
    if weights is not None:
        model.set_weights(weights)
    return model


def process() -> dict[str, Any]:
    attributes = {f"{x.__name__}.{key}": id(v) for x in PATCHED for key, v in vars(x).items()}
    return {**twins.process(), **attributes}


def copy(model: Any, x: Any) -> Any:
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    return np.asarray(other(x))


ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda m, x: m.fit(x, x.sum(1), batch_size=2, shuffle=False, verbose=0).history,
    "train": lambda m, x: float(np.asarray(m.train_on_batch(x, x.sum(1))).ravel()[0]),
    "evaluate": lambda m, x: m.evaluate(x, x.sum(1), verbose=0),
    "predict": lambda m, x: m.predict(x, verbose=0),
    "call": lambda m, x: np.asarray(m(x)),
    "call wrongly": lambda m, x: twins.outcome(lambda: m(x[:, :2]))[0],
    "freeze": lambda m, _: setattr(m.layers[0], "trainable", not m.layers[0].trainable),
    "compile": lambda m, _: m.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=True),
    "copy": copy,
    "reload": lambda m, _: m.set_weights([weight.copy() for weight in m.get_weights()]),
}


class Walk(twins.Doors, RuleBasedStateMachine):
    """Do the same with two models; track, pause, resume and untrack one of them."""

    process = staticmethod(process)

    @initialize()
    def begin(self) -> None:
        self.before = self.process()
        self.plain = made()
        self.tracked = made(self.plain.get_weights())

    @rule(k=twins.SEEDS, bad=st.sampled_from([False, False, True]), act=st.sampled_from([*ACTS]))
    def both(self, k: int, bad: bool, act: str) -> None:
        what = ACTS[act]
        x = np.random.default_rng(k).normal(size=(4, 3)).astype("float32")
        if bad:
            x[1, 1] = np.inf
        self.was_bad = self.was_bad or bad
        begun = self.plain.get_weights()
        with twins.quiet():
            try:
                one = what(self.plain, x)
            except ValueError as error:  # some weights were frozen as the optimizer was built
                if "it was originally built with" not in str(error):
                    raise
                reject()
            try:
                two = what(self.tracked, x)
            except anynan.AnomalyError:
                assert self.was_bad
                two = one
                self.tracked.set_weights(self.plain.get_weights())
        np.testing.assert_equal(one, two)
        np.testing.assert_equal(self.plain.get_weights(), self.tracked.get_weights())
        if bad:  # or everything is bad from now on
            self.plain.set_weights(begun)
            self.tracked.set_weights(begun)

    @precondition(lambda self: self.tracker is None)
    @rule(options=OPTIONS)
    def track(self, options: dict[str, Any]) -> None:
        with twins.quiet():
            self.tracker = anynan.keras.track(self.tracked, **split(options))
        self.was_bad = False


def test_a_tracked_keras_model_and_its_twin(amount: Any) -> None:
    amount(Walk, examples=4, steps=12)
