"""A run whose operations are shown: what stands in the place of MLX's functions meanwhile.

Each operation runs as a ``mx.custom_function``, whose gradient is the operation's own ``mx.vjp``:
so the backward pass, which MLX builds out of sight, is shown operation by operation, too.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from anynan._base import context
from anynan._base.patches import Patches
from anynan._base.sources import user_source
from anynan._trace.op import Op, RerunError
from anynan.events import Phase, Source
from anynan.mlx.functions import functions, holders, methods, swapped
from anynan.mlx.messages import INSIDE_UNSEEN
from anynan.mlx.names import FLAT, PROPERTIES, WRITING, canonical, operands, reflected
from anynan.mlx.reading import is_float

# By what the tape knows a value: the operation that made it and which of its results it is, or a
# weight by its name, or an array that was there by its id.
Key = tuple[Any, Any]
# Layer, which call of it, phase and line.
Place = tuple[str | None, int, Phase, Source | None]


class Made(NamedTuple):
    """Say what made an array that is still there."""

    array: Callable[[], Any]
    key: Key
    grows: bool  # whether a gradient may reach it
    operation: "Operation | None" = None


class Operation(Op):
    """Tell of one operation of MLX, or of its gradient.

    Attributes:
        keys: By what each of the floating inputs is known; of a gradient, those of its results.
        took: For a gradient, by what the results of the forward operation are known.
    """

    def __init__(
        self, number: int, raw: str, place: Place,
        given: Sequence[tuple[str, Any]], params: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.number, self.raw = number, f"mlx.core.{raw}"
        self.name = self.kernel = canonical(raw)
        self.layer, self.call, self.phase, self._source = place
        self.given, self._params = given, params
        self.expected = context.expectations()
        self._outputs: Sequence[Any] = ()
        self.keys: list[Key] = []
        self.took: list[Key] = []
        self.named: dict[str, Key] = {}
        self.of: Operation | None = None
        self.makers: tuple[str, ...] = ()
        self._run: Callable[..., Any] | None = None

    @property
    def source(self) -> Source | None:
        """Give the user's line."""
        return self._source

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays it works on, by name."""
        return [(label, x) for label, x in self.given if is_float(x)]

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return self._outputs

    @property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        return self._params

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more, in nobody's sight, and give what it makes then.

        Raises:
            RerunError: If it cannot be run so.
        """
        if self._run is None:
            msg = f"{self.raw} is over"
            raise RerunError(msg)
        given = {id(x): (inputs or {}).get(label, x) for label, x in self.inputs}
        if dtype is not None:
            given = {key: x.astype(getattr(mx, dtype)) for key, x in given.items()}
        try:
            made = arrays(self._run(given))
            mx.eval(made)
        except Exception as error:
            raise RerunError(str(error)) from error
        return made

    def over(self) -> None:
        """Keep no array of it."""
        self._outputs, self._run = (), None
        self.given = [(label, x) for label, x in self.given if not isinstance(x, mx.array)]


