"""Loops of one's own with a tape: around a model, and what they make outside of models."""

import re
import textwrap
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.keras_adapter import models
from tests.keras_adapter.models import WAYS, Root, data, layers, line, positive, zero
from tests.keras_backends.models import LAYERS, NAMES
from tests.processes import python
from tests.tensorflow_adapter.watching import watched
from tests.tiers import first

X = tf.ones((2, 3))


def model():
    given = keras.Input((3,))
    return keras.Model(given, keras.layers.Dense(1, name="dense")(given) * 2.0)


def log_of_negative(out):
    return tf.reduce_mean(tf.math.log(-1 - out * out))  # log_of_negative


def slope_of_root(out):
    return tf.reduce_mean(tf.sqrt(out * 0.0))  # slope_of_root


def train(net, loss_of, optimizer):
    with tf.GradientTape() as tape:
        loss = loss_of(net(X))
    weights = net.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


@pytest.mark.parametrize(("loss", "operation"), [(log_of_negative, "log"), (slope_of_root, "sqrt")])
def test_what_is_made_outside_of_the_model_is_named_with_its_line(loss, operation):
    net = model()
    with anynan.keras.track(net, action="record") as tracker:
        train(net, tf.reduce_mean, keras.optimizers.SGD(0.0))
        train(net, loss, keras.optimizers.SGD())
    event = tracker.events[0]
    assert (event.step, event.layer, event.operation.name) == (1, None, operation)
    assert event.operation.source.line == line(__file__, loss.__name__)


def test_a_clean_loop_gives_what_it_gives_without():
    def run():
        keras.utils.set_random_seed(3)
        net, optimizer = model(), keras.optimizers.Adam()
        for _ in range(3):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(net(X) ** 2)
                with tf.GradientTape() as inner:
                    inner.watch(X)
                    out = net(X)
                loss += tf.reduce_mean(inner.gradient(out, X) ** 2)
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            del tape
        return [w.numpy() for w in net.weights]

    from tensorflow.python.eager import execute

    plain, before, seen = run(), execute.execute, []
    assert watched(lambda: seen.extend(run())).events == []
    for one, other in zip(plain, seen, strict=True):
        np.testing.assert_array_equal(one, other)
    assert execute.execute is before


PROGRAMS = {
    "numpy": """
        import numpy as np, tensorflow as tf
        w, y = tf.Variable([1.0, 2.0]), np.ones(2, "float32")
        for i in range(3):
            with tf.GradientTape() as tape:
                ratio = y / (y - y)  # here
                loss = tf.reduce_sum(w * tf.linalg.matvec([[1.0, -1.0]], ratio))
            tape.gradient(loss, w)
        """,
    "prepared": """
        import tensorflow as tf, keras
        net = keras.Sequential([keras.layers.Dense(1)])
        x = tf.random.uniform((12, 3))
        x = (x - tf.reduce_mean(x)) / tf.norm(x - x)  # here
        net.compile("sgd", "mse")
        net.fit(x, tf.zeros((12, 1)), batch_size=4, verbose=0)
        """,
    "clean": """
        import tensorflow as tf, keras
        net, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.01)
        @tf.function
        def mask(x):
            return tf.where(x > 0, x, -float("inf"))
        for i in range(3):
            mask(tf.zeros(3))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(tf.ones((2, 3))) ** 2)
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            print(tf.constant([0.0, 1.0]) / [0.0, 1.0], float(loss), tf.math.is_nan(loss))
        """,
    "unread": """
        import tensorflow as tf, keras, numpy as np
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        net.compile(keras.optimizers.SGD(float("inf")), "mse")
        net.fit(np.ones((4, 3)), np.zeros((4, 1)), verbose=0, epochs=1)
        """,
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.tier(2)
def test_a_program_as_it_is_is_told_with_its_line(tmp_path, name):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAMS[name]).lstrip())
    done = python("-m", "anynan", "run", path, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    if name == "clean":
        assert "the program: nothing went bad in 3 steps" in done.stderr, done.stderr
    elif name == "unread":
        assert "as the program ends" in done.stderr, done.stderr
        assert "nothing went bad" not in done.stderr
    else:
        here = f"program.py:{line(path, 'here')}"
        assert re.search(f"op +[a-z ]+ +{here}", done.stderr), done.stderr
        assert ("NumPy met this alone" in done.stderr) == (name == "numpy"), done.stderr
        assert re.search(r"(program|Sequential): \d bad in 3 steps", done.stderr), done.stderr


REPLICAS = """\
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
both = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with both.scope():
    w = tf.Variable(tf.ones((4, 1)))

def one(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.math.log(x @ w))
    slope = tape.gradient(loss, w)
    w.assign_sub(tf.distribute.get_replica_context().all_reduce("mean", slope))
    return loss

@tf.function
def step(x):
    return both.reduce("MEAN", both.run(one, args=(x,)), axis=None)

rows = np.ones((32, 4), np.float32)
rows[20:24] = 0
for x in both.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(8)):
    step(x)
print("to its end")
"""


@pytest.mark.tier(2)
@pytest.mark.parametrize("devices", ['["CPU:0", "CPU:1"]', '["CPU:0"]'])
def test_a_loop_over_replicas_of_the_programs_own_runs_to_its_end(tmp_path, devices):
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS.replace('["CPU:0", "CPU:1"]', devices))
    ended = python("-m", "anynan", "run", script, cwd=tmp_path)
    assert "to its end" in ended.stdout, ended.stderr
    assert "replicas-full" not in ended.stdout + ended.stderr
    assert "1 bad in 4 steps" in ended.stdout + ended.stderr
    assert re.search(r"op +log +replicas\.py:12 in one", ended.stderr), ended.stderr


