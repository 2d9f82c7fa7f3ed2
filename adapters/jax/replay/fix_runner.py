"""Operations repaired while a function is traced once more: differentiation follows by itself.

A repaired operation stands in its place before JAX differentiates, batches or compiles it, so the
gradient is the repair's own. Nothing of such a trace is found again by the program's next calls:
JAX keeps what it traced under a context of its own.
"""

import functools
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, RepairError
from anynan.jax.graphs import lines, names
from anynan.jax.graphs.bodies import CUSTOM, JITS, bodies
from anynan.jax.graphs.stacks import FIXED
from anynan.jax.graphs.versions import context

# What a jitted function of JAX's does to operands beside its one operation.
_FORMS = ("convert_element_type", "broadcast_in_dim", "reshape", "copy", "copy_p")
_WORDS = repairs.Namespace(jnp)


class FixedOp:
    """Stand for one operation.

    Args:
        run: Runs it on its arguments.
        args: What it is given.
        operands: Its operands by the names that records have for them: where they are among the
            arguments.
        params: Its plain arguments, by the names that records have for them.
        numbers: Operands that are no arguments.
    """

    def __init__(
        self, run: Callable[..., Any], args: Sequence[Any], operands: dict[str, int],
        params: dict[str, Any], numbers: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._numbers = numbers or {}
        self._run, self._args, self._operands = run, list(args), operands
        self._floats = {k: i for k, i in operands.items() if is_float(self._args[i])}
        self._shape = jax.eval_shape(run, *args)
        first = jax.tree.leaves(self._shape)[:1]
        x: Any = self._args[next(iter(operands.values()))] if operands else None
        keepdim = bool(first) and jnp.ndim(x) == len(first[0].shape)
        self._params = {**params, "keepdim": keepdim}

    @property
    def itself(self) -> tuple[Callable[..., Any], list[Any]]:
        """Give the operation as it is, and its arguments."""
        return self._run, self._args

    def __call__(self, found: Sequence[Repair]) -> Any:
        """Run it repaired.

        Raises:
            RepairError: If what comes out has not the form of what the operation gives.
        """
        with jax.named_scope(FIXED):
            new = repairs.around(found, self._own, self._expression, self._filled)()
        shapes, form = jax.tree.flatten(self._shape)
        made = [_like(x, shape) for x, shape in zip(jax.tree.leaves(new), shapes, strict=True)]
        return jax.tree.unflatten(form, made)

    def _own(self, *new: Any) -> Any:
        """Run the operation itself, with others in the place of its first operands of floats."""
        args = list(self._args)
        for i, x in zip(self._floats.values(), new, strict=False):
            args[i] = jnp.asarray(x, jax.dtypes.result_type(args[i]))
            if args[i].shape != jnp.shape(self._args[i]):
                raise RepairError(str(args[i].shape))
        if len(new) > len(self._floats):
            raise RepairError(str(len(new)))
        out = self._run(*args)
        return out[0] if isinstance(out, list | tuple) and len(out) == 1 else out

    def _expression(self, item: Repair, own: Callable[..., Any], *new: Any) -> Any:
        given = {name: self._args[i] for name, i in self._operands.items()} | self._numbers
        given.update(zip(self._floats, new, strict=False))
        return repairs.run(item, _WORDS, own, given, self._params)

    def _filled(self, item: Repair, own: Callable[..., Any], *new: Any) -> Any:
        """Run it with 0 in the place of the bad values that it makes, and of its gradient's."""
        floats = [self._args[i] for i in self._floats.values()]
        floats[: len(new)] = new

        def made(*given: Any) -> Any:
            out = own(*given)
            return out if item.phase == "backward" else jax.tree.map(_fill, out)

        def ahead(*given: Any) -> Any:
            _, slope = jax.vjp(own, *given)
            return made(*given), slope

        def back(slope: Any, incoming: Any) -> Any:
            clean = functools.reduce(
                jnp.logical_and, [jnp.isfinite(x).all() for x in jax.tree.leaves(incoming)]
            )  # what came in bad is another fault's
            return tuple(jnp.where(clean, _fill(x), x) for x in slope(incoming))

        fixed: Any = jax.custom_vjp(made)
        fixed.defvjp(ahead, back)
        return fixed(*floats)


def of_primitive(
    primitive: Any, real: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]
) -> FixedOp:
    """Stand for what is bound: a primitive, or a jitted function of JAX's.

    Args:
        primitive: What it is.
        real: Binds it.
        args: What it is given.
        params: Its parameters.
    """
    inner, given, order = _inmost(primitive, params, range(len(args)))
    whole = inner.name in JITS  # what is no float stands beside the operands
    order = [i for i in order if not whole or is_float(args[i])]
    name = "" if whole else inner.name
    operands = {names.operand(name, k, len(order)): i for k, i in enumerate(order)}
    described = _described(params)
    counts = [x for x in args if not jnp.ndim(x) and not is_float(x)]
    if counts:
        described["correction"] = counts[0]
    numbers = {"exponent": given["y"]} if name == "integer_pow" else {}
    return FixedOp(lambda *new: real(*new, **params), args, operands, described, numbers)


