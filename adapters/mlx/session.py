"""Watch one model, training step or function of MLX."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from mlx import nn
from mlx.utils import tree_flatten, tree_map

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._diagnosis.evidence import BadParameter
from anynan._diagnosis.rules.repair import Repair
from anynan._reach import Reach
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.lazy import LazyAdapter, Local
from anynan._steps.tracked import Tracked
from anynan.events import Phase
from anynan.mlx.layers import Layers, Weight, code_of, mapped
from anynan.mlx.messages import CALLED_COMPILED, INSIDE_UNSEEN
from anynan.mlx.reading import EVALUATE, READER, dtype, ends, is_float, squares
from anynan.mlx.seams import SEAMS
from anynan.mlx.second import SecondRun, watched
from anynan.mlx.state import Root


class MlxLocal(Local):
    """Hold what is under way in one thread.

    Attributes:
        inside: The layers that run, by id.
        counts: How often each layer ran in this step.
        updating: Whether an optimizer is at work.
        updated: Whether this step's update was made, or dropped.
        moved: Whether this step moved weights out of sight.
        over: Whether the next call of a tracked model begins another step.
    """

    def begin(self) -> None:
        """Begin a step."""
        self.inside: list[int] = []
        self.counts: Counter[str] = Counter()
        self.updating = self.updated = self.moved = self.over = False


class Session(LazyAdapter):
    """Keep the contract of ``BaseAdapter`` for MLX.

    Args:
        tracker: What is tracked.
        model: The model; None where a function is tracked.
    """

    backend = "mlx"
    probes = READER

    def __init__(self, tracker: Tracked, model: Any = None) -> None:
        super().__init__(tracker)
        self.layers, self.local = Layers(self.options), MlxLocal()
        self._model = None if model is None else weakref.ref(model)
        self._reach: Reach | None = None
        self._left: dict[str, weakref.ref[Any]] = {}
        if model is not None:
            self.layers.watch({"": model}, whole=True)
            self.input_names = positional(type(model).__call__)[1:]
        else:
            code = code_of(tracker.fn)
            self.input_names = positional(code)
            self._reach = Reach(code, self.layers.kinds)

    @property
    def model(self) -> Any:
        """Give the model that is tracked, None where a function is."""
        return None if self._model is None else self._model()

    # Life.

    def renew(self, fn: Callable[..., Any]) -> None:
        """Watch what the program made anew of the same code."""
        self.tracker.renew(fn)
        self._reach = Reach(code_of(fn), self.layers.kinds)
        self.layers.search(self._reach, fn, {})

    def attach(self) -> None:
        """Have MLX tell what runs."""
        if self._reach is not None:
            self.layers.search(self._reach, self.tracker.fn, {})
        SEAMS.add(self)
        self.attached()

    def detach(self) -> None:
        """Undo it."""
        SEAMS.remove(self)

    def watched(self) -> list[str]:
        """List the layers that ought to be read."""
        return [] if self.options.level == "step" else sorted(self.layers.chosen - {""})

    # What LazyAdapter asks for.

    def is_float(self, x: Any) -> bool:
        """Tell whether a value is an array that could hold NaN or Inf."""
        return is_float(x)

    def dtype(self, x: Any) -> tuple[str, float | None]:
        """Give the short name of an array's dtype, and its largest finite value."""
        return dtype(x)

    def lazy_ends(self, x: Any, *, norm: bool) -> tuple[Any, ...]:
        """Give the ends, and with ``norm`` the sum of squares, not computed yet."""
        return (*ends(x), squares(x)) if norm else ends(x)

    def compute(self, lazy: Sequence[Any]) -> None:
        """Compute what waits, in one traversal of the graph."""
        try:
            EVALUATE(list(lazy))
        except ValueError as error:  # mx.compile traces it just now
            raise RuntimeError(str(error)) from error

    def number(self, lazy: Any) -> float:
        """Bring one number to the host."""
        return float(lazy.item())

    def say_traced(self) -> None:
        """Say that mx.compile traced something."""
        if self._reach is None:
            self.tracker.judge.say(CALLED_COMPILED())
        else:
            self.tracker.judge.remark(INSIDE_UNSEEN())

    def began(self, fn: Any, args: Any, kwargs: Any) -> Root:
        """Keep what a step begins with."""
        return Root(fn, args, kwargs, self.layers, self._reach)

    def run_again(
        self, root: Root, reading: Reading | None, repairs: Sequence[Repair]
    ) -> SecondRun:  # fmt: skip
        """Run a step again, and leave no trace."""
        second = self.local.second = SecondRun(self, root, reading, repairs)
        try:
            with root.again(self.tracker.judge.say):
                second.run()
        finally:
            self.local.second = None
        return second

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights that are bad, as the step began with them."""
        root, moved = self.local.root, self.local.moved
        weights = self.layers.weights() if root is None else root.weights
        left = ((weight, self._left.get(weight.name)) for weight in weights)
        by_hand = {weight.name for weight, ref in left if ref and ref() is not weight.array}
        # The state is that after the update.
        return self.layers.bad(weights, by_hand, known=not moved)

    # A function's step.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step of a tracked function."""
        local, reach = self.local, self._reach
        if local.open or local.second is not None or reach is None:
            return fn(*args, **kwargs)
        given = dict(bound(self.input_names, args, kwargs))
        if reach.is_due() or any(isinstance(x, nn.Module) for x in given.values()):
            self.layers.search(reach, fn, given)
            SEAMS.cover(self.layers.classes())
        given = {name: x for name, x in given.items() if not isinstance(x, nn.Module)}
        with reach.lending(args, kwargs) as (lent, named):
            return self.step_of(fn, lent, named, given)

    def write_result(self, result: Any) -> None:
        """Write what a function returned."""
        for name, phase, label, x in self.results(result):
            layer = self.layers.name_of(None, name)[1] if name else None
            self.write(phase, layer, label, x, parameter=name or None, norm=bool(name))
        self._write_moved()

    def end(self) -> None:
        """Close the open step; what it moved out of sight, it updated."""
        if self.local.root is None:  # what was written by hand since is not the step's
            return
        number, moved = self.tracker.step, self.local.moved
        super().end()
        if moved:
            self.tracker.judge.updated(number)
        self._note_weights()

    def _note_weights(self) -> None:
        """Remember the weights that a step left: others that the next begins with are by hand."""
        self._left = {weight.name: weakref.ref(weight.array) for weight in self.layers.weights()}

    def _write_moved(self) -> None:
        """Read the weights that a step moved out of sight: in compiled code, or by hand."""
        if self.options.backward and (self.traced or not self.local.updated):
            for weight in self.moved(self.local.root):
                self.local.moved = True
                x, name = weight.array, weight.name
                self.write("optimizer", weight.layer, weight.label, x, parameter=name)

    def moved(self, root: Root) -> Iterator[Weight]:
        """Yield the weights that are no longer what a step began with."""
        old = {weight.name: weight.array for weight in root.weights}
        for weight in self.layers.weights():
            if weight.trained and weight.array is not old.get(weight.name):
                yield weight

    def results(self, result: Any) -> Iterator[tuple[str, Phase, str, Any]]:
        """Yield what a function returned.

        Yields:
            The weight that it is the gradient of, if any; its phase, its label, and the array.
        """
        known = {w.name for w in self.layers.weights()}
        parts = list(result) if type(result) in (tuple, list) else [result]
        for i, part in enumerate(parts):
            flat = tree_flatten(part) if isinstance(part, dict) else []
            if flat and known and all(name in known for name, _ in flat):
                for name, x in flat:
                    yield name, "backward", f"grad of {name.rpartition('.')[2]}", x
            elif not isinstance(part, nn.Module):
                for label, x in leaves(part, "result" if part is result else f"result[{i}]"):
                    single = is_float(x) and x.size == 1
                    named = "loss" if single and label == "result" else label
                    yield "", "loss" if single else "forward", named, x

    # What MLX tells.

    def layer(self, run: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a layer, and read what leaves it."""
        local, path = self.local, self.layers.path(module)
        if path is None or id(module) in local.inside:
            return run(*args, **kwargs)
        if local.second is not None:
            return local.second.layer(run, module, path, args, kwargs)
        if self._reach is None and not local.inside:
            self._begin(run, module, path, args, kwargs)
        if local.root is None:  # outside of the tracked function
            return run(*args, **kwargs)
        call, local.counts[path] = local.counts[path], local.counts[path] + 1
        local.inside.append(id(module))
        try:
            out = run(*args, **kwargs)
        finally:
            local.inside.pop()
        outer = self._reach is None and not path
        read = outer if self.options.level == "step" else path in self.layers.chosen
        if not (read or outer):
            return out
        return mapped(out, "output", lambda x, label: self._leave(path, call, label, x, read))

    def _begin(self, run: Any, module: Any, path: str, args: Any, kwargs: Any) -> None:
        """Begin a step of a tracked model with a call of it."""
        local = self.local
        if local.root is not None and local.over and not path:  # else a layer that is made again
            self.end()
        if local.root is None or not path:
            # A second run of it comes by here as well: what leaves this layer is looked at, too.
            local.root = self.began(partial(self.layer, run, module), args, kwargs)
        if not path:
            self.write_inputs(bound(self.input_names, args, kwargs))

    def _leave(self, path: str, call: int, label: str, x: Any, read: bool) -> Any:
        if read:
            self.write("forward", path, label, x, call)
        if not self.options.backward:
            return x
        tensor = label.replace("output", "grad", 1)

        def arrived(cotangent: Any) -> None:
            local = self.local
            if local.root is None or local.second is not None:
                return
            local.over = True
            if not path:
                local.root.cotangents[label] = cotangent
            if read:
                self.write("backward", path, tensor, cotangent, call)

        return watched(x, arrived)

    def update(
        self, run: Callable[..., Any], optimizer: Any, gradients: Any, parameters: Any
    ) -> Any:
        """Judge the gradients before an optimizer uses them."""
        local, judge = self.local, self.tracker.judge
        if local.second is not None:
            return local.second.update(run, gradients, parameters)
        named = self.gradients(gradients, parameters)
        if not named or local.updating:
            return run(gradients, parameters)
        if local.root is None:  # the step was what gave the gradients
            result = run(gradients, parameters)
            if isinstance(parameters, nn.Module):
                self.layers.add_optimizer(optimizer)
                judge.updated(self.tracker.step - 1)
                self._note_weights()
            return result
        self.layers.add_optimizer(optimizer)
        for (name, layer), x in named if self.options.backward else ():
            label = f"grad of {name.rpartition('.')[2]}"
            self.write("backward", layer, label, x, parameter=name, norm=True)
        self.read()
        rows = judge.rows()
        judge.guard(rows)
        local.over = local.updated = True
        if rows.skip:
            return tree_map(lambda _, w: w, gradients, parameters)
        every = self.options.updates
        moves = every is not None and rows.number % every == 0
        old = dict(tree_flatten(parameters)) if moves else {}
        local.updating = True
        try:
            result = run(gradients, parameters)
        finally:
            local.updating = False
        judge.updated(rows.number)
        self._updated(rows, result, parameters, old)
        return result

    def gradients(self, gradients: Any, parameters: Any) -> list[tuple[tuple[str, str], Any]]:
        """List gradients with the name and layer of each; none of another model's."""
        if isinstance(parameters, nn.Module) and self.layers.path(parameters) is None:
            return []
        flat = [(name, x) for name, x in tree_flatten(gradients) if is_float(x)]
        return [(self.layers.name_of(parameters, name), x) for name, x in flat]

    def _updated(self, rows: Step, result: Any, parameters: Any, old: dict[str, Any]) -> None:
        """Read the weights that an update made, and how far it moved them."""
        for key, x in tree_flatten(result) if old or self.options.parameters else ():
            if not is_float(x):
                continue
            name, layer = self.layers.name_of(parameters, key)
            if self.options.parameters:
                self.write("parameter", layer, name.rpartition(".")[2], x, parameter=name)
            if key in old:
                sizes = squares(x - old[key]), squares(old[key])
                self.compute(sizes)
                rows.moved(layer, *(math.sqrt(self.number(size)) for size in sizes))

    def about_to_write(self, x: Any) -> None:
        """Keep what an array holds that the program writes into, for a second run."""
        if self.local.root is not None and self.options.replay:
            self.local.root.keep(x)

    def evaluated(self) -> None:
        """Judge a model's readings where the program computes what it needs."""
        local = self.local
        if local.root is None or self._reach is not None or local.inside or local.second:
            return
        if local.updated or not local.root.cotangents:
            self.end()
        else:
            local.over = True
            self.read()
