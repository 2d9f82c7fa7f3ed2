"""Run a traced program in a narrow dtype, with some layers kept in float32."""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._apps.precision.watch import How, Narrow, refuse
from anynan._trace.op import Observed, Observer
from anynan.jax.graphs.graph import Node
from anynan.jax.graphs.layers import inside
from anynan.jax.graphs.versions import rebind_in
from anynan.jax.messages import CLOSED_OVER
from anynan.jax.observe import JaxTarget, Run, as_typed, traced

_CODE = """\
kept = {names}

def wide(call):  # computes in float32 what it is wrapped around: wide(layer)(x)
    def cast(tree, dtype):
        return jax.tree.map(
            lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating)
            else x, tree)
    return lambda *args, **kwargs: cast(
        call(*cast(args, jnp.float32), **cast(kwargs, jnp.float32)), jnp.{dtype})
"""
_LINEN = """
def keep(call, args, kwargs, context):
    inside = ".".join(context.module.path) in kept
    return (wide(call) if inside else call)(*args, **kwargs)

# with flax.linen.intercept_methods(keep): call the model
"""


class Narrowed(JaxTarget, Narrow):
    """Run one target in narrow dtypes."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        self._program, self._arrays = traced(*self.call)

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

    def run(
        self, observer: Observer, dtype: str, how: str, keep: Collection[str], *, own: bool
    ) -> Observed:
        """Run in a dtype, with some layers kept in float32."""
        refuse(how, "JAX")
        program, arrays = traced(*self.call, lambda x: self.cast(x, dtype) if _narrows(x) else x)
        run = Kept(program, observer, keep, None if own else jnp.dtype(dtype))
        closed = [x for x in program.closed.consts if _narrows(x) and np.size(x) > 1]
        if closed:
            run.notes.append(CLOSED_OVER(count=len(closed)))
        return run.observed(arrays)

    def code(self, dtype: str, how: How, keep: Collection[str], scale: float) -> str:
        """Say in code which layers to keep, and how to scale the loss."""
        text = _CODE.format(dtype=dtype, names=list(keep)) if keep else ""
        linen: Any = getattr(sys.modules.get("flax.linen"), "Module", ())
        if keep and isinstance(getattr(self.call[0], "__self__", None), linen):
            text += _LINEN
        return text + super().code(dtype, how, {}, scale)


narrowed_of = Narrowed.of


class Kept(Run):
    """Evaluate a program with some layers in float32; what comes out of them is cast back.

    Args:
        program: The program, traced with arrays of the dtype.
        observer: Sees each operation.
        keep: The layers.
        narrow: The dtype of which no kernel is to run: what it would make is computed in float32
            and stored in it. None to run the kernels.
    """

    def __init__(
        self, program: Any, observer: Observer, keep: Collection[str], narrow: Any
    ) -> None:
        super().__init__(program, observer)
        self._narrow = narrow
        self._is_kept: Callable[[str | None], bool] = lambda layer: any(
            inside(layer, kept) for kept in keep
        )

    def bind(self, eqn: Any, ins: list[Any], node: Node | None) -> list[Any]:
        """Run one equation in the dtype of its layer."""
        whole = None if node is None else self.whole.get(node.index)
        place = node if whole is None or whole.forward is None else whole.forward.nodes[0]
        if place is None or not self._is_kept(self.program.layers.of(place)):
            ins = [as_typed(var, x) for var, x in zip(eqn.invars, ins, strict=True)]
            if not any(_dtype(var) == self._narrow for var in (*eqn.invars, *eqn.outvars)):
                return super().bind(eqn, ins, node)
            with suppress(Exception):  # some primitives know no float32
                outs = self._wide(eqn, ins)
                return [as_typed(var, x) for var, x in zip(eqn.outvars, outs, strict=True)]
            return super().bind(eqn, ins, node)
        return self._wide(eqn, ins)

    def _wide(self, eqn: Any, ins: list[Any]) -> list[Any]:
        with eqn.ctx.manager:
            return rebind_in(eqn, ins, "float32")


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", None)


def _narrows(x: Any) -> bool:
    kind = getattr(x, "dtype", None)
    return isinstance(x, jax.Array | np.ndarray) and kind in (np.float32, np.float64)
