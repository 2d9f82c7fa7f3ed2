"""What a hunt needs of JAX: the traced program with a distance as its result, and its slope."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._apps.stress.edges import Edge, Site, edges
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan._trace.op import Observed, Observer, Op
from anynan.jax.observe import Run, takes, traced
from anynan.jax.program.program import Program
from anynan.jax.program.trace import UntraceableError
from anynan.jax.tracking import track


def lab_of(target: Any, example: tuple[Any, ...]) -> Lab | None:
    """Give the lab of a function or a module; None for what is not JAX's."""
    return JaxLab(target, example) if callable(target) and takes(target, example, {}) else None


class JaxLab(Lab):
    """Run a function of JAX's on changed inputs.

    What changes are the arguments that are arrays; trees, as weights and optimizer states are,
    stay as they are. Where every argument is a tree, all of them change.
    """

    door = staticmethod(track)
    imports = ("import jax.numpy as jnp",)

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        names = positional(target)
        names = tuple(names[i] if i < len(names) else f"args[{i}]" for i in range(len(args)))
        data = [i for i, x in enumerate(args) if self.is_array(x)] or list(range(len(args)))

        def filled(*given: Any) -> Any:
            whole = list(args)
            for i, x in zip(data, given, strict=True):
                whole[i] = x
            return target(*whole)

        filled.__name__ = getattr(target, "__name__", type(target).__name__)
        self.target, self.args = filled, tuple(args[i] for i in data)
        self.parameters = tuple(names[i] for i in data)
        self._programs: dict[Any, Program] = {}
        self._slopes: dict[Any, Any] = {}

    def is_array(self, x: Any) -> bool:
        """Tell what an array is that a hunt may change."""
        if not isinstance(x, jax.Array | np.ndarray):
            return False
        return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool

    def host(self, x: Any) -> Array:
        """Bring an array to the host; what NumPy has no dtype for in float32."""
        plain = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
        numbers = np.asarray(x) if plain else np.zeros(0)  # a key has none
        return numbers if numbers.dtype.kind in "biufc" else numbers.astype(np.float32)

    def like(self, new: Array, x: Any) -> Any:
        """Make an array of the same dtype."""
        return jnp.asarray(new, dtype=x.dtype)

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
        form = tuple((x.shape, str(x.dtype)) for x in xs)
        if form not in self._programs:
            self._programs[form], _ = traced(program, tuple(xs), {})
        return self._programs[form]

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Run it, and differentiate the smallest distance from an edge, of all rounds of loops."""
        self.observe(program, xs, watch)
        watch.kept.clear()
        places = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.floating)]
        found: list[Array | None] = [None for _ in xs]
        if not places or watch.wanted is None:
            return found
        key = watch.wanted, tuple((x.shape, str(x.dtype)) for x in xs)
        if key not in self._slopes:
            self._slopes[key] = jax.jit(
                jax.grad(_sloping(self._traced(program, xs), watch.wanted, places))
            )
        try:
            grads = self._slopes[key]([xs[i] for i in places], list(xs))
        except jax.errors.ConcretizationTypeError:  # how often a loop runs depends on numbers
            return found
        for i, grad in zip(places, grads, strict=True):
            found[i] = self.host(grad)
        return found

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put nothing back: a function of JAX's changes nothing."""
        del program
        return nullcontext()


def _sloping(whole: Program, site: Site, places: list[int]) -> Callable[..., Any]:
    """Make a function of the inputs that gives the smallest distance from an edge."""

    def distance(given: list[Any], xs: list[Any]) -> Any:
        arrays, kept = list(xs), []
        for i, x in zip(places, given, strict=True):
            arrays[i] = x

        def keep(op: Op) -> None:
            if op.name != site.operation:
                return
            found = (edge for edge in edges(op) if edge == site.edge)
            if any(Site(op.name, edge, op.layer, op.source) == site for edge in found):
                kept.append(site.edge.array(op))

        observed = Run(whole, keep).observed(arrays)
        if observed.error is not None:
            raise observed.error
        return jnp.min(jnp.stack([_distance(site.edge, x) for x in kept]))

    return distance


def _distance(edge: Edge, x: Any) -> Any:
    distances = jnp.where(jnp.isfinite(x), edge.distances(x), jnp.inf)
    return jnp.min(distances).astype(jnp.float32)
