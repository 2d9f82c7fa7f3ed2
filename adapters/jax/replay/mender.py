"""Operations repaired while a function is traced once more: differentiation follows by itself.

A repaired operation stands in its place before JAX differentiates, batches or compiles it, so the
gradient is the repair's own. Nothing of such a trace is found again by the program's next calls:
JAX keeps what it traced under a context of its own.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import Repair, RepairError
from anynan._diagnosis.sources import is_library
from anynan._reach.patches import Patches
from anynan.jax.graphs import lines, names
from anynan.jax.graphs.bodies import JITS, bodies
from anynan.jax.graphs.stacks import MENDED

# What stands between a user's line and an operation that is bound a second time: in a derivative
# rule, or as a body that was traced before is run through.
_AGAIN = frozenset({"bind", "_true_bind", "bind_with_trace", "eval_jaxpr"})
# What a jitted function of JAX's does to operands beside its one operation.
_FORMS = ("convert_element_type", "broadcast_in_dim", "reshape", "copy", "copy_p")
# What the functions of JAX are called that trace another.
_TRACES = re.compile("_*trace_(to|for)_")


class Words:
    """Give an expression what it is run with."""

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        """Choose by a mask; a number takes the other side's dtype."""
        return jnp.where(condition, x, y)

    @staticmethod
    def isfinite(x: Any) -> Any:
        """Tell which elements are neither NaN nor Inf."""
        return jnp.isfinite(x)

    @staticmethod
    def reduce(name: str, x: Any, axis: Any, *, keepdims: bool) -> Any:
        """Give the sum, the largest, or whether any is true."""
        axes = tuple(axis) if isinstance(axis, list) else axis
        return getattr(jnp, name)(x, axis=axes, keepdims=keepdims)

    @staticmethod
    def eye(x: Any) -> Any:
        """Give the unit matrix."""
        return jnp.eye(x.shape[-1], dtype=x.dtype)


class Mender:
    """Put repaired operations in the place of those that made bad values.

    Args:
        chosen: What to repair; one that is named later stands inside of one named before.
    """

    def __init__(self, chosen: Sequence[Repair]) -> None:
        self._chosen = list(chosen)
        self._names = {item.operation for item in chosen}
        self._used: set[Repair] = set()
        self._lost = self._busy = False
        self._thread = get_ident()

    @property
    def whole(self) -> bool:
        """Tell whether every repair took its place."""
        return not self._lost and self._used == set(self._chosen)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Repair what this thread traces meanwhile.

        Raises:
            RepairError: If this JAX could not keep such a trace apart.
        """
        apart = context()
        if apart is None:
            raise RepairError(jax.__version__)
        with apart(object()), Patches() as patches:
            for primitive in _primitives():
                if primitive.name in JITS or names.primitive(primitive.name) in self._names:
                    patches.put(primitive, "bind", self._in_place(primitive))
            yield

    def _in_place(self, primitive: Any) -> Callable[..., Any]:
        real = primitive.bind

        def bind(*args: Any, **params: Any) -> Any:
            if self._busy or get_ident() != self._thread:
                return real(*args, **params)
            found = self._wanted(primitive, params)
            if not found:
                return real(*args, **params)
            self._busy = True
            try:
                with context()(object()):  # its own function may be in the middle of a trace
                    new = _Mended(primitive, real, args, params)(found)
                self._used.update(found)
            except Exception:  # noqa: BLE001  then nothing is told of this run
                self._lost = True
                return real(*args, **params)
            else:
                return new
            finally:
                self._busy = False

        return bind

    def _wanted(self, primitive: Any, params: dict[str, Any]) -> list[Repair]:
        """Choose the repairs of what is bound at this moment."""
        word = _word(primitive, params)
        if word not in self._names:
            return []
        frame: FrameType | None = sys._getframe(2)
        way: list[str] = []
        inside = 0
        while frame is not None and is_library(frame.f_code.co_filename):
            way.insert(0, frame.f_code.co_name)
            inside = inside + 1 if inside == len(way) - 1 and _of_jax(frame) else inside
            frame = frame.f_back
        # What a library's own function is traced to serves its calls from other lines, too.
        if frame is None or not _AGAIN.isdisjoint(way) or any(map(_TRACES.match, way)):
            return []
        # A part of another operation is none.
        if names.function(tuple(way[len(way) - inside :])) not in (None, word):
            return []
        source = lines.source_here(sys._getframe(2))
        return [item for item in self._chosen if source and item.is_of(word, source, None)]


def _of_jax(frame: FrameType) -> bool:
    return lines.is_jax(frame.f_code.co_filename)


def _word(primitive: Any, params: dict[str, Any]) -> str | None:
    """Name an operation as it is bound: of a jitted function of JAX's, the one that it is."""
    if primitive.name not in JITS:
        return names.primitive(primitive.name)
    whole = names.function((str(params.get("name")),))
    only = None if whole is not None else _only(params)
    return whole if only is None else names.primitive(only.primitive.name)


