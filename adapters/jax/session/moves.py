"""How far an update moves the weights, from a sample of each, in one step of so many."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from anynan._readings.moves import due, moved, stride
from anynan._readings.step import Step
from anynan.jax.program.program import Program
from anynan.jax.read import probes


@dataclass(frozen=True, slots=True)
class Moved:
    """Hold the norms of an update, on the device.

    Attributes:
        weights: Layer path and shape of each weight.
        norms: Of the update and of the weight before it, of each.
    """

    weights: list[tuple[str, tuple[int, ...]]]
    norms: Any

    def write(self, rows: Step) -> None:
        """Bring them to the host, and write them into the step's rows."""
        told = probes.on_host(self.norms).tolist()
        moved(rows, [(*weight, *pair) for weight, pair in zip(self.weights, told, strict=True)])


class Sample:
    """Keep samples of the weights that a step takes, until it has given new ones.

    Args:
        program: What will run.
        places: The results that are new weights, with the argument that each comes in as.
        arrays: Its arguments; they may be donated.
    """

    def __init__(self, program: Program, places: list[tuple[int, int]], arrays: list[Any]) -> None:
        self._program, self._places = program, places
        self._old = _samples([arrays[source] for _, source in self._places])

    def after(self, outs: list[Any]) -> Moved:
        """Compare them with what came out."""
        leaves, new = self._program.leaves, [outs[i] for i, _ in self._places]
        owners = [self._program.owner(leaves[source]) for _, source in self._places]
        weights = [(owner, x.shape) for owner, x in zip(owners, new, strict=True)]
        return Moved(weights, _norms(self._old, new))


def sample(every: int | None, step: int, program: Program, arrays: list[Any]) -> Sample | None:
    """Keep samples if it is the step's turn, and it returns new weights."""
    places = weights_of(program) if due(every, step) else []
    return Sample(program, places, arrays) if places else None


def weights_of(program: Program) -> list[tuple[int, int]]:
    """List the results that are new weights, with the argument that each comes in as."""
    return [
        (i, result.source)
        for i, result in enumerate(program.results)
        if result.state
        and result.source is not None
        and program.leaves[result.source].role == "parameter"
        and probes.checkable(program.closed.out_avals[i])
        # What is handed on as it came is not updated.
        and program.graph.values[program.graph.results[i]].argument is None
    ]


@jax.jit
def _samples(arrays: list[Any]) -> list[Any]:
    return [_sample(x) for x in arrays]


@jax.jit
def _norms(old: list[Any], new: list[Any]) -> Any:
    pairs = []
    for before, x in zip(old, new, strict=True):
        kind = jnp.promote_types(before.dtype, jnp.float32)
        start, end = before.astype(kind), _sample(x).astype(kind)
        pairs.append(jnp.stack([jnp.linalg.norm(end - start), jnp.linalg.norm(start)]))
    return jnp.stack(pairs)


def _sample(x: Any) -> Any:
    return jnp.reshape(x, -1)[:: stride(x.shape)]
