"""One operation as it is bound, and what stands in its place."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import Repair, RepairError
from anynan.jax.graphs import names
from anynan.jax.graphs.bodies import JITS, bodies
from anynan.jax.graphs.stacks import FIXED

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
