"""The functions that ``fit``, ``evaluate`` and ``predict`` run on JAX, as tracked functions."""

import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from anynan._base.identity import ByIdentity
from anynan._readings.patterns import choose
from anynan._steps.adapter import BaseAdapter
from anynan._steps.tracked import Tracked
from anynan.jax.program.program import Form, Program
from anynan.jax.program.watch import Watches
from anynan.jax.replay.steps import Step
from anynan.jax.session.session import Session
from anynan.jax.session.verdicts import ThresholdTable
from anynan.keras.layers import Weight, layers_of, moments_of, weights_of
from anynan.keras.messages import RUNS_COMPILED

DATA = ("x", "y", "sample_weight")
# A state of so many bytes, or of this part of the device's memory, is not donated: the old one is
# there for a second run. That takes memory, and no time.
KEPT, PART = 2**22, 64
# What Keras hands to each function besides the batch, and takes back.
STATES = {
    "train": ("params", "buffers", "opt_state", "metrics"),
    "test": ("params", "buffers", "metrics"),
    "predict": ("params", "buffers"),
}


class Named(BaseAdapter):
    """Name the layers and weights of a model, and know which are watched."""

    def __init__(self, model: Any, tracker: Tracked) -> None:
        super().__init__(tracker)
        self._model = weakref.ref(model)
        self._paths: ByIdentity[Any, str] = ByIdentity()
        self.chosen: set[str] = set()
        self.weights: list[Weight] = []
        self._take_up(whole=all(layer.built for layer in layers_of(model).values()))

    def model(self) -> Any:
        """Give the model, None if it is gone."""
        return self._model()

    def _take_up(self, *, whole: bool) -> None:
        """Name the layers and weights that there are now; what has a name keeps it."""
        options, layers = self.options, layers_of(self.model())
        named = dict(self._paths)
        for path, layer in layers.items():
            name = path
            while layer not in named and name in named.values():
                name += "_"
            named.setdefault(layer, name)
        self._paths.update(named)
        layers = {path: layer for layer, path in named.items()}
        overrides = options.policy.overrides
        self.chosen |= choose(
            layers, options.layers, options.exclude, overrides, whole=whole
        ).keys()
        self.weights = weights_of(layers)
        self._built = all(layer.built for layer in layers.values())

    def grow(self) -> None:
        """Watch the layers and weights that came since, if some were not there yet."""
        if not self._built:
            self._take_up(whole=False)


class Part(Session):
    """Watch one function of a model for the tracker of the model."""

    def __init__(
        self, owner: Named, fn: Callable[..., Any], names: tuple[str, ...],
        tallies: frozenset[Hashable], *, scaled: bool = False,
    ) -> None:  # fmt: skip
        options = dataclasses.replace(owner.options, layers=None, exclude=None, lag=0)
        super().__init__(fn, owner.tracker, options)
        self._static = set()
        self._chosen = owner.chosen
        if scaled:  # a loss scaler takes care of gradients itself
            self.verdicts = ThresholdTable(owner.tracker.judge.monitor, ("backward",))
        gradients = self.settings.gradients or (scaled and self.settings.backward)
        self.settings = dataclasses.replace(
            self.settings, names=names, tallies=tallies, gradients=gradients
        )
        self.fn = fn
        self.left: Step | None = None

    def _read(self, but: int = 0) -> None:
        """Read and judge the steps not read yet; keep the last one if that raises."""
        last = self.unread.last
        try:
            super()._read(but)
        except BaseException:
            self.left = last
            raise

    def watched(self) -> list[str]:
        """List the watched layers that were found in the traced programs."""
        return [path for path in super().watched() if path in self._chosen]

    def watches(self, form: Form) -> Watches:
        """Give what runs a function, with the layers that the model's tracker watches."""
        watches = super().watches(form)
        found = watches.program
        found.chosen = (found.chosen or set()) & self._chosen
        tallies = self.settings.tallies
        if tallies != {-1} and not any(point.phase == "loss" for point in found.layers.checked()):
            # A step that never asks the model for its loss: what it returns tells of it.
            found.settings = dataclasses.replace(self.settings, tallies=tallies - {-1})
        return watches

    def _refuse(self, program: Program) -> None:
        """Refuse nothing: where there is no update, none is dropped."""


