"""What holds for Keras on every backend; PyTorch and JAX run this in processes of their own."""

import copy
import gc
import weakref
from contextlib import nullcontext

import keras
import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from anynan.keras import seams
from tests.failing import failure
from tests.keras_backends import models
from tests.keras_backends.models import (
    LAYERS,
    NAMES,
    Log,
    Root,
    compiled,
    data,
    layers,
    line,
    positive,
    zero,
)  # fmt: skip
from tests.tensorflow_adapter.watching import watched

BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def _fresh():
    keras.utils.set_random_seed(1)
    yield
    for session in seams.sessions():
        session.tracker.remove()
    keras.mixed_precision.set_global_policy("float32")


def same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", models.KINDS)
def test_fit_reads_every_layer_and_a_forward_fault_is_found(kind):
    model = positive(compiled(Log(name="inner"), kind))
    tracker = anynan.keras.track(model)
    model.fit(*data(), batch_size=4, epochs=2, verbose=0)
    assert layers(tracker, "forward") == set(LAYERS)
    assert layers(tracker, "loss") == {None}
    if BACKEND == "torch":
        assert layers(tracker, "backward") == set(LAYERS)
        names = {f"{name}.{part}" for name in NAMES for part in ("kernel", "bias")}
        assert names == {r.site.parameter for r in tracker.history.last() if r.site.parameter}
    inputs = {r.site.tensor for r in tracker.history.last() if r.phase == "input"}
    assert inputs == {"x", "y"} or BACKEND == "tensorflow"  # which reads what the model is given
    assert len(tracker.history) == 4
    assert not tracker.events
    assert not tracker.notes
    zero(model)
    before = model.get_weights()
    event = failure(model.fit, *data(), batch_size=4, verbose=0)
    assert (event.backend, event.layer, event.phase) == (BACKEND, "block.inner", "forward")
    assert (event.kind, event.step, event.operation.name) == ("neginf", 4, "log")
    assert event.operation.source.line == line(models.__file__, "bad log")
    assert event.cause.tag == "log_of_zero"
    same(before, model.get_weights())
    positive(model)
    model.fit(*data(), batch_size=4, verbose=0)  # the model is as usable as it was


def test_backward_fault_is_found_in_fit():
    model = zero(compiled(Root(name="inner")))
    anynan.keras.track(model)
    before = model.get_weights()
    event = failure(model.fit, *data(), verbose=0)
    assert (event.layer, event.phase, event.operation.name) == ("block.inner", "backward", "sqrt")
    assert event.operation.source.line == line(models.__file__, "bad sqrt")
    assert event.cause.tag == "sqrt_gradient_at_zero"
    same(before, model.get_weights())


def test_being_built_into_another_model_is_no_step():
    base = zero(models.functional(Log(name="inner")))
    tracker = anynan.keras.track(base)
    inputs = keras.Input((4,))
    keras.Model(inputs, keras.layers.Dense(2)(base(inputs)))
    keras.Model(inputs, base.layers[-1](inputs))
    assert (tracker.step, len(tracker.history), tracker.events) == (0, 0, ())
    with pytest.raises(anynan.NonFiniteError):
        base(data()[0])


def test_statistics_that_the_failing_call_spoils_are_not_to_blame():
    inner = keras.Sequential(
        [keras.layers.ReLU(), Log(name="log"), keras.layers.BatchNormalization(name="bn")]
    )
    model = zero(compiled(inner))
    anynan.keras.track(model)
    event = failure(model.fit, *data(), verbose=0)
    assert (event.phase, event.step, event.parameter) == ("forward", 0, None)
    assert (event.layer, event.cause.tag) == (f"block.{inner.name}.log", "log_of_zero")


def test_run_tells_an_operation_once_with_the_line_that_wrote_it():
    def run():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(3)(inputs)
        hidden = keras.ops.log(hidden - 99.0)  # bad functional
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        model.fit(*data(), verbose=0)

    found = watched(run)
    (event,) = found.bad()
    source = event.operation.source
    assert source.line == line(__file__, "bad functional")
    if source.column is not None:
        assert source.text[source.column : source.end_column].startswith("keras.ops.log(")
    assert not [text for text in found.lines() if "not watched" in text]


def test_run_names_the_line_that_made_a_layer_for_its_activation():
    def run():
        layer = keras.layers.Dense(3, activation=keras.ops.log)  # bad activation
        model = keras.Sequential([layer])
        model.compile("sgd", "mse")
        model.fit(*data(), verbose=0)
        assert layer.activation is keras.ops.log

    event = watched(run).bad()[0]
    assert event.operation.source.line == line(__file__, "bad activation")


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, of its variables
def test_a_metric_that_is_bad_by_itself_is_said_once():
    def ratio(y, p):
        return keras.ops.sum(p) / keras.ops.sum(y * 0)

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[ratio])
    with pytest.warns(anynan.AnynanWarning, match="the metric itself probably made it") as warned:
        tracker = anynan.keras.track(model)
        model.fit(*data(), batch_size=4, epochs=2, verbose=0)
    assert not tracker.events
    assert len([x for x in warned if x.category is anynan.AnynanWarning]) == 1


