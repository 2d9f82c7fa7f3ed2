"""The classes that watching changes while anything is tracked, and how they are put back."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import custom_gradient
from tensorflow.python.saved_model import save as saving

from anynan._base.patches import Patches, owner_of, through
from anynan.tensorflow.replay import taped

# Gives a session of this adapter while it lives: each is known here, and knows this module.
Finds = Callable[[], Any]
_SAVED = "anynan_rows"  # what holds our variables in a model that is saved


class Seams:
    """Change classes while anything is tracked, and put them back.

    The session of a model stays while the model does. That of a function goes with its tracker,
    which is the only way to call it.

    Attributes:
        layers: A layer's id -> how to find who watches it, under which path.
    """

    def __init__(self) -> None:
        self._sessions: list[Finds] = []
        self.layers: dict[int, list[tuple[weakref.ref[Any], Finds, str]]] = {}
        # Where a class's own call is a compiled function that is left as it is: it would not be
        # found there when the module is saved.
        self._compiled: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._patches = Patches()
        self._saves = False
        self._all = functools.partial(getattr, self, "sessions")

    @property
    def sessions(self) -> list[Any]:
        """List who watches: nobody where a model is saved, and in a graph that is no function's.

        Nor who watches a part of a model of which a step runs: that one's session reads it.
        """
        if self._saves or not (tf.executing_eagerly() or tf.inside_function()):
            return []
        living = self._living()
        return [x for x in living if not any(x is not y and x.is_part_of(y) for y in living)]

    def _free(self) -> list[Any]:
        """List those who watch, but for whom what runs now is none of theirs."""
        return [session for session in self.sessions if not session.others()]

    def calls(self, function: Any) -> Any:
        """Give the layer that a compiled function is the call of, None if it is none's."""
        ref = self._compiled.get(function)
        return None if ref is None else ref()

    def _living(self) -> list[Any]:
        return [session for one in self._sessions if (session := one()) is not None]

    def of(self, layer: Any) -> list[tuple[Any, str]]:
        """List who watches a layer, each with the path it has there."""
        watching = self.sessions
        held = [item for item in self.layers.get(id(layer), ()) if item[0]() is layer]
        return [(session, path) for _, one, path in held if (session := one()) in watching]

    def install(self, session: Any, layers: dict[str, Any]) -> None:
        """Watch these layers for a session; change classes if it is the first."""
        if session not in self._living():
            weak = session.layers.model() is None
            self._sessions.append(weakref.ref(session, self._end) if weak else lambda: session)
        one = next(one for one in self._sessions if one() is session)
        first: set[int] = set()
        for path, layer in layers.items():
            if id(layer) not in first:  # a shared layer goes by its first path
                first.add(id(layer))
                held = self.layers.setdefault(id(layer), [])
                held[:] = [entry for entry in held if entry[0]() is layer]
                held.append((weakref.ref(layer), one, path))
        for layer in layers.values():
            owner = owner_of(type(layer), "__call__")
            if isinstance(vars(owner)["__call__"], FUNCTION):
                self._compiled[layer.__call__] = weakref.ref(layer)
                session.calls.reads(layer.__call__)
            else:
                self._change(owner, "__call__", _layer_call)
        model = type(session.layers.model())
        for name in ("compute_loss", "test_step"):
            if hasattr(model, name):
                self._change(owner_of(model, name), name, through(self._all, f"calls.{name}"))
        self.install_weights(session.layers.weights.trainable())
        if self._patches.holds(tf.GradientTape, "gradient"):
            return
        asked = through(self._free, "calls.gradient")
        self._change(tf.GradientTape, "gradient", asked)
        for name in ("jacobian", "batch_jacobian"):
            self._change(tf.GradientTape, name, through(self._all, "calls.jacobian"))
        self._change(tf.GradientTape, "__enter__", _enter)
        self._change(tf.GradientTape, "__exit__", _exit)
        self._change(FUNCTION, "__call__", _function_call)
        self._patches.change(custom_gradient, "_eager_mode_decorator", _custom)
        taken_out = through(self._free, "calls.taken_out")
        self._patches.change(owner_of(EagerTensor, "_numpy"), "_numpy", taken_out)
        self._patches.change(saving, "save_and_return_nodes", self._saving)
        for name in ("categorical", "stateless_categorical"):
            self._change(tf.random, name, self._drawing)

    def install_weights(self, weights: list[Any]) -> None:
        """Change how a program updates weights by itself."""
        made = through(self._all, "updates.assign")
        for owner in {owner_of(type(x), "assign") for x in weights}:
            for name in ("assign", "assign_add", "assign_sub"):
                self._change(owner, name, made)

    def install_keras(self, keras: Any) -> None:
        """Change what Keras trains with, and its layers: they may come later."""
        self._change(keras.layers.Layer, "__call__", _layer_call)
        self._change(keras.optimizers.Optimizer, "apply", through(self._all, "updates.apply"))
        bound = through(self._all, "updates.constrain")
        self._change(owner_of(keras.Variable, "assign"), "assign", bound)
        scaled = through(self._all, "updates.apply_scaled")
        self._change(keras.optimizers.LossScaleOptimizer, "apply", scaled)
        for metric in (keras.metrics.Mean, keras.metrics.Sum):
            self._change(metric, "update_state", through(self._free, "calls.metric"))
        wrapper = keras.metrics.MeanMetricWrapper
        self._change(wrapper, "update_state", through(self._free, "calls.eager_metric"))
        self._change(keras.callbacks.History, "on_epoch_end", _epoch_ended)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            self._change(keras.Model, name, functools.partial(_make_function, name=name))

    def install_tf_keras(self, keras: Any) -> None:
        """Have Keras 2 train by batches, which a second run can be given, too."""
        self._change(keras.Model, "make_train_function", _by_batches)

    def _drawing(self, original: Any) -> Any:
        around = through(self._free, "calls.sample")(original)

        def draw(logits: Any, *args: Any, **kwargs: Any) -> Any:  # it may be given by its name
            return around(logits, *args, **kwargs)

        return draw

    def _saving(self, original: Any) -> Any:
        """Save what is watched: a model has to own every variable that its graphs refer to."""

        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            ours = {
                f"{_SAVED}_{i}": x
                for i, x in enumerate(x for one in self._living() for x in one.variables())
            }
            children = getattr(obj, "_trackable_children", None)
            if children is None or not hasattr(obj, "__dict__"):  # TensorFlow says what is wrong
                return original(obj, *args, **kwargs)
            # Put past the object's own ``__setattr__``, which would keep what it once tracked.
            vars(obj)["_trackable_children"] = lambda *how, **more: children(*how, **more) | ours
            self._saves = True  # what is traced meanwhile is not watched
            try:
                return original(obj, *args, **kwargs)
            finally:
                self._saves = False
                del vars(obj)["_trackable_children"]

        return save

    def uninstall(self, session: Any) -> None:
        """Forget a session; after the last one every class is as it was."""
        for one in [one for one in self._sessions if one() is session]:
            self._end(one)

    def _end(self, one: Finds) -> None:
        if one in self._sessions:
            self._sessions.remove(one)
        for key, held in list(self.layers.items()):
            held[:] = [entry for entry in held if entry[1] is not one and entry[0]() is not None]
            if not held:
                del self.layers[key]
        if self._sessions:
            return
        taped.drop()
        self._patches.undo()

    def _change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._patches.change(owner, name, lambda original: _converting(make, original))