def _only(params: dict[str, Any]) -> Any:
    """Give the one equation of a jitted function, beside changes of shape and dtype.

    None where there are several, or where it takes something else than the function does.
    """
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    roots = {id(var): var for var in jaxpr.invars}
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if len(jaxpr.eqns) > 1 and eqn.primitive.name in _FORMS and id(eqn.invars[0]) in roots:
            roots[id(eqn.outvars[0])] = roots[id(eqn.invars[0])]
        else:
            found.append(eqn)
    taken = [roots.get(id(var)) for eqn in found for var in eqn.invars]
    if len(found) != 1 or taken != list(jaxpr.invars) or found[0].primitive.name in JITS:
        return None
    return found[0]


class _Mended:
    """Stand for one operation as it is bound.

    Args:
        primitive: What it is.
        real: Binds it.
        args: What it is given.
        params: Its parameters.
    """

    def __init__(
        self, primitive: Any, real: Callable[..., Any], args: tuple[Any, ...],
        params: dict[str, Any],
    ) -> None:  # fmt: skip
        self._primitive, self._real = primitive, real
        self._args, self._given = args, params
        jitted = primitive.name in JITS
        only = _only(params) if jitted else None
        name = (
            "" if jitted and only is None else (primitive if only is None else only.primitive).name
        )
        taken = [x for x in args if name or _is_float(x)]
        count = len(taken)
        self._operands = {names.operand(name, i, count): x for i, x in enumerate(taken)}
        if name == "integer_pow":
            self._operands["exponent"] = (params if only is None else only.params)["y"]
        self._params = self._described()

    def _described(self) -> dict[str, Any]:
        """Give the plain arguments by the names that records have for them."""
        todo, found = [self._given], dict[str, Any]()
        shapes = self._shapes()
        while todo:
            params = todo.pop(0)
            for name in ("axes", "axis", "dimension"):
                if isinstance(params.get(name), int | tuple):
                    axes = params[name]
                    found.setdefault("dim", list(axes) if isinstance(axes, tuple) else axes)
            inner = params.get("jaxpr") or params.get("call_jaxpr")
            if inner is not None:
                inner = getattr(inner, "jaxpr", inner)
                todo += [eqn.params for eqn in inner.eqns if bodies(eqn) or eqn.params]
        x: Any = next(iter(self._operands.values()), None)
        found["keepdim"] = bool(shapes) and jnp.ndim(x) == len(shapes[0].shape)
        counts = [x for x in self._args if not jnp.ndim(x) and not _is_float(x)]
        if counts:
            found["correction"] = counts[0]
        return found

    def _shapes(self) -> list[Any]:
        shapes = jax.eval_shape(self._bind, *self._args)
        return list(shapes) if isinstance(shapes, list | tuple) else [shapes]

    def _bind(self, *args: Any) -> Any:
        return self._real(*args, **self._given)

    def __call__(self, found: Sequence[Repair]) -> Any:
        """Bind it repaired."""
        with jax.named_scope(MENDED):
            step: Callable[..., Any] = self._own
            for item in reversed(found):
                if item.expression:
                    step = functools.partial(self._expression, item, step)
                else:
                    step = functools.partial(self._filled, item, step)
            new = step()
        shapes = self._shapes()
        many = list(new) if isinstance(new, list | tuple) else [new]
        made = [self._like(x, shape) for x, shape in zip(many, shapes, strict=True)]
        return made if self._primitive.multiple_results else made[0]

    def _own(self, *new: Any) -> Any:
        """Bind the operation itself, with others in the place of its first operands."""
        args = list(self._args)
        if len(new) > len(args) or not all(map(_is_float, args[: len(new)])):
            raise RepairError(self._primitive.name)
        for i, x in enumerate(new):
            args[i] = jnp.asarray(x, args[i].dtype)
            if args[i].shape != jnp.shape(self._args[i]):
                raise RepairError(self._primitive.name)
        out = self._bind(*args)
        return out[0] if isinstance(out, list | tuple) and len(out) == 1 else out

    def _expression(self, item: Repair, own: Callable[..., Any], *new: Any) -> Any:
        given = {**self._operands, **dict(zip(self._operands, new, strict=False))}
        return repairs.run(item, Words(), own, given, self._params)

    def _filled(self, item: Repair, own: Callable[..., Any], *new: Any) -> Any:
        """Run it with 0 in the place of the bad values that it makes, and of its gradient's."""
        floats = [x for x in self._args if _is_float(x)]
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

        mended: Any = jax.custom_vjp(made)
        mended.defvjp(ahead, back)
        return mended(*floats)

    def _like(self, new: Any, shape: Any) -> Any:
        """Give a repaired result the form of the operation's own."""
        if jnp.shape(new) != shape.shape:
            raise RepairError(self._primitive.name)
        return jnp.asarray(new).astype(shape.dtype)


def _fill(x: Any) -> Any:
    return repairs.neutral(Words(), x) if _is_float(x) else x


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact))


@functools.cache
def context() -> Any:
    """Give what keeps a trace apart from all others, None where JAX has no such thing.

    The first call has JAX forget what it compiled: it is part of what each program is found by.
    """
    make = getattr(jax, "make_user_context", None)
    return None if make is None else make(None)


@functools.cache
def _primitives() -> list[Any]:
    """List the primitives of JAX, each once."""
    found = (item for item in vars(primitives).values() if isinstance(item, Primitive))
    return list({id(item): item for item in found}.values())