@pytest.mark.parametrize("what", ["fit", "evaluate"])
def test_fault_inside_the_loss(what):
    def loss(y, found):
        return keras.ops.mean(keras.ops.log(y - 2.0) * found)  # bad loss

    model = compiled(keras.layers.Dense(4, name="inner"), optimizer="sgd", loss=loss)
    anynan.keras.track(model)
    event = failure(lambda: getattr(model, what)(*data(), verbose=0))
    assert (event.layer, event.phase, event.kind) == (None, "loss", "nan")
    assert event.operation.source.line == line(__file__, "bad loss")
    assert event.cause.tag == "log_of_negative"


def test_step_of_ones_own_that_never_asks_for_the_loss():
    class Own(keras.Model):
        def test_step(self, *given):
            y = given[-1][1]
            found = keras.ops.mean(keras.ops.log(y - 2.0))  # bad step
            return {"loss": found} if len(given) == 1 else ({"loss": found}, given[0])

    inputs = keras.Input((4,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd")
    anynan.keras.track(model)
    event = failure(model.evaluate, *data(), verbose=0)
    assert (event.phase, event.operation.name) == ("loss", "log")
    assert event.operation.source.line == line(__file__, "bad step")


@pytest.mark.parametrize("what", ["evaluate", "predict", "train_on_batch", "call"])
def test_the_other_ways_are_watched(what):
    model = positive(compiled(Log(name="inner")))
    x, y = data()

    def run():
        if what == "call":
            with no_gradients():
                return model(x)
        arguments = (x,) if what == "predict" else (x, y)
        options = {} if what == "train_on_batch" else {"verbose": 0}
        return getattr(model, what)(*arguments, **options)

    plain = run() if what in ("predict", "call") else None
    tracker = anynan.keras.track(model)
    out = run()
    if plain is not None:
        same(*(keras.ops.convert_to_numpy(part) for part in (plain, out)))
    assert layers(tracker, "forward") == set(LAYERS)
    zero(model)
    before = model.get_weights()
    event = failure(run)
    assert (event.layer, event.phase, event.step) == ("block.inner", "forward", 1)
    assert event.operation.source.line == line(models.__file__, "bad log")
    same(before, model.get_weights())


def no_gradients():
    """Make a call a whole step, where gradients would keep it open."""
    return pytest.importorskip("torch").no_grad() if BACKEND == "torch" else nullcontext()


def trained(prepare, action):
    """Train with layers that draw and count, and give what came of it."""
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(x))
    x = models.Block(Root(name="inner"), name="block")(x)
    model = prepare(keras.Model(inputs, keras.layers.Dense(1, activation="gelu")(x)))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)  # with a state of its own
    model.compile(optimizer, "mse", metrics=["mae"])
    kept = anynan.Advanced(keep_inputs=BACKEND == "jax")
    tracker = action and anynan.keras.track(model, action=action, advanced=kept)
    losses = model.fit(*data(12), batch_size=4, epochs=2, verbose=0).history
    if tracker:
        tracker.remove()
    return [*model.get_weights(), losses["loss"], losses["mae"]], tracker


@pytest.mark.parametrize(
    ("prepare", "action"), [(positive, "raise"), (positive, "record"), (zero, "record")]
)
def test_training_is_the_same_with_tracking(prepare, action):
    found, tracker = trained(prepare, action)
    same(found, trained(prepare, None)[0])
    events = [(event.layer, event.operation.name) for event in tracker.events]
    assert events[:1] == ([("block.inner", "sqrt")] if prepare is zero else [])


def test_skip_drops_the_update_and_goes_on():
    model = zero(compiled(Root(name="inner")))
    before = model.get_weights()
    with anynan.keras.track(model, action="skip") as tracker:
        with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
            model.fit(*data(), batch_size=4, verbose=0)
        same(before, model.get_weights())
        assert tracker.count("bad") == 2
        positive(model)
        model.fit(*data(), batch_size=4, verbose=0)
        assert tracker.count("bad") == 2
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_bad_batch_and_bad_label_are_told_apart():
    model = compiled(keras.layers.Dense(4, name="inner"))
    x, y = data()
    bad_x, bad_y = x.copy(), y.copy()
    bad_x[3, 1] = bad_y[3] = np.nan
    with anynan.keras.track(model):
        event = failure(model.fit, bad_x, y, shuffle=False, verbose=0)
        assert (event.phase, event.tensor, event.cause.tag) == ("input", "x", "bad_input")
        event = failure(model.train_on_batch, x, bad_y)
        assert (event.phase, event.tensor, event.cause.tag) == ("input", "y", "bad_label")


def test_bad_weight_is_found_at_once():
    model = compiled(keras.layers.Dense(4, name="inner"))
    model.get_layer("last").bias.assign([np.inf])
    event = failure(anynan.keras.track, model)
    assert (event.phase, event.parameter) == ("parameter", "last.bias")
    assert not seams.sessions()


