"""Operations repaired while a function is traced once more: differentiation follows by itself.

A repaired operation stands in its place before JAX differentiates, batches or compiles it, so the
gradient is the repair's own. Nothing of such a trace is found again by the program's next calls:
JAX keeps what it traced under a context of its own.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, RepairError
from anynan.jax.graphs import lines, names
from anynan.jax.graphs.bodies import CUSTOM, JITS
from anynan.jax.graphs.stacks import FIXED
from anynan.jax.graphs.versions import context
from anynan.jax.replay.fixed import FixedOp, of_call, of_primitive, word_of


class OpCounter:
    """Hold what a function binds, in order.

    Args:
        name: What it is called.

    Attributes:
        parts: The results of each.
        passed: Whether a part is the whole operation by itself.
        ends: Whether the function gives what the last one gives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.parts: list[list[Any]] = []
        self.passed = self.ends = False

    def add(self, word: str | None, made: Any) -> None:
        """Take a part."""
        self.parts.append(list(made) if isinstance(made, list | tuple) else [made])
        self.passed = self.passed or word == self._name

    def of(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run the function."""
        out = run(*args)
        self.ends = bool(self.parts) and len(self.parts[-1]) == 1 and self.parts[-1][0] is out
        return out


class CompositeCall:
    """Stand for one call of such a function.

    Args:
        frame: The call.
        counts: Runs a function to see what it binds.

    Attributes:
        passed: Whether a part of it is the whole operation.
        fixed: What stands in its place.
        shapes: The form of what each part gives.
        position: How many parts were bound.

    Raises:
        RepairError: If it cannot be called once more from its frame, or its last part does not
            give what it gives.
    """

    def __init__(
        self, frame: FrameType, counts: Callable[[str, Callable[..., Any], list[Any]], OpCounter]
    ) -> None:
        code = frame.f_code
        if code.co_freevars or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise RepairError(code.co_name)
        fn = FunctionType(code, frame.f_globals)
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = inspect.signature(fn).bind_partial()
        given.arguments.update({name: frame.f_locals[name] for name in known})
        self.fixed: FixedOp = of_call(fn, given, numbers=False)
        tally = counts(names.function((code.co_name,)) or "", *self.fixed.itself)
        self.passed, self.position = tally.passed, 0
        if not (tally.ends or tally.passed):
            raise RepairError(code.co_name)
        self.shapes = [[(x.shape, x.dtype) for x in made] for made in tally.parts]

    @property
    def open(self) -> bool:
        """Tell whether there are parts still to come."""
        return not self.passed and self.position < len(self.shapes)

    def blank(self, primitive: Any) -> Any:
        """Give a part's results, of which nothing is used: zeros."""
        with jax.named_scope(FIXED):
            made = [jnp.zeros(*form) for form in self.shapes[self.position - 1]]
        return made if primitive.multiple_results else made[0]


# What stands between a user's line and an operation that is bound a second time: in a derivative
# rule, or as a body that was traced before is run through.
_AGAIN = frozenset({"bind", "_true_bind", "bind_with_trace", "eval_jaxpr"})
# What the functions of JAX are called that trace another.
_TRACES = re.compile("_*trace_(to|for)_")


class FixRunner(BaseFixRunner):
    """Put repaired operations in the place of those that made bad values.

    Args:
        repairs: What to repair; one that is named later stands inside of one named before.
    """

    def __init__(self, repairs: Sequence[Repair]) -> None:
        super().__init__(repairs)
        self._wholes: dict[FrameType, CompositeCall] = {}
        self._tally: OpCounter | None = None
        self._busy = False
        self._thread = get_ident()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Repair what this thread traces meanwhile.

        Raises:
            RepairError: If this JAX could not keep such a trace apart.
        """
        apart = context()
        if apart is None:
            raise RepairError(jax.__version__)
        functions = not self.names.isdisjoint(names.FUNCTIONS.values())
        with apart(object()), Patches() as patches:
            for primitive in _primitives():
                if functions or primitive.name in JITS or word_of(primitive, {}) in self.names:
                    patches.put(primitive, "bind", self._in_place(primitive))
            if functions:
                patches.change(jax.custom_jvp, "__call__", self._in_place_of_a_call)
            yield
        if any(item.open for item in self._wholes.values()):
            self.lost = "a function did not come to its end"
        self._wholes.clear()  # they hold frames

    def _in_place(self, primitive: Any) -> Callable[..., Any]:
        real = primitive.bind

        def bind(*args: Any, **params: Any) -> Any:
            if get_ident() != self._thread:
                return real(*args, **params)
            if self._tally is not None:
                return self._counted(primitive, real, args, params)
            if self._busy:
                return real(*args, **params)
            found, frame = self._wanted(word_of(primitive, params))
            if not found:
                return real(*args, **params)
            if frame is None:
                make = functools.partial(of_primitive, primitive, real, args, params)
                return self._fixed(found, make, lambda: real(*args, **params))
            return self._in_a_whole(found, frame, primitive, lambda: real(*args, **params))

        return bind

    def _in_place_of_a_call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def bind(function: Any, *args: Any, **kwargs: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                return real(function, *args, **kwargs)

            if self._busy or self._tally is not None or get_ident() != self._thread:
                return run(*args, **kwargs)
            name = getattr(function, "__name__", "")
            found, frame = self._wanted(names.function((name,)))
            if not found or frame is not None:  # a part of another
                return run(*args, **kwargs)

            def make() -> Any:
                given = inspect.signature(function).bind(*args, **kwargs)
                return of_call(run, given, numbers=True)

            return self._fixed(found, make, lambda: run(*args, **kwargs))

        return bind

    def _fixed(self, found: list[Repair], make: Callable[[], Any], real: Callable[[], Any]) -> Any:
        """Run an operation repaired; as it is where that cannot be."""

        def run() -> Any:
            with self._aside(), context()(object()):  # its function may be in the middle of a trace
                return make()(found)

        new = self.made(found, run)
        return real() if new is None else new

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Repair nothing inside."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _in_a_whole(
        self, found: list[Repair], frame: FrameType, primitive: Any, real: Callable[[], Any]
    ) -> Any:
        """Bind a part of a function of JAX's: its last gives what the function gives, repaired."""
        whole = self._wholes.get(frame)
        if whole is None:
            with self._aside():
                whole = self.made((), lambda: CompositeCall(frame, self._counts))
            if whole is None:
                return real()
            self._wholes[frame] = whole
        if whole.passed:
            return real()
        whole.position += 1
        if primitive.name in CUSTOM:  # JAX waits for what its function leaves behind
            real()
        if whole.position > len(whole.shapes):
            self.lost = "a function ran otherwise than before"
            return real()
        if whole.open:
            with self._aside():
                return whole.blank(primitive)
        new = self._fixed(found, lambda: whole.fixed, lambda: None)
        if new is None:
            return real()
        return [new] if primitive.multiple_results else new

    def _counts(self, name: str, run: Callable[..., Any], args: list[Any]) -> OpCounter:
        """Run a function of JAX's to see what it binds."""
        tally = self._tally = OpCounter(name)
        try:
            with context()(object()):
                jax.eval_shape(functools.partial(tally.of, run), *args)
        finally:
            self._tally = None
        return tally

    def _counted(self, primitive: Any, real: Any, args: Any, params: dict[str, Any]) -> Any:
        """Bind a part of a function that is run to see what it binds, and not what those bind."""
        tally, self._tally = self._tally, None
        try:
            made = real(*args, **params)
        finally:
            self._tally = tally
        assert tally is not None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not OpCounter.of.__code__:
            if _TRACES.match(frame.f_code.co_name):  # a jitted function is traced, and bound then
                return made
            frame = frame.f_back
        tally.add(word_of(primitive, params), made)
        return made

    def _wanted(self, word: str | None) -> tuple[list[Repair], FrameType | None]:
        """Choose the repairs of what is bound at this moment.

        Args:
            word: What it is called.

        Returns:
            The repairs, and the call of the function of JAX's that they are of, if it is a part
            of one.
        """
        frame: FrameType | None = sys._getframe(2)
        way: list[str] = []
        whole, around, inside = None, None, True
        while frame is not None and is_library(frame.f_code.co_filename):
            way.append(frame.f_code.co_name)
            inside = inside and lines.is_jax(frame.f_code.co_filename)
            name = names.function((way[-1],)) if inside else None
            whole, around = (whole, around) if name is None else (name, frame)
            frame = frame.f_back
        if whole in (None, word):
            whole, around = word, None
        # What a library's own function is traced to serves its calls from other lines, too.
        if whole not in self.names or frame is None or not _AGAIN.isdisjoint(way):
            return [], None
        if any(map(_TRACES.match, way)):
            return [], None
        source = lines.source_here(sys._getframe(2))
        return self.of(whole, source, None) if whole and source else [], around


@functools.cache
def _primitives() -> list[Any]:
    """List the primitives of JAX, each once."""
    found = (item for item in vars(primitives).values() if isinstance(item, Primitive))
    return list({id(item): item for item in found}.values())