SEAMS = Seams()


def _epoch_ended(original: Any) -> Any:
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> Any:
        for session in SEAMS.sessions:
            if session.layers.model() is self.model:
                session.shown(logs or {})
        return original(self, epoch, logs)

    return on_epoch_end


def _nothing() -> None:
    pass


FUNCTION = type(tf.function(_nothing))


# What stands in for the methods.


def _converting(make: Callable[[Any], Any], original: Any) -> Any:
    """Make a stand-in that autograph leaves as it is, around what it converts as without it.

    What it converts is the program's own method, which may branch on a tensor.
    """
    autograph, kept = tf.__internal__.autograph, tf.autograph.experimental.do_not_convert
    plain = kept(make(original))

    def method(*args: Any, **kwargs: Any) -> Any:
        control = autograph.control_status_ctx()
        if control.status.name == "ENABLED":
            return kept(make(autograph.tf_convert(original, control)))(*args, **kwargs)
        return plain(*args, **kwargs)

    return method


def _layer_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _as_layer(self, functools.partial(original, self), *args, **kwargs)

    return __call__


def _as_layer(layer: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    record = taped.running()
    if record is not None:
        run = functools.partial(_noted, record, layer, run)
    known = [session for session, _ in SEAMS.of(layer)]
    for session in SEAMS.sessions:
        if session not in known and not session.paused:
            session.adopt(layer, known=bool(known))
    for session, path in SEAMS.of(layer):
        if not session.paused:
            run = functools.partial(session.calls.layer, run, layer, path)
    return run(*args, **kwargs)


def _noted(record: Any, layer: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with record.inside(layer):
        return run(*args, **kwargs)


def _enter(original: Any) -> Any:
    def __enter__(self: Any) -> Any:  # noqa: N807
        begins = not tf.inside_function()
        for session in SEAMS.sessions:
            state = session.state
            if not state.tapes:
                if begins and not state.replaying:
                    session.steps.end_trained()
                state.outputs = []
            begins = begins and not (state.tapes or state.replaying or state.depth or state.held)
            state.tapes += 1
        if begins:
            taped.begin()
        return original(self)

    return __enter__


def _exit(original: Any) -> Any:
    def __exit__(self: Any, *details: Any) -> Any:  # noqa: N807
        for session in SEAMS.sessions:
            state = session.state
            state.tapes = max(0, state.tapes - 1)
        within = tf.inside_function() or any(session.state.tapes for session in SEAMS.sessions)
        if not within:
            taped.end()
            for session in SEAMS.sessions:
                session.calls.trail(afresh=False)
        return original(self, *details)

    return __exit__


def _function_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        layer = SEAMS.calls(self)
        if layer is not None:
            return _as_layer(layer, functools.partial(call, self), *args, **kwargs)
        return call(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self)
        inside = tf.inside_function()
        if inside and any(session.state.inline for session in SEAMS.sessions):
            asked = any(session.state.asked for session in SEAMS.sessions)
            return taped.in_place(self, args, kwargs, asked=asked)
        for session in SEAMS.sessions:
            if not session.paused and session.runs(self, args, kwargs):
                return session.call(self, args, kwargs)
        for session in SEAMS.sessions:
            if not session.paused:
                around = session.calls.compiling if inside else session.calls.function
                run = functools.partial(around, run, self)
        record = None if inside else taped.running()
        if record is None or tf.config.functions_run_eagerly():
            return run(*args, **kwargs)
        return record.whole(lambda: run(*args, **kwargs), taped.Call, self, args, kwargs)

    return __call__


def _custom(original: Any) -> Any:
    def run(fn: Any, args: Any, kwargs: Any) -> Any:
        record, call = taped.running(), functools.partial(original, fn, args, kwargs)
        return call() if record is None else record.whole(call, taped.Custom, fn, args, kwargs)

    return run


def _make_function(original: Any, name: str) -> Any:
    held = name.removeprefix("make_")

    def make(self: Any, force: bool = False) -> Any:
        before = getattr(self, held)
        made = original(self, force)
        function = getattr(self, held)
        owners = [s for s in SEAMS.sessions if s.layers.model() is self]
        if owners and function is not None and function is not before:
            predicts = held == "predict_function"
            wrap = owners[0].predictions if predicts else owners[0].batches
            setattr(self, held, wrap(self, function))
        return made

    return make


def _by_batches(original: Any) -> Any:
    def make(self: Any, force: bool = False) -> Any:
        made = original(self, force)
        if not isinstance(made, FUNCTION) or int(self._steps_per_execution or 1) > 1:
            return made
        inside = made.python_function

        @functools.partial(tf.function, reduce_retracing=True)
        def by_batch(data: Any) -> Any:
            return inside(iter((data,)))

        return lambda batches: by_batch(next(batches)) if SEAMS.sessions else made(batches)

    return make