def test_mixed_float16_overflow_is_expected():
    keras.mixed_precision.set_global_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**30)
    model = compiled(keras.layers.Dense(4, name="inner"), optimizer=optimizer)
    tracker = anynan.keras.track(model)
    model.fit(*data(), verbose=0)
    assert (tracker.count("expected"), tracker.count("bad")) == (1, 0)
    assert {event.severity for event in tracker.events} == {"suspect"}


def test_patterns_and_nested_models():
    inputs = keras.Input((4,))
    inner = keras.Model(inputs, keras.layers.Dense(4, name="deep")(inputs), name="sub")
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(inner(inputs)), name="net")
    x, _ = data()
    for chosen, seen in (
        ({}, {"sub", "sub.deep", "last", ""}),
        ({"exclude": "sub"}, {"last", ""}),
        ({"layers": "sub*"}, {"sub", "sub.deep"}),
    ):
        with anynan.keras.track(model, **chosen) as tracker:
            model.predict(x, verbose=0)
            assert layers(tracker, "forward") == seen
    with pytest.raises(ValueError, match="exclude='lost' matches no layer; did you mean 'last'"):
        anynan.keras.track(model, exclude="lost")
    assert not seams.sessions()


class Late(keras.Model):
    """Build its layers when it first runs, and make one of them only then."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, name="first")

    def build(self, shape):
        self.inner = Log(name="inner")
        super().build(shape)

    def call(self, x):
        return self.inner(-keras.ops.abs(self.first(x)))


def test_a_model_that_fit_builds_is_watched_from_its_first_batch():
    model = Late()
    model.compile("sgd", "mse")
    monitor = anynan.keras.Monitor()
    with pytest.warns(anynan.AnynanWarning, match="logarithm of a negative number"):
        model.fit(*data(), batch_size=4, verbose=0, callbacks=[monitor])
    event = monitor.events[0]
    assert (event.step, event.layer, event.operation.name) == (0, "inner", "log")
    assert layers(monitor.tracker, "forward") == {"", "first", "inner"}


def test_what_cannot_be_tracked_is_refused():
    for target, said in ((3, "takes a Keras model, not int"), (keras.Model, "not the class Model")):
        with pytest.raises(TypeError, match=said):
            anynan.keras.track(target)
    model = compiled(keras.layers.Dense(4, name="inner"))
    with pytest.raises(TypeError, match=r"track\(\) has no option 'colour'"):
        anynan.keras.track(model, colour=1)
    message = "is tracked already, by <anynan.Tracker watching"
    with anynan.keras.track(model), pytest.raises(ValueError, match=message):
        anynan.keras.track(model)
    tracker = anynan.keras.track(model)
    anynan.untrack(model)
    assert inside(tracker).judge.adapter is None
    with pytest.raises(ValueError, match="this Functional is not tracked"):
        anynan.untrack(model)


def changed():
    """Give what the classes of Keras hold of their own."""
    owners = [
        keras.layers.Layer, keras.Model, keras.optimizers.Optimizer,
        keras.optimizers.LossScaleOptimizer, *keras.Model.__mro__,
    ]  # fmt: skip
    return [dict(vars(owner)) for owner in owners]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, in deepcopy
def test_remove_leaves_nothing_and_copies_are_not_tracked(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="first")])
    model.compile("sgd", "mse")
    model.fit(*data(), verbose=0)
    before = changed()  # with what Keras itself adds as it first runs
    held = {name: model.__dict__[name] for name in ("train_function", "test_function")}
    tracker = anynan.keras.track(model)
    assert changed() != before
    model.fit(*data(), verbose=0)
    twin = keras.models.clone_model(model)
    model.save_weights(tmp_path / "model.weights.h5")
    seen = len(tracker.history)
    twin(np.ones((1, 4), "float32"))
    copy.deepcopy(model.get_layer("first"))(np.ones((1, 4), "float32"))
    assert len(tracker.history) == seen
    tracker.remove()
    tracker.remove()
    assert changed() == before
    if BACKEND == "torch":
        assert {name: model.__dict__[name] for name in held} == held
    model.fit(*data(), verbose=0)


def test_nothing_is_kept_alive():
    model = positive(compiled(Root(name="inner")))
    anynan.keras.track(model)
    if BACKEND == "torch":
        model.fit(*data(), verbose=0)
    else:
        model(data()[0])
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


class Spoil(keras.callbacks.Callback):
    """Make the model go bad at the third batch of the second epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        if len(self.seen) == 6:
            if BACKEND == "jax":
                self.model.jax_state_sync()
            zero(self.model)


WHERE = "epoch 2, batch 3 of fit"


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_monitor(action):
    model = positive(compiled(Root(name="inner")))
    monitor, spoil = anynan.keras.Monitor(action=action), Spoil()
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

    def run():
        model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[spoil, monitor])

    if action == "raise":
        with pytest.raises(anynan.NonFiniteError, match=WHERE):
            run()
        monitor.on_train_end()
    else:
        with pytest.warns(anynan.AnynanWarning, match=WHERE):
            run()
    assert spoil.seen == [0, 1, 2, 3, 0, 1, 2]
    event = monitor.events[0]
    assert (event.layer, event.phase, event.operation.name) == ("block.inner", "backward", "sqrt")
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert inside(monitor.tracker).judge.adapter is None