class Compiled(tf.Module):
    b = None

    @tf.function
    def __call__(self, x):
        if self.b is None:
            self.b = tf.Variable(tf.zeros((3,)))
        return x + tf.math.log(self.b)  # compiled


def test_a_compiled_model_under_a_tape_of_the_programs_own_is_opened():
    model = Compiled()

    def run():
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X) ** 2)
            model.b.assign_sub(0.1 * tape.gradient(loss, model.b))

    found = watched(run)
    assert found.bad()[0].operation.source.line == line(__file__, "compiled")
    assert not [text for text in found.lines() if "stale-graph" in text]


@tf.custom_gradient
def given_slope(x):
    def slope(above):
        return above / tf.norm(x - x)  # given slope

    return tf.clip_by_value(x, -1.0, 1.0), slope


@pytest.mark.parametrize("compiled", first(1, [True, False]))
def test_a_gradient_that_the_program_gives_is_opened(compiled):
    w = tf.Variable([1.0, 4.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(given_slope(w * 0.5))
        return tape.gradient(loss, w)

    (event,) = watched(tf.function(step) if compiled else step).bad()
    assert (event.operation.name, event.cause.tag) == ("divide", "divide_by_zero")
    assert event.operation.source.line == line(__file__, "given slope")


@pytest.mark.parametrize("traced", [False, True])
def test_what_is_watched_can_be_saved(tmp_path, traced):
    saved = tf.Module()
    saved.net = net = model()
    saved.call = tf.function(lambda x: net(x), input_signature=[tf.TensorSpec((2, 3))])

    def run():
        tf.function(train)(net, tf.reduce_mean, keras.optimizers.SGD())
        if traced:
            saved.call(X)
        tf.saved_model.save(saved, str(tmp_path))

    assert not watched(run).bad()
    assert not [name for name in vars(saved) if "anynan" in name]
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.call(X), net(X))


@pytest.mark.parametrize("by_hand", first(1, [False, True]))
def test_a_gradient_that_a_loop_changes_is_told_with_its_line(by_hand):
    net, optimizer = model(), keras.optimizers.Adam()

    def run():
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(X) ** 2)
            weights = net.trainable_variables
            slopes = [g / tf.norm(g - g) for g in tape.gradient(loss, weights)]  # changed outside
            if by_hand:
                weights[0].assign_sub(slopes[0])
            else:
                optimizer.apply(slopes, weights)

    event = watched(run).bad()[0]
    assert (event.step, event.operation.name) == (0, "divide")
    assert event.operation.source.line == line(__file__, "changed outside")


