"""The layers of what is tracked, by path, and their weights."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.optimizers import Optimizer

from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter
from anynan._reach import Kinds, Reach
from anynan._readings.patterns import choose
from anynan.mlx.reading import READER, is_float
from anynan.options import Options

_FUNCTION: Any = type(mx.compile(abs))  # what mx.compile and mx.grad give


class Weight(NamedTuple):
    """Hold a weight as it is now."""

    name: str
    layer: str
    array: Any
    trained: bool

    @property
    def label(self) -> str:
        """Give its name in its layer."""
        return self.name.rpartition(".")[2]


def code_of(fn: Any) -> Any:
    """Give the function that ``mx.compile`` or ``mx.grad`` was given, any other as it is."""
    while type(fn) is _FUNCTION:
        inner = [x for x in gc.get_referents(fn) if callable(x) and not isinstance(x, type)]
        if not inner:
            break
        fn = inner[0]
    return fn


def _inner(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is _FUNCTION:
        yield "fn", code_of(value)


class Layers:
    """Name the layers and weights of the models that a session watches.

    Attributes:
        optimizers: What updates them, as far as it was met.
        kinds: What a search for the program's state is told: it meets models, and notes them here.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._roots: dict[str, weakref.ref[Any]] = {}
        self._layers: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.chosen: set[str] = set()
        self.optimizers: list[Any] = []
        self._met: list[Any] = []
        self.kinds = Kinds(arrays=(mx.array,), passed=self._meet, inner=_inner)

    def _meet(self, value: Any) -> bool:
        if isinstance(value, Optimizer):
            self.add_optimizer(value)
        elif isinstance(value, nn.Module):
            self._met.append(value)
        return isinstance(value, Optimizer | nn.Module)

    def add_optimizer(self, optimizer: Any) -> None:
        """Know an optimizer, whose state a second run finds as the first did."""
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)

    def search(self, reach: Reach, fn: Any, given: dict[str, Any]) -> None:
        """Look for the models and optimizers that a function uses, and watch them.

        Args:
            reach: Searches what the function reaches.
            fn: The function.
            given: What it is called with, by name.
        """
        reach.search([])
        reach.now(given.items())
        code = code_of(fn)
        names = {id(x): name for name, x in getattr(code, "__globals__", {}).items()}
        cells = getattr(getattr(code, "__code__", None), "co_freevars", ())
        for name, cell in zip(cells, getattr(code, "__closure__", None) or (), strict=False):
            with suppress(ValueError):  # nothing is in it yet
                names[id(cell.cell_contents)] = name
        names |= {id(x): name for name, x in given.items()}
        met = {id(x): x for x in self._met}
        self._met = []
        inner = {id(part) for x in met.values() for part in x.modules() if part is not x}
        whole = [x for key, x in met.items() if key not in inner]
        if len(whole) == 1 and not self._roots:
            self.watch({"": whole[0]})
        else:
            known = {id(ref()) for ref in self._roots.values()}
            new = [x for x in whole if id(x) not in known]
            self.watch({names.get(id(x), type(x).__name__.lower()): x for x in new})

    def watch(self, models: dict[str, Any], *, whole: bool = False) -> None:
        """Watch models and all layers in them, those of before as they are now.

        Raises:
            ValueError: If a pattern matches no layer.
        """
        self._roots.update({name: weakref.ref(x) for name, x in models.items()})
        found: dict[str, Any] = {}
        for prefix, model in self.roots():
            for name, part in model.named_modules():
                found.setdefault(".".join(filter(None, (prefix, name))), part)
        options, policy = self._options, self._options.policy
        self.chosen = set(
            choose(found, options.layers, options.exclude, policy.overrides, whole=whole)
        )
        self._layers = {}
        for path, part in found.items():
            self._layers.setdefault(id(part), (weakref.ref(part), path))

    def roots(self) -> list[tuple[str, Any]]:
        """Give the models that are still there, by name; a lone one has an empty name."""
        return [(name, x) for name, ref in self._roots.items() if (x := ref()) is not None]

    def path(self, module: Any) -> str | None:
        """Give a layer's path, None if it is not watched."""
        found = self._layers.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def classes(self) -> set[type]:
        """Give the classes of the layers."""
        return {type(x) for ref, _ in self._layers.values() if (x := ref()) is not None}

    def of(self, module: Any, path: str) -> Iterator[Weight]:
        """Yield a layer's own weights, as they are now."""
        for key, value in list(dict.items(module)):
            if key[0] != "_":
                trained = key not in module._no_grad
                for name, x in _own(key, value):
                    if is_float(x):
                        yield Weight(f"{path}.{name}".lstrip("."), path, x, trained)

    def weights(self) -> list[Weight]:
        """List the weights of all layers, as they are now."""
        found = [(ref(), path) for ref, path in self._layers.values()]
        return [w for part, path in found if part is not None for w in self.of(part, path)]

    def name_of(self, target: Any, name: str) -> tuple[str, str]:
        """Give the full name and the layer of a weight by its name in a model or a tree of one.

        Args:
            target: The model, or the tree of its parameters.
            name: As ``tree_flatten`` gives it.
        """
        path = self.path(target) if isinstance(target, nn.Module) else None
        full = f"{path}.{name}" if path else name
        paths = {path for _, path in self._layers.values()}
        layer = full.rpartition(".")[0]
        while layer and layer not in paths:
            layer = layer.rpartition(".")[0]
        return full, layer

    def bad(self, weights: list[Weight], by_hand: set[str], *, known: bool) -> list[BadParameter]:
        """Describe those of some weights that are bad.

        Args:
            weights: The weights.
            by_hand: Which of them no optimizer wrote.
            known: Whether their optimizer's state is that of the same time.
        """
        return [
            BadParameter(
                w.name, w.layer, READER.measure(w.array), buffer=not w.trained,
                held=w.name not in by_hand,
                state=self._state(w.name) if known else {}, settings=self._settings(),
            )
            for w in weights if not READER.is_finite(w.array)
        ]  # fmt: skip

    def _state(self, name: str) -> dict[str, Summary]:
        for optimizer in self.optimizers:
            held: Any = optimizer.state
            for part in name.split("."):
                held = held[int(part)] if isinstance(held, list) else dict(held).get(part, {})
            if isinstance(held, dict) and held:
                return {key: READER.measure(x) for key, x in held.items() if is_float(x)}
        return {}

    def _settings(self) -> dict[str, float]:
        found = {}
        for optimizer in self.optimizers[:1]:
            rate = optimizer.state.get("learning_rate")
            found = {} if rate is None else {"lr": float(rate)}
            found |= {key: x for key, x in vars(optimizer).items() if type(x) is float}
        return found


def _own(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, mx.array):
        yield name, value
    elif isinstance(value, list | tuple | dict) and not isinstance(value, nn.Module):
        pairs: Any = dict.items(value) if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _own(f"{name}.{key}", item)


def mapped(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Put others in the place of the floating arrays in a layer's output, by their names."""
    if is_float(value):
        return change(value, name)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        return type(value)(*(mapped(x, f"{name}.{key}", change) for key, x in pairs))
    if type(value) in (list, tuple):
        return type(value)(mapped(x, f"{name}[{i}]", change) for i, x in enumerate(value))
    if type(value) is dict:
        return {key: mapped(x, f"{name}[{key!r}]", change) for key, x in value.items()}
    return value
