"""What a hunt needs of JAX: the traced program with a distance as its result, and its slope."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from anynan._apps.stress.edges import Edge, Margin, Site, edges
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan._trace.op import Observed, Observer, Op
from anynan.jax.observe import JaxTarget, Run, traced
from anynan.jax.program.evaluator import jit_once
from anynan.jax.program.objects import fresh, without_writes
from anynan.jax.program.program import Program
from anynan.jax.program.trace import UntraceableError
from anynan.jax.tracking import track


class JaxLab(JaxTarget, Lab):
    """Run a function of JAX's on changed inputs.

    What changes are the arguments that are arrays; trees, as weights and optimizer states are,
    stay as they are. Where every argument is a tree, all of them change.
    """

    door = staticmethod(track)
    imports = ("import jax.numpy as jnp",)

    def __init__(self, target: Any, args: tuple[Any, ...], *more: Any) -> None:
        names = positional(target)
        names = tuple(names[i] if i < len(names) else f"args[{i}]" for i in range(len(args)))
        data = [i for i, x in enumerate(args) if self.changes(x)] or list(range(len(args)))

        def filled(*given: Any) -> Any:
            whole = list(args)
            for i, x in zip(data, given, strict=True):
                whole[i] = x
            with without_writes():
                call, *whole = fresh((target, *whole))
                return call(*whole)

        filled.__name__ = getattr(target, "__name__", type(target).__name__)
        super().__init__(filled, tuple(args[i] for i in data), *more)
        self.parameters = tuple(names[i] for i in data)
        self._programs: dict[Any, Program] = {}
        self._slopes: dict[Any, Any] = {}
        self._sites: dict[Any, list[Site]] = {}

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        return f'jnp.asarray({{}}, dtype="{x.dtype}")'

    def observe(self, program: Callable[..., Any], xs: Sequence[Any], watch: Observer) -> Observed:
        """Evaluate the traced program once."""
        try:
            return Run(self._traced(program, xs), watch).observed(list(xs))
        except (UntraceableError, TypeError, ValueError) as error:  # the code refuses it
            return Observed(error=error.__cause__ or error)

    def _traced(self, program: Callable[..., Any], xs: Sequence[Any]) -> Program:
        form = program, *_form(xs)
        if form not in self._programs:
            self._programs[form], _ = traced(program, tuple(xs), {})
        return self._programs[form]

    def sloped(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Take the gradient of what a program gives."""

        def sloped(*xs: Any) -> Any:
            places = _fractions(xs)

            def of(given: list[Any]) -> Any:
                new = dict(zip(places, given, strict=True))
                return program(*(new.get(i, x) for i, x in enumerate(xs)))

            out, back = jax.vjp(of, [xs[i] for i in places])
            return out, back(tree_util.tree_map(_one, out))

        sloped.__name__ = getattr(program, "__name__", "target")
        return sloped

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Differentiate the smallest distance from an edge, of all rounds of loops.

        One program is compiled for all edges; what it computes is looked at one by one only
        where something is bad.
        """
        site, form = watch.wanted, (program, *_form(xs))
        places = _fractions(xs)
        found: list[Array | None] = [None for _ in xs]
        if form not in self._sites:
            self.observe(program, xs, watch)
            watch.kept.clear()
            self._sites[form] = [x for x in watch.margins if x.edge.has_slope]
        if not places or site not in self._sites[form]:
            return found
        for sites in (self._sites[form], [site]):  # alone, where another's slope is no number
            key = *sites, form
            if key not in self._slopes:
                self._slopes[key] = jit_once(_sloping(self._traced(program, xs), sites, places))
            number, given = sites.index(site), [xs[i] for i in places]
            try:
                distance, good, grads = self._slopes[key](number, given, xs)
            except jax.errors.ConcretizationTypeError:  # how often a loop runs depends on numbers
                return found
            hosts = [self.host(grad) for grad in grads]
            if all(np.isfinite(x).all() for x in hosts):
                break
        for i, x in zip(places, hosts, strict=True):
            found[i] = x
        if good:
            watch.margins[site] = Margin(site, float(distance), 0.0)
        else:
            self.observe(program, xs, watch)
            watch.kept.clear()
        return found

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put nothing back: a function of JAX's changes nothing."""
        del program
        return nullcontext()


lab_of = JaxLab.of


def _form(xs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, str(x.dtype)) for x in xs)


def _fractions(xs: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.floating)]


def _one(x: Any) -> Any:
    kind = jnp.result_type(x)
    inexact = jnp.issubdtype(kind, jnp.inexact)
    return jnp.ones(jnp.shape(x), kind) if inexact else np.zeros(jnp.shape(x), jax.dtypes.float0)


def _sloping(whole: Program, sites: list[Site], places: list[int]) -> Callable[..., Any]:
    """Make a function of the inputs that gives one distance from an edge, and its slope."""

    def distances(given: list[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
        arrays, kept = list(xs), {site: list[Any]() for site in sites}
        made: list[Any] = []
        for i, x in zip(places, given, strict=True):
            arrays[i] = x

        def keep(op: Op) -> None:
            for edge in edges(op):
                site = Site(op.name, edge, op.layer, op.source)
                if site in kept:
                    kept[site].append(_distance(edge, edge.array(op)))
                    made.extend(op.outputs)

        observed = Run(whole, keep).observed(arrays)
        if observed.error is not None:
            raise observed.error
        made += tree_util.tree_leaves(observed.value)
        return jnp.stack([jnp.min(jnp.stack(found)) for found in kept.values()]), _finite(made)

    def slope(number: Any, given: list[Any], xs: Sequence[Any]) -> tuple[Any, Any, Any]:
        found, back, good = jax.vjp(lambda x: distances(x, xs), given, has_aux=True)
        return found[number], good, back(jax.nn.one_hot(number, len(sites), dtype=found.dtype))[0]

    return slope


def _finite(xs: Sequence[Any]) -> Any:
    fractions = [x for x in xs if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.array([jnp.isfinite(x).all() for x in fractions] or [True]).all()


def _distance(edge: Edge, x: Any) -> Any:
    distances = jnp.where(jnp.isfinite(x), edge.distances(x), jnp.inf)
    return jnp.min(distances).astype(jnp.float32)
