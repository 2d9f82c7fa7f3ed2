"""What a hunt needs of MLX: to run a target, and the slope of a distance."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from anynan._apps.stress.edges import Edge
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan.mlx.layers import code_of
from anynan.mlx.observe import MlxTarget, sight
from anynan.mlx.reading import is_float
from anynan.mlx.tracking import track


class MlxLab(MlxTarget, Lab):
    """Run a model, a training step or a function on changed inputs."""

    door = staticmethod(track)
    imports = ("import mlx.core as mx",)

    def __init__(self, target: Any, *given: Any) -> None:
        super().__init__(target, *given)
        if isinstance(target, nn.Module):
            self.parameters = positional(type(target).__call__)[1:]
        else:
            self.parameters = positional(code_of(target))
        self.trains = "backward" in self.phases()

    def changes(self, x: Any) -> bool:
        """Tell whether something is an array that a hunt may change: of real numbers."""
        return self.is_array(x) and x.dtype != mx.complex64

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        name = str(x.dtype).rpartition(".")[2]
        return f"mx.array({{}}).astype(mx.{name})"

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what runs change."""
        return _kept(program)

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Run a program, and differentiate its smallest distance from an edge to its inputs."""
        places, site = [i for i, x in enumerate(xs) if is_float(x)], watch.wanted

        def distance(*new: Any) -> Any:
            given = dict(zip(places, new, strict=True))
            self.observe(program, [given.get(i, x) for i, x in enumerate(xs)], watch)
            kept, watch.kept[:] = list(watch.kept), []
            edges = [] if site is None else [_distance(site.edge, x) for x in kept]
            return mx.min(mx.stack([mx.array(mx.inf), *edges]))

        found: list[Array | None] = [None for _ in xs]
        if places:
            _, grads = mx.vjp(distance, [xs[i] for i in places], [mx.array(1.0)])
            for i, grad in zip(places, grads, strict=True):
                found[i] = self.host(grad)
        return found


lab_of = MlxLab.of


@contextmanager
def _kept(program: Callable[..., Any]) -> Iterator[None]:
    _, root = sight(program, (), {})
    with root.again(lambda _: None):
        yield


def _distance(edge: Edge, x: Any) -> Any:
    distances = edge.distances(x.astype(mx.float32))
    finite = mx.where(mx.isfinite(distances), distances, mx.inf)
    return mx.min(finite) if x.size else mx.array(mx.inf)