class Tape:
    """Show each operation that this thread runs to an observer.

    Args:
        observer: Sees each, and may give other results.
        repairs: Runs something else in an operation's place, in a trial of a fix.

    Attributes:
        layers: The layers that run now, outermost first, each with the number of its call.
        notes: What was not seen.
        phase: Phase of what is outside of the layers.
    """

    def __init__(self, observer: Callable[[Any], Any], repairs: Any = None) -> None:
        self._observer: Any = observer
        self._repairs = repairs
        self.layers: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.phase: Phase = "loss"
        self._count = 0
        self._made: dict[int, Made] = {}
        self._places: dict[Any, Made] = {}
        self._weights: dict[int, tuple[Any, str]] = {}
        self._busy, self._thread = False, get_ident()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stand in the place of MLX's functions meanwhile, and run what is compiled as Python."""
        with Patches() as patches:
            stands = {}
            for room, name, raw in functions():
                real = getattr(room, name)
                stands[id(real)] = self._seen(raw, real)
            for module, name, real in holders(set(stands)):
                patches.put(module, name, stands[id(real)])
            for name, raw in methods():
                real = getattr(mx.array, name)
                real = swapped(real) if reflected(name) else real
                patches.put(mx.array, name, self._method(raw, real, swap=reflected(name)))
            for name in PROPERTIES:
                real = vars(mx.array)[name].__get__
                patches.put(mx.array, name, property(self._seen(name, real)))
            for name in WRITING:
                patches.put(mx.array, name, self._writes(name, getattr(mx.array, name)))
            compiles = compiling()
            mx.disable_compile()
            try:
                yield
            finally:
                if compiles:
                    mx.enable_compile()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Show nothing meanwhile."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _off(self) -> bool:
        return self._busy or get_ident() != self._thread

    def _seen(self, raw: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs) if self._off() else self.run(raw, real, args, kwargs)

        return function

    def _method(self, raw: str, real: Callable[..., Any], *, swap: bool) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            given = args[::-1] if swap else args
            return real(*given, **kwargs) if self._off() else self.run(raw, real, given, kwargs)

        return method

    def _writes(self, raw: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(x: Any, *args: Any) -> Any:
            if self._off():
                return real(x, *args)
            with self.quiet():
                before = mx.array(x)
            if known := self._known(x):
                self._enter(before, known)
            elif name := self.weight(x):
                self.name_weight(before, name)

            def made(x: Any, *args: Any) -> Any:
                new = mx.array(x)
                real(new, *args)
                return new

            # Written outside of the gradient's sight it would have no operation there.
            new = self.run(raw, made, (before, *args), {}, written=True)
            with self.quiet():
                _put(x, new)
            if known := self._known(new):
                self._enter(x, known)
            return x

        return write

    # What is known of arrays.

    def _known(self, x: Any) -> Made | None:
        found = self._made.get(id(x))
        if found is not None and found.array() is x:
            return found
        # What goes through mx.compile, or a function of mx.grad's, comes out as another object over
        # the same memory.
        found = self._places.get(place(x)) if id(x) not in self._weights else None
        return found if found is not None and found.array() is not None else None

    def _enter(self, x: Any, made: Made) -> None:
        self._made[id(x)] = made = made._replace(array=weakref.ref(x))
        at = place(x) if is_float(x) else None
        if at is not None:
            self._places[at] = made

    def same(self, new: Any, old: Any) -> None:
        """Take an array for another, which it was made of and which it equals."""
        key, grows, operation = self.key(old), self._grows(old), self.maker(old)
        self._enter(new, Made(weakref.ref(new), key, grows, operation))

    def key(self, x: Any) -> Key:
        """Give by what an array is known."""
        if found := self._known(x):
            return found.key
        name = self.weight(x)
        return ("array", id(x)) if name is None else ("weight", name)

    def maker(self, x: Any) -> Operation | None:
        """Give the operation that made an array, None if that was not seen."""
        found = self._known(x)
        return None if found is None else found.operation

    def name_weight(self, x: Any, name: str) -> None:
        """Know a weight, as the run holds it, by its name."""
        self._weights[id(x)] = x, name

    def weight(self, x: Any) -> str | None:
        """Give a weight's name."""
        found = self._weights.get(id(x))
        return found[1] if found is not None and found[0] is x else None

    def _grows(self, x: Any) -> bool:
        found = self._known(x)
        return found is None or found.grows

    # Operations.

    def run(
        self, raw: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        *, written: bool = False,
    ) -> Any:  # fmt: skip
        """Run one operation, and show it."""
        given, params = operands(raw, args, kwargs)
        layer, call = self.layers[-1] if self.layers else (context.scope_path(), 0)
        phase: Phase = self.phase if layer is None else "forward"
        place: Place = layer, call, phase, user_source(skip=2, framework="mlx")
        op = Operation(self._count, raw, place, given, params)
        op.written = written
        op.named = {label: self.key(x) for label, x in given if isinstance(x, mx.array)}
        self._count += 1
        leaves = [x for x in _unique((args, kwargs)) if is_float(x)]
        flat = raw.rpartition(".")[2] in FLAT
        grown = [x for x in leaves if self._grows(x)] if not flat else []
        op.keys = [self.key(x) for x in grown]
        op.makers = self._makers(leaves[0]) if leaves else ()
        with self.quiet():
            return self._run(op, real, args, kwargs, grown)

    def _makers(self, x: Any) -> tuple[str, ...]:
        made = self.maker(x)
        return () if made is None else (made.name, *made.makers)[:2]

    def _run(
        self, op: Operation, real: Callable[..., Any], args: Any, kwargs: Any, grown: list[Any]
    ) -> Any:  # fmt: skip
        def own(given: Mapping[int, Any]) -> Any:
            return real(*_filled(args, given), **_filled(kwargs, given))

        run, repaired = own, ()
        if self._repairs is not None:
            run, repaired = self._repairs.around(op, own)
        op._run = own
        ids = [id(x) for x in grown]

        def pure(*new: Any) -> Any:
            return run(dict(zip(ids, new, strict=True)))

        if grown:
            function = mx.custom_function(pure)
            labels = {id(x): label for label, x in op.given}
            function.vjp(partial(self._back, op, pure, [labels.get(i, "") for i in ids], repaired))
            result = function(*grown)
        else:
            result = run({})
        return self._shown(op, result, grows=bool(grown))

    def _shown(self, op: Operation, result: Any, *, grows: bool) -> Any:
        made = arrays(result)
        if not made:
            return result
        op._outputs = made
        op.took = [(op.number, k) for k in range(len(made))]
        new = self._show(op)
        if new is not None:
            result = _filled(result, dict(zip(map(id, made), new, strict=True)))
            made = list(new)
        op.over()
        for key, x in zip(op.took, made, strict=True):
            grown = grows and is_float(x)
            self._enter(x, Made(weakref.ref(x), key, grown, op))
        return result

    def _show(self, op: Operation) -> Sequence[Any] | None:
        try:
            mx.eval([x for _, x in op.inputs], list(op.outputs))
        except RuntimeError:  # of arrays that mx.vmap makes there is nothing to see
            self.notes.append(INSIDE_UNSEEN())
            return None
        found: Sequence[Any] | None = self._observer(op)
        return found

    def _back(
        self, op: Operation, pure: Callable[..., Any], labels: list[str], repaired: Any,
        primals: Any, cotangents: Any, outputs: Any,
    ) -> Any:  # fmt: skip
        """Run an operation's gradient, and show it."""
        given, incoming, made = arrays(primals), arrays(cotangents), arrays(outputs)
        with self.quiet():
            _, slopes = mx.vjp(lambda *x: arrays(pure(*x)), given, incoming)
            if repaired:
                self._repairs.back(incoming, slopes)
            grads = [(f"grad{k}" if k else "grad", x) for k, x in enumerate(incoming)]
            forward = [(label, x) for label, x in zip(labels, given, strict=True) if label]
            rest = [("result", x) for x in made if is_float(x)]
            numbers = [(label, x) for label, x in op.given if label not in labels]
            place: Place = op.layer, op.call, "backward", op.source
            back = Operation(
                self._count, op.raw.partition(".")[2].partition(".")[2],
                place, [*grads, *forward, *numbers, *rest], op.params,
            )  # fmt: skip
            back.raw += ".vjp"
            back.forward, back.of, back.expected = op.number, op, op.expected
            back.keys, back.took, back.makers = op.keys, op.took, op.makers
            back._outputs = slopes
            back._run = lambda new: mx.vjp(
                lambda *x: arrays(pure(*x)), [new.get(id(x), x) for x in given],
                [new.get(id(x), x) for x in incoming],
            )[1]  # fmt: skip
            self._count += 1
            new = self._show(back)
            back.over()
            slopes = slopes if new is None else list(new)
        return slopes[0] if len(slopes) == 1 else tuple(slopes)


def arrays(value: Any) -> list[Any]:
    """List the arrays in a result, in order."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple):
        return [x for item in value for x in arrays(item)]
    if isinstance(value, dict):
        return [x for item in value.values() for x in arrays(item)]
    return []


def place(x: Any) -> Any:
    """Say where an array's values lie, and in what form; None where it has none yet."""
    if not x.size:
        return None
    try:
        plain = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
        at = np.asarray(memoryview(plain)).__array_interface__["data"][0]
    except (RuntimeError, TypeError, ValueError):  # of mx.vmap's, or on a device of its own
        return None
    return at, x.shape, x.dtype


def _unique(value: Any) -> list[Any]:
    return list({id(x): x for x in arrays(list(value))}.values())


def _filled(value: Any, given: Mapping[int, Any]) -> Any:
    """Put other arrays in the place of those with these ids."""
    if isinstance(value, mx.array):
        return given.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_filled(item, given) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, given) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, given) for key, item in value.items()}
    return value


def _put(x: Any, new: Any) -> None:
    """Have an array hold another's values, as a write into it does."""
    mx.array.__setitem__(x, Ellipsis, new)


def compiling() -> bool:
    """Tell whether ``mx.compile`` compiles now: what is compiled runs in Python once."""
    runs: list[int] = []

    def count(x: Any) -> Any:
        runs.append(1)
        return x

    compiled = mx.compile(count)
    with suppress(RuntimeError):
        compiled(mx.array(0.0))
        compiled(mx.array(0.0))
    return len(runs) < 2