class Steps:
    """Run the batches of one of a model's functions as steps."""

    def __init__(self, owner: Named, model: Any, kind: str) -> None:
        self.kind = kind
        self._owner = weakref.ref(owner)
        self._model = weakref.ref(model)
        self._names: list[list[str]] = []
        self.part: Part | None = None
        if model.run_eagerly or not model.jit_compile:
            owner.tracker.judge.say(RUNS_COMPILED())

    def run(self, model: Any, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run as many batches as Keras runs at once, each as a step.

        Raises:
            StopIteration: If there is none.
            AnomalyError: As the tracker's action says.
        """
        outs = []
        for data in itertools.islice(iterator, int(model.steps_per_execution)):
            out, state = self._batch(model, state, data)
            outs.append(out)
        if not outs:
            raise StopIteration
        if self.kind != "predict" or len(outs) == 1:
            return outs[-1], state
        return keras.tree.map_structure(lambda *parts: jnp.concatenate(parts), *outs), state

    def _batch(self, model: Any, state: Any, data: Any) -> tuple[Any, Any]:
        part = self.part or self._prepare(model, state)
        trees = [_wrapped(i, names, x) for i, (names, x) in enumerate(self._pairs(state))]
        plain = type(data) in (tuple, list) and len(data) <= len(DATA)
        try:
            out = part.call(part.fn, (*trees, *(data if plain else (data,))), {})
        except BaseException:
            self._put_back(model, state)
            raise
        return self._parted(out)

    def _pairs(self, state: Any) -> Any:
        return zip(self._names, state, strict=True)

    def _parted(self, out: Any) -> tuple[Any, Any]:
        first, *trees = out
        trees = [_bare(i, names, tree) for i, (names, tree) in enumerate(self._pairs(trees))]
        return first, tuple(trees)

    def _prepare(self, model: Any, state: Any) -> Part:
        """Name the variables, and make the function."""
        owner = self._owner()
        assert owner is not None
        owner.grow()
        weights = {id(w.variable): w.name for w in owner.weights}
        self._names = [
            _unique([_name(group, v, weights, model) for v in _variables(model, group)])
            for group in STATES[self.kind]
        ]
        count = len(self._names)
        tallies = {-1} if self.kind == "predict" else {count - 1, -1}
        scaler = getattr(model, "optimizer", None)
        scaled = self.kind == "train" and isinstance(scaler, keras.optimizers.LossScaleOptimizer)
        fn = functional(self._model, self)
        if model.jit_compile and not model.run_eagerly:
            shardings = None
            if keras.distribution.distribution() is not None:
                shared = [
                    _wrapped(i, names, [x.sharding for x in part])
                    for i, (names, part) in enumerate(self._pairs(state))
                ]
                shardings = (None, *shared)
            # Evaluation changes next to nothing of its state: it is left for a second run.
            # So is a small state: the report of a bad step then names the operation.
            size = sum(x.nbytes for x in jax.tree_util.tree_leaves(state))
            donated = tuple(range(count)) if self.kind == "train" and size > room() else ()
            fn = jax.jit(fn, donate_argnums=donated, out_shardings=shardings)
        names = (*STATES[self.kind], *DATA)
        made = self.part = Part(owner, fn, names, frozenset(tallies), scaled=scaled)
        return made

    def pure(self, model: Any, args: tuple[Any, ...]) -> Any:
        """Run the model's own step on arrays."""
        count = len(self._names)
        parts = zip(self._names, args[:count], strict=True)
        state = tuple(_bare(i, names, tree) for i, (names, tree) in enumerate(parts))
        data = args[count:]
        if self.kind == "predict":
            out, buffers = model.predict_step(state, data)
            state = state[0], buffers
        else:
            out, state = getattr(model, f"{self.kind}_step")(state, data)
        trees = [_wrapped(i, names, x) for i, (names, x) in enumerate(self._pairs(state))]
        return out, *trees

    def _put_back(self, model: Any, state: Any) -> None:
        """Give the model its state, which Keras took away for the time of the training."""
        part = self.part
        left = None if part is None else part.left
        if part is not None:
            part.left = None
        if left is not None and any(_gone(x) for x in jax.tree_util.tree_leaves(state)):
            _, state = self._parted(left.program.joined(left.outs))
        for group, values in zip(STATES[self.kind], state, strict=True):
            for variable, value in zip(_variables(model, group), values, strict=True):
                if not _gone(value):
                    variable.assign(value)
        model._jax_state_synced = True

    def scale(self, step: Step) -> float | None:
        """Give the loss scale after a step."""
        model = self._model()
        scaler = getattr(model, "optimizer", None)
        if self.kind != "train" or not isinstance(scaler, keras.optimizers.LossScaleOptimizer):
            return None
        _, state = self._parted(step.program.joined(step.outs))
        at = [variable is scaler.dynamic_scale for variable in scaler.variables].index(True)
        return float(state[2][at])


def room() -> int:
    """Give how many bytes of state are kept for a second run."""
    held: Any = jax.local_devices()[0].memory_stats() or {}
    memory = held.get("bytes_limit", 0)
    if not memory and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # the CPU has the host's
    return max(KEPT, int(memory) // PART)


def functional(model: Any, steps: Steps) -> Callable[..., Any]:
    """Make the function of a model's step that is traced; it keeps no model alive."""

    def step(*args: Any) -> Any:
        return steps.pure(model(), args)

    return step


def _variables(model: Any, group: str) -> list[Any]:
    if group == "opt_state":
        return list(model.optimizer.variables)
    names = {"params": "trainable", "buffers": "non_trainable", "metrics": "metrics"}
    return list(getattr(model, f"{names[group]}_variables"))


def _name(group: str, variable: Any, weights: dict[int, str], model: Any) -> str:
    """Name a variable: a weight by its own name, what is kept for it by that name, too."""
    if group == "opt_state":
        for weight in model.trainable_variables:
            for moment, held in moments_of(model.optimizer, weight):
                if held is variable:
                    return f"{moment}.{weights.get(id(weight), weight.path.replace('/', '.'))}"
    path: str = variable.path
    return weights.get(id(variable), path.replace("/", "."))


def _unique(names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        made = name
        while made in found:
            made += "_"
        found.append(made)
    return found


def _wrapped(i: int, names: list[str], values: Any) -> dict[str, Any]:
    """Give a part of the state as a tree by names; what is not trained says so."""
    tree = dict(zip(names, values, strict=True))
    return {"batch_stats": tree} if i == 1 and tree else tree


def _bare(i: int, names: list[str], tree: dict[str, Any]) -> list[Any]:
    held = tree["batch_stats"] if i == 1 and names else tree
    return [held[name] for name in names]


def _gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()
