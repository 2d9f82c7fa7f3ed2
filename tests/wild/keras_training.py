"""Train a Keras model with and without `anynan`, as it is and with faults."""

import gc
import inspect
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import anynan
import anynan.keras
from tests.wild.keras_layers import TABLE, batch
from tests.wild.rows import LEVELS, YES, Fault, Row, alarm, marked, placed, wanted

BACKEND = keras.backend.backend()
SUITE = f"keras_{BACKEND}"
SAMPLE = ["Dense"]
ZERO, BIG = "0/0", "scaled weight"
Model = Any
Build = Callable[[], Model]
# The size of the images, and what makes a model of keras.applications small.
APPLICATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {"minimalistic": True}),
    "VGG16": (32, {}),
    "ResNet50": (32, {}),
    "ConvNeXtTiny": (32, {}),
    "DenseNet121": (32, {}),
    "EfficientNetB0": (32, {}),
    "NASNetMobile": (32, {}),
    "InceptionResNetV2": (75, {}),
}


def is_float(x: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)))


def divided(x: Any) -> Any:
    zero = x * 0 if is_float(x) else None
    return x if zero is None else zero / zero  # fault: 0/0


def break_call(layer: Any) -> None:
    """Make a layer divide what it returns; the model must not have been compiled yet."""
    call = layer.call

    def faulty(*args: Any, **options: Any) -> Any:
        return keras.tree.map_structure(divided, call(*args, **options))

    faulty.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    layer.call = faulty


class Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs += [float(value) for value in logs.values()]


class Run:
    """A model that is built from a seed and fitted, tracked at a level or not."""

    def __init__(self, build: Build, level: Any | None, broken: str | None = None) -> None:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        self.model = build()
        if broken is not None:
            break_call(self.layer(broken))
        self.before = self.footprint()
        self.heard: set[str] = set()
        self.tracker: Any = None if level is None else anynan.keras.track(self.model, level=level)

    def layer(self, name: str) -> Any:
        return next(layer for layer in self.model._flatten_layers() if layer.name == name)

    def weight(self, name: str) -> Any:
        """Find a weight inside of a layer: the last one that is trained."""
        return next(iter(reversed(self.layer(name).trainable_weights)), None)

    def fit(self, x: np.ndarray, y: np.ndarray) -> anynan.Event | None:
        """Fit for an epoch in two batches; give the event that ended it."""
        losses = Losses()
        keras.utils.set_random_seed(7)
        options = {"batch_size": len(x) // 2, "shuffle": False, "verbose": 0}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                self.model.fit(x, y, callbacks=[losses], **options)
            except anynan.NonFiniteError as error:
                return error.event
            finally:
                self.heard |= {str(warning.message) for warning in heard}
        self.result = [np.array(losses.logs), *map(np.array, self.model.get_weights())]
        state = self.model.optimizer.variables
        self.result += [np.array(keras.ops.convert_to_numpy(variable)) for variable in state]
        return None

    def footprint(self) -> dict[str, Any]:
        """Note the functions of classes that tracking may wrap."""
        classes = {base for layer in self.model._flatten_layers() for base in type(layer).__mro__}
        names = ("__call__", "call", "apply", "apply_gradients", "train_step", "stateless_call")
        return {
            f"{kind.__name__}.{name}": vars(kind)[name]
            for kind in (*classes, *type(self.model.optimizer).__mro__)
            for name in names
            if name in vars(kind)
        }

    def attributes(self) -> set[str]:
        parts = {layer.name: layer for layer in self.model._flatten_layers()}
        parts["the optimizer"] = self.model.optimizer
        return {f"{name} has {key}" for name, part in parts.items() for key in vars(part)}

    def end(self, plain: "Run") -> str:
        """Remove the tracker and say what is left of it."""
        self.tracker.remove()
        alive = weakref.ref(self.tracker)
        self.tracker = None
        gc.collect()
        after = self.footprint()
        wrong = [name for name, value in self.before.items() if after.get(name) is not value]
        wrong += sorted(self.attributes() ^ plain.attributes())
        wrong += ["the tracker is still held"] * (alive() is not None)
        return f"no: {', '.join(wrong)[:300]}" if wrong else YES


def difference(one: list[np.ndarray], other: list[np.ndarray]) -> str:
    """Compare losses, weights and the optimizer's state, in bits or within what fusing does."""
    if [array.shape for array in one] != [array.shape for array in other]:
        return "no: other shapes"
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.tobytes() != b.tobytes()]
    if not pairs:
        return YES
    off = max(float(np.nanmax(abs(a.astype("f8") - b.astype("f8")))) for a, b in pairs)
    near = all(np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs)
    if near and BACKEND != "torch":
        return f"within {off:.1e}"
    return f"no: {len(pairs)} of {len(one)} arrays, by {off:.1e}"


def bad(arrays: list[np.ndarray]) -> int:
    return sum(not np.isfinite(a).all() for a in arrays if a.dtype.kind == "f")


