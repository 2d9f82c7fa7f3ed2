"""Watch one model, training step or function: the first run, and what the core asks for."""

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._base.context import expectations
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach import Reach
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.adapter import BaseAdapter
from anynan._steps.messages import STEPS_UNSEEN
from anynan._steps.tracked import Tracked
from anynan.errors import AnomalyError, reason
from anynan.events import Phase
from anynan.mlx.layers import Layers, Weight, code_of, mapped
from anynan.mlx.messages import CALLED_COMPILED, INSIDE_UNSEEN
from anynan.mlx.reading import EVALUATE, bad_rows, dtype, ends, is_float, measure, span, squares
from anynan.mlx.seams import SEAMS
from anynan.mlx.second import SecondRun
from anynan.mlx.state import Root


class Waiting(NamedTuple):
    """Hold a reading that is not computed yet: two numbers, and a sum of squares."""

    rows: Step
    order: int
    ends: tuple[Any, ...]

    def read(self) -> tuple[float, float]:
        """Bring it to the host; nothing is known of what ``mx.compile`` traced."""
        try:
            EVALUATE(*self.ends)
        except RuntimeError:
            return math.inf, -math.inf
        if len(self.ends) > 2:
            self.rows.add_norm(self.order, math.sqrt(max(float(self.ends[2].item()), 0.0)))
        return span(*self.ends[:2])


class Local(threading.local):
    """Hold what is under way in one thread."""

    def __init__(self) -> None:
        self.open = False  # a tracked function runs
        self.root: Root | None = None
        self.second: SecondRun | None = None
        self.inside: list[int] = []
        self.calls: Counter[str] = Counter()
        self.waiting: list[Waiting] = []
        self.updates = False  # an optimizer is at work
        self.updated = False  # its update was made, or dropped
        self.over = False  # the model's step has come to its end