@pytest.mark.parametrize(("loss", "operation"), [(tf.math.log, "log"), (tf.sqrt, "sqrt")])
def test_data_that_is_optimized_is_told_in_its_step_with_its_line(loss, operation):
    net, x = model(), X + 0.0

    def run():
        nonlocal x
        for number in range(4):
            with tf.GradientTape() as tape:
                tape.watch(x)
                cost = tf.reduce_mean(net(x) ** 2)
                if number == 2:
                    cost += tf.reduce_sum(loss(x * 0 - (operation == "log")))  # of the image
            x = x - 0.1 * tf.sign(tape.gradient(cost, x))
        float(cost)

    (event,) = watched(run).bad()
    assert (event.step, event.operation.name) == (2, operation)
    assert event.operation.source.line == line(__file__, "of the image")
    assert event.phase == ("loss" if operation == "log" else "backward")


def test_the_loss_of_a_test_outside_of_functions_is_told_with_its_line():
    net, held = model(), keras.metrics.Mean()

    def run():
        train(net, tf.reduce_mean, keras.optimizers.SGD())
        held(tf.math.log(-1 - net(X) ** 2))  # test loss

    (event,) = watched(run).bad()
    assert event.operation.source.line == line(__file__, "test loss")


def test_a_bad_array_that_a_compiled_test_gives_is_told_and_a_mask_is_not():
    net = model()
    net.compile("sgd", "mse")

    @tf.function
    def test(x):
        out = net(x)
        return tf.math.log(-1 - out * out), tf.where(out < 0, -np.inf, out)  # test array

    def run():
        net.fit(X, X[:, :1], verbose=0)
        test(X)

    (event,) = watched(run).bad()
    assert event.operation.source.line == line(__file__, "test array")


@pytest.mark.parametrize("trains", [False, True])
def test_a_function_that_takes_no_gradient_is_listed_where_nothing_else_ran(trains):
    net = model()

    def run():
        tf.function(log_of_negative)(X)
        if trains:
            train(net, tf.reduce_mean, keras.optimizers.SGD())

    told = "\n".join(watched(run).lines(8, harmed=False))
    assert trains != ("unwatched log_of_negative, a tf.function that takes no gradient" in told)


def loop(model, way, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    if way == "eager":
        return step
    return tf.function(step, jit_compile=way == "xla")


@pytest.mark.tier(2)
@pytest.mark.parametrize("way", WAYS)
def test_loop_of_ones_own(way):
    model = positive(models.functional(Root(name="inner")))
    step = loop(model, way, keras.optimizers.SGD(0.01))
    x, y = data()
    tracker = anynan.tensorflow.track(model)
    for _ in range(3):
        step(tf.constant(x), tf.constant(y))
    assert len(tracker.history) == 3
    assert layers(tracker, "forward") == set(LAYERS)
    assert layers(tracker, "backward") == set(LAYERS if way == "eager" else NAMES)
    assert not tracker.events
    zero(model)
    before = model.get_weights()
    event = failure(step, tf.constant(x), tf.constant(y))
    assert (event.layer, event.phase, event.step) == ("block.inner", "backward", 3), event.notes
    assert event.operation.source.line == line(models.__file__, "bad sqrt")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.tier(2)
def test_one_write_for_each_phase_and_one_read_for_each_step(monkeypatch):
    model = positive(models.functional(Root(name="inner")))
    step = loop(model, "graph", keras.optimizers.SGD(0.01))
    x, y = (tf.constant(part) for part in data())
    with anynan.keras.track(model) as tracker:
        step(x, y)
        assert step.experimental_get_tracing_count() == 1
        nodes = step.get_concrete_function(x, y).graph.get_operations()
        assert [n.type for n in nodes].count("ResourceStridedSliceAssign") == 2
        counts = Counter(n.type for n in nodes if n.name.startswith("anynan"))
        # The input, each layer's output, the loss and the gradient of each weight.
        read = 1 + len(LAYERS) + 1 + len(model.weights)
        assert counts["Min"] == counts["Max"] == counts["L2Loss"] == read
        (buffer,) = inside(tracker).judge.adapter._buffers.held
        (part,) = buffer.parts
        reads = []
        read = tf.raw_ops.ReadVariableOp

        def count(resource, dtype):
            reads.append(resource is part.rows.handle)
            return read(resource=resource, dtype=dtype)

        monkeypatch.setattr(tf.raw_ops, "ReadVariableOp", count)
        for _ in range(3):
            step(x, y)
        assert reads == [True] * 3