def of_call(run: Callable[..., Any], given: inspect.BoundArguments, *, numbers: bool) -> FixedOp:
    """Stand for a call of a function of JAX's.

    Args:
        run: The function.
        given: What it is called with.
        numbers: Whether a number among it is an operand, too.
    """
    known = given.arguments
    taken = [k for k, x in known.items() if hasattr(x, "dtype") or (numbers and type(x) is float)]
    if not taken:
        raise RepairError(", ".join(known))

    def again(*new: Any) -> Any:
        arguments = OrderedDict({**known, **dict(zip(taken, new, strict=True))})
        bound = inspect.BoundArguments(given.signature, arguments)
        return run(*bound.args, **bound.kwargs)

    args = [known[name] for name in taken]
    floats = [i for i, x in enumerate(args) if is_float(x)]
    operands = {names.operand("", k, len(floats)): i for k, i in enumerate(floats)}
    axis = known.get("axis")
    described = {"dim": list(axis) if isinstance(axis, tuple) else axis} if "axis" in known else {}
    return FixedOp(again, args, operands, described)


def word_of(primitive: Any, params: dict[str, Any]) -> str | None:
    """Name an operation as it is bound: of a jitted function of JAX's, the one that it is."""
    while primitive.name in JITS and params:
        whole = names.function((str(params.get("name")),))
        only = None if whole is not None else _only(params)
        if only is None:
            return whole
        primitive, params = only[0].primitive, only[0].params
    return names.primitive(primitive.name)


def _inmost(
    primitive: Any, params: dict[str, Any], order: Sequence[int]
) -> tuple[Any, dict[str, Any], list[int]]:
    """Give the one operation of a jitted function, and its arguments in the order it takes them."""
    only = _only(params) if primitive.name in JITS else None
    if only is None:
        return primitive, params, list(order)
    eqn, taken = only
    return _inmost(eqn.primitive, eqn.params, [order[i] for i in taken])


def _only(params: dict[str, Any]) -> tuple[Any, list[int]] | None:
    """Give the one equation of a jitted function, beside changes of shape and dtype.

    None where there are several, or where it takes something else than the function does.
    """
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    roots = {id(var): i for i, var in enumerate(jaxpr.invars)}
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if len(jaxpr.eqns) > 1 and eqn.primitive.name in _FORMS and id(eqn.invars[0]) in roots:
            roots[id(eqn.outvars[0])] = roots[id(eqn.invars[0])]
        else:
            found.append(eqn)
    taken = [roots.get(id(var), -1) for eqn in found for var in eqn.invars]
    if len(found) != 1 or sorted(taken) != list(range(len(jaxpr.invars))):
        return None
    return found[0], taken


def _described(params: dict[str, Any]) -> dict[str, Any]:
    """Give the plain arguments by the names that records have for them."""
    todo, found = [params], dict[str, Any]()
    while todo:
        given = todo.pop(0)
        for name in ("axes", "axis", "dimension"):
            if isinstance(given.get(name), int | tuple):
                axes = given[name]
                found.setdefault("dim", list(axes) if isinstance(axes, tuple) else axes)
        inner = given.get("jaxpr") or given.get("call_jaxpr")
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            todo += [eqn.params for eqn in inner.eqns if bodies(eqn) or eqn.params]
    return found


def is_float(x: Any) -> bool:
    """Tell whether something is an array of floats, or a number of its kind."""
    return bool(jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact))


def _fill(x: Any) -> Any:
    return repairs.neutral(_WORDS, x) if is_float(x) else x


def _like(new: Any, shape: Any) -> Any:
    """Give a repaired result the form of the operation's own."""
    if jnp.shape(new) != shape.shape:
        raise RepairError(str(shape))
    return jnp.asarray(new).astype(shape.dtype)


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
            if not self.here:
                return real(*args, **params)
            if self._tally is not None:
                return self._counted(primitive, real, args, params)
            if self.busy:
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

            if self.busy or self._tally is not None or not self.here:
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
            with context()(object()):  # its function may be in the middle of a trace
                return make()(found)

        new = self.made(found, run)
        return real() if new is None else new

    def _in_a_whole(
        self, found: list[Repair], frame: FrameType, primitive: Any, real: Callable[[], Any]
    ) -> Any:
        """Bind a part of a function of JAX's: its last gives what the function gives, repaired."""
        whole = self._wholes.get(frame)
        if whole is None:
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
            blank = self.made((), lambda: whole.blank(primitive))
            return real() if blank is None else blank
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