class Session(BaseAdapter):
    """Keep the contract of ``BaseAdapter`` for MLX.

    Args:
        tracker: What is tracked.
        model: The model; None where a function is tracked.
    """

    backend = "mlx"
    in_order = True

    def __init__(self, tracker: Tracked, model: Any = None) -> None:
        super().__init__(tracker)
        self.layers = Layers(self.options)
        self.paused = False
        self.traced = False  # what ran inside of mx.compile was not seen
        self._reach: Reach | None = None
        self.local = Local()
        if model is not None:
            self.layers.watch({"": model}, whole=True)
            self.input_names = positional(type(model).__call__)[1:]
        else:
            code = code_of(tracker.fn)
            self.input_names = positional(code)
            self._reach = Reach(code, self.layers.kinds)

    # Life.

    def attach(self) -> None:
        """Have MLX tell what runs."""
        if self._reach is not None:
            self._search({})
        SEAMS.add(self)
        self.attached(self._write_bad)

    def detach(self) -> None:
        """Undo it."""
        SEAMS.remove(self)

    def watched(self) -> list[str]:
        """List the layers that ought to be read."""
        return [] if self.options.level == "step" else sorted(self.layers.chosen - {""})

    def set_paused(self, paused: bool) -> None:
        """Stop or go on."""
        if paused:
            self.finish()
        self.paused = paused

    def read(self) -> None:
        """Compute what waits, and have it judged."""
        self._fetch()
        if self.local.root is not None:
            self.tracker.judge.review(self.tracker.judge.rows())

    def finish(self) -> None:
        """End the open step."""
        if not self.local.open:
            self._end()

    def _search(self, given: dict[str, Any]) -> None:
        """Look for the models and optimizers that the function uses."""
        reach, code = self._reach, code_of(self.tracker.fn)
        if reach is None:
            return
        reach.search([])
        reach.now(given.items())  # meets the models among the arguments
        cells = zip(
            getattr(getattr(code, "__code__", None), "co_freevars", ()),
            getattr(code, "__closure__", None) or (), strict=False,
        )  # fmt: skip
        named = {id(x): name for name, x in getattr(code, "__globals__", {}).items()}
        for name, cell in cells:
            try:
                named[id(cell.cell_contents)] = name
            except ValueError:  # nothing is in it yet
                continue
        self.layers.take_met(named | {id(x): name for name, x in given.items()})
        SEAMS.cover(self.layers.classes())

    # A function's step.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step of a tracked function."""
        local, reach = self.local, self._reach
        if local.open or local.second is not None or reach is None:
            return fn(*args, **kwargs)
        given = dict(bound(self.input_names, args, kwargs))
        if reach.is_due() or any(isinstance(x, nn.Module) for x in given.values()):
            self._search(given)
        judge = self.tracker.judge
        local.open = True
        try:
            with reach.lending(args, kwargs) as (lent, named):
                local.root = self._root(fn, lent, named)
                self._write_inputs(given)
                try:
                    result = fn(*lent, **named)
                except AnomalyError:
                    raise
                except BaseException as error:
                    with judge.carried_by(error, judge.rows()):
                        self._end()
                    raise
                self._write_result(result)
                self._end()
                return result
        finally:
            local.open = False
            self._end()

    def _root(self, fn: Any, args: Any, kwargs: Any) -> Root:
        held = [model for _, model in self.layers.roots()] + self.layers.optimizers
        return Root(fn, args, kwargs, held, self.layers.weights(), self._reach)

    def _end(self) -> None:
        """Close the open step, and have it judged."""
        local = self.local
        if local.root is None:
            return
        try:
            self._fetch()
            self._watch_operations()
            rows = self.tracker.judge.close_step()
            if rows is not None:
                self.tracker.judge.settle(rows)
        finally:
            local.root, local.over, local.updated = None, False, False
            local.waiting, local.inside = [], []
            local.calls.clear()

    def _watch_operations(self) -> None:
        """Run the step a second time where every operation is to be seen."""
        judge = self.tracker.judge
        rows = judge.rows()
        if judge.level != "operation" or rows.failed is not None:
            return
        judge.review(rows)
        try:
            seen = self._again().replay()
        except Exception as error:  # noqa: BLE001  the program itself goes on
            judge.say(STEPS_UNSEEN(why=reason(error)))
            return
        judge.operations(rows, seen)

    def _write_inputs(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if not isinstance(value, nn.Module):
                for label, x in leaves(value, name, self.tracker.judge.say):
                    self._write("input", None, label, x)

    def _write_result(self, result: Any) -> None:
        for name, label, x in self.results(result):
            if name:
                layer = self.layers.name_of(None, name)[1]
                self._write("backward", layer, label, x, parameter=name, norm=True)
            else:
                single = is_float(x) and x.size == 1
                phase: Phase = "loss" if single else "forward"
                self._write(phase, None, "loss" if single and label == "result" else label, x)

    def results(self, result: Any) -> Iterator[tuple[str, str, Any]]:
        """Yield what a function returned: the weight it is the gradient of, label and array."""
        known = {w.name for w in self.layers.weights()}
        parts = list(result) if type(result) in (tuple, list) else [result]
        for i, part in enumerate(parts):
            flat = tree_flatten(part) if isinstance(part, dict) else []
            if flat and known and all(name in known for name, _ in flat):
                for name, x in flat:
                    yield name, f"grad of {name.rpartition('.')[2]}", x
            elif not isinstance(part, nn.Module):
                at = "result" if part is result else f"result[{i}]"
                yield from (("", label, x) for label, x in leaves(part, at))

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
        call, local.calls[path] = local.calls[path], local.calls[path] + 1
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
        if local.root is not None and local.over:
            self._end()
        if local.root is None or not path:
            local.root = self._root(run, args, kwargs)
        if not path:
            self._write_inputs(dict(bound(self.input_names, args, kwargs)))

    def _leave(self, path: str, call: int, label: str, x: Any, read: bool) -> Any:
        if read:
            self._write("forward", path, label, x, call)
        if not self.options.backward:
            return x
        seen = mx.custom_function(_same)
        tensor = label.replace("output", "grad", 1)

        def arrived(_: Any, cotangent: Any, __: Any) -> Any:
            root = self.local.root
            if root is not None and self.local.second is None:
                self.local.over = True
                if not path:
                    root.cotangents[label] = cotangent
                if read:
                    self._write("backward", path, tensor, cotangent, call)
            return cotangent

        seen.vjp(arrived)
        return seen(x)

    def update(
        self, run: Callable[..., Any], optimizer: Any, gradients: Any, parameters: Any
    ) -> Any:
        """Judge the gradients before an optimizer uses them."""
        local, judge = self.local, self.tracker.judge
        if local.second is not None:
            return local.second.update(run, gradients, parameters)
        named = self.gradients(gradients, parameters)
        if local.root is None or not named or local.updates:
            return run(gradients, parameters)
        self.layers.add_optimizer(optimizer)
        if self.options.backward:
            for (name, layer), x in named:
                label = f"grad of {name.rpartition('.')[2]}"
                self._write("backward", layer, label, x, parameter=name, norm=True)
        self._fetch()
        rows = judge.rows()
        judge.review(rows)
        judge.guard(rows)
        local.over = local.updated = True
        if rows.skip:
            return tree_map(lambda _, w: w, gradients, parameters)
        old = dict(tree_flatten(parameters)) if self._moves(rows) else {}
        local.updates = True
        try:
            result = run(gradients, parameters)
        finally:
            local.updates = False
        judge.updated(rows.number)
        self._updated(rows, result, parameters, old)
        return result

    def gradients(self, gradients: Any, parameters: Any) -> list[tuple[tuple[str, str], Any]]:
        """List gradients with the name and layer of each; none of another model's."""
        if isinstance(parameters, nn.Module) and self.layers.path(parameters) is None:
            return []
        flat = [(name, x) for name, x in tree_flatten(gradients) if is_float(x)]
        return [(self.layers.name_of(parameters, name), x) for name, x in flat]

    def _moves(self, rows: Step) -> bool:
        every = self.options.updates
        return every is not None and rows.number % every == 0

    def _updated(self, rows: Step, result: Any, parameters: Any, old: dict[str, Any]) -> None:
        """Read the weights that an update made, and how far it moved them."""
        for key, x in tree_flatten(result):
            if not is_float(x):
                continue
            name, layer = self.layers.name_of(parameters, key)
            if self.options.parameters:
                self._write("parameter", layer, name.rpartition(".")[2], x, parameter=name)
            if key in old:
                sizes = squares(x - old[key]), squares(old[key])
                EVALUATE(*sizes)
                rows.moved(layer, *(math.sqrt(size.item()) for size in sizes))

    def about_to_write(self, x: Any) -> None:
        """Keep what an array holds that the program writes into, for a second run."""
        if self.local.root is not None and self.options.replay:
            self.local.root.keep(x)

    def unread(self) -> list[Any]:
        """Give what waits to be computed."""
        return [x for item in self.local.waiting for x in item.ends]

    def evaluated(self) -> None:
        """Judge a model's readings where the program computes what it needs."""
        local = self.local
        if local.root is not None and self._reach is None and not local.inside:
            if local.updated:
                self._end()
            else:
                local.over = True
                self.read()

    # Readings.

    def _write(
        self, phase: Phase, layer: str | None, tensor: str, x: Any, call: int = 0, *,
        parameter: str | None = None, norm: bool = False,
    ) -> None:  # fmt: skip
        if not is_float(x) or not x.size:
            return
        judge = self.tracker.judge
        rows = judge.rows()
        site = judge.monitor.site(layer, phase, tensor, *dtype(x), parameter=parameter)
        order = rows.reserve(site, call)
        rows.keep(order, weakref.ref(x))
        expected = expectations()
        if expected is not None:
            rows.expect([order], expected)
        found = (*ends(x), squares(x)) if norm else ends(x)
        self.local.waiting.append(Waiting(rows, order, found))

    def _write_bad(self, bad: BadParameter, rows: Step) -> None:
        weight = next(w for w in self.layers.weights() if w.name == bad.name)
        self._write("parameter", bad.layer, bad.name.rpartition(".")[2], weight.array,
                    parameter=bad.name)  # fmt: skip
        self._fetch()
        rows.forget_arrays()

    def _fetch(self) -> None:
        """Compute all that waits in one go, and bring it to the host."""
        waiting, self.local.waiting = self.local.waiting, []
        if not waiting:
            return
        try:
            EVALUATE([item.ends for item in waiting])
        except RuntimeError:
            self.traced = True
            said = CALLED_COMPILED if self._reach is None else INSIDE_UNSEEN
            (self.tracker.judge.say if self._reach is None else self.tracker.judge.remark)(said())
        for item in waiting:
            low, high = item.read()
            item.rows.fill((low,), (high,))

    # What is asked when something is bad.

    def measure(self, value: Any) -> Summary:
        """Summarise an array."""
        return measure(value)

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a bad batch that are bad."""
        return bad_rows(value)

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights that are bad, as the step began with them."""
        root = self.local.root
        weights: Sequence[Weight] = self.layers.weights() if root is None else root.weights
        return self.layers.bad(list(weights))

    def replay(self, reading: Reading) -> Replay:
        """Run the step again, operation by operation.

        Raises:
            ReplayError: If its call is not known.
        """
        return self._again(reading).replay()

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the step again to its end, with operations repaired."""
        try:
            return self._again(reading, repairs).attempt()
        except Exception:  # noqa: BLE001  then nothing is told of it
            return None

    def _again(self, reading: Reading | None = None, repairs: Sequence[Repair] = ()) -> SecondRun:
        local = self.local
        root = local.root
        if root is None:
            msg = "the step was over when it was read, so it cannot be run again"
            raise ReplayError(msg)
        second = SecondRun(self, root, reading, repairs)
        before = local.inside, local.calls
        local.second, local.inside, local.calls = second, [], Counter()
        try:
            with root.again(self.tracker.judge.say):
                second.run(of_model=self._reach is None)
        finally:
            local.second = None
            local.inside, local.calls = before
        return second


def _same(x: Any) -> Any:
    return x
