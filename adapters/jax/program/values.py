"""Evaluate a jaxpr again and take chosen values, those inside a scan of every turn.

Discrete operations can be held to a choice on the way.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from anynan.jax.graphs.bodies import backwards, bodies, rounds_of
from anynan.jax.graphs.choices import CHOOSING
from anynan.jax.graphs.versions import dropped, rebind
from anynan.jax.read.readings import Path

ValueKey = tuple[Path, Any]


class Values:
    """Take values of one jaxpr.

    Attributes:
        places: Path and variable of each value that is wanted, and its number.
        choosers: Path of each discrete operation whose choice is wanted, and its number.
    """

    def __init__(
        self, jaxpr: Any, places: Mapping[ValueKey, int], choosers: Mapping[Path, int]
    ) -> None:
        self.jaxpr, self.places, self.choosers = jaxpr, places, choosers
        points = [*(path for path, _ in places), *(path[:-1] for path in choosers)]
        self._inside = {path[:i] for path in points for i in range(len(path) + 1)}

    def __call__(
        self, consts: Any, args: Any, held: Mapping[int, Any]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Evaluate.

        Args:
            consts: Of the jaxpr.
            args: Of the jaxpr.
            held: What discrete operations shall choose, by number; of every turn.

        Returns:
            The values, and what the discrete operations would have chosen, by number.
        """
        _, found, chosen = self._walk(self.jaxpr, consts, args, (), held)
        return found, chosen

    def _walk(
        self, jaxpr: Any, consts: Any, args: Any, path: Path, held: Mapping[int, Any]
    ) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
        env: dict[Any, Any] = {}
        found: dict[int, Any] = {}
        chosen: dict[int, Any] = {}

        def write(var: Any, x: Any) -> None:
            env[var] = x
            if (path, var) in self.places:
                found[self.places[path, var]] = x

        def read(var: Any) -> Any:
            return var.val if hasattr(var, "val") else env[var]

        for var, x in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True):
            write(var, x)
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [read(var) for var in eqn.invars]
            point = (*path, i)
            inner = bodies(eqn)
            kind = inner[0].kind if inner else None
            if point in self.choosers:
                number = self.choosers[point]
                outs, chosen[number] = _chosen(eqn, operands, held.get(number))
            elif kind == "call":
                body = inner[0]
                outs, more, picks = self._walk(body.jaxpr, body.consts, operands, point, held)
                found.update(more)
                chosen.update(picks)
            elif kind == "scan" and point in self._inside:
                outs, more, picks = self._scan(eqn, inner[0], operands, point, held)
                found.update(more)
                chosen.update(picks)
            else:
                outs = rebind(eqn, operands)
            for var, x in zip(eqn.outvars, outs, strict=True):
                if not dropped(var):
                    write(var, x)
        return [read(var) for var in jaxpr.outvars], found, chosen

    def _scan(
        self, eqn: Any, body: Any, ins: list[Any], path: Path, held: Mapping[int, Any]
    ) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
        first, last = body.fixed, body.fixed + body.carried
        mine = {
            number: held[number]
            for point, number in self.choosers.items()
            if point[: len(path)] == path and number in held
        }

        def step(carry: Any, x: Any) -> Any:
            xs, kept = x
            args = [*ins[:first], *carry, *xs]
            outs, found, chosen = self._walk(body.jaxpr, body.consts, args, path, kept)
            return outs[: body.carried], (outs[body.carried :], found, chosen)

        carry, (ys, found, chosen) = lax.scan(
            step, ins[first:last], (ins[last:], mine),
            length=rounds_of(eqn), reverse=backwards(eqn),
        )  # fmt: skip
        return [*carry, *ys], found, chosen


def _chosen(eqn: Any, operands: list[Any], held: Any) -> tuple[list[Any], Any]:
    """Run a discrete operation: its results with what it is held to, and its own choice."""
    name = eqn.primitive.name
    if name == "sort":
        dimension = eqn.params["dimension"]
        order = lax.broadcasted_iota(jnp.int32, operands[0].shape, dimension)
        *outs, own = rebind(eqn, [*operands, order])
        if held is not None:
            outs = [jnp.take_along_axis(x, held, dimension) for x in operands]
        return outs, own
    outs = rebind(eqn, operands)
    at = CHOOSING[name][1] if name in CHOOSING else 0
    own = outs[at]
    if held is not None:
        outs[at] = held.astype(own.dtype)
        if name == "top_k":
            outs[0] = jnp.take_along_axis(operands[0], held, eqn.params.get("axis", -1))
    return outs, own
