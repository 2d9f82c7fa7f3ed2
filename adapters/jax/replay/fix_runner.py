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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, RepairError
from anynan.jax.graphs import lines, names
from anynan.jax.graphs.bodies import JITS, bodies
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


# What runs in the place of functions of JAX's, by the code that stands there.
STANDING: dict[CodeType, Callable[..., Any]] = {}


def _stand_in(*args: Any, **kwargs: Any) -> Any:
    import sys  # the globals are those of the function that its code is put into

    runs = sys.modules["anynan.jax.replay.fix_runner"].STANDING
    return runs[sys._getframe().f_code](*args, **kwargs)


@contextmanager
def _standing(function: Any, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Have another run in a function's place, wherever that was imported to meanwhile.

    Raises:
        RepairError: If another run of a step does so.
    """
    code = function.__code__
    if code in STANDING:
        raise RepairError(code.co_name)
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    known: Any = {key: getattr(code, key) for key in ("co_name", "co_filename", "co_firstlineno")}
    stand = _stand_in.__code__.replace(**known)
    STANDING[stand] = make(own)
    function.__code__ = stand
    try:
        yield
    finally:
        function.__code__ = code
        STANDING[stand] = own  # for a thread that has just begun to run what stands there


def _functions(wanted: Collection[str]) -> list[Any]:
    """List the functions of JAX's, in Python, that are one operation of these."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("jax.")]
    held = [x for module in modules for x in [*vars(module).values()] if type(x) is FunctionType]
    return [x for x in {id(x): x for x in held}.values() if _is_one_of(x.__code__, wanted)]


def _is_one_of(code: CodeType, wanted: Collection[str]) -> bool:
    """Tell whether code can be put in another's place, and is JAX's of one of these operations."""
    if code.co_freevars or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return False
    return names.function((code.co_name,)) in wanted and lines.is_jax(code.co_filename)


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
        # The function of JAX's that is run to see whether a part of it is the whole operation.
        self._looked: tuple[str | None, CodeType] | None = None
        self._passed = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Repair what this thread traces meanwhile.

        Raises:
            RepairError: If this JAX could not keep such a trace apart.
        """
        apart = context()
        if apart is None:
            raise RepairError(jax.__version__)
        with apart(object()), Patches() as patches, ExitStack() as stack:
            for primitive in _primitives():
                if primitive.name in JITS or word_of(primitive, {}) in self.names:
                    patches.put(primitive, "bind", self._in_place(primitive))
            if not self.names.isdisjoint(names.FUNCTIONS.values()):
                patches.change(jax.custom_jvp, "__call__", self._in_place_of_a_call)
                for function in _functions(self.names):
                    stack.enter_context(_standing(function, self._in_place_of_a_function))
            yield

    def _in_place(self, primitive: Any) -> Callable[..., Any]:
        real = primitive.bind

        def bind(*args: Any, **params: Any) -> Any:
            if self._looked is not None and self.here:
                self._look(word_of(primitive, params))
            found = self._wanted(word_of(primitive, params))
            if not found:
                return real(*args, **params)
            make = functools.partial(of_primitive, primitive, real, args, params)
            return self._fixed(found, make, lambda: real(*args, **params))

        return bind

    def _in_place_of_a_call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def bind(function: Any, *args: Any, **kwargs: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                return real(function, *args, **kwargs)

            found = self._wanted(names.function((getattr(function, "__name__", ""),)))
            if not found:
                return run(*args, **kwargs)

            def make() -> Any:
                given = inspect.signature(function).bind(*args, **kwargs)
                return of_call(run, given, numbers=True)

            return self._fixed(found, make, lambda: run(*args, **kwargs))

        return bind

    def _in_place_of_a_function(self, own: Any) -> Callable[..., Any]:
        word = names.function((own.__name__,))

        def run(*args: Any, **kwargs: Any) -> Any:
            found = self._wanted(word)
            if not found:
                return own(*args, **kwargs)

            def whole() -> FixedOp | None:
                given = inspect.signature(own).bind(*args, **kwargs)
                given.apply_defaults()
                self._looked, self._passed = (word, own.__code__), False
                try:
                    with context()(object()):
                        fixed = of_call(own, given, numbers=False)
                finally:
                    self._looked = None
                return None if self._passed else fixed

            fixed = self.made((), whole)
            if fixed is None:
                return own(*args, **kwargs)
            return self._fixed(found, lambda: fixed, lambda: own(*args, **kwargs))

        return run

    def _look(self, word: str | None) -> None:
        """Look whether the function that runs binds the whole operation by itself."""
        assert self._looked is not None
        name, code = self._looked
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not code:
            if _TRACES.match(frame.f_code.co_name):  # a jitted function is traced, and bound then
                return
            frame = frame.f_back
        self._passed = self._passed or word == name

    def _fixed(self, found: list[Repair], make: Callable[[], Any], real: Callable[[], Any]) -> Any:
        """Run an operation repaired; as it is where that cannot be."""

        def run() -> Any:
            with context()(object()):  # its function may be in the middle of a trace
                return make()(found)

        new = self.made(found, run)
        return real() if new is None else new

    def _wanted(self, word: str | None) -> list[Repair]:
        """Choose the repairs of what is bound or called at this moment, unless it is a part.

        Args:
            word: What it is called.
        """
        if self.busy or not self.here or word not in self.names:
            return []
        frame: FrameType | None = sys._getframe(2)
        way: list[str] = []
        whole, inside = word, True
        while frame is not None and is_library(frame.f_code.co_filename):
            way.append(frame.f_code.co_name)
            inside = inside and lines.is_jax(frame.f_code.co_filename)
            whole = (names.function((way[-1],)) if inside else None) or whole
            frame = frame.f_back
        # What a library's own function is traced to serves its calls from other lines, too.
        if whole != word or frame is None or not _AGAIN.isdisjoint(way):
            return []
        if any(map(_TRACES.match, way)):
            return []
        source = lines.source_here(sys._getframe(2))
        return self.of(whole, source, None) if source else []


@functools.cache
def _primitives() -> list[Any]:
    """List the primitives of JAX, each once."""
    found = (item for item in vars(primitives).values() if isinstance(item, Primitive))
    return list({id(item): item for item in found}.values())