def spoilt(
    run: Run, plain: Run, how: str, target: str, x: np.ndarray, y: np.ndarray, first: list[Any]
) -> Fault | None:
    """Spoil a weight after the steps that were taken."""
    variable = run.weight(target)
    if variable is None:
        return None
    for one in (run, plain):
        one.model.set_weights(first)
        weight = one.weight(target)
        values = np.array(keras.ops.convert_to_numpy(weight))
        if how == BIG:
            values *= 1e38
        else:
            values.reshape(-1)[0] = np.nan
        weight.assign(values)
    event = run.fit(x, y)
    fault = Fault(how, variable.path)
    if event is None:
        plain.fit(x, y)
        losses, *others = plain.result
        if not bad([losses]) and bad(others) <= (how != BIG):  # a fused ReLU: max(NaN, 0) is 0
            fault.left_out = "nothing but the weight itself is bad without anynan"
        return fault
    fault.detected, fault.said = True, placed(event)
    if how != BIG:
        fault.layer = str(event.parameter).endswith(variable.path.replace("/", "."))
        tag = event.cause.tag if event.cause is not None else ""
        fault.cause = tag in ("bad_parameter", "weight_written")
    return fault


def zeroed(build: Build, level: Any, target: str, x: np.ndarray, y: np.ndarray) -> Fault:
    run = Run(build, level, target)
    event = run.fit(x, y)
    run.tracker.remove()
    fault = Fault(ZERO, f"what {target} returns")
    if event is None:
        plain = Run(build, None, target)
        plain.fit(x, y)
        if not bad(plain.result):
            fault.left_out = "finite without anynan"
        return fault
    fault.judge(event, "divide", marked(__file__, ZERO), "divide_by_zero")
    fault.layer = event.layer is not None and target in event.layer.split(".")  # or a part of it
    return fault


def rows(
    case: str, build: Build, x: np.ndarray, y: np.ndarray, target: str, *, whole: bool
) -> Iterator[Row]:
    """Train a model without and with `anynan`, and with faults in one of its layers, the target.

    At all levels, and with scaled weights, if ``whole``.
    """
    try:
        plain = Run(build, None)
        plain.fit(x, y)
    except Exception as error:
        yield Row(SUITE, case, skipped=f"{type(error).__name__}: {error}"[:200])
        return
    result, heard = plain.result, set(plain.heard)
    first = plain.model.get_weights()
    for level in LEVELS if whole else ("layer",):
        row = Row(SUITE, case, level)
        run = Run(build, level)
        event = run.fit(x, y)
        if event is None:
            row.identical = difference(result, run.result)
            if row.identical.startswith("no"):
                again = Run(build, None)
                again.fit(x, y)
                if difference(result, again.result) != YES:
                    row.identical = ""  # nothing to compare with: random without anynan
        row.silent = alarm(event, run.tracker.events, run.heard - heard)
        if level == "layer":
            ways = ("nan weight", BIG) if whole else ("nan weight",)
            found = (spoilt(run, plain, how, target, x, y, first) for how in ways)
            row.faults = [fault for fault in found if fault is not None]
        row.clean = run.end(plain)
        if wanted(case, level, ZERO):
            row.faults.append(zeroed(build, level, target, x, y))
        yield row


def of_layer(case: str) -> Iterator[Row]:
    make, shape, dtype = TABLE[case]

    def build() -> Model:
        inputs = keras.Input(shape, dtype=dtype)
        x = keras.layers.Dense(shape[-1], name="pre")(inputs) if dtype == "float32" else inputs
        layer = make()
        layer.name = "target"
        x = layer(x)
        if not is_float(x):
            x = keras.layers.Lambda(lambda x: keras.ops.cast(x, "float32"), name="cast")(x)
        outputs = keras.layers.Dense(1, name="post")(keras.layers.Flatten(name="flat")(x))
        model = keras.Model(inputs, outputs, name="net")
        model.compile("adam", "mse")
        return model

    given = batch(shape, dtype)
    yield from rows(case, build, given, np.ones((4, 1), "float32"), "target", whole=True)


def of_application(case: str) -> Iterator[Row]:
    size, options = APPLICATIONS[case]

    def build() -> Model:
        make = getattr(keras.applications, case)
        model = make(weights=None, classes=3, input_shape=(size, size, 3), **options)
        model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
        return model

    names = [layer.name for layer in build().layers if layer.trainable_weights]
    x = np.random.default_rng(0).uniform(0, 255, (4, size, size, 3)).astype("float32")
    yield from rows(case, build, x, np.array([0, 1, 2, 0]), names[len(names) // 2], whole=False)


def cases() -> list[str]:
    """Name the layers of the table and the applications: all on TensorFlow, else a sample."""
    # In an order of no meaning: part of a run is a sample.
    mixed = sorted([*TABLE, *APPLICATIONS], key=lambda case: zlib.crc32(case.encode()))
    if BACKEND == "tensorflow":
        return mixed
    return [case for case in mixed if case in TABLE or case in ("MobileNet", "VGG16")][::4]


def run(case: str) -> Iterator[Row]:
    yield from (of_application if case in APPLICATIONS else of_layer)(case)
