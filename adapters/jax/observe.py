"""Run a function once and show each of its operations: the traced program, equation by equation."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.extend import core as jc

from anynan._arrays.arguments import positional
from anynan._base.context import but
from anynan._reach import named
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan._trace.target import Target
from anynan.errors import reason
from anynan.events import Phase, Source
from anynan.jax.graphs import names
from anynan.jax.graphs.bodies import Body, backwards, bodies, hides, rounds_of
from anynan.jax.graphs.graph import Node
from anynan.jax.graphs.lines import source
from anynan.jax.graphs.operations import Op as Grouped
from anynan.jax.graphs.versions import dropped, rebind, rebind_in
from anynan.jax.messages import EFFECT_NOT_RUN, GRADIENTS_UNLINKED, INSIDE_NOT_SEEN
from anynan.jax.program import signature
from anynan.jax.program.evaluator import going_on, silent
from anynan.jax.program.program import Program, Settings, form_of
from anynan.jax.program.trace import UntraceableError, UnwatchableError, under_way
from anynan.jax.read.probes import checkable
from anynan.jax.read.readings import Path

_MODULES = ("flax.nnx", "flax.linen", "equinox")


def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call is JAX's: by its arrays, or by what the target is made with."""
    if any(isinstance(x, jax.Array) for x in tree_util.tree_leaves((args, dict(kwargs)))):
        return True
    if hasattr(target, "lower") and hasattr(target, "trace"):  # a jitted function
        return True
    return _is_module(target) or any(map(_is_module, args)) or _names_jax(target, (args, kwargs))


def _names_jax(target: Any, given: Any) -> bool:
    """Tell whether a function that is given NumPy's arrays takes them to JAX in its own code."""
    if not any(isinstance(x, np.ndarray) for x in tree_util.tree_leaves(given)):
        return False
    used = named(inspect.unwrap(target)).values()
    return any(isinstance(x, ModuleType) and x.__name__.split(".")[0] == "jax" for x in used)


def _is_module(x: Any) -> bool:
    loaded = (getattr(sys.modules.get(name), "Module", None) for name in _MODULES)
    return isinstance(x, tuple(kind for kind in loaded if isinstance(kind, type)))


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
) -> Observed:
    """Trace a call, and evaluate what it traces to in the observer's sight.

    Inner jits, remats and custom rules are opened, and loops and branches run as they come. The
    state of flax objects among the arguments is a result: the objects stay as they were.

    Args:
        target: A function, jitted or not, or a module.
        args: What it is called with.
        kwargs: By name.
        observer: Sees each operation.

    Raises:
        TypeError: If the target is no function of arrays.
    """
    if not callable(target):
        msg = f"{type(target).__name__} cannot be called: give a function or a module"
        raise TypeError(msg)
    try:
        program, arrays = traced(target, args, dict(kwargs))
    except UntraceableError as error:
        raise TypeError(str(error)) from error.__cause__
    return Run(program, observer).observed(arrays)


class JaxTarget(Target):
    """Reach the numbers of JAX's arrays."""

    takes, shows = staticmethod(takes), staticmethod(observe)

    def is_array(self, x: Any) -> bool:
        """Tell whether something is an array of numbers."""
        kind = x.dtype if isinstance(x, jax.Array | np.ndarray) else object
        return any(jnp.issubdtype(kind, each) for each in (jnp.number, jnp.bool_))

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Bring an array to the host; what NumPy has no dtype for in float32."""
        numbers = np.asarray(x) if self.is_array(x) else np.zeros(0)  # a key has none
        return numbers if numbers.dtype.kind in "biufc" else numbers.astype(np.float32)

    def like(self, numbers: np.ndarray[Any, Any], x: Any) -> Any:
        """Make an array of the same dtype, on the host, where nothing has to be compiled."""
        with np.errstate(all="ignore"):
            return jnp.asarray(numbers.astype(x.dtype))

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast an array, on the host as well."""
        with np.errstate(all="ignore"):
            return jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))


