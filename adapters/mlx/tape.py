"""A run whose operations are shown: what stands in the place of MLX's functions meanwhile.

Each operation runs as a ``mx.custom_function``, whose gradient is the operation's own ``mx.vjp``:
so the backward pass, which MLX builds out of sight, is shown operation by operation, too.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from anynan._arrays.containers import mapped
from anynan._base import context
from anynan._base.context import but
from anynan._base.patches import Patches
from anynan._base.sources import user_source
from anynan._diagnosis.records import KEPT, called
from anynan._trace.op import Key, LinkedOp, Place, RerunError
from anynan.events import Phase
from anynan.mlx.functions import At, functions, holders, methods
from anynan.mlx.messages import INSIDE_UNSEEN
from anynan.mlx.names import FLAT, PROPERTIES, WRITING, canonical, operands, reflected
from anynan.mlx.reading import EVALUATE, is_float

Run = Callable[..., Any]


class Made(NamedTuple):
    """Say what made an array that is still there."""

    array: Callable[[], Any]
    key: Key
    grows: bool  # whether a gradient may reach it
    chain: tuple[str, ...] = ()


class Operation(LinkedOp):
    """Tell of one operation of MLX, or of its gradient."""

    # What was called, with what; and what runs it on arrays by the ids of those they stand for.
    function = ""
    arguments: tuple[Any, dict[str, Any]] = (), {}
    own: Run | None = None

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays it works on, by name."""
        return [(label, x) for label, x in self.given if is_float(x)]

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more, in nobody's sight, and give what it makes then.

        Raises:
            RerunError: If it cannot be run so.
        """
        given = {id(x): (inputs or {}).get(label, x) for label, x in self.inputs}
        if dtype is not None:
            given = {key: x.astype(getattr(mx, dtype)) for key, x in given.items()}
        if self.own is None:
            msg = "it is over"
            raise RerunError(msg)
        try:
            made = arrays(self.own(given))
            EVALUATE(made)
        except Exception as error:
            raise RerunError(str(error)) from error
        return made


class Tape:
    """Show each operation that this thread runs.

    Args:
        show: Sees each ``Operation``, and may give other results.
        repairs: Runs something else in an operation's place, in a trial of a fix.

    Attributes:
        layers: The layers that run now, outermost first, each with the number of its call.
        notes: What was not seen.
        phase: Phase of what is outside of the layers.
    """

    def __init__(self, show: Callable[[Any], Any], repairs: Any = None) -> None:
        self._shows, self._repairs = show, repairs
        self.layers: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.phase: Phase = "loss"
        self._count = 0
        self._made: dict[int, Made] = {}
        self._places: dict[Any, Made] = {}
        self._held: deque[Any] = deque()
        self._size = 0
        self._weights: dict[int, tuple[Any, str]] = {}
        self._busy, self._over, self._thread = False, False, get_ident()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stand in the place of MLX's functions meanwhile, and run what is compiled as Python."""
        compiles = compiling()
        with Patches() as patches:
            stands = {}
            for room, name, raw in functions():
                real = getattr(room, name)
                stands[id(real)] = self._stand(raw, real)
            for module, name, real in holders(set(stands)):
                patches.put(module, name, stands[id(real)])
            for name, raw in methods():
                real = getattr(mx.array, name)
                patches.put(mx.array, name, self._stand(raw, real, swap=reflected(name)))
            for name in PROPERTIES:
                real = vars(mx.array)[name].__get__
                patches.put(mx.array, name, property(self._stand(name, real)))
            at = vars(mx.array)["at"].__get__
            put = property(lambda x: at(x) if self._off() else At(self.run, x))
            patches.put(mx.array, "at", put)
            for name in WRITING:
                patches.put(mx.array, name, self._writes(name, getattr(mx.array, name)))
            mx.disable_compile()
            try:
                yield
            finally:
                self._over = True
                if compiles:
                    mx.enable_compile()

    def quiet(self) -> AbstractContextManager[None]:
        """Show nothing meanwhile."""
        return but(self, _busy=True)

    def _off(self) -> bool:
        return self._busy or get_ident() != self._thread

    def _stand(self, raw: str, real: Run, *, swap: bool = False) -> Run:
        shown = (lambda a, b: real(b, a)) if swap else real

        def function(*args: Any, **kwargs: Any) -> Any:
            if self._off():
                return real(*args, **kwargs)
            return self.run(raw, shown, args[::-1] if swap else args, kwargs)

        return function

    def _writes(self, raw: str, real: Run) -> Run:
        def write(x: Any, *args: Any) -> Any:
            if self._off():
                return real(x, *args)
            with self.quiet():
                before = mx.array(x)
                self.same(before, x)

            def made(x: Any, *args: Any) -> Any:
                new = mx.array(x)
                real(new, *args)
                return new

            # Written outside of the gradient's sight it would have no operation there.
            new = self.run(raw, made, (before, *args), {}, written=True)
            with self.quiet():
                mx.array.__setitem__(x, Ellipsis, new)
                self.same(x, new)
            return x

        return write

    # What is known of arrays.

    def _known(self, x: Any) -> Made | None:
        found = self._made.get(id(x))
        if found is not None and found.array() is x:
            return found
        if self.weight(x) is not None:
            return None
        # What goes through mx.compile, or a function of mx.grad's, comes out as another object over
        # the same memory.
        found = self._places.get(place(x))
        return found if found is not None and found.array() is not None else None

    def _enter(self, x: Any, made: Made) -> None:
        self._made[id(x)] = made = made._replace(array=weakref.ref(x))
        at = place(x) if is_float(x) else None
        if at is None:
            return
        self._places[at] = made
        self._held.append(x)  # its memory is nobody else's while it is there
        self._size += x.nbytes
        while self._size > KEPT:
            self._size -= self._held.popleft().nbytes

    def same(self, new: Any, old: Any) -> None:
        """Take an array for another, which it was made of and which it equals."""
        known, name = self._known(old), self.weight(old)
        if known is not None:
            self._enter(new, known)
        elif name is not None:
            self.name_weight(new, name)

    def key(self, x: Any) -> Key:
        """Give by what an array is known."""
        if found := self._known(x):
            return found.key
        name = self.weight(x)
        return ("array", id(x)) if name is None else ("weight", name)

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
        self, raw: str, real: Run, args: tuple[Any, ...], kwargs: dict[str, Any], *,
        written: bool = False,
    ) -> Any:  # fmt: skip
        """Run one operation, and show it."""
        with self.quiet():
            given, params = operands(raw, args, kwargs)
            layer, call = self.layers[-1] if self.layers else (context.scope_path(), 0)
            phase: Phase = self.phase if layer is None else "forward"
            place: Place = layer, call, phase, user_source(skip=2, framework="mlx")
            op = self._operation(raw, canonical(raw), place, given, params)
            op.written, op.function, op.arguments = written, raw, (args, kwargs)
            op.operands = {label: self.key(x) for label, x in given if hasattr(x, "dtype")}
            leaves = [x for x in {id(x): x for x in arrays((args, kwargs))}.values() if is_float(x)]
            flat = raw.rpartition(".")[2] in FLAT
            grown = [x for x in leaves if not flat and self._grows(x)]
            op.grown = [self.key(x) for x in grown]
            first = self._known(leaves[0]) if leaves else None
            op.chain = () if first is None else first.chain

            def own(given: Mapping[int, Any]) -> Any:
                return real(*_filled(args, given), **_filled(kwargs, given))

            op.own = own
            return self._shown(op, self._run(op, grown), grows=bool(grown))

    def _operation(self, raw: str, name: str, *more: Any) -> Operation:
        self._count += 1
        return Operation(self._count - 1, name, f"mlx.core.{raw}", *more)

    def _run(self, op: Operation, grown: list[Any]) -> Any:
        run: Any = op.own
        if self._repairs is not None:
            run = self._repairs.around(op, run)
        if not grown:
            return run({})
        ids = [id(x) for x in grown]

        def pure(*new: Any) -> Any:
            return run(dict(zip(ids, new, strict=True)))

        function = mx.custom_function(pure)
        labels = {id(x): label for label, x in op.given}
        function.vjp(partial(self._back, op, pure, [labels.get(i, "") for i in ids]))
        return function(*grown)

    def _shown(self, op: Operation, result: Any, *, grows: bool) -> Any:
        made = arrays(result)
        if not made:
            return result
        op.made, op.results = made, [(op.number, k) for k in range(len(made))]
        new = self._show(op)
        if new is not None:
            result = _filled(result, dict(zip(map(id, made), new, strict=True)))
            made = list(new)
        op.over()
        op.own = None
        if not grows:  # else its gradient has them
            op.arguments = (), {}
        for key, x in zip(op.results, made, strict=True):
            name = called(op.name, [*op.operands.values()])
            makers = (name, *op.chain)[:2]
            self._enter(x, Made(weakref.ref(x), key, grows and is_float(x), makers))
        return result

    def _show(self, op: Operation) -> Sequence[Any] | None:
        try:
            EVALUATE([x for _, x in op.inputs], list(op.outputs))
        except (RuntimeError, ValueError):  # of arrays that mx.vmap makes there is nothing to see
            self.notes.append(INSIDE_UNSEEN())
            return None
        found: Sequence[Any] | None = self._shows(op)
        return found

    def _back(
        self, op: Operation, pure: Run, labels: list[str], primals: Any, cotangents: Any,
        outputs: Any,
    ) -> Any:  # fmt: skip
        """Run an operation's gradient, and show it."""
        given, incoming = arrays(primals), arrays(cotangents)

        def slopes(new: Mapping[int, Any]) -> Any:
            at = [[new.get(id(x), x) for x in each] for each in (given, incoming)]
            return mx.vjp(lambda *x: arrays(pure(*x)), *at)[1]

        with self.quiet():
            forward = [(label, x) for label, x in zip(labels, given, strict=True) if label]
            rest = [(label, x) for label, x in op.given if label not in labels]
            rest += [("result", x) for x in arrays(outputs) if is_float(x)]
            grads = [(f"grad{k or ''}", x) for k, x in enumerate(incoming)]
            place: Place = op.layer, op.call, "backward", op.source
            taken = [*grads, *forward, *rest]
            back = self._operation(f"{op.function}.vjp", op.name, place, taken, op.params, op)
            back.own, back.made = slopes, slopes({})
            found = list(back.made)
            if self._over:  # somebody takes a gradient of what the run gave
                return found[0] if len(found) == 1 else tuple(found)
            if self._repairs is not None:
                self._repairs.back(op, incoming, found)
            new = self._show(back)
            back.over()
            back.own = None
        found = found if new is None else list(new)
        return found[0] if len(found) == 1 else tuple(found)


def arrays(value: Any) -> list[Any]:
    """List the arrays in a result, in order."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return [x for item in items for x in arrays(item)]
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


def _filled(value: Any, given: Mapping[int, Any]) -> Any:
    """Put other arrays in the place of those with these ids."""
    return mapped(value, lambda x: given.get(id(x), x))


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
