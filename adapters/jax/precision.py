"""Run a traced program in a narrow dtype, with some layers kept in float32."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from anynan._files.formats import FORMATS
from anynan._trace.op import Observed, Observer
from anynan.jax.graphs.graph import Node
from anynan.jax.graphs.layers import inside
from anynan.jax.graphs.versions import rebind_in
from anynan.jax.messages import CLOSED_OVER
from anynan.jax.observe import Run, as_typed, observe, takes, traced

_CODE = """\
# Compute in float32 in the modules of these layers: dtype=jnp.float32 in flax and Keras, or
# x.astype(jnp.float32) before the call and .astype(jnp.{dtype}) after it.
kept = {names}"""


def narrowed_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Narrowed | None":
    """Give what runs a target of this framework in narrow dtypes; None for all else."""
    return Narrowed(target, args, kwargs) if takes(target, args, kwargs) else None


class Narrowed:
    """Run one target in narrow dtypes.

    Args:
        target: A function or a module.
        args: What it is called with.
        kwargs: By name.
    """

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._call = target, args, dict(kwargs)
        self._program, self._arrays = traced(*self._call)

    def observe(self, observer: Observer) -> Observed:
        """Run as it is, and show each operation."""
        return observe(*self._call, observer)

    def host(self, x: Any) -> NDArray[Any] | None:
        """Give an array's numbers to NumPy; None if it has none with a fraction."""
        kind = getattr(x, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.inexact) or not hasattr(x, "shape"):
            return None
        found = np.asarray(x)
        return found if found.dtype.kind in "fc" else found.astype(np.float32)

    def rounded(self, x: Any, dtype: str) -> Any:
        """Round an array to a dtype, and give it in its own again."""
        there = np.asarray(x)  # on the host, where nothing has to be compiled
        if there.dtype.kind == "c":
            return x
        with np.errstate(all="ignore"):
            return jnp.asarray(there.astype(jnp.dtype(dtype)).astype(there.dtype))

    def bounded(self, x: Any) -> Any:
        """Put the largest number in the place of Inf, and 0 in that of NaN."""
        top = FORMATS[x.dtype.name].max
        there = np.asarray(x).astype(np.float64)
        return jnp.asarray(np.nan_to_num(there, posinf=top, neginf=-top).astype(x.dtype))

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List the arguments; weights with their layers."""
        pairs = zip(self._program.leaves, self._arrays, strict=True)
        return [
            (leaf.name, None if leaf.role == "input" else self._program.owner(leaf), x)
            for leaf, x in pairs
            if _narrows(x)
        ]

    def sizes(self) -> dict[str, int]:
        """Give the layers, with the elements of the weights in them."""
        program = self._program
        owned = [
            (program.owner(leaf), x.size)
            for leaf, x in zip(program.leaves, self._arrays, strict=True)
            if leaf.role == "parameter" and _narrows(x)
        ]
        return {
            layer: sum(size for owner, size in owned if inside(owner, layer))
            for layer in program.layers.names()
        }

    def tied(self, layer: str) -> list[str]:
        """List none: what several layers use is cast where it is used."""
        del layer
        return []

    def run(self, observer: Observer, dtype: str, how: str, keep: Collection[str]) -> Observed:
        """Run in a dtype, with some layers kept in float32.

        Raises:
            ValueError: If it is to run under autocast: JAX has none.
        """
        if how == "autocast":
            msg = "JAX has no autocast: choose how='cast' or how='round'"
            raise ValueError(msg)
        narrow = jnp.dtype(dtype)

        def cast(x: Any) -> Any:
            if not _narrows(x):
                return x
            made = jnp.asarray(x).astype(narrow)
            return made if how == "cast" else made.astype(x.dtype)

        program, arrays = traced(*self._call, cast)
        run = _Kept(program, observer, keep if how == "cast" else ())
        closed = [x for x in program.closed.consts if _narrows(x) and np.size(x) > 1]
        if closed and how == "cast":
            run.notes.append(CLOSED_OVER(count=len(closed)))
        return run.observed(arrays)

    def code(self, dtype: str, how: str, keep: Collection[str], scale: float) -> str:
        """Say in code which layers to keep, and how to scale the loss."""
        del how  # there is but one way
        text = _CODE.format(dtype=dtype, names=list(keep)) if keep else ""
        return text + (f"\nloss_scale = {scale:g}  # divide the gradients by it" * (scale != 1))


class _Kept(Run):
    """Evaluate a program with some layers in float32; what comes out of them is cast back."""

    def __init__(self, program: Any, observer: Observer, keep: Collection[str]) -> None:
        super().__init__(program, observer)
        self._is_kept: Callable[[str | None], bool] = lambda layer: any(
            inside(layer, kept) for kept in keep
        )

    def bind(self, eqn: Any, ins: list[Any], node: Node | None) -> list[Any]:
        """Run one equation in the dtype of its layer."""
        whole = None if node is None else self.whole.get(node.index)
        place = node if whole is None or whole.forward is None else whole.forward.nodes[0]
        if place is None or not self._is_kept(self.program.layers.of(place)):
            typed = [as_typed(var, x) for var, x in zip(eqn.invars, ins, strict=True)]
            return super().bind(eqn, typed, node)
        with eqn.ctx.manager:
            return rebind_in(eqn, ins, "float32")


def _narrows(x: Any) -> bool:
    kind = getattr(x, "dtype", None)
    return isinstance(x, jax.Array | np.ndarray) and kind in (np.float32, np.float64)