def traced(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    cast: Callable[[Any], Any] = lambda x: x,
) -> tuple[Program, list[Any]]:  # fmt: skip
    """Trace a call, and give what its arrays are.

    Args:
        target: A function or a module.
        args: What it is called with.
        kwargs: By name.
        cast: What is done with each array first.
    """
    fn: Callable[..., Any] = target
    if _is_module(target):  # its weights come in as an argument's do

        def fn(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        args = (target, *args)
    with under_way():
        static = signature.static_arguments(fn, args, kwargs)
    plain = any(type(x).__module__.startswith("equinox") for x in (target, *args))
    form = form_of(fn, args, kwargs, static, plain=plain)
    arrays = [cast(x) for x in form.flat.arrays]
    settings = Settings(names=positional(fn), plain=plain, forgets=True)
    return form.program(settings, arrays), arrays


class _Equation(Op):
    """Tell of one equation, in one round of the loops around it."""

    def __init__(
        self, run: "Run", node: Node, ins: list[Any], outs: list[Any], number: int
    ) -> None:
        self.number, self._node, self._ins, self._outs = number, node, ins, outs
        self._whole: Grouped | None = run.whole.get(node.index)
        owner = None if self._whole is None else self._whole.forward
        place = node if owner is None else owner.nodes[0]
        self.kernel = names.primitive(node.name)
        self.name = self.kernel if owner is None else owner.name
        self.raw = node.name
        layers = run.program.layers
        self.layer: str | None = layers.of(place)
        self.call = layers.call(place, self.layer)
        self.phase: Phase = layers.phase(node) if owner is None else "backward"
        self.forward = None if owner is None else run.numbers.get(owner.nodes[-1].index)
        if self.phase == "backward" and self.layer is None:
            self.layer = layers.of(node)

    @property
    def source(self) -> Source | None:
        """Give the user's line; of a gradient, the forward line."""
        if self._whole is not None:
            return self._whole.source
        return source(self._node.chain, self._node.eqn)

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays it works on, by name; numbers in the code are among them."""
        count = len(self._ins)
        return [
            (names.operand(self.raw, i, count), x if isinstance(x, jax.Array) else jnp.asarray(x))
            for i, x in enumerate(self._ins)
            if checkable(self._node.eqn.invars[i].aval)
        ]

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return list(self._outs)

    @property
    def params(self) -> Mapping[str, Any]:
        """Give its parameters."""
        return dict(self._node.eqn.params)

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Bind its primitive once more."""
        eqn, ins, count = self._node.eqn, list(self._ins), len(self._ins)
        for i in range(count):
            given = (inputs or {}).get(names.operand(self.raw, i, count))
            if given is not None and checkable(eqn.invars[i].aval):
                ins[i] = given
        try:
            return rebind(eqn, ins) if dtype is None else rebind_in(eqn, ins, dtype)
        except Exception as error:
            msg = f"{self.raw} cannot be run in {dtype or 'this form'}: {reason(error)}"
            raise RerunError(msg) from error


def as_typed(var: Any, x: Any) -> Any:
    """Give a value in the dtype that the program has it in: an observer may have changed that."""
    if checkable(var.aval) and getattr(x, "dtype", var.aval.dtype) != var.aval.dtype:
        with np.errstate(all="ignore"):  # on the host, where nothing has to be compiled
            return jnp.asarray(np.asarray(x).astype(var.aval.dtype))
    return x


class Run:
    """Evaluate one program.

    Attributes:
        turn: The round of each loop that runs, outermost first.
    """

    def __init__(self, program: Program, observer: Observer) -> None:
        self.program, self.observer = program, observer
        self.turn: tuple[int, ...] = ()
        self.nodes = {(*node.path, node.order[-1]): node for node in program.graph.nodes}
        self.notes: list[str] = []
        self.whole: dict[int, Grouped] = {}
        # The last number that each equation ran as.
        self.numbers: dict[int, int] = {}
        self._next = itertools.count()
        try:
            self.whole = program.operations().of
        except Exception as error:  # noqa: BLE001  lines are then the equations' own
            why = UnwatchableError(reason(error))
            self.notes.append(GRADIENTS_UNLINKED(why=why))

    def observed(self, arrays: list[Any]) -> Observed:
        """Evaluate the program; what it raises is told."""
        closed = self.program.closed
        try:
            outs = self.run(closed.jaxpr, closed.consts, arrays, ())
        except Exception as error:  # noqa: BLE001  the program's own, or the observer's
            return Observed(None, error, self.notes)
        out = self.program.joined(outs)
        return Observed(out[0] if self.program.stateful else out, None, self.notes)

    def bind(self, eqn: Any, ins: list[Any], node: Node | None) -> list[Any]:
        """Run one equation that is not opened."""
        del node  # nothing here depends on where it is
        with eqn.ctx.manager:
            return rebind(eqn, ins)

    def run(self, jaxpr: Any, consts: Iterable[Any], args: Iterable[Any], path: Path) -> list[Any]:
        """Evaluate one jaxpr."""
        env: dict[Any, Any] = {}

        def write(variables: Iterable[Any], values: Iterable[Any]) -> None:
            for var, x in zip(variables, values, strict=True):
                if not dropped(var):
                    env[var] = x
                    self.took(path, var, x)

        def read(var: Any) -> Any:
            return var.val if isinstance(var, jc.Literal) else env[var]

        write(jaxpr.constvars, consts)
        write(jaxpr.invars, args)
        for i, eqn in enumerate(jaxpr.eqns):
            if silent(eqn):
                self._note(EFFECT_NOT_RUN(name=eqn.primitive.name))
                continue
            write(eqn.outvars, self.equation(eqn, [read(var) for var in eqn.invars], (*path, i)))
        return [read(var) for var in jaxpr.outvars]

    def took(self, path: Path, var: Any, x: Any) -> None:
        """Be told what a variable of the jaxpr at a path holds."""

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def equation(self, eqn: Any, ins: list[Any], path: Path) -> list[Any]:
        """Evaluate one equation, with what is inside of it."""
        inner = [] if path in self.program.graph.shut else bodies(eqn)
        if inner and inner[0].kind != "shard_map":
            return self.inside(eqn, inner, ins, path)
        node = self.nodes.get(path)
        outs = self.bind(eqn, ins, node)
        if node is None:  # shard_map: what is inside is not opened
            self._note(INSIDE_NOT_SEEN(name=eqn.primitive.name))
            return outs
        if hides(eqn):
            self._note(INSIDE_NOT_SEEN(name=eqn.primitive.name))
        number = self.numbers[node.index] = next(self._next)
        changed = self.observer(_Equation(self, node, ins, outs, number))
        return outs if changed is None else list(changed)

    def inside(self, eqn: Any, inner: list[Body], ins: list[Any], path: Path) -> list[Any]:
        """Evaluate what is inside of a call, a loop or a branch."""
        kind = inner[0].kind
        if kind == "call":
            return self.run(inner[0].jaxpr, inner[0].consts, ins, path)
        if kind == "cond":
            body = inner[min(max(int(ins[0]), 0), len(inner) - 1)]
            return self.run(body.jaxpr, body.consts, ins[1:], body.path(path))
        loop = self._scan if kind == "scan" else self._while
        with but(self, turn=self.turn):
            return loop(eqn, inner[0], ins, path)

    def _scan(self, eqn: Any, body: Body, ins: list[Any], path: Path) -> list[Any]:
        last = body.fixed + body.carried
        carry, rounds, found = ins[body.fixed : last], rounds_of(eqn) or 0, []
        outer = self.turn
        for at in reversed(range(rounds)) if backwards(eqn) else range(rounds):
            self.turn = *outer, at
            args = [*ins[: body.fixed], *carry, *(x[at] for x in ins[last:])]
            outs = self.run(body.jaxpr, body.consts, args, path)
            carry = outs[: body.carried]
            found.append(outs[body.carried :])
        if not rounds:
            return rebind(eqn, ins)
        stacked = [jnp.stack(xs) for xs in zip(*found[:: -1 if backwards(eqn) else 1], strict=True)]
        return [*carry, *stacked]

    def _while(self, eqn: Any, body: Body, ins: list[Any], path: Path) -> list[Any]:
        of_cond, of_body = body.skip, body.skip + body.fixed
        cond, values = eqn.params["cond_jaxpr"], ins[of_body:]
        outer, at = self.turn, 0
        while True:
            given = [
                as_typed(var, x)
                for var, x in zip(cond.jaxpr.invars, [*ins[:of_cond], *values], strict=True)
            ]
            going = jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *given)[0]
            if not jnp.any(going):
                return values
            self.turn, at = (*outer, at), at + 1
            outs = self.run(body.jaxpr, body.consts, [*ins[of_cond:of_body], *values], path)
            values = going_on(going, outs, values) if jnp.ndim(going) else outs
