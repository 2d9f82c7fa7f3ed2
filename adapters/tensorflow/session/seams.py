"""The classes that watching changes while anything is tracked, and how they are put back."""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from anynan.tensorflow.replay import nested, taped

if TYPE_CHECKING:
    from anynan.tensorflow.session.session import Session

    Finds = Callable[[], Session | None]

_ABSENT = object()


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
        self._changed: list[tuple[type, str, Any]] = []

    @property
    def sessions(self) -> "list[Session]":
        """List who watches: nobody in a graph that is no function's, as where a model is saved."""
        if not (tf.executing_eagerly() or tf.inside_function()):
            return []
        return self._living()

    def calls(self, function: Any) -> Any:
        """Give the layer that a compiled function is the call of, None if it is none's."""
        ref = self._compiled.get(function)
        return None if ref is None else ref()

    def _living(self) -> "list[Session]":
        return [session for one in self._sessions if (session := one()) is not None]

    def of(self, layer: Any) -> "list[tuple[Session, str]]":
        """List who watches a layer, each with the path it has there."""
        watching = self.sessions
        held = [item for item in self.layers.get(id(layer), ()) if item[0]() is layer]
        return [(session, path) for _, one, path in held if (session := one()) in watching]

    def install(self, session: "Session", layers: dict[str, Any]) -> None:
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
            owner = _owner(type(layer), "__call__")
            if isinstance(vars(owner)["__call__"], FUNCTION):
                self._compiled[layer.__call__] = weakref.ref(layer)
                session.calls.reads(layer.__call__)
            else:
                self._change(owner, "__call__", _layer_call)
        self.install_weights(session.layers.weights.trainable())
        if any(name == "gradient" for _, name, _ in self._changed):
            return
        for name, make in (("gradient", _gradient), ("jacobian", _jacobian)):
            self._change(tf.GradientTape, name, make)
        self._change(tf.GradientTape, "batch_jacobian", _jacobian)
        self._change(tf.GradientTape, "__enter__", _enter)
        self._change(tf.GradientTape, "__exit__", _exit)
        self._change(FUNCTION, "__call__", _function_call)

    def install_weights(self, weights: list[Any]) -> None:
        """Change how a program updates weights by itself."""
        for owner in {_owner(type(x), "assign") for x in weights}:
            for name in ("assign", "assign_add", "assign_sub"):
                self._change(owner, name, _assign)

    def install_keras(self, keras: Any) -> None:
        """Change what Keras trains with, and its layers: they may come later."""
        self._change(keras.layers.Layer, "__call__", _layer_call)
        self._change(keras.optimizers.Optimizer, "apply", _apply)
        self._change(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            self._change(keras.Model, name, functools.partial(_make_function, name=name))

    def uninstall(self, session: "Session") -> None:
        """Forget a session; after the last one every class is as it was."""
        for one in [one for one in self._sessions if one() is session]:
            self._end(one)

    def _end(self, one: "Finds") -> None:
        if one in self._sessions:
            self._sessions.remove(one)
        for key, held in list(self.layers.items()):
            held[:] = [entry for entry in held if entry[1] is not one and entry[0]() is not None]
            if not held:
                del self.layers[key]
        if self._sessions:
            return
        taped.drop()
        while self._changed:
            owner, name, before = self._changed.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _change(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        if any(held is owner and known == name for held, known, _ in self._changed):
            return
        before = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        made = tf.autograph.experimental.do_not_convert(make(original))
        functools.update_wrapper(made, original)
        self._changed.append((owner, name, before))
        setattr(owner, name, made)


SEAMS = Seams()


def _nothing() -> None:
    pass


FUNCTION = type(tf.function(_nothing))


def _owner(cls: type, name: str) -> type:
    """Give the class that a class has a method from."""
    return next(owner for owner in cls.__mro__ if name in vars(owner))


# What stands in for the methods.


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


def _gradient(original: Any) -> Any:
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        record = taped.newest()
        if record is not None:
            with record.off():
                return ask(self, target, sources, *args, **kwargs)
        return ask(self, target, sources, *args, **kwargs)

    def ask(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self)
        for session in SEAMS.sessions:
            if not session.paused and not session.others():
                run = functools.partial(session.calls.gradient, run)
        return run(target, sources, *args, **kwargs)

    return gradient


def _jacobian(original: Any) -> Any:
    def jacobian(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = [session.state for session in SEAMS.sessions]
        before = [state.vectorised for state in found]
        for state in found:
            state.vectorised = True
        try:
            return original(self, *args, **kwargs)
        finally:
            for state, flag in zip(found, before, strict=True):
                state.vectorised = flag

    return jacobian


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
        if not any(session.state.tapes for session in SEAMS.sessions):
            taped.end()
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
            return nested.call(self, args, kwargs)
        for session in SEAMS.sessions:
            if not session.paused and session.runs(self, args, kwargs):
                return session.call(self, args, kwargs)
        for session in SEAMS.sessions:
            if not session.paused:
                around = session.calls.compiling if inside else session.calls.function
                run = functools.partial(around, run, self)
        return run(*args, **kwargs)

    return __call__


def _apply(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        run = functools.partial(original, self)
        for session in SEAMS.sessions:
            if not session.paused:
                run = functools.partial(session.updates.apply, run, self)
        return run(grads, trainable_variables)

    return apply


def _apply_scaled(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        found = []
        for session in SEAMS.sessions:
            session.updates.scaler = weakref.ref(self)
            session.state.scaling += 1
            found.append(session.state)
        try:
            return original(self, grads, trainable_variables)
        finally:
            for state in found:
                state.scaling -= 1

    return apply


def _assign(original: Any) -> Any:
    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self)
        for session in SEAMS.sessions:
            if not session.paused:
                run = functools.partial(session.updates.assign, run, self)
        return run(*args, **kwargs)

    return assign


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
