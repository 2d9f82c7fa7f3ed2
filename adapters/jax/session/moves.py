"""How far an update moves the weights, from a sample of each, in one step of so many."""

from typing import Any

import jax
import jax.numpy as jnp

from anynan._readings.moves import due, moved, stride
from anynan._readings.step import Step
from anynan.jax.program.program import Program
from anynan.jax.read import probes


class Sample:
    """Keep samples of the weights that a step takes, and then how far it moved them.

    Args:
        program: What will run.
        places: The results that are new weights, with the argument that each comes in as.
        arrays: Its arguments; they may be donated.
    """

    def __init__(self, program: Program, places: list[tuple[int, int]], arrays: list[Any]) -> None:
        self._places, old = places, [arrays[source] for _, source in places]
        owners = [program.owner(program.leaves[source]) for _, source in places]
        self._weights = [(owner, x.shape) for owner, x in zip(owners, old, strict=True)]
        self._held: Any = _samples(old)

    def after(self, outs: list[Any]) -> None:
        """Compare them with what came out."""
        self._held = _norms(self._held, [outs[i] for i, _ in self._places])

    def write(self, rows: Step) -> None:
        """Bring it to the host, and write it into the step."""
        moved(rows, self._weights, probes.on_host(self._held).tolist())


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
